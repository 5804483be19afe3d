"""`StepContext`: the objects that all layer calls of one pass share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from l2l_core.eps.blocks import Unit
from l2l_core.model import ThreadState
from l2l_core.step.graph import BufferOrder, TensorGuard
from l2l_core.step.guards import (
    AttributeKey,
    ModuleAttributes,
    NumpyDrawOrder,
    RecomputeCheck,
    SideOutputs,
    StateDiffs,
    UserHooks,
)
from l2l_core.step.micro_batch.influence import Influence
from l2l_core.step.traffic import ComputeClock, CurrentTurn, MemoryMeter, Stash, StashMode, time_event

CallObserver = Callable[[Any, Callable[..., Any]], Callable[..., Any]]  # (call, layer's forward) -> forward to run


@dataclass(frozen=True, slots=True)
class StepContext:
    """Device traffic, hooks and checks of a pass, and the results of its calls so far.

    Attributes:
        outer_state: the thread's state while no forward runs.
        mode_in_layers: whether the stash mode is on in layers too: when activations are counted, and in inference, where it
            alone checks reads.
        check_call: raises where no layer may be called.
        observers: wrap the forward of every call.
        reentrant_layers: layers that run a nested backward.
    """

    outer_state: ThreadState
    current_turn: CurrentTurn
    stash: Stash
    stash_mode: StashMode
    mode_in_layers: bool
    guard: TensorGuard
    side_outputs: SideOutputs
    user_hooks: UserHooks
    meter: MemoryMeter
    clock: ComputeClock
    attributes: ModuleAttributes
    buffer_order: BufferOrder
    check_call: Callable[[], None]
    run_counts: Counter[Unit] = field(default_factory=Counter)
    influence: Influence = field(default_factory=Influence)
    observers: list[CallObserver] = field(default_factory=list)
    recompute_check: RecomputeCheck = field(default_factory=RecomputeCheck)
    state_diffs: StateDiffs = field(default_factory=StateDiffs)
    numpy_draws: NumpyDrawOrder = field(default_factory=NumpyDrawOrder)
    reentrant_layers: set[Unit] = field(default_factory=set)
    buffer_values: dict[Unit, list[torch.Tensor | None]] = field(default_factory=dict)

    def buffers_of(self, unit: Unit) -> list[torch.Tensor | None]:
        """Return copies of a unit's buffers; the same list as before if none has changed."""
        last = self.buffer_values.get(unit)
        if last is None or not unit.buffers.equal(last):
            self.buffer_values[unit] = unit.buffers.copy()
        return self.buffer_values[unit]

    def make_attribute_check(self, unit: Unit) -> Callable[[], None]:
        """Return a check that no attribute of a layer is set while a micro-batch waits for the layer's first run."""
        runs, before = self.run_counts[unit], self.attributes.values_set_on(unit)
        if self.stash.metering:
            found = [
                (AttributeKey(module, name), value)
                for module in unit.module.modules()
                for name, value in vars(module).items()
            ]
            before = {key: value for key, value in found if isinstance(value, int | float | str)} | before

        def check() -> None:
            if self.run_counts[unit] != runs:
                return
            for key in before | self.attributes.values_set_on(unit):
                module, name = key
                value, now = before.get(key), vars(module).get(name)
                if now is not value and not (isinstance(value, int | float | str) and now == value):
                    raise RuntimeError(
                        f"attribute {name!r} of layer {unit.name} is set for every micro-batch, but micro-batches take turns at "
                        "the layer, so it would read another micro-batch's value. Pass it as an argument of the layer"
                    )

        return check

    @contextmanager
    def watch_backward(self, in_layer: bool = False) -> Iterator[None]:
        """Run backward in the block under the stash mode, if it is needed."""
        if self.mode_in_layers or (self.stash.needs_watch and not in_layer):
            with self.current_turn.enter_backward(), self.stash_mode:
                yield
        else:
            yield

    def time_event(self, kind: str, layer: str, k: int, visit: int = -1) -> Callable[[], None]:
        """Start a compute event; calling the result ends it."""
        return time_event(self.meter, self.clock, kind, layer, k, visit)
