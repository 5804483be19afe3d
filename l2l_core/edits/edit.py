"""Edits of the architecture, as values: what to change between two steps, and what becomes of the optimizer's state.

An edit names layers by position (where the model has one stack), by ``(stack, position)``, by permanent key ("L003") or by
dotted name; see `stacks.Resolver`. It checks everything before it touches anything, and becomes a few changes
(`change.py`) that an `Editor` carries out. What an edit does not name is not affected, to the bit.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn

from l2l_core.edits.change import Change, Held, Lose, Restack, Retrain, Rewrite, Spill
from l2l_core.edits.editor import Editor
from l2l_core.eps.blocks import Unit
from l2l_core.model import Where, deep_copy

Init = Literal["identity", "copy", "fresh", "interpolate"]
Mode = Literal["top", "middle", "interleaved"]
Policy = Literal["fresh", "copy"] | float  # of the optimizer's state; a number scales a copy
Span = Where | slice | range | tuple[str, slice | range] | tuple[str, str]  # the last: from one layer to another

Do = Callable[[Change], None]


class Edit(ABC):
    """Something that changes the stack of layers, or what of it is trained."""

    @property
    def preserves_function(self) -> bool:
        """Whether the model computes the same afterwards."""
        return False

    @property
    def optimizer_policy(self) -> str:
        """What becomes of the optimizer's state, for the journal."""
        return "kept"

    @abstractmethod
    def carry_out(self, editor: Editor, do: Do) -> None:
        """Check everything, then hand changes to `do` one by one.

        Raises:
            ValueError, TypeError: before anything is changed; says what would be valid.
        """


@dataclass(frozen=True)
class Insert(Edit):
    """A new layer in front of position `at`, or behind the last one.

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

    at: Where
    module: nn.Module | None = None
    like: Where | None = None
    init: Init = "identity"
    optimizer: Policy = "fresh"
    warmup: int = 0

    def __post_init__(self) -> None:
        _check_choice("init", self.init, Init)
        _check_new(self.optimizer, self.warmup)

    @property
    def preserves_function(self) -> bool:
        return self.init == "identity" and self.module is None

    @property
    def optimizer_policy(self) -> str:
        return _in_words(self.optimizer, self.warmup)

    def carry_out(self, editor: Editor, do: Do) -> None:
        stack, at = editor.resolver.place(self.at)
        before = editor.units_of(stack)
        like = before[max(0, at - 1)] if self.like is None else editor.unit_of(editor.resolver.layer(self.like))
        new = self._module(editor, before, at, like)
        plan = editor.plan_identity(new, stack, at) if self.preserves_function else None
        unit = editor.make_layer(new, like, inherit(self.optimizer), self.warmup)
        if self.module is not None:
            editor.untried.append(unit)
        if plan is not None:
            preceding = before[at - 1] if at else editor.shell
            if left := editor.make_identity(unit, plan, preceding):
                do(Rewrite(preceding, left))
        do(Restack(editor.name_of(stack), before, (*before[:at], unit, *before[at:]), {unit: like}))

    def _module(self, editor: Editor, before: Sequence[Unit], at: int, like: Unit) -> nn.Module:
        if self.module is not None:
            module = editor.check_new(self.module)
            if self.optimizer != "fresh" and _shapes(module) != _shapes(like.module):
                raise ValueError(
                    f"optimizer={self.optimizer!r}: the parameters of this {type(module).__name__} are others than those of "
                    f"{like.name}, so there is no state that it could inherit: use optimizer='fresh'"
                )
            return module
        module = _copy_of(like)
        if self.init == "fresh":
            editor.initialise(module)
        if self.init == "interpolate":
            if not 0 < at < len(before):
                raise ValueError(
                    f"Insert(at={self.at!r}, init='interpolate') needs a layer on both sides: use init='copy'"
                )
            _set_to_mean(module, before[at - 1].module, before[at].module)
        return module


@dataclass(frozen=True)
class Duplicate(Edit):
    """Copies of a layer, or of layers that follow one another.

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
        _check_choice("mode", self.mode, Mode)
        _check_new(self.optimizer, self.warmup)

    @property
    def optimizer_policy(self) -> str:
        return _in_words(self.optimizer, self.warmup)

    def carry_out(self, editor: Editor, do: Do) -> None:
        stack, span = editor.resolver.span(self.layers)
        before = editor.units_of(stack)
        twins = {}
        for old in (before[i] for i in span):
            twins[editor.make_layer(_copy_of(old), old, inherit(self.optimizer), self.warmup)] = old
        if self.mode == "interleaved":
            of = {old: new for new, old in twins.items()}
            after = tuple(one for old in before for one in (old, of.get(old)) if one is not None)
        else:
            end = len(before) if self.mode == "top" else span.stop
            after = (*before[:end], *twins, *before[end:])
        do(Restack(editor.name_of(stack), before, after, twins))


