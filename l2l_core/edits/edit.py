"""Edits of the architecture, as values: what to change between two steps.

An edit names layers by position (where the model has one stack), by ``(stack, position)``, by permanent key ("L003") or by
dotted name; see `Resolver` in `model/layer_stacks.py`. It checks everything before it touches anything, and becomes a few changes
(`commands.py`) that an `Editor` carries out. What an edit does not name is not affected, to the bit.

All edits but `Delink` (`delink.py`) are in this file, which is a long one for that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
from l2l_core.edits.layer_factory import copy_module, pair_parameters, set_to_mean
from l2l_core.edits.optimizer_state import (
    ParameterSnapshot,
    Policy,
    check_policy,
    describe_policy,
    is_finite,
    make_inherit,
    mix_states,
    states_of,
)
from l2l_core.eps.blocks import Unit
from l2l_core.model import LayerRef, Stack

Init = Literal["identity", "copy", "fresh", "interpolate"]
Mode = Literal["top", "middle", "interleaved"]
Span = LayerRef | slice | range | tuple[str, slice | range] | tuple[str, str]  # the last: from one layer to another

RunCommand = Callable[[EditCommand], None]


class Edit(ABC):
    """Changes the stack of layers, or what of it is trained."""

    @property
    def preserves_function(self) -> bool:
        """Whether the model computes the same afterwards."""
        return False

    @property
    def optimizer_policy(self) -> str:
        """What becomes of the optimizer's state, for the journal."""
        return "kept"

    @abstractmethod
    def execute(self, editor: Editor, run: RunCommand) -> None:
        """Check everything, then hand changes to `do` one by one.

        Raises:
            ValueError, TypeError: before anything is changed; says what would be valid.
        """


@dataclass(frozen=True)
class Insert(Edit):
    """Put a new layer in front of position `at`, or behind the last one.

    Args:
        at: where; the number of layers is a position too.
        module: the new layer; default one that is made like another. When the whole group of edits is done, the model is run
            with it on rows of the last batch, and the group is refused if that fails; before the first step it cannot be.
        like: the layer that it is made like, default the one before `at` (at 0, the first). It also decides the groups of
            the optimizer, and the state that may be inherited.
        init: "identity" leaves the function as it is; "copy" has the weights of `like`; "fresh" is initialised as the model
            does it; "interpolate" is the mean of the layers before and behind.
        optimizer: "fresh" starts with a state and a count of steps of its own; "copy" inherits that of `like`; a number
            scales what is inherited (first moments by it, second moments by its square).
        warmup: updates over which its learning rate rises to that of its group.
    """

    at: LayerRef
    module: nn.Module | None = None
    like: LayerRef | None = None
    init: Init = "identity"
    optimizer: Policy = "fresh"
    warmup: int = 0

    def __post_init__(self) -> None:
        check_choice("init", self.init, Init)
        check_policy(self.optimizer, self.warmup)

    @property
    def preserves_function(self) -> bool:
        return self.init == "identity" and self.module is None

    @property
    def optimizer_policy(self) -> str:
        return describe_policy(self.optimizer, self.warmup)

    def execute(self, editor: Editor, run: RunCommand) -> None:
        stack, at = editor.registry.resolver.insertion_point(self.at)
        before = editor.registry.units_of(stack)
        like = before[max(0, at - 1)] if self.like is None else editor.registry.unit_at(self.like)
        with editor.load_layers(self._layers_needed(editor, before, at, like)):
            new = self._make_module(editor, before, at, like)
            # May refuse, so before a key is given out and memory taken
            plan = editor.layer_factory.plan_identity(new, stack, at) if self.preserves_function else None
            unit = editor.layer_factory.make(new, like, make_inherit(self.optimizer), self.warmup)
            if self.module is not None:
                editor.layer_factory.unverified.append(unit)
            if plan is not None:
                # Before the layer stands there: `preceding` still has the values that it hands over.
                preceding = before[at - 1] if at else editor.registry.shell
                if left := editor.layer_factory.make_identity(unit, plan, preceding):
                    run(RewriteCommand(preceding, left))
        run(restack_command(editor, stack, (*before[:at], unit, *before[at:]), {unit: like}))

    def _layers_needed(self, editor: Editor, before: Sequence[Unit], at: int, like: Unit) -> list[Unit]:
        """List whose weights or state are looked at: for the identity, of what the model runs as far as the new layer."""
        beside = before[max(0, at - 1) : at + 1] if self.init in ("identity", "interpolate") else ()
        return [like, *beside, *([editor.registry.shell, before[0]] if self.preserves_function else ())]

    def _make_module(self, editor: Editor, before: Sequence[Unit], at: int, like: Unit) -> nn.Module:
        if self.module is not None:
            module = editor.layer_factory.check_module(self.module)
            if self.optimizer != "fresh" and _shapes(module) != _shapes(like.module):
                raise ValueError(
                    f"optimizer={self.optimizer!r}: the parameters of this {type(module).__name__} are others than those of "
                    f"{like.name}, so there is no state that it could inherit: use optimizer='fresh'"
                )
            return module
        module = copy_module(like)
        if self.init == "fresh":
            editor.layer_factory.initialise(module)
        if self.init == "interpolate":
            if not 0 < at < len(before):
                raise ValueError(
                    f"Insert(at={self.at!r}, init='interpolate') needs a layer on both sides: use init='copy'"
                )
            set_to_mean(module, before[at - 1].module, before[at].module)
        return module


