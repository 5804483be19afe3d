"""Weight source of a sharded model: gathers a block from all workers into a host buffer.

Gathers run ahead of loads, on a separate channel and thread, and send weights in the type that the device uses. Besides its
shards a worker holds buffers for about ``ahead + 2`` whole layers, independent of the depth of the model. Frozen parameters that
keep their dtypes are whole on every worker, and are not gathered.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

from l2l_core.devices import Device, Ledger, Ticket
from l2l_core.eps import WeightSource
from l2l_core.eps.blocks import Block, Unit
from l2l_core.trace import Trace
from l2l_core.workers.channel import record_collective
from l2l_core.workers.health_monitor import cause_of
from l2l_core.workers.worker_group import WorkerGroup

LeaseShard = Callable[[Block, Trace], AbstractContextManager[torch.Tensor]]


def lease_master(block: Block, trace: Trace) -> AbstractContextManager[torch.Tensor]:
    """Lend this worker's shard of a block in memory; a `LeaseShard`."""
    return nullcontext(block.values)


class ShardedWeightSource(WeightSource):
    """Weight source that gathers blocks from all workers; `lease_shard` lends this worker's shards, on the thread for gathers.

    Invariant: gathers start in the order of `prefetch` and `acquire` calls, which is the same on all workers.
    """

    reads_ahead = True

    def __init__(
        self, device: Device, host: Ledger, group: WorkerGroup, lease_shard: LeaseShard = lease_master
    ) -> None:
        self._device, self._host, self._group, self._lease_shard = device, host, group, lease_shard
        self._dtype, self._trace = torch.float32, Trace()
        self._free: defaultdict[tuple[int, torch.dtype], deque[tuple[torch.Tensor, Ticket | None]]] = defaultdict(deque)
        self._gathers: dict[Block, Future[torch.Tensor]] = {}
        self._acquired: defaultdict[Block, list[torch.Tensor]] = defaultdict(list)

    def begin(self, units: Sequence[Unit], dtype: torch.dtype, trace: Trace) -> None:
        self.end()
        self._dtype, self._trace = dtype, trace
        for key in [key for key in self._free if key[1] != dtype]:  # of a pass in another precision
            del self._free[key]
        for free in self._free.values():  # the loads of the last pass are complete: release their slots
            free.extend([(free.popleft()[0], None) for _ in range(len(free))])

    def prefetch(self, units: Sequence[Unit]) -> None:
        wanted = dict.fromkeys(block for unit in units for block in unit.blocks if not block.in_bytes)
        for block in [block for block in self._gathers if block not in wanted]:
            self._discard(self._gathers.pop(block))
        for block in wanted:
            if block not in self._gathers:
                self._gathers[block] = self._start(block)

    def acquire(self, block: Block) -> torch.Tensor:
        if block.in_bytes:
            return super().acquire(block)
        gather = self._gathers.pop(block, None) or self._start(block)
        buffer = gather.result()
        self._acquired[block].append(buffer)
        return buffer[: block.layout.numel]

    def release(self, block: Block, load: Ticket | None) -> None:
        if not block.in_bytes:
            self._return_buffer(self._acquired[block].pop(0), load)

    def end(self) -> None:
        gathers, self._gathers = self._gathers, {}
        for gather in gathers.values():
            self._discard(gather)

    def close(self) -> None:
        self.end()
        self._free.clear()

    def _start(self, block: Block) -> Future[torch.Tensor]:
        buffer = self._buffer(self._group.shard_layout(block).numel)
        return self._group.thread.submit(self._gather, block, buffer)

    def _gather(self, block: Block, buffer: torch.Tensor) -> torch.Tensor:
        with ExitStack() as stack:
            try:
                shard = stack.enter_context(self._lease_shard(block, self._trace))
            except BaseException as error:  # later gathers of this thread must not meet those of other blocks
                self._group.gathers.announce_failure(cause_of(error))
                raise
            handshake = self._group.gathers.handshake(f"load {block.key}")
            self._group.gather_weights(self._group.gathers, block, shard, buffer)
        received = buffer.numel() - self._group.shard_layout(block).shard_numel(self._group.rank)
        record_collective(self._trace, "gather", "gather", block.key, handshake, received * buffer.itemsize)
        return buffer

    def _discard(self, gather: Future[torch.Tensor]) -> None:
        if gather.exception() is None:  # an error is raised by another call
            self._return_buffer(gather.result())

    def _buffer(self, numel: int) -> torch.Tensor:
        free = self._free[numel, self._dtype]
        if free:
            buffer, load = free.popleft()  # the one with the oldest load
            if load is not None:
                load.abandon()
            return buffer
        buffer = self._device.host_empty(numel, self._dtype)
        self._host.book("weights", "gathered", buffer.nbytes)
        weakref.finalize(buffer, self._host.release, "weights", "gathered", buffer.nbytes)
        return buffer

    def _return_buffer(self, buffer: torch.Tensor, load: Ticket | None = None) -> None:
        self._free[buffer.numel(), buffer.dtype].append((buffer, load))
