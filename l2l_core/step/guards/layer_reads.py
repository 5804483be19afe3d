"""Tensors that a layer reads: arguments must not change before the recompute, and others must be given to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import GradientEdge

from l2l_core.eps.blocks import Unit
from l2l_core.model import version_of
from l2l_core.step.graph import BoundaryGradient, Subgraph, unguarded, walk_graph


class ArgumentVersions:
    """Version counters of the tensors that a layer was called with.

    Args:
        layer: name of the layer, for messages.
        tensors: its tensor arguments; the same list is given to `check`.
    """

    __slots__ = ("_layer", "_versions")

    def __init__(self, layer: str, tensors: Sequence[torch.Tensor]) -> None:
        self._layer, self._versions = layer, _versions_of(tensors)

    def check(
        self, tensors: Sequence[torch.Tensor], cause: str = "the model changed it in place after the call"
    ) -> None:
        """Raise RuntimeError if a tensor was changed in place since; `cause` explains it in the error."""
        now = _versions_of(tensors)
        if now == self._versions:
            return
        index = next(i for i, (a, b) in enumerate(zip(now, self._versions, strict=True)) if a != b)
        raise RuntimeError(
            f"tensor argument {index} of layer {self._layer} (shape {tuple(tensors[index].shape)}) cannot be recomputed from: "
            f"{cause}. Change a copy instead (x = x + y rather than x += y, ReLU(inplace=False))"
        )


def _versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    with unguarded():
        return [version_of(tensor) for tensor in tensors]


def find_layer_graph(
    unit: Unit, inputs: Iterable[BoundaryGradient], outputs: Iterable[GradientEdge], began: int
) -> Subgraph:
    """Return the graph behind outputs of a layer.

    Args:
        unit: the layer.
        inputs: boundaries of its differentiable arguments.
        outputs: edges of outputs.
        began: sequence number of autograd when the layer was called.

    Raises:
        RuntimeError: the graph has differentiable tensors that are neither arguments nor parameters of the layer.
    """
    graph = walk_graph(outputs)
    own, params = set(map(id, inputs)), set(map(id, unit.params))
    foreign = sum(id(leaf) not in params and isinstance(leaf, torch.nn.Parameter) for leaf in graph.leaves)
    foreign += sum(id(node.boundary) not in own for node in graph.inputs)
    if graph.first < began:
        foreign += sum(node._sequence_nr() < began for node in graph.nodes)
    if foreign:
        raise RuntimeError(
            f"layer {unit.name} reads {foreign} differentiable tensor(s) that it was not given as arguments (taken "
            "from an attribute, a closure or another layer): their gradients would miss the relay. Pass them as "
            "arguments of the layer"
        )
    return graph
