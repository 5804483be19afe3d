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

MAX_STAGES = 6
INPUT, RECORD = "input", "record"
DROP_KINDS = {INPUT: "drop input", RECORD: "drop record"}  # kinds of moves, beside those of plans

Kept = frozenset[tuple[str, int]]


class SearchState(NamedTuple):
    """What a sequence has reached.

    Attributes:
        next: the stage whose backward comes next.
        kept: inputs and records of stages.
        at: the stage whose input is at hand besides, made by the run before.
    """

    next_backward: int
    kept: Kept
    next_input: int | None


class SearchMove(NamedTuple):
    """One thing to do: what, how long it takes, what is in use meanwhile, and what is reached."""

    kind: str
    stage: int
    seconds: float
    used_units: int
    next_state: SearchState


class SearchResult(NamedTuple):
    """The fastest sequence; infinite, without moves, if there is none."""

    seconds: float
    moves: tuple[SearchMove, ...]


def find_fastest(chain: Chain, budget: int, drops: bool = True) -> SearchResult:
    """Search for the fastest sequence.

    Args:
        chain: of at most `MOST_STAGES` stages.
        budget: in units of memory, the input of the chain not counted.
        drops: whether something kept may be dropped before its backward.

    Raises:
        ValueError: the chain is longer.
    """
    if chain.stages > MAX_STAGES:
        raise ValueError(
            f"the chain has {chain.stages} stages: all sequences are tried, which is for up to {MAX_STAGES}"
        )
    start = SearchState(chain.stages - 1, frozenset([(INPUT, 0)]), None)
    queue, ticket, best = [(0.0, 0, start)], count(1), {start: 0.0}
    came: dict[SearchState, tuple[SearchState, SearchMove]] = {}
    while queue:
        seconds, _, held = heapq.heappop(queue)
        if seconds > best[held]:
            continue
        if held.next_backward < 0:
            return SearchResult(seconds, _path_to(came, held))
        for move in _possible_moves(chain, held, drops):
            total = seconds + move.seconds
            if move.used_units <= budget and total < best.get(move.next_state, float("inf")):
                best[move.next_state], came[move.next_state] = total, (held, move)
                heapq.heappush(queue, (total, next(ticket), move.next_state))
    return SearchResult(float("inf"), ())


def _path_to(
    predecessors: dict[SearchState, tuple[SearchState, SearchMove]], state: SearchState
) -> tuple[SearchMove, ...]:
    moves = []
    while state in predecessors:
        state, move = predecessors[state]
        moves.append(move)
    return tuple(reversed(moves))


def _possible_moves(chain: Chain, state: SearchState, drops: bool) -> Iterator[SearchMove]:
    t, kept, at = state
    in_use = sum(_size(chain, *each) for each in kept) + chain.inputs[t + 1]  # and the gradient that comes in
    for j in range(t + 1):
        is_kept = (INPUT, j) in kept or (RECORD, j - 1) in kept  # a record holds its output
        if not is_kept and at != j:
            continue
        own = 0 if is_kept else chain.inputs[j]
        yield SearchMove(
            F0, j, chain.run_s[j], in_use + own + chain.inputs[j + 1] + chain.run_extra[j], SearchState(t, kept, j + 1)
        )
        if not is_kept:
            yield SearchMove(FCK, j, 0, in_use + own, SearchState(t, kept | {(INPUT, j)}, None))
        elif (RECORD, j) not in kept:
            used = in_use + chain.records[j] + chain.keep_extra[j]
            yield SearchMove(FALL, j, chain.keep_s[j], used, SearchState(t, kept | {(RECORD, j)}, None))
    if (RECORD, t) in kept:
        yield SearchMove(
            B,
            t,
            chain.backward_s[t],
            in_use + chain.backward_extra[t],
            SearchState(t - 1, kept - {(RECORD, t), (INPUT, t)}, None),
        )
    for each in kept - {(INPUT, 0)} if drops else ():
        yield SearchMove(DROP_KINDS[each[0]], each[1], 0, 0, SearchState(t, kept - {each}, at))


def _size(chain: Chain, kind: str, i: int) -> int:
    return chain.records[i] if kind == RECORD else chain.inputs[i] if i else 0  # the first input is not counted
