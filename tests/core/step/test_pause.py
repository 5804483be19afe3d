"""Forwards that pause: rules of the design's paused-forwards.md that the zoo alone does not show. R1 is rule 1."""

import contextvars
import copy
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_equal, assert_state, both, copy_state, micro_batches_of, run_both
from patience import HANG_S, wait_until
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from zoo import BY_NAME, STEPS, WIDTH, Chain, Kind, Mlp, ResidualMlp, ResidualOutside, cross_entropy, sequences

from l2l_core import EmulatedDevice, Relay, RelayConfig, TornStep

stashes = pytest.mark.parametrize("stash", ["device", "host"])


def kind_of(
    build: Callable[[], nn.Module],
    make_batch: Callable[..., Any] = sequences,
    loss: Callable[[Any, Any], Tensor] = cross_entropy,
) -> Kind:
    """A kind from a function that builds its model; weights are the same every time."""

    def make_model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build()

    return Kind("by hand", make_model, make_batch, loss)


def chain_of(layer: Callable[[], nn.Module], shell: type[Chain] = Chain, count: int = 3) -> Kind:
    return kind_of(lambda: shell([layer() for _ in range(count)]))


def assert_trains(kind: Kind, stash: str = "host", micro_batches: int = 3, steps: int = 3) -> None:
    """Equal bits in the metered first step, and in those after it."""
    assert_equal(run_both(kind, steps, RelayConfig(micro_batches=micro_batches, stash=stash)))


def assert_refused_or_trains(kind: Kind, message: str, stash: str, micro_batches: int) -> None:
    """Never a silent difference: the same bits, or an error that says what is meant."""
    try:
        assert_trains(kind, stash, micro_batches)
    except RuntimeError as error:
        assert re.search(message, str(error)), str(error)


def with_charge(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    """Cross entropy plus what the layers charge."""
    return F.cross_entropy(outputs[0], batch[-1]) + 0.1 * outputs[1]


# --- R1, R2: modules stay where they are, layers run inside their micro-batch ----------------------------------------

collected: contextvars.ContextVar[list[Tensor]] = contextvars.ContextVar("collected")
scale: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


class Recording(Chain):
    """Installs hooks on its layers' submodules at the first forward, and charges for what they record."""

    installed, recorded = False, "drop"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.installed:
            for layer in self.layers:
                assert isinstance(layer, ResidualMlp)  # the ModuleList holds the layers, not stand-ins
                part = layer.get_submodule(self.recorded)
                part.register_forward_hook(lambda module, args, output: collected.get().append(output))
            self.installed = True
        token = collected.set([])
        outputs = super().forward(x), torch.stack([y.square().mean() for y in collected.get()]).sum()
        collected.reset(token)
        return outputs


@pytest.mark.parametrize("recorded", ["drop", "norm"])  # autograd saves what the norm gives for fc1
@pytest.mark.parametrize("micro_batches", [1, 3])
@stashes
def test_hooks_that_the_model_installs(stash: str, micro_batches: int, recorded: str) -> None:
    """R1, R2, R12: a recorder hook sees its own micro-batch, and gradients flow back through what it has kept."""
    Records = type("Records", (Recording,), {"recorded": recorded})  # noqa: N806
    kind = kind_of(lambda: Records([ResidualMlp() for _ in range(3)]), loss=with_charge)
    assert_trains(kind, stash, micro_batches)


class ScaledByContext(ResidualMlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * scale.get())


class SetsContext(Chain):
    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            token = scale.set(1.0 + float(h.detach().abs().mean()))  # another value for every micro-batch and layer
            h = layer(h)
            scale.reset(token)
        return h


class SavesNorm(ResidualMlp):
    """Autograd saves the recorded tensor itself, which is then cut in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc2(self.fc1(F.gelu(self.norm(x)))))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_recorded_tensor_that_autograd_has_saved(micro_batches: int) -> None:
    """R12: the last layer, which is not run twice, among them."""
    Records = type("Records", (Recording,), {"recorded": "norm"})  # noqa: N806
    assert_trains(kind_of(lambda: Records([SavesNorm() for _ in range(3)]), loss=with_charge), "device", micro_batches)


@stashes
def test_context_variables(stash: str) -> None:
    """R2: each micro-batch has its own, in the recompute too."""
    assert_trains(chain_of(ScaledByContext, SetsContext), stash)
    assert scale.get() == 1.0


# --- R3: state that PyTorch keeps per thread -------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Doubling(TorchFunctionMode):
    """Doubles what gelu gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is F.gelu else out


class DoublingBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.gelu.default else out


def rounded(t: Tensor) -> Tensor:
    return t.bfloat16().float() if t.dtype == torch.float32 else t


BLOCKS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(rounded, lambda t: t),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "function_mode": Doubling,
    "dispatch_mode": DoublingBelow,
}


@pytest.mark.parametrize("name", BLOCKS)
@stashes
def test_block_around_the_layers(name: str, stash: str) -> None:
    """R3: layers, their recompute and the shell between them stand inside the block; what is outside does not."""
    outside: list[Any] = []

    class Within(Chain):
        def walk(self, h: Tensor) -> Tensor:
            outside.append(thread_state())
            with BLOCKS[name]():
                for layer in self.layers:
                    h = layer(h) * F.gelu(h)
            outside.append(thread_state())
            return h.float()

    before = thread_state()
    plain, changed = chain_of(Attention, ResidualGelu), chain_of(Attention, Within)
    assert_trains(changed, stash)
    assert thread_state() == before and all(state == before for state in outside)
    if name not in ("sdpa_kernel", "save_on_cpu"):  # the block does something
        first = [run_both(kind, 2, RelayConfig())[1].result.loss for kind in (plain, changed)]
        assert first[0] != first[1]


class ResidualGelu(Chain):
    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h) * F.gelu(h)
        return h


