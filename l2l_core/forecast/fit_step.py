"""The fastest settings for a relay's next step: what room there is, and which of the steps that fit are timed once more."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from l2l_core.batches import Batch
from l2l_core.config import RelayConfig
from l2l_core.devices import Device, Ledger, free_bytes
from l2l_core.forecast.fastest import Search, Wanted
from l2l_core.forecast.fit import FREE, Fit, NothingFits, Room
from l2l_core.forecast.from_costs import Costs, forecast_costs
from l2l_core.forecast.prices import Prices
from l2l_core.forecast.rehearsal import Rehearsal
from l2l_core.forecast.smallest import Priced, settings_in_words, what_fits
from l2l_core.rules import has_link
from l2l_core.simulator import Fleet
from l2l_core.trace import format_bytes

_PASSES = 3  # timed ones, of the steps that are looked at once more


def fit_step(
    rehearsal: Rehearsal,
    batch: Batch,
    asked: RelayConfig,
    fixed: Iterable[str],
    room: Room,
    most_s: float,
    rows: int,
    fleet: Fleet,
) -> Fit:
    """Look for the fastest settings with which a step on this batch fits.

    Arguments and errors are those of `Relay.fit`; `rehearsal` has the relay's parts. Of several workers, which `fleet` is, one
    looks for all: the smallest batch has so many `rows`.
    """
    began_s = time.monotonic()
    free, figures = _free(asked, fixed, rehearsal.store.has_hooks, fleet.count), rehearsal.parts.device.figures()
    prices = Prices(rehearsal, batch, figures, free_bytes(rehearsal.parts.device), fleet)
    before = prices(replace(asked, resident=0, keep=0, schedule="breadth_first")) and prices(asked)
    wanted = Wanted(asked, free, rows, prices.visits, room, has_link(figures))
    search = Search(prices, wanted, most_s)
    exact = list(_looked_at_again(search, prices))
    if not exact:
        raise _nothing_fits(prices, wanted)
    again = {step: costs for step, costs in exact}
    chosen = min(again, key=search.cost)
    return Fit(
        asked=asked,
        before=before,
        chosen=chosen,
        better=search.better_than(chosen.config),
        room=room,
        layers=prices.visits,
        forecast=forecast_costs(again[chosen], chosen.config, figures, room.host_bytes, fleet),
        tried=search.tried,
        seconds=time.monotonic() - began_s,
        all_tried=search.all_tried,
    )


def room_of(
    device: Device, host: Ledger, device_bytes: int | None, host_bytes: int | None, neighbours: int = 1
) -> Room:
    """Say what a step may take: what was asked for, else the device's budget, and of the host what is free now.

    So many `neighbours`, this relay among them, share what is free of the host.

    Raises:
        ValueError: a number of bytes that is not positive, or more than the device has.
    """
    for name, value in (("device_bytes", device_bytes), ("host_bytes", host_bytes)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value!r}: must be positive, or None for what there is")
    budget = device.ledger.limit_bytes
    if budget is not None and device_bytes is not None and device_bytes > budget:
        raise ValueError(
            f"device_bytes={device_bytes!r}: {device.name} has a budget of {budget:,} bytes; ask for at most that, or make the "
            "relay on a device with more"
        )
    free_host = free_bytes(None) // neighbours + host.total
    if device.in_host_memory:
        return Room(device_bytes or budget, host_bytes, free_host)
    return Room(device_bytes or budget or free_bytes(device), host_bytes or free_host)


def _free(asked: RelayConfig, fixed: Iterable[str], has_hooks: bool, workers: int) -> list[str]:
    if isinstance(fixed, str):
        raise TypeError(f"fixed={fixed!r} is text: give names, as [{fixed!r}]")
    held = {*fixed}
    if unknown := sorted(held.difference(FREE)):
        raise ValueError(f"fixed names {unknown[0]!r}: a search changes {', '.join(FREE)}, and nothing else")
    if has_hooks or asked.max_grad_norm is not None:  # both need all gradients at once
        held.add("update")
    if workers > 1:  # who goes depth first trains alone
        held.add("schedule")
    return [name for name in FREE if name not in held]


def _looked_at_again(search: Search, prices: Prices) -> Iterator[tuple[Priced, Costs]]:
    """Rehearse the most promising steps as they are; what does not fit after all makes place for one that is a little smaller."""
    for finalist in search.finalists(search.run()):
        step: Priced | None = finalist
        while step is not None:
            costs = prices.rehearse(step.config, _PASSES if search.has_time else 1)
            if costs is not None and search.room.holds(exact := prices.priced(costs, step.config)):
                yield exact, costs
                break
            step = search.smaller_than(step)


def _nothing_fits(prices: Prices, wanted: Wanted) -> Exception:
    """Say what the step that needs least would need; if no step can be made, what the model said to it."""
    try:
        least = what_fits(prices, wanted.asked, wanted.rows, 0).smallest
    except ValueError:
        return prices.errors[0]
    named = ["micro_batches", "ahead", "stash", "update"]
    named += ["schedule"] if least.config.schedule != wanted.asked.schedule else []
    settings = settings_in_words({name: getattr(least.config, name) for name in named})
    remedies = {
        "host": "take an optimizer with less state, or a machine with more memory",
        "device": "give the device that much, or make big parts of the shell layers of their own (layers=[...])",
    }
    lacking = " ".join(wanted.room.lacks(least))
    remedy = next((words for place, words in remedies.items() if place in lacking), "hold fewer settings fixed")
    return NothingFits(
        f"No settings were found with which a step on this batch fits {wanted.room}. What needs least needs "
        f"{format_bytes(least.budget_bytes)} ({least.budget_bytes:,} bytes) on the device and "
        f"{format_bytes(least.host_bytes)} on the host, with {settings}. Remedy: {remedy}",
        least,
    )
