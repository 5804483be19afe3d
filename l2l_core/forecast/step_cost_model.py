"""The needs of steps with many settings, from few rehearsals.

For each number of micro-batches and place of the stash, with overlap or without, two rehearsals give any number of kept graphs
and weights (`profile_interpolation.py`): one that keeps no graph, and one that keeps all. The second takes as much memory as a step in core:
where there is too little for that, fewer are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from l2l_core.batches import Batch, split
from l2l_core.config import RelayConfig
from l2l_core.forecast.cost_forecast import ForecastCosts, simulate_costs
from l2l_core.forecast.measured_costs import costs_of_rehearsal, slot_bytes
from l2l_core.forecast.memory_timeline import MemoryTimeline
from l2l_core.forecast.minimise import Priced, Run
from l2l_core.forecast.profile_interpolation import interpolate_profiles, with_slots
from l2l_core.forecast.rehearsal import Rehearsal
from l2l_core.schedule_rules import kept_layer_count
from l2l_core.simulator import Cluster

_TIMED_PASSES = 2  # timed ones, of short steps: one may fall into a moment in which the machine does something else


class StepCostModel:
    """Prices of steps on a batch, with any settings.

    Args:
        rehearsal: of the relay.
        batch: to step on.
        figures: of the device.
        most_bytes: that rehearsals may take of the device; None for no limit.
        fleet: the workers that make such steps together.

    Attributes:
        visits: of a forward, as far as is known.
        known: the steps priced so far, by their settings.
        errors: what went wrong in rehearsals; a model need not run with every number of rows, nor a real device have the room.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        batch: Batch,
        figures: Mapping[str, Any],
        max_bytes: int | None,
        cluster: Cluster = Cluster(count=1),  # noqa: B008 - frozen
    ) -> None:
        self._rehearsal, self._batch, self._figures, self._max_bytes = rehearsal, batch, figures, max_bytes
        self._cluster = cluster
        self.visits = len(rehearsal.parts.layers)
        self._costs = cache(lambda config: self.rehearse(config, _TIMED_PASSES))
        self._max_kept = cache(self._count_kept)
        self.known: dict[RelayConfig, Priced | None] = {}
        self.errors: list[Exception] = []

    def __call__(self, config: RelayConfig) -> Priced | None:
        """Price a step; None if it cannot be made."""
        if config not in self.known:
            self.known[config] = self._price(config)
        return self.known[config]

    def _price(self, config: RelayConfig) -> Priced | None:
        kind = kind_of(replace(config, schedule="breadth_first"))
        costs = self._costs(kind)
        if costs is None:
            return None
        self.visits = (len(costs.profile.stays) + 1) // 2
        if config.schedule == "depth_first":
            return self._cost_depth_first(config, costs)
        kept = kept_layer_count(asdict(config), self.visits)
        if kept > 1:
            most = self._max_kept(kind)
            keeping = (
                self._costs(replace(kind, keep=most, resident=max(0, most - kind.ahead - 1))) if most >= kept else None
            )
            if keeping is None:
                return None
            try:
                costs = replace(costs, profile=interpolate_profiles(costs.profile, keeping.profile, kept))
            except ValueError as error:
                self.errors.append(error)
                return None
        profile = with_slots(costs.profile, config, slot_bytes(self._rehearsal, config))
        return self.cost_of(replace(costs, profile=profile), config)

    def cost_of(self, costs: ForecastCosts, config: RelayConfig) -> Priced:
        """Price a step of known costs."""

        def run() -> Run:
            trace = simulate_costs(costs, config, self._figures, self._cluster)
            return Run(trace.span_s + costs.overhead_s + self._cluster.overhead_s, trace.peak_bytes("host"))

        return Priced(config, costs.peak_bytes("device"), run)

    def exact(self, config: RelayConfig, most_passes: int = 1) -> Priced | None:
        """Price a step by a rehearsal of the very step; None if it cannot be made."""
        costs = self.rehearse(config, most_passes)
        return None if costs is None else self.cost_of(costs, config)

    def rehearse(self, config: RelayConfig, max_passes: int) -> ForecastCosts | None:
        """Rehearse the very step, timed so often; None if it cannot be made."""
        try:
            return costs_of_rehearsal(self._rehearsal, split(self._batch, config.micro_batches), config, max_passes)
        except Exception as error:
            self.errors.append(error)
            return None

    def _cost_depth_first(self, config: RelayConfig, costs: ForecastCosts) -> Priced | None:
        """Price a step that is told by no other one: where micro-batches come one after another, the very step is rehearsed."""
        config = config.for_layers(
            len(self._rehearsal.parts.layers)
        )  # a layer has one slot, however often it is visited
        layer = 4 * max((unit.gradient_numel for unit in self._rehearsal.parts.layers), default=0)
        in_core = costs.peak_bytes("device") + self.visits * (
            _graph_bytes(costs) + slot_bytes(self._rehearsal, config) + layer
        )
        if self._max_bytes is not None and in_core > self._max_bytes:
            return None
        return self.exact(config, _TIMED_PASSES)

    def _count_kept(self, kind: RelayConfig) -> int:
        """Count the graphs that can be kept in a rehearsal, which has no budget but uses memory like any step."""
        costs = self._costs(kind)
        if self._max_bytes is None or costs is None:
            return self.visits
        graph = _graph_bytes(costs) * costs.profile.micro_batches
        spare = self._max_bytes - replace(costs, representatives=range(costs.profile.micro_batches)).peak_bytes(
            "device"
        )
        return min(self.visits, 1 + max(0, spare) // (graph + slot_bytes(self._rehearsal, kind)))


def kind_of(config: RelayConfig) -> RelayConfig:
    """Return the settings of the rehearsal from which a step with these settings is priced."""
    return replace(config, ahead=min(config.ahead, 1), resident=0, keep=0)


def _graph_bytes(costs: ForecastCosts) -> int:
    """What the graph of one layer and micro-batch takes at most: all that comes while it is recomputed and back-propagated."""
    walk, stays = MemoryTimeline(costs.profile), costs.profile.stays
    rises = [
        turn.rise("device").peak
        for (at, _), turn in walk.turns.items()
        if 0 <= at < len(stays) and stays[at].is_backward
    ]
    return max(rises, default=0)
