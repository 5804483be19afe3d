"""One layer on one micro-batch: run with its graph cut on both sides, recomputed later, and back-propagated.

Both the first run and the recompute see their differentiable inputs through entries, so that the same code gives the
same graph. What becomes of the first run's graph in between is for its keeper to say.

A file of one idea, the life of a call: first run, proof, recompute, backward, release, in this order.
"""

from __future__ import annotations

import contextvars
import copy
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from l2l_core._torch import pytree
from l2l_core.eps.blocks import Unit, check_stamps, stamps_of
from l2l_core.model import ThreadState, refuse_hidden_tensors
from l2l_core.step.graph import (
    BoundaryGradient,
    EdgeId,
    Root,
    Segment,
    Subgraph,
    count_uses,
    edge_id,
    is_segment_input,
    reentrant_message,
    run_backward,
    sequence_number,
    take_gradients,
    unguarded,
    walk_graph,
)
from l2l_core.step.micro_batch.activation_policy import ActivationPolicy
from l2l_core.step.micro_batch.arguments import NO_ARGUMENTS, Arguments, LayerGraph, LayerInput, LayerOutputs
from l2l_core.step.micro_batch.fast_pytree import unflatten
from l2l_core.step.micro_batch.graph_segmenter import GraphSegmenter
from l2l_core.step.micro_batch.module_attributes import AttributeKey
from l2l_core.step.micro_batch.module_hooks import Locator, alive_outputs
from l2l_core.step.micro_batch.recompute_check import Checksum, checksums_of, difference_message
from l2l_core.step.micro_batch.step_context import StepContext
from l2l_core.step.traffic import SlotStay
from l2l_core.surgery import preserve_random_state

PartialSums = Callable[
    [int, Callable[[], Counter[torch.Tensor]]], list[Root]
]  # what a run of a micro-batch has to add to


