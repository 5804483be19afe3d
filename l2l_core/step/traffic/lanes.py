"""The link between host and device: a `Lane` per direction.

A lane is serial: a copy delays every later one. A layer's weights have a whole visit to arrive, but a micro-batch's stash is
needed at the next turn. So weights and gradients are sent in chunks, one per turn, behind the stash.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise

from l2l_core.devices import Copy, Device, Ticket
from l2l_core.schedule_rules import chunk_bounds
from l2l_core.trace import Event, Trace


class Lane:
    """One direction of the link: "h2d" or "d2h"."""

    def __init__(
        self,
        device: Device,
        trace: Trace,
        name: str,
        pieces: int = 1,  # of a chunked copy, one per turn of a visit
        stalled: Callable[[], AbstractContextManager[None]] | None = None,  # None if copies overlap with compute
    ) -> None:
        self._device, self._trace, self.name, self._pieces = device, trace, name, pieces
        self._overlaps, self._while_copying = stalled is None, stalled or nullcontext
        self._chunked_copy: _ChunkedCopy | None = None  # at most one: the next one flushes it
        self.owner = threading.get_ident()  # the thread that sends on this lane

    def send(
        self, kind: str, layer: str, copies: Sequence[Copy], k: int = -1, visit: int = -1, **of_piece: int
    ) -> Ticket:
        """Start copies as one event; see `Event` for the arguments, with `slot`, `piece` and `pieces` of a chunked copy."""
        nbytes = sum(target.nbytes for target, _ in copies)
        t0, add, lane = self._trace.began_s, self._trace.add, self.name
        with self._while_copying():
            return self._device.issue(
                lane,
                list(copies),
                lambda a, b: add(Event(lane, kind, a - t0, b - t0, layer, k, nbytes, visit, **of_piece)),
                label=f"{kind} {layer}",
                overlaps=self._overlaps,
            )

    def send_chunked(self, kind: str, layer: str, copies: Sequence[Copy], slot: int = -1) -> Ticket:
        """Start a chunked copy of flat tensors: the first piece is sent at once, the others one per `send_chunk`."""
        self.flush()
        pieces = _split_copies(copies, self._pieces)
        if len(pieces) < 2:
            return self.send(kind, layer, copies, slot=slot)
        self._chunked_copy = _ChunkedCopy(self, kind, layer, pieces, slot)
        self.send_chunk()
        return self._chunked_copy

    def send_chunk(self) -> None:
        """Send the next piece of the chunked copy, if any."""
        if self._chunked_copy is not None and self._chunked_copy.send_next():
            self._chunked_copy = None

    def flush(self) -> None:
        """Send all remaining pieces."""
        while self._chunked_copy is not None:
            self.send_chunk()

    def cancel(self, copy: _ChunkedCopy) -> None:
        """Drop the remaining pieces of a chunked copy; threads that wait for it raise RuntimeError."""
        if copy is self._chunked_copy:
            copy._all_sent.set()
            self._chunked_copy = None


class _ChunkedCopy:
    """Ticket of a copy sent in pieces. Another thread may join it before the last piece is sent."""

    def __init__(self, lane: Lane, kind: str, layer: str, pieces: Sequence[list[Copy]], slot: int) -> None:
        self._lane, self._name, self._pieces = lane, f"{kind} of {layer}", deque(pieces)
        self._send = partial(lane.send, kind, layer, slot=slot, pieces=len(pieces))
        self._tickets: list[Ticket] = []
        self._all_sent = threading.Event()

    def send_next(self) -> bool:
        """Send the next piece; return whether it was the last one."""
        self._tickets.append(self._send(self._pieces[0], piece=len(self._tickets)))
        self._pieces.popleft()  # last: after an error in `send`, threads that wait must find a piece left
        if not self._pieces:
            self._all_sent.set()
        return not self._pieces

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
        if threading.get_ident() == self._lane.owner and not self._all_sent.is_set():
            self._lane.flush()  # no other thread sends the rest
        self._all_sent.wait()
        if self._pieces:
            raise RuntimeError(f"the {self._name} was cancelled because the step failed")


def _split_copies(copies: Sequence[Copy], pieces: int) -> list[list[Copy]]:
    """Split copies of flat tensors of one dtype into pieces of about the same number of bytes."""
    if not copies or pieces < 2:
        return []
    edges = chunk_bounds(sum(target.numel() for target, _ in copies), copies[0][0].element_size(), pieces)
    return [_slice_copies(copies, start, stop) for start, stop in pairwise(edges)]


def _slice_copies(copies: Sequence[Copy], start: int, stop: int) -> list[Copy]:
    """Return elements `start` to `stop` of `copies`, counted through all of them."""
    parts, passed = [], 0
    for target, source in copies:
        a, b = max(start - passed, 0), min(stop - passed, target.numel())
        if a < b:
            parts.append((target[a:b], source[a:b]))
        passed += target.numel()
    return parts
