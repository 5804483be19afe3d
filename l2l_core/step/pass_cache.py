"""What passes have taught for later ones like them: the way through the layers, and what a meter need not find out again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from l2l_core.batches import LRUCache
from l2l_core.config import RelayConfig
from l2l_core.eps.blocks import Unit
from l2l_core.step.traffic import MeterRecord

LayerFlags = frozenset[tuple[str, tuple[bool, ...]]]  # key, and of every parameter whether it is trained

_MAX_KINDS = 16  # of inference, of which it is remembered what they need


@dataclass(frozen=True, slots=True)
class PassKind:
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
    layers: LayerFlags


class PassCache:
    """What a relay remembers of its passes.

    Attributes:
        way: the order of visits that the next step is expected to take.
        last: of what kind the last step was, if later ones go its way.
    """

    def __init__(self, layers: Sequence[Unit]) -> None:
        self._inferences: LRUCache[MeterRecord] = LRUCache(_MAX_KINDS)
        self._kept_counts: LRUCache[int] = LRUCache(_MAX_KINDS)
        self.last_kind: PassKind | None = None
        self.reset(layers)

    def reset(self, layers: Sequence[Unit]) -> None:
        """Layers were edited: all that is known now is their order."""
        self.layer_order, self._order_is_guess = list(layers), True
        self._full_steps = self._current_steps = _StepRecords()
        self._partial_steps = _PartialStepRecords(self._full_steps)
        self._inferences.clear()
        self._kept_counts.clear()

    def invalidate(self) -> None:
        """A step did what the one that was metered did not: the next one is metered."""
        self._full_steps.clear()
        self._partial_steps.clear()

    def set_layer_order(self, layer_order: Sequence[Unit]) -> None:
        """A pass has found out in which order layers are visited."""
        self.layer_order, self._order_is_guess = list(layer_order), False

    def find_step(self, kind: PassKind) -> MeterRecord | None:
        """Return what a step of this kind may replay; None if it must be metered."""
        return self._current_steps.find(kind)

    def record_step(self, kind: PassKind, layer_order: Sequence[Unit], record: MeterRecord) -> None:
        """A step is over, and went this way."""
        self.last_kind = None
        if (
            not self._order_is_guess or list(layer_order) == self.layer_order
        ):  # otherwise no later step goes the way of this one
            self.last_kind = kind
            self._current_steps.store(kind, record)
        self.set_layer_order(layer_order)

    def find_inference(self, kind: PassKind, task: object) -> MeterRecord | None:
        """Return what an inference of this kind, for this purpose, may replay; None if it must be metered."""
        return self._inferences.get((kind, task))

    def record_inference(self, kind: PassKind, task: object, record: MeterRecord) -> None:
        """An inference is over."""
        self._inferences.put((kind, task), record)

    def find_kept_count(self, kind: PassKind) -> int | None:
        """Return how many graphs a step of this kind keeps, whose settings say in bytes how much; None if nobody has counted."""
        return self._kept_counts.get(kind)

    def record_kept_count(self, kind: PassKind, count: int) -> None:
        """Say how many these are."""
        self._kept_counts.put(kind, count)

    @contextmanager
    def without(self, units: Collection[Unit]) -> Iterator[None]:
        """Let some layers sit out in the block; what is known of steps with all of them is as it was afterwards."""
        before = self.layer_order, self._order_is_guess, self._current_steps
        self.layer_order, self._order_is_guess = [unit for unit in self.layer_order if unit not in units], False
        self._current_steps = self._partial_steps
        try:
            yield
        finally:
            self.layer_order, self._order_is_guess, self._current_steps = before

    def snapshot(self) -> Callable[[], None]:
        """Keep what is known of steps; the result forgets what was learned since."""
        kept = {
            name: getattr(self, name)
            for name in (
                "layer_order",
                "_order_is_guess",
                "last_kind",
                "_full_steps",
                "_current_steps",
                "_partial_steps",
            )
        }
        put_back = self._full_steps.snapshot()

        def forget() -> None:
            vars(self).update(kept)
            put_back()

        return forget


class _StepRecords:
    """Of one kind of step."""

    def __init__(self) -> None:
        self._kind: PassKind | None = None
        self._record: MeterRecord | None = None

    def find(self, kind: PassKind) -> MeterRecord | None:
        return self._record if kind == self._kind else None

    def store(self, kind: PassKind, record: MeterRecord) -> None:
        self._kind, self._record = kind, record

    def clear(self) -> None:
        self._kind = self._record = None

    def snapshot(self) -> Callable[[], None]:
        kind, metered = self._kind, self._record
        return lambda: vars(self).update(_kind=kind, _record=metered)

    def find_superset(self, kind: PassKind) -> MeterRecord | None:
        """Return what a step with all of these layers, and maybe with others, has learned; None if there was none."""
        if self._kind is None or not _same_but_layers(kind, self._kind) or not kind.layers <= self._kind.layers:
            return None
        return self._record


class _PartialStepRecords(_StepRecords):
    """Of steps that leave some layers out, others every time: it is enough that each layer was in a step that was metered.

    Where layers are missing, events are not in the order of the metered step: the meter books the most that an event of
    their kind had.
    """

    def __init__(self, full_steps: _StepRecords) -> None:
        super().__init__()
        self._full_steps = full_steps

    def find(self, kind: PassKind) -> MeterRecord | None:
        return self._full_steps.find_superset(kind) or self.find_superset(kind)

    def store(self, kind: PassKind, record: MeterRecord) -> None:
        if self.find(kind) is not None:
            return
        if self._kind is not None and self._record is not None and _same_but_layers(kind, self._kind):
            kind = PassKind(kind.config, kind.shapes, kind.training, kind.layers | self._kind.layers)
            record = record.merge(self._record)
        super().store(kind, record)


def _same_but_layers(a: PassKind, b: PassKind) -> bool:
    """Whether two kinds differ in layers alone."""
    return (a.config, a.shapes, a.training) == (b.config, b.shapes, b.training)
