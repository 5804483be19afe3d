"""Variants of a study: a schedule of edits and values of factors, and the decision which variants still train alike."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from l2l_core import Edit, Relay, Schedule
from l2l_core.edits import SchedulableRelay, Schedules
from workbench.study.segment_relay import recipe_random_state

EditFunction = Callable[[Any, int], Edit | Sequence[Edit] | None]
# Columns of every frame.
RESERVED = ("variant", "seed", "step", "flop", "tokens", "seconds", "split", "loss", "lr", "layers")


@dataclass(frozen=True)
class FunctionSchedule(Schedule):
    """Schedule by a function ``(relay, step) -> edits``, which returns an edit, a list of edits or None."""

    function: EditFunction

    def edits(self, relay: SchedulableRelay) -> Sequence[Edit]:
        found = self.function(relay, relay.steps)
        if found is None:
            return ()
        return (found,) if isinstance(found, Edit) else tuple(found)

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)  # without an address


@dataclass(frozen=True)
class Variant:
    """One way to train in a study.

    Args:
        schedule: a schedule as `Depth`, or a function ``(relay, step) -> edits`` without a state; None: no edits. Random numbers
            that it draws, as for the weights of ``Insert(module=Block())``, depend on the run's seed and the step alone.
        factors: keyword arguments for `make_relay`; also columns of the frame, see `columns`.
        labels: further columns of the frame, which `make_relay` does not get.
        steps: budget of its runs in place of the study's. Runs of different lengths share their common beginning. With a learning
            rate that changes over the steps, pass the length of its schedule as a factor too, so that it ends with the run.

    Example:
        >>> from l2l_core import Depth
        >>> from workbench import Variant
        >>> Variant(Depth({0: 2, 100: 4}), {"lr": 1e-3}).factors
        {'lr': 0.001}
    """

    schedule: Schedule | EditFunction | None = None
    factors: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and (
            not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1
        ):
            raise ValueError(f"steps={self.steps!r}: pass a positive integer, or None for the study's budget")
        object.__setattr__(self, "schedule", _as_schedule(self.schedule))
        if twice := [name for name in self.factors if name in self.labels]:
            raise ValueError(f"{twice[0]!r} is a factor and a label: rename one of them")

    @property
    def columns(self) -> dict[str, Any]:
        """Plain values of factors and labels by column of the frame; ``lr``, which every frame has, is ``factor_lr``."""
        given = {**self.factors, **self.labels}
        return {f"factor_{name}" if name in RESERVED else name: _plain(value) for name, value in given.items()}

    def describe(self) -> dict[str, Any]:
        """Return what must be equal when the study is resumed, as JSON."""
        schedule = (
            "no edits" if type(self.schedule) is Schedule else re.sub(r" at 0x[0-9a-f]+", "", repr(self.schedule))
        )
        steps = {} if self.steps is None else {"steps": self.steps}
        return {"schedule": schedule, "columns": self.columns, "factors": [*self.factors], **steps}


def grid(make: Callable[..., Any] | None = None, **factors: Sequence[Any]) -> dict[str, Variant]:
    """Make variants of all combinations of factors.

    Args:
        make: function that returns the schedule of a combination; its parameters are names of factors, and those factors
            are not passed to `make_relay`: ``grid(lambda grow: Depth({0: 2, 300: 8}, grow=grow), grow=[...], lr=[...])``.
        factors: values of each factor.

    Raises:
        ValueError: a factor has no values, or `make` has a parameter that is no factor.

    Example:
        >>> from l2l_core import Depth
        >>> from workbench import grid
        >>> list(grid(lambda grow: Depth({0: 2, 2: 4}, grow=grow), grow=["top", "identity"], lr=[1e-3]))
        ['grow=top, lr=0.001', 'grow=identity, lr=0.001']
    """
    for name, values in factors.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"{name}={values!r}: pass a list of the factor's values, as {name}=[1e-3, 3e-3]")
    used = [*inspect.signature(make).parameters] if make is not None else []
    if unknown := [name for name in used if name not in factors]:
        raise ValueError(f"the schedule depends on {unknown[0]!r}, which is no factor: pass {unknown[0]}=[...] to grid")
    found = {}
    for values in itertools.product(*factors.values()):
        chosen = dict(zip(factors, values, strict=True))
        labels = {name: chosen[name] for name in used}
        name = ", ".join(f"{key}={_plain(value)}" for key, value in chosen.items()) or "all"
        given = {key: value for key, value in chosen.items() if key not in labels}
        found[name] = Variant(make(**labels) if make is not None else None, given, labels)
    return found


def check_variants(variants: object) -> dict[str, Variant]:
    """Return named variants.

    Raises:
        TypeError, ValueError: not a mapping from names to schedules, functions or variants, or an empty one.
    """
    if not isinstance(variants, Mapping) or not all(isinstance(name, str) and name.strip() for name in variants):
        raise TypeError(
            f'variants={variants!r}: pass a mapping from names, as {{"deep": Depth({{0: 8}}), "plain": None}}'
        )
    if not variants:
        raise ValueError("variants is empty: pass one or more, the first of them as the baseline of the comparison")
    return {name: one if isinstance(one, Variant) else Variant(one) for name, one in variants.items()}


def check_factors(variants: Mapping[str, Variant], make_relay: Callable[..., Any]) -> None:
    """Check that `make_relay` can be called with a seed and the factors of each variant.

    Raises:
        TypeError: a factor is no parameter of it, or a parameter without a default is no factor.
    """
    try:
        signature = inspect.signature(make_relay)
    except ValueError:  # as of some functions written in C
        return
    known = [*signature.parameters][1:]
    for name, variant in variants.items():
        try:
            signature.bind(0, **variant.factors)
        except TypeError as error:
            raise TypeError(
                f"variant {name!r} has the factors {[*variant.factors]}, with which make_relay{signature} cannot be called: "
                f"{error}; its parameters after the seed are {', '.join(known) or 'none'}. Correct the name in Variant(..., "
                "factors=) or in make_relay"
            ) from None


def group_by_next_step(relay: Relay, variants: Mapping[str, Variant], seed: int) -> list[list[str]]:
    """Return the names of the variants in groups with the same next step, to the bit; `seed` is the runs'."""
    if len(variants) == 1:
        return [[*variants]]
    groups: list[tuple[object, list[str]]] = []
    for name, variant in variants.items():
        with recipe_random_state(seed, relay.steps):
            decision = _next_decision(variant.schedule, relay)
        members = next((members for other, members in groups if other == decision), None)
        if members is None:
            groups.append((decision, [name]))
        else:
            members.append(name)
    return [members for _, members in groups]


