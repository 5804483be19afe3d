"""`loss_over="batch"`: one loss over the outputs of all micro-batches.

A step equals, to the bit, plain training that keeps every micro-batch's graph, takes the loss of their detached outputs, and
then back-propagates each micro-batch in ascending order. It equals a step on the undivided batch to rounding.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_losses import (
    CASES,
    LAYERS,
    Loss,
    Tower,
    adam,
    add_gradients,
    batch_of,
    cut,
    detached,
    inputs_of,
    joined,
    shifted,
    tensors_of,
)
from torch import Tensor, nn

from l2l_core import FileShelf, Insert, Relay, RelayConfig, TornStep, Views
from l2l_core.eps import NonFiniteError


def make(name: str, count: int, **settings: Any) -> tuple[Relay, nn.Module, Loss]:
    """A relay, and a copy of its model for training in core."""
    build, loss = CASES[name]
    torch.manual_seed(0)
    model = build()
    twin = copy.deepcopy(model)
    config = RelayConfig(seed=0, micro_batches=count, **settings)
    layers = [f"layers.{i}" for i in range(LAYERS)]
    relay = Relay(model, adam, layers=layers, loss=partial(loss, model), loss_over="batch", config=config)
    return relay, twin, loss


def compare(name: str, count: int, rows: int = 16, steps: int = 3, **settings: Any) -> None:
    relay, twin, loss = make(name, count, **settings)
    optimizer, config = adam(twin.parameters()), relay.config
    with relay:
        for step in range(steps):
            batch = batch_of(twin, rows, step)
            seeds = [config.micro_batch_seed(step, k) for k in range(count)]
            with torch.random.fork_rng():
                expected = add_gradients(twin, loss, batch, seeds)
            if config.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(twin.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            result = relay.step(batch)
            assert result.loss == expected
            for (key, ours), theirs in zip(relay.model.named_parameters(), twin.parameters(), strict=True):
                assert torch.equal(ours, theirs), (step, key)
        assert result.objective == relay.objective_summary == 'one loss of the whole batch (loss_over="batch")'
        assert relay.verify(batch).equal
        twin.eval()
        with torch.no_grad(), torch.random.fork_rng():
            parts = [twin(**inputs_of(part)) for part in cut(batch, count)]
            if name != "noisy":
                assert relay.evaluate(batch) == loss(twin, joined(parts), batch).item()


@pytest.mark.all_cases
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_plain_training_to_the_bit(name: str, stash: Any) -> None:
    compare(name, 4, stash=stash)


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("name", ["two_towers", "temperature", "early_outputs"])
def test_any_number_of_micro_batches(name: str, count: int) -> None:
    compare(name, count, stash="host")


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "settings",
    [
        {"ahead": 0},
        {"keep": 1},
        {"keep": 2, "resident": 2, "stash": "host"},
        {"keep": LAYERS, "resident": LAYERS},
        {"update": "deferred", "max_grad_norm": 0.05, "stash": "host"},
        {"meter": "always"},
        {"rollback": True},
    ],
    ids=str,
)
def test_any_settings(settings: dict[str, Any]) -> None:
    compare("temperature", 3, rows=10, **settings)  # uneven: 4, 4 and 2 rows


@pytest.mark.parametrize("name", ["early_outputs", "temperature"])
def test_weights_and_stash_in_files(name: str, tmp_path: Path) -> None:
    build, loss = CASES[name]
    torch.manual_seed(0)
    model = build()
    twin = copy.deepcopy(model)
    optimizer, config = adam(twin.parameters()), RelayConfig(seed=0, micro_batches=4, stash="disk")
    shelf = FileShelf(folder=tmp_path, memory_bytes="1 MB")
    with Relay(
        model,
        adam,
        layers=list(model.layers),
        loss=partial(loss, model),
        loss_over="batch",
        shelf=shelf,
        config=config,  # type: ignore[call-overload]
    ) as relay:
        for step in range(2):
            batch = batch_of(twin, 16, step)
            with torch.random.fork_rng():
                expected = add_gradients(twin, loss, batch, [config.micro_batch_seed(step, k) for k in range(4)])
            optimizer.step()
            optimizer.zero_grad()
            assert relay.step(batch).loss == expected
        assert relay.verify(batch).equal
        assert relay.shelf is not None
        weights = {key: tensor.clone() for key, tensor in relay.shelf.weights()}
    for key, theirs in twin.named_parameters():  # a tied weight has one name
        assert torch.equal(weights[key], theirs)


def test_bfloat16() -> None:
    """Weights rounded, the loss under autocast, gradients of the loss and of micro-batches added up in float32."""
    relay, twin, loss = make("info_nce", 4, precision="bf16")
    masters = [nn.Parameter(param.detach().clone()) for param in twin.parameters()]
    optimizer = adam(masters)
    batch = batch_of(twin, 16, 0)
    with relay:
        for step in range(3):
            for param, master in zip(twin.parameters(), masters, strict=True):
                param.data = master.detach().bfloat16()
            outputs = []
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.random.fork_rng():
                for k, part in enumerate(cut(batch, 4)):
                    torch.manual_seed(relay.config.micro_batch_seed(step, k))
                    outputs.append(twin(**inputs_of(part)))
                leaves = [detached(each) for each in outputs]
                total = loss(twin, joined(leaves), batch)
            total.backward()
            for output, leaf in zip(outputs, leaves, strict=True):
                torch.autograd.backward(tensors_of(output), [each.grad for each in tensors_of(leaf)])
                for param, master in zip(twin.parameters(), masters, strict=True):
                    if param.grad is not None:
                        grad, param.grad = param.grad.float(), None
                        master.grad = grad if master.grad is None else master.grad + grad
            optimizer.step()
            optimizer.zero_grad()
            assert relay.step(batch).loss == total.item()
            for ours, master in zip(relay.model.parameters(), masters, strict=True):
                assert torch.equal(ours, master)


@pytest.mark.all_cases
@pytest.mark.parametrize("name", [name for name in CASES if name != "noisy"])
def test_a_step_equals_the_undivided_batch_to_rounding(name: str) -> None:
    build, loss = CASES[name]
    torch.manual_seed(0)
    model = build()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    twin, batch = copy.deepcopy(model), batch_of(model, 512, 0)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
    whole = loss(twin, twin(**inputs_of(batch)), batch)
    whole.backward()
    optimizer.step()
    config = RelayConfig(seed=0, micro_batches=8, stash="host")
    sgd = partial(torch.optim.SGD, lr=1.0)
    with Relay(
        model, sgd, layers=list(model.layers), loss=partial(loss, model), loss_over="batch", config=config
    ) as relay:  # type: ignore[call-overload]
        assert relay.step(batch).loss == pytest.approx(whole.item(), rel=1e-5)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.all_cases
@pytest.mark.parametrize("settings", [{}, {"stash": "host"}, {"ahead": 0}, {"keep": 2, "resident": 2}], ids=str)
def test_the_forecast_is_what_is_measured(settings: dict[str, Any]) -> None:
    relay, twin, _ = make("two_towers", 4, **settings)
    with relay:
        batch = batch_of(twin, 64, 0)
        expected = relay.forecast(batch).peak_device_bytes
        measured = [relay.step(batch).peak_device_bytes for _ in range(3)]
        assert measured == [expected] * 3
        assert relay.forecast(batch).peak_device_bytes == expected


def test_memory_is_that_of_micro_batches() -> None:
    """Where activations need most, eight micro-batches need far less than the undivided batch."""
    peaks = {}
    for count in (1, 8):
        relay, twin, _ = make("two_towers", count, stash="host")
        with relay:
            batch = batch_of(twin, 64, 0, words=50)
            relay.step(batch)
            peaks[count] = relay.step(batch).peak_device_bytes
    assert peaks[8] < peaks[1] / 4


def test_fit_and_keep_in_bytes() -> None:
    relay, twin, _ = make("two_towers", 4, keep="40 kB")
    with relay:
        batch = batch_of(twin, 32, 0)
        relay.step(batch)
        assert relay.verify(batch).equal
        fit = relay.fit(batch, most_s=1.0)
        relay.config = fit.config
        assert relay.verify(batch).equal


@pytest.mark.parametrize("stash", ["device", "host"])
def test_with_views_that_belong_together(stash: Any) -> None:
    """SimCLR: rows i and i + N/2 are views of one picture, and all other rows are negatives."""

    def nt_xent(outputs: Tensor, batch: Any) -> Tensor:
        z = nn.functional.normalize(outputs, dim=-1)
        similar = (z @ z.T * 5).fill_diagonal_(-torch.inf)
        return nn.functional.cross_entropy(similar, torch.arange(len(z)).roll(len(z) // 2))

    torch.manual_seed(0)
    model = Tower()
    twin = copy.deepcopy(model)
    optimizer, config = adam(twin.parameters()), RelayConfig(seed=0, micro_batches=2, stash=stash)
    options: dict[str, Any] = {"layers": list(model.layers), "loss": nt_xent, "loss_over": "batch", "config": config}
    with Relay(model, adam, split=Views(2), **options) as relay:
        for step in range(2):
            batch = batch_of(model, 12, step)
            parts = [
                {key: value[rows] for key, value in batch.items()}
                for rows in ([0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11])
            ]
            outputs = []
            with torch.random.fork_rng():
                for k, part in enumerate(parts):
                    torch.manual_seed(config.micro_batch_seed(step, k))
                    outputs.append(twin(**inputs_of(part)))
                one, other = leaves = [detached(each) for each in outputs]
                total = nt_xent(torch.cat([one[:3], other[:3], one[3:], other[3:]]), batch)
            total.backward()
            for output, leaf in zip(outputs, leaves, strict=True):
                output.backward(leaf.grad)
            optimizer.step()
            optimizer.zero_grad()
            assert relay.step(batch).loss == total.item()
            assert all(map(torch.equal, model.parameters(), twin.parameters()))
        assert relay.verify(batch).equal


def test_look_and_edits() -> None:
    """They run the model on a micro-batch alone, of which there is no loss."""
    relay, twin, _ = make("sup_con", 4)
    with relay:
        batch = batch_of(twin, 12, 0)
        relay.step(batch)
        assert len(relay.look(batch, micro_batches=[1]).keys) == LAYERS
        relay.apply(Insert(1, init="identity"))
        relay.step(batch)
        assert len(relay.stack) == LAYERS + 1 and relay.verify(batch).equal


def test_probe_and_forward() -> None:
    relay, twin, loss = make("two_towers", 4)
    with relay:
        batch = batch_of(twin, 12, 0)
        twin.eval()
        with torch.no_grad():
            expected = joined([twin(**inputs_of(part)) for part in cut(batch, 4)])
        outputs = relay.forward(batch)
        assert torch.equal(outputs["a"], expected["a"])
        assert relay.probe([batch]) == [loss(twin, expected, batch).item()]


# -- what is refused ---------------------------------------------------------------------------------------------------


class Broken(Tower):
    """Does what `fault` says."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.seen: Any = None

    def forward(self, a: Tensor) -> Any:
        out = self.encode(a)
        self.seen = out.detach() if self.fault == "detached attribute" else out
        if self.fault == "scalar":
            return out, out.pow(2).mean()
        if self.fault == "no rows":
            return out, out.mean(0, keepdim=True).expand(3, -1)
        return out


