"""Forecast of a relay's next step: the source of its costs, and checks of link and budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from l2l_core.batches import Batch, shapes_of
from l2l_core.config import RelayConfig
from l2l_core.devices import Device, EmulatedDevice
from l2l_core.forecast.cost_forecast import ForecastCosts, forecast_costs
from l2l_core.forecast.forecast import Forecast
from l2l_core.forecast.measured_costs import costs_of_rehearsal, costs_of_step
from l2l_core.forecast.rehearsal import Rehearsal
from l2l_core.forecast.what_fits import search_settings
from l2l_core.simulator import Cluster
from l2l_core.step import PassKind
from l2l_core.trace import Trace

_SPEEDS = ("h2d_bytes_per_s", "d2h_bytes_per_s")

Recording = tuple[Trace, list[Any]]  # of a step, with the shapes of its micro-batches


def last_recording(trace: Trace | None, number: int, kind: PassKind | None, current_kind: PassKind) -> Recording | None:
    """Return the recording of the last finished step; `current_kind` is that of an empty batch now.

    None if it failed or ran on several workers, or if the model, its layers or settings have changed since.
    """
    if trace is None or kind is None or trace.step != number or trace.worker.count > 1:
        return None
    if (kind.training, kind.layers) != (current_kind.training, current_kind.layers):
        return None
    if kind.config.has_own_schedule:
        return None
    if any(
        trace.settings.get(name) != value
        for name, value in kind.config.to_plain().items()
        if name not in ("seed", "verify")
    ):
        return None
    return trace, list(kind.shapes)


def forecast_step(
    rehearsal: Rehearsal,
    batch: Batch,
    config: RelayConfig,
    device: Device | Mapping[str, Any],
    host_limit_bytes: int | None,
    recording: Recording | None,
    cluster: Cluster,
    add_storage: Callable[[ForecastCosts], ForecastCosts] = lambda costs: costs,
) -> Forecast:
    """Forecast a relay's next step, from its last one if that was of the same kind, else from a rehearsal.

    Arguments and errors are those of `Relay.forecast`; `add_storage` moves weights and state in the costs to where they are,
    if not in memory. If the step does not fit the device, `Forecast.advice` has settings that do.
    """
    if not isinstance(config, RelayConfig):
        raise TypeError(f"config={config!r}: give a RelayConfig, or None for the relay's own")
    if host_limit_bytes is not None and not host_limit_bytes > 0:
        raise ValueError(f"host_bytes={host_limit_bytes!r}: must be positive, or None for no limit")
    figures = _check_figures(device)
    micro_batches, costs = rehearsal.split(batch, config.micro_batches), None
    if recording is not None and not cluster.per_micro_batch:  # the trace of a single worker has no pushes of each
        recorded = recording[0].settings
        # A speed limit in the recording hides the speed without it.
        is_slower = any(recorded.get(name) and not figures.get(name) for name in _SPEEDS)
        if not is_slower:
            costs = costs_of_step(rehearsal, *recording, [shapes_of(each) for each in micro_batches], config)
    costs = add_storage(costs or costs_of_rehearsal(rehearsal, micro_batches, config))
    forecast = forecast_costs(costs, config, figures, host_limit_bytes, cluster)
    budget_bytes = forecast.memory_bytes
    if budget_bytes is None or forecast.peak_device_bytes <= budget_bytes:
        return forecast
    return replace(forecast, advice=str(search_settings(rehearsal, batch, config, figures, budget_bytes)))


def _check_figures(device: Device | Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a link and a budget, checked."""
    if isinstance(device, Device):
        return device.figures()
    if not isinstance(device, Mapping):
        raise TypeError(f"device={device!r}: give a Device, or figures such as {{'h2d_bytes_per_s': 1e9}}")
    known = ("memory_bytes", *_SPEEDS, "latency_s")
    if unknown := [name for name in device if name not in known]:
        raise ValueError(f"device has the figure {unknown[0]!r}; accepted are {', '.join(known)}")
    return EmulatedDevice(**device).figures()  # checks the values
