"""Creation of new layers for edits: checks, initial values, optimizer state and identity.

A new layer has a new key and new blocks and is detached; an edit then inserts it into a stack.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from l2l_core.edits.detached_layers import DetachedLayer, DetachedLayers
from l2l_core.edits.initial_weights import initialise
from l2l_core.edits.layer_registry import LayerRegistry
from l2l_core.edits.optimizer_state import InheritFn, ParameterSnapshot, ParamState, reshape_state, states_of
from l2l_core.eps import LayerStore, OptimizerEntry
from l2l_core.eps.blocks import EmptyFn, Unit, build_layer, is_placeholder, refuse_scripted
from l2l_core.eps.optimizers import rounds_weights
from l2l_core.model import RandomState, Stack, deep_copy, preserve_random_state
from l2l_core.surgery import check_fit, describe_layer, replace_layers
from l2l_core.surgery.identity import CallSample, IdentityPlan, capture_samples, plan_identity, sample_after


@dataclass(frozen=True)
class SampleRun:
    """A run of the model on a few rows of a batch."""

    run: Callable[[Any], Any]
    rows: Any

    def __call__(self) -> Any:
        return self.run(self.rows)


class LayerFactory:
    """Factory of the new layers of one relay."""

    def __init__(
        self,
        registry: LayerRegistry,
        store: LayerStore,
        detached: DetachedLayers,
        empty: EmptyFn,
        seed: Callable[[], int],
    ) -> None:
        self._registry, self._store, self._detached = registry, store, detached
        self._empty, self._seed, self._bf16 = empty, seed, rounds_weights(store.optimizer)
        # Runs the model on a few rows of the last batch; None before the first step.
        self.run_model: SampleRun | None = None
        self._given: dict[Unit, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # see `add_given`
        self.unstored: list[Unit] = []  # new layers whose values are not in the storage yet
        self._plans: dict[int, IdentityPlan] = {}  # the last plan by kind of layer, which is tried first

    # -- modules -------------------------------------------------------------------------------------------------------

    def check_module(self, module: object) -> nn.Module:
        """Check and return a user's module that is to become a layer.

        Raises:
            TypeError: it is no module.
            ValueError: it is TorchScript; it, or one of its parameters, is part of the model already.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"module is a {type(module).__name__}: pass a torch.nn.Module, or leave it out for one like another layer"
            )
        refuse_scripted(module)
        params = {param for unit in self._registry.units for param in unit.params}
        if module in set(self._registry.model.modules()) or not params.isdisjoint(module.parameters()):
            raise ValueError(
                f"this {type(module).__name__} is part of the model already: pass a separate module, as copy.deepcopy(...)"
            )
        return module

    def initialise(self, module: nn.Module, like: Unit) -> None:
        """Draw the weights of a module as those of a new model, from seed and number of keys; see `initial_weights.py`."""
        for name, param in module.named_parameters():
            if _is_code(param):
                raise ValueError(
                    f"init='fresh': {name} is {param.dtype}, and codes cannot be drawn at random. Use init='copy', or "
                    "make and quantise a new layer yourself and pass it as module="
                )
        with preserve_random_state():
            # Not `hash`, which differs between processes.
            RandomState.from_seed(zlib.crc32(f"{self._seed()}/layer/{self._registry.key_count}".encode())).restore()
            initialise(module, self._registry.model, like.module)

    # -- layers --------------------------------------------------------------------------------------------------------

    def make(self, module: nn.Module, like: Unit, inherit: InheritFn, warmup: int = 0) -> Unit:
        """Return a new, detached layer with `module`, which shares no parameters with the model.

        Each parameter joins the optimizer's group of its counterpart in `like` (same name and shape) and inherits from its
        state. One without a counterpart joins the group of most parameters of its kind: matrices, or others.
        """
        key = self._registry.new_key()
        unit = build_layer(
            key, key, module, self._empty, bf16=self._bf16, keeps_dtypes=self._store.masters.keeps_dtypes
        )
        self._registry.origin[key] = self._registry.origin[like.key]
        self._registry.add(unit)
        named = {(name, param.shape): param for name, param in like.module.named_parameters()}
        infos, entries = self._optimizer_info(like), {}
        for block in unit.blocks:
            block.warmup = warmup
            names = [name.removeprefix(f"{key}.") for name in block.names]
            twins = [named.get((name, param.shape)) for name, param in zip(names, block.params, strict=True)]
            inherited = [
                ((_most_common_group(param, infos) if isinstance(param, nn.Parameter) else -1), {})
                if twin is None
                else infos[twin]
                for twin, param in zip(twins, block.params, strict=True)
            ]
            masters, groups = self._store.masters.make_params(block), [group for group, _ in inherited]
            states = zip(masters, [inherit(state) for _, state in inherited], strict=True)
            entries[block] = OptimizerEntry(masters, groups, {m: state for m, state in states if state is not None})
        self._detached.add(DetachedLayer(unit, entries))
        self.unstored.append(unit)
        return unit

    def add_given(self, unit: Unit) -> None:
        """Note a new layer that is a module of the user, until `forget_given`.

        It is checked at the end of its group. A group that fails, and one that is only tried, leave the module its values, which
        a shelf has moved into a file by then.
        """
        self._given[unit] = [(param, param.data) for block in unit.blocks for param in block.params]

    def restore_given(self) -> None:
        """Restore the values of the user's modules in layers that are removed again."""
        for values in self._given.values():
            for param, value in values:
                if is_placeholder(param):
                    param.data = value
        self._given = {}

    def forget_given(self) -> None:
        """Forget the user's modules in a group that has succeeded."""
        self._given = {}

    def make_empty(self, key: str, module: nn.Module) -> Unit:
        """Return a detached layer for a save, without values, state and groups yet; it may share weights."""
        shared = {param: block for block in self._registry.blocks if block.shared for param in block.params}
        unit = build_layer(key, key, module, self._empty, shared, self._bf16, self._store.masters.keeps_dtypes)
        self._registry.add(unit)
        own = [block for block in unit.blocks if not block.shared]
        entries = {
            block: OptimizerEntry(self._store.masters.make_params(block), [-1] * len(block.params), {}) for block in own
        }
        self._detached.add(DetachedLayer(unit, entries))
        return unit

    def _optimizer_info(self, unit: Unit) -> dict[nn.Parameter, tuple[int, ParamState]]:
        """Return the optimizer's group (-1: none) and the state of each parameter of a layer, in a stack or detached."""
        found = {}
        for block in unit.blocks:
            entry = self._detached.entries.get(block) or self._store.masters.entry_of(block)
            for param, master, group in zip(block.params, entry.masters, entry.groups, strict=True):
                found[param] = group, entry.state.get(master, {})
        return found

    # -- the identity --------------------------------------------------------------------------------------------------

    def plan_identity(self, module: nn.Module, stack: Stack, at: int) -> IdentityPlan:
        """Plan how `module` becomes the identity at position `at` of a stack.

        Raises:
            ValueError: there is no plan, or no step has been made yet, so that there is no batch.
        """
        if self.run_model is None:
            raise ValueError("init='identity' is found by running layers: make a step first, or use init='copy'")
        model, layers, storage = self._registry.model, stack.layers, self._store.storage
        if {unit.module for unit in self._registry.layers} - set(layers):
            storage.require_all_in_memory("init='identity' in a model with layers outside of this stack", _REMEDY)
        neighbours = list(dict.fromkeys(layers[max(0, at - 1) : at + 1]))
        # First in the model without most of the other layers, which takes less time. Its code may need them and raise anything.
        kept = [layer for i, layer in enumerate(layers) if i == 0 or layer in neighbours]
        with suppress(Exception):
            restore = replace_layers(model, stack, kept, force=True)
            try:
                samples = capture_samples(model, self.run_model, neighbours)
            finally:
                restore()
            plan = self._plan_from(samples, module, layers, at)
            if not plan.transfers:  # otherwise its error depends on the layers before
                return plan
        storage.require_all_in_memory("finding how this kind of layer becomes the identity", _REMEDY)
        return self._plan_from(capture_samples(model, self.run_model, neighbours), module, layers, at)

    def _plan_from(
        self, samples: Mapping[nn.Module, CallSample], module: nn.Module, layers: Sequence[nn.Module], at: int
    ) -> IdentityPlan:
        before = layers[at - 1] if at else None
        sample = samples[layers[at]] if at < len(layers) else sample_after(layers[-1], samples[layers[-1]])
        kind = id(describe_layer(module).features)  # the same object for layers built alike
        plan = plan_identity(module, sample, before, None if before is None else samples[before], self._plans.get(kind))
        self._plans[kind] = plan
        return plan

    def make_identity(self, unit: Unit, plan: IdentityPlan, preceding: Unit) -> dict[nn.Parameter, ParameterSnapshot]:
        """Make a new, detached layer the identity; return the new values of the preceding layer's parameters.

        The preceding layer is not changed here but by a `RewriteCommand`, which can be undone. Transferred values
        keep their optimizer state.
        """
        states, remaining = states_of(preceding, self._store), {}
        entries = [(m, entry.state) for entry in self._detached[unit].entries.values() for m in entry.masters]
        master_of = dict(zip(unit.params, entries, strict=True))
        with torch.no_grad():
            for name, value in plan.constants.items():
                unit.module.get_parameter(name).fill_(value)
            for item in plan.transfers:
                source = preceding.module.get_parameter(item.preceding)
                target = unit.module.get_parameter(item.new)
                target.copy_(source.view_as(target))
                if source in states:
                    master, state = master_of[target]
                    state[master] = reshape_state(target, states[source])
                remaining[source] = ParameterSnapshot(torch.full_like(source, item.neutral), None)
        return remaining

    def snapshot_plans(self) -> Callable[[], None]:
        """Return a function that drops the plans found since."""
        return partial(setattr, self, "_plans", dict(self._plans))

    # -- checks at their places ----------------------------------------------------------------------------------------

    def check_fits(self) -> None:
        """Run the model with the user's inserted modules on a few rows of the last batch, if there was one.

        Raises:
            ValueError: the model does not run; the message has the neighbours and the shapes.
        """
        registry, call = self._registry, self.run_model
        if call is None:
            return
        # Without modules that later edits of the group have removed.
        for unit in [unit for unit in self._given if unit in registry.layers]:
            stack = next(stack for stack in registry.stacks if unit.module in stack.layers)
            names = [f"{other.key} ({other.name})" for other in registry.units_of(stack)]
            check_fit(registry.model, call, stack, stack.layers.index(unit.module), names)


