"""Cost of a training step of a large transformer on many ranks: bytes, seconds, messages; by formula and simulated.

A layout divides ranks into tensor x pipeline x data. Its stages are costs for `simulate_pipeline`, which gives seconds, waits
and activations; the rest is added by closed formulas. Nothing is measured. Assumptions:

- Matrix products run at one share of the peak, whatever their size. Work is spread evenly over stages.
- Tensor ranks are on one node; two all-reduces per layer and direction are not hidden.
- Weights gathered and gradients reduced per micro-batch (ZeRO 2, 3) are hidden behind its compute, and gradients reduced once
  per step behind the last backward; the rest is waited for. So are copies between device and host.
- With activations on the host a rank keeps two layers' records. With weights there, or with ZeRO 3, it has two layers' weights.
- Updates on the device take no time. Those on the host follow backward; a relay's are hidden behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from l2l_core.pipelines.pipeline_plan import PipelinePlan
from l2l_core.pipelines.pipeline_schedules import SCHEDULES, relay_over_ranks
from l2l_core.pipelines.pipeline_simulation import RankSpeeds, StageCost, simulate_pipeline
from l2l_core.pipelines.transformer_shape import NUMBER_BYTES, TransformerShape, state_bytes

Recompute = Literal["nothing", "attention", "layers"]
Offload = Literal["nothing", "activations", "weights"]
PARTS: tuple[str, ...] = ("compute", "recompute", "bubble", "wire", "host")  # of the seconds of a step
MESSAGES: tuple[str, ...] = (
    "activations",
    "weights",
    "activation gradients",
    "weight gradients",
)  # kinds of bytes that move
_RECOMPUTING = ("GPipe-recompute", "Varuna", "Relay")  # schedules with recomputes of whole stages


@dataclass(frozen=True)
class RankCluster:
    """Ranks and their figures; the defaults are those of an A100 in a node of eight.

    Attributes:
        ranks: number of devices.
        memory_bytes: budget of a device.
        flop_per_s: that matrix products reach.
        node: ranks of a node.
        node_bytes_per_s: link of a rank within its node.
        link_bytes_per_s: link of a rank to other nodes; None is a link that takes no time.
        host_bytes_per_s: link between a device and its host, in each direction.
        update_params_per_s: parameters that the host updates for each rank.
    """

    ranks: int
    memory_bytes: float = 80e9
    flop_per_s: float = 0.53 * 312e12
    node: int = 8
    node_bytes_per_s: float = 200e9
    link_bytes_per_s: float | None = 25e9
    host_bytes_per_s: float = 25e9
    update_params_per_s: float = 1.4e9

    def link(self, ranks: int) -> float | None:
        """Return bytes per second between neighbours of so many ranks: of the node if it holds them."""
        return self.node_bytes_per_s if ranks <= self.node else self.link_bytes_per_s


@dataclass(frozen=True)
class RankLayout:
    """Division of a model and a batch over tensor x pipeline x data ranks, and what each rank keeps.

    Attributes:
        tensor, pipeline, data: ranks that share a layer, the layers, and the rows.
        micro_batch: rows of a micro-batch.
        schedule: key of `SCHEDULES`; "Relay" visits layers one by one, with weights and activations on the host.
        stages: stages of each rank.
        zero: stage of ZeRO over the data ranks; 0 shards nothing.
        recompute: what backward makes again.
        offload: what waits on the host; "weights" stands for gradients and optimizer state too.
        gelu_bits, linear_share: see `TransformerShape.record_bytes`.
        gradient_bits: of a gradient in a message.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    micro_batch: int = 1
    schedule: str = "1F1B"
    stages: int = 1
    zero: int = 0
    recompute: Recompute = "nothing"
    offload: Offload = "nothing"
    gelu_bits: float = 16.0
    linear_share: float = 1.0
    gradient_bits: float = 16.0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data

    @property
    def is_relay(self) -> bool:
        """Whether layers are visited one by one."""
        return self.schedule == "Relay"

    def __str__(self) -> str:
        degrees = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}
        words = [" x ".join(f"{name} {count}" for name, count in degrees.items() if count > 1) or "one rank"]
        words += [f"{self.schedule}, {self.stages} stages per rank" if self.stages > 1 else self.schedule] * (
            self.pipeline > 1 or self.is_relay
        )
        words += [f"ZeRO {self.zero}"] * (self.zero > 0)
        words += [f"micro-batches of {self.micro_batch}"] * (self.micro_batch > 1)
        words += [f"recompute {self.recompute}"] * (self.recompute != "nothing")
        words += [f"offload {self.offload}"] * (self.offload != "nothing")
        return ", ".join(words)


