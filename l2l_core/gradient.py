"""Gradients on the device: summed over micro-batches in a flat slot, then pushed to the EPS.

Autograd's own accumulation is not used: a hook moves each parameter's fresh gradient into its place in the slot as soon
as it is ready, so that at most one parameter's gradient exists besides the slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import get_gradient_edge

from l2l_core.clock import Clock
from l2l_core.cut import Root
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


class Takers:
    """Who takes the gradients that autograd accumulates into parameters: one hook on each, for the length of a pass.

    Invariant: every gradient is taken by the unit whose backward has made it, or the step ends.

    Args:
        units: the shell and the layers.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._names = {
            param: name for unit in units for b in unit.blocks for param, name in zip(b.params, b.names, strict=True)
        }
        self._routes: dict[torch.Tensor, Callable[[torch.Tensor], None]] = {}
        self._handles = [
            param.register_post_accumulate_grad_hook(self._collect) for param in self._names if param.requires_grad
        ]

    def _collect(self, param: torch.Tensor) -> None:
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if param not in self._routes:
            raise RuntimeError(
                f"parameter {self._names[param]} gets a gradient from code that is not in its layer (a closure, an attribute, "
                "another layer): it would miss the relay. Pass it as an argument of the layer that uses it"
            )
        if grad.layout is not torch.strided:
            raise ValueError(
                f"parameter {self._names[param]} has a {grad.layout} gradient; use Embedding(sparse=False)"
            )
        self._routes[param](grad)

    def route(self, param: torch.Tensor, take: Callable[[torch.Tensor], None]) -> Callable[[], None]:
        """Let `take` have the gradients of a parameter, unless somebody has them; the result ends that."""
        if self._routes.setdefault(param, take) is not take:
            return lambda: None
        return lambda: self._routes.pop(param)  # type: ignore[func-returns-value]

    def close(self) -> None:
        """Take no more gradients."""
        for handle in self._handles:
            handle.remove()
        self._routes.clear()


class Gradient:
    """The gradient of one unit during one visit.

    Invariant: `touched[i]` says whether parameter i has a gradient; untouched places hold garbage. Parameters that no
    micro-batch touched get no update, as in plain training.
    """

    def __init__(self, unit: Unit, buffer: _Buffer, takers: Takers, apart: Callable[[Block], bool]) -> None:
        self.unit, self._buffer, self.apart = unit, buffer, apart
        self.flat = buffer.flat[: unit.numel]
        self._views = unit.views(self.flat)
        self.touched = [False] * len(self._views)
        self._ends = [
            takers.route(param, self._taker(index)) for index, param in enumerate(unit.params) if param.requires_grad
        ]

    def _taker(self, index: int) -> Callable[[torch.Tensor], None]:
        view = self._views[index]

        def take(grad: torch.Tensor) -> None:
            self._buffer.settle()
            if self.touched[index]:
                view.add_(grad)
            else:
                view.copy_(grad)
                self.touched[index] = True

        return take

    @property
    def is_open(self) -> bool:
        """Whether gradients are still being taken."""
        return bool(self._ends)

    def stop(self) -> None:
        """Take no more gradients."""
        for end in self._ends:
            end()
        self._ends = []

    def priors(self, store: LayerStore, k: int, uses: Callable[[], Counter[torch.Tensor]]) -> list[Root]:
        """What micro-batch `k` has brought before to parameters that the next run reads more than once.

        As a root of that run it is the first summand, as in plain training; added afterwards, the sum would be another. A
        parameter that is read once makes no difference: there the EPS adds.
        """
        blocks = [block for block in self.unit.blocks if self.apart(block) and store.has_part(block, k)]
        if not blocks:
            return []
        counts, roots = uses(), []
        for block in blocks:
            several = [i for i, param in enumerate(block.params) if counts[param] > 1]
            if several:
                with self._buffer.clock.stalled():
                    lent = store.lend_part(block, k, several)
                pairs = [(block.params[i], host.to(self.flat.device)) for i, host in lent.items()]
                roots += [(get_gradient_edge(param), grad) for param, grad in pairs]
        return roots

    def holds_part_of(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether there is a gradient, not pushed yet, of one of these parameters whose micro-batches are kept apart."""
        if not any(self.touched):
            return False
        held = {
            param
            for block, _, covers, _ in self._parts()
            if any(covers) and self.apart(block)
            for param, has in zip(block.params, covers, strict=True)
            if has
        }
        return bool(held) and any(param in held for param in params)

    def flush(self, k: int, visit: int, store: LayerStore, push: Link) -> None:
        """Push what micro-batch `k` has just added, in `visit`, to blocks whose micro-batches are kept apart."""
        if not any(map(self.apart, self.unit.blocks)):
            return
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

    def __init__(self, device: Device, clock: Clock, takers: Takers, numel: int, count: int, name: str) -> None:
        self._device, self._takers, self._owner, self._nbytes = device, takers, name, 4 * numel * count
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
        self._live = [gradient for gradient in self._live if gradient.is_open] + [
            Gradient(unit, buffer, self._takers, apart)
        ]
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
