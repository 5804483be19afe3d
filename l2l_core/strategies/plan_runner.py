"""One pass of a plan over all micro-batches of a batch, on a metered device: gradients in the parameters, a log, a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.batches import Objective, leaves_in
from l2l_core.devices import Device, Ledger
from l2l_core.eps import TornStep
from l2l_core.eps.optimizers import state_bytes
from l2l_core.model import KVCaches, RandomState, copy_tensors
from l2l_core.step.traffic import ComputeClock
from l2l_core.strategies.allocation_meter import AllocationMeter
from l2l_core.strategies.fixed_plans import Operations
from l2l_core.strategies.plan import COMPUTE_KINDS
from l2l_core.strategies.plan_execution import ExecutedOperation, OnOutputs, PlanExecution
from l2l_core.strategies.stage_structure import StageStructure
from l2l_core.strategies.staged_forward import Tensor
from l2l_core.strategies.storage_offload import StorageOffloader
from l2l_core.strategies.structure_tracer import StructureTracer
from l2l_core.surgery import preserve_random_state
from l2l_core.trace import Trace


@dataclass(frozen=True)
class PlanInputs:
    """What all micro-batches of a step are made of.

    Attributes:
        micro_batches, divisors, seeds: one per micro-batch; a loss is divided by its own.
        structures: of the model, one per micro-batch.
    """

    micro_batches: Sequence[Any]
    divisors: Sequence[float]
    seeds: Sequence[int]
    structures: Sequence[StageStructure]


@dataclass
class PlanResult:
    """What a pass gave.

    Attributes:
        losses: scaled, one per micro-batch.
        logs, bases, constants: per micro-batch: operations; bytes before the first one; bytes of constants by stage.
        random: the state of the random stream at the end of the last micro-batch's pass.
    """

    losses: list[Tensor] = field(default_factory=list)
    logs: list[list[ExecutedOperation]] = field(default_factory=list)
    base_bytes: list[int] = field(default_factory=list)
    constant_bytes: list[dict[int, int]] = field(default_factory=list)
    layer_forwards: int = 0
    random_state: RandomState | None = None


class PlanRunner:
    """A model on a device, as plans see it.

    Invariant: between passes the device's ledger is as it was.

    Args:
        model: trained in place.
        layers: by module, their names.
        objective: the scalar loss of a micro-batch.
        device: computes in host memory.
        shared: names of parameters to whose gradients several stages add.
        trace: of what happens; default one that nobody reads.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[nn.Module, str],
        objective: Objective,
        device: Device,
        shared: frozenset[str] = frozenset(),
        trace: Trace | None = None,
    ) -> None:
        self.model, self._layers, self._objective, self._device = model, layers, objective, device
        self._shared = [param for name, param in model.named_parameters() if name in shared]
        self._kv_caches = KVCaches(model)
        self.host = Ledger("host", "Host memory")
        self.trace = trace or Trace()
        self.stages_of: dict[str, set[int]] = {}  # which stages added to each parameter's gradient, in `measuring`
        self.on_outputs: OnOutputs | None = None  # is shown what stages make, first and again
        self._records_frames = False
        self._execution: PlanExecution | None = None

    def trace_structure(
        self, tracer_class: Callable[..., StructureTracer], micro_batch: Any, divisor: float, seed: int
    ) -> StageStructure:
        """Learn the structure of the model from one micro-batch; leaves buffers and random state as they were."""
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        given = copy_tensors(micro_batch)
        with preserve_random_state(), self._kv_caches.disabled():
            RandomState.from_seed(seed).restore()
            structure = tracer_class(self.model, self._layers, self._task(given, divisor)).trace()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        return structure

    def _task(self, micro_batch: Any, divisor: float) -> Callable[[], Tensor]:
        return lambda: self._objective(self.model, micro_batch) / divisor

    def without_caches(self, model: nn.Module) -> AbstractContextManager[None]:
        """Let a copy of the model, too, do without key-value caches."""
        return KVCaches(model).disabled()

    @contextmanager
    def metered(self, optimizer: Optimizer | None = None) -> Iterator[AllocationMeter]:
        """Book weights and optimizer state, and count what else is made, in the block."""
        ledger, weights = self._device.ledger, [*self.model.parameters(), *self.model.buffers()]
        fixed = {"weights": total_storage_bytes(weights), "optimizer": optimizer_bytes(optimizer)}
        states = _state_tensors(optimizer) if optimizer else []
        ledger.reset_peak()
        booked: dict[str, int] = {}
        meter = AllocationMeter(ledger, [*weights, *states])
        try:
            for category, nbytes in fixed.items():
                ledger.book(category, "", nbytes)
                booked[category] = nbytes
            with self._kv_caches.disabled(), preserve_random_state(), torch.enable_grad(), meter:
                yield meter
        finally:
            meter.close()
            for category, nbytes in booked.items():
                ledger.release(category, "", nbytes)

    @contextmanager
    def timed(self) -> Iterator[AllocationMeter]:
        """Count nothing in the block, since counting takes longer than small operations do; for plans that move nothing."""
        with self._kv_caches.disabled(), preserve_random_state(), torch.enable_grad():
            yield AllocationMeter(self._device.ledger)

    def run(self, operations: Operations, inputs: PlanInputs, meter: AllocationMeter) -> PlanResult:
        """Execute a plan for every micro-batch; gradients add up in ascending k, as in plain training.

        Raises:
            DeviceOutOfMemory: the device's budget does not suffice.
            RuntimeError: the model takes another way than the one learned.
        """
        ran = PlanResult()
        for k, micro_batch in enumerate(inputs.micro_batches):
            with self._separate_gradients() if k else _leave_gradients():
                self._run_micro_batch(k, micro_batch, operations, inputs, meter, ran)
        return ran

    def _run_micro_batch(
        self,
        k: int,
        host_micro_batch: Any,
        operations: Operations,
        inputs: PlanInputs,
        meter: AllocationMeter,
        result: PlanResult,
    ) -> None:
        meter.exempt(leaf for leaf in leaves_in(host_micro_batch) if isinstance(leaf, Tensor))  # it stays on the host
        micro_batch = copy_tensors(host_micro_batch)
        moves = StorageOffloader(self._device, self.host, meter, self.trace)
        clock = ComputeClock(self._device, self.trace)
        execution = PlanExecution(
            self.model,
            self._layers,
            self._task(micro_batch, inputs.divisors[k]),
            inputs.structures[k],
            meter,
            moves,
            partial(_begin_event, clock, k),
            k,
        )
        execution.records_frames, execution.on_outputs = self._records_frames, self.on_outputs
        execution.on_done = partial(self._sample, meter)
        self._execution = execution
        RandomState.from_seed(inputs.seeds[k]).restore()
        result.base_bytes.append(meter.current_bytes)
        self.trace.sample("device", self._device.ledger.by_category())
        try:
            execution.run(operations)
        except BaseException:
            moves.abandon()
            raise
        result.random_state = RandomState.capture()
        result.constant_bytes.append(execution.constant_bytes())
        result.logs.append(execution.log)
        result.losses.append(execution.loss)
        result.layer_forwards += execution.layer_forwards
        self._execution = None

    def _sample(self, meter: AllocationMeter, done: ExecutedOperation) -> None:
        if done.operation.kind in COMPUTE_KINDS:
            self._sample_peak(meter, done.peak_bytes)
        meter.set_category((p.grad for p in self.model.parameters() if p.grad is not None), "gradients")
        self.trace.sample("device", self._device.ledger.by_category())
        self.trace.sample("host", self.host.by_category())

    def _sample_peak(self, meter: AllocationMeter, peak_bytes: int) -> None:
        """Note the most bytes within what has just run, ahead of what is left of it; readers know this order from a relay."""
        held = self._device.ledger.by_category()
        self.trace.sample(
            "device", {**held, "activations": held.get("activations", 0) + peak_bytes - meter.current_bytes}
        )

    def update(self, optimizer: Optimizer, meter: AllocationMeter, needed_bytes: int) -> None:
        """Update with the gradients that are there, and drop them.

        Args:
            room_bytes: that the update will need besides what is there now.

        Raises:
            DeviceOutOfMemory: there is no such room; nothing was updated.
            TornStep: the optimizer failed when some weights were new; it names their parameters.
        """
        ledger = self._device.ledger
        if ledger.limit_bytes is not None and ledger.total + needed_bytes > ledger.limit_bytes:
            ledger.book("activations", "", needed_bytes)  # refuses, before a part of the weights is new
        meter.take_high_water()
        clock = ComputeClock(self._device, self.trace)
        clock.start("update", "", -1)
        versions = {name: param._version for name, param in self.model.named_parameters()}
        try:
            optimizer.step()
        except Exception as error:
            new = [name for name, param in self.model.named_parameters() if param._version != versions[name]]
            if not new:
                raise
            raise TornStep(f"the optimizer failed after it had updated {', '.join(new)}: {error!r}", new) from error
        clock.stop()
        self._sample_peak(meter, meter.take_high_water())
        meter.set_category(_state_tensors(optimizer), "optimizer")
        optimizer.zero_grad(set_to_none=True)
        self.trace.sample("device", ledger.by_category())

    @contextmanager
    def _separate_gradients(self) -> Iterator[None]:
        """Gather the gradients that a micro-batch has for parameters of several stages, and add them up at the end.

        Stage by stage they would be added in another order than in plain training: (a + b) + (c + d) is not ((a + b) + c) + d.
        """
        before = [param.grad for param in self._shared]
        for param in self._shared:
            param.grad = None
        yield
        for param, grad in zip(self._shared, before, strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else grad.add_(param.grad)

    @contextmanager
    def recording_frames(self) -> Iterator[None]:
        """Note in the block what frames hold, and which stages add to each parameter's gradient."""
        self._records_frames = True
        handles = []
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                found = self.stages_of.setdefault(name, set())
                handles.append(param.register_post_accumulate_grad_hook(partial(self._record_stage, found)))
        try:
            yield
        finally:
            self._records_frames = False
            for handle in handles:
                handle.remove()

    def separate_shared_gradients(self) -> frozenset[str]:
        """Keep gradients of each micro-batch apart where, as was noted, several stages add to them; returns the names."""
        shared = frozenset(name for name, found in self.stages_of.items() if len(found) > 1)
        self._shared = [param for name, param in self.model.named_parameters() if name in shared]
        return shared

    def _record_stage(self, found: set[int], _: Tensor) -> None:
        found.add(self._execution.backward_count)  # type: ignore[union-attr]


def _begin_event(clock: ComputeClock, k: int, kind: str, layer: str, visit: int) -> Callable[[], None]:
    clock.stay += 1  # every operation is a stay of its own: a stage may run several times
    clock.start(kind, layer, k, visit)
    return clock.stop


@contextmanager
def _leave_gradients() -> Iterator[None]:
    yield


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def total_storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def optimizer_bytes(optimizer: Optimizer | None) -> int:
    """Return the bytes of an optimizer's state."""
    return sum(state_bytes(state) for state in optimizer.state.values()) if optimizer else 0
