"""Ways to train a model from its configuration alone: the formulas of `strategy_costs.py`, and the engine's forecasts.

Formulas that are only here:

    8-bit optimizer  as in core, with 2 + 8 / 256 bytes of optimizer state per parameter: two moments of one byte, and for
                     each a float32 scale per 256 elements (Dettmers et al., arXiv 2110.02861; bitsandbytes' block size)
    LoRA             frozen weights in the precision of compute; adapters of rank 8 on every matrix of a layer, with float32
                     masters, gradients and two moments (Hu et al., arXiv 2106.09685); activations as in core; no gradients
                     of frozen weights, so 4 operations per parameter and token in place of 6

Both run without recompute if that fits, and else with it. The relay with LoRA on NF4 is the engine's forecast with the same
adapters, on matrices of layers in 4 bits (`nf4_bytes` in `l2l_core/forecast/model_shapes.py`).
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, cast

import torch

from l2l_core import Disk, Machine, PlannedShelf, RelayConfig, forecast_config
from l2l_core.forecast import Forecast, read_model_shapes
from workbench.fit.cards import DISK_SHARES, GpuCard, SpeedRange
from workbench.fit.fit_table import RELAY_ON_NF4, FitWay, MachineLimits, Measure
from workbench.lessons.strategy_costs import ADAM_BYTES, MASTER_BYTES, StepSpec, StrategyCost

LORA_RANK = 8  # the default of peft's LoraConfig
EIGHT_BIT_STATE = 2 + 8 / 256  # bytes per parameter
WAYS = ("in core", "recompute", "LoRA", "8-bit optimizer", "ZeRO-Offload", "relay", RELAY_ON_NF4, "relay on disk")
LANES = {
    "compute": "compute",
    "h2d": "link",
    "d2h": "link",
    "eps": "update on the host",
    "disk read": "disk",
    "disk write": "disk",
    "idle": "time between operations",
}


def relay_way(name: str, count: int, forecast: Forecast) -> FitWay:
    """Return a relay in `count` micro-batches, in memory or on disk, with the bytes of its forecast and no seconds."""
    bound, shelf = forecast.bound, forecast.shelf
    return FitWay(
        name,
        count,
        True,
        device=Measure(forecast.peak_device_bytes, "forecast"),
        host=Measure(forecast.needed_host_bytes, "forecast"),
        disk=Measure(0 if shelf is None else shelf.needed_bytes, "forecast"),
        binds="compute" if bound is None else LANES.get(bound.lane, bound.lane),
        pool_bytes=0 if shelf is None else shelf.memory_bytes,
    )


NO_DISK = 'give a disk: disk="2TB", or a folder on it'
adamw = partial(torch.optim.AdamW, lr=1e-4)


@dataclass(frozen=True)
class PlannedDisk:
    """A disk for the relay, and the share of its speeds that the slowest forecast assumes."""

    disk: Disk
    slow_share: float = DISK_SHARES[0]

    def at(self, share: float) -> Disk:
        """Return the disk with this share of its speeds."""
        read, write = self.disk.read_bytes_per_s * share, self.disk.write_bytes_per_s * share
        return replace(self.disk, read_bytes_per_s=read, write_bytes_per_s=write)


@dataclass(frozen=True, eq=False)
class FormulaWays:
    """All ways of one step, from a configuration.

    Args:
        config: configuration of a family that `forecast_config` supports.
        card: the card.
        limits: bytes of card, host and disk.
        rows, length: rows of the batch, and tokens of a row.
        precision: "bf16" or "fp32".
        update_params_per_s: parameters that the host updates.
        disk: for a relay on disk; None without one.
    """

    config: Any
    card: GpuCard
    limits: MachineLimits
    rows: int
    length: int
    precision: str
    update_params_per_s: float
    disk: PlannedDisk | None = None

    def all_ways(self) -> list[FitWay]:
        """Return every way with the fewest micro-batches that fit, or with one row each if none does."""
        return [self.way(name) for name in WAYS]

    def way(self, name: str) -> FitWay:
        """Return one way; without a disk, a relay on disk has a reason in place of figures."""
        if name == "relay on disk" and self.disk is None:
            return FitWay(name, reason=NO_DISK)
        if name.startswith("relay"):
            count = self._fewest(name) if name == RELAY_ON_NF4 else self._relay_count
            return self._timed_relay(self._relay(name, count))
        for recomputes in (False, True) if name in ("LoRA", "8-bit optimizer") else (name != "in core",):
            way = fewest_that_fit(self.rows, lambda k, r=recomputes: self._by_formula(name, k, r), self.limits)
            if self.limits.fits(way):
                break
        return way

    # -- formulas ------------------------------------------------------------------------------------------------------

    def _by_formula(self, name: str, count: int, recomputes: bool) -> FitWay:
        costs: dict[str, Callable[[StepSpec], StrategyCost]] = {
            "in core": in_core_cost,
            "recompute": StepSpec.recompute,
            "LoRA": partial(lora_cost, recomputes=recomputes),
            "8-bit optimizer": partial(eight_bit_cost, recomputes=recomputes),
            "ZeRO-Offload": StepSpec.zero_offload,
        }
        specs = [
            StepSpec(self.config, machine, self.rows, self.length, count, self.precision)
            for machine in (self._speeds.slow, self._speeds.middle, self._speeds.fast)
        ]
        slow, middle, fast = map(costs[name], specs)
        return FitWay(
            name,
            count,
            recomputes,
            device=Measure(middle.peak_bytes, "formula"),
            host=Measure(middle.host_bytes, "formula"),
            seconds=Measure.between(slow.seconds, fast.seconds, "formula"),
            binds=_offload_bound(specs[1]) if name == "ZeRO-Offload" else "compute",
        )

    @cached_property
    def _speeds(self) -> SpeedRange:
        return self.card.machines(self.precision, self.update_params_per_s)

    # -- relays --------------------------------------------------------------------------------------------------------

    @cached_property
    def _relay_count(self) -> int:
        """Fewest micro-batches with which a relay fits the device; the bytes of host and disk hardly depend on them."""
        return self._fewest("relay")

    def _fewest(self, name: str) -> int:
        device = MachineLimits(self.limits.device_bytes, sys.maxsize)
        return fewest_that_fit(self.rows, lambda count: self._relay(name, count), device).micro_batches

    def _relay(self, name: str, count: int) -> FitWay:
        """Return the bytes of a relay, at any speed of the machine, and the resource that binds."""
        forecast = self._forecast(name, self._speeds.middle, count, self._shelf(name == "relay on disk"))
        if forecast.shelf is not None:
            shelf = self._shelf(True, self._pool_bytes(forecast))
            forecast = self._forecast(name, self._speeds.middle, count, shelf)
        return relay_way(name, count, forecast)

    def _timed_relay(self, way: FitWay) -> FitWay:
        on_disk = way.name == "relay on disk"
        slow, fast = (
            self._forecast(way.name, machine, way.micro_batches, self._shelf(on_disk, way.pool_bytes, share))
            for machine, share in ((self._speeds.slow, self._slow_disk_share), (self._speeds.fast, 1.0))
        )
        return replace(way, seconds=Measure.between(slow.seconds, fast.seconds, "forecast"))

    @property
    def _slow_disk_share(self) -> float:
        return 1.0 if self.disk is None else self.disk.slow_share

    def _shelf(self, on_disk: bool, pool_bytes: int = 0, share: float = 1.0) -> PlannedShelf | None:
        """Return the shelf of a relay on disk, with the smallest pool that works if none is given."""
        if not on_disk or self.disk is None:
            return None
        return PlannedShelf(disk=self.disk.at(share), memory_bytes=pool_bytes or None)

    def _pool_bytes(self, least: Forecast) -> int:
        """Return the largest useful pool that the host can hold, or the smallest that works."""
        assert least.shelf is not None
        left = self.limits.host_bytes - (least.needed_host_bytes - least.shelf.memory_bytes)
        return max(least.shelf.min_bytes, min(least.shelf.max_useful_bytes, left))

    def _forecast(self, name: str, machine: Machine, count: int, shelf: PlannedShelf | None = None) -> Forecast:
        settings = RelayConfig(precision=cast(Any, self.precision), stash="host")  # it checks the precision
        return forecast_config(
            self.config,
            machine,
            micro_batches=count,
            batch=self.rows,
            sequence=self.length,
            relay_config=settings,
            optimizer=adamw,
            shelf=shelf,
            adapters=adapter_shapes(read_model_shapes(self.config).layer) if name == RELAY_ON_NF4 else (),
            base="nf4" if name == RELAY_ON_NF4 else None,
        )


def fewest_that_fit(rows: int, make: Callable[[int], FitWay], limits: MachineLimits) -> FitWay:
    """Return a way with the fewest equal micro-batches that fit, or with one row each if none does.

    Bytes shrink as the number of micro-batches grows, so a bisection finds it.
    """
    counts, make = [count for count in range(1, rows + 1) if rows % count == 0], cache(make)
    return make(counts[bisect_left(counts[:-1], True, key=lambda count: limits.fits(make(count)))])


def in_core_cost(spec: StepSpec) -> StrategyCost:
    """Return the cost in core, with the bfloat16 copies of weights that `torch.autocast` keeps for backward."""
    base = spec.in_core()
    copies = 2 * spec.model.num_params if spec.precision == "bf16" else 0
    return replace(base, device_bytes={**base.device_bytes, "autocast": copies})


def lora_cost(spec: StepSpec, recomputes: bool) -> StrategyCost:
    """Return the cost of training adapters of `LORA_RANK` on every matrix of a layer, beside frozen weights."""
    base = spec.recompute() if recomputes else spec.in_core()
    N, adapters = spec.model.num_params, spec.model.depth * adapter_params(spec.model.layer)
    kept = {name: base.device_bytes[name] for name in ("stash", "activations") if name in base.device_bytes}
    itemsize = base.device_bytes["weights"] // N
    weights = {
        "weights": itemsize * N + MASTER_BYTES * adapters,
        "gradients": MASTER_BYTES * adapters,
        "optimizer": ADAM_BYTES * adapters,
    }
    saved_s = spec.in_core().seconds / 3  # 2 of 6 operations: gradients of the frozen weights
    return StrategyCost("LoRA", spec.micro_batches, {**weights, **kept}, 0, base.seconds - saved_s, 0)


def adapter_shapes(shapes: Iterable[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Return the shapes of adapters for these shapes: two thin matrices beside every matrix."""
    matrices = [shape for shape in shapes if len(shape) == 2]
    return [thin for outputs, inputs in matrices for thin in ((LORA_RANK, inputs), (outputs, LORA_RANK))]


def adapter_params(shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the parameters of adapters for these shapes."""
    return sum(rows * columns for rows, columns in adapter_shapes(shapes))


def eight_bit_cost(spec: StepSpec, recomputes: bool) -> StrategyCost:
    """Return the cost with an optimizer state of 8 bits per moment."""
    base = spec.recompute() if recomputes else in_core_cost(spec)
    saved = round((ADAM_BYTES - EIGHT_BIT_STATE) * spec.model.num_params)
    device = {**base.device_bytes, "optimizer": base.device_bytes["optimizer"] - saved}
    return replace(base, name="8-bit optimizer", device_bytes=device)


def _offload_bound(spec: StepSpec) -> str:
    """Return the resource that takes longest in a step of ZeRO-Offload: each of these is exposed or computes."""
    machine, way = spec.machine, spec.zero_offload()
    parts = {
        "compute": spec.recompute().seconds,
        "link": way.link_bytes / machine.d2h_bytes_per_s,
        "update on the host": spec.model.num_params / machine.update_params_per_s,
    }
    return max(parts, key=lambda name: parts[name])
