"""Depth, and what is trained of it, as a function of the step.

A schedule looks at the number of finished steps and at the stack, and says which edits are due before the next step and which
layers sit it out. It keeps nothing: a run that was saved and loaded, or a step that is tried again, does the same.

    schedule = gradual_stacking(3, every=100, depth=12) + LayerDrop(0.1)
    for batch in batches:
        schedule.step(relay, batch)

What it is not: a learning rate schedule (torch has those), or a loop of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from l2l_core.batches import Batch
from l2l_core.config import RelayConfig
from l2l_core.edits.edit import Drop, Duplicate, Edit, Freeze, Insert, Policy, Unfreeze
from l2l_core.eps.blocks import Unit
from l2l_core.model import Where
from l2l_core.trace import StepResult

Grow = Literal["top", "middle", "interleaved", "identity"]
Shrink = Literal["influence", "top", "bottom"]
PerStep = Callable[[int], int] | Mapping[int, int]  # by step; a mapping holds each value from its step on


class Steerable(Protocol):
    """What a schedule asks of a relay."""

    @property
    def config(self) -> RelayConfig: ...

    @property
    def steps(self) -> int: ...

    @property
    def stacks(self) -> Mapping[str, tuple[Unit, ...]]: ...

    def apply(self, *edits: Edit) -> object: ...

    def expect(self, batch: Batch) -> object: ...

    def step(self, batch: Batch, skip: Iterable[Where] = (), trust: bool = False) -> StepResult: ...


class Schedule:
    """What is due before the next step. Schedules add up: ``Depth(...) + LayerDrop(0.1)``.

    Attributes:
        trust: whether layers sit out even where that is refused on evidence alone; see `Relay.step`.
    """

    trust: bool = False

    def edits(self, relay: Steerable) -> Sequence[Edit]:
        """Edits for now, one group of them, which last; none if all is as it should be."""
        return ()

    def skip(self, relay: Steerable) -> Sequence[str]:
        """Keys of the layers that sit the next step out."""
        return ()

    def prepare(self, relay: Steerable) -> None:
        """Carry out the edits that are due.

        Raises:
            ValueError: one cannot be; the relay is as it was.
        """
        if edits := self.edits(relay):
            relay.apply(*edits)

    def step(self, relay: Steerable, batch: Batch) -> StepResult:
        """Edit what is due, and train on one batch; raises what `Relay.apply` and `Relay.step` do."""
        relay.expect(batch)
        self.prepare(relay)
        return relay.step(batch, skip=self.skip(relay), trust=self.trust)

    def __add__(self, other: Schedule) -> Schedule:
        if not isinstance(other, Schedule):
            return NotImplemented
        return Schedules((self, other))


@dataclass(frozen=True)
class Schedules(Schedule):
    """Several schedules, one after another: each finds the stack as those before it have left it.

    `edits` are those of the first one that has something to do.
    """

    parts: tuple[Schedule, ...]

    def edits(self, relay: Steerable) -> Sequence[Edit]:
        return next((edits for part in self.parts if (edits := part.edits(relay))), ())

    @property
    def trust(self) -> bool:  # type: ignore[override] - of any part
        return any(part.trust for part in self.parts)

    def skip(self, relay: Steerable) -> Sequence[str]:
        return list(dict.fromkeys(key for part in self.parts for key in part.skip(relay)))

    def prepare(self, relay: Steerable) -> None:
        for part in self.parts:
            part.prepare(relay)


@dataclass(frozen=True)
class Depth(Schedule):
    """Grow or shrink a stack to a depth that depends on the step.

    Args:
        depth: number of layers by step, as a function of the number of finished steps, or as a mapping that holds each value
            from its step on: ``{0: 3, 100: 6, 200: 12}``.
        grow: from n to m layers. "top": copies of the last m - n layers go on top (stacking: Gong et al. 2019, StackBERT;
            Du et al., arXiv 2405.15319). "middle": a block of m - n layers in the middle is followed by its copy (MIDAS:
            Saunshi et al., arXiv 2409.19044; of an even number of blocks the one below the middle). "interleaved": m - n layers,
            evenly spread, are each followed by their copy. "identity": evenly spread new layers that change nothing yet. To
            more than 2n layers the stack grows in several rounds, each of which doubles it, as one group.
        shrink: from n to m layers. "influence": without those of the least influence in the last step (ShortGPT: Men et al.,
            arXiv 2403.03853); waits for a step that tells it of enough layers. "top", "bottom": without the last, the first.
        stack: dotted name of the container, if there are several.
        optimizer, warmup: of new layers, as of `Insert`; None is "copy" for copies and "fresh" for identity layers.
        park: of layers that go, as of `Drop`.
    """

    depth: PerStep
    grow: Grow = "middle"
    shrink: Shrink = "influence"
    stack: str | None = None
    optimizer: Policy | None = None
    warmup: int = 0
    park: Literal["memory", "disk"] | None = "memory"

    def __post_init__(self) -> None:
        _check_per_step("depth", self.depth, least=1)
        for name, choices in (("grow", Grow), ("shrink", Shrink)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: must be one of {', '.join(map(repr, get_args(choices)))}"
                )
        Insert(
            0, optimizer="copy" if self.optimizer is None else self.optimizer, warmup=self.warmup
        )  # refuse what is wrong
        Drop(0, park=self.park)

    def edits(self, relay: Steerable) -> Sequence[Edit]:
        layers = _stack_of(relay, self.stack)
        wanted = _at("depth", self.depth, relay.steps, least=1)
        if wanted is None or wanted == len(layers):
            return ()
        if wanted < len(layers):
            return self._drops(layers, len(layers) - wanted)
        edits, count = list[Edit](), len(layers)
        while count < wanted:
            more = min(count, wanted - count)
            edits += self._additions(count, more)
            count += more
        return edits

    def _additions(self, count: int, more: int) -> list[Edit]:
        """Edits that make `count` layers `more`."""
        policy = "copy" if self.optimizer is None else self.optimizer
        if self.grow == "top":
            return [Duplicate(_in(self.stack, slice(count - more, count)), "top", policy, self.warmup)]
        if self.grow == "middle":
            first = more * ((count // more - 1) // 2) + count % more // 2
            return [Duplicate(_in(self.stack, slice(first, first + more)), "middle", policy, self.warmup)]
        spread = [
            (2 * i + 1) * count // (2 * more) for i in reversed(range(more))
        ]  # from the last, which moves no other
        if self.grow == "interleaved":
            return [Duplicate(_in(self.stack, i), "interleaved", policy, self.warmup) for i in spread]
        policy = "fresh" if self.optimizer is None else self.optimizer
        return [Insert(_in(self.stack, i + 1), optimizer=policy, warmup=self.warmup) for i in spread]

    def _drops(self, layers: Sequence[Unit], fewer: int) -> list[Edit]:
        if self.shrink == "influence":
            known = [unit for unit in layers if "influence" in unit.stats]
            least = sorted(known, key=lambda unit: unit.stats["influence"])[:fewer]
            return [Drop(unit.key, self.park) for unit in layers if unit in least] if len(least) == fewer else []
        first = len(layers) - fewer if self.shrink == "top" else 0
        return [Drop(_in(self.stack, slice(first, first + fewer)), self.park)]


@dataclass(frozen=True)
class Freezing(Schedule):
    """Train all but the first layers of a stack; the stack is the schedule's, which thaws whatever else is frozen in it.

    Backward goes no further than it must: if nothing below is trained either (freeze the embedding too), frozen layers at the
    bottom are run forward only.

    Args:
        frozen: number of layers from the bottom that are frozen, by step, as `depth` of `Depth`.
        stack: dotted name of the container, if there are several.
    """

    frozen: PerStep
    stack: str | None = None

    def __post_init__(self) -> None:
        _check_per_step("frozen", self.frozen, least=0)

    def edits(self, relay: Steerable) -> Sequence[Edit]:
        layers = _stack_of(relay, self.stack)
        count = _at("frozen", self.frozen, relay.steps, least=0)
        if count is None:
            return ()
        edits: list[Edit] = [
            Freeze(_in(self.stack, part))
            for part in _runs(i for i in range(min(count, len(layers))) if not layers[i].frozen)
        ]
        thawing = (i for i in range(count, len(layers)) if layers[i].params and layers[i].frozen)
        return edits + [Unfreeze(_in(self.stack, part)) for part in _runs(thawing)]


# -- by name -----------------------------------------------------------------------------------------------------------


def gradual_stacking(block: int, every: int, depth: int, grow: Grow = "middle", **options: object) -> Depth:
    """`block` layers more `every` so many steps, from `block` up to `depth`: in the middle (MIDAS), or on the "top"."""
    _check_growth(block, depth, block)
    return _growing([*range(block, depth, block), depth], every, grow, **options)


def stacking_by_doubling(first: int, every: int, depth: int, grow: Grow = "top", **options: object) -> Depth:
    """Twice as many layers `every` so many steps, from `first` up to `depth` (StackBERT)."""
    _check_growth(first, depth, first)
    depths = [first]
    while depths[-1] < depth:
        depths.append(min(depth, 2 * depths[-1]))
    return _growing(depths, every, grow, **options)


def growing_by_identity(first: int, every: int, depth: int, by: int = 1, **options: object) -> Depth:
    """`by` identity layers more `every` so many steps, from `first` up to `depth`; the loss does not jump."""
    _check_growth(first, depth, by)
    return _growing([*range(first, depth, by), depth], every, "identity", **options)


def dropping_by_influence(depth: PerStep, **options: object) -> Depth:
    """Shrink to a depth by step, without the layers of the least influence (ShortGPT)."""
    return Depth(depth, shrink="influence", **options)  # type: ignore[arg-type]


def _growing(depths: Sequence[int], every: int, grow: Grow, **options: object) -> Depth:
    _checked("every", every, 1)
    options.setdefault("shrink", "top")  # a model that has its full depth at first
    return Depth({i * every: depth for i, depth in enumerate(depths)}, grow, **options)  # type: ignore[arg-type]


# -- helpers -----------------------------------------------------------------------------------------------------------


def _stack_of(relay: Steerable, name: str | None) -> tuple[Unit, ...]:
    """The layers of the stack that is meant."""
    stacks = relay.stacks
    if name is None and len(stacks) == 1:
        return next(iter(stacks.values()))
    if name is None or name not in stacks:
        there = ", ".join(f"{each!r} ({len(layers)} layers)" for each, layers in stacks.items()) or "none"
        raise ValueError(f"stack={name!r}: say which stack the schedule is for; there are {there}")
    return stacks[name]


def _in(stack: str | None, where: Any) -> Any:
    """A place as edits take it: where there is one stack, a position will do."""
    return where if stack is None else (stack, where)


def _at(name: str, values: PerStep, step: int, least: int) -> int | None:
    """The value for a step; None before the first one of a mapping."""
    if not isinstance(values, Mapping):
        return _checked(f"{name}({step})", values(step), least)
    past = [first for first in values if first <= step]
    return values[max(past)] if past else None


def _check_per_step(name: str, values: object, least: int) -> None:
    if isinstance(values, Mapping):
        if not values:
            raise ValueError(f"{name}={values!r}: give a value from some step on, as {{0: 3, 100: 6}}")
        for step, value in values.items():
            _checked(f"a step of {name}", step, 0)
            _checked(f"{name} from step {step} on", value, least)
    elif not callable(values):
        raise TypeError(f"{name}={values!r}: give a function of the step, or a mapping as {{0: 3, 100: 6}}")


def _checked(what: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} is {value!r}: must be an integer of at least {least}")
    return value


def _check_growth(first: int, depth: int, by: int) -> None:
    for name, value in (("the first depth", first), ("depth", depth), ("the number of layers at a time", by)):
        _checked(name, value, 1)
    if first > depth:
        raise ValueError(f"from {first} to {depth} layers is no growth: begin with at most {depth}")


def _runs(positions: Iterable[int]) -> Iterator[slice]:
    """Ascending positions as slices without gaps."""
    first = last = None
    for i in positions:
        if first is not None and i != last + 1:  # type: ignore[operator] - set together
            yield slice(first, last + 1)  # type: ignore[operator]
            first = None
        first, last = i if first is None else first, i
    if first is not None and last is not None:
        yield slice(first, last + 1)
