"""Results of earlier passes that later ones of the same kind reuse: layer order and meter records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from l2l_core.batches import LRUCache
from l2l_core.config import RelayConfig
from l2l_core.eps.blocks import Unit
from l2l_core.step.traffic import MeterRecord

_MAX_KINDS = 16  # of inferences, and of steps with a counted `keep`


@dataclass(frozen=True, slots=True)
class PassKind:
    """Inputs that determine layer order and memory of a pass."""

    config: RelayConfig  # without the seed
    shapes: tuple[Any, ...]  # of every micro-batch's tensors
    training: bool  # the model's mode
    layers: frozenset[tuple[str, tuple[bool, ...]]]  # key, and whether each parameter is trained

    def without_layers(self) -> PassKind:
        """Return the kind without its layers."""
        return replace(self, layers=frozenset())


_StepRecord = tuple[PassKind, MeterRecord]


class PassCache:
    """Results of a relay's earlier passes.

    Attributes:
        layer_order: the expected order of visits of the next step.
        last_kind: kind of the last step, if later steps have its layer order.
        inferences: meter records by kind and task.
        kept_counts: how many layers fit a `keep` in bytes, by kind of step.
    """

    def __init__(self, layers: Sequence[Unit]) -> None:
        self.inferences: LRUCache[MeterRecord] = LRUCache(_MAX_KINDS)
        self.kept_counts: LRUCache[int] = LRUCache(_MAX_KINDS)
        self.last_kind: PassKind | None = None
        self.reset(layers)

    def reset(self, layers: Sequence[Unit]) -> None:
        """Forget all passes after an edit of the layers."""
        self.layer_order, self._order_is_guess = list(layers), True
        self._skips_layers = False
        self.invalidate()
        self.inferences.clear()
        self.kept_counts.clear()

    def invalidate(self) -> None:
        """Forget the meter records of steps, so that the next step is metered."""
        self._full_step: _StepRecord | None = None  # the last metered one with all layers
        self._partial_steps: _StepRecord | None = None  # those that skip layers, merged

    def set_layer_order(self, layer_order: Sequence[Unit]) -> None:
        """Set the order of visits that a pass has found."""
        self.layer_order, self._order_is_guess = list(layer_order), False

    def find_step(self, kind: PassKind) -> MeterRecord | None:
        """Return the record that a step of this kind may replay; None if it must be metered.

        A step that skips layers can be replayed when each of its layers was in a metered step. Its events are then not in the
        order of that step: the meter books the peak of their label.
        """
        if self._skips_layers:
            return self._find_covering(kind)
        return self._full_step[1] if self._full_step is not None and self._full_step[0] == kind else None

    def _find_covering(self, kind: PassKind) -> MeterRecord | None:
        return _find_superset(self._full_step, kind) or _find_superset(self._partial_steps, kind)

    def record_step(self, kind: PassKind, layer_order: Sequence[Unit], record: MeterRecord) -> None:
        """Store the results of a finished step."""
        self.last_kind = None
        if not self._order_is_guess or list(layer_order) == self.layer_order:  # else later steps run in another order
            self.last_kind = kind
            if not self._skips_layers:
                self._full_step = kind, record
            elif self._find_covering(kind) is None:
                self._partial_steps = _merge(kind, record, self._partial_steps)
        self.set_layer_order(layer_order)

    @contextmanager
    def without(self, units: Collection[Unit]) -> Iterator[None]:
        """Skip some layers in the block; the layer order of all layers is restored after it."""
        before = self.layer_order, self._order_is_guess, self._skips_layers
        self.layer_order, self._order_is_guess = [unit for unit in self.layer_order if unit not in units], False
        self._skips_layers = True
        try:
            yield
        finally:
            self.layer_order, self._order_is_guess, self._skips_layers = before

    def snapshot(self) -> Callable[[], None]:
        """Return a function that forgets the steps recorded since."""
        return partial(vars(self).update, dict(vars(self)))


def _find_superset(step: _StepRecord | None, kind: PassKind) -> MeterRecord | None:
    """Return the record of a step with all layers of `kind`, and maybe others; None if `step` is none."""
    if step is None or not kind.layers <= step[0].layers:
        return None
    return step[1] if kind.without_layers() == step[0].without_layers() else None


def _merge(kind: PassKind, record: MeterRecord, earlier: _StepRecord | None) -> _StepRecord:
    """Add the layers and the record of earlier steps, if they differ in nothing else."""
    if earlier is None or kind.without_layers() != earlier[0].without_layers():
        return kind, record
    return replace(kind, layers=kind.layers | earlier[0].layers), record.merge(earlier[1])
