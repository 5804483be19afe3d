"""How a block's weights and the optimizer's state follow from a gradient, and how that is undone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core._torch import foreach_norm
from l2l_core.eps.blocks import SHELL, Block, BlockGradient, TrainedParameters
from l2l_core.eps.eps_clock import EPSClock
from l2l_core.eps.masters import Masters, warmup_factor
from l2l_core.eps.optimizers import (
    SettingChanges,
    apply_changes,
    call_after,
    call_before,
    call_torchs,
    check_hooks,
    clone_state,
    merge_changes,
    restrict_optimizer,
    step_part,
    update_part,
    user_hooks,
)
from l2l_core.model import snapshot_except

_SAMPLES = 4096

BlockGradients = dict[Block, BlockGradient]


class Updater(Protocol):
    """Says what an EPS does with whole gradients. Between `begin` and `finish` or `undo` lies one step.

    Attributes:
        updated: blocks that may hold new weights in this step.
    """

    updated: list[Block]

    def begin(self, undoable: bool, deferred: bool, clock: EPSClock) -> None:
        """Open a step.

        Args:
            logged: whether its updates can be undone.
            deferred: whether they come when all gradients are there.
            clock: times the thread of updates, and shall not while that waits.

        Raises:
            ValueError: this step could not be made, as far as that can be known before it.
        """

    def gradients_complete(self, gradients: BlockGradients) -> None:
        """Hear that all gradients of a deferred step are there; `whole` afterwards has what hooks leave of them."""

    def prefetch(self, block: Block) -> None:
        """Hear, on the thread that trains, that `update` or `spare` comes for this block, after those announced before."""

    def skip(self, block: Block) -> None:
        """Hear that a block has no gradient in this step after all."""

    def update(self, block: Block, gradient: BlockGradient) -> Mapping[str, float]:
        """Update a block; returns statistics of it. Before it writes it calls `Masters.before_write`."""

    def finish(self, gradients: BlockGradients) -> None:
        """Hear that the step's last update is done; `whole` is what the updates used, where they were deferred."""

    def undo(self) -> None:
        """Undo the step's updates if they were logged; else `updated` says what they were."""

    def state_of(self, block: Block) -> Sequence[Mapping[str, Any]]:
        """Give what the optimizer keeps of each of a block's parameters, to be read."""


class OptimizerUpdater:
    """The user's own optimizer updates the masters, block by block.

    Invariant: what its parts make of settings counts once per step, when the step is over; a step that is undone leaves
    weights, versions, state and settings as they were.

    Args:
        masters: the optimizer over them.
    """

    def __init__(self, masters: Masters) -> None:
        self._masters, self._optimizer = masters, masters.optimizer
        self._reset()

    def _reset(self) -> None:
        self.updated: list[Block] = []
        self._undo_log: list[Callable[[], None]] = []
        self._kept: set[Block] = set()  # blocks that this step may change
        self._setting_changes: SettingChanges = {}  # what parts of the optimizer have made of settings in this step
        self._restore_settings: Callable[[], None] = lambda: None  # to those before hooks
        self._is_undoable = self._is_deferred = False

    def begin(self, undoable: bool, deferred: bool, clock: EPSClock) -> None:
        self._reset()
        self._is_undoable, self._is_deferred = undoable, deferred
        if self._optimizer.state:
            check_newcomers(self._masters, self._has_state)
        check_can_step(self._masters, self._optimizer)
        check_hooks(self._optimizer, self._masters.blocks, deferred)

    def _has_state(self, block: Block) -> bool:
        groups = self._masters.part_of(block).param_groups
        trained = [param for group in groups for param in group["params"] if param.requires_grad]
        return not trained or any(param in self._optimizer.state for param in trained)

    def prefetch(self, block: Block) -> None:
        pass

    def skip(self, block: Block) -> None:
        pass

    def gradients_complete(self, gradients: BlockGradients) -> None:
        if user_hooks(self._optimizer):
            for block in self._masters.blocks:  # hooks may change any weight
                self._keep(block)
            # Without the state, which the log has: it may be larger than the weights
            self._restore_settings = snapshot_except(vars(self._optimizer), {"state"})
            call_before(self._optimizer, self._masters.all_params(), gradients)

    def update(self, block: Block, gradient: BlockGradient) -> Mapping[str, float]:
        self._keep(block, gradient)
        set_grads(self._masters.params_of(block), gradient)
        before = _sample_weights(block, gradient.trained).clone()
        try:
            self.updated.append(block)  # from here on the block may hold new weights
            merge_changes(
                self._setting_changes, update_part(self._masters.part_of(block), self._optimizer, warmup_factor(block))
            )
        finally:
            for param in self._masters.params_of(block):
                param.grad = None  # a view of a buffer that the next gradient gets
        moved, size = (
            norm.item() for norm in foreach_norm([_sample_weights(block, gradient.trained) - before, before])
        )
        block.version += 1
        return {"update_ratio": moved / size if size else math.inf if moved else 0.0}

    def finish(self, gradients: BlockGradients) -> None:
        if self._undo_log:  # settings change now, and a hook may still fail
            self._undo_log.append(snapshot_except(vars(self._optimizer), {"state"}))
        apply_changes(self._optimizer, self._setting_changes)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look at
        if self._is_deferred and user_hooks(self._optimizer):
            call_after(self._optimizer, self._masters.all_params(), gradients)
        else:
            call_torchs(self._optimizer)
        self._undo_log.clear(), self._kept.clear()
        self._masters.book_state()

    def undo(self) -> None:
        for undo in reversed(self._undo_log):
            undo()
        if self._undo_log:
            self.updated.clear()
        if self.updated:  # for them the step has counted
            apply_changes(self._optimizer, self._setting_changes)
        else:
            self._restore_settings()
        updated = self.updated
        self._reset()
        self.updated = updated
        self._masters.book_state()

    def state_of(self, block: Block) -> Sequence[Mapping[str, Any]]:
        state = self._masters.optimizer.state
        return [state.get(param, {}) for param in self._masters.params_of(block)]

    def _keep(self, block: Block, gradient: BlockGradient | None = None) -> None:
        """Keep weights that are about to change, for the undo and for branches."""
        if block not in self._kept:
            self._kept.add(block)
            if self._is_undoable:
                self._undo_log.append(self._snapshot(block, gradient))
            self._masters.before_write(block)

    def _snapshot(self, block: Block, gradient: BlockGradient | None = None) -> Callable[[], None]:
        """Copy what an update with this gradient may change, 12 bytes per parameter with AdamW; returns the undo."""
        params, version = self._masters.params_of(block), block.version
        indices = range(len(params)) if gradient is None else gradient.views()
        values = {params[i]: block.views[i].clone() for i in indices}
        state = {p: clone_state(self._optimizer.state[p]) for p in values if p in self._optimizer.state}

        def undo() -> None:
            block.version = version
            known = self._optimizer.state
            with torch.no_grad():
                for param, value in values.items():
                    param.copy_(value)
                    known.pop(param, None)  # also of those that had no state before the step
            known.update(state)

        return undo


