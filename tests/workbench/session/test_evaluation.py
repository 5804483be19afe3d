"""Held-out loss and metrics over a loader: their values, when they are measured, and no effect on training, to the bit."""

from __future__ import annotations

import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from patience import HANG_S
from sessions import Batch, held, make_batches, mse, train, wait_until
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from l2l_core import EmulatedDevice, Relay, RelayConfig
from workbench.pictures import header_html, progress_html
from workbench.session.background_work import WorkCancelled
from workbench.session.early_stopping import EarlyStopping
from workbench.session.loggers import JsonLines
from workbench.session.session import Session
from workbench.session.snapshot_values import HeldOutRow, StepRow

HELD_OUT = make_batches(8)[5:]  # not used for training here
UNEVEN = [(HELD_OUT[0][0], HELD_OUT[0][1]), (HELD_OUT[1][0][:2], HELD_OUT[1][1][:2])]  # six rows, and two


class MeanAbsoluteError:
    """A metric with the methods of those of torchmetrics."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sum, self.count = torch.zeros(()), 0

    def update(self, outputs: torch.Tensor, target: torch.Tensor) -> None:
        self.sum, self.count = self.sum + (outputs - target).abs().sum(), self.count + target.numel()

    def compute(self) -> torch.Tensor:
        return self.sum / self.count


def absolute(outputs: torch.Tensor, batch: Batch) -> float:
    return float((outputs - batch[1]).abs().mean())


def now_of(session: Session, loader: Any = HELD_OUT, metrics: Any = None, **options: Any) -> HeldOutRow:
    row = session.evaluate(loader, metrics, **options).result(HANG_S)
    assert row is not None
    return row


# Values ---------------------------------------------------------------------------------------------------------------


def test_means_are_weighted_by_rows(relay: Relay) -> None:
    metrics = {"absolute": absolute, "torchmetrics": MeanAbsoluteError()}
    with Session(relay, make_batches()) as session:
        train(session, 2)
        row = now_of(session, UNEVEN, metrics)
        x, y = (torch.cat([batch[i] for batch in UNEVEN]) for i in (0, 1))
        with torch.no_grad():
            outputs = relay.model.eval()(x)
        relay.model.train()
        assert session.snapshot().held_out == (row,)
    assert row.values["loss"] == pytest.approx(float(nn.functional.mse_loss(outputs, y)))
    assert row.values["absolute"] == pytest.approx(float((outputs - y).abs().mean())) == row.values["torchmetrics"]
    assert (row.step, row.branch, row.batches, row.rows) == (2, "main", 2, 8)


def test_loss_of_one_batch_has_the_bits_of_evaluate(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        train(session, 1)
        loss = session.edit(lambda relay: relay.evaluate(HELD_OUT[0])).result(HANG_S)
        assert now_of(session, HELD_OUT[:1]).values == {"loss": loss}


class Wrapped(nn.Module):
    """Logits in a mapping, from tokens, as models of transformers give."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return {"loss": nn.functional.cross_entropy(hidden.flatten(0, 1), labels.flatten()), "logits": hidden}


def wrapped_relay() -> Relay:
    torch.manual_seed(0)
    model = Wrapped()
    config = RelayConfig(micro_batches=2, seed=0)
    return Relay(model, partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), list(model.layers), config=config)