def thread_state() -> tuple[Any, ...]:
    c = torch._C
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
        sum(isinstance(mode, Doubling) for mode in _get_current_function_mode_stack()),
        sum(isinstance(mode, DoublingBelow) for mode in _get_current_dispatch_mode_stack()),
        c._autograd._top_saved_tensors_default_hooks(True),
    )


def test_caller_in_a_block() -> None:
    """R3: a block around the step itself holds for every micro-batch, and still after the step."""
    kind = chain_of(ResidualMlp)
    with both(kind, RelayConfig(micro_batches=3, stash="host")) as pair, torch.autocast("cpu", torch.bfloat16):
        assert_equal([pair.step(kind.make_batch(7, step)) for step in range(2)])
        assert torch.is_autocast_enabled("cpu")


def test_steps_without_grad_around() -> None:
    """R3: a first layer under no_grad gets no backward, the others train."""

    class NoGradFirst(Chain):
        def walk(self, h: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.layers[0](h)
            return self.layers[2](self.layers[1](h))

    assert_trains(chain_of(ResidualMlp, NoGradFirst))


class Swallows(Chain):
    """Catches everything, its own end included, and goes on."""

    def walk(self, h: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            try:
                h = layer(h)
            except BaseException:  # noqa: B036
                h = h * 1
            if index == 0 and self.armed:
                self.armed = False
                raise ValueError("boom")
        return h

    armed = True


def test_forward_that_survives_its_end_is_an_error() -> None:
    """R3: micro-batch 0 fails, the others are thrown out of layer 0 and must not call layer 1."""
    kind = chain_of(ResidualMlp, Swallows)
    model = kind.make_model()
    with Relay(model, loss=kind.loss, config=RelayConfig(micro_batches=3)) as relay:
        before = copy_state(model)
        with pytest.raises(RuntimeError, match="micro-batch 1 swallowed its own end"):
            relay.step(kind.make_batch(6, 0))
        assert_state(model, before)
        assert_unshadowed(model)


# --- R4: the order of layers -----------------------------------------------------------------------------------------


class Reordering(Chain):
    """Another order per step and, with `alone`, per micro-batch: layers may come twice or not at all."""

    order = [0, 1, 2]
    alone = False

    def walk(self, h: Tensor) -> Tensor:
        for index in torch.randint(3, (4,)).tolist() if self.alone else self.order:
            h = self.layers[index](h)
        return h


@stashes
def test_order_that_changes(stash: str) -> None:
    """R4: predicted from the last step, corrected when a micro-batch asks for another layer."""
    kind = chain_of(ResidualMlp, Reordering)
    with both(kind, RelayConfig(micro_batches=3, stash=stash)) as pair:
        keys = {f"layers.{i}": layer.key for i, layer in enumerate(pair.relay.stack)}
        for step, order in enumerate([[2, 0, 1], [0, 1, 2], [1], [1, 2, 1, 0], [0, 1, 2]]):
            pair.relay.model.order = pair.in_core.model.order = order
            compared = pair.step(kind.make_batch(7, step))
            assert_equal([compared])
            forwards = [e.layer for e in compared.result.trace.events if e.kind == "forward" and e.k == 0]
            assert forwards[: len(order)] == [keys[f"layers.{i}"] for i in order]


@stashes
def test_every_micro_batch_its_own_order(stash: str) -> None:
    class Alone(Reordering):
        alone = True

    assert_trains(chain_of(ResidualMlp, Alone), stash, steps=6)


# --- R5: exceptions --------------------------------------------------------------------------------------------------


class Fuse:
    """Burns through at the `left`-th call from now, when what it waits for is so."""

    left, error = -1, ValueError("boom")

    def __init__(self) -> None:
        self.until: Callable[[], Any] = lambda: True

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            wait_until(self.until)
            raise self.error


class FusedLayer(ResidualMlp):
    def __init__(self) -> None:
        super().__init__()
        self.fuse = Fuse()

    def forward(self, x: Tensor) -> Tensor:
        self.fuse()
        return super().forward(x)


class FusedShell(Chain):
    """Burns between the layers, and counts forwards in a buffer."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.fuse = Fuse()
        self.register_buffer("count", torch.zeros(()))

    def walk(self, h: Tensor) -> Tensor:
        self.count += 1
        for layer in self.layers:
            self.fuse()
            h = layer(h)
        return h


def assert_unshadowed(model: nn.Module) -> None:
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("call", [1, 2, 3])  # in forward, of each micro-batch
def test_exception_in_a_layer(call: int, error: BaseException) -> None:
    """R5: nothing has changed, and the same relay trains on."""
    kind = chain_of(FusedLayer, FusedShell)
    with both(kind, RelayConfig(micro_batches=3, stash="host")) as pair:
        assert_equal([pair.step(kind.make_batch(7, 0))])
        assert_step_fails(pair.relay, kind, pair.relay.model.layers[1].fuse, call, error)
        assert_equal([pair.step(kind.make_batch(7, 1))])


@pytest.mark.parametrize("call", [1, 2, 5, 9])
def test_exception_in_the_shell(call: int) -> None:
    """R5: before the first layer of the first micro-batch, of the second, and between layers."""
    kind = chain_of(FusedLayer, FusedShell)
    with both(kind, RelayConfig(micro_batches=3, stash="host")) as pair:
        assert_equal([pair.step(kind.make_batch(7, 0))])
        assert_step_fails(pair.relay, kind, pair.relay.model.fuse, call, ValueError("boom"))
        assert_equal([pair.step(kind.make_batch(7, 1))])


def assert_step_fails(relay: Relay, kind: Kind, fuse: Fuse, call: int, error: BaseException) -> None:
    """Let `fuse` burn at its `call`-th call from now: an error that leaves no trace."""
    before, random_state = copy_state(relay.model), torch.get_rng_state()
    versions = [unit.version for unit in relay.stack]
    fuse.left, fuse.error = call, error
    with pytest.raises(type(error)) as caught:
        relay.step(kind.make_batch(7, 1))
    assert not isinstance(caught.value, TornStep)
    assert_state(relay.model, before)
    assert_unshadowed(relay.model)
    assert [unit.version for unit in relay.stack] == versions
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in relay.model.parameters())
    assert relay.device.ledger.total == 0, relay.device.ledger.by_category()


def test_exception_in_the_loss() -> None:
    """R5: at micro-batch 0, when others still stand in their last layer, and at the last one with a deferred update."""
    burns_at, seen = [-1], [0]

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        seen[0] += 1
        if seen[0] == burns_at[0]:
            raise ValueError("boom")
        return cross_entropy(outputs, batch)

    kind = chain_of(ResidualMlp)
    with both(kind, RelayConfig(micro_batches=3, update="deferred"), loss=loss) as pair:
        pair.in_core.objective = lambda model, part: cross_entropy(model(part[0]), part)
        for step, call in enumerate([1, 3]):
            before, burns_at[0] = copy_state(pair.relay.model), seen[0] + call
            with pytest.raises(ValueError, match="boom"):
                pair.relay.step(kind.make_batch(7, step))
            assert_state(pair.relay.model, before)
            assert_unshadowed(pair.relay.model)
            assert_equal([pair.step(kind.make_batch(7, step))])


def test_exception_in_the_recompute() -> None:
    """R5 and invariant 6: the step is torn, and says so, or it is not."""
    kind = chain_of(FusedLayer, FusedShell)
    for config, torn in [
        (RelayConfig(micro_batches=2), True),
        (RelayConfig(micro_batches=2, update="deferred"), False),
        (RelayConfig(micro_batches=2, rollback=True), False),
    ]:
        with both(kind, config) as pair:
            assert_equal([pair.step(kind.make_batch(6, 0))])
            before = copy_state(pair.relay.model)
            pair.relay.model.layers[0].fuse.left = 4
            if torn:  # only after an update, however late the EPS is
                pair.relay.model.layers[0].fuse.until = lambda store=pair.relay.store: store.updated
            with pytest.raises(TornStep if torn else ValueError) as caught:
                pair.relay.step(kind.make_batch(6, 1))
            if torn:
                assert caught.value.updated and pair.relay.stack[0].key not in caught.value.updated
            else:
                assert_state(pair.relay.model, before)
                assert_equal([pair.step(kind.make_batch(6, 1))])
            assert_unshadowed(pair.relay.model)


def test_forward_of_an_instance_comes_back() -> None:
    """R1, R5: layers are shadowed during a step only; a forward that somebody else has set is called and restored."""
    kind = chain_of(ResidualMlp)
    calls: list[int] = []

    def scaled(module: nn.Module) -> Callable[[Tensor], Tensor]:
        real = module.forward
        return lambda x: calls.append(1) or real(x) * 1.5

    with both(kind, RelayConfig(micro_batches=3)) as pair:
        for model in (pair.relay.model, pair.in_core.model):
            model.layers[1].forward = scaled(model.layers[1])
        own = pair.relay.model.layers[1].forward
        assert_equal([pair.step(kind.make_batch(7, step)) for step in range(2)])
        assert pair.relay.model.layers[1].forward is own and calls
        del pair.relay.model.layers[1].forward
        assert_unshadowed(pair.relay.model)


# --- R6, R7: what is cut ---------------------------------------------------------------------------------------------


class Views(Chain):
    """Slices, transposes and halves of one tensor enter layers; the shell reads the whole before and after."""

    def walk(self, h: Tensor) -> Tensor:
        a = self.layers[0](h[:, 1:])
        b = self.layers[1](h.transpose(1, 2).contiguous().transpose(1, 2))
        left, right = h.sigmoid().split(STEPS // 2, dim=1)
        return torch.cat([a, self.layers[2](left) + right, b * h], dim=1)


@stashes
def test_views_enter_layers(stash: str) -> None:
    """R6: a view cannot be detached in place."""
    assert_trains(chain_of(ResidualMlp, Views), stash)


class ReadsBefore(Chain):
    """The shell reads a tensor before it enters a layer, and between layers."""

    def walk(self, h: Tensor) -> Tensor:
        gate = h.sigmoid()
        for layer in self.layers:
            doubled, total = h * 2, h.sum(-1, keepdim=True)
            h = layer(h) * gate + doubled + total.tanh() + h
        return h


class Squares(Chain):
    """Autograd saves the very tensors that enter layers: views, their bases, and neither."""

    def walk(self, h: Tensor) -> Tensor:
        view = h[:, :]
        square = view * view
        h = self.layers[0](view) + square
        half = h[:, :4]
        h = self.layers[1](h) + half.mean(1, keepdim=True) * half.sum(1, keepdim=True)
        return self.layers[2](h) + F.gelu(h) * h


class ReadsLate(Chain):
    """What early code has made enters layers far later, some of it for the second time."""

    def walk(self, h: Tensor) -> Tensor:
        a, b = h.sin(), h.cos()
        c = a * b
        h = self.layers[0](a)
        d = h * c
        return self.layers[2](c) + self.layers[1](b + d) * a + d * self.layers[0](c)


@pytest.mark.parametrize("shell", [ReadsBefore, Squares, ReadsLate])
@pytest.mark.parametrize("layer", [Mlp, ResidualMlp])
@stashes
def test_sums_in_the_order_of_plain_training(stash: str, layer: type, shell: type[Chain]) -> None:
    """R6, R8: shell code is back-propagated in the reverse order of its making, whatever lies between."""
    assert_trains(chain_of(layer, shell), stash)


class Passing(Mlp):
    """Returns its first input as it is, its output twice, a slice of its input, and things that are no tensors."""

    def forward(self, x: Tensor, skip: Tensor | None = None) -> dict[str, Any]:
        y = super().forward(x)
        return {"x": x, "y": (y, [y]), "skip": skip, "slice": x[:, :1], "class": y.argmax(-1), "none": None, "n": 3}


class AssertsIdentity(Chain):
    def walk(self, h: Tensor) -> Tensor:
        first = h
        for layer in self.layers:
            out = layer(h, skip=first)
            assert out["x"] is h and out["skip"] is first and out["y"][0] is out["y"][1][0]
            assert out["none"] is None and out["n"] == 3
            h = h + out["y"][0] * out["n"] + out["slice"] + F.one_hot(out["class"], WIDTH) + 0.1 * out["skip"]
        return h


@stashes
def test_tensors_keep_their_identity(stash: str) -> None:
    """R7"""
    assert_trains(chain_of(Passing, AssertsIdentity), stash)


class WeightOut(ResidualMlp):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(x), self.norm.weight, self.fc1.bias.detach()[:WIDTH]


class UsesWeight(Chain):
    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h, weight, bias = layer(h)
            h = h * weight + bias
        return h


@stashes
def test_layer_gives_out_its_weights(stash: str) -> None:
    """R6: the slot will hold another layer's soon."""
    assert_trains(chain_of(WeightOut, UsesWeight), stash)


class Gate(ResidualMlp):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * gate


class ShellParameterAsArgument(Chain):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h, self.gate) + layer(h, h)
        return h


@stashes
def test_arguments_met_before(stash: str) -> None:
    """R6, R8, R14: a parameter of the shell, and one tensor twice, as arguments; each layer is visited twice."""
    assert_trains(chain_of(Gate, ShellParameterAsArgument), stash)


class TensorHooks(Chain):
    """The user's own hooks on tensors that enter and leave layers; clamping shows how often and on what they run."""

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = h * 1.5
            h.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
            y = layer(h)
            y.register_hook(lambda grad: grad * 2)
            h = h + y
        return h


@stashes
def test_tensor_hooks_of_the_user(stash: str) -> None:
    """R6, R18: on the whole gradient, once."""
    assert_trains(chain_of(Mlp, TensorHooks), stash)


def test_tensor_hook_on_a_skip_connection() -> None:
    """R6, R18: a layer's output that is read by two layers further on."""

    class Skips(Chain):
        def walk(self, h: Tensor) -> Tensor:
            a = self.layers[0](h)
            a.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
            b = self.layers[1](a)
            return self.layers[2](b * 1.5 + a) + a

    assert_trains(chain_of(ResidualMlp, Skips))


def test_gradient_taken_inside_a_layer() -> None:
    """R6: an energy's gradient by autograd.grad, as part of the layer's forward."""

    class Energy(ResidualMlp):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]

    assert_trains(chain_of(Energy))


