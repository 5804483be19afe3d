"""Extras that a loss returns beside the scalar, and metrics that it updates: each micro-batch counts once, in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from l2l_core import EmulatedDevice, Relay, RelayConfig

WIDTH, ROWS = 4, 11
BOUNDS = ((0, 4), (4, 8), (8, 11))
LAYERS = [f"layers.{i}" for i in range(3)]
sgd = partial(torch.optim.SGD, lr=0.1)
CONFIGS = {
    "breadth first": RelayConfig(micro_batches=3),
    "stash on the host": RelayConfig(micro_batches=3, stash="host"),
    "one graph kept": RelayConfig(micro_batches=3, keep=1),
    "depth first": RelayConfig(micro_batches=3, schedule="depth_first"),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in LAYERS)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def rows() -> dict[str, Any]:
    return {
        "x": torch.randn(ROWS, WIDTH),
        "y": torch.randint(0, WIDTH, (ROWS,)),
        "name": [f"row {i}" for i in range(ROWS)],
    }


def by_hand(batch: dict[str, Any], steps: int = 1) -> tuple[nn.Module, list[Tensor]]:
    """Train with plain accumulation; return the model and the outputs of the last step's micro-batches."""
    twin, outputs = Net(), []
    optimizer = sgd(twin.parameters())
    for _ in range(steps):
        outputs.clear()
        for start, stop in BOUNDS:
            outputs.append(twin(batch["x"][start:stop]))
            (cross_entropy(outputs[-1], batch["y"][start:stop]) / (ROWS / (stop - start))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return twin, [each.detach() for each in outputs]


def assert_equal_weights(model: nn.Module, twin: nn.Module) -> None:
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def extras_of(outputs: Tensor, batch: Any) -> dict[str, Any]:
    return {
        "logits": outputs,
        "labels": batch["y"],
        "figures": (outputs.mean(), (outputs.argmax(1) == batch["y"]).sum()),
        "names": batch["name"],
        "rows": len(outputs),
        "nothing": None,
    }


@each_config
@pytest.mark.parametrize("form", ["loss", "objective"])
def test_extras_are_joined_over_micro_batches(config: RelayConfig, form: str) -> None:
    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, Any]:
        return cross_entropy(outputs, batch["y"]), extras_of(outputs, batch)

    def objective(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        return loss(model(batch["x"]), batch)

    batch, model = rows(), Net()
    function: Any = {"loss": loss} if form == "loss" else {"objective": objective}
    with Relay(model, sgd, EmulatedDevice(), layers=LAYERS, config=config, **function) as relay:
        for steps in (1, 2):  # the first step is metered
            result = relay.step(batch)
            twin, outputs = by_hand(batch, steps)
            extras, expected = result.extras, [o.argmax(1) for o in outputs]
            assert torch.equal(extras["logits"], torch.cat(outputs)) and torch.equal(extras["labels"], batch["y"])
            means, correct = extras["figures"]
            assert torch.equal(means, torch.stack([each.mean() for each in outputs]))
            counts = [int((p == batch["y"][a:b]).sum()) for p, (a, b) in zip(expected, BOUNDS, strict=True)]
            assert correct.tolist() == counts and correct.dtype == torch.int64
            assert extras["names"] == [batch["name"][a:b] for a, b in BOUNDS]
            assert extras["rows"] == [4, 4, 3] and extras["nothing"] == [None] * 3
            tensors = [extras["logits"], extras["labels"], means, correct]
            assert not any(each.requires_grad or each.device.type != "cpu" for each in tensors)
        assert_equal_weights(model, twin)
        assert relay.evaluate(batch) == relay.probe([batch])[0] == pytest.approx(_mean_loss(twin, batch))
        assert relay.verify(batch).equal
        assert relay.forecast(batch).fits


def _mean_loss(model: nn.Module, batch: Any) -> float:
    return float(cross_entropy(model(batch["x"]), batch["y"]).detach())


def test_a_loss_without_extras_gives_none() -> None:
    batch = rows()
    losses: list[Callable[[Tensor, Any], Any]] = [
        lambda outputs, batch: cross_entropy(outputs, batch["y"]),
        lambda outputs, batch: (cross_entropy(outputs, batch["y"]), None),
    ]
    for loss in losses:
        with Relay(Net(), sgd, layers=LAYERS, loss=loss, config=RelayConfig(micro_batches=2)) as relay:
            assert relay.step(batch).extras is None


def test_extras_of_one_micro_batch_have_the_same_form() -> None:
    loss = lambda outputs, batch: (cross_entropy(outputs, batch["y"]), [outputs.mean(), outputs, 1])  # noqa: E731
    with Relay(Net(), sgd, layers=LAYERS, loss=loss) as relay:
        mean, outputs, one = relay.step(rows()).extras
        assert mean.shape == (1,) and outputs.shape == (ROWS, WIDTH) and one == [1]


@each_config
def test_extras_that_cannot_be_joined_are_refused_before_training(config: RelayConfig) -> None:
    ragged = lambda outputs: outputs[:, : len(outputs)]  # noqa: E731
    padded = lambda outputs: nn.functional.pad(ragged(outputs), (0, WIDTH - ragged(outputs).shape[1]))  # noqa: E731
    keys = lambda outputs: {f"first of {len(outputs)}": outputs[0]}  # noqa: E731
    hidden = lambda outputs: SimpleNamespace(logits=outputs)  # noqa: E731

    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, Any]:
        return cross_entropy(outputs, batch["y"]), returned["extras"](outputs)

    returned: dict[str, Callable[[Tensor], Any]] = {}
    batch, model = rows(), Net()
    with Relay(model, sgd, layers=LAYERS, loss=loss, config=config) as relay:
        for returned["extras"], message in (
            (ragged, r"extras of micro-batch 2.*padded to one shape"),
            (keys, r"extras of micro-batch 2.*other keys"),
            (hidden, r"among the loss's extras is a SimpleNamespace that holds tensors"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                relay.step(batch)
        assert relay.steps == 0
        assert_equal_weights(model, Net())
        returned["extras"] = padded  # as the message says
        assert relay.step(batch).extras.shape == (ROWS, WIDTH)
        assert_equal_weights(model, by_hand(batch)[0])


def test_a_tuple_that_is_no_scalar_and_extras_is_refused() -> None:
    wrong: list[Callable[[Any], Any]] = [
        lambda loss: (loss, 1, 2),
        lambda loss: (1, loss),
        lambda loss: (loss.expand(2), None),
    ]
    for returned in wrong:
        loss = lambda outputs, batch, returned=returned: returned(cross_entropy(outputs, batch["y"]))  # noqa: E731
        with (
            Relay(Net(), sgd, layers=LAYERS, loss=loss) as relay,
            pytest.raises(ValueError, match=r"one scalar tensor per micro-batch, or \(scalar, extras\)"),
        ):
            relay.step(rows())


def test_extras_are_in_the_order_of_micro_batches_that_finish_in_another() -> None:
    """The first micro-batch runs a layer more than the others, so its loss is the last one."""

    class Uneven(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:2]:
                x = torch.tanh(layer(x))
            return torch.tanh(self.layers[2](x)) if len(x) == 4 and not finished else x

    finished: list[int] = []

    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, Any]:
        return outputs.square().mean(), batch["y"]

    batch = rows()
    config = RelayConfig(micro_batches=3)
    with Relay(Uneven(), sgd, layers=LAYERS, loss=loss, weight=len, config=config) as relay:
        assert torch.equal(relay.step(batch).extras, batch["y"])


# -- metrics -----------------------------------------------------------------------------------------------------------


class Hits(nn.Module):
    """A metric with state of every kind: a tensor that is replaced, one that is written, a buffer, a list and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced, self.written, self.calls, self.kept = torch.zeros(()), torch.zeros(()), 0, list[Tensor]()
        self.register_buffer("total", torch.zeros(()))

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        hits = (outputs.detach().argmax(1) == labels).sum()
        self.replaced = self.replaced + hits
        self.written += hits
        self.total = self.total + hits
        self.kept.append(labels)
        self.calls += 1

    def check(self, outputs: list[Tensor], batch: Any, steps: int) -> None:
        hits = steps * int((torch.cat(outputs).argmax(1) == batch["y"]).sum()) if steps else 0
        assert self.calls == len(self.kept) == 3 * steps
        assert {int(self.replaced), int(self.written), int(self.total)} == {hits}
        assert not steps or torch.equal(torch.cat(self.kept), batch["y"].repeat(steps))


hits = Hits()  # a global, as in a notebook


def losses_with_metric() -> dict[str, tuple[Callable[[Tensor, Any], Tensor], Hits]]:
    """Return losses that reach a metric in different ways, each with its metric."""
    own, held, given, inner = Hits(), Hits(), Hits(), Hits()

    def plain(outputs: Tensor, batch: Any) -> Tensor:
        return cross_entropy(outputs, batch["y"])

    def closure(outputs: Tensor, batch: Any) -> Tensor:
        own.update(outputs, batch["y"])
        return plain(outputs, batch)

    def use_global(outputs: Tensor, batch: Any) -> Tensor:
        hits.update(outputs, batch["y"])
        return plain(outputs, batch)

    def argument(outputs: Tensor, batch: Any, metric: Hits) -> Tensor:
        metric.update(outputs, batch["y"])
        return plain(outputs, batch)

    class Trainer:
        def __init__(self) -> None:
            self.metrics = {"hits": held}

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return argument(outputs, batch, self.metrics["hits"])

    class LossModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = nn.ModuleList([inner])

        def forward(self, outputs: Tensor, batch: Any) -> Tensor:
            inner.update(outputs, batch["y"])
            return plain(outputs, batch)

    return {
        "closure": (closure, own),
        "global": (use_global, hits),
        "partial": (partial(argument, metric=given), given),
        "object": (Trainer().loss, held),
        "module": (LossModule(), inner),
    }


@pytest.mark.parametrize("config", [CONFIGS["stash on the host"], CONFIGS["depth first"]], ids=["breadth", "depth"])
@pytest.mark.parametrize("kind", losses_with_metric())
def test_a_metric_in_the_loss_counts_every_micro_batch_once(kind: str, config: RelayConfig) -> None:
    """Not the comparison of losses before the first step, nor forecasts, nor `verify`."""
    hits.__init__()
    loss, metric = losses_with_metric()[kind]
    batch, model = rows(), Net()
    with Relay(model, sgd, EmulatedDevice(), layers=LAYERS, loss=loss, config=config) as relay:
        relay.forecast(batch)
        assert relay.verify(batch).equal
        relay.probe([batch])
        metric.check([], batch, 0)
        relay.step(batch)
        twin, outputs = by_hand(batch)
        metric.check(outputs, batch, 1)
        relay.forecast(batch)
        assert relay.verify(batch).equal
        relay.fit(batch)
        relay.look(batch)
        metric.check(outputs, batch, 1)
        assert_equal_weights(model, twin)


@each_config
def test_metrics_of_torchmetrics_in_the_loss(config: RelayConfig) -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

    def make() -> list[Any]:
        kind = partial(torchmetrics.Accuracy, "multiclass", num_classes=WIDTH)
        collection = torchmetrics.MetricCollection(
            {"accuracy": kind(), "f1": torchmetrics.F1Score("multiclass", num_classes=WIDTH)}
        )
        return [kind(), torchmetrics.AUROC("multiclass", num_classes=WIDTH), collection, torchmetrics.MeanMetric()]

    def update(metrics: list[Any], outputs: Tensor, labels: Tensor) -> Tensor:
        accuracy, auroc, collection, mean = metrics
        loss = cross_entropy(outputs, labels)
        accuracy(outputs, labels)  # updates it, and computes that of the micro-batch
        auroc.update(outputs, labels)
        collection.update(outputs, labels)
        mean.update(loss)
        return loss

    ours, expected = make(), make()
    batch, model = rows(), Net()
    loss = lambda outputs, batch: update(ours, outputs, batch["y"])  # noqa: E731
    with Relay(model, sgd, EmulatedDevice(), layers=LAYERS, loss=loss, config=config) as relay:
        for steps in (1, 2):
            relay.step(batch)
            twin, outputs = by_hand(batch, steps)
            for each, (start, stop) in zip(outputs, BOUNDS, strict=True):
                update(expected, each, batch["y"][start:stop])
            relay.forecast(batch)
            assert relay.verify(batch).equal
        assert_equal_weights(model, twin)
    for metric, other in zip(ours, expected, strict=True):
        values, others = metric.compute(), other.compute()
        pairs = [(values[n], others[n]) for n in others] if isinstance(others, dict) else [(values, others)]
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_metric_outside_of_the_loss_is_updated_from_extras() -> None:
    metric, batch = Hits(), rows()
    loss = lambda outputs, batch: (cross_entropy(outputs, batch["y"]), (outputs, batch["y"]))  # noqa: E731
    with Relay(Net(), sgd, layers=LAYERS, loss=loss, config=CONFIGS["breadth first"]) as relay:
        metric.update(*relay.step(batch).extras)
    assert int(metric.total) == int((torch.cat(by_hand(batch)[1]).argmax(1) == batch["y"]).sum())


def test_tensors_that_a_loss_collects_in_an_object_are_refused_and_given_as_extras() -> None:
    """As by a meter that is no module: the relay cannot tell its tensors from those of the model."""
    meter, batch, model = SimpleNamespace(total=torch.zeros(())), rows(), Net()

    def collecting(outputs: Tensor, batch: Any) -> Tensor:
        loss = cross_entropy(outputs, batch["y"])
        meter.total = meter.total + loss.detach()
        return loss

    def giving(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        loss = cross_entropy(outputs, batch["y"])
        return loss, loss

    weight, config = (lambda part: float(len(part["y"]))), CONFIGS["breadth first"]
    with (
        Relay(model, sgd, layers=LAYERS, loss=collecting, weight=weight, config=config) as relay,
        pytest.raises(RuntimeError, match=r"made for micro-batch 1 .*\(scalar, extras\)"),
    ):
        relay.step(batch)
    assert_equal_weights(model, Net())
    with Relay(model, sgd, layers=LAYERS, loss=giving, weight=weight, config=config) as relay:
        losses = relay.step(batch).extras
    _, outputs = by_hand(batch)
    parts = zip(outputs, BOUNDS, strict=True)
    assert torch.equal(losses, torch.stack([cross_entropy(each, batch["y"][a:b]) for each, (a, b) in parts]))
