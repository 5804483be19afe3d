"""Results of earlier passes that later ones of the same kind reuse: layer order and meter records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from l2l_core.batches import LRUCache
from l2l_core.config import RelayConfig
from l2l_core.eps.blocks import Unit
from l2l_core.step.traffic import MeterRecord

LayerFlags = frozenset[tuple[str, tuple[bool, ...]]]  # key, and `requires_grad` of every parameter

_MAX_KINDS = 16  # of inferences, and of steps with a counted `keep`


@dataclass(frozen=True, slots=True)
class PassKind:
    """Inputs that determine layer order and memory of a pass.

    Attributes:
        config: settings, without the seed.
        shapes: shapes of every micro-batch's tensors.
        training: the model's mode.
        layers: the layers, and which of their parameters are trained.
    """

    config: RelayConfig
    shapes: tuple[Any, ...]
    training: bool
    layers: LayerFlags

    def without_layers(self) -> PassKind:
        """Return the kind without its layers."""
        return replace(self, layers=frozenset())


class PassCache:
    """Results of a relay's earlier passes.

    Attributes:
        layer_order: the expected order of visits of the next step.
        last_kind: kind of the last step, if later steps have its layer order.
    """

    def __init__(self, layers: Sequence[Unit]) -> None:
        self._inferences: LRUCache[MeterRecord] = LRUCache(_MAX_KINDS)
        self._kept_counts: LRUCache[int] = LRUCache(_MAX_KINDS)
        self.last_kind: PassKind | None = None
        self.reset(layers)

    def reset(self, layers: Sequence[Unit]) -> None:
        """Forget all passes after an edit of the layers."""
        self.layer_order, self._order_is_guess = list(layers), True
        self._full_steps = self._current_steps = _StepRecords()
        self._partial_steps = _PartialStepRecords(self._full_steps)
        self._inferences.clear()
        self._kept_counts.clear()

    def invalidate(self) -> None:
        """Forget the meter records of steps, so that the next step is metered."""
        self._full_steps.clear()
        self._partial_steps.clear()

    def set_layer_order(self, layer_order: Sequence[Unit]) -> None:
        """Set the order of visits that a pass has found."""
        self.layer_order, self._order_is_guess = list(layer_order), False

    def find_step(self, kind: PassKind) -> MeterRecord | None:
        """Return the record that a step of this kind may replay; None if it must be metered."""
        return self._current_steps.find(kind)

    def record_step(self, kind: PassKind, layer_order: Sequence[Unit], record: MeterRecord) -> None:
        """Store the results of a finished step."""
        self.last_kind = None
        if not self._order_is_guess or list(layer_order) == self.layer_order:  # else later steps run in another order
            self.last_kind = kind
            self._current_steps.store(kind, record)
        self.set_layer_order(layer_order)

    def find_inference(self, kind: PassKind, task: object) -> MeterRecord | None:
        """Return the record that an inference of this kind and task may replay; None if it must be metered."""
        return self._inferences.get((kind, task))

    def record_inference(self, kind: PassKind, task: object, record: MeterRecord) -> None:
        """Store the results of a finished inference."""
        self._inferences.put((kind, task), record)

    def find_kept_count(self, kind: PassKind) -> int | None:
        """Return how many layers fit a `keep` in bytes, for steps of this kind; None if it was not counted."""
        return self._kept_counts.get(kind)

    def record_kept_count(self, kind: PassKind, count: int) -> None:
        """Store the number of layers that fit a `keep` in bytes."""
        self._kept_counts.put(kind, count)

    @contextmanager
    def without(self, units: Collection[Unit]) -> Iterator[None]:
        """Skip some layers in the block; the layer order of all layers is restored after it."""
        before = self.layer_order, self._order_is_guess, self._current_steps
        self.layer_order, self._order_is_guess = [unit for unit in self.layer_order if unit not in units], False
        self._current_steps = self._partial_steps
        try:
            yield
        finally:
            self.layer_order, self._order_is_guess, self._current_steps = before

    def snapshot(self) -> Callable[[], None]:
        """Return a function that forgets the steps recorded since."""
        before, steps = dict(vars(self)), self._full_steps
        records = dict(vars(steps))

        def restore() -> None:
            vars(self).update(before)
            vars(steps).update(records)

        return restore


class _StepRecords:
    """The record of the last metered kind of step."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._kind: PassKind | None = None
        self._record: MeterRecord | None = None

    def find(self, kind: PassKind) -> MeterRecord | None:
        return self._record if kind == self._kind else None

    def store(self, kind: PassKind, record: MeterRecord) -> None:
        self._kind, self._record = kind, record

    def find_superset(self, kind: PassKind) -> MeterRecord | None:
        """Return the record of a step with all layers of `kind`, and maybe others; None if there is none."""
        if self._kind is None or not kind.layers <= self._kind.layers:
            return None
        return self._record if kind.without_layers() == self._kind.without_layers() else None


class _PartialStepRecords(_StepRecords):
    """Records of steps that skip layers; replayable when every layer was in a metered step.

    Where layers are missing, events are not in the order of the metered step: the meter books the peak of their label.
    """

    def __init__(self, full_steps: _StepRecords) -> None:
        super().__init__()
        self._full_steps = full_steps

    def find(self, kind: PassKind) -> MeterRecord | None:
        return self._full_steps.find_superset(kind) or self.find_superset(kind)

    def store(self, kind: PassKind, record: MeterRecord) -> None:
        if self.find(kind) is not None:
            return
        last, metered = self._kind, self._record
        if last is not None and metered is not None and kind.without_layers() == last.without_layers():
            kind, record = replace(kind, layers=kind.layers | last.layers), record.merge(metered)
        super().store(kind, record)
