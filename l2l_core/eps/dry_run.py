"""Updates of scratch copies of the weights, to measure the cost of a step's updates without effect.

Masters, versions, optimizer state and hooks of the real EPS are unchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.devices import Ledger
from l2l_core.eps.blocks import Block, BlockGradient
from l2l_core.eps.eps_clock import EPSClock
from l2l_core.eps.gradient_buffers import GradientBuffers
from l2l_core.eps.optimizers import clone_shallow, clone_state, step_part
from l2l_core.eps.reducer import Reducer
from l2l_core.eps.residuals import Residuals
from l2l_core.eps.store import LayerStore
from l2l_core.eps.updater import BlockGradients, check_can_step


def dry_run_store(
    store: LayerStore, host: Ledger, empty: Callable[[int], torch.Tensor], reducer: Reducer, residuals: Residuals
) -> LayerStore:
    """Return an EPS over the same masters whose updates have no effect; `store` must be idle.

    It writes only to `grad` of the masters (while gradients are clipped) and to statistics. `host` gets the bytes of gradient
    buffers booked; `empty` returns a float32 host buffer with a number of elements.
    """
    return LayerStore(
        store.masters, GradientBuffers(host, empty), DryRunUpdater(store), store.thread, residuals, reducer
    )


class DryRunUpdater:
    """Updater of scratch weights with the layout of each gradient."""

    def __init__(self, store: LayerStore) -> None:
        self._masters, self._storage = store.masters, store.storage
        optimizer = self._masters.optimizer
        self._optimizer = clone_shallow(optimizer, optimizer.param_groups, optimizer.state)  # without hooks
        self._by_layout: dict[Any, _ScratchWeights] = {}
        self._is_undoable = False
        self.updated: list[Block] = []
        self._states: dict[Block, Sequence[Mapping[str, Any]]] = {}  # of blocks updated in any step so far

    def begin(self, undoable: bool, deferred: bool, clock: EPSClock) -> None:
        self._is_undoable, self.updated = undoable, []
        check_can_step(self._masters, self._optimizer)

    def prefetch(self, block: Block) -> None:
        pass

    def skip(self, block: Block) -> None:
        pass

    def gradients_complete(self, gradients: BlockGradients) -> None:
        pass

    def update(self, block: Block, gradient: BlockGradient) -> Mapping[str, float]:
        scratch = self._find_scratch(block, gradient)
        for param in self._masters.params_of(block):
            param.grad = None  # set by clipping
        undo = clone_state(scratch.tensors()) if self._is_undoable else None
        scratch.step(gradient)
        del undo  # copied only for its cost
        self.updated.append(block)
        earlier = self._master_states(block)  # for parameters without an update
        self._states[block] = [scratch.states.get(i, state) for i, state in enumerate(earlier)]
        return {}

    def finish(self, gradients: BlockGradients) -> None:
        pass

    def undo(self) -> None:
        self.updated = []

    def state_of(self, block: Block) -> Sequence[Mapping[str, Any]]:
        states = self._states.get(block)
        return self._master_states(block) if states is None else states

    def _master_states(self, block: Block) -> Sequence[Mapping[str, Any]]:
        state = self._masters.optimizer.state
        return [state.get(param, {}) for param in self._masters.params_of(block)]

    def _find_scratch(self, block: Block, gradient: BlockGradient) -> _ScratchWeights:
        """Return scratch weights with the gradient's layout and groups; equal gradients share them."""
        groups = self._masters.entry_of(block).groups
        form = gradient.trained.layout, gradient.covers, tuple(groups[i] for i in gradient.trained.indices)
        if form not in self._by_layout:
            masters = self._masters.params_of(block)
            with self._storage.lease(block):
                states = [self._optimizer.state.get(masters[i]) for i in gradient.trained.indices]
                self._by_layout[form] = _ScratchWeights(gradient, form[2], self._optimizer, states)
        return self._by_layout[form]


class _ScratchWeights:
    """Weights with the layout of one gradient, and a copy of the user's optimizer over them.

    The copy starts with the state of the real weights, whose step counts match the counts in the groups.
    """

    def __init__(
        self,
        gradient: BlockGradient,
        groups: tuple[int, ...],
        optimizer: Optimizer,
        states: Sequence[Mapping[str, Any] | None],
    ) -> None:
        layout = gradient.trained.layout
        self.flat = torch.full((layout.numel,), 0.01)
        self._params = [nn.Parameter(view) for view in layout.views(self.flat)]
        self._by_index = dict(zip(gradient.trained.indices, self._params, strict=True))
        numbers = range(len(optimizer.param_groups))
        members = [[p for p, i in zip(self._params, groups, strict=True) if i == number] for number in numbers]
        self._part = clone_shallow(
            optimizer,
            [{**group, "params": mine} for group, mine in zip(optimizer.param_groups, members, strict=True)],
            defaultdict(dict),
        )
        pairs = zip(self._params, states, strict=True)
        self._part.state.update({param: clone_state(state) for param, state in pairs if state})
        self.step(replace(gradient, flat=torch.full((layout.numel,), 0.01)))  # the first step creates the state

    def step(self, gradient: BlockGradient) -> None:
        """Update the scratch weights with a gradient of their layout."""
        views = gradient.views()
        for param, index in zip(self._params, gradient.trained.indices, strict=True):
            param.grad = views.get(index)
        step_part(self._part)
        for param in self._params:
            param.grad = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights and their optimizer state, by name."""
        state = self._part.state
        kept = {f"{i} {name}": v for i, p in enumerate(self._params) for name, v in state.get(p, {}).items()}
        return {"flat": self.flat, **kept}

    @property
    def states(self) -> dict[int, Mapping[str, Any]]:
        """Optimizer state of each updated parameter, by index in its block."""
        return {i: self._part.state[p] for i, p in self._by_index.items() if p in self._part.state}
