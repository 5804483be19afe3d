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
from l2l_core.batches import RowsOf
from l2l_core.devices import serial_thread
from l2l_core.eps.blocks import Block
from l2l_core.trace import Trace, Worker
from l2l_core.workers.channel import Channel, Meeting
from l2l_core.workers.cuts import Cut
from l2l_core.workers.errors import WorkerError, WorkerLostError, cause_of
from l2l_core.workers.line import Line
from l2l_core.workers.network import Network

T = TypeVar("T")

_CLOSING_S = 30.0  # how long a worker that closes waits for the others


class Crew:
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
        self._line, self._made_group = Line(self.rank, self.count, timeout_s, store, network), made_group
        self.control, self.gathers, self.reduces = (self._channel(ranks) for _ in range(3))
        # A name that no connection had before: the store may be of an earlier round, with word of a worker lost in that
        said = self.control.share((secrets.token_hex(8), self._line.holds_store()), "agree on a name")
        self._line.settle(said[0][0], next((rank for rank, (_, holds) in enumerate(said) if holds), None))
        self.thread, self._ending = serial_thread("gather"), serial_thread("end")
        self.elementwise, self._closed = True, False
        self._ends: list[Future[None]] = []  # where a failure is being told
        self._told = [False, False]  # whether it is, on `gathers` and `reduces`
        self._updated: list[str] | None = None  # what all said that they had updated, once it was told
        self._met: Meeting | None = None  # where what is done together began

    def _channel(self, ranks: list[int]) -> Channel:
        # With gloo whatever the group's own backend is: masters and gradients are on the host
        if self._is_world:
            return Channel(self._line, dist.new_group(ranks, backend="gloo"))
        return Channel(self._line, dist.new_group(ranks, backend="gloo", use_local_synchronization=True))

    @property
    def lost(self) -> WorkerLostError | None:
        """The error that tells of a lost worker, if there is one."""
        return self._line.lost

    # -- together ------------------------------------------------------------------------------------------------------

    @contextmanager
    def together(
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
            channel.open()
        self._ends, self._told, self._updated = [], [False, False], None
        try:
            self._met = self.control.meet(what, facts(), timeout_s)
            self._line.time.agree(partial(self.control.tell, what="compare clocks"))
            yield
        except BaseException as error:
            self.failed(error, ())
            raise

    def failing(self, error: BaseException) -> None:
        """Begin to tell the others of a failure: those who wait for a load from here must not, while updates are undone."""
        if not self._told[0]:
            self._told[0] = True
            self._ends.append(self.thread.submit(self.gathers.end, cause_of(error)))

    def reduces_no_more(self, error: BaseException) -> None:
        """Begin to tell the others that no gradient will come any more; nobody here makes use of `reduces` in this step."""
        if not self._told[1]:
            self._told[1] = True
            # Not on the thread that asks for it: the others may come to hear of it only when that has come to another channel
            self._ends.append(self._ending.submit(self.reduces.end, cause_of(error)))

    def failed(self, error: BaseException, updated: Sequence[str]) -> list[str]:
        """Tell the others of a failure; nothing of this worker is under way any more.

        Args:
            error: what has failed here.
            updated: keys of what holds new weights here all the same.

        Returns:
            The keys of what holds new weights on any worker.
        """
        if self._updated is not None:  # told by whoever was nearer to the failure
            return self._updated
        self.failing(error)
        self.reduces_no_more(error)
        self._updated = list(updated)
        with suppress(WorkerLostError):
            self.control.end(cause_of(error))
            said = self.control.objects(list(updated), "say what is updated")
            self._updated = list(dict.fromkeys(key for keys in said for key in keys))
        for end in self._ends:
            end.exception()
        return self._updated

    def signed(self, trace: Trace) -> Trace:
        """Say in the trace of what is being done together whose it is, and who had to be waited for."""
        assert self._met is not None, "a trace of something that has not begun"
        began_s = self._line.time.of(trace.began_s)
        trace.worker = Worker(self.rank, self.count, began_s, self._met.waited_s, self._met.last)
        return trace

    def every(self, mine: Sequence[T], what: str = "put losses together") -> list[T]:
        """Put everybody's items side by side, worker 0's first; `what` it is for, in words."""
        return [item for items in self.control.share(list(mine), what) for item in items]

    # -- blocks --------------------------------------------------------------------------------------------------------

    def cut_of(self, block: Block) -> Cut:
        """Say who holds what of a block."""
        return Cut.of(block.layout, self.count, self.elementwise)

    def gather_weights(self, channel: Channel, block: Block, every: torch.Tensor) -> None:
        """Gather a block into `every`, (numel of its cut,), in the type of that."""
        cut, mine = self.cut_of(block), block.values.to(every.dtype)
        if cut.even:
            channel.gather(every, mine, f"load {block.key}")
        else:
            self.gather_ranges(channel, every, cut.edges, mine, f"load {block.key}")

    def gather_ranges(
        self, channel: Channel, every: torch.Tensor, edges: Sequence[int], mine: torch.Tensor, what: str
    ) -> None:
        """Gather ranges of unlike sizes: `every` from ``edges[r]`` to ``edges[r + 1]`` is worker r's `mine`."""
        for rank, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
            if start < stop:
                if rank == self.rank:
                    every[start:stop].copy_(mine[: stop - start])
                channel.spread(every[start:stop], rank, what)

    # -- what batches have in common -----------------------------------------------------------------------------------

    def joined(self, counts: Mapping[str, list[int] | None]) -> dict[str, list[int] | None]:
        """Put together what micro-batches count for, by candidate: those of worker 0 first; see `batches/mean.py`."""
        said = self.control.share(dict(counts), "weigh micro-batches")
        unlike = [rank for rank, each in enumerate(said) if each.keys() != said[0].keys()]
        if unlike:
            raise WorkerError(f"the batches of worker 0 and {unlike} differ in their structure", unlike)
        return {name: None if own is None else [n for each in said for n in each[name]] for name, own in counts.items()}

    def rows(self, rows: RowsOf) -> Iterator[RowsOf]:
        """Give rows that all workers look at together to find out what a loss is a mean over: one worker's after another's."""
        for rank in range(self.count):
            batch: Any = rows.batch if self.rank == rank else None
            yield RowsOf(self.control.share(batch, "look at rows")[rank])

    def own(self, every: Sequence[T]) -> list[T]:
        """Choose this worker's own of something that there is for the micro-batches of all, as many for each."""
        count = len(every) // self.count
        return list(every[self.rank * count : (self.rank + 1) * count])

    def first(self, count: int) -> int:
        """Give the number, in the whole batch, of this worker's first micro-batch, where each worker has so many."""
        return self.rank * count

    # -- the end -------------------------------------------------------------------------------------------------------

    def part(self, finish: Callable[[], None]) -> bool:
        """Take leave of the other workers; whether they all came.

        Args:
            finish: what to do together before that.
        """
        try:
            with self.together("close", dict, _CLOSING_S):
                finish()
                self.control.meet("leave")  # nobody pulls down a connection that another one still reads from
        except WorkerError:
            return False
        return True

    def close(self) -> None:
        """Join threads and give process groups up; calling it twice is fine."""
        if self._closed:
            return
        self._closed = True
        self.thread.shutdown(wait=True)
        self._ending.shutdown(wait=True)
        # Groups of some processes are named by their members alone, and the next one of a name that is free again would look for
        # connections of the one before: they end with the default group
        for channel in (self.control, self.gathers, self.reduces) if self._is_world else ():
            channel.close()
        if self._made_group:
            dist.destroy_process_group()
