"""Arguments of an inspection, checked."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from l2l_core.inside.micro_batch_rows import MicroBatchRows

MAX_LAYERS = 12  # layers inspected by default


@dataclass(frozen=True, slots=True)
class InspectionRequest:
    """Figures to record in a pass. Passes with equal requests do the same work.

    Attributes:
        keys: of the layers.
        micro_batches: their numbers among those of a step.
        rows: of each of these.
        row: row to inspect.
        positions: number of its first positions.
        attention: record maps.
    """

    keys: frozenset[str]
    micro_batches: tuple[int, ...]
    rows: tuple[MicroBatchRows, ...]
    row: int
    positions: int
    attention: bool


def evenly_spaced(count: int) -> list[int]:
    """Choose at most `MAX_LAYERS` of `count` layers, evenly, with the first and the last."""
    if count <= MAX_LAYERS:
        return list(range(count))
    return [round(i * (count - 1) / (MAX_LAYERS - 1)) for i in range(MAX_LAYERS)]


def check_arguments(
    sizes: Sequence[int], micro_batches: Iterable[Any], row: Any, positions: Any, generate: Any, top: Any
) -> tuple[tuple[int, ...], int, int, int, int]:
    """Check the arguments of `Relay.look`; `sizes` are the rows of all micro-batches.

    Returns:
        The chosen micro-batches in order, `row`, `positions`, `generate` and `top`, as plain `int`.

    Raises:
        ValueError: a number out of range; names the range.
        TypeError: `micro_batches` is not a collection.
    """
    positions, generate, top = (
        _check_at_least(least, name, value)
        for name, value, least in (("positions", positions, 1), ("generate", generate, 0), ("top", top, 1))
    )
    if isinstance(micro_batches, str) or not isinstance(micro_batches, Iterable):
        raise TypeError(
            f"micro_batches={micro_batches!r} is not a collection: give the numbers of one or more, as [{micro_batches!r}]"
        )
    given = list(micro_batches)
    numbers = {_to_int(one) for one in given}
    chosen = tuple(sorted(one for one in numbers if one is not None and 0 <= one < len(sizes)))
    if not chosen or len(chosen) < len(numbers):
        raise ValueError(
            f"micro_batches={given!r}: a step has {len(sizes)} micro-batches here, give one or more of the whole numbers 0 to "
            f"{len(sizes) - 1}"
        )
    fewest, number = min(sizes[k] for k in chosen), _to_int(row)
    if number is None or not 0 <= number < fewest:
        raise ValueError(
            f"row={row!r}: a chosen micro-batch has {fewest} row(s), give a whole number from 0 to {fewest - 1}"
        )
    return chosen, number, positions, generate, top


def _check_at_least(minimum: int, name: str, value: Any) -> int:
    number = _to_int(value)
    if number is None or number < minimum:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {minimum}")
    return number


def _to_int(value: Any) -> int | None:
    """Convert an integer of any library to `int`; return None for other values and for bool."""
    if isinstance(value, bool):  # `index` converts it to 0 or 1
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
