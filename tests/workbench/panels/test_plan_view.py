"""The plan of a step in a notebook: changes by page and text, refusals, simulations, and Apply."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from panel_reading import find
from sessions import assert_equal, make_batches, make_relay, weights_of

import workbench
from l2l_core import EmulatedDevice, Relay, RelayConfig, StepPlan
from workbench.panels.plan_view import SERIAL, PlanView
from workbench.what_if import PlannedStep

CONFIG = RelayConfig(seed=0, micro_batches=2, verify="first")
LINK = EmulatedDevice(h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e6)


@pytest.fixture
def relay() -> Iterator[Relay]:
    with make_relay(CONFIG, LINK) as made:
        yield made


@pytest.fixture
def batch() -> Any:
    return make_batches(1)[0]


@pytest.fixture
def view(relay: Relay, batch: Any) -> Iterator[PlanView]:
    made = workbench.PlanView(relay, batch)
    assert made.wait_until_idle()
    yield made
    assert made.wait_until_idle()
    made.close(), made.close()


def send(view: PlanView, behind: int = 0, **content: Any) -> None:
    """A message of the page, which shows the plan as it was so many changes ago."""
    editor = view._editor
    editor._on_message({**content, "version": editor.version - behind, "selected": editor.selected})


def select(view: PlanView, kind: str, layer: str = "", k: int = -1) -> int:
    """Select the first such action, as a click does."""
    actions = view.plan.actions
    view._editor.selected = next(
        i for i, a in enumerate(actions) if (a.kind, a.k) == (kind, k) and layer in ("", a.layer)
    )
    return view._editor.selected


def word(view: PlanView, index: int) -> str:
    return next(word for line in view._editor.lines for at, word in line[-1] if at == index)


def test_it_shows_the_plan_of_the_relay_and_nothing_has_run(view: PlanView, relay: Relay, batch: Any) -> None:
    editor = view._editor
    assert view.plan == relay.plan(batch) and relay.steps == 0 and view.result is None
    assert [line[:2] for line in editor.lines][:2] == [["-", "-"], ["0", "L000"]]
    assert "relay&#x27;s own plan, simulated" in editor.picture and editor.spans and editor.message == ""
    assert "own plan, simulated" in editor.figures and "same costs" in editor.figures
    select(view, "L", "L002")
    assert "Load the weights of layer L002 into slot 0." in editor.about and "host → device from" in editor.about
    assert {span[0] for span in editor.spans} > {editor.selected}


def test_a_change_is_simulated_once_and_a_refused_one_not_at_all(
    view: PlanView, monkeypatch: pytest.MonkeyPatch
) -> None:
    editor, simulated = view._editor, list[StepPlan]()
    run = view._simulator.run

    def counted(plan: StepPlan) -> PlannedStep:
        simulated.append(plan)
        return run(plan)

    monkeypatch.setattr(view._simulator, "run", counted)
    select(view, "L", "L001")
    send(view, key="later")
    assert view.wait_until_idle() and simulated == [view.plan] and not editor.is_stale
    assert word(view, editor.selected) == "L:L001>1" and [line[-1] for line in editor.lines][1][1][1] == "|"
    picture = editor.picture
    select(view, "F", "L000", 1)
    send(view, key="earlier")
    assert view.wait_until_idle() and len(simulated) == 1
    assert word(view, editor.wrong) == "F1" and editor.wrong == editor.selected
    assert "micro-batches run in ascending order" in editor.message and "Remedy: move it behind F0." in editor.message
    assert editor.is_stale and editor.picture == picture and find_disabled(view, "Apply")
    send(view, undo=True)
    assert view.wait_until_idle() and len(simulated) == 2 and not editor.is_stale and editor.message == ""
    assert not find_disabled(view, "Apply") and not find_disabled(view, "Redo")
    find(view, "Reset").click()  # type: ignore[arg-type]
    assert view.wait_until_idle() and len(simulated) == 3
    find(view, "Reset").click()  # type: ignore[arg-type]
    assert view.wait_until_idle() and len(simulated) == 3, "the plan is that already"


def find_disabled(view: PlanView, words: str) -> bool:
    return find(view, words).disabled  # type: ignore[arg-type]


def test_the_figures_are_those_of_the_changed_plan(view: PlanView) -> None:
    find(view, "begin with").value = SERIAL  # type: ignore[arg-type]
    assert view.wait_until_idle()
    serial, own = view._step, view._own
    assert view.plan.settings.ahead == 0 and serial.seconds > own.seconds
    cells = ["loads of layers</th><td>6</td><td>7</td><td>+1"]
    assert all(cell in view._editor.figures for cell in cells)


def test_messages_about_an_older_plan_act_on_the_selection_alone(view: PlanView) -> None:
    select(view, "L", "L002")
    send(view, key="up")
    before = view.plan
    send(view, behind=1, drop=[0, 3]), send(view, behind=1, write=[0, "I1"])
    assert view.plan is before
    editor = view._editor
    editor._on_message({"key": "later", "version": editor.version - 1, "selected": 0})  # a key that is pressed twice
    assert word(view, editor.selected) == "|" or word(view, editor.selected) == "L:L002>0"
    assert view.plan != before and view._draft.selected_action is not None and view._draft.selected_action.kind == "L"


def test_words_drops_and_buttons_change_the_plan(view: PlanView) -> None:
    editor = view._editor
    send(view, none=True)
    assert "no action is selected" in editor.message
    index = select(view, "L", "L002")
    send(view, write=[index, "L:L002>7"])
    assert "there are 2 weight slots" in editor.message and editor.wrong == index
    send(view, write=[index, "nonsense"])
    assert "is no action" in editor.message and word(view, index) == "L:L002>7"
    send(view, cancel=True)
    assert "there are 2 weight slots" in editor.message
    send(view, write=[index, "L:L002>0"]), send(view, insert=[index, "A:L003"])
    assert word(view, index + 1) == "A:L003" and editor.selected == index + 1
    find(view, "Remove").click()  # type: ignore[arg-type]
    first = select(view, "L", "L000")
    send(view, drop=[first, 0])
    assert editor.lines[0][-1][0][1] == "L:L000>0" and editor.message == ""
    find(view, "Undo").click(), find(view, "Redo").click()  # type: ignore[arg-type]
    assert editor.lines[0][-1][0][1] == "L:L000>0"


def test_the_text_is_the_plan_and_the_plan_the_text(view: PlanView) -> None:
    text = find(view, "plan")  # type: ignore[arg-type]
    assert text.value == str(view.plan)
    own = view.plan
    text.value = str(own).replace("L:L002>0", "L:L002")
    assert "lacks its layer, slot" in view._editor.message and view.plan == own
    text.value = str(own).replace("L:L002>0 |", "| L:L002>0")
    assert view._editor.message == "" and view.plan != own and view.wait_until_idle()
    assert view._step.plan == view.plan == StepPlan.parse(text.value)
    find(view, "Undo").click()  # type: ignore[arg-type]
    assert text.value == str(own)
    view.plan = StepPlan.parse(str(own).replace("P:shell", ""))
    assert view._editor.wrong == len(view.plan.actions) and "append P:shell" in view._editor.message


def test_apply_trains_one_step_with_the_bits_of_plain_training(view: PlanView, relay: Relay, batch: Any) -> None:
    model: Any = copy.deepcopy(relay.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for rows in (slice(0, 3), slice(3, 6)):
        (0.5 * torch.nn.functional.mse_loss(model(batch[0][rows]), batch[1][rows])).backward()
    optimizer.step()
    select(view, "L", "L001")
    send(view, key="later")
    find(view, "Apply").click()  # type: ignore[arg-type]
    assert relay.steps == 1 and view.result is not None and view.result.plan == view.plan
    assert_equal(weights_of(relay), [param.detach() for param in model.parameters()])
    assert (
        "step 1 by this plan: loss" in view._note.value and "equal to the step in core, to the bit" in view._note.value
    )
    assert "this plan, step 1, measured" in view._editor.figures
    send(view, key="earlier")
    assert view.wait_until_idle() and "measured" not in view._editor.figures, "that was another plan"
    send(view, undo=True)
    assert view.wait_until_idle() and "step 1, measured" in view._editor.figures
    find(view, "Apply").click()  # type: ignore[arg-type]
    assert relay.steps == 2 and "compared before" in view._note.value


def test_an_error_of_the_step_is_shown_and_nothing_is_trained(view: PlanView, relay: Relay) -> None:
    before, layer = weights_of(relay), relay.model[1]  # type: ignore[index]
    layer.error = ValueError("this layer fails")
    find(view, "Apply").click()  # type: ignore[arg-type]
    assert "this layer fails" in view._note.value and view.result is None and not find_disabled(view, "Apply")
    layer.error = None
    assert_equal(weights_of(relay), before)


def test_a_plan_that_cannot_be_simulated_is_said_so(view: PlanView, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: StepPlan) -> PlannedStep:
        raise ValueError("no costs")

    monkeypatch.setattr(view._simulator, "run", fail)
    select(view, "L", "L001")
    send(view, key="later")
    assert view.wait_until_idle() and "cannot be simulated: no costs" in view._editor.message and view._editor.is_stale


def test_still_and_text_have_plan_and_figures(view: PlanView, capsys: pytest.CaptureFixture[str]) -> None:
    still: dict[str, Any] = view.still()
    assert "<pre>plan micro_batches=2" in still["text/html"] and "own plan, simulated" in still["text/html"]
    assert still["text/html"].count("<svg") == 1
    view._ipython_display_()  # outside of notebooks, text is printed
    assert str(view.plan) in capsys.readouterr().out
    assert view._repr_mimebundle_().keys() - still.keys() == {"application/vnd.jupyter.widget-view+json"}
    view.close()
    assert view._repr_mimebundle_().keys() == still.keys()


def make_frozen_relay() -> Relay:
    """A relay whose first layer, and the shell before it, are not trained."""
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)))
    model[0].requires_grad_(False)
    return Relay(model, torch.optim.SGD, LINK, list(model), mse_of_sum, config=CONFIG)


def mse_of_sum(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs.sum(1, keepdim=True), batch[1])


def test_what_has_no_plan_is_refused(relay: Relay, batch: Any) -> None:
    with pytest.raises(TypeError, match="takes a Relay, not a int"):
        PlanView(3, batch)  # type: ignore[arg-type]
    with make_relay(RelayConfig(schedule="depth_first")) as other, pytest.raises(ValueError, match="has no plan"):
        PlanView(other, batch)
    with make_frozen_relay() as other, pytest.raises(ValueError, match="layer L000 has no backward .* print"):
        PlanView(other, batch)
    assert other.steps == 0