# --- R9, R11: bits that a relay changes easily -----------------------------------------------------------------------


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(ChannelsLast() for _ in range(3))
        self.head = nn.Linear(8, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.to(memory_format=torch.channels_last))
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean((2, 3)))


@stashes
def test_gradients_keep_their_strides(stash: str) -> None:
    """R9: boundary gradients come by a hook, not from `.grad`; weights stay channels-last."""
    kind = kind_of(Images, BY_NAME["inplace"].make_batch)
    assert_trains(kind, stash)
    model = kind.make_model()
    with Relay(model, loss=kind.loss) as relay:
        relay.step(kind.make_batch(4, 0))
        assert model.layers[0].conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_first_forward_runs_in_grad_mode() -> None:
    """R11: an LSTM takes another path, with other bits, under no_grad."""
    modes: list[bool] = []

    class Asks(ResidualMlp):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(torch.is_grad_enabled())
            return super().forward(x)

    kind = chain_of(Asks)
    with both(kind, RelayConfig(micro_batches=2)) as pair:
        pair.step(kind.make_batch(4, 0))
        assert modes and all(modes)
        modes.clear()
        pair.relay.evaluate(kind.make_batch(4, 0))
        assert modes and not any(modes)


# --- R12: side outputs -----------------------------------------------------------------------------------------------