@dataclass(frozen=True)
class LayoutCost:
    """Cost of a step with a layout; bytes by formula, seconds simulated.

    Attributes:
        layout: that was costed.
        memory: bytes by category of the rank that needs most.
        host_bytes: on the host, for that rank.
        wire: bytes that a rank sends to others in a step, by kind; the mean over ranks.
        copies: bytes between a rank and its host in a step, by kind, both directions together.
        seconds: by part, the mean over ranks; "bubble" includes the wait for messages between stages.
        bubble: waiting time of all ranks as a share of their compute time, as in `PipelineSimulation`.
        tokens_per_s: of all ranks together.
    """

    layout: RankLayout
    memory: Mapping[str, float]
    host_bytes: float
    wire: Mapping[str, float]
    copies: Mapping[str, float]
    seconds: Mapping[str, float]
    bubble: float
    tokens_per_s: float

    @property
    def device_bytes(self) -> float:
        """Bytes of the rank that needs most."""
        return sum(self.memory.values())

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())


def check_layout(shape: TransformerShape, layout: RankLayout, rows: int) -> int:
    """Check that a layout divides the model and the batch; return its number of micro-batches.

    Raises:
        ValueError: it does not; the message has the cause and a remedy.
    """
    t, p, d, b, v = layout.tensor, layout.pipeline, layout.data, layout.micro_batch, layout.stages
    zero, recomputes = layout.zero, layout.schedule in _RECOMPUTING
    if min(t, p, d, b, v, rows) < 1:
        raise ValueError(f"rows={rows}, {layout}: each number is 1 or more")
    wrong = {
        f"rows={rows} do not divide into {d} data ranks of micro-batches of {b}: use a multiple of {d * b}": rows
        % (d * b),
        f"heads={shape.heads} do not divide over tensor={t}: use a divisor": shape.heads % t,
        f"pipeline={p} ranks of {v} stages need as many layers, and layers={shape.layers}: use fewer": p * v
        > shape.layers,
        f"schedule={layout.schedule!r}: use one of {', '.join(SCHEDULES)}": layout.schedule not in SCHEDULES,
        f"zero={zero} reduces gradients after each micro-batch, which a pipeline cannot hide: use zero=1 or pipeline=1": (
            zero >= 2 and p > 1
        ),
        f"{layout.schedule} recomputes by itself: use recompute='nothing'": recomputes and layout.recompute == "layers",
        f"{layout.schedule} is costed without a further offload: use offload='nothing'": (
            recomputes and layout.offload != "nothing"
        ),
        "a relay visits whole layers: use tensor=1, stages=1 and zero=0": layout.is_relay and (t > 1 or v > 1 or zero),
        "offload='weights' shards them over data ranks, as ZeRO 3 does: use zero=3": (
            layout.offload == "weights" and zero != 3
        ),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(message)
    return rows // (d * b)


def layout_cost(shape: TransformerShape, cluster: RankCluster, layout: RankLayout, rows: int) -> LayoutCost:
    """Return the cost of a step.

    Args:
        shape: the model.
        cluster: figures of ranks and links.
        layout: division of the ranks; it may use fewer than the cluster has.
        rows: of the batch, over all ranks.

    Raises:
        ValueError: the layout does not divide model and batch.
    """
    return _StepCost(shape, cluster, layout, rows).cost()


def layout_bounds(shape: TransformerShape, cluster: RankCluster, layout: RankLayout, rows: int) -> tuple[float, float]:
    """Return bytes and seconds that a step takes at least, without a simulation: the search leaves out what cannot win."""
    return _StepCost(shape, cluster, layout, rows).bounds()


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
        self.layers = shape.layers / self.stages  # of a stage
        self.share = (layout.data - 1) / layout.data  # of its bytes that a rank sends in a gather
        self.data_link = cluster.link(layout.tensor * layout.data)
        self.layer_bytes = NUMBER_BYTES * shape.layer_parameters / layout.tensor  # weights of a layer on a rank

    # -- one action of a stage -----------------------------------------------------------------------------------------

    def runs(self) -> dict[str, _StageRun]:
        """Return the seconds of F, R and B of a stage and a micro-batch."""
        shape, layout, rows = self.shape, self.layout, self.layout.micro_batch
        per_s = rows / layout.tensor / self.cluster.flop_per_s
        layers_s = shape.layer_flop * self.layers * per_s
        forward_s = layers_s + shape.head_flop / self.stages * per_s
        again_s = {"nothing": 0.0, "attention": shape.attention_flop * self.layers * per_s, "layers": layers_s}
        reduce_s = self._seconds(self._reduced_bytes, self.cluster.node_bytes_per_s)
        in_s, out_s, gather_s, scatter_s = self._collectives
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

    @property
    def _collectives(self) -> tuple[float, float, float, float]:
        """Seconds that hide behind F or B: copies from the host and to it, gathers, reductions."""
        layout, host = self.layout, self.cluster.host_bytes_per_s
        weights = self.layer_bytes * self.layers
        visits = self.m if layout.is_relay else 1  # micro-batches that share one load
        gather_s = self._seconds(self.share * weights, self.data_link) / visits
        copy_s = weights / layout.data / host / visits
        if layout.is_relay or layout.offload == "weights":
            return copy_s, copy_s, gather_s, gather_s
        moved_s = self._kept_bytes / host if layout.offload == "activations" else 0.0
        return moved_s, moved_s, gather_s * (layout.zero == 3), gather_s * (layout.zero >= 2)

    @property
    def _reduced_bytes(self) -> float:
        """Bytes that a tensor rank sends in one direction through a stage: two all-reduces per layer."""
        t = self.layout.tensor
        return 2 * self.shape.boundary_bytes * self.layout.micro_batch * 2 * (t - 1) / t * self.layers

    @property
    def _kept_bytes(self) -> float:
        """Bytes that the layers of a stage keep of a micro-batch until backward."""
        return self.layers * self._kept_by_layer

    @property
    def _kept_by_layer(self) -> float:
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

    def stage_costs(self, runs: Mapping[str, _StageRun]) -> tuple[StageCost, StageCost]:
        """Return the costs of a stage and of the last one, which keeps the loss too."""
        shape, layout, rows = self.shape, self.layout, self.layout.micro_batch
        whole_attention = shape.record_bytes(layout.tensor) - shape.record_bytes(layout.tensor, attention=False)
        extra = {"nothing": 0.0, "attention": rows * whole_attention, "layers": self._record_bytes}[layout.recompute]
        record = self._kept_bytes
        if layout.offload == "activations":
            record, extra = 0.0, extra + 2 * self._kept_by_layer
        boundary = rows * shape.boundary_bytes
        cost = StageCost(
            runs["F"].seconds,
            runs["B"].seconds,
            runs["R"].seconds,
            input_bytes=boundary,
            record_bytes=round(record),
            forward_extra_bytes=round(extra) if layout.recompute != "layers" else round(extra - self._record_bytes),
            backward_extra_bytes=round(extra),
            output_bytes=boundary if self.layout.pipeline > 1 else 0,
        )
        return cost, replace(cost, record_bytes=round(record + rows * shape.loss_bytes / layout.tensor))

    def cost(self) -> LayoutCost:
        shape, layout, cluster = self.shape, self.layout, self.cluster
        runs = self.runs()
        link = cluster.link(layout.ranks) if layout.pipeline > 1 else None
        step = _simulate_step(
            layout.schedule, layout.pipeline, self.m, layout.stages, shape.layers, *self.stage_costs(runs), link
        )
        seconds = dict.fromkeys(PARTS, 0.0)
        for kind, count in step.counts.items():
            for part, value in runs[kind].parts.items():
                seconds[part] += count * value / layout.pipeline
        busy_s = sum(seconds.values())
        seconds["bubble"] = max(0.0, step.seconds - busy_s)  # not a rounding error below 0
        memory, host_bytes = self._memory(step)
        wire, copies = self._wire(step), self._copies(step)
        seconds["wire"] += self._exposed_s(runs["B"].seconds * layout.stages)
        seconds["host"] += self._update_s(step.counts["B"] / layout.pipeline * runs["B"].seconds)
        tokens_per_s = self.rows * shape.sequence / sum(seconds.values())
        bubble = seconds["bubble"] / busy_s
        return LayoutCost(layout, memory, host_bytes, wire, copies, seconds, bubble, tokens_per_s)

    def bounds(self) -> tuple[float, float]:
        """Return the bytes of the first rank at least, and the seconds without any wait between ranks."""
        layout, runs = self.layout, self.runs()
        keeps_all = layout.schedule in ("GPipe", "1F1B", "Interleaved1F1B")
        in_flight = min(self.m, layout.pipeline) * layout.stages if keeps_all else 0
        state, _ = self._state(self._parameters(True, layout.pipeline == 1), 0.0)
        record = self.stage_costs(runs)[0].record_bytes
        visits = self.stages / layout.pipeline * self.m
        busy_s = visits * (runs["F"].seconds + runs["B"].seconds)
        exposed_s = self._exposed_s(runs["B"].seconds * layout.stages) + self._update_s(visits * runs["B"].seconds)
        return sum(state.values()) + in_flight * record, busy_s + exposed_s

    def _exposed_s(self, backward_s: float) -> float:
        """Return the seconds of messages between data ranks, once per step, that no compute hides."""
        layout = self.layout
        if layout.data == 1 or layout.is_relay or layout.zero == 3:
            return 0.0
        weights = self.layer_bytes * self.shape.layers / layout.pipeline
        gather_s = self._seconds(self.share * weights, self.data_link)
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

    def _parameters(self, holds_first: bool, holds_last: bool) -> float:
        """Return the parameters of a rank: its layers, and the embedding on the ranks of the first and last stage."""
        shape, layout = self.shape, self.layout
        copies = holds_first + holds_last if layout.pipeline > 1 else 1
        layers = shape.layers / layout.pipeline
        return (layers * shape.layer_parameters + copies * shape.embedding_parameters) / layout.tensor

    def _memory(self, step: _SimulatedRounds) -> tuple[dict[str, float], float]:
        """Return the bytes of the fullest rank by category, and those on its host."""
        ranks: list[tuple[dict[str, float], float]] = []
        for rank, activations in enumerate(step.peak_bytes):
            is_first, is_last = rank == 0, rank == step.last_rank
            state, host_bytes = self._state(self._parameters(is_first, is_last), step.in_flight)
            ranks.append(({**state, "activations": activations}, host_bytes))
        return max(ranks, key=lambda each: sum(each[0].values()))

    def _state(self, parameters: float, in_flight: float) -> tuple[dict[str, float], float]:
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
        return state, in_flight * self._kept_bytes if layout.offload == "activations" else 0.0

    def _wire(self, step: _SimulatedRounds) -> dict[str, float]:
        layout, counts = self.layout, step.counts
        weights = self.layer_bytes * self.shape.layers / layout.pipeline + self._embedding_bytes
        messages = self.layout.micro_batch * self.shape.boundary_bytes * self.m * (self.stages - 1) / layout.pipeline
        forward = min(messages, step.wire_bytes / layout.pipeline)
        reduced = self._reduced_bytes / layout.pipeline
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

    def _copies(self, step: _SimulatedRounds) -> dict[str, float]:
        layout = self.layout
        copies = dict.fromkeys(MESSAGES, 0.0)
        weights = self.layer_bytes * self.shape.layers / layout.pipeline / layout.data
        if layout.offload == "activations":
            copies["activations"] = 2 * self.m * layout.stages * self._kept_bytes
        elif layout.offload == "weights":
            copies |= {"weights": 2 * self.m * weights, "weight gradients": self.m * weights}
        elif layout.is_relay:
            inputs = 2 * step.counts["R"] * layout.micro_batch * self.shape.boundary_bytes / layout.pipeline
            copies |= {"activations": inputs, "weights": 2 * weights, "weight gradients": weights}
        return copies


class _SimulatedRounds(NamedTuple):
    """A simulated step: seconds, activations by rank, bytes sent by all ranks, numbers of actions by kind."""

    seconds: float
    peak_bytes: tuple[float, ...]
    wire_bytes: float
    counts: Mapping[str, float]
    in_flight: float  # records of stages on the first rank
    last_rank: int  # that has the last stage


_STEADY = {"GPipe": 1, "GPipe-recompute": 1, "1F1B": 1, "Interleaved1F1B": 2}  # rounds of p after which all are alike


@lru_cache(maxsize=4096)
def _simulate_step(
    schedule: str, p: int, m: int, v: int, layers: int, cost: StageCost, last: StageCost, link: float | None
) -> _SimulatedRounds:
    """Simulate a step; where rounds of p micro-batches are alike, simulate a few and add the others."""

    def simulate(count: int) -> _SimulatedRounds:
        plan = _make_plan(schedule, p, count, v, layers)
        simulation = simulate_pipeline(plan, [*[cost] * (plan.stages - 1), last], RankSpeeds(bytes_per_s=link))
        kinds = [action.kind for actions in plan.ranks for action in actions]
        counts = {kind: float(kinds.count(kind)) for kind in "FRB"}
        last_rank = max(range(p), key=lambda rank: max(plan.stages_of(rank), default=-1))
        wire_bytes = sum(simulation.wire_bytes)
        return _SimulatedRounds(
            simulation.seconds, simulation.peak_bytes, wire_bytes, counts, plan.in_flight(0), last_rank
        )

    short = m % p + _STEADY.get(schedule, 1) * p
    if m <= short + 2 * p or (schedule not in _STEADY and p > 1):
        return simulate(m)
    few, more = simulate(short), simulate(short + p)
    if schedule == "Interleaved1F1B" and link:  # with slow messages, rounds may differ for longer
        next_s = simulate(short + 2 * p).seconds
        if abs((next_s - more.seconds) - (more.seconds - few.seconds)) > 1e-9 * next_s:
            return simulate(m)
    rounds = (m - short) / p

    def beyond(a: float, b: float) -> float:
        return a + rounds * (b - a)

    return _SimulatedRounds(
        beyond(few.seconds, more.seconds),
        tuple(map(beyond, few.peak_bytes, more.peak_bytes)),
        beyond(few.wire_bytes, more.wire_bytes),
        {kind: beyond(count, more.counts[kind]) for kind, count in few.counts.items()},
        beyond(few.in_flight, more.in_flight),
        few.last_rank,
    )


@lru_cache(maxsize=64)
def _make_plan(schedule: str, p: int, m: int, v: int, layers: int) -> PipelinePlan:
    return relay_over_ranks(p, m, layers) if schedule == "Relay" else SCHEDULES[schedule](p, m, v)
