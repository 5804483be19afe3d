"""A step in which more graphs are kept, or fewer, made of one that was measured, by formula.

What autograd keeps of a layer is read off the end of its forward, where the graph is whole whatever becomes of it. A kept one
stays on the device from there until backward, which is shorter by a recompute: that takes as long as forward, and at most half of
backward, since to back-propagate is as much work at least. With the stash on the host, the outputs of the layer arrive once more,
because the graph may have saved them. What it is not: `l2l_core/forecast/profile_interpolation.py`, which has seen steps of both kinds.
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
    """Make the step that keeps the graphs of the last `now` layers, of one that keeps those of the last `was`.

    The last layer's is there anyhow, so that 0 and 1 are the same.

    Args:
        profile: of the step.
        was, now: numbers of layers.
        times: by key, how many layers a layer of the profile stands for, where that is not one.
        count: micro-batches that a turn stands for.
        graph_bytes: of one layer and micro-batch, where the profile does not tell.
    """
    return profile.map_turns(_GraphRewriter(profile, old_keep, new_keep, times or {}, count, graph_bytes).rewrite_turns)


class _GraphRewriter:
    """One such step in the making; stays are asked for in order of time.

    Invariant: `_extra` is what graphs take on the device beyond what they took in the old step, `_moving` likewise what moves.
    """

    def __init__(
        self, profile: Profile, old_keep: int, new_keep: int, times: Mapping[str, int], count: float, graph_bytes: int
    ) -> None:
        self._walk, self._count, self._graph_bytes = MemoryTimeline(profile), count, graph_bytes
        layers = [stay.layer for stay in profile.stays if stay.has("forward")]
        self._visits, self._times = len(layers), [times.get(layer, 1) for layer in layers]
        known, asked = self._kept_per_visit(old_keep), self._kept_per_visit(new_keep)
        # by visit of forward, as a share of the layers that it stands for; the last one's graph is there anyhow
        more = {v: (asked[v] - known[v]) / self._times[v] for v in range(len(layers) - 1)}
        self._kept_change = {visit: share for visit, share in more.items() if share}
        self._outputs = self._output_bytes(profile)
        self._ring_bytes = self._ring_growth(profile)
        self._open_graphs: dict[Call, tuple[float, float]] = {}  # seconds of forward, and bytes of graphs
        self._extra_bytes = self._moving_bytes = 0.0

    def _kept_per_visit(self, keep: int) -> list[int]:
        """By visit, of how many of the layers that it stands for the graphs are kept: of the last ones of all."""
        found = []
        for times in reversed(self._times):
            found.append(min(keep, times))
            keep -= found[-1]
        return found[::-1]

    def rewrite_turns(self, index: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        """Make the turns of a stay."""
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
        said = [known for op in ops for place, known in op.memory if place == "device"]
        if self._kept_change and (not said or said[-1] != held):  # of a graph that nothing came after
            ops[-1] = ops[-1]._replace(memory=(*ops[-1].memory, ("device", held)))
        return turn._replace(ops=tuple(ops))

    def _begin_backward(self, turn: TurnCost, call: Call) -> TurnCost:
        """The turn with a shorter backward, or a longer one; its graph is let go from here on."""
        share = self._kept_change.get(call[0], 0.0)
        # Outputs are there from the turn on, where backward begins, as long as graphs want them.
        wanted = share or (sum(self._kept_change.values()) if call[0] == self._visits - 1 else 0.0)
        output = max(self._outputs.values(), default=0.0)
        self._moving_bytes = self._ring_bytes + (0.0 if not wanted else output if wanted > 0 else -output)
        if call not in self._open_graphs:
            return turn
        forward_s, graphs = self._open_graphs.pop(call)
        self._extra_bytes -= graphs
        backward_s = sum(op.seconds for op in turn.ops if op.kind == "backward")
        saved_s = share * (min(forward_s, backward_s / 2) if share > 0 else forward_s)
        pace = 1 - saved_s / backward_s if backward_s else 1.0
        ops = [op._replace(seconds=op.seconds * pace) if op.kind == "backward" else op for op in turn.ops]
        return turn._replace(ops=tuple(ops), fetch_bytes=self._fetched_bytes(turn, call))

    # -- what moves ------------------------------------------------------------------------------------------------------

    def _output_bytes(self, profile: Profile) -> dict[Call, float]:
        """What leaves after the forwards whose graphs become others, each of one layer and micro-batch."""
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
        """By how much the room for two moving images becomes larger, if the largest of all is one of these."""
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
        """What is there at the end of forward that was not there before it."""
        found = [held.get("activations", 0) for place, held in samples if place == "device"]
        return max(0, found[-1]) if found else self._graph_bytes

    def _adjusted_sample(self, held: Mapping[str, int]) -> dict[str, int]:
        """A sample with what is there more, or less."""
        made = dict(held)
        for name, more in (("activations", self._extra_bytes), ("stash", self._moving_bytes)):
            if more:
                made[name] = max(0, round(held.get(name, 0) + more))
        return made
