"""Forecasts beside what was measured from files: figures come from the steps of one number of rows, and forecast the
others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from l2l_core import Disk, Machine, PlannedShelf, RelayConfig, forecast_config

TOLERANCE = (
    0.25  # of the seconds, on a quiet machine, of steps that are not the first of their shape; bytes must be equal
)


class Foreteller:
    """Forecasts steps of a benchmark.

    Args:
        model: configuration of the model.
        optimizer: makes the optimizer.
        config: of the relay.
        pool: memory_bytes of the shelf.
        length: tokens of a row.
    """

    def __init__(self, model: Any, optimizer: Any, config: RelayConfig, pool: str, length: int) -> None:
        self._model, self._pool = model, pool
        micro_batches = config.micro_batches
        self._known = {
            "optimizer": optimizer,
            "relay_config": config,
            "micro_batches": micro_batches,
            "sequence": length,
            "emulated": True,
        }
        self._machine: Machine | None = None
        self._disk = Disk(read_bytes_per_s=1e9, write_bytes_per_s=1e9)

    def learn(self, rows: int, lanes: Mapping[str, Mapping[str, float]]) -> None:
        """Take figures from a step that was measured."""
        self._machine = Machine(1.0, 1.0, 1.0, 1.0)
        trace = self._forecast(rows).trace  # so that seconds are operations and parameters

        def speed(lane: str) -> float:
            return lanes[lane]["bytes"] / lanes[lane]["busy_s"]

        self._machine = Machine(
            flops_per_s=trace.busy_s("compute") / lanes["compute"]["busy_s"],
            update_params_per_s=trace.busy_s("eps") / lanes["eps"]["busy_s"],
            h2d_bytes_per_s=speed("h2d"),
            d2h_bytes_per_s=speed("d2h"),
            name="figures of a step with fewer rows",
        )
        self._disk = replace(self._disk, read_bytes_per_s=speed("disk read"), write_bytes_per_s=speed("disk write"))

    def tell(self, rows: int, seconds: float, lanes: Mapping[str, Mapping[str, float]]) -> dict[str, Any] | None:
        """Forecast a step and compare it with what was measured; None before anything was learned."""
        if self._machine is None:
            return None
        forecast = self._forecast(rows)
        assert forecast.shelf is not None
        moved = {"disk read": forecast.shelf.read_bytes, "disk write": forecast.shelf.written_bytes}
        return {
            "seconds": forecast.seconds,
            "error": forecast.seconds / seconds - 1,
            "equal_bytes": all(lanes[lane]["bytes"] == nbytes for lane, nbytes in moved.items()),
            "hiding_micro_batches": forecast.hiding_micro_batches,
        }

    def _forecast(self, rows: int) -> Any:
        assert self._machine is not None
        shelf = PlannedShelf(disk=self._disk, memory_bytes=self._pool)
        return forecast_config(self._model, self._machine, batch=rows, shelf=shelf, **self._known)


def said(told: Mapping[str, Any]) -> str:
    """Put a forecast into words."""
    verdict = "within" if abs(told["error"]) <= TOLERANCE else "NOT within"
    bytes_ = "equal" if told["equal_bytes"] else "OTHERS"
    return (
        f"forecast {told['seconds']:.2f} s ({told['error']:+.0%}, {verdict} {TOLERANCE:.0%}), bytes over the disk {bytes_}; "
        f"micro-batches of this size that hide link and disk: {told['hiding_micro_batches']}"
    )
