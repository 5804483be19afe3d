"""Micro-batches and layers that represent others, so that few are measured.

`profile_transforms.py` and the workbench apply these rules to costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple


class Representatives(NamedTuple):
    """Chosen micro-batches of a step, by index; and for each of its micro-batches a position among the chosen."""

    chosen: list[int]
    positions: list[int]


def choose_representatives(shapes: Sequence[Any]) -> Representatives:
    """Choose the micro-batches to rehearse, given the shapes of all.

    Consecutive micro-batches of one shape cost the same, except the first two, which fill the pipeline, and the very last.
    """
    chosen: list[int] = []
    positions: list[int] = []
    start = 0
    for k, shape in enumerate(shapes):
        if shape != shapes[start]:
            start = k
        if k - start < 3 or k == len(shapes) - 1:
            chosen.append(k)
        positions.append(len(chosen) - 1)
    return Representatives(chosen, positions)


def repeat_middle(known: int, count: int) -> list[int]:
    """Return for each of `count` equal micro-batches its representative among `known`; one represents all inner ones."""
    usual = max(0, min(2, known - 2)) if known > 1 else 0
    last = [known - 1] if count > 1 else []
    inner = count - len(last)
    return [*(min(k, usual) for k in range(inner)), *last]


def cycle_middle(known: int, count: int) -> list[int]:
    """Return representatives as `repeat_middle` does, but use all inner ones in turn, which preserves their variation."""
    if known == 1 or count == 1:
        return [0] * count
    return [*(k if k < known - 1 else 1 + (k - 1) % max(1, known - 2) for k in range(count - 1)), known - 1]


class RepresentedLayer(NamedTuple):
    """One or several layers of another stack, with the costs of a known layer."""

    key: str
    source: str  # key of the known layer
    count: int  # number of layers represented


def order_from_middle(keys: Sequence[str], last_layer: str) -> list[str]:
    """List layers in the order in which a stack can lose them: from the middle outwards, `last_layer` never.

    Of two at the same distance, the earlier one is first.
    """
    far = {key: abs(2 * index - (len(keys) - 1)) for index, key in enumerate(keys)}
    return sorted((key for key in keys if key != last_layer), key=far.__getitem__)


def resize_stack(keys: Sequence[str], depth: int, last_layer: str, similar: Sequence[str]) -> list[str]:
    """List the known layers for a stack of `depth` layers: with repetitions, or without some of the middle.

    Repetitions are distributed over all layers in `similar`, so that each has the same weight.
    """
    further = depth - len(keys)
    if further < 0:
        gone = set(order_from_middle(keys, last_layer)[:-further])
        return [key for key in keys if key not in gone]
    ends = [round((i + 1) * further / len(similar)) for i in range(len(similar))]
    more = {key: end - begin for key, begin, end in zip(similar, [0, *ends], ends, strict=False)}
    return [key for key in keys for _ in range(1 + more.get(key, 0))]


def chunk_stack(stack: Sequence[str], last_layer: str, max_chunks: int) -> list[RepresentedLayer]:
    """Split a stack into at most `max_chunks` chunks of similar size; the first and the last layer are separate chunks."""
    inner = max(0, len(stack) - 2)
    pieces = min(inner, max(1, max_chunks - 2))
    cuts = {1 + round(i * inner / pieces) for i in range(pieces + 1) if pieces}
    used: Counter[str] = Counter()
    chunks = []
    for start, stop in pairwise(sorted({0, *cuts, len(stack) - 1, len(stack)})):
        part = stack[start:stop]
        source = last_layer if last_layer in part else part[len(part) // 2]
        chunks.append(RepresentedLayer(f"{source}+{used[source]}" if used[source] else source, source, len(part)))
        used[source] += 1
    return chunks
