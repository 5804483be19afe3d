"""The shell code of one micro-batch: its segments, and the tensors that cross from one into a later one.

While shell code runs, a function mode shows every operation of it. A tensor that was made before the last layer call is
handed to the operation as an entry, so that graphs of different segments never touch. What the mode does not see (scripted
code, functions of C++ extensions) is found by a walk over the graph at the end of the forward, before anything is
trained, and refused; so is a loss that reads the inside of a layer, which the relay would get wrong without a word.

A file of one idea, which tensor belongs to which segment: all of it reads and writes the same few tables.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from l2l_core._torch import function_modes, pytree
from l2l_core.model import is_sparse, key_of
from l2l_core.step.graph import (
    Asides,
    Segment,
    Sink,
    edge_of,
    enter,
    enter_in_place,
    is_entry,
    is_leaf,
    reach,
    sequence_number,
)
from l2l_core.step.micro_batch.operations import Extent, operation_of
from l2l_core.step.traffic import NewHabit


class Crossing(TorchFunctionMode):
    """Cuts the graph of one micro-batch's shell code into segments.

    Invariant: no graph node of a segment leads to a node of another one; `check` proves it for every forward.

    Args:
        k: the micro-batch.
        asides: guards what it has made while it waits.
        relies: whether layers of which nothing was read on the side in the metered pass are not watched in this one.
    """

    def __init__(self, k: int, asides: Asides, relies: bool = False) -> None:
        super().__init__()
        self._k, self.asides, self._relies = k, asides, relies
        self.segments = [Segment()]
        self._begins = [0]  # autograd's sequence number at the begin of each segment
        self._layers: list[tuple[int, int, str]] = []  # sequence numbers of every run of a layer, and its name
        self._sinks: dict[tuple[Any, int], Sink] = {}  # of what was cut, by node and output
        self._entries: dict[tuple[Any, int], torch.Tensor] = {}  # of the present segment
        self.autocasts = False  # some layer was called under an autocast that keeps its casts
        self._casts: Counter[torch.Tensor] = Counter()
        self._outputs: dict[Any, Extent] = {}  # of the last layer call, by the node of their entry
        self._changed: dict[int, int] = {}  # storages that were changed through a view, and when
        self._was_in_place = False  # something older than a layer call was changed in place after it

    # -- the engine's side ---------------------------------------------------------------------------------------------

    def sink_of(self, tensor: torch.Tensor) -> Sink:
        """Return where a differentiable tensor's gradient gathers, which a layer or later code is about to read."""
        node = tensor.grad_fn
        if node is not None:
            _check_data(tensor, node)
        if is_entry(node):
            self._check_unchanged(tensor, node)
            return node.sink  # type: ignore[union-attr]
        edge = edge_of(tensor)
        self._check_unchanged(tensor, edge.node)
        if is_leaf(edge.node):  # nothing is behind it that could run too early: every reader has a sink of its own
            sink = Sink()
            self.segments[-1].roots.append((edge, sink))
            return sink
        key = edge.node, edge.output_nr
        if key not in self._sinks:
            self._refuse_inside(edge.node)
            self._sinks[key] = Sink()
            self._segment_of(edge.node).roots.append((edge, self._sinks[key]))
        return self._sinks[key]

    def _segment_of(self, node: Any) -> Segment:
        return self.segments[bisect_right(self._begins, node._sequence_nr()) - 1]

    def ran(self, layer: str, began: int) -> None:
        """A layer has run since sequence number `began`: shell code goes on."""
        self._layers.append((began, sequence_number(), layer))

    def turn(self) -> Segment:
        """Begin a segment: the shell code that follows is one of its own; return the one that has ended."""
        # Entries are for one segment. The next one gets others, or backward of the two would run together.
        for entry in self._entries.values():
            if _is_changed(entry):
                self._note_changed(entry)
        self._entries.clear()
        self._outputs.clear()
        self._begins.append(self._layers[-1][1])
        self.segments.append(Segment())
        return self.segments[-2]

    def leave(self, tensor: torch.Tensor, sink: Sink) -> torch.Tensor:
        """Show `tensor`, which a layer gives out, as the following segment shall see it."""
        if is_sparse(tensor):  # no view of it can stand for it
            raise TypeError(
                f"a layer gives out a tensor of layout {tensor.layout} through which gradients go: let it give out its "
                "indices and values, and make the tensor in the model's own code"
            )
        shown = enter(tensor, sink)
        self._outputs[shown.grad_fn] = Extent.of(tensor)
        self._entered(shown, sink)
        return self.asides.note(shown, self._k)

    def leave_in_place(self, tensor: torch.Tensor, sink: Sink) -> None:
        """Do the same for a tensor that somebody holds already."""
        enter_in_place(tensor, sink)
        self._entered(tensor, sink)

    def _entered(self, tensor: torch.Tensor, sink: Sink) -> None:
        self.segments[-1].entries.append((get_gradient_edge(tensor), sink))

    def check(self, tail: GradientEdge | None, inside: Mapping[torch.Tensor, str]) -> None:
        """The forward is over: walk the graph of every segment, and count how often it reads each parameter.

        Args:
            tail: the loss, or None if it does not depend on any parameter.
            inside: parameter -> layer name, for parameters that only layers use.

        Raises:
            RuntimeError: a segment reads the inside of a layer, or an earlier segment past the function mode.
        """
        ends = [*self._begins[1:], sequence_number() + 1]
        for segment, begin, end in zip(self.segments, self._begins, ends, strict=True):
            starts = [edge for edge, _ in segment.roots]
            if segment is self.segments[-1] and tail is not None:
                starts.append(tail)
            found = reach(starts)
            segment.is_nested |= found.is_nested
            segment.uses.update(found.leaves)
            for leaf in segment.uses:
                if leaf in inside:
                    raise RuntimeError(self._reads_parameter(leaf, inside[leaf]))
            if found.first < begin or found.last >= end:
                strays = {node for node in found.nodes if not begin <= node._sequence_nr() < end}
                readers = [n for n in found.nodes - strays if any(behind in strays for behind, _ in n.next_functions)]
                self._refuse_stray(next(iter(strays)), {reader.name() for reader in readers})
            if strays := set(found.entries).difference([edge.node for edge, _ in segment.entries]):
                self._refuse_stray(strays.pop(), set())
            if self.autocasts:
                self.casts(found.cast)

    def _refuse_stray(self, node: Any, readers: Collection[str]) -> None:
        """Refuse a graph that reads a node of an earlier segment; autograd reads the base of a view anew when it was changed."""
        self._refuse_inside(node)
        if self._was_in_place or "AsStridedBackward0" in readers:
            raise RuntimeError(
                f"micro-batch {self._k}: the model's own code changes a tensor in place, after a layer call, of which it took a "
                f"view before ({node.name()} is behind it), so that the view's gradient would miss the change or the relay. "
                "Change a copy instead (x = x + y rather than x += y), or take the view anew"
            )
        raise RuntimeError(
            f"micro-batch {self._k}: {node.name()} in the model's own code reads a tensor from before a layer call in a way that "
            "PyTorch's function modes do not show (scripted code, an operation of an extension), so its gradient would miss "
            "the relay. Hand it a copy that was made after the layer call: x.clone()"
        )

    def casts(self, params: Iterable[torch.Tensor]) -> None:
        """A segment, or a visit of a layer, has read these parameters in another type, under an autocast that keeps casts.

        Raises:
            RuntimeError: not for the first time.
        """
        self._casts.update(params)
        if several := [param for param in params if self._casts[param] > 1]:
            raise RuntimeError(
                f"micro-batch {self._k}: a weight of shape {tuple(several[0].shape)} is used in several places under autocast, "
                "which casts it once and adds their gradients up in the lower precision; a relay would cast it for each. Use "
                "torch.autocast(..., cache_enabled=False), or RelayConfig(precision='bf16') instead of autocast"
            )

    def _refuse_inside(self, node: Any) -> None:
        number = node._sequence_nr()
        at = bisect_right(self._layers, number, key=lambda ran: ran[0]) - 1
        if at >= 0 and number < self._layers[at][1]:
            layer = self._layers[at][2]
            if self._relies:
                raise NewHabit(f"micro-batch {self._k}: the model reads a tensor from inside layer {layer}")
            raise RuntimeError(self._reads_inside(layer))

    def _reads_inside(self, layer: str) -> str:
        return (
            f"micro-batch {self._k}: the model reads a tensor from inside layer {layer} that the layer does not return, so its "
            "gradient would miss the relay. Return it from the layer's forward, or keep it on an attribute of a module of the "
            "layer"
        )

    def _reads_parameter(self, param: torch.Tensor, layer: str) -> str:
        return (
            f"micro-batch {self._k}: the loss, or the model's own code, reads a parameter of layer {layer} (shape "
            f"{tuple(param.shape)}) outside of the layer, as a penalty over model.parameters() does; at that time it is not on "
            "the device, and the gradient would miss the relay. Let the optimizer's weight_decay do it, or compute the penalty "
            "in the layer's forward, or in a forward hook on a module in it that returns the output, and keep it on an attribute "
            "of the layer (self.penalty = ...), where the loss may read it. AdaLoRA (peft) looks at gradients between "
            "steps besides: train a LoraConfig instead"
        )

    # -- the model's side ----------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = operation_of(func)
        if (kind.hooks or kind.asks_the_graph) and (node := args[0].grad_fn) is not None and is_entry(node):
            self._check_whole(args[0], node)
            self._segment_of(node).is_hooked |= kind.hooks
        is_first = len(self.segments) == 1  # nothing is older than the present segment
        if kind.asks_the_object or is_first or not torch.is_grad_enabled():
            return self.asides.note(func(*args, **kwargs), self._k)
        if kind.differentiates:
            self._refuse_backward(func)
        for target in (*args[: kind.is_in_place], *pytree.tree_leaves(kwargs.get("out"))):
            if isinstance(target, torch.Tensor):
                self._to_be_changed(target)
        return self._on_entries(func, args, kwargs)

    def _check_whole(self, tensor: torch.Tensor, node: Any) -> None:
        """Somebody wants to see, or change, the gradient of an entry: refuse one that gets a part of it here only."""
        if node.sink.is_part:
            raise RuntimeError(
                f"the model's own code puts a hook on what a layer gives out, or keeps (shape {tuple(tensor.shape)}), or asks "
                "for its grad_fn, and the layer reads it too: a hook would see only a part of its gradient. Put the hook on it "
                "in the layer's forward, or return a copy of it (x.clone())"
            )

    def _to_be_changed(self, tensor: torch.Tensor) -> None:
        """An operation is about to change `tensor` in place."""
        if self._is_older(tensor):
            self._enter_in_place(tensor)
        elif (output := self._outputs.get(tensor.grad_fn)) is not None:
            if any(output.overlaps(other) for other in self._outputs.values()):
                raise RuntimeError(_changes_view(tensor))
            if output.is_view:
                self._become_view(tensor, output.keeps_strides)

    def _become_view(self, tensor: torch.Tensor, keeps_strides: bool) -> None:
        """`tensor`, an entry, was a view in the layer: let it be one, before it is changed.

        Where a view is changed in place, autograd brings the gradient into the strides of its base before it goes on, and
        kernels round by strides.
        """
        if not keeps_strides or tensor._backward_hooks:
            raise RuntimeError(_changes_view(tensor))
        sink = tensor.grad_fn.sink  # type: ignore[union-attr]
        self.asides.forget(tensor)
        base = enter(tensor, sink)
        self._entered(base, sink)
        try:
            torch.utils.swap_tensors(tensor, base.view_as(base))
        except RuntimeError as error:
            raise RuntimeError(_changes_view(tensor)) from error
        self.asides.note(tensor, self._k)

    def _on_entries(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operation on entries in place of tensors from before the last layer call."""
        given: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        out = func(*self.hand(args, given), **self.hand(kwargs, given))
        if not given:
            return self.asides.note(out, self._k)
        for tensor, entry, version in given.values():
            if entry._version != version:
                name = getattr(func, "__name__", "an operation")
                raise RuntimeError(
                    f"{name} of the model's own code changes a tensor of shape {tuple(tensor.shape)} in place that was made "
                    "before a layer call. Change a copy instead (inplace=False, x = x + y, not x += y)"
                )
        if isinstance(out, torch.Tensor) and id(out) in (kept := {id(e): t for t, e, _ in given.values()}):
            return kept[id(out)]  # `x.contiguous()` of what is contiguous is x
        return self.asides.note(out, self._k)

    def applied(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run what is to be seen as one operation in the model's own code: a custom function, a compiled part."""
        if len(self.segments) == 1 or not torch.is_grad_enabled():
            return self.asides.note(function(*args, **kwargs), self._k)
        return self._on_entries(function, args, kwargs)

    def hand(self, tree: Any, given: dict[int, tuple[torch.Tensor, torch.Tensor, int]]) -> Any:
        """Return the arguments, with entries in place of tensors that were made before the last layer call."""
        kind = type(tree)
        if isinstance(tree, torch.Tensor):
            if not self._is_older(tree):
                return tree
            entry = self._entry(tree)
            given.setdefault(id(entry), (tree, entry, entry._version))
            return entry
        if kind is tuple or kind is list:
            new = [self.hand(item, given) for item in tree]
            return kind(new) if any(a is not b for a, b in zip(new, tree, strict=True)) else tree
        if kind is dict:
            return {name: self.hand(item, given) for name, item in tree.items()}
        return tree

    def _is_older(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has a history that ends before the present segment, or in a layer."""
        return tensor.requires_grad and (node := tensor.grad_fn) is not None and node._sequence_nr() < self._begins[-1]

    def _entry(self, tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.grad_fn, tensor.output_nr
        if key not in self._entries:
            sink = self.sink_of(tensor)
            self._entries[key] = entry = enter(tensor, sink)
            self._entered(entry, sink)
            self.asides.note(entry, self._k)
        elif not _is_changed(self._entries[key]):  # one that is knows it
            self._check_unchanged(tensor, tensor.grad_fn)
        return self._entries[key]

    def _enter_in_place(self, tensor: torch.Tensor) -> None:
        """`tensor` is about to be changed in place: from now on it belongs to the present segment."""
        sink = self.sink_of(tensor)
        self.asides.forget(tensor)
        self._was_in_place = True
        lies = Extent.of(tensor)
        if lies.is_view:
            self._note_changed(tensor)
        try:
            enter_in_place(tensor, sink)
        except RuntimeError as error:
            raise RuntimeError(_changes_view(tensor)) from error
        if lies.is_view:
            self._become_view(tensor, lies.keeps_strides)
        else:
            self._entered(tensor, sink)
            self.asides.note(tensor, self._k)

    def _check_unchanged(self, tensor: torch.Tensor, node: Any) -> None:
        """Refuse a tensor that was changed through a view after a layer call: its own graph does not know it."""
        entry = self._entries.get((node, tensor.output_nr))
        if self._changed and node._sequence_nr() < self._changed.get(key_of(tensor), 0):
            raise RuntimeError(_changes_view(tensor))
        if entry is not None and entry is not tensor and _is_changed(entry):
            raise RuntimeError(_changes_view(tensor))

    def _note_changed(self, tensor: torch.Tensor) -> None:
        self._was_in_place = True
        self._changed[key_of(tensor)] = sequence_number()

    def _refuse_backward(self, func: Any) -> None:
        raise RuntimeError(
            f"the model calls {func.__name__}() in its own code after a layer call: the graph before it is not there, layers "
            "run backward one at a time. Do it before the first layer, or within one layer"
        )


def _is_changed(entry: torch.Tensor) -> bool:
    """Whether an entry was changed in place since, through a view of it: what it stands for does not know of that."""
    return not is_entry(entry.grad_fn)


def _check_data(tensor: torch.Tensor, node: Any) -> None:
    """Refuse a tensor that was given other data: gradients for it have another form than those that its graph takes."""
    made = node._input_metadata[tensor.output_nr]
    if not tensor.is_nested and (made.dtype != tensor.dtype or made.shape != list(tensor.shape)):
        raise RuntimeError(
            f"the model assigns to .data of a tensor (made as {made.dtype} of shape {tuple(made.shape)}, now {tensor.dtype} of "
            f"shape {tuple(tensor.shape)}), and its gradient would be rounded otherwise than in plain training. Make another "
            "tensor instead (x = x.expand(...), x = x.double())"
        )


def _changes_view(tensor: torch.Tensor) -> str:
    return (
        f"the model's own code changes a view in place, after a layer call, of a tensor that others see (shape "
        f"{tuple(tensor.shape)}). Change a copy instead (x = x + y rather than x += y)"
    )


def crossing_in_force() -> Crossing | None:
    """Return the crossing of the micro-batch at work, while its shell code runs."""
    return next((mode for mode in function_modes() if isinstance(mode, Crossing)), None)


@contextmanager
def functions_seen() -> Iterator[None]:
    """Show the crossing in force custom autograd functions too, which PyTorch's function modes do not see."""
    before = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        crossing = crossing_in_force()
        if crossing is None:
            return before.__func__(cls, *args, **kwargs)
        return crossing.applied(partial(before.__func__, cls), args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]
