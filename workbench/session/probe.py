"""A few fixed batches whose losses are looked at around every edit; measuring them changes no bit of training.

The losses of two training steps differ because their batches do. On the same batches, in evaluation mode, what differs
before and after an edit is what the edit did.
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
from workbench.session.batches import Batches, copy_batch
from workbench.session.probe_verdict import LossChange, ProbeLosses
from workbench.session.snapshot_values import ProbeRow

MAX_BATCHES = 4  # training batches that are kept, if nobody has given others

_NO_BATCH = "no batch has been trained on yet, and no probe=[...] was given"

ProbeBatches = Sequence[Batch] | Literal[False] | None


class NotMeasured(ValueError):
    """The probe has nothing to say; why, in one line. Nothing is lost by it."""


class Probe:
    """Batches, and the last measurement of them.

    Invariant: `_last` is of the relay as it is now, or `_state` differs from that of the relay. Called on the session's
    thread, but for `is_on` and `row`, which are read and written under its lock.

    Args:
        relay: is measured.
        given: batches; None: copies of the first training batches that are used while it is on; False: the same, and off.
        source: of training batches; one that waits there serves as long as none has been used.

    Attributes:
        is_on: whether edits are judged.

    Raises:
        TypeError: neither, or one batch instead of several.
        ValueError: no batch.
    """

    def __init__(self, relay: Relay, given: ProbeBatches, source: Batches) -> None:
        self.is_on = given is not False
        self._relay, self._source = relay, source
        self._is_given = given is not None and given is not False
        self._batches = tuple(_check_batches(given)) if self._is_given else ()
        self._batch_count = len(self._batches) or None  # that were measured last, or will be
        self._first_step: int | None = None  # from which training batches are kept
        self._last: ProbeLosses | None = None
        self._state: object = None
        self._measured_batches: Sequence[Batch] = ()  # held, so that no other batch is taken for one of these
        self._seconds: float | None = None

    @property
    def row(self) -> ProbeRow:
        """What panels show of the probe."""
        return ProbeRow(self.is_on, self._is_given, self._batch_count, MAX_BATCHES, self._first_step, self._seconds)

    def add_training_batch(self, batch: Batch, step: int) -> None:
        """Keep a copy of a training batch that a step was made on, if batches are still wanted; its source may fill it again.

        One that is kept already would make the spread smaller than it is, and cost the same again.
        """
        if self._is_given or not self.is_on or len(self._batches) == MAX_BATCHES:
            return
        if any(_is_equal(batch, kept) for kept in self._batches):
            return
        self._first_step = step if self._first_step is None else self._first_step
        self._batches = (*self._batches, copy_batch(batch))
        self.invalidate()

    def invalidate(self) -> None:
        """Forget the last measurement: the relay may have changed in ways that it does not tell."""
        self._last, self._state, self._measured_batches = None, None, ()

    def measure(self) -> ProbeLosses:
        """Measure the losses as the relay is now, or return the last ones if nothing has changed since.

        Raises:
            NotMeasured: it is off, or there is no batch, or it fails on the batches.
        """
        batches, state = self._current_batches(), self._relay_fingerprint()
        is_known = state == self._state and all(a is b for a, b in zip(batches, self._measured_batches, strict=False))
        if self._last is None or not is_known:
            self._last = self._evaluate(batches)
            self._state, self._measured_batches = state, batches
        return self._last

    def measure_before(self) -> ProbeLosses | str:
        """Measure the losses before an edit, or say why that cannot be done."""
        try:
            return self.measure()
        except NotMeasured as error:
            return str(error)

    def measure_after(self, before: ProbeLosses | str) -> LossChange | str:
        """Measure what an edit that is done has changed, or say why that is not known."""
        if isinstance(before, str):
            return before
        try:
            return LossChange(before, self.measure())
        except NotMeasured as error:
            return str(error)

    def measure_edits(self, edits: Sequence[Edit]) -> LossChange:
        """Measure what edits would do; they are taken back again.

        Raises:
            NotMeasured: as of `measure`.
            ValueError, TypeError: an edit that cannot be carried out.
        """
        before = self.measure()
        return LossChange(before, self._evaluate(self._measured_batches, edits))

    def look(self, batch: Batch, layers: Any, options: Mapping[str, Any]) -> Inside:
        """Look inside of layers; without a batch on the first one there is, whether the probe is on or not.

        Raises:
            NotMeasured: there is no batch, or the model fails on it.
            ValueError, TypeError: layers or options that there are not.
        """
        if batch is None:
            known = self._batches or self._source.pending
            if not known:
                raise NotMeasured(_NO_BATCH)
            batch = known[0]
        try:
            return self._relay.look(batch, layers, **options)
        except (ValueError, TypeError):
            raise
        except Exception as error:  # nothing has changed, so a run goes on
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
        """What tells the relay from what it was, as far as steps, edits, settings and writes of the user's own go."""
        relay = self._relay
        written = sum(param._version for param in relay.model.parameters())
        return relay.branch, relay.steps, len(relay.journal), relay.config, written, len(self._current_batches())


class ProbingRelay:
    """A relay as schedules see it: what they apply is judged at once, since a step comes next.

    Attributes:
        found: what was found out about an edit, by the number of its line in the journal.
    """

    _relay: Relay
    _probe: Probe
    found: dict[int, LossChange | str]

    def __init__(self, relay: Relay, probe: Probe) -> None:
        vars(self).update(_relay=relay, _probe=probe, found={})  # past `__setattr__`, which writes to the relay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._relay, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._relay, name, value)  # as `config`, which a schedule of the user's own may set

    def apply(self, *edits: Edit, force: bool = False) -> Edit:
        """Apply edits as `Relay.apply` does, and measure the losses before and after."""
        before = self._probe.measure_before()
        inverse = self._relay.apply(*edits, force=force)
        self.found[self._relay.journal[-1].number] = self._probe.measure_after(before)
        return inverse


def _check_batches(given: object) -> Sequence[Batch]:
    """Batches that somebody has given, if they are such."""
    is_batch = isinstance(given, Mapping | torch.Tensor | str) or is_dataclass(given) or hasattr(given, "_fields")
    is_batch = is_batch or (isinstance(given, tuple) and given and all(isinstance(x, torch.Tensor) for x in given))
    if is_batch or not isinstance(given, Sequence):
        raise TypeError(
            f"probe is a {type(given).__name__}: give a list of a few held-out batches, also of one: probe=[batch]; "
            "None takes the first training batches, False turns it off"
        )
    if not given:
        raise ValueError(
            "probe holds no batch: give a few held-out ones, or None for the first training batches, or False for none"
        )
    return given


def _is_equal(batch: Batch, other: Batch) -> bool:
    mine, its = leaves_in(batch), leaves_in(other)
    return len(mine) == len(its) and all(_is_equal_leaf(a, b) for a, b in zip(mine, its, strict=True))


def _is_equal_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, numpy.ndarray) and isinstance(b, numpy.ndarray):
        return numpy.array_equal(a, b)
    return a is b or (isinstance(a, str | int | float) and a == b)


def _first_line(error: Exception) -> str:
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
