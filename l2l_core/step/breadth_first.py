"""Set-up and tear-down of a pass in which forwards are suspended: hooks, modes and patched layers.

An exception at any point leaves no patch and no hook behind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from l2l_core.eps.blocks import Unit, refuse_cached
from l2l_core.plan import RelaySchedule
from l2l_core.step.graph import BufferOrder, TensorGuard
from l2l_core.step.guards import ModuleAttributes, SideOutputs, UserHooks
from l2l_core.step.micro_batch import (
    CompiledRegionGuard,
    GraphSegmenter,
    StepContext,
    SuspendedForward,
    patch_function_apply,
    patch_layers,
    suspending_forward,
)
from l2l_core.step.pass_runtime import PassRuntime
from l2l_core.step.traffic import StashMode, raw_read_hook

_PERTURBATION = 0.02  # standard deviation in `perturb`, that of common initializations


class BreadthFirstRuntime(PassRuntime):
    """Runtime of a pass with suspended forwards. Use as a context manager."""

    def _set_up(self) -> None:
        super()._set_up()
        parts, enter = self.parts, self._stack.enter_context
        enter(patch_function_apply())
        hooks = enter(UserHooks(unit.module for unit in parts.layers))
        sides = SideOutputs(self.meter.record, self.meter.is_metering)
        attributes = ModuleAttributes(parts.shell_modules(), parts.layers, self._guard, sides, self.meter.is_metering)
        self.ctx = StepContext(
            self.outer_state,
            self.stash.current_turn,
            self.stash,
            self._stash_mode,
            self.stash.metering or (self.stash.offloads and not torch.is_grad_enabled()),
            self._guard,
            sides,
            hooks,
            self.meter,
            self.clock,
            attributes,
            self._buffer_order,
            partial(refuse_cached, parts.model),
        )
        enter(CompiledRegionGuard(parts.model, parts.layers, self.ctx))
        enter(patch_layers(parts.layers, suspending_forward))
        enter(attributes)

    def _set_up_guards(self) -> None:
        parts, later = self.parts, self._stack.callback
        self._buffer_order = BufferOrder(parts.shell.buffers, [u.buffers for u in parts.layers], self._attributes)
        later(self._buffer_order.close)
        self._stash_mode = StashMode(self.stash, self._buffer_order, parts.units)
        self._guard = TensorGuard(self._stash_mode.check_guarded_read, self.stash.restore_tensor)
        later(self.stash.clear)
        later(self._guard.close)
        if self.stash.offloads:
            self._stack.enter_context(raw_read_hook(self.stash.restore_tensor))

    def make_forwards(self) -> list[SuspendedForward]:
        """Make one suspended forward per micro-batch, each with its random stream."""
        run: Callable[[Any], Any] = partial(self.spec.task, self.parts.model)
        forwards: list[SuspendedForward] = []
        for k, (micro_batch, state) in enumerate(zip(self.spec.micro_batches, self.initial_states(), strict=True)):
            if self._stash_mode.needed_in_shell:
                state = state._replace(dispatch_modes=(*state.dispatch_modes, self._stash_mode))
            segmenter = GraphSegmenter(k, self._guard, use_meter_record=not self.meter.is_metering)
            if torch.is_grad_enabled():
                state = state._replace(function_modes=(segmenter, *state.function_modes))  # the outermost
            load_rows = partial(self.load_micro_batch, k, micro_batch)
            forwards.append(SuspendedForward(k, load_rows, run, state, self.ctx, segmenter))
            # Undone first and last begun first: forwards unwind while hooks, modes and slots are still in place.
            self._stack.callback(forwards[-1].cancel)
        return forwards

    def make_schedule(self) -> RelaySchedule:
        """Make the schedule of this pass."""
        layers, expected = ([unit.key for unit in units] for units in (self.parts.layers, self.spec.plan.layer_order))
        return RelaySchedule(self.spec.plan.settings(self.config, self.parts), layers, expected)

    def _register_input(self, tensor: torch.Tensor, k: int) -> torch.Tensor:
        self._guard.register(tensor, k)
        return tensor


def perturb(shell: Unit) -> None:
    """Add noise to a copy of the shell's weights: a zero head gives every input the same loss.

    Parameters kept as bytes, which may be codes, stay unchanged.
    """
    generator = torch.Generator().manual_seed(0)  # on the host, apart from all streams: equal on every device
    with torch.no_grad():
        for param in (p for block in shell.blocks if not block.in_bytes for p in block.params):
            noise = torch.randn(param.shape, generator=generator) * _PERTURBATION
            param.data.add_(noise.to(param.device, param.dtype))
