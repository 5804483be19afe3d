"""What any pass over the model stands on, set up before it and taken down after it, whatever happens.

Slots and shell on the device, the stash, the meter, random streams. An exception anywhere leaves no booked byte and no moved
parameter behind. `stage.py` adds what forwards need that pause, `depth_first.py` what those need that do not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from l2l_core.batches import map_tensors
from l2l_core.config import RelayConfig
from l2l_core.devices import Copy
from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Block, Unit
from l2l_core.model import Ambient, RandomState, is_sparse, modules_of, pieces_of
from l2l_core.rules import gradient_slots, pieces_of_copy
from l2l_core.step.advice import advise
from l2l_core.step.cycles import only_young
from l2l_core.step.parts import Parts
from l2l_core.step.plan import Plan
from l2l_core.step.traffic import (
    AtWork,
    Clock,
    Gradient,
    GradientSlots,
    Images,
    Lane,
    Link,
    Meter,
    Metered,
    Prefetch,
    Stash,
    Takers,
    Ways,
)
from l2l_core.trace import Trace

# What most attributes of modules are: sorted out first, since to be asked whether they are tensors takes them long.
_PLAIN = frozenset((type(None), bool, int, float, str, tuple, list, dict, set, OrderedDict))
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Task = Callable[[nn.Module, Any], Any]


class Ground(ABC):
    """One pass, set up as far as all passes are alike. Use as a context manager.

    Args:
        parts: of the relay.
        config: how to run.
        plan: which weights stay on the device.
        trace: gets events and memory.
        replay: activation bytes of an earlier step; None counts them operation by operation.

    Attributes:
        outside: the state that the thread is in where no forward runs.
    """

    def __init__(self, parts: Parts, config: RelayConfig, plan: Plan, trace: Trace, replay: Metered | None) -> None:
        self.parts, self.config, self._plan, self.trace, self._replay = parts, config, plan, trace, replay
        turns = pieces_of_copy(config.micro_batches, config.ahead, config.stash)
        self.clock = Clock(parts.device, trace)
        stalled = None if config.ahead else self.clock.stalled
        self.h2d, self.d2h = (Lane(parts.device, trace, name, turns, stalled) for name in ("h2d", "d2h"))
        self.loads, self.pushes = Link(self.h2d, "load"), Link(self.d2h, "push")
        self._dtype = _DTYPES[config.precision]  # of weights on the device
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            try:
                self._set_up()
            except torch.OutOfMemoryError as error:
                raise self.parts.device.ledger.refused(error) from error
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        """Take the pass down.

        Raises:
            DeviceOutOfMemory: in place of the error of the device's own allocator; says what was booked.
        """
        ledger = self.parts.device.ledger
        if isinstance(error, Exception) and not isinstance(error, MemoryError) and (doing := ledger.doing()):
            note = f"The relay was at: {doing}."
            if note not in getattr(error, "__notes__", ()):  # the same error object may come again
                error.add_note(note)
        if error is not None:
            self.clock.stop()  # the trace shows what was being computed
        refused = ledger.refused(error) if isinstance(error, torch.OutOfMemoryError) else None  # while all is booked
        is_whole = False
        try:
            self._stack.close()
            is_whole = error is None
        finally:
            if not is_whole:  # a second interrupt may have come just as parameters were pointed to a slot, or back
                for unit in self.parts.units:
                    unit.point([home for block in unit.blocks for home in block.homes])
        if refused is not None:
            raise refused from error

    def _set_up(self) -> None:
        parts, enter, later = self.parts, self._stack.enter_context, self._stack.callback
        ledger = parts.device.ledger
        slot_bytes = self._dtype.itemsize * parts.slot_numel
        ledger.advise = partial(advise, ledger, self.config, slot_bytes, slot_bytes + self._least_beside_a_slot())
        self._collect = enter(only_young())
        enter(parts.device.current())
        later(parts.device.settle)  # last of all: then nothing is under way, and the trace has every event
        parts.place.begin(parts.units, self._dtype, self.trace)
        later(parts.place.end)
        later(RandomState.take().put)  # forwards draw from streams of their own; the caller's stands where it stood
        self.outside = Ambient.now()
        enter(parts.shell.buffers.on(parts.device, "shell buffers"))
        # After the shell's buffers came: modules hold their copies now.
        buffers, self._attributes = tensors_on(modules_of(parts.model))
        exempt = [*buffers, *self._attributes, *(master for unit in parts.units for master in unit.masters)]
        at_work = AtWork()
        room, moves = parts.waiting_room(self.config.stash), self.config.stash != "device"
        room.begin(self.trace, self.clock.stalled)
        later(room.clear)
        self._images = Images(parts.device, room, at_work, exempt)
        self.stash = Stash(
            parts.device,
            self._images,
            at_work,
            room=room,
            moves=moves,
            overlap=self.config.ahead > 0,
            metering=self._replay is None,
            h2d=self.h2d,
            d2h=self.d2h,
            clock=self.clock,
        )
        self._watch_out()
        self.meter = Meter(ledger, parts.host, self.trace, self._replay, self.config.keep > 0)
        later(self.meter.close)
        shell = self._load_shell()
        self.prefetch = Prefetch(
            parts.device,
            parts.slot_numel,
            self.config.ahead,
            self.loads.trickle,
            self.clock,
            shell,
            parts.place,
            self._dtype,
            self._visiting,
            self._plan.resident,
        )
        later(self.prefetch.close)
        self._images.exempt([slot.flat for slot in self.prefetch.slots], weights=True)

    @abstractmethod
    def _watch_out(self) -> None:
        """Set up who looks at what tensors are used for; they look until nothing is held any more."""

    def _least_beside_a_slot(self) -> int:
        """Device bytes that a pass takes besides a layer's weights, whatever the settings."""
        layers = [sum(block.trained.numel for block in unit.blocks) for unit in self.parts.layers]
        shell = sum(block.trained.numel for block in self.parts.shell.blocks)
        gradients = 4 * (shell + max(layers, default=0)) if torch.is_grad_enabled() else 0
        return self._dtype.itemsize * self.parts.shell.numel + gradients

    def _load_shell(self) -> Mapping[nn.Parameter, torch.Tensor]:
        """Put the shell on the device; return where its parameters are for the length of the pass."""
        shell, device = self.parts.shell, self.parts.device
        flat = device.empty(shell.numel, self._dtype)
        self._stack.callback(device.recycle, flat)
        # Booking may raise: then the buffer is recycled, and nothing is released.
        device.ledger.book("weights", "shell", flat.nbytes)
        self._stack.callback(device.ledger.release, "weights", "shell", flat.nbytes)
        self._images.exempt([flat], weights=True)
        self._images.exempt([master for unit in self.parts.units for master in unit.masters], weights=True)
        pairs = zip(shell.ranges(flat), shell.blocks, strict=True)
        with self.clock.stalled():
            load = self.loads(shell.key, [(part, self.parts.place.lend(block)) for part, block in pairs])
            load.wait()
        for block in shell.blocks:
            self.parts.place.take_back(block, load)
        views = shell.views(flat)
        self._stack.callback(shell.point, [home for block in shell.blocks for home in block.homes])
        shell.point(views)
        return dict(zip(shell.params, views, strict=True))

    @contextmanager
    def _visiting(self, unit: Unit) -> Iterator[None]:
        """Bring what a visit needs besides weights: the layer's buffers, which are part of no image."""
        with unit.buffers.on(self.parts.device, "buffers") as copies, self._images.exempting(copies):
            yield
        self._collect()

    def gradients(self, store: LayerStore, is_apart: Callable[[Block], bool]) -> tuple[GradientSlots, Gradient]:
        """Make device buffers for the gradients of layers, and the gradient of the shell."""
        parts = self.parts
        takers = Takers(parts.units)
        count = gradient_slots(self.config.ahead, self.config.schedule, len(parts.layers))
        self._stack.callback(takers.close)
        ways = Ways(parts.device, self.clock, takers, store, self.pushes, is_apart)
        slots = GradientSlots(ways, parts.layers, count, "slots")
        self._stack.callback(slots.close)
        shell = GradientSlots(ways, [parts.shell], 1, "shell")
        self._stack.callback(shell.close)
        self._images.exempt([*slots.flats, *shell.flats])
        return slots, shell.take(parts.shell)

    def ambients(self, seeds: Sequence[int]) -> list[Ambient]:
        """Return the state in which the forward of each micro-batch begins."""
        base = self.outside
        if self._dtype != torch.float32:  # operations cast activations to the weights' type, or compute in float32
            base = base._replace(autocast=tuple((True, self._dtype) for _ in base.autocast), autocast_cache=False)
        return [base.reseeded(RandomState.seeded(seed)) for seed in seeds]

    def bring(self, k: int, micro_batch: Any) -> Any:
        """Copy a micro-batch to the device."""
        copies: list[Copy] = []

        def brought(tensor: torch.Tensor) -> torch.Tensor:
            to = self.parts.device.torch_device
            fresh = tensor.detach().to(to, copy=True) if is_sparse(tensor) else torch.empty_like(tensor, device=to)
            target = self._noted(fresh, k)
            for piece, source in zip(pieces_of(target), pieces_of(tensor.detach()), strict=True):
                self.stash.hold(piece, k, "other", "", fresh=True)
                copies.append((piece, source))
            return target

        rows = map_tensors(micro_batch, brought)
        if copies:
            with self.clock.stalled():
                self.h2d.send("batch", "", copies, k).wait()
        return rows

    def _noted(self, tensor: torch.Tensor, k: int) -> torch.Tensor:
        """Return a tensor that is part of micro-batch `k`'s rows, whoever looks out for it."""
        return tensor


def tensors_on(modules: Sequence[nn.Module]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """List the tensors that modules keep between passes: buffers, and those on plain attributes."""
    buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
    held = (value for module in modules for value in vars(module).values() if type(value) not in _PLAIN)
    return buffers, [value for value in held if isinstance(value, torch.Tensor)]
