"""Layers that edits bring in: what may become one, the values it begins with, what makes it the identity, whether it fits.

A new layer has a key and blocks of its own and is parked; an edit then puts it into a stack.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from l2l_core.edits.detached_layers import DetachedLayer, DetachedLayers
from l2l_core.edits.layer_registry import LayerRegistry
from l2l_core.edits.optimizer_state import InheritFn, ParameterSnapshot, ParamState, reshape_state, states_of
from l2l_core.eps import LayerStore, OptimizerEntry
from l2l_core.eps.blocks import EmptyFn, Unit, build_layer, make_masters, refuse_scripted
from l2l_core.eps.optimizers import rounds_weights
from l2l_core.model import RandomState, Stack, deep_copy
from l2l_core.surgery import check_fit, describe_layer, preserve_random_state, replace_layers
from l2l_core.surgery.identity import CallSample, IdentityPlan, apply_plan, capture_samples, plan_identity, sample_after


class LayerFactory:
    """Makes the new layers of one relay.

    Args:
        lineup: gives them keys, and knows what the model holds.
        store: the EPS.
        parking: takes them in.
        empty: makes a host buffer of so many elements of a `dtype`.
        seed: of what is initialised anew.

    Attributes:
        call: runs the model on a few rows of the last batch; None before the first step.
        untried: layers of the user's own making that the group of edits under way has put in.
        made: layers whose values are not settled yet.
    """

    def __init__(
        self,
        registry: LayerRegistry,
        store: LayerStore,
        detached: DetachedLayers,
        empty: EmptyFn,
        seed: int,
    ) -> None:
        self._registry, self._store, self._detached = registry, store, detached
        self._empty, self._seed, self._bf16 = empty, seed, rounds_weights(store.optimizer)
        self.run_model: Callable[[], Any] | None = None
        self.unverified: list[Unit] = []
        self.unstored: list[Unit] = []
        self._plans: dict[int, IdentityPlan] = {}  # the last one by kind of layer: it is tried first

    # -- modules -------------------------------------------------------------------------------------------------------

    def check_module(self, module: object) -> nn.Module:
        """Check a module of the user's that is to become a layer.

        Raises:
            TypeError: no module.
            ValueError: it is TorchScript; it, or a parameter of it, is part of the model already.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"module is a {type(module).__name__}: give a torch.nn.Module, or leave it out for one like another layer"
            )
        refuse_scripted(module)
        params = {param for unit in self._registry.units for param in unit.params}
        if module in set(self._registry.model.modules()) or not params.isdisjoint(module.parameters()):
            raise ValueError(
                f"this {type(module).__name__} is part of the model already: give a module of its own, as copy.deepcopy(...)"
            )
        return module

    def initialise(self, module: nn.Module) -> None:
        """Give a module the values that it would have in a new model; the same ones for the same number of edits.

        Raises:
            ValueError: nobody says how to initialise some of its parameters.
        """
        with preserve_random_state():
            # A checksum: Python's hash of a string differs from process to process
            RandomState.from_seed(zlib.crc32(f"{self._seed}/layer/{self._registry.key_count}".encode())).restore()
            before = {name: param.detach().clone() for name, param in module.named_parameters()}
            init = getattr(self._registry.model, "_init_weights", None)  # of transformers' models
            for inner in module.modules():
                if init is not None:
                    init(inner)
                elif callable(reset := getattr(inner, "reset_parameters", None)):
                    reset()
        constant = [
            name for name, param in module.named_parameters() if param.dim() > 1 and torch.equal(param, before[name])
        ]
        if constant:
            raise ValueError(
                f"init='fresh': neither the model's _init_weights nor reset_parameters() sets {constant[0]}. Initialise a module "
                "yourself and pass it as module="
            )

    # -- layers --------------------------------------------------------------------------------------------------------

    def make(self, module: nn.Module, like: Unit, inherit: InheritFn, warmup: int = 0) -> Unit:
        """Make a new layer, parked for the time being.

        Args:
            module: has parameters of its own.
            like: whose groups of the optimizer its parameters join, and whose state they may inherit. A parameter without a
                counterpart (same name and shape) joins the group that most of the same kind are in: matrices, or the rest.
            inherit: what of that state.
            warmup: updates over which its learning rate rises.
        """
        key = self._registry.new_key()
        unit = build_layer(key, key, module, self._empty, bf16=self._bf16)
        self._registry.origin[key] = self._registry.origin[like.key]
        self._registry.add(unit)
        named = {(name, param.shape): param for name, param in like.module.named_parameters()}
        known, sides = self._optimizer_info(like), {}
        for block in unit.blocks:
            block.warmup = warmup
            names = [name.removeprefix(f"{key}.") for name in block.names]
            twins = [named.get((name, param.shape)) for name, param in zip(names, block.params, strict=True)]
            theirs = [
                known[twin] if twin is not None else _OptimizerInfo(_most_common_group(param, known), {})
                for twin, param in zip(twins, block.params, strict=True)
            ]
            masters = make_masters(block)
            states = {
                master: state
                for master, its in zip(masters, theirs, strict=True)
                if (state := inherit(its.state)) is not None
            }
            sides[block] = OptimizerEntry(masters, [its.group for its in theirs], states)
        self._detached.add(DetachedLayer(unit, sides))
        self.unstored.append(unit)
        return unit

    def make_empty(self, key: str, module: nn.Module) -> Unit:
        """Make room for a parked layer of a save, without values, state and groups yet; it may share weights."""
        shared = {param: block for block in self._registry.blocks if block.shared for param in block.params}
        unit = build_layer(key, key, module, self._empty, shared, self._bf16)
        self._registry.add(unit)
        own = [block for block in unit.blocks if not block.shared]
        sides = {block: OptimizerEntry(make_masters(block), [-1] * len(block.params), {}) for block in own}
        self._detached.add(DetachedLayer(unit, sides))
        return unit

    def _optimizer_info(self, unit: Unit) -> dict[nn.Parameter, _OptimizerInfo]:
        """Give what the optimizer has of each parameter of a layer, in a stack or parked."""
        sides = [
            (block, self._detached.entry_of(block) or self._store.masters.entry_of(block)) for block in unit.blocks
        ]
        return {
            param: _OptimizerInfo(group, side.state.get(master, {}))
            for block, side in sides
            for param, master, group in zip(block.params, side.masters, side.groups, strict=True)
        }

    # -- the identity --------------------------------------------------------------------------------------------------

    def plan_identity(self, module: nn.Module, stack: Stack, at: int) -> IdentityPlan:
        """Find how a layer becomes the identity at a place of a stack.

        Raises:
            ValueError: it cannot, or no step has been made yet from which a batch could be taken.
        """
        if self.run_model is None:
            raise ValueError("init='identity' is found by running layers: make a step first, or use init='copy'")
        layers, at_hand = stack.layers, self._store.edit_storage
        if {unit.module for unit in self._registry.layers} - set(layers):
            at_hand.require_all_in_memory("init='identity' in a model with layers outside of this stack", _REMEDY)
        wanted = list(dict.fromkeys(layers[max(0, at - 1) : at + 1]))
        try:
            plan = self._plan_from(self._capture_samples_nearby(stack, wanted), module, layers, at)
        except Exception:  # of the model's own code too, which may need what is left out
            plan = None
        if plan is None or plan.transfers:  # how exact it is depends on what the layers before make
            at_hand.require_all_in_memory("finding how this kind of layer becomes the identity", _REMEDY)
            plan = self._plan_from(capture_samples(self._registry.model, self.run_model, wanted), module, layers, at)
        return plan

    def _capture_samples_nearby(self, stack: Stack, wanted: Sequence[nn.Module]) -> dict[nn.Module, CallSample]:
        """Capture what layers are called with in the model without most of the others, which takes less time."""
        model = self._registry.model
        kept = [layer for i, layer in enumerate(stack.layers) if i == 0 or layer in wanted]
        put_back = replace_layers(model, stack, kept, force=True)
        try:
            return capture_samples(model, self.run_model, wanted)  # type: ignore[arg-type] - the caller has looked
        finally:
            put_back()

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
        """Make a new, parked layer the identity; returns what its predecessor has to be left with.

        Values that are handed over take along what the optimizer knows of them.
        """
        # Without what is handed over: the layer before must change by a `Rewrite`, which can be taken back
        apply_plan(replace(plan, transfers=()), unit.module)
        states, left = states_of(preceding, self._store), {}
        sides = [(m, side) for block, side in self._detached[unit].entries.items() for m in side.masters]
        master_of = dict(zip(unit.params, sides, strict=True))
        with torch.no_grad():
            for item in plan.transfers:
                source = preceding.module.get_parameter(item.preceding)
                target = unit.module.get_parameter(item.new)
                target.copy_(source.view_as(target))
                master, side = master_of[target]
                if source in states:
                    side.state[master] = reshape_state(target, states[source])
                left[source] = ParameterSnapshot(torch.full_like(source, item.neutral), None)
        return left

    def snapshot_plans(self) -> Callable[[], None]:
        """Keep which plans are tried first; the result forgets those that were found since."""
        plans = dict(self._plans)

        def put_back() -> None:
            self._plans = plans

        return put_back

    # -- whether they fit ----------------------------------------------------------------------------------------------

    def check_fits(self) -> None:
        """Run the model with the user's own modules where edits have put them, on a few rows of the last batch.

        Before the first step there are none, and nothing is tried.

        Raises:
            ValueError: it does not run; names the neighbours and the shapes.
        """
        lineup, call = self._registry, self.run_model
        # Those that later edits of the group have taken out again are not tried; none is left over if one is refused
        new, self.unverified = [unit for unit in self.unverified if unit in lineup.layers], []
        for unit in new if call is not None else []:
            stack = next(stack for stack in lineup.stacks if unit.module in stack.layers)
            names = [f"{other.key} ({other.name})" for other in lineup.units_of(stack)]
            check_fit(lineup.model, call, stack, stack.layers.index(unit.module), names)


