"""Activation policies: what happens to a layer's graph between its forward and its backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from l2l_core.plan import Keep


@dataclass(frozen=True)
class ActivationPolicy:
    """Decides which calls of a visit keep their graphs.

    Attributes:
        keeps_graph: whether the graph is kept after the layer's run.
        outlives_turn: whether it is kept while other micro-batches run; then no recompute verifies the layer.
    """

    keeps_graph: bool = False
    outlives_turn: bool = False


RECOMPUTE = ActivationPolicy()
KEEP_UNTIL_SUSPENDED = ActivationPolicy(keeps_graph=True)
KEEP = ActivationPolicy(keeps_graph=True, outlives_turn=True)
POLICIES: Mapping[Keep, ActivationPolicy] = {"input": RECOMPUTE, "turn": KEEP_UNTIL_SUSPENDED, "graph": KEEP}