def check_newcomers(masters: Masters, has_state: Callable[[Block], bool]) -> None:
    """Refuse to train a layer without state, between steps of an optimizer that makes state in its first step only.

    Raises:
        ValueError: names the layer.
    """
    for block, unit in masters.owner.items() if masters.findings.newcomers else ():
        if unit.key != SHELL and any(block.trained.flags) and not has_state(block):
            raise ValueError(
                f"layer {unit.key} ({unit.name}) has no state in {type(masters.optimizer).__name__}, which cannot take a "
                f"parameter after its first step ({masters.findings.newcomers}). Keep the layer frozen, insert it with "
                "optimizer='copy', or use another optimizer; nothing has been trained"
            )


def check_can_step(masters: Masters, optimizer: Optimizer) -> None:
    """Refuse an optimizer that would not take a step at its present rates and in its present mode.

    Raises:
        ValueError: a block warms up, and settings follow the rate; or its mode is one without steps.
    """
    if masters.findings.follows_rate and (warm := [block for block in masters.blocks if warmup_factor(block) < 1]):
        raise ValueError(
            f"layer {warm[0].key} warms up, and {type(optimizer).__name__} keeps in its settings values that it computes from "
            "the learning rate: all layers share them, and this one needs others. Insert layers with warmup=0; nothing has been "
            "trained"
        )
    if callable(getattr(optimizer, "train", None)):
        part = restrict_optimizer(optimizer, [])  # its step changes nothing
        try:
            step_part(part)
        except Exception as error:
            raise ValueError(
                f"{type(part).__name__} would not take a step now: {error}. If it has modes, call relay.optimizer.train() before "
                "steps, and eval() before weights are used or saved; nothing has been trained"
            ) from error


def set_grads(params: list[nn.Parameter], gradient: BlockGradient) -> None:
    """Give the optimizer's parameters of a block their gradients, and none to those that have none."""
    views = gradient.views()
    for index, param in enumerate(params):
        param.grad = views.get(index)


def _sample_weights(block: Block, trained: TrainedParameters) -> torch.Tensor:
    """Give evenly spaced weights of those that are trained, by which the size of an update is told: (samples,).

    They are about `_SAMPLED`; where parameters are frozen, at least one of every one that is trained.
    """
    if all(trained.flags):
        return block.master[:: -(-len(block.master) // _SAMPLES) or 1]
    places = [
        (block.master_layout.pieces[i].offset, math.prod(block.master_layout.pieces[i].size)) for i in trained.indices
    ]
    stride = -(-trained.layout.used // _SAMPLES) or 1
    return torch.cat([block.master[start : start + numel : stride] for start, numel in places])
