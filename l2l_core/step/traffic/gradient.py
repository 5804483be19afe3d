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
from l2l_core.eps.blocks import Block, GradientPiece, Layout, Trained, Unit
from l2l_core.step.graph import Root
from l2l_core.step.traffic.clock import Clock
from l2l_core.step.traffic.lanes import Link
from l2l_core.step.traffic.takers import Takers


@dataclass(eq=False, slots=True)
class _Buffer:
    flat: torch.Tensor
    clock: Clock
    leaving: list[Ticket] = field(default_factory=list)  # copies that still read it
    seen_as: dict[tuple[int, Layout], list[torch.Tensor]] = field(default_factory=dict)

    def views(self, start: int, layout: Layout) -> list[torch.Tensor]:
        """See the buffer from an element on as a layout says; gradients of layers that are alike share the views."""
        if (start, layout) not in self.seen_as:
            self.seen_as[start, layout] = layout.views(self.flat[start : start + layout.numel])
        return self.seen_as[start, layout]

    def settle(self) -> None:
        """Let compute write to the buffer only when what it held has left."""
        if self.leaving:
            with self.clock.stalled():
                for ticket in self.leaving:
                    ticket.wait()
            self.leaving.clear()


@dataclass(eq=False, slots=True)
class _Share:
    """What of a slot belongs to one block.

    Invariant: `touched[i]` says whether the i-th trained parameter has a gradient; untouched places hold garbage.
    """

    block: Block
    trained: Trained
    flat: torch.Tensor  # (trained.numel,)
    touched: list[bool]

    @property
    def piece(self) -> GradientPiece:
        return GradientPiece(self.flat, self.trained, tuple(self.touched))


@dataclass(frozen=True, slots=True)
class Ways:
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
    clock: Clock
    takers: Takers
    store: LayerStore
    push: Link
    is_apart: Callable[[Block], bool]


