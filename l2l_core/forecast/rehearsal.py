"""A step without effect on a few micro-batches: what it costs, and what it leaves in memory turn by turn.

The model's own forward and the relay's own loop run over all layers, on a device without limits and a link without
limits, with an EPS that updates scratch copies (`l2l_core/eps/scratch.py`). What it is not: a simulation. Nothing of the
relay changes; forward hooks of the user's own do run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from l2l_core.batches import form_of
from l2l_core.config import RelayConfig
from l2l_core.devices import Device, EmulatedDevice, Ledger
from l2l_core.eps import Alone, AloneApart, LayerStore, Place, ScratchResiduals, dry_store
from l2l_core.eps.blocks import Block, Unit
from l2l_core.forecast.holdings import Holdings
from l2l_core.forecast.noted import NotedRoom
from l2l_core.simulator import Profile, Recording
from l2l_core.step import Parts, Plan, Task, Work, run_step
from l2l_core.step.traffic import Metered
from l2l_core.trace import Trace

ENOUGH_S = 2.0  # timed passes are repeated until they have taken so long together,
MOST_PASSES = 5  # or there are so many

_REDUCERS = {"sum": Alone(), "ordered": AloneApart()}


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What a rehearsal found.

    Attributes:
        profile: costs of the pass of median length; of two, the shorter one.
        around_s: seconds of a step before its first event and after its last one.
        holdings: what the EPS has after a step.
        passes: timed ones.
        seconds: what the rehearsal took.
    """

    profile: Profile
    around_s: float
    holdings: Holdings
    passes: int
    seconds: float


class _Pass(NamedTuple):
    """One step without effect."""

    trace: Trace
    profile: Profile
    seconds: float  # with what comes before its first event and after its last one
    learned: Metered
    way: list[Unit]  # through the layers