def token_batches() -> list[dict[str, torch.Tensor]]:
    """Two batches of unequal numbers of targets."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        {name: torch.randint(0, 8, (4, length), generator=generator) for name in ("ids", "labels")}
        for length in (10, 6)
    ]
    batches[0]["labels"][0, 3:] = -100
    return batches


def test_means_are_weighted_by_targets_and_the_remedy_for_arguments_works() -> None:
    classification = pytest.importorskip("torchmetrics.classification")
    accuracy = classification.MulticlassAccuracy(8, average="micro", ignore_index=-100)
    batches = token_batches()
    with wrapped_relay() as relay, Session(relay, batches) as session:
        train(session, 1)
        error = session.evaluate(batches, {"accuracy": accuracy}).exception(HANG_S)
        assert "needs predictions and targets" in str(error) and "'accuracy': (metric, lambda outputs, batch:" in str(
            error
        )
        failure = session.wait(HANG_S).failure
        assert failure is not None and failure.during == "measurement" and "Training is as before" in failure.after
        pair = (accuracy, lambda outputs, batch: (outputs["logits"].flatten(0, 1), batch["labels"].flatten()))
        row = now_of(session, batches, {"accuracy": pair})
        losses = [relay.evaluate(batch) for batch in batches]
        hits = total = 0
        for batch in batches:
            predicted, taken = relay.forward(batch)["logits"].argmax(-1), batch["labels"] != -100
            hits, total = hits + int((predicted == batch["labels"])[taken].sum()), total + int(taken.sum())
        train(session, 1)
        assert session.snapshot().failure is None
    assert row.values["loss"] == pytest.approx((33 * losses[0] + 24 * losses[1]) / 57)
    assert row.values["accuracy"] == pytest.approx(hits / total)


# No effect on training ------------------------------------------------------------------------------------------------


class Counted(nn.Module):
    """A residual layer with dropout, running statistics, a plain counter, and draws of three generators in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop, self.calls = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if not self.training:
            torch.rand(1), random.random(), numpy.random.rand()
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


