"""The forecast of a relay's next step: which costs apply, and for which link and budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from l2l_core.batches import Batch, shapes_of, split
from l2l_core.config import RelayConfig
from l2l_core.devices import Device, EmulatedDevice
from l2l_core.forecast.cost_forecast import ForecastCosts, forecast_costs
from l2l_core.forecast.forecast import Forecast
from l2l_core.forecast.measured_costs import costs_of_rehearsal, costs_of_step
from l2l_core.forecast.rehearsal import Rehearsal
from l2l_core.forecast.what_fits import search_settings
from l2l_core.simulator import COPY_LANES, Cluster
from l2l_core.step import PassKind
from l2l_core.trace import Trace


@dataclass(frozen=True, slots=True)
class LastStep:
    """What a relay knows of the step that it made last.

    Attributes:
        trace: of the last step or attempt, if there was any.
        number: of the last finished step.
        kind: of what kind it was, if that is known.
        now: the same for an empty batch, as things stand.
    """

    trace: Trace | None
    number: int
    kind: PassKind | None
    current_kind: PassKind

    def micro_batch_shapes(self) -> list[Any] | None:
        """Return the shapes of its micro-batches.

        None if it failed or was made with other workers, or the model, its layers or settings are others now.
        """
        trace, kind = self.trace, self.kind
        if trace is None or kind is None or trace.step != self.number or trace.worker.count > 1:
            return None  # with others, costs are those of a part
        if (kind.training, kind.layers) != (self.current_kind.training, self.current_kind.layers):
            return None
        if any(trace.settings.get(name) != value for name, value in asdict(kind.config).items() if name != "seed"):
            return None
        return list(kind.shapes)


def forecast_step(
    rehearsal: Rehearsal,
    batch: Batch,
    config: RelayConfig,
    device: Device | Mapping[str, Any],
    host_limit_bytes: int | None,
    last: LastStep,
    cluster: Cluster = Cluster(count=1),  # noqa: B008 - frozen
    add_storage: Callable[[ForecastCosts], ForecastCosts] = lambda costs: costs,
) -> Forecast:
    """Forecast a relay's next step: from its last one if that was of the same kind, else from a rehearsal.

    Arguments and errors are those of `Relay.forecast`, `fleet` is its workers; `rehearsal` has the relay's parts, and `where`
    tells costs where its weights and state are, if not in memory. Where the step does not fit the device, `Forecast.advice` says
    what would.
    """
    if not isinstance(config, RelayConfig):
        raise TypeError(f"config={config!r}: give a RelayConfig, or None for the relay's own")
    if host_limit_bytes is not None and not host_limit_bytes > 0:
        raise ValueError(f"host_bytes={host_limit_bytes!r}: must be positive, or None for no limit")
    figures = _check_figures(device)
    micro_batches = split(batch, config.micro_batches)
    costs, recorded = (
        None,
        None if cluster.per_micro_batch else last.micro_batch_shapes(),
    )  # one alone adds up before anything leaves
    if recorded is not None and last.trace is not None and not _lifts_link_limit(figures, last.trace.settings):
        costs = costs_of_step(rehearsal, last.trace, recorded, [shapes_of(each) for each in micro_batches], config)
    costs = add_storage(costs or costs_of_rehearsal(rehearsal, micro_batches, config))
    forecast = forecast_costs(costs, config, figures, host_limit_bytes, cluster)
    budget_bytes = forecast.memory_bytes
    if budget_bytes is None or forecast.peak_device_bytes <= budget_bytes:
        return forecast
    return replace(forecast, advice=str(search_settings(rehearsal, batch, config, figures, budget_bytes)))


def _check_figures(device: Device | Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a link and a budget, checked."""
    if isinstance(device, Device):
        return device.figures()
    if not isinstance(device, Mapping):
        raise TypeError(f"device={device!r}: give a Device, or figures such as {{'h2d_bytes_per_s': 1e9}}")
    known = ("memory_bytes", "h2d_bytes_per_s", "d2h_bytes_per_s", "latency_s")
    if unknown := [name for name in device if name not in known]:
        raise ValueError(f"device has the figure {unknown[0]!r}: known are {', '.join(known)}")
    return EmulatedDevice(**device).figures()  # checks the values


def _lifts_link_limit(figures: Mapping[str, Any], recorded_figures: Mapping[str, Any]) -> bool:
    """Whether a link is asked for without a limit, where a limit hid how fast it is."""
    names = [f"{lane}_bytes_per_s" for lane in COPY_LANES]
    return any(recorded_figures.get(name) and not figures.get(name) for name in names)
