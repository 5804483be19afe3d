"""One rank's part of a pipeline: its stages run in `torch.distributed.pipelining`, and are measured.

Bits: gradients of each parameter are added in the order of the schedule, which is ascending in the micro-batch but for
`looped_breadth_first`. Parameters that several stages read keep a gradient per micro-batch; ranks exchange these, and each adds
them as plain training does.
"""

from __future__ import annotations

import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from l2l_core._torch import pipeline_runtime
from l2l_core.devices import Device, EmulatedDevice, Ledger
from l2l_core.model import KVCaches, RandomState, preserve_random_state
from l2l_core.parallel.pipeline_cut import TensorForm, cut_model
from l2l_core.parallel.pipeline_job import PipelineJob
from l2l_core.parallel.pipeline_stage import KeptStage, TreatedStage, laid_out_as
from l2l_core.parallel.shared_gradients import SharedGradients
from l2l_core.pipelines import PipelinePlan, check_pipeline
from l2l_core.step.traffic import ComputeClock
from l2l_core.strategies import AllocationMeter, Operations, StorageOffloader, mixed_plan
from l2l_core.trace import Trace, WorkerInfo

Tensor = torch.Tensor


@dataclass
class RankReport:
    """Measurements of one rank in its last step.

    Attributes:
        rank: its number.
        sent_bytes: payload of messages to other ranks: tensors, and gradients.
        exchanged_bytes: payload sent for gradients of parameters that several stages read.
        held_bytes: peak bytes of activations and gradients at the boundary, between actions.
        peak_bytes: the same, within actions too.
        message_bytes: peak bytes of messages whose micro-batch is over: torch's runtime keeps them until the step ends. The
            state of the random generator counts here too.
        host_bytes: peak bytes offloaded.
        buffer_bytes: of torch's receive buffers, which exist for every micro-batch all the time.
        weight_bytes: of the rank's parameters.
        trace: events and memory.
        seconds: wall time of the step.

    Example:
        See `run_pipeline`.
    """

    rank: int
    sent_bytes: int = 0
    exchanged_bytes: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    message_bytes: int = 0
    host_bytes: int = 0
    buffer_bytes: int = 0
    weight_bytes: int = 0
    trace: Trace = field(default_factory=Trace)
    seconds: float = 0.0


