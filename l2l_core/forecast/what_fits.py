"""Settings for a step that does not fit: the fastest near the present ones, and those that need the least.

Only settings that change no result are tried: smaller micro-batches, layers ahead, place of the stash.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count, takewhile
from operator import attrgetter
from typing import Any

from l2l_core.batches import Batch
from l2l_core.config import MEMORY_STASHES, RelayConfig
from l2l_core.devices import DeviceOutOfMemory
from l2l_core.forecast.fit_result import MemoryLimits, WhatFits
from l2l_core.forecast.minimise import Price, Priced, Space, minimise
from l2l_core.forecast.rehearsal import Rehearsal
from l2l_core.forecast.step_cost_model import StepCostModel

_LONG_S = 10.0  # time that an error waits for faster settings


def what_fits(
    price: Price, requested: RelayConfig, counts: Sequence[int], budget_bytes: int, most_s: float = math.inf
) -> WhatFits:
    """Find the fastest settings near the present ones that fit a device, and those that need the least.

    `counts` are numbers of micro-batches, the largest first. After `most_s` seconds nothing more is tried, except for the step
    that needs the least.

    Raises:
        ValueError: no step could run with the settings tried.
    """
    until_s, price = time.monotonic() + most_s, cache(price)
    # Depth first, all layers stay because of the schedule, not because of these settings.
    stay = {"resident": requested.resident, "keep": requested.keep} if requested.schedule == "breadth_first" else {}
    bare = replace(requested, schedule="breadth_first", resident=0, keep=0)
    least, limits = least_of(price, bare, counts), MemoryLimits(budget_bytes, None)
    if least is None:
        raise ValueError(f"no step could run with {price.cache_info().currsize} settings from {requested} on")
    fitting = [least] if limits.fits(least) else []
    if fitting and time.monotonic() < until_s:
        aheads = sorted({requested.ahead, 1, 0}, reverse=True)
        choices = [{"ahead": ahead, "stash": place} for ahead in aheads for place in MEMORY_STASHES]
        space = Space(start=bare, counts=counts, tiers=[choices], growing=[[{}, stay]])
        fitting += minimise(price, space, limits.fits, until_s=until_s).steps
    return WhatFits(requested, budget_bytes, least, min(fitting, key=attrgetter("seconds"), default=None))


def least_of(price: Price, config: RelayConfig, counts: Sequence[int]) -> Priced | None:
    """Return the step with the least device memory, of equal ones with the fewest micro-batches; None if none can run.

    It loads no layers ahead: that takes the fewest slots, and no buffers for concurrent copies.
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
    """Find settings with which a step on this batch fits; every step tried is rehearsed.

    Raises:
        Exception: the error of the model on the batch, if it fails with all settings.
    """
    prices = StepCostModel(rehearsal, batch, figures, None)
    counts = counts_from(config.micro_batches, rehearsal.rows_of(batch).count)
    try:
        return what_fits(prices.exact, config, counts, budget_bytes, _LONG_S)
    except ValueError as error:
        raise error from prices.errors[0]


def advise(error: DeviceOutOfMemory, rehearsal: Rehearsal, batch: Batch, config: RelayConfig) -> None:
    """Replace an error's remedy by settings that fit; if the search fails, add a note."""
    figures = rehearsal.parts.device.figures()
    try:
        found = search_settings(rehearsal, batch, config, figures, error.limit_bytes)
    except Exception as second:
        error.add_note(f"The search for settings that fit failed: {type(second).__name__}: {second}")
        return
    error.settings, error.least_bytes = found.settings, found.smallest.budget_bytes
    error.remedy = f"Remedy: {found}"