_REMEDY = "use init='copy' or 'fresh'"


def _most_common_group(param: nn.Parameter, infos: Mapping[nn.Parameter, tuple[int, ParamState]]) -> int:
    """Return the group of most of a layer's parameters of the same kind, matrices or others."""
    alike = [other for other in infos if (other.dim() > 1) == (param.dim() > 1)]
    groups = Counter(infos[other][0] for other in alike or infos)
    return groups.most_common(1)[0][0] if groups else 0


def copy_module(unit: Unit) -> nn.Module:
    """Copy a layer's module; the copy of a frozen layer is trained, except what keeps its dtype."""
    module, kept = deep_copy(unit.module), params_in_bytes(unit)
    if unit.frozen:
        for old, new in zip(unit.module.parameters(), module.parameters(), strict=True):
            new.requires_grad_(old not in kept)
    return module


def params_in_bytes(unit: Unit) -> set[nn.Parameter]:
    """Return the parameters of a layer that are never trained, since they keep their dtypes."""
    return {param for block in unit.blocks if block.in_bytes for param in block.params}


def set_to_mean(module: nn.Module, a: nn.Module, b: nn.Module) -> None:
    """Set a module's weights to the mean of those of two others with the same parameters."""
    with torch.no_grad():
        for (param, x), (_, y) in zip(pair_parameters(module, a), pair_parameters(module, b), strict=True):
            param.copy_(torch.lerp(x, y, 0.5))


