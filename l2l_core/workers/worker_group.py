"""One worker's connection to the others: joint operations, agreement on failures, and gathers of blocks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from l2l_core._torch import default_store
from l2l_core.batches import RowsOfBatch
from l2l_core.devices import serial_executor
from l2l_core.eps.blocks import Block
from l2l_core.trace import Trace, WorkerInfo
from l2l_core.workers.channel import Channel, Handshake
from l2l_core.workers.health_monitor import HealthMonitor, WorkerError, WorkerLostError, cause_of
from l2l_core.workers.network import Network
from l2l_core.workers.shard_layout import ShardLayout

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 30.0  # time for which a closing worker waits for the others


class WorkerGroup:
    """The workers of a relay, connected by three channels: `control` for the training thread, `gathers` and `reduces`.

    Invariant: between two calls of the relay all workers have issued the same collectives, unless one is lost.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, made_group: bool, network: Network) -> None:
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        store = default_store()
        self._is_world = len(ranks) == dist.get_world_size()
        self._monitor, self._made_group = HealthMonitor(self.rank, self.count, timeout_s, store, network), made_group
        self._channels = self.control, self.gathers, self.reduces = [self._channel(ranks) for _ in range(3)]
        # A new name: the store may hold the report of a worker lost in an earlier round
        offer = (secrets.token_hex(8), self._monitor.holds_store(), torch.initial_seed())
        offers = self.control.all_gather_object(offer, "agree on a name")
        self._monitor.name, _, self.initial_seed = offers[0]
        self._monitor.holder = next((rank for rank, (_, holds, _) in enumerate(offers) if holds), None)
        self.thread, self._failure_thread = serial_executor("gather"), serial_executor("end")
        self.elementwise, self._closed = True, False
        self._announcements: list[Future[None]] = []  # reports of a failure, in progress
        self._announced = [False, False]  # whether a report has begun, on `gathers` and `reduces`
        self._updated: list[str] | None = None  # keys updated on any worker, once a failure is agreed on
        self._last_handshake: Handshake | None = None  # at the start of the present joint operation

    def _channel(self, ranks: list[int]) -> Channel:
        # Always gloo: masters and gradients are on the host
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=not self._is_world)
        assert isinstance(group, dist.ProcessGroup)
        return Channel(self._monitor, group)

    @property
    def lost(self) -> WorkerLostError | None:
        """The error of a lost worker, or None."""
        return self._monitor.lost

    # -- joint operations ------------------------------------------------------------------------------------------------------

    @contextmanager
    def synchronized(
        self, what: str, facts: Callable[[], Mapping[str, str]], timeout_s: float | None = None
    ) -> Iterator[None]:
        """Run a block of code on all workers; an error in it on one of them raises on all.

        `what` is the operation, as a verb phrase. `facts` returns the values that must be equal, and may raise. `timeout_s` is
        for the wait at the start.

        Raises:
            WorkerError: a worker runs another operation, differs in a fact, has failed or is lost.
        """
        for channel in self._channels:
            channel.reset()
        self._announcements, self._announced, self._updated = [], [False, False], None
        try:
            self._last_handshake = self.control.handshake(what, facts(), timeout_s)
            self._monitor.clock.synchronize(partial(self.control.all_gather_small, what="compare clocks"))
            yield
        except BaseException as error:
            self.agree_on_failure(error, ())
            raise

    def announce_failure(self, error: BaseException) -> None:
        """Report a failure on `gathers` in the background, so that no worker waits for a gather while updates are undone."""
        if not self._announced[0]:
            self._announced[0] = True
            self._announcements.append(self.thread.submit(self.gathers.announce_failure, cause_of(error)))

    def stop_reducing(self, error: BaseException) -> None:
        """Report a failure on `reduces` in the background; this worker no longer uses that channel in this step."""
        if not self._announced[1]:
            self._announced[1] = True
            # On another thread: the others may reach `reduces` only after the calling thread has reached another channel
            self._announcements.append(self._failure_thread.submit(self.reduces.announce_failure, cause_of(error)))

    def agree_on_failure(self, error: BaseException, updated: Sequence[str]) -> list[str]:
        """Report a failure to the others, once no operation of this worker is in progress.

        Returns:
            Keys of the layers that keep new weights on any worker; `updated` are those of this one.
        """
        if self._updated is not None:  # an inner call has reported it
            return self._updated
        self.announce_failure(error)
        self.stop_reducing(error)
        self._updated = list(updated)
        with suppress(WorkerLostError):
            self.control.announce_failure(cause_of(error))
            by_worker = self.control.all_gather_unchecked(list(updated), "report updated layers")
            self._updated = list(dict.fromkeys(key for keys in by_worker for key in keys))
        for announcement in self._announcements:
            announcement.exception()
        return self._updated

    def sign_trace(self, trace: Trace) -> Trace:
        """Add this worker, and the wait at the start of the joint operation, to a trace; return the trace."""
        handshake = self._last_handshake
        assert handshake is not None, "called outside of `synchronized`"
        began_s = self._monitor.clock.from_local(trace.began_s)
        trace.worker = WorkerInfo(self.rank, self.count, began_s, handshake.waited_s, handshake.last)
        return trace

    def gather_items(self, items: Sequence[T], what: str = "gather losses") -> list[T]:
        """Concatenate the items of all workers, worker 0 first; `what` is the purpose, for messages."""
        return [item for own in self.control.all_gather_object(list(items), what) for item in own]

    # -- blocks --------------------------------------------------------------------------------------------------------

    def shard_layout(self, block: Block) -> ShardLayout:
        """Return the ranges of a block that the workers hold."""
        return ShardLayout.of(block.layout, self.count, self.elementwise)

    def gather_weights(self, channel: Channel, block: Block, shard: torch.Tensor, output: torch.Tensor) -> None:
        """Gather a block into `output`, (numel of its shard layout,), in the type of `output`; `shard` is this worker's part."""
        layout, shard = self.shard_layout(block), shard.to(output.dtype)
        if layout.uniform_numel:
            channel.all_gather(output, shard, f"load {block.key}")
        else:
            self.gather_ranges(channel, output, layout.edges, shard, f"load {block.key}")

    def gather_ranges(
        self, channel: Channel, output: torch.Tensor, edges: Sequence[int], shard: torch.Tensor, what: str
    ) -> None:
        """Gather ranges of different sizes: `output` from ``edges[r]`` to ``edges[r + 1]`` is the shard of worker r."""
        for rank, (start, stop) in enumerate(pairwise(edges)):
            if start < stop:
                if rank == self.rank:
                    output[start:stop].copy_(shard[: stop - start])
                channel.broadcast(output[start:stop], rank, what)

    # -- batches -----------------------------------------------------------------------------------

    def gather_counts(self, counts: Mapping[str, list[int] | None]) -> dict[str, list[int] | None]:
        """Concatenate the counts of all workers' micro-batches by candidate, worker 0 first; see `batches/loss_normaliser.py`."""
        by_worker = self.control.all_gather_object(dict(counts), "weigh micro-batches")
        unlike = [rank for rank, other in enumerate(by_worker) if other.keys() != by_worker[0].keys()]
        if unlike:
            raise WorkerError(f"the batches of worker 0 and {unlike} differ in their structure", unlike)
        return {
            name: None if own is None else [count for other in by_worker for count in other[name]]
            for name, own in counts.items()
        }

    def gather_rows(self, rows: RowsOfBatch) -> Iterator[RowsOfBatch]:
        """Yield the rows of each worker in turn, from which all workers determine the normaliser of the loss."""
        for rank in range(self.count):
            batch: Any = rows.batch if self.rank == rank else None
            yield rows.of(self.control.all_gather_object(batch, "compare rows")[rank])

    def select_own(self, every: Sequence[T]) -> list[T]:
        """Return this worker's entries of a sequence with one entry per micro-batch of the whole batch."""
        count = len(every) // self.count
        return list(every[self.rank * count : (self.rank + 1) * count])

    # -- the end -------------------------------------------------------------------------------------------------------

    def leave(self, finish: Callable[[], None]) -> None:
        """Run `finish` jointly and wait until every worker has done so, unless one does not take part."""
        with suppress(WorkerError), self.synchronized("close", dict, _CLOSE_TIMEOUT_S):
            finish()
            self.control.handshake("leave")  # no connection closes while another worker still reads from it

    def close(self) -> None:
        """Join threads and destroy process groups; a second call has no effect."""
        if self._closed:
            return
        self._closed = True
        self.thread.shutdown(wait=True)
        self._failure_thread.shutdown(wait=True)
        # Groups of some processes are named after their members alone, and a new group of the same name would use connections
        # of the old one: they are destroyed with the default group
        for channel in self._channels if self._is_world else ():
            channel.close()
        if self._made_group:
            dist.destroy_process_group()
