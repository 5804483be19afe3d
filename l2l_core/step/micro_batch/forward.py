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
from l2l_core.model import Ambient, call_of
from l2l_core.step.micro_batch.attributes import Place, holder_of
from l2l_core.step.micro_batch.call import Call
from l2l_core.step.micro_batch.crossing import Crossing
from l2l_core.step.micro_batch.keepers import RECOMPUTE, Keeper
from l2l_core.step.micro_batch.shared import Pass


class _Coroutine(greenlet.greenlet):
    forward: Forward


class Forward:
    """One micro-batch's forward.

    Invariant: between two `advance` calls it stands at a layer call (`waiting`), or it is `done` and has a `result`.
    """

    def __init__(
        self,
        k: int,
        bring: Callable[[], Any],
        task: Callable[[Any], Any],
        ambient: Ambient,
        run: Pass,
        crossing: Crossing,
    ) -> None:
        self.k = k
        self.crossing = crossing
        self.calls: list[Call] = []  # those that take part in backward, in order
        self.waiting: Call | None = None
        self.result: Any = None
        self.done = False
        self.keeper: Keeper = RECOMPUTE  # of the graph of the layer that runs next
        self._bring, self._task, self._ambient, self._run = bring, task, ambient, run
        self._greenlet = _Coroutine(self._body)
        self._greenlet.forward = self
        self._greenlet.gr_context = contextvars.copy_context()
        self._stop_shell: Callable[[], None] = lambda: None
        self._attributes: dict[Place, Any] = {}  # what this micro-batch, and layers for it, have set on modules

    def advance(self) -> None:
        """Run the waiting layer and the shell after it, up to the next layer call or the end."""
        self._run.order.begin_turn()
        Ambient.clear()
        try:
            with self._run.at_work.turn(self.k, SHELL), self._run.attributes.turn(self.k, self._attributes):
                self._greenlet.switch()
        finally:
            # The loop draws nothing by itself. What runs backward next, a loss, goes on in this micro-batch's stream as in core,
            # and the stage gives the caller's generators back.
            self._run.outside.put_all_but_random()
        self._run.order.end_turn(self.k)

    def cancel(self) -> None:
        """Unwind a forward that has not finished.

        Raises:
            RuntimeError: the model's code caught the exit and went on.
        """
        if not self._greenlet or self._greenlet.dead:
            return
        engine = Ambient.take()
        try:
            self._greenlet.throw()
        finally:
            engine.put()
        if not self._greenlet.dead:
            raise RuntimeError(
                f"the forward of micro-batch {self.k} swallowed its own end (a bare `except:` around a layer call?): "
                "catch Exception instead, GreenletExit must pass"
            )

    # -- inside the coroutine ------------------------------------------------------------------------------------------

    def _body(self) -> None:
        self._ambient.put()
        try:
            rows = self._bring()
            self._stop_shell = self._run.timed("shell", SHELL, self.k)
            self.result = self._task(rows)
            self._stop_shell()
            self._run.asides.guard()
            self.done = True
        finally:
            self._ambient = Ambient.take()

    def call(self, unit: Unit, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what a shadowed layer does: cut, give way, and run when it is this layer's turn."""
        if transforms_are_active():  # what is transformed would see others at work meanwhile
            raise RuntimeError(
                f"layer {unit.name} is called in a function under torch.vmap, or under jvp or grad of torch.func, where it "
                "cannot give way to other layers. Call it outside, and hand the function what it gives out"
            )
        for last in self.calls[-1:]:
            last.gives_way(self._run)  # it was not the last one after all
        self._run.check_call()
        with DisableTorchFunction():  # the crossing is for the model's own code
            self.waiting = call = Call.of(unit, real, self.k, args, kwargs, self.crossing)
            for item in call.inputs:
                self._run.stash.hold(item.tensor, self.k, "stash", "")
        check = self._run.expect_unchanged(unit)
        shell = self._give_way()
        self.waiting = None
        outputs = self._run_layer(call, shell, check)
        self._stop_shell = self._run.timed("shell", SHELL, self.k)
        return outputs

    def _give_way(self) -> Ambient:
        """Hand control to the engine until it resumes this micro-batch; returns the state that the shell stood in."""
        self._stop_shell()
        self._run.asides.guard()
        self._ambient = shell = Ambient.take()
        parent = self._greenlet.parent
        assert parent is not None
        try:
            parent.switch()
        except BaseException:
            shell.put()  # blocks that the model stands in unwind the state that they find
            raise
        return shell

    def _run_layer(self, call: Call, shell: Ambient, check: Callable[[], None]) -> Any:
        self.crossing.autocasts |= shell.autocasts and shell.autocast_cache
        call.ambient = shell.without(self.crossing, *(() if self._run.watches_layers else (self._run.watch,)))
        call.ambient.put()
        try:
            try:
                check()
                if shell.recomputes:
                    raise RuntimeError(_checkpointed(f"layer {call.unit.name} was called within a checkpoint"))
                outputs = call.first(self._run, self.keeper, self.crossing)
            finally:
                Ambient.clear()
            call.note(self._run, outputs)  # no mode is on: nobody sees it
            call.prove(self._run)
        finally:
            shell.put_all_but_random()  # the shell goes on in the stream where the layer has left it
        self._run.runs[call.unit] += 1
        self._attributes.update(call.attributes)
        for module, name in self._attributes:  # a layer that runs again may keep something else there, without a graph
            self._attributes[module, name] = holder_of(module, name).get(name)
        if shell.autocasts:
            torch.clear_autocast_cache()  # it would keep casted copies of evicted weights
        if call.needs_backward:
            self.calls.append(call)
        else:
            call.release()
        return outputs


class Shadows:
    """Shadows the layers' ``forward`` while a pass is on, or what stands for it where a layer is compiled.

    Invariant: after the block every module has the forward that it had before, whatever happened.
    """

    def __init__(self, units: Mapping[nn.Module, Unit]) -> None:
        self._units = units
        self._before: dict[nn.Module, tuple[str, Any]] = {}
        self.forwards: list[Forward] = []

    def __enter__(self) -> Shadows:
        for module, unit in self._units.items():
            called = call_of(module)
            self._before[module] = called, vars(module).get(called)
            setattr(module, called, self._shadow(unit, getattr(module, called)))
        return self

    def __exit__(self, *exc: object) -> None:
        for module, (called, own) in self._before.items():
            delattr(module, called)
            if own is not None:
                setattr(module, called, own)
        self._before.clear()

    def cancel(self) -> None:
        """Unwind every forward that has not finished."""
        for forward in self.forwards:
            forward.cancel()

    def _shadow(self, unit: Unit, real: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            current = greenlet.getcurrent()
            if isinstance(current, _Coroutine):
                return current.forward.call(unit, real, args, kwargs)
            raise RuntimeError(
                _checkpointed(
                    f"layer {unit.name} was called outside of the relay's forward. Is gradient checkpointing on?"
                )
            )

        return forward


def _checkpointed(what: str) -> str:
    return (
        f"{what}. The relay recomputes layers itself: call model.gradient_checkpointing_disable(), or remove "
        "torch.utils.checkpoint"
    )
