"""What passes have taught for later ones like them: the way through the layers, and what a meter need not find out again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from l2l_core.batches import Recent
from l2l_core.config import RelayConfig
from l2l_core.eps.blocks import Unit
from l2l_core.step.traffic import Metered

Layers = frozenset[tuple[str, tuple[bool, ...]]]  # key, and of every parameter whether it is trained

_MOST_KINDS = 16  # of inference, of which it is remembered what they need


@dataclass(frozen=True, slots=True)
class Kind:
    """What the course of a pass depends on. Passes of one kind go one way and need the same memory.

    Attributes:
        config: settings, but for the seed.
        shapes: of every micro-batch's tensors.
        training: the model's mode.
        layers: those that there are, and what of them is trained.
    """

    config: RelayConfig
    shapes: tuple[Any, ...]
    training: bool
    layers: Layers


class Learned:
    """What a relay remembers of its passes.

    Attributes:
        way: the order of visits that the next step is expected to take.
        last: of what kind the last step was, if later ones go its way.
    """

    def __init__(self, layers: Sequence[Unit]) -> None:
        self._inferred: Recent[Metered] = Recent(_MOST_KINDS)
        self._kept: Recent[int] = Recent(_MOST_KINDS)
        self.last: Kind | None = None
        self.forget(layers)

    def forget(self, layers: Sequence[Unit]) -> None:
        """Layers were edited: all that is known now is their order."""
        self.way, self._is_guess = list(layers), True
        self._whole = self._known = _Metered()
        self._in_part = _MeteredInPart(self._whole)
        self._inferred.clear()
        self._kept.clear()

    def distrust(self) -> None:
        """A step did what the one that was metered did not: the next one is metered."""
        self._whole.forget()
        self._in_part.forget()

    def take_way(self, way: Sequence[Unit]) -> None:
        """A pass has found out in which order layers are visited."""
        self.way, self._is_guess = list(way), False

    def of_step(self, kind: Kind) -> Metered | None:
        """Return what a step of this kind may replay; None if it must be metered."""
        return self._known.find(kind)

    def stepped(self, kind: Kind, way: Sequence[Unit], metered: Metered) -> None:
        """A step is over, and went this way."""
        self.last = None
        if not self._is_guess or list(way) == self.way:  # otherwise no later step goes the way of this one
            self.last = kind
            self._known.learn(kind, metered)
        self.take_way(way)

    def of_inference(self, kind: Kind, task: object) -> Metered | None:
        """Return what an inference of this kind, for this purpose, may replay; None if it must be metered."""
        return self._inferred.get((kind, task))

    def inferred(self, kind: Kind, task: object, metered: Metered) -> None:
        """An inference is over."""
        self._inferred.keep((kind, task), metered)

    def kept_of(self, kind: Kind) -> int | None:
        """Return how many graphs a step of this kind keeps, whose settings say in bytes how much; None if nobody has counted."""
        return self._kept.get(kind)

    def keeps(self, kind: Kind, count: int) -> None:
        """Say how many these are."""
        self._kept.keep(kind, count)

    @contextmanager
    def without(self, units: Collection[Unit]) -> Iterator[None]:
        """Let some layers sit out in the block; what is known of steps with all of them is as it was afterwards."""
        before = self.way, self._is_guess, self._known
        self.way, self._is_guess = [unit for unit in self.way if unit not in units], False
        self._known = self._in_part
        try:
            yield
        finally:
            self.way, self._is_guess, self._known = before

    def snapshot(self) -> Callable[[], None]:
        """Keep what is known of steps; the result forgets what was learned since."""
        kept = {name: getattr(self, name) for name in ("way", "_is_guess", "last", "_whole", "_known", "_in_part")}
        put_back = self._whole.snapshot()

        def forget() -> None:
            vars(self).update(kept)
            put_back()

        return forget


class _Metered:
    """Of one kind of step."""

    def __init__(self) -> None:
        self._kind: Kind | None = None
        self._metered: Metered | None = None

    def find(self, kind: Kind) -> Metered | None:
        return self._metered if kind == self._kind else None

    def learn(self, kind: Kind, metered: Metered) -> None:
        self._kind, self._metered = kind, metered

    def forget(self) -> None:
        self._kind = self._metered = None

    def snapshot(self) -> Callable[[], None]:
        kind, metered = self._kind, self._metered
        return lambda: vars(self).update(_kind=kind, _metered=metered)

    def with_more(self, kind: Kind) -> Metered | None:
        """Return what a step with all of these layers, and maybe with others, has learned; None if there was none."""
        if self._kind is None or not _is_like(kind, self._kind) or not kind.layers <= self._kind.layers:
            return None
        return self._metered


class _MeteredInPart(_Metered):
    """Of steps that leave some layers out, others every time: it is enough that each layer was in a step that was metered.

    Where layers are missing, events are not in the order of the metered step: the meter books the most that an event of
    their kind had.
    """

    def __init__(self, whole: _Metered) -> None:
        super().__init__()
        self._of_all = whole

    def find(self, kind: Kind) -> Metered | None:
        return self._of_all.with_more(kind) or self.with_more(kind)

    def learn(self, kind: Kind, metered: Metered) -> None:
        if self.find(kind) is not None:
            return
        if self._kind is not None and self._metered is not None and _is_like(kind, self._kind):
            kind = Kind(kind.config, kind.shapes, kind.training, kind.layers | self._kind.layers)
            metered = metered.joined(self._metered)
        super().learn(kind, metered)


def _is_like(a: Kind, b: Kind) -> bool:
    """Whether two kinds differ in layers alone."""
    return (a.config, a.shapes, a.training) == (b.config, b.shapes, b.training)
