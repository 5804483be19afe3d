"""Scale the profile of a measured step to other settings, by formula.

Costs that a setting does not affect stay as measured. Weights and compute grow with the square of the width, activations in
proportion to it (the products of attention are not treated separately). Compute and activations grow in proportion to the
rows of a micro-batch; host overheads stay. `rescale_memory.py` scales the memory samples, `formula_notes` lists the formulas
used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from l2l_core import Profile
from l2l_core.forecast import RepeatedStay, RepresentedLayer, chunk_stack, cycle_middle, repeat_stays, resize_stack
from l2l_core.schedule_rules import chunks_per_copy, weight_slots
from l2l_core.simulator import (
    BEFORE_FIRST_STAY,
    SHELL,
    ComputeOp,
    GradientPartCost,
    LayerCost,
    MemorySamples,
    StayCost,
    TurnCost,
)
from workbench.what_if.kept_graphs import with_kept_graphs
from workbench.what_if.measured_step import MeasuredStep
from workbench.what_if.question import CONFIG_FIELDS, Question
from workbench.what_if.rescale_memory import MemoryScaler

MAX_EVENTS = 2000  # longer steps are simulated with merged micro-batches and layers, so that the answer is immediate
MAX_LAYERS = 120  # after merging


def rescale(base: MeasuredStep, question: Question, graph_bytes: int = 0) -> tuple[Profile, int]:
    """Return the profile of a step with new settings, and the largest number of layers per simulated layer.

    A step of more than `MAX_EVENTS` has its micro-batches merged (`Profile.micro_batches` is 1 then) and its layers grouped
    in chunks; its setting "resident" counts chunks.

    Args:
        base: the measured step.
        question: the new settings.
        graph_bytes: graph size per layer and micro-batch for steps without memory samples.

    Raises:
        ValueError: another precision, and frozen weights that keep their dtypes, so that bytes do not follow from it.
    """
    was = base.profile.settings.get("precision", question.precision)
    if base.profile.settings.get("keeps_dtypes") and question.precision != was:
        raise ValueError(
            f"precision={question.precision!r}: the measured step has frozen weights that keep their dtypes (a quantised base), "
            "whose bytes do not change with it. relay.forecast(batch, config) rehearses a step with this precision"
        )
    is_long = count_events(base, question) > MAX_EVENTS
    keeps_graphs = not is_long and _has_same_graphs(base, question)
    base = base if keeps_graphs else base.without_kept_graphs
    base = base.merged if is_long else base
    keys = resize_stack(base.keys, question.depth, base.first_backward_layer, base.representative_layers)
    stack = chunk_stack(keys, base.first_backward_layer, MAX_LAYERS if is_long else len(keys))
    profile = _ProfileScaler(base, question, stack, is_long).profile()
    if not keeps_graphs and question.kept > 1:
        times = {layer.key: layer.count for layer in stack}
        count = question.micro_batches if is_long else 1
        profile = with_kept_graphs(profile, 1, question.kept, times, count, graph_bytes)
    return profile, max(layer.count for layer in stack)


def _has_same_graphs(base: MeasuredStep, question: Question) -> bool:
    """Return True if the same graphs are kept as in the measured step, so that no formula is needed."""
    same = (base.depth, base.micro_batches, base.profile.settings.get("stash", question.stash), base.num_kept_graphs)
    return same == (question.depth, question.micro_batches, question.stash, question.kept)


def count_events(base: MeasuredStep, question: Question) -> int:
    """Estimate the number of events of the step without merging."""
    # + 1: the stay of the last layer is a visit of forward and one of backward.
    visits = question.depth * (len(base.profile.stays) + 1) / max(1, base.depth)
    on_host = question.stash == "host"
    pieces = chunks_per_copy(question.micro_batches, question.ahead, question.stash)
    # With the stash on the host every turn has a fetch and an offload besides its compute.
    return int(visits * (question.micro_batches * (3 if on_host else 1) + pieces + 2))


def formula_notes(base: MeasuredStep, question: Question) -> list[str]:
    """Describe the figures that are scaled by formula."""
    settings, found = base.profile.settings, []
    if question.depth != base.depth:
        found.append("layers repeated or left out")
    if question.width != 1:
        found.append("weights and compute with the square of the width, activations in proportion to it")
    if question.rows_factor(base) != 1:
        found.append("compute and activations in proportion to the rows of a micro-batch")
    if max(base.num_kept_graphs, question.kept) > 1 and not _has_same_graphs(base, question):
        found.append("graphs as large as the activations after forward, and a recompute as long as forward")
    if question.stash != settings.get("stash", question.stash):
        found.append("the stash from the output size of a layer")
    if question.precision != settings.get("precision", question.precision):
        found.append("bytes from the size of the new data type, with compute as fast as measured")
    return found


class _ProfileScaler:
    """Builds one scaled profile."""

    def __init__(self, base: MeasuredStep, question: Question, stack: Sequence[RepresentedLayer], merged: bool) -> None:
        self._question, self._old_profile, self._stack, self._merged = question, base.profile, stack, merged
        self._rows = question.rows_factor(base)
        self._count = question.micro_batches / base.micro_batches if merged else 1.0  # micro-batches per turn
        self._turns_per_stay = 1 if merged else question.micro_batches
        weights = sum(each.count * base.weight_bytes(each.source) for each in stack) * question.width**2
        self._memory_scaler = MemoryScaler(base, question, weights + question.width * base.weight_bytes(SHELL))

    def profile(self) -> Profile:
        old, question = self._old_profile, self._question
        # In order of time, because the memory scaler accumulates.
        before = RepeatedStay(BEFORE_FIRST_STAY, StayCost("", -1, old.start), RepresentedLayer("", "", 1), {})
        start = self._scale_stay(before).turns if old.start else ()
        settings = {name: getattr(question, name) for name in CONFIG_FIELDS} | {"resident": self._resident()}
        return replace(
            old,
            layers=self._scale_layers(),
            start=start,
            stays=tuple(map(self._scale_stay, repeat_stays(old.stays, self._stack))),
            closing=tuple(job._replace(seconds=job.seconds * question.width**2) for job in old.closing),
            settings={**old.settings, **settings},
            memory=self._memory_scaler.first,
        )

    def _resident(self) -> int:
        """Return the number of the last chunks that stay as a whole, beyond those that streaming needs."""
        if all(layer.count == 1 for layer in self._stack):
            return self._question.resident
        slots, chunks = weight_slots(self._question.ahead, self._question.resident), 0
        for layer in reversed(self._stack):
            slots -= layer.count
            if slots < 0:
                break
            chunks += 1
        return max(0, chunks - weight_slots(self._question.ahead))

    def _scale_layers(self) -> dict[str, LayerCost]:
        old, width = self._old_profile.layers, self._question.width
        scaled = {key: self._scale_layer(old[source], times * width**2) for key, source, times in self._stack}
        return {**scaled, **({SHELL: self._scale_layer(old[SHELL], width)} if SHELL in old else {})}

    def _scale_layer(self, layer: LayerCost, factor: float) -> LayerCost:
        return LayerCost(
            _round_to_floats(layer.load_bytes * factor * self._memory_scaler.weight_factor),
            _round_to_floats(layer.push_bytes * factor),
            _round_to_floats(layer.block_bytes * factor),
            layer.reduce_s * factor,
            layer.update_s * factor,
        )

    def _scale_stay(self, new: RepeatedStay) -> StayCost:
        turns = new.stay.turns
        sources = cycle_middle(len(turns), self._turns_per_stay)
        scaled = tuple(self._scale_turn(new, turns[source], k) for k, source in enumerate(sources))
        # The stay of the last layer has two visits; forward is the first.
        return StayCost(new.layer.key, next(iter(new.visits.values()), new.stay.visit), scaled)

    def _scale_turn(self, new: RepeatedStay, turn: TurnCost, k: int) -> TurnCost:
        """Return turn `k` of a stay, scaled from the measured turn that represents it."""
        count = new.layer.count * self._count
        memory = self._memory_scaler.scale_turn(new.index, turn, count)
        fetched, stashed = self._memory_scaler.moved_bytes(turn, is_start=new.index == BEFORE_FIRST_STAY)
        ops = [self._scale_op(op, count, new, samples) for op, samples in zip(turn.ops, memory, strict=True)]
        return TurnCost(
            turn.k if self._merged else k,
            tuple(self._spread_host_time(ops, new.layer.count) if self._merged else ops),
            round(turn.batch_bytes * self._rows * self._count),
            round(fetched * count),
            round(stashed * count),
        )

    def _scale_op(self, op: ComputeOp, count: float, new: RepeatedStay, memory: MemorySamples) -> ComputeOp:
        width = self._question.width
        in_layer = op.kind in ("forward", "backward")
        on_host = self._question.stash == "host"
        return ComputeOp(
            op.kind,
            new.layer.key if in_layer else op.layer,
            new.visits.get(op.kind, op.visit),
            op.seconds * count * self._rows * (width**2 if in_layer else width),
            op.overhead_s * count,
            round(op.demand_bytes * count * self._memory_scaler.transfer_factor) if on_host else 0,
            tuple(self._scale_part(part, new) for part in op.gradient_parts),
            memory,
        )

    def _spread_host_time(self, ops: Sequence[ComputeOp], times: int) -> list[ComputeOp]:
        """Move the host overhead of merged work, except that of its first piece, behind the work.

        Otherwise copies that overlap with the work would appear to run before it.
        """
        pieces = times * self._question.micro_batches
        late_s = sum(op.overhead_s for op in ops) * (1 - 1 / pieces)
        early = [op._replace(overhead_s=op.overhead_s / pieces) for op in ops]
        return [*early, ComputeOp("shell", SHELL, -1, 0.0, late_s)] if late_s else early

    def _scale_part(self, part: GradientPartCost, new: RepeatedStay) -> GradientPartCost:
        """Scale a gradient of the shell, or of weights that several layers share."""
        width = self._question.width
        return GradientPartCost(
            part.layer if part.layer == SHELL else new.layer.key,
            _round_to_floats(part.nbytes * self._count * width),
            part.block,
            _round_to_floats(part.block_bytes * width),
            part.reduce_s * self._count * width,
            new.visits.get("backward", part.visit),
        )


def _round_to_floats(nbytes: float) -> int:
    """Round to a multiple of the size of a float32."""
    return 4 * round(nbytes / 4)
