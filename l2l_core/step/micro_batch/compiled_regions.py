"""How compiled parts of a model run in a pass: out of the engine's sight.

Dynamo traces whatever is in force when a compiled part is called: function modes, global hooks, descriptors on classes. If it
saw the engine's, it would trace the engine, compile other code than plain training does, or none. So every compiled part is
entered through a wrapper. Around it the engine's means are put away, and what they would have seen is told in one
piece: which tensors go in and come out, which attributes and buffers have changed, and what autograd has saved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from l2l_core._torch import dispatch_modes, dynamo_is_imported, optimized_module, pytree, wrap_dynamo
from l2l_core.eps.blocks import ModuleBuffers
from l2l_core.model import compiled_attribute, compiled_modules, function_modes_without, is_compile_wrapper, modules_of
from l2l_core.step.graph import BufferOrder, TensorGuard, sequence_number
from l2l_core.step.micro_batch.graph_segmenter import GraphSegmenter, active_segmenter
from l2l_core.step.micro_batch.module_attributes import ModuleAttributes
from l2l_core.step.micro_batch.module_hooks import SideOutputs
from l2l_core.step.traffic import StashMode


class CompiledRegionGuard:
    """Lets the compiled parts of a model run out of the engine's sight. Use as a context manager around a pass.

    Invariant: after the block every module has the entry that it had before. While a compiled part runs, no wrapper stands in it.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        stash_mode: StashMode,
        guard: TensorGuard,
        side_outputs: SideOutputs,
        attributes: ModuleAttributes,
        buffer_order: BufferOrder,
    ) -> None:
        self._stash_mode, self._stash, self._current_turn = stash_mode, stash_mode.stash, stash_mode.current_turn
        self._guard, self._side_outputs = guard, side_outputs
        self._attributes, self._buffer_order = attributes, buffer_order
        self._regions = {part: modules_of(part) for part in compiled_modules(model)}
        inside = {module for layer in layers for module in modules_of(layer)}
        self._buffers = {
            p: ModuleBuffers(modules) for p, modules in self._regions.items() if p not in inside
        }  # of the shell
        self._originals: dict[nn.Module, tuple[str, Any]] = {}  # entry, and what the instance had there
        self._wrapped: dict[nn.Module, Any] = {}
        self._undo = ExitStack()

    def __enter__(self) -> CompiledRegionGuard:
        self._undo.enter_context(_exclude_other_passes(bool(self._regions)))
        if dynamo_is_imported():
            _hide_engine()
        if self._regions:
            self._undo.enter_context(_plain_calls(self._regions))
        for part in self._regions:
            entry = compiled_attribute(part)
            assert entry is not None
            self._originals[part] = entry, vars(part).get(entry)
            self._wrapped[part] = partial(self._call_region, part, getattr(part, entry))
            self._wrap(part)
        return self

    def __exit__(self, *exc: object) -> None:
        for part in self._originals:
            self._unwrap(part)
        self._undo.close()

    def _wrap(self, part: nn.Module) -> None:
        vars(part)[self._originals[part][0]] = self._wrapped[part]

    def _unwrap(self, part: nn.Module) -> None:
        entry, own = self._originals[part]
        if own is None:
            vars(part).pop(entry, None)
        else:
            vars(part)[entry] = own

    # -- one call of a compiled part -----------------------------------------------------------------------------------

    def _call_region(self, part: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        crossing = active_segmenter()
        run = partial(self._run_region, part, original)
        if crossing is None:
            return run(*args, **kwargs)
        return crossing.run_as_operation(run, args, kwargs)

    def _run_region(self, part: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        modules = self._regions[part]
        self._restore_reads(pytree.tree_leaves((args, kwargs)), (value for m in modules for value in vars(m).values()))
        began = sequence_number()
        with self._disable_hooks(modules), self._record_buffers(part), self._attributes.record_compiled_region(modules):
            out = original(*args, **kwargs)
        self._track_outputs(out, began)
        return out

    def _restore_reads(self, given: Iterable[Any], attributes: Iterable[Any]) -> None:
        """Have what the part reads, or may read, on the device and off guard: no mode sees it in compiled code."""
        self._guard.check_reads(given)
        self._guard.check_reads(attributes, self._current_turn.k)  # another micro-batch's may be about to be replaced

    @contextmanager
    def _disable_hooks(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        inner = [module for module in modules if module in self._originals and self._is_wrapped(module)]
        for part in inner:
            self._unwrap(part)
        try:
            with (
                self._side_outputs.paused(),
                self._current_turn.enter_compiled_region(),
                function_modes_without(GraphSegmenter),
            ):
                yield
        finally:
            for part in inner:
                self._wrap(part)

    def _is_wrapped(self, part: nn.Module) -> bool:
        return vars(part).get(self._originals[part][0]) is self._wrapped[part]

    @contextmanager
    def _record_buffers(self, part: nn.Module) -> Iterator[None]:
        """Tell the order of buffers what a part has done in the block to those of the shell."""
        buffers = self._buffers.get(part)
        if not buffers:
            yield
            return
        before = buffers.copy()
        yield
        after = before if buffers.equal(before) else buffers.copy()
        self._buffer_order.record_compiled_region(self._current_turn.k, buffers, before, after)

    def _track_outputs(self, out: Any, began: int) -> None:
        """Keep what the part gives out, and what autograd has saved in it, like that of any other code."""
        tensors = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self._track(tensors)
        edges = [get_gradient_edge(tensor) for tensor in tensors if tensor.grad_fn is not None]
        for node in _nodes_since(edges, began):
            if type(node).__name__ == "CompiledFunctionBackward":
                saved = [
                    tensor.detach() for tensor in node.saved_tensors
                ]  # not the node's own: they would keep it alive
                self._track(saved)
                node.register_prehook(partial(self._restore_saved, saved))

    def _track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note what was there when the part had run; some are weights and other tensors of the model."""
        self._stash_mode.track_outputs([tensor for tensor in tensors if not self._stash.tracker.is_exempt(tensor)], {})

    def _restore_saved(self, saved: Sequence[torch.Tensor], _grads: Any) -> None:
        """Compiled backward is about to read what it has saved, which no mode sees."""
        for tensor in saved:
            self._stash.restore_tensor(tensor)


def _nodes_since(edges: Iterable[GradientEdge], began: int) -> set[Any]:
    """Find the graph nodes behind some edges that were made since a sequence number."""
    nodes, todo = set(), [edge.node for edge in edges]
    while todo:
        node = todo.pop()
        if node not in nodes and node._sequence_nr() >= began:
            nodes.add(node)
            todo += [parent for parent, _ in node.next_functions if parent is not None]
    return nodes


@contextmanager
def _plain_calls(parts: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Call wrappers of `torch.compile` among these like any other module.

    Their own `__call__` warns of global hooks, and notes globally that one is at work, which none is that has given way.
    """
    if not any(is_compile_wrapper(part) for part in parts):
        yield
        return
    cls = optimized_module()
    before = vars(cls)["__call__"]

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (nn.Module.__call__ if self in parts else before)(self, *args, **kwargs)

    cls.__call__ = call
    try:
        yield
    finally:
        cls.__call__ = before


@cache
def _hide_engine() -> None:
    """Let Dynamo take no frame of the engine for the model's, and run nothing by itself in shell code."""

    def around(before: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def callback(compiler: Any) -> Any:
            _refuse_compiled_function(compiler)  # compiled code is about to run
            return before(compiler)

        return callback

    wrap_dynamo(__package__, around)


def _refuse_compiled_function(compiler: Any) -> None:
    """Compiled code is about to run in this thread: refuse it in shell code, unless it is a part, which was entered properly."""
    if not callable(compiler):  # nothing is: each operation that the watch sees comes by here
        return
    watches = [mode for mode in dispatch_modes() if isinstance(mode, StashMode)]
    if active_segmenter() is not None or any(watch.is_active_in_shell for watch in watches):
        raise RuntimeError(
            "the model's own code calls a compiled function (torch.compile on a function) outside of its layers: it would be "
            "compiled together with what the relay does around each operation. Make it the forward of a module of the model and "
            "compile that, call it within a layer, or leave it as it is written"
        )


_lock = threading.Lock()
_running_passes: list[tuple[int, bool]] = []  # under way: thread, and whether compiled parts are in the model


@contextmanager
def _exclude_other_passes(has_parts: bool) -> Iterator[None]:
    """What is put away around a compiled part is the process's: nobody else's pass may count on it meanwhile.

    Raises:
        RuntimeError: a pass is under way in another thread, and one of the two has compiled parts.
    """
    own = threading.get_ident(), has_parts
    with _lock:
        if any(thread != own[0] and (has_parts or other_has) for thread, other_has in _running_passes):
            raise RuntimeError(
                "another relay is in the middle of a step in another thread, and one of the two models has compiled parts, which "
                "run while the engine's hooks are put away, everybody's. Let one wait for the other, or use two processes"
            )
        _running_passes.append(own)
    try:
        yield
    finally:
        with _lock:
            _running_passes.remove(own)
