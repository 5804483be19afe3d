"""What steps with many settings need, from few rehearsals.

One rehearsal that keeps no graph and one that keeps all tell, for each number of micro-batches, place of the stash and way to
load, of any number of kept graphs and weights in between (`mixture.py`). A step that keeps all graphs takes as much memory as one
in core: where there is too little for that, fewer are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from l2l_core.batches import Batch, split
from l2l_core.config import RelayConfig
from l2l_core.forecast.from_costs import Costs
from l2l_core.forecast.measured_costs import costs_of_rehearsal, slot_bytes
from l2l_core.forecast.memory_walk import MemoryWalk
from l2l_core.forecast.mixture import mixed, with_slots
from l2l_core.forecast.rehearsal import Rehearsal
from l2l_core.forecast.smallest import Priced, device_bytes
from l2l_core.rules import kept_of
from l2l_core.simulator import Fleet

_PASSES = 2  # timed ones, of short steps: one may fall into a moment in which the machine does something else


class _Keeping(NamedTuple):
    """A step that kept so many graphs."""

    costs: Costs
    most: int


class Prices:
    """Says what a step on a batch needs with any settings.

    Args:
        rehearsal: of the relay.
        batch: to step on.
        figures: of the device.
        most_bytes: that rehearsals may take of the device; None for no limit.
        fleet: the workers that make such steps together.

    Attributes:
        figures: as given.
        visits: of a forward, as far as is known.
        errors: what went wrong in rehearsals; a model need not run with every number of rows, nor a real device have the room.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        batch: Batch,
        figures: Mapping[str, Any],
        most_bytes: int | None,
        fleet: Fleet = Fleet(count=1),  # noqa: B008 - frozen
    ) -> None:
        self._rehearsal, self._batch, self.figures, self._most_bytes = rehearsal, batch, figures, most_bytes
        self._fleet = fleet
        self.visits = len(rehearsal.parts.layers)
        self._recomputing: dict[RelayConfig, Costs | None] = {}
        self._keeping: dict[RelayConfig, _Keeping | None] = {}
        self.errors: list[Exception] = []

    def __call__(self, config: RelayConfig) -> Priced | None:
        """Price a step; None if it cannot be made."""
        kind = replace(config, ahead=min(config.ahead, 1), resident=0, keep=0, schedule="breadth_first")
        if kind not in self._recomputing:
            self._recomputing[kind] = self.rehearse(kind, _PASSES)
        costs = self._recomputing[kind]
        if costs is None:
            return None
        self.visits = (len(costs.profile.stays) + 1) // 2
        if config.schedule == "depth_first":
            return self._depth_first(config, costs)
        kept = kept_of(asdict(config), self.visits)
        if kept > 1:
            keeping = self._keeping_of(kind, costs)
            if keeping is None or keeping.most < kept:
                return None
            try:
                costs = replace(costs, profile=mixed(costs.profile, keeping.costs.profile, kept))
            except ValueError as error:
                self.errors.append(error)
                return None
        return self.priced(self._with_slots(costs, config), config)

    def priced(self, costs: Costs, config: RelayConfig) -> Priced:
        """Price a step of known costs."""
        return Priced.of(costs, config, self.figures, self._fleet)

    def rehearse(self, config: RelayConfig, most_passes: int) -> Costs | None:
        """Rehearse the very step, timed so often; None if it cannot be made."""
        try:
            return costs_of_rehearsal(self._rehearsal, split(self._batch, config.micro_batches), config, most_passes)
        except Exception as error:
            self.errors.append(error)
            return None

    def _depth_first(self, config: RelayConfig, costs: Costs) -> Priced | None:
        """Price a step that is told by no other one: where micro-batches come one after another, the very step is rehearsed."""
        config = config.over(len(self._rehearsal.parts.layers))  # a layer has one slot, however often it is visited
        layer = 4 * max((unit.gradient_numel for unit in self._rehearsal.parts.layers), default=0)
        in_core = device_bytes(costs) + self.visits * (
            _graph_bytes(costs) + slot_bytes(self._rehearsal, config) + layer
        )
        if self._most_bytes is not None and in_core > self._most_bytes:
            return None
        found = self.rehearse(config, _PASSES)
        return None if found is None else self.priced(found, config)

    def _keeping_of(self, kind: RelayConfig, costs: Costs) -> _Keeping | None:
        """The same step, keeping all graphs, or as many as there is memory for."""
        if kind not in self._keeping:
            most = self._most_kept(kind, costs)
            asked = replace(kind, keep=most, resident=max(0, most - kind.ahead - 1))
            found = self.rehearse(asked, _PASSES) if most > 1 else None
            self._keeping[kind] = None if found is None else _Keeping(found, most)
        return self._keeping[kind]

    def _most_kept(self, kind: RelayConfig, costs: Costs) -> int:
        """How many graphs can be kept in a rehearsal, which has no budget but uses memory like any step."""
        if self._most_bytes is None:
            return self.visits
        graph = _graph_bytes(costs) * costs.profile.micro_batches
        spare = self._most_bytes - device_bytes(replace(costs, stands=range(costs.profile.micro_batches)))
        return min(self.visits, 1 + max(0, spare) // (graph + slot_bytes(self._rehearsal, kind)))

    def _with_slots(self, costs: Costs, config: RelayConfig) -> Costs:
        return replace(costs, profile=with_slots(costs.profile, config, slot_bytes(self._rehearsal, config)))


def _graph_bytes(costs: Costs) -> int:
    """What the graph of one layer and micro-batch takes at most: all that comes while it is recomputed and back-propagated."""
    walk, stays = MemoryWalk(costs.profile), costs.profile.stays
    rises = [
        turn.rise("device").high
        for (at, _), turn in walk.turns.items()
        if 0 <= at < len(stays) and stays[at].is_backward
    ]
    return max(rises, default=0)
