"""The learning-rate finder: its curve and suggestion, and training afterwards with the bits of a run without it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from patience import HANG_S
from sessions import Batch, held, make_batches, mse, noisy_relay, train, wait_until
from torch.utils.data import DataLoader, TensorDataset

from l2l_core import Depth, EmulatedDevice, LayerDrop, Relay, RelayConfig
from workbench.pictures import header_html, progress_html
from workbench.session.background_work import WorkCancelled
from workbench.session.lr_finder import LRFinding
from workbench.session.session import Session


def shuffled() -> DataLoader[Any]:
    """Four batches per pass, so that a finder reaches the next shuffle."""
    x, y = (torch.cat([batch[i] for batch in make_batches(4)]) for i in (0, 1))
    return DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True)


def refilled() -> Iterator[Batch]:
    """Batches in the same tensors, filled again for each; they end."""
    x, y = torch.empty(6, 4), torch.empty(6, 1)
    for number in range(40):
        yield x.fill_(0).add_(torch.randn(6, 4)), y.fill_(number / 40)


def drawn() -> Batch:
    return torch.randn(6, 4), torch.randn(6, 1)


def state_after(source: Any, finds: int) -> list[Any]:
    """Train before and after the finder; return all that it could have changed."""
    torch.manual_seed(7)
    with noisy_relay(RelayConfig(micro_batches=3, seed=5, verify="never")) as relay:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(relay.optimizer, 0.9)
        schedule = Depth({0: 4, 5: 5}, grow="identity") + LayerDrop(0.3)
        with Session(
            relay, source() if source is not drawn else drawn, scheduler=scheduler, schedule=schedule
        ) as session:
            train(session, 2)
            for _ in range(finds):
                session.find_lr(steps=10).result(HANG_S)
            now = session.wait(HANG_S)
            assert (now.step, now.failure, now.work, len(now.branches), now.elsewhere) == (2, None, None, 1, {})
            train(session, 10)  # until the batches of the finder are used, which were drawn early
            now = session.snapshot()
        return [
            [(row.loss, row.epoch, row.lr) for row in now.steps],
            [tensor.tolist() for tensor in relay.model.state_dict().values()],
            str(relay.optimizer.state_dict()),
            scheduler.state_dict(),
            [(unit.key, unit.version, unit.stats) for unit in relay.stack],
            [change.what for change in now.changes],
            torch.rand(2).tolist(),
        ]


@pytest.mark.all_cases
@pytest.mark.parametrize("source", [shuffled, refilled, drawn])
def test_training_goes_on_with_the_bits_of_a_run_without_it(source: Any) -> None:
    assert state_after(source, 0) == state_after(source, 2)


def test_suggestion_is_where_the_loss_falls_fastest(relay: Relay) -> None:
    """On one quadratic, rates near the best one reduce the loss most; the curve ends where it diverges."""
    with Session(relay, make_batches(1)) as session:
        found = session.find_lr(1e-5, 100.0, 40).result(HANG_S)
    assert found.rates[0] == 1e-5 and len(found.curve) == len(found.losses) <= 40
    assert found.suggestion is not None and 1e-4 < found.suggestion < 1.0
    assert len(found.losses) == 40 or "diverged" in found.ended or "not finite" in found.ended


def test_nothing_is_suggested_if_the_loss_does_not_fall() -> None:
    rising = LRFinding([10.0**i for i in range(-7, 1)], [float(i) for i in range(8)])
    assert rising.suggestion is None and "no suggestion" in repr(rising)
    falls_once = LRFinding([10.0**i for i in range(-12, 0)], [5.0] * 6 + [4.0, 1.0, 0.5, 3.0, 9.0, 20.0])
    assert falls_once.suggestion in (1e-6, 1e-5)


def test_groups_keep_the_ratio_of_their_rates() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), *(torch.nn.Linear(8, 8) for _ in range(3)), torch.nn.Linear(8, 1)
    )
    layers = list(model)[1:4]
    rest = [*model[0].parameters(), *model[4].parameters()]
    groups = [{"params": [p for layer in layers for p in layer.parameters()]}, {"params": rest, "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    config = RelayConfig(micro_batches=2, seed=0, verify="never")
    seen: list[tuple[float, float]] = []

    def loss(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"]))
        return mse(outputs, batch)

    with Relay(model, optimizer, EmulatedDevice(), layers, loss, config=config) as relay:
        with Session(relay, make_batches()) as session:
            session.find_lr(1e-4, 1e-2, 10).result(HANG_S)
        assert [group["lr"] for group in relay.optimizer.param_groups] == [0.1, 0.02]
    assert all(low == pytest.approx(0.2 * high) for high, low in seen) and len({high for high, _ in seen}) >= 10


def test_progress_is_shown_and_cancel_leaves_no_trace(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        train(session, 1)
        before = copy.deepcopy(relay.model.state_dict())
        with held(relay):
            future = session.find_lr()
            wait_until(lambda: session.snapshot().work is not None)
            now = session.snapshot()
            assert "▶ finding a learning rate" in header_html(now) and "0 of 60 steps" in progress_html(now)
            session.cancel_search()
        assert isinstance(future.exception(HANG_S), WorkCancelled)
        now = session.wait(HANG_S)
        assert (now.work, now.failure, now.state, now.step) == (None, None, "idle", 1)
        assert all(torch.equal(before[name], value) for name, value in relay.model.state_dict().items())


@pytest.mark.all_cases
@pytest.mark.parametrize("arguments", [(0.0, 1.0, 60), (1.0, 0.1, 60), (1e-3, float("inf"), 60), (1e-7, 1.0, 3)])
def test_ranges_are_checked_in_the_call(relay: Relay, arguments: tuple[float, float, int]) -> None:
    with Session(relay, make_batches()) as session, pytest.raises(ValueError, match="give"):
        session.find_lr(*arguments)


def test_too_few_batches_are_refused_and_still_trained_on(relay: Relay) -> None:
    with Session(relay, iter(make_batches(5))) as session:
        with pytest.raises(ValueError, match="only 5 batches are left, and the finder needs at least 10"):
            session.find_lr().result(HANG_S)
        session.run()
        now = session.wait(HANG_S)
    assert now.step == 5 and now.failure is None


def test_a_step_that_fails_is_shown_and_rewound(relay: Relay) -> None:
    layer: Any = relay.model[2]
    with Session(relay, make_batches()) as session:
        train(session, 1)
        layer.error = RuntimeError("the layer broke")
        assert session.find_lr().exception(HANG_S) is not None
        layer.error = None
        now = session.wait(HANG_S)
        assert now.failure is not None and now.failure.during == "measurement" and len(relay.branches) == 1
        train(session, 1)
        assert session.snapshot().step == 2
