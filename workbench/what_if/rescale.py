"""The profile of a measured step turned into that of a step with other settings, by formula.

What a setting changes is scaled, all else stays as it was measured. With the width, weights and the products with them grow
with its square, activations in proportion (attention's own products are not told apart). With the rows of a micro-batch,
compute and activations grow in proportion; overheads of the host stay. What fills the memories is in `rescale_memory.py`. What
it is not: a measurement. `formulas` names what is by formula.
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

MAX_EVENTS = 2000  # of a simulation that answers at once; beyond, micro-batches and then layers are taken together
MAX_LAYERS = 120  # that are simulated one by one then


def rescale(base: MeasuredStep, question: Question, graph_bytes: int = 0) -> tuple[Profile, int]:
    """Make the profile of a step with these settings, and say how many layers one simulated layer stands for at most.

    A step of very many events has its micro-batches taken together (`Profile.micro_batches` is 1 then), and its layers in
    chunks; its "resident" counts chunks, too.

    Args:
        base: the measured step.
        question: its new settings.
        graph_bytes: that autograd keeps of a layer and micro-batch, where the step does not tell.
    """
    is_long = count_events(base, question) > MAX_EVENTS
    as_it_is = not is_long and _keeps_treatment(base, question)
    base = base if as_it_is else base.without_kept_graphs
    base = base.merged if is_long else base
    keys = resize_stack(base.keys, question.depth, base.first_backward_layer, base.representative_layers)
    stack = chunk_stack(keys, base.first_backward_layer, MAX_LAYERS if is_long else len(keys))
    profile = _ProfileScaler(base, question, stack, is_long).profile()
    if not as_it_is and question.kept > 1:
        times = {layer.key: layer.count for layer in stack}
        count = question.micro_batches if is_long else 1
        profile = with_kept_graphs(profile, 1, question.kept, times, count, graph_bytes)
    return profile, max(layer.count for layer in stack)


def _keeps_treatment(base: MeasuredStep, question: Question) -> bool:
    """Whether every layer is treated as in the measured step, so that no formula is needed for graphs."""
    same = (base.depth, base.micro_batches, base.profile.settings.get("stash", question.stash), base.num_kept_graphs)
    return same == (question.depth, question.micro_batches, question.stash, question.kept)


def count_events(base: MeasuredStep, question: Question) -> int:
    """Estimate how many events the step has with every layer and micro-batch by itself."""
    # + 1: the stay at the turn is a visit of forward and one of backward.
    visits = question.depth * (len(base.profile.stays) + 1) / max(1, base.depth)
    on_host = question.stash == "host"
    pieces = chunks_per_copy(question.micro_batches, question.ahead, question.stash)
    # With the stash on the host every turn has a fetch and a stash beside its compute.
    return int(visits * (question.micro_batches * (3 if on_host else 1) + pieces + 2))


def formula_notes(base: MeasuredStep, question: Question) -> list[str]:
    """Say what is by formula where another step was measured."""
    settings, found = base.profile.settings, []
    if question.depth != base.depth:
        found.append("layers repeated or left out")
    if question.width != 1:
        found.append("weights and compute with the square of the width, activations in proportion to it")
    if question.rows_factor(base) != 1:
        found.append("compute and activations in proportion to the rows of a micro-batch")
    if max(base.num_kept_graphs, question.kept) > 1 and not _keeps_treatment(base, question):
        found.append("graphs from what forward leaves behind, and a recompute as long as forward")
    if question.stash != settings.get("stash", question.stash):
        found.append("the stash from what one layer hands to the next")
    if question.precision != settings.get("precision", question.precision):
        found.append("bytes from the precision's, with compute as fast as measured")
    return found


class _ProfileScaler:
    """One scaled profile in the making."""

    def __init__(
        self, base: MeasuredStep, question: Question, stack: Sequence[RepresentedLayer], together: bool
    ) -> None:
        self._question, self._old_layers, self._stack = question, base.profile, stack
        self._rows = question.rows_factor(base)
        self._count = question.micro_batches / base.micro_batches if together else 1.0  # that a turn stands for
        self._turns_per_stay, self._merged = (1, True) if together else (question.micro_batches, False)
        weights = sum(each.count * base.weight_bytes(each.source) for each in stack) * question.width**2
        self._memory_scaler = MemoryScaler(base, question, weights + question.width * base.weight_bytes(SHELL))

    def profile(self) -> Profile:
        old, question = self._old_layers, self._question
        # in order of time, since the memories add up
        before = RepeatedStay(BEFORE_FIRST_STAY, StayCost("", -1, old.start), RepresentedLayer("", "", 1), {})
        start = self._scale_stay(before).turns if old.start else ()
        now = {name: getattr(question, name) for name in CONFIG_FIELDS} | {"resident": self._resident()}
        return replace(
            old,
            layers=self._scale_layers(),
            start=start,
            stays=tuple(map(self._scale_stay, repeat_stays(old.stays, self._stack))),
            closing=tuple(job._replace(seconds=job.seconds * question.width**2) for job in old.closing),
            settings={**old.settings, **now},
            memory=self._memory_scaler.first,
        )

    def _resident(self) -> int:
        """How many of the last pieces of the stack stay as a whole, beyond those that streaming needs."""
        streams = weight_slots(self._question.ahead)
        left, stay = weight_slots(self._question.ahead, self._question.resident), 0
        for layer in reversed(self._stack):
            left -= layer.count
            if left < 0:
                break
            stay += 1
        whole = all(layer.count == 1 for layer in self._stack)
        return self._question.resident if whole else max(0, stay - streams)

    def _scale_layers(self) -> dict[str, LayerCost]:
        old, width = self._old_layers.layers, self._question.width
        made = {key: self._scale_layer(old[source], times * width**2) for key, source, times in self._stack}
        return {**made, **({SHELL: self._scale_layer(old[SHELL], width)} if SHELL in old else {})}

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
        stands = cycle_middle(len(turns), self._turns_per_stay)
        made = tuple(self._scale_turn(new, turns[stand], k) for k, stand in enumerate(stands))
        # At the turn a stay has two numbers, of which the first is that of forward.
        return StayCost(new.layer.key, next(iter(new.visits.values()), new.stay.visit), made)

    def _scale_turn(self, new: RepeatedStay, turn: TurnCost, k: int) -> TurnCost:
        """The k-th turn of a stay, from the one that stands for it."""
        many = new.layer.count * self._count
        memory = self._memory_scaler.scale_turn(new.index, turn, many)
        fetched, parked = self._memory_scaler.moved_bytes(turn, is_start=new.index == BEFORE_FIRST_STAY)
        ops = [self._scale_op(op, many, new, held) for op, held in zip(turn.ops, memory, strict=True)]
        return TurnCost(
            turn.k if self._merged else k,
            tuple(self._spread_host_time(ops, new.layer.count) if self._merged else ops),
            round(turn.batch_bytes * self._rows * self._count),
            round(fetched * many),
            round(parked * many),
        )

    def _scale_op(self, op: ComputeOp, count: float, new: RepeatedStay, memory: MemorySamples) -> ComputeOp:
        width = self._question.width
        is_layers = op.kind in ("forward", "backward")
        on_host = self._question.stash == "host"
        return ComputeOp(
            op.kind,
            new.layer.key if is_layers else op.layer,
            new.visits.get(op.kind, op.visit),
            op.seconds * count * self._rows * (width**2 if is_layers else width),
            op.overhead_s * count,
            round(op.demand_bytes * count * self._memory_scaler.transfer_factor) if on_host else 0,
            tuple(self._scale_part(part, new) for part in op.gradient_parts),
            memory,
        )

    def _spread_host_time(self, ops: Sequence[ComputeOp], times: int) -> list[ComputeOp]:
        """Let the host's own time before work that was taken together come after it, but for the first piece.

        Otherwise copies that run beside the work would seem to run before it.
        """
        pieces = times * self._question.micro_batches
        late_s = sum(op.overhead_s for op in ops) * (1 - 1 / pieces)
        early = [op._replace(overhead_s=op.overhead_s / pieces) for op in ops]
        return [*early, ComputeOp("shell", SHELL, -1, 0.0, late_s)] if late_s else early

    def _scale_part(self, part: GradientPartCost, new: RepeatedStay) -> GradientPartCost:
        """A gradient of the shell, or of weights that several layers share."""
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
    """A whole number of float32."""
    return 4 * round(nbytes / 4)
