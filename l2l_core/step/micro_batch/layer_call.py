"""One layer call: the layer is run by one micro-batch, perhaps recomputed, and back-propagated.

The first run and the recompute read differentiable inputs through segment inputs, so that they make the same graph. The
activation policy decides whether the graph of the first run is kept until backward.
"""

from __future__ import annotations

import contextvars
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from l2l_core._torch import pytree
from l2l_core.eps.blocks import Unit, check_stamps, stamps_of
from l2l_core.model import ThreadState, preserve_random_state, refuse_hidden_tensors
from l2l_core.step.graph import (
    BoundaryGradient,
    Root,
    Segment,
    Subgraph,
    is_segment_input,
    reentrant_message,
    run_backward,
    sequence_number,
    take_gradients,
    walk_graph,
)
from l2l_core.step.guards import (
    ArgumentVersions,
    AttributeKey,
    Checksum,
    LayerState,
    Locator,
    StateDiff,
    alive_outputs,
    checksums_of,
    difference_message,
    find_layer_graph,
    preserved_attributes,
)
from l2l_core.step.micro_batch.activation_policy import RECOMPUTE, ActivationPolicy
from l2l_core.step.micro_batch.arguments import NO_ARGUMENTS, Arguments, LayerGraph, LayerOutputs
from l2l_core.step.micro_batch.fast_pytree import unflatten
from l2l_core.step.micro_batch.graph_segmenter import GraphSegmenter
from l2l_core.step.micro_batch.step_context import StepContext
from l2l_core.step.traffic import SlotStay

# (micro-batch, uses of parameters) -> roots that add its earlier contributions to the sums of this run
PartialSums = Callable[[int, Callable[[], Counter[torch.Tensor]]], list[Root]]


