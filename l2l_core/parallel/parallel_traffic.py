"""Bytes that ranks send: counted by the kernel at their sockets, and foreseen by closed formulas of collectives.

Formulas for p ranks and n bytes, means over ranks. gloo sends more than they state: 48 bytes of headers, three times per
message, and a reduce-scatter is an all-reduce there.

    all-reduce                       2 (p-1)/p n     a ring: reduce-scatter, then all-gather
    all-gather, of n in all            (p-1)/p n
    reduce-scatter                     (p-1)/p n     on gloo 2 (p-1)/p n
    broadcast                          (p-1)/p n

Sources: https://github.com/pytorch/gloo, `gloo/allreduce.cc`, and those of `l2l_core/workers/network.py`. Linux 4.19 counts.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from l2l_core._torch import default_store
from l2l_core.workers import FRAME_BYTES, all_gather_traffic, broadcast_traffic

_SEGMENT_BYTES = 1 << 20  # gloo's `kMaxSegmentSize`: an all-reduce sends no longer messages
_STILL = 5  # readings without a change


@dataclass(frozen=True)
class WireBytes:
    """Bytes that one rank sends, as a mean over ranks.

    Attributes:
        formula: by the closed formula, on any backend.
        on_gloo: by gloo's algorithms, with headers.
    """

    formula: float = 0.0
    on_gloo: float = 0.0

    def __add__(self, other: WireBytes) -> WireBytes:
        return WireBytes(self.formula + other.formula, self.on_gloo + other.on_gloo)

    def __mul__(self, times: float) -> WireBytes:
        return WireBytes(self.formula * times, self.on_gloo * times)


def all_reduce_bytes(nbytes: int, count: int) -> WireBytes:
    """Return the bytes of adding `nbytes` over ranks."""
    segments = max(2, -(-nbytes // (_SEGMENT_BYTES * count)))  # of each rank, in each of the two phases
    headers = 2 * segments * (count - 1) * 3 * FRAME_BYTES
    formula = 2 * (count - 1) / count * nbytes
    return WireBytes(formula, formula + headers)


def all_gather_bytes(nbytes: int, count: int) -> WireBytes:
    """Return the bytes of gathering `nbytes`, an equal part from each rank, on all ranks."""
    traffic = all_gather_traffic(nbytes // count, count)
    return WireBytes(traffic.sent, traffic.wire_sent)


def reduce_scatter_bytes(nbytes: int, count: int) -> WireBytes:
    """Return the bytes of adding `nbytes` over ranks, where each receives a part of the sum."""
    return WireBytes((count - 1) / count * nbytes, all_reduce_bytes(nbytes, count).on_gloo)


def broadcast_bytes(nbytes: int, count: int) -> WireBytes:
    """Return the bytes of sending `nbytes` from one rank to all."""
    every = [broadcast_traffic(nbytes, count, 0, rank) for rank in range(count)]
    return WireBytes(sum(each.sent for each in every) / count, sum(each.wire_sent for each in every) / count)


def send_bytes(nbytes: int) -> WireBytes:
    """Return the bytes of one message to another rank, with the header that it sends back."""
    return WireBytes(nbytes, nbytes + 3 * FRAME_BYTES)


def settled_tcp_bytes(count: int) -> tuple[int, int]:
    """Return the bytes sent to and received from other ranks so far, once no byte moves.

    All ranks call this, and wait for one another through the process group's store, whose bytes do not count.

    Example:
        See `run_parallel`, whose ranks count their bytes by it.
    """
    _wait_for_ranks(count)
    before, still = tcp_bytes(), 0
    while still < _STILL:
        time.sleep(0.02)
        now = tcp_bytes()
        before, still = now, still + 1 if now == before else 0
    _wait_for_ranks(count)  # no rank sends before all have counted
    return before


def tcp_bytes() -> tuple[int, int]:
    """Return the bytes that connections to other ranks have sent and received, as the kernel counts them.

    Raises:
        OSError: the system is not Linux.
    """
    if sys.platform != "linux":
        raise OSError(
            f"bytes at sockets are counted by Linux (TCP_INFO, from 4.19 on), and this is {sys.platform}: run this on Linux"
        )
    port = _tcp_store().port
    sent = received = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as one:
                if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if port in (one.getpeername()[1], one.getsockname()[1]):
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # it listens, or was closed meanwhile
            continue
        (arrived,), (left, again) = struct.unpack_from("Q", info, 128), struct.unpack_from("QQ", info, 200)
        sent, received = sent + left - again, received + arrived  # <linux/tcp.h>: tcpi_bytes_received, _sent, _retrans
    return sent, received


def _wait_for_ranks(count: int) -> None:
    store, key = _tcp_store(), "l2l ranks that arrived"
    arrived = store.add(key, 1)
    until = -(-arrived // count) * count  # no rank arrives for the next time before all have arrived for this one
    while store.add(key, 0) < until:
        time.sleep(0.002)


def _tcp_store() -> Any:
    store: Any = default_store()
    while not isinstance(store, dist.TCPStore):
        store = store.underlying_store
    return store
