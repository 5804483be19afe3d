"""Plans that need no search: nothing recomputed, everything, every so often; records to the host and back.

Periodic recompute: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from l2l_core.strategies.plan import F0, FALL, FCK, OFF, OFFX, PRE, PREX, B, Operation

Operations = tuple[Operation, ...]

KEEP, RECOMPUTE, OFFLOAD = "K", "R", "O"  # what becomes of a stage's record
OFFLOAD_INPUT = "H"  # recompute from an input that waits on the host


def plain_plan(n: int) -> Operations:
    """Keep every record: n layer runs and no more."""
    return periodic_plan(n, n)


def full_plan(n: int) -> Operations:
    """Keep inputs only, and run every layer once more right before its backward."""
    return mixed_plan(RECOMPUTE * (n - 1))


def periodic_plan(n: int, length: int | None = None) -> Operations:
    """Cut into segments of `length` stages (default about the root of n); all but the last one run twice."""
    length = length or max(1, round(math.sqrt(n)))
    last = (n - 1) // length * length  # where the last segment starts
    return complete_plan([FALL if i >= last else F0 if i % length else FCK for i in range(n)])


def complete_plan(kinds: Sequence[str]) -> Operations:
    """Say how the first runs go; every record that is missing in backward is made again from the last kept input before it.

    Args:
        kinds: F0, Fck or Fall for every stage; the first one may not be F0 (it is taken for Fck), the last one is Fall.
    """
    kinds = [FCK if i == 0 and kind == F0 else kind for i, kind in enumerate(kinds)]
    steps = list(zip(kinds, range(len(kinds)), strict=True))
    records = {i for i, kind in enumerate(kinds) if kind == FALL}
    for i in reversed(range(len(kinds))):
        if i not in records:
            start = max(j for j in range(i + 1) if kinds[j] == FCK)
            steps += [(FALL, j) for j in range(start, i + 1)]
            records.update(range(start, i + 1))
        steps.append((B, i))
    return _operations(steps)


def mixed_plan(choices: Sequence[str], ahead: int = 1) -> Operations:
    """Treat every stage but the last in a way of its own; see the letters above.

    Args:
        choices: one letter for each of stages 0 to n - 2. The last stage keeps its record.
        ahead: how many stages before it is read something begins to come back from the host; 0 is synchronous.
    """
    n = len(choices) + 1
    out, back = {OFFLOAD: OFF, OFFLOAD_INPUT: OFFX}, {OFFLOAD: PRE, OFFLOAD_INPUT: PREX}
    steps: list[tuple[str, int]] = []
    for i, choice in enumerate([*choices, KEEP]):
        steps.append((FCK if choice in (RECOMPUTE, OFFLOAD_INPUT) else FALL, i))
        if choice in out:
            steps.append((out[choice], i))
    due = [i for i in reversed(range(n - 1)) if choices[i] in back]
    for i in reversed(range(n)):
        while due and due[0] >= i - ahead:
            steps.append((back[choices[due[0]]], due.pop(0)))
        if i < n - 1 and choices[i] in (RECOMPUTE, OFFLOAD_INPUT):
            steps.append((FALL, i))
        steps.append((B, i))
    return _operations(steps)


def _operations(steps: Sequence[tuple[str, int]]) -> Operations:
    return tuple(Operation(kind, stage) for kind, stage in steps)
