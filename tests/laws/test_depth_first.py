"""Depth first, a step equals plain accumulation to the bit, or is refused with nothing changed (invariants 1, 6)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from late_cuda import LateDevice
from oracle import adamw, assert_equal, assert_state, both, copy_state, differences, has_gradient, run_both
from patience import rarely, sampled, wait_until
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import BY_NAME, KINDS, Kind

from l2l_core import (
    Drop,
    Duplicate,
    EmulatedDevice,
    FileShelf,
    Freeze,
    NonFiniteError,
    Relay,
    RelayConfig,
    Swap,
    TornStep,
)
from l2l_core.model import find_layers
from l2l_core.model.reference import train_step

FEW = ["chain", "gpt2", "t5", "qwen3_moe", "resnet", "unet", "random_skip", "albert", "tied_layers"]
few_kinds = pytest.mark.parametrize("kind", [BY_NAME[name] for name in FEW], ids=str)


@cache
def depth_of(name: str) -> int:
    """How many layers a kind has."""
    kind = BY_NAME[name]
    return len(kind.layers or find_layers(kind.make_model()))


def config_for(layers: int, **settings: Any) -> RelayConfig:
    """Settings with which so many layers stay."""
    ahead = settings.setdefault("ahead", 1)
    settings = {"micro_batches": 3, "keep": layers, "resident": max(0, layers - ahead - 1)} | settings
    return RelayConfig(seed=0, schedule="depth_first", **settings)


def config_of(kind: Kind, **settings: Any) -> RelayConfig:
    return config_for(depth_of(kind.name), **settings)


# --- every kind, every setting -----------------------------------------------------------------------------------------


@pytest.mark.all_cases
@pytest.mark.parametrize("kind", sampled(KINDS), ids=str)
def test_every_kind(kind: Kind) -> None:
    """AdamW steps with decay groups, dropout on, an uneven last micro-batch (3, 3 and 1 rows)."""
    assert_equal(run_both(kind, 5, config_of(kind)))


@pytest.mark.parametrize("ahead", [0, rarely(1), 2])
@pytest.mark.parametrize("micro_batches", [1, rarely(2), 4])
@few_kinds
def test_settings(kind: Kind, micro_batches: int, ahead: int) -> None:
    assert_equal(run_both(kind, 2, config_of(kind, micro_batches=micro_batches, ahead=ahead)))


@pytest.mark.parametrize(
    "settings",
    [
        {"update": "deferred"},
        {"rollback": True},
        {"meter": "always"},
        {"keep": 99, "resident": 40},
        {"update": "deferred", "max_grad_norm": 0.1},
    ],
    ids=str,
)
@few_kinds
def test_other_settings(kind: Kind, settings: dict[str, Any]) -> None:
    assert_equal(run_both(kind, 2, config_of(kind, **settings)))


def test_clipping_clips() -> None:
    kind, sgd = BY_NAME["gpt2"], lambda m: torch.optim.SGD(m.parameters(), lr=1.0)
    clipped = run_both(kind, 2, config_of(kind, update="deferred", max_grad_norm=0.1), sgd)
    free = run_both(kind, 2, config_of(kind), sgd)
    assert_equal(clipped)
    assert_equal(free)
    assert clipped[1].result.loss != free[1].result.loss


@pytest.mark.parametrize("name", ["gpt2", rarely("albert"), rarely("tied_layers"), "random_skip"])
def test_schedules_take_turns(name: str) -> None:
    """One relay, other settings at every step; what one schedule has metered is not taken for the other's."""
    kind = BY_NAME[name]
    with both(kind, config_of(kind)) as pair:
        for step, breadth_first in enumerate([False, True, False, True, True, False]):
            config = RelayConfig(seed=0, micro_batches=3) if breadth_first else config_of(kind)
            pair.relay.config = pair.in_core.config = config
            assert_equal([pair.step(kind.make_batch(7, step))])


@few_kinds
def test_verify_agrees(kind: Kind) -> None:
    with both(kind, config_of(kind)) as pair:
        pair.relay.step(kind.make_batch(7, 0))
        before = copy_state(pair.relay.model)
        report = pair.relay.verify(kind.make_batch(7, 1))
        assert report.equal and report.max_abs_diff == 0.0, str(report)
        assert_state(pair.relay.model, before)


@pytest.mark.parametrize("name", ["chain", "gpt2_untied", "bert_classifier"])
def test_bf16_is_that_of_the_relay(name: str) -> None:
    """Which test_precision.py holds against its definition."""
    kind, states = BY_NAME[name], []
    for config in (config_of(kind, precision="bf16"), RelayConfig(seed=0, micro_batches=3, precision="bf16")):
        model = kind.make_model()
        with Relay(
            model, adamw(model), loss=kind.loss, loss_over=kind.loss_over, layers=kind.layers, config=config
        ) as relay:
            losses = [relay.step(kind.make_batch(6, step)).loss for step in range(3)]
            states.append((losses, copy_state(relay.model)))
    assert states[0][0] == states[1][0]
    assert all(torch.equal(states[0][1][key], value) for key, value in states[1][1].items())


@pytest.mark.parametrize("compress", ["bf16", "int8"])
def test_fewer_bits_are_those_of_the_relay(compress: Any) -> None:
    kind, states = BY_NAME["chain"], []
    for config in (config_of(kind, compress=compress), RelayConfig(seed=0, micro_batches=3, compress=compress)):
        model = kind.make_model()
        with Relay(
            model, adamw(model), loss=kind.loss, loss_over=kind.loss_over, layers=kind.layers, config=config
        ) as relay:
            states.append(([relay.step(kind.make_batch(6, step)).loss for step in range(3)], copy_state(relay.model)))
    assert states[0][0] == states[1][0]
    assert all(torch.equal(states[0][1][key], value) for key, value in states[1][1].items())


