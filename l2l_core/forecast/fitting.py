"""Settings with which a step by formula would fit where it does not, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from l2l_core.forecast.configured_step import ConfiguredStep, costs_of
from l2l_core.forecast.forecast import Forecast
from l2l_core.forecast.memory_walk import MemoryWalk
from l2l_core.forecast.smallest import device_bytes
from l2l_core.rules import MAX_UNDER_WAY
from l2l_core.trace import format_bytes

Make = Callable[[ConfiguredStep], ConfiguredStep | None]


class Change(NamedTuple):
    """Settings that make a step smaller."""

    kind: str  # of one kind the last change that was taken is named, since it holds those before it
    words: str
    make: Make  # gives None where the step is so already


def advise(step: ConfiguredStep, batch: int, memory_bytes: int | None, host_bytes: int | None) -> str:
    """Find settings that together make the step fit, and say them in words; one is taken only if its place still lacks room."""
    taken: dict[str, str] = {}  # words by kind
    limits = {"device": memory_bytes, "host": host_bytes}
    for place, limit in limits.items():
        for change in _changes(place, batch):
            if limit is None or _need(step, place) <= limit:
                break
            other = change.make(step)
            if other is not None and _need(other, place) < _need(step, place):
                taken[change.kind] = change.words
                step = other
    lacking = [
        f"{format_bytes(need)} on the {place}"
        for place, limit in limits.items()
        if limit is not None and (need := _need(step, place)) > limit
    ]
    settings = ", ".join(taken.values())
    if lacking:
        return f"even with {settings or 'other settings'} it would need {' and '.join(lacking)}"
    return f"would fit with {settings}"


def advise_shelf(step: ConfiguredStep, batch: int, forecast: Forecast) -> str:
    """Say what would make a step fit whose masters are on a shelf."""
    shelf, words = forecast.shelf, list[str]()
    assert shelf is not None
    if forecast.memory_bytes is not None and forecast.peak_device_bytes > forecast.memory_bytes:
        words.append(f"on the device it {advise(step, batch, forecast.memory_bytes, None)}")
    if forecast.host_limit_bytes is not None and (over := forecast.needed_host_bytes - forecast.host_limit_bytes) > 0:
        room = shelf.memory_bytes - over
        words.append(
            f"on the host it would fit with memory_bytes={room:,} of the shelf"
            if room >= shelf.least_bytes
            else f"the smallest pool that works is {format_bytes(shelf.least_bytes)}, which is {shelf.needs}: load fewer layers "
            f"ahead, or free {format_bytes(over - (shelf.memory_bytes - shelf.least_bytes))} of the host"
        )
    if shelf.lacks_disk:
        words.append(
            f"the disk must have {format_bytes(shelf.needed_bytes)} free, or the optimizer less state (in_bf16)"
        )
    return "; ".join(words)


def _need(step: ConfiguredStep, place: str) -> int:
    """Bytes at the peak; of gradients in host memory as many as there may be."""
    costs = costs_of(step)
    if place == "device":
        return device_bytes(costs)
    high = MemoryWalk(costs.profile).rise(place, costs.stands, {}).high
    layer, shell = step.gradient_bytes
    many = step.model.depth if step.config.update == "deferred" else min(MAX_UNDER_WAY, step.model.depth)
    apart = step.config.micro_batches + 1 if step.parts_shell else 1
    return high + sum(costs.host.values()) + many * layer + apart * shell


def _changes(place: str, batch: int) -> list[Change]:
    """What makes a step smaller at a place, the cheapest first."""

    def config(**settings: Any) -> Make:
        return lambda step: replace(step, config=replace(step.config, **settings))

    def optimizer(nbytes: int) -> Make:
        return lambda step: replace(step, state_bytes=nbytes, kept=None) if step.state_bytes > nbytes else None

    def single(step: ConfiguredStep) -> ConfiguredStep | None:
        return replace(step, rows=1, config=replace(step.config, micro_batches=batch)) if step.rows > 1 else None

    if place == "device":
        return [
            Change("stash", "stash='host'", config(stash="host")),
            Change("rows", f"micro_batches={batch}", single),
            Change("precision", "precision='bf16'", config(precision="bf16")),
            Change("ahead", "ahead=0", config(ahead=0)),
        ]
    return [
        Change("update", "update='eager'", config(update="eager", max_grad_norm=None)),
        Change(
            "optimizer",
            "4 bytes of optimizer state per parameter (one moment, or two in bfloat16: in_bf16)",
            optimizer(4),
        ),
        Change("optimizer", "2 bytes of optimizer state per parameter (bitsandbytes' 8-bit optimizers)", optimizer(2)),
        Change("optimizer", "an optimizer without state (SGD)", optimizer(0)),
        Change("precision", "precision='fp32'", config(precision="fp32")),
    ]
