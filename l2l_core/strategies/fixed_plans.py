"""Plans without a search: keep, recompute or offload each stage, by segments or by partitions.

Periodic recompute: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from l2l_core.strategies.plan import F0, FALL, FCK, OFF, OFFX, PRE, PREX, B, Operation, Operations

KEEP, RECOMPUTE, OFFLOAD = "K", "R", "O"  # treatment of a stage's record
OFFLOAD_INPUT = "H"  # recompute from an input that is offloaded to the host


def plain_plan(n: int) -> Operations:
    """Keep every record; nothing runs twice."""
    return periodic_plan(n, n)


def full_plan(n: int) -> Operations:
    """Keep inputs only, and recompute every layer right before its backward."""
    return mixed_plan(RECOMPUTE * (n - 1))


def periodic_plan(n: int, length: int | None = None) -> Operations:
    """Recompute segments of `length` stages, by default about sqrt(n); only the last segment runs once."""
    length = length or max(1, round(math.sqrt(n)))
    last = (n - 1) // length * length  # the first stage of the last segment
    return complete_plan([FALL if i >= last else F0 if i % length else FCK for i in range(n)])


def complete_plan(kinds: Sequence[str]) -> Operations:
    """Complete the first runs by backward; missing records are recomputed from the last kept input before them.

    Args:
        kinds: `F0`, `Fck` or `Fall` of every stage. In the first stage `F0` is taken as `Fck`; the last stage has `Fall`.
    """
    kinds = [FCK if i == 0 and kind == F0 else kind for i, kind in enumerate(kinds)]
    operations = [Operation(kind, i) for i, kind in enumerate(kinds)]
    records = {i for i, kind in enumerate(kinds) if kind == FALL}
    for i in reversed(range(len(kinds))):
        if i not in records:
            start = max(j for j in range(i + 1) if kinds[j] == FCK)
            operations += [Operation(FALL, j) for j in range(start, i + 1)]
            records.update(range(start, i + 1))
        operations.append(Operation(B, i))
    return tuple(operations)


def mixed_plan(choices: Sequence[str], ahead: int = 1) -> Operations:
    """Keep, recompute or offload each stage but the last, as a letter chooses.

    Args:
        choices: one letter for each of stages 0 to n - 2. The last stage keeps its record.
        ahead: number of stages by which a fetch precedes its use; 0 is synchronous.

    Example:
        >>> from l2l_core.strategies import mixed_plan
        >>> [str(operation) for operation in mixed_plan("RK")]  # recompute stage 0, keep stage 1; stage 2 is the loss
        ['Fck 0', 'Fall 1', 'Fall 2', 'B 2', 'B 1', 'Fall 0', 'B 0']
    """
    return _mix(choices, lambda i: i - ahead)


def partition_plan(n: int, size: int, near: int) -> Operations:
    """Keep every record: in the last `near` partitions of `size` stages on the device, in earlier ones on the host.

    A record is fetched while the partition after its own runs backward.
    """
    return _mix(offload_first(n, ((n - 1) // size - near + 1) * size), lambda i: (i // size - 1) * size)


def offload_first(n: int, count: int) -> str:
    """Return the letters that offload the first `count` of n stages and keep the others."""
    return (OFFLOAD * min(n - 1, max(0, count))).ljust(n - 1, KEEP)


def _mix(choices: Sequence[str], fetched_from: Callable[[int], int]) -> Operations:
    """Build the plan of `choices`; before backward of stage i, fetch the stages from `fetched_from(i)` on."""
    n = len(choices) + 1
    out, back = {OFFLOAD: OFF, OFFLOAD_INPUT: OFFX}, {OFFLOAD: PRE, OFFLOAD_INPUT: PREX}
    operations = []
    for i, choice in enumerate([*choices, KEEP]):
        operations.append(Operation(FCK if choice in (RECOMPUTE, OFFLOAD_INPUT) else FALL, i))
        if choice in out:
            operations.append(Operation(out[choice], i))
    offloaded = [i for i in range(n - 1) if choices[i] in back]
    for i in reversed(range(n)):
        while offloaded and offloaded[-1] >= fetched_from(i):
            j = offloaded.pop()
            operations.append(Operation(back[choices[j]], j))
        if i < n - 1 and choices[i] in (RECOMPUTE, OFFLOAD_INPUT):
            operations.append(Operation(FALL, i))
        operations.append(Operation(B, i))
    return tuple(operations)
