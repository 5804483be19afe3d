"""Models with compiled layers and parts: equal to the same model in core, compiled alike, or refused before anything is trained.

Everything is compiled with `fullgraph=True` where the model allows it: whatever Dynamo saw of the engine would be an error.
The in-core side is compiled anew, so that it shares no code with the relay's.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import has_gradient
from patience import HANG_S, rarely
from torch import Tensor, nn
from torch.nn import functional as F

from l2l_core import Drop, Duplicate, Insert, Relay, RelayConfig, Swap
from l2l_core.model.reference import train_step

pytestmark = pytest.mark.filterwarnings(  # of PyTorch's own code
    "ignore:.*grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:.*torch.jit:DeprecationWarning",
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning",
)

WIDTH, TOKENS = 8, 11
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
BACKENDS = [rarely("eager"), "aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])]


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(x).sin(), 0.1, self.training) * x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.out = nn.LayerNorm(WIDTH), Gate(), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.out(F.gelu(self.gate(self.norm(x)))))


class Head(nn.Module):
    """Reads what was made before the layers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        return self.out(F.dropout(x.tanh(), 0.1, self.training) + early)


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, stem: Callable[[], nn.Module] = Gate) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.stem, self.head = nn.Embedding(TOKENS, WIDTH), stem(), Head()
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = early = self.stem(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(x, early)


def objective(model: nn.Module, part: Any) -> Tensor:
    return F.cross_entropy(model(part[0]).flatten(0, 1), part[0].flatten())


def batch(step: int = 0, rows: int = 6) -> tuple[Tensor]:
    return (torch.randint(TOKENS, (rows, 5), generator=torch.Generator().manual_seed(step)),)


def in_place(model: Any, compiler: Any) -> None:
    for layer in model.layers:
        layer.compile(**compiler)


def around(model: Any, compiler: Any) -> None:
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, **compiler)


def by_forward(model: Any, compiler: Any) -> None:
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, **compiler)


def in_layers(model: Any, compiler: Any) -> None:
    for layer in model.layers:
        layer.gate.compile(**compiler)
        layer.norm = torch.compile(layer.norm, **compiler)


def in_the_shell(model: Any, compiler: Any) -> None:
    model.stem = torch.compile(model.stem, **compiler)
    model.head.compile(**compiler)


def everywhere(model: Any, compiler: Any) -> None:
    in_layers(model, compiler)
    in_place(model, compiler)
    in_the_shell(model, compiler)


WAYS = [in_place, around, by_forward, in_layers, in_the_shell, everywhere]
adamw = partial(torch.optim.AdamW, lr=1e-2)


def made(way: Callable[..., None], backend: str = "aot_eager", make: Callable[[], Any] = Model, **options: Any) -> Any:
    model = make()
    way(model, {"backend": backend, "fullgraph": True} | options)
    return model