def fault_loss(model: Any, outputs: Any, batch: Any) -> Tensor:
    out = outputs[0] if isinstance(outputs, tuple) else outputs
    total = shifted(model, out, batch)
    if model.fault in ("attribute", "detached attribute"):
        total = total + model.seen.pow(2).mean()
    elif model.fault == "weight of a layer":
        total = total + model.layers[0].up.weight.pow(2).sum()
    elif model.fault == "not finite":
        total = total / 0
    elif model.fault == "not a scalar":
        total = out.mean(1)
    elif model.fault == "frozen":
        total = total.detach()
    elif model.fault == "changes a weight":
        with torch.no_grad():
            model.norm.weight.mul_(2)
    return total


FAULTS = {
    "scalar": (ValueError, "no rows.*x.expand"),
    "no rows": (ValueError, "no rows.*x.expand"),
    "attribute": (RuntimeError, "Return that tensor from the model's forward"),
    "detached attribute": (RuntimeError, "made for micro-batch"),
    "weight of a layer": (RuntimeError, "the loss of the batch reads a parameter of layer layers.0"),
    "not finite": (NonFiniteError, "the loss of the batch is inf"),
    "not a scalar": (ValueError, "one scalar"),
    "frozen": (RuntimeError, "is the whole model frozen"),
    "changes a weight": (RuntimeError, "the loss changes a weight, norm.weight of shape"),
}