@pytest.mark.parametrize("name", ["chain", "random_skip", "lora_tied", "batch_norm", "gpt2", "qwen3_moe"])
def test_copies_that_come_late(name: str) -> None:
    """As on a GPU: what the step does not wait for has not come."""
    kind = BY_NAME[name]
    with both(kind, config_of(kind), device=LateDevice()) as pair:
        assert_equal([pair.step(kind.make_batch(7, step)) for step in range(3)])


# --- the trace and what is booked ----------------------------------------------------------------------------------------


def test_every_layer_is_loaded_once_and_pushed_once() -> None:
    kind, moved = BY_NAME["chain"], []
    for schedule in ("breadth_first", "depth_first"):
        with both(kind, replace(config_of(kind), schedule=schedule)) as pair:  # type: ignore[arg-type]
            for step in range(2):
                result = pair.step(kind.make_batch(7, step)).result
                moved.append((result.bytes_loaded, result.bytes_pushed))
    assert len(set(moved)) == 1, moved
    events = [event for event in result.trace.events if event.lane == "compute"]
    for what, count in {"forward": 3 * 4, "backward": 3 * 4, "loss": 3}.items():
        assert len({(e.layer, e.k, e.visit) for e in events if e.kind == what}) == count, what
    first_back = min(e.start_s for e in events if e.kind == "backward" and e.k == 0)
    assert first_back < min(e.start_s for e in events if e.k == 1), "a micro-batch goes back before the next one begins"


def test_a_layer_is_pushed_while_backward_goes_on_below_it() -> None:
    kind = BY_NAME["chain"]
    with both(kind, config_of(kind, ahead=1, verify="never")) as pair:
        relay = pair.relay
        begun: list[tuple[str, int]] = []
        below = relay.stack[0].module
        params = list(below.parameters())
        take = relay.store.push_gradient
        relay.store.push_gradient = lambda unit, *args: begun.append((unit.key, len(seen))) or take(unit, *args)  # type: ignore
        seen: list[int] = []
        handle = params[0].register_hook(lambda grad: seen.append(1))
        pair.step(kind.make_batch(7, 0))
        handle.remove()
        relay.store.push_gradient = take  # type: ignore[method-assign]
    assert [key for key, _ in begun] == ["L003", "L002", "L001", "L000", "shell"]
    assert [before for key, before in begun if key in ("L003", "L002")] == [2, 2], "before the last gradient of L000"


@pytest.mark.parametrize("meter", ["on_change", "always"])
def test_nothing_stays_booked(meter: Any) -> None:
    kind = BY_NAME["gpt2"]
    with both(kind, config_of(kind, meter=meter)) as pair:
        peaks = [pair.step(kind.make_batch(6, step)).result.peak_device_bytes for step in range(3)]
        assert pair.relay.device.ledger.total == 0, pair.relay.device.ledger.by_category()
    assert peaks[0] == peaks[1] == peaks[2] > 0


def test_gradients_on_the_host_are_none_of_the_devices() -> None:
    """The emulated device is the host itself, and the EPS makes room for them while backward goes on, in a metered step too."""
    kind, peaks = BY_NAME["chain"], set()
    for settings in (
        {"update": "eager"},
        {"update": "deferred", "ahead": 0},
        {"update": "deferred", "meter": "always"},
    ):
        with both(kind, config_of(kind, **settings)) as pair:
            peaks |= {pair.step(kind.make_batch(3, step)).result.peak_device_bytes for step in range(3)}
    assert len(peaks) == 1


# --- programs -------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(F.dropout(x, 0.1, self.training)))


class Normed(Block):
    """Has statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Reentrant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class UnderAutocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class InPlace(Block):
    """Changes what it is given, and gives out that."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5).add_(torch.tanh(self.inner(x.detach().clone())))


