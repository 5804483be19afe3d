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

from l2l_core.batches import Batch, BatchRows
from l2l_core.config import MEMORY_STASHES, RelayConfig
from l2l_core.devices import DeviceOutOfMemory
from l2l_core.forecast.fit_result import MemoryLimits, WhatFits
from l2l_core.forecast.minimise import Price, Priced, Space, minimise, seconds
from l2l_core.forecast.rehearsal import Rehearsal
from l2l_core.forecast.step_cost_model import StepCostModel

_LONG_S = 10.0  # an error waits so long for further settings that might be faster


def what_fits(
    price: Price, requested: RelayConfig, counts: Sequence[int], budget_bytes: int, most_s: float = math.inf
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
    stay = {"resident": requested.resident, "keep": requested.keep} if requested.schedule == "breadth_first" else {}
    bare = replace(requested, schedule="breadth_first", resident=0, keep=0)
    least, room = least_of(price, bare, counts), MemoryLimits(budget_bytes, None)
    if least is None:
        raise ValueError(f"no step could be made with {price.cache_info().currsize} settings from {requested} on")
    fitting = [least] if room.fits(least) else []
    if fitting and time.monotonic() < until_s:
        aheads = sorted({requested.ahead, 1, 0}, reverse=True)
        choices = [{"ahead": ahead, "stash": place} for ahead in aheads for place in MEMORY_STASHES]
        space = Space(start=bare, counts=counts, tiers=[choices], growing=[[{}, stay]])
        fitting += minimise(price, space, room.fits, until_s=until_s).steps
    return WhatFits(requested, budget_bytes, least, min(fitting, key=seconds, default=None))


def least_of(price: Price, config: RelayConfig, counts: Sequence[int]) -> Priced | None:
    """Find the step that needs the least device memory, with the fewest micro-batches of those; None if none can be made.

    Without layers ahead there are fewer slots and no room for moving activations, so that nothing needs less.
    """
    serial = replace(config, schedule="breadth_first", ahead=0, resident=0, keep=0)
    spaces = [Space(start=replace(serial, stash=place), counts=counts) for place in MEMORY_STASHES]
    found = [step for space in spaces for step in minimise(price, space, None, lambda step: step.device_bytes).steps]
    return min(found, key=lambda step: (step.device_bytes, step.config.micro_batches), default=None)


def counts_from(present: int, rows: int) -> list[int]:
    """List numbers of micro-batches: one row each, then about half as many each time, down to the present number."""
    return [rows, *reversed([*takewhile(rows.__gt__, (present << times for times in count()))])]


def search_settings(
    rehearsal: Rehearsal, batch: Batch, config: RelayConfig, figures: Mapping[str, Any], budget_bytes: int
) -> WhatFits:
    """Find settings with which a step on this batch fits; each step tried is rehearsed as it is.

    Raises:
        Whatever the model raises on the batch with any settings.
    """
    prices = StepCostModel(rehearsal, batch, figures, None)
    counts = counts_from(config.micro_batches, BatchRows(batch).count)
    try:
        return what_fits(prices.exact, config, counts, budget_bytes, _LONG_S)
    except ValueError as error:
        raise error from prices.errors[0]


def advise(error: DeviceOutOfMemory, rehearsal: Rehearsal, batch: Batch, config: RelayConfig) -> None:
    """Give an error the settings that would fit, in place of its remedy; if the search fails, add a note."""
    figures = rehearsal.parts.device.figures()
    try:
        found = search_settings(rehearsal, batch, config, figures, error.limit_bytes)
    except Exception as second:
        error.add_note(f"What would fit could not be tried: {type(second).__name__}: {second}")
        return
    error.settings, error.least_bytes = found.settings, found.smallest.budget_bytes
    error.remedy = f"Remedy: {found}"
