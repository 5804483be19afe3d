"""Arguments of a layer call, detached from the graph that made them, and the layer's run on them.

The first run and every recompute use the same code, so that they make the same graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from l2l_core.model import is_cache, refuse_hidden_tensors
from l2l_core.step.graph import BoundaryGradient, detach_to
from l2l_core.step.guards import CacheView, EmptyCache, Locator
from l2l_core.step.micro_batch.fast_pytree import flatten, unflatten
from l2l_core.step.micro_batch.graph_segmenter import GraphSegmenter


@dataclass(slots=True)
class LayerGraph:
    """Edges of a layer's graph from which backward can start.

    Attributes:
        segment_inputs: the tensors that the layer read in place of `Arguments.inputs`; they keep their nodes alive.
        input_edges: edges at these; roots for gradients that the inputs already have.
        output_edges: edges of the differentiable outputs.
        kept_outputs: the outputs, if the graph is kept and its tensors may be offloaded.
    """

    segment_inputs: list[torch.Tensor]
    input_edges: list[GradientEdge]
    output_edges: list[GradientEdge]
    side_edges: dict[Locator, GradientEdge] = field(default_factory=dict)
    kept_outputs: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class LayerOutputs:
    """Outputs of one run of a layer.

    Attributes:
        originals: id of a segment input or cache view that the layer read -> the argument that it stands for.
        new_tensors: id -> output tensor that is not an argument.
        differentiable: those of them that receive a gradient.
        caches: the caches among the arguments, each with the view that the layer read.
    """

    flat: list[Any]
    spec: Any
    originals: dict[int, Any]
    new_tensors: dict[int, torch.Tensor]
    differentiable: list[torch.Tensor]
    caches: list[tuple[EmptyCache, CacheView]]

    def check_caches(self) -> None:
        """Raise TypeError if in plain training the layer would have found an entry in one of its caches."""
        for cache, view in self.caches:
            cache.check_first_run(view)


@dataclass(slots=True)
class Arguments:
    """Arguments of a call.

    Invariant: the tensors they hold are the stash of the call.

    Attributes:
        leaves: tensors, caches and plain values, in the order of `spec`.
        inputs: the differentiable tensors among them, each once, and their gradients.
        tensors: all tensors among them.
    """

    leaves: list[Any]
    spec: Any
    inputs: list[tuple[torch.Tensor, BoundaryGradient]]
    tensors: list[torch.Tensor]

    @staticmethod
    def of(layer: str, args: tuple[Any, ...], kwargs: dict[str, Any], segmenter: GraphSegmenter) -> Arguments:
        """Flatten arguments and place a boundary at each differentiable tensor.

        Raises:
            TypeError: an argument hides tensors (a cache, an object that is not a pytree).
        """
        leaves, spec = flatten((args, kwargs))
        inputs: dict[int, tuple[torch.Tensor, BoundaryGradient]] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if leaf.requires_grad and torch.is_grad_enabled() and id(leaf) not in inputs:
                    inputs[id(leaf)] = leaf, segmenter.boundary_of(leaf)
            elif is_cache(leaf):
                leaves[index] = EmptyCache(leaf, f"argument {index} of layer {layer}")
            else:
                refuse_hidden_tensors(leaf, f"argument {index} of layer {layer}")
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return Arguments(leaves, spec, list(inputs.values()), tensors)

    def run(self, layer: Callable[..., Any]) -> tuple[LayerOutputs, LayerGraph]:
        """Call the layer with segment inputs in place of differentiable arguments, and with views of empty caches."""
        segment_inputs: list[Any] = [detach_to(*item) for item in self.inputs]
        caches = [(leaf, leaf.make_view()) for leaf in self.leaves if isinstance(leaf, EmptyCache)]
        shown = {id(tensor): made for (tensor, _), made in zip(self.inputs, segment_inputs, strict=True)}
        shown |= {id(cache): view for cache, view in caches}
        args, kwargs = unflatten([shown.get(id(leaf), leaf) for leaf in self.leaves], self.spec)
        flat, spec = flatten(layer(*args, **kwargs))
        # A layer may return an argument, or a part of it. The shell then gets its own tensor and not the segment input, so
        # that the gradient bypasses the layer.
        originals = {id(shown[id(tensor)]): tensor for tensor, _ in self.inputs}
        originals |= {id(view): cache.original for cache, view in caches}
        passed = {id(leaf) for leaf in self.leaves} | set(originals)
        new = {id(t): t for t in flat if isinstance(t, torch.Tensor) and id(t) not in passed}
        differentiable = [t for t in new.values() if t.requires_grad and torch.is_grad_enabled()]
        input_edges = [GradientEdge(tensor.grad_fn, tensor.output_nr) for tensor in segment_inputs]
        graph = LayerGraph(segment_inputs, input_edges, [get_gradient_edge(t) for t in differentiable])
        return LayerOutputs(flat, spec, originals, new, differentiable, caches), graph


NO_ARGUMENTS = Arguments([], None, [], [])  # of a released call
