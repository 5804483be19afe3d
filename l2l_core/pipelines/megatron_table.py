"""Megatron-LM's table of models from 1.7 B to 1 T parameters, and the same steps simulated (arXiv 2104.04473, table 1)."""

from __future__ import annotations

from typing import NamedTuple

from l2l_core.pipelines.layout_cost import layout_cost
from l2l_core.pipelines.rank_layout import RankCluster, RankLayout
from l2l_core.pipelines.transformer_shape import TransformerShape

PEAK_FLOP_PER_S = 312e12  # of an A100 in 16 bits
# Two figures for all rows: matrix products at 53 % of the peak, all-reduces within a node at 200 GB/s. Gradients are reduced, and
# messages between stages sent, in no time.
MEGATRON_CLUSTER = RankCluster(1, flop_per_s=0.53 * PEAK_FLOP_PER_S, node_bytes_per_s=200e9, link_bytes_per_s=None)


class MegatronRow(NamedTuple):
    """A row of the table.

    Attributes:
        billions: parameters, as printed.
        shape: the model.
        model_ranks: ranks that share it, in nodes of eight: tensor parallel within a node, a pipeline over nodes.
        ranks: all ranks.
        rows: of a batch.
        teraflop_per_s: reached per rank, as printed; recompute is counted.

    Example:
        >>> from l2l_core.pipelines import MEGATRON_ROWS
        >>> row = MEGATRON_ROWS[0]
        >>> row.layout.data, row.teraflop_per_s, round(row.simulated_teraflop_per_s())
        (32, 137, 165)
    """

    billions: float
    shape: TransformerShape
    model_ranks: int
    ranks: int
    rows: int
    teraflop_per_s: float

    @property
    def layout(self) -> RankLayout:
        """One row per micro-batch, full recompute; over several nodes an interleaved pipeline, 2 stages per rank."""
        tensor, is_far = min(8, self.model_ranks), self.model_ranks > 8
        schedule = "Interleaved1F1B" if is_far else "1F1B"
        pipeline, data = self.model_ranks // tensor, self.ranks // self.model_ranks
        return RankLayout(tensor, pipeline, data, 1, schedule, 1 + is_far, recompute="layers")

    def simulated_teraflop_per_s(self) -> float:
        """Return the simulated speed of a rank, with recompute counted."""
        cost = layout_cost(self.shape, MEGATRON_CLUSTER, self.layout, self.rows)
        return self.shape.step_flop * self.rows / self.ranks / cost.step_s / 1e12


def _row(billions: float, width: int, layers: int, heads: int, *rest: int) -> MegatronRow:
    return MegatronRow(billions, TransformerShape(layers, width, heads), *rest)


MEGATRON_ROWS = (  # parameters / 1e9, width, layers, heads, ranks of a model, all ranks, rows, TFLOP/s per rank
    _row(1.7, 2304, 24, 24, 1, 32, 512, 137),
    _row(3.6, 3072, 30, 32, 2, 64, 512, 138),
    _row(7.5, 4096, 36, 32, 4, 128, 512, 142),
    _row(18.4, 6144, 40, 48, 8, 256, 1024, 135),
    _row(39.1, 8192, 48, 64, 16, 512, 1536, 138),
    _row(76.1, 10240, 60, 80, 32, 1024, 1792, 140),
    _row(145.6, 12288, 80, 96, 64, 1536, 2304, 148),
    _row(310.1, 16384, 96, 128, 128, 1920, 2160, 155),
    _row(529.6, 20480, 105, 128, 280, 2520, 2520, 163),
    _row(1008.0, 25600, 128, 160, 512, 3072, 3072, 163),
)
