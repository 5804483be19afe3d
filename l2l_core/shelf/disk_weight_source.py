"""Weight source of a shelf: reads weights into buffers, from which loads copy.

Reads run ahead of loads as far as the pool has room. They skip the optimizer state, which lies behind the weights in a record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from l2l_core.devices import Ticket
from l2l_core.eps.blocks import Block, Unit
from l2l_core.shelf.buffer_pool import BufferPool, PoolBuffer
from l2l_core.shelf.direct_io import round_to_pages
from l2l_core.shelf.record_store import RecordStore
from l2l_core.trace import Trace

_Read = tuple[PoolBuffer, "Future[None]"]


class DiskWeightSource:
    """Weight source that reads blocks from records.

    Args:
        records: records of all blocks.
        pool: buffers for weights, with room for all concurrent loads.
        casts: loads cannot cast, so that this source converts weights to the type of the device.
    """

    def __init__(self, records: RecordStore, pool: BufferPool, casts: bool) -> None:
        self._records, self._pool, self._casts = records, pool, casts
        self._dtype = torch.float32
        self._reads: dict[Block, _Read] = {}
        self._acquired: defaultdict[Block, list[PoolBuffer]] = defaultdict(list)

    def begin(self, units: Sequence[Unit], dtype: torch.dtype, trace: Trace) -> None:
        self.end()
        self._dtype, self._records.trace = dtype, trace

    def prefetch(self, units: Sequence[Unit]) -> None:
        wanted = dict.fromkeys(block for unit in units for block in unit.blocks)
        for block in [block for block in self._reads if block not in wanted]:
            self._discard(block)
        for block in wanted:
            if block not in self._reads and (read := self._start(block)) is not None:
                self._reads[block] = read

    def acquire(self, block: Block) -> torch.Tensor:
        read = self._reads.pop(block, None) or self._start(block)
        while read is None and self._reads:  # free buffers of reads ahead, latest first
            self._discard(next(reversed(self._reads)))
            read = self._start(block)
        if read is None:
            raise ValueError(
                f"memory_bytes of the shelf leaves no room for the weights of {block.key} ({4 * block.layout.numel:,} bytes) "
                f"beside {sum(map(len, self._acquired.values()))} blocks in loading: raise memory_bytes, or load fewer layers "
                "ahead (RelayConfig(ahead=...)). The old step is kept"
            )
        buffer, done = read
        try:
            done.result()
        except BaseException:
            self._pool.release(buffer)
            raise
        self._acquired[block].append(buffer)
        dtype = self._dtype if self._casts else torch.float32
        return buffer.flat[: dtype.itemsize * block.layout.numel].view(dtype)

    def release(self, block: Block, load: Ticket | None) -> None:
        self._pool.release(self._acquired[block].pop(0), load)

    def end(self) -> None:
        for block in list(self._reads):
            self._discard(block)
        for buffers in self._acquired.values():  # not empty after a pass that has failed
            for buffer in buffers:
                self._pool.release(buffer)
        self._acquired.clear()

    def close(self) -> None:
        self.end()

    def _start(self, block: Block) -> _Read | None:
        """Start to read a block's weights, or return None if there is no room."""
        pool, numel = self._pool, block.layout.numel
        raw = pool.acquire(round_to_pages(4 * numel))
        if raw is None or not self._casts or self._dtype == torch.float32:
            return None if raw is None else (raw, self._records.read(block, raw.flat))
        cast = pool.acquire(round_to_pages(self._dtype.itemsize * numel))
        if cast is None:
            pool.release(raw)
            return None

        def convert() -> None:
            target = cast.flat[: self._dtype.itemsize * numel].view(self._dtype)
            target.copy_(raw.flat[: 4 * numel].view(torch.float32))

        done = self._records.read(block, raw.flat, convert)
        done.add_done_callback(lambda _: pool.release(raw))  # also after an error
        return cast, done

    def _discard(self, block: Block) -> None:
        buffer, done = self._reads.pop(block)
        done.exception()  # an error is raised by another call
        self._pool.release(buffer)
