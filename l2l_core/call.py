"""One layer on one micro-batch: run with its graph cut on both sides, recomputed later, and back-propagated.

Both the first run and the recompute see their differentiable inputs through `enter` nodes, so that the same code gives
the same graph. The first run's graph is dropped at once unless this is the last layer, which is not run twice.
"""

from __future__ import annotations

import contextvars
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from l2l_core.ambient import Ambient
from l2l_core.attributes import Attributes, Place, check_layer, of_layer
from l2l_core.clock import Clock
from l2l_core.cut import Segment, Sink, cut, enter, is_entry, run_backward, sink_of, trace_segments
from l2l_core.device import Device
from l2l_core.hidden import is_cache, refuse_hidden
from l2l_core.hooks import Locator, SideOutputs, UserHooks, alive
from l2l_core.influence import Influence
from l2l_core.meter import Meter
from l2l_core.stash import Stash
from l2l_core.trace import Trace
from l2l_core.units import Unit


@dataclass(frozen=True, slots=True)
class Pass:
    """What all calls of one pass over the model share."""

    device: Device
    stash: Stash
    trace: Trace
    sides: SideOutputs
    user_hooks: UserHooks
    meter: Meter
    clock: Clock
    attributes: Attributes
    runs: Counter[Unit] = field(default_factory=Counter)  # how often each layer has run
    influence: Influence = field(default_factory=Influence)
    buffer_values: dict[Unit, list[torch.Tensor | None]] = field(default_factory=dict)

    def buffers_of(self, unit: Unit) -> list[torch.Tensor | None]:
        """Values of a unit's buffers now; the same list as before if none has changed."""
        last = self.buffer_values.get(unit)
        if last is None or not unit.buffers.equal(last):
            self.buffer_values[unit] = unit.buffers.copy()
        return self.buffer_values[unit]

    def expect_unchanged(self, unit: Unit) -> Callable[[], None]:
        """In metered passes: a check that nobody sets a layer's attributes while a micro-batch waits for it to run first."""
        if not self.stash.metering:
            return lambda: None
        runs, found = self.runs[unit], of_layer(unit)
        return lambda: check_layer(unit, found) if self.runs[unit] == runs else None

    @contextmanager
    def watched(self, in_layer: bool = False) -> Iterator[None]:
        """Run a block of backward under the stash's watch, where it needs one."""
        if self.stash.metering or self.stash.guards_layers or (self.stash.guards and not in_layer):
            with self.stash.watch:
                yield
        else:
            yield

    def timed(self, kind: str, layer: str, k: int, visit: int = -1) -> Callable[[], None]:
        """Start a compute event; calling the result ends it."""
        self.meter.enter(kind, layer, k)
        self.clock.start(kind, layer, k, visit)

        def end() -> None:
            self.clock.stop()
            self.meter.leave()

        return end


@dataclass(slots=True)
class _Graph:
    """Edges of a layer's graph from which backward can start."""

    inputs: list[GradientEdge]  # aligned with Call.inputs; roots for gradients that inputs already have
    outputs: list[GradientEdge]  # aligned with Call.outputs
    sides: dict[Locator, GradientEdge]


@dataclass(slots=True)
class _Input:
    """A differentiable argument, where its gradient gathers, and the edge behind it if it entered a layer first here."""

    tensor: torch.Tensor
    sink: Sink
    edge: GradientEdge | None