class KeepsCharge(ResidualMlp):
    """Leaves an auxiliary loss, that depends on its input and weights, on a submodule and on itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.fc1.charge = y.square().mean() + self.fc1.weight.square().mean()
        self.charge = y.abs().mean()
        return y


class AddsCharges(Chain):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, torch.stack([layer.fc1.charge + layer.charge for layer in self.layers]).sum()


class AddsChargesAtOnce(AddsCharges):
    """Reads each charge right after its layer."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, charges = self.embed(x), []
        for layer in self.layers:
            h = layer(h)
            charges.append(layer.fc1.charge + layer.charge)
        return self.head(h.mean(1)), torch.stack(charges).sum()


@pytest.mark.parametrize("shell", [AddsCharges, AddsChargesAtOnce])
@pytest.mark.parametrize("micro_batches", [1, 3])
@stashes
def test_auxiliary_loss_on_an_attribute(stash: str, micro_batches: int, shell: type[Chain]) -> None:
    """R12: the outer model adds it to the loss, after each layer or at the end; each micro-batch meets its own."""
    kind = kind_of(lambda: shell([KeepsCharge() for _ in range(3)]), loss=with_charge)
    assert_trains(kind, stash, micro_batches)


def test_tensor_from_inside_a_layer_is_refused() -> None:
    """R12: what hides in a list outside of the model is not found again in the recompute."""
    hidden: list[Tensor] = []

    class Hides(ResidualMlp):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            hidden.append((y * self.fc1.weight.mean()).mean())
            return y

    class Finds(Chain):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden.clear()
            return super().forward(x), torch.stack(hidden[-3:]).sum()

    kind = kind_of(lambda: Finds([Hides() for _ in range(3)]), loss=with_charge)
    with both(kind, RelayConfig()) as pair:
        before = copy_state(pair.relay.model)
        with pytest.raises(RuntimeError, match="inside layer layers.*Return it"):
            pair.relay.step(kind.make_batch(4, 0))
        assert_state(pair.relay.model, before)


