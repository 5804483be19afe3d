"""What is set up around one pass of forwards that pause: watches, hooks, shadowed layers, on the ground of every pass.

The loop finds everything ready, and an exception anywhere leaves no shadow and no hook behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from l2l_core.eps.blocks import refuse_cached
from l2l_core.step.graph import Asides, BufferOrder
from l2l_core.step.ground import Ground, Task
from l2l_core.step.micro_batch import (
    Attributes,
    Crossing,
    Forward,
    Observer,
    OutOfSight,
    Pass,
    Shadows,
    SideOutputs,
    UserHooks,
    functions_seen,
)
from l2l_core.step.traffic import Watch, before_reads

_SHAKEN = 0.02  # of a weight, in `Stage.shake`: as much as models begin with


class Stage(Ground):
    """One pass of forwards that pause, set up. Use as a context manager."""

    def _set_up(self) -> None:
        super()._set_up()
        parts, enter = self.parts, self._stack.enter_context
        enter(functions_seen())
        hooks = enter(UserHooks({unit.key: unit.module for unit in parts.layers}))
        sides = SideOutputs(self.meter.latest, self.meter.learns)
        attributes = Attributes(parts.shell_modules(), parts.layers, self._asides, sides, self.meter.learns)
        layers = {unit.module: unit for unit in parts.layers}
        enter(OutOfSight(parts.model, layers, self._watch, self._asides, sides, attributes, self._order))
        self.shadows = enter(Shadows(layers))
        enter(attributes)
        self.run = Pass(
            parts.device,
            self.outside,
            self.stash.at_work,
            self.stash,
            self._watch,
            self.stash.metering or (self.stash.moves and not torch.is_grad_enabled()),
            self._asides,
            self.trace,
            sides,
            hooks,
            self.meter,
            self.clock,
            attributes,
            self._order,
            partial(refuse_cached, parts.model),
        )
        # Undone before all that is above: forwards unwind while the hooks, spies and slots around them are there.
        self._stack.callback(self.shadows.cancel)

    def _watch_out(self) -> None:
        parts, later = self.parts, self._stack.callback
        self._order = BufferOrder(parts.shell.buffers, [u.buffers for u in parts.layers], self._attributes)
        later(self._order.close)
        self._watch = Watch(self.stash, self._order)
        self._asides = Asides(self._watch.asked, self.stash.touch, active=torch.is_grad_enabled())
        later(self.stash.clear)
        later(self._asides.close)
        if self.stash.moves:
            self._stack.enter_context(before_reads(self.stash.touch))

    def show(self, observer: Observer) -> None:
        """Show every call of this pass to somebody; see `Pass.observers`."""
        self.run.observers.append(observer)

    def shake(self) -> None:
        """Move the shell's weights on the device a little, for this pass: a head that is all zero tells no loss from another.

        The masters, and whatever comes after, know nothing of it.
        """
        generator = torch.Generator().manual_seed(0)  # of its own, on the host: no stream moves, the same on any device
        with torch.no_grad():
            for param in self.parts.shell.params:
                noise = torch.randn(param.shape, generator=generator) * _SHAKEN
                param.data.add_(noise.to(param.device, param.dtype))

    def forwards(self, micro_batches: Sequence[Any], task: Task, seeds: Sequence[int]) -> list[Forward]:
        """Make one paused forward per micro-batch, each with a random stream of its own."""
        run: Callable[[Any], Any] = partial(task, self.parts.model)
        for k, (micro_batch, ambient) in enumerate(zip(micro_batches, self.ambients(seeds), strict=True)):
            if self._watch.guards_shell:
                ambient = ambient._replace(dispatch_modes=(*ambient.dispatch_modes, self._watch))
            crossing = Crossing(k, self._asides, relies=not self.meter.learns)
            if torch.is_grad_enabled():
                ambient = ambient.inside(crossing)
            bring = partial(self.bring, k, micro_batch)
            self.shadows.forwards.append(Forward(k, bring, run, ambient, self.run, crossing))
        return self.shadows.forwards

    def _noted(self, tensor: torch.Tensor, k: int) -> torch.Tensor:
        self._asides.note(tensor, k)
        return tensor
