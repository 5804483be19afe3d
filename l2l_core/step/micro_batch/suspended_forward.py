"""Forwards that pause: every micro-batch runs the model's own ``forward`` as a coroutine that stops at each layer call.

While a pass is on, the layers' ``forward`` is shadowed on the instance (the modules stay where they are, so hooks that
the model installs keep working). Calling a shadow hands control to the engine; when the engine has loaded the layer it
resumes the coroutine, and the layer runs there, inside the micro-batch's own frames, context variables and hooks.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from typing import Any

import greenlet
import torch
from torch import nn

from l2l_core._torch import DisableTorchFunction, transforms_are_active
from l2l_core.eps.blocks import SHELL, Unit
from l2l_core.model import ThreadState, call_attribute
from l2l_core.step.micro_batch.activation_policy import RECOMPUTE, ActivationPolicy
from l2l_core.step.micro_batch.graph_segmenter import GraphSegmenter
from l2l_core.step.micro_batch.layer_call import LayerCall
from l2l_core.step.micro_batch.module_attributes import AttributeKey, attribute_dict
from l2l_core.step.micro_batch.step_context import StepContext


class _Coroutine(greenlet.greenlet):
    forward: SuspendedForward


class SuspendedForward:
    """One micro-batch's forward.

    Invariant: between two `advance` calls it stands at a layer call (`waiting`), or it is `done` and has a `result`.
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
        self.calls: list[LayerCall] = []  # those that take part in backward, in order
        self.waiting_call: LayerCall | None = None
        self.result: Any = None
        self.done = False
        self.policy: ActivationPolicy = RECOMPUTE  # of the graph of the layer that runs next
        self._load_rows, self._task, self._thread_state, self._ctx = load_rows, task, thread_state, ctx
        self._greenlet = _Coroutine(self._body)
        self._greenlet.forward = self
        self._greenlet.gr_context = contextvars.copy_context()
        self._end_shell_event: Callable[[], None] = lambda: None
        self._attribute_values: dict[
            AttributeKey, Any
        ] = {}  # what this micro-batch, and layers for it, have set on modules

    def resume(self) -> None:
        """Run the waiting layer and the shell after it, up to the next layer call or the end."""
        self._ctx.buffer_order.begin_turn()
        ThreadState.clear()
        try:
            with (
                self._ctx.current_turn.activate(self.k, SHELL),
                self._ctx.attributes.turn(self.k, self._attribute_values),
            ):
                self._greenlet.switch()
        finally:
            # The loop draws nothing by itself. What runs backward next, a loss, goes on in this micro-batch's stream as in core,
            # and the stage gives the caller's generators back.
            self._ctx.outer_state.restore_except_random()
        self._ctx.buffer_order.end_turn(self.k)

    def cancel(self) -> None:
        """Unwind a forward that has not finished.

        Raises:
            RuntimeError: the model's code caught the exit and went on.
        """
        if not self._greenlet or self._greenlet.dead:
            return
        engine = ThreadState.take()
        try:
            self._greenlet.throw()
        finally:
            engine.restore()
        if not self._greenlet.dead:
            raise RuntimeError(
                f"the forward of micro-batch {self.k} swallowed its own end (a bare `except:` around a layer call?): "
                "catch Exception instead, GreenletExit must pass"
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

    def call_layer(
        self, unit: Unit, layer_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do what a shadowed layer does: cut, give way, and run when it is this layer's turn."""
        if transforms_are_active():  # what is transformed would see others at work meanwhile
            raise RuntimeError(
                f"layer {unit.name} is called in a function under torch.vmap, or under jvp or grad of torch.func, where it "
                "cannot give way to other layers. Call it outside, and hand the function what it gives out"
            )
        for last in self.calls[-1:]:
            last.suspend(self._ctx)  # it was not the last one after all
        self._ctx.check_call()
        with DisableTorchFunction():  # the crossing is for the model's own code
            self.waiting_call = call = LayerCall.of(unit, layer_forward, self.k, args, kwargs, self.segmenter)
            for item in call.inputs:
                self._ctx.stash.track(item.tensor, self.k, "stash", "")
        check = self._ctx.make_attribute_check(unit)
        shell = self._suspend()
        self.waiting_call = None
        outputs = self._run_layer(call, shell, check)
        self._end_shell_event = self._ctx.time_event("shell", SHELL, self.k)
        return outputs

    def _suspend(self) -> ThreadState:
        """Hand control to the engine until it resumes this micro-batch; returns the state that the shell stood in."""
        self._end_shell_event()
        self._ctx.guard.guard_all()
        self._thread_state = shell = ThreadState.take()
        parent = self._greenlet.parent
        assert parent is not None
        try:
            parent.switch()
        except BaseException:
            shell.restore()  # blocks that the model stands in unwind the state that they find
            raise
        return shell

    def _run_layer(self, call: LayerCall, shell_state: ThreadState, check: Callable[[], None]) -> Any:
        self.segmenter.has_autocast |= shell_state.has_autocast and shell_state.autocast_cache
        call.thread_state = shell_state.without_modes(
            self.segmenter, *(() if self._ctx.mode_in_layers else (self._ctx.stash_mode,))
        )
        call.thread_state.restore()
        try:
            try:
                check()
                if shell_state.in_checkpoint:
                    raise RuntimeError(_checkpoint_message(f"layer {call.unit.name} was called within a checkpoint"))
                outputs = call.run_first(self._ctx, self.policy, self.segmenter)
            finally:
                ThreadState.clear()
            call.record_first_run(self._ctx, outputs)  # no mode is on: nobody sees it
            call.check_recompute(self._ctx)
        finally:
            shell_state.restore_except_random()  # the shell goes on in the stream where the layer has left it
        self._ctx.run_counts[call.unit] += 1
        self._attribute_values.update(call.side_attributes)
        for (
            module,
            name,
        ) in self._attribute_values:  # a layer that runs again may keep something else there, without a graph
            self._attribute_values[module, name] = attribute_dict(module, name).get(name)
        if shell_state.has_autocast:
            torch.clear_autocast_cache()  # it would keep casted copies of evicted weights
        if call.needs_backward:
            self.calls.append(call)
        else:
            call.release()
        return outputs


class LayerPatches:
    """Shadows the layers' ``forward`` while a pass is on, or what stands for it where a layer is compiled.

    Invariant: after the block every module has the forward that it had before, whatever happened.
    """

    def __init__(self, units: Mapping[nn.Module, Unit]) -> None:
        self._units = units
        self._originals: dict[nn.Module, tuple[str, Any]] = {}
        self.forwards: list[SuspendedForward] = []

    def __enter__(self) -> LayerPatches:
        for module, unit in self._units.items():
            called = call_attribute(module)
            self._originals[module] = called, vars(module).get(called)
            setattr(module, called, self._patched_forward(unit, getattr(module, called)))
        return self

    def __exit__(self, *exc: object) -> None:
        for module, (called, own) in self._originals.items():
            delattr(module, called)
            if own is not None:
                setattr(module, called, own)
        self._originals.clear()

    def cancel(self) -> None:
        """Unwind every forward that has not finished."""
        for forward in self.forwards:
            forward.cancel()

    def _patched_forward(self, unit: Unit, layer_forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            current = greenlet.getcurrent()
            if isinstance(current, _Coroutine):
                return current.forward.call_layer(unit, layer_forward, args, kwargs)
            raise RuntimeError(
                _checkpoint_message(
                    f"layer {unit.name} was called outside of the relay's forward. Is gradient checkpointing on?"
                )
            )

        return forward


def _checkpoint_message(what: str) -> str:
    return (
        f"{what}. The relay recomputes layers itself: call model.gradient_checkpointing_disable(), or remove "
        "torch.utils.checkpoint"
    )