@dataclass(frozen=True)
class Drop(Edit):
    """Take layers out.

    Args:
        layers: one, or a slice of positions.
        park: keep their weights and optimizer state, so that the edit can be undone: in "memory", or on "disk". None frees
            their bytes at once, and this edit and those before it cannot be undone any more.
    """

    layers: Span
    park: Literal["memory", "disk"] | None = "memory"

    def __post_init__(self) -> None:
        if self.park not in ("memory", "disk", None):
            raise ValueError(f"park={self.park!r}: must be 'memory', 'disk' or None")

    @property
    def optimizer_policy(self) -> str:
        return "freed" if self.park is None else f"parked ({self.park})"

    def carry_out(self, editor: Editor, do: Do) -> None:
        stack, span = editor.resolver.span(self.layers)
        before = editor.units_of(stack)
        gone = {before[i] for i in span}
        if len(gone) == len(before):
            raise ValueError(
                f"{stack.title} has {len(before)} layer(s), and one must stay: drop fewer, or put another in its place (Replace)"
            )
        do(Restack(editor.name_of(stack), before, tuple(unit for unit in before if unit not in gone)))
        if self.park != "memory":
            do((Spill if self.park == "disk" else Lose)(tuple(unit for unit in before if unit in gone)))


@dataclass(frozen=True)
class Swap(Edit):
    """Let two layers of one stack change places."""

    a: Where
    b: Where

    def carry_out(self, editor: Editor, do: Do) -> None:
        (stack, i), (other, j) = (editor.place_of(where) for where in (self.a, self.b))
        _check_same(stack, other, self.a, self.b)
        before = editor.units_of(stack)
        after = list(before)
        after[i], after[j] = before[j], before[i]
        do(Restack(editor.name_of(stack), before, tuple(after)))


@dataclass(frozen=True)
class Move(Edit):
    """Take a layer out and put it in at the position `to` of what is left."""

    layer: Where
    to: Where

    def carry_out(self, editor: Editor, do: Do) -> None:
        (stack, i), (other, j) = editor.place_of(self.layer), editor.place_of(self.to)
        _check_same(stack, other, self.layer, self.to)
        before = editor.units_of(stack)
        after = [unit for unit in before if unit is not before[i]]
        after.insert(j, before[i])
        do(Restack(editor.name_of(stack), before, tuple(after)))


@dataclass(frozen=True)
class Replace(Edit):
    """Another module in the place of a layer.

    Args:
        layer: the one that goes, and whose groups of the optimizer the new one joins.
        module: the one that comes; tried as in `Insert`.
        warmup: as of `Insert`.
    """

    layer: Where
    module: nn.Module
    warmup: int = 0

    def __post_init__(self) -> None:
        _check_new("fresh", self.warmup)

    @property
    def optimizer_policy(self) -> str:
        return f"{_in_words('fresh', self.warmup)}; of the old layer: parked (memory)"

    def carry_out(self, editor: Editor, do: Do) -> None:
        stack, i = editor.place_of(self.layer)
        before = editor.units_of(stack)
        unit = editor.make_layer(editor.check_new(self.module), before[i], inherit("fresh"), self.warmup)
        editor.untried.append(unit)
        do(Restack(editor.name_of(stack), before, (*before[:i], unit, *before[i + 1 :]), {unit: before[i]}))


@dataclass(frozen=True)
class Interpolate(Edit):
    """Move a layer towards another one: ``(1 - weight) * layer + weight * other``, optimizer state included.

    Args:
        layer: the one that changes.
        other: of the same shapes; stays as it is.
        weight: 0 is no change, 1 is a copy.
    """

    layer: Where
    other: Where
    weight: float = 0.5

    def __post_init__(self) -> None:
        if not _is_finite(self.weight):
            raise ValueError(
                f"weight={self.weight!r}: must be a finite number, 0 for no change, 1 for a copy; it goes into every weight"
            )

    @property
    def optimizer_policy(self) -> str:
        return "interpolated"

    def carry_out(self, editor: Editor, do: Do) -> None:
        a, b = (editor.unit_of(editor.resolver.layer(where)) for where in (self.layer, self.other))
        states = [editor.states_of(unit) for unit in (a, b)]
        values = {
            param: (
                torch.lerp(param.detach(), other.detach(), self.weight),
                _mix_states(states[0].get(param), states[1].get(other), self.weight),
            )
            for param, other in _pairs(a.module, b.module)
            if param is not other  # a weight that both share stays what it is, and undo leaves it alone
        }
        do(Rewrite(a, values))


