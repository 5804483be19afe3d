"""A step without effect on a few micro-batches: what it costs, and what it leaves in memory turn by turn.

The model's own forward and the relay's own loop run over all layers, on a device without limits and a link without
limits, with an EPS that updates scratch copies (`l2l_core/eps/dry_run.py`). What it is not: a simulation. Nothing of the
relay changes; forward hooks of the user's own do run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from l2l_core.batches import shapes_of
from l2l_core.config import RelayConfig
from l2l_core.devices import Device, EmulatedDevice, Ledger
from l2l_core.eps import DryRunResiduals, LayerStore, LocalReducer, PerMicroBatchReducer, WeightSource, dry_run_store
from l2l_core.eps.blocks import Block, Unit
from l2l_core.forecast.block_inventory import Inventory
from l2l_core.forecast.recording_stash import RecordingStashStore
from l2l_core.simulator import Profile, ProfileBuilder
from l2l_core.step import PassPlan, PassSpec, PassTask, RelayParts, run_step
from l2l_core.step.traffic import MeterRecord
from l2l_core.trace import Trace

MIN_TIMED_S = 2.0  # timed passes are repeated until they have taken so long together,
MAX_PASSES = 5  # or there are so many

_REDUCERS = {"sum": LocalReducer(), "ordered": PerMicroBatchReducer()}


@dataclass(frozen=True, slots=True)
class RehearsalResult:
    """What a rehearsal found.

    Attributes:
        profile: costs of the pass of median length; of two, the shorter one.
        around_s: seconds of a step before its first event and after its last one.
        holdings: what the EPS has after a step.
        passes: timed ones.
        seconds: what the rehearsal took.
    """

    profile: Profile
    overhead_s: float
    inventory: Inventory
    passes: int
    seconds: float


class _RehearsedPass(NamedTuple):
    """One step without effect."""

    trace: Trace
    profile: Profile
    seconds: float  # with what comes before its first event and after its last one
    record: MeterRecord
    layer_order: list[Unit]  # through the layers


class _MeteredPass(NamedTuple):
    """What a metered pass finds out."""

    layer_order: list[Unit]  # through the layers
    record: MeterRecord


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

    parts: RelayParts
    store: LayerStore
    predicted_order: Sequence[Unit]
    task: PassTask
    make_weight_source: Callable[[Device, Ledger], WeightSource]
    on_layer_order: Callable[[list[Unit]], None] = lambda way: None
    reduce: str = "sum"
    metered_passes: dict[Any, _MeteredPass] = field(default_factory=dict)

    def run(self, micro_batches: Sequence[Any], config: RelayConfig, max_passes: int | None = None) -> RehearsalResult:
        """Rehearse these micro-batches under `config`, once metered, then timed, at most so often."""
        began_s = time.perf_counter()
        config = replace(config, micro_batches=len(micro_batches), seed=0)
        most = MAX_PASSES if max_passes is None else max_passes
        with self._isolate_parts() as parts, self._open_dry_run_store(parts) as dry:
            passing = partial(self._run_pass, parts, dry, micro_batches, config)
            kind = replace(config, ahead=0, resident=0), tuple(map(shapes_of, micro_batches))
            if kind not in self.metered_passes:
                self.metered_passes[kind] = self._run_metered(passing)
            known = self.metered_passes[kind]
            replayed = None if config.meter == "always" else known.record
            timed: list[_RehearsedPass] = []
            while not timed or (len(timed) < most and sum(one.seconds for one in timed) < MIN_TIMED_S):
                timed.append(passing(replayed, known.layer_order))
        usual = sorted(timed, key=lambda one: one.trace.span_s)[(len(timed) - 1) // 2]
        return RehearsalResult(
            profile=usual.profile,
            overhead_s=max(0.0, usual.seconds - usual.trace.span_s),
            inventory=Inventory.of(parts.units, dry.updater, self.store.masters.findings.elementwise),
            passes=len(timed),
            seconds=time.perf_counter() - began_s,
        )

    def _run_metered(self, run_pass: Callable[[MeterRecord | None, Sequence[Unit]], _RehearsedPass]) -> _MeteredPass:
        """Make a metered pass; two where the way that it finds is not the one that was predicted."""
        found = run_pass(None, self.predicted_order)
        if found.layer_order != list(
            self.predicted_order
        ):  # some are visited twice, say: prefetch learns, and so do we
            found = run_pass(None, found.layer_order)
            self.on_layer_order(found.layer_order)
        return _MeteredPass(found.layer_order, found.record)

    @contextmanager
    def _isolate_parts(self) -> Iterator[RelayParts]:
        """The parts, on a device without limits and with ledgers of their own; afterwards as they were."""
        device, host = _unlimited_device(self.parts.device), Ledger("host", "Host memory")
        room = RecordingStashStore(device)  # of a stash on the disk: what it costs there follows from what moves
        parts = replace(
            self.parts, device=device, host=host, weight_source=self.make_weight_source(device, host), disk_stash=room
        )
        blocks = _blocks_of(parts)
        casts = [block.cast for block in blocks]
        # A real device is not copied, so its ledger is the relay's: the peak of a step must stay that of the step.
        peak, limit_bytes = device.ledger.peak, device.ledger.limit_bytes
        device.ledger.limit_bytes = None  # what does not fit is what a forecast is asked for
        try:
            with device.current():
                yield parts
        finally:
            parts.weight_source.close()
            for block, cast in zip(blocks, casts, strict=True):
                block.cast = cast
            device.ledger.limit_bytes, device.ledger.peak = limit_bytes, max(peak, device.ledger.total)
            if device is not self.parts.device:
                device.close()

    @contextmanager
    def _open_dry_run_store(self, parts: RelayParts) -> Iterator[LayerStore]:
        """An EPS without effect; its work is over when the block is left, however it is left."""
        # Copies: the dry EPS clears them, and notes its own, on the same units.
        stats = [dict(unit.stats) for unit in parts.units]
        residuals = DryRunResiduals(parts.device, is_real=parts.device is self.parts.device)
        dry = dry_run_store(self.store, parts.host, parts.device.host_empty, _REDUCERS[self.reduce], residuals)
        try:
            yield dry
        except BaseException:
            dry.rollback()  # waits for its jobs: clipping sets the `grad` that is cleared below
            raise
        finally:
            residuals.close()
            for param in parts.model.parameters():
                param.grad = None
            for unit, told in zip(parts.units, stats, strict=True):
                unit.stats = told

    def _run_pass(
        self,
        parts: RelayParts,
        store: LayerStore,
        micro_batches: Sequence[Any],
        config: RelayConfig,
        record: MeterRecord | None,
        predicted_order: Sequence[Unit],
    ) -> _RehearsedPass:
        """Make one step without effect."""
        began_s = time.perf_counter()
        trace = parts.new_trace(config)
        trace.settings["reduce"] = self.reduce
        seeds = [config.micro_batch_seed(0, k) for k in range(len(micro_batches))]
        work = PassSpec(config, PassPlan.of(config, predicted_order), self.task, micro_batches, seeds)
        put_buffers_back = parts.snapshot_buffers()
        try:
            _, ran = run_step(parts, store, work, [1.0] * len(micro_batches), trace, record)
            seconds = time.perf_counter() - began_s
        finally:
            put_buffers_back()
        profile = Profile(**ProfileBuilder(trace).profile_fields())
        if config.stash == "disk":
            assert isinstance(parts.disk_stash, RecordingStashStore)
            profile = parts.disk_stash.add_moves(profile)
        return _RehearsedPass(trace, profile, seconds, ran.metered, ran.layer_order)


def _blocks_of(parts: RelayParts) -> list[Block]:
    return list(dict.fromkeys(block for unit in parts.units for block in unit.blocks))


def _unlimited_device(device: Device) -> Device:
    """The same kind of device without a budget and with the fastest link; a real one is what it is."""
    return EmulatedDevice() if isinstance(device, EmulatedDevice) else device
