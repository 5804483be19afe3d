"""Where the autograd graph of a micro-batch is cut: at tensors that one stretch of the forward makes and a later one reads.

A tensor that crosses a cut is read through an *entry*: the same storage, at the start of a new graph. Backward through
what reads it ends there and hands the gradient to a `Sink`; when everything that was made later has run, the sink's
gradient goes on into the graph behind. So each layer, and each *segment* of shell code between two layer calls, runs
backward by itself, and nothing of an earlier one runs with it: neither its nodes nor the user's hooks on its tensors.

Sums come out in the order of plain training: a gradient that waits in a sink takes part in the next run as a root at the
entry, where autograd adds to it what that run brings, one contribution after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from l2l_core._torch import (
    AccumulateGrad,
    DisableFuncTorch,
    PythonNode,
    enable_single_level_autograd_function,
    run_engine,
    transforms_are_active,
)
from l2l_core._torch import sequence_number as sequence_number
from l2l_core.step.graph.guarded_tensor import unguard

Root = tuple[GradientEdge, torch.Tensor]
EdgeId = tuple[int, int]  # a graph's node, by autograd's number, and which of its outputs


class BoundaryGradient:
    """Holds the gradient of one tensor of one micro-batch until the graph behind it runs backward.

    Invariant: contributions are added in the order in which backward produces them.

    Attributes:
        is_part: whether the graph behind reads the tensor too, so that this is a part of its gradient only.
    """

    __slots__ = ("grad", "is_partial")

    def __init__(self) -> None:
        self.grad: torch.Tensor | None = None
        self.is_partial = False

    def add(self, grad: torch.Tensor) -> None:
        """Add one contribution; same shape as the tensor."""
        # Not in place: backward of an addition hands one and the same tensor to both sides.
        self.grad = grad if self.grad is None else self.grad + grad

    def take(self) -> torch.Tensor | None:
        """Take out the gradient so far; the sink is empty afterwards."""
        grad, self.grad = self.grad, None
        return grad if grad is None else unguard(grad)


class _SegmentInput(torch.autograd.Function):
    """A node without a history, whose output is a new tensor, or one that is in place of what it was made of."""

    @staticmethod
    def forward(ctx: Any, phony: torch.Tensor, x: torch.Tensor | None, held: tuple[Any, ...]) -> torch.Tensor:  # type: ignore[override]
        sink, tensor = held  # unseen by autograd, which would look for its history
        ctx.boundary = sink
        ctx.set_materialize_grads(False)  # no zeros where nobody reads it: plain training has no gradient there
        if x is not None:
            ctx.mark_dirty(x)
            return x
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None, None]:  # type: ignore[override]
        if grad is not None:
            ctx.boundary.add(grad)
        return None, None, None


def detach_to(x: torch.Tensor, boundary: BoundaryGradient) -> torch.Tensor:
    """Make `x` the start of a new graph: same storage, no leaf (in-place use is allowed), its gradient goes to `sink`.

    Gradients must be enabled.
    """
    if not transforms_are_active():
        return _apply_segment_input(_PHONY, None, (boundary, x))
    # A function under `vmap` or `jvp` reads it from outside: what is transformed is the function, not the tensor.
    with DisableFuncTorch(), enable_single_level_autograd_function():
        return _apply_segment_input(_PHONY, None, (boundary, x))


def detach_in_place(x: torch.Tensor, boundary: BoundaryGradient) -> None:
    """Let the tensor object itself be the start of a new graph; whoever holds it holds an entry from now on.

    Gradients must be enabled.

    Raises:
        RuntimeError: `x` is a view to which somebody holds a weak reference, so that it cannot be exchanged.
    """
    hooks = x._backward_hooks  # the user's stay with the history, which sees the whole gradient
    x._backward_hooks = None
    try:
        if x._is_view():  # cannot be detached in place; the Python object gets another tensor of the same storage
            torch.utils.swap_tensors(x, detach_to(x, boundary))
        else:
            x.detach_()
            _apply_segment_input(_PHONY, x, (boundary, None))
    except BaseException:
        x._backward_hooks = hooks
        raise


_PHONY = torch.empty(0, requires_grad=True)  # makes autograd record the node; gets no gradient ever
# What `Function.apply` ends in: past what it asks on the way, and past who watches the model's custom functions.
_apply_segment_input = super(torch.autograd.Function, _SegmentInput).apply


def edge_of(tensor: torch.Tensor, lives: bool = False) -> GradientEdge:
    """Return where backward of a tensor starts, as `get_gradient_edge` does; `lives`: the tensor is there as long as the edge."""
    node = tensor.grad_fn
    if node is None or (isinstance(node, PythonNode) and not lives):
        return get_gradient_edge(tensor)  # with a node besides, which keeps one alive that Python has made
    return GradientEdge(node, tensor.output_nr)


@dataclass(eq=False, slots=True)
class Segment:
    """Shell code of one micro-batch between two layer calls.

    Attributes:
        roots: of tensors that were made here and are read later: where backward starts.
        entries: through which it reads what was made earlier, and the outputs of the layer before it.
        uses: how often the graph reads each parameter; known once the forward is over.
        is_hooked: whether somebody wants to see the gradient of an entry.
    """

    roots: list[tuple[GradientEdge, BoundaryGradient]] = field(default_factory=list)
    inputs: list[tuple[GradientEdge, BoundaryGradient]] = field(default_factory=list)
    uses: Counter[torch.Tensor] = field(default_factory=Counter)
    is_hooked: bool = False
    has_reentrant: bool = False  # a reentrant checkpoint is in it

    @property
    def has_gradient(self) -> bool:
        """Whether later code has left gradients for what was made here, or for a hook."""
        places = [*self.roots, *self.inputs] if self.is_hooked else self.roots
        return any(sink.grad is not None for _, sink in places)

    def take_gradients(self) -> list[Root]:
        """Take every gradient that takes part in the run of this segment."""
        return take_gradients([*self.roots, *self.inputs])

    def pending_gradients(self) -> list[torch.Tensor]:
        """List the gradients that wait at the segment's borders."""
        return [sink.grad for _, sink in (*self.roots, *self.inputs) if sink.grad is not None]


