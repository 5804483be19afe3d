"""Steps of a lab session: equality with plain training, plans that do not fit, and the panels' texts."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence

import pytest
import torch
from panel_reading import find, html_of, shown
from patience import HANG_S
from torch import nn

import workbench
from l2l_core import EmulatedDevice
from l2l_core.strategies import Full, Lab, Offload, Plain, RelayPolicy, Rotor
from workbench.lab_bench import LabBench
from workbench.panels.memory_panel import MemoryPanel
from workbench.panels.plan_header_panel import PlanHeaderPanel
from workbench.plans import LabSession

ROWS = 24
WAYS = (Plain(), Full(), Offload(), Rotor(1), RelayPolicy())


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(8, 1))


def make_batches(count: int = 3, rows: int = ROWS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(rows, 8), torch.randn(rows, 1)) for _ in range(count)]


def loss_of(out: torch.Tensor, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(out, batch[1])


def make_lab(memory_bytes: int | None = None) -> Lab:
    model = make_model()
    return Lab(model, make_batches()[0], device=EmulatedDevice(memory_bytes), layers=[*model][:3], loss=loss_of)


def needs(*ways: Plain | Full) -> list[int]:
    lab = make_lab()
    return [lab.plan(way).peak_device_bytes for way in ways]


def test_steps_by_plans_in_turn_are_plain_training() -> None:
    batches, lab = make_batches(), make_lab()
    plain = copy.deepcopy(lab.model)
    optimizer, losses = torch.optim.AdamW(plain.parameters(), lr=1e-4), []
    for batch in [*batches, batches[0]]:
        losses.append(loss_of(plain(batch[0]), batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    session = LabSession(lab, batches, WAYS, plan="Full")
    session.run(2)
    session.wait(HANG_S)
    session.follow("Offload").result(HANG_S)
    session.step()
    session.wait(HANG_S)
    by_hand = lab.plan(
        [("Fck", 0), *(("Fall", i) for i in (1, 2, 3)), ("B", 3), ("B", 2), ("B", 1), ("Fall", 0), ("B", 0)]
    )
    session.follow(by_hand).result(HANG_S)
    session.step()
    now = session.wait(HANG_S)
    session.close()
    assert [row.loss for row in now.steps] == [loss.item() for loss in losses]
    assert all(map(torch.equal, lab.model.parameters(), plain.parameters()))
    assert [change.what for change in now.changes] == ["plan Full → Offload", "plan Offload → by hand"]
    assert [row.samples for row in now.steps] == [ROWS] * 4 and now.layers[0].version == now.step == 4


def test_a_plan_that_does_not_fit_changes_nothing_and_names_the_smallest_budget() -> None:
    least, most = needs(Full(), Plain())
    lab, batches = make_lab(most - 1), make_batches()
    session = LabSession(lab, batches, WAYS, plan="Plain")
    before = copy.deepcopy(lab.model.state_dict())
    session.run(3)
    now = session.wait(HANG_S)
    failure = now.failure
    assert now.state == "failed" and failure is not None and now.step == 0
    assert f"({most} bytes), which is the smallest budget that would do" in failure.message
    assert "Run tries the same batch again" in failure.after and "Plans that fit: Full" in failure.after
    assert failure.trace is not None and failure.trace.failed is not None and failure.trace.failed.missing_bytes > 0
    assert all(torch.equal(before[name], value) for name, value in lab.model.state_dict().items())
    assert not lab.optimizer.state and all(param.grad is None for param in lab.model.parameters())
    panel = MemoryPanel(session)
    assert shown(panel) and "too much" in html_of(panel)

    session.follow("Full").result(HANG_S)
    session.run()  # the three that are left, and with the same batch first
    now = session.wait(HANG_S)
    session.close()
    assert now.failure is None and now.done == now.step == 3 and now.steps[-1].peak_device_bytes == least
    other = make_lab(most)  # a step by plain training fits exactly
    assert other.step(other.plan(Plain()), batches[0]).loss == now.steps[0].loss


def test_an_update_without_room_is_refused_before_it_begins() -> None:
    """On few rows the update has the highest bytes of a step; if it does not fit, no weight may change."""
    model, batch = make_model(), make_batches(1, rows=1)[0]
    probe = Lab(copy.deepcopy(model), batch, loss=loss_of, layers=["0", "1", "2"])
    most = probe.plan(Full()).peak_device_bytes
    assert most == probe.cost_model.fixed_bytes + probe.cost_model.update_bytes, "the update is what needs most"
    lab = Lab(model, batch, device=EmulatedDevice(most - 1), loss=loss_of, layers=["0", "1", "2"])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(MemoryError, match=f"{most} bytes"):
        lab.step(lab.plan(Full()))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not lab.optimizer.state and lab.device.ledger.total == 0


def test_strategies_without_a_plan_are_disabled_with_a_reason() -> None:
    lab = make_lab(needs(Plain())[0])
    session = LabSession(lab, make_batches(), WAYS)
    panel = PlanHeaderPanel(session)
    shown(panel)
    assert session.chosen.name == "Plain" and find(panel, "Plain").icon == "check"
    assert [find(panel, name).disabled for name in ("Plain", "Full", "Offload", "Relay")] == [False] * 3 + [True]
    rotor = session.choices[3]
    assert find(panel, rotor.name).disabled and "the smallest budget for which it has one is" in rotor.reason
    assert rotor.reason in html_of(panel) and "Workbench(Relay(" in html_of(panel)
    with pytest.raises(ValueError, match="Relay is not a plan over stages"):
        session.follow("Relay")
    with pytest.raises(ValueError, match="there is no plan 'Ful'; give one of 'Plain', 'Full'"):
        session.follow("Ful")
    with pytest.raises(TypeError, match="give the name of a choice"):
        session.follow(Full())  # type: ignore[arg-type]
    find(panel, "Full").click()
    session.wait(HANG_S)
    shown(panel)
    assert session.chosen.name == "Full" and (find(panel, "Full").icon, find(panel, "Plain").icon) == ("check", "")
    assert "The next step follows <b>Full</b>" in html_of(panel)
    session.close()
    with pytest.raises(ValueError, match="none has a plan"):
        LabSession(lab, make_batches(), [RelayPolicy()])
    with pytest.raises(TypeError, match="give policies, as Rotor"):
        LabSession(lab, make_batches(), ["Full"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="give l2l_core.strategies.Lab"):
        LabSession(lab.model, make_batches())  # type: ignore[arg-type]


def test_a_batch_of_other_shapes_is_refused_and_can_be_skipped() -> None:
    good, other = make_batches(1)[0], make_batches(1, ROWS - 1)[0]
    session = LabSession(make_lab(), [other, good], WAYS)
    session.run(1)
    now = session.wait(HANG_S)
    assert now.failure is not None and "drop_last=True" in now.failure.message and now.step == 0
    session.skip()
    session.run()
    assert session.wait(HANG_S).step == 1
    session.close()
    assert session.snapshot().state == "closed" and "was closed" in session.snapshot().ended


def test_a_second_bench_on_a_model_takes_it_over() -> None:
    lab = make_lab()
    with_views = LabBench(lab, make_batches(), ways=WAYS, view=["time", "memory", "loss"])
    with_views.step()
    with_views.wait(HANG_S)
    assert re.search(r"of the step; .* would help|compute hardly ever waits", " ".join(repr(with_views).split()))
    still = with_views._repr_mimebundle_()["text/html"]
    assert "Timeline of step 1" in still and "Memory over a step" in still and "The next step follows" in still
    second = workbench.LabBench(lab.on_device(EmulatedDevice()), make_batches())
    second.step()
    assert second.wait(HANG_S).state == "idle" and lab.steps == 1
    assert "taken over" in with_views.snapshot().ended
    with pytest.raises(RuntimeError, match="closed"):
        with_views.step()
    second.close(), with_views.close()


def test_an_optimizer_that_fails_in_the_middle_leaves_a_torn_step() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise ArithmeticError("no")

    model, (batch,) = make_model(), make_batches(1)
    lab = Lab(model, batch, torch.optim.SGD(model.parameters(), 0.1), layers=["0", "1", "2"], loss=loss_of)
    session = LabSession(lab, iter([batch]), WAYS)
    lab.optimizer = Failing(model.parameters(), 0.1)
    session.step()
    failure = session.wait(HANG_S).failure
    assert (
        failure is not None and failure.error == "TornStep" and "updated 0.0.weight: ArithmeticError" in failure.message
    )
    assert "the batch counts as used" in failure.after
    session.step()
    assert session.wait(HANG_S).state == "idle", "there is no other batch"
    session.close()
