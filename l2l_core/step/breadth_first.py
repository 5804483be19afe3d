"""What is set up around one pass of forwards that pause: watches, hooks, shadowed layers, on the ground of every pass.

The loop finds everything ready, and an exception anywhere leaves no shadow and no hook behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from l2l_core.eps.blocks import refuse_cached
from l2l_core.step.graph import BufferOrder, TensorGuard
from l2l_core.step.micro_batch import (
    CallObserver,
    CompiledRegionGuard,
    GraphSegmenter,
    LayerPatches,
    ModuleAttributes,
    SideOutputs,
    StepContext,
    SuspendedForward,
    UserHooks,
    patch_function_apply,
)
from l2l_core.step.pass_runtime import PassRuntime, PassTask
from l2l_core.step.traffic import StashMode, raw_read_hook

_PERTURBATION = 0.02  # of a weight, in `Stage.perturb_shell`: as much as models begin with


class BreadthFirstRuntime(PassRuntime):
    """One pass of forwards that pause, set up. Use as a context manager."""

    def _set_up(self) -> None:
        super()._set_up()
        parts, enter = self.parts, self._stack.enter_context
        enter(patch_function_apply())
        hooks = enter(UserHooks({unit.key: unit.module for unit in parts.layers}))
        sides = SideOutputs(self.meter.record, self.meter.is_metering)
        attributes = ModuleAttributes(parts.shell_modules(), parts.layers, self._guard, sides, self.meter.is_metering)
        layers = {unit.module: unit for unit in parts.layers}
        enter(
            CompiledRegionGuard(
                parts.model, layers, self._stash_mode, self._guard, sides, attributes, self._buffer_order
            )
        )
        self.patches = enter(LayerPatches(layers))
        enter(attributes)
        self.ctx = StepContext(
            parts.device,
            self.outer_state,
            self.stash.current_turn,
            self.stash,
            self._stash_mode,
            self.stash.metering or (self.stash.offloads and not torch.is_grad_enabled()),
            self._guard,
            self.trace,
            sides,
            hooks,
            self.meter,
            self.clock,
            attributes,
            self._buffer_order,
            partial(refuse_cached, parts.model),
        )
        # Undone before all that is above: forwards unwind while the hooks, spies and slots around them are there.
        self._stack.callback(self.patches.cancel)

    def _set_up_guards(self) -> None:
        parts, later = self.parts, self._stack.callback
        self._buffer_order = BufferOrder(parts.shell.buffers, [u.buffers for u in parts.layers], self._attributes)
        later(self._buffer_order.close)
        self._stash_mode = StashMode(self.stash, self._buffer_order)
        self._guard = TensorGuard(
            self._stash_mode.check_guarded_read, self.stash.restore_tensor, active=torch.is_grad_enabled()
        )
        later(self.stash.clear)
        later(self._guard.close)
        if self.stash.offloads:
            self._stack.enter_context(raw_read_hook(self.stash.restore_tensor))

    def add_observer(self, observer: CallObserver) -> None:
        """Show every call of this pass to somebody; see `Pass.observers`."""
        self.ctx.observers.append(observer)

    def perturb_shell(self) -> None:
        """Move the shell's weights on the device a little, for this pass: a head that is all zero tells no loss from another.

        The masters, and whatever comes after, know nothing of it.
        """
        generator = torch.Generator().manual_seed(0)  # of its own, on the host: no stream moves, the same on any device
        with torch.no_grad():
            for param in self.parts.shell.params:
                noise = torch.randn(param.shape, generator=generator) * _PERTURBATION
                param.data.add_(noise.to(param.device, param.dtype))

    def make_forwards(
        self, micro_batches: Sequence[Any], task: PassTask, seeds: Sequence[int]
    ) -> list[SuspendedForward]:
        """Make one paused forward per micro-batch, each with a random stream of its own."""
        run: Callable[[Any], Any] = partial(task, self.parts.model)
        for k, (micro_batch, ambient) in enumerate(zip(micro_batches, self.initial_states(seeds), strict=True)):
            if self._stash_mode.needed_in_shell:
                ambient = ambient._replace(dispatch_modes=(*ambient.dispatch_modes, self._stash_mode))
            crossing = GraphSegmenter(k, self._guard, use_meter_record=not self.meter.is_metering)
            if torch.is_grad_enabled():
                ambient = ambient.with_function_mode(crossing)
            bring = partial(self.load_micro_batch, k, micro_batch)
            self.patches.forwards.append(SuspendedForward(k, bring, run, ambient, self.ctx, crossing))
        return self.patches.forwards

    def _register_input(self, tensor: torch.Tensor, k: int) -> torch.Tensor:
        self._guard.register(tensor, k)
        return tensor
