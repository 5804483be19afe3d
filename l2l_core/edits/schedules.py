"""Schedules of a stack's depth and training, as a function of the step.

Given the number of finished steps and the stack, a schedule determines the edits before the next step and the layers that are
skipped in it. It has no state, so that it does the same after loading a save and in a repeated step.

    schedule = Depth({0: 3, 100: 6, 200: 12}, grow="top") + LayerDrop(0.1)
    for batch in batches:
        schedule.step(relay, batch)

`Freezing` and `WarmupStableDecay` are here, `Depth` is in `depth.py`, `LayerDrop` and `ActiveLayers` in `skip_schedules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch.optim import Optimizer

from l2l_core.batches import Batch
from l2l_core.config import RelayConfig
from l2l_core.edits.edit import Edit, Freeze, Unfreeze
from l2l_core.eps.blocks import Unit
from l2l_core.model import LayerRef
from l2l_core.trace import StepResult

PerStep = (
    int | Callable[[int], int] | Mapping[int, int]
)  # for all steps, a function of the step, or first step -> value


class SchedulableRelay(Protocol):
    """The part of a relay that schedules use."""

    @property
    def config(self) -> RelayConfig: ...

    @property
    def steps(self) -> int: ...

    @property
    def stacks(self) -> Mapping[str, tuple[Unit, ...]]: ...

    @property
    def loops(self) -> Mapping[str, int]: ...

    @property
    def optimizer(self) -> Optimizer: ...

    def apply(self, *edits: Edit, force: bool = False) -> object: ...

    def expect(self, batch: Batch) -> AbstractContextManager[object]: ...

    def step(self, batch: Batch, skip: Iterable[LayerRef] = (), force: bool = False) -> StepResult: ...


class Schedule:
    """Edits and skipped layers by step; schedules can be added: ``Depth(...) + LayerDrop(0.1)``.

    Attributes:
        force: skip the refusals that rest on evidence, of edits and of layers to skip; see `Relay.apply` and `Relay.step`.

    Example:
        >>> from l2l_core import Duplicate, Schedule
        >>> class Grow(Schedule):
        ...     def edits(self, relay):
        ...         return [Duplicate(0)] if relay.steps == 2 else []
        >>> schedule = Grow()
        >>> [len(relay.stack) for _ in range(4) if schedule.step(relay, batch)]
        [6, 6, 7, 7]
    """

    force: bool = False

    def is_forced(self, relay: SchedulableRelay) -> bool:
        """Return `force`; a schedule of schedules returns that of the parts that are used now."""
        return self.force

    def edits(self, relay: SchedulableRelay) -> Sequence[Edit]:
        """List the edits to apply before the next step, as one group."""
        return ()

    def skip(self, relay: SchedulableRelay) -> Sequence[str]:
        """List the keys of the layers to skip in the next step."""
        return ()

    def skip_in_evaluation(self, relay: SchedulableRelay) -> Sequence[str]:
        """List the keys of the layers that the model evaluated after the last step is without."""
        return ()

    def lr_factor(self, relay: SchedulableRelay) -> float | None:
        """Return the factor of the optimizer's learning rates in the next step; None leaves them as they are."""
        return None

    def prepare(self, relay: SchedulableRelay) -> None:
        """Apply the edits before the next step, and set the learning rates if the schedule has a factor for them.

        Raises:
            ValueError: an edit is not possible; the relay has not changed.
        """
        if edits := self.edits(relay):
            relay.apply(*edits, force=self.is_forced(relay))
        if (factor := self.lr_factor(relay)) is not None:
            for group in relay.optimizer.param_groups:  # as torch's schedulers do
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def step(self, relay: SchedulableRelay, batch: Batch) -> StepResult:
        """Apply the edits and train on one batch; raise as `Relay.apply` and `Relay.step` do."""
        with relay.expect(batch):
            self.prepare(relay)
            return relay.step(batch, skip=self.skip(relay), force=self.is_forced(relay))

    def __add__(self, other: Schedule) -> Schedule:
        if not isinstance(other, Schedule):
            return NotImplemented
        return Schedules((self, other))


