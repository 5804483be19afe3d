"""Choice among memory, fewer bits and a disk for the masters and optimizer state of a planned model.

Every optimizer is forecast in memory and on the disk, and the fastest that fits is chosen. The quality that a codec costs and
the time for packing are not part of the forecast: offer only optimizers with acceptable quality.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from l2l_core.config import RelayConfig
from l2l_core.forecast.config_forecast import forecast_config
from l2l_core.forecast.forecast import Forecast
from l2l_core.forecast.optimizer_state_size import OptimizerFactory, OptimizerStateSize
from l2l_core.forecast.shelf_costs import PlannedShelf
from l2l_core.shelf import Disk
from l2l_core.simulator import Machine
from l2l_core.trace import format_bytes


@dataclass(frozen=True, slots=True)
class Way:
    """An optimizer, and the place of its state and of the masters."""

    optimizer: str  # its name, as it was offered
    forecast: Forecast  # `forecast.shelf` is None if masters are in memory

    @property
    def name(self) -> str:
        """Label for users."""
        return f"{self.optimizer} {'in memory' if self.forecast.shelf is None else 'on disk'}"

    def __str__(self) -> str:
        forecast, shelf = self.forecast, self.forecast.shelf
        disk = ""
        if shelf is not None:
            disk = f", {format_bytes(shelf.needed_bytes)} of disk, memory_bytes={shelf.memory_bytes:,}"
        verdict = "fits" if forecast.fits else "; ".join(forecast.shortfalls())
        return f"{self.name}: {forecast.seconds:.3g} s, {format_bytes(forecast.needed_host_bytes)} of host{disk}: {verdict}"


@dataclass(frozen=True, slots=True)
class ConfigFit:
    """All combinations of optimizer and place, and the fastest that fits; `str` gives the reasons."""

    ways: tuple[Way, ...]  # the fastest first; equal ones in the order offered, memory before disk

    @property
    def best(self) -> Way | None:
        """The fastest that fits; None if none does."""
        return next((way for way in self.ways if way.forecast.fits), None)

    @property
    def better(self) -> tuple[Way, ...]:
        """Faster ones than `best` that do not fit; all if none fits."""
        limit_s = math.inf if self.best is None else self.best.forecast.seconds
        return tuple(way for way in self.ways if way.forecast.seconds < limit_s and not way.forecast.fits)

    def __str__(self) -> str:
        best = self.best
        if best is None:
            lines = ["nothing of this fits"]
        else:
            lines = [f"take {best.name}, the fastest of those that fit", f"there, {best.forecast.bound}"]
            for way in self.better[-1:]:
                lines.append(f"faster would be {way.name}, but it {'; '.join(way.forecast.shortfalls())}")
        return "\n".join([*lines, *map(str, self.ways)])


def fit_config(
    config: Any,
    machine: Machine,
    *,
    optimizers: Mapping[str, OptimizerFactory],
    host_bytes: int,
    micro_batches: int,
    batch: int,
    sequence: int | None = None,
    disk: Disk | None = None,
    relay_config: RelayConfig | None = None,
    memory_bytes: int | None = None,
    emulated: bool = False,
) -> ConfigFit:
    """Choose among memory, codecs and disk for a model's masters and optimizer state.

    Args:
        optimizers: by name, each a function from parameters to an optimizer, in order of preference.
        host_bytes: of the host.
        disk: its figures; None for memory alone.
        config, machine, micro_batches, batch, sequence, relay_config, memory_bytes, emulated: as for `forecast_config`. With
            ``stash="disk"`` only the disk is considered.

    Raises:
        ValueError: no optimizers, or an argument that `forecast_config` refuses.

    Example:
        >>> from functools import partial
        >>> from transformers import LlamaConfig
        >>> from l2l_core import Machine, fit_config, in_bf16
        >>> card = Machine(flops_per_s=50e12, update_params_per_s=1e9, h2d_bytes_per_s=20e9, d2h_bytes_per_s=20e9)
        >>> adamw = torch.optim.AdamW
        >>> optimizers = {"float32": partial(adamw, lr=1e-4), "bf16": partial(in_bf16(adamw), lr=1e-4)}
        >>> fit = fit_config(
        ...     LlamaConfig(), card, optimizers=optimizers, host_bytes=64 * 10**9, micro_batches=8, batch=8, sequence=1024
        ... )
        >>> print(fit.best)
        bf16 in memory: 9.5 s, 56.6 GB of host: fits
    """
    if not optimizers:
        raise ValueError('optimizers={}: offer at least one, {"float32": partial(torch.optim.AdamW, lr=1e-4)}')
    forecast = partial(
        forecast_config,
        config,
        machine,
        micro_batches=micro_batches,
        batch=batch,
        sequence=sequence,
        relay_config=relay_config,
        memory_bytes=memory_bytes,
        host_bytes=host_bytes,
        emulated=emulated,
    )
    ways = []
    if disk is None or relay_config is None or relay_config.stash != "disk":
        ways += [Way(name, forecast(optimizer=make)) for name, make in optimizers.items()]
    if disk is not None:
        ways += [
            Way(name, _on_disk(partial(forecast, optimizer=make), disk, host_bytes))
            for name, make in optimizers.items()
            if not OptimizerStateSize(make).rounds_weights  # bfloat16 masters cannot be in files
        ]
    return ConfigFit(tuple(sorted(ways, key=lambda way: way.forecast.seconds)))


def _on_disk(forecast: partial[Forecast], disk: Disk, host_bytes: int) -> Forecast:
    """Forecast a step with the largest useful pool that the host can hold, or with the smallest that works."""
    least = forecast(shelf=PlannedShelf(disk=disk))
    assert least.shelf is not None
    pool = min(least.shelf.max_useful_bytes, host_bytes - (least.needed_host_bytes - least.shelf.memory_bytes))
    if pool <= least.shelf.min_bytes:
        return least
    wide = forecast(shelf=PlannedShelf(disk=disk, memory_bytes=pool))
    return wide if wide.fits and wide.seconds < least.seconds else least
