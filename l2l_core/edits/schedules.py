"""Depth, and what is trained of it, as a function of the step.

A schedule looks at the number of finished steps and at the stack, and says which edits are due before the next step and which
layers sit it out. It keeps nothing: a run that was saved and loaded, or a step that is tried again, does the same.

    schedule = gradual_stacking(3, every=100, depth=12) + LayerDrop(0.1)
    for batch in batches:
        schedule.step(relay, batch)

What it is not: a learning rate schedule (torch has those), or a loop of its own. The schedules that there are have a file each:
`depth.py`, `freezing.py`, `layer_drop.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from l2l_core.batches import Batch
from l2l_core.config import RelayConfig
from l2l_core.edits.edit import Edit
from l2l_core.eps.blocks import Unit
from l2l_core.model import LayerRef
from l2l_core.trace import StepResult

PerStep = Callable[[int], int] | Mapping[int, int]  # by step; a mapping holds each value from its step on


class SchedulableRelay(Protocol):
    """Names what a schedule asks of a relay."""

    @property
    def config(self) -> RelayConfig: ...

    @property
    def steps(self) -> int: ...

    @property
    def stacks(self) -> Mapping[str, tuple[Unit, ...]]: ...

    def apply(self, *edits: Edit) -> object: ...

    def expect(self, batch: Batch) -> AbstractContextManager[object]: ...

    def step(self, batch: Batch, skip: Iterable[LayerRef] = (), force: bool = False) -> StepResult: ...


class Schedule:
    """Says what is due before the next step. Schedules add up: ``Depth(...) + LayerDrop(0.1)``.

    Attributes:
        force: whether layers sit out even where that is refused on evidence alone; see `Relay.step`.
    """

    force: bool = False

    def edits(self, relay: SchedulableRelay) -> Sequence[Edit]:
        """List the edits for now, one group, which last; none if all is as it should be."""
        return ()

    def skip(self, relay: SchedulableRelay) -> Sequence[str]:
        """List the keys of the layers that sit the next step out."""
        return ()

    def prepare(self, relay: SchedulableRelay) -> None:
        """Carry out the edits that are due.

        Raises:
            ValueError: one cannot be; the relay is as it was.
        """
        if edits := self.edits(relay):
            relay.apply(*edits)

    def step(self, relay: SchedulableRelay, batch: Batch) -> StepResult:
        """Edit what is due, and train on one batch; raises what `Relay.apply` and `Relay.step` do."""
        with relay.expect(batch):
            self.prepare(relay)
            return relay.step(batch, skip=self.skip(relay), force=self.force)

    def __add__(self, other: Schedule) -> Schedule:
        if not isinstance(other, Schedule):
            return NotImplemented
        return Schedules((self, other))


@dataclass(frozen=True)
class Schedules(Schedule):
    """Follows several schedules, one after another: each finds the stack as those before it have left it.

    `edits` are those of the first one that has something to do.
    """

    parts: tuple[Schedule, ...]

    def edits(self, relay: SchedulableRelay) -> Sequence[Edit]:
        return next((edits for part in self.parts if (edits := part.edits(relay))), ())

    @property
    def force(self) -> bool:  # type: ignore[override] - of any part
        return any(part.force for part in self.parts)

    def skip(self, relay: SchedulableRelay) -> Sequence[str]:
        return list(dict.fromkeys(key for part in self.parts for key in part.skip(relay)))

    def prepare(self, relay: SchedulableRelay) -> None:
        for part in self.parts:
            part.prepare(relay)


# -- for schedules -----------------------------------------------------------------------------------------------------


def stack_of(relay: SchedulableRelay, name: str | None) -> tuple[Unit, ...]:
    """Find the layers of the stack of that name, or of the only one.

    Raises:
        ValueError: there is no such stack, or there are several; names them.
    """
    stacks = relay.stacks
    if name is None and len(stacks) == 1:
        return next(iter(stacks.values()))
    if name is None or name not in stacks:
        there = ", ".join(f"{each!r} ({len(layers)} layers)" for each, layers in stacks.items()) or "none"
        raise ValueError(f"stack={name!r}: say which stack the schedule is for; there are {there}")
    return stacks[name]


def in_stack(stack: str | None, where: Any) -> Any:
    """Name a place as edits take it: where there is one stack, a position will do."""
    return where if stack is None else (stack, where)


def value_at(name: str, values: PerStep, step: int, least: int) -> int | None:
    """Look the value for a step up; None before the first one of a mapping.

    Raises:
        ValueError: a function gave something else than an integer of at least `least`.
    """
    if not isinstance(values, Mapping):
        return check_int(f"{name}({step})", values(step), least)
    past = [first for first in values if first <= step]
    return values[max(past)] if past else None


def check_step_values(name: str, values: object, least: int) -> None:
    """Refuse what gives no integer of at least `least` by step, as far as that shows without a step.

    Raises:
        ValueError, TypeError: of a mapping's steps and values, or of another kind of thing.
    """
    if isinstance(values, Mapping):
        if not values:
            raise ValueError(f"{name}={values!r}: give a value from some step on, as {{0: 3, 100: 6}}")
        for step, value in values.items():
            check_int(f"a step of {name}", step, 0)
            check_int(f"{name} from step {step} on", value, least)
    elif not callable(values):
        raise TypeError(f"{name}={values!r}: give a function of the step, or a mapping as {{0: 3, 100: 6}}")


def check_int(what: str, value: object, least: int) -> int:
    """Check that `value` is an integer of at least `least`, and return it; raises ValueError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} is {value!r}: must be an integer of at least {least}")
    return value
