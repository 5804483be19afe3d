"""What a layer is called with, cut from what it was made by; and the layer's run on it.

The first run and every recompute go this way, so that the same code gives the same graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from l2l_core.model import is_cache, refuse_hidden_tensors
from l2l_core.step.graph import BoundaryGradient, detach_to, edge_of
from l2l_core.step.micro_batch.empty_cache import CacheView, EmptyCache
from l2l_core.step.micro_batch.fast_pytree import flatten, unflatten
from l2l_core.step.micro_batch.graph_segmenter import GraphSegmenter
from l2l_core.step.micro_batch.module_hooks import Locator


@dataclass(slots=True)
class LayerGraph:
    """Edges of a layer's graph from which backward can start."""

    segment_inputs: list[torch.Tensor]  # what the layer saw of Arguments.inputs; their nodes live as long as they do
    input_edges: list[GradientEdge]  # at these; roots for gradients that inputs already have
    output_edges: list[GradientEdge]  # aligned with Call.outputs
    side_edges: dict[Locator, GradientEdge]
    kept_outputs: list[torch.Tensor] = field(default_factory=list)  # what the layer gave out, if it may be parked


@dataclass(slots=True)
class LayerOutputs:
    """What a run of the layer gave out."""

    flat: list[Any]
    spec: Any
    originals: dict[int, Any]  # arguments by the id of what the layer saw of them: an entry, a lent cache
    new_tensors: dict[int, torch.Tensor]  # tensors that are no argument, by id
    differentiable: list[torch.Tensor]  # those of them that receive a gradient
    cache_views: dict[EmptyCache, CacheView]

    def check_caches(self) -> None:
        """Raise TypeError if the layer would have found something in a cache that it was lent empty."""
        for cache, lent in self.cache_views.items():
            cache.check_first_run(lent)


@dataclass(slots=True)
class LayerInput:
    """A differentiable argument, and where its gradient gathers."""

    tensor: torch.Tensor
    boundary: BoundaryGradient


@dataclass(slots=True)
class Arguments:
    """A call's arguments.

    Invariant: what they hold is the stash of the call.

    Attributes:
        leaves: tensors, caches and plain values, in the order of `spec`.
        inputs: the differentiable tensors among them, each once.
        tensors: every tensor among them.
    """

    leaves: list[Any]
    spec: Any
    inputs: list[LayerInput]
    tensors: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @staticmethod
    def of(layer: str, args: tuple[Any, ...], kwargs: dict[str, Any], segmenter: GraphSegmenter) -> Arguments:
        """Take arguments and cut their graph.

        Raises:
            TypeError: an argument hides tensors (a cache, an object that is no pytree).
        """
        leaves, spec = flatten((args, kwargs))
        inputs: dict[int, LayerInput] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if leaf.requires_grad and torch.is_grad_enabled() and id(leaf) not in inputs:
                    inputs[id(leaf)] = LayerInput(leaf, segmenter.boundary_of(leaf))
            elif is_cache(leaf):
                leaves[index] = EmptyCache(leaf, f"argument {index} of layer {layer}")
            else:
                refuse_hidden_tensors(leaf, f"argument {index} of layer {layer}")
        return Arguments(leaves, spec, list(inputs.values()))

    def run(self, layer: Callable[..., Any]) -> tuple[LayerOutputs, LayerGraph]:
        """Call the layer with entries in place of differentiable arguments, and with caches lent empty."""
        entered = {id(i.tensor): detach_to(i.tensor, i.boundary) for i in self.inputs}
        lent = {leaf: leaf.make_view() for leaf in self.leaves if isinstance(leaf, EmptyCache)}
        seen = entered | {id(cache): own for cache, own in lent.items()}
        args, kwargs = unflatten([seen.get(id(leaf), leaf) for leaf in self.leaves], self.spec)
        flat, spec = flatten(layer(*args, **kwargs))
        # A layer may return what it was given, or a part of it. The shell then sees its own tensor and not the entry, so that
        # the gradient takes the way past the layer.
        own: dict[int, Any] = {id(entered[id(i.tensor)]): i.tensor for i in self.inputs}
        own.update((id(seen), cache.original) for cache, seen in lent.items())
        passed = {id(leaf) for leaf in self.leaves} | set(own)
        new = {id(t): t for t in flat if isinstance(t, torch.Tensor) and id(t) not in passed}
        flowing = [t for t in new.values() if t.requires_grad and torch.is_grad_enabled()]
        entries = list(entered.values())
        graph = LayerGraph(
            entries, [edge_of(entry, lives=True) for entry in entries], [edge_of(t) for t in flowing], {}
        )
        return LayerOutputs(flat, spec, own, new, flowing, lent), graph


NO_ARGUMENTS = Arguments([], None, [])  # of a call that is over
