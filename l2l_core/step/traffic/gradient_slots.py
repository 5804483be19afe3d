"""Gradients on the device: summed over micro-batches in a flat buffer, then pushed to the EPS.

A hook copies a parameter's first gradient to its place in the buffer at once, so at most one parameter's gradient exists
besides the buffer. Then that place is the parameter's `grad`, and autograd adds to it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge

from l2l_core.devices import Device, Ticket
from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Block, BlockGradient, Layout, TrainedParameters, Unit
from l2l_core.step.graph import Root
from l2l_core.step.traffic.compute_events import ComputeClock
from l2l_core.step.traffic.gradient_hooks import GradientHooks
from l2l_core.step.traffic.lanes import Lane


@dataclass(eq=False, slots=True)
class _GradientBuffer:
    flat: torch.Tensor
    clock: ComputeClock
    pending_copies: list[Ticket] = field(default_factory=list)  # copies that still read it
    view_cache: dict[tuple[int, Layout], list[torch.Tensor]] = field(default_factory=dict)

    def views(self, start: int, layout: Layout) -> list[torch.Tensor]:
        """Return views of the buffer from element `start`; layers of one layout share them."""
        if (start, layout) not in self.view_cache:
            self.view_cache[start, layout] = layout.views(self.flat[start : start + layout.numel])
        return self.view_cache[start, layout]

    def wait_until_free(self) -> None:
        """Stall compute until no copy reads the buffer."""
        if self.pending_copies:
            with self.clock.stalled():
                for ticket in self.pending_copies:
                    ticket.wait()
            self.pending_copies.clear()


@dataclass(eq=False, slots=True)
class _BufferPart:
    """The part of a gradient buffer that belongs to one block.

    Invariant: `touched[i]` is true if the i-th trained parameter has a gradient; its place is uninitialized otherwise.
    """

    block: Block
    trained: TrainedParameters
    flat: torch.Tensor  # (trained.numel,)
    touched: list[bool]

    @property
    def piece(self) -> BlockGradient:
        return BlockGradient(self.flat, self.trained, tuple(self.touched))


@dataclass(frozen=True, slots=True)
class GradientRoutes:
    """The parts through which gradients pass from autograd to the EPS."""

    device: Device
    clock: ComputeClock
    hooks: GradientHooks
    store: LayerStore
    lane: Lane  # to the host
    is_per_micro_batch: Callable[[Block], bool]  # it may change during a pass


class Gradient:
    """The gradient of a unit's trained parameters during one visit.

    Parameters that no micro-batch used get no update, as in plain training.
    """

    def __init__(self, unit: Unit, buffer: _GradientBuffer, routes: GradientRoutes) -> None:
        self.unit, self._buffer, self._routes = unit, buffer, routes
        self._block_gradients: list[_BufferPart] = []
        self._unregister: list[Callable[[], object]] = []
        self._installed: list[torch.Tensor] = []  # parameters whose `grad` is a view of the buffer
        start = 0
        for block in unit.blocks:
            trained = routes.hooks.trained[block]
            flat = buffer.flat[start : start + trained.numel]
            part = _BufferPart(block, trained, flat, [False] * len(trained.indices))
            views = buffer.views(start, trained.layout)
            start += trained.numel
            if trained.indices:
                self._block_gradients.append(part)
            for index, (i, view) in enumerate(zip(trained.indices, views, strict=True)):
                self._unregister.append(routes.hooks.route(block.params[i], self._make_hook(part, index, view)))

    def _make_hook(self, part: _BufferPart, index: int, view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        param, routes = part.block.params[part.trained.indices[index]], self._routes

        def consume(grad: torch.Tensor) -> None:
            self._buffer.wait_until_free()  # only now: until the first gradient, an earlier push may read the buffer
            if part.touched[index]:
                view.add_(grad)
                return
            view.copy_(grad)  # not added to zero: -0.0 + 0.0 is 0.0, and the buffer need not be cleared
            part.touched[index] = True
            if not routes.is_per_micro_batch(part.block):
                routes.hooks.install_grad(param, view)
                self._installed.append(param)

        return consume

    @property
    def is_open(self) -> bool:
        """Whether it still takes gradients."""
        return bool(self._unregister)

    @property
    def is_complete(self) -> bool:
        """Whether the present run of backward will add nothing more."""
        return not any(self._routes.hooks.is_pending(part.block) for part in self._block_gradients)

    def stop(self) -> None:
        """Take no more gradients."""
        for unregister in self._unregister:
            unregister()
        self._unregister = []
        self._remove_grads()

    def _remove_grads(self) -> None:
        for param in self._installed:
            self._routes.hooks.remove_grad(param)
        self._installed.clear()

    def partial_sums(self, k: int, uses: Callable[[], Counter[torch.Tensor]]) -> list[Root]:
        """Return the earlier gradients of micro-batch `k` for parameters that the next run uses more than once.

        As roots of that run they are its first summands, as in plain training; added afterwards, the sum would round
        otherwise. For a parameter that is used once both orders are equal, and the EPS adds.
        """
        routes = self._routes
        parts = [
            part
            for part in self._block_gradients
            if routes.is_per_micro_batch(part.block) and routes.store.has_part(part.block, k)
        ]
        if not parts:
            return []
        counts, roots = uses(), []
        for block, trained in ((part.block, part.trained) for part in parts):
            several = [i for i in trained.indices if counts[block.params[i]] > 1]
            if several:
                routes.lane.flush()  # the EPS works in order: it needs the whole gradient of the layer before
                with routes.clock.stalled():
                    withdrawn = routes.store.withdraw_part(block, k, several)
                pairs = [(block.params[i], host.to(self._buffer.flat.device)) for i, host in withdrawn.items()]
                roots += [(get_gradient_edge(param), grad) for param, grad in pairs]
        return roots

    def holds_part_of(self, params: Collection[torch.Tensor]) -> bool:
        """Whether it holds a per-micro-batch gradient, not pushed yet, of one of these parameters."""
        if not params:
            return False
        return any(
            not {part.block.params[i] for i in part.piece.views()}.isdisjoint(params)
            for part in self._block_gradients
            if any(part.touched) and self._routes.is_per_micro_batch(part.block)
        )

    def flush(self, k: int, visit: int) -> None:
        """Push the per-micro-batch gradients that micro-batch `k` added in `visit`."""
        routes = self._routes
        for part in self._block_gradients:
            if any(part.touched) and routes.is_per_micro_batch(part.block):
                self._push_block(part, partial(routes.lane.send, "push", self.unit.key, k=k, visit=visit), k)
                self._remove_grads()  # installed before the block became per-micro-batch
                part.touched[:] = [False] * len(part.touched)

    def push(self, at_once: bool = False) -> None:
        """Push the summed gradient of every block, to be reduced and updated in the background: piece by piece, or `at_once`."""
        routes = self._routes
        self.stop()
        routes.lane.flush()
        for part in self._block_gradients:
            if any(part.touched) and not routes.is_per_micro_batch(part.block):
                self._push_block(part, partial(routes.lane.send_chunked, "push", self.unit.key))
        if at_once:
            routes.lane.flush()

    def _push_block(self, part: _BufferPart, send: Callable[..., Ticket], k: int | None = None) -> None:
        with self._routes.clock.stalled():  # until the EPS has room; without overlap, until it is done
            ticket = self._routes.store.push_gradient(self.unit, part.block, part.piece, send, k)
            self._buffer.pending_copies.append(ticket)


class GradientSlots:
    """Device buffers for the gradients of some units: one is filled while another is pushed."""

    def __init__(self, routes: GradientRoutes, units: Iterable[Unit], count: int, name: str) -> None:
        numel = max((routes.hooks.numel(unit) for unit in units), default=0)
        device, clock = routes.device, routes.clock
        self.hooks, self._routes, self._owner, self._nbytes = routes.hooks, routes, name, 4 * numel * count
        device.ledger.book("gradients", name, self._nbytes)
        self._buffers = deque(_GradientBuffer(device.empty(numel), clock) for _ in range(count))
        self._empty_buffer = _GradientBuffer(device.empty(0), clock)  # for units without trained parameters
        self._open_gradients: list[Gradient] = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [buffer.flat for buffer in self._buffers]

    def acquire(self, unit: Unit) -> Gradient:
        """Open a gradient for a visit of `unit`, in the buffer that was pushed longest ago."""
        self.hooks.check_requires_grad(unit.blocks if self._open_gradients else None)  # all, before any is updated
        buffer = self._empty_buffer
        if self.hooks.numel(unit):
            buffer = self._buffers[0]
            self._buffers.rotate(-1)
        buffer.wait_until_free()
        opened = Gradient(unit, buffer, self._routes)
        self._open_gradients = [*(gradient for gradient in self._open_gradients if gradient.is_open), opened]
        return opened

    def close(self) -> None:
        """Stop every gradient and release the buffers."""
        for gradient in self._open_gradients:
            gradient.stop()
        device = self._routes.device
        device.ledger.release("gradients", self._owner, self._nbytes)
        for buffer in self._buffers:
            for ticket in buffer.pending_copies:
                ticket.abandon()  # a buffer is not recycled while a copy reads it
            device.recycle(buffer.flat)
        self._buffers.clear()