@dataclass(eq=False)
class LayerCall:
    """The call of `unit` by micro-batch `k`.

    Invariant: what `arguments` hold is the stash of this call; it is let go when backward is done.
    """

    unit: Unit
    layer_forward: Callable[..., Any]  # the layer's own forward
    k: int
    arguments: Arguments
    visit: int = -1
    output_boundaries: list[BoundaryGradient] = field(default_factory=list)
    side_boundaries: dict[Locator, BoundaryGradient] = field(default_factory=dict)
    segment: Segment | None = None  # of shell code before the call, back-propagated after it
    stay: SlotStay = field(default_factory=SlotStay)  # of the layer, where the kept graph has saved its weights
    policy: ActivationPolicy | None = None
    kept_graph: LayerGraph | None = None
    thread_state: ThreadState | None = None
    context: contextvars.Context | None = None
    buffers: list[torch.Tensor | None] | None = None  # the unit's buffers as the forward saw them
    versions: list[int] = field(default_factory=list)
    side_attributes: dict[AttributeKey, torch.Tensor] = field(default_factory=dict)  # side outputs left there
    has_side_effects: bool = False  # something else than buffers is not as it was, so that the recompute may differ
    output_checksums: list[Checksum] = field(default_factory=list)  # of the outputs, to compare the recompute with

    @staticmethod
    def of(
        unit: Unit,
        layer_forward: Callable[..., Any],
        k: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        segmenter: GraphSegmenter,
    ) -> LayerCall:
        """Make a call that waits for its layer.

        Raises:
            TypeError: an argument hides tensors (a cache, an object that is no pytree).
        """
        return LayerCall(
            unit, layer_forward, k, Arguments.of(unit.name, args, kwargs, segmenter), context=contextvars.copy_context()
        )

    @property
    def inputs(self) -> list[LayerInput]:
        """Its differentiable arguments."""
        return self.arguments.inputs

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor among the arguments."""
        return self.arguments.tensors

    @property
    def needed_tensors(self) -> Iterator[torch.Tensor]:
        """What the call needs on the device: its arguments and, in backward, the gradients that have come so far.

        Gone through only by those who want it: where nothing moves, nobody does.
        """
        yield from self.tensors
        if self.kept_graph is not None:
            yield from self.kept_graph.kept_outputs  # a graph may have saved what the layer gave out
        for sink in (*self.output_boundaries, *self.side_boundaries.values(), *(item.boundary for item in self.inputs)):
            if sink.grad is not None:
                yield sink.grad

    def has_changed_buffers(self, ctx: StepContext) -> bool:
        """Whether the layer's buffers are others than before its run, which a kept graph may have saved."""
        return ctx.buffers_of(self.unit) is not self.buffers

    @property
    def needs_backward(self) -> bool:
        """Whether the layer gave out anything that can receive a gradient; handing on what it is given is not enough."""
        return bool(self.output_boundaries or self.side_boundaries)

    def record_first_run(self, ctx: StepContext, outputs: Any) -> None:
        """Note what the layer did to its buffers and to the hidden state, in its first run."""
        if self.buffers:
            ctx.buffer_order.record_layer(self.k, self.unit.buffers, self.buffers, ctx.buffers_of(self.unit))
        ctx.influence.record(self.unit, self.tensors, outputs)
        # At the turn nothing is parked before backward, and what is asked for needs room.
        if self.kept_graph is not None and self.policy is not None and self.policy.outlives_turn and ctx.stash.offloads:
            self.kept_graph.kept_outputs = [
                leaf.detach() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)
            ]

    # -- forward -------------------------------------------------------------------------------------------------------

    def run_first(self, ctx: StepContext, policy: ActivationPolicy, segmenter: GraphSegmenter) -> Any:
        """Run the layer inside its micro-batch's coroutine; return its outputs as the shell shall see them."""
        with unguarded():
            self.versions = [tensor._version for tensor in self.tensors]
        # Autograd numbers nodes as they are made: by these numbers it is told later whose code has made one.
        began, stamps = sequence_number(), stamps_of(self.unit.params)
        traces = ctx.state_diffs.full_diff(self.unit.module) if ctx.stash.metering else None
        differs = ctx.state_diffs.quick_diff(self.unit.module) if traces is None and policy.outlives_turn else None
        ctx.user_hooks.wrap_layer(self.unit.module)
        stop = ctx.time_event("forward", self.unit.key, self.k, self.visit)
        with ctx.side_outputs.watch(self.unit) as seen:
            given, graph = self._run_layer(ctx)
        segmenter.record_layer_run(self.unit.name, began)
        given.check_caches()
        outputs = self._detach_outputs(ctx, given, segmenter)
        stop()
        check_stamps(self.unit.params, stamps, f"layer {self.unit.name}")
        self._check_versions("the layer itself changed it in place")
        found = self._check_graph(graph.output_edges, began)
        starts = [edge_id(edge) for edge in graph.output_edges]
        self._mark_partial_outputs(
            starts, found.internal_reads() if any(e.node in found.shared_nodes for e in graph.output_edges) else set()
        )
        if segmenter.has_autocast:
            segmenter.record_casts(found.cast_leaves)
        if found.has_reentrant:
            ctx.reentrant_layers.add(self.unit)
            if any(block.shared for block in self.unit.blocks):
                raise RuntimeError(reentrant_message(f"layer {self.unit.name}"))
        if traces is not None:
            self.has_side_effects, changed = traces.compare()
            for place in changed:
                ctx.attributes.record_layer_change(place)
        elif differs is not None:
            self.has_side_effects = differs()
        self.output_checksums = checksums_of(given.differentiable)
        is_kept = policy.keeps_graph and not (
            policy.outlives_turn and self.has_side_effects
        )  # proven by a recompute, then
        self.policy, self.kept_graph = policy, graph if is_kept else None
        # Side outputs are what is still alive when the graph is gone, so nothing here may hold on to it.
        left = {id(tensor): at for at, tensor in enumerate(given.differentiable)}
        del given, graph, found
        sides = {**alive_outputs(seen), **ctx.side_outputs.attribute_tensors(self.unit)}
        seen.clear()
        if sides:
            ctx.side_outputs.record_layer(self.unit)
            self.kept_graph = None  # what a graph has saved cannot be cut
            edges = [get_gradient_edge(tensor) for tensor in sides.values()]
            new = [edge for edge in edges if edge.node._sequence_nr() >= began]
            self._mark_partial_outputs(starts, self._check_graph(new, began).internal_reads())
        self._detach_side_outputs(ctx, sides, left, segmenter)
        return outputs

    def suspend(self, ctx: StepContext) -> None:
        """The micro-batch goes on to another layer, or waits, or the layer's weights go."""
        assert self.policy is not None
        self.policy.on_suspend(self, ctx)

    def drop_graph(self, ctx: StepContext) -> None:
        """Recompute after all, although the graph was kept.

        Raises:
            RuntimeError: the recompute gives something else than the first run.
        """
        if self.kept_graph is not None:
            self.kept_graph = None
            self.check_recompute(ctx)

    def check_recompute(self, ctx: StepContext) -> None:
        """Recompute at once, before anything is trained, a call that left traces, to see whether it gives the same again.

        Raises:
            RuntimeError: it does not.
        """
        if self.has_side_effects and self.needs_backward and self.kept_graph is None:
            with (
                ThreadState.cleared(),
                ctx.current_turn.activate(self.k, "shell"),
                self._forward_buffers(ctx),
                preserve_random_state(),
                _preserved_attributes(self.unit),
                ctx.attributes.checking_recompute(),
            ):
                self._recompute(ctx)

    def _mark_partial_outputs(self, edge_ids: Sequence[EdgeId], internal_reads: Set[EdgeId]) -> None:
        """Mark outputs that the layer reads itself: the shell gives a part of their gradient, the layer the rest."""
        for sink, start in zip(self.output_boundaries, edge_ids, strict=True):
            sink.is_partial |= start in internal_reads

    def _check_graph(self, outputs: Iterable[GradientEdge], began: int) -> Subgraph:
        """Refuse a layer that reads differentiable tensors it was not given; return what its graph consists of."""
        found = walk_graph(outputs)
        own, params = {id(i.boundary) for i in self.inputs}, {id(param) for param in self.unit.params}
        foreign = sum(id(leaf) not in params and isinstance(leaf, torch.nn.Parameter) for leaf in found.leaves)
        foreign += sum(id(node.boundary) not in own for node in found.inputs)
        if found.first < began:
            foreign += sum(node._sequence_nr() < began for node in found.nodes)
        if foreign:
            raise RuntimeError(
                f"layer {self.unit.name} reads {foreign} differentiable tensor(s) that it was not given as arguments (taken "
                "from an attribute, a closure or another layer): their gradients would miss the relay. Pass them as "
                "arguments of the layer"
            )
        return found

    def _run_layer(self, ctx: StepContext) -> tuple[LayerOutputs, LayerGraph]:
        buffers = [buffer for buffer in self.unit.buffers.tensors() if buffer is not None]
        with ctx.current_turn.activate(self.k, self.unit.key, [*self.tensors, *buffers]), ctx.attributes.in_layer():
            ctx.guard.unguard_all(self.tensors)
            real = self.layer_forward
            for shown in ctx.observers:
                real = shown(self, real)
            return self.arguments.run(real)

    def _detach_outputs(self, ctx: StepContext, outputs: LayerOutputs, segmenter: GraphSegmenter) -> Any:
        """Return the outputs as the shell shall see them: entries, what the layer was given, and copies of weights."""
        if (
            outputs.differentiable
        ):  # a layer that only hands on what it was given ends no segment: nothing will run at its place
            self.segment = segmenter.begin_segment()
        ctx.guard.register(list(outputs.new_tensors.values()), self.k)  # should the layer keep them
        shown = dict(outputs.originals)
        for tensor in outputs.differentiable:
            self.output_boundaries.append(sink := BoundaryGradient())
            shown[id(tensor)] = shown_tensor = segmenter.detach_output(self._copy_if_exempt(ctx, tensor), sink)
            ctx.stash.track(shown_tensor, self.k, "stash", "", fresh=True)
        for index, item in enumerate(outputs.flat):
            if id(item) in shown:
                continue
            if not isinstance(item, torch.Tensor):
                refuse_hidden_tensors(item, f"output {index} of layer {self.unit.name}")
            elif id(item) in outputs.new_tensors:
                shown[id(item)] = constant = self._copy_if_exempt(ctx, item)
                ctx.stash.track(ctx.guard.register(constant, self.k), self.k, "activations", "", fresh=True)
        return unflatten([shown.get(id(item), item) for item in outputs.flat], outputs.spec)

    def _copy_if_exempt(self, ctx: StepContext, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor that lies in a weight, whose slot soon holds another layer's, or in a buffer; return others."""
        return _copy_strided(tensor.detach()) if ctx.stash.tracker.is_exempt(tensor) else tensor

    def _detach_side_outputs(
        self,
        ctx: StepContext,
        tensors: dict[Locator, torch.Tensor],
        index_by_id: dict[int, int],
        segmenter: GraphSegmenter,
    ) -> None:
        """Make entries of what the layer gave out on the side; of an output that somebody keeps too, by its place in `left`."""
        if tensors and not self.output_boundaries:
            self.segment = segmenter.begin_segment()
        for locator, tensor in tensors.items():
            if tensor.grad_fn is None or is_segment_input(tensor.grad_fn):
                continue  # the same tensor under a second name
            is_output = id(tensor) in index_by_id
            sink = self.output_boundaries[index_by_id[id(tensor)]] if is_output else BoundaryGradient()
            sink.is_partial |= not is_output  # what is kept on the way is read on the way
            try:
                segmenter.detach_output_in_place(tensor, sink)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{'.'.join(locator[1:])} of layer {self.unit.name} is kept by the model and is a view, so that its graph "
                    f"cannot be cut ({error}). Keep a copy: x.clone()"
                ) from error
            if not is_output:
                self.side_boundaries[locator] = sink
            if locator[0] == "attribute":
                self.side_attributes[self.unit.module.get_submodule(locator[1]), locator[2]] = tensor
            ctx.stash.track(tensor, self.k, "activations", "", fresh=True)

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, ctx: StepContext, partial_sums: PartialSums, shell_partial_sums: PartialSums) -> None:
        """Recompute, and back-propagate through the layer."""
        # Nobody used what it gave out: plain training runs none of its nodes either, so weights get no gradient, not zero.
        if all(sink.grad is None for sink in [*self.output_boundaries, *self.side_boundaries.values()]):
            return
        if self.stay.is_over:
            self.kept_graph = None  # the weights that it has saved are another layer's by now
        ctx.stash.fetch(self.needed_tensors, self.k, self.unit.key)
        stop = ctx.time_event("backward", self.unit.key, self.k, self.visit)
        with ctx.current_turn.activate(self.k, "shell"), self._forward_buffers(ctx):
            graph = self.kept_graph or self._recompute(ctx)
            # All that waits goes into one run as roots. Autograd adds a root to what the run brings, the youngest reader's
            # first, as in plain training; gradients of two runs, added afterwards, would round otherwise.
            roots = take_gradients(zip(graph.output_edges, self.output_boundaries, strict=True))
            roots += take_gradients((graph.side_edges[at], sink) for at, sink in self.side_boundaries.items())
            weights = {
                i.tensor: (e, i.boundary)
                for e, i in zip(graph.input_edges, self.inputs, strict=True)
                if i.tensor.is_leaf
            }
            entered = {edge.node: tensor for tensor, (edge, _) in weights.items()}
            uses = partial(count_uses, [edge for edge, _ in roots], entered)
            if weights:  # of the shell, given as arguments: their sums go on here
                given = shell_partial_sums(self.k, lambda: Counter({t: n for t, n in uses().items() if t in weights}))
                for edge, grad in given:
                    weights[edge.node.variable][1].add(grad)  # type: ignore[attr-defined]
            roots += take_gradients(
                (edge, item.boundary) for edge, item in zip(graph.input_edges, self.inputs, strict=True)
            )
            self.kept_graph = None  # the run frees what the graph has saved; it must not be run again
            with ctx.current_turn.activate(self.k, self.unit.key, None), ctx.watch_backward(in_layer=True):
                run_backward(roots + partial_sums(self.k, uses))
        stop()

    def _recompute(self, ctx: StepContext) -> LayerGraph:
        assert self.context is not None and self.thread_state is not None
        self.check_arguments_unchanged()
        return self.context.run(self._recompute_in_context, ctx)

    def check_arguments_unchanged(self) -> None:
        """Refuse to recompute from arguments that were changed in place."""
        self._check_versions("the model changed it in place after the call")

    def _check_versions(self, cause: str) -> None:
        with unguarded():
            now = [tensor._version for tensor in self.tensors]
        if now != self.versions:
            index = next(i for i, (a, b) in enumerate(zip(now, self.versions, strict=True)) if a != b)
            raise RuntimeError(
                f"tensor argument {index} of layer {self.unit.name} (shape {tuple(self.tensors[index].shape)}) cannot be "
                f"recomputed from: {cause}. Change a copy instead (x = x + y rather than x += y, ReLU(inplace=False))"
            )

    def _recompute_in_context(self, ctx: StepContext) -> LayerGraph:
        with (
            ctx.user_hooks.silenced(),  # they ran with the forward, once, as in plain training
            self.thread_state.activate(ctx.outer_state),
            ctx.side_outputs.watch(self.unit, strong=True) as seen,
        ):  # type: ignore[union-attr]
            given, graph = self._run_layer(ctx)
            ctx.recompute_check.compare(self.unit.name, self.output_checksums, given.differentiable)
            if self.side_boundaries or self.side_attributes:
                graph.side_edges = self._find_side_edges(ctx, seen)
            if self.thread_state.has_autocast:  # type: ignore[union-attr]  # its casts are of weights that leave with the visit
                torch.clear_autocast_cache()
        return graph

    def _find_side_edges(self, ctx: StepContext, seen: dict[Locator, Any]) -> dict[Locator, GradientEdge]:
        tensors = {**seen, **ctx.side_outputs.attribute_tensors(self.unit)}
        for _, path, *rest in [at for at in tensors if at[0] == "attribute"]:
            module = self.unit.module.get_submodule(path)
            setattr(
                module, rest[0], tensors["attribute", path, rest[0]].detach()
            )  # as backward leaves it: without a graph
        if any(at not in tensors or tensors[at].grad_fn is None for at in self.side_boundaries):
            raise RuntimeError(difference_message(self.unit.name))
        return {at: get_gradient_edge(tensors[at]) for at in self.side_boundaries}

    def _forward_buffers(self, ctx: StepContext) -> AbstractContextManager[None]:
        """Recompute from what the forward saw; put the newest values back after backward, which reads them too."""
        is_now = not self.buffers or self.kept_graph is not None or ctx.buffers_of(self.unit) is self.buffers
        return nullcontext() if is_now else self._restored_buffers()

    @contextmanager
    def _restored_buffers(self) -> Iterator[None]:
        now = self.unit.buffers.copy()
        self.unit.buffers.restore(self.buffers)
        yield
        self.unit.buffers.restore(now)

    def backward_segment(self, ctx: StepContext, partial_sums: PartialSums) -> None:
        """Back-propagate through the shell code before the call."""
        assert self.segment is not None, f"{self.unit.key} k={self.k} has no segment"
        if self.segment.has_gradient:
            stop = ctx.time_event("shell", "shell", self.k, self.visit)
            with ctx.current_turn.activate(self.k, "shell", None), ctx.watch_backward():
                run_backward(self.segment.take_gradients() + partial_sums(self.k, lambda: self.segment.uses))  # type: ignore[union-attr]
            stop()
        for grad in [*self.segment.pending_gradients(), *(i.boundary.grad for i in self.inputs)]:
            if grad is not None:
                ctx.stash.track(grad, self.k, "stash", "", fresh=True)

    def release(self) -> None:
        """Let go of the stash."""
        self.arguments, self.segment, self.buffers = NO_ARGUMENTS, None, None
        self.context = self.thread_state = self.kept_graph = None


def _copy_strided(tensor: torch.Tensor) -> torch.Tensor:
    """Copy with the same strides, overlapping ones too (an expanded weight): kernels round by them."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return tensor.clone()
    count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((count,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


@contextmanager
def _preserved_attributes(unit: Unit) -> Iterator[None]:
    """Forget what the layer's modules set on themselves in the block, or put into their lists and dicts."""
    before = [(module, dict(vars(module))) for module in unit.module.modules()]
    held = [v for _, attributes in before for v in attributes.values() if isinstance(v, list | dict | set | deque)]
    contents = [(container, copy.copy(container)) for container in held]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        for container, content in contents:
            if len(container) != len(content):
                container.clear()
                container.extend(content) if isinstance(container, list | deque) else container.update(content)