def _form(param: nn.Parameter) -> tuple[torch.Size, torch.dtype]:
    return param.shape, param.dtype


def _is_code(param: nn.Parameter) -> bool:
    """Return whether a parameter's values are codes or flags, not numbers: integers, bools and floats of one byte."""
    return param.dtype.itemsize == 1 or not (param.is_floating_point() or param.is_complex())


def pair_parameters(a: nn.Module, b: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Pair the parameters of two layers by their names; raise ValueError if they differ in form or are codes."""
    of_a, of_b = dict(a.named_parameters()), dict(b.named_parameters())
    unlike = [n for n in {**of_a, **of_b} if n not in of_a or n not in of_b or _form(of_a[n]) != _form(of_b[n])]
    if unlike:
        raise ValueError(
            f"a {type(a).__name__} and a {type(b).__name__} cannot be mixed: {unlike[0]} is not in both of them with the same "
            "shape and dtype; use two layers of one kind"
        )
    codes = [name for name, param in of_a.items() if _is_code(param)]
    if codes:
        raise ValueError(
            f"a {type(a).__name__} and a {type(b).__name__} cannot be mixed: {codes[0]} is {of_a[codes[0]].dtype}, codes that "
            "have no mean. Use Insert(init='copy'), or make the mean yourself and pass it as module="
        )
    return [(param, of_b[name]) for name, param in of_a.items()]
