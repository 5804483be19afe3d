"""Set-up and tear-down that all passes over the model share.

Slots and shell on the device, the stash, the meter, random streams. An exception at any point leaves no booked byte and no
moved parameter behind. `breadth_first.py` adds suspended forwards, `depth_first.py` the schedule without them.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from l2l_core.batches import map_tensors
from l2l_core.devices import Copy, Device
from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Block, Unit
from l2l_core.model import RandomState, ThreadState, dense_parts, is_sparse
from l2l_core.schedule_rules import chunks_per_copy, gradient_slots, weight_slots
from l2l_core.step.failure import suggest_remedy
from l2l_core.step.guards import refuse_kept_weights
from l2l_core.step.pass_inputs import WEIGHT_DTYPES, PassSpec, RelayParts
from l2l_core.step.traffic import (
    NO_MICRO_BATCH,
    ComputeClock,
    CurrentTurn,
    Gradient,
    GradientHooks,
    GradientRoutes,
    GradientSlots,
    Lane,
    MemoryMeter,
    MeterRecord,
    Stash,
    StorageTracker,
    WeightSlots,
)
from l2l_core.trace import Trace


class PassRuntime(ABC):
    """Runtime of one pass, as far as all passes are alike. Use as a context manager.

    It replays the meter record of an earlier step, or is metered without one.
    """

    def __init__(self, parts: RelayParts, spec: PassSpec, trace: Trace, replay: MeterRecord | None) -> None:
        self.parts, self.spec, self.trace, self._replay = parts, spec, trace, replay
        self.config = config = spec.config
        turns = chunks_per_copy(config.micro_batches, config.ahead, config.stash)
        self.clock = ComputeClock(parts.device, trace)
        stalled = None if config.ahead else self.clock.stalled
        self.h2d, self.d2h = (Lane(parts.device, trace, name, turns, stalled) for name in ("h2d", "d2h"))
        self._dtype = WEIGHT_DTYPES[config.precision]  # of weights on the device
        self._checked_attributes = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            try:
                self._set_up()
            except torch.OutOfMemoryError as error:
                raise self.parts.device.ledger.allocator_error(error) from error
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        """Tear the pass down.

        Raises:
            DeviceOutOfMemory: in place of an error of the device's allocator, with the booked bytes.
        """
        ledger = self.parts.device.ledger
        if isinstance(error, Exception) and not isinstance(error, MemoryError) and (activity := ledger.activity()):
            note = f"The relay was at: {activity}."
            if note not in getattr(error, "__notes__", ()):  # the same error object may be raised twice
                error.add_note(note)
        refused = None
        if error is not None:
            self.clock.stop()  # so that the trace has the event that failed
            if isinstance(error, torch.OutOfMemoryError):
                refused = ledger.allocator_error(error)  # while everything is still booked
        completed = False
        try:
            self._stack.close()
            completed = error is None
        finally:
            if not completed:  # a second interrupt may have occurred while parameters were pointed to a slot, or back
                for unit in self.parts.units:
                    unit.set_data([home for block in unit.blocks for home in block.host_views])
        if refused is not None:
            raise refused from error

    def _set_up(self) -> None:
        parts, enter, later = self.parts, self._stack.enter_context, self._stack.callback
        ledger = parts.device.ledger
        slot_bytes = parts.slot_bytes(self._dtype)
        ledger.advise = partial(
            suggest_remedy, ledger, self.config, slot_bytes, slot_bytes + self._min_bytes_beside_slot()
        )
        self._collect_garbage = enter(_manual_gc())
        enter(parts.device.current())
        later(parts.device.synchronize)  # undone last: then all copies are done, and the trace has every event
        parts.weight_source.begin(parts.units, self._dtype, self.trace)
        later(parts.weight_source.end)
        later(RandomState.capture().restore)  # forwards draw from their own streams; the caller's is unchanged
        self.outer_state = ThreadState.capture()  # the thread's state outside of forwards
        enter(parts.shell.buffers.on_device(parts.device, "shell buffers"))
        # After the shell's buffers were loaded: modules hold the copies now.
        buffers, self._attributes = module_tensors(list(parts.model.modules()))
        exempt = [*buffers, *self._attributes, *(master for unit in parts.units for master in unit.masters)]
        turn = CurrentTurn()
        stash_store = parts.stash_store(self.config.stash)
        stash_store.begin(self.trace, self.clock.stalled)
        later(stash_store.clear)
        self._tracker = StorageTracker(parts.device, stash_store, turn, exempt)
        self.stash = Stash(
            parts.device,
            self._tracker,
            turn,
            stash_store=stash_store,
            offloads=self.config.stash != "device",
            overlap=self.config.ahead > 0,
            metering=self._replay is None,
            h2d=self.h2d,
            d2h=self.d2h,
            clock=self.clock,
        )
        self._set_up_guards()
        keeps_graphs = self.config.keep != 0
        self.meter = MemoryMeter(ledger, parts.host, self.trace, self._replay, keeps_graphs)
        later(self.meter.close)
        shell = self._load_shell()
        self.weight_slots = WeightSlots(
            parts.device,
            parts.layers,
            weight_slots(self.config.ahead, self.spec.plan.resident),
            partial(self.h2d.send_chunked, "load"),
            self.clock,
            shell,
            parts.weight_source,
            self._dtype,
            partial(_load_buffers, parts.device, self._tracker, self._collect_garbage),
        )
        later(self.weight_slots.close)
        self._tracker.exempt([slot.flat for slot in self.weight_slots.slots], weights=True)

    @abstractmethod
    def _set_up_guards(self) -> None:
        """Set up the modes and guards that check and fetch tensors."""

    def _min_bytes_beside_slot(self) -> int:
        """Return the device bytes of a pass besides a layer's weights, under any settings."""
        layers = [sum(block.trained.numel for block in unit.blocks) for unit in self.parts.layers]
        shell = sum(block.trained.numel for block in self.parts.shell.blocks)
        gradients = 4 * (shell + max(layers, default=0)) if torch.is_grad_enabled() else 0
        return self._dtype.itemsize * self.parts.shell.slot_numel(self._dtype) + gradients

    def _load_shell(self) -> Mapping[nn.Parameter, torch.Tensor]:
        """Load the shell for the length of the pass; return its parameters' tensors on the device."""
        shell, device = self.parts.shell, self.parts.device
        flat = device.empty(shell.slot_numel(self._dtype), self._dtype)
        self._stack.callback(device.recycle, flat)
        # Booking may raise: then the buffer is recycled, and nothing is released.
        device.ledger.book("weights", "shell", flat.nbytes)
        self._stack.callback(device.ledger.release, "weights", "shell", flat.nbytes)
        self._tracker.exempt([flat, *(master for unit in self.parts.units for master in unit.masters)], weights=True)
        self._shell_weights = flat
        pairs = zip(shell.ranges(flat), shell.blocks, strict=True)
        with self.clock.stalled():
            copies = [(part, self.parts.weight_source.acquire(block)) for part, block in pairs]
            load = self.h2d.send("load", shell.key, copies)
            load.wait()
        for block in shell.blocks:
            self.parts.weight_source.release(block, load)
        views = shell.views(flat)
        self._stack.callback(shell.set_data, [home for block in shell.blocks for home in block.host_views])
        shell.set_data(views)
        return dict(zip(shell.params, views, strict=True))

    def check_forward(self) -> None:
        """Refuse the step if a forward shows that it would differ from plain training; called after each forward."""
        self.spec.check()
        if self.meter.is_metering and not self._checked_attributes:
            self._checked_attributes = True
            buffers = [slot.flat for slot in self.weight_slots.slots]
            refuse_kept_weights(self.parts.model, self.parts.units, [*buffers, self._shell_weights])

    def make_gradients(
        self, store: LayerStore, is_per_micro_batch: Callable[[Block], bool]
    ) -> tuple[GradientSlots, Gradient]:
        """Make the gradient slots of layers, and the gradient of the shell."""
        parts, later = self.parts, self._stack.callback
        hooks = GradientHooks(parts.units)
        count = gradient_slots(self.config.ahead, self.config.schedule, len(parts.layers))
        later(hooks.close)
        routes = GradientRoutes(parts.device, self.clock, hooks, store, self.d2h, is_per_micro_batch)
        slots = GradientSlots(routes, parts.layers, count, "slots")
        later(slots.close)
        shell = GradientSlots(routes, [parts.shell], 1, "shell")
        later(shell.close)
        self._tracker.exempt([*slots.tensors, *shell.tensors])
        return slots, shell.acquire(parts.shell)

    def initial_states(self) -> list[ThreadState]:
        """Return the thread state in which each micro-batch's forward begins."""
        base = self.outer_state
        if self._dtype != torch.float32:  # operations cast activations to the weights' type, or compute in float32
            base = base._replace(autocast=tuple((True, self._dtype) for _ in base.autocast), autocast_cache=False)
        return [base._replace(random=RandomState.from_seed(seed)) for seed in self.spec.seeds]

    def load_batch(self) -> Any:
        """Copy the batch of a loss over all micro-batches to the device."""
        assert self.spec.batch_loss is not None
        return self.load_micro_batch(len(self.spec.micro_batches), self.spec.batch_loss.batch, label=NO_MICRO_BATCH)

    def load_micro_batch(self, k: int, micro_batch: Any, label: int | None = None) -> Any:
        """Copy a micro-batch to the device; `label` is its number in the trace, `k` by default."""
        copies: list[Copy] = []

        def load(tensor: torch.Tensor) -> torch.Tensor:
            to = self.parts.device.torch_device
            fresh = tensor.detach().to(to, copy=True) if is_sparse(tensor) else torch.empty_like(tensor, device=to)
            target = self._register_input(fresh, k)
            for piece, source in zip(dense_parts(target), dense_parts(tensor.detach()), strict=True):
                self.stash.track(piece, k, "other", "", fresh=True)
                copies.append((piece, source))
            return target

        rows = map_tensors(micro_batch, load)
        if copies:
            with self.clock.stalled():
                self.h2d.send("batch", "", copies, k if label is None else label).wait()
        return rows

    def _register_input(self, tensor: torch.Tensor, k: int) -> torch.Tensor:
        """Return `tensor`, an input of micro-batch `k`, registered with the guard if the pass has one."""
        return tensor


@contextmanager
def _load_buffers(
    device: Device, tracker: StorageTracker, collect_garbage: Callable[[], object], unit: Unit
) -> Iterator[None]:
    """Load a layer's buffers for a visit; they are part of no stash."""
    with unit.buffers.on_device(device, "buffers") as copies, tracker.exempting(copies):
        yield
    collect_garbage()


@contextmanager
def _manual_gc() -> Iterator[Callable[[], object]]:
    """Disable Python's collector of reference cycles in the block; yield a function that collects young objects.

    A pass makes thousands of small objects that live until backward. The collector would promote them and scan the whole process
    every few passes: a tenth of a step with small layers. Instead it scans young objects after each visit, so that a cycle that a
    layer leaves does not keep tensors for longer. If it is disabled already, by the user or a pass in another thread, nothing is
    collected.
    """
    if not gc.isenabled():
        yield lambda: None
        return
    gc.disable()
    try:
        yield partial(gc.collect, 0)
    finally:
        gc.enable()


def module_tensors(modules: Sequence[nn.Module]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that modules keep between passes: buffers, and those on plain attributes."""
    buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
    values = (value for module in modules for value in vars(module).values())
    return buffers, [value for value in values if isinstance(value, torch.Tensor)]
