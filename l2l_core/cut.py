"""Where the autograd graph of a micro-batch is cut: at the tensors that enter and leave a layer.

A tensor that *leaves* a layer comes out of an `enter` node, whose backward hands the gradient to a `Sink` and stops. A
tensor that *enters* a layer is cut in place: the edge to its history is kept, the tensor itself becomes a leaf, so that
everything that reads it later (a residual connection, the far side of a U-Net) meets the leaf and not its history.

Between two cuts lies a *segment* of shell code. Each segment runs backward once, from the edges of the tensors that
entered a layer, when that layer has added its part to their gradients. `trace_segments` walks the graph beforehand: what
a segment meets decides which waiting gradients must take part in its run, so that sums come out in the order of plain
training, and where it must stop because a node belongs to an earlier segment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Sink:
    """Holds the gradient of one boundary tensor of one micro-batch until its layer or segment runs backward.

    Invariant: contributions are added in the order in which backward produces them.
    """

    __slots__ = ("grad",)

    def __init__(self) -> None:
        self.grad: torch.Tensor | None = None

    def add(self, grad: torch.Tensor) -> None:
        """Add one contribution; same shape as the boundary tensor."""
        self.grad = grad if self.grad is None else self.grad + grad

    def take(self) -> torch.Tensor | None:
        """The gradient so far; the sink is empty afterwards."""
        grad, self.grad = self.grad, None
        return grad


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, phony: torch.Tensor, x: torch.Tensor, sink: Sink) -> torch.Tensor:  # type: ignore[override]
        ctx.sink = sink
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None, None]:  # type: ignore[override]
        if grad is not None:
            ctx.sink.add(grad)
        return None, None, None


def enter(x: torch.Tensor, sink: Sink) -> torch.Tensor:
    """`x` as the start of a new graph: same storage, no leaf (in-place use is allowed), its gradient goes to `sink`."""
    with torch.enable_grad():
        phony = torch.empty(0, requires_grad=True)  # makes autograd record the node
        return _Enter.apply(phony, x.detach(), sink)


def cut(tensor: torch.Tensor) -> tuple[Sink, GradientEdge | None]:
    """Where the gradient of a tensor that enters a layer gathers, and the edge to the graph behind it.

    The tensor becomes a leaf in place, unless something else holds on to it (autograd has saved it, it is the base of a
    view, it is a parameter): then its graph stays attached, and what later code adds to its gradient waits at the gate of
    its node. The edge is None if the tensor was cut before: whoever cut it first runs what lies behind.
    """
    if (sink := sink_of(tensor)) is not None:
        return sink, None
    sink, edge = Sink(), get_gradient_edge(tensor)
    if not tensor.is_leaf and tensor._use_count() == 1:
        _make_leaf(tensor)
        tensor._backward_hooks = None  # the user's stay with the history, where they see the whole gradient, once
        tensor.register_hook(sink.add)  # not .grad, which would re-stride it
        tensor.register_post_accumulate_grad_hook(_drop_grad)
        tensor._relay_sink = sink  # type: ignore[attr-defined]
    return sink, edge


def sink_of(tensor: torch.Tensor) -> Sink | None:
    """The sink of a tensor that has been cut, None for any other."""
    return getattr(tensor, "_relay_sink", None)


def _drop_grad(tensor: torch.Tensor) -> None:
    tensor.grad = None


def _make_leaf(tensor: torch.Tensor) -> None:
    if tensor._is_view():  # cannot be detached in place; the Python object gets another tensor of the same storage
        torch.utils.swap_tensors(tensor, tensor.detach().requires_grad_())
    else:
        tensor.detach_().requires_grad_()


class Gate:
    """Where one segment's graph runs into nodes of an earlier one, which runs later: gradients wait here for it."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: dict[int, Sink] = {}  # by output of the node

    def catch(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[None, ...]:
        """A hook before the node: keep what arrives and let nothing pass (autograd skips undefined gradients)."""
        for output, grad in enumerate(grads):
            if grad is not None:
                self.pending.setdefault(output, Sink()).add(grad)
        return (None,) * len(grads)


@dataclass(slots=True)
class Segment:
    """The part of a micro-batch's graph that one run of backward is responsible for: from its edges to the cuts.

    A node belongs to the segment in which it was made; for later segments that reach it, it is a gate.
    """

    nodes: set[Any] = field(default_factory=set)
    leaves: list[torch.Tensor] = field(default_factory=list)  # parameters and cut tensors
    gates: dict[Any, Gate] = field(default_factory=dict)  # of earlier segments, on this one's border
    own_gates: dict[Any, Gate] = field(default_factory=dict)  # of this segment, on the border of later ones

    def waiting(self) -> list[tuple[GradientEdge, Sink]]:
        """Sinks in reach that already hold a gradient, with the edge at which it can rejoin a run."""
        entered = [(GradientEdge(node, 0), node.sink) for node in self.nodes if is_entry(node)]
        cuts = [(get_gradient_edge(leaf), sink) for leaf in self.leaves if (sink := sink_of(leaf)) is not None]
        gates = [
            (GradientEdge(node, output), sink)
            for node, gate in self.own_gates.items()
            for output, sink in gate.pending.items()
        ]
        return [(edge, sink) for edge, sink in entered + cuts + gates if sink.grad is not None]

    @property
    def is_awaited(self) -> bool:
        """Whether later segments have left gradients at this one's border."""
        return any(sink.grad is not None for gate in self.own_gates.values() for sink in gate.pending.values())

    def waiting_at(self, edge: GradientEdge) -> Sink | None:
        """Where gradients of later segments wait for the tensor behind `edge`, if it is still attached."""
        gate = self.own_gates.get(edge.node) or self.gates.get(edge.node)
        return gate.pending.get(edge.output_nr) if gate is not None else None


def trace_segments(starts: Sequence[Sequence[GradientEdge]], marks: Sequence[int] = ()) -> list[Segment]:
    """Walk the graph behind each list of edges up to the cuts, and share out its nodes by the time of their making.

    Segment i owns what was made between `marks[i - 1]` and `marks[i]` (autograd's sequence numbers at the layer calls), and
    runs when all later segments have: autograd takes the youngest node first, so sums come out in its own order.
    """
    segments = [Segment() for _ in starts]
    todo = [(edge.node, index) for index, edges in enumerate(starts) for edge in edges]
    while todo:
        node, reader = todo.pop()
        if node is None:
            continue
        is_leaf = type(node).__name__ == "AccumulateGrad"
        if is_leaf or is_entry(node):  # ends may be reached from several segments
            if is_leaf and node not in segments[reader].nodes:
                segments[reader].leaves.append(node.variable)
            segments[reader].nodes.add(node)
            continue
        at = min(reader, bisect_right(marks, node._sequence_nr()))
        if at < reader:
            segments[reader].gates[node] = segments[at].own_gates.setdefault(node, Gate())
        if node not in segments[at].nodes:
            segments[at].nodes.add(node)
            todo.extend((parent, at) for parent, _ in node.next_functions)
    return segments


def is_entry(node: Any) -> bool:
    """Whether a graph node is the start of a tensor that left a layer."""
    return isinstance(node, _Enter._backward_cls)


def run_backward(roots: Sequence[tuple[GradientEdge, torch.Tensor]], segment: Segment | None = None) -> None:
    """Back-propagate from `roots`; gradients that wait at a sink in reach take part as roots of their own.

    Joining the run puts a waiting gradient first in autograd's own sum, as in a backward that was never cut.
    """
    if segment is None:
        _backward(roots)
        return
    pairs = []
    for edge, grad in roots:
        if (gate := segment.gates.get(edge.node)) is not None:
            gate.pending.setdefault(edge.output_nr, Sink()).add(grad)  # made earlier: it waits for that segment
        else:
            pairs.append((edge, grad))
    pairs += [(edge, grad) for edge, sink in segment.waiting() if (grad := sink.take()) is not None]
    handles = [node.register_prehook(gate.catch) for node, gate in segment.gates.items()]
    try:
        _backward(pairs, keep=bool(handles))  # what lies behind a gate will run again, for good
    finally:
        for handle in handles:
            handle.remove()


def _backward(pairs: Sequence[tuple[GradientEdge, torch.Tensor]], keep: bool = False) -> None:
    if pairs:
        edges, grads = zip(*pairs, strict=True)
        torch.autograd.backward(edges, grads, retain_graph=keep)
