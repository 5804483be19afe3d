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

from l2l_core.config import RelayConfig
from l2l_core.devices import Device, Ledger
from l2l_core.eps.blocks import Block, BlockGradient
from l2l_core.eps.gradient_buffers import GradientBuffers, Reducer
from l2l_core.eps.gradient_codec import CATEGORY, OWNER, Residuals
from l2l_core.eps.optimizers import clone_shallow, clone_state, restrict_optimizer, step_part
from l2l_core.eps.store import LayerStore
from l2l_core.eps.updater import BlockGradients, EPSClock, Updater, check_can_step


def dry_run_store(
    store: LayerStore, host: Ledger, empty: Callable[[int], torch.Tensor], reducer: Reducer, residuals: Residuals
) -> LayerStore:
    """Return an EPS over the same masters whose updates have no effect; `store` must be idle.

    It writes only to `grad` of the masters (while gradients are clipped) and to statistics. `host` gets the bytes of gradient
    buffers booked; `empty` returns a float32 host buffer with a number of elements.
    """
    dry_run = LayerStore(store.masters, GradientBuffers(host, empty), residuals, store.thread)
    dry_run.updater, dry_run.reducer = DryRunUpdater(store), reducer
    return dry_run


class DryRunUpdater(Updater):
    """Updater of scratch weights with the layout of each gradient."""

    def __init__(self, store: LayerStore) -> None:
        super().__init__(store.masters)
        self._storage, optimizer = store.storage, store.optimizer
        self._optimizer = restrict_optimizer(optimizer, list(store.masters.model_params))  # without hooks
        self._by_layout: dict[Any, _ScratchWeights] = {}
        self._states: dict[Block, Sequence[Mapping[str, Any]]] = {}  # of blocks updated in any step so far

    def begin(self, config: RelayConfig, clock: EPSClock) -> None:
        self._is_undoable, self.updated = config.rollback or config.update != "eager", []
        check_can_step(self._masters, self._optimizer)

    def gradients_complete(self, gradients: BlockGradients) -> None:
        pass

    def update(self, block: Block, gradient: BlockGradient) -> Mapping[str, float]:
        scratch = self._find_scratch(block, gradient)
        for param in self._masters.params_of(block):
            param.grad = None  # set by clipping
        undo = [clone_state(state) for state in ({"flat": scratch.flat}, *scratch.states.values()) if self._is_undoable]
        scratch.step(gradient)
        del undo  # copied only for its cost
        self.updated.append(block)
        earlier = super().state_of(block)  # for parameters without an update
        self._states[block] = [scratch.states.get(i, state) for i, state in enumerate(earlier)]
        return {}

    def update_whole(self, gradients: BlockGradients) -> Mapping[Block, Mapping[str, float]]:
        return {block: self.update(block, gradient) for block, gradient in gradients.items()}

    def finish(self, gradients: BlockGradients) -> None:
        pass

    def undo(self) -> None:
        self.updated = []

    def state_of(self, block: Block) -> Sequence[Mapping[str, Any]]:
        return self._states[block] if block in self._states else super().state_of(block)

    def _find_scratch(self, block: Block, gradient: BlockGradient) -> _ScratchWeights:
        """Return scratch weights with the gradient's layout and groups; equal gradients share them."""
        groups = self._masters.entry_of(block).groups
        form = gradient.trained.layout, gradient.covers, tuple(groups[i] for i in gradient.trained.indices)
        if form not in self._by_layout:
            masters = self._masters.params_of(block)
            with self._storage.lease(self._storage.views([block]), "read"):
                known = [masters[i] for i in gradient.trained.indices]
                self._by_layout[form] = _ScratchWeights(gradient, form[2], self._optimizer, known)
        return self._by_layout[form]


class DryRunResiduals(Residuals):
    """Residuals for a dry run: booked like real ones, but equal sizes share memory.

    If the device is real, its ledger contains the real ones, which are not booked again.
    """

    def __init__(self, device: Device, is_real: bool) -> None:
        super().__init__(device)
        self._is_real = is_real
        self._by_block: dict[Block, dict[int, torch.Tensor]] = {}
        self._shared: dict[int, torch.Tensor] = {}
        self._booked_bytes = 0

    def for_block(self, block: Block) -> dict[int, torch.Tensor]:
        return self._by_block.setdefault(block, {})

    def create(self, block: Block, index: int, numel: int) -> torch.Tensor:
        if not (self._is_real and index in block.residuals):
            self.device.ledger.book(CATEGORY, OWNER, 4 * numel)
            self._booked_bytes += 4 * numel
        if numel not in self._shared:
            self._shared[numel] = self.device.empty(numel).zero_()
        self.for_block(block)[index] = self._shared[numel]
        return self._shared[numel]

    def close(self) -> None:
        """Release what only this object holds."""
        if self._booked_bytes:
            self.device.ledger.release(CATEGORY, OWNER, self._booked_bytes)
        self._booked_bytes = 0
        self._by_block.clear()
        self._shared.clear()


class _ScratchWeights:
    """Weights with the layout of one gradient, and a copy of the user's optimizer over them.

    The copy starts with the state of the real weights, whose step counts match the counts in the groups.
    """

    def __init__(
        self,
        gradient: BlockGradient,
        groups: tuple[int, ...],
        optimizer: Optimizer,
        known: Sequence[nn.Parameter],
    ) -> None:
        layout = gradient.trained.layout
        self.flat = torch.full((layout.numel,), 0.01)
        params = [nn.Parameter(view) for view in layout.views(self.flat)]
        self._params = dict(zip(gradient.trained.indices, params, strict=True))  # by index in the block
        own_groups = [
            {**group, "params": [p for p, i in zip(params, groups, strict=True) if i == number]}
            for number, group in enumerate(optimizer.param_groups)
        ]
        own_state: dict[nn.Parameter, dict[str, Any]] = {}
        for param, its in zip(params, known, strict=True):
            vars(param).update(vars(its))  # attributes that the optimizer may read
            if optimizer.state.get(its):
                own_state[param] = clone_state(optimizer.state[its])
        self._part = clone_shallow(optimizer, own_groups, defaultdict(dict, own_state))
        self.step(replace(gradient, flat=torch.full((layout.numel,), 0.01)))  # the first step creates the state

    def step(self, gradient: BlockGradient) -> None:
        """Update the scratch weights with a gradient of their layout."""
        views = gradient.views()
        for index, param in self._params.items():
            param.grad = views.get(index)
        step_part(self._part)
        for param in self._params.values():
            param.grad = None

    @property
    def states(self) -> dict[int, Mapping[str, Any]]:
        """Optimizer state of each updated parameter, by index in its block."""
        return {i: self._part.state[p] for i, p in self._params.items() if p in self._part.state}
