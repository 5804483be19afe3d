"""What all calls of one pass over the model share: `Pass`, which the code calls `run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from l2l_core.devices import Device
from l2l_core.eps.blocks import Unit
from l2l_core.model import ThreadState
from l2l_core.step.graph import BufferOrder, TensorGuard
from l2l_core.step.micro_batch.influence import Influence
from l2l_core.step.micro_batch.module_attributes import AttributeKey, ModuleAttributes
from l2l_core.step.micro_batch.module_hooks import SideOutputs, UserHooks
from l2l_core.step.micro_batch.recompute_check import RecomputeCheck
from l2l_core.step.micro_batch.state_diff import StateDiffs
from l2l_core.step.traffic import ComputeClock, CurrentTurn, MemoryMeter, Stash, StashMode, time_event
from l2l_core.trace import Trace

CallObserver = Callable[
    [Any, Callable[..., Any]], Callable[..., Any]
]  # (call, layer's forward) -> the forward that is to run


_NO_WATCH = nullcontext()


@dataclass(frozen=True, slots=True)
class StepContext:
    """Device traffic, hooks and watches of a pass, and what its calls have found out so far."""

    device: Device
    outer_state: ThreadState  # the state that the thread is in where no forward runs
    current_turn: CurrentTurn
    stash: Stash
    stash_mode: StashMode
    mode_in_layers: bool  # when activations are counted; and in inference, where nobody else is on guard
    guard: TensorGuard
    trace: Trace
    side_outputs: SideOutputs
    user_hooks: UserHooks
    meter: MemoryMeter
    clock: ComputeClock
    attributes: ModuleAttributes
    buffer_order: BufferOrder
    check_call: Callable[[], None]  # refuses what no layer may be called in
    run_counts: Counter[Unit] = field(default_factory=Counter)  # how often each layer has run
    influence: Influence = field(default_factory=Influence)
    observers: list[CallObserver] = field(default_factory=list)  # are shown every call, by running it
    recompute_check: RecomputeCheck = field(default_factory=RecomputeCheck)
    state_diffs: StateDiffs = field(default_factory=StateDiffs)
    reentrant_layers: set[Unit] = field(default_factory=set)  # layers that run a backward of their own in theirs
    buffer_values: dict[Unit, list[torch.Tensor | None]] = field(default_factory=dict)

    def buffers_of(self, unit: Unit) -> list[torch.Tensor | None]:
        """Return the values of a unit's buffers now; the same list as before if none has changed."""
        last = self.buffer_values.get(unit)
        if last is None or not unit.buffers.equal(last):
            self.buffer_values[unit] = unit.buffers.copy()
        return self.buffer_values[unit]

    def make_attribute_check(self, unit: Unit) -> Callable[[], None]:
        """Make a check that nobody sets a layer's attributes while a micro-batch waits for it to run first."""
        runs, found = self.run_counts[unit], self._attributes_of(unit)
        return lambda: self._check_attributes(unit, found) if self.run_counts[unit] == runs else None

    def _attributes_of(self, unit: Unit) -> dict[AttributeKey, Any]:
        return {**(_plain_attributes(unit) if self.stash.metering else {}), **self.attributes.values_set_on(unit)}

    def _check_attributes(self, unit: Unit, before: dict[AttributeKey, Any]) -> None:
        if new := self.attributes.values_set_on(unit).keys() - before.keys():
            before = {**before, **dict.fromkeys(new)}  # it was not there when the micro-batch came
        _check_layer(unit, before)

    def watch_backward(self, in_layer: bool = False) -> AbstractContextManager[None]:
        """Run a block of backward under the stash's watch, where it needs one."""
        return self._watch_backward() if self.mode_in_layers or (self.stash.needs_watch and not in_layer) else _NO_WATCH

    @contextmanager
    def _watch_backward(self) -> Iterator[None]:
        with self.current_turn.enter_backward(), self.stash_mode:
            yield

    def time_event(self, kind: str, layer: str, k: int, visit: int = -1) -> Callable[[], None]:
        """Start a compute event; calling the result ends it."""
        return time_event(self.meter, self.clock, kind, layer, k, visit)


def _plain_attributes(unit: Unit) -> dict[AttributeKey, Any]:
    """Find numbers and strings that the layer's modules keep as attributes."""
    found = ((module, name, value) for module in unit.module.modules() for name, value in vars(module).items())
    return {(module, name): value for module, name, value in found if isinstance(value, int | float | str)}


def _check_layer(unit: Unit, before: dict[AttributeKey, Any]) -> None:
    """Raise RuntimeError if an attribute of the layer is not what it was when the micro-batch came to it."""
    for (module, name), value in before.items():
        now = vars(module).get(name)
        if now is not value and not (isinstance(value, int | float | str) and now == value):
            raise RuntimeError(
                f"attribute {name!r} of layer {unit.name} is set anew for every micro-batch, and micro-batches take turns: the "
                "layer would see another micro-batch's value. Pass it as an argument of the layer"
            )