class Named(Block):
    """Gives out what no tree has seen."""

    def forward(self, x: Tensor) -> Any:
        return Box(super().forward(x))


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Penalized(Block):
    """Differentiates in its forward, back through the layers before."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if x.requires_grad:
            [slope] = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            out = out + 0.1 * slope
        return out


class Viewing(Block):
    """Gives out a view of what it is given, and a flag without a gradient."""

    def forward(self, x: Tensor) -> Any:
        return x.view(-1, 2, 4), super().forward(x), (x > 0).any()


class Program(nn.Module):
    """A stem, layers, a head, and a way through them."""

    def __init__(self, way: Callable[..., Tensor], make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.layers, self.head = nn.Linear(8, 8), nn.ModuleList(make() for _ in range(3)), nn.Linear(8, 8)
        self.way = [way]  # in a list, as a method would be bound to another model when this one is copied

    def forward(self, x: Tensor) -> Tensor:
        return self.way[0](self, x)


def straight(model: Program, x: Tensor) -> Tensor:
    x = model.stem(x)
    for layer in model.layers:
        x = layer(x)
    return model.head(x)


def without_stem(model: Program, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def called_twice(model: Program, x: Tensor) -> Tensor:
    x = model.stem(x)
    for layer in (model.layers[1], model.layers[0], model.layers[1], model.layers[2], model.layers[0]):
        x = layer(x)
    return model.head(x)


def backwards(model: Program, x: Tensor) -> Tensor:
    """Another order than the one in which they are defined, and one is left out."""
    return model.head(model.layers[0](model.layers[2](model.stem(x))))


def side_by_side(model: Program, x: Tensor) -> Tensor:
    x = model.stem(x)
    return model.head(model.layers[0](x) * model.layers[1](x) + model.layers[2](x))


def weight_before(model: Program, x: Tensor) -> Tensor:
    """Older code than the layer uses its weight, so that the gradient is whole only after that."""
    x = model.stem(x) @ model.layers[2].inner.weight
    for layer in model.layers:
        x = layer(x)
    return model.head(x)


def weight_after(model: Program, x: Tensor) -> Tensor:
    out = straight(model, x)
    return out + 0.1 * sum(layer.inner.weight.square().sum() for layer in model.layers)


def weight_in_another_layer(model: Program, x: Tensor) -> Tensor:
    x = model.layers[0](model.stem(x)) @ model.layers[2].inner.weight.t()
    return model.head(model.layers[2](model.layers[1](x)))


def part_of_a_layer(model: Program, x: Tensor) -> Tensor:
    """Shell code calls a submodule of a layer by itself, before and after."""
    x = model.layers[1].inner(model.stem(x))
    return model.layers[0].inner(model.layers[1](model.layers[0](x)) + model.layers[2](x))


def checkpointed_pair(reentrant: bool, model: Program, x: Tensor) -> Tensor:
    """The model recomputes two layers together."""
    x = model.layers[0](model.stem(x))
    x = checkpoint(lambda h: model.layers[2](model.layers[1](h)), x, use_reentrant=reentrant)
    return model.head(x)


def boxed(model: Program, x: Tensor) -> Tensor:
    x = model.stem(x)
    for layer in model.layers:
        x = layer(x).value
    return model.head(x)


def viewed(model: Program, x: Tensor) -> Tensor:
    x = model.stem(x)
    for layer in model.layers:
        seen, x, flag = layer(x)
        x = x + 0.1 * seen.flatten(1) * flag
    return model.head(x)


def changed_outside(model: Program, x: Tensor) -> Tensor:
    """What a layer has given out is changed in place."""
    x = model.stem(x)
    for layer in model.layers:
        x = layer(x)
        x.mul_(1.5)
        x[:, 0] = 0.0
    return model.head(x)


def under_no_grad(model: Program, x: Tensor) -> Tensor:
    x = model.stem(x)
    with torch.no_grad():
        seen = model.layers[0](x)
    return model.head(model.layers[2](model.layers[1](x.detach()) + seen))


def hooked_tensor(model: Program, x: Tensor) -> Tensor:
    x = model.layers[0](model.stem(x))
    x.register_hook(lambda grad: grad * 0.5)
    return model.head(model.layers[2](model.layers[1](x)))


def left_on_an_attribute(model: Program, x: Tensor) -> Tensor:
    """A value of this micro-batch, for the code behind."""
    model.left = model.layers[0](model.stem(x))
    return model.head(model.layers[2](model.layers[1](model.left)) + model.left)


def from_the_last_micro_batch(model: Program, x: Tensor) -> Tensor:
    """A running value without a graph, which micro-batches hand on in order, as in plain training."""
    x = model.layers[0](model.stem(x))
    before = getattr(model, "mean", torch.zeros(8))
    model.mean = 0.9 * before + 0.1 * x.detach().mean(0)
    return model.head(model.layers[2](model.layers[1](x - before)))


def with_backward_inside(model: Program, x: Tensor) -> Tensor:
    """A gradient in the model's own code, through a layer."""
    x = model.stem(x)
    first = model.layers[0](x)
    [slope] = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return model.head(model.layers[2](model.layers[1](first + 0.1 * slope)))


def backward_inside(model: Program, x: Tensor) -> Tensor:
    """Gradients go to parameters from within the forward, as an auxiliary loss of the model's own."""
    x = model.stem(x)
    first = model.layers[0](x)
    (0.1 * first.square().sum()).backward(retain_graph=True)
    return model.head(model.layers[2](model.layers[1](first)))


def slopes_of_weights(model: Program, x: Tensor) -> Tensor:
    """A penalty on gradients of parameters, differentiated once more."""
    out = straight(model, x)
    slopes = torch.autograd.grad(out.square().mean(), list(model.parameters()), create_graph=True)
    return out + 0.1 * sum(slope.square().sum() for slope in slopes)


def layer_in_a_layer(model: Program, x: Tensor) -> Tensor:
    """A layer calls others, of which one is called by nobody else."""
    borrowed = [model.layers[0], model.layers[2]]
    handle = model.layers[1].inner.register_forward_hook(lambda module, args, out: borrowed[0](borrowed[1](out)))
    x = model.layers[0](model.layers[1](model.stem(x)))
    handle.remove()
    return model.head(x)


def under_vmap(model: Program, x: Tensor) -> Tensor:
    x = torch.func.vmap(model.layers[0], randomness="different")(model.stem(x))
    return model.head(model.layers[2](model.layers[1](x)))


def under_grad(model: Program, x: Tensor) -> Tensor:
    x = model.stem(x)
    slope = torch.func.grad(lambda h: model.layers[0](h).square().sum())(x)
    return model.head(model.layers[2](model.layers[1](x + 0.1 * slope)))


