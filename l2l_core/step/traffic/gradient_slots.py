"""Gradients on the device: summed over micro-batches in a flat slot, then pushed to the EPS.

A hook moves a parameter's first gradient into its place in the slot as soon as it is ready, so that at most one parameter's
gradient exists besides the slot. From then on that place stands as the parameter's `grad`, and autograd adds to it by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge

from l2l_core.devices import Device, Ticket
from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Block, BlockGradient, Layout, TrainedParameters, Unit
from l2l_core.step.graph import Root
from l2l_core.step.traffic.compute_clock import ComputeClock
from l2l_core.step.traffic.gradient_hooks import GradientHooks
from l2l_core.step.traffic.lanes import CountedLane


@dataclass(eq=False, slots=True)
class _GradientBuffer:
    flat: torch.Tensor
    clock: ComputeClock
    pending_copies: list[Ticket] = field(default_factory=list)  # copies that still read it
    view_cache: dict[tuple[int, Layout], list[torch.Tensor]] = field(default_factory=dict)

    def views(self, start: int, layout: Layout) -> list[torch.Tensor]:
        """See the buffer from an element on as a layout says; gradients of layers that are alike share the views."""
        if (start, layout) not in self.view_cache:
            self.view_cache[start, layout] = layout.views(self.flat[start : start + layout.numel])
        return self.view_cache[start, layout]

    def wait_until_free(self) -> None:
        """Let compute write to the buffer only when what it held has left."""
        if self.pending_copies:
            with self.clock.stalled():
                for ticket in self.pending_copies:
                    ticket.wait()
            self.pending_copies.clear()


@dataclass(eq=False, slots=True)
class _BlockGradient:
    """What of a slot belongs to one block.

    Invariant: `touched[i]` says whether the i-th trained parameter has a gradient; untouched places hold garbage.
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
    """How gradients get from autograd to the EPS.

    Attributes:
        device: whose memory they gather in.
        clock: of compute, which may have to wait.
        takers: who hands out gradients, and knows what is trained.
        store: the EPS.
        push: sends them there.
        is_apart: whether a block's micro-batches are kept apart, as far as the pass knows by now.
    """

    device: Device
    clock: ComputeClock
    hooks: GradientHooks
    store: LayerStore
    push: CountedLane
    is_per_micro_batch: Callable[[Block], bool]


class Gradient:
    """The gradient of one unit during one visit: of the parameters that are trained, and of no others.

    Parameters that no micro-batch touched get no update, as in plain training.
    """

    def __init__(self, unit: Unit, buffer: _GradientBuffer, routes: GradientRoutes) -> None:
        self.unit, self._buffer, self._routes, takers = unit, buffer, routes, routes.hooks
        self._block_gradients: list[_BlockGradient] = []
        self._unregister: list[Callable[[], None]] = []
        self._installed: list[torch.Tensor] = []  # parameters to whose place autograd adds
        start = 0
        for block in unit.blocks:
            trained = takers.trained[block]
            share = _BlockGradient(
                block, trained, buffer.flat[start : start + trained.numel], [False] * len(trained.indices)
            )
            places = enumerate(zip(trained.indices, buffer.views(start, trained.layout), strict=True))
            start += trained.numel
            if trained.indices:
                self._block_gradients.append(share)
            self._unregister += [
                takers.route(block.params[i], self._make_hook(share, at, view)) for at, (i, view) in places
            ]

    def _make_hook(
        self, block_gradient: _BlockGradient, index: int, view: torch.Tensor
    ) -> Callable[[torch.Tensor], None]:
        param, ways = block_gradient.block.params[block_gradient.trained.indices[index]], self._routes

        def take(grad: torch.Tensor) -> None:
            self._buffer.wait_until_free()  # only now: up to the first gradient, what was pushed may still leave
            if block_gradient.touched[index]:
                view.add_(grad)
                return
            view.copy_(grad)  # not added to zero: -0.0 + 0.0 is 0.0, and a buffer need not be cleared
            block_gradient.touched[index] = True
            if not ways.is_per_micro_batch(block_gradient.block):
                ways.hooks.install_grad(param, view)
                self._installed.append(param)

        return take

    @property
    def is_open(self) -> bool:
        """Whether gradients are still being taken."""
        return bool(self._unregister)

    @property
    def is_complete(self) -> bool:
        """Whether the run of backward that asks will add nothing more."""
        return not any(self._routes.hooks.is_pending(share.block) for share in self._block_gradients)

    def stop(self) -> None:
        """Take no more gradients."""
        for end in self._unregister:
            end()
        self._unregister = []
        self._remove_grads()

    def _remove_grads(self) -> None:
        for param in self._installed:
            self._routes.hooks.remove_grad(param)
        self._installed.clear()

    def partial_sums(self, k: int, uses: Callable[[], Counter[torch.Tensor]]) -> list[Root]:
        """Return what micro-batch `k` has brought before to parameters that the next run reads more than once.

        As a root of that run it is the first summand, as in plain training; added afterwards, the sum would be another. A
        parameter that is read once makes no difference: there the EPS adds.
        """
        ways = self._routes
        shares = [
            s for s in self._block_gradients if ways.is_per_micro_batch(s.block) and ways.store.has_part(s.block, k)
        ]
        if not shares:
            return []
        counts, roots = uses(), []
        for block, trained in ((share.block, share.trained) for share in shares):
            several = [i for i in trained.indices if counts[block.params[i]] > 1]
            if several:
                ways.push.lane.flush()  # the EPS works in order: the layer before must have come whole
                with ways.clock.stalled():
                    lent = ways.store.withdraw_part(block, k, several)
                pairs = [(block.params[i], host.to(self._buffer.flat.device)) for i, host in lent.items()]
                roots += [(get_gradient_edge(param), grad) for param, grad in pairs]
        return roots

    def holds_part_of(self, params: Collection[torch.Tensor]) -> bool:
        """Whether there is a gradient, not pushed yet, of one of these parameters whose micro-batches are kept apart."""
        if not params:
            return False
        apart = [
            share
            for share in self._block_gradients
            if any(share.touched) and self._routes.is_per_micro_batch(share.block)
        ]
        return not {share.block.params[i] for share in apart for i in share.piece.views()}.isdisjoint(params)

    def flush(self, k: int, visit: int) -> None:
        """Push what micro-batch `k` has just added, in `visit`, to blocks whose micro-batches are kept apart."""
        ways = self._routes
        for share in self._block_gradients:
            if any(share.touched) and ways.is_per_micro_batch(share.block):
                with ways.clock.stalled():
                    send = partial(ways.push, self.unit.key, k=k, visit=visit)
                    self._buffer.pending_copies.append(
                        ways.store.push_gradient(self.unit, share.block, share.piece, send, k)
                    )
                self._remove_grads()  # it was not known to be apart when the first gradient came
                share.touched[:] = [False] * len(share.touched)

    def push(self, at_once: bool = False) -> None:
        """Push the summed gradient of every block, to be reduced and updated in the background.

        Args:
            at_once: let no piece of it wait for the turn of a micro-batch, as there will be none.
        """
        ways = self._routes
        self.stop()
        ways.push.lane.flush()
        for share in self._block_gradients:
            if any(share.touched) and not ways.is_per_micro_batch(share.block):
                with ways.clock.stalled():  # until there is room, and without overlap until all is done
                    send = partial(ways.push.send_chunked, self.unit.key)
                    self._buffer.pending_copies.append(
                        ways.store.push_gradient(self.unit, share.block, share.piece, send)
                    )
        if at_once:
            ways.push.lane.flush()


