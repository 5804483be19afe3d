"""Who stands for whom where a step is known by a few of its micro-batches and layers: the rules, without costs.

There are several, because what is known differs: micro-batches that may be chosen, those that were recorded, layers that may
be of different sizes. `profile_extrapolation.py` does what the rules say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

# -- micro-batches ---------------------------------------------------------------------------------------------------


class Representatives(NamedTuple):
    """Micro-batches of a step, by index; and for each of its micro-batches the position of its own among them."""

    chosen: list[int]
    positions: list[int]


def choose_representatives(shapes: Sequence[Any]) -> Representatives:
    """Choose micro-batches of a step to rehearse, given the shapes of all, and say which of the chosen stands for each.

    Micro-batches of one form in a row are alike but for the first two, that find the pipeline filling, and the very last.
    """
    chosen: list[int] = []
    stands: list[int] = []
    start = 0
    for k, form in enumerate(shapes):
        if form != shapes[start]:
            start = k
        if k - start < 3 or k == len(shapes) - 1:
            chosen.append(k)
        stands.append(len(chosen) - 1)
    return Representatives(chosen, stands)


def represent_each(count: int) -> Representatives:
    """Let every micro-batch of a step stand for itself."""
    return Representatives(list(range(count)), list(range(count)))


def repeat_middle(known: int, count: int) -> list[int]:
    """Say which of `known` micro-batches stands for each of `count` of their size."""
    usual = max(0, min(2, known - 2)) if known > 1 else 0
    head = list(range(usual))
    last = [known - 1] if count > 1 else []
    middle = [usual] * max(0, count - len(head) - len(last))
    return (head + middle + last)[:count] if count >= len(head) + len(last) else (head[: count - len(last)] + last)


def cycle_middle(known: int, count: int) -> list[int]:
    """Do the same with all that are known: the first and the last stand for themselves, the inner ones take turns.

    `pattern` lets one stand for all inner ones, so that equal ones follow one another; this keeps how they were spread.
    """
    if known == 1 or count == 1:
        return [0] * count
    return [*(k if k < known - 1 else 1 + (k - 1) % max(1, known - 2) for k in range(count - 1)), known - 1]


# -- layers ----------------------------------------------------------------------------------------------------------


class RepresentedLayer(NamedTuple):
    """A layer of another stack, or several as one, with the costs of one that is known."""

    key: str  # its own
    source: str  # of the layer that is known
    count: int  # how many layers it stands for


def order_from_middle(keys: Sequence[str], last_layer: str) -> list[str]:
    """List layers in the order in which a stack can do without them: from the middle outwards, but never the turning one.

    Of two that are as far from it, the earlier one comes first.
    """
    far = {key: abs(2 * index - (len(keys) - 1)) for index, key in enumerate(keys)}
    return sorted((key for key in keys if key != last_layer), key=far.__getitem__)


def resize_stack(keys: Sequence[str], depth: int, last_layer: str, similar: Sequence[str]) -> list[str]:
    """List the known layers that stand for those of a stack of `depth`: inner ones are repeated, or some of the middle left out.

    Copies are shared out among all layers that are `alike`, so that none counts for more than the others.
    """
    further = depth - len(keys)
    if further < 0:
        gone = set(order_from_middle(keys, last_layer)[:-further])
        return [key for key in keys if key not in gone]
    ends = [round((i + 1) * further / len(similar)) for i in range(len(similar))]
    more = {key: end - begin for key, begin, end in zip(similar, [0, *ends], ends, strict=False)}
    return [key for key in keys for _ in range(1 + more.get(key, 0))]


def chunk_stack(stack: Sequence[str], last_layer: str, max_chunks: int) -> list[RepresentedLayer]:
    """Cut the stack into at most `most` pieces of about the same size; the first and the last layer are pieces of their own."""
    inner = max(0, len(stack) - 2)
    pieces = min(inner, max(1, max_chunks - 2))
    edges = sorted(
        {0, *(1 + round(i * inner / pieces) for i in range(pieces + 1) if pieces), len(stack) - 1, len(stack)}
    )
    used: Counter[str] = Counter()
    chunks = []
    for start, stop in pairwise(edges):
        part = stack[start:stop]
        source = last_layer if last_layer in part else part[len(part) // 2]
        chunks.append(RepresentedLayer(f"{source}+{used[source]}" if used[source] else source, source, len(part)))
        used[source] += 1
    return chunks
