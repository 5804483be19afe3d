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
from l2l_core.forecast import Repeated, StandIn, in_chunks, in_turn, repeat, stack_of
from l2l_core.rules import pieces_of_copy, weight_slots
from l2l_core.simulator import SHELL, START, LayerCost, Memory, Op, PartCost, Stay, TurnCost
from workbench.what_if.kept_graphs import with_kept_graphs
from workbench.what_if.measured_step import MeasuredStep
from workbench.what_if.question import CONFIG, Question
from workbench.what_if.rescale_memory import Memories

MOST_EVENTS = 2000  # of a simulation that answers at once; beyond, micro-batches and then layers are taken together
MOST_LAYERS = 120  # that are simulated one by one then


def rescale(base: MeasuredStep, question: Question, graph_bytes: int = 0) -> tuple[Profile, int]:
    """Make the profile of a step with these settings, and say how many layers one simulated layer stands for at most.

    A step of very many events has its micro-batches taken together (`Profile.micro_batches` is 1 then), and its layers in
    chunks; its "resident" counts chunks, too.

    Args:
        base: the measured step.
        question: its new settings.
        graph_bytes: that autograd keeps of a layer and micro-batch, where the step does not tell.
    """
    is_long = events_of(base, question) > MOST_EVENTS
    as_it_is = not is_long and _treats_alike(base, question)
    base = base if as_it_is else base.recomputing
    base = base.together if is_long else base
    keys = stack_of(base.keys, question.depth, base.turning, base.alike)
    stack = in_chunks(keys, base.turning, MOST_LAYERS if is_long else len(keys))
    profile = _Scaled(base, question, stack, is_long).profile()
    if not as_it_is and question.kept > 1:
        times = {layer.key: layer.times for layer in stack}
        count = question.micro_batches if is_long else 1
        profile = with_kept_graphs(profile, 1, question.kept, times, count, graph_bytes)
    return profile, max(layer.times for layer in stack)


def _treats_alike(base: MeasuredStep, question: Question) -> bool:
    """Whether every layer is treated as in the measured step, so that no formula is needed for graphs."""
    same = (base.depth, base.micro_batches, base.profile.settings.get("stash", question.stash), base.kept)
    return same == (question.depth, question.micro_batches, question.stash, question.kept)


def events_of(base: MeasuredStep, question: Question) -> int:
    """Estimate how many events the step has with every layer and micro-batch by itself."""
    # + 1: the stay at the turn is a visit of forward and one of backward.
    visits = question.depth * (len(base.profile.stays) + 1) / max(1, base.depth)
    on_host = question.stash == "host"
    pieces = pieces_of_copy(question.micro_batches, question.ahead, question.stash)
    # With the stash on the host every turn has a fetch and a stash beside its compute.
    return int(visits * (question.micro_batches * (3 if on_host else 1) + pieces + 2))


def formulas(base: MeasuredStep, question: Question) -> list[str]:
    """Say what is by formula where another step was measured."""
    settings, found = base.profile.settings, []
    if question.depth != base.depth:
        found.append("layers repeated or left out")
    if question.width != 1:
        found.append("weights and compute with the square of the width, activations in proportion to it")
    if question.rows_of(base) != 1:
        found.append("compute and activations in proportion to the rows of a micro-batch")
    if max(base.kept, question.kept) > 1 and not _treats_alike(base, question):
        found.append("graphs from what forward leaves behind, and a recompute as long as forward")
    if question.stash != settings.get("stash", question.stash):
        found.append("the stash from what one layer hands to the next")
    if question.precision != settings.get("precision", question.precision):
        found.append("bytes from the precision's, with compute as fast as measured")
    return found