class Pipeline:
    """One rank's part of a pipeline; the process group is initialised.

    The rank keeps the parameters of its stages; others take no memory from now on.

    Args:
        job: the same on every rank.
        plan: the schedule; with `schedule`, only its placement of stages is used.
        schedule: name of a schedule of torch, such as "1F1B", which then orders the actions.
        treatments: by stage, operations of the lab (`treat_pipeline`); None keeps everything. Default: recompute where the
            plan has an R.
        bounds: by stage, its first layer; default about as many layers in each.
        device: holds offloaded tensors.

    Raises:
        PipelineError: the plan is not one of a training step.
        ValueError: it does not fit the job or the number of ranks.

    Example:
        >>> import torch.distributed as dist
        >>> from l2l_core.parallel import Pipeline, PipelineJob
        >>> from l2l_core.pipelines import gpipe
        >>> relay.close()  # a model has one trainer at a time
        >>> job = PipelineJob.of(model, batch, micro_batches=2, loss=nn.CrossEntropyLoss())
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts several
        >>> pipeline = Pipeline(job, gpipe(1, 2))
        >>> optimizer = torch.optim.AdamW(pipeline.parameters().values(), lr=1e-2)
        >>> losses = []
        >>> for _ in range(2):
        ...     losses.append(pipeline.step())
        ...     optimizer.step()
        >>> losses[1] < losses[0]
        True
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        job: PipelineJob,
        plan: PipelinePlan,
        schedule: str | None = None,
        treatments: Sequence[Operations | None] | None = None,
        bounds: Sequence[int] | None = None,
        device: Device | None = None,
    ) -> None:
        self.job, self.plan, self.steps = job, plan, 0
        self.rank, count = dist.get_rank(), dist.get_world_size()
        check_pipeline(plan)
        rows = plan.csv()
        if len(plan.ranks) != count or plan.micro_batches != len(job.micro_batches):
            raise ValueError(
                f"{plan.name} is a plan for {len(plan.ranks)} ranks and {plan.micro_batches} micro-batches, and there are "
                f"{count} ranks and {len(job.micro_batches)} micro-batches: make the plan for these numbers"
            )
        self.model = job.model
        self._layers = {self.model.get_submodule(name): name for name in job.layers}
        self.cut = cut_model(self.model, self._layers, job.task(self.model, 0), plan.stages, bounds)
        self._treatments = treatments or [None] * plan.stages
        if len(self._treatments) != plan.stages:
            raise ValueError(f"{len(self._treatments)} treatments for {plan.stages} stages: give one for each, or None")
        _refuse_split_backward(plan, schedule, self._treatments)
        self._device = device or EmulatedDevice()
        self.stages = [_Stage(self, stage) for stage in plan.stages_of(self.rank)]
        self._shared = SharedGradients(self.cut, dict(self.model.named_parameters()), plan, self.rank)
        self._drop_foreign_parameters()
        self._schedule = self._make_schedule(schedule, rows)
        self.report = RankReport(self.rank)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the rank's own parameters by name."""
        own = frozenset().union(*(self.cut.parameters_of(each.stage_index) for each in self.stages))
        return {name: param for name, param in self.model.named_parameters() if name in own}

    def buffers(self) -> dict[str, Tensor]:
        """Return by name the buffers that the rank's stages change."""
        cut = self.cut
        layers = [i for each in self.stages for i in range(*cut.bounds[each.stage_index : each.stage_index + 2])]
        return {name: self.model.get_buffer(name) for i in layers for name in cut.buffers[i]}

    def step(self) -> float | None:
        """Run forward and backward of all micro-batches; gradients are in `.grad` afterwards.

        Returns:
            The mean loss on the rank that has the last stage, else None.
        """
        report = self.report = RankReport(self.rank)
        worker = WorkerInfo(self.rank, dist.get_world_size(), began_s=time.perf_counter())
        report.trace = trace = Trace(step=self.steps, device="gloo", worker=worker)
        m, has_last = len(self.job.micro_batches), any(each.is_last for each in self.stages)
        losses: list[Tensor] = []
        ledger = Ledger("device", "Device memory")
        self.host = Ledger("host", "Host memory")
        self.clock = ComputeClock(self._device, trace)
        began_s = time.perf_counter()
        weights = [*self.model.parameters(), *self.model.buffers()]
        target = {"target": torch.zeros(m)} if has_last else {}
        with preserve_random_state(), KVCaches(self.model).disabled(), torch.enable_grad():
            self.meter = AllocationMeter(ledger, weights)
            try:
                with self.meter:
                    self._schedule.step(k=torch.arange(m), losses=losses, return_outputs=False, **target)
            finally:
                self.meter.close()
            report.exchanged_bytes = self._shared.exchange()
        self.steps += 1
        report.seconds = time.perf_counter() - began_s
        report.host_bytes = self.host.peak
        report.buffer_bytes = sum(each.buffer_bytes() for each in self.stages)
        report.weight_bytes = sum(param.nbytes for param in self.parameters().values())
        return float(sum(loss.detach() for loss in losses)) if has_last else None

    def _make_schedule(self, name: str | None, rows: str) -> Any:
        m, options = len(self.job.micro_batches), {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        if name is not None:
            kind = get_schedule_class(name)
            stages: Any = self.stages[0] if issubclass(kind, PipelineScheduleSingle) else self.stages
            return kind(stages, m, **options)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.csv"
            path.write_text(rows)
            return pipeline_runtime(self.stages, m, str(path), **options)

    def _operations_of(self, stage: int, k: int) -> Operations | None:
        if self._treatments[stage] is None and self.plan.recomputes(stage, k):
            first, stop = self.cut.bounds[stage : stage + 2]
            return mixed_plan("R" * (stop - first))
        return self._treatments[stage]

    def _drop_foreign_parameters(self) -> None:
        own = self.parameters()
        for name, param in self.model.named_parameters():
            if name not in own:
                param.data = TensorForm.of(param.data).placeholder()
                param.grad = None

    def run_forward(self, stage: int, k: int, received: Sequence[Tensor]) -> tuple[Any, tuple[Tensor, ...]]:
        """Run the forward of a stage; return its execution and what it sends."""
        task, state = self.job.task(self.model, k), RandomState.from_seed(self.job.seed_of(self.steps, k))
        operations = self._operations_of(stage, k)
        if operations is None:
            execution: Any = KeptStage(self.cut, stage, self.model, self._layers, task)
            return None, execution.forward(received, state)
        trace = self.report.trace
        offloader = StorageOffloader(self._device, self.host, self.meter, trace)
        parts = (self.model, self._layers, task, self.cut.structure, self.meter, offloader, self.clock, k)
        execution = TreatedStage(self.cut, stage, operations, *parts, None, lambda done: None, False)
        return execution, execution.forward(received, state)

    @contextmanager
    def measured(self, kind: str, stage: int, k: int, is_treated: bool) -> Iterator[None]:
        """Add an action to the trace, and the bytes after it."""
        self.meter.take_high_water()
        if not is_treated:
            self.clock.start(kind, f"stage {stage}", k)
        yield
        self.clock.stop()
        if kind == "backward":
            self._shared.set_aside(stage, k)
        self._sample()

    def _sample(self) -> None:
        report, meter = self.report, self.meter
        kept = [param.grad for param in self.model.parameters() if param.grad is not None]
        gradients = meter.bytes_of(grad.untyped_storage()._cdata for grad in (*kept, *self._shared.kept()))
        inputs = sum(each.input_bytes() for each in self.stages)
        messages = meter.bytes_of(key for each in self.stages for key in each.message_keys())
        held = meter.current_bytes - gradients - messages + inputs
        report.held_bytes = max(report.held_bytes, held)
        report.peak_bytes = max(report.peak_bytes, meter.take_high_water() - gradients - messages + inputs)
        report.message_bytes = max(report.message_bytes, messages)
        report.trace.sample("device", {"activations": held, "gradients": gradients, "other": messages})


class _Stage(PipelineStage):
    """A stage of torch's pipeline whose module runs a part of the model's own forward; it counts messages."""

    def __init__(self, pipeline: Pipeline, index: int) -> None:
        self._pipeline = pipeline
        cut = pipeline.cut
        self._forms = cut.received(index)
        names = cut.parameters_of(index)
        own = [param for name, param in pipeline.model.named_parameters() if name in names]
        is_last = index == cut.stages - 1
        loss = [torch.zeros((), requires_grad=True)]
        sent = loss if is_last else [form.empty() for form in cut.received(index + 1)]
        # The first stage receives nothing; torch wants to see some argument.
        inputs = tuple(form.empty() for form in self._forms) if index else (torch.zeros(()),)
        super().__init__(
            _StageModule(self.run_module, own),
            index,
            cut.stages,
            torch.device("cpu"),
            input_args=inputs,
            output_args=tuple(sent),
        )
        self._executions: dict[int, Any] = {}
        self._k = -1
        self.in_flight: set[int] = set()
        self._messages: list[tuple[int, weakref.ref[torch.UntypedStorage], int]] = []
        self._input_bytes = sum(tensor.nbytes for tensor in inputs) if index else 0

    def input_bytes(self) -> int:
        """Return the bytes of received tensors that micro-batches between forward and backward read."""
        kept = [k for k in self.in_flight if self._executions.get(k) is None]  # others have copies
        return len(kept) * self._input_bytes

    def buffer_bytes(self) -> int:
        """Return the bytes of torch's receive buffers."""
        infos = [each for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()) for each in infos]
        return sum(info.buffer.nbytes for info in infos if not info.is_root_arg and info.buffer is not None)

    def run_module(self, received: Sequence[Tensor], k: int) -> Any:
        """Run the forward of the stage on one micro-batch."""
        self._executions[k], sent = self._pipeline.run_forward(
            self.stage_index, k, received if self.stage_index else []
        )
        return sent[0] if self.is_last else sent

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        self.in_flight.add(fwd_chunk_id)
        is_treated = self._pipeline._operations_of(self.stage_index, fwd_chunk_id) is not None
        with self._pipeline.measured("forward", self.stage_index, fwd_chunk_id, is_treated):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._k = bwd_chunk_id
        is_treated = self._executions.get(bwd_chunk_id) is not None
        with self._pipeline.measured("backward", self.stage_index, bwd_chunk_id, is_treated):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            gradients = self.bwd_cache[bwd_chunk_id]
            if self.stage_index:
                laid_out = [g if g is None else laid_out_as(f, g) for f, g in zip(self._forms, gradients, strict=True)]
                self.bwd_cache[bwd_chunk_id] = tuple(laid_out)
            else:
                self.bwd_cache[bwd_chunk_id] = (None,) * len(gradients)
            if full_backward:
                self._executions.pop(bwd_chunk_id)
                self.in_flight.discard(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._k = bwd_chunk_id
        with self._pipeline.measured("backward", self.stage_index, bwd_chunk_id, False):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self._executions.pop(bwd_chunk_id)
            self.in_flight.discard(bwd_chunk_id)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        execution = self._executions[self._k]
        if execution is None:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        return tuple(execution.backward(bwd_kwargs["output_grads"] or ())), None

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(fwd_chunk_id, _in_memory_order(super().get_fwd_send_ops(fwd_chunk_id)))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(bwd_chunk_id, _in_memory_order(super().get_bwd_send_ops(bwd_chunk_id)))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _in_memory_order(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _in_memory_order(super().get_bwd_recv_ops(bwd_chunk_id))

    def _counted(self, k: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        self._pipeline.report.sent_bytes += sum(op.tensor.nbytes for op in ops)
        storages = [op.tensor.untyped_storage() for op in ops]
        self._messages += [(k, weakref.ref(storage), storage._cdata) for storage in storages]
        return ops

    def message_keys(self) -> list[int]:
        """Return the storages of messages that only torch's runtime still keeps."""
        state = torch.get_rng_state().nbytes
        alive = [(each, storage) for each in self._messages if (storage := each[1]()) is not None]
        self._messages = [each for each, _ in alive]
        return [key for (k, _, key), storage in alive if k not in self.in_flight or storage.nbytes() == state]


class _StageModule(nn.Module):
    """The module that torch's stage calls; it registers the parameters of the stage."""

    def __init__(self, run: Callable[..., Any], own: list[nn.Parameter]) -> None:
        super().__init__()
        self._run, self.own = run, nn.ParameterList(own)

    def forward(self, *received: Tensor, k: Tensor) -> Any:
        return self._run(received, int(k))


def _in_memory_order(ops: list[dist.P2POp]) -> list[dist.P2POp]:
    """Turn each message into a contiguous view, since gloo moves no others; both sides have the same strides."""
    for op in ops:
        if not op.tensor.is_contiguous():
            strides = op.tensor.stride()
            op.tensor = op.tensor.detach().permute(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
    return ops


def _refuse_split_backward(plan: PipelinePlan, schedule: str | None, treatments: Sequence[Any]) -> None:
    splits = any(action.kind == "I" for actions in plan.ranks for action in actions)
    recomputes = any(action.kind == "R" for actions in plan.ranks for action in actions)
    if splits and (recomputes or any(each is not None for each in treatments)):
        raise ValueError(
            f"{plan.name} runs backward in two parts, and a stage that recomputes or offloads runs it at once: give no "
            "treatments, or choose one_forward_one_backward or interleaved"
        )
    if recomputes and schedule is not None:
        raise ValueError(
            f"{plan.name} recomputes, and schedule={schedule!r} of torch does not: leave schedule out, or choose a plan without R"
        )
