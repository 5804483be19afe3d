"""A training step with one micro-batch after another through all layers and back, as in plain training.

    k = 0     shell, forward 0 .. L-1, loss, backward L-1 .. 0, shell
    k = 1     ...                      gradients are added to those of k = 0
    k = K-1   ...                      each gradient is pushed when backward leaves its layer; the EPS updates the layer

Every layer has a slot, and autograd has the whole graph of a micro-batch: no call is suspended, segmented or recomputed. The
rest of the relay stays: the EPS has masters and optimizer, loads and pushes overlap with compute, all events are traced and
all bytes booked.

Backward is one run of autograd over all layers. Its position is reported by hooks on the nodes that made a layer's outputs and
inputs. Of the ready nodes autograd runs the youngest first, so a node made before a layer runs after all nodes of the layer:
then the layer's gradient is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from l2l_core._torch import temporarily_clear_interpreter_stack
from l2l_core.batches import divide_loss
from l2l_core.devices import NoTorchModes
from l2l_core.eps import LayerStore, NonFiniteError
from l2l_core.eps.blocks import (
    SHELL,
    ModuleBuffers,
    Stamp,
    Unit,
    check_stamps,
    refuse_cached,
    stamps_of,
    stray_grad_message,
)
from l2l_core.model import ThreadState
from l2l_core.plan import SlotChoice, forward_then_backward
from l2l_core.step.graph import BufferOrder, run_backward
from l2l_core.step.micro_batch import Influence, flatten, patch_layers
from l2l_core.step.pass_runtime import PassRuntime
from l2l_core.step.step_checks import nonfinite_message, refuse_frozen_model
from l2l_core.step.traffic import NO_MICRO_BATCH, Gradient, Stash, StashMode, time_event


class _EarlyReadMode(StashMode):
    """Stash mode that also records which layers' weights are read before the layer is called."""

    def __init__(self, stash: Stash, units: Sequence[Unit]) -> None:
        # Without buffer order: forwards run one after another, as in plain training.
        super().__init__(stash, BufferOrder(ModuleBuffers([]), [], []), units)
        self.uncalled: dict[int, Unit] = {}  # layers, by the storages of their weights
        self.early_read_layers: set[str] = set()  # keys of those whose weights were read

    def register(self, unit: Unit, shell: Unit) -> None:
        """Watch the weights of a layer, except those shared with the shell."""
        self.uncalled |= dict.fromkeys(_storage_keys(unit) - _storage_keys(shell), unit)

    def unregister(self, unit: Unit) -> None:
        """Stop watching a layer, at its first call."""
        for key in _storage_keys(unit) & self.uncalled.keys():
            del self.uncalled[key]

    def _prepare_reads(
        self, func: Any, reads: dict[int, torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> None:
        self.early_read_layers.update(self.uncalled[key].key for key in self.uncalled.keys() & reads.keys())
        super()._prepare_reads(func, reads, args, kwargs)


def _storage_keys(unit: Unit) -> set[int]:
    return {param.untyped_storage()._cdata for param in unit.params}


@dataclass(eq=False, frozen=True, slots=True)
class _Call:
    """A layer call; `index` counts the calls of its micro-batch."""

    unit: Unit
    index: int


class DepthFirstRuntime(PassRuntime):
    """Runtime of a depth-first step. Use as a context manager."""

    def _set_up(self) -> None:
        super()._set_up()
        assert len(self.weight_slots.slots) >= len(self.parts.layers), "depth first needs a slot for every layer"
        self.layer_order: list[Unit] = []  # as the first micro-batch called them
        self.influence = Influence()
        self._current_turn = self.stash.current_turn
        self._open_visits = self._stack.enter_context(ExitStack())  # of loaded layers, until the end of the step
        self._stamps: dict[torch.Tensor, Stamp] = {}  # of parameters on the device
        self._stamp_params(self.parts.shell)
        self._loaded: dict[Unit, None] = {}  # in the order of their loads
        self._calls: list[_Call] = []  # of the present micro-batch
        self._in_shell = False  # whether the forward of the model runs, outside of layers
        self._in_backward = False
        self._current_call: _Call | None = None  # the layer call that backward is in
        self._on_layer_done: Callable[[int], None] = lambda index: None  # further micro-batches add to the gradients
        self._k = NO_MICRO_BATCH
        self._end_event: Callable[[], None] = lambda: None  # ends the open compute event
        self._stack.enter_context(patch_layers(self.parts.layers, lambda *layer: partial(self._call_layer, *layer)))

    def _set_up_guards(self) -> None:
        self._stash_mode = _EarlyReadMode(self.stash, self.parts.units)
        self._stack.callback(self.stash.clear)

    def train(self, store: LayerStore, divisors: Sequence[float]) -> list[torch.Tensor]:
        """Run the step; return the scaled losses of the micro-batches, which add up to the step's loss."""
        model, spec = self.parts.model, self.spec
        refuse_cached(model)
        slots, shell = self.make_gradients(store, lambda block: False)  # autograd adds in the order of plain training
        gradients = {unit: slots.acquire(unit) for unit in self.parts.layers}
        visits = forward_then_backward([unit.key for unit in spec.plan.layer_order])
        count = len(self.weight_slots.slots)
        self._slot_choice = SlotChoice(self.config.ahead, count, visits, self.parts.weight_source.reads_ahead)
        self._load_early()
        rows = (self.load_micro_batch(k, micro_batch) for k, micro_batch in enumerate(spec.micro_batches))
        remaining = deque(partial(spec.task, model, each) for each in rows)
        losses: list[torch.Tensor] = []
        has_gradient = False
        for k, (thread_state, divisor) in enumerate(zip(self.initial_states(), divisors, strict=True)):
            self._k, run = k, remaining.popleft()
            loss = divide_loss(self._forward(run, thread_state), divisor)
            self.check_forward()
            if not torch.isfinite(loss):  # the host waits for the device here, once per micro-batch
                loss = loss.detach()  # frees its graph before the forward runs again
                raise NonFiniteError(self._explain_nonfinite(loss, run, thread_state))
            del run  # and the rows
            if not remaining:
                slots.hooks.check_requires_grad()
                slots.hooks.begin_backward()
                self._on_layer_done = partial(_push_completed, store, gradients, self._pushable_calls())
            has_gradient |= loss.requires_grad
            try:
                self._backward(loss)
            except RuntimeError as error:
                _explain_updated_weight(store, error)
                raise
            losses.append(loss.detach().clone())
            del loss
        if not has_gradient:
            refuse_frozen_model()
        self.meter.record.early_read_layers |= self._stash_mode.early_read_layers
        for gradient in gradients.values():  # of layers that were not called, or share parameters
            gradient.push()
        slots.hooks.check_no_stray_grads()
        shell.push(at_once=True)
        return losses

    # -- forward -------------------------------------------------------------------------------------------------------

    def _forward(self, run: Callable[[], torch.Tensor], thread_state: ThreadState) -> torch.Tensor:
        """Run the model's own forward on the present micro-batch."""
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
            owner = "the model's own code" if unit is self.parts.shell else f"layer {unit.name}"
            check_stamps(unit, [self._stamps[param] for param in unit.params], owner)
        return result

    @contextmanager
    def _in_state(self, thread_state: ThreadState) -> Iterator[None]:
        """Run a forward in its thread state. The backward after it continues its random stream, as in core."""
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
        """Load the layer and run its own forward."""
        if not self._in_shell:  # called by a checkpoint of the model's, or by another layer
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
        inputs = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        input_nodes = dict.fromkeys(tensor.grad_fn for tensor in inputs)  # before the layer changes one in place
        self._begin_event("forward", unit.key, call.index)
        try:
            with self._current_turn.activate(NO_MICRO_BATCH, unit.key, ()):
                outputs = layer_forward(*args, **kwargs)
        finally:  # the model may catch an error of the layer
            self._in_shell = True
            self._end_event()
            self._begin_event("shell", SHELL)
        self.influence.record(unit, inputs, outputs)
        self._register_prehooks(call, input_nodes, outputs)
        return outputs

    def _load_early(self) -> None:
        """Load the layers whose weights shell code or a forward pre-hook reads before their first call.

        A metered step finds out which these are, and loads all layers.
        """
        is_metering, early = self.meter.is_metering, self.meter.record.early_read_layers
        for unit in self.spec.plan.layer_order:
            if (is_metering or unit.key in early) and self._ensure_loaded(unit):
                self._stash_mode.register(unit, self.parts.shell)
        self.clock.stay = -1

    def _ensure_loaded(self, unit: Unit) -> bool:
        """Load a layer until the end of the step, unless it is loaded; return whether it was not."""
        if unit in self._loaded:
            return False
        with temporarily_clear_interpreter_stack():  # the call may be inside torch.vmap, the load is not
            shared = [(param, param.data) for param in unit.params if param in self._stamps]
            for action in self._slot_choice.begin_visit(unit.key):
                self.weight_slots.run(action)
            self._open_visits.enter_context(self.weight_slots.visit(unit))
            for param, data in shared:  # a graph may have the parameter as it was first loaded
                param.data = data
        self._loaded[unit] = None
        self._stamp_params(unit)
        return True

    def _stamp_params(self, unit: Unit) -> None:
        """Stamp a unit's parameters as they are loaded, to detect later changes."""
        new = [param for param in unit.params if param not in self._stamps]
        self._stamps.update(zip(new, stamps_of(new), strict=True))

    def _register_prehooks(self, call: _Call, input_nodes: Collection[Node | None], outputs: Any) -> None:
        """Register hooks on the nodes of a layer's outputs and inputs, for backward to enter and leave it."""
        output_nodes = dict.fromkeys(leaf.grad_fn for leaf in flatten(outputs)[0] if isinstance(leaf, torch.Tensor))
        for node in output_nodes:
            if node is not None and node not in input_nodes:
                node.register_prehook(partial(self._on_enter_layer, call))
        for node in input_nodes:
            if node is not None:
                node.register_prehook(partial(self._on_leave_layer, call))

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward(self, loss: torch.Tensor) -> None:
        """Back-propagate the present micro-batch."""
        self._begin_event("loss", SHELL)
        self._in_backward = True
        try:
            if loss.requires_grad:
                with ExitStack() as watch:
                    if self.stash.metering:
                        watch.enter_context(self._current_turn.enter_backward())
                        watch.enter_context(self._stash_mode)
                    run_backward([(get_gradient_edge(loss), torch.ones_like(loss))])
        finally:
            self._in_backward, self._current_call = False, None
        self._end_event()

    def _on_enter_layer(self, call: _Call, _: object) -> None:
        """Begin the backward event of a layer call."""
        # Outside of `_backward`, user code differentiates: in a forward, or a graph that it has kept.
        if call is self._current_call or not self._in_backward:
            return
        self._end_event()
        self._on_layer_done(call.index)
        self.clock.stay += call.index < len(self._calls) - 1  # the last layer's stay continues
        self._current_call = call
        self._begin_event("backward", call.unit.key, self._backward_index(call))

    def _on_leave_layer(self, call: _Call, _: object) -> None:
        """End the backward event of a layer call."""
        if call is not self._current_call:
            return
        self._end_event()
        self._on_layer_done(call.index - 1)
        self._current_call = None
        self._begin_event("shell", SHELL, self._backward_index(call))

    def _backward_index(self, call: _Call) -> int:
        return 2 * len(self._calls) - 1 - call.index

    def _pushable_calls(self) -> list[_Call]:
        """Return the first call of every layer without shared blocks: after its backward the gradient may be complete."""
        first = {call.unit: call for call in reversed(self._calls)}
        alone = [call for unit, call in first.items() if not any(block.shared for block in unit.blocks)]
        return sorted(alone, key=lambda call: call.index)

    # -- reports -------------------------------------------------------------------------------------------------------

    def _begin_event(self, kind: str, layer: str, visit: int = -1) -> None:
        """Begin a compute event; `_end_event` ends it."""
        self._end_event = time_event(self.meter, self.clock, kind, layer, self._k, visit)

    def _explain_nonfinite(self, loss: torch.Tensor, run: Callable[[], Any], thread_state: ThreadState) -> str:
        """Find the source of a loss that is not finite, by running the forward once more."""
        producers: list[str] = []

        def inspect(unit: Unit, _: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            if not producers and not all(map(_is_finite, flatten(outputs)[0])):
                layer = f"layer {unit.name} ({unit.key})"
                inputs_are_finite = all(map(_is_finite, flatten((args, kwargs))[0]))
                producers.append(layer if inputs_are_finite else f"the batch, or the model's own code before {layer}")

        hooks = [
            unit.module.register_forward_hook(partial(inspect, unit), with_kwargs=True) for unit in self.parts.layers
        ]
        try:
            with self._in_state(thread_state):
                run()
        finally:
            for hook in hooks:
                hook.remove()
        producers.append("the loss, or the code after the last layer")
        return nonfinite_message(self._k, loss, producers[0])


def _push_completed(store: LayerStore, gradients: dict[Unit, Gradient], pushable: list[_Call], index: int) -> None:
    """Push the complete gradients of layers whose first call is after the call with this index."""
    while pushable and pushable[-1].index > index:
        store.raise_failure()  # if an update failed, the rest of backward is useless
        unit = pushable.pop().unit
        if gradients[unit].is_complete:  # code before the layer may use its parameters too
            with NoTorchModes():  # allocations on the host are not device activations
                gradients.pop(unit).push()


def _explain_updated_weight(store: LayerStore, error: RuntimeError) -> None:
    """Raise the error for a weight that code outside of its layer reads in backward, after the layer was updated.

    Autograd finds then that it was changed in place; its message has the shape, and the view that weights on a device are.
    """
    named = [pair for block in store.updated for pair in zip(block.params, block.names, strict=True)]
    found = [name for param, name in named if f"{list(param.shape)}], which is output 0 of AsStrided" in str(error)]
    if found:
        raise RuntimeError(stray_grad_message(" or ".join(found))) from error


def _is_finite(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or bool(torch.isfinite(leaf).all())
