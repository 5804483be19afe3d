"""Settings with which a step would fit where the present ones do not: the fastest near them, and those that need the least.

Only settings that change no result are tried: micro-batches no larger than the present ones, layers ahead, place of the stash.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count, takewhile
from typing import Any

from l2l_core.batches import Batch, RowsOf
from l2l_core.config import IN_MEMORY, RelayConfig
from l2l_core.devices import DeviceOutOfMemory
from l2l_core.forecast.fit import Room, WhatFits
from l2l_core.forecast.minimise import Price, Priced, Space, minimise, seconds
from l2l_core.forecast.prices import Prices
from l2l_core.forecast.rehearsal import Rehearsal

_LONG_S = 10.0  # an error waits so long for further settings that might be faster


def what_fits(
    price: Price, asked: RelayConfig, counts: Sequence[int], budget_bytes: int, most_s: float = math.inf
) -> WhatFits:
    """Find the fastest settings near the present ones with which a step fits, and those that need the least.

    Args:
        price: the needs of a step.
        asked: the present settings.
        counts: numbers of micro-batches, the most first.
        budget_bytes: budget of the device.
        most_s: after so many seconds nothing further is tried; the least is found in any case.

    Raises:
        ValueError: the step cannot be made with any settings that were tried.
    """
    until_s, price = time.monotonic() + most_s, cache(price)
    # Depth first, all layers stay because of the schedule, not because the settings ask for it.
    stay = {"resident": asked.resident, "keep": asked.keep} if asked.schedule == "breadth_first" else {}
    bare = replace(asked, schedule="breadth_first", resident=0, keep=0)
    least, room = least_of(price, bare, counts), Room(budget_bytes, None)
    if least is None:
        raise ValueError(f"no step could be made with {price.cache_info().currsize} settings from {asked} on")
    fitting = [least] if room.holds(least) else []
    if fitting and time.monotonic() < until_s:
        aheads = sorted({asked.ahead, 1, 0}, reverse=True)
        choices = [{"ahead": ahead, "stash": place} for ahead in aheads for place in IN_MEMORY]
        space = Space(start=bare, counts=counts, tiers=[choices], growing=[[{}, stay]])
        fitting += minimise(price, space, room.holds, until_s=until_s).steps
    return WhatFits(asked, budget_bytes, least, min(fitting, key=seconds, default=None))


def least_of(price: Price, config: RelayConfig, counts: Sequence[int]) -> Priced | None:
    """Find the step that needs the least device memory, with the fewest micro-batches of those; None if none can be made.

    Without layers ahead there are fewer slots and no room for moving activations, so that nothing needs less.
    """
    serial = replace(config, schedule="breadth_first", ahead=0, resident=0, keep=0)
    spaces = [Space(start=replace(serial, stash=place), counts=counts) for place in IN_MEMORY]
    found = [step for space in spaces for step in minimise(price, space, None, lambda step: step.device_bytes).steps]
    return min(found, key=lambda step: (step.device_bytes, step.config.micro_batches), default=None)


def counts_from(present: int, rows: int) -> list[int]:
    """List numbers of micro-batches: one row each, then about half as many each time, down to the present number."""
    return [rows, *reversed([*takewhile(rows.__gt__, (present << times for times in count()))])]


def search(
    rehearsal: Rehearsal, batch: Batch, config: RelayConfig, figures: Mapping[str, Any], budget_bytes: int
) -> WhatFits:
    """Find settings with which a step on this batch fits; each step tried is rehearsed as it is.

    Raises:
        Whatever the model raises on the batch with any settings.
    """
    prices = Prices(rehearsal, batch, figures, None)
    counts = counts_from(config.micro_batches, RowsOf(batch).count)
    try:
        return what_fits(prices.exact, config, counts, budget_bytes, _LONG_S)
    except ValueError as error:
        raise error from prices.errors[0]


def advise(error: DeviceOutOfMemory, rehearsal: Rehearsal, batch: Batch, config: RelayConfig) -> None:
    """Give an error the settings that would fit, in place of its remedy; if the search fails, add a note."""
    figures = rehearsal.parts.device.figures()
    try:
        found = search(rehearsal, batch, config, figures, error.limit_bytes)
    except Exception as second:
        error.add_note(f"What would fit could not be tried: {type(second).__name__}: {second}")
        return
    error.settings, error.least_bytes = found.settings, found.smallest.budget_bytes
    error.remedy = f"Remedy: {found}"
