"""A step in which nothing gives way: one micro-batch after another through all layers and back, as in plain training.

    k = 0     shell, forward 0 .. L-1, loss, backward L-1 .. 0, shell
    k = 1     ...                      gradients gather where those of k = 0 are
    k = K-1   ...                      as backward leaves a layer, its gradient is pushed and the EPS updates it

All weights are in slots of their own, and autograd has the whole graph of a micro-batch, so that no call is cut, paused or run
again. What is left of the relay is what surrounds the arithmetic: the EPS has masters and optimizer, loads and pushes overlap
with compute, every event is traced and every byte is booked. In core is the limit case of a relay.

Backward is one run of autograd over all layers. Where it stands is told by hooks on the nodes that made what a layer gave out
and was given. Of the nodes that are ready autograd runs the youngest, so one that was made before a layer runs when all of that
layer's are done: then the layer's gradient is whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from l2l_core._torch import temporarily_clear_interpreter_stack
from l2l_core.devices import NoTorchModes
from l2l_core.eps import LayerStore, NonFiniteError
from l2l_core.eps.blocks import SHELL, ModuleBuffers, Stamp, Unit, check_stamps, refuse_cached, stamps_of
from l2l_core.model import ThreadState, call_attribute
from l2l_core.step.early_reads import EarlyReadMode
from l2l_core.step.graph import BufferOrder, run_backward
from l2l_core.step.micro_batch import Influence, flatten
from l2l_core.step.pass_runtime import PassRuntime, PassTask
from l2l_core.step.step_checks import nonfinite_message, refuse_frozen_model
from l2l_core.step.traffic import NO_MICRO_BATCH, Gradient, time_event


class _Call:
    """A layer's part in one micro-batch; `index` is its place among those of that micro-batch."""

    __slots__ = ("index", "unit")

    def __init__(self, unit: Unit, index: int) -> None:
        self.unit, self.index = unit, index


