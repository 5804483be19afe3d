"""Gradients on the device: summed over micro-batches in a flat slot, then pushed to the EPS.

Autograd's own accumulation is not used: a hook moves each parameter's fresh gradient into its place in the slot as soon
as it is ready, so that at most one parameter's gradient exists besides the slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from l2l_core.clock import Clock
from l2l_core.device import Device, Ticket
from l2l_core.link import Link
from l2l_core.store import LayerStore
from l2l_core.units import Block, Unit


@dataclass(eq=False, slots=True)
class _Buffer:
    flat: torch.Tensor
    clock: Clock
    leaving: list[Ticket] = field(default_factory=list)  # copies that still read it

    def settle(self) -> None:
        """Let compute write to the buffer only when what it held has left."""
        if self.leaving:
            with self.clock.stalled():
                for ticket in self.leaving:
                    ticket.wait()
            self.leaving.clear()


class Gradient:
    """The gradient of one unit during one visit.

    Invariant: `touched[i]` says whether parameter i has a gradient; untouched places hold garbage. Parameters that no
    micro-batch touched get no update, as in plain training.
    """

    def __init__(self, unit: Unit, buffer: _Buffer, apart: Callable[[Block], bool]) -> None:
        self.unit, self._buffer, self.apart = unit, buffer, apart
        self.flat = buffer.flat[: unit.numel]
        self._views = unit.views(self.flat)
        self.touched = [False] * len(self._views)
        self._handles = [
            param.register_post_accumulate_grad_hook(self._collector(index))
            for index, param in enumerate(unit.params)
            if param.requires_grad
        ]

    def _collector(self, index: int) -> Callable[[torch.Tensor], None]:
        view = self._views[index]

        def collect(param: torch.Tensor) -> None:
            grad, param.grad = param.grad, None
            if grad is None:
                return  # another unit that shares the parameter has taken it
            if grad.layout is not torch.strided:
                raise ValueError(
                    f"a parameter of {self.unit.name} has a {grad.layout} gradient; use Embedding(sparse=False)"
                )
            self._buffer.settle()
            if self.touched[index]:
                view.add_(grad)
            else:
                view.copy_(grad)
                self.touched[index] = True

        return collect

    @property
    def is_open(self) -> bool:
        """Whether gradients are still being taken."""
        return bool(self._handles)

    def stop(self) -> None:
        """Take no more gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def flush(self, k: int, visit: int, store: LayerStore, push: Link) -> None:
        """Push what micro-batch `k` has just added, in `visit`, to blocks whose micro-batches are kept apart."""
        for block, grad, covers, start in self._parts():
            if self.apart(block) and any(covers):
                host = store.buffer(grad.numel())
                pairs = zip(block.layout.views(host), block.layout.views(grad), covers, strict=True)
                ticket = push(self.unit.key, [(target, source) for target, source, has in pairs if has], k, visit)
                with self._buffer.clock.stalled():
                    store.reduce_part(self.unit, block, k, host, covers, ticket)
                self._buffer.leaving.append(ticket)
                self.touched[start : start + len(covers)] = [False] * len(covers)

    def push(self, store: LayerStore, push: Link) -> None:
        """[3] Push the summed gradient of every block, to be reduced and updated in the background."""
        self.stop()
        push.lane.flush()
        for block, grad, covers, _ in self._parts():
            if not self.apart(block) and any(covers):
                with self._buffer.clock.stalled():  # until there is room, and without overlap until all is done
                    host = store.buffer(grad.numel(), bounded=True)
                    ticket = push.trickle(self.unit.key, [(host, grad)])
                    self._buffer.leaving.append(ticket)
                    store.reduce(self.unit, block, host, covers, ticket)

    def _parts(self) -> list[tuple[Block, torch.Tensor, tuple[bool, ...], int]]:
        parts, start = [], 0
        for block, grad in zip(self.unit.blocks, self.unit.ranges(self.flat), strict=True):
            parts.append((block, grad, tuple(self.touched[start : start + len(block.params)]), start))
            start += len(block.params)
        return parts


class GradientSlots:
    """Device buffers for gradients: one fills while another is being pushed."""

    def __init__(self, device: Device, clock: Clock, numel: int, count: int, name: str) -> None:
        self._device, self._owner, self._nbytes = device, name, 4 * numel * count
        device.ledger.book("gradients", name, self._nbytes)
        self._buffers = [_Buffer(device.empty(numel), clock) for _ in range(count)]
        self._live: list[Gradient] = []
        self._next = 0

    @property
    def flats(self) -> list[torch.Tensor]:
        return [buffer.flat for buffer in self._buffers]

    def take(self, unit: Unit, apart: Callable[[Block], bool]) -> Gradient:
        """A gradient for a visit of `unit`, in the buffer that was pushed longest ago."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        buffer.settle()
        self._live = [gradient for gradient in self._live if gradient.is_open] + [Gradient(unit, buffer, apart)]
        return self._live[-1]

    def close(self) -> None:
        """Stop every gradient and give the bytes back."""
        for gradient in self._live:
            gradient.stop()
        self._device.ledger.release("gradients", self._owner, self._nbytes)
        for buffer in self._buffers:
            for ticket in buffer.leaving:
                ticket.abandon()
            self._device.recycle(buffer.flat)
        self._buffers.clear()
