"""Boundaries: tensors at which the autograd graph of a micro-batch is cut.

A tensor that crosses a boundary is read through a *segment input*: the same storage at the start of a new graph. Backward
through the code that reads it ends there and adds the gradient to a `BoundaryGradient`. When all later code has run backward,
that gradient continues into the graph before the boundary. So backward of each layer, and of each *segment* of shell code
between two layer calls, is a separate run that reaches no node of an earlier one and no user hook on its tensors.

Sums are in the order of plain training: a gradient held at a boundary is a root of the next run at the segment input, where
autograd adds the contributions of that run to it one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from l2l_core._torch import (
    AccumulateGrad,
    DisableFuncTorch,
    EngineDispatchMode,
    count_dispatch_modes,
    dispatch_modes,
    enable_single_level_autograd_function,
    no_dispatch,
    run_engine,
    transforms_are_active,
)
from l2l_core._torch import sequence_number as sequence_number
from l2l_core.step.graph.guarded_tensor import unguard

Root = tuple[GradientEdge, torch.Tensor]

# Nodes of `prod`, and of `masked_fill` by a tensor: the only ones of PyTorch's operators in its own list of samples (torch 2.13).
_OTHER_UNDER_MODES = {"ProdBackward0", "ProdBackward1", "MaskedFillBackward1"}


class BoundaryGradient:
    """The gradient of one tensor of one micro-batch, held until the graph before the boundary runs backward.

    Invariant: contributions are added in the order in which backward produces them.

    Attributes:
        is_partial: whether the graph before the boundary reads the tensor too, so that this is only a part of its gradient.
    """

    __slots__ = ("grad", "is_partial")

    def __init__(self) -> None:
        self.grad: torch.Tensor | None = None
        self.is_partial = False

    def add(self, grad: torch.Tensor) -> None:
        """Add one contribution of the same shape as the tensor."""
        # Not in place: backward of an addition passes one tensor to both operands.
        self.grad = grad if self.grad is None else self.grad + grad

    def take(self) -> torch.Tensor | None:
        """Return the gradient collected so far and reset it to None."""
        grad, self.grad = self.grad, None
        return grad if grad is None else unguard(grad)


class _SegmentInput(torch.autograd.Function):
    """Graph node without inputs whose output is a segment input."""

    @staticmethod
    def forward(ctx: Any, phony: torch.Tensor, x: torch.Tensor | None, held: tuple[Any, ...]) -> torch.Tensor:
        boundary, tensor = held  # in a tuple, so that autograd does not connect the node to the tensor's history
        ctx.boundary = boundary
        ctx.set_materialize_grads(False)  # plain training has no gradient for an output that is not read
        if x is not None:
            ctx.mark_dirty(x)
            return x
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None, None]:
        if grad is not None:
            ctx.boundary.add(grad)
        return None, None, None


def detach_to(x: torch.Tensor, boundary: BoundaryGradient) -> torch.Tensor:
    """Return a segment input for `x`: same storage, a new graph, no leaf; its gradient is added to `boundary`.

    Gradients must be enabled.
    """
    if not transforms_are_active():
        return _apply_segment_input(_PHONY, None, (boundary, x))
    # A function under `vmap` or `jvp` closes over `x`; the transform applies to the function, not to `x`.
    with DisableFuncTorch(), enable_single_level_autograd_function():
        return _apply_segment_input(_PHONY, None, (boundary, x))


def detach_in_place(x: torch.Tensor, boundary: BoundaryGradient) -> None:
    """Make the tensor object `x` itself a segment input, for all who hold a reference to it.

    Gradients must be enabled.

    Raises:
        RuntimeError: `x` is a view with weak references, so that it cannot be swapped.
    """
    hooks = x._backward_hooks  # user hooks stay on the old graph, which receives the whole gradient
    x._backward_hooks = None
    try:
        if x._is_view():  # a view cannot be detached in place
            torch.utils.swap_tensors(x, detach_to(x, boundary))
        else:
            x.detach_()
            _apply_segment_input(_PHONY, x, (boundary, None))
    except BaseException:
        x._backward_hooks = hooks
        raise


_PHONY = torch.empty(0, requires_grad=True)  # makes autograd record the node; never receives a gradient
# The C function under `Function.apply`, without its overhead and without `patch_function_apply`.
_base: Any = super(torch.autograd.Function, _SegmentInput)
_apply_segment_input = _base.apply


Crossing = tuple[GradientEdge, BoundaryGradient]


@dataclass(eq=False, slots=True)
class Segment:
    """Shell code of one micro-batch between two layer calls.

    Attributes:
        roots: tensors that are made here and read later, where backward starts.
        inputs: segment inputs: tensors made earlier, and outputs of the layer before.
        uses: how often the graph reads each parameter; complete when the forward has finished.
        is_hooked: whether a hook is on a segment input.
    """

    roots: list[Crossing] = field(default_factory=list)
    inputs: list[Crossing] = field(default_factory=list)
    uses: Counter[torch.Tensor] = field(default_factory=Counter)
    is_hooked: bool = False

    @property
    def boundaries(self) -> list[Crossing]:
        """All boundaries of the segment and their edges."""
        return [*self.roots, *self.inputs]

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient has arrived for a root, or for a segment input with a hook."""
        return any(boundary.grad is not None for _, boundary in (self.boundaries if self.is_hooked else self.roots))

    def pending_gradients(self) -> list[torch.Tensor]:
        """Return the gradients held at all boundaries of the segment."""
        return [boundary.grad for _, boundary in self.boundaries if boundary.grad is not None]