@dataclass(frozen=True)
class _Train(Edit):
    layers: Span
    trained: ClassVar[bool]

    @property
    def preserves_function(self) -> bool:
        return True

    def carry_out(self, editor: Editor, do: Do) -> None:
        stack, span = editor.resolver.span(self.layers)
        for unit in (editor.units_of(stack)[i] for i in span):
            do(Retrain(unit, dict.fromkeys(self._params_of(unit, editor), self.trained)))

    @abstractmethod
    def _params_of(self, unit: Unit, editor: Editor) -> Sequence[nn.Parameter]: ...


@dataclass(frozen=True)
class Freeze(_Train):
    """Train layers no longer; their optimizer state is kept for when they thaw."""

    trained = False

    def _params_of(self, unit: Unit, editor: Editor) -> Sequence[nn.Parameter]:
        return unit.params


@dataclass(frozen=True)
class Unfreeze(_Train):
    """Train layers again, as far as the optimizer has been given their parameters."""

    trained = True

    def _params_of(self, unit: Unit, editor: Editor) -> Sequence[nn.Parameter]:
        params = editor.optimized(unit)
        if unit.params and not params:
            raise ValueError(
                f"layer {unit.key} ({unit.name}) is in no group of the optimizer, so it would never learn: give the optimizer "
                "all parameters when the relay is made, frozen ones too"
            )
        return params


# -- optimizer state ---------------------------------------------------------------------------------------------------


_COUNTS = {"step", "mu_product", "eta", "mu"}  # go with the number of updates (NAdam, ASGD)
_SIZES = _COUNTS | {"ax", "step_size"}  # of weights and of steps, whatever the gradients are (ASGD, Rprop)
_SECOND_MOMENTS = {"square_avg", "sum", "acc_delta", "row_var", "col_var", "variance"}  # besides "..._sq"


def inherit(policy: Policy) -> Callable[[Mapping[str, Any]], dict[str, Any] | None]:
    """What a new parameter takes over from the state of its model; None: it starts anew."""
    if policy == "fresh":
        return lambda state: None
    factor = 1.0 if policy == "copy" else float(policy)

    def scaled(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if name in _SIZES or factor == 1.0:
            return value.clone()
        return value * (factor**2 if name.endswith("_sq") or name in _SECOND_MOMENTS else factor)

    return lambda state: {name: scaled(name, value) for name, value in state.items()} or None


def _mix_states(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None, weight: float) -> dict[str, Any] | None:
    """Both states mixed; whole numbers, the count of steps and what goes with it are those of `a`.

    Where one is missing, or holds other things than the other (groups with other settings), the optimizer starts anew.
    """
    if not a or not b or a.keys() != b.keys():
        return None
    return {
        name: torch.lerp(value, b[name], weight)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in _COUNTS
        else copy.deepcopy(value)
        for name, value in a.items()
    }


def _copy_of(unit: Unit) -> nn.Module:
    """A layer's module once more; that of a frozen layer is trained all the same, since it is new."""
    module = deep_copy(unit.module)
    return module.requires_grad_(True) if unit.frozen else module


def _set_to_mean(module: nn.Module, a: nn.Module, b: nn.Module) -> None:
    with torch.no_grad():
        for (param, x), (_, y) in zip(_pairs(module, a), _pairs(module, b), strict=True):
            param.copy_(torch.lerp(x, y, 0.5))


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: param.shape for name, param in module.named_parameters()}


def _pairs(a: nn.Module, b: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Parameters of two layers that have the same name."""
    mine, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    unlike = [n for n in {**mine, **theirs} if n not in mine or n not in theirs or mine[n].shape != theirs[n].shape]
    if unlike:
        raise ValueError(
            f"a {type(a).__name__} and a {type(b).__name__} cannot be mixed: {unlike[0]} is not in both of them with the same "
            "shape"
        )
    return [(param, theirs[name]) for name, param in mine.items()]


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_choice(name: str, value: object, choices: object) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, get_args(choices)))}")


def _check_new(policy: object, warmup: object) -> None:
    if policy not in ("fresh", "copy") and not _is_finite(policy):
        raise ValueError(
            f"optimizer={policy!r}: must be 'fresh', 'copy' or a finite number that scales what is inherited"
        )
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
        raise ValueError(f"warmup={warmup!r}: must be a number of updates, 0 for none")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_same(stack: Any, other: Any, a: Where, b: Where) -> None:
    if stack is not other:
        raise ValueError(f"{a!r} is in {stack.title} and {b!r} in {other.title}: layers change places within one stack")


def _in_words(policy: Policy, warmup: int) -> str:
    words = policy if isinstance(policy, str) else f"scaled by {policy:g}"
    return words + (f", warm-up over {warmup} updates" if warmup else "")


__all__ = [
    "Drop", "Duplicate", "Edit", "Freeze", "Held", "Insert", "Interpolate", "Move", "Replace", "Swap", "Unfreeze", "inherit",
]  # fmt: skip
