"""Execute a plan for one micro-batch: first runs, runs again, backward, and what waits on the host.

Every run of a layer has gradients on, also where its graph is dropped at once: under `no_grad` PyTorch may take other
kernels. A run again replays the stage's tape and calls its layer, under the random state and from the buffers that the
first run found. Gradients pass from cut to cut through sinks, so autograd adds them in the order of plain training.

It is long because first runs, runs again and backward share what is held between two operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from l2l_core._torch import DisableTorchDispatch, pytree
from l2l_core.model import RandomState, snapshot_attributes
from l2l_core.step.graph import BoundaryGradient, detach_to, run_backward
from l2l_core.strategies.allocation_meter import AllocationMeter
from l2l_core.strategies.frame_lifetimes import ForwardPosition, FrameRecorder, FrameReport, find_earlier, storage_key
from l2l_core.strategies.plan import COMPUTE_KINDS, FALL, FCK, OFF, OFFX, PRE, PREX, B, Operation
from l2l_core.strategies.stage_structure import StageStructure
from l2l_core.strategies.staged_forward import StagedForward, StageTape, Tensor
from l2l_core.strategies.storage_offload import StorageOffloader
from l2l_core.strategies.tape import TapeReplay, return_unchanged

OnOutputs = Callable[[int, dict[int, Tensor], bool], None]  # stage, the cut behind it, whether it ran again
BeginEvent = Callable[
    [str, str, int], Callable[[], None]
]  # begins an event of a kind, layer and visit; the result ends it
_OFFLOAD_OF = {PRE: OFF, PREX: OFFX}


@dataclass(eq=False)
class StageRecord:
    """What backward through one stage reads.

    Attributes:
        entries: the tensors of older stages as this one has read them, each with where its gradient gathers.
        outs: what it has made for later stages.
        saved: storages that autograd has saved.
    """

    inputs: dict[int, tuple[Tensor, BoundaryGradient]]
    outputs: dict[int, Tensor]
    saved: dict[int, None]


class ExecutedOperation(NamedTuple):
    """One executed operation, in bytes counted by the meter."""

    operation: Operation
    peak_bytes: int  # most bytes during it
    bytes_after: int
    host_bytes: int  # bytes on the host after it
    seconds: float
    record_bytes: int = 0  # of B: bytes of the record that are in no tensor at a cut
    pending_gradient_bytes: int = 0  # of B: bytes of gradients that wait at the cut
    frame_report: FrameReport | None = None  # of a first run, if it is measured


class PlanExecution(StagedForward):
    """One micro-batch under one plan.

    Invariant: between operations it holds the cut, what the plan keeps, and gradients that wait at the next cut.

    Args:
        structure: learned from a micro-batch of this form.
        meter, moves: count and move bytes.
        timed: tells the trace of compute.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[nn.Module, str],
        task: Callable[[], Tensor],
        structure: StageStructure,
        meter: AllocationMeter,
        offloader: StorageOffloader,
        begin_event: BeginEvent,
        k: int = 0,
    ) -> None:
        super().__init__(model, layers, task)
        self.structure, self.meter, self.offloader, self.k = structure, meter, offloader, k
        self.log: list[ExecutedOperation] = []
        self.loss = torch.zeros(())
        self.layer_forwards = 0
        self.on_outputs: OnOutputs | None = None
        self.backward_count = 0  # how many backwards have begun
        self.records_frames = False
        self.on_done: Callable[[ExecutedOperation], None] = lambda done: None
        self._begin_event = begin_event
        self._boundary: dict[int, Tensor] = {}
        self._inputs: dict[int, tuple[Tensor, BoundaryGradient]] = {}
        self._outputs: dict[int, Tensor] = {}
        self._records: dict[int, StageRecord] = {}
        self._kept_inputs: dict[int, dict[int, Tensor]] = {}
        self._next_input: tuple[int, dict[int, Tensor]] | None = None  # the input that a run again has just made
        self._pending_gradients: dict[int, Tensor] = {}  # gradients
        self._keeps_record = False

    def run(self, operations: Sequence[Operation]) -> None:
        """Execute a checked plan.

        Raises:
            RuntimeError: the model takes another way than the one that was learned.
        """
        with self.patch_layers():
            for operation in operations:
                self._execute(operation)
        assert not (self._records or self._kept_inputs), f"left: {list(self._records)}, {list(self._kept_inputs)}"

    def constant_bytes(self) -> dict[int, int]:
        """Return the bytes of what is read across cuts without a gradient, by the stage that made it."""
        made: dict[int, set[int]] = {}
        seen: set[int] = set()
        for number, tensor in self.constants.items():
            if self.made_in[number] >= 0 and storage_key(tensor) not in seen:
                made.setdefault(self.made_in[number], set()).add(storage_key(tensor))
                seen.add(storage_key(tensor))
        return {stage: self.meter.bytes_of(keys) for stage, keys in made.items()}

    def _report_frames(self, recorder: FrameRecorder) -> FrameReport:
        """Find what shell code made that only the model's own frames hold."""
        held = [*self._boundary.values(), *self.constants.values()]
        held += [
            t for r in self._records.values() for t in (*r.outputs.values(), *(leaf for leaf, _ in r.inputs.values()))
        ]
        held += [t for tensors in self._kept_inputs.values() for t in tensors.values()]
        keys = {storage_key(tensor) for tensor in held}.union(*(record.saved for record in self._records.values()))
        found: dict[int, int] = {}
        late = set()
        for key, (storage, stage) in find_earlier(self.numbers, self.made_in, self.structure).items():
            if key in keys:
                continue
            if storage == -1:
                found[stage] = found.get(stage, 0) + self.meter.bytes_of([key])
            else:
                late.add(storage)
        return FrameReport(found, frozenset(late), recorder.peak_by_position, recorder.releases)

    def _position(self) -> ForwardPosition:
        return ForwardPosition(len(self.stages), len(self.signature))

    def _execute(self, operation: Operation) -> None:
        kind, i = operation
        self.meter.take_high_water()
        began_s, record, is_first = time.perf_counter(), 0, len(self.stages) < self.structure.stages
        layer = self.structure.names[i]
        if kind in COMPUTE_KINDS:
            for out in (OFF, OFFX):
                self.offloader.wait((out, i))
            visit = i if is_first else 2 * self.structure.stages - 1 - i
            stop = self._begin_event("backward" if kind == B else "forward", layer, visit)
            if kind == B:
                record = self._backward(i)
            elif is_first:
                if self.records_frames:
                    self.meter.recorder = FrameRecorder(
                        find_earlier(self.numbers, self.made_in, self.structure), self._position
                    )
                self._run_first(kind, i)
            else:
                self._rerun(kind, i)
            stop()
            self.offloader.finish_sends()
        elif kind in _OFFLOAD_OF:
            self.offloader.fetch((_OFFLOAD_OF[kind], i), layer, self.k)
        else:
            self.offloader.send((kind, i), self._storages_to_offload(kind, i), layer, self.k)
        seconds, waiting = (
            time.perf_counter() - began_s,
            self.meter.bytes_of(map(storage_key, self._pending_gradients.values())),
        )
        seen, self.meter.recorder = self.meter.recorder, None
        frames = self._report_frames(seen) if seen else None
        high, now = self.meter.take_high_water(), self.meter.current_bytes
        done = ExecutedOperation(operation, high, now, self.offloader.host_bytes, seconds, record, waiting, frames)
        self.log.append(done)
        self.on_done(done)

    # -- first runs ----------------------------------------------------------------------------------------------------

    def _run_first(self, kind: str, i: int) -> None:
        self._keeps_record = kind == FALL
        if kind == FCK:
            self._kept_inputs[i] = {number: tensor.detach() for number, tensor in self._boundary.items()}
        buffers = {} if self._keeps_record else self._copy_buffers(i)
        with torch.set_grad_enabled(self._keeps_record), _record_saved() as saved:
            loss = self.run_stage()
        self.stages[-1].buffers = buffers
        self._check_order(is_over=loss is not None)
        if loss is not None:
            self._outputs[self.structure.loss] = loss
            with DisableTorchDispatch():  # the result is the caller's
                self.loss = loss.detach().clone()
            self._boundary.clear()
        wanted = self.structure.live[i + 1] if loss is None else (self.structure.loss,)
        cut = {
            number: self._outputs[number] if number in self._outputs else self._boundary[number] for number in wanted
        }
        if self.on_outputs is not None:
            self.on_outputs(i, cut, False)
        if self._keeps_record:
            self._records[i] = StageRecord(self._inputs, self._outputs, saved)
        self._inputs, self._outputs = {}, {}
        self._boundary = cut if loss is None else {}

    def _copy_buffers(self, i: int) -> dict[str, Tensor]:
        names = self.structure.buffers[i]
        buffers = dict(self.model.named_buffers(remove_duplicate=False)) if names else {}
        return {name: buffers[name].clone() for name in names}

    def _check_order(self, is_over: bool) -> None:
        known = self.structure.signature
        done = self.signature
        at = self.stage_index
        layer = "loss" if self.stages[-1].layer_entry is None else self.layer_name
        same = known[: len(done)] == tuple(done) and self.structure.names[at] == layer
        if not same or is_over != (at == self.structure.stages - 1) or (is_over and len(done) != len(known)):
            raise RuntimeError(
                f"the model takes another way than when it was learned, in stage {at} (up to {layer}): a plan holds for one way. "
                "Layers that are skipped at random, or chosen by values, relay (Relay(model)), but follow no plan"
            )

    def substitute(self, tensor: Tensor, number: int) -> Tensor:
        if number not in self.structure.differentiable:
            self.constants[number] = tensor
            return tensor
        if number not in self._inputs:
            self._inputs[number] = self._detach_input(tensor, number, self._keeps_record)
        return self._inputs[number][0]

    def on_output(self, tensor: Tensor, number: int) -> None:
        if number in self.structure.constants:
            self.constants[number] = tensor
        following = self.structure.live[self.stage_index + 1] if self.stage_index + 1 < self.structure.stages else ()
        if number in following:
            self._outputs[number] = tensor

    def _detach_input(self, tensor: Tensor, number: int, keeps_record: bool) -> tuple[Tensor, BoundaryGradient]:
        sink = BoundaryGradient()
        if keeps_record:
            with torch.enable_grad():
                leaf = detach_to(tensor, sink)
        else:
            leaf = tensor.detach()
        self.numbers[leaf] = number  # a layer may hand it on
        return leaf, sink

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
        return value if number not in self.structure.differentiable else self._detach_input(value, number, True)[0]

    def _without_graph(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad or self.is_static(value):
            return value
        plain, number = value.detach(), self.numbers.get(value)
        if number is not None:
            self.numbers[plain] = number
        return plain

    # -- again ---------------------------------------------------------------------------------------------------------

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
        self._inputs = entries = {}
        shell_in = partial(self._read_in_rerun, stage=i) if self._keeps_record else return_unchanged
        layer_in, layer_out = (
            (shell_in, return_unchanged) if self._keeps_record else (self._read_detached, self._without_graph)
        )
        with self._restore_first_run(stage) as lent, _record_saved() as saved:
            replay = TapeReplay(given, self.constants, lent)
            for call, on in zip(stage.shell_entries, self.structure.grad_enabled[i], strict=True):
                with torch.set_grad_enabled(self._keeps_record and on):
                    replay.run(call, shell_in)
            if stage.layer_entry is not None:
                replay.keep_only(wanted, stage.layer_entry)
                with torch.enable_grad():
                    replay.run(stage.layer_entry, layer_in, layer_out)
                self.layer_forwards += 1
        self._inputs = {}
        made = {number: replay.values[number] for number in wanted}
        del replay
        if self._keeps_record:
            self._records[i] = StageRecord(entries, {t: made[t] for t in wanted if t not in given}, saved)
            made = {number: tensor.detach() for number, tensor in made.items()}
        if self.on_outputs is not None:
            self.on_outputs(i, made, True)
        self._next_input = None if is_last else (i + 1, made)

    def _read_in_rerun(self, tensor: Tensor, number: int, stage: int) -> Tensor:
        # At its first reading, as in the first run: the order in which nodes are made is the one in which autograd runs them.
        if number not in self.structure.reads[stage]:
            return tensor
        if number not in self._inputs:
            self._inputs[number] = self._detach_input(tensor, number, True)
        return self._inputs[number][0]

    def _read_detached(self, tensor: Tensor, number: int) -> Tensor:
        return self._detach_input(tensor, number, True)[0] if number in self.structure.differentiable else tensor

    @contextmanager
    def _restore_first_run(self, stage: StageTape) -> Iterator[dict[int, Tensor]]:
        """Let a stage find random state and buffers as in its first run, and leave no effect but tensors.

        Buffers are lent as copies: to put values back would break autograd's check of what the run has saved.
        """
        outside, lent = RandomState.capture(), {}
        places = [(self.model.get_submodule(path.rpartition(".")[0]), path) for path in stage.buffers]
        own = [(module, path.rpartition(".")[2], module._buffers[path.rpartition(".")[2]]) for module, path in places]
        for (module, path), (_, name, buffer) in zip(places, own, strict=True):
            lent.setdefault(id(buffer), stage.buffers[path].clone())
            module._buffers[name] = lent[id(buffer)]
        modules = [m for m, name in self.layers.items() if name == self.structure.names[stage.index]]
        put_back = snapshot_attributes(part for module in modules for part in module.modules())
        stage.random_state.restore()
        try:
            yield lent
        finally:
            outside.restore()
            put_back()
            for module, name, buffer in own:
                module._buffers[name] = buffer

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward(self, i: int) -> int:
        """Back-propagate through stage i; returns the bytes of its record that lie in no tensor at a cut."""
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
        entries = record.inputs  # they stay until the end, whoever else has them: so the bytes depend on nobody else
        del record
        run_backward(roots)
        del roots
        for number, (_, sink) in entries.items():
            if (grad := sink.take()) is not None:
                self._pending_gradients[number] = grad
        return own_bytes

    # -- what goes to the host -----------------------------------------------------------------------------------------

    def _storages_to_offload(self, kind: str, i: int) -> list[int]:
        """List the storages that go out: what stage i is the last to read, and what autograd has saved for it alone."""
        if kind == OFFX:
            tensors, saved = self._kept_inputs[i], set()
        else:
            record = self._records[i]
            tensors = {number: leaf for number, (leaf, _) in record.inputs.items()}
            saved = record.saved.keys() - self._boundary_storages(record)
        movable = self.structure.movable_storages(i)
        mine = {storage_key(t) for number, t in tensors.items() if self.structure.storage[number] in movable}
        return sorted(saved | mine - {storage_key(t) for t in self.constants.values()})

    def _boundary_storages(self, record: StageRecord) -> set[int]:
        tensors = [leaf for leaf, _ in record.inputs.values()]
        return {
            storage_key(t)
            for t in (*tensors, *record.outputs.values(), *self.constants.values(), *self._boundary.values())
        }


@contextmanager
def _record_saved() -> Iterator[dict[int, None]]:
    """Note the storages that autograd saves in the block."""
    keys: dict[int, None] = {}

    def pack(tensor: Tensor) -> Tensor:
        keys[storage_key(tensor)] = None
        return tensor.detach()  # itself would be a cycle: node, saved output, node

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield keys