_REMEDY = "use init='copy' or 'fresh'"


class _OptimizerInfo(NamedTuple):
    """Holds what the optimizer has of a parameter: its group (-1: in none) and its state."""

    group: int
    state: ParamState


def _most_common_group(param: nn.Parameter, known: Mapping[nn.Parameter, _OptimizerInfo]) -> int:
    """Find the group that most of a layer's parameters of the same kind are in, matrices or the rest."""
    alike = [other for other in known if (other.dim() > 1) == (param.dim() > 1)]
    groups = Counter(known[other].group for other in alike or known)
    return groups.most_common(1)[0][0] if groups else 0


def copy_module(unit: Unit) -> nn.Module:
    """Copy a layer's module; the copy of a frozen layer is trained all the same, since it is new."""
    module = deep_copy(unit.module)
    return module.requires_grad_(True) if unit.frozen else module


def set_to_mean(module: nn.Module, a: nn.Module, b: nn.Module) -> None:
    """Give a module the mean of the weights of two others.

    Raises:
        ValueError: they have other parameters than it has.
    """
    with torch.no_grad():
        for (param, x), (_, y) in zip(pair_parameters(module, a), pair_parameters(module, b), strict=True):
            param.copy_(torch.lerp(x, y, 0.5))


def pair_parameters(a: nn.Module, b: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Pair the parameters of two layers by their names.

    Raises:
        ValueError: one of them is not in both with the same shape.
    """
    mine, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    unlike = [n for n in {**mine, **theirs} if n not in mine or n not in theirs or mine[n].shape != theirs[n].shape]
    if unlike:
        raise ValueError(
            f"a {type(a).__name__} and a {type(b).__name__} cannot be mixed: {unlike[0]} is not in both of them with the same "
            "shape"
        )
    return [(param, theirs[name]) for name, param in mine.items()]