def state_of(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def in_core(
    model: nn.Module, config: RelayConfig, objective: Any, rows: int, steps: int, before: Callable[[int], object] = id
) -> tuple[list[float], list[Tensor]]:
    """Losses and state after plain training; whoever compiles next does it from the start. `before` is called with each step."""
    torch._dynamo.reset()
    optimizer, losses = adamw(model.parameters()), []
    for step in range(steps):
        before(step)
        parts = [(part,) for part in batch(step, rows)[0].split(-(-rows // config.micro_batches))]
        seeds = [config.micro_batch_seed(step, k) for k in range(len(parts))]
        divisors = [rows / len(part[0]) for part in parts]
        losses.append(float(sum(train_step(model, optimizer, parts, objective, divisors, seeds))))
    torch._dynamo.reset()
    return losses, state_of(model)


def assert_equal(
    make: Callable[[], Any], config: RelayConfig, objective: Any = objective, rows: int = 6, steps: int = 3
) -> None:
    """Train by relay and in core: the same bits where two runs in core have them, otherwise the same to rounding."""
    losses, state = in_core(make(), config, objective, rows, steps)
    again, state_again = in_core(make(), config, objective, rows, steps)
    exact = losses == again and all(torch.equal(a, b) for a, b in zip(state, state_again, strict=True))
    torch._dynamo.utils.counters.clear()
    model = make()
    with Relay(model, adamw, objective=objective, config=config) as relay:
        found = [relay.step(batch(step, rows)).loss for step in range(steps)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    torch.testing.assert_close(found, losses, **tolerance)
    torch.testing.assert_close(state_of(model), state, **tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_equal_to_the_same_model_in_core(way: Callable[..., None], backend: str) -> None:
    assert_equal(partial(made, way, backend), RelayConfig(seed=0, micro_batches=3, stash="host"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("micro_batches, stash, meter", [rarely(1, "device", "on_change"), (3, "device", "always")])
def test_with_other_settings(way: Callable[..., None], micro_batches: int, stash: Any, meter: Any) -> None:
    assert_equal(partial(made, way), RelayConfig(seed=0, micro_batches=micro_batches, stash=stash, meter=meter))


@pytest.mark.parametrize("backend", ["eager", rarely("aot_eager"), BACKENDS[-1]])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_tied_weights_uneven_micro_batches_and_any_shape(stash: Any, backend: str) -> None:
    """Backward of code for any shape is compiled when it first runs."""

    def tied() -> Any:
        model = Model()
        model.head.out.weight = model.embed.weight
        return model

    config = RelayConfig(seed=0, micro_batches=3, stash=stash)
    assert_equal(partial(made, everywhere, backend, tied, dynamic=True), config, rows=7)


def test_layers_are_compiled_once() -> None:
    """As many graphs as in core: weights that move cause no compiling."""
    losses = []
    with Relay(made(around), adamw, objective=objective, config=RelayConfig(seed=0, micro_batches=3)) as relay:
        torch._dynamo.utils.counters.clear()
        losses = [relay.step(batch(step)).loss for step in range(3)]
    assert len(losses) == 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class WithStatistics(Block):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x.flatten(0, 1)).view_as(x))


class WithPenalty(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.out.weight.square().mean() + x.square().mean()
        return super().forward(x)


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.saved_tensors[0].cos()


class WithFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Sine.apply(x))


class Noting(Gate):
    """Keeps a tensor and reads a number of its own."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mean = 2.0, None

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.mean()
        return super().forward(x) * self.scale


def penalised(model: Any, part: Any) -> Tensor:
    return objective(model, part) + 0.01 * sum(layer.penalty for layer in model.layers)


def noted(model: Any, part: Any) -> Tensor:
    return objective(model, part) + model.stem.mean


PARTS: dict[str, tuple[Callable[[], Any], Callable[..., None], Any]] = {
    "statistics in layers": (partial(Model, WithStatistics), in_place, objective),
    "statistics in the shell": (partial(Model, stem=WithStatistics), in_the_shell, objective),
    "side outputs": (partial(Model, WithPenalty), in_place, penalised),
    "custom functions": (partial(Model, WithFunction, WithFunction), everywhere, objective),
    "attributes of the shell": (partial(Model, stem=Noting), everywhere, noted),
}


@pytest.mark.parametrize("stash", [rarely("device"), "host"])
@pytest.mark.parametrize("case", PARTS)
def test_what_compiled_parts_do_besides(case: str, stash: Any) -> None:
    make, way, loss = PARTS[case]
    assert_equal(partial(made, way, "aot_eager", make), RelayConfig(seed=0, micro_batches=3, stash=stash), loss)


class Broken(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y * (1 + self.norm(x).mean())


@pytest.mark.parametrize("way", [in_place, around])
def test_graph_breaks(way: Callable[..., None]) -> None:
    make = partial(made, way, "aot_eager", partial(Model, Broken), fullgraph=False)
    assert_equal(make, RelayConfig(seed=0, micro_batches=3, stash="host"))


def test_a_compiled_function_in_a_layer() -> None:
    twice = torch.compile(lambda x: x * 2 + x.sin(), backend="aot_eager", fullgraph=True)

    class Calling(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(twice(x))

    assert_equal(partial(Model, Calling), RelayConfig(seed=0, micro_batches=3, stash="host"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference(backend: str) -> None:
    model, config = made(everywhere, backend), RelayConfig(seed=0, micro_batches=3, stash="host")
    with Relay(model, adamw, objective=objective, config=config) as relay:
        found, loss = relay.forward(batch()), relay.evaluate(batch())
    torch._dynamo.reset()
    model.eval()
    with torch.no_grad():
        expected = torch.cat([model(part) for part in batch()[0].split(2)])
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert loss == pytest.approx(float(objective(model, batch())), rel=1e-6)


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [in_place, rarely(around), rarely(by_forward), in_layers])
def test_edits_and_saves(way: Callable[..., None], tmp_path: Path) -> None:
    """Copies are compiled as the originals are; `verify` is the proof, on a copy of its own that shares no weights."""
    config = RelayConfig(seed=0, micro_batches=2)
    model = made(way)
    before = state_of(model)
    with Relay(model, adamw, objective=objective, config=config) as relay:
        relay.step(batch())
        assert relay.verify(batch(1)).equal
        names = {name for name, _ in model.named_parameters()}
        for edit in (Duplicate(1), Swap(0, 2), Drop(1), Insert(at=1, like=0, init="identity")):
            relay.apply(edit, force=True)
            assert relay.verify(batch(1)).equal, edit
            relay.step(batch(2))
        if way is in_place:
            assert all(layer._compiled_call_impl is not None for layer in model.layers)
        assert {name.replace(".3.", ".0.") for name, _ in model.named_parameters()} == names
        relay.save(tmp_path)
        losses = [relay.step(batch(3)).loss]
        with Relay.load(tmp_path, other := made(way), adamw, objective=objective) as loaded:
            assert [loaded.step(batch(3)).loss] == losses
            assert all(torch.equal(a, b) for a, b in zip(state_of(other), state_of(model), strict=True))
        while relay.can_undo:
            relay.undo()
        assert relay.verify(batch(1)).equal
        assert len(state_of(model)) == len(before)


def test_verify_compiles_its_side_alike() -> None:
    """Not the layer as it is written, and not the layer's own code, which would train its own weights."""
    model = made(by_forward)
    with Relay(model, adamw, objective=objective, config=RelayConfig(seed=0, micro_batches=2)) as relay:
        relay.step(batch())
        torch._dynamo.utils.counters.clear()
        torch._dynamo.reset()
        before = state_of(model)
        assert relay.verify(batch(1)).equal
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        assert all(torch.equal(a, b) for a, b in zip(state_of(model), before, strict=True))
        assert not any(map(has_gradient, model.parameters()))


# -- refusals ----------------------------------------------------------------------------------------------------------


def whole_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def whole_by_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


class Nest(nn.Module):
    """A module between the model and its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Model()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(tokens)


def nested() -> Any:
    model = Nest()
    model.body.compile(backend="eager")
    return model


WHOLE = {
    "around": lambda: torch.compile(Model(), backend="eager"),
    "in place": lambda: whole_in_place(Model()),
    "by forward": lambda: whole_by_forward(Model()),
    "within": nested,
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_model_compiled_as_a_whole_is_refused_when_the_relay_is_made(case: str) -> None:
    with pytest.raises(ValueError, match=r"is compiled as a whole.*layer in model\.layers: layer\.compile\(\)"):
        Relay(WHOLE[case](), adamw, objective=objective)


def test_a_layer_inside_of_its_compiled_wrapper_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'layers\.0' is compiled as a whole"):
        Relay(made(around), adamw, objective=objective, layers=["layers.0._orig_mod", "layers.1"])


def test_compiling_the_model_later_is_refused() -> None:
    model = Model()
    with Relay(model, adamw, objective=objective, config=RelayConfig(seed=0, micro_batches=2)) as relay:
        relay.step(batch())
        before = state_of(model)
        model.compile(backend="eager")
        with pytest.raises(ValueError, match="is compiled as a whole"):
            relay.step(batch())
        assert all(torch.equal(a, b) for a, b in zip(state_of(model), before, strict=True))


def test_layers_that_are_compiled_later_relay_too() -> None:
    model, twin, backend = Model(), Model(), {"backend": "aot_eager", "fullgraph": True}
    config = RelayConfig(seed=0, micro_batches=2)
    losses, _ = in_core(twin, config, objective, 6, 3, lambda step: in_place(twin, backend) if step == 1 else None)
    with Relay(model, adamw, objective=objective, config=config) as relay:
        found = [relay.step(batch(0)).loss]
        in_place(model, backend)
        found += [relay.step(batch(step)).loss for step in (1, 2)]
    assert found == losses


@pytest.mark.parametrize("stash", [rarely("device"), "host"])
@pytest.mark.parametrize("backend", ["eager", rarely("aot_eager")])
def test_a_compiled_function_outside_of_layers_is_refused(backend: str, stash: Any) -> None:
    twice = torch.compile(lambda x: x * 2, backend=backend)
    model = Model()
    config = RelayConfig(seed=0, micro_batches=2, stash=stash)
    with Relay(model, adamw, objective=lambda *given: twice(objective(*given)), config=config) as relay:
        before = state_of(model)
        with pytest.raises(RuntimeError, match="calls a compiled function.*outside of its layers.*forward of a module"):
            relay.step(batch())
        assert all(torch.equal(a, b) for a, b in zip(state_of(model), before, strict=True))


@pytest.mark.parametrize("inside", [True, False])
def test_hooks_in_what_is_compiled_of_a_layer(inside: bool) -> None:
    """A recompute cannot keep them from firing; on the wrapper they are outside of the graph and fire once."""
    model, seen = made(around), []
    layer = model.layers[0]
    (layer.gate if inside else layer).register_forward_hook(lambda *_: seen.append(1))
    options: dict[str, Any] = {
        "loss_over": "micro-batch",
        "config": RelayConfig(seed=0, micro_batches=2, verify="never"),
    }  # no other forwards
    with Relay(model, adamw, objective=objective, **options) as relay:
        if inside:
            with pytest.raises(ValueError, match=r"a Gate in the compiled part of layer layers\.0 has a forward hook"):
                relay.step(batch())
            return
        relay.step(batch())
        assert len(seen) == 2


def test_two_threads_with_compiled_parts_do_not_train_at_once() -> None:
    """What is put away around a compiled part is the process's."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(model: nn.Module, part: Any) -> Tensor:
        inside.set()
        assert go_on.wait(HANG_S)
        return objective(model, part)

    config = RelayConfig(verify="never")  # training in core waits, too
    with (
        Relay(Model(), adamw, objective=slow, config=config) as plain,
        Relay(made(in_place), adamw, objective=objective) as compiled,
    ):
        thread = threading.Thread(target=plain.step, args=(batch(),))
        thread.start()
        try:
            assert inside.wait(HANG_S)
            with pytest.raises(RuntimeError, match="another relay is in the middle of a step in another thread"):
                compiled.step(batch())
        finally:
            go_on.set()
            thread.join(HANG_S)
        compiled.step(batch())
