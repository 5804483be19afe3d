"""Suspended forwards: each micro-batch runs the model's own ``forward`` as a coroutine that pauses at every layer call.

During a pass the layers' ``forward`` is patched on the instance; the modules stay in place, so hooks that the model installs keep
working. A call of a patched layer switches to the engine. When the engine has loaded the layer it resumes the coroutine, and the
layer runs there, with the micro-batch's own frames, context variables and hooks.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import greenlet
import torch

from l2l_core._torch import DisableTorchFunction, transforms_are_active
from l2l_core.eps.blocks import SHELL, Unit
from l2l_core.model import ThreadState, call_attribute
from l2l_core.step.guards import AttributeKey, InstancePatch, attribute_dict
from l2l_core.step.micro_batch.arguments import Arguments
from l2l_core.step.micro_batch.graph_segmenter import GraphSegmenter
from l2l_core.step.micro_batch.layer_call import LayerCall
from l2l_core.step.micro_batch.step_context import StepContext


class _Coroutine(greenlet.greenlet):
    forward: SuspendedForward


class SuspendedForward:
    """The forward of one micro-batch.

    Invariant: between two `resume` calls it is paused at a layer call (`waiting_call`), or it is `done` and has a `result`.

    Attributes:
        calls: the calls that take part in backward, in order.
        called: the layers called so far, also those without a gradient, in order.
    """

    def __init__(
        self,
        k: int,
        load_rows: Callable[[], Any],
        task: Callable[[Any], Any],
        thread_state: ThreadState,
        ctx: StepContext,
        segmenter: GraphSegmenter,
    ) -> None:
        self.k = k
        self.segmenter = segmenter
        self.calls: list[LayerCall] = []
        self.called: list[Unit] = []
        self.waiting_call: LayerCall | None = None
        self.result: Any = None
        self.done = False
        self._load_rows, self._task, self._thread_state, self._ctx = load_rows, task, thread_state, ctx
        self._greenlet = _Coroutine(self._body)
        self._greenlet.forward = self
        self._greenlet.gr_context = contextvars.copy_context()
        self._end_shell_event: Callable[[], None] = lambda: None
        self._attribute_values: dict[AttributeKey, Any] = {}  # set by this micro-batch, and by layers that ran for it

    def resume(self) -> None:
        """Run the waiting layer and the shell code after it, up to the next layer call or the end."""
        ctx = self._ctx
        ctx.buffer_order.begin_turn()
        ctx.numpy_draws.begin_turn()
        ThreadState.clear()
        try:
            with ctx.current_turn.activate(self.k, SHELL), ctx.attributes.turn(self.k, self._attribute_values):
                self._greenlet.switch()
        finally:
            # Random generators are left as they are: a backward that follows uses this micro-batch's stream as in core. The
            # runtime restores the caller's.
            ctx.outer_state.restore_except_random()
        ctx.buffer_order.end_turn(self.k)
        ctx.numpy_draws.end_turn(self.k)

    @contextmanager
    def resume_after_end(self, k: int) -> Iterator[None]:
        """Run the block as code that follows the forward, in turn `k`: with its random stream and attributes."""
        ctx = self._ctx
        ThreadState.clear()
        self._thread_state.without_modes(self.segmenter, ctx.stash_mode).restore()
        try:
            with ctx.current_turn.activate(k, SHELL), ctx.attributes.turn(k, self._attribute_values):
                yield
        finally:
            ThreadState.clear()
            ctx.outer_state.restore_except_random()

    def cancel(self) -> None:
        """Unwind a forward that has not finished; raise RuntimeError if the model's code catches the exit."""
        if self._greenlet.dead:
            return
        if not self._greenlet:  # never started
            coroutine: Any = self._greenlet
            del coroutine.run, coroutine.forward  # reference cycles that would hold the model
            return
        engine = ThreadState.take()
        try:
            self._greenlet.throw()
        finally:
            engine.restore()
        if not self._greenlet.dead:
            raise RuntimeError(
                f"the forward of micro-batch {self.k} caught GreenletExit, which must end it (a bare `except:` around a layer "
                "call?). Catch Exception instead"
            )

    # -- inside the coroutine ------------------------------------------------------------------------------------------

    def _body(self) -> None:
        self._thread_state.restore()
        try:
            rows = self._load_rows()
            self._end_shell_event = self._ctx.time_event("shell", SHELL, self.k)
            self.result = self._task(rows)
            self._end_shell_event()
            self._ctx.guard.guard_all()
            self.done = True
        finally:
            self._thread_state = ThreadState.take()
            del self._greenlet.forward  # a reference cycle that would hold the model

    def call_layer(
        self, unit: Unit, layer_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Cut the graph at the arguments, suspend the micro-batch, and run the layer when it is resumed."""
        if transforms_are_active():  # other micro-batches would run inside the transform
            raise RuntimeError(
                f"layer {unit.name} is called in a function under torch.vmap, or under jvp or grad of torch.func, where the "
                "micro-batch cannot be suspended. Call it outside, and pass its outputs to the function"
            )
        for last in self.calls[-1:]:
            last.suspend(self._ctx)  # it was not the last one
        self._ctx.check_call()
        self.called.append(unit)
        with DisableTorchFunction():  # hides the engine's operations from the segmenter
            arguments = Arguments.of(unit.name, args, kwargs, self.segmenter)
            self._ctx.guard.check_arguments(arguments.tensors, self.k)
            self.waiting_call = call = LayerCall(unit, layer_forward, self.k, arguments)
            for tensor, _ in arguments.inputs:
                self._ctx.stash.track(tensor, self.k, "stash", "")
        check = self._ctx.make_attribute_check(unit)
        shell_state = self._suspend()
        self.waiting_call = None
        outputs = self._run_layer(call, shell_state, check)
        self._end_shell_event = self._ctx.time_event("shell", SHELL, self.k)
        return outputs

    def _suspend(self) -> ThreadState:
        """Switch to the engine until it resumes this micro-batch; return the thread state of the shell code."""
        self._end_shell_event()
        self._ctx.guard.guard_all()
        self._thread_state = shell_state = ThreadState.take()
        parent = self._greenlet.parent
        assert parent is not None
        try:
            parent.switch()
        except BaseException:
            shell_state.restore()  # `with` blocks of the model exit from the state that they entered
            raise
        return shell_state

    def _run_layer(self, call: LayerCall, shell_state: ThreadState, check: Callable[[], None]) -> Any:
        self.segmenter.has_autocast |= shell_state.has_autocast and shell_state.autocast_cache
        hidden_modes = [self.segmenter] if self._ctx.mode_in_layers else [self.segmenter, self._ctx.stash_mode]
        call.thread_state = shell_state.without_modes(*hidden_modes)
        call.thread_state.restore()
        try:
            try:
                check()
                if shell_state.in_checkpoint:
                    raise RuntimeError(_checkpoint_message(f"layer {call.unit.name} was called within a checkpoint"))
                outputs = call.run_first(self._ctx, self.segmenter)
            finally:
                ThreadState.clear()
            call.record_first_run(self._ctx, outputs)  # while no mode is on
            call.check_recompute(self._ctx)
        finally:
            shell_state.restore_except_random()  # shell code continues the layer's random stream
        self._ctx.run_counts[call.unit] += 1
        self._attribute_values.update(call.side_attributes)
        for key, tensor in self._ctx.attributes.take_kept_tensors().items():
            self._attribute_values[key] = tensor
            self._ctx.stash.track(tensor, self.k, "activations", "", fresh=True)
        # A recompute may leave another value on an attribute, without a graph.
        for key in self._attribute_values:
            self._attribute_values[key] = attribute_dict(key.module, key.name).get(key.name)
        if shell_state.has_autocast:
            torch.clear_autocast_cache()  # it would keep casts of evicted weights
        if call.needs_backward:
            self.calls.append(call)
        else:
            call.release()
        return outputs


@contextmanager
def patch_layers(
    units: Sequence[Unit], wrap: Callable[[Unit, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Wrap the layers' ``forward`` in the block, or the attribute that is called where a layer is compiled."""
    with ExitStack() as undo:
        for unit in units:
            name = call_attribute(unit.module)
            patch = InstancePatch(unit.module, name, wrap(unit, getattr(unit.module, name)))
            undo.callback(patch.undo)
            patch.apply()
        yield


def suspending_forward(unit: Unit, layer_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that suspends its micro-batch, and runs the layer when it is resumed."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        current = greenlet.getcurrent()
        if isinstance(current, _Coroutine):
            return current.forward.call_layer(unit, layer_forward, args, kwargs)
        raise RuntimeError(
            f"layer {unit.name} was called outside of the relay's forward: by gradient checkpointing (the relay recomputes "
            "layers itself: call model.gradient_checkpointing_disable(), or remove torch.utils.checkpoint); by a loss "
            "that runs the model again in backward (GradCache, Cached...Loss: use the loss without a cache, as "
            "MultipleNegativesRankingLoss, since micro-batches keep its memory low); or by code that calls the model during a "
            "step, in another thread or in a hook: let it wait for the end of the step"
        )

    return forward


def _checkpoint_message(cause: str) -> str:
    return (
        f"{cause}. The relay recomputes layers itself: call model.gradient_checkpointing_disable(), or remove "
        "torch.utils.checkpoint"
    )
