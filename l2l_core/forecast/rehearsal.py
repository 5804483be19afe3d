"""Rehearsal of a step: passes without effect on a few micro-batches, which measure costs and memory turn by turn.

The model's own forward and the relay's own loop run over all layers, on a device without budget behind a link without
limits, with an EPS that updates scratch copies (`l2l_core/eps/dry_run.py`). Nothing of the relay changes; the user's forward
hooks do run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from l2l_core.batches import Batch, RowsRule, shapes_of
from l2l_core.config import RelayConfig
from l2l_core.devices import Device, EmulatedDevice, Ledger
from l2l_core.eps import DryRunResiduals, LayerStore, PerMicroBatchReducer, Reducer, WeightSource, dry_run_store
from l2l_core.eps.blocks import Unit
from l2l_core.forecast.block_inventory import Inventory
from l2l_core.forecast.stash_moves import RecordingStashStore
from l2l_core.simulator import Profile, ProfileBuilder
from l2l_core.step import BatchLoss, PassPlan, PassSpec, PassTask, RelayParts, run_step
from l2l_core.step.traffic import MeterRecord
from l2l_core.trace import Trace

MIN_TIMED_S = 2.0  # timed passes are repeated until their total time reaches this,
MAX_PASSES = 5  # or their number this

_REDUCERS = {"sum": Reducer(), "ordered": PerMicroBatchReducer()}


@dataclass(frozen=True, slots=True)
class RehearsalResult:
    """Results of a rehearsal."""

    profile: Profile  # of the pass of median length; of two, the shorter one
    overhead_s: float  # time of a step before its first event and after its last one
    inventory: Inventory  # after a step
    passes: int  # timed ones
    seconds: float  # of the whole rehearsal


class _MeteredPass(NamedTuple):
    """Layer order of a pass, predicted or observed, and its record if it was metered."""

    layer_order: Sequence[Unit]
    record: MeterRecord | None


class _RehearsedPass(NamedTuple):
    """One pass without effect."""

    trace: Trace
    profile: Profile
    seconds: float  # including the time before its first event and after its last one
    metered: _MeteredPass


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Rehearses steps of a relay, given its parts, store, task and cut.

    A step with a wrong prediction of its layer order runs its last layer twice and keeps less meanwhile, so its device peak is
    lower than that of all later steps. Therefore the observed order is passed on for the next step.
    """

    parts: RelayParts
    store: LayerStore
    predicted_order: Sequence[Unit]
    task: PassTask
    rows_of: RowsRule
    make_weight_source: Callable[[Device, Ledger], WeightSource]
    on_layer_order: Callable[[list[Unit]], None] = lambda order: None  # gets an order that was not predicted
    reduce: str = "sum"  # reduction of gradients between workers, see `Cluster`
    batch_loss: BatchLoss | None = None  # None: every micro-batch has its own loss
    # Called before settings are tried; an error ends a search
    on_trial: Callable[[RelayConfig], None] = lambda config: None
    metered_passes: dict[Any, _MeteredPass] = field(default_factory=dict)  # by kind of step; the same for any `ahead`

    def split(self, batch: Batch, micro_batches: int) -> list[Any]:
        """Cut a batch into micro-batches, at most one per row."""
        rows = self.rows_of(batch)
        return rows.split(rows.most_parts(micro_batches))

    def run(self, micro_batches: Sequence[Any], config: RelayConfig, max_passes: int | None = None) -> RehearsalResult:
        """Rehearse these micro-batches under `config`: a metered pass, then at most `max_passes` timed ones."""
        began_s = time.perf_counter()
        config = replace(config, micro_batches=len(micro_batches), seed=0, verify="never")
        most = MAX_PASSES if max_passes is None else max_passes
        with self._isolate_parts() as parts, self._open_dry_run_store(parts) as store:
            run_pass = partial(self._run_pass, parts, store, micro_batches, config)
            kind = replace(config, ahead=0, resident=0), tuple(map(shapes_of, micro_batches))
            if kind not in self.metered_passes:
                self.metered_passes[kind] = self._run_metered(run_pass)
            known = self.metered_passes[kind]
            known = known._replace(record=None) if config.meter == "always" else known
            timed: list[_RehearsedPass] = []
            while not timed or (len(timed) < most and sum(one.seconds for one in timed) < MIN_TIMED_S):
                timed.append(run_pass(known))
        median = sorted(timed, key=lambda one: one.trace.span_s)[(len(timed) - 1) // 2]
        return RehearsalResult(
            profile=median.profile,
            overhead_s=max(0.0, median.seconds - median.trace.span_s),
            inventory=Inventory.of(parts.units, store.updater, self.store.masters.findings.elementwise),
            passes=len(timed),
            seconds=time.perf_counter() - began_s,
        )

    def _run_metered(self, run_pass: Callable[[_MeteredPass], _RehearsedPass]) -> _MeteredPass:
        """Make a metered pass, and a second one if the observed layer order differs from the predicted one."""
        found = run_pass(_MeteredPass(self.predicted_order, None)).metered
        if found.layer_order != list(self.predicted_order):
            found = run_pass(found._replace(record=None)).metered
            self.on_layer_order([*found.layer_order])
        return found

    @contextmanager
    def _isolate_parts(self) -> Iterator[RelayParts]:
        """Yield the parts with a device without limits and separate ledgers; restore them afterwards."""
        real, host = self.parts.device, Ledger("host", "Host memory")
        # Only an emulated device can be replaced.
        device = EmulatedDevice() if isinstance(real, EmulatedDevice) else real
        parts = replace(
            self.parts,
            device=device,
            host=host,
            weight_source=self.make_weight_source(device, host),
            disk_stash=RecordingStashStore(device),
        )
        blocks = list(dict.fromkeys(block for unit in parts.units for block in unit.blocks))
        casts = [block.cast for block in blocks]
        # The ledger of a real device belongs to the relay: its peak must stay that of the steps.
        peak, limit_bytes = device.ledger.peak, device.ledger.limit_bytes
        device.ledger.limit_bytes = None
        try:
            with device.current():
                yield parts
        finally:
            parts.weight_source.close()
            for block, cast in zip(blocks, casts, strict=True):
                block.cast = cast
            device.ledger.limit_bytes, device.ledger.peak = limit_bytes, max(peak, device.ledger.total)
            if device is not real:
                device.close()

    @contextmanager
    def _open_dry_run_store(self, parts: RelayParts) -> Iterator[LayerStore]:
        """Yield an EPS without effect, and finish its work on exit."""
        # Copies, since the dry EPS writes to the same units.
        stats = [dict(unit.stats) for unit in parts.units]
        residuals = DryRunResiduals(parts.device, is_real=parts.device is self.parts.device)
        store = dry_run_store(self.store, parts.host, parts.device.host_empty, _REDUCERS[self.reduce], residuals)
        try:
            yield store
        except BaseException:
            store.rollback()  # waits for its jobs: clipping sets the `grad` that is cleared below
            raise
        finally:
            residuals.close()
            for param in parts.model.parameters():
                param.grad = None
            for unit, before in zip(parts.units, stats, strict=True):
                unit.stats = before

    def _run_pass(
        self,
        parts: RelayParts,
        store: LayerStore,
        micro_batches: Sequence[Any],
        config: RelayConfig,
        known: _MeteredPass,
    ) -> _RehearsedPass:
        """Make one pass without effect."""
        began_s = time.perf_counter()
        trace = parts.new_trace(config)
        trace.settings["reduce"] = self.reduce
        seeds = [config.micro_batch_seed(0, k) for k in range(len(micro_batches))]
        plan = PassPlan.of(config, known.layer_order, loss_per_micro_batch=self.batch_loss is None)
        spec = PassSpec(config, plan, self.task, micro_batches, seeds)
        if self.batch_loss is not None:
            spec = replace(spec, task=self.batch_loss.outputs, batch_loss=self.batch_loss)
        restore_buffers = parts.snapshot_buffers()
        try:
            _, ran = run_step(parts, store, spec, [1.0] * len(micro_batches), trace, known.record)
            seconds = time.perf_counter() - began_s
        finally:
            restore_buffers()
        profile = Profile(**ProfileBuilder(trace).profile_fields())
        if config.stash == "disk":
            assert isinstance(parts.disk_stash, RecordingStashStore)
            profile = parts.disk_stash.add_moves(profile)
        return _RehearsedPass(trace, profile, seconds, _MeteredPass(ran.layer_order, ran.metered))
