"""Costs of a step that keeps more or fewer graphs than a measured step, by formula.

The size of a layer's graph is measured at the end of its forward. A kept graph stays on the device until backward, which
becomes shorter by a recompute: the time of forward, but at most half of backward, since the gradients take at least as much
work. With the stash on the host, the outputs of a layer with a kept graph are fetched too, because the graph may have saved
them. `l2l_core/forecast/profile_transforms.py` uses measurements with and without kept graphs instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from l2l_core import Profile
from l2l_core.forecast import MemoryTimeline, TurnMemory
from l2l_core.simulator import ComputeOp, MemorySamples, TurnCost

Call = tuple[int, int]  # visit of forward and micro-batch


def with_kept_graphs(
    profile: Profile,
    old_keep: int,
    new_keep: int,
    times: Mapping[str, int] | None = None,
    count: float = 1.0,
    graph_bytes: int = 0,
) -> Profile:
    """Convert a step that keeps the graphs of `old_keep` layers into one that keeps those of `new_keep` layers.

    The last layers are kept. The graph of the very last one is kept in any case, so 0 and 1 are equivalent.

    Args:
        profile: costs of the step.
        old_keep, new_keep: numbers of layers.
        times: by key, the number of layers that a layer of the profile represents, if not 1.
        count: number of micro-batches that a turn represents.
        graph_bytes: graph size per layer and micro-batch for profiles without memory samples.
    """
    return profile.map_turns(_GraphRewriter(profile, old_keep, new_keep, times or {}, count, graph_bytes).rewrite_turns)


class _GraphRewriter:
    """Rewrites the turns of a step; stays must be passed in order of time.

    Invariant: `_extra_bytes` and `_moving_bytes` are the device bytes of graphs and of the stash beyond those in the old step.
    """

    def __init__(
        self, profile: Profile, old_keep: int, new_keep: int, times: Mapping[str, int], count: float, graph_bytes: int
    ) -> None:
        self._walk, self._count, self._graph_bytes = MemoryTimeline(profile), count, graph_bytes
        layers = [stay.layer for stay in profile.stays if stay.has("forward")]
        self._visits, self._times = len(layers), [times.get(layer, 1) for layer in layers]
        old, new = self._kept_per_visit(old_keep), self._kept_per_visit(new_keep)
        # By visit of forward, as a share of the layers that it represents; the last layer's graph is kept in any case.
        more = {v: (new[v] - old[v]) / self._times[v] for v in range(len(layers) - 1)}
        self._kept_change = {visit: share for visit, share in more.items() if share}
        self._outputs = self._output_bytes(profile)
        self._ring_bytes = self._ring_growth(profile)
        self._open_graphs: dict[Call, tuple[float, float]] = {}  # seconds of forward, and bytes of graphs
        self._extra_bytes = self._moving_bytes = 0.0

    def _kept_per_visit(self, keep: int) -> list[int]:
        """Return, by visit, the number of represented layers whose graphs are kept."""
        found = []
        for times in reversed(self._times):
            found.append(min(keep, times))
            keep -= found[-1]
        return found[::-1]

    def rewrite_turns(self, index: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        """Return the turns of a stay with the new number of graphs."""
        for turn in turns:
            yield self._rewrite_turn(turn, self._walk.turns[index, turn.k])

    def _rewrite_turn(self, turn: TurnCost, walked: TurnMemory) -> TurnCost:
        backward = next((op for op in turn.ops if op.kind == "backward"), None)
        if backward is not None:
            turn = self._begin_backward(turn, self._call(backward, turn))
        ops: list[ComputeOp] = []
        for i, op in enumerate(turn.ops):
            memory = tuple(
                (place, self._adjusted_sample(held) if place == "device" else held) for place, held in op.memory
            )
            ops.append(op._replace(memory=memory))
            ends = op.kind == "forward" and not any(other.kind == "forward" for other in turn.ops[i + 1 :])
            if ends and (share := self._kept_change.get(op.visit)):
                seconds = sum(other.seconds for other in turn.ops if other.kind == "forward")
                graphs = share * self._times[op.visit] * self._count * self._graph_size(walked.sample_deltas[i])
                self._open_graphs[self._call(op, turn)] = seconds, graphs
                self._extra_bytes += graphs
        held = self._adjusted_sample(walked.after["device"])
        samples = [sample for op in ops for place, sample in op.memory if place == "device"]
        if self._kept_change and (not samples or samples[-1] != held):  # a graph that no later sample includes
            ops[-1] = ops[-1]._replace(memory=(*ops[-1].memory, ("device", held)))
        return turn._replace(ops=tuple(ops))

    def _begin_backward(self, turn: TurnCost, call: Call) -> TurnCost:
        """Return the turn with the new duration of backward, and release its graph."""
        share = self._kept_change.get(call[0], 0.0)
        # From the first backward on, outputs that kept graphs need are on the device.
        change = share or (sum(self._kept_change.values()) if call[0] == self._visits - 1 else 0.0)
        output = max(self._outputs.values(), default=0.0)
        self._moving_bytes = self._ring_bytes + (0.0 if not change else output if change > 0 else -output)
        if call not in self._open_graphs:
            return turn
        forward_s, graphs = self._open_graphs.pop(call)
        self._extra_bytes -= graphs
        backward_s = sum(op.seconds for op in turn.ops if op.kind == "backward")
        saved_s = share * (min(forward_s, backward_s / 2) if share > 0 else forward_s)
        pace = 1 - saved_s / backward_s if backward_s else 1.0
        ops = [op._replace(seconds=op.seconds * pace) if op.kind == "backward" else op for op in turn.ops]
        return turn._replace(ops=tuple(ops), fetch_bytes=self._fetched_bytes(turn, call))

    # -- transfers -------------------------------------------------------------------------------------------------------

    def _output_bytes(self, profile: Profile) -> dict[Call, float]:
        """Return the bytes offloaded after each forward with a changed graph, per layer and micro-batch."""
        return {
            self._call(op, turn): turn.stash_bytes / (self._times[op.visit] * self._count)
            for turn in profile.turns
            for op in turn.ops
            if op.kind == "forward" and op.visit in self._kept_change
        }

    def _fetched_bytes(self, turn: TurnCost, call: Call) -> int:
        many = self._times[call[0]] * self._count
        return round(turn.fetch_bytes + self._kept_change[call[0]] * many * self._outputs.get(call, 0.0))

    def _ring_growth(self, profile: Profile) -> float:
        """Return the growth of the ring, which has room for two of the largest transfers."""
        others, before, after = [0.0], [0.0], [0.0]
        for turn in profile.turns:
            backward = next((op for op in turn.ops if op.kind == "backward"), None)
            call = self._call(backward, turn) if backward is not None else (-1, turn.k)
            if call[0] in self._kept_change:
                many = self._times[call[0]] * self._count
                before.append(turn.fetch_bytes / many)
                after.append(self._fetched_bytes(turn, call) / many)
            else:
                others.append(max(turn.fetch_bytes, turn.stash_bytes))
        overlaps = profile.settings.get("ahead", 1) > 0
        return 2 * (max(*others, *after) - max(*others, *before)) if overlaps else 0.0

    # -- readings --------------------------------------------------------------------------------------------------------

    def _call(self, op: ComputeOp, turn: TurnCost) -> Call:
        return (2 * self._visits - 1 - op.visit if op.kind == "backward" else op.visit), turn.k

    def _graph_size(self, samples: MemorySamples) -> int:
        """Return the activation bytes that forward adds."""
        found = [held.get("activations", 0) for place, held in samples if place == "device"]
        return max(0, found[-1]) if found else self._graph_bytes

    def _adjusted_sample(self, held: Mapping[str, int]) -> dict[str, int]:
        """Return a sample with the additional bytes."""
        adjusted = dict(held)
        for name, more in (("activations", self._extra_bytes), ("stash", self._moving_bytes)):
            if more:
                adjusted[name] = max(0, round(held.get(name, 0) + more))
        return adjusted
