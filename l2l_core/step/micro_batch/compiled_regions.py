"""Compiled regions of a model: during a pass they run with the engine's hooks removed.

Dynamo traces all that is active when compiled code is called: function modes, global hooks, descriptors on classes. With the
engine's, it would trace the engine, and compile other code than plain training or none. So each compiled region is called through
a wrapper that removes them, and afterwards reports inputs and outputs, changed attributes and buffers, and tensors that autograd
has saved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from l2l_core._torch import dispatch_modes, dynamo_is_imported, optimized_module, pytree, wrap_dynamo
from l2l_core.eps.blocks import ModuleBuffers, Unit
from l2l_core.model import call_attribute, compiled_modules, function_modes_without, is_compile_wrapper
from l2l_core.step.graph import sequence_number, walk_graph
from l2l_core.step.guards import InstancePatch, temporarily
from l2l_core.step.micro_batch.graph_segmenter import GraphSegmenter, active_segmenter, run_as_operation
from l2l_core.step.micro_batch.step_context import StepContext
from l2l_core.step.traffic import StashMode


class CompiledRegionGuard:
    """Wraps the compiled regions of a model. Use as a context manager around a pass.

    Invariant: after the block every module has its original entry point. While a region runs, none inside it is wrapped.
    """

    def __init__(self, model: nn.Module, layers: Iterable[Unit], ctx: StepContext) -> None:
        self._ctx = ctx
        self._regions = compiled_modules(model)
        self._in_layers = {id(module) for unit in layers for module in unit.module.modules()}
        self._patches: dict[int, InstancePatch] = {}  # of entry points, by id of a region
        self._undo = ExitStack()

    def __enter__(self) -> CompiledRegionGuard:
        self._undo.enter_context(_exclude_other_passes(bool(self._regions)))
        if dynamo_is_imported():
            _hide_engine()
        self._undo.enter_context(_plain_calls(self._regions))
        for region in self._regions:
            entry = call_attribute(region)
            modules = list(region.modules())
            buffers = None if id(region) in self._in_layers else ModuleBuffers(modules)
            run = partial(self._call_region, modules, buffers, getattr(region, entry))
            self._patches[id(region)] = patch = InstancePatch(region, entry, run)
            self._undo.callback(patch.undo)
            patch.apply()
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    # -- one call of a region ------------------------------------------------------------------------------------------

    def _call_region(
        self,
        modules: Sequence[nn.Module],
        buffers: ModuleBuffers | None,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return run_as_operation(partial(self._run_region, modules, buffers, original), args, kwargs)

    def _run_region(
        self,
        modules: Sequence[nn.Module],
        buffers: ModuleBuffers | None,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        ctx = self._ctx
        # No mode observes reads in compiled code, so all that it may read is fetched and unguarded before.
        ctx.guard.check_reads(pytree.tree_leaves((args, kwargs)))
        # Tensors of other micro-batches are skipped: the region may be about to replace them.
        ctx.guard.check_reads((value for m in modules for value in vars(m).values()), ctx.current_turn.k)
        began = sequence_number()
        with self._disable_hooks(modules), ctx.attributes.record_compiled_region(modules):
            before = buffers.copy() if buffers else []
            out = original(*args, **kwargs)
            if buffers:
                after = before if buffers.equal(before) else buffers.copy()
                ctx.buffer_order.record_compiled_region(ctx.current_turn.k, buffers, before, after)
        self._track_outputs(out, began)
        return out

    @contextmanager
    def _disable_hooks(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        inner = [patch for m in modules if (patch := self._patches.get(id(m))) is not None and patch.is_applied]
        for patch in inner:
            patch.undo()
        try:
            with (
                self._ctx.side_outputs.paused(),
                self._ctx.current_turn.enter_compiled_region(),
                function_modes_without(GraphSegmenter),
            ):
                yield
        finally:
            for patch in inner:
                patch.apply()

    def _track_outputs(self, out: Any, began: int) -> None:
        """Track a region's outputs, and the tensors that autograd has saved in it."""
        tensors = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self._track(tensors)
        edges = [get_gradient_edge(tensor) for tensor in tensors if tensor.grad_fn is not None]
        for node in walk_graph(edges).nodes:
            if type(node).__name__ == "CompiledFunctionBackward" and node._sequence_nr() >= began:
                saved = [tensor.detach() for tensor in node.saved_tensors]  # the originals would keep the node alive
                self._track(saved)
                node.register_prehook(partial(self._restore_saved, saved))

    def _track(self, tensors: Iterable[torch.Tensor]) -> None:
        is_not_stash = self._ctx.stash.tracker.is_not_stash
        self._ctx.stash_mode.track_outputs([tensor for tensor in tensors if not is_not_stash(tensor)], {})

    def _restore_saved(self, saved: Sequence[torch.Tensor], _grads: Any) -> None:
        """Fetch saved tensors before a compiled backward reads them, since no mode observes it."""
        for tensor in saved:
            self._ctx.stash.restore_tensor(tensor)


@contextmanager
def _plain_calls(regions: Sequence[nn.Module]) -> Iterator[None]:
    """Call `torch.compile` wrappers among these like any other module.

    Their own `__call__` warns about global hooks, and sets a global flag during the call, which a suspended forward must not.
    """
    if not any(is_compile_wrapper(region) for region in regions):
        yield
        return
    cls: Any = optimized_module()
    ids = {id(region) for region in regions}
    before = cls.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (nn.Module.__call__ if id(self) in ids else before)(self, *args, **kwargs)

    with temporarily(cls, "__call__", call):
        yield


@cache
def _hide_engine() -> None:
    """Make Dynamo skip the engine's frames, and refuse compiled functions in shell code."""
    wrap_dynamo("l2l_core.step", _refuse_compiled_function)


def _refuse_compiled_function(compiler: Any) -> None:
    """Refuse compiled code that is about to run in shell code of this thread outside of a compiled region."""
    if not callable(compiler):  # nothing is compiled: called for each operation under the stash mode
        return
    modes = [mode for mode in dispatch_modes() if isinstance(mode, StashMode)]
    if active_segmenter() is not None or any(mode.is_active_in_shell for mode in modes):
        raise RuntimeError(
            "the model's own code calls a compiled function (torch.compile on a function) outside of its layers: it would be "
            "compiled together with the relay's code around each operation. Make it the forward of a module of the model and "
            "compile that, call it within a layer, or leave it uncompiled"
        )


_lock = threading.Lock()
_running_passes: list[tuple[int, bool]] = []  # (thread, whether the model has compiled regions)


@contextmanager
def _exclude_other_passes(has_regions: bool) -> Iterator[None]:
    """Refuse to run beside a pass in another thread: a region removes hooks of the whole process.

    Raises:
        RuntimeError: a pass runs in another thread, and one of the two models has compiled regions.
    """
    own = threading.get_ident(), has_regions
    with _lock:
        if any(thread != own[0] and (has_regions or other_has) for thread, other_has in _running_passes):
            raise RuntimeError(
                "another relay is in the middle of a step in another thread, and one of the two models has compiled parts, which "
                "run while the hooks of all relays in the process are removed. Run the steps one after the other, or use two "
                "processes"
            )
        _running_passes.append(own)
    try:
        yield
    finally:
        with _lock:
            _running_passes.remove(own)
