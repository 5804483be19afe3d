"""The link between host and device during a pass: one `Lane` per direction, and `Link`s that send one kind of copy on it.

A lane is a serial resource, so what is sent first stands in the way of what comes next. A layer's weights have a whole
visit's time to arrive; a micro-batch's stash is wanted at the next turn. So weights and gradients *trickle*: they are cut
into pieces, and one piece goes out at each turn, behind the stash.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

from l2l_core.devices import Copy, Device, Ticket
from l2l_core.schedule_rules import chunk_bounds
from l2l_core.trace import Event, Trace


class Lane:
    """One direction of the link: "h2d" or "d2h".

    Args:
        device: does the copying.
        trace: gets one event per copy, or per piece of one.
        name: of the lane.
        pieces: into how many pieces a trickling copy is cut: the number of turns in a visit.
        stalled: entered while compute waits for a copy; None if it goes on meanwhile.
    """

    def __init__(
        self,
        device: Device,
        trace: Trace,
        name: str,
        pieces: int = 1,
        stalled: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._device, self._trace, self.name, self._pieces = device, trace, name, pieces
        self._overlaps, self._while_copying = stalled is None, stalled or nullcontext
        self._chunked_copy: _ChunkedCopy | None = None  # at most one copy: another one sends out the rest of it
        self._owner = threading.get_ident()

    def send(
        self,
        kind: str,
        layer: str,
        copies: Sequence[Copy],
        k: int = -1,
        visit: int = -1,
        slot: int = -1,
        piece: int = 0,
        pieces: int = 1,
    ) -> Ticket:
        """Start copies that belong to `layer`, micro-batch `k` and the visit with that number, as one event; see `Event`."""
        nbytes = sum(target.nbytes for target, _ in copies)
        t0, add, lane = self._trace.began_s, self._trace.add, self.name
        with self._while_copying():
            return self._device.issue(
                lane,
                list(copies),
                lambda a, b: add(
                    Event(lane, kind, a - t0, b - t0, layer, k, nbytes, visit, 0.0, -1, slot, piece, pieces)
                ),
                label=f"{kind} {layer}",
                overlaps=self._overlaps,
            )

    def send_chunked(self, kind: str, layer: str, copies: Sequence[Copy], slot: int = -1) -> Ticket:
        """Start copies that have time; the first piece goes out at once, the others one per `turn`."""
        self.flush()
        pieces = _split_copies(copies, self._pieces)
        if len(pieces) < 2:
            return self.send(kind, layer, copies, slot=slot)
        self._chunked_copy = _ChunkedCopy(self, kind, layer, pieces, slot)
        self.send_chunk()
        return self._chunked_copy

    def send_chunk(self) -> None:
        """A micro-batch has had its turn: let one piece follow."""
        if self._chunked_copy is not None and self._chunked_copy.send_next():
            self._chunked_copy = None

    def flush(self) -> None:
        """Send what still waits."""
        while self._chunked_copy is not None:
            self.send_chunk()

    def cancel(self, copy: _ChunkedCopy) -> None:
        """Give up what of `trickle` still waits."""
        if copy is self._chunked_copy:
            copy.cancel()
            self._chunked_copy = None

    @property
    def on_owner_thread(self) -> bool:
        """Whether the calling thread is the one that sends on this lane."""
        return threading.get_ident() == self._owner


class _ChunkedCopy:
    """A copy that goes out in pieces. Its ticket may be joined by another thread before the last piece has gone out."""

    def __init__(self, lane: Lane, kind: str, layer: str, pieces: Sequence[list[Copy]], slot: int) -> None:
        self._lane, self._kind, self._layer, self._slot = lane, kind, layer, slot
        self._pieces, self._count = deque(pieces), len(pieces)
        self._tickets: list[Ticket] = []
        self._all_sent = threading.Event()

    def send_next(self) -> bool:
        """Send the next piece; whether it was the last one."""
        piece = self._count - len(self._pieces)
        self._tickets.append(
            self._lane.send(self._kind, self._layer, self._pieces[0], slot=self._slot, piece=piece, pieces=self._count)
        )
        self._pieces.popleft()  # only now: if it could not be sent, whoever waits is told so
        if not self._pieces:
            self._all_sent.set()
        return not self._pieces

    def cancel(self) -> None:
        """Send no more; whoever waits wakes, finds pieces left, and is told so."""
        self._all_sent.set()

    def wait(self) -> None:
        self._wait_until_sent()
        for ticket in self._tickets:
            ticket.wait()

    def join(self) -> None:
        self._wait_until_sent()
        for ticket in self._tickets:
            ticket.join()

    def abandon(self) -> None:
        self._lane.cancel(self)
        for ticket in self._tickets:
            ticket.abandon()

    def _wait_until_sent(self) -> None:
        if self._lane.on_owner_thread and not self._all_sent.is_set():
            self._lane.flush()  # nobody else would send the rest
        self._all_sent.wait()
        if self._pieces:
            raise RuntimeError(f"the {self._kind} of {self._layer} was given up: the step failed")


class CountedLane:
    """Sends copies of one kind on a lane, and counts their bytes."""

    def __init__(self, lane: Lane, kind: str) -> None:
        self.lane, self.kind = lane, kind
        self.nbytes = 0

    def __call__(self, layer: str, copies: Sequence[Copy], k: int = -1, visit: int = -1) -> Ticket:
        """Start copies that belong to `layer`, and to micro-batch `k` in `visit`."""
        self.nbytes += sum(target.nbytes for target, _ in copies)
        return self.lane.send(self.kind, layer, copies, k, visit)

    def send_chunked(self, layer: str, copies: Sequence[Copy], slot: int = -1) -> Ticket:
        """Start copies of flat tensors that belong to `layer` and may take a visit's time; weights go to that slot."""
        self.nbytes += sum(target.nbytes for target, _ in copies)
        return self.lane.send_chunked(self.kind, layer, copies, slot)


def _split_copies(copies: Sequence[Copy], pieces: int) -> list[list[Copy]]:
    """Cut `copies` of flat tensors of one type into lists of about the same number of bytes."""
    if not copies or pieces < 2:
        return []
    edges = chunk_bounds(sum(target.numel() for target, _ in copies), copies[0][0].element_size(), pieces)
    return [_slice_copies(copies, start, stop) for start, stop in pairwise(edges)]


def _slice_copies(copies: Sequence[Copy], start: int, stop: int) -> list[Copy]:
    """Take elements `start` to `stop` of `copies`, counted through all of them."""
    parts, passed = [], 0
    for target, source in copies:
        a, b = max(start - passed, 0), min(stop - passed, target.numel())
        if a < b:
            parts.append((target[a:b], source[a:b]))
        passed += target.numel()
    return parts
