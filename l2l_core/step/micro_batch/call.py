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
from torch.utils import _pytree as pytree

from l2l_core.eps.blocks import Unit, check_stamps, stamps_of
from l2l_core.model import Ambient, refuse_hidden
from l2l_core.step.graph import (
    Reach,
    Root,
    Segment,
    Sink,
    Start,
    is_entry,
    nested,
    reach,
    run_backward,
    sequence_number,
    start_of,
    taken,
    unasked,
    uses_of,
)
from l2l_core.step.micro_batch.arguments import NO_ARGUMENTS, Arguments, Given, Graph, Input
from l2l_core.step.micro_batch.attributes import Place
from l2l_core.step.micro_batch.crossing import Crossing
from l2l_core.step.micro_batch.hooks import Locator, alive
from l2l_core.step.micro_batch.keepers import Keeper
from l2l_core.step.micro_batch.recomputes import Sum, differs, sums_of
from l2l_core.step.micro_batch.shared import Pass
from l2l_core.step.micro_batch.trees import unflatten
from l2l_core.step.traffic import Stay
from l2l_core.surgery import same_random_numbers

Priors = Callable[[int, Callable[[], Counter[torch.Tensor]]], list[Root]]  # what a run of a micro-batch has to add to


@dataclass(eq=False)
class Call:
    """The call of `unit` by micro-batch `k`.

    Invariant: what `arguments` hold is the stash of this call; it is let go when backward is done.
    """

    unit: Unit
    real: Callable[..., Any]  # the layer's own forward
    k: int
    arguments: Arguments
    visit: int = -1
    outputs: list[Sink] = field(default_factory=list)
    side_sinks: dict[Locator, Sink] = field(default_factory=dict)
    segment: Segment | None = None  # of shell code before the call, back-propagated after it
    stay: Stay = field(default_factory=Stay)  # of the layer, where the kept graph has saved its weights
    keeper: Keeper | None = None
    kept: Graph | None = None
    ambient: Ambient | None = None
    context: contextvars.Context | None = None
    buffers: list[torch.Tensor | None] | None = None  # the unit's buffers as the forward saw them
    versions: list[int] = field(default_factory=list)
    attributes: dict[Place, torch.Tensor] = field(default_factory=dict)  # side outputs left there
    left_traces: bool = False  # something else than buffers is not as it was, so that the recompute may differ
    sums: list[Sum] = field(default_factory=list)  # of the outputs, to compare the recompute with

    @staticmethod
    def of(
        unit: Unit,
        real: Callable[..., Any],
        k: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        crossing: Crossing,
    ) -> Call:
        """Make a call that waits for its layer.

        Raises:
            TypeError: an argument hides tensors (a cache, an object that is no pytree).
        """
        return Call(unit, real, k, Arguments.of(unit.name, args, kwargs, crossing), context=contextvars.copy_context())

    @property
    def inputs(self) -> list[Input]:
        """Its differentiable arguments."""
        return self.arguments.inputs

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor among the arguments."""
        return self.arguments.tensors

    @property
    def awaited(self) -> Iterator[torch.Tensor]:
        """What the call needs on the device: its arguments and, in backward, the gradients that have come so far.

        Gone through only by those who want it: where nothing moves, nobody does.
        """
        yield from self.tensors
        if self.kept is not None:
            yield from self.kept.given  # a graph may have saved what the layer gave out
        for sink in (*self.outputs, *self.side_sinks.values(), *(item.sink for item in self.inputs)):
            if sink.grad is not None:
                yield sink.grad

    def has_changed_buffers(self, run: Pass) -> bool:
        """Whether the layer's buffers are others than before its run, which a kept graph may have saved."""
        return run.buffers_of(self.unit) is not self.buffers

    @property
    def needs_backward(self) -> bool:
        """Whether the layer gave out anything that can receive a gradient; handing on what it is given is not enough."""
        return bool(self.outputs or self.side_sinks)

    def note(self, run: Pass, outputs: Any) -> None:
        """Note what the layer did to its buffers and to the hidden state, in its first run."""
        if self.buffers:
            run.order.layer_ran(self.k, self.unit.buffers, self.buffers, run.buffers_of(self.unit))
        run.influence.note(self.unit, self.tensors, outputs)
        # At the turn nothing is parked before backward, and what is asked for needs room.
        if self.kept is not None and self.keeper is not None and self.keeper.outlasts and run.stash.moves:
            self.kept.given = [leaf.detach() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]

    # -- forward -------------------------------------------------------------------------------------------------------

    def first(self, run: Pass, keeper: Keeper, crossing: Crossing) -> Any:
        """Run the layer inside its micro-batch's coroutine; return its outputs as the shell shall see them."""
        with unasked():
            self.versions = [tensor._version for tensor in self.tensors]
        # Autograd numbers nodes as they are made: by these numbers it is told later whose code has made one.
        began, stamps = sequence_number(), stamps_of(self.unit.params)
        traces = run.glances.traces(self.unit.module) if run.stash.metering else None
        differs = run.glances.look(self.unit.module) if traces is None and keeper.outlasts else None
        run.user_hooks.adopt(self.unit.module)
        stop = run.timed("forward", self.unit.key, self.k, self.visit)
        with run.sides.watching(self.unit) as seen:
            given, graph = self._run(run)
        crossing.ran(self.unit.name, began)
        given.check_caches()
        outputs = self._leave(run, given, crossing)
        stop()
        check_stamps(self.unit.params, stamps, f"layer {self.unit.name}")
        self._check_versions("the layer itself changed it in place")
        found = self._check_graph(graph.outputs, began)
        starts = [start_of(edge) for edge in graph.outputs]
        self._mark_parts(starts, found.reads() if any(e.node in found.again for e in graph.outputs) else set())
        if crossing.autocasts:
            crossing.casts(found.cast)
        if found.is_nested:
            run.nesting.add(self.unit)
            if any(block.shared for block in self.unit.blocks):
                raise RuntimeError(nested(f"layer {self.unit.name}"))
        if traces is not None:
            self.left_traces, changed = traces.look()
            for place in changed:
                run.attributes.layer_changed(place)
        elif differs is not None:
            self.left_traces = differs()
        self.sums = sums_of(given.flowing)
        is_kept = keeper.keeps and not (keeper.outlasts and self.left_traces)  # proven by a recompute, then
        self.keeper, self.kept = keeper, graph if is_kept else None
        # Side outputs are what is still alive when the graph is gone, so nothing here may hold on to it.
        left = {id(tensor): at for at, tensor in enumerate(given.flowing)}
        del given, graph, found
        sides = {**alive(seen), **run.sides.attributes(self.unit)}
        seen.clear()
        if sides:
            run.sides.found(self.unit)
            self.kept = None  # what a graph has saved cannot be cut
            edges = [get_gradient_edge(tensor) for tensor in sides.values()]
            new = [edge for edge in edges if edge.node._sequence_nr() >= began]
            self._mark_parts(starts, self._check_graph(new, began).reads())
        self._cut_sides(run, sides, left, crossing)
        return outputs

    def gives_way(self, run: Pass) -> None:
        """The micro-batch goes on to another layer, or waits, or the layer's weights go."""
        assert self.keeper is not None
        self.keeper.gives_way(self, run)

    def drop_graph(self, run: Pass) -> None:
        """Recompute after all, although the graph was kept.

        Raises:
            RuntimeError: the recompute gives something else than the first run.
        """
        if self.kept is not None:
            self.kept = None
            self.prove(run)

    def prove(self, run: Pass) -> None:
        """Recompute at once, before anything is trained, a call that left traces, to see whether it gives the same again.

        Raises:
            RuntimeError: it does not.
        """
        if self.left_traces and self.needs_backward and self.kept is None:
            with Ambient.aside(), run.at_work.turn(self.k, "shell"), self._buffers_as_seen(run), same_random_numbers():
                with _attributes_kept(self.unit), run.attributes.proving():
                    self._recompute(run)

    def _mark_parts(self, starts: Sequence[Start], read: Set[Start]) -> None:
        """Mark outputs that the layer reads itself: the shell gives a part of their gradient, the layer the rest."""
        for sink, start in zip(self.outputs, starts, strict=True):
            sink.is_part |= start in read

    def _check_graph(self, outputs: Iterable[GradientEdge], began: int) -> Reach:
        """Refuse a layer that reads differentiable tensors it was not given; return what its graph consists of."""
        found = reach(outputs)
        own, params = {id(i.sink) for i in self.inputs}, {id(param) for param in self.unit.params}
        foreign = sum(id(leaf) not in params and isinstance(leaf, torch.nn.Parameter) for leaf in found.leaves)
        foreign += sum(id(node.sink) not in own for node in found.entries)
        if found.first < began:
            foreign += sum(node._sequence_nr() < began for node in found.nodes)
        if foreign:
            raise RuntimeError(
                f"layer {self.unit.name} reads {foreign} differentiable tensor(s) that it was not given as arguments (taken "
                "from an attribute, a closure or another layer): their gradients would miss the relay. Pass them as "
                "arguments of the layer"
            )
        return found

    def _run(self, run: Pass) -> tuple[Given, Graph]:
        buffers = [buffer for buffer in self.unit.buffers.now() if buffer is not None]
        with run.at_work.turn(self.k, self.unit.key, [*self.tensors, *buffers]), run.attributes.in_layer():
            run.asides.release(self.tensors)
            real = self.real
            for shown in run.observers:
                real = shown(self, real)
            return self.arguments.run(real)

    def _leave(self, run: Pass, given: Given, crossing: Crossing) -> Any:
        """Return the outputs as the shell shall see them: entries, what the layer was given, and copies of weights."""
        if given.flowing:  # a layer that only hands on what it was given ends no segment: nothing will run at its place
            self.segment = crossing.turn()
        run.asides.note(list(given.new.values()), self.k)  # should the layer keep them
        shown = dict(given.own)
        for tensor in given.flowing:
            self.outputs.append(sink := Sink())
            shown[id(tensor)] = shown_tensor = crossing.leave(self._apart(run, tensor), sink)
            run.stash.hold(shown_tensor, self.k, "stash", "", fresh=True)
        for index, item in enumerate(given.flat):
            if id(item) in shown:
                continue
            if not isinstance(item, torch.Tensor):
                refuse_hidden(item, f"output {index} of layer {self.unit.name}")
            elif id(item) in given.new:
                shown[id(item)] = constant = self._apart(run, item)
                run.stash.hold(run.asides.note(constant, self.k), self.k, "activations", "", fresh=True)
        return unflatten([shown.get(id(item), item) for item in given.flat], given.spec)

    def _apart(self, run: Pass, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor that lies in a weight, whose slot soon holds another layer's, or in a buffer; return others."""
        return _copied(tensor.detach()) if run.stash.images.is_exempt(tensor) else tensor

    def _cut_sides(
        self, run: Pass, tensors: dict[Locator, torch.Tensor], left: dict[int, int], crossing: Crossing
    ) -> None:
        """Make entries of what the layer gave out on the side; of an output that somebody keeps too, by its place in `left`."""
        if tensors and not self.outputs:
            self.segment = crossing.turn()
        for locator, tensor in tensors.items():
            if tensor.grad_fn is None or is_entry(tensor.grad_fn):
                continue  # the same tensor under a second name
            is_output = id(tensor) in left
            sink = self.outputs[left[id(tensor)]] if is_output else Sink()
            sink.is_part |= not is_output  # what is kept on the way is read on the way
            try:
                crossing.leave_in_place(tensor, sink)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{'.'.join(locator[1:])} of layer {self.unit.name} is kept by the model and is a view, so that its graph "
                    f"cannot be cut ({error}). Keep a copy: x.clone()"
                ) from error
            if not is_output:
                self.side_sinks[locator] = sink
            if locator[0] == "attribute":
                self.attributes[self.unit.module.get_submodule(locator[1]), locator[2]] = tensor
            run.stash.hold(tensor, self.k, "activations", "", fresh=True)

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, run: Pass, priors: Priors, shell_priors: Priors) -> None:
        """Recompute, and back-propagate through the layer."""
        # Nobody used what it gave out: plain training runs none of its nodes either, so weights get no gradient, not zero.
        if all(sink.grad is None for sink in [*self.outputs, *self.side_sinks.values()]):
            return
        if self.stay.is_over:
            self.kept = None  # the weights that it has saved are another layer's by now
        run.stash.fetch(self.awaited, self.k, self.unit.key)
        stop = run.timed("backward", self.unit.key, self.k, self.visit)
        with run.at_work.turn(self.k, "shell"), self._buffers_as_seen(run):
            graph = self.kept or self._recompute(run)
            # All that waits goes into one run as roots. Autograd adds a root to what the run brings, the youngest reader's
            # first, as in plain training; gradients of two runs, added afterwards, would round otherwise.
            roots = taken(zip(graph.outputs, self.outputs, strict=True))
            roots += taken((graph.sides[at], sink) for at, sink in self.side_sinks.items())
            weights = {
                i.tensor: (e, i.sink) for e, i in zip(graph.inputs, self.inputs, strict=True) if i.tensor.is_leaf
            }
            entered = {edge.node: tensor for tensor, (edge, _) in weights.items()}
            uses = partial(uses_of, [edge for edge, _ in roots], entered)
            if weights:  # of the shell, given as arguments: their sums go on here
                given = shell_priors(self.k, lambda: Counter({t: n for t, n in uses().items() if t in weights}))
                for edge, grad in given:
                    weights[edge.node.variable][1].add(grad)  # type: ignore[attr-defined]
            roots += taken((edge, item.sink) for edge, item in zip(graph.inputs, self.inputs, strict=True))
            self.kept = None  # the run frees what the graph has saved; it must not be run again
            with run.at_work.turn(self.k, self.unit.key, None), run.watched(in_layer=True):
                run_backward(roots + priors(self.k, uses))
        stop()

    def _recompute(self, run: Pass) -> Graph:
        assert self.context is not None and self.ambient is not None
        self.check_unchanged()
        return self.context.run(self._recompute_in_context, run)

    def check_unchanged(self) -> None:
        """Refuse to recompute from arguments that were changed in place."""
        self._check_versions("the model changed it in place after the call")

    def _check_versions(self, cause: str) -> None:
        with unasked():
            now = [tensor._version for tensor in self.tensors]
        if now != self.versions:
            index = next(i for i, (a, b) in enumerate(zip(now, self.versions, strict=True)) if a != b)
            raise RuntimeError(
                f"tensor argument {index} of layer {self.unit.name} (shape {tuple(self.tensors[index].shape)}) cannot be "
                f"recomputed from: {cause}. Change a copy instead (x = x + y rather than x += y, ReLU(inplace=False))"
            )

    def _recompute_in_context(self, run: Pass) -> Graph:
        with (
            run.user_hooks.silenced(),  # they ran with the forward, once, as in plain training
            self.ambient.within(run.outside),
            run.sides.watching(self.unit, strong=True) as seen,
        ):  # type: ignore[union-attr]
            given, graph = self._run(run)
            run.recomputes.compare(self.unit.name, self.sums, given.flowing)
            if self.side_sinks or self.attributes:
                graph.sides = self._find_sides(run, seen)
            if self.ambient.autocasts:  # type: ignore[union-attr]  # its casts are of weights that leave with the visit
                torch.clear_autocast_cache()
        return graph

    def _find_sides(self, run: Pass, seen: dict[Locator, Any]) -> dict[Locator, GradientEdge]:
        tensors = {**seen, **run.sides.attributes(self.unit)}
        for _, path, *rest in [at for at in tensors if at[0] == "attribute"]:
            module = self.unit.module.get_submodule(path)
            setattr(
                module, rest[0], tensors["attribute", path, rest[0]].detach()
            )  # as backward leaves it: without a graph
        if any(at not in tensors or tensors[at].grad_fn is None for at in self.side_sinks):
            raise RuntimeError(differs(self.unit.name))
        return {at: get_gradient_edge(tensors[at]) for at in self.side_sinks}

    def _buffers_as_seen(self, run: Pass) -> AbstractContextManager[None]:
        """Recompute from what the forward saw; put the newest values back after backward, which reads them too."""
        is_now = not self.buffers or self.kept is not None or run.buffers_of(self.unit) is self.buffers
        return nullcontext() if is_now else self._buffers_of_before()

    @contextmanager
    def _buffers_of_before(self) -> Iterator[None]:
        now = self.unit.buffers.copy()
        self.unit.buffers.restore(self.buffers)
        yield
        self.unit.buffers.restore(now)

    def backward_before(self, run: Pass, priors: Priors) -> None:
        """Back-propagate through the shell code before the call."""
        assert self.segment is not None, f"{self.unit.key} k={self.k} has no segment"
        if self.segment.is_awaited:
            stop = run.timed("shell", "shell", self.k, self.visit)
            with run.at_work.turn(self.k, "shell", None), run.watched():
                run_backward(self.segment.take() + priors(self.k, lambda: self.segment.uses))  # type: ignore[union-attr]
            stop()
        for grad in [*self.segment.gradients(), *(i.sink.grad for i in self.inputs)]:
            if grad is not None:
                run.stash.hold(grad, self.k, "stash", "", fresh=True)

    def release(self) -> None:
        """Let go of the stash."""
        self.arguments, self.segment, self.buffers = NO_ARGUMENTS, None, None
        self.context = self.ambient = self.kept = None


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy with the same strides, overlapping ones too (an expanded weight): kernels round by them."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return tensor.clone()
    count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((count,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


@contextmanager
def _attributes_kept(unit: Unit) -> Iterator[None]:
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