def with_other_weights(model: Program, x: Tensor) -> Tensor:
    halved = {name: 0.5 * param for name, param in model.layers[1].named_parameters()}
    x = torch.func.functional_call(model.layers[1], halved, (model.stem(x),))
    return model.head(model.layers[2](model.layers[0](x)))


def in_a_thread(model: Program, x: Tensor) -> Tensor:
    """Nodes of another thread are numbered from 0 there, so that their age says nothing."""
    x, given = model.stem(x), []
    for layer in model.layers:
        thread = threading.Thread(target=lambda layer=layer, x=x: given.append(layer(x)))
        thread.start()
        thread.join()
        x = given[-1]
    return model.head(x)


WAYS: dict[str, Callable[[], Program]] = {
    way.__name__: partial(Program, way)
    for way in (
        straight,
        without_stem,
        called_twice,
        backwards,
        side_by_side,
        weight_before,
        weight_after,
        weight_in_another_layer,
        part_of_a_layer,
        changed_outside,
        under_no_grad,
        hooked_tensor,
        left_on_an_attribute,
        from_the_last_micro_batch,
        with_backward_inside,
        backward_inside,
        slopes_of_weights,
        layer_in_a_layer,
        under_vmap,
        under_grad,
        with_other_weights,
    )
}
WAYS |= {
    make.__name__: partial(Program, straight, make)
    for make in (Normed, Reentrant, Checkpointed, UnderAutocast, InPlace, Penalized)
}
WAYS |= {
    "in a thread": partial(Program, in_a_thread, lambda: nn.Linear(8, 8)),  # the seed is the main thread's
    "boxed": partial(Program, boxed, Named),
    "viewed": partial(Program, viewed, Viewing),
    "checkpointed pair": partial(Program, partial(checkpointed_pair, False)),
    "checkpointed pair, reentrant": partial(Program, partial(checkpointed_pair, True)),
}


def batch(step: int, rows: int = 6) -> tuple[Tensor]:
    return (torch.randn(rows, 8, generator=torch.Generator().manual_seed(step)),)


def objective(model: nn.Module, part: Any) -> Tensor:
    return model(part[0]).square().mean()


@contextmanager
def relay_over(model: nn.Module, **settings: Any) -> Iterator[Relay]:
    """A relay depth first over the layers of a program."""
    options = {name: settings.pop(name) for name in ("objective", "device") if name in settings}
    config = config_for(len(model.layers), **settings)  # type: ignore[arg-type]
    options = {"objective": objective, "layers": list(model.layers), "config": config} | options  # type: ignore
    options.setdefault("loss_over", "micro-batch")  # type: ignore[call-overload]
    with Relay(model, adamw(model, lr=1e-2), **options) as relay:
        yield relay


