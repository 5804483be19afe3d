"""Hooks on modules and parameters, the user's and those that a model installs itself.
R18 is rule 18 of the design's paused-forwards.md.
"""

import contextvars
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import assert_refused, assert_trains, chain_of, kind_of, stashes, with_charge
from oracle import assert_equal, both
from torch import Tensor, nn
from torch.nn.utils import prune
from zoo import BY_NAME, STEPS, WIDTH, Chain, ResidualMlp

from l2l_core import Relay, RelayConfig

# --- R1, R2: modules stay where they are, layers run inside their micro-batch ----------------------------------------

collected: contextvars.ContextVar[list[Tensor]] = contextvars.ContextVar("collected")


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


VERBS: dict[str, Callable[[Relay, Any], Any]] = {
    "probe": lambda relay, batch: relay.probe([batch]),
    "look": Relay.look,
    "verify": Relay.verify,
    "evaluate": Relay.evaluate,
    "forward": Relay.forward,
    "forecast": Relay.forecast,
}


@pytest.mark.parametrize("verb", VERBS)
def test_who_only_looks_leaves_neither_a_hook_nor_the_note_of_one(verb: str) -> None:
    """Otherwise the model installs its hooks once more, and records everything twice."""
    kind = kind_of(lambda: Recording([ResidualMlp() for _ in range(3)]), loss=with_charge)
    with both(kind, RelayConfig(micro_batches=2), loss_over=None) as pair:  # the first step evaluates a few rows, too
        for seed in range(2):
            VERBS[verb](pair.relay, kind.make_batch(6, seed))
            assert_equal([pair.step(kind.make_batch(6, seed))])


def test_uneven_targets_are_looked_at_without_a_second_hook() -> None:
    """Mixtral's mean over router logits, of which there were twice as many, is rounded otherwise."""
    kind = BY_NAME["mixtral"]
    with both(kind, RelayConfig(micro_batches=2)) as pair:
        assert_equal([pair.step(kind.make_batch(5, seed)) for seed in (24, 0)])
        gates = [module for name, module in pair.relay.model.named_modules() if name.endswith("gate")]
    assert gates and {len(gate._forward_hooks) for gate in gates} == {1}


class SavesNorm(ResidualMlp):
    """Autograd saves the recorded tensor itself, which is then cut in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc2(self.fc1(F.gelu(self.norm(x)))))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_recorded_tensor_that_autograd_has_saved(micro_batches: int) -> None:
    """R12: the last layer, which is not run twice, among them."""
    Records = type("Records", (Recording,), {"recorded": "norm"})  # noqa: N806
    assert_trains(kind_of(lambda: Records([SavesNorm() for _ in range(3)]), loss=with_charge), "device", micro_batches)


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
    config = RelayConfig(micro_batches=2, verify="never")  # a comparison runs them, too
    with Relay(model, loss=kind.loss, loss_over=kind.loss_over, config=config) as relay:
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


def test_verify_calls_parameter_hooks_in_core_too() -> None:
    torch.manual_seed(0)
    model = Chain([ResidualMlp() for _ in range(3)])
    for param in model.parameters():
        param.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    next(model.layers[1].parameters()).requires_grad_(False)  # its hook stays
    with Relay(model, device="cpu", loss=lambda outputs, x: outputs.square().mean(), config=RelayConfig()) as relay:
        x = (torch.randn(4, 3, 16),)
        assert relay.verify(x).equal
        assert relay.step(x).verified.startswith("equal")


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


class TellsItsNorm(ResidualMlp):
    """Keeps an auxiliary loss of what it gives out."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.charge = h.square().mean()
        return h


WAYS: dict[str, Callable[[Tensor], object]] = {
    "a hook": lambda h: h.register_hook(lambda grad: grad * 0.5),
    "a hook on several": lambda h: torch.autograd.graph.register_multi_grad_hook([h], lambda grads: None),
    "a kept gradient": lambda h: h.retain_grad(),
    "a hook on the node": lambda h: h.grad_fn.register_hook(lambda ours, theirs: None),
    "a hook before the node": lambda h: h.grad_fn.register_prehook(lambda grads: (grads[0] * 0.5,)),
}


@pytest.mark.parametrize("on_copy", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_hook_that_would_see_a_part_of_the_gradient(way: str, on_copy: bool) -> None:
    """What a layer gives out and reads itself gets a part of its gradient in the layer; a copy is the shell's alone."""

    class Hooks(Chain):
        def walk(self, h: Tensor) -> Tensor:
            for layer in self.layers:
                h = layer(h)
                WAYS[way](h := h.clone() if on_copy else h)
            return h

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), sum(layer.charge for layer in self.layers)

    kind = kind_of(lambda: Hooks([TellsItsNorm() for _ in range(3)]), loss=with_charge)
    if on_copy:
        assert_trains(kind)
    else:
        assert_refused(kind, "would see only a part of its gradient", RelayConfig(micro_batches=1))