@dataclass(eq=False)
class LayerCall:
    """The call of layer `unit` by micro-batch `k`.

    Invariant: the tensors in `arguments` are the stash of this call; they are released after backward.

    Attributes:
        segment: the shell code before the call; back-propagated after it.
        stay: stay of the layer whose weights the kept graph has saved.
        buffers: the unit's buffers as the forward read them.
        versions: of `tensors`, at the first run.
        state: the layer's plain attributes as the first run found them, if it changed them.
        has_side_effects: whether the run changed other state than buffers, so that the recompute may differ.
        output_checksums: checksums of the first run's outputs, for comparison with the recompute.
    """

    unit: Unit
    layer_forward: Callable[..., Any]
    k: int
    arguments: Arguments
    visit: int = -1
    output_boundaries: list[BoundaryGradient] = field(default_factory=list)
    side_boundaries: dict[Locator, BoundaryGradient] = field(default_factory=dict)
    segment: Segment = field(default_factory=Segment)
    stay: SlotStay = field(default_factory=SlotStay)
    policy: ActivationPolicy = RECOMPUTE
    kept_graph: LayerGraph | None = None
    thread_state: ThreadState | None = None
    context: contextvars.Context | None = field(default_factory=contextvars.copy_context)
    buffers: list[torch.Tensor | None] | None = None
    versions: ArgumentVersions | None = None
    side_attributes: dict[AttributeKey, torch.Tensor] = field(default_factory=dict)
    state: LayerState | None = None
    has_side_effects: bool = False
    output_checksums: list[Checksum] = field(default_factory=list)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self.arguments.tensors

    @property
    def needed_tensors(self) -> Iterator[torch.Tensor]:
        """Tensors that must be on the device: arguments, outputs that a kept graph may have saved, gradients so far."""
        yield from self.tensors
        if self.kept_graph is not None:
            yield from self.kept_graph.kept_outputs
        for boundary in (*self._boundaries, *(boundary for _, boundary in self.arguments.inputs)):
            if boundary.grad is not None:
                yield boundary.grad

    @property
    def _boundaries(self) -> list[BoundaryGradient]:
        return [*self.output_boundaries, *self.side_boundaries.values()]

    def has_changed_buffers(self, ctx: StepContext) -> bool:
        """Whether the layer's buffers differ from those that a kept graph may have saved."""
        return ctx.buffers_of(self.unit) is not self.buffers

    @property
    def needs_backward(self) -> bool:
        """Whether the layer made a differentiable output; returning an argument is not enough."""
        return bool(self.output_boundaries or self.side_boundaries)

    # -- forward -------------------------------------------------------------------------------------------------------

    def run_first(self, ctx: StepContext, segmenter: GraphSegmenter) -> Any:
        """Run the layer in its micro-batch's coroutine; return the outputs for the shell.

        Its graph is cut off at the outputs, and dropped unless backward follows before the layer leaves.
        """
        # Nodes with this sequence number or a later one are made by the layer.
        began, check_params, find_changes = sequence_number(), self._watch_params(), self._watch_state(ctx)
        ctx.user_hooks.wrap_layer(self.unit.module)
        stop = ctx.time_event("forward", self.unit.key, self.k, self.visit)
        with ctx.side_outputs.watch(self.unit) as submodule_outputs:
            result, graph = self._run_layer(ctx)
        segmenter.record_layer_run(self.unit.name, began)
        result.check_caches()
        outputs = self._detach_outputs(ctx, result, segmenter)
        stop()
        check_params()
        find_partial_outputs = self._check_first_graph(ctx, graph, began, segmenter)
        self._record_changes(ctx, find_changes)
        self.output_checksums = checksums_of(result.differentiable)
        # A graph that outlives the turn is never verified by a recompute, so side effects require one at once.
        if self.policy.keeps_graph and not (self.policy.outlives_turn and self.has_side_effects):
            self.kept_graph = graph
        boundaries = dict(zip(map(id, result.differentiable), self.output_boundaries, strict=True))
        del result, graph  # side outputs are the tensors that are alive without the graph
        self._cut_side_outputs(ctx, submodule_outputs, boundaries, find_partial_outputs, segmenter, began)
        return outputs

    def record_first_run(self, ctx: StepContext, outputs: Any) -> None:
        """Record the changes that the first run made to buffers and to the hidden state."""
        if self.buffers:
            ctx.buffer_order.record_layer(self.k, self.unit.buffers, self.buffers, ctx.buffers_of(self.unit))
        ctx.influence.record(self.unit, self.tensors, outputs)
        # Not for a graph that is dropped at suspension: its tensors are never offloaded.
        if self.kept_graph is not None and self.policy.outlives_turn and ctx.stash.offloads:
            leaves = pytree.tree_leaves(outputs)
            self.kept_graph.kept_outputs = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _watch_params(self) -> Callable[[], None]:
        """Return the check that the run changes neither parameters nor arguments in place."""
        self.versions, stamps = ArgumentVersions(self.unit.name, self.tensors), stamps_of(self.unit.params)

        def check() -> None:
            check_stamps(self.unit, stamps, f"layer {self.unit.name}")
            self.check_arguments_unchanged("the layer itself changed it in place")

        return check

    def _watch_state(self, ctx: StepContext) -> StateDiff | None:
        """Keep the state for a recompute if runs change it; return the diff of this run, if needed."""
        metering, module = ctx.stash.metering, self.unit.module
        find_changes: StateDiff | None = None
        if metering or self.policy.outlives_turn:
            find_changes = (ctx.state_diffs.full_diff if metering else ctx.state_diffs.quick_diff)(module)
        if metering or self.unit.key in ctx.meter.record.stateful_layers:
            self.state = LayerState(module)
        return find_changes

    def _record_changes(self, ctx: StepContext, find_changes: StateDiff | None) -> None:
        """Record the changes of the run to the layer's state."""
        stateful = ctx.meter.record.stateful_layers
        if find_changes is not None:
            self.has_side_effects, changed = find_changes()
            for key in changed:
                ctx.attributes.record_change(key)
            if ctx.stash.metering and LayerState.includes(changed):
                stateful.add(self.unit.key)
        if self.unit.key not in stateful:
            self.state = None

    def _check_first_graph(
        self, ctx: StepContext, graph: LayerGraph, began: int, segmenter: GraphSegmenter
    ) -> Callable[[Iterable[torch.Tensor]], None]:
        """Refuse a graph that cannot be cut; return the search for outputs that others are made from."""
        subgraph = self._find_graph(graph.output_edges, began)
        starts = [(edge.node._sequence_nr(), edge.output_nr) for edge in graph.output_edges]  # without their nodes

        def mark_partial_outputs(subgraph: Subgraph) -> None:
            # Outputs that the layer reads itself: only a part of their gradient is from the shell.
            reads = subgraph.internal_reads()
            for boundary, start in zip(self.output_boundaries, starts, strict=True):
                boundary.is_partial |= start in reads

        def find_partial_outputs(sides: Iterable[torch.Tensor]) -> None:
            edges = [get_gradient_edge(tensor) for tensor in sides]
            new = [edge for edge in edges if edge.node._sequence_nr() >= began]
            mark_partial_outputs(self._find_graph(new, began))

        if any(edge.node in subgraph.shared_nodes for edge in graph.output_edges):
            mark_partial_outputs(subgraph)
        if segmenter.has_autocast:
            segmenter.record_casts(subgraph.cast_leaves)
        if subgraph.has_reentrant:
            ctx.reentrant_layers.add(self.unit)
            if any(block.shared for block in self.unit.blocks):
                raise RuntimeError(reentrant_message(f"layer {self.unit.name}"))
        return find_partial_outputs

    def _find_graph(self, outputs: Iterable[GradientEdge], began: int) -> Subgraph:
        return find_layer_graph(self.unit, (boundary for _, boundary in self.arguments.inputs), outputs, began)

    def suspend(self, ctx: StepContext) -> None:
        """Drop the graph when the micro-batch is suspended, unless the policy keeps it."""
        if not self.policy.outlives_turn:
            self.drop_graph(ctx)

    def drop_graph(self, ctx: StepContext) -> None:
        """Drop the kept graph, if any; backward recomputes it."""
        if self.kept_graph is not None:
            self.kept_graph = None
            self.check_recompute(ctx)

    def check_recompute(self, ctx: StepContext) -> None:
        """Recompute a call with side effects at once, and raise RuntimeError if it gives other outputs."""
        if self.has_side_effects and self.needs_backward and self.kept_graph is None:
            with (
                ThreadState.cleared(),
                ctx.current_turn.activate(self.k, "shell"),
                self._forward_buffers(ctx),
                self._forward_state(),
                preserve_random_state(),
                preserved_attributes(self.unit.module),
                ctx.attributes.checking_recompute(),
            ):
                self._recompute(ctx)

    def _run_layer(self, ctx: StepContext) -> tuple[LayerOutputs, LayerGraph]:
        buffers = [buffer for buffer in self.unit.buffers.tensors() if buffer is not None]
        with ctx.current_turn.activate(self.k, self.unit.key, [*self.tensors, *buffers]), ctx.attributes.in_layer():
            ctx.guard.unguard_all(self.tensors)
            forward = self.layer_forward
            for observer in ctx.observers:
                forward = observer(self, forward)
            return self.arguments.run(forward)

    def _detach_outputs(self, ctx: StepContext, outputs: LayerOutputs, segmenter: GraphSegmenter) -> Any:
        """Return the outputs for the shell: segment inputs, arguments themselves, and copies of weights."""
        if outputs.differentiable:  # else no node ends the segment, at which its backward would start
            self.segment = segmenter.begin_segment()
        ctx.guard.register(list(outputs.new_tensors.values()), self.k)  # the layer may keep them
        shown = dict(outputs.originals)
        for tensor in outputs.differentiable:
            self.output_boundaries.append(boundary := BoundaryGradient())
            shown[id(tensor)] = output = segmenter.detach_output(_copy_if_exempt(ctx, tensor), boundary)
            ctx.stash.track(output, self.k, "stash", "", fresh=True)
        for index, item in enumerate(outputs.flat):
            if id(item) in shown:
                continue
            if not isinstance(item, torch.Tensor):
                refuse_hidden_tensors(item, f"output {index} of layer {self.unit.name}")
            elif id(item) in outputs.new_tensors:
                shown[id(item)] = output = _copy_if_exempt(ctx, item)
                ctx.stash.track(ctx.guard.register(output, self.k), self.k, "activations", "", fresh=True)
        return unflatten([shown.get(id(item), item) for item in outputs.flat], outputs.spec)

    def _cut_side_outputs(
        self,
        ctx: StepContext,
        submodule_outputs: dict[Locator, Any],
        boundaries: dict[int, BoundaryGradient],
        find_partial_outputs: Callable[[Iterable[torch.Tensor]], None],
        segmenter: GraphSegmenter,
        began: int,
    ) -> None:
        """Make side outputs segment inputs; `boundaries` are those of outputs by id, which may be among them."""
        tensors = {**alive_outputs(submodule_outputs), **ctx.side_outputs.attribute_tensors(self.unit, began)}
        submodule_outputs.clear()
        if not tensors:
            return
        ctx.side_outputs.record_layer(self.unit)
        self.kept_graph = None  # tensors saved by a graph cannot be detached
        find_partial_outputs(tensors.values())
        if not self.output_boundaries:
            self.segment = segmenter.begin_segment()
        for locator, tensor in tensors.items():
            if tensor.grad_fn is None or is_segment_input(tensor.grad_fn):
                continue  # the same tensor under another locator
            boundary = boundaries.get(id(tensor))
            if boundary is None:
                boundary = self.side_boundaries[locator] = BoundaryGradient()
                boundary.is_partial = True  # the layer may read it too
            try:
                segmenter.detach_output_in_place(tensor, boundary)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{'.'.join(locator[1:])} of layer {self.unit.name} is kept by the model and is a view, so that its graph "
                    f"cannot be cut ({error}). Keep a copy: x.clone()"
                ) from error
            if locator[0] == "attribute":
                self.side_attributes[AttributeKey(self.unit.module.get_submodule(locator[1]), locator[2])] = tensor
            ctx.stash.track(tensor, self.k, "activations", "", fresh=True)

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, ctx: StepContext, partial_sums: PartialSums, shell_partial_sums: PartialSums) -> None:
        """Back-propagate through the layer, after a recompute if its graph was not kept."""
        # Unused outputs: plain training runs none of the layer's nodes either, so weights get no gradient, not zero.
        if all(boundary.grad is None for boundary in self._boundaries):
            return
        if self.stay.is_over:
            self.kept_graph = None  # the memory of the weights that it has saved is reused
        ctx.stash.fetch(self.needed_tensors, self.k, self.unit.key)
        stop = ctx.time_event("backward", self.unit.key, self.k, self.visit)
        with ctx.current_turn.activate(self.k, "shell"), self._forward_buffers(ctx), self._forward_state():
            graph = self.kept_graph or self._recompute(ctx)
            # All gradients are roots of one run. Autograd adds a root to the gradients of the run, those of the youngest reader
            # first, as in plain training; the sum of the gradients of two runs would be rounded otherwise.
            roots = take_gradients(zip(graph.output_edges, self.output_boundaries, strict=True))
            roots += take_gradients((graph.side_edges[key], boundary) for key, boundary in self.side_boundaries.items())
            inputs = [(edge, *item) for edge, item in zip(graph.input_edges, self.arguments.inputs, strict=True)]
            weights = {tensor: boundary for _, tensor, boundary in inputs if tensor.is_leaf}
            params_by_node = {edge.node: tensor for edge, tensor, _ in inputs if tensor.is_leaf}
            uses = partial(_count_uses, [edge for edge, _ in roots], params_by_node)
            if weights:  # parameters of the shell that are arguments: their sums continue here
                sums = shell_partial_sums(self.k, lambda: Counter({t: n for t, n in uses().items() if t in weights}))
                for edge, grad in sums:
                    node: Any = edge.node
                    weights[node.variable].add(grad)
            roots += take_gradients((edge, boundary) for edge, _, boundary in inputs)
            self.kept_graph = None  # its saved tensors are freed by the run
            with ctx.current_turn.activate(self.k, self.unit.key, None), ctx.watch_backward(in_layer=True):
                run_backward(roots + partial_sums(self.k, uses))
        stop()

    def _recompute(self, ctx: StepContext) -> LayerGraph:
        assert self.context is not None and self.thread_state is not None
        self.check_arguments_unchanged()
        return self.context.run(self._recompute_in_context, ctx, self.thread_state)

    def check_arguments_unchanged(self, *cause: str) -> None:
        """Refuse to recompute from arguments that were changed in place; `cause` explains it in the error."""
        if self.versions is not None:
            self.versions.check(self.tensors, *cause)

    def _recompute_in_context(self, ctx: StepContext, thread_state: ThreadState) -> LayerGraph:
        with (
            ctx.user_hooks.silenced(),  # they run once, in the forward, as in plain training
            thread_state.activate(ctx.outer_state),
            ctx.side_outputs.watch(self.unit, strong=True) as submodule_outputs,
        ):
            began = sequence_number()
            result, graph = self._run_layer(ctx)
            ctx.recompute_check.compare(self.unit.name, self.output_checksums, result.differentiable)
            if self.side_boundaries or self.side_attributes:
                graph.side_edges = self._find_side_edges(ctx, submodule_outputs, began)
            if thread_state.has_autocast:  # its casts are of weights that are evicted after the visit
                torch.clear_autocast_cache()
        return graph

    def _find_side_edges(
        self, ctx: StepContext, outputs: dict[Locator, Any], began: int
    ) -> dict[Locator, GradientEdge]:
        tensors = {**outputs, **ctx.side_outputs.attribute_tensors(self.unit, began)}
        for _, path, *rest in [locator for locator in tensors if locator[0] == "attribute"]:
            # Without a graph, as after backward of plain training.
            setattr(self.unit.module.get_submodule(path), rest[0], tensors["attribute", path, rest[0]].detach())
        if any(locator not in tensors or tensors[locator].grad_fn is None for locator in self.side_boundaries):
            raise RuntimeError(difference_message(self.unit.name))
        return {locator: get_gradient_edge(tensors[locator]) for locator in self.side_boundaries}

    @contextmanager
    def _forward_buffers(self, ctx: StepContext) -> Iterator[None]:
        """Restore the buffers of the forward in the block, for a recompute and the backward that reads them."""
        if not self.buffers or self.kept_graph is not None or not self.has_changed_buffers(ctx):
            yield
            return
        now = self.unit.buffers.copy()
        self.unit.buffers.restore(self.buffers)
        yield
        self.unit.buffers.restore(now)

    @contextmanager
    def _forward_state(self) -> Iterator[None]:
        """Restore the plain attributes that the first run found in the block, for a recompute."""
        if self.state is None or self.kept_graph is not None:
            yield
            return
        now = LayerState(self.unit.module)
        self.state.restore()
        try:
            yield
        finally:
            now.restore()

    def backward_segment(self, ctx: StepContext, partial_sums: PartialSums) -> None:
        """Back-propagate through the shell code before the call."""
        segment = self.segment
        if segment.has_gradient:
            stop = ctx.time_event("shell", "shell", self.k, self.visit)
            with ctx.current_turn.activate(self.k, "shell", None), ctx.watch_backward():
                run_backward(take_gradients(segment.boundaries) + partial_sums(self.k, lambda: segment.uses))
            stop()
        for grad in [*segment.pending_gradients(), *(boundary.grad for _, boundary in self.arguments.inputs)]:
            if grad is not None:
                ctx.stash.track(grad, self.k, "stash", "", fresh=True)

    def release(self) -> None:
        """Release the stash."""
        self.arguments, self.segment, self.buffers, self.state = NO_ARGUMENTS, Segment(), None, None
        self.context = self.thread_state = self.kept_graph = None


