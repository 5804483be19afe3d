"""The passes of one relay: prepare each from a batch, run it, and restore the state if it fails.

Splits the batch, finds the divisor of each micro-batch's loss, and reuses measurements of earlier passes of the same kind.
The passes themselves are in `step/`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from socket import gethostname
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import nn

from l2l_core.batches import (
    Batch,
    BatchRows,
    LossNormaliser,
    ModelCall,
    RowsOfBatch,
    RowsRule,
    divide_loss,
    join_batches,
    leaves_in,
    map_tensors,
    refuse_gradients,
    shapes_of,
    snapshot_modules,
)
from l2l_core.config import RelayConfig
from l2l_core.devices import DeviceOutOfMemory
from l2l_core.eps import LayerStore, TornStep
from l2l_core.eps.blocks import Unit, check_model, check_step, set_used_gradients
from l2l_core.model import (
    KVCaches,
    RandomState,
    Restore,
    nbytes_of,
    preserve_random_state,
    restore_all,
    snapshot_attributes,
    snapshot_user_state,
)
from l2l_core.plan import ScheduleFunction, ScheduleSettings, StepPlan, check_plan
from l2l_core.step import (
    BatchLoss,
    BreadthFirstRuntime,
    MeterRecord,
    OutsideGradients,
    PassCache,
    PassKind,
    PassPlan,
    PassResult,
    PassSpec,
    PassTask,
    RelayParts,
    StaleMeterError,
    StepExtras,
    new_state_copied,
    record_failure,
    run_forward,
    run_step,
)
from l2l_core.trace import StepResult, Trace, parse_bytes
from l2l_core.workers import WorkerBackend

if TYPE_CHECKING:  # the methods that plan import these rooms when they are called
    from l2l_core.forecast import Fit, Rehearsal
    from l2l_core.simulator import Cluster


def change_nothing(runtime: BreadthFirstRuntime) -> None:
    """Leave the weights as they are."""


class BatchProbe(NamedTuple):
    """A held-out batch in evaluation mode.

    Attributes:
        loss: mean loss.
        count: number of items over which `loss` is a mean: rows or targets, or the sum of `weight=`; 1 if it is a sum. Means
            over several batches weigh them by it.
        rows: number of rows.
        outputs: outputs of the model, joined over micro-batches, on the host; None unless requested.
    """

    loss: float
    count: float
    rows: int
    outputs: Any


OnTrial = Callable[[DeviceOutOfMemory | None, RelayConfig], None]
PassMode = Literal["evaluation", "present"]  # of the modules: evaluation, or the modes that they are in


class Runner:
    """Runs passes over a relay's parts, one at a time; the caller holds the relay's lock.

    Args:
        parts: model, device, shell and layers.
        store: the EPS.
        model_call: runs the model on a micro-batch.
        make_normaliser: returns a new normaliser of losses, which measures them by this runner.
        has_batch_loss: whether the loss is one over the outputs of all micro-batches.
        backend: of one or several workers.
        kv_caches: of decoders; disabled in every pass.
        config: settings of a step.
        rows_rule: rule by which batches are cut.

    Attributes:
        config: settings of the next pass.
        parts: with the current layers.
        pass_cache: measurements of earlier passes.
        normaliser: divisors of the losses of steps.
        probe_normaliser: the same for probes, which must not influence steps.
        steps: number of completed steps.
        trace: of the current or last step.
        on_trial: see `Relay.on_trial`.
    """

    def __init__(
        self,
        parts: RelayParts,
        store: LayerStore,
        model_call: ModelCall,
        make_normaliser: Callable[[Runner], LossNormaliser],
        has_batch_loss: bool,
        backend: WorkerBackend,
        kv_caches: KVCaches,
        config: RelayConfig,
        rows_rule: RowsRule = BatchRows,
    ) -> None:
        self.config, self.parts, self.pass_cache = config, parts, PassCache(parts.layers)
        self._has_batch_loss = has_batch_loss
        if has_batch_loss:
            model_call.check_batch_loss()
        self.steps = 0
        self.trace: Trace | None = None
        self.on_trial: OnTrial | None = None
        self._failed_inference: Trace | None = None  # of a device that was too small
        self._warned_of_fewer = False
        self._rows_rule = rows_rule
        self._model, self._device = parts.model, parts.device
        self._store, self.model_call, self.backend, self.kv_caches = store, model_call, backend, kv_caches
        self.normaliser, self.probe_normaliser = make_normaliser(self), make_normaliser(self)

    def close(self) -> None:
        """Release threads and files, and references by which the runner would keep itself alive."""
        self.parts.weight_source.close()
        self.pass_cache.inferences.clear()  # tasks may be this object's methods
        self.normaliser.close()
        self.probe_normaliser.close()

    def seed(self) -> int:
        """Return the seed of all random numbers."""
        seed = self.config.seed
        assert seed is not None, "taken from PyTorch when the relay was made"
        return seed

    # -- parts of a pass -----------------------------------------------------------------------------------------------

    def rows_of(self, batch: Batch) -> RowsOfBatch:
        """Return a batch as rows."""
        rows = self._rows_rule(batch)
        self.model_call.check(batch)
        return rows

    def split(self, batch: Batch) -> tuple[RowsOfBatch, list[Any]]:
        """Split a batch into `config.micro_batches` micro-batches, or one per row if it has fewer rows."""
        rows, count = self.rows_of(batch), self.config.micro_batches
        fewer = self._most_parts(rows, count)
        if fewer < count and not self._warned_of_fewer:
            self._warned_of_fewer = True
            warnings.warn(
                f"a batch has {rows.count} row(s), fewer than micro_batches={count}: such batches run with one row per "
                "micro-batch",
                stacklevel=4,
            )
        return rows, rows.split(fewer)

    def _most_parts(self, rows: RowsOfBatch, count: int) -> int:
        """Return `count`, or the number of rows if there are fewer; workers must agree on a number."""
        return rows.most_parts(count) if self.backend.count == 1 else count

    def kind_of(self, micro_batches: Sequence[Any], config: RelayConfig) -> PassKind:
        """Return the kind of a pass over these micro-batches."""
        shapes = tuple(shapes_of(each) for each in micro_batches)
        layers = frozenset((unit.key, unit.trained) for unit in self.parts.units)
        config = replace(config, seed=0, verify="never")  # the memory and time of a pass do not depend on them
        return PassKind(config, shapes, self._model.training, layers)

    def resolve_config(self, config: RelayConfig, batch: Batch) -> RelayConfig:
        """Replace `keep` in bytes by the number of graphs that fit, and a user-defined schedule by its plan.

        A batch of fewer rows has fewer micro-batches.

        Raises:
            PlanError: the plan breaks a rule of a step.
            ValueError: a given plan was made for another batch, model or place of the stash.
        """
        if not isinstance(config, RelayConfig):
            return config
        rows = self.rows_of(batch)
        config = config.for_layers(len(self.parts.layers))
        config = replace(config, micro_batches=self._most_parts(rows, config.micro_batches))
        if config.has_own_schedule:
            return self._with_plan(config)
        if not isinstance(config.keep, str):
            return config
        nbytes = parse_bytes(config.keep, "keep")
        kind = self.kind_of(rows.split(config.micro_batches), config)
        cached = self.pass_cache.kept_counts.get(kind)
        counts = [
            count for count in self.backend.gather_items([cached], "share counts of kept graphs") if count is not None
        ]
        if len(counts) < self.backend.count:
            from l2l_core.forecast import layers_within

            with self.backend.storage_unsharded(), self.rehearsing(batch) as rehearsal:
                own = layers_within(rehearsal, batch, config, nbytes) if cached is None else cached
            counts = self.backend.gather_items([own], "count the graphs that are kept")
        kept = min(counts)  # all workers must load the same layers
        self.pass_cache.kept_counts.put(kind, kept)
        return replace(config, keep=kept)

    def batch_loss(self, rows: RowsOfBatch, micro_batches: int, extras: StepExtras | None = None) -> BatchLoss | None:
        """Return the loss over the outputs of all micro-batches, of all workers; None if every micro-batch has a loss."""
        found = self.batch_loss_in_core(rows, micro_batches, extras)
        if found is None or self.backend.count == 1:
            return found
        compute = partial(self._gather_outputs, found.compute)
        return replace(found, compute=compute, trains_parameters=self.backend.rank == 0)

    def batch_loss_in_core(
        self, rows: RowsOfBatch, micro_batches: int, extras: StepExtras | None = None
    ) -> BatchLoss | None:
        """Return the same loss where one process has the micro-batches of all workers."""
        if not self._has_batch_loss:
            return None
        if self.backend.count == 1:
            return self._make_batch_loss(rows.batch, rows.join, extras)
        own = rows.batch, rows.sizes(micro_batches)
        batches, sizes = zip(*self.backend.gather_items([own], "gather the batch"), strict=True)
        rows = rows.of(join_batches(batches, [sum(each) for each in sizes]))
        assert isinstance(rows, BatchRows), "another rule is refused where the relay is made"
        join = partial(rows.join, sizes=[size for each in sizes for size in each])
        return self._make_batch_loss(rows.batch, join, extras)

    def _make_batch_loss(
        self, batch: Batch, join: Callable[[Sequence[Any]], Any], extras: StepExtras | None = None
    ) -> BatchLoss:
        call = self.model_call
        compute = call.batch_loss if extras is None else partial(extras.run_once, call.batch_loss_with_extras)
        return BatchLoss(call.outputs, batch, partial(compute, join))

    def _gather_outputs(self, compute: Callable[..., torch.Tensor], outputs: Sequence[Any], batch: Any) -> torch.Tensor:
        """Compute the loss over the outputs of all workers.

        Those of others need gradients as this worker's do, so that sums have the same order.
        """

        def copy_to(device: torch.device, tree: Any) -> Any:
            return map_tensors(tree, lambda t: t.detach().to(device).requires_grad_(t.requires_grad))

        own = [copy_to(torch.device("cpu"), each) for each in outputs], RandomState.capture()
        gathered = self.backend.gather_items([own], "gather outputs")
        every: list[Any] = []
        for rank, (trees, _) in enumerate(gathered):
            is_own, device = rank == self.backend.rank, self._device.torch_device
            every += outputs if is_own else [copy_to(device, tree) for tree in trees]
        gathered[-1][1].restore()  # the loss follows the last micro-batch of all
        return compute(every, batch=batch)

    def _make_spec(
        self,
        config: RelayConfig,
        task: PassTask,
        micro_batches: Sequence[Any],
        batch_loss: BatchLoss | None = None,
        first: int | None = None,
    ) -> PassSpec:
        seeds = self.seeds_of(len(micro_batches), config, first)
        plan = PassPlan.of(config, self.pass_cache.layer_order, loss_per_micro_batch=batch_loss is None)
        return PassSpec(config, plan, task, micro_batches, seeds, batch_loss=batch_loss)

    def seeds_of(self, count: int, config: RelayConfig, first: int | None = None) -> list[int]:
        """Return the seeds of `count` micro-batches; `first` is the position of the first one in the whole batch."""
        first = self.backend.first_micro_batch(count) if first is None else first
        return [config.micro_batch_seed(self.steps, first + k) for k in range(count)]

    def objective(self, model: nn.Module, micro_batch: Any) -> torch.Tensor:
        """Return the loss of a micro-batch, without extras; NaN if only the batch has a loss."""
        if self._has_batch_loss:
            self.model_call.outputs(model, micro_batch)
            return torch.full((), torch.nan)
        with new_state_copied(self.model_call.metrics()):
            return self.model_call.objective(model, micro_batch)

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, config: RelayConfig) -> StepResult:
        """Train on a batch; see `Relay.step`."""
        began_s = time.perf_counter()
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "step inside torch.inference_mode(), where PyTorch trains nothing: call it outside of the block"
            )
        self.check_can_step(batch)
        rows, micro_batches = self.split(batch)
        config = replace(config, micro_batches=len(micro_batches))
        try:
            divisors = self.normaliser.divisors(rows, micro_batches)
        except DeviceOutOfMemory as error:  # a few rows do not fit
            self.trace = self._failed_inference
            self._advise(error, batch, config)
            raise
        kind = self.kind_of(micro_batches, config)
        replay = self.pass_cache.find_step(kind) if config.meter == "on_change" else None
        extras = StepExtras(self.model_call.objective_with_extras, self.model_call.metrics())
        batch_loss = self.batch_loss(rows, len(micro_batches), extras)
        losses, ran, trace = self._train(batch, micro_batches, divisors, batch_loss, config, replay, extras)
        loss = self._share_results(losses)
        self.steps += 1
        set_used_gradients(self._store.updated)
        self._store.updated.clear()  # else it would keep layers that are dropped next in memory
        self.pass_cache.record_step(kind, ran.layer_order, ran.metered)
        events, _ = trace.events_since(0)
        return StepResult(
            loss=loss,
            seconds=time.perf_counter() - began_s,
            samples=rows.count,
            trace=trace,
            peak_device_bytes=self._device.ledger.peak,
            bytes_loaded=sum(event.nbytes for event in events if event.kind == "load"),
            bytes_pushed=sum(event.nbytes for event in events if event.kind == "push"),
            objective=self.normaliser.summary,
            extras=extras.join(),
            grad_norm=self._grad_norm(config),
            plan=ran.plan,
        )

    def plan(self, config: RelayConfig) -> StepPlan:
        """Return the plan of a step with these settings, which were resolved; see `Relay.plan`."""
        if isinstance(config.schedule, StepPlan):
            return config.schedule
        settings, visits = self._schedule_inputs(config)
        return StepPlan.expected(settings, [unit.key for unit in self.parts.layers], visits)

    def _schedule_inputs(self, config: RelayConfig) -> tuple[ScheduleSettings, list[str]]:
        """Return the settings of a schedule, and the layers in the expected order of forward."""
        expected = PassPlan.of(config, self.pass_cache.layer_order, loss_per_micro_batch=not self._has_batch_loss)
        return expected.settings(config, self.parts), [unit.key for unit in expected.layer_order]

    def _with_plan(self, config: RelayConfig) -> RelayConfig:
        """Return the settings of a step by a user-defined schedule, with its plan in place of it."""
        plan = config.schedule
        if not isinstance(plan, StepPlan):
            plan = StepPlan.of(cast(ScheduleFunction, plan), *self._schedule_inputs(config))
        self._check_plan(plan, config)
        settings = plan.settings
        kept = {action.visit for action in plan.actions if action.kind == "F" and action.keep == "graph"}
        resident = settings.slots - settings.ahead - 1
        return replace(config, schedule=plan, ahead=settings.ahead, resident=resident, keep=len(kept))

    def _check_plan(self, plan: StepPlan, config: RelayConfig) -> None:
        check_plan(plan)
        settings, count = plan.settings, config.micro_batches
        unknown = sorted({*plan.loads} - {unit.key for unit in self.parts.layers})
        differences = {
            f"{settings.micro_batches} micro-batches, and the batch is split into {count}": settings.micro_batches != count,
            f"layers {', '.join(unknown)}, which the model does not have": bool(unknown),
            f"offloads={settings.offloads}, and the relay has stash={config.stash!r}": settings.offloads
            != (config.stash != "device"),
            f"loss_per_micro_batch={settings.loss_per_micro_batch}, and the relay's loss is of the other kind":
            settings.loss_per_micro_batch == self._has_batch_loss,
            f"{settings.slots} slots, too few for ahead={settings.ahead}": settings.slots <= settings.ahead,
        }  # fmt: skip
        for difference, holds in differences.items():
            if holds:
                raise ValueError(
                    f"the plan has {difference}. Start from the relay's own plan, which fits this batch and relay: "
                    "relay.plan(batch, dataclasses.replace(relay.config, schedule='breadth_first'))"
                )

    def check_can_step(self, batch: Batch) -> None:
        """Refuse to train on a batch if the model, the optimizer's groups or the batch would make a step fail."""
        if (default := torch.get_default_device()).type != "cpu":
            raise RuntimeError(
                f"the default device is {str(default)!r}, where PyTorch would make the relay's buffers of host memory: call "
                "torch.set_default_device('cpu'), or step outside of the torch.device block. Layers compute on the device of "
                "Relay(..., device=...)"
            )
        check_model(self._model, self.parts.units)
        check_step(self._model, self.parts.shell_modules(), self.parts.units)
        self._store.masters.check_groups()
        refuse_gradients(batch)

    def _share_results(self, losses: Sequence[torch.Tensor]) -> float:
        """Return the sum of all workers' losses; set the influence of layers, by which edits choose, to the workers' mean."""
        own = {unit.key: unit.stats["influence"] for unit in self.parts.layers if "influence" in unit.stats}
        every_loss, influences = zip(*self.backend.gather_items([(losses, own)]), strict=True)
        for unit in self.parts.layers:
            if found := [each[unit.key] for each in influences if unit.key in each]:
                unit.stats["influence"] = fmean(found)
        return float(sum(chain.from_iterable(every_loss)))

    def _grad_norm(self, config: RelayConfig) -> float | None:
        """Return the norm of the last step's gradients; None if a worker knows only the norms of its part."""
        is_whole = self.backend.count == 1 or config.max_grad_norm is not None
        return self._store.grad_norm if is_whole else None

    def _train(
        self,
        batch: Batch,
        micro_batches: Sequence[Any],
        divisors: Sequence[float],
        batch_loss: BatchLoss | None,
        config: RelayConfig,
        replay: MeterRecord | None,
        extras: StepExtras,
    ) -> tuple[list[torch.Tensor], PassResult, Trace]:
        # Set before the step runs, for readers that follow it live.
        self.trace = trace = self.backend.sign_trace(self.parts.new_trace(config, self.steps))
        restore_buffers = self.parts.snapshot_buffers()
        self._device.ledger.reset_peak()
        if batch_loss is None:
            spec = self._make_spec(config, extras.run, list(enumerate(micro_batches)))
        else:
            spec = self._make_spec(config, batch_loss.outputs, micro_batches, batch_loss)
        spec = replace(spec, check=self.backend.make_buffer_check(self.parts.units))
        try:
            return *run_step(self.parts, self._store, spec, divisors, trace, replay), trace
        except BaseException as error:  # a second interrupt, too
            record_failure(trace, error)
            self.backend.announce_failure(error)
            updated = self.backend.agree_on_failure(error, self._roll_back(restore_buffers))
            if isinstance(error, StaleMeterError):
                self.pass_cache.invalidate()
            if isinstance(error, DeviceOutOfMemory):
                self._advise(error, batch, config)
            if updated:
                raise self._torn_step(error, updated) from error
            raise

    def _advise(self, error: DeviceOutOfMemory, batch: Batch, config: RelayConfig) -> None:
        """Add settings that fit to an error, with one worker."""
        if self.backend.count == 1:
            from l2l_core.forecast import advise

            searched = replace(config, schedule="breadth_first") if config.has_own_schedule else config
            with self.rehearsing(batch) as rehearsal:
                advise(error, self._watched(rehearsal, error), batch, searched)
            if config.has_own_schedule and error.settings:
                error.settings = {**error.settings, "schedule": searched.schedule}
                error.remedy += " These settings are for schedule='breadth_first'."

    def _watched(self, rehearsal: Rehearsal, error: DeviceOutOfMemory | None) -> Rehearsal:
        """Return the rehearsal, which calls `on_trial`, if there is one."""
        if self.on_trial is None:
            return rehearsal
        return replace(rehearsal, on_trial=partial(self.on_trial, error))

    def _roll_back(self, restore_buffers: Callable[[], None]) -> list[str]:
        """Undo the step where possible; return the keys of blocks that stay updated."""
        self._store.rollback()  # removes the blocks that it restores from `updated`
        for param in self._model.parameters():  # now that no update uses them
            param.grad = None  # a parameter unfrozen during the step has no hook that takes its gradient
        updated = [block.key for block in self._store.updated]
        if not updated:
            restore_buffers()
        return updated

    def _torn_step(self, error: BaseException, updated: list[str]) -> TornStep:
        names = [self.parts.names.get(key, key) for key in updated]
        return TornStep(
            f"step {self.steps + 1} failed ({type(error).__name__}: {error}) after the update of {', '.join(names[:6])}"
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
        prepare: Callable[[BreadthFirstRuntime], None] = change_nothing,
        batch_loss: BatchLoss | None = None,
        mode: PassMode = "evaluation",
        first: int | None = None,
    ) -> list[Any]:
        """Run a forward relay without gradients, in evaluation mode or in the modes that the modules are in.

        Random numbers are those of micro-batch `first` of the whole batch and of the next ones; by default this worker's.

        Returns:
            The micro-batches' results on the host; with `batch_loss` that loss alone.
        """
        check_model(self._model, self.parts.units)
        config = self.config if config is None else config
        config = replace(
            config, micro_batches=len(micro_batches), meter="on_change", keep=0, schedule="breadth_first"
        )  # no backward: nothing is kept
        kind = self.kind_of(micro_batches, config)
        spec = self._make_spec(config, task, micro_batches, batch_loss, first)
        trace = self.backend.sign_trace(self.parts.new_trace(config, self.steps))
        try:
            with self.without_gradients(mode):
                replay = self.pass_cache.inferences.get((kind, task))
                results, ran = run_forward(self.parts, spec, trace, replay, prepare)
            self.pass_cache.inferences.put((kind, task), ran.metered)
            return results
        except DeviceOutOfMemory as error:
            record_failure(trace, error)
            self._failed_inference = trace
            raise

    def evaluate(self, batch: Batch, normaliser: LossNormaliser) -> float:
        """Return the mean loss of the rows of all workers, in evaluation mode."""
        rows, micro_batches = self.split(batch)
        divisors = normaliser.divisors(rows, micro_batches)
        batch_loss = self.batch_loss(rows, len(micro_batches))
        restore_buffers = self.parts.snapshot_buffers()
        try:
            with preserve_random_state():
                if batch_loss is not None:
                    [loss] = self.infer(micro_batches, batch_loss.outputs, batch_loss=batch_loss)
                    return float(loss)
                losses = self.infer(micro_batches, self.objective)
        finally:
            restore_buffers()
        return float(
            sum(self.backend.gather_items([divide_loss(loss, n) for loss, n in zip(losses, divisors, strict=True)]))
        )

    def probe_batch(self, batch: Batch, with_outputs: bool) -> BatchProbe:
        """Return loss, count and outputs of a batch; see `Relay.probe_batch`."""
        rows, micro_batches = self.split(batch)
        joins_passes = with_outputs and not (self._has_batch_loss or self.model_call.has_objective)
        if not joins_passes:
            loss = self.evaluate(batch, self.probe_normaliser)
            outputs = self.infer(micro_batches, self.model_call.outputs) if with_outputs else None
        else:
            divisors = self.probe_normaliser.divisors(rows, micro_batches)
            results = self.infer(micro_batches, self._objective_with_outputs)
            losses = [divide_loss(each[0], n) for each, n in zip(results, divisors, strict=True)]
            loss, outputs = float(sum(self.backend.gather_items(losses))), [each[1] for each in results]
        count = self.probe_normaliser.item_count(rows, micro_batches)
        if outputs is None:
            return BatchProbe(loss, count, rows.count, None)
        joined = rows.join(outputs, cache(partial(self.probe_normaliser.divisors, rows, micro_batches)))
        return BatchProbe(loss, count, rows.count, joined)

    def _objective_with_outputs(self, model: nn.Module, micro_batch: Any) -> tuple[torch.Tensor, Any]:
        with new_state_copied(self.model_call.metrics()):
            return self.model_call.objective_with_outputs(model, micro_batch)

    @contextmanager
    def without_gradients(self, mode: PassMode) -> Iterator[None]:
        """Disable gradients and the caches of decoders; set the modules to evaluation mode, or leave them as they are."""
        # Per module: parts of a model may always be in evaluation mode.
        modes = {module: module.training for module in self._model.modules()}
        try:
            # Not model.eval(), which a model may override: to merge adapters, for one
            for module in modes if mode == "evaluation" else ():
                module.training = False
            with torch.no_grad(), self.kv_caches.disabled():
                yield
        finally:
            for module, training in modes.items():
                module.training = training

    def snapshot_attributes(self) -> Restore:
        """Capture plain attributes of the model, and metrics that the loss updates; return a function that restores them."""
        restore_metrics = snapshot_modules(self.model_call.loss_modules())
        return restore_all([snapshot_attributes(self._model.modules()), restore_metrics])

    def snapshot_user_state(self) -> Restore:
        """Capture what loss, hooks, objects and optimizer keep beside those, before runs that the user must not notice."""
        roots = [*self.model_call.functions, *self._store.masters.user_objects]
        return snapshot_user_state(roots, self._model.modules())

    # -- a rehearsal ---------------------------------------------------------------------------------------------------

    def rehearsal(
        self, batch: Batch, cluster: Cluster | None = None, outside: OutsideGradients | None = None
    ) -> Rehearsal:
        """Make a rehearsal, whose passes train nothing and run on the model's own weights, for one worker of a cluster."""
        from l2l_core.forecast import Rehearsal

        reduce = "ordered" if (self.cluster() if cluster is None else cluster).per_micro_batch else "sum"
        outside = OutsideGradients(self._model.parameters()) if outside is None else outside
        batch_loss = None
        if self._has_batch_loss:  # of this worker alone
            batch_loss = self._make_batch_loss(batch, self.rows_of(batch).join)
            batch_loss = replace(batch_loss, compute=outside.keeping(batch_loss.compute))
        return Rehearsal(
            self.parts,
            self._store,
            self.pass_cache.layer_order,
            outside.keeping(self.objective),
            self.rows_of,
            self.backend.make_rehearsal_source,
            self.pass_cache.set_layer_order,  # spares the first step the search for the order
            reduce,
            batch_loss,
        )

    @contextmanager
    def rehearsing(self, batch: Batch, cluster: Cluster | None = None) -> Iterator[Rehearsal]:
        """Yield a rehearsal; afterwards restore random state, plain attributes of modules, and gradients outside of the model."""
        restore = restore_all([self.snapshot_attributes(), self.snapshot_user_state()])
        outside = OutsideGradients(self._model.parameters())
        try:
            with preserve_random_state():
                yield self.rehearsal(batch, cluster, outside)
        finally:
            restore()
            outside.restore()

    def cluster(self, **other: Any) -> Cluster:
        """Return the workers for a forecast; arguments in `other` that are not None override this relay's own."""
        from l2l_core.simulator import Cluster

        settings = self.backend.settings
        own = {"network": settings.network, "wire": settings.wire, "reduce": settings.reduce}
        given = {name: value for name, value in other.items() if value is not None}
        return Cluster(**{"count": self.backend.count, "rank": self.backend.rank, **own, **given})

    def fit(
        self, batch: Batch, device_bytes: int | None, host_bytes: int | None, fixed: Iterable[str], most_s: float
    ) -> Fit:
        """Find settings for steps on this batch; see `Relay.fit`.

        The worker with the largest batch rehearses, within the memory of the worker with the least, and all use its result.
        """
        from l2l_core.forecast import MemoryLimits, fit_step, memory_limits_of

        check_model(self._model, self.parts.units)
        backend, rows, host = self.backend, self.rows_of(batch), gethostname()
        workers_here = backend.gather_items([host], "share host names").count(host)
        limits = memory_limits_of(self._device, self.parts.host, device_bytes, host_bytes, workers_here)
        tensors = [leaf for leaf in leaves_in(batch) if isinstance(leaf, torch.Tensor)]
        own = limits, rows.count, sum(map(nbytes_of, tensors))
        all_limits, counts, sizes = zip(*backend.gather_items([own], "share memory limits"), strict=True)
        config, fixed = self.resolve_config(self.config, batch), [*fixed] if not isinstance(fixed, str) else fixed
        found: list[Fit] = []
        with backend.unsharded():
            if backend.rank == sizes.index(max(sizes)):
                args = fixed, MemoryLimits.tightest(all_limits), most_s, min(counts), self.cluster()
                with self.rehearsing(batch) as rehearsal:
                    found = [fit_step(self._watched(rehearsal, None), batch, config, *args)]
            [fit] = backend.gather_items(found, "send the settings found")
        return fit

    # -- between passes ------------------------------------------------------------------------------------------------

    def set_layers(self, layers: Sequence[Unit]) -> None:
        """Use these layers from the next pass on."""
        self.parts = replace(self.parts, layers=list(layers))
        self.pass_cache.reset(layers)

    @contextmanager
    def without(self, units: Collection[Unit], layers: Sequence[Unit]) -> Iterator[None]:
        """Run a block without `units`, with `layers` left; meter records of passes over all layers are kept."""
        parts = self.parts
        with self.pass_cache.without(units):
            self.parts = replace(parts, layers=list(layers))
            try:
                yield
            finally:
                self.parts = parts

    def snapshot(self) -> Callable[[], None]:
        """Capture step count, trace, parts, layer statistics and pass cache; return a function that restores them."""
        steps, trace, parts = self.steps, self.trace, self.parts
        stats = {unit: dict(unit.stats) for unit in parts.units}
        restore_cache = self.pass_cache.snapshot()

        def restore() -> None:
            self.steps, self.trace, self.parts = steps, trace, parts
            for unit, old in stats.items():
                unit.stats = old
            restore_cache()

        return restore
