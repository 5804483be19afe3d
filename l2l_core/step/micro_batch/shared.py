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
from l2l_core.model import Ambient
from l2l_core.step.graph import Asides, BufferOrder
from l2l_core.step.micro_batch.attributes import Attributes, Place
from l2l_core.step.micro_batch.hooks import SideOutputs, UserHooks
from l2l_core.step.micro_batch.influence import Influence
from l2l_core.step.micro_batch.recomputes import Recomputes
from l2l_core.step.micro_batch.traces import Glances
from l2l_core.step.traffic import AtWork, Clock, Meter, Stash, Watch, timed
from l2l_core.trace import Trace

Observer = Callable[
    [Any, Callable[..., Any]], Callable[..., Any]
]  # (call, layer's forward) -> the forward that is to run


_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class Pass:
    """Device traffic, hooks and watches of a pass, and what its calls have found out so far."""

    device: Device
    outside: Ambient  # the state that the thread is in where no forward runs
    at_work: AtWork
    stash: Stash
    watch: Watch
    watches_layers: bool  # when activations are counted; and in inference, where nobody else is on guard
    asides: Asides
    trace: Trace
    sides: SideOutputs
    user_hooks: UserHooks
    meter: Meter
    clock: Clock
    attributes: Attributes
    order: BufferOrder
    check_call: Callable[[], None]  # refuses what no layer may be called in
    runs: Counter[Unit] = field(default_factory=Counter)  # how often each layer has run
    influence: Influence = field(default_factory=Influence)
    observers: list[Observer] = field(default_factory=list)  # are shown every call, by running it
    recomputes: Recomputes = field(default_factory=Recomputes)
    glances: Glances = field(default_factory=Glances)
    nesting: set[Unit] = field(default_factory=set)  # layers that run a backward of their own in theirs
    buffer_values: dict[Unit, list[torch.Tensor | None]] = field(default_factory=dict)

    def buffers_of(self, unit: Unit) -> list[torch.Tensor | None]:
        """Return the values of a unit's buffers now; the same list as before if none has changed."""
        last = self.buffer_values.get(unit)
        if last is None or not unit.buffers.equal(last):
            self.buffer_values[unit] = unit.buffers.copy()
        return self.buffer_values[unit]

    def expect_unchanged(self, unit: Unit) -> Callable[[], None]:
        """Make a check that nobody sets a layer's attributes while a micro-batch waits for it to run first."""
        runs, found = self.runs[unit], self._noted_on(unit)
        return lambda: self._check_noted(unit, found) if self.runs[unit] == runs else None

    def _noted_on(self, unit: Unit) -> dict[Place, Any]:
        return {**(_of_layer(unit) if self.stash.metering else {}), **self.attributes.set_on(unit)}

    def _check_noted(self, unit: Unit, found: dict[Place, Any]) -> None:
        if new := self.attributes.set_on(unit).keys() - found.keys():
            found = {**found, **dict.fromkeys(new)}  # it was not there when the micro-batch came
        _check_layer(unit, found)

    def watched(self, in_layer: bool = False) -> AbstractContextManager[None]:
        """Run a block of backward under the stash's watch, where it needs one."""
        return self._watched() if self.watches_layers or (self.stash.guards and not in_layer) else _NOTHING

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with self.at_work.backward(), self.watch:
            yield

    def timed(self, kind: str, layer: str, k: int, visit: int = -1) -> Callable[[], None]:
        """Start a compute event; calling the result ends it."""
        return timed(self.meter, self.clock, kind, layer, k, visit)


def _of_layer(unit: Unit) -> dict[Place, Any]:
    """Find numbers and strings that the layer's modules keep as attributes."""
    found = ((module, name, value) for module in unit.module.modules() for name, value in vars(module).items())
    return {(module, name): value for module, name, value in found if isinstance(value, int | float | str)}


def _check_layer(unit: Unit, before: dict[Place, Any]) -> None:
    """Raise RuntimeError if an attribute of the layer is not what it was when the micro-batch came to it."""
    for (module, name), value in before.items():
        now = vars(module).get(name)
        if now is not value and not (isinstance(value, int | float | str) and now == value):
            raise RuntimeError(
                f"attribute {name!r} of layer {unit.name} is set anew for every micro-batch, and micro-batches take turns: the "
                "layer would see another micro-batch's value. Pass it as an argument of the layer"
            )
