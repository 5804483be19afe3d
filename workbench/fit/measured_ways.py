"""Ways to train a model that is built: bytes and seconds of steps on copies of it.

Steps run on an emulated device of this machine, in float32. In core and recompute run as plans of `l2l_core.strategies`, whose
bytes are metered. The relays are forecast by rehearsal, which is exact for device bytes. The other ways are arithmetic on
these figures. For a card, bytes stay the same, and compute is scaled: the operations of a step, as torch counts them, over the
speed of the card.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, TypeVar

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from l2l_core import Disk, EmulatedDevice, FileShelf, Forecast, Machine, Profile, Relay, RelayConfig, simulate
from l2l_core.batches import ModelCall, rows_rule
from l2l_core.model import accumulate, preserve_random_state, resolve_layers
from l2l_core.simulator import TurnCost
from l2l_core.strategies import Full, Lab, Plain, StrategyResult
from workbench.fit.cards import SpeedRange
from workbench.fit.fit_table import RELAY_ON_NF4, FitWay, MachineLimits, Measure, Origin
from workbench.fit.formula_ways import (
    EIGHT_BIT_STATE,
    NO_DISK,
    PlannedDisk,
    adamw,
    adapter_params,
    fewest_that_fit,
    relay_way,
)
from workbench.lessons.strategy_costs import ADAM_BYTES, MASTER_BYTES

T = TypeVar("T")
_TIMED_STEPS = 3  # in core after every measurement, and one before them that is not timed
_LEAST_MARGIN = 0.2  # of the seconds; forecasts of steps on a quiet machine are within 10 %, see `docs/BENCHMARKS.md`


@dataclass(frozen=True, eq=False)
class MeasuredWays:
    """All ways of one step of a built model.

    Args:
        model: stays as it is; copies are trained.
        batch: the whole batch.
        rows: its rows, which are divided into micro-batches.
        limits: bytes of device, host and disk.
        device: emulated, for its link; its budget is not used.
        speeds: of a card to which seconds are scaled; None for the seconds of this machine.
        disk: for a relay on disk; None without one.
        options: `layers=`, `loss=` and others, as for `Relay`.
        known: results of measurements of this model and batch, which further instances reuse.
    """

    model: nn.Module
    batch: Any
    rows: int
    limits: MachineLimits
    device: EmulatedDevice
    speeds: SpeedRange | None = None
    disk: PlannedDisk | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def all_ways(self) -> list[FitWay]:
        """Return every way with the fewest micro-batches that fit, or with one row each if none does."""
        self._make_ways()  # measures; the steps timed in between show how much the speed of the machine varies
        return self._make_ways()

    def _make_ways(self) -> list[FitWay]:
        makers = (self._in_core, self._recompute, self._lora, self._eight_bit, self._zero_offload, self._relay)
        ways = [fewest_that_fit(self.rows, make, self.limits) for make in makers]
        by_formula = FitWay(RELAY_ON_NF4, reason="forecast from a configuration, for a card: give both")
        return [*ways, by_formula, self._relay_on_disk(ways[-1].micro_batches)]

    # -- in core -------------------------------------------------------------------------------------------------------

    def _in_core(self, count: int) -> FitWay:
        plain, origin = self._results(count)[0], "measured" if self.speeds is None else "formula"
        return FitWay(
            "in core",
            count,
            device=Measure(plain.peak_device_bytes, "measured"),
            seconds=self._seconds(count, 1, origin),
        )

    def _recompute(self, count: int) -> FitWay:
        plain, full = self._results(count)
        device, origin = Measure(full.peak_device_bytes, "measured"), "forecast" if self.speeds is None else "formula"
        return FitWay(
            "recompute", count, True, device, seconds=self._seconds(count, full.seconds / plain.seconds, origin)
        )

    def _results(self, count: int) -> tuple[StrategyResult, StrategyResult]:
        """Return metered steps by the plans that keep everything, and that recompute every layer."""

        def measure() -> tuple[StrategyResult, StrategyResult]:
            options = {**self.options, "layers": self._layer_names}
            lab = Lab(self.model, self.batch, adamw(self.model.parameters()), micro_batches=count, **options)
            return lab.run_policy(Plain()), lab.run_policy(Full())

        return self._remembered(("plans", count), measure)

    def _remembered(self, key: tuple[str, int, *tuple[str, ...]], measure: Callable[[], T]) -> T:
        """Return the result for a key, whose second part is the number of micro-batches; time steps after measuring."""
        if key not in self.known:
            self.known[key] = measure()
            after = self._time_in_core(key[1])
            self._samples(key[1]).extend(after)
            self.known["after", *key] = median(after)
        return self.known[key]

    def _samples(self, count: int) -> list[float]:
        return self.known.setdefault(("samples", count), [])

    # -- by arithmetic on these ----------------------------------------------------------------------------------------

    def _lora(self, count: int) -> FitWay:
        whole, kept = self._in_core(count), MASTER_BYTES + ADAM_BYTES  # gradients and moments; weights stay
        shapes = (tuple(param.shape) for layer in self._layers for param in layer.parameters())
        added = (MASTER_BYTES + kept) * adapter_params(shapes)
        device = Measure(whole.device.value - kept * self._num_params + added, "formula")
        return FitWay("LoRA", count, device=device, seconds=self._seconds(count, 4 / 6, "formula"))

    def _eight_bit(self, count: int) -> FitWay:
        whole = self._in_core(count)
        device = Measure(whole.device.value - (ADAM_BYTES - EIGHT_BIT_STATE) * self._num_params, "formula")
        return replace(whole, name="8-bit optimizer", device=device, seconds=replace(whole.seconds, origin="formula"))

    def _zero_offload(self, count: int) -> FitWay:
        whole, N = self._recompute(count), self._num_params
        largest = max(sum(param.numel() for param in layer.parameters()) for layer in self._layers)
        device = whole.device.value - (MASTER_BYTES + ADAM_BYTES) * N + 2 * MASTER_BYTES * largest
        host = Measure((2 * MASTER_BYTES + ADAM_BYTES) * N, "formula")
        link = self.device.figures()["d2h_bytes_per_s"] if self.speeds is None else self.speeds.middle.d2h_bytes_per_s
        moved_s = (count + 1) * MASTER_BYTES * N / link if link else 0.0
        seconds = replace(whole.seconds, value=whole.seconds.value + moved_s, origin="formula")
        binds = "link" if moved_s > whole.seconds.value else "compute"
        return FitWay("ZeRO-Offload", count, True, Measure(device, "formula"), host, seconds=seconds, binds=binds)

    # -- relays --------------------------------------------------------------------------------------------------------

    def _relay(self, count: int) -> FitWay:
        def rehearse() -> Forecast:
            with self._open_relay(count) as relay:
                return relay.forecast(self.batch)

        key = "relay", count, str(self._unlimited.figures())
        forecast = self._remembered(key, rehearse)
        return replace(relay_way("relay", count, forecast), seconds=self._relay_seconds(forecast, key))

    def _relay_on_disk(self, count: int) -> FitWay:
        if self.disk is None:
            return FitWay("relay on disk", reason=NO_DISK)
        disk = self.disk.disk
        key = ("relay on disk", count, str(self._unlimited.figures()), str(disk))
        forecast = self._remembered(key, lambda: self._rehearse_on_disk(count, disk))
        assert forecast.shelf is not None
        seconds, shelf = self._relay_seconds(forecast, key), forecast.shelf
        moved_s = max(shelf.read_bytes / disk.read_bytes_per_s, shelf.written_bytes / disk.write_bytes_per_s)
        if self.speeds is not None:
            seconds = replace(seconds, value=max(seconds.value, moved_s), origin="formula")
        return replace(relay_way("relay on disk", count, forecast), seconds=seconds)

    def _rehearse_on_disk(self, count: int, disk: Disk) -> Forecast:
        """Return the forecast with the smallest pool that works, which a first forecast states."""
        pool_bytes, forecasts = 16 * self._num_params + (1 << 20), list[Forecast]()  # at first room for everything
        for _ in range(2):
            with (
                tempfile.TemporaryDirectory() as folder,
                self._open_relay(count, FileShelf(folder=folder, memory_bytes=pool_bytes)) as relay,
            ):
                forecasts.append(relay.forecast(self.batch, disk=disk))
            shelf = forecasts[-1].shelf
            assert shelf is not None
            pool_bytes = shelf.min_bytes
        return forecasts[-1]

    def _open_relay(self, count: int, shelf: FileShelf | None = None) -> Relay:
        options = {**self.options, "layers": self._layer_names}
        model, config = copy.deepcopy(self.model), RelayConfig(micro_batches=count, stash="host")
        return Relay(model, adamw, self._unlimited, config=config, shelf=shelf, **options)

    @property
    def _unlimited(self) -> EmulatedDevice:
        """The device without its budget, so that a forecast searches for no other settings."""
        figures = self.device.figures()
        return EmulatedDevice(None, figures["h2d_bytes_per_s"], figures["d2h_bytes_per_s"], figures["latency_s"])

    def _relay_seconds(self, forecast: Forecast, key: tuple[str, int, *tuple[str, ...]]) -> Measure:
        """Return the seconds of a forecast, corrected for the speed of the machine at the time of its rehearsal."""
        count = key[1]
        if self.speeds is None:
            typical, share = self._timed(count)
            seconds = forecast.seconds * typical / self.known["after", *key]
            return Measure(seconds, "forecast", share * seconds)
        slow, fast = (self._simulated(forecast, count, machine) for machine in (self.speeds.slow, self.speeds.fast))
        return Measure.between(slow, fast, "forecast")

    def _simulated(self, forecast: Forecast, count: int, machine: Machine) -> float:
        """Return the seconds of a rehearsed step with the compute, link and updates of a card's machine."""
        profile = Profile.of(forecast.trace)
        compute = self._operations / machine.flops_per_s / self._timed(count)[0]
        here_s = sum(layer.update_s + layer.reduce_s for layer in profile.layers.values())
        update = self._num_params / machine.update_params_per_s / here_s
        layers = {
            key: layer._replace(update_s=update * layer.update_s, reduce_s=update * layer.reduce_s)
            for key, layer in profile.layers.items()
        }

        def scale(_: int, turns: tuple[TurnCost, ...]) -> Iterator[TurnCost]:
            for turn in turns:
                yield turn._replace(
                    ops=tuple(op._replace(seconds=compute * op.seconds, overhead_s=0.0) for op in turn.ops)
                )

        device = EmulatedDevice(None, machine.h2d_bytes_per_s, machine.d2h_bytes_per_s)
        return simulate(profile.map_turns(scale, layers=layers), forecast.config, device).span_s

    # -- seconds -------------------------------------------------------------------------------------------------------

    def _seconds(self, count: int, factor: float, origin: Origin) -> Measure:
        """Return the seconds of a step that computes `factor` times as much as one in core."""
        if self.speeds is None:
            seconds, share = self._timed(count)
            return Measure(factor * seconds, origin, share * factor * seconds)
        slow, fast = (
            factor * self._operations / machine.flops_per_s for machine in (self.speeds.slow, self.speeds.fast)
        )
        return Measure.between(slow, fast, origin)

    def _timed(self, count: int) -> tuple[float, float]:
        """Return the median seconds of a step in core, and the margin of all seconds as a share."""
        samples = self._samples(count)
        if not samples:
            samples.extend(self._time_in_core(count))
        typical = median(samples)
        return typical, max(_LEAST_MARGIN, (max(samples) - min(samples)) / typical)

    def _time_in_core(self, count: int) -> list[float]:
        model, call = copy.deepcopy(self.model), self._call
        optimizer, seconds = adamw(model.parameters()), list[float]()
        parts = rows_rule(self.options.get("split"))(self.batch).split(count)
        with preserve_random_state():
            for _ in range(1 + _TIMED_STEPS):
                began_s = time.perf_counter()
                accumulate(model, parts, call.objective, [count] * count, range(count))
                optimizer.step()
                optimizer.zero_grad()
                seconds.append(time.perf_counter() - began_s)
        return seconds[1:]

    @cached_property
    def _operations(self) -> int:
        """Floating-point operations of forward and backward of the batch."""
        model = copy.deepcopy(self.model)
        with preserve_random_state(), FlopCounterMode(display=False) as counter:
            accumulate(model, [self.batch], self._call.objective, [1], [0])
        return counter.get_total_flops()

    @property
    def _call(self) -> ModelCall:
        return ModelCall(self.model, self.options.get("loss"), self.options.get("objective"))

    # -- the model -----------------------------------------------------------------------------------------------------

    @cached_property
    def _layer_names(self) -> list[str]:
        return [*resolve_layers(self.model, self.options.get("layers"))]

    @property
    def _layers(self) -> list[nn.Module]:
        return [self.model.get_submodule(name) for name in self._layer_names]

    @cached_property
    def _num_params(self) -> int:
        return sum(param.numel() for param in self.model.parameters())