def state_after(evaluates: bool, metric: MeanAbsoluteError) -> list[Any]:
    """Train on shuffled batches; return all that training could have changed."""
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    model = nn.Sequential(nn.Linear(4, 8), *(Counted() for _ in range(4)), nn.Linear(8, 1))
    calls: list[int] = []

    def loss(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        calls.append(len(outputs))
        return mse(outputs, batch)

    x, y = (torch.cat([batch[i] for batch in make_batches()]) for i in (0, 1))
    data, shared = TensorDataset(x, y), torch.Generator().manual_seed(5)
    loader = DataLoader(data, batch_size=6, shuffle=True)  # of the process's generator
    held_out = DataLoader(data, batch_size=8, sampler=RandomSampler(data, generator=shared))
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    layers, config = list(model)[1:5], RelayConfig(micro_batches=2)
    with Relay(model, optimizer, EmulatedDevice(), layers, loss, config=config) as relay:
        scheduler = torch.optim.lr_scheduler.StepLR(relay.optimizer, 3)
        with Session(relay, loader, scheduler=scheduler) as session:
            if evaluates:
                now_of(session, held_out, {"torchmetrics": metric, "absolute": absolute}, every=2)
            train(session, 12)
            now = session.snapshot()
            measured = [row.step for row in now.held_out]
            assert measured == ([0, 2, 4, 6, 8, 10, 12] if evaluates else []) and now.failure is None
        return [
            [row.loss for row in now.steps],
            [tensor.tolist() for tensor in model.state_dict().values()],
            str(relay.optimizer.state_dict()),
            [layer.calls for layer in layers],
            calls,
            [torch.rand(3).tolist(), random.random(), numpy.random.rand(), shared.get_state().tolist()],
            [module.training for module in model.modules()],
        ]


def test_training_equals_a_run_that_never_evaluates() -> None:
    metric = MeanAbsoluteError()
    metric.update(torch.tensor([1.0]), torch.tensor([3.0]))
    assert state_after(True, metric) == state_after(False, metric)
    assert float(metric.compute()) == 2.0 and metric.count == 1


# When -----------------------------------------------------------------------------------------------------------------


def test_every_n_steps_until_it_is_ended(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        now_of(session, every=3)
        train(session, 7)
        now_of(session, HELD_OUT[:1])  # once; the repeated one stays
        train(session, 2)
        session.evaluate(None).result(HANG_S)
        train(session, 3)
        rows = session.snapshot().held_out
    assert [(row.step, row.batches) for row in rows] == [(0, 3), (3, 3), (6, 3), (7, 1), (9, 3)]


def test_branches_keep_their_own_measurements(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        now_of(session, every=2)
        train(session, 2)
        session.fork("wide").result(HANG_S)
        train(session, 2)
        assert [row.step for row in session.snapshot().held_out] == [0, 2, 4]
        session.switch("main").result(HANG_S)
        assert [row.step for row in session.wait(HANG_S).held_out] == [0, 2]


def test_progress_is_shown_and_cancel_leaves_the_measurement_out(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        train(session, 1)
        with held(relay):
            future = session.evaluate(HELD_OUT)
            wait_until(lambda: session.snapshot().work is not None)
            now = session.snapshot()
            assert "▶ evaluating" in header_html(now) and "0 of 3 held-out batches" in progress_html(now)
            session.cancel_search()
        assert isinstance(future.exception(HANG_S), WorkCancelled)
        now = session.wait(HANG_S)
        assert (now.work, now.failure, now.held_out, now.state) == (None, None, (), "idle")
        now_of(session, every=1)
        with held(relay):
            session.run(2)
            wait_until(lambda: session.snapshot().progress is not None)
        assert [row.step for row in session.wait(HANG_S).held_out] == [1, 2, 3], "a cancel ends no later one"


def test_close_does_not_wait_for_the_rest_of_an_evaluation(relay: Relay) -> None:
    closing: list[int] = []

    def metric(outputs: torch.Tensor, batch: Batch) -> float:
        closing.append(len(closing))
        session.close(wait=False)
        return 1.0

    session = Session(relay, make_batches())
    future = session.evaluate(HELD_OUT, {"mine": metric})
    assert isinstance(future.exception(HANG_S), WorkCancelled) and closing == [0]
    session.close()


def test_an_error_ends_the_evaluation_and_no_step_is_lost(relay: Relay) -> None:
    broken: list[int] = []

    def metric(outputs: torch.Tensor, batch: Batch) -> float:
        return 1 / 0 if broken else 1.0

    with Session(relay, make_batches()) as session:
        now_of(session, HELD_OUT, {"mine": metric}, every=2)
        broken.append(1)
        session.run(5)
        now = session.wait(HANG_S)
        assert now.failure is not None and (now.failure.during, now.failure.error) == (
            "measurement",
            "ZeroDivisionError",
        )
        assert (now.step, now.target) == (2, 5)
        session.run()
        now = session.wait(HANG_S)
    assert now.failure is None and now.step == 5 and len(now.held_out) == 1


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("loader", "options", "error", "message"),
    [
        (HELD_OUT[0], {}, TypeError, "one batch: give a list of batches, such as .batch."),
        (iter(HELD_OUT), {}, TypeError, "can be used once only: give the DataLoader itself, or list"),
        (3, {}, TypeError, "loader is a int: give a DataLoader"),
        (HELD_OUT, {"every": 0}, ValueError, "every=0: give a positive number"),
        (HELD_OUT, {"metrics": [absolute]}, TypeError, "metrics is a list: give names"),
        (HELD_OUT, {"metrics": {"loss": absolute}}, ValueError, "rename it"),
        (HELD_OUT, {"metrics": {"x": MeanAbsoluteError}}, TypeError, r"give an object of it, MeanAbsoluteError\("),
        (HELD_OUT, {"metrics": {"x": 3}}, TypeError, "give a function f.outputs, batch. -> float"),
        (HELD_OUT, {"stop": EarlyStopping()}, ValueError, "give every="),
        (HELD_OUT, {"every": 1, "stop": EarlyStopping("accuracy")}, ValueError, "there are loss"),
    ],
)
def test_arguments_are_checked_in_the_call(
    relay: Relay, loader: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with Session(relay, make_batches()) as session, pytest.raises(error, match=message):
        session.evaluate(loader, **options)


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("loader", "metrics", "message"),
    [
        ([], None, "holds no batch"),
        (
            HELD_OUT,
            {"each": lambda outputs, batch: outputs.abs()},
            r"a tensor of the shape \(6, 1\): one number is needed",
        ),
        (HELD_OUT, {"none": lambda outputs, batch: None}, "gave a NoneType: one number is needed"),
    ],
)
def test_values_are_checked(relay: Relay, loader: Any, metrics: Any, message: str) -> None:
    with Session(relay, make_batches()) as session, pytest.raises(ValueError, match=message):
        now_of(session, loader, metrics)


# Early stopping -------------------------------------------------------------------------------------------------------


def test_early_stopping_pauses_with_its_reason_and_run_continues(relay: Relay) -> None:
    values = iter([0.5, 0.7, 0.6, 0.65, 0.71, 0.6, 0.6, 0.6, 0.6])
    metric = {"accuracy": lambda outputs, batch: next(values)}
    with Session(relay, make_batches()) as session:
        with pytest.raises(ValueError, match="higher_is_better=True"):
            session.evaluate(HELD_OUT[:1], metric, every=1, stop=EarlyStopping("accuracy", 2))
        stop = EarlyStopping("accuracy", patience=2, min_change=0.05, higher_is_better=True)
        now_of(session, HELD_OUT[:1], metric, every=1, stop=stop)
        session.run(8)
        now = session.wait(HANG_S)
        assert (now.state, now.step, now.target) == ("paused", 3, 8)
        assert (
            "accuracy has not improved in 2 evaluations in a row; the best is 0.7 after step 1. Run continues."
            in now.notice
        )
        assert "Stopped early: the held-out accuracy" in progress_html(now)
        session.run()
        now = session.wait(HANG_S)
        assert (now.state, now.step) == ("paused", 5), "as patient as before"
        train(session, 1)
        assert session.snapshot().notice == ""


def test_early_stopping_by_the_loss_takes_the_lowest(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        now_of(session, every=1, stop=EarlyStopping(patience=1))
        session.run(400)
        now = session.wait(HANG_S)
    losses = [row.values["loss"] for row in now.held_out]
    assert now.state == "paused" and now.step < 400 and losses[-1] >= losses[-2] == min(losses)


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "options", [{"patience": 0}, {"patience": True}, {"min_change": -1.0}, {"min_change": math.nan}]
)
def test_rules_of_early_stopping_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give"):
        EarlyStopping(**options)


# Loggers, epochs, rates -----------------------------------------------------------------------------------------------


def test_loggers_get_measurements(relay: Relay, tmp_path: Path) -> None:
    with Session(relay, make_batches(), loggers=[JsonLines(tmp_path / "run.jsonl")]) as session:
        now_of(session, HELD_OUT, {"absolute": absolute}, every=2)
        train(session, 2)
        rows = session.snapshot().held_out
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if line.pop("type") == "held_out"]
    assert [HeldOutRow(**line) for line in found] == list(rows)


def test_rows_have_epoch_tokens_and_rate() -> None:
    batches = token_batches()
    with wrapped_relay() as relay, Session(relay, batches) as session:
        session.run(epochs=2)
        rows = session.wait(HANG_S).steps
    assert [(row.epoch, row.tokens, row.lr) for row in rows] == [(1, 40, 0.1), (1, 24, 0.1), (2, 40, 0.1), (2, 24, 0.1)]
    assert all(row.unit == "tokens" and row.flop > 0 for row in rows)
    assert rows[0].per_s == 40 / rows[0].seconds


def test_sources_without_passes_have_no_epochs(relay: Relay) -> None:
    for source in (make_batches(1), iter(make_batches()), lambda: make_batches(1)[0]):
        with Session(relay, source) as session:
            train(session, 2)
            assert {row.epoch for row in session.snapshot().steps} == {None}
    with Session(relay, iter(make_batches())) as session:
        with pytest.raises(ValueError, match=r"epochs=1: the batches have no length.*give run\(steps="):
            session.run(epochs=1)
        with pytest.raises(ValueError, match="epochs=0: must be a positive"):
            session.run(epochs=0)
        with pytest.raises(ValueError, match="both given"):
            session.run(3, epochs=1)
        session.run(steps=2)
        row = session.wait(HANG_S).steps[-1]
    assert (row.unit, row.tokens) == ("rows", 6) and StepRow(1, 1.0, 2.0, 6, 1, 1, 1, 1.0).per_s == 3
