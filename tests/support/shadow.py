"""Plain training beside a relay: own modules, a plain torch optimizer, edits by list surgery, undo by what was there before.

It shares no code with `l2l_core` but `RelayConfig.micro_batch_seed`, so that what both do alike is not one mistake.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from oracle import seeded
from torch import Tensor, nn
from torch.optim import Optimizer

from l2l_core import RelayConfig

Make = Callable[[nn.Module], Optimizer]
Batch = tuple[Tensor, Tensor]
Known = dict[str, Any]  # what an optimizer knows of a parameter
Loss = Callable[[Any, Batch], Tensor]

# What happens to a model. Doing one gives the one that takes it back.
Order = tuple[str, nn.Module, list[nn.Module]]  # ("order", container, its layers from now on)
Values = tuple[str, dict[nn.Parameter, tuple[Tensor, Known | None]]]
Flags = tuple[str, dict[nn.Parameter, bool]]
Loops = tuple[str, int]
Change = Order | Values | Flags | Loops


@dataclass
class World:
    """One branch of plain training.

    Attributes:
        model, states: what is trained, and what the optimizer knows of all parameters, of those that are gone too.
        containers, layers: by stack, where its layers are, and which.
        done, undone: changes to be undone or redone, groups of them.
        warmups, updates: by parameter, of layers that warm up.
    """

    model: nn.Module
    containers: dict[str, nn.Module]
    layers: dict[str, list[nn.Module]]
    states: dict[nn.Parameter, Known] = field(default_factory=lambda: defaultdict(dict))
    done: list[list[Change]] = field(default_factory=list)
    undone: list[list[Change]] = field(default_factory=list)
    warmups: dict[nn.Parameter, int] = field(default_factory=dict)
    updates: dict[nn.Parameter, int] = field(default_factory=lambda: defaultdict(int))
    steps: int = 0


class Shadow:
    """Plain training with edits and branches.

    Args:
        model: to be trained.
        stacks: dotted names of the containers that hold layers.
        layers: class of the layers.
        make: the optimizer over a model.
        loss: of outputs and a micro-batch.
        config: of the relay: micro-batches, seed, clipping.
    """

    def __init__(
        self, model: nn.Module, stacks: Sequence[str], kind: type, make: Make, loss: Loss, config: RelayConfig
    ) -> None:
        containers = {name: model.get_submodule(name) for name in stacks}
        layers = {
            name: [member for member in container if isinstance(member, kind)] for name, container in containers.items()
        }
        self.world = World(model, containers, layers)
        self.make, self.loss, self.config = make, loss, seeded(config)
        self.branch, self.others = "main", dict[str, World]()

    # -- looking -------------------------------------------------------------------------------------------------------

    def optimizer(self) -> Optimizer:
        """A plain one over the model as it is now, with what is known so far."""
        made = self.make(self.world.model)
        for group in made.param_groups:
            for param in group["params"]:
                if self.world.states.get(param):
                    made.state[param] = self.world.states[param]
        return made

    def evaluate(self, batch: Batch) -> float:
        """Mean loss in evaluation mode."""
        model = self.world.model.eval()
        with torch.no_grad():
            losses = [self.loss(model(part[0]), part) / divisor for part, divisor in self._parts(batch)]
        model.train()
        return float(sum(losses))

    def _parts(self, batch: Batch) -> list[tuple[Batch, float]]:
        size = -(-len(batch[0]) // self.config.micro_batches)
        parts = list(zip(*(each.split(size) for each in batch), strict=True))
        even = len({len(part[0]) for part in parts}) == 1
        return [(part, float(len(parts)) if even else len(batch[0]) / len(part[0])) for part in parts]

    # -- training ------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, skip: Collection[tuple[str, int]] = ()) -> float:
        """One step, without some layers."""
        world = self.world
        whole = {name: (layers, dict(world.containers[name]._modules)) for name, layers in world.layers.items()}
        for name, (layers, _) in whole.items():
            # At its place, so that numbers beside the layers stay with the others
            self._put(name, [nn.Identity() if (name, i) in skip else layer for i, layer in enumerate(layers)])
        losses = []
        random = torch.get_rng_state()
        for k, (part, divisor) in enumerate(self._parts(batch)):
            torch.manual_seed(self.config.micro_batch_seed(world.steps, k))
            loss = self.loss(world.model(part[0]), part) / divisor
            if loss.requires_grad:
                loss.backward()
            losses.append(loss.detach())
        torch.set_rng_state(random)
        if self.config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(world.model.parameters(), self.config.max_grad_norm)
        self._update()
        for name, (layers, members) in whole.items():  # not by `_put`: all layers may have been skipped
            world.layers[name] = layers
            world.containers[name]._modules.clear()
            world.containers[name]._modules.update(members)
        world.steps += 1
        return float(sum(losses))

    def _update(self) -> None:
        """A step of the plain optimizer, in which parameters that warm up have a group of their own."""
        world, made = self.world, self.optimizer()
        groups = []
        for group in made.param_groups:
            by_factor: dict[float, list[nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                warmup = world.warmups.get(param, 0)
                by_factor[min(1.0, (world.updates[param] + 1) / warmup) if warmup else 1.0].append(param)
            groups += [{**group, "params": params, "lr": group["lr"] * f} for f, params in by_factor.items()]
        made.param_groups = groups
        learned = [param for group in groups for param in group["params"] if param.grad is not None]
        made.step()
        for param in learned:
            world.states[param] = made.state[param]
        for layer in {layer for layers in world.layers.values() for layer in layers}:
            if any(param.grad is not None for param in layer.parameters()):
                for param in layer.parameters():
                    world.updates[param] += 1
        for param in world.model.parameters():
            param.grad = None

    # -- edits ---------------------------------------------------------------------------------------------------------

    def do(self, *changes: Change) -> None:
        """Carry out a new edit."""
        self.world.done.append([self._do(change) for change in changes][::-1])
        self.world.undone.clear()

    def undo(self) -> None:
        self.world.undone.append([self._do(change) for change in self.world.done.pop()][::-1])

    def redo(self) -> None:
        self.world.done.append([self._do(change) for change in self.world.undone.pop()][::-1])

    def insert(self, stack: str, at: int, like: int, policy: str | float, warmup: int = 0) -> nn.Module:
        """A copy of a layer at a place."""
        layers = self.world.layers[stack]
        made = self.copy_of(layers[like], policy, warmup)
        self.do(self.order(stack, [*layers[:at], made, *layers[at:]]))
        return made

    def copy_of(self, layer: nn.Module, policy: str | float, warmup: int = 0) -> nn.Module:
        """A layer's copy, which is trained if none of its weights is."""
        made, world = copy.deepcopy(layer), self.world
        if not any(param.requires_grad for param in layer.parameters()):
            made.requires_grad_(True)
        for new, old in zip(made.parameters(), layer.parameters(), strict=True):
            if policy != "fresh" and world.states.get(old):
                world.states[new] = inherited(world.states[old], 1.0 if policy == "copy" else float(policy))
            world.warmups[new] = warmup
        return made

    def order(self, stack: str, layers: list[nn.Module]) -> Change:
        return "order", self.world.containers[stack], layers

    def interpolate(self, a: nn.Module, b: nn.Module, weight: float) -> Change:
        """A layer moved towards another."""
        values, states = {}, self.world.states
        for one, other in zip(a.parameters(), b.parameters(), strict=True):
            if one is not other:
                mixed = mix(states.get(one), states.get(other), weight)
                values[one] = torch.lerp(one.detach(), other.detach(), weight), mixed
        return "values", values

    def _do(self, change: Change) -> Change:
        kind, *what = change
        world = self.world
        if kind == "order":
            container, layers = what
            name = next(name for name, each in world.containers.items() if each is container)
            before = world.layers[name]
            self._put(name, layers)
            return "order", container, before
        if kind == "values":
            old = {}
            for param, (value, known) in what[0].items():
                old[param] = param.detach().clone(), world.states.pop(param, None)
                param.data.copy_(value)
                if known is not None:
                    world.states[param] = copy.deepcopy(known)
            return "values", old
        if kind == "loops":
            model: Any = world.model
            before, model.n_loops = model.n_loops, what[0]
            return "loops", before
        old = {param: param.requires_grad for param in what[0]}
        for param, trained in what[0].items():
            param.requires_grad_(trained)
        return "flags", old

    def _put(self, name: str, layers: list[nn.Module]) -> None:
        """Let a container hold other layers where its own have been."""
        if layers == self.world.layers[name]:
            return
        container, inside = self.world.containers[name], set(self.world.layers[name])
        members = list(container)
        first = next(i for i, member in enumerate(members) if member in inside)
        rest = [member for member in members[first:] if member not in inside]
        container._modules.clear()
        container._modules.update({str(i): m for i, m in enumerate([*members[:first], *layers, *rest])})
        self.world.layers[name] = layers
        config = getattr(self.world.model, "config", None)
        if hasattr(config, "n_layer"):
            config.n_layer = len(layers)

    # -- branches ------------------------------------------------------------------------------------------------------

    def fork(self, name: str) -> None:
        """Go on with a copy of everything."""
        self.others[self.branch], self.branch = copy.deepcopy(self.world), name

    def switch(self, name: str) -> None:
        if name != self.branch:
            self.others[self.branch], self.world = self.world, self.others.pop(name)
            self.branch = name