@pytest.mark.all_cases
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_and_nothing_is_trained(fault: str, stash: Any) -> None:
    torch.manual_seed(0)
    model = Broken(fault)
    before = copy.deepcopy(model.state_dict())
    kind, message = FAULTS[fault]
    config = RelayConfig(seed=0, micro_batches=4, stash=stash)
    loss = partial(fault_loss, model)
    with Relay(model, adam, layers=list(model.layers), loss=loss, loss_over="batch", config=config) as relay:
        batch = batch_of(model, 8, 0)
        with pytest.raises(kind, match=message) as caught:
            relay.step(batch)
        assert not isinstance(caught.value, TornStep)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]) or (fault, name) == ("changes a weight", "norm.weight")
        model.fault = ""
        relay.step(batch)  # the remedy in every case: the fault is gone
        assert relay.verify(batch).equal


@pytest.mark.parametrize("kept", ["output", "hidden"])
def test_a_graph_that_a_single_micro_batch_left_behind_is_refused(kept: str) -> None:
    """Nobody guards its tensors, since there is no other micro-batch; the loss would run backward through its graph."""

    class Leaving(Tower):
        kept: Any = None

        def forward(self, a: Tensor) -> Tensor:
            x = self.layers[0](self.embed(a))
            out = self.head(self.norm(self.layers[1](x)).mean(1))
            self.kept = out if kept == "output" else x
            return out

    torch.manual_seed(0)
    model = Leaving()

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return outputs.pow(2).mean() + model.kept.pow(2).mean()

    before = copy.deepcopy(model.state_dict())
    options: dict[str, Any] = {"layers": list(model.layers), "config": RelayConfig(seed=0, micro_batches=1)}
    with Relay(model, adam, loss=loss, loss_over="batch", **options) as relay:
        with pytest.raises(RuntimeError, match="Return that tensor from the model's forward"):
            relay.step(batch_of(model, 4, 0))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_joined_is_refused_at_once() -> None:
    model = Tower()
    relay = partial(Relay, model, adam, layers=list(model.layers), loss_over="batch")
    loss = partial(shifted, model)
    with pytest.raises(ValueError, match="leave schedule out"):
        relay(loss=loss, config=RelayConfig(seed=0, schedule="depth_first"))
    with pytest.raises(ValueError, match="pass loss=lambda outputs, batch"):
        relay()
    with pytest.raises(ValueError, match="pass loss=lambda outputs, batch"):
        relay(objective=lambda model, part: model(part["a"]).mean())
    with pytest.raises(ValueError, match="leave one out"):
        relay(loss=loss, weight=len)
    with relay(loss=loss) as made:
        with pytest.raises(ValueError, match="leave schedule out"):
            made.config = RelayConfig(seed=0, schedule="depth_first")
        made.step(batch_of(model, 4, 0))


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_loss_of_the_batch_may_return_extras(stash: Any) -> None:
    torch.manual_seed(0)
    model = Tower(dropout=0.0)

    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        total = shifted(model, outputs, batch)
        return total, {"outputs": outputs, "loss": total, "rows": len(outputs)}

    options: dict[str, Any] = {
        "layers": list(model.layers),
        "config": RelayConfig(seed=0, micro_batches=4, stash=stash),
    }
    with Relay(model, adam, loss=loss, loss_over="batch", **options) as relay:
        batch = batch_of(model, 8, 0)
        expected = relay.forward(batch)
        result = relay.step(batch)
        assert result.extras["rows"] == 8 and float(result.extras["loss"]) == result.loss
        assert torch.equal(result.extras["outputs"], expected) and not result.extras["outputs"].requires_grad
        assert relay.verify(batch).equal
        assert relay.evaluate(batch) > 0
