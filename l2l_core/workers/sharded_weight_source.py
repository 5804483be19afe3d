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
from l2l_core.workers.seen import record_collective
from l2l_core.workers.worker_group import WorkerGroup

_BufferKey = tuple[int, torch.dtype]


class ShardedWeightSource:
    """Lends blocks that it gathers from all workers.

    Invariant: gathers are begun in the order of `expect` and `lend`, which is the same for all workers.

    Args:
        device: where the loads go, and what makes host memory that they reach at full speed.
        host: gets the bytes of buffers booked.
        crew: the workers.
    """

    def __init__(self, device: Device, host: Ledger, group: WorkerGroup) -> None:
        self._device, self._host, self._group = device, host, group
        self._dtype, self._trace = torch.float32, Trace()
        self._free: defaultdict[_BufferKey, deque[tuple[torch.Tensor, Ticket | None]]] = defaultdict(deque)
        self._gathers: dict[Block, Future[torch.Tensor]] = {}
        self._acquired: defaultdict[Block, list[torch.Tensor]] = defaultdict(list)

    def begin(self, units: Sequence[Unit], dtype: torch.dtype, trace: Trace) -> None:
        self.end()
        self._dtype, self._trace = dtype, trace
        for free in self._free.values():  # loads of the pass before are over, and hold on to their slots
            free.extend([(free.popleft()[0], None) for _ in range(len(free))])

    def prefetch(self, units: Sequence[Unit]) -> None:
        wanted = dict.fromkeys(block for unit in units for block in unit.blocks)
        for block in [block for block in self._gathers if block not in wanted]:
            self._discard(self._gathers.pop(block))
        for block in wanted:
            if block not in self._gathers:
                self._gathers[block] = self._start(block)

    def acquire(self, block: Block) -> torch.Tensor:
        coming = self._gathers.pop(block, None) or self._start(block)
        buffer = coming.result()
        self._acquired[block].append(buffer)
        return buffer[: block.layout.numel]

    def release(self, block: Block, load: Ticket | None) -> None:
        self._return_buffer(self._acquired[block].pop(0), load)

    def end(self) -> None:
        coming, self._gathers = self._gathers, {}
        for each in coming.values():
            self._discard(each)

    def close(self) -> None:
        self.end()
        self._free.clear()

    def _start(self, block: Block) -> Future[torch.Tensor]:
        buffer = self._buffer(self._group.shard_layout(block).numel)
        return self._group.thread.submit(self._gather, block, buffer)

    def _gather(self, block: Block, buffer: torch.Tensor) -> torch.Tensor:
        met = self._group.gathers.handshake(f"load {block.key}")
        self._group.gather_weights(self._group.gathers, block, buffer)
        others = buffer.numel() - self._group.shard_layout(block).shard_numel(self._group.rank)
        record_collective(self._trace, "gather", "gather", block.key, met, others * buffer.itemsize)
        return buffer

    def _discard(self, coming: Future[torch.Tensor]) -> None:
        if coming.exception() is None:  # who wanted it has had its error, or will have it elsewhere
            self._return_buffer(coming.result())

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

    def _return_buffer(self, buffer: torch.Tensor, load: Ticket | None = None) -> None:
        self._free[buffer.numel(), buffer.dtype].append((buffer, load))