class _Known(NamedTuple):
    """What a metered pass finds out."""

    way: list[Unit]  # through the layers
    learned: Metered


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A relay's parts, as a rehearsal needs them.

    Attributes:
        predicted: the way through the layers that a step would expect.
        place: makes what knows where weights are, for another device and ledger.
        learn: gets the way that was found, if it is another one. A step that expects the wrong way runs its last layer
            twice and keeps less meanwhile, so its device peak is lower than that of all later steps, which is what is
            forecast. (ALBERT's one layer is visited once per depth.)
        reduce: what workers would send of their gradients, see `Fleet`: of one alone, "sum".
        metered: by kind of step, what a metered pass of it has learned. How far ahead weights are loaded, and which of them
            stay, changes nothing of that, and a search asks for both.
    """

    parts: Parts
    store: LayerStore
    predicted: Sequence[Unit]
    objective: Task
    place: Callable[[Device, Ledger], Place]
    learn: Callable[[list[Unit]], None] = lambda way: None
    reduce: str = "sum"
    metered: dict[Any, _Known] = field(default_factory=dict)

    def run(self, micro_batches: Sequence[Any], config: RelayConfig, most_passes: int | None = None) -> Rehearsed:
        """Rehearse these micro-batches under `config`, once metered, then timed, at most so often."""
        began_s = time.perf_counter()
        config = replace(config, micro_batches=len(micro_batches), seed=0)
        most = MOST_PASSES if most_passes is None else most_passes
        with self._parts_apart() as parts, self._dry_store(parts) as dry:
            passing = partial(self._pass, parts, dry, micro_batches, config)
            kind = replace(config, ahead=0, resident=0), tuple(map(form_of, micro_batches))
            if kind not in self.metered:
                self.metered[kind] = self._meter(passing)
            known = self.metered[kind]
            replayed = None if config.meter == "always" else known.learned
            timed: list[_Pass] = []
            while not timed or (len(timed) < most and sum(one.seconds for one in timed) < ENOUGH_S):
                timed.append(passing(replayed, known.way))
        usual = sorted(timed, key=lambda one: one.trace.span_s)[(len(timed) - 1) // 2]
        return Rehearsed(
            profile=usual.profile,
            around_s=max(0.0, usual.seconds - usual.trace.span_s),
            holdings=Holdings.of(parts.units, dry.update, self.store.masters.findings.elementwise),
            passes=len(timed),
            seconds=time.perf_counter() - began_s,
        )

    def _meter(self, passing: Callable[[Metered | None, Sequence[Unit]], _Pass]) -> _Known:
        """Make a metered pass; two where the way that it finds is not the one that was predicted."""
        found = passing(None, self.predicted)
        if found.way != list(self.predicted):  # some are visited twice, say: prefetch learns, and so do we
            found = passing(None, found.way)
            self.learn(found.way)
        return _Known(found.way, found.learned)

    @contextmanager
    def _parts_apart(self) -> Iterator[Parts]:
        """The parts, on a device without limits and with ledgers of their own; afterwards as they were."""
        device, host = _unlimited(self.parts.device), Ledger("host", "Host memory")
        room = NotedRoom(device)  # of a stash on the disk: what it costs there follows from what moves
        parts = replace(self.parts, device=device, host=host, place=self.place(device, host), scratch=room)
        blocks = _blocks_of(parts)
        casts = [block.cast for block in blocks]
        # A real device is not copied, so its ledger is the relay's: the peak of a step must stay that of the step.
        peak, limit_bytes = device.ledger.peak, device.ledger.limit_bytes
        device.ledger.limit_bytes = None  # what does not fit is what a forecast is asked for
        try:
            with device.current():
                yield parts
        finally:
            parts.place.close()
            for block, cast in zip(blocks, casts, strict=True):
                block.cast = cast
            device.ledger.limit_bytes, device.ledger.peak = limit_bytes, max(peak, device.ledger.total)
            if device is not self.parts.device:
                device.close()

    @contextmanager
    def _dry_store(self, parts: Parts) -> Iterator[LayerStore]:
        """An EPS without effect; its work is over when the block is left, however it is left."""
        # Copies: the dry EPS clears them, and notes its own, on the same units.
        stats = [dict(unit.stats) for unit in parts.units]
        residuals = ScratchResiduals(parts.device, is_real=parts.device is self.parts.device)
        dry = dry_store(self.store, parts.host, parts.device.host_empty, _REDUCERS[self.reduce], residuals)
        try:
            yield dry
        except BaseException:
            dry.roll_back()  # waits for its jobs: clipping sets the `grad` that is cleared below
            raise
        finally:
            residuals.close()
            for param in parts.model.parameters():
                param.grad = None
            for unit, told in zip(parts.units, stats, strict=True):
                unit.stats = told

    def _pass(
        self,
        parts: Parts,
        dry: LayerStore,
        micro_batches: Sequence[Any],
        config: RelayConfig,
        replay: Metered | None,
        predicted: Sequence[Unit],
    ) -> _Pass:
        """Make one step without effect."""
        began_s = time.perf_counter()
        trace = parts.new_trace(config)
        trace.settings["reduce"] = self.reduce
        seeds = [config.micro_batch_seed(0, k) for k in range(len(micro_batches))]
        work = Work(config, Plan.of(config, predicted), self.objective, micro_batches, seeds)
        put_buffers_back = parts.copy_buffers()
        try:
            _, ran = run_step(parts, dry, work, [1.0] * len(micro_batches), trace, replay)
            seconds = time.perf_counter() - began_s
        finally:
            put_buffers_back()
        profile = Profile(**Recording(trace).costs())
        if config.stash == "disk":
            assert isinstance(parts.scratch, NotedRoom)
            profile = parts.scratch.told(profile)
        return _Pass(trace, profile, seconds, ran.metered, ran.way)


def _blocks_of(parts: Parts) -> list[Block]:
    return list(dict.fromkeys(block for unit in parts.units for block in unit.blocks))


def _unlimited(device: Device) -> Device:
    """The same kind of device without a budget and with the fastest link; a real one is what it is."""
    return EmulatedDevice() if isinstance(device, EmulatedDevice) else device
