"""Traffic of collectives between workers, and its duration on an emulated network: formulas of gloo's algorithms.

    all-gather  a ring: each worker passes on one part per round, in two halves   N - 1 rounds, N - 1 parts each way
    broadcast   a binomial tree: each holder sends to one worker per round        log2 N rounds, log2 N times the bytes
    all-to-all  direct messages between all pairs at once                         one round, the bytes for the others

Sources: https://github.com/pytorch/gloo, `gloo/allgather.cc`, `broadcast.cc`, `alltoallv.cc`; a test counts bytes at the
sockets. gloo announces, requests and sends each message, with a 48-byte header each time (`gloo/transport/tcp/pair.h`). Headers
of TCP and IP are not counted.
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

FRAME_BYTES = 48  # header of a gloo message


class Traffic(NamedTuple):
    """Traffic of a collective at one worker."""

    sent: int  # bytes of payload
    received: int  # bytes of payload
    messages_sent: int
    messages_received: int
    rounds: int  # a round begins when the messages of the previous one have arrived
    busiest_link_bytes: int  # one way, of the worker with the most traffic

    @property
    def wire_sent(self) -> int:
        """Bytes that leave this worker, with gloo's headers of announcements, requests and messages."""
        return self.sent + FRAME_BYTES * (2 * self.messages_sent + self.messages_received)

    @property
    def wire_received(self) -> int:
        """Bytes that reach this worker, with gloo's headers."""
        return self.received + FRAME_BYTES * (2 * self.messages_received + self.messages_sent)


def all_gather_traffic(nbytes: int, count: int) -> Traffic:
    """Return the traffic of gathering `nbytes` of each of `count` workers on all of them."""
    moved, messages = (count - 1) * nbytes, 2 * (count - 1)
    return Traffic(moved, moved, messages, messages, count - 1, moved)


def broadcast_traffic(nbytes: int, count: int, source: int, rank: int) -> Traffic:
    """Return the traffic of sending `nbytes` from the worker `source` to all."""
    rounds = math.ceil(math.log2(count))
    position = (rank - source) % count  # in the tree with the source as its root
    # In round i each holder sends to the worker 2 ** i positions behind it
    sends = sum(position + (1 << i) < count for i in range(position.bit_length(), rounds))
    receives = int(position > 0)
    return Traffic(sends * nbytes, receives * nbytes, sends, receives, rounds, rounds * nbytes)


def all_to_all_traffic(sizes: Sequence[int], rank: int) -> Traffic:
    """Return the traffic of sending ``sizes[r]`` bytes to each worker r from every worker."""
    count = len(sizes)
    others = count - 1
    sent, received = sum(sizes) - sizes[rank], sizes[rank] * others
    busiest = max(max(sum(sizes) - each, each * others) for each in sizes)
    return Traffic(sent, received, others, others, 1, busiest)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Bandwidth and latency of a network in which every worker has one full-duplex link.

    Args:
        bytes_per_s: bandwidth of a link, each way.
        latency_s: seconds from sending a message to its receipt.

    Raises:
        ValueError: a bandwidth that is not positive, or a negative latency.

    Example:
        >>> from l2l_core import Network
        >>> forecast = relay.forecast(batch, workers=4, network=Network(bytes_per_s=1e9, latency_s=1e-4))
        >>> forecast.worker.cluster.count
        4
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
        """Return the seconds for which a collective occupies the busiest link."""
        return traffic.busiest_link_bytes / self.bytes_per_s

    def delay_s(self, traffic: Traffic) -> float:
        """Return the seconds for which a collective waits for messages in flight."""
        return traffic.rounds * self.latency_s


class EmulatedLink:
    """A worker's link to an emulated network, on which no collective finishes earlier than it would on the real one.

    The calling thread sleeps. Collectives of several threads share the link in the order in which they finish.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._free_s = 0.0  # on the clock of `time.perf_counter`
        self._lock = threading.Lock()

    @contextmanager
    def throttled(self, traffic: Traffic) -> Iterator[None]:
        """Extend a block of code that runs a collective to the duration of that collective on the network."""
        began_s = time.perf_counter()
        yield
        with self._lock:
            self._free_s = max(self._free_s, began_s) + self._network.busy_s(traffic)
            until_s = self._free_s + self._network.delay_s(traffic)
        sleep_until(until_s)