def _next_decision(schedule: Any, relay: Any) -> object:
    """Return a value that is equal for two schedules only if their next step is the same."""
    factor = schedule.lr_factor(relay)
    if isinstance(schedule, Schedules):
        # A part that only sets the rate does not depend on what the others do.
        acting = [part for part in schedule.parts if not _only_sets_rate(part)]
        if len(acting) <= 1:
            schedule = acting[0] if acting else Schedule()
    kind = type(schedule)
    edits = tuple(schedule.edits(relay))
    if kind.step is not Schedule.step:
        return schedule, factor
    # A sum of schedules prepares its parts one after another, and layers to skip are chosen after the edits.
    if edits and (kind.prepare is not Schedule.prepare or kind.skip is not Schedule.skip):
        return schedule, factor
    return edits, tuple(schedule.skip(relay)), schedule.is_forced(relay), factor


def _only_sets_rate(schedule: Schedule) -> bool:
    kind = type(schedule)
    return all(
        getattr(kind, name) is getattr(Schedule, name) for name in ("edits", "skip", "prepare", "step", "is_forced")
    )


def _as_schedule(given: Any) -> Schedule:
    if given is None:
        return Schedule()
    if isinstance(given, Schedule):
        return given
    if callable(given) and not isinstance(given, type):
        function: Any = given
        return FunctionSchedule(function)
    raise TypeError(
        f"{given!r} is no variant: pass a schedule such as Depth({{0: 2, 300: 4}}), a function (relay, step) -> edits, "
        "a Variant, or None for no edits"
    )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__name__", repr(value))