class DepthFirstRuntime(PassRuntime):
    """The step, set up. Use as a context manager.

    Attributes:
        way: the layers in the order in which the first micro-batch has called them.
        influence: of the layers, as far as they have run.
    """

    def _set_up(self) -> None:
        super()._set_up()
        assert len(self.prefetch.slots) >= len(self.parts.layers), "a layer would give way"
        self.layer_order: list[Unit] = []
        self.influence = Influence()
        self._current_turn = self.stash.current_turn
        self._open_visits = self._stack.enter_context(ExitStack())  # of layers in their slots: until the end
        self._stamps: dict[torch.Tensor, Stamp] = {}  # of parameters on the device
        self._stamp_params(self.parts.shell)
        self._loaded: dict[Unit, None] = {}  # layers in their slots, in the order in which they came
        self._calls: list[_Call] = []  # of the micro-batch at work
        self._in_shell = False  # whether its forward runs, and no layer in it
        self._in_backward = False  # whether its backward runs
        self._current_call: _Call | None = None  # the layer in which that is
        self._on_layer_done: Callable[[int], None] = _push_nothing
        self._k = NO_MICRO_BATCH
        self._end_event: Callable[[], None] = lambda: None  # ends the compute event that is open
        self._stack.enter_context(self._patch_layers())

    def _set_up_guards(self) -> None:
        # What forwards do to buffers, or leave to one another, they do in the order of plain training.
        self._stash_mode = EarlyReadMode(self.stash, BufferOrder(ModuleBuffers([]), [], []))
        self._stack.callback(self.stash.clear)

    @contextmanager
    def _patch_layers(self) -> Iterator[None]:
        """Stand before the layers' own forwards."""
        before: list[tuple[nn.Module, str, Any]] = []
        try:
            for unit in self.parts.layers:
                called = call_attribute(unit.module)
                before.append((unit.module, called, vars(unit.module).get(called)))
                setattr(unit.module, called, partial(self._call_layer, unit, getattr(unit.module, called)))
            yield
        finally:
            for module, called, own in before:
                vars(module).pop(called, None)
                if own is not None:
                    setattr(module, called, own)

    def train(
        self,
        store: LayerStore,
        task: PassTask,
        micro_batches: Sequence[Any],
        seeds: Sequence[int],
        divisors: Sequence[float],
        check: Callable[[], None],
    ) -> list[torch.Tensor]:
        """Run the step; return the scaled losses of the micro-batches, which add up to the step's loss.

        Args:
            store: the EPS.
            task: gives the loss of a micro-batch.
            micro_batches: as the model takes them.
            seeds: of their random streams.
            divisors: of their losses.
            check: looks, after each forward, at what nobody here knows of; it may refuse the step.
        """
        refuse_cached(self.parts.model)
        slots, shell = self.make_gradients(
            store, lambda block: False
        )  # autograd itself adds in the order of plain training
        gradients = {unit: slots.acquire(unit) for unit in self.parts.layers}
        self.prefetch.begin(self._plan.forward_then_backward)  # what comes back once more is not given way to
        self._load_early()
        waiting = deque(
            partial(task, self.parts.model, self.load_micro_batch(k, each)) for k, each in enumerate(micro_batches)
        )
        losses: list[torch.Tensor] = []
        learns = False
        for k, (ambient, divisor) in enumerate(zip(self.initial_states(seeds), divisors, strict=True)):
            self._k, run = k, waiting.popleft()
            loss = self._forward(run, ambient) / divisor
            check()
            if not torch.isfinite(loss):  # the host waits for the device here, once per micro-batch
                loss = loss.detach()  # its graph makes room for another one
                raise NonFiniteError(self._explain_nonfinite(loss, run, ambient))
            del run  # and the rows
            if not waiting:
                slots.check_requires_grad()
                slots.begin_backward()
                self._on_layer_done = partial(self._push_completed, store, gradients, self._pushable_calls())
            learns |= loss.requires_grad
            self._backward(loss)
            losses.append(loss.detach().clone())
            del loss
        if not learns:
            refuse_frozen_model()
        self.meter.record.early_read_layers |= self._stash_mode.early_read_layers
        for gradient in gradients.values():  # of layers that were not called, or share parameters
            gradient.push()
        slots.check_no_stray_grads()
        shell.push(at_once=True)
        return losses

    # -- forward -------------------------------------------------------------------------------------------------------

    def _forward(self, run: Callable[[], torch.Tensor], thread_state: ThreadState) -> torch.Tensor:
        """Run the model's own forward on the micro-batch at work."""
        self._calls = []
        with self._in_state(thread_state), self._current_turn.activate(NO_MICRO_BATCH, SHELL):
            self._begin_event("shell", SHELL)
            self._in_shell = True
            try:
                result = run()
            finally:
                self._in_shell = False
            self._end_event()
        self.layer_order = self.layer_order or [call.unit for call in self._calls]
        for unit in (self.parts.shell, *self._loaded):
            who = "the model's own code" if unit is self.parts.shell else f"layer {unit.name}"
            check_stamps(unit.params, [self._stamps[param] for param in unit.params], who)
        return result

    @contextmanager
    def _in_state(self, thread_state: ThreadState) -> Iterator[None]:
        """Run a forward in its own state. What runs backward next goes on in its random stream, as in core."""
        if self.stash.metering:
            thread_state = thread_state._replace(dispatch_modes=(*thread_state.dispatch_modes, self._stash_mode))
        ThreadState.clear()
        thread_state.restore()
        try:
            yield
        finally:
            ThreadState.clear()
            self.outer_state.restore_except_random()

    def _call_layer(self, unit: Unit, layer_forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Do what a layer's forward does, once its weights are there."""
        if not self._in_shell:  # a checkpoint of the model's own runs it again, or another layer does
            self._ensure_loaded(unit)
            return layer_forward(*args, **kwargs)
        call = _Call(unit, len(self._calls))
        self._calls.append(call)
        self._end_event()
        if not self._ensure_loaded(unit):
            self.clock.stay += 1
        if self._stash_mode.uncalled:
            self._stash_mode.unregister(unit)
        self._in_shell = False
        given = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        before = dict.fromkeys(tensor.grad_fn for tensor in given)  # asked now: the layer may change it in place
        self._begin_event("forward", unit.key, call.index)
        try:
            with self._current_turn.activate(NO_MICRO_BATCH, unit.key, ()):
                outputs = layer_forward(*args, **kwargs)
        finally:  # the model may catch what a layer raises
            self._in_shell = True
            self._end_event()
            self._begin_event("shell", SHELL)
        self.influence.record(unit, given, outputs)
        self._register_prehooks(call, before, outputs)
        return outputs

    def _load_early(self) -> None:
        """Bring the layers whose weights somebody reads before they are called: code of the shell, a hook before a forward.

        A metered step finds out which these are. It brings all of them, since it does not know yet.
        """
        learns, known = self.meter.is_metering, self.meter.record.early_read_layers
        for unit in self._plan.layer_order:
            if (learns or unit.key in known) and self._ensure_loaded(unit):
                self._stash_mode.register(unit, self.parts.shell)
        self.clock.stay = -1  # none has begun

    def _ensure_loaded(self, unit: Unit) -> bool:
        """Have a layer's weights in their slot, from now on until the end of the step; return whether that is new."""
        if unit in self._loaded:
            return False
        with temporarily_clear_interpreter_stack():  # the call may be in a function under torch.vmap, and this is not
            shared = [(param, param.data) for param in unit.params if param in self._stamps]
            self._open_visits.enter_context(self.prefetch.visit(unit))
            for param, data in shared:  # whoever had it first may have it in a graph
                param.data = data
        self._loaded[unit] = None
        self._stamp_params(unit)
        return True

    def _stamp_params(self, unit: Unit) -> None:
        """Remember how a unit's parameters are as they come to the device."""
        new = [param for param in unit.params if param not in self._stamps]
        self._stamps.update(zip(new, stamps_of(new), strict=True))

    def _register_prehooks(self, call: _Call, input_nodes: Collection[Node | None], outputs: Any) -> None:
        """Have it told when backward comes to a layer, and when it leaves it for the nodes that were there before."""
        made = dict.fromkeys(leaf.grad_fn for leaf in flatten(outputs)[0] if isinstance(leaf, torch.Tensor))
        for node in made:
            if node is not None and node not in input_nodes:
                node.register_prehook(partial(self._on_enter_layer, call))
        for node in input_nodes:
            if node is not None:
                node.register_prehook(partial(self._on_leave_layer, call))

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward(self, loss: torch.Tensor) -> None:
        """Back-propagate the micro-batch at work."""
        self._begin_event("loss", SHELL)
        self._in_backward = True
        try:
            if loss.requires_grad:
                with self._watch_backward():
                    run_backward([(get_gradient_edge(loss), torch.ones_like(loss))])
        finally:
            self._in_backward, self._current_call = False, None
        self._end_event()

    def _on_enter_layer(self, call: _Call, _: object) -> None:
        """Backward comes to what a layer has given out."""
        if (
            call is self._current_call or not self._in_backward
        ):  # a forward differentiates, or somebody does who has kept the graph
            return
        self._end_event()
        self._on_layer_done(call.index)
        self.clock.stay += call.index < len(self._calls) - 1  # at the turn it is still there
        self._current_call = call
        self._begin_event("backward", call.unit.key, self._backward_index(call))

    def _on_leave_layer(self, call: _Call, _: object) -> None:
        """Backward comes to what a layer was given."""
        if call is not self._current_call:
            return
        self._end_event()
        self._on_layer_done(call.index - 1)
        self._current_call = None
        self._begin_event("shell", SHELL, self._backward_index(call))

    def _backward_index(self, call: _Call) -> int:
        return 2 * len(self._calls) - 1 - call.index

    def _watch_backward(self) -> AbstractContextManager[None]:
        return (
            _enter_both(self._current_turn.enter_backward(), self._stash_mode) if self.stash.metering else nullcontext()
        )

    def _pushable_calls(self) -> list[_Call]:
        """List the first call of every layer whose gradient may be whole when backward has left that."""
        first = {call.unit: call for call in reversed(self._calls)}
        alone = [call for unit, call in first.items() if not any(block.shared for block in unit.blocks)]
        return sorted(alone, key=lambda call: call.index)

    def _push_completed(
        self, store: LayerStore, gradients: dict[Unit, Gradient], pushable: list[_Call], index: int
    ) -> None:
        """Push the gradients of layers that were called after the call with this index, as far as they are whole."""
        while pushable and pushable[-1].index > index:
            store.raise_failure()  # of the EPS: the rest of backward would be in vain
            unit = pushable.pop().unit
            if gradients[unit].is_complete:  # older code than the layer's may use its parameters too
                with NoTorchModes():  # what the host makes room for is not for a watch over the device
                    gradients.pop(unit).push()

    # -- what is told --------------------------------------------------------------------------------------------------

    def _begin_event(self, kind: str, layer: str, visit: int = -1) -> None:
        """Begin a compute event; `_stop` ends it."""
        self._end_event = time_event(self.meter, self.clock, kind, layer, self._k, visit)

    def _explain_nonfinite(self, loss: torch.Tensor, run: Callable[[], Any], thread_state: ThreadState) -> str:
        """Say where a loss comes from that is not finite: the forward runs once more, as it did."""
        producers: list[str] = []

        def look(unit: Unit, _: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            if not producers and not all(map(_is_finite, flatten(outputs)[0])):
                is_whole = all(map(_is_finite, flatten((args, kwargs))[0]))
                layer = f"layer {unit.name} ({unit.key})"
                producers.append(layer if is_whole else f"the batch, or the model's own code before {layer}")

        hooks = [unit.module.register_forward_hook(partial(look, unit), with_kwargs=True) for unit in self.parts.layers]
        try:
            with self._in_state(thread_state):
                run()
        finally:
            for hook in hooks:
                hook.remove()
        return nonfinite_message(
            self._k, loss, producers[0] if producers else "the loss, or the code after the last layer"
        )


def _push_nothing(index: int) -> None:
    """Push nothing: further micro-batches add to the gradients."""


@contextmanager
def _enter_both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def _is_finite(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or bool(torch.isfinite(leaf).all())
