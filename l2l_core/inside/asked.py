"""What is to be looked at, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST = 12  # layers that are looked at unless some are named


@dataclass(frozen=True, slots=True)
class Asked:
    """What a pass is to show. Passes that are asked the same do the same work.

    Attributes:
        keys: of layers.
        micro_batches: their numbers among those of a step.
        row: of each of these.
        positions: the first ones of the row.
        attention: whether maps are wanted.
    """

    keys: frozenset[str]
    micro_batches: tuple[int, ...]
    row: int
    positions: int
    attention: bool


def spaced(count: int) -> list[int]:
    """Choose at most `MOST` of so many layers, evenly, the first and the last among them."""
    if count <= MOST:
        return list(range(count))
    return [round(i * (count - 1) / (MOST - 1)) for i in range(MOST)]


def check_numbers(
    sizes: Sequence[int], micro_batches: Sequence[int], row: int, positions: int, generate: int, top: int
) -> tuple[int, ...]:
    """Refuse numbers that mean nothing; `sizes` are the rows of all micro-batches. Returns the chosen micro-batches in order.

    Raises:
        ValueError: names the number, and what there is.
    """
    for name, value, least in (("positions", positions, 1), ("generate", generate, 0), ("top", top, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")
    chosen = tuple(sorted({*micro_batches}))
    if not chosen or any(k not in range(len(sizes)) for k in chosen):
        raise ValueError(
            f"micro_batches={list(micro_batches)!r}: a step has {len(sizes)} micro-batches here, give one or more of the "
            f"numbers 0 to {len(sizes) - 1}"
        )
    fewest = min(sizes[k] for k in chosen)
    if not isinstance(row, int) or row not in range(fewest):
        raise ValueError(
            f"row={row!r}: a micro-batch that is looked at has {fewest} row(s), give a number from 0 to {fewest - 1}"
        )
    return chosen
