"""Ranks with their figures, the division of a model and a batch over them, and the cost of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from l2l_core.pipelines.pipeline_schedules import SCHEDULES
from l2l_core.pipelines.transformer_shape import TransformerShape

Recompute = Literal["nothing", "attention", "layers"]
Offload = Literal["nothing", "activations", "weights"]
PARTS: tuple[str, ...] = ("compute", "recompute", "bubble", "wire", "host")  # of the seconds of a step
MESSAGES: tuple[str, ...] = (
    "activations",
    "weights",
    "activation gradients",
    "weight gradients",
)  # kinds of bytes that move
RECOMPUTING = ("GPipe-recompute", "Varuna", "Relay")  # schedules with recomputes of whole stages


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

    Example:
        >>> from l2l_core.pipelines import RankCluster
        >>> cluster = RankCluster(ranks=16, memory_bytes=24e9)
        >>> cluster.link(8), cluster.link(16)  # within a node, and over nodes: bytes per second
        (200000000000.0, 25000000000.0)
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
        cut: layers of each stage; the last stage runs the output too. By default all stages share the work evenly.

    Example:
        >>> from l2l_core.pipelines import RankLayout
        >>> RankLayout(tensor=8, pipeline=4, data=2).ranks
        64
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
    cut: tuple[int, ...] | None = None

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
        words += [f"stages of {_runs(self.cut)} layers"] if self.cut else []
        words += [f"ZeRO {self.zero}"] * (self.zero > 0)
        words += [f"micro-batches of {self.micro_batch}"] * (self.micro_batch > 1)
        words += [f"recompute {self.recompute}"] * (self.recompute != "nothing")
        words += [f"offload {self.offload}"] * (self.offload != "nothing")
        return ", ".join(words)


def _runs(counts: tuple[int, ...]) -> str:
    """Return counts as text, "3 x 9, 8" for three times 9 and an 8."""
    groups = [(count, len([*each])) for count, each in groupby(counts)]
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in groups)


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

    Example:
        See `layout_cost`.
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

    Example:
        >>> from l2l_core.pipelines import RankLayout, TransformerShape, check_layout
        >>> shape = TransformerShape(layers=32, width=4096, heads=32)
        >>> check_layout(shape, RankLayout(pipeline=8, data=2), rows=64)  # micro-batches of each pipeline
        32
        >>> check_layout(shape, RankLayout(tensor=5), rows=64)
        Traceback (most recent call last):
        ValueError: heads=32 do not divide over tensor=5: use a divisor
    """
    t, p, d, b, v = layout.tensor, layout.pipeline, layout.data, layout.micro_batch, layout.stages
    zero, recomputes = layout.zero, layout.schedule in RECOMPUTING
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
        f"cut={layout.cut} is none of layers={shape.layers} into {p * v} stages: give a count of 1 or more for each": (
            layout.cut is not None
            and (len(layout.cut) != p * v or sum(layout.cut) != shape.layers or min(layout.cut) < 1)
        ),
        "a relay visits whole layers: use cut=None": layout.is_relay and layout.cut,
        "a relay visits whole layers: use tensor=1, stages=1 and zero=0": layout.is_relay and (t > 1 or v > 1 or zero),
        "offload='weights' shards them over data ranks, as ZeRO 3 does: use zero=3": (
            layout.offload == "weights" and zero != 3
        ),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(message)
    return rows // (d * b)