def take_gradients(pairs: Iterable[tuple[GradientEdge, BoundaryGradient]]) -> list[Root]:
    """Take what waits in the sinks, each with the edge where it goes on; they are empty afterwards."""
    return [(edge, grad) for edge, sink in pairs if (grad := sink.take()) is not None]


def run_backward(roots: Sequence[Root]) -> None:
    """Back-propagate from `roots` to the entries and parameters in reach."""
    if roots:
        edges, grads = zip(*roots, strict=True)
        # What `torch.autograd.backward` ends in: gradients that come from sinks need not be looked at before.
        run_engine(edges, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


def count_uses(starts: Iterable[GradientEdge], params_by_node: Mapping[Any, torch.Tensor]) -> Counter[torch.Tensor]:
    """Count how often the graph behind some edges reads each parameter, by itself or through an entry (by its node)."""
    found = walk_graph(starts)
    return Counter([*found.leaves, *(params_by_node[node] for node in found.inputs if node in params_by_node)])


def edge_id(edge: GradientEdge) -> EdgeId:
    """Write the edge by numbers, which keep nothing of the graph alive."""
    return edge.node._sequence_nr(), edge.output_nr


@dataclass(slots=True)
class Subgraph:
    """What the graph behind some edges consists of, up to the entries.

    Attributes:
        leaves: parameters, and tensors that ask for a gradient themselves; one for every edge that leads to it.
        entries: nodes at which it starts; one for every edge too.
        nodes: what lies between.
        again: those of them that several edges lead to; that it is a start counts as one.
        first, last: lowest and highest sequence number of these.
        cast: leaves that it reads in another type, as autocast makes them.
        is_nested: whether a node runs a backward of its own, which adds to parameters at once (a reentrant checkpoint).
    """

    leaves: list[torch.Tensor]
    inputs: list[Any]
    nodes: set[Any]
    shared_nodes: set[Any]
    first: int
    last: int
    cast_leaves: set[torch.Tensor]
    has_reentrant: bool

    def internal_reads(self) -> set[EdgeId]:
        """Find which results of its nodes the graph itself reads, as `start_of` writes them."""
        return {
            (read._sequence_nr(), nr) for node in self.nodes for read, nr in node.next_functions if read is not None
        }


def walk_graph(starts: Iterable[GradientEdge]) -> Subgraph:
    """Walk over a graph. It happens at every layer call, so this is written to be quick."""
    leaves, entries, nodes = [], [], set()
    again: set[Any] = set()
    cast, is_nested = set(), False
    todo = [edge.node for edge in starts]
    while todo:
        node = todo.pop()
        kind = type(node)
        if kind is AccumulateGrad:
            leaves.append(node.variable)
        elif kind is _SEGMENT_INPUT:
            entries.append(node)
        elif node in nodes:
            again.add(node)
        else:
            nodes.add(node)
            behind = [parent for parent, _ in node.next_functions if parent is not None]
            todo += behind
            if kind not in _ORDINARY:
                name = kind.__name__
                if name == "ToCopyBackward0":
                    cast.update(parent.variable for parent in behind if type(parent) is AccumulateGrad)
                elif name == "CheckpointFunctionBackward":
                    is_nested = True
                elif kind.__module__ == "builtins":  # a custom function's class may be one of many
                    _ORDINARY.add(kind)
    numbers = [node._sequence_nr() for node in nodes]
    first, last = min(numbers, default=sequence_number()), max(numbers, default=0)
    return Subgraph(leaves, entries, nodes, again, first, last, cast, is_nested)


def reentrant_message(who: str) -> str:
    """Say what is wrong with a reentrant checkpoint where others read its weights too: nobody sees which it reads."""
    return (
        f"{who} uses a reentrant checkpoint: it adds to gradients of weights, which may be used elsewhere too, in a backward of "
        "its own, out of the order in which a relay adds them up. Use checkpoint(..., use_reentrant=False)"
    )


def is_leaf(node: Any) -> bool:
    """Whether a graph node stands for a leaf: a parameter, or a tensor that asks for a gradient itself."""
    return type(node) is AccumulateGrad


def is_segment_input(node: Any) -> bool:
    """Whether a graph node is the start of an entry."""
    return type(node) is _SEGMENT_INPUT


_ORDINARY: set[type] = set()  # kinds of nodes of which nothing is to be known; to ask one for its name takes long
_SEGMENT_INPUT = _SegmentInput._backward_cls
