"""Cost of a training step of a large transformer on many ranks: bytes, seconds, messages; by formula and simulated.

A layout divides ranks into tensor x pipeline x data. Its stages are costs for `simulate_pipeline`, which gives seconds, waits
and activations; the rest is added by closed formulas. Nothing is measured. Assumptions:

- Matrix products run at one share of the peak, whatever their size. The output runs on the last stage, and its weights are
  those of the embedding on the first, whose look-up takes no time; without a `cut`, work is spread evenly over stages instead.
- Tensor ranks are on one node; two all-reduces per layer and direction are not hidden.
- Weights gathered and gradients reduced per micro-batch (ZeRO 2, 3) are hidden behind its compute, and gradients reduced once
  per step behind the last backward; the rest is waited for. So are copies between device and host.
- With activations on the host a rank keeps two layers' records. With weights there, or with ZeRO 3, it has two layers' weights.
- Updates on the device take no time. Those on the host follow backward; a relay's are hidden behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from l2l_core.pipelines.layout_rounds import SimulatedRounds, fullest_moments, simulate_rounds
from l2l_core.pipelines.pipeline_simulation import StageCost
from l2l_core.pipelines.rank_layout import (
    MESSAGES,
    PARTS,
    RECOMPUTING,
    LayoutCost,
    RankCluster,
    RankLayout,
    check_layout,
)
from l2l_core.pipelines.transformer_shape import NUMBER_BYTES, TransformerShape, state_bytes

Costs = NDArray[np.float64]


def layout_cost(shape: TransformerShape, cluster: RankCluster, layout: RankLayout, rows: int) -> LayoutCost:
    """Return the cost of a step.

    Args:
        shape: the model.
        cluster: figures of ranks and links.
        layout: division of the ranks; it may use fewer than the cluster has.
        rows: of the batch, over all ranks.

    Raises:
        ValueError: the layout does not divide model and batch.

    Example:
        >>> from l2l_core.pipelines import RankCluster, RankLayout, TransformerShape, layout_cost
        >>> shape = TransformerShape(layers=8, width=1024, heads=16)
        >>> cost = layout_cost(shape, RankCluster(4), RankLayout(pipeline=4), rows=8)
        >>> f"{cost.step_s:.3f} s, {cost.device_bytes / 1e9:.1f} GB, a bubble of {cost.bubble:.0%}"
        '0.038 s, 4.5 GB, a bubble of 39%'
    """
    return _StepCost(shape, cluster, layout, rows).cost()


def layout_bounds(shape: TransformerShape, cluster: RankCluster, layout: RankLayout, rows: int) -> tuple[float, float]:
    """Return bytes and seconds that a step takes at least, without a simulation: the search leaves out what cannot win."""
    return _StepCost(shape, cluster, layout, rows).bounds()


def cut_layout(shape: TransformerShape, cluster: RankCluster, layout: RankLayout, rows: int) -> RankLayout:
    """Return the layout with the cut of its layers into stages that makes the slowest stage fastest, within the memory.

    If no cut fits, it is the one whose fullest rank needs least. Several stages per rank are as equal as may be. Layouts without
    a pipeline, and relays, stay as they are.

    Example:
        >>> from l2l_core.pipelines import RankCluster, RankLayout, TransformerShape, cut_layout
        >>> shape = TransformerShape(layers=8, width=1024, heads=16)
        >>> cut_layout(shape, RankCluster(4), RankLayout(pipeline=4), rows=8).cut  # the last stage runs the output too
        (4, 2, 1, 1)
    """
    if layout.pipeline == 1 or layout.is_relay:
        return layout
    if layout.stages > 1:
        stages = layout.pipeline * layout.stages
        return replace(layout, cut=tuple(shape.layers // stages + (at < shape.layers % stages) for at in range(stages)))
    seconds, nbytes = _StepCost(shape, cluster, layout, rows).stage_table()
    return replace(layout, cut=cut_stages(seconds, nbytes, cluster.memory_bytes) or cut_stages(nbytes, nbytes))


def cut_stages(seconds: Costs, nbytes: Costs, budget: float = np.inf) -> tuple[int, ...] | None:
    """Return the number of layers of each rank such that the slowest rank is fastest, by dynamic programming.

    As in PipeDream (arXiv 1806.03377) and Piper (Tarnawski et al., 2021). The slowest stage decides the seconds of a pipeline of
    many micro-batches. Among cuts with that slowest stage, the work is on the earliest ranks, which wait least.

    Args:
        seconds, nbytes: (ranks, layers + 1, layers + 1): of a rank that runs layers i to j - 1, at [rank, i, j].
        budget: bytes that each rank has.

    Returns:
        None if no cut fits.
    """
    ends = seconds.shape[1]
    is_empty = np.tril(np.ones((ends, ends), bool))
    costs = np.where(is_empty | (nbytes > budget), np.inf, seconds)
    slowest = np.full(ends, np.inf)  # of the ranks so far, by the number of their layers
    slowest[0] = 0.0
    for rank in costs:
        slowest = np.maximum(slowest[:, None], rank).min(0)
    if np.isinf(slowest[-1]):
        return None
    total = np.full(ends, np.inf)
    total[0] = 0.0
    begins: list[NDArray[np.intp]] = []
    for position, rank in enumerate(costs):
        is_fast = rank <= slowest[-1] * (1 + 1e-12)
        sums = total[:, None] + np.where(is_fast, position * np.where(is_fast, rank, 0.0), np.inf)
        begins.append(sums.argmin(0))
        total = sums.min(0)
    end, counts = ends - 1, list[int]()
    for begin in reversed(begins):
        counts.append(end - int(begin[end]))
        end = int(begin[end])
    return tuple(reversed(counts))


class _StageRun(NamedTuple):
    """Seconds of one F, R or B on a stage by part, before anything overlaps."""

    compute: float
    recompute: float
    reduce: float  # all-reduces of tensor ranks
    gather: float  # collectives of data ranks, behind compute
    host: float  # copies, behind compute

    @property
    def seconds(self) -> float:
        return max(self.compute + self.recompute + self.reduce, self.gather, self.host)

    @property
    def parts(self) -> dict[str, float]:
        busy = self.compute + self.recompute + self.reduce
        excess = {"host" if self.host >= self.gather else "wire": self.seconds - busy}
        wire = self.reduce + excess.get("wire", 0.0)
        return {"compute": self.compute, "recompute": self.recompute, "wire": wire, "host": excess.get("host", 0.0)}


class _StepCost:
    """The terms of the cost of one step."""

    def __init__(self, shape: TransformerShape, cluster: RankCluster, layout: RankLayout, rows: int) -> None:
        self.m = check_layout(shape, layout, rows)
        self.shape, self.cluster, self.layout, self.rows = shape, cluster, layout, rows
        self.stages = shape.layers if layout.is_relay else layout.pipeline * layout.stages
        self.layers = layout.cut or (shape.layers / self.stages,) * self.stages  # of each stage
        self.outputs = [
            float(stage == self.stages - 1) if layout.cut else 1 / self.stages for stage in range(self.stages)
        ]
        self.share = (layout.data - 1) / layout.data  # of its bytes that a rank sends in a gather
        self.data_link = cluster.link(layout.tensor * layout.data)
        self.layer_bytes = NUMBER_BYTES * shape.layer_parameters / layout.tensor  # weights of a layer on a rank

    # -- one action of a stage -----------------------------------------------------------------------------------------

    def runs(self, layers: float, outputs: float) -> dict[str, _StageRun]:
        """Return the seconds of F, R and B of a stage with these layers and share of outputs."""
        shape, layout, rows = self.shape, self.layout, self.layout.micro_batch
        per_s = rows / layout.tensor / self.cluster.flop_per_s
        layers_s = shape.layer_flop * layers * per_s
        forward_s = layers_s + shape.head_flop * outputs * per_s
        again_s = {"nothing": 0.0, "attention": shape.attention_flop * layers * per_s, "layers": layers_s}
        reduce_s = self._seconds(self._reduced_bytes * layers, self.cluster.node_bytes_per_s)
        in_s, out_s, gather_s, scatter_s = (layers * each for each in self._collectives)
        reruns = layout.recompute == "layers"
        return {
            "F": _StageRun(forward_s, 0.0, reduce_s, gather_s, in_s),
            "R": _StageRun(0.0, layers_s, reduce_s, 0.0, 0.0),
            "B": _StageRun(
                2 * forward_s,
                again_s[layout.recompute],
                (1 + reruns) * reduce_s,
                gather_s + scatter_s,
                max(in_s, out_s),
            ),
        }

    @cached_property
    def stage_runs(self) -> list[dict[str, _StageRun]]:
        """Seconds of F, R and B of each stage."""
        found = {each: self.runs(*each) for each in zip(self.layers, self.outputs, strict=True)}
        return [found[each] for each in zip(self.layers, self.outputs, strict=True)]

    @property
    def _collectives(self) -> tuple[float, float, float, float]:
        """Seconds per layer that hide behind F or B: copies from the host and to it, gathers, reductions."""
        layout, host = self.layout, self.cluster.host_bytes_per_s
        visits = self.m if layout.is_relay else 1  # micro-batches that share one load
        gather_s = self._seconds(self.share * self.layer_bytes, self.data_link) / visits
        copy_s = self.layer_bytes / layout.data / host / visits
        if layout.is_relay or layout.offload == "weights":
            return copy_s, copy_s, gather_s, gather_s
        moved_s = self._kept_by_layer / host if layout.offload == "activations" else 0.0
        return moved_s, moved_s, gather_s * (layout.zero == 3), gather_s * (layout.zero >= 2)

    @property
    def _reduced_bytes(self) -> float:
        """Bytes that a tensor rank sends in one direction through a layer: two all-reduces."""
        t = self.layout.tensor
        return 2 * self.shape.boundary_bytes * self.layout.micro_batch * 2 * (t - 1) / t

    @property
    def _kept_by_layer(self) -> float:
        """Bytes that a layer keeps of a micro-batch until backward."""
        if self.layout.recompute == "layers":
            return self.layout.micro_batch * self.shape.boundary_bytes
        return self._record_bytes

    @property
    def _record_bytes(self) -> float:
        layout = self.layout
        attention = layout.recompute != "attention"
        sizes = self.shape.record_bytes(layout.tensor, attention, layout.gelu_bits, layout.linear_share)
        return layout.micro_batch * sizes

    @staticmethod
    def _seconds(nbytes: float, bytes_per_s: float | None) -> float:
        return nbytes / bytes_per_s if bytes_per_s else 0.0

    # -- all stages ----------------------------------------------------------------------------------------------------

    def stage_cost(self, runs: Mapping[str, _StageRun], layers: float, is_last: bool) -> StageCost:
        """Return the cost of a stage; the last one keeps the loss too."""
        shape, layout, rows = self.shape, self.layout, self.layout.micro_batch
        whole_attention = shape.record_bytes(layout.tensor) - shape.record_bytes(layout.tensor, attention=False)
        extra = {"nothing": 0.0, "attention": rows * whole_attention, "layers": self._record_bytes}[layout.recompute]
        record = layers * self._kept_by_layer
        if layout.offload == "activations":
            record, extra = 0.0, extra + 2 * self._kept_by_layer
        boundary = rows * shape.boundary_bytes
        return StageCost(
            runs["F"].seconds,
            runs["B"].seconds,
            runs["R"].seconds,
            input_bytes=boundary,
            record_bytes=round(record + is_last * rows * shape.loss_bytes / layout.tensor),
            forward_extra_bytes=round(extra) if layout.recompute != "layers" else round(extra - self._record_bytes),
            backward_extra_bytes=round(extra),
            output_bytes=boundary if self.layout.pipeline > 1 else 0,
        )

    def cost(self) -> LayoutCost:
        shape, layout, cluster = self.shape, self.layout, self.cluster
        p, runs = layout.pipeline, self.stage_runs
        link = cluster.link(layout.ranks) if p > 1 else None
        costs = tuple(
            self.stage_cost(runs[stage], layers, stage == self.stages - 1) for stage, layers in enumerate(self.layers)
        )
        step = simulate_rounds(layout.schedule, p, self.m, layout.stages, costs, link)
        seconds = dict.fromkeys(PARTS, 0.0)
        for (kind, stage), count in step.counts.items():
            for part, value in runs[stage][kind].parts.items():
                seconds[part] += count * value / p
        busy_s = sum(seconds.values())
        seconds["bubble"] = max(0.0, step.seconds - busy_s)  # not a rounding error below 0
        memory, host_bytes = self._memory(step)
        wire, copies = self._wire(step), self._copies(step)
        seconds["wire"] += self._exposed_s(step.stages_of)
        backward_s = sum(
            count * runs[stage]["B"].seconds for (kind, stage), count in step.counts.items() if kind == "B"
        )
        seconds["host"] += self._update_s(backward_s / p)
        tokens_per_s = self.rows * shape.sequence / sum(seconds.values())
        bubble = seconds["bubble"] / busy_s
        return LayoutCost(layout, memory, host_bytes, wire, copies, seconds, bubble, tokens_per_s)

    def stage_table(self) -> tuple[Costs, Costs]:
        """Return seconds and bytes of each rank's stage for any layers, as `cut_stages` reads them."""
        layout, ends, p = self.layout, self.shape.layers + 1, self.layout.pipeline
        counts = np.arange(ends) - np.arange(ends)[:, None]  # [i, j]: layers from i to j - 1
        tables = np.zeros((2, p, ends, ends))
        runs_of = [[self.runs(count, float(is_last)) for count in range(ends)] for is_last in (False, True)]
        if layout.schedule in RECOMPUTING:
            moments = fullest_moments(layout.schedule, p, self.m)
        else:
            moments = [{(kind, self._in_flight(rank), 0) for kind in "FB"} for rank in range(p)]
        for rank in range(p):
            by_count, is_last = np.zeros((2, ends)), rank == p - 1
            for count, runs in enumerate(runs_of[is_last]):
                by_count[0, count] = sum(runs[kind].seconds for kind in {kind for kind, *_ in moments[rank]})
                cost = self.stage_cost(runs, count, is_last)
                extra = {"B": cost.backward_extra_bytes, "F": cost.forward_extra_bytes, "R": cost.forward_extra_bytes}
                state, _ = self._state(self._parameters(count, rank == 0, is_last), 0.0)
                by_count[1, count] = sum(state.values()) + max(
                    records * cost.record_bytes + inputs * cost.input_bytes + extra[kind]
                    for kind, records, inputs in moments[rank]
                )
            tables[:, rank] = by_count[:, counts.clip(0)]
        return tables[0], tables[1]

    def _in_flight(self, rank: int) -> float:
        """Return the largest number of micro-batches whose records a rank keeps, counted once for all its stages."""
        p, v = self.layout.pipeline, self.layout.stages
        if self.layout.schedule == "GPipe":
            return self.m
        return min(self.m, p - rank if v == 1 else ((v - 1) * p + 2 * (p - 1 - rank) + 1) / v)

    def bounds(self) -> tuple[float, float]:
        """Return the bytes of the fullest rank and the seconds of a step, both at least."""
        layout, p = self.layout, self.layout.pipeline
        runs = self.runs(self.shape.layers / self.stages, 1 / self.stages)
        keeps_all = layout.schedule in ("GPipe", "1F1B", "Interleaved1F1B") and layout.offload != "activations"
        # Each rank has a part of the layers, and needs so many bytes for each; together they have all layers.
        layers, fixed = 0.0, 0.0
        for rank in range(p):
            empty, one = (self._state(self._parameters(count, rank == 0, rank == p - 1), 0.0)[0] for count in (0, 1))
            kept = self._in_flight(rank) if keeps_all else 0
            if layout.is_relay or layout.offload == "weights":
                return sum(one.values()), self._busy_s(runs)
            each = sum(one.values()) - sum(empty.values()) + kept * self._kept_by_layer
            layers, fixed = layers + 1 / each, fixed + sum(empty.values()) / each
        return (self.shape.layers + fixed) / layers, self._busy_s(runs)

    def _busy_s(self, runs: Mapping[str, _StageRun]) -> float:
        """Return a lower bound of a step's seconds, if a rank's first stage has its mean work or more.

        A rank is busy with all micro-batches, waits for the first one, and is waited for after the last one, by the first stages
        of the ranks before it. So in T seconds it does so much work at most, and together they do all of it.
        """
        layout, p, v = self.layout, self.layout.pipeline, self.layout.stages
        visits = self.stages / p
        backward_s = visits * self.m * runs["B"].seconds
        work_s = self.stages * (runs["F"].seconds + runs["B"].seconds)  # of a micro-batch
        share = 0.0  # of T, that the ranks so far work for a micro-batch
        for _ in range(p):
            share += (1 - share / v * (not layout.is_relay)) / self.m
        exposed_s = self._exposed_on_rank_s(self.shape.layers / p, v * runs["B"].seconds)
        return work_s / share + exposed_s + self._update_s(backward_s)

    def _exposed_s(self, stages_of: Sequence[Sequence[int]]) -> float:
        """Return the seconds of messages between data ranks, once per step, that no compute hides, on the slowest rank."""
        return max(
            self._exposed_on_rank_s(
                sum(self.layers[stage] for stage in stages),
                sum(self.stage_runs[stage]["B"].seconds for stage in stages),
            )
            for stages in stages_of
        )

    def _exposed_on_rank_s(self, layers: float, backward_s: float) -> float:
        layout = self.layout
        if layout.data == 1 or layout.is_relay or layout.zero == 3:
            return 0.0
        gather_s = self._seconds(self.share * self.layer_bytes * layers, self.data_link)
        reduce_s = gather_s * layout.gradient_bits / 16
        if layout.zero == 0:
            return max(0.0, 2 * reduce_s - backward_s)
        return gather_s + (max(0.0, reduce_s - backward_s) if layout.zero == 1 else 0.0)

    def _update_s(self, backward_s: float) -> float:
        """Return the seconds of updates on the host that nothing hides."""
        layout = self.layout
        if layout.offload != "weights" and not layout.is_relay:
            return 0.0
        update_s = self.shape.parameters / layout.ranks / self.cluster.update_params_per_s
        return max(0.0, update_s - backward_s) if layout.is_relay else update_s

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _parameters(self, layers: float, holds_first: bool, holds_last: bool) -> float:
        """Return the parameters of a rank: its layers, and the embedding on the ranks of the first and last stage."""
        shape, layout = self.shape, self.layout
        copies = holds_first + holds_last if layout.pipeline > 1 else 1
        return (layers * shape.layer_parameters + copies * shape.embedding_parameters) / layout.tensor

    def _memory(self, step: SimulatedRounds) -> tuple[dict[str, float], float]:
        """Return the bytes of the fullest rank by category, and those on its host."""
        ranks: list[tuple[dict[str, float], float]] = []
        for rank, activations in enumerate(step.peak_bytes):
            stages = step.stages_of[rank]
            layers = (
                sum(self.layers[stage] for stage in stages)
                if self.layout.cut
                else self.shape.layers / len(step.peak_bytes)
            )
            parameters = self._parameters(layers, 0 in stages, self.stages - 1 in stages)
            state, host_bytes = self._state(parameters, step.in_flight * layers / self.layout.stages)
            ranks.append(({**state, "activations": activations}, host_bytes))
        return max(ranks, key=lambda each: sum(each[0].values()))

    def _state(self, parameters: float, layers_in_flight: float) -> tuple[dict[str, float], float]:
        """Return bytes of weights, gradients and optimizer state on a device, and all bytes on its host."""
        shape, layout = self.shape, self.layout
        two_layers = 2 * self.layer_bytes
        if layout.is_relay or layout.offload == "weights":
            whole = sum(state_bytes(parameters).values()) / layout.data
            shell = NUMBER_BYTES * shape.embedding_parameters / layout.tensor
            kept = self.m * shape.layers * layout.micro_batch * shape.boundary_bytes / layout.pipeline
            on_device = {"weights": two_layers + shell, "gradients": two_layers + shell, "optimizer": 0.0}
            return on_device, whole + (kept if layout.is_relay else 0.0)
        state = state_bytes(parameters, layout.data, layout.zero)
        if layout.zero == 3 and layout.data > 1:  # two layers gathered
            state["weights"] += two_layers
        if layout.zero >= 2 and layout.data > 1:  # whole gradients of a layer until they are reduced
            state["gradients"] += self.layer_bytes
        return state, layers_in_flight * self._kept_by_layer if layout.offload == "activations" else 0.0

    def _wire(self, step: SimulatedRounds) -> dict[str, float]:
        layout, counts = self.layout, {kind: step.number_of(kind) for kind in "FRB"}
        weights = self.layer_bytes * self.shape.layers / layout.pipeline + self._embedding_bytes
        messages = self.layout.micro_batch * self.shape.boundary_bytes * self.m * (self.stages - 1) / layout.pipeline
        forward = min(messages, step.wire_bytes / layout.pipeline)
        reduced = self._reduced_bytes * self.shape.layers / self.stages / layout.pipeline  # in the mean stage
        reruns = counts["R"] + (counts["B"] if layout.recompute == "layers" else 0)
        each = self.share * weights
        is_sharded = layout.is_relay or layout.zero == 3
        gathers = 0 if not (is_sharded or layout.zero) else 2 * (1 if layout.is_relay else self.m) if is_sharded else 1
        scatters = 2 if not (is_sharded or layout.zero) else self.m if layout.zero >= 2 else 1
        return {
            "activations": forward + (counts["F"] + reruns) * reduced,
            "weights": gathers * each,
            "activation gradients": step.wire_bytes / layout.pipeline - forward + counts["B"] * reduced,
            "weight gradients": scatters * each * layout.gradient_bits / 16,
        }

    @property
    def _embedding_bytes(self) -> float:
        """Bytes of the embedding's weights on a rank, the mean over the pipeline."""
        copies = 2 if self.layout.pipeline > 1 else 1
        return NUMBER_BYTES * copies * self.shape.embedding_parameters / self.layout.tensor / self.layout.pipeline

    def _copies(self, step: SimulatedRounds) -> dict[str, float]:
        layout = self.layout
        copies = dict.fromkeys(MESSAGES, 0.0)
        weights = self.layer_bytes * self.shape.layers / layout.pipeline / layout.data
        if layout.offload == "activations":
            copies["activations"] = 2 * self.m * self.shape.layers / layout.pipeline * self._kept_by_layer
        elif layout.offload == "weights":
            copies |= {"weights": 2 * self.m * weights, "weight gradients": self.m * weights}
        elif layout.is_relay:
            inputs = 2 * step.number_of("R") * layout.micro_batch * self.shape.boundary_bytes / layout.pipeline
            copies |= {"activations": inputs, "weights": 2 * weights, "weight gradients": weights}
        return copies