class _Scaled:
    """One scaled profile in the making."""

    def __init__(self, base: MeasuredStep, question: Question, stack: Sequence[StandIn], together: bool) -> None:
        self._question, self._old, self._stack = question, base.profile, stack
        self._rows = question.rows_of(base)
        self._count = question.micro_batches / base.micro_batches if together else 1.0  # that a turn stands for
        self._turns_each, self._together = (1, True) if together else (question.micro_batches, False)
        weights = sum(each.times * base.weight_bytes(each.source) for each in stack) * question.width**2
        self._memories = Memories(base, question, weights + question.width * base.weight_bytes(SHELL))

    def profile(self) -> Profile:
        old, question = self._old, self._question
        # in order of time, since the memories add up
        before = Repeated(START, Stay("", -1, old.start), StandIn("", "", 1), {})
        start = self._stay(before).turns if old.start else ()
        now = {name: getattr(question, name) for name in CONFIG} | {"resident": self._resident()}
        return replace(
            old,
            layers=self._layers(),
            start=start,
            stays=tuple(map(self._stay, repeat(old.stays, self._stack))),
            closing=tuple(job._replace(seconds=job.seconds * question.width**2) for job in old.closing),
            settings={**old.settings, **now},
            memory=self._memories.first,
        )

    def _resident(self) -> int:
        """How many of the last pieces of the stack stay as a whole, beyond those that streaming needs."""
        streams = weight_slots(self._question.ahead)
        left, stay = weight_slots(self._question.ahead, self._question.resident), 0
        for layer in reversed(self._stack):
            left -= layer.times
            if left < 0:
                break
            stay += 1
        whole = all(layer.times == 1 for layer in self._stack)
        return self._question.resident if whole else max(0, stay - streams)

    def _layers(self) -> dict[str, LayerCost]:
        old, width = self._old.layers, self._question.width
        made = {key: self._layer(old[source], times * width**2) for key, source, times in self._stack}
        return {**made, **({SHELL: self._layer(old[SHELL], width)} if SHELL in old else {})}

    def _layer(self, layer: LayerCost, factor: float) -> LayerCost:
        return LayerCost(
            _floats(layer.load_bytes * factor * self._memories.item),
            _floats(layer.push_bytes * factor),
            _floats(layer.block_bytes * factor),
            layer.reduce_s * factor,
            layer.update_s * factor,
        )

    def _stay(self, new: Repeated) -> Stay:
        turns = new.stay.turns
        stands = in_turn(len(turns), self._turns_each)
        made = tuple(self._turn(new, turns[stand], k) for k, stand in enumerate(stands))
        # At the turn a stay has two numbers, of which the first is that of forward.
        return Stay(new.layer.key, next(iter(new.visits.values()), new.stay.visit), made)

    def _turn(self, new: Repeated, turn: TurnCost, k: int) -> TurnCost:
        """The k-th turn of a stay, from the one that stands for it."""
        many = new.layer.times * self._count
        memory = self._memories.turn(new.index, turn, many)
        fetched, parked = self._memories.moved(turn, is_start=new.index == START)
        ops = [self._op(op, many, new, held) for op, held in zip(turn.ops, memory, strict=True)]
        return TurnCost(
            turn.k if self._together else k,
            tuple(self._spread(ops, new.layer.times) if self._together else ops),
            round(turn.batch_bytes * self._rows * self._count),
            round(fetched * many),
            round(parked * many),
        )

    def _op(self, op: Op, many: float, new: Repeated, memory: Memory) -> Op:
        width = self._question.width
        is_layers = op.kind in ("forward", "backward")
        on_host = self._question.stash == "host"
        return Op(
            op.kind,
            new.layer.key if is_layers else op.layer,
            new.visits.get(op.kind, op.visit),
            op.seconds * many * self._rows * (width**2 if is_layers else width),
            op.overhead_s * many,
            round(op.demand_bytes * many * self._memories.moves) if on_host else 0,
            tuple(self._part(part, new) for part in op.parts),
            memory,
        )

    def _spread(self, ops: Sequence[Op], times: int) -> list[Op]:
        """Let the host's own time before work that was taken together come after it, but for the first piece.

        Otherwise copies that run beside the work would seem to run before it.
        """
        pieces = times * self._question.micro_batches
        late_s = sum(op.overhead_s for op in ops) * (1 - 1 / pieces)
        early = [op._replace(overhead_s=op.overhead_s / pieces) for op in ops]
        return [*early, Op("shell", SHELL, -1, 0.0, late_s)] if late_s else early

    def _part(self, part: PartCost, new: Repeated) -> PartCost:
        """A gradient of the shell, or of weights that several layers share."""
        width = self._question.width
        return PartCost(
            part.layer if part.layer == SHELL else new.layer.key,
            _floats(part.nbytes * self._count * width),
            part.block,
            _floats(part.block_bytes * width),
            part.reduce_s * self._count * width,
            new.visits.get("backward", part.visit),
        )


def _floats(nbytes: float) -> int:
    """A whole number of float32."""
    return 4 * round(nbytes / 4)