def test_side_output_that_is_a_view() -> None:
    """R12: never a silent difference."""

    class KeepsView(ResidualMlp):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.charge = (y * 2)[:, 0].T
            return y

    class AddsViews(Chain):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h, charge = self.embed(x), torch.zeros(())
            for layer in self.layers:
                h = layer(h)
                charge = charge + layer.charge.square().mean()
            return self.head(h.mean(1)), charge

    kind = kind_of(lambda: AddsViews([KeepsView() for _ in range(3)]), loss=with_charge)
    assert_refused_or_trains(kind, "view", "host", micro_batches=1)


# --- R15: what is refused --------------------------------------------------------------------------------------------


class Boxed:
    """No pytree."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Deep:
    def __init__(self, tensor: Tensor) -> None:
        self.content = {"tensors": [tensor]}

    @property
    def tensor(self) -> Tensor:
        return self.content["tensors"][0]


class TakesBox(ResidualMlp):
    def forward(self, box: Any) -> Tensor:
        return super().forward(box.tensor)


class GivesBox(ResidualMlp):
    def forward(self, x: Tensor) -> Any:
        return self.box(super().forward(x))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("box", [Boxed, Slotted, Deep])
@stashes
def test_hidden_tensors_in_arguments_are_refused(box: type, stash: str, micro_batches: int) -> None:
    """R15: a clear error that names the layer."""

    class Boxes(Chain):
        def walk(self, h: Tensor) -> Tensor:
            for layer in self.layers:
                h = layer(box(h * 2))
            return h

    assert_refused(chain_of(TakesBox, Boxes), "layers.0|L000", RelayConfig(micro_batches=micro_batches, stash=stash))


@pytest.mark.parametrize("box", [Boxed, Slotted, Deep])
def test_hidden_tensors_in_outputs_are_refused(box: type) -> None:
    """R15"""

    class Unboxes(Chain):
        def walk(self, h: Tensor) -> Tensor:
            for layer in self.layers:
                h = layer(h).tensor
            return h

    class Gives(GivesBox):
        pass

    Gives.box = box
    assert_refused(chain_of(Gives, Unboxes), "layers.[02]", RelayConfig(micro_batches=2))


def assert_refused(kind: Kind, message: str, config: RelayConfig, steps: int = 2) -> None:
    """A step raises an error that says what is meant, and the model is as before."""
    model = kind.make_model()
    with Relay(model, loss=kind.loss, config=config) as relay:
        before = copy_state(model)
        with pytest.raises((TypeError, RuntimeError, ValueError), match=message) as caught:
            for seed in range(steps):
                relay.step(kind.make_batch(4, seed))
        assert not isinstance(caught.value, TornStep), caught.value
        assert_state(model, before)
        assert_unshadowed(model)


# --- R15, R19: tensors that reach a layer by other ways --------------------------------------------------------------


class ReadsAttribute(ResidualMlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + self.bias))


class SetsAttribute(Chain):
    """A tensor of this micro-batch for all layers, without gradient."""

    def walk(self, h: Tensor) -> Tensor:
        bias = h.detach().mean(-1, keepdim=True)
        for layer in self.layers:
            layer.bias = bias
        return super().walk(h)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_attribute_per_forward(micro_batches: int) -> None:
    """R19, R15: not another micro-batch's value, in forward and in the recompute."""
    assert_refused_or_trains(chain_of(ReadsAttribute, SetsAttribute), "argument", "device", micro_batches)


class SetsNumber(Chain):
    """A number for all layers, another one for the smaller last micro-batch."""

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            layer.bias = 0.1 * len(h)
        return super().walk(h) * len(h)


class CountsUp(ResidualMlp):
    """A plain counter that matters: the recompute must neither see a later value nor count again."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * (1 + 0.01 * self.count)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_counter_in_a_layer(micro_batches: int) -> None:
    """R16 for what is no buffer."""
    assert_refused_or_trains(chain_of(CountsUp), "counter", "host", micro_batches)


def test_hooks_installed_per_forward_are_refused() -> None:
    """R1: the hooks of all micro-batches are there at once, so each would record the others' tensors too."""

    class RecordsOnce(Chain):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            seen: list[Tensor] = []
            handles = [la.register_forward_hook(lambda m, args, y: seen.append(y)) for la in self.layers]
            out = super().forward(x)
            for handle in handles:
                handle.remove()
            return out, torch.stack([y.square().mean() for y in seen]).sum()

    kind = kind_of(lambda: RecordsOnce([ResidualMlp() for _ in range(3)]), loss=with_charge)
    assert_trains(kind, micro_batches=1)
    assert_refused(kind, "another micro-batch", RelayConfig(micro_batches=2))


def test_number_per_forward() -> None:
    assert_refused_or_trains(chain_of(ReadsAttribute, SetsNumber), "attribute", "device", 3)


class SharesBetweenLayers(ResidualMlp):
    """The first layer computes something that the later ones read from a shared place."""

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.shared["bias"] = x.detach().mean(-1, keepdim=True)
        return super().forward(x * (1 + self.shared["bias"]))


def sharing_chain() -> nn.Module:
    model, shared = Chain([SharesBetweenLayers() for _ in range(3)]), {}
    for index, layer in enumerate(model.layers):
        layer.first, layer.shared = index == 0, shared
    return model


def test_tensor_shared_between_layers() -> None:
    """R19, R15: layers must not find another micro-batch's tensor."""
    assert_refused_or_trains(kind_of(sharing_chain), "argument", "device", micro_batches=3)