def take_gradients(crossings: Iterable[Crossing]) -> list[Root]:
    """Take the gradients held at boundaries, each with the edge at which it continues."""
    return [(edge, grad) for edge, boundary in crossings if (grad := boundary.take()) is not None]


def run_backward(roots: Sequence[Root]) -> None:
    """Back-propagate from `roots` to segment inputs and parameters."""
    if roots:
        edges, grads = zip(*roots, strict=True)
        with _modes_hidden_from_nodes(edges) if count_dispatch_modes() else nullcontext():
            # The engine call under `torch.autograd.backward`, without its checks of the gradients.
            run_engine(edges, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


@contextmanager
def _modes_hidden_from_nodes(edges: Iterable[GradientEdge]) -> Iterator[None]:
    """Let PyTorch compute the gradients as in plain training for nodes that have another formula under a dispatch mode.

    It rounds otherwise, and plain training has none of the relay's modes.
    """
    with ExitStack() as scope:
        if all(isinstance(mode, EngineDispatchMode) for mode in dispatch_modes()):
            for node in walk_graph(edges).nodes:
                if type(node).__name__ in _OTHER_UNDER_MODES:
                    _run_outside_modes(node, scope)
        yield


def _run_outside_modes(node: Any, scope: ExitStack) -> None:
    hidden = scope.enter_context(ExitStack())  # closed here if the node raises
    names = [name for name in dir(node) if name.startswith("_saved_")]

    def before(grads: Sequence[torch.Tensor | None]) -> None:
        for saved in (getattr(node, name) for name in names):
            if isinstance(saved, torch.Tensor):
                saved.detach()  # under the mode: restores its memory, if it was offloaded
        hidden.enter_context(no_dispatch())

    def after(inputs: Sequence[torch.Tensor | None], grads: Sequence[torch.Tensor | None]) -> None:
        hidden.close()

    scope.callback(node.register_prehook(before).remove)  # the hooks refer to the node, and the node to them
    scope.callback(node.register_hook(after).remove)


@dataclass(slots=True)
class Subgraph:
    """The graph behind some edges, up to segment inputs and leaves.

    Attributes:
        leaves: parameters and other leaves, once for every edge to them.
        inputs: nodes of segment inputs, once for every edge to them.
        nodes: all other nodes.
        shared_nodes: nodes with several edges to them; a start counts as an edge.
        first, last: lowest and highest sequence number of `nodes`.
        cast_leaves: leaves that are read in another dtype, as under autocast.
        has_reentrant: whether a node runs backward itself and adds to parameters (a reentrant checkpoint).
    """

    leaves: list[torch.Tensor]
    inputs: list[Any]
    nodes: set[Any]
    shared_nodes: set[Any]
    first: int
    last: int
    cast_leaves: set[torch.Tensor]
    has_reentrant: bool

    def internal_reads(self) -> set[tuple[int, int]]:
        """Return the results that the graph itself reads: sequence number of a node, index of its output."""
        reads = (read for node in self.nodes for read in node.next_functions)
        return {(node._sequence_nr(), nr) for node, nr in reads if node is not None}


def walk_graph(starts: Iterable[GradientEdge]) -> Subgraph:
    """Collect the graph behind some edges. Runs at every layer call, so it is written for speed."""
    leaves, inputs, nodes, shared, cast_leaves = [], [], set(), set(), set()
    has_reentrant = False
    todo: list[Any] = [edge.node for edge in starts]
    while todo:
        node = todo.pop()
        kind = type(node)
        if kind is AccumulateGrad:
            leaves.append(node.variable)
        elif kind is _SEGMENT_INPUT:
            inputs.append(node)
        elif node in nodes:
            shared.add(node)
        else:
            nodes.add(node)
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            todo += parents
            name = kind.__name__
            if name == "ToCopyBackward0":
                cast_leaves.update(parent.variable for parent in parents if type(parent) is AccumulateGrad)
            elif name == "CheckpointFunctionBackward":
                has_reentrant = True
    numbers = [node._sequence_nr() for node in nodes]
    first, last = min(numbers, default=sequence_number()), max(numbers, default=0)
    return Subgraph(leaves, inputs, nodes, shared, first, last, cast_leaves, has_reentrant)


def reentrant_message(place: str) -> str:
    """Return the error message for a reentrant checkpoint that may read weights that are used elsewhere too."""
    return (
        f"{place} uses a reentrant checkpoint, which runs a separate backward and adds to gradients of weights that may be used "
        "elsewhere too, in another order than the relay adds them. Use checkpoint(..., use_reentrant=False)"
    )


def is_segment_input(node: Any) -> bool:
    """Whether a graph node belongs to a segment input."""
    return type(node) is _SEGMENT_INPUT


_SEGMENT_INPUT = _SegmentInput._backward_cls
