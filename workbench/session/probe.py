"""Losses of a few fixed batches before and after every edit; the measurement does not change training, to the bit.

The losses of two training steps differ because their batches differ. On fixed batches in evaluation mode, the difference
between the losses before and after an edit is the effect of the edit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal

import numpy
import torch

from l2l_core import Edit, Inside, Relay
from l2l_core.batches import Batch, leaves_in
from workbench.session.batches import Batches, copy_batch, with_own_tokens
from workbench.session.probe_verdict import LossChange, ProbeLosses
from workbench.session.snapshot_values import ProbeRow

MAX_BATCHES = 4  # training batches that are kept if the user gave none

_NO_BATCH = "no batch has been trained on yet, and no probe=[...] was given"

ProbeBatches = Sequence[Batch] | Literal[False] | None


class NotMeasured(ValueError):
    """The losses of the probe could not be measured; the message is the reason, in one line."""


class Probe:
    """Fixed batches, and the last measurement of their losses.

    Invariant: `_last` belongs to the current state of the relay unless `_state` differs from `_relay_fingerprint()`.
    Called on the session's thread, except `is_on` and `row`, which are read and written under its lock.

    Args:
        relay: the relay to measure.
        given: batches; None: copies of the first training batches that are used while the probe is on; False: the same,
            initially off.
        source: source of training batches; its pending batch is measured until a training batch was used.

    Attributes:
        is_on: whether edits are measured.

    Raises:
        TypeError: not a sequence, or a single batch.
        ValueError: an empty sequence.
    """

    def __init__(self, relay: Relay, given: ProbeBatches, source: Batches) -> None:
        self.is_on = given is not False
        self._relay, self._source = relay, source
        self._is_given = given is not None and given is not False
        self._batches = tuple(_check_batches(given)) if self._is_given else ()
        self._batch_count = len(self._batches) or None  # number measured last, or to be measured
        self._first_step: int | None = None  # step of the first kept training batch
        self._last: ProbeLosses | None = None
        self._state: object = None
        self._measured_batches: Sequence[Batch] = ()  # kept alive, since they are compared by identity
        self._seconds: float | None = None

    @property
    def row(self) -> ProbeRow:
        """State of the probe for snapshots."""
        return ProbeRow(self.is_on, self._is_given, self._batch_count, MAX_BATCHES, self._first_step, self._seconds)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the probe, with its training batches; batches that the user gave are not part of it."""
        return {
            "is_on": self.is_on,
            "batches": () if self._is_given else self._batches,
            "first_step": self._first_step,
            "count": self._batch_count,
            "seconds": self._seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        self.is_on, self._first_step, self._seconds = state["is_on"], state["first_step"], state["seconds"]
        if not self._is_given:
            self._batches, self._batch_count = tuple(state["batches"]), state["count"]
        self.invalidate()

    def add_training_batch(self, batch: Batch, step: int) -> None:
        """Keep a copy of a training batch, unless there are enough or an equal one is kept.

        A repeated batch would reduce the spread without new information.
        """
        if self._is_given or not self.is_on or len(self._batches) == MAX_BATCHES:
            return
        if any(_is_equal(batch, kept) for kept in self._batches):
            return
        self._first_step = step if self._first_step is None else self._first_step
        self._batches = (*self._batches, copy_batch(batch))
        self.invalidate()

    def invalidate(self) -> None:
        """Drop the last measurement, since the relay may have changed in ways that its fingerprint does not show."""
        self._last, self._state, self._measured_batches = None, None, ()

    def measure(self) -> ProbeLosses:
        """Measure the losses of the current relay, or return the last ones if nothing has changed since.

        Raises:
            NotMeasured: the probe is off, there is no batch, or the relay fails on the batches.
        """
        batches, state = self._current_batches(), self._relay_fingerprint()
        is_current = state == self._state and all(a is b for a, b in zip(batches, self._measured_batches, strict=False))
        if self._last is None or not is_current:
            self._last = self._evaluate(batches)
            self._state, self._measured_batches = state, batches
        return self._last

    def measure_before(self) -> ProbeLosses | str:
        """Measure the losses before an edit, or return the reason why they cannot be measured."""
        try:
            return self.measure()
        except NotMeasured as error:
            return str(error)

    def measure_after(self, before: ProbeLosses | str) -> LossChange | str:
        """Measure the effect of an applied edit, or return the reason why it cannot be measured."""
        if isinstance(before, str):
            return before
        try:
            return LossChange(before, self.measure())
        except NotMeasured as error:
            return str(error)

    def measure_edits(self, edits: Sequence[Edit]) -> LossChange:
        """Measure the effect of edits, which are reverted.

        Raises:
            NotMeasured: see `measure`.
            ValueError, TypeError: an edit cannot be applied.
        """
        before = self.measure()
        return LossChange(before, self._evaluate(self._measured_batches, edits))

    def look(
        self, batch: Batch, layers: Any, options: Mapping[str, Any], tokens: Sequence[int] | None = None
    ) -> Inside:
        """Look inside layers on a batch; default the first batch of the probe, also if the probe is off.

        With `tokens`, they take the place of those in every row of the batch.

        Raises:
            NotMeasured: there is no batch, or the model fails on it.
            ValueError, TypeError: unknown layers or options.
        """
        if batch is None:
            batches = self._batches or self._source.pending
            if not batches:
                raise NotMeasured(_NO_BATCH)
            batch = batches[0]
        if tokens is not None:
            batch, options = with_own_tokens(batch, tokens), {"positions": len(tokens), **options}
        try:
            return self._relay.look(batch, layers, **options)
        except (ValueError, TypeError):
            raise
        except Exception as error:  # nothing has changed, so the run continues
            raise NotMeasured(_first_line(error)) from error

    def _evaluate(self, batches: Sequence[Batch], edits: Sequence[Edit] = ()) -> ProbeLosses:
        began_s = time.perf_counter()
        try:
            losses = self._relay.probe(batches, *edits)
        except Exception as error:
            if edits and isinstance(error, ValueError | TypeError):
                raise
            raise NotMeasured(_first_line(error)) from error
        self._seconds, self._batch_count = time.perf_counter() - began_s, len(losses)
        return ProbeLosses(tuple(losses), self._seconds)

    def _current_batches(self) -> Sequence[Batch]:
        if not self.is_on:
            raise NotMeasured("the probe is off")
        if batches := self._batches or self._source.pending:
            return batches
        raise NotMeasured(_NO_BATCH)

    def _relay_fingerprint(self) -> object:
        """Return a value that changes with steps, edits, settings and in-place writes of weights."""
        relay = self._relay
        writes = sum(param._version for param in relay.model.parameters())
        return relay.branch, relay.steps, len(relay.journal), relay.config, writes, len(self._current_batches())


class ProbingRelay:
    """Proxy of a relay for schedules that measures the effect of each edit at once, since a step follows.

    Attributes:
        found: effect of each edit, or the reason why it was not measured, by number of its journal entry.
    """

    _relay: Relay
    _probe: Probe
    found: dict[int, LossChange | str]

    def __init__(self, relay: Relay, probe: Probe) -> None:
        vars(self).update(_relay=relay, _probe=probe, found={})  # bypasses `__setattr__`, which writes to the relay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._relay, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._relay, name, value)  # such as `config`, which a schedule may set

    def apply(self, *edits: Edit, force: bool = False) -> Edit:
        """Apply edits, see `Relay.apply`, and measure the losses before and after."""
        before = self._probe.measure_before()
        inverse = self._relay.apply(*edits, force=force)
        self.found[self._relay.journal[-1].number] = self._probe.measure_after(before)
        return inverse


def _check_batches(given: object) -> Sequence[Batch]:
    """Check the batches that the user gave, and return them."""
    is_batch = isinstance(given, Mapping | torch.Tensor | str) or is_dataclass(given) or hasattr(given, "_fields")
    is_batch = is_batch or (isinstance(given, tuple) and given and all(isinstance(x, torch.Tensor) for x in given))
    if is_batch or not isinstance(given, Sequence):
        raise TypeError(
            f"probe is a {type(given).__name__}: give a list of a few held-out batches, such as probe=[batch]; "
            "None takes the first training batches, False turns it off"
        )
    if not given:
        raise ValueError(
            "probe holds no batch: give a few held-out ones, or None for the first training batches, or False for none"
        )
    return given


def _is_equal(batch: Batch, other: Batch) -> bool:
    a, b = leaves_in(batch), leaves_in(other)
    return len(a) == len(b) and all(map(_is_equal_leaf, a, b))


def _is_equal_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, numpy.ndarray) and isinstance(b, numpy.ndarray):
        return numpy.array_equal(a, b)
    return a is b or (isinstance(a, str | int | float) and a == b)


def _first_line(error: Exception) -> str:
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
