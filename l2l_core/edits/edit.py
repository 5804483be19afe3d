"""Edits of the architecture, to be applied between two steps.

An edit names layers by position (if the model has one stack), by ``(stack, position)``, by permanent key ("L003") or by
dotted name; see `LayerResolver`. It makes all checks first, and then runs commands (`commands.py`) on an `Editor`. Layers that
it does not name keep their weights and optimizer state to the bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import nn

from l2l_core.edits.commands import (
    EditCommand,
    FreeCommand,
    RestackCommand,
    RewriteCommand,
    SetTrainedCommand,
    SpillCommand,
)
from l2l_core.edits.editor import Editor
from l2l_core.edits.layer_factory import copy_module, pair_parameters, params_in_bytes, set_to_mean
from l2l_core.edits.optimizer_state import (
    ParameterSnapshot,
    Policy,
    check_policy,
    is_finite,
    make_inherit,
    mix_states,
    states_of,
)
from l2l_core.eps.blocks import Unit
from l2l_core.model import LayerRef, Stack

Init = Literal["identity", "copy", "fresh", "interpolate"]
Mode = Literal["top", "middle", "interleaved"]
Span = LayerRef | slice | range | tuple[str, slice | range] | tuple[str, str]  # tuple[str, str]: first and last layer

RunCommand = Callable[[EditCommand], None]


class Edit(ABC):
    """A change of a stack's layers, of their values, or of the set of trained parameters.

    Arguments of type `LayerRef` name one layer: by its position in the only stack, such as 2 or -1; by the stack, a key of
    `Relay.stacks`, and its position there, ``("encoder", 2)``; by its permanent key, ``"L002"``; by its dotted name,
    ``"encoder.2"``; or by the module. Those of type `Span` name one layer likewise, or consecutive ones: positions as in Python,
    ``slice(2, 5)``, ``range(2, 5)`` or ``("encoder", slice(2, 5))``; or the first and the last one, ``("L002", "L004")``.

    Attributes:
        preserves_function: whether the model's outputs stay the same.
        optimizer_policy: the effect on the optimizer's state, for the journal.
        moves_layers: whether layers change their position, or their number changes.
        changes_depth: whether their number may change, so that the model is run with the edit before it is applied.

    Example:
        >>> from l2l_core import Drop
        >>> names = [2, -4, ("", 2), "L002", "2", model[2]]  # the model itself is the stack, whose name is ""
        >>> for layers in [*names, slice(2, 3), range(2, 3), ("", slice(2, 3)), ("L002", "L002")]:
        ...     inverse = relay.apply(Drop(layers))
        ...     assert [layer.key for layer in relay.stack] == ["L000", "L001", "L003", "L004", "L005"]
        ...     entry = relay.undo()
    """

    moves_layers: ClassVar[bool] = True
    changes_depth: ClassVar[bool] = True
    preserves_function: bool = False
    optimizer_policy: str = "kept"

    @abstractmethod
    def execute(self, editor: Editor, run: RunCommand) -> None:
        """Make all checks, then pass commands to `run`; raise ValueError or TypeError before any change."""


class LayerMakingEdit(Edit):
    """An edit that makes layers."""

    optimizer: Policy
    warmup: int

    def __post_init__(self) -> None:
        check_policy(self.optimizer, self.warmup)

    @property
    def optimizer_policy(self) -> str:
        words = self.optimizer if isinstance(self.optimizer, str) else f"scaled by {self.optimizer:g}"
        return words + (f", warm-up over {self.warmup} updates" if self.warmup else "")

    def make_layer(self, editor: Editor, module: nn.Module, like: Unit) -> Unit:
        """Return a new, detached layer; see `LayerFactory.make`."""
        return editor.layer_factory.make(module, like, make_inherit(self.optimizer), self.warmup)


@dataclass(frozen=True)
class Insert(LayerMakingEdit):
    """Insert a new layer before position `at`, or after the last layer.

    Args:
        at: the position; the number of layers is valid, too.
        module: the new layer; by default it is made like another one. After all edits of the group the model is run with it on
            rows of the last batch, and the group is refused if that fails. Before the first step there is no such check.
        like: the layer to be made like, by default the one before `at` (at 0, the first). It also determines the groups of
            the optimizer, and the state that may be inherited.
        init: "identity" does not change the model's outputs; "copy" has the weights of `like`; "fresh" is initialised as in a
            new model, by its `_init_weights` (transformers) or `reset_parameters()`; weights that the code of layer or model sets
            in another way need `module`. "interpolate" is the mean of the layers before and after.
        optimizer: "fresh" starts with an empty state and no steps; "copy" inherits the state of `like`; a number scales the
            inherited state (first moments by it, second moments by its square).
        warmup: updates over which its learning rate rises to that of its group.

    Example:
        >>> from l2l_core import Insert
        >>> result = relay.step(batch)
        >>> before = relay.evaluate(batch)
        >>> inverse = relay.apply(Insert(at=3))  # the identity: the loss stays
        >>> len(relay.stack), relay.evaluate(batch) == before
        (7, True)
        >>> inverse = relay.apply(Insert(at=0, init="copy", optimizer="copy", warmup=10))
    """

    at: LayerRef
    module: nn.Module | None = None
    like: LayerRef | None = None
    init: Init = "identity"
    optimizer: Policy = "fresh"
    warmup: int = 0

    def __post_init__(self) -> None:
        check_choice("init", self.init, Init)
        super().__post_init__()

    @property
    def preserves_function(self) -> bool:
        return self.init == "identity" and self.module is None

    def execute(self, editor: Editor, run: RunCommand) -> None:
        stack, at = editor.registry.resolver.insertion_point(self.at)
        before = editor.registry.units_of(stack)
        like = before[max(0, at - 1)] if self.like is None else editor.registry.unit_at(self.like)
        # The layers whose weights or state are read; for the identity also the model's first layers.
        needed = [like, *(before[max(0, at - 1) : at + 1] if self.init in ("identity", "interpolate") else ())]
        needed += [editor.registry.shell, before[0]] if self.preserves_function else []
        with editor.load_layers(needed):
            new = self._make_module(editor, before, at, like)
            # May raise, so it runs before a key and memory are taken.
            plan = editor.layer_factory.plan_identity(new, stack, at) if self.preserves_function else None
            unit = self.make_layer(editor, new, like)
            if self.module is not None:
                editor.layer_factory.add_given(unit)
            if plan is not None:
                # Before the restack, while `preceding` still has the values to transfer.
                preceding = before[at - 1] if at else editor.registry.shell
                if remaining := editor.layer_factory.make_identity(unit, plan, preceding):
                    run(RewriteCommand(preceding, remaining))
        run(restack_command(editor, stack, (*before[:at], unit, *before[at:]), {unit: like}))

    def _make_module(self, editor: Editor, before: Sequence[Unit], at: int, like: Unit) -> nn.Module:
        if self.module is not None:
            module = editor.layer_factory.check_module(self.module)
            shapes, wanted = (
                [(name, param.shape) for name, param in each.named_parameters()] for each in (module, like.module)
            )
            if self.optimizer != "fresh" and dict(shapes) != dict(wanted):
                raise ValueError(
                    f"optimizer={self.optimizer!r}: the parameters of this {type(module).__name__} differ from those of "
                    f"{like.name}, so it cannot inherit their state: use optimizer='fresh'"
                )
            return module
        module = copy_module(like)
        if self.init == "fresh":
            editor.layer_factory.initialise(module, like)
        if self.init == "interpolate":
            if not 0 < at < len(before):
                raise ValueError(
                    f"Insert(at={self.at!r}, init='interpolate') needs a layer on both sides: use init='copy'"
                )
            set_to_mean(module, before[at - 1].module, before[at].module)
        return module


@dataclass(frozen=True)
class Duplicate(LayerMakingEdit):
    """Copy a layer, or consecutive layers.

    Args:
        layers: one layer, or a slice of positions; default the whole stack (its depth doubles).
        mode: place of the copies: "top" after the last layer of the stack, "middle" after the last copied layer,
            "interleaved" each after its original.
        optimizer, warmup: as in `Insert`.

    Example:
        >>> from l2l_core import Duplicate
        >>> inverse = relay.apply(Duplicate(slice(0, 2), mode="interleaved"))
        >>> [layer.key for layer in relay.stack]
        ['L000', 'L006', 'L001', 'L007', 'L002', 'L003', 'L004', 'L005']
    """

    layers: Span = field(default_factory=lambda: slice(None))
    mode: Mode = "middle"
    optimizer: Policy = "copy"
    warmup: int = 0

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, Mode)
        super().__post_init__()

    def execute(self, editor: Editor, run: RunCommand) -> None:
        stack, span = editor.registry.resolver.span(self.layers)
        before = editor.registry.units_of(stack)
        twins = {}
        for old in (before[i] for i in span):
            with editor.load_layers([old]):  # one at a time
                twins[self.make_layer(editor, copy_module(old), old)] = old
        if self.mode == "interleaved":
            copies = {old: new for new, old in twins.items()}
            after = tuple(one for old in before for one in (old, copies.get(old)) if one is not None)
        else:
            end = len(before) if self.mode == "top" else span.stop
            after = (*before[:end], *twins, *before[end:])
        run(restack_command(editor, stack, after, twins))


@dataclass(frozen=True)
class Drop(Edit):
    """Remove layers.

    Args:
        layers: one layer, or a slice of positions.
        park: where to keep their weights and optimizer state for undo: in "memory", or on "disk" (with a shelf always on its
            disk). None frees their bytes, so that this edit and those before it can no longer be undone.

    Example:
        >>> from l2l_core import Drop
        >>> inverse = relay.apply(Drop("L002"), Drop(0))  # by permanent key, by position
        >>> [layer.key for layer in relay.stack]
        ['L001', 'L003', 'L004', 'L005']
    """

    layers: Span
    park: Literal["memory", "disk"] | None = "memory"

    def __post_init__(self) -> None:
        if self.park not in ("memory", "disk", None):
            raise ValueError(f"park={self.park!r}: must be 'memory', 'disk' or None")

    @property
    def optimizer_policy(self) -> str:
        return "freed" if self.park is None else f"parked ({self.park})"

    def execute(self, editor: Editor, run: RunCommand) -> None:
        stack, span = editor.registry.resolver.span(self.layers)
        before = editor.registry.units_of(stack)
        dropped = dict.fromkeys(before[i] for i in span)
        if len(dropped) == len(before):
            raise ValueError(
                f"{stack.title} has {len(before)} layer(s), and one must stay: drop fewer, or put another in its place (Replace)"
            )
        run(restack_command(editor, stack, [unit for unit in before if unit not in dropped]))
        if self.park != "memory":
            run((SpillCommand if self.park == "disk" else FreeCommand)(tuple(dropped)))


@dataclass(frozen=True)
class Swap(Edit):
    """Exchange two layers of one stack.

    Example:
        >>> from l2l_core import Swap
        >>> inverse = relay.apply(Swap(0, 5))
        >>> [layer.key for layer in relay.stack]
        ['L005', 'L001', 'L002', 'L003', 'L004', 'L000']
    """

    a: LayerRef
    b: LayerRef

    changes_depth = False

    def execute(self, editor: Editor, run: RunCommand) -> None:
        stack, i, j = _positions_in_one_stack(editor, self.a, self.b)
        after = list(editor.registry.units_of(stack))
        after[i], after[j] = after[j], after[i]
        run(restack_command(editor, stack, after))


@dataclass(frozen=True)
class Move(Edit):
    """Move a layer to position `to`, counted among the remaining layers.

    Example:
        >>> from l2l_core import Move
        >>> inverse = relay.apply(Move(0, to=5))
        >>> [layer.key for layer in relay.stack]
        ['L001', 'L002', 'L003', 'L004', 'L005', 'L000']
    """

    layer: LayerRef
    to: LayerRef

    changes_depth = False

    def execute(self, editor: Editor, run: RunCommand) -> None:
        stack, i, j = _positions_in_one_stack(editor, self.layer, self.to)
        before = editor.registry.units_of(stack)
        after = [unit for unit in before if unit is not before[i]]
        after.insert(j, before[i])
        run(restack_command(editor, stack, after))


@dataclass(frozen=True)
class Replace(LayerMakingEdit):
    """Replace a layer by another module.

    Args:
        layer: the layer to replace; the new one joins its groups of the optimizer.
        module: the new layer; checked as in `Insert`.
        warmup: as in `Insert`.

    Example:
        >>> from l2l_core import Replace
        >>> inverse = relay.apply(Replace(2, Block()))
        >>> [layer.key for layer in relay.stack]
        ['L000', 'L001', 'L006', 'L003', 'L004', 'L005']
    """

    layer: LayerRef
    module: nn.Module
    warmup: int = 0
    optimizer = "fresh"
    moves_layers = False

    @property
    def optimizer_policy(self) -> str:
        return f"{super().optimizer_policy}; of the old layer: parked (memory)"

    def execute(self, editor: Editor, run: RunCommand) -> None:
        stack, i = editor.registry.resolver.position_of(self.layer)
        before = editor.registry.units_of(stack)
        module = editor.layer_factory.check_module(self.module)
        with editor.load_layers(()):
            unit = self.make_layer(editor, module, before[i])
            editor.layer_factory.add_given(unit)
        run(restack_command(editor, stack, (*before[:i], unit, *before[i + 1 :]), {unit: before[i]}))


@dataclass(frozen=True)
class Interpolate(Edit):
    """Interpolate between two layers: ``(1 - weight) * layer + weight * other``, optimizer state included.

    Args:
        layer: the layer that changes.
        other: a layer of the same shapes, which does not change.
        weight: 0 is no change, 1 is a copy.

    Example:
        >>> from l2l_core import Interpolate
        >>> middle = (relay.stack[0].module.inner.weight + relay.stack[1].module.inner.weight) / 2
        >>> inverse = relay.apply(Interpolate(0, 1))
        >>> torch.allclose(relay.stack[0].module.inner.weight, middle)
        True
    """

    layer: LayerRef
    other: LayerRef
    weight: float = 0.5
    optimizer_policy = "interpolated"
    moves_layers = False

    def __post_init__(self) -> None:
        if not is_finite(self.weight):
            raise ValueError(f"weight={self.weight!r}: must be a finite number, 0 for no change, 1 for a copy")

    def execute(self, editor: Editor, run: RunCommand) -> None:
        a, b = (editor.registry.unit_at(where) for where in (self.layer, self.other))
        with editor.load_layers([a, b]):
            states = [states_of(unit, editor.store) for unit in (a, b)]
            values = {
                param: ParameterSnapshot(
                    torch.lerp(param.detach(), other.detach(), self.weight),
                    mix_states(states[0].get(param), states[1].get(other), self.weight),
                )
                for param, other in pair_parameters(a.module, b.module)
                if param is not other  # a shared weight does not change, so undo must not restore it
            }
        run(RewriteCommand(a, values))


@dataclass(frozen=True)
class _SetTrainedEdit(Edit):
    layers: Span
    trained: ClassVar[bool]
    preserves_function = True
    moves_layers = False

    def execute(self, editor: Editor, run: RunCommand) -> None:
        stack, span = editor.registry.resolver.span(self.layers)
        for unit in (editor.registry.units_of(stack)[i] for i in span):
            run(SetTrainedCommand(unit, dict.fromkeys(self._params_of(unit, editor), self.trained)))

    def _params_of(self, unit: Unit, editor: Editor) -> Sequence[nn.Parameter]:
        return unit.params


@dataclass(frozen=True)
class Freeze(_SetTrainedEdit):
    """Stop training layers; their optimizer state is kept for `Unfreeze`.

    Example:
        >>> from l2l_core import Freeze
        >>> inverse = relay.apply(Freeze(slice(0, 2)))
        >>> [layer.frozen for layer in relay.stack]
        [True, True, False, False, False, False]
    """

    trained = False


@dataclass(frozen=True)
class Unfreeze(_SetTrainedEdit):
    """Train layers again; parameters that are not in the optimizer, or that keep their dtype, stay frozen.

    Example:
        >>> from l2l_core import Freeze, Unfreeze
        >>> inverse = relay.apply(Freeze(slice(0, 2)))
        >>> inverse = relay.apply(Unfreeze(0))
        >>> [layer.frozen for layer in relay.stack]
        [False, True, False, False, False, False]
    """

    trained = True

    def _params_of(self, unit: Unit, editor: Editor) -> Sequence[nn.Parameter]:
        groups = [group for block in unit.blocks for group in editor.store.masters.entry_of(block).groups]
        kept = params_in_bytes(unit)
        params = [p for p, group in zip(unit.params, groups, strict=True) if group >= 0 and p not in kept]
        if kept and not params:
            raise ValueError(
                f"layer {unit.key} ({unit.name}) has nothing to train: its parameters that are in the optimizer were frozen when "
                f"the relay was made, and keep their dtypes ({next(iter(kept)).dtype}). Add an adapter to the layer, or give it "
                "float32 weights that require gradients, and make a new relay"
            )
        if unit.params and not params:
            raise ValueError(
                f"layer {unit.key} ({unit.name}) is in no group of the optimizer, so it would not be trained: pass all "
                "parameters to the optimizer when you create the relay, frozen ones too"
            )
        return params


# -- helpers -----------------------------------------------------------------------------------------------------------


def restack_command(
    editor: Editor, stack: Stack, after: Sequence[Unit], like: Mapping[Unit, Unit] | None = None
) -> RestackCommand:
    """Return the command that replaces the current layers of a stack; `like` as in `RestackCommand`."""
    return RestackCommand(editor.registry.first_name(stack), editor.registry.units_of(stack), tuple(after), like or {})


def inherit_state(unit: Unit, params: Iterable[nn.Parameter], policy: Policy, editor: Editor, run: RunCommand) -> None:
    """Apply a policy to the optimizer state of parameters that a layer keeps while others get copies of them."""
    with editor.load_layers([unit]):
        states = states_of(unit, editor.store)
        kept = {param: make_inherit(policy)(states[param]) for param in params if param in states}
        values = {param: ParameterSnapshot(param.detach().clone(), state) for param, state in kept.items()}
    if values:
        run(RewriteCommand(unit, values))


def check_choice(name: str, value: object, choices: object) -> None:
    """Raise ValueError if `value` is not one of the values of the Literal `choices`."""
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, get_args(choices)))}")


def _positions_in_one_stack(editor: Editor, a: LayerRef, b: LayerRef) -> tuple[Stack, int, int]:
    (stack, i), (other, j) = (editor.registry.resolver.position_of(where) for where in (a, b))
    if stack is not other:
        raise ValueError(
            f"{a!r} is in {stack.title} and {b!r} in {other.title}: layers change places within one stack; pass two of one stack"
        )
    return stack, i, j
