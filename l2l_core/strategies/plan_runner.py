"""One pass of a plan over all micro-batches of a batch, on a metered device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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
from l2l_core.model import KVCaches, RandomState, copy_tensors, preserve_random_state
from l2l_core.step.traffic import ComputeClock
from l2l_core.strategies.allocation_meter import AllocationMeter
from l2l_core.strategies.plan import COMPUTE_KINDS, B, Operations
from l2l_core.strategies.plan_execution import ExecutedOperation, OnOutputs, PlanExecution
from l2l_core.strategies.stage_structure import StageStructure
from l2l_core.strategies.staged_forward import Tensor
from l2l_core.strategies.storage_offload import StorageOffloader
from l2l_core.strategies.structure_tracer import StructureTracer
from l2l_core.trace import Trace


@dataclass(frozen=True)
class PlanInputs:
    """The micro-batches of a step, in order; the other fields have one item for each."""

    micro_batches: Sequence[Any]
    divisors: Sequence[float]  # of the losses
    seeds: Sequence[int]  # of the random streams
    structures: Sequence[StageStructure]


@dataclass
class PlanResult:
    """Losses and measurements of a pass, in lists with one item per micro-batch."""

    losses: list[Tensor] = field(default_factory=list)  # scaled
    logs: list[list[ExecutedOperation]] = field(default_factory=list)
    base_bytes: list[int] = field(default_factory=list)  # before the first operation
    constant_bytes: list[dict[int, int]] = field(default_factory=list)  # by stage
    layer_forwards: int = 0  # in all micro-batches together
    random_state: RandomState | None = None  # at the end of the pass


class PlanRunner:
    """A model on a device that runs plans.

    Invariant: between passes the device's ledger is as it was.

    Args:
        model: trained in place.
        layers: names of layers, by module.
        objective: returns the scalar loss of a micro-batch.
        device: computes in host memory.
        shared: names of parameters to whose gradients several stages add.
        trace: gets the events and samples, if given.

    Attributes:
        host: ledger of offloaded bytes.
        on_outputs: called with the outputs of every run of a stage, if set.
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
        self.on_outputs: OnOutputs | None = None
        self._gradient_stages: dict[str, set[int]] = {}  # by parameter, the backwards that add to its gradient
        self._records_frames = False
        self._execution: PlanExecution | None = None
        self._without_gradient: Sequence[nn.Parameter] = ()  # from the present micro-batch, so far

    def trace_structure(self, micro_batch: Any, divisor: float, seed: int) -> StageStructure:
        """Trace the stage structure with one micro-batch; restore buffers and random state afterwards."""
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        with preserve_random_state(), self._kv_caches.disabled():
            RandomState.from_seed(seed).restore()
            task = self._task(copy_tensors(micro_batch), divisor)
            structure = StructureTracer(self.model, self._layers, task).trace()
        restore_buffers(buffers)
        return structure

    def _task(self, micro_batch: Any, divisor: float) -> Callable[[], Tensor]:
        return lambda: self._objective(self.model, micro_batch) / divisor

    @contextmanager
    def metered(self, optimizer: Optimizer | None = None) -> Iterator[AllocationMeter]:
        """Book weights and optimizer state inside the block, and count all storages made in it."""
        ledger, weights = self._device.ledger, [*self.model.parameters(), *self.model.buffers()]
        fixed = {"weights": total_storage_bytes(weights), "optimizer": optimizer_bytes(optimizer)}
        ledger.reset_peak()
        meter = AllocationMeter(ledger, [*weights, *_state_tensors(optimizer)])
        with ExitStack() as stack:
            for category, nbytes in fixed.items():
                ledger.book(category, "", nbytes)
                stack.callback(ledger.release, category, "", nbytes)
            stack.callback(meter.close)
            with self.timed(), meter:
                yield meter

    @contextmanager
    def timed(self) -> Iterator[AllocationMeter]:
        """Prepare the model for runs inside the block, with a meter that is off: counting would slow down operations."""
        with self._kv_caches.disabled(), preserve_random_state(), torch.enable_grad():
            yield AllocationMeter(self._device.ledger)

    def run(self, operations: Operations, inputs: PlanInputs, meter: AllocationMeter) -> PlanResult:
        """Execute a plan for every micro-batch; gradients are added in ascending k, as in plain training.

        Raises:
            DeviceOutOfMemory: the device's budget does not suffice.
            RuntimeError: the model takes another path than the traced one.
        """
        result = PlanResult()
        for k in range(len(inputs.micro_batches)):
            with self._separate_gradients() if k else nullcontext():
                self._run_micro_batch(k, operations, inputs, meter, result)
        return result

    def _run_micro_batch(
        self, k: int, operations: Operations, inputs: PlanInputs, meter: AllocationMeter, result: PlanResult
    ) -> None:
        # The given micro-batch stays on the host, its copy is on the device.
        meter.exempt(leaf for leaf in leaves_in(inputs.micro_batches[k]) if isinstance(leaf, Tensor))
        micro_batch = copy_tensors(inputs.micro_batches[k])
        offloader = StorageOffloader(self._device, self.host, meter, self.trace)
        execution = self._execution = PlanExecution(
            self.model,
            self._layers,
            self._task(micro_batch, inputs.divisors[k]),
            inputs.structures[k],
            meter,
            offloader,
            ComputeClock(self._device, self.trace),
            k,
            self.on_outputs,
            partial(self._sample, meter),
            self._records_frames,
            self._shared,
        )
        self._without_gradient = list(self.model.parameters())
        RandomState.from_seed(inputs.seeds[k]).restore()
        result.base_bytes.append(meter.current_bytes)
        self.trace.sample("device", self._device.ledger.by_category())
        try:
            execution.run(operations)
        except BaseException:
            offloader.abandon()
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
        if done.operation.kind == B:
            # Of stage after stage the new ones only: all parameters each time would be quadratic in the depth of a model.
            found = [p.grad for p in (*self._without_gradient, *self._shared) if p.grad is not None]
            meter.set_category(found, "gradients")
            self._without_gradient = [p for p in self._without_gradient if p.grad is None]
        self.trace.sample("device", self._device.ledger.by_category())
        self.trace.sample("host", self.host.by_category())

    def _sample_peak(self, meter: AllocationMeter, peak_bytes: int) -> None:
        """Sample the peak of the last operation; as in a relay's trace, the bytes after it follow."""
        held = self._device.ledger.by_category()
        activations = held.get("activations", 0) + peak_bytes - meter.current_bytes
        self.trace.sample("device", {**held, "activations": activations})

    def update(self, optimizer: Optimizer, meter: AllocationMeter, needed_bytes: int) -> None:
        """Update the weights and drop the gradients.

        Args:
            optimizer: updates from the gradients of the parameters.
            meter: of the block that `metered` opened.
            needed_bytes: peak of the update above the present bytes.

        Raises:
            DeviceOutOfMemory: the device has no room for the update; nothing was updated.
            TornStep: the optimizer failed after it had updated some parameters, which the error names.
        """
        ledger = self._device.ledger
        if ledger.limit_bytes is not None and ledger.total + needed_bytes > ledger.limit_bytes:
            ledger.book("activations", "", needed_bytes)  # raises, before any weight is updated
        meter.take_high_water()
        clock = ComputeClock(self._device, self.trace)
        clock.start("update", "", -1)
        versions = {name: param._version for name, param in self.model.named_parameters()}
        try:
            optimizer.step()
        except Exception as error:
            updated = [name for name, param in self.model.named_parameters() if param._version != versions[name]]
            if not updated:
                raise
            message = f"the optimizer failed after it had updated {', '.join(updated)}: {error!r}"
            raise TornStep(message, updated) from error
        clock.stop()
        self._sample_peak(meter, meter.take_high_water())
        meter.set_category(_state_tensors(optimizer), "optimizer")
        optimizer.zero_grad(set_to_none=True)
        self.trace.sample("device", ledger.by_category())

    @contextmanager
    def _separate_gradients(self) -> Iterator[None]:
        """Collect a micro-batch's gradients of parameters of several stages inside the block; add them at its end.

        Added stage by stage, they would round differently than in plain training: (a + b) + (c + d), not ((a + b) + c) + d.
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
        """Record inside the block the tensors of frames, and the stages that add to each parameter's gradient."""
        self._records_frames = True
        with ExitStack() as stack:
            stack.callback(setattr, self, "_records_frames", False)
            for name, param in self.model.named_parameters():
                if param.requires_grad:
                    stages = self._gradient_stages.setdefault(name, set())
                    hook = param.register_post_accumulate_grad_hook(partial(self._record_stage, stages))
                    stack.callback(hook.remove)
            yield

    def _record_stage(self, stages: set[int], _: Tensor) -> None:
        assert self._execution is not None
        stages.add(self._execution.backward_count)

    def separate_shared_gradients(self) -> frozenset[str]:
        """Separate by micro-batch the gradients to which several recorded stages add; return the parameters' names."""
        shared = frozenset(name for name, stages in self._gradient_stages.items() if len(stages) > 1)
        self._shared = [param for name, param in self.model.named_parameters() if name in shared]
        return shared


def restore_buffers(buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write earlier values back into buffers.

    Example:
        >>> from l2l_core.strategies import restore_buffers
        >>> norm = nn.BatchNorm1d(16)
        >>> before = [(buffer, buffer.clone()) for buffer in norm.buffers()]
        >>> y = norm(torch.randn(8, 16))
        >>> restore_buffers(before)
        >>> norm.num_batches_tracked
        tensor(0)
    """
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def _state_tensors(optimizer: Optimizer | None) -> list[Tensor]:
    states = optimizer.state.values() if optimizer else ()
    return [value for state in states for value in state.values() if torch.is_tensor(value)]


def total_storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def optimizer_bytes(optimizer: Optimizer | None) -> int:
    """Return the bytes of an optimizer's state."""
    return sum(state_bytes(state) for state in optimizer.state.values()) if optimizer else 0
