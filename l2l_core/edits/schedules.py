"""Schedules of a stack's depth and training, as a function of the step.

Given the number of finished steps and the stack, a schedule determines the edits before the next step and the layers that are
skipped in it. It has no state, so that it does the same after loading a save and in a repeated step.

    schedule = gradual_stacking(3, every=100, depth=12) + LayerDrop(0.1)
    for batch in batches:
        schedule.step(relay, batch)

`Freezing`, `LayerDrop`, `ActiveLayers` and `WarmupStableDecay` are here, `Depth` is in `depth.py`.
"""

from __future__ import annotations

import hashlib
import inspect
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
Rate = float | Callable[[float], float] | Callable[[float, int], float]


class SchedulableRelay(Protocol):
    """The part of a relay that schedules use."""

    @property
    def config(self) -> RelayConfig: ...

    @property
    def steps(self) -> int: ...

    @property
    def stacks(self) -> Mapping[str, tuple[Unit, ...]]: ...

    @property
    def optimizer(self) -> Optimizer: ...

    def apply(self, *edits: Edit) -> object: ...

    def expect(self, batch: Batch) -> AbstractContextManager[object]: ...

    def step(self, batch: Batch, skip: Iterable[LayerRef] = (), force: bool = False) -> StepResult: ...


class Schedule:
    """Edits and skipped layers by step; schedules can be added: ``Depth(...) + LayerDrop(0.1)``.

    Attributes:
        force: skip the refusals that rest on evidence; see `Relay.step`.
    """

    force: bool = False

    def edits(self, relay: SchedulableRelay) -> Sequence[Edit]:
        """List the edits to apply before the next step, as one group."""
        return ()

    def skip(self, relay: SchedulableRelay) -> Sequence[str]:
        """List the keys of the layers to skip in the next step."""
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
            relay.apply(*edits)
        if (factor := self.lr_factor(relay)) is not None:
            for group in relay.optimizer.param_groups:  # as torch's schedulers do
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def step(self, relay: SchedulableRelay, batch: Batch) -> StepResult:
        """Apply the edits and train on one batch; raise as `Relay.apply` and `Relay.step` do."""
        with relay.expect(batch):
            self.prepare(relay)
            return relay.step(batch, skip=self.skip(relay), force=self.force)

    def __add__(self, other: Schedule) -> Schedule:
        if not isinstance(other, Schedule):
            return NotImplemented
        return Schedules((self, other))


@dataclass(frozen=True)
class Schedules(Schedule):
    """Several schedules, applied one after another; `edits` are those of the first one that has any."""

    parts: tuple[Schedule, ...]

    def edits(self, relay: SchedulableRelay) -> Sequence[Edit]:
        return next((edits for part in self.parts if (edits := part.edits(relay))), ())

    @property
    def force(self) -> bool:  # type: ignore[override] - a property, because it depends on the parts
        return any(part.force for part in self.parts)

    def skip(self, relay: SchedulableRelay) -> Sequence[str]:
        return list(dict.fromkeys(key for part in self.parts for key in part.skip(relay)))

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
class LayerDrop(Schedule):
    """Skip every layer of a stack in a step with some probability; at least one of each stack runs.

    LayerDrop (Fan et al., arXiv 1909.11556) has one rate for all layers; in stochastic depth (Huang et al., arXiv 1603.09382)
    it grows linearly with depth, ``LayerDrop(lambda x: 0.5 * x)``; in progressive layer dropping (Zhang & He, arXiv 2010.13369)
    with the step, too, ``LayerDrop(lambda x, step: 0.5 * x * (1 - math.exp(-step / 1000)))``. Outputs of layers are not
    rescaled. The choice depends on the relay's seed, the step and the layers' keys alone, so that a repeated step, or one after
    loading a save, skips the same layers.

    Args:
        rate: the probability, or a function of the relative depth (0 for the first layer of the stack, 1 for the last), or of
            the relative depth and the number of finished steps.
        stack: dotted name of the container; None for all stacks.
        force: skip the refusals that rest on evidence; see `Relay.step`.
    """

    rate: Rate
    stack: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if not callable(self.rate):
            _checked(self.rate, "")
        elif not _accepts(self.rate, 1) and not _accepts(self.rate, 2):
            raise TypeError(
                f"rate={self.rate!r}: must be a number, or a function of the relative depth, or of relative depth and step"
            )

    def skip(self, relay: SchedulableRelay) -> Sequence[str]:
        stacks = relay.stacks
        if self.stack is not None and self.stack not in stacks:
            raise ValueError(f"stack={self.stack!r}: there are {', '.join(map(repr, stacks)) or 'none'}")
        skipped = list[str]()
        for layers in stacks.values() if self.stack is None else [stacks[self.stack]]:
            rates = self.rates([unit.key for unit in layers], relay.steps)
            skipped += draw_skipped(relay.config.seed, relay.steps, rates)
        return skipped

    def rates(self, keys: Sequence[str], step: int) -> dict[str, float]:
        """Return the probability of every layer of a stack to be skipped in `step`; `keys` are its layers in order."""
        rate: Any = self.rate
        if not callable(rate):
            return dict.fromkeys(keys, float(rate))
        args, last = ((step,) if _accepts(rate, 2) else ()), max(1, len(keys) - 1)
        return {key: _checked(rate(i / last, *args), f" for {key} in step {step}") for i, key in enumerate(keys)}


@dataclass(frozen=True)
class ActiveLayers(Schedule):
    """Run the first layers of a stack and skip all others, which keep their values until they run.

    With as many layers as the stack has, it is trained as without this schedule. Layers that have not run yet have the initial
    values of the whole model and no optimizer state, so that growth by this schedule is growth by new random layers. 0 layers
    are valid where a layer's output is as its input, see `Relay.step`.

    Args:
        active: number of layers that run, by step, as `depth` of `Depth`.
        stack: dotted name of the container, if there are several.
    """

    active: PerStep
    stack: str | None = None

    def __post_init__(self) -> None:
        check_step_values("active", self.active, least=0)

    def skip(self, relay: SchedulableRelay) -> Sequence[str]:
        count = value_at("active", self.active, relay.steps, least=0)
        return [] if count is None else [unit.key for unit in stack_of(relay, self.stack)[count:]]


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


def draw_skipped(seed: int | None, step: int, rates: Mapping[str, float]) -> list[str]:
    """Draw the keys of the layers that are skipped in `step`, given the probability of each; never all of them."""
    margins = {key: _uniform(f"{seed}/{step}/{key}/skip") - rate for key, rate in rates.items()}
    skipped = [key for key, margin in margins.items() if margin < 0]
    if len(skipped) == len(rates):
        skipped.remove(max(margins, key=margins.__getitem__))
    return skipped


def _uniform(label: str) -> float:
    """Return a pseudo-random number in [0, 1) that depends on `label` alone."""
    # 48 bits, which a float holds without rounding to 1; not `hash`, which differs between processes.
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=6).digest()) / 2**48


def _accepts(function: Callable[..., object], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


def _checked(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"rate={value!r}{where}: must be a number from 0 to 1")
    return float(value)


# -- helpers of schedules ----------------------------------------------------------------------------------------------


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
