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
from l2l_core.devices import Unseen
from l2l_core.eps import LayerStore, NonFiniteError
from l2l_core.eps.blocks import SHELL, Buffers, Stamp, Unit, check_stamps, refuse_cached, stamps_of
from l2l_core.model import Ambient, call_of
from l2l_core.step.checks import not_finite, refuse_idle
from l2l_core.step.early_reads import EarlyReads
from l2l_core.step.graph import BufferOrder, run_backward
from l2l_core.step.ground import Ground, Task
from l2l_core.step.micro_batch import Influence, flatten
from l2l_core.step.traffic import NOBODY, Gradient, timed


class _Call:
    """A layer's part in one micro-batch; `index` is its place among those of that micro-batch."""

    __slots__ = ("index", "unit")

    def __init__(self, unit: Unit, index: int) -> None:
        self.unit, self.index = unit, index


class DepthFirst(Ground):
    """The step, set up. Use as a context manager.

    Attributes:
        way: the layers in the order in which the first micro-batch has called them.
        influence: of the layers, as far as they have run.
    """

    def _set_up(self) -> None:
        super()._set_up()
        assert len(self.prefetch.slots) >= len(self.parts.layers), "a layer would give way"
        self.way: list[Unit] = []
        self.influence = Influence()
        self._at_work = self.stash.at_work
        self._stay = self._stack.enter_context(ExitStack())  # of layers in their slots: until the end
        self._stamps: dict[torch.Tensor, Stamp] = {}  # of parameters on the device
        self._came(self.parts.shell)
        self._here: dict[Unit, None] = {}  # layers in their slots, in the order in which they came
        self._calls: list[_Call] = []  # of the micro-batch at work
        self._in_shell = False  # whether its forward runs, and no layer in it
        self._goes_back = False  # whether its backward runs
        self._at: _Call | None = None  # the layer in which that is
        self._leave: Callable[[int], None] = _nobody_waits
        self._k = NOBODY
        self._stop: Callable[[], None] = lambda: None  # ends the compute event that is open
        self._stack.enter_context(self._shadows())

    def _watch_out(self) -> None:
        # What forwards do to buffers, or leave to one another, they do in the order of plain training.
        self._watch = EarlyReads(self.stash, BufferOrder(Buffers([]), [], []))
        self._stack.callback(self.stash.clear)

    @contextmanager
    def _shadows(self) -> Iterator[None]:
        """Stand before the layers' own forwards."""
        before: list[tuple[nn.Module, str, Any]] = []
        try:
            for unit in self.parts.layers:
                called = call_of(unit.module)
                before.append((unit.module, called, vars(unit.module).get(called)))
                setattr(unit.module, called, partial(self._call, unit, getattr(unit.module, called)))
            yield
        finally:
            for module, called, own in before:
                vars(module).pop(called, None)
                if own is not None:
                    setattr(module, called, own)

    def train(
        self,
        store: LayerStore,
        task: Task,
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
        slots, shell = self.gradients(store, lambda block: False)  # autograd itself adds in the order of plain training
        gradients = {unit: slots.take(unit) for unit in self.parts.layers}
        self.prefetch.begin(self._plan.there_and_back)  # what comes back once more is not given way to
        self._have_early()
        waiting = deque(partial(task, self.parts.model, self.bring(k, each)) for k, each in enumerate(micro_batches))
        losses: list[torch.Tensor] = []
        learns = False
        for k, (ambient, divisor) in enumerate(zip(self.ambients(seeds), divisors, strict=True)):
            self._k, run = k, waiting.popleft()
            loss = self._forward(run, ambient) / divisor
            check()
            if not torch.isfinite(loss):  # the host waits for the device here, once per micro-batch
                loss = loss.detach()  # its graph makes room for another one
                raise NonFiniteError(self._explained(loss, run, ambient))
            del run  # and the rows
            if not waiting:
                slots.check()
                slots.begin_run()
                self._leave = partial(self._push_behind, store, gradients, self._whole_in_backward())
            learns |= loss.requires_grad
            self._backward(loss)
            losses.append(loss.detach().clone())
            del loss
        if not learns:
            refuse_idle()
        self.meter.latest.read_early |= self._watch.read_early
        for gradient in gradients.values():  # of layers that were not called, or share parameters
            gradient.push()
        slots.check_none_left()
        shell.push(at_once=True)
        return losses

    # -- forward -------------------------------------------------------------------------------------------------------

    def _forward(self, run: Callable[[], torch.Tensor], ambient: Ambient) -> torch.Tensor:
        """Run the model's own forward on the micro-batch at work."""
        self._calls = []
        with self._in(ambient), self._at_work.turn(NOBODY, SHELL):
            self._open("shell", SHELL)
            self._in_shell = True
            try:
                result = run()
            finally:
                self._in_shell = False
            self._stop()
        self.way = self.way or [call.unit for call in self._calls]
        for unit in (self.parts.shell, *self._here):
            who = "the model's own code" if unit is self.parts.shell else f"layer {unit.name}"
            check_stamps(unit.params, [self._stamps[param] for param in unit.params], who)
        return result

    @contextmanager
    def _in(self, ambient: Ambient) -> Iterator[None]:
        """Run a forward in its own state. What runs backward next goes on in its random stream, as in core."""
        if self.stash.metering:
            ambient = ambient._replace(dispatch_modes=(*ambient.dispatch_modes, self._watch))
        Ambient.clear()
        ambient.put()
        try:
            yield
        finally:
            Ambient.clear()
            self.outside.put_all_but_random()

    def _call(self, unit: Unit, real: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Do what a layer's forward does, once its weights are there."""
        if not self._in_shell:  # a checkpoint of the model's own runs it again, or another layer does
            self._have(unit)
            return real(*args, **kwargs)
        call = _Call(unit, len(self._calls))
        self._calls.append(call)
        self._stop()
        if not self._have(unit):
            self.clock.stay += 1
        if self._watch.uncalled:
            self._watch.called(unit)
        self._in_shell = False
        given = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        before = dict.fromkeys(tensor.grad_fn for tensor in given)  # asked now: the layer may change it in place
        self._open("forward", unit.key, call.index)
        try:
            with self._at_work.turn(NOBODY, unit.key, ()):
                outputs = real(*args, **kwargs)
        finally:  # the model may catch what a layer raises
            self._in_shell = True
            self._stop()
            self._open("shell", SHELL)
        self.influence.note(unit, given, outputs)
        self._mark(call, before, outputs)
        return outputs

    def _have_early(self) -> None:
        """Bring the layers whose weights somebody reads before they are called: code of the shell, a hook before a forward.

        A metered step finds out which these are. It brings all of them, since it does not know yet.
        """
        learns, known = self.meter.learns, self.meter.latest.read_early
        for unit in self._plan.order:
            if (learns or unit.key in known) and self._have(unit):
                self._watch.expect(unit, self.parts.shell)
        self.clock.stay = -1  # none has begun

    def _have(self, unit: Unit) -> bool:
        """Have a layer's weights in their slot, from now on until the end of the step; return whether that is new."""
        if unit in self._here:
            return False
        with temporarily_clear_interpreter_stack():  # the call may be in a function under torch.vmap, and this is not
            shared = [(param, param.data) for param in unit.params if param in self._stamps]
            self._stay.enter_context(self.prefetch.visit(unit))
            for param, data in shared:  # whoever had it first may have it in a graph
                param.data = data
        self._here[unit] = None
        self._came(unit)
        return True

    def _came(self, unit: Unit) -> None:
        """Remember how a unit's parameters are as they come to the device."""
        new = [param for param in unit.params if param not in self._stamps]
        self._stamps.update(zip(new, stamps_of(new), strict=True))

    def _mark(self, call: _Call, before: Collection[Node | None], outputs: Any) -> None:
        """Have it told when backward comes to a layer, and when it leaves it for the nodes that were there before."""
        made = dict.fromkeys(leaf.grad_fn for leaf in flatten(outputs)[0] if isinstance(leaf, torch.Tensor))
        for node in made:
            if node is not None and node not in before:
                node.register_prehook(partial(self._enters, call))
        for node in before:
            if node is not None:
                node.register_prehook(partial(self._leaves, call))

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward(self, loss: torch.Tensor) -> None:
        """Back-propagate the micro-batch at work."""
        self._open("loss", SHELL)
        self._goes_back = True
        try:
            if loss.requires_grad:
                with self._watched():
                    run_backward([(get_gradient_edge(loss), torch.ones_like(loss))])
        finally:
            self._goes_back, self._at = False, None
        self._stop()

    def _enters(self, call: _Call, _: object) -> None:
        """Backward comes to what a layer has given out."""
        if call is self._at or not self._goes_back:  # a forward differentiates, or somebody does who has kept the graph
            return
        self._stop()
        self._leave(call.index)
        self.clock.stay += call.index < len(self._calls) - 1  # at the turn it is still there
        self._at = call
        self._open("backward", call.unit.key, self._visit_back(call))

    def _leaves(self, call: _Call, _: object) -> None:
        """Backward comes to what a layer was given."""
        if call is not self._at:
            return
        self._stop()
        self._leave(call.index - 1)
        self._at = None
        self._open("shell", SHELL, self._visit_back(call))

    def _visit_back(self, call: _Call) -> int:
        return 2 * len(self._calls) - 1 - call.index

    def _watched(self) -> AbstractContextManager[None]:
        return _both(self._at_work.backward(), self._watch) if self.stash.metering else nullcontext()

    def _whole_in_backward(self) -> list[_Call]:
        """List the first call of every layer whose gradient may be whole when backward has left that."""
        first = {call.unit: call for call in reversed(self._calls)}
        alone = [call for unit, call in first.items() if not any(block.shared for block in unit.blocks)]
        return sorted(alone, key=lambda call: call.index)

    def _push_behind(self, store: LayerStore, gradients: dict[Unit, Gradient], whole: list[_Call], index: int) -> None:
        """Push the gradients of layers that were called after the call with this index, as far as they are whole."""
        while whole and whole[-1].index > index:
            store.raise_failure()  # of the EPS: the rest of backward would be in vain
            unit = whole.pop().unit
            if gradients[unit].is_whole:  # older code than the layer's may use its parameters too
                with Unseen():  # what the host makes room for is not for a watch over the device
                    gradients.pop(unit).push()

    # -- what is told --------------------------------------------------------------------------------------------------

    def _open(self, kind: str, layer: str, visit: int = -1) -> None:
        """Begin a compute event; `_stop` ends it."""
        self._stop = timed(self.meter, self.clock, kind, layer, self._k, visit)

    def _explained(self, loss: torch.Tensor, run: Callable[[], Any], ambient: Ambient) -> str:
        """Say where a loss comes from that is not finite: the forward runs once more, as it did."""
        producers: list[str] = []

        def look(unit: Unit, _: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            if not producers and not all(map(_is_finite, flatten(outputs)[0])):
                is_whole = all(map(_is_finite, flatten((args, kwargs))[0]))
                layer = f"layer {unit.name} ({unit.key})"
                producers.append(layer if is_whole else f"the batch, or the model's own code before {layer}")

        hooks = [unit.module.register_forward_hook(partial(look, unit), with_kwargs=True) for unit in self.parts.layers]
        try:
            with self._in(ambient):
                run()
        finally:
            for hook in hooks:
                hook.remove()
        return not_finite(self._k, loss, producers[0] if producers else "the loss, or the code after the last layer")


def _nobody_waits(index: int) -> None:
    """Push nothing: further micro-batches add to the gradients."""


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def _is_finite(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or bool(torch.isfinite(leaf).all())
