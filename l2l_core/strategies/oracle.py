"""The least time of any sequence of runs within a number of bytes, by trying them all: for chains of up to six stages.

Dijkstra's search over what is kept. `least_seconds` lets a sequence drop what it keeps at any time and make it again: plans
that are not persistent, whose optimum is NP-hard to find (Beaumont et al., arXiv 1911.13214). With `drops=False` what is kept
stays until its backward, as in Rotor's plans; the search shares no code with Rotor's program, and judges it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from l2l_core.strategies.plan import F0, FALL, FCK, B
from l2l_core.strategies.rotor import Chain

MOST_STAGES = 6
INPUT, RECORD = "input", "record"
DROPS = {INPUT: "drop input", RECORD: "drop record"}  # kinds of moves, beside those of plans

Kept = frozenset[tuple[str, int]]


class Held(NamedTuple):
    """What a sequence has reached.

    Attributes:
        next: the stage whose backward comes next.
        kept: inputs and records of stages.
        at: the stage whose input is at hand besides, made by the run before.
    """

    next: int
    kept: Kept
    at: int | None


class Move(NamedTuple):
    """One thing to do: what, how long it takes, what is in use meanwhile, and what is reached."""

    kind: str
    stage: int
    seconds: float
    used: int
    reached: Held


class Found(NamedTuple):
    """The fastest sequence; infinite, without moves, if there is none."""

    seconds: float
    moves: tuple[Move, ...]


def least_seconds(chain: Chain, budget: int, drops: bool = True) -> Found:
    """Search for the fastest sequence.

    Args:
        chain: of at most `MOST_STAGES` stages.
        budget: in units of memory, the input of the chain not counted.
        drops: whether something kept may be dropped before its backward.

    Raises:
        ValueError: the chain is longer.
    """
    if chain.stages > MOST_STAGES:
        raise ValueError(
            f"the chain has {chain.stages} stages: all sequences are tried, which is for up to {MOST_STAGES}"
        )
    start = Held(chain.stages - 1, frozenset([(INPUT, 0)]), None)
    queue, ticket, best = [(0.0, 0, start)], count(1), {start: 0.0}
    came: dict[Held, tuple[Held, Move]] = {}
    while queue:
        seconds, _, held = heapq.heappop(queue)
        if seconds > best[held]:
            continue
        if held.next < 0:
            return Found(seconds, _way(came, held))
        for move in _moves(chain, held, drops):
            total = seconds + move.seconds
            if move.used <= budget and total < best.get(move.reached, float("inf")):
                best[move.reached], came[move.reached] = total, (held, move)
                heapq.heappush(queue, (total, next(ticket), move.reached))
    return Found(float("inf"), ())


def _way(came: dict[Held, tuple[Held, Move]], held: Held) -> tuple[Move, ...]:
    moves = []
    while held in came:
        held, move = came[held]
        moves.append(move)
    return tuple(reversed(moves))


def _moves(c: Chain, held: Held, drops: bool) -> Iterator[Move]:
    t, kept, at = held
    in_use = sum(_size(c, *each) for each in kept) + c.inputs[t + 1]  # and the gradient that comes in
    for j in range(t + 1):
        is_kept = (INPUT, j) in kept or (RECORD, j - 1) in kept  # a record holds its output
        if not is_kept and at != j:
            continue
        own = 0 if is_kept else c.inputs[j]
        yield Move(F0, j, c.run_s[j], in_use + own + c.inputs[j + 1] + c.run_more[j], Held(t, kept, j + 1))
        if not is_kept:
            yield Move(FCK, j, 0, in_use + own, Held(t, kept | {(INPUT, j)}, None))
        elif (RECORD, j) not in kept:
            used = in_use + c.records[j] + c.keep_more[j]
            yield Move(FALL, j, c.keep_s[j], used, Held(t, kept | {(RECORD, j)}, None))
    if (RECORD, t) in kept:
        yield Move(B, t, c.back_s[t], in_use + c.back_more[t], Held(t - 1, kept - {(RECORD, t), (INPUT, t)}, None))
    for each in kept - {(INPUT, 0)} if drops else ():
        yield Move(DROPS[each[0]], each[1], 0, 0, Held(t, kept - {each}, at))


def _size(c: Chain, kind: str, i: int) -> int:
    return c.records[i] if kind == RECORD else c.inputs[i] if i else 0  # the first input is not counted
