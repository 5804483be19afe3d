"""The workers as one of them sees them: who they are, what they agree on, and how a step that fails on one fails on all."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from l2l_core._torch import default_store
from l2l_core.batches import BatchRows
from l2l_core.devices import serial_executor
from l2l_core.eps.blocks import Block
from l2l_core.trace import Trace, WorkerInfo
from l2l_core.workers.channel import Channel, Handshake
from l2l_core.workers.errors import WorkerError, WorkerLostError, cause_of
from l2l_core.workers.health_monitor import HealthMonitor
from l2l_core.workers.network import Network
from l2l_core.workers.shard_layout import ShardLayout

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 30.0  # how long a worker that closes waits for the others


class WorkerGroup:
    """One worker's view of all of them. Three channels: `control` for the thread that trains, `gathers`, `reduces`.

    Invariant: between two verbs of the relay all workers have had the same collectives, unless one is lost.

    Args:
        group: the workers, in the order of their ranks.
        timeout_s: how long to wait for another one at most, in seconds.
        made_group: whether `close` ends the process group too.
        network: that is emulated.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, made_group: bool, network: Network) -> None:
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        store = default_store()
        self._is_world = len(ranks) == dist.get_world_size()
        self._monitor, self._made_group = HealthMonitor(self.rank, self.count, timeout_s, store, network), made_group
        self.control, self.gathers, self.reduces = (self._channel(ranks) for _ in range(3))
        # A name that no connection had before: the store may be of an earlier round, with word of a worker lost in that
        said = self.control.all_gather_object((secrets.token_hex(8), self._monitor.holds_store()), "agree on a name")
        self._monitor.configure(said[0][0], next((rank for rank, (_, holds) in enumerate(said) if holds), None))
        self.thread, self._failure_thread = serial_executor("gather"), serial_executor("end")
        self.elementwise, self._closed = True, False
        self._announcements: list[Future[None]] = []  # where a failure is being told
        self._announced = [False, False]  # whether it is, on `gathers` and `reduces`
        self._updated: list[str] | None = None  # what all said that they had updated, once it was told
        self._last_handshake: Handshake | None = None  # where what is done together began

    def _channel(self, ranks: list[int]) -> Channel:
        # With gloo whatever the group's own backend is: masters and gradients are on the host
        if self._is_world:
            return Channel(self._monitor, dist.new_group(ranks, backend="gloo"))
        return Channel(self._monitor, dist.new_group(ranks, backend="gloo", use_local_synchronization=True))

    @property
    def lost(self) -> WorkerLostError | None:
        """The error that tells of a lost worker, if there is one."""
        return self._monitor.lost

    # -- together ------------------------------------------------------------------------------------------------------

    @contextmanager
    def synchronized(
        self, what: str, facts: Callable[[], Mapping[str, str]], timeout_s: float | None = None
    ) -> Iterator[None]:
        """Do something with all workers: what fails in the block on one of them raises on all.

        Args:
            what: in words.
            facts: gives what must be the same for all, by name; may fail.
            timeout_s: how long to wait for the others to begin; default that of the line.

        Raises:
            WorkerError: a worker does something else, differs in a fact, has failed or is lost.
        """
        for channel in (self.control, self.gathers, self.reduces):
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
        """Begin to tell the others of a failure: those who wait for a load from here must not, while updates are undone."""
        if not self._announced[0]:
            self._announced[0] = True
            self._announcements.append(self.thread.submit(self.gathers.announce_failure, cause_of(error)))

    def stop_reducing(self, error: BaseException) -> None:
        """Begin to tell the others that no gradient will come any more; nobody here makes use of `reduces` in this step."""
        if not self._announced[1]:
            self._announced[1] = True
            # Not on the thread that asks for it: the others may come to hear of it only when that has come to another channel
            self._announcements.append(self._failure_thread.submit(self.reduces.announce_failure, cause_of(error)))

    def agree_on_failure(self, error: BaseException, updated: Sequence[str]) -> list[str]:
        """Tell the others of a failure; nothing of this worker is under way any more.

        Args:
            error: what has failed here.
            updated: keys of what holds new weights here all the same.

        Returns:
            The keys of what holds new weights on any worker.
        """
        if self._updated is not None:  # told by whoever was nearer to the failure
            return self._updated
        self.announce_failure(error)
        self.stop_reducing(error)
        self._updated = list(updated)
        with suppress(WorkerLostError):
            self.control.announce_failure(cause_of(error))
            said = self.control.all_gather_unchecked(list(updated), "say what is updated")
            self._updated = list(dict.fromkeys(key for keys in said for key in keys))
        for end in self._announcements:
            end.exception()
        return self._updated

    def sign_trace(self, trace: Trace) -> Trace:
        """Say in the trace of what is being done together whose it is, and who had to be waited for."""
        assert self._last_handshake is not None, "a trace of something that has not begun"
        began_s = self._monitor.clock.from_local(trace.began_s)
        trace.worker = WorkerInfo(
            self.rank, self.count, began_s, self._last_handshake.waited_s, self._last_handshake.last
        )
        return trace

    def gather_items(self, mine: Sequence[T], what: str = "put losses together") -> list[T]:
        """Put everybody's items side by side, worker 0's first; `what` it is for, in words."""
        return [item for items in self.control.all_gather_object(list(mine), what) for item in items]

    # -- blocks --------------------------------------------------------------------------------------------------------

    def shard_layout(self, block: Block) -> ShardLayout:
        """Say who holds what of a block."""
        return ShardLayout.of(block.layout, self.count, self.elementwise)

    def gather_weights(self, channel: Channel, block: Block, output: torch.Tensor) -> None:
        """Gather a block into `every`, (numel of its cut,), in the type of that."""
        cut, mine = self.shard_layout(block), block.values.to(output.dtype)
        if cut.uniform_numel:
            channel.all_gather(output, mine, f"load {block.key}")
        else:
            self.gather_ranges(channel, output, cut.edges, mine, f"load {block.key}")

    def gather_ranges(
        self, channel: Channel, output: torch.Tensor, edges: Sequence[int], shard: torch.Tensor, what: str
    ) -> None:
        """Gather ranges of unlike sizes: `every` from ``edges[r]`` to ``edges[r + 1]`` is worker r's `mine`."""
        for rank, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
            if start < stop:
                if rank == self.rank:
                    output[start:stop].copy_(shard[: stop - start])
                channel.broadcast(output[start:stop], rank, what)

    # -- what batches have in common -----------------------------------------------------------------------------------

    def gather_counts(self, counts: Mapping[str, list[int] | None]) -> dict[str, list[int] | None]:
        """Put together what micro-batches count for, by candidate: those of worker 0 first; see `batches/loss_normaliser.py`."""
        said = self.control.all_gather_object(dict(counts), "weigh micro-batches")
        unlike = [rank for rank, each in enumerate(said) if each.keys() != said[0].keys()]
        if unlike:
            raise WorkerError(f"the batches of worker 0 and {unlike} differ in their structure", unlike)
        return {name: None if own is None else [n for each in said for n in each[name]] for name, own in counts.items()}

    def gather_rows(self, rows: BatchRows) -> Iterator[BatchRows]:
        """Give rows that all workers look at together to find out what a loss is a mean over: one worker's after another's."""
        for rank in range(self.count):
            batch: Any = rows.batch if self.rank == rank else None
            yield BatchRows(self.control.all_gather_object(batch, "look at rows")[rank])

    def select_own(self, every: Sequence[T]) -> list[T]:
        """Choose this worker's own of something that there is for the micro-batches of all, as many for each."""
        count = len(every) // self.count
        return list(every[self.rank * count : (self.rank + 1) * count])

    def first_micro_batch(self, count: int) -> int:
        """Give the number, in the whole batch, of this worker's first micro-batch, where each worker has so many."""
        return self.rank * count

    # -- the end -------------------------------------------------------------------------------------------------------

    def leave(self, finish: Callable[[], None]) -> bool:
        """Take leave of the other workers; whether they all came.

        Args:
            finish: what to do together before that.
        """
        try:
            with self.synchronized("close", dict, _CLOSE_TIMEOUT_S):
                finish()
                self.control.handshake("leave")  # nobody pulls down a connection that another one still reads from
        except WorkerError:
            return False
        return True

    def close(self) -> None:
        """Join threads and give process groups up; calling it twice is fine."""
        if self._closed:
            return
        self._closed = True
        self.thread.shutdown(wait=True)
        self._failure_thread.shutdown(wait=True)
        # Groups of some processes are named by their members alone, and the next one of a name that is free again would look for
        # connections of the one before: they end with the default group
        for channel in (self.control, self.gathers, self.reduces) if self._is_world else ():
            channel.close()
        if self._made_group:
            dist.destroy_process_group()