class GradientSlots:
    """Device buffers for gradients: one fills while another is being pushed.

    Args:
        ways: how gradients come and go.
        units: those that use the buffers, which are as large as the largest gradient of them.
        count: of buffers.
        name: for the ledger.
    """

    def __init__(self, routes: GradientRoutes, units: Iterable[Unit], count: int, name: str) -> None:
        numel = max((routes.hooks.numel(unit) for unit in units), default=0)
        device, clock = routes.device, routes.clock
        self._routes, self._owner, self._nbytes = routes, name, 4 * numel * count
        device.ledger.book("gradients", name, self._nbytes)
        self._buffers = [_GradientBuffer(device.empty(numel), clock) for _ in range(count)]
        self._empty_buffer = _GradientBuffer(device.empty(0), clock)  # for units of which nothing is trained
        self._open_gradients: list[Gradient] = []
        self._next = 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [buffer.flat for buffer in self._buffers]

    def acquire(self, unit: Unit) -> Gradient:
        """Open a gradient for a visit of `unit`, in the buffer that was pushed longest ago.

        Raises:
            RuntimeError: a parameter was frozen, or let go, since the step began.
        """
        takers = self._routes.hooks
        takers.check_requires_grad(
            unit.blocks if self._open_gradients else takers.trained
        )  # all of them before any is updated
        buffer = self._next_buffer() if takers.numel(unit) else self._empty_buffer
        buffer.wait_until_free()
        self._open_gradients = [gradient for gradient in self._open_gradients if gradient.is_open] + [
            Gradient(unit, buffer, self._routes)
        ]
        return self._open_gradients[-1]

    def check_requires_grad(self) -> None:
        """Refuse parameters that were frozen, or let go, since the step began.

        Raises:
            RuntimeError: names one of them.
        """
        self._routes.hooks.check_requires_grad(self._routes.hooks.trained)

    def begin_backward(self) -> None:
        """A run of backward begins, in which gradients will be asked whether they are whole."""
        self._routes.hooks.begin_backward()

    def check_no_stray_grads(self) -> None:
        """Refuse gradients that were set by hand on parameters of layers that backward has left.

        Raises:
            RuntimeError: names one of the parameters.
        """
        self._routes.hooks.check_no_stray_grads()

    def _next_buffer(self) -> _GradientBuffer:
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        return buffer

    def close(self) -> None:
        """Stop every gradient and give the bytes back."""
        for gradient in self._open_gradients:
            gradient.stop()
        device = self._routes.device
        device.ledger.release("gradients", self._owner, self._nbytes)
        for buffer in self._buffers:
            for ticket in buffer.pending_copies:
                ticket.abandon()  # a buffer is not recycled under a copy
            device.recycle(buffer.flat)
        self._buffers.clear()