def inherited(known: Known, factor: float) -> Known:
    """What a copy takes over of AdamW's or SGD's state."""
    powers = {"exp_avg": factor, "momentum_buffer": factor, "exp_avg_sq": factor**2}
    return {
        name: value.clone() * powers[name] if name in powers and factor != 1.0 else copy.deepcopy(value)
        for name, value in known.items()
    }


def mix(a: Known | None, b: Known | None, weight: float) -> Known | None:
    if not a or not b:
        return None
    return {name: value.clone() if name == "step" else torch.lerp(value, b[name], weight) for name, value in a.items()}


def assert_equal(optimizer: Optimizer, model: nn.Module, shadow: Shadow) -> None:
    """Insist on equal bits of weights, buffers, flags and, through its `state_dict`, the optimizer's state."""
    mine, plain = dict(model.named_parameters()), dict(shadow.world.model.named_parameters())
    assert list(mine) == list(plain), "names"
    unequal = [name for name, param in mine.items() if not torch.equal(param, plain[name])]
    assert not unequal, f"weights {unequal[:4]}"
    unequal = [name for name, param in mine.items() if param.requires_grad is not plain[name].requires_grad]
    assert not unequal, f"flags {unequal[:4]}"
    for (name, buffer), (other, value) in zip(model.named_buffers(), shadow.world.model.named_buffers(), strict=True):
        assert name == other and torch.equal(buffer, value), f"buffer {name}"
    expected, loaded = shadow.optimizer(), shadow.make(shadow.world.model)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group, other in zip(loaded.param_groups, expected.param_groups, strict=True):
        assert {**group, "params": 0} == {**other, "params": 0}, "settings"
        assert len(group["params"]) == len(other["params"]), "members of a group"
    for name, param in plain.items():
        have, want = loaded.state.get(param, {}), expected.state.get(param, {})
        assert have.keys() == want.keys(), f"state of {name}: {sorted(have)} and not {sorted(want)}"
        for key, value in want.items():
            assert torch.equal(torch.as_tensor(have[key]), torch.as_tensor(value)), f"{key} of {name}"