@dataclass(frozen=True)
class Schedules(Schedule):
    """Several schedules, applied one after another; `edits` are those of the first one that has any.

    Raises:
        ValueError: one overrides `step`.
    """

    parts: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            refuse_own_step(part, "a sum of schedules")

    def edits(self, relay: SchedulableRelay) -> Sequence[Edit]:
        return next((edits for part in self.parts if (edits := part.edits(relay))), ())

    @property
    def force(self) -> bool:  # type: ignore[override] - a property, because it depends on the parts
        return any(part.force for part in self.parts)

    def is_forced(self, relay: SchedulableRelay) -> bool:
        return any(part.is_forced(relay) for part in self.parts)

    def skip(self, relay: SchedulableRelay) -> Sequence[str]:
        return list(dict.fromkeys(key for part in self.parts for key in part.skip(relay)))

    def skip_in_evaluation(self, relay: SchedulableRelay) -> Sequence[str]:
        return list(dict.fromkeys(key for part in self.parts for key in part.skip_in_evaluation(relay)))

    def lr_factor(self, relay: SchedulableRelay) -> float | None:
        """Return the factor of the last part that has one, since parts are prepared in order."""
        return next((factor for part in reversed(self.parts) if (factor := part.lr_factor(relay)) is not None), None)

    def prepare(self, relay: SchedulableRelay) -> None:
        for part in self.parts:
            part.prepare(relay)


@dataclass(frozen=True)
class Freezing(Schedule):
    """Freeze the first layers of a stack and train all others; it unfreezes other layers of the stack.

    Frozen layers at the bottom are run forward only, if nothing below them is trained either (freeze the embedding, too).

    Args:
        frozen: number of frozen layers by step, as `depth` of `Depth`.
        stack: dotted name of the container, if there are several.

    Example:
        >>> from l2l_core import Freezing
        >>> result = Freezing(2).step(relay, batch)
        >>> [layer.frozen for layer in relay.stack]
        [True, True, False, False, False, False]
    """

    frozen: PerStep
    stack: str | None = None

    def __post_init__(self) -> None:
        check_step_values("frozen", self.frozen, least=0)

    def edits(self, relay: SchedulableRelay) -> Sequence[Edit]:
        layers = stack_of(relay, self.stack)
        count = value_at("frozen", self.frozen, relay.steps, least=0)
        if count is None:
            return ()
        edits: list[Edit] = [
            Freeze(in_stack(self.stack, part))
            for part in _runs(i for i in range(min(count, len(layers))) if not layers[i].frozen)
        ]
        # A layer without parameters counts as frozen.
        unfreezing = (i for i in range(count, len(layers)) if layers[i].params and layers[i].frozen)
        return edits + [Unfreeze(in_stack(self.stack, part)) for part in _runs(unfreezing)]


def _runs(positions: Iterable[int]) -> Iterator[slice]:
    """Join ascending positions to slices without gaps."""
    run: list[int] = []
    for i in positions:
        if run and i != run[-1] + 1:
            yield slice(run[0], run[-1] + 1)
            run = []
        run.append(i)
    if run:
        yield slice(run[0], run[-1] + 1)


@dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    """Learning rate that rises linearly, stays constant, and falls linearly towards zero at the end of the run.

    Runs of different lengths are equal up to the first decay, so that one run at constant rate is the trunk of all of them (Hu
    et al., arXiv 2404.06395). The rate of a group is its first one times the factor of the step. Use this in place of a
    scheduler of torch, since both set the rates: ``Depth({0: 4, 500: 8}) + WarmupStableDecay(1000, warmup=20, decay=200)``.

    Args:
        steps: number of steps of the run; beyond it the rate is that of the last step.
        warmup: steps over which the rate rises.
        decay: steps over which it falls, the last ones of the run.
        restarts: steps at which the rate rises again over `warmup` steps, for all layers. For new layers alone, see `warmup`
            of `Insert`, `Duplicate` and `Depth`.

    Example:
        >>> from l2l_core import WarmupStableDecay
        >>> WarmupStableDecay(1000, warmup=20, decay=200).lr_factor(relay)  # of the first step
        0.05
    """

    steps: int
    warmup: int = 0
    decay: int = 0
    restarts: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_int("steps", self.steps, 1)
        for name, value in (
            ("warmup", self.warmup),
            ("decay", self.decay),
            *(("a restart", at) for at in self.restarts),
        ):
            check_int(name, value, 0)
        if self.warmup + self.decay > self.steps:
            raise ValueError(
                f"warmup={self.warmup} and decay={self.decay} are more than steps={self.steps}: shorten one of them"
            )

    def lr_factor(self, relay: SchedulableRelay) -> float:
        return self.factor(relay.steps)

    def factor(self, step: int) -> float:
        """Return the factor of the step after `step` finished ones."""
        step = min(step, self.steps - 1)
        began = max([0, *(at for at in self.restarts if at <= step)])
        rise = min(1.0, (step - began + 1) / self.warmup) if self.warmup else 1.0
        return min(rise, (self.steps - step) / (self.decay + 1) if self.decay else 1.0, 1.0)


# -- helpers of schedules ----------------------------------------------------------------------------------------------


def refuse_own_step(schedule: Schedule, caller: str) -> None:
    """Raise ValueError if a schedule overrides `step`, which a caller that makes the steps itself would ignore."""
    step = getattr(schedule, "step", None)
    if step is not None and getattr(step, "__func__", None) is not Schedule.step:
        raise ValueError(
            f"{type(schedule).__name__} overrides step, and {caller} would ignore that: it calls prepare, skip and "
            "is_forced, and makes the step itself. Move the code into prepare(self, relay), which runs before each step and "
            "there can also do what is due after the step before; or call schedule.step(relay, batch) in a loop of yours"
        )


def stack_of(relay: SchedulableRelay, name: str | None) -> tuple[Unit, ...]:
    """Return the stack `name`, or the only one; raise ValueError if there is no such stack."""
    stacks = relay.stacks
    if name is None and len(stacks) == 1:
        return next(iter(stacks.values()))
    if name is None or name not in stacks:
        there = ", ".join(f"{each!r} ({len(layers)} layers)" for each, layers in stacks.items()) or "none"
        raise ValueError(f"stack={name!r}: pass the name of the stack for the schedule; there are {there}")
    return stacks[name]


def in_stack(stack: str | None, where: Any) -> Any:
    """Return `where` with the stack's name, or alone if there is one stack."""
    return where if stack is None else (stack, where)


def value_at(name: str, values: PerStep, step: int, least: int) -> int | None:
    """Return the value at a step, of at least `least`, or None before the first step of a mapping."""
    if isinstance(values, int):
        return values
    if not isinstance(values, Mapping):
        return check_int(f"{name}({step})", values(step), least)
    past = [first for first in values if first <= step]
    return values[max(past)] if past else None


def check_step_values(name: str, values: object, least: int) -> None:
    """Check that `values` is an integer of at least `least`, a mapping of steps to such integers, or a function."""
    if isinstance(values, int):
        check_int(name, values, least)
    elif isinstance(values, Mapping):
        if not values:
            raise ValueError(f"{name}={values!r}: pass at least one value by its first step, as {{0: 3, 100: 6}}")
        for step, value in values.items():
            check_int(f"a step of {name}", step, 0)
            check_int(f"{name} from step {step} on", value, least)
    elif not callable(values):
        raise TypeError(f"{name}={values!r}: pass an integer, a function of the step, or a mapping as {{0: 3, 100: 6}}")


def check_int(name: str, value: object, least: int) -> int:
    """Return `value` if it is an integer of at least `least`; raise ValueError otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}: must be an integer of at least {least}")
    return value
