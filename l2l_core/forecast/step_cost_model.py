"""Prices of steps with many settings, from few rehearsals.

For each number of micro-batches and place of the stash, with overlap or without, two rehearsals suffice for any number of
kept graphs and resident weights (`interpolate_profiles`): one that keeps no graph, and one that keeps all, or as many as memory
allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from l2l_core.batches import Batch
from l2l_core.config import RelayConfig
from l2l_core.forecast.cost_forecast import ForecastCosts, simulate_costs
from l2l_core.forecast.measured_costs import costs_of_rehearsal, slot_bytes
from l2l_core.forecast.memory_timeline import MemoryTimeline
from l2l_core.forecast.minimise import Priced, Run
from l2l_core.forecast.profile_transforms import interpolate_profiles, with_slots
from l2l_core.forecast.rehearsal import Rehearsal
from l2l_core.schedule_rules import kept_layer_count
from l2l_core.simulator import Cluster

_TIMED_PASSES = 2  # one alone may be slowed down by other work on the machine


class StepCostModel:
    """Prices of steps on a batch, with any settings; rehearsals take at most `max_bytes` of the device.

    `errors` are those of rehearsals: a model may not run with every number of rows, and a real device may lack memory.
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
        self.visits = len(rehearsal.parts.layers)  # of a forward, once a step was priced
        self._rehearsed: dict[RelayConfig, ForecastCosts | None] = {}
        self._kept: dict[RelayConfig, int] = {}
        self.known: dict[RelayConfig, Priced | None] = {}
        self.errors: list[Exception] = []

    def __call__(self, config: RelayConfig) -> Priced | None:
        """Price a step; None if it cannot run."""
        if config not in self.known:
            self.known[config] = self._price(config)
        return self.known[config]

    def _price(self, config: RelayConfig) -> Priced | None:
        kind = kind_of(replace(config, schedule="breadth_first"))
        costs = self._costs(kind)
        if costs is None:
            return None
        self.visits = costs.profile.forward_visits
        if config.schedule == "depth_first":
            return self._price_depth_first(config, costs)
        kept = kept_layer_count(asdict(config), self.visits)
        if kept > 1:
            most = self._max_kept(kind)
            if most < kept:
                return None
            keeping = self._costs(replace(kind, keep=most, resident=max(0, most - kind.ahead - 1)))
            if keeping is None:
                return None
            try:
                costs = replace(costs, profile=interpolate_profiles(costs.profile, keeping.profile, kept))
            except ValueError as error:
                self.errors.append(error)
                return None
        profile = with_slots(costs.profile, config, slot_bytes(self._rehearsal, config))
        return self.price_of(replace(costs, profile=profile), config)

    def price_of(self, costs: ForecastCosts, config: RelayConfig) -> Priced:
        """Price a step with known costs."""
        figures, cluster = self._figures, self._cluster  # without `self`, which keeps the result: no reference cycle

        def run() -> Run:
            trace = simulate_costs(costs, config, figures, cluster).trace
            return Run(trace.span_s + costs.overhead_s + cluster.overhead_s, trace.peak_bytes("host"))

        return Priced(config, costs.peak_bytes("device"), run)

    def exact(self, config: RelayConfig, max_passes: int = 1) -> Priced | None:
        """Price a step by rehearsing it; None if it cannot run."""
        costs = self.rehearse(config, max_passes)
        return None if costs is None else self.price_of(costs, config)

    def rehearse(self, config: RelayConfig, max_passes: int) -> ForecastCosts | None:
        """Rehearse a step with at most `max_passes` timed passes; None if it cannot run."""
        self._rehearsal.on_trial(config)
        try:
            micro_batches = self._rehearsal.split(self._batch, config.micro_batches)
            return costs_of_rehearsal(self._rehearsal, micro_batches, config, max_passes)
        except Exception as error:
            assert error.__traceback__ is not None
            self.errors.append(
                error.with_traceback(error.__traceback__.tb_next)
            )  # without this frame: no reference cycle
            return None

    def _costs(self, config: RelayConfig) -> ForecastCosts | None:
        if config not in self._rehearsed:
            self._rehearsed[config] = self.rehearse(config, _TIMED_PASSES)
        return self._rehearsed[config]

    def _max_kept(self, kind: RelayConfig) -> int:
        if kind not in self._kept:
            self._kept[kind] = self._count_kept(kind)
        return self._kept[kind]

    def _price_depth_first(self, config: RelayConfig, costs: ForecastCosts) -> Priced | None:
        """Price a depth-first step by rehearsing it, unless the memory certainly does not suffice."""
        layers = self._rehearsal.parts.layers
        config = config.for_layers(len(layers))  # a layer has one slot, however often it is visited
        gradient = 4 * max((unit.gradient_numel for unit in layers), default=0)
        per_visit = _graph_bytes(costs) + slot_bytes(self._rehearsal, config) + gradient
        if self._max_bytes is not None and costs.peak_bytes("device") + self.visits * per_visit > self._max_bytes:
            return None
        return self.exact(config, _TIMED_PASSES)

    def _count_kept(self, kind: RelayConfig) -> int:
        """Return the number of graphs that a rehearsal can keep in `max_bytes`."""
        costs = self._costs(kind)
        if self._max_bytes is None or costs is None:
            return self.visits
        every = range(costs.profile.micro_batches)
        spare = self._max_bytes - replace(costs, representatives=every).peak_bytes("device")
        per_graph = _graph_bytes(costs) * len(every) + slot_bytes(self._rehearsal, kind)
        return min(self.visits, 1 + max(0, spare) // per_graph)


def kind_of(config: RelayConfig) -> RelayConfig:
    """Return the settings of the rehearsal from which a step with these settings is priced."""
    return replace(config, ahead=min(config.ahead, 1), resident=0, keep=0)


def _graph_bytes(costs: ForecastCosts) -> int:
    """Return an upper bound of the bytes of a layer's graph per micro-batch: the highest rise of a backward turn."""
    timeline, stays = MemoryTimeline(costs.profile), costs.profile.stays
    turns = ((at, turn) for (at, _), turn in timeline.turns.items() if 0 <= at < len(stays))
    return max((turn.rise("device").peak for at, turn in turns if stays[at].is_backward), default=0)