class ScalesItself(Chain):
    """The shell leaves something on itself, goes through the layers and reads it again."""

    def walk(self, h: Tensor) -> Tensor:
        self.scale, self.rows = h.detach().abs().mean(), len(h)
        return super().walk(h) * self.scale / self.rows


class CountsForwards(Chain):
    """The same with a buffer that it changes in place."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.register_buffer("count", torch.zeros(()))

    def walk(self, h: Tensor) -> Tensor:
        self.count += 1
        return super().walk(h) * self.count


HANDED_OVER = {
    "attribute": chain_of(ReadsAttribute, SetsAttribute),
    "number": chain_of(ReadsAttribute, SetsNumber),
    "shared": kind_of(sharing_chain),
    "shell": chain_of(ResidualMlp, ScalesItself),
    "buffer": chain_of(ResidualMlp, CountsForwards),
}


@pytest.mark.parametrize("name", HANDED_OVER)
def test_inference_sees_its_own_micro_batch(name: str) -> None:
    """R19: without a step before it, so without anything learnt from one."""
    kind = HANDED_OVER[name]
    model, batch = kind.make_model().eval(), kind.make_batch(7, 0)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = torch.cat([twin(part[0]) for part in micro_batches_of(batch, 3)])
    with Relay(model, loss=kind.loss, config=RelayConfig(micro_batches=3)) as relay:
        try:
            assert torch.equal(relay.forward(batch), expected)
        except RuntimeError as error:
            assert "micro-batch" in str(error)


@pytest.mark.parametrize("name", ["shell", "buffer"])
def test_shell_reads_what_it_has_left(name: str) -> None:
    """R19: after a pause, in which other micro-batches have run the same code."""
    assert_refused_or_trains(HANDED_OVER[name], "micro-batch", "device", micro_batches=3)


PARKED = """
import torch
from test_pause import HANDED_OVER, RelayConfig, Relay, run_both
kind = HANDED_OVER["attribute"]
config = RelayConfig(micro_batches=1, stash="host")
with Relay(kind.make_model(), loss=kind.loss, config=config) as relay:
    relay.evaluate(kind.make_batch(4, 0))
assert all(step.equal for step in run_both(kind, 3, config))
"""


def test_parked_attribute_is_not_read() -> None:
    """R19: an unguarded read of an emptied storage would end the process, so it has one of its own."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
    done = subprocess.run(
        [sys.executable, "-c", PARKED], capture_output=True, text=True, env=environment, timeout=HANG_S
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr}"


class CachesTable(Chain):
    """A table that the shell makes once, at the first forward, and keeps."""

    def walk(self, h: Tensor) -> Tensor:
        if not hasattr(self.layers[0], "bias"):
            table = torch.arange(h.shape[1]).view(-1, 1) / 10
            for layer in self.layers:
                layer.bias = table
        return super().walk(h)


@pytest.mark.parametrize("micro_batches", [1, 3])
@stashes
def test_cached_constant(stash: str, micro_batches: int) -> None:
    """R19: it stays on the device."""
    assert_trains(chain_of(ReadsAttribute, CachesTable), stash, micro_batches)


class ReadsPython(Chain):
    """Numbers of a tensor, taken after a pause by ways that no dispatcher sees."""

    def walk(self, h: Tensor) -> Tensor:
        lengths, weights = torch.arange(h.shape[1]) % 3, torch.rand(4)
        for layer in self.layers:
            total = sum(lengths.tolist()) + sum(float(w) for w in weights) + float(weights.numpy().sum())
            h = layer(h) * (1 + 0.01 * total)
        return h


@stashes
def test_python_reads_a_parked_tensor(stash: str) -> None:
    """R19: guard everything or keep it."""
    assert_trains(chain_of(ResidualMlp, ReadsPython), stash)


# --- R16, R17: buffers and random numbers ----------------------------------------------------------------------------


class Averages(ResidualMlp):
    """Buffers that every forward moves on: in place, and by assignment."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.assigns = assigns
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x + self.average)
        new = 0.9 * self.average + 0.1 * y.detach().mean((0, 1))
        if self.assigns:
            self.average = new
        else:
            self.average.copy_(new)
        return y


@pytest.mark.parametrize("assigns", [False, True])
@stashes
def test_buffers(stash: str, assigns: bool) -> None:
    """R16: recompute from what the forward saw; the newest values afterwards."""
    assert_trains(chain_of(lambda: Averages(assigns)), stash)


def test_buffers_after_an_error() -> None:
    """R16 and invariant 6: statistics come back too."""
    kind = BY_NAME["batch_norm"]
    model = kind.make_model()
    with Relay(model, loss=kind.loss, config=RelayConfig(micro_batches=2)) as relay:
        relay.step(kind.make_batch(6, 0))
        before = copy_state(model)
        relay.model.head.register_forward_pre_hook(boom)
        with pytest.raises(ValueError, match="boom"):
            relay.step(kind.make_batch(6, 1))
        assert_state(model, before)


def boom(module: nn.Module, args: Any) -> None:
    raise ValueError("boom")


class Draws(ResidualMlp):
    """Draws from PyTorch's and Python's generators, in the layer and in the shell."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + torch.rand(()) + random.random())


class ShellDraws(Chain):
    def walk(self, h: Tensor) -> Tensor:
        drawn = []
        for layer in self.layers:
            drawn.append(float(torch.rand(())))
            h = layer(h) * random.random()
            drawn.append(random.random())
        self.drawn.append(drawn)
        return h

    drawn: list[list[float]] = []