class Gradient:
    """The gradient of one unit during one visit: of the parameters that are trained, and of no others.

    Parameters that no micro-batch touched get no update, as in plain training.
    """

    def __init__(self, unit: Unit, buffer: _Buffer, ways: Ways) -> None:
        self.unit, self._buffer, self._ways, takers = unit, buffer, ways, ways.takers
        self._shares: list[_Share] = []
        self._ends: list[Callable[[], None]] = []
        self._standing: list[torch.Tensor] = []  # parameters to whose place autograd adds
        start = 0
        for block in unit.blocks:
            trained = takers.trained[block]
            share = _Share(block, trained, buffer.flat[start : start + trained.numel], [False] * len(trained.indices))
            places = enumerate(zip(trained.indices, buffer.views(start, trained.layout), strict=True))
            start += trained.numel
            if trained.indices:
                self._shares.append(share)
            self._ends += [takers.route(block.params[i], self._taker(share, at, view)) for at, (i, view) in places]

    def _taker(self, share: _Share, at: int, view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        param, ways = share.block.params[share.trained.indices[at]], self._ways

        def take(grad: torch.Tensor) -> None:
            self._buffer.settle()  # only now: up to the first gradient, what was pushed may still leave
            if share.touched[at]:
                view.add_(grad)
                return
            view.copy_(grad)  # not added to zero: -0.0 + 0.0 is 0.0, and a buffer need not be cleared
            share.touched[at] = True
            if not ways.is_apart(share.block):
                ways.takers.let_stand(param, view)
                self._standing.append(param)

        return take

    @property
    def is_open(self) -> bool:
        """Whether gradients are still being taken."""
        return bool(self._ends)

    @property
    def is_whole(self) -> bool:
        """Whether the run of backward that asks will add nothing more."""
        return not any(self._ways.takers.awaits(share.block) for share in self._shares)

    def stop(self) -> None:
        """Take no more gradients."""
        for end in self._ends:
            end()
        self._ends = []
        self._lift()

    def _lift(self) -> None:
        for param in self._standing:
            self._ways.takers.lift(param)
        self._standing.clear()

    def priors(self, k: int, uses: Callable[[], Counter[torch.Tensor]]) -> list[Root]:
        """Return what micro-batch `k` has brought before to parameters that the next run reads more than once.

        As a root of that run it is the first summand, as in plain training; added afterwards, the sum would be another. A
        parameter that is read once makes no difference: there the EPS adds.
        """
        ways = self._ways
        shares = [s for s in self._shares if ways.is_apart(s.block) and ways.store.has_part(s.block, k)]
        if not shares:
            return []
        counts, roots = uses(), []
        for block, trained in ((share.block, share.trained) for share in shares):
            several = [i for i in trained.indices if counts[block.params[i]] > 1]
            if several:
                ways.push.lane.flush()  # the EPS works in order: the layer before must have come whole
                with ways.clock.stalled():
                    lent = ways.store.lend_part(block, k, several)
                pairs = [(block.params[i], host.to(self._buffer.flat.device)) for i, host in lent.items()]
                roots += [(get_gradient_edge(param), grad) for param, grad in pairs]
        return roots

    def holds_part_of(self, params: Collection[torch.Tensor]) -> bool:
        """Whether there is a gradient, not pushed yet, of one of these parameters whose micro-batches are kept apart."""
        if not params:
            return False
        apart = [share for share in self._shares if any(share.touched) and self._ways.is_apart(share.block)]
        return not {share.block.params[i] for share in apart for i in share.piece.views()}.isdisjoint(params)

    def flush(self, k: int, visit: int) -> None:
        """Push what micro-batch `k` has just added, in `visit`, to blocks whose micro-batches are kept apart."""
        ways = self._ways
        for share in self._shares:
            if any(share.touched) and ways.is_apart(share.block):
                with ways.clock.stalled():
                    send = partial(ways.push, self.unit.key, k=k, visit=visit)
                    self._buffer.leaving.append(ways.store.take(self.unit, share.block, share.piece, send, k))
                self._lift()  # it was not known to be apart when the first gradient came
                share.touched[:] = [False] * len(share.touched)

    def push(self, at_once: bool = False) -> None:
        """Push the summed gradient of every block, to be reduced and updated in the background.

        Args:
            at_once: let no piece of it wait for the turn of a micro-batch, as there will be none.
        """
        ways = self._ways
        self.stop()
        ways.push.lane.flush()
        for share in self._shares:
            if any(share.touched) and not ways.is_apart(share.block):
                with ways.clock.stalled():  # until there is room, and without overlap until all is done
                    send = partial(ways.push.trickle, self.unit.key)
                    self._buffer.leaving.append(ways.store.take(self.unit, share.block, share.piece, send))
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

    def __init__(self, ways: Ways, units: Iterable[Unit], count: int, name: str) -> None:
        numel = max((ways.takers.numel(unit) for unit in units), default=0)
        device, clock = ways.device, ways.clock
        self._ways, self._owner, self._nbytes = ways, name, 4 * numel * count
        device.ledger.book("gradients", name, self._nbytes)
        self._buffers = [_Buffer(device.empty(numel), clock) for _ in range(count)]
        self._none = _Buffer(device.empty(0), clock)  # for units of which nothing is trained
        self._live: list[Gradient] = []
        self._next = 0

    @property
    def flats(self) -> list[torch.Tensor]:
        return [buffer.flat for buffer in self._buffers]

    def take(self, unit: Unit) -> Gradient:
        """Open a gradient for a visit of `unit`, in the buffer that was pushed longest ago.

        Raises:
            RuntimeError: a parameter was frozen, or let go, since the step began.
        """
        takers = self._ways.takers
        takers.check(unit.blocks if self._live else takers.trained)  # all of them before any is updated
        buffer = self._next_buffer() if takers.numel(unit) else self._none
        buffer.settle()
        self._live = [gradient for gradient in self._live if gradient.is_open] + [Gradient(unit, buffer, self._ways)]
        return self._live[-1]

    def check(self) -> None:
        """Refuse parameters that were frozen, or let go, since the step began.

        Raises:
            RuntimeError: names one of them.
        """
        self._ways.takers.check(self._ways.takers.trained)

    def begin_run(self) -> None:
        """A run of backward begins, in which gradients will be asked whether they are whole."""
        self._ways.takers.begin_run()

    def check_none_left(self) -> None:
        """Refuse gradients that were set by hand on parameters of layers that backward has left.

        Raises:
            RuntimeError: names one of the parameters.
        """
        self._ways.takers.check_none_left()

    def _next_buffer(self) -> _Buffer:
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        return buffer

    def close(self) -> None:
        """Stop every gradient and give the bytes back."""
        for gradient in self._live:
            gradient.stop()
        device = self._ways.device
        device.ledger.release("gradients", self._owner, self._nbytes)
        for buffer in self._buffers:
            for ticket in buffer.leaving:
                ticket.abandon()  # a buffer is not recycled under a copy
            device.recycle(buffer.flat)
        self._buffers.clear()