def assert_plain(make: Callable[[], Program], steps: int = 3, objective: Any = objective, **settings: Any) -> None:
    """Insist on the bits of plain training."""
    model, twin = make(), make()
    optimizer = adamw(twin, lr=1e-2)
    with relay_over(model, objective=objective, **settings) as relay:
        for step in range(steps):
            count = relay.config.micro_batches
            parts = [(part,) for part in batch(step)[0].split(-(-6 // count))]
            seeds = [relay.config.micro_batch_seed(step, k) for k in range(count)]
            losses = train_step(twin, optimizer, parts, objective, [float(count)] * count, seeds)
            assert relay.step(batch(step)).loss == float(sum(losses)), f"loss of step {step}"
            assert not differences(model, twin), f"step {step}"
        assert not any(map(has_gradient, model.parameters()))
        assert relay.device.ledger.total == 0, relay.device.ledger.by_category()


@pytest.mark.all_cases
@pytest.mark.parametrize("settings", [{"micro_batches": 1}, {"micro_batches": 3, "meter": "always"}], ids=["1", "3"])
@pytest.mark.parametrize("name", WAYS)
def test_programs(name: str, settings: dict[str, Any]) -> None:
    assert_plain(WAYS[name], **settings)


def shared_inner(model: Program) -> Program:
    model.layers[2].inner.weight = model.layers[0].inner.weight
    return model


def tied_head(model: Program) -> Program:
    model.head.weight = model.stem.weight
    return model


def tied_to_a_layer(model: Program) -> Program:
    model.head.weight = model.layers[1].inner.weight
    return model


def frozen_layer(model: Program) -> Program:
    model.layers[1].requires_grad_(False)
    model.layers[2].inner.bias.requires_grad_(False)
    return model


def frozen_below(model: Program) -> Program:
    """No gradient goes below the last layer."""
    model.stem.requires_grad_(False)
    model.layers[:2].requires_grad_(False)
    return model


def all_layers_frozen(model: Program) -> Program:
    model.layers.requires_grad_(False)
    return model


def hooked_parameters(model: Program) -> Program:
    """As gradients are clipped by value, or scaled."""
    for param in model.layers[1].parameters():
        param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model.head.weight.register_hook(lambda grad: grad * 2)
    return model


def hooked_modules(model: Program) -> Program:
    model.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model.layers[1].register_forward_hook(lambda module, args, out: out * 0.5)
    model.layers[2].register_full_backward_hook(lambda module, given, came: (given[0] * 0.5,))
    model.layers[1].inner.register_full_backward_pre_hook(lambda module, came: (came[0] * 0.5,))
    return model


def normed_weights(model: Program) -> Program:
    for layer, norm in zip(model.layers, ("spectral_norm", "weight_norm", "orthogonal"), strict=True):
        getattr(nn.utils.parametrizations, norm)(layer.inner)
    return model


CHANGES = [
    shared_inner,
    tied_head,
    tied_to_a_layer,
    frozen_layer,
    frozen_below,
    all_layers_frozen,
    hooked_parameters,
    hooked_modules,
    normed_weights,
]


@pytest.mark.all_cases
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_models(change: Callable[[Program], Program], micro_batches: int) -> None:
    assert_plain(lambda: change(Program(straight)), micro_batches=micro_batches)


def test_a_weight_norm_by_a_hook_of_the_layer_itself() -> None:
    """The hook runs before the layer's forward, and reads its weights."""

    def make() -> Program:
        model = Program(straight, lambda: nn.Linear(8, 8))
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(model.layers[1])
        return model

    assert_plain(make)


def test_an_objective_that_reads_weights() -> None:
    def decayed(model: Any, part: Any) -> Tensor:
        return objective(model, part) + 0.01 * sum(p.square().sum() for p in model.parameters())

    assert_plain(partial(Program, straight), objective=decayed)


@pytest.mark.parametrize("who", ["shell", "hook"])
def test_weights_are_on_the_device_whoever_reads_them_first(who: str) -> None:
    """In bfloat16 every micro-batch of every step sees the copy there; layers that nobody reads early come as they are called."""
    seen: list[torch.dtype] = []

    def read(layer: Any) -> Tensor:
        seen.append((scale := layer.weight.mean()).dtype)
        return scale

    def scaled(model: Any, x: Tensor) -> Tensor:
        x = model.stem(x) + (read(model.layers[2]) if who == "shell" else 0.0)
        return model.head(model.layers[2](model.layers[1](model.layers[0](x))))

    def make() -> Program:
        return Program(scaled, lambda: nn.Linear(8, 8))

    model = make()
    if who == "hook":
        model.layers[2].register_forward_pre_hook(lambda layer, args: (args[0] + read(layer),))
    with relay_over(model, precision="bf16") as relay:
        traces = [relay.step(batch(step)).trace for step in range(3)]
    assert seen == 9 * [torch.bfloat16]
    loads = [[e.layer for e in trace.lanes["h2d"] if e.kind == "load"] for trace in traces]
    assert loads[0] == ["shell", "L000", "L001", "L002"], "a metered step does not know yet"
    assert {*map(tuple, loads[1:])} == {("shell", "L002", "L001", "L000")}, (
        "the one that is read, and the one before it"
    )
    if who == "shell":
        assert_plain(make)


def test_a_graph_that_outlives_its_micro_batch() -> None:
    """A sum that keeps nothing for backward: plain training may go through it again, and so may this."""

    def make() -> Program:
        model = Program(kept)
        model.layers[1].bias = nn.Parameter(torch.ones(8))
        return model

    def kept(model: Any, x: Tensor) -> Tensor:
        x = model.layers[0](model.stem(x))
        before = getattr(model, "before", 0.0)
        model.before = before + model.layers[1].bias
        return model.head(model.layers[2](model.layers[1](x)) + model.before)

    model, twin = make(), make()
    optimizer = adamw(twin, lr=1e-2)
    with relay_over(model) as relay:
        parts = [(part,) for part in batch(0)[0].split(2)]
        seeds = [relay.config.micro_batch_seed(0, k) for k in range(3)]
        losses = train_step(twin, optimizer, parts, objective, [3.0] * 3, seeds)
        assert relay.step(batch(0)).loss == float(sum(losses))
        assert not differences(model, twin)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # PyTorch's compiler asks for it
def test_a_compiled_layer() -> None:
    def make() -> Program:
        model = Program(straight)
        for layer in model.layers:
            layer.compile(backend="eager")
        return model

    assert_plain(make, steps=2)


def test_a_graph_that_is_used_after_the_step() -> None:
    """It runs as far as it has not been freed, and the relay knows nothing of it."""

    def kept(model: Any, x: Tensor) -> Tensor:
        x = model.layers[0](model.stem(x))
        model.cleared = model.layers[1](x.detach())
        return model.head(model.layers[2](x))

    model = Program(kept)
    with relay_over(model) as relay:
        relay.step(batch(0))
        events = len(relay.trace.events)  # type: ignore[union-attr]
        model.cleared.sum().backward()
        assert len(relay.trace.events) == events and model.layers[1].inner.bias.grad is not None  # type: ignore
        model.zero_grad()
        relay.step(batch(1))
        assert relay.device.ledger.total == 0


def test_a_graph_that_plain_training_cannot_run_again_fails_as_there() -> None:
    def kept(model: Any, x: Tensor) -> Tensor:
        model.before = model.layers[0](model.stem(x)) + 0.1 * getattr(model, "before", torch.zeros(8))
        return model.head(model.layers[2](model.layers[1](model.before)))

    model = Program(kept)
    before = copy_state(model)
    with relay_over(model, rollback=True) as relay:
        with pytest.raises(RuntimeError, match="second time"):
            relay.step(batch(0))
        assert_state(model, before)


# --- between steps --------------------------------------------------------------------------------------------------------


def test_looks_between_steps_change_nothing() -> None:
    kind = BY_NAME["gpt2"]
    with both(kind, config_of(kind)) as pair:
        for step in range(3):
            assert_equal([pair.step(kind.make_batch(7, step))])
            relay, other = pair.relay, kind.make_batch(7, 50)
            assert relay.evaluate(other) == relay.probe([other])[0]
            relay.forward(other)
            relay.look(other)
            assert relay.verify(other).equal


def test_frozen_and_thawed() -> None:
    kind = BY_NAME["gpt2_untied"]
    with both(kind, config_of(kind)) as pair:
        for step, (name, trained) in enumerate([("h.1.", False), ("wte", False), ("h.1.", True), ("h.", False)]):
            for model in (pair.relay.model, pair.in_core.model):
                for param in (p for n, p in model.named_parameters() if name in n):
                    param.requires_grad_(trained)
            assert_equal([pair.step(kind.make_batch(7, step))])


def test_edits() -> None:
    """Against a relay breadth first with the same edits; a longer stack is refused until the settings follow."""
    kind = BY_NAME["gpt2"]
    relays = []
    for config in (config_of(kind), RelayConfig(seed=0, micro_batches=3)):
        model = kind.make_model()
        relays.append(Relay(model, adamw(model), EmulatedDevice(), config=config))
    ours, theirs = relays
    with ours, theirs:

        def train(step: int) -> None:
            assert ours.step(kind.make_batch(7, step)).loss == theirs.step(kind.make_batch(7, step)).loss
            assert not differences(ours.model, theirs.model)

        train(0)
        for step, edit in enumerate([Swap(0, 2), Drop(1), Freeze(0)], start=1):
            ours.apply(edit), theirs.apply(edit)
            train(step)
        ours.undo(), theirs.undo()
        ours.undo(), theirs.undo()
        train(4)
        ours.apply(Duplicate(0)), theirs.apply(Duplicate(0))
        train(5)
        ours.undo(), theirs.undo()
        train(6)


def test_layers_that_sit_out() -> None:
    kind = BY_NAME["gpt2"]
    losses = []
    for config in (config_of(kind), RelayConfig(seed=0, micro_batches=3)):
        model = kind.make_model()
        with Relay(model, adamw(model), config=config) as relay:
            skips = [[], [1], [0, 3], []]
            losses.append([relay.step(kind.make_batch(7, i), skip=skip).loss for i, skip in enumerate(skips)])
            losses[-1] += [tensor.double().sum().item() for tensor in copy_state(model).values()]
    assert losses[0] == losses[1]


def test_branches() -> None:
    kind = BY_NAME["chain"]
    with both(kind, config_of(kind)) as pair:
        assert_equal([pair.step(kind.make_batch(7, 0))])
        here = copy_state(pair.relay.model)
        pair.relay.fork("other")
        pair.relay.step(kind.make_batch(7, 9))
        pair.relay.switch("main")
        assert_state(pair.relay.model, here)
        assert_equal([pair.step(kind.make_batch(7, 1))])


def test_save_and_resume(tmp_path: Path) -> None:
    kind = BY_NAME["gpt2"]
    with both(kind, config_of(kind)) as pair:
        assert_equal([pair.step(kind.make_batch(7, 0))])
        pair.relay.save(tmp_path)
        model = kind.make_model()
        with Relay.load(tmp_path, model, adamw(model), loss=kind.loss, loss_over=kind.loss_over) as again:
            assert again.config == pair.relay.config
            assert again.step(kind.make_batch(7, 1)).loss == pair.in_core.step(kind.make_batch(7, 1))
            assert not differences(model, pair.in_core.model)


# --- what fails -----------------------------------------------------------------------------------------------------------


class Fault(Exception):
    """What the tests inject."""


class Trapped(torch.autograd.Function):
    """The identity; what it was given is called on its way, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[], None], back: Callable[[], None]) -> Tensor:
        there()
        ctx.back = back
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.back()
        return grad, None, None


def fails_at(nth: int, error: type[BaseException]) -> Callable[[], None]:
    """Raises at its n-th call (from 0), once."""
    calls = iter(range(1 << 30))

    def trap() -> None:
        if next(calls) == nth:
            raise error("injected")

    return trap


class WithTrap(Normed):
    """Traps are in dictionaries, as a plain attribute of the layer is looked at by everybody."""

    def __init__(self) -> None:
        super().__init__()
        self.traps: dict[str, Callable[[], None]] = {}

    def forward(self, x: Tensor) -> Tensor:
        quiet = lambda: None  # noqa: E731
        return Trapped.apply(super().forward(x), self.traps.get("there", quiet), self.traps.get("back", quiet))


def whole(relay: Relay) -> dict[str, Tensor]:
    """Weights, buffers, optimizer state, versions and the random state, by value."""
    state = copy_state(relay.model)
    for index, entry in relay.optimizer.state_dict()["state"].items():
        state |= {f"optimizer {index} {name}": torch.as_tensor(value).clone() for name, value in entry.items()}
    state["versions"] = torch.tensor([unit.version for unit in (relay.shell, *relay.stack)])
    return state | {"random": torch.get_rng_state()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def assert_clean(relay: Relay) -> None:
    """Insist that a failed step has left nothing behind, and that the relay still trains."""
    for module in relay.model.modules():
        assert "forward" not in vars(module)
    for param in relay.model.parameters():
        assert not has_gradient(param) and not param._post_accumulate_grad_hooks and param.device.type == "cpu"
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert relay.device.ledger.total == 0, relay.device.ledger.by_category()
    assert relay.verify(batch(7)).equal


SAFE: dict[str, dict[str, Any]] = {"eager": {}, "rollback": {"rollback": True}, "deferred": {"update": "deferred"}}


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["there", "back"])
@pytest.mark.parametrize("layer, k", [rarely(0, 0), (2, 1), rarely(1, 2), (0, 2)])
@pytest.mark.parametrize("settings", SAFE.values(), ids=SAFE)
@pytest.mark.all_cases
def test_a_layer_that_fails(
    settings: dict[str, Any], layer: int, k: int, where: str, error: type[BaseException]
) -> None:
    with relay_over(Program(straight, WithTrap), **settings) as relay:
        relay.step(batch(0))
        before = whole(relay)
        relay.model.layers[layer].traps[where] = fails_at(k, error)  # type: ignore[union-attr, index]
        can_tear = where == "back" and k == 2 and layer < 2 and not settings
        with pytest.raises((error, TornStep) if can_tear else error) as caught:
            relay.step(batch(1))
        relay.model.layers[layer].traps.clear()  # type: ignore[union-attr, index]
        different = changed(before, whole(relay)) - {"versions"}
        if not isinstance(caught.value, TornStep):
            assert not different
        else:
            units = {unit.key: unit for unit in (relay.shell, *relay.stack)}
            new = {id(param) for key in caught.value.updated for param in units[key].params}
            assert new and all(id(p) in new for n, p in relay.model.named_parameters() if n in different)
        assert_clean(relay)


@pytest.mark.parametrize("settings", SAFE.values(), ids=SAFE)
@pytest.mark.parametrize("nth", [0, 2, 3])
def test_an_optimizer_that_fails(settings: dict[str, Any], nth: int) -> None:
    with relay_over(Program(straight, Normed), **settings) as relay:
        relay.step(batch(0))
        before = whole(relay)
        trap = fails_at(nth, Fault)
        plain = type(relay.optimizer).step
        type(relay.optimizer).step = lambda self, *args: (trap(), plain(self, *args))[1]  # type: ignore
        try:
            with pytest.raises((Fault, TornStep)) as caught:
                relay.step(batch(1))
        finally:
            type(relay.optimizer).step = plain  # type: ignore[method-assign]
        if isinstance(caught.value, TornStep):
            assert not settings and isinstance(caught.value.__cause__, Fault)
        else:
            assert not changed(before, whole(relay))
        assert_clean(relay)


def test_a_layers_own_forward_is_put_back() -> None:
    """Where the user has put one on the module, it is that one, after steps and after failures."""
    with relay_over(Program(straight, WithTrap)) as relay:
        layer: Any = relay.model.layers[1]  # type: ignore[index]
        plain = layer.forward
        layer.forward = own = lambda x: plain(x) * 0.5
        relay.step(batch(0))
        assert vars(layer)["forward"] is own
        layer.traps["there"] = fails_at(1, Fault)
        with pytest.raises(Fault):
            relay.step(batch(1))
        assert vars(layer)["forward"] is own
        relay.step(batch(1))


@pytest.mark.parametrize("layer", [0, 2])
def test_a_loss_that_is_not_finite_names_the_layer(layer: int) -> None:
    with relay_over(Program(straight, Normed)) as relay:
        relay.step(batch(0))
        before = whole(relay)
        with torch.no_grad():
            kept = relay.model.layers[layer].inner.bias.clone()  # type: ignore[index, union-attr]
            relay.model.layers[layer].inner.bias[3] = float("nan")  # type: ignore[index, union-attr]
        with pytest.raises(
            NonFiniteError, match=rf"micro-batch 0 is nan; first produced by layer layers\.{layer} \(L00"
        ):
            relay.step(batch(1))
        with torch.no_grad():
            relay.model.layers[layer].inner.bias.copy_(kept)  # type: ignore[index, union-attr]
        assert not changed(before, whole(relay))
        assert_clean(relay)


def test_a_loss_that_is_not_finite_is_explained_where_forward_differentiates() -> None:
    """The forward that finds out is the same once more, with its gradients."""
    with relay_over(Program(straight, Penalized)) as relay:
        with torch.no_grad():
            relay.model.layers[1].inner.bias[3] = float("inf")  # type: ignore[index, union-attr]
            relay.model.layers[1].inner.weight[3] = float("nan")  # type: ignore[index, union-attr]
        with pytest.raises(NonFiniteError, match=r"is nan; first produced by layer layers\.1 \(L001\)"):
            relay.step(batch(1))


def test_what_layers_are_given_by_name_is_looked_at_too() -> None:
    def by_name(model: Any, x: Tensor) -> Tensor:
        x = model.stem(x)
        for layer in model.layers:
            x = layer(x=x)
        return model.head(x)

    with relay_over(Program(by_name)) as relay:
        [x] = batch(1)
        x[0, 0] = float("nan")
        with pytest.raises(NonFiniteError, match="by the batch, or the model's own code before layer layers.0"):
            relay.step((x,))


@pytest.mark.parametrize("row, k", [(0, 0), (5, 2)])
def test_a_batch_that_is_not_finite_is_named(row: int, k: int) -> None:
    with relay_over(Program(straight, Normed)) as relay:
        relay.step(batch(0))
        before = whole(relay)
        [x] = batch(1)
        x[row, 0] = float("inf")
        with pytest.raises(NonFiniteError, match=rf"micro-batch {k} is nan; first produced by the batch"):
            relay.step((x,))
        assert not changed(before, whole(relay))
        assert_clean(relay)


def test_a_model_may_catch_what_a_layer_raises() -> None:
    def forgiving(model: Any, x: Tensor) -> Tensor:
        x = model.stem(x)
        for layer in model.layers:
            try:
                x = layer(x)
            except Fault:
                x = 0.9 * x
        return model.head(x)

    def make() -> Program:
        model = Program(forgiving, WithTrap)
        model.layers[1].traps["there"] = fails_at(4, Fault)
        return model

    assert_plain(make, verify="never")  # the trap counts its calls


# --- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"keep": 2}, {"resident": 0}, {"keep": 0, "resident": 0}, {"resident": 9}], ids=str
)
def test_all_layers_stay_whatever_numbers_say(settings: dict[str, Any]) -> None:
    with relay_over(Program(straight), **settings) as relay:
        result = relay.step(batch(0))
    assert {name: result.trace.settings[name] for name in ("keep", "resident")} == {"keep": 3, "resident": 1}
    assert [e.layer for e in result.trace.lanes["h2d"] if e.kind == "load"] == ["shell", "L000", "L001", "L002"]


@pytest.mark.parametrize("settings", [{"stash": "host"}, {"stash": "disk"}, {"keep": "1 MB"}], ids=str)
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="schedule='depth_first' with .*stash='device'"):
        config_for(3, **settings)


def test_a_schedule_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="schedule='sideways': must be one of 'breadth_first', 'depth_first'"):
        RelayConfig(seed=0, schedule="sideways")  # type: ignore[arg-type]


def test_weights_in_files(tmp_path: Path) -> None:
    kind = BY_NAME["chain"]
    options: dict[str, Any] = {"loss": kind.loss, "device": EmulatedDevice()}
    shelf = FileShelf(folder=tmp_path, memory_bytes="8 MB")
    with pytest.raises(ValueError, match=r"schedule='depth_first' is not possible.*leave schedule out of RelayConfig"):
        Relay(kind.make_model(), partial(torch.optim.SGD, lr=0.1), shelf=shelf, config=config_of(kind), **options)


def test_a_frozen_model() -> None:
    model = Program(straight).requires_grad_(False)
    with relay_over(model) as relay, pytest.raises(RuntimeError, match="frozen"):
        relay.step(batch(0))


def test_a_weight_that_the_forward_changes() -> None:
    def renorming(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.layers[1].inner.weight.mul_(0.99)
        return straight(model, x)

    for micro_batches in (1, 3):
        model = Program(renorming)
        before = copy_state(model)
        with relay_over(model, micro_batches=micro_batches) as relay:
            with pytest.raises(
                RuntimeError,
                match=r"changes a weight, layers\.1\.inner\.weight of shape .*would be lost. Change weights between steps",
            ):
                relay.step(batch(0))
            assert_state(model, before)


def test_a_parameter_that_is_frozen_in_mid_step() -> None:
    def freezing(model: Any, x: Tensor) -> Tensor:
        model.layers[1].inner.bias.requires_grad_(False)
        return straight(model, x)

    for micro_batches in (1, 3):
        model = Program(freezing)
        before = copy_state(model)
        with relay_over(model, micro_batches=micro_batches) as relay:
            with pytest.raises(RuntimeError, match=r"requires_grad of parameter layers\.1.* during the step"):
                relay.step(batch(0))
            assert_state(model, before)


@pytest.mark.parametrize("settings", [{"verify": "never"}, {}, {"update": "deferred"}, {"rollback": True}], ids=str)
def test_a_weight_in_a_backward_within_an_older_nodes_backward(settings: dict[str, Any]) -> None:
    """No graph shows that a gradient is still to come: without a comparison, the step may be torn by an update before that."""

    def hidden(model: Any, x: Tensor) -> Tensor:
        x = checkpoint(lambda h: model.layers[1].inner(h), model.stem(x), use_reentrant=True)
        for layer in model.layers:
            x = layer(x)
        return model.head(x)

    model = Program(hidden)
    before = copy_state(model)
    with relay_over(model, **settings) as relay:
        with pytest.raises(
            RuntimeError, match="gets a gradient from code that is not in its layer.*Pass it as an arg"
        ) as caught:
            relay.step(batch(0))
        if not isinstance(caught.value, TornStep):
            assert_state(model, before)
        assert not isinstance(caught.value, TornStep) or settings == {"verify": "never"}


def test_a_weight_that_was_updated_before_it_is_read_in_backward_is_named() -> None:
    """Autograd finds that it was changed in place; the error names it, and that the step is torn."""

    def read(model: Any, h: Tensor) -> Tensor:
        h = model.layers[1].inner(h)
        if h.requires_grad:  # run again in backward, before the update; its own backward follows the update
            h.register_hook(lambda grad: wait_until(lambda: relay.stack[1].version > 0))
        return h

    def hidden(model: Any, x: Tensor) -> Tensor:
        x = checkpoint(partial(read, model), model.stem(x), use_reentrant=True)
        for layer in model.layers:
            x = layer(x)
        return model.head(x)

    stray = r"parameter .*layers\.1\.inner\.\w+.* gets a gradient from code that is not in its layer"
    with relay_over(Program(hidden), verify="never", micro_batches=1) as relay:
        with pytest.raises(TornStep, match=stray) as caught:
            relay.step(batch(0))
        assert "layers.1" in str(caught.value)


def test_a_sparse_gradient_changes_nothing() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.stem, self.layers = nn.Embedding(5, 8, sparse=True), nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem((x[:, 0] > 0).long())
            for layer in self.layers:
                x = layer(x)
            return x

    model = Embedded()
    before = copy.deepcopy(model.state_dict())
    with relay_over(model, micro_batches=1) as relay:
        with pytest.raises(ValueError, match=r"sparse gradients.*sparse=False"):
            relay.step(batch(0))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
