"""Execution of a plan for one micro-batch: first runs, reruns, backward, and copies to and from the host.

Every run of a layer has gradients on, even if its graph is dropped at once: under `no_grad` PyTorch may choose other
kernels. A rerun replays the stage's tape and calls its layer, with the random state and the buffers of the first run.
Gradients pass from boundary to boundary through `BoundaryGradient`, so autograd adds them in the order of plain training.

The file is long because first runs, reruns and backward share the tensors that are held between two operations.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from l2l_core._torch import DisableTorchDispatch, pytree
from l2l_core.model import RandomState, snapshot_attributes, storage_key
from l2l_core.step.graph import BoundaryGradient, Root, detach_to, run_backward, walk_graph
from l2l_core.step.traffic import ComputeClock
from l2l_core.strategies.allocation_meter import AllocationMeter
from l2l_core.strategies.frame_lifetimes import FrameRecorder, FrameReport, find_earlier
from l2l_core.strategies.plan import COMPUTE_KINDS, FALL, FCK, OFF, OFFLOAD_OF, OFFX, B, Operation
from l2l_core.strategies.stage_structure import StageStructure
from l2l_core.strategies.staged_forward import StagedForward, TapeReplay, Tensor, return_unchanged
from l2l_core.strategies.storage_offload import StorageOffloader

OnOutputs = Callable[[int, dict[int, Tensor], bool], None]  # stage, tensors at the boundary after it, True for a rerun
_Input = tuple[Tensor, BoundaryGradient]  # a leaf that stands for an older tensor, and the gradient that arrives there


@dataclass(eq=False)
class StageRecord:
    """All that backward through one stage reads."""

    inputs: dict[int, _Input]  # tensors of older stages
    outputs: dict[int, Tensor]  # tensors for later stages
    saved: dict[int, None]  # keys of the storages that autograd has saved


class ExecutedOperation(NamedTuple):
    """One executed operation, with bytes as the meter counts them."""

    operation: Operation
    peak_bytes: int
    bytes_after: int
    host_bytes: int  # on the host, after it
    seconds: float
    record_bytes: int = 0  # of B: bytes of the record outside of the boundaries
    pending_gradient_bytes: int = 0  # of B: bytes of gradients at the boundary
    frame_report: FrameReport | None = None  # of a first run whose frames are recorded


class PlanExecution(StagedForward):
    """Execution of one micro-batch by one plan.

    Invariant: between operations it holds the boundary, the kept tensors of the plan, and gradients at the next boundary.

    Args:
        structure: structure of the stages, traced from a micro-batch of this form.
        meter, offloader: count and copy bytes.
        clock: adds compute to the trace.
        k: number of the micro-batch.
        on_outputs: called with the outputs of every run, if given.
        on_done: called after every operation.
        records_frames: True to record in first runs the tensors that the model's frames hold.
        shared: parameters that several stages read; before the micro-batch they have no gradient.

    Example:
        See `Lab`, whose steps are made by it.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[nn.Module, str],
        task: Callable[[], Tensor],
        structure: StageStructure,
        meter: AllocationMeter,
        offloader: StorageOffloader,
        clock: ComputeClock,
        k: int,
        on_outputs: OnOutputs | None,
        on_done: Callable[[ExecutedOperation], None],
        records_frames: bool,
        shared: Collection[Tensor] = (),
    ) -> None:
        super().__init__(model, layers, task)
        self.structure, self.meter, self.offloader, self.k = structure, meter, offloader, k
        self.log: list[ExecutedOperation] = []
        self.loss = torch.zeros(())
        self.layer_forwards = 0
        self.backward_count = 0  # number of backwards that have begun
        self._clock, self._on_done, self._records_frames, self._shared = clock, on_done, records_frames, shared
        self._on_outputs: OnOutputs = on_outputs or (lambda i, outputs, is_rerun: None)
        self._boundary: dict[int, Tensor] = {}
        self._inputs: dict[int, _Input] = {}
        self._outputs: dict[int, Tensor] = {}
        self._records: dict[int, StageRecord] = {}
        self._kept_inputs: dict[int, dict[int, Tensor]] = {}
        self._next_input: tuple[int, dict[int, Tensor]] | None = (
            None  # stage and input that the previous rerun has made
        )
        self._pending_gradients: dict[int, Tensor] = {}
        self._keeps_record = False

    def run(self, operations: Sequence[Operation]) -> None:
        """Execute a checked plan.

        Raises:
            RuntimeError: the model takes another path than the traced one.
        """
        with self.patch_layers():
            for operation in operations:
                self._execute(operation)
        assert not (self._records or self._kept_inputs), f"left: {list(self._records)}, {list(self._kept_inputs)}"

    def constant_bytes(self) -> dict[int, int]:
        """Return the bytes of tensors without a gradient that are read after a boundary, by the stage that made them."""
        stages: dict[int, int] = {}  # by storage
        for number, tensor in self.constants.items():
            if self.made_in[number] >= 0:
                stages.setdefault(storage_key(tensor), self.made_in[number])
        return {i: self.meter.bytes_of(key for key, j in stages.items() if j == i) for i in set(stages.values())}

    def _execute(self, operation: Operation) -> None:
        kind, i = operation
        layer, record_bytes, began_s = self.structure.names[i], 0, time.perf_counter()
        self.meter.take_high_water()
        if kind in COMPUTE_KINDS:
            record_bytes = self._compute(kind, i)
        elif kind in OFFLOAD_OF:
            self.offloader.fetch((OFFLOAD_OF[kind], i), layer, self.k)
        else:
            self.offloader.send((kind, i), self._storages_to_offload(kind, i), layer, self.k)
        seconds = time.perf_counter() - began_s
        pending = self.meter.bytes_of(map(storage_key, self._pending_gradients.values()))
        recorder, self.meter.recorder = self.meter.recorder, None
        frames = self._report_frames(recorder) if recorder else None
        peak, after = self.meter.take_high_water(), self.meter.current_bytes
        host = self.offloader.host.total
        done = ExecutedOperation(operation, peak, after, host, seconds, record_bytes, pending, frames)
        self.log.append(done)
        self._on_done(done)

    def _compute(self, kind: str, i: int) -> int:
        """Run an operation that computes; return the bytes of the record that backward has read."""
        record_bytes, is_first = 0, i == len(self.stages)
        for out in (OFF, OFFX):
            self.offloader.wait((out, i))
        visit = i if is_first else 2 * self.structure.stages - 1 - i
        self._clock.stay += 1  # every operation is one stay, because a stage may run several times
        self._clock.start("backward" if kind == B else "forward", self.structure.names[i], self.k, visit)
        if kind == B:
            record_bytes = self._backward(i)
        elif is_first:
            if self._records_frames:
                earlier = find_earlier(self.numbers, self.made_in, self.structure)
                self.meter.recorder = FrameRecorder(earlier, lambda: (len(self.stages), len(self.signature)))
            self._run_first(kind, i)
        else:
            self._rerun(kind, i)
        self._clock.stop()
        self.offloader.finish_sends()
        return record_bytes

    def _report_frames(self, recorder: FrameRecorder) -> FrameReport:
        """Find the tensors of shell code that only the model's own frames hold."""
        held = [*self._boundary.values(), *self.constants.values()]
        for record in self._records.values():
            held += [*record.outputs.values(), *(leaf for leaf, _ in record.inputs.values())]
        for tensors in self._kept_inputs.values():
            held += tensors.values()
        keys = set(map(storage_key, held)).union(*(record.saved for record in self._records.values()))
        nbytes: dict[int, int] = {}
        late = set()
        for key, (storage, stage) in find_earlier(self.numbers, self.made_in, self.structure).items():
            if key in keys:
                continue
            if storage == -1:
                nbytes[stage] = nbytes.get(stage, 0) + self.meter.bytes_of([key])
            else:
                late.add(storage)
        return FrameReport(nbytes, frozenset(late), recorder.peak_by_position, recorder.releases)

    # -- first runs ----------------------------------------------------------------------------------------------------

    def _run_first(self, kind: str, i: int) -> None:
        self._keeps_record = kind == FALL
        if kind == FCK:
            self._kept_inputs[i] = {number: tensor.detach() for number, tensor in self._boundary.items()}
        changing = () if self._keeps_record else self.structure.buffers[i]
        buffers = {name: self.model.get_buffer(name).clone() for name in changing}
        with torch.set_grad_enabled(self._keeps_record), _record_saved() as saved:
            loss = self.run_stage()
        self.stages[-1].buffers = buffers
        self._check_path(is_over=loss is not None)
        if loss is not None:
            self._outputs[self.structure.loss] = loss
            with DisableTorchDispatch():  # the result belongs to the caller
                self.loss = loss.detach().clone()
            self._boundary.clear()
        wanted = self.structure.live[i + 1] if loss is None else (self.structure.loss,)
        boundary = {n: self._outputs[n] if n in self._outputs else self._boundary[n] for n in wanted}
        self._on_outputs(i, boundary, False)
        if self._keeps_record:
            self._records[i] = StageRecord(self._inputs, self._outputs, saved)
        self._inputs, self._outputs = {}, {}
        self._boundary = boundary if loss is None else {}

    def _check_path(self, is_over: bool) -> None:
        traced, taken, i = self.structure.signature, tuple(self.signature), self.stage_index
        layer = "loss" if self.stages[-1].layer_entry is None else self.layer_name
        same = traced[: len(taken)] == taken and self.structure.names[i] == layer
        if not same or is_over != (i == self.structure.stages - 1) or (is_over and len(taken) != len(traced)):
            raise RuntimeError(
                f"the model takes another path than in the traced forward, in stage {i} (up to {layer}), and a plan holds for "
                "one path. Train models that skip layers at random, or choose layers by values, with a relay: Relay(model)"
            )

    def substitute(self, tensor: Tensor, number: int) -> Tensor:
        if number not in self.structure.differentiable:
            self.constants[number] = tensor
            return tensor
        return self._read_input(tensor, number)

    def on_output(self, tensor: Tensor, number: int) -> None:
        if number in self.structure.constants:
            self.constants[number] = tensor
        if self.stage_index + 1 < self.structure.stages and number in self.structure.live[self.stage_index + 1]:
            self._outputs[number] = tensor

    def _read_input(self, tensor: Tensor, number: int) -> Tensor:
        # Cut at the first read, in reruns too: autograd runs nodes in an order that depends on their creation.
        if number not in self._inputs:
            self._inputs[number] = self._detach_input(tensor, number, self._keeps_record)
        return self._inputs[number][0]

    def _detach_input(self, tensor: Tensor, number: int, keeps_record: bool = True) -> _Input:
        gradient = BoundaryGradient()
        if keeps_record:
            with torch.enable_grad():
                leaf = detach_to(tensor, gradient)
        else:
            leaf = tensor.detach()
        self.numbers[leaf] = number  # a layer may return it
        return leaf, gradient

    def run_layer(self, layer_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.layer_forwards += 1
        if self._keeps_record:
            return layer_forward(*args, **kwargs)
        args, kwargs = pytree.tree_map(self._with_graph, (args, kwargs))
        with torch.enable_grad():
            out = layer_forward(*args, **kwargs)
        del args, kwargs
        return pytree.tree_map(self._without_graph, out)

    def _with_graph(self, value: Any) -> Any:
        number = None if self.is_static(value) else self.numbers.get(value)
        return value if number not in self.structure.differentiable else self._detach_input(value, number)[0]

    def _without_graph(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad or self.is_static(value):
            return value
        plain, number = value.detach(), self.numbers.get(value)
        if number is not None:
            self.numbers[plain] = number
        return plain

    # -- reruns --------------------------------------------------------------------------------------------------------

    def _rerun(self, kind: str, i: int) -> None:
        given = self._next_input[1] if self._next_input and self._next_input[0] == i else self._kept_inputs[i]
        self._next_input = None
        if kind == FCK:
            self._kept_inputs[i] = given
        elif kind == FALL:
            self._kept_inputs.pop(i, None)
        self._keeps_record = kind == FALL
        stage, is_last = self.stages[i], i == self.structure.stages - 1
        wanted = frozenset((self.structure.loss,)) if is_last else self.structure.live[i + 1]
        self._inputs = inputs = {}
        if self._keeps_record:
            shell_in = layer_in = partial(self._read_in_rerun, stage=i)
            layer_out = return_unchanged
        else:
            shell_in, layer_in, layer_out = return_unchanged, self._read_detached, self._without_graph
        with self._restore_first_run(i) as buffers, _record_saved() as saved:
            replay = TapeReplay(given, self.constants, buffers)
            for entry, grad_enabled in zip(stage.shell_entries, self.structure.grad_enabled[i], strict=True):
                with torch.set_grad_enabled(self._keeps_record and grad_enabled):
                    replay.run(entry, shell_in)
            if stage.layer_entry is not None:
                replay.keep_only(wanted, stage.layer_entry)
                with torch.enable_grad():
                    replay.run(stage.layer_entry, layer_in, layer_out)
                self.layer_forwards += 1
        self._inputs = {}
        made = {number: replay.values[number] for number in wanted}
        del replay
        if self._keeps_record:
            self._records[i] = StageRecord(inputs, {n: tensor for n, tensor in made.items() if n not in given}, saved)
            made = {number: tensor.detach() for number, tensor in made.items()}
        self._on_outputs(i, made, True)
        self._next_input = None if is_last else (i + 1, made)

    def _read_in_rerun(self, tensor: Tensor, number: int, stage: int) -> Tensor:
        return self._read_input(tensor, number) if number in self.structure.reads[stage] else tensor

    def _read_detached(self, tensor: Tensor, number: int) -> Tensor:
        return self._detach_input(tensor, number)[0] if number in self.structure.differentiable else tensor

    @contextmanager
    def _restore_first_run(self, i: int) -> Iterator[dict[int, Tensor]]:
        """Restore the random state and the buffers of a stage's first run inside the block; undo side effects after it.

        Buffers are replaced by copies, because autograd would refuse saved tensors whose values were written back.
        """
        stage, random_state, copies = self.stages[i], RandomState.capture(), {}
        replaced = []
        for path, value in stage.buffers.items():
            parent, _, name = path.rpartition(".")
            module = self.model.get_submodule(parent)
            replaced.append((module, name, module._buffers[name], value))
        for module, name, buffer, value in replaced:
            module._buffers[name] = copies.setdefault(id(buffer), value.clone())
        layers = [layer for layer, name in self.layers.items() if name == self.structure.names[i]]
        restore_attributes = snapshot_attributes(part for layer in layers for part in layer.modules())
        stage.random_state.restore()
        try:
            yield copies
        finally:
            random_state.restore()
            restore_attributes()
            for module, name, buffer, _ in replaced:
                module._buffers[name] = buffer

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward(self, i: int) -> int:
        """Run backward of stage i; return the bytes of its record outside of the boundaries."""
        record = self._records.pop(i)
        self.backward_count += 1
        self._kept_inputs.pop(i, None)
        self.stages[i].buffers.clear()
        if self._next_input and self._next_input[0] == i + 1:
            self._next_input = None
        own_bytes = self.meter.bytes_of(record.saved.keys() - self._boundary_storages(record))
        record.saved.clear()
        if i == self.structure.stages - 1:
            self._pending_gradients = {self.structure.loss: torch.ones_like(record.outputs[self.structure.loss])}
        roots = [
            (get_gradient_edge(root), self._pending_gradients.pop(number))
            for number in list(self._pending_gradients)
            if (root := record.outputs.get(number, record.inputs.get(number, (None,))[0])) is not None
        ]
        inputs = record.inputs  # held until the end, so that the bytes do not depend on other holders
        del record
        roots += self._take_sums(roots)
        run_backward(roots)
        del roots
        for number, (_, gradient) in inputs.items():
            if (grad := gradient.take()) is not None:
                self._pending_gradients[number] = grad
        return own_bytes

    def _take_sums(self, roots: Sequence[Root]) -> list[Root]:
        """Take the gradients so far of shared parameters that this stage reads several times, as roots of its backward.

        Autograd adds to them one contribution after another, as in plain training: (a + b) + c, not a + (b + c).
        """
        if not self._shared:
            return []
        uses = Counter(walk_graph(edge for edge, _ in roots).leaves)
        sums = [(param, param.grad) for param in self._shared if uses[param] > 1 and param.grad is not None]
        for param, _ in sums:
            param.grad = None
        return [(get_gradient_edge(param), grad) for param, grad in sums]

    # -- offload -------------------------------------------------------------------------------------------------------

    def _storages_to_offload(self, kind: str, i: int) -> list[int]:
        """List the storages that stage i is the last to read, and those that autograd has saved for it alone."""
        if kind == OFFX:
            tensors, saved = self._kept_inputs[i], set()
        else:
            record = self._records[i]
            tensors = {number: leaf for number, (leaf, _) in record.inputs.items()}
            saved = record.saved.keys() - self._boundary_storages(record)
        movable = self.structure.movable_storages(i)
        own = {storage_key(t) for number, t in tensors.items() if self.structure.storage[number] in movable}
        return sorted(saved | own.difference(map(storage_key, self.constants.values())))

    def _boundary_storages(self, record: StageRecord) -> set[int]:
        leaves = [leaf for leaf, _ in record.inputs.values()]
        others = (record.outputs.values(), self.constants.values(), self._boundary.values())
        return {storage_key(t) for tensors in (leaves, *others) for t in tensors}


@contextmanager
def _record_saved() -> Iterator[dict[int, None]]:
    """Record the keys of the storages that autograd saves inside the block."""
    keys: dict[int, None] = {}

    def pack(tensor: Tensor) -> Tensor:
        keys[storage_key(tensor)] = None
        return tensor.detach()  # the tensor itself would form a cycle: node, saved output, node

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield keys
