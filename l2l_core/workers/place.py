"""Where weights are that several workers hold parts of: a load copies from a buffer into which these were gathered.

A gather takes time on the network, so it begins a visit before the load does, on a thread and a channel of its own. Weights
travel in the type in which the device will have them. Besides its part of the layers a worker holds buffers for those whole
layers that are on their way: some ``ahead + 2``, whatever the depth.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from l2l_core.devices import Device, Ledger, Ticket
from l2l_core.eps.blocks import Block, Unit
from l2l_core.trace import Trace
from l2l_core.workers.crew import Crew
from l2l_core.workers.seen import note

_Key = tuple[int, torch.dtype]


class Gathered:
    """Lends blocks that it gathers from all workers.

    Invariant: gathers are begun in the order of `expect` and `lend`, which is the same for all workers.

    Args:
        device: where the loads go, and what makes host memory that they reach at full speed.
        host: gets the bytes of buffers booked.
        crew: the workers.
    """

    def __init__(self, device: Device, host: Ledger, crew: Crew) -> None:
        self._device, self._host, self._crew = device, host, crew
        self._dtype, self._trace = torch.float32, Trace()
        self._free: defaultdict[_Key, deque[tuple[torch.Tensor, Ticket | None]]] = defaultdict(deque)
        self._coming: dict[Block, Future[torch.Tensor]] = {}
        self._lent: defaultdict[Block, list[torch.Tensor]] = defaultdict(list)

    def begin(self, units: Sequence[Unit], dtype: torch.dtype, trace: Trace) -> None:
        self.end()
        self._dtype, self._trace = dtype, trace
        for free in self._free.values():  # loads of the pass before are over, and hold on to their slots
            free.extend([(free.popleft()[0], None) for _ in range(len(free))])

    def expect(self, units: Sequence[Unit]) -> None:
        wanted = dict.fromkeys(block for unit in units for block in unit.blocks)
        for block in [block for block in self._coming if block not in wanted]:
            self._forget(self._coming.pop(block))
        for block in wanted:
            if block not in self._coming:
                self._coming[block] = self._start(block)

    def lend(self, block: Block) -> torch.Tensor:
        coming = self._coming.pop(block, None) or self._start(block)
        buffer = coming.result()
        self._lent[block].append(buffer)
        return buffer[: block.layout.numel]

    def take_back(self, block: Block, load: Ticket | None) -> None:
        self._give_back(self._lent[block].pop(0), load)

    def end(self) -> None:
        coming, self._coming = self._coming, {}
        for each in coming.values():
            self._forget(each)

    def close(self) -> None:
        self.end()
        self._free.clear()

    def _start(self, block: Block) -> Future[torch.Tensor]:
        buffer = self._buffer(self._crew.cut_of(block).numel)
        return self._crew.thread.submit(self._gather, block, buffer)

    def _gather(self, block: Block, buffer: torch.Tensor) -> torch.Tensor:
        met = self._crew.gathers.meet(f"load {block.key}")
        self._crew.gather_weights(self._crew.gathers, block, buffer)
        others = buffer.numel() - self._crew.cut_of(block).size(self._crew.rank)
        note(self._trace, "gather", "gather", block.key, met, others * buffer.itemsize)
        return buffer

    def _forget(self, coming: Future[torch.Tensor]) -> None:
        if coming.exception() is None:  # who wanted it has had its error, or will have it elsewhere
            self._give_back(coming.result())

    def _buffer(self, numel: int) -> torch.Tensor:
        free = self._free[numel, self._dtype]
        if free:
            buffer, load = free.popleft()  # whose load was over longest ago
            if load is not None:
                load.abandon()
            return buffer
        buffer = self._device.host_empty(numel, self._dtype)
        self._host.book("weights", "gathered", buffer.nbytes)
        weakref.finalize(buffer, self._host.release, "weights", "gathered", buffer.nbytes)
        return buffer

    def _give_back(self, buffer: torch.Tensor, load: Ticket | None = None) -> None:
        self._free[buffer.numel(), buffer.dtype].append((buffer, load))