@dataclass(frozen=True)
class Duplicate(Edit):
    """Copy a layer, or layers that follow one another.

    Args:
        layers: one, or a slice of positions; default the whole stack (its depth doubles).
        mode: where the copies go: "top" behind the last layer of the stack, "middle" behind the span as a whole,
            "interleaved" each behind its original.
        optimizer, warmup: as of `Insert`.
    """

    layers: Span = field(default_factory=lambda: slice(None))
    mode: Mode = "middle"
    optimizer: Policy = "copy"
    warmup: int = 0

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, Mode)
        check_policy(self.optimizer, self.warmup)

    @property
    def optimizer_policy(self) -> str:
        return describe_policy(self.optimizer, self.warmup)

    def execute(self, editor: Editor, run: RunCommand) -> None:
        stack, span = editor.registry.resolver.span(self.layers)
        before = editor.registry.units_of(stack)
        twins = {}
        for old in (before[i] for i in span):
            with editor.load_layers([old]):  # one at a time
                twins[editor.layer_factory.make(copy_module(old), old, make_inherit(self.optimizer), self.warmup)] = old
        if self.mode == "interleaved":
            of = {old: new for new, old in twins.items()}
            after = tuple(one for old in before for one in (old, of.get(old)) if one is not None)
        else:
            end = len(before) if self.mode == "top" else span.stop
            after = (*before[:end], *twins, *before[end:])
        run(restack_command(editor, stack, after, twins))


