"""Least time of any sequence of runs within a memory budget, by exhaustive search, for chains of up to six stages.

Dijkstra's search over the kept inputs and records. A sequence may drop a kept tensor and make it again: such plans are not
persistent, and the fastest is NP-hard to find (Beaumont et al., arXiv 1911.13214). With `drops=False` a kept tensor stays
until its backward, as in Rotor's plans. The search shares no code with Rotor's solver; `tests/core/strategies/test_rotor.py`
compares the two.
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
DROP_KINDS = {INPUT: "drop input", RECORD: "drop record"}  # kinds of moves, in addition to those of plans


class SearchState(NamedTuple):
    """State of a sequence between two moves."""

    next_backward: int
    kept: frozenset[tuple[str, int]]  # inputs and records of stages
    next_input: int | None  # the stage whose input the previous run has made


class SearchMove(NamedTuple):
    """A run, a backward or a drop, with its seconds and the units in use during it."""

    kind: str
    stage: int
    seconds: float
    used_units: int
    next_state: SearchState


class SearchResult(NamedTuple):
    """The fastest sequence; infinite and without moves if none fits."""

    seconds: float
    moves: tuple[SearchMove, ...]


def find_fastest(chain: Chain, budget: int, drops: bool = True) -> SearchResult:
    """Search for the fastest sequence.

    Args:
        chain: of at most `MAX_STAGES` stages.
        budget: in units of memory, without the input of the chain.
        drops: True if a kept tensor may be dropped before its backward.

    Raises:
        ValueError: the chain is longer.
    """
    if chain.stages > MAX_STAGES:
        raise ValueError(f"the chain has {chain.stages} stages: the search is exhaustive, for up to {MAX_STAGES}")
    start = SearchState(chain.stages - 1, frozenset([(INPUT, 0)]), None)
    queue: list[tuple[float, int, SearchState]] = [(0.0, 0, start)]
    ticket, best = count(1), {start: 0.0}
    predecessors: dict[SearchState, tuple[SearchState, SearchMove]] = {}
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if seconds > best[state]:
            continue
        if state.next_backward < 0:
            moves = []
            while state in predecessors:
                state, move = predecessors[state]
                moves.append(move)
            return SearchResult(seconds, tuple(reversed(moves)))
        for move in _possible_moves(chain, state, drops):
            total = seconds + move.seconds
            if move.used_units <= budget and total < best.get(move.next_state, float("inf")):
                best[move.next_state], predecessors[move.next_state] = total, (state, move)
                heapq.heappush(queue, (total, next(ticket), move.next_state))
    return SearchResult(float("inf"), ())


def _possible_moves(chain: Chain, state: SearchState, drops: bool) -> Iterator[SearchMove]:
    t, kept, at = state
    in_use = sum(_size(chain, *each) for each in kept) + chain.inputs[t + 1]  # the incoming gradient is in use
    for j in range(t + 1):
        is_kept = (INPUT, j) in kept or (RECORD, j - 1) in kept  # a record includes its output
        if not is_kept and at != j:
            continue
        own = 0 if is_kept else chain.inputs[j]
        used = in_use + own + chain.inputs[j + 1] + chain.run_extra[j]
        yield SearchMove(F0, j, chain.run_s[j], used, SearchState(t, kept, j + 1))
        if not is_kept:
            yield SearchMove(FCK, j, 0, in_use + own, SearchState(t, kept | {(INPUT, j)}, None))
        elif (RECORD, j) not in kept:
            used = in_use + chain.records[j] + chain.keep_extra[j]
            yield SearchMove(FALL, j, chain.keep_s[j], used, SearchState(t, kept | {(RECORD, j)}, None))
    if (RECORD, t) in kept:
        after = SearchState(t - 1, kept - {(RECORD, t), (INPUT, t)}, None)
        yield SearchMove(B, t, chain.backward_s[t], in_use + chain.backward_extra[t], after)
    for each in kept - {(INPUT, 0)} if drops else ():
        yield SearchMove(DROP_KINDS[each[0]], each[1], 0, 0, SearchState(t, kept - {each}, at))


def _size(chain: Chain, kind: str, i: int) -> int:
    return chain.records[i] if kind == RECORD else chain.inputs[i] if i else 0  # the first input is not counted
