"""Lanes of the link: what trickles lets others through, arrives whole, and is not waited for in vain."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from patience import HANG_S

from l2l_core import EmulatedDevice, Trace
from l2l_core.devices import Copy
from l2l_core.schedule_rules import MIN_CHUNK_BYTES
from l2l_core.step.traffic.lanes import Lane

PIECE = MIN_CHUNK_BYTES // 4  # elements of float32


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice()
    yield made
    made.close()


@pytest.fixture
def trace() -> Trace:
    return Trace()


@pytest.fixture
def lane(device: EmulatedDevice, trace: Trace) -> Lane:
    """Cuts what trickles into three."""
    return Lane(device, trace, "h2d", pieces=3)


def copies(*numels: int) -> list[Copy]:
    return [(torch.zeros(n), torch.arange(n, dtype=torch.float32)) for n in numels]


def assert_arrived(these: list[Copy]) -> None:
    assert all(torch.equal(target, source) for target, source in these)


def sent(trace: Trace) -> list[str]:
    return [event.label() for event in trace.lanes["h2d"]]


def test_one_piece_goes_out_per_turn_and_others_between(lane: Lane, trace: Trace) -> None:
    """Turns of a visit:  0                1                2
    On the lane:          layer, image 0,  layer, image 1,  layer, image 2
    """
    layer = copies(3 * PIECE)
    ticket = lane.send_chunked("load", "L001", layer)
    for k in range(3):
        last = lane.send("fetch", "L000", copies(8), k=k)
        lane.send_chunk()
    last.join()
    ticket.join()
    assert_arrived(layer)
    kinds = [(event.kind, event.k) for event in trace.lanes["h2d"]]
    assert kinds == [("load", -1), ("fetch", 0), ("load", -1), ("fetch", 1), ("load", -1), ("fetch", 2)]


def test_pieces_of_several_blocks_are_alike(lane: Lane, trace: Trace) -> None:
    """Blocks are cut through, so that no turn has more to send than another."""
    layer = copies(PIECE // 2, 2 * PIECE, PIECE // 2)
    lane.send_chunked("load", "L001", layer).wait()
    assert_arrived(layer)
    assert [event.nbytes for event in trace.lanes["h2d"]] == [MIN_CHUNK_BYTES] * 3


def test_another_copy_that_trickles_waits_for_the_whole_of_the_first(lane: Lane, trace: Trace) -> None:
    lane.send_chunked("load", "L001", copies(3 * PIECE))
    lane.send_chunked("load", "L002", copies(3 * PIECE)).join()
    assert [event.layer for event in trace.lanes["h2d"]] == ["L001"] * 3 + ["L002"] * 3


def test_who_sends_on_the_lane_need_not_wait_for_turns(lane: Lane, trace: Trace) -> None:
    layer = copies(3 * PIECE)
    lane.send_chunked("load", "L001", layer).wait()
    assert_arrived(layer)
    lane.send_chunk()
    assert len(trace.lanes["h2d"]) == 3


def test_another_thread_waits_until_all_has_gone_out_or_is_told_that_it_will_not(lane: Lane) -> None:
    def joined_meanwhile(given_up: bool) -> list[str]:
        layer = copies(3 * PIECE)
        ticket, said = lane.send_chunked("push", "L001", layer), []

        def join() -> None:
            try:
                ticket.join()
                assert_arrived(layer)
                said.append("arrived")
            except RuntimeError as error:
                said.append(str(error))

        thread = threading.Thread(target=join)
        thread.start()
        ticket.abandon() if given_up else lane.flush()
        thread.join(HANG_S)
        return said

    assert joined_meanwhile(given_up=False) == ["arrived"]
    assert joined_meanwhile(given_up=True) == ["the push of L001 was cancelled because the step failed"]


def test_events_have_the_bytes_of_whole_and_of_chunked_copies(lane: Lane, trace: Trace) -> None:
    lane.send("load", "L000", copies(10)).join()
    lane.send_chunked("load", "L001", copies(3 * PIECE)).join()
    assert 40 + 12 * PIECE == sum(event.nbytes for event in trace.lanes["h2d"])