@dataclass(frozen=True)
class Drop(Edit):
    """Take layers out.

    Args:
        layers: one, or a slice of positions.
        park: keep their weights and optimizer state, so that the edit can be undone: in "memory", or on "disk". None frees
            their bytes at once, and this edit and those before it cannot be undone any more. On a shelf they are on its disk
            in any case.
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
        gone = {before[i] for i in span}
        if len(gone) == len(before):
            raise ValueError(
                f"{stack.title} has {len(before)} layer(s), and one must stay: drop fewer, or put another in its place (Replace)"
            )
        run(restack_command(editor, stack, [unit for unit in before if unit not in gone]))
        if self.park != "memory":
            run((SpillCommand if self.park == "disk" else FreeCommand)(tuple(unit for unit in before if unit in gone)))


@dataclass(frozen=True)
class Swap(Edit):
    """Let two layers of one stack change places."""

    a: LayerRef
    b: LayerRef

    def execute(self, editor: Editor, run: RunCommand) -> None:
        (stack, i), (other, j) = (editor.registry.resolver.position_of(where) for where in (self.a, self.b))
        _check_same(stack, other, self.a, self.b)
        before = editor.registry.units_of(stack)
        after = list(before)
        after[i], after[j] = before[j], before[i]
        run(restack_command(editor, stack, after))


@dataclass(frozen=True)
class Move(Edit):
    """Take a layer out and put it in at the position `to` of what is left."""

    layer: LayerRef
    to: LayerRef

    def execute(self, editor: Editor, run: RunCommand) -> None:
        (stack, i), (other, j) = (
            editor.registry.resolver.position_of(self.layer),
            editor.registry.resolver.position_of(self.to),
        )
        _check_same(stack, other, self.layer, self.to)
        before = editor.registry.units_of(stack)
        after = [unit for unit in before if unit is not before[i]]
        after.insert(j, before[i])
        run(restack_command(editor, stack, after))


@dataclass(frozen=True)
class Replace(Edit):
    """Put another module in the place of a layer.

    Args:
        layer: the one that goes, and whose groups of the optimizer the new one joins.
        module: the one that comes; tried as in `Insert`.
        warmup: as of `Insert`.
    """

    layer: LayerRef
    module: nn.Module
    warmup: int = 0

    def __post_init__(self) -> None:
        check_policy("fresh", self.warmup)

    @property
    def optimizer_policy(self) -> str:
        return f"{describe_policy('fresh', self.warmup)}; of the old layer: parked (memory)"

    def execute(self, editor: Editor, run: RunCommand) -> None:
        stack, i = editor.registry.resolver.position_of(self.layer)
        before = editor.registry.units_of(stack)
        module = editor.layer_factory.check_module(self.module)
        with editor.load_layers(()):
            unit = editor.layer_factory.make(module, before[i], make_inherit("fresh"), self.warmup)
        editor.layer_factory.unverified.append(unit)
        run(restack_command(editor, stack, (*before[:i], unit, *before[i + 1 :]), {unit: before[i]}))


@dataclass(frozen=True)
class Interpolate(Edit):
    """Move a layer towards another one: ``(1 - weight) * layer + weight * other``, optimizer state included.

    Args:
        layer: the one that changes.
        other: of the same shapes; stays as it is.
        weight: 0 is no change, 1 is a copy.
    """

    layer: LayerRef
    other: LayerRef
    weight: float = 0.5

    def __post_init__(self) -> None:
        if not is_finite(self.weight):
            raise ValueError(
                f"weight={self.weight!r}: must be a finite number, 0 for no change, 1 for a copy; it goes into every weight"
            )

    @property
    def optimizer_policy(self) -> str:
        return "interpolated"

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
                if param is not other  # a weight that both share stays what it is, and undo leaves it alone
            }
        run(RewriteCommand(a, values))


@dataclass(frozen=True)
class _SetTrainedEdit(Edit):
    layers: Span
    trained: ClassVar[bool]

    @property
    def preserves_function(self) -> bool:
        return True

    def execute(self, editor: Editor, run: RunCommand) -> None:
        stack, span = editor.registry.resolver.span(self.layers)
        for unit in (editor.registry.units_of(stack)[i] for i in span):
            run(SetTrainedCommand(unit, dict.fromkeys(self._params_of(unit, editor), self.trained)))

    @abstractmethod
    def _params_of(self, unit: Unit, editor: Editor) -> Sequence[nn.Parameter]: ...


@dataclass(frozen=True)
class Freeze(_SetTrainedEdit):
    """Train layers no longer; their optimizer state is kept for when they thaw."""

    trained = False

    def _params_of(self, unit: Unit, editor: Editor) -> Sequence[nn.Parameter]:
        return unit.params


@dataclass(frozen=True)
class Unfreeze(_SetTrainedEdit):
    """Train layers again, as far as the optimizer has been given their parameters."""

    trained = True

    def _params_of(self, unit: Unit, editor: Editor) -> Sequence[nn.Parameter]:
        sides = [(block, editor.store.masters.entry_of(block)) for block in unit.blocks]
        params = [p for block, side in sides for p, group in zip(block.params, side.groups, strict=True) if group >= 0]
        if unit.params and not params:
            raise ValueError(
                f"layer {unit.key} ({unit.name}) is in no group of the optimizer, so it would never learn: give the optimizer "
                "all parameters when the relay is made, frozen ones too"
            )
        return params


# -- helpers -----------------------------------------------------------------------------------------------------------


def restack_command(
    editor: Editor, stack: Stack, after: Sequence[Unit], like: Mapping[Unit, Unit] | None = None
) -> RestackCommand:
    """Make the change to another order of a stack that is as it is now; `like` as of `Restack`."""
    return RestackCommand(editor.registry.first_name(stack), editor.registry.units_of(stack), tuple(after), like or {})


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: param.shape for name, param in module.named_parameters()}


def check_choice(name: str, value: object, choices: object) -> None:
    """Refuse what is none of a Literal's values; raises ValueError, which lists them."""
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, get_args(choices)))}")


def _check_same(stack: Stack, other: Stack, a: LayerRef, b: LayerRef) -> None:
    if stack is not other:
        raise ValueError(f"{a!r} is in {stack.title} and {b!r} in {other.title}: layers change places within one stack")