def suspend_all(calls: Sequence[LayerCall], ctx: StepContext) -> None:
    """Suspend the calls of a layer whose weights are about to be evicted."""
    kept = [call for call in calls if call.kept_graph is not None]
    # Plain training back-propagates before the next micro-batch changes a buffer, and a recompute restores old values in it.
    if kept and any(call.has_changed_buffers(ctx) for call in calls):
        for call in kept:
            call.drop_graph(ctx)
        ctx.meter.amend_event()
    for call in calls:
        call.suspend(ctx)


def _count_uses(starts: Iterable[GradientEdge], params_by_node: Mapping[Any, torch.Tensor]) -> Counter[torch.Tensor]:
    """Count how often the graph behind `starts` reads each parameter, directly or through a segment input."""
    graph = walk_graph(starts)
    return Counter([*graph.leaves, *(params_by_node[node] for node in graph.inputs if node in params_by_node)])


def _copy_if_exempt(ctx: StepContext, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor that shares memory with a weight, whose slot is reused, or with a buffer; return others.

    The copy has the same strides, also overlapping ones (an expanded weight), since rounding depends on them.
    """
    if not ctx.stash.tracker.is_not_stash(tensor):
        return tensor
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or not tensor.numel():
        return tensor.clone()
    count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((count,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)