def test_random_streams() -> None:
    """R17: `torch.manual_seed(config.micro_batch_seed(step, k))` before each micro-batch gives the same numbers."""
    kind = chain_of(Draws, ShellDraws)
    assert_trains(kind)
    config = RelayConfig(micro_batches=3, seed=5)
    model = kind.make_model()
    with Relay(model, loss=kind.loss, config=config) as relay:
        for step in range(2):
            ShellDraws.drawn.clear()
            twin = copy.deepcopy(model)
            relay.step(kind.make_batch(6, step))
            drawn = ShellDraws.drawn[:]
            ShellDraws.drawn.clear()
            for k in range(3):
                torch.manual_seed(config.micro_batch_seed(step, k))
                random.seed(config.micro_batch_seed(step, k))
                twin(kind.make_batch(6, step)[0][:2])
            assert drawn == ShellDraws.drawn
    assert len({config.micro_batch_seed(step, k) for step in range(20) for k in range(20)}) == 400


# --- R18: the user's hooks -------------------------------------------------------------------------------------------


def test_hooks_fire_once_per_call() -> None:
    """R18: on a layer and on what is inside, forward and backward; not again in the recompute."""
    kind, seen = chain_of(ResidualMlp), []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: seen.append(name)

    model = kind.make_model()
    for layer in model.layers:
        for name, module in {"layer": layer, "inside": layer.fc1}.items():
            module.register_forward_pre_hook(note(f"{name} pre"))
            module.register_forward_hook(note(f"{name} forward"))
            module.register_forward_hook(note(f"{name} keywords"), with_kwargs=True)
            module.register_full_backward_pre_hook(note(f"{name} backward pre"))
            module.register_full_backward_hook(note(f"{name} backward"))
    with Relay(model, loss=kind.loss, config=RelayConfig(micro_batches=2)) as relay:
        for _ in range(2):
            seen.clear()
            relay.step(kind.make_batch(4, 0))
            assert {name: seen.count(name) for name in seen} == dict.fromkeys(seen, 2 * 3) and len(set(seen)) == 10


def clamp_all(module: nn.Module, grads: Any, *_: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else g.clamp(-1e-2, 1e-2) for g in grads)


@stashes
def test_hooks_that_change_something(stash: str) -> None:
    """R18: these run again in the recompute, or it would compute something else."""

    def build() -> nn.Module:
        model = Chain([ResidualMlp() for _ in range(3)])
        for layer in model.layers:
            for module in (layer, layer.fc1):
                module.register_forward_pre_hook(lambda m, args: (args[0] * 1.1,))
                module.register_forward_hook(lambda m, args, kwargs, y: y * 1.1, with_kwargs=True)
                module.register_full_backward_pre_hook(clamp_all)
                module.register_full_backward_hook(clamp_all)
        return model

    assert_trains(kind_of(build), stash)


def test_parameter_hooks() -> None:
    """R18: once per micro-batch, on that micro-batch's gradient."""

    def build() -> nn.Module:
        model = Chain([ResidualMlp() for _ in range(3)])
        for param in model.parameters():
            param.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return model

    assert_trains(kind_of(build))


def test_pruned_layers() -> None:
    """R18, R12: torch's own hooks, which leave a weight with a graph on the module."""

    def build() -> nn.Module:
        model = Chain([ResidualMlp() for _ in range(3)])
        for layer in model.layers:
            prune.l1_unstructured(layer.fc1, "weight", amount=0.3)
        return model

    assert_trains(kind_of(build))


class Keeps(Chain):
    """For its owner to look at: hidden states, with and without a graph, their gradients, and a cycle of references."""

    def walk(self, h: Tensor) -> Tensor:
        hidden, grads = [], []
        for layer in self.layers:
            h = layer(h)
            h.register_hook(grads.append)
            hidden.append(h.detach() if len(hidden) == 1 else h)
        cycle: list[Any] = [h]
        cycle.append(cycle)
        self.hidden, self.grads = hidden, grads
        return h


@stashes
def test_user_keeps_tensors(stash: str) -> None:
    """R19: the stash is what the engine keeps; tensors that somebody else has kept stay readable after the step."""
    kind = chain_of(ResidualMlp, Keeps)
    with both(kind, RelayConfig(micro_batches=2, stash=stash)) as pair:
        for step in range(3):
            assert_equal([pair.step(kind.make_batch(4, step))])
            for ours, theirs in zip(pair.relay.model.hidden, pair.in_core.model.hidden, strict=True):
                assert torch.equal(ours, theirs)
            assert [grad.shape for grad in pair.relay.model.grads] == [(2, STEPS, WIDTH)] * 3


# --- R19 to R21: memory ----------------------------------------------------------------------------------------------


def peak_of(depth: int, micro_batches: int, shell: type[Chain] = ResidualOutside) -> tuple[int, int]:
    """Peak device bytes of the metered first step and of the second; two rows per micro-batch."""
    kind = kind_of(lambda: shell([Mlp() for _ in range(depth)]))
    config = RelayConfig(micro_batches=micro_batches, stash="host")
    with Relay(kind.make_model(), loss=kind.loss, device=EmulatedDevice(), config=config) as relay:
        first, second = (relay.step(kind.make_batch(2 * micro_batches, seed)) for seed in range(2))
    return first.peak_device_bytes, second.peak_device_bytes


@pytest.mark.parametrize("shell", [Chain, ResidualOutside])
def test_peak_is_flat(shell: type[Chain]) -> None:
    """R19, R20: in depth and in the number of micro-batches, one included."""
    reference = peak_of(4, 1, shell)
    for depth, micro_batches in [(4, 2), (4, 8), (16, 1), (16, 3)]:
        assert peak_of(depth, micro_batches, shell) == pytest.approx(reference, rel=0.01)


def test_metering_on_change() -> None:
    """R21: counted once, then replayed: the second step books what the first one counted."""
    first, second = peak_of(4, 3)
    assert first == second


