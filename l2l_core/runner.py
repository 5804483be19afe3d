"""The passes of one relay: how each is prepared from a batch, run, and put back if it fails.

A step, a forward relay and a rehearsal begin here with the same questions: how the batch is cut, what the loss of each
micro-batch is divided by, what an earlier pass of the kind has taught. The passes themselves are in `step/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from socket import gethostname
from typing import TYPE_CHECKING, Any

import torch

from l2l_core.batches import Batch, BatchRows, LossNormaliser, ModelCall, Weight, leaves_in, shapes_of
from l2l_core.config import RelayConfig, parse_bytes
from l2l_core.devices import DeviceOutOfMemory
from l2l_core.eps import LayerStore, TornStep
from l2l_core.eps.blocks import Unit, check_model, check_step
from l2l_core.model import KVCaches, full_precision, nbytes_of, snapshot_attributes
from l2l_core.step import (
    BreadthFirstRuntime,
    MeterRecord,
    PassCache,
    PassKind,
    PassPlan,
    PassResult,
    PassSpec,
    PassTask,
    RelayParts,
    StaleMeterError,
    record_failure,
    run_forward,
    run_step,
)
from l2l_core.surgery import preserve_random_state
from l2l_core.trace import StepResult, Trace
from l2l_core.workers import WorkerBackend

if TYPE_CHECKING:  # of methods that plan; these import the rooms when they are called
    from l2l_core.forecast import Fit, Rehearsal
    from l2l_core.simulator import Cluster


def _change_nothing(runtime: BreadthFirstRuntime) -> None:
    """Leave the weights as they are."""


class Runner:
    """Runs passes over a relay's parts, one at a time; whoever calls has the relay's lock.

    Args:
        parts: what there is to run.
        store: the EPS.
        call: how a micro-batch is given to the model.
        weight: what a micro-batch counts for, if the user says so.
        company: who trains along.
        caches: what decoders do without meanwhile.
        config: how to run.

    Attributes:
        config: how the next pass runs.
        parts: with the layers as they stand now.
        learned: what passes have taught.
        mean: what losses of steps are divided by.
        mean_of_probes: the same for batches that steps must not learn from.
        steps: number of completed steps.
        trace: of the step under way, or of the last one.
    """

    def __init__(
        self,
        parts: RelayParts,
        store: LayerStore,
        model_call: ModelCall,
        weight: Weight | None,
        backend: WorkerBackend,
        kv_caches: KVCaches,
        config: RelayConfig,
    ) -> None:
        self.config, self.parts, self.pass_cache = config, parts, PassCache(parts.layers)
        self.normaliser = LossNormaliser(weight, self._measure_losses, backend.batch_peers)
        self.probe_normaliser = LossNormaliser(weight, self._measure_losses, backend.batch_peers)
        self.steps = 0
        self.trace: Trace | None = None
        self._model, self._device = parts.model, parts.device
        self._store, self._model_call, self._backend, self._kv_caches = store, model_call, backend, kv_caches

    # -- what a pass is made of ----------------------------------------------------------------------------------------

    def rows_of(self, batch: Batch) -> BatchRows:
        """Return a batch as rows.

        Raises:
            ValueError, TypeError: it has none, or the model cannot take it.
        """
        rows = BatchRows(batch)
        self._model_call.check(batch)
        return rows

    def split(self, batch: Batch) -> tuple[BatchRows, list[Any]]:
        """Cut a batch into as many micro-batches as the settings say."""
        rows = self.rows_of(batch)
        return rows, rows.split(self.config.micro_batches)

    def kind_of(self, micro_batches: Sequence[Any], config: RelayConfig) -> PassKind:
        """Say of what kind a pass over these micro-batches is."""
        shapes = tuple(shapes_of(each) for each in micro_batches)
        layers = frozenset((unit.key, unit.trained) for unit in self.parts.units)
        return PassKind(
            replace(config, seed=0), shapes, self._model.training, layers
        )  # no seed changes what a pass needs

    def resolve_config(self, config: RelayConfig, batch: Batch) -> RelayConfig:
        """Return settings that say by number what stays: of bytes for graphs, how many; depth first, all of it."""
        if not isinstance(config, RelayConfig):
            return config
        config = config.for_layers(len(self.parts.layers))
        if not isinstance(config.keep, str):
            return config
        nbytes = parse_bytes(config.keep, "keep")
        kind = self.kind_of(self.rows_of(batch).split(config.micro_batches), config)
        known = self.pass_cache.find_kept_count(kind)
        if None in (counts := self._backend.gather_items([known], "say how many graphs are kept")):
            from l2l_core.forecast import layers_within

            with self._backend.storage_unsharded(), self.rehearsing() as rehearsal:
                mine = layers_within(rehearsal, batch, config, nbytes) if known is None else known
            counts = self._backend.gather_items([mine], "count the graphs that are kept")
        kept = min(counts)  # what fits everywhere: all must load the same layers
        self.pass_cache.record_kept_count(kind, kept)
        return replace(config, keep=kept)

    def _make_spec(self, config: RelayConfig, task: PassTask, micro_batches: Sequence[Any]) -> PassSpec:
        first = self._backend.first_micro_batch(len(micro_batches))
        seeds = [config.micro_batch_seed(self.steps, first + k) for k in range(len(micro_batches))]
        return PassSpec(config, PassPlan.of(config, self.pass_cache.layer_order), task, micro_batches, seeds)

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, config: RelayConfig) -> StepResult:
        """Train on a batch; see `Relay.step`."""
        began_s = time.perf_counter()
        check_model(self._model, self.parts.units)
        check_step(self._model, self.parts.shell_modules(), self.parts.units)
        self._store.masters.check_groups()
        rows, micro_batches = self.split(batch)
        divisors = self.normaliser.divisors(rows, micro_batches)
        kind = self.kind_of(micro_batches, config)
        replay = self.pass_cache.find_step(kind) if config.meter == "on_change" else None
        losses, ran, trace = self._train(batch, micro_batches, divisors, config, replay)
        loss = float(sum(self._backend.gather_items(losses)))
        self.steps += 1
        self._store.updated.clear()  # it would keep layers that are dropped next
        self.pass_cache.record_step(kind, ran.layer_order, ran.metered)
        return StepResult(
            loss=loss,
            seconds=time.perf_counter() - began_s,
            samples=rows.count,
            trace=trace,
            peak_device_bytes=self._device.ledger.peak,
            bytes_loaded=ran.bytes_loaded,
            bytes_pushed=ran.bytes_pushed,
        )

    def _train(
        self,
        batch: Batch,
        micro_batches: Sequence[Any],
        divisors: Sequence[float],
        config: RelayConfig,
        replay: MeterRecord | None,
    ) -> tuple[list[torch.Tensor], PassResult, Trace]:
        # Whoever follows the step reads it meanwhile.
        self.trace = trace = self._backend.sign_trace(self.parts.new_trace(config, self.steps))
        put_buffers_back = (
            self.parts.snapshot_buffers()
        )  # forwards change them, and a step that fails leaves the old ones
        self._device.ledger.reset_peak()
        work = self._make_spec(config, self._model_call.objective, micro_batches)
        work = replace(work, check=self._backend.make_buffer_check(self.parts.units))
        try:
            return *run_step(self.parts, self._store, work, divisors, trace, replay), trace
        except BaseException as error:
            record_failure(trace, error)
            self._backend.announce_failure(error)
            updated = self._roll_back(put_buffers_back)  # a second interrupt comes here, too
            updated = self._backend.agree_on_failure(error, updated)
            if isinstance(error, StaleMeterError):
                self.pass_cache.invalidate()
            if isinstance(error, DeviceOutOfMemory) and self._backend.can_rehearse:
                from l2l_core.forecast import advise

                with self.rehearsing() as rehearsal:
                    advise(error, rehearsal, batch, config)
            if updated:
                raise self._torn_step(error, updated) from error
            raise

    def _roll_back(self, put_buffers_back: Callable[[], None]) -> list[str]:
        """Leave the old step if nothing was updated or updates can be undone; returns what is updated all the same."""
        for param in self._model.parameters():
            param.grad = None  # where it began to train during the step, no hook took that
        self._store.rollback()
        updated = [block.key for block in self._store.updated]  # asked now: what was rolled back is not among them
        if not updated:
            put_buffers_back()
        return updated

    def _torn_step(self, error: BaseException, updated: list[str]) -> TornStep:
        names = [self.parts.names.get(key, key) for key in updated]
        return TornStep(
            f"step {self.steps} failed ({type(error).__name__}: {error}) after the update of {', '.join(names[:6])}"
            f"{f' and {len(names) - 6} more' if len(names) > 6 else ''}: these hold new weights, the others old ones. Training "
            "can go on from here; RelayConfig(update='deferred') or rollback=True keeps steps whole",
            updated,
        )

    # -- a forward relay -----------------------------------------------------------------------------------------------

    def infer(
        self,
        micro_batches: Sequence[Any],
        task: PassTask,
        config: RelayConfig | None = None,
        prepare: Callable[[BreadthFirstRuntime], None] = _change_nothing,
    ) -> list[Any]:
        """Run a forward relay in evaluation mode, without gradients; results of the micro-batches on the host.

        Args:
            micro_batches: as the model takes them.
            task: gives the result of one.
            config: how to run; default the relay's own settings.
            prepare: is shown the stage before anything runs.
        """
        check_model(self._model, self.parts.units)
        # One by one: parts of a model may be in evaluation mode for good.
        modes = {module: module.training for module in self._model.modules()}
        # Nothing is kept for a backward that does not come
        asked = self.config if config is None else config
        config = replace(asked, meter="on_change", keep=0, schedule="breadth_first")
        kind = self.kind_of(micro_batches, config)
        work = self._make_spec(config, task, micro_batches)
        trace = self._backend.sign_trace(self.parts.new_trace(config, self.steps))
        try:
            self._model.eval()
            with torch.no_grad(), self._kv_caches.disabled():
                replay = self.pass_cache.find_inference(kind, task)
                results, ran = run_forward(self.parts, work, trace, replay, prepare)
            self.pass_cache.record_inference(kind, task, ran.metered)
            return results
        finally:
            for module, training in modes.items():
                module.training = training

    def evaluate(self, batch: Batch, normaliser: LossNormaliser) -> float:
        """Return the mean loss of a batch, of all workers' rows, in evaluation mode."""
        rows, micro_batches = self.split(batch)
        divisors = normaliser.divisors(rows, micro_batches)
        put_buffers_back = self.parts.snapshot_buffers()
        try:
            with preserve_random_state():
                losses = self.infer(micro_batches, self._model_call.objective)
        finally:
            put_buffers_back()
        return float(sum(self._backend.gather_items([loss / n for loss, n in zip(losses, divisors, strict=True)])))

    def _measure_losses(self, batches: Sequence[Any], perturbed: bool) -> list[float]:
        """Measure losses of a few rows each, in evaluation mode and float32; what a forward changes is put back.

        Weights outside of layers may be `shaken`, on the device alone. Weights in float32 take twice the room of bfloat16 there,
        so none is loaded ahead.
        """
        config = replace(self.config, micro_batches=len(batches), precision="fp32", ahead=0)
        back = [self.parts.snapshot_buffers(), snapshot_attributes(self._model.modules())]
        try:
            with preserve_random_state(), full_precision(self._device.torch_device):
                prepare = BreadthFirstRuntime.perturb_shell if perturbed else _change_nothing
                return [float(loss) for loss in self.infer(batches, self._model_call.objective, config, prepare)]
        except Exception as error:
            error.add_note(
                "Micro-batches hold unequal shares of targets, so the relay looked at the losses of a few rows in evaluation "
                "mode, to find out what the loss is a mean over. Nothing was trained. With weight=, it need not look"
            )
            raise
        finally:
            for put_back in back:
                put_back()

    # -- a rehearsal ---------------------------------------------------------------------------------------------------

    def rehearsal(self, cluster: Cluster | None = None) -> Rehearsal:
        """Make what runs passes that train nothing, beside the model's own weights; as one of a fleet, default of its own."""
        from l2l_core.forecast import Rehearsal

        learn = self.pass_cache.set_layer_order  # what the first step would find out the slow way
        reduce = "ordered" if (self.cluster() if cluster is None else cluster).per_micro_batch else "sum"
        place = self._backend.make_rehearsal_source
        return Rehearsal(
            self.parts, self._store, self.pass_cache.layer_order, self._model_call.objective, place, learn, reduce
        )

    @contextmanager
    def rehearsing(self, cluster: Cluster | None = None) -> Iterator[Rehearsal]:
        """Give a rehearsal whose passes leave no trace: what a forward counts, notes or draws is as before after the block."""
        put_back = snapshot_attributes(self._model.modules())
        try:
            with preserve_random_state():
                yield self.rehearsal(cluster)
        finally:
            put_back()

    def cluster(self, **other: Any) -> Cluster:
        """Say who trains along, for forecasts; `other` is what is asked for instead."""
        from l2l_core.simulator import Cluster

        settings = self._backend.settings
        ours = {"network": settings.network, "wire": settings.wire, "reduce": settings.reduce}
        given = {name: value for name, value in other.items() if value is not None}
        return Cluster(**{"count": self._backend.count, "rank": self._backend.rank, **ours, **given})

    def fit(
        self, batch: Batch, device_bytes: int | None, host_bytes: int | None, fixed: Iterable[str], most_s: float
    ) -> Fit:
        """Find settings for steps on this batch; see `Relay.fit`.

        Of several workers the one with the largest batch looks, in the room of whoever has least, and all do as it says.
        """
        from l2l_core.forecast import MemoryLimits, fit_step, memory_limits_of

        check_model(self._model, self.parts.units)
        company, rows, here = self._backend, self.rows_of(batch), gethostname()
        neighbours = company.gather_items([here], "say where they are").count(here)
        room = memory_limits_of(self._device, self.parts.host, device_bytes, host_bytes, neighbours)
        tensors = [leaf for leaf in leaves_in(batch) if isinstance(leaf, torch.Tensor)]
        mine = room, rows.count, sum(map(nbytes_of, tensors))
        rooms, counts, sizes = zip(*company.gather_items([mine], "say what room there is"), strict=True)
        asked, fixed = self.resolve_config(self.config, batch), [*fixed] if not isinstance(fixed, str) else fixed
        looks = sizes.index(max(sizes))
        found: list[Fit] = []
        with company.unsharded():
            if company.rank == looks:
                args = fixed, MemoryLimits.tightest(rooms), most_s, min(counts), self.cluster()
                with self.rehearsing() as rehearsal:
                    found = [fit_step(rehearsal, batch, asked, *args)]
            [fit] = company.gather_items(found, "hear which settings were found")
        return fit

    # -- what changes between passes -----------------------------------------------------------------------------------

    def set_layers(self, layers: Sequence[Unit]) -> None:
        """Layers were edited: these are they now."""
        self.parts = replace(self.parts, layers=list(layers))
        self.pass_cache.reset(layers)

    @contextmanager
    def without(self, units: Sequence[Unit], layers: Sequence[Unit]) -> Iterator[None]:
        """Let `units` sit out in the block, so that `layers` are left; what is known of passes with all of them stays known."""
        parts = self.parts
        with self.pass_cache.without(units):
            self.parts = replace(parts, layers=list(layers))
            try:
                yield
            finally:
                self.parts = parts

    def snapshot(self) -> Callable[[], None]:
        """Keep count of steps, trace, parts, statistics of layers, and what steps have taught; the result puts them back."""
        steps, trace, parts = self.steps, self.trace, self.parts
        stats = {unit: dict(unit.stats) for unit in parts.units}
        put_knowledge_back = self.pass_cache.snapshot()

        def put_back() -> None:
            self.steps, self.trace, self.parts = steps, trace, parts
            for unit, old in stats.items():
                unit.stats = old
            put_knowledge_back()

        return put_back