@dataclass(eq=False)
class Call:
    """The call of `unit` by micro-batch `k`.

    Invariant: what `inputs` and `leaves` hold is the stash of this call; it is let go when backward is done.
    """

    unit: Unit
    real: Callable[..., Any]  # the layer's own forward
    k: int
    leaves: list[Any]
    spec: Any
    inputs: list[_Input]
    behind: list[tuple[GradientEdge, Sink]]  # what entered a layer first here: segments to run after this call
    mark: int = 0  # autograd's sequence number at the call: what is older was made before it
    visit: int = -1
    outputs: list[Sink] = field(default_factory=list)
    side_sinks: dict[Locator, Sink] = field(default_factory=dict)
    segment: Segment | None = None
    kept: _Graph | None = None
    ambient: Ambient | None = None
    context: contextvars.Context | None = None
    buffers: list[torch.Tensor | None] | None = None  # the unit's buffers as the forward saw them
    versions: list[int] = field(default_factory=list)
    attributes: dict[Place, torch.Tensor] = field(default_factory=dict)  # side outputs left there
    sums: list[tuple[float, float]] = field(default_factory=list)  # of the outputs, in metered steps; with their slack

    @staticmethod
    def of(unit: Unit, real: Callable[..., Any], k: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Take a call's arguments and cut their graph.

        Raises:
            TypeError: an argument hides tensors (a cache, an object that is no pytree).
        """
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=is_cache)
        inputs: dict[int, _Input] = {}
        behind = []
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                refuse_hidden(leaf, f"argument {index} of layer {unit.name}")
            elif leaf.requires_grad and torch.is_grad_enabled() and id(leaf) not in inputs:
                sink, edge = cut(leaf)
                inputs[id(leaf)] = _Input(leaf, sink, edge)
                if edge is not None:
                    behind.append((edge, sink))
        call = Call(unit, real, k, leaves, spec, list(inputs.values()), behind)
        call.context, call.mark = contextvars.copy_context(), torch._C._autograd._get_sequence_nr()
        return call

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor among the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def awaited(self) -> list[torch.Tensor]:
        """What the call needs on the device: its arguments and, in backward, the gradients that have come so far."""
        sinks = [*self.outputs, *self.side_sinks.values(), *(s for item in self.inputs for s in self._gathering(item))]
        return self.tensors + [sink.grad for sink in sinks if sink.grad is not None]

    @property
    def needs_backward(self) -> bool:
        """Whether the layer gave out anything that can receive a gradient, or what entered it here still has to pass one on.

        The second alone: a layer that hands on what it is given, or gives out nothing that learns.
        """
        return bool(self.outputs or self.side_sinks or self.behind)

    # -- forward -------------------------------------------------------------------------------------------------------

    def first(self, run: Pass, keep: bool) -> Any:
        """Run the layer inside its micro-batch's coroutine; return its outputs as the shell shall see them."""
        self.versions = [tensor._version for tensor in self.tensors]
        stop = run.timed("forward", self.unit.key, self.k, self.visit)
        with run.sides.watching(self.unit.module) as seen:
            outputs, graph = self._run(run, seen=None)
        stop()
        self._check_versions("the layer itself changed it in place")
        if run.stash.metering:
            self._check_graph(graph)
        self.kept = graph if keep else None
        del graph  # with it goes what only the layer's own graph kept alive
        sides = {**alive(seen), **run.sides.attributes(self.unit.module)}
        if sides:
            self.kept = None  # what a graph has saved cannot be cut
        self._cut_sides(run, sides)
        return outputs

    def _check_graph(self, graph: _Graph) -> None:
        """Refuse a layer that reads differentiable tensors which it was not given."""
        (reached,) = trace_segments([graph.outputs])
        own, params = {id(i.sink) for i in self.inputs}, set(self.unit.params)
        foreign = [n for n in reached.nodes if is_entry(n) and id(n.sink) not in own]
        foreign += [t for t in reached.leaves if sink_of(t) or (isinstance(t, torch.nn.Parameter) and t not in params)]
        if foreign:
            raise RuntimeError(
                f"layer {self.unit.name} reads {len(foreign)} differentiable tensor(s) that it was not given as arguments (taken "
                "from an attribute, a closure or another layer): their gradients would miss the relay. Pass them as "
                "arguments of the layer"
            )

    def _run(self, run: Pass, seen: dict[Locator, Any] | None) -> tuple[Any, _Graph]:
        """The layer itself. In the first run (`seen` is None) its outputs are made ready for the shell."""
        buffers = [buffer for buffer in self.unit.buffers.now() if buffer is not None]
        with run.stash.working(self.k, self.unit.key, [*self.tensors, *buffers]):
            return self._run_cut(run, seen)

    def _run_cut(self, run: Pass, seen: dict[Locator, Any] | None) -> tuple[Any, _Graph]:
        entered = {id(i.tensor): enter(i.tensor, i.sink) for i in self.inputs}
        args, kwargs = pytree.tree_unflatten([entered.get(id(leaf), leaf) for leaf in self.leaves], self.spec)
        flat, spec = pytree.tree_flatten(self.real(*args, **kwargs), is_leaf=is_cache)
        graph = _Graph([get_gradient_edge(entered[id(i.tensor)]) for i in self.inputs], [], {})
        own = {id(entered[id(i.tensor)]): i.tensor for i in self.inputs}
        passed = {id(leaf) for leaf in self.leaves} | set(own)
        flowing = list(
            {id(t): t for t in flat if isinstance(t, torch.Tensor) and t.requires_grad and id(t) not in passed}.values()
        )
        graph.outputs = [get_gradient_edge(t) for t in flowing]
        sums = [_sum_of(t.detach(), run.device.in_host_memory) for t in flowing] if run.stash.metering else []
        if seen is not None:
            self._check_sums(sums)
            return None, graph
        self.sums = sums
        shown = {**own, **{id(t): self._leave(run, t) for t in flowing}}
        for index, item in enumerate(flat):
            if not isinstance(item, torch.Tensor):
                refuse_hidden(item, f"output {index} of layer {self.unit.name}")
            elif id(item) not in shown and id(item) not in passed:
                run.stash.hold(item, self.k, "activations", "", fresh=True)
        return pytree.tree_unflatten([shown.get(id(item), item) for item in flat], spec), graph

    def _check_sums(self, sums: list[tuple[float, float]]) -> None:
        """In metered steps, the recompute must give what the forward gave."""
        pairs = zip(sums, self.sums, strict=False)
        if len(sums) != len(self.sums) or not all(
            abs(a - b) <= slack or repr(a) == repr(b) for (a, slack), (b, _) in pairs
        ):
            raise RuntimeError(
                f"layer {self.unit.name} gave other outputs when it was recomputed: it depends on something besides its "
                "arguments, weights and buffers (an attribute that changes between calls, NumPy's random numbers, a counter). "
                "Pass it as an argument of the layer, or use torch's random numbers"
            )

    def _leave(self, run: Pass, tensor: torch.Tensor) -> torch.Tensor:
        if run.stash.is_exempt(tensor):  # a weight, or a view of one: the slot will hold another layer's soon
            tensor = tensor.detach().clone()
        self.outputs.append(sink := Sink())
        shown = enter(tensor, sink)
        run.stash.hold(shown, self.k, "stash", "", fresh=True)
        return shown

    def _cut_sides(self, run: Pass, tensors: dict[Locator, torch.Tensor]) -> None:
        for locator, tensor in tensors.items():
            sink, edge = cut(tensor)
            if edge is None:
                continue  # the same tensor under a second name
            if sink_of(tensor) is None:
                raise RuntimeError(
                    f"{'.'.join(locator[1:])} of layer {self.unit.name} is kept by the model and has been used already, or is "
                    "the base of a view, so that its graph cannot be cut. Keep a copy: x.clone()"
                )
            self.side_sinks[locator] = sink
            if locator[0] == "attribute":
                self.attributes[self.unit.module.get_submodule(locator[1]), locator[2]] = tensor
            run.stash.hold(tensor, self.k, "activations", "", fresh=True)

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, run: Pass) -> None:
        """[2] Recompute, back-propagate through the layer, then through the shell code before it."""
        if any(sink.grad is not None for sink in [*self.outputs, *self.side_sinks.values()]):
            run.stash.fetch(self.awaited, self.k, self.unit.key)
            stop = run.timed("backward", self.unit.key, self.k, self.visit)
            with run.stash.working(self.k, "shell"), self._buffers_as_seen(run):
                graph = self.kept or self._recompute(run)
                roots = [
                    (e, g) for e, s in zip(graph.outputs, self.outputs, strict=True) if (g := s.take()) is not None
                ]
                roots += [(graph.sides[at], g) for at, s in self.side_sinks.items() if (g := s.take()) is not None]
                roots += [
                    (edge, grad)
                    for edge, item in zip(graph.inputs, self.inputs, strict=True)
                    for sink in self._gathering(item)
                    if (grad := sink.take()) is not None
                ]
                self.kept = None
                with run.stash.working(self.k, self.unit.key, None), run.watched(in_layer=True):
                    run_backward(roots)
            stop()
        self._run_segment(run)

    def _gathering(self, item: _Input) -> list[Sink]:
        """Where the gradient of an input has gathered so far: its sink, or the gate of its node if it is still attached."""
        at_gate = self.segment.waiting_at(item.edge) if self.segment is not None and item.edge is not None else None
        return [item.sink] if at_gate is None else [at_gate, item.sink]

    def _recompute(self, run: Pass) -> _Graph:
        assert self.context is not None and self.ambient is not None
        self.check_unchanged()
        return self.context.run(self._recompute_in_context, run)

    def check_unchanged(self) -> None:
        """Refuse to recompute from arguments that were changed in place."""
        self._check_versions("the model changed it in place after the call")

    def _check_versions(self, cause: str) -> None:
        for index, (tensor, version) in enumerate(zip(self.tensors, self.versions, strict=True)):
            if tensor._version != version:
                raise RuntimeError(
                    f"tensor argument {index} of layer {self.unit.name} (shape {tuple(tensor.shape)}) cannot be recomputed "
                    f"from: {cause}. Change a copy instead (x = x + y rather than x += y, ReLU(inplace=False))"
                )

    def _recompute_in_context(self, run: Pass) -> _Graph:
        with (
            run.user_hooks.silenced(),
            self.ambient.active(),
            run.sides.watching(self.unit.module, strong=True) as seen,
        ):  # type: ignore[union-attr]
            _, graph = self._run(run, seen)
            if self.side_sinks:
                graph.sides = self._find_sides(run, seen)
            if self.ambient.autocasts:  # type: ignore[union-attr]
                torch.clear_autocast_cache()
        return graph

    def _find_sides(self, run: Pass, seen: dict[Locator, Any]) -> dict[Locator, GradientEdge]:
        tensors = {**seen, **run.sides.attributes(self.unit.module)}
        for _, path, *rest in [at for at in tensors if at[0] == "attribute"]:
            module = self.unit.module.get_submodule(path)
            setattr(
                module, rest[0], tensors["attribute", path, rest[0]].detach()
            )  # as backward leaves it: without a graph
        return {at: get_gradient_edge(tensors[at]) for at in self.side_sinks}

    @contextmanager
    def _buffers_as_seen(self, run: Pass) -> Iterator[None]:
        """Recompute from what the forward saw; put the newest values back after backward, which reads them too."""
        if not self.buffers or self.kept is not None or run.buffers_of(self.unit) is self.buffers:
            yield
            return
        now = self.unit.buffers.copy()
        self.unit.buffers.restore(self.buffers)
        yield
        self.unit.buffers.restore(now)

    def _run_segment(self, run: Pass) -> None:
        """Back-propagate through the shell code that made the inputs which entered a layer here for the first time."""
        roots = [(edge, grad) for edge, sink in self.behind if (grad := sink.take()) is not None]
        self.behind = []
        if roots or (self.segment is not None and self.segment.is_awaited):
            stop = run.timed("shell", "shell", self.k, self.visit)
            with run.stash.working(self.k, "shell", None), run.watched():
                run_backward(roots, self.segment)
            stop()
        self.hold_gradients(run)

    def hold_gradients(self, run: Pass) -> None:
        """Gradients that wait for an earlier call are part of the image."""
        waiting = [sink.grad for _, sink in self.segment.waiting()] if self.segment else []
        for grad in [*waiting, *(i.sink.grad for i in self.inputs)]:
            if grad is not None:
                run.stash.hold(grad, self.k, "stash", "", fresh=True)

    def release(self) -> None:
        """Let go of the stash."""
        self.leaves, self.inputs, self.segment, self.buffers = [], [], None, None
        self.context = self.ambient = self.kept = None


def _sum_of(tensor: torch.Tensor, exact: bool) -> tuple[float, float]:
    """The sum of all elements, and by how much that of the same values may differ where a device adds up in any order."""
    total = float(torch.sum(tensor, dtype=torch.float64))
    return total, 0.0 if exact else 1e-5 * float(torch.sum(tensor.abs(), dtype=torch.float64))