# --- the model behind the relay's back -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.half(),
        lambda model: model.to("meta"),
        lambda model: setattr(model.layers[1].fc1, "weight", nn.Parameter(torch.zeros(2 * WIDTH, WIDTH))),
        lambda model: setattr(model.layers[1].fc1.weight, "data", torch.zeros(2 * WIDTH, WIDTH)),
        lambda model: model.load_state_dict(copy_state(model), assign=True),
    ],
    ids=["double", "half", "meta", "new parameter", "new data", "assigned"],
)
def test_changed_model_is_noticed(change: Callable[[nn.Module], Any]) -> None:
    kind = chain_of(ResidualMlp)
    model = kind.make_model()
    with Relay(model, loss=kind.loss) as relay:
        relay.step(kind.make_batch(4, 0))
        change(model)
        for act in (relay.step, relay.evaluate, relay.forward):
            with pytest.raises(RuntimeError, match="behind the relay's back|moved or cast"):
                act(kind.make_batch(4, 1))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradient_checkpointing_is_refused(name: str) -> None:
    kind = BY_NAME[name]
    model = kind.make_model()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # the newer name
    enable()
    with pytest.raises(ValueError, match="checkpointing_disable"):
        Relay(model)
    model = kind.make_model()
    with Relay(model) as relay:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        with pytest.raises(ValueError, match="checkpointing_disable"):
            relay.step(kind.make_batch(4, 0))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_layers_is_refused(reentrant: bool) -> None:
    class Checkpoints(Chain):
        def walk(self, h: Tensor) -> Tensor:
            for layer in self.layers:
                h = checkpoint(layer, h, use_reentrant=reentrant)
            return h

    assert_refused(chain_of(ResidualMlp, Checkpoints), "checkpoint", RelayConfig(micro_batches=2))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_checkpoint_around_one_layer_is_refused_before_anything_is_trained(which: int, reentrant: bool) -> None:
    """Behind it others have been updated when it would run again."""

    class Checkpoints(Chain):
        def walk(self, h: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                h = checkpoint(layer, h, use_reentrant=reentrant) if index == which else layer(h)
            return h

    assert_refused(chain_of(ResidualMlp, Checkpoints), "checkpoint", RelayConfig(micro_batches=2))


def test_checkpoint_inside_a_layer() -> None:
    """That is the layer's own affair; and so it is with the shell's own code."""

    class Inside(ResidualMlp):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    class Between(Chain):
        def walk(self, h: Tensor) -> Tensor:
            for layer in self.layers:
                h = checkpoint(lambda y: y.tanh() * y, layer(h), use_reentrant=False)
            return h

    assert_trains(chain_of(Inside, Between))


# --- changes in place ------------------------------------------------------------------------------------------------


class AddsFirst(ResidualMlp):
    """Does not save its inputs, so that plain training allows to change them afterwards."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x + (1 if mask is None else mask))


class ChangesInput(Chain):
    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(h)
            h += y
        return h


class ChangesMask(Chain):
    def walk(self, h: Tensor) -> Tensor:
        mask = torch.ones(h.shape[:2] + (1,))
        for layer in self.layers:
            h = layer(h, mask)
            mask *= 0.5
        return h


class ChangesOwnInput(ResidualMlp):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return super().forward(x)


class Copies(Chain):
    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h * 1)
        return h


@pytest.mark.parametrize(
    ("layer", "shell"),
    [(AddsFirst, ChangesInput), (AddsFirst, ChangesMask), (ChangesOwnInput, Copies)],
    ids=["input", "mask", "by the layer"],
)
def test_layer_input_changed_in_place_is_refused(layer: type, shell: type[Chain]) -> None:
    """The recompute would start from other values. The message names the layer and the remedy; nothing has changed."""
    assert_refused(chain_of(layer, shell), r"(?=.*layer layers\.\d).*in place", RelayConfig(micro_batches=2))


@stashes
def test_layer_output_changed_in_place(stash: str) -> None:
    """An output is the shell's own, as long as no layer has taken it."""

    class ChangesOutput(Chain):
        def walk(self, h: Tensor) -> Tensor:
            for layer in self.layers:
                y = layer(h)
                y += h
                y[:, 0] *= 2
                h = F.relu_(y)
            return h

    assert_trains(chain_of(Mlp, ChangesOutput), stash)


# --- outputs of inference --------------------------------------------------------------------------------------------


def test_forward_gives_no_single_part_silently() -> None:
    """Outputs that are no pytree cannot be concatenated: an error, not the first micro-batch's part."""

    class Namespaced(Chain):
        def forward(self, x: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=super().forward(x))

    kind = chain_of(ResidualMlp, Namespaced)
    with (
        Relay(kind.make_model(), loss=lambda outputs, batch: F.cross_entropy(outputs.logits, batch[-1])) as relay,
        pytest.raises((TypeError, ValueError), match="SimpleNamespace"),
    ):
        relay.config = RelayConfig(micro_batches=2)
        relay.forward(kind.make_batch(4, 0))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.1, batch_first=True)
        self.embed, self.encoder, self.head = nn.Linear(16, WIDTH), nn.TransformerEncoder(layer, 3), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=mask).mean(1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # that is torch's own doing, in evaluation
@stashes
def test_transformer_encoder_takes_its_fast_path(stash: str) -> None:
    """R3: it looks for function modes, and takes another path with other bits if there is one."""

    def padded(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        x, target = sequences(rows, seed)
        return x, torch.arange(STEPS) >= torch.arange(rows)[:, None] % 4 + 4, target

    kind = kind_of(Encoder, padded)
    assert_trains(kind, stash)
    model, batch = kind.make_model().eval(), padded(6, 0)
    with torch.no_grad():
        expected = torch.cat([model(*part[:-1]) for part in micro_batches_of(batch, 3)])
    with Relay(model, loss=kind.loss, config=RelayConfig(micro_batches=3, stash=stash)) as relay:
        assert torch.equal(relay.forward(batch), expected)
