"""What collectives send between workers, and how long that takes on a network: formulas of gloo's algorithms.

    gather    a ring: N - 1 times everybody hands on a part, in two halves     N - 1 rounds, (N - 1) parts each way
    spread    a binomial tree: in every round whoever has it gives it to one   log2 N rounds, log2 N times the bytes
    exchange  everybody sends to everybody, all at once                        one round, what is meant for the others

Sources: https://github.com/pytorch/gloo, `gloo/allgather.cc`, `broadcast.cc`, `alltoallv.cc`; a test counts at the sockets. A
message is announced, asked for and sent, each with 48 bytes of gloo's own (`gloo/transport/tcp/pair.h`); what TCP and IP add
to that is not counted.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from l2l_core.devices import sleep_until
from l2l_core.trace import format_bytes

FRAME_BYTES = 48  # before every message of gloo


class Traffic(NamedTuple):
    """What a collective is to one of its workers.

    Attributes:
        sent, received: bytes that the collective is about.
        goes, comes: messages in which they travel.
        rounds: how often somebody waits for what has just been sent.
        widest: bytes through the link of the worker that moves most, one way.
    """

    sent: int
    received: int
    messages_sent: int
    messages_received: int
    rounds: int
    busiest_link_bytes: int

    @property
    def wire_sent(self) -> int:
        """Bytes that leave this worker, gloo's own among them: it announces what it sends, and asks for what it receives."""
        return self.sent + FRAME_BYTES * (2 * self.messages_sent + self.messages_received)

    @property
    def wire_received(self) -> int:
        """Bytes that come to this worker, gloo's own among them."""
        return self.received + FRAME_BYTES * (2 * self.messages_received + self.messages_sent)


def all_gather_traffic(nbytes: int, count: int) -> Traffic:
    """Gather so many bytes of each of `count` workers on all of them."""
    moved, messages = (count - 1) * nbytes, 2 * (count - 1)
    return Traffic(moved, moved, messages, messages, count - 1, moved)


def broadcast_traffic(nbytes: int, count: int, source: int, rank: int) -> Traffic:
    """Give so many bytes of the worker `source` to all."""
    rounds = math.ceil(math.log2(count))
    place = (rank - source) % count  # in the tree, of which the source is the root
    # Whoever has it gives it, in round i, to the one 2 ** i places behind
    begins = place.bit_length()
    goes = sum(place + (1 << i) < count for i in range(begins, rounds))
    comes = int(place > 0)
    return Traffic(goes * nbytes, comes * nbytes, goes, comes, rounds, rounds * nbytes)


def all_to_all_traffic(sizes: Sequence[int], rank: int) -> Traffic:
    """Give ``goes[r]`` bytes to each worker r, as all others do."""
    count = len(sizes)
    others = count - 1
    sent, received = sum(sizes) - sizes[rank], sizes[rank] * others
    widest = max(max(sum(sizes) - each, each * others) for each in sizes)
    return Traffic(sent, received, others, others, 1, widest)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Figures of a network, on which every worker has one link that carries both ways at once.

    Args:
        bytes_per_s: of a link, each way.
        latency_s: from sending a message to its receipt.

    Raises:
        ValueError: a bandwidth that is not positive, or a negative latency.
    """

    bytes_per_s: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s={self.bytes_per_s!r}: must be positive; leave it out for no limit")
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise ValueError(f"latency_s={self.latency_s!r}: must be 0 or more seconds")

    def __str__(self) -> str:
        speed = f"{format_bytes(self.bytes_per_s)}/s each way" if math.isfinite(self.bytes_per_s) else "no limit"
        return f"network: {speed}, latency {1e6 * self.latency_s:.3g} us"

    def busy_s(self, traffic: Traffic) -> float:
        """Seconds in which a collective fills the link of whoever moves most."""
        return traffic.busiest_link_bytes / self.bytes_per_s

    def delay_s(self, traffic: Traffic) -> float:
        """Seconds in which nothing is sent, because what was sent has not arrived."""
        return traffic.rounds * self.latency_s


class EmulatedLink:
    """A worker's link to an emulated network: no collective takes less time than it would there.

    What waits is the thread that makes the collective. Those of several threads share the link, in the order of their ends.

    Args:
        network: its figures; without any nothing waits.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._free_s = 0.0  # on the clock of `time.perf_counter`
        self._lock = threading.Lock()

    @contextmanager
    def throttled(self, traffic: Traffic) -> Iterator[None]:
        """Let a block of code, in which a collective is made, take at least as long as that would."""
        began_s = time.perf_counter()
        yield
        with self._lock:
            self._free_s = max(self._free_s, began_s) + self._network.busy_s(traffic)
            until_s = self._free_s + self._network.delay_s(traffic)
        sleep_until(until_s)
