"""How a block's weights and the optimizer's state follow from a gradient, and how that is undone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core._torch import foreach_norm
from l2l_core.eps.blocks import SHELL, Block, GradientPiece, Trained
from l2l_core.eps.clock import Clock
from l2l_core.eps.masters import Masters, warmth_of
from l2l_core.eps.optimizers import (
    Changes,
    call_after,
    call_before,
    call_torchs,
    check_hooks,
    clone_state,
    merge,
    settle,
    slice_of,
    step_alone,
    update_part,
    user_hooks,
)
from l2l_core.model import keep_without

_SAMPLED = 4096

Whole = dict[Block, GradientPiece]


class Update(Protocol):
    """Says what an EPS does with whole gradients. Between `begin` and `finish` or `undo` lies one step.

    Attributes:
        updated: blocks that may hold new weights in this step.
    """

    updated: list[Block]

    def begin(self, logged: bool, deferred: bool, clock: Clock) -> None:
        """Open a step.

        Args:
            logged: whether its updates can be undone.
            deferred: whether they come when all gradients are there.
            clock: times the thread of updates, and shall not while that waits.

        Raises:
            ValueError: this step could not be made, as far as that can be known before it.
        """

    def gathered(self, whole: Whole) -> None:
        """Hear that all gradients of a deferred step are there; `whole` afterwards has what hooks leave of them."""

    def expect(self, block: Block) -> None:
        """Hear, on the thread that trains, that `update` or `spare` comes for this block, after those announced before."""

    def spare(self, block: Block) -> None:
        """Hear that a block has no gradient in this step after all."""

    def update(self, block: Block, piece: GradientPiece) -> Mapping[str, float]:
        """Update a block; returns statistics of it. Before it writes it calls `Masters.before_write`."""

    def finish(self, whole: Whole) -> None:
        """Hear that the step's last update is done; `whole` is what the updates used, where they were deferred."""

    def undo(self) -> None:
        """Undo the step's updates if they were logged; else `updated` says what they were."""

    def state_of(self, block: Block) -> Sequence[Mapping[str, Any]]:
        """Give what the optimizer keeps of each of a block's parameters, to be read."""


class ByOptimizer:
    """The user's own optimizer updates the masters, block by block.

    Invariant: what its parts make of settings counts once per step, when the step is over; a step that is undone leaves
    weights, versions, state and settings as they were.

    Args:
        masters: the optimizer over them.
    """

    def __init__(self, masters: Masters) -> None:
        self._masters, self._optimizer = masters, masters.optimizer
        self._clear()

    def _clear(self) -> None:
        self.updated: list[Block] = []
        self._log: list[Callable[[], None]] = []
        self._kept: set[Block] = set()  # blocks that this step may change
        self._settings: Changes = {}  # what parts of the optimizer have made of settings in this step
        self._settings_back: Callable[[], None] = lambda: None  # to those before hooks
        self._is_logged = self._is_deferred = False

    def begin(self, logged: bool, deferred: bool, clock: Clock) -> None:
        self._clear()
        self._is_logged, self._is_deferred = logged, deferred
        if self._optimizer.state:
            check_newcomers(self._masters, self._has_state)
        check_rates(self._masters, self._optimizer)
        check_hooks(self._optimizer, self._masters.blocks, deferred)

    def _has_state(self, block: Block) -> bool:
        groups = self._masters.part_of(block).param_groups
        trained = [param for group in groups for param in group["params"] if param.requires_grad]
        return not trained or any(param in self._optimizer.state for param in trained)

    def expect(self, block: Block) -> None:
        pass

    def spare(self, block: Block) -> None:
        pass

    def gathered(self, whole: Whole) -> None:
        if user_hooks(self._optimizer):
            for block in self._masters.blocks:  # hooks may change any weight
                self._keep(block)
            # Without the state, which the log has: it may be larger than the weights
            self._settings_back = keep_without(vars(self._optimizer), {"state"})
            call_before(self._optimizer, self._masters.all_params(), whole)

    def update(self, block: Block, piece: GradientPiece) -> Mapping[str, float]:
        self._keep(block, piece)
        let_have(self._masters.params_of(block), piece)
        before = _sample(block, piece.trained).clone()
        try:
            self.updated.append(block)  # from here on the block may hold new weights
            merge(self._settings, update_part(self._masters.part_of(block), self._optimizer, warmth_of(block)))
        finally:
            for param in self._masters.params_of(block):
                param.grad = None  # a view of a buffer that the next gradient gets
        moved, size = (norm.item() for norm in foreach_norm([_sample(block, piece.trained) - before, before]))
        block.version += 1
        return {"update_ratio": moved / size if size else math.inf if moved else 0.0}

    def finish(self, whole: Whole) -> None:
        if self._log:  # settings change now, and a hook may still fail
            self._log.append(keep_without(vars(self._optimizer), {"state"}))
        settle(self._optimizer, self._settings)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look at
        if self._is_deferred and user_hooks(self._optimizer):
            call_after(self._optimizer, self._masters.all_params(), whole)
        else:
            call_torchs(self._optimizer)
        self._log.clear(), self._kept.clear()
        self._masters.book_state()

    def undo(self) -> None:
        for undo in reversed(self._log):
            undo()
        if self._log:
            self.updated.clear()
        if self.updated:  # for them the step has counted
            settle(self._optimizer, self._settings)
        else:
            self._settings_back()
        updated = self.updated
        self._clear()
        self.updated = updated
        self._masters.book_state()

    def state_of(self, block: Block) -> Sequence[Mapping[str, Any]]:
        state = self._masters.optimizer.state
        return [state.get(param, {}) for param in self._masters.params_of(block)]

    def _keep(self, block: Block, piece: GradientPiece | None = None) -> None:
        """Keep weights that are about to change, for the undo and for branches."""
        if block not in self._kept:
            self._kept.add(block)
            if self._is_logged:
                self._log.append(self._snapshot(block, piece))
            self._masters.before_write(block)

    def _snapshot(self, block: Block, piece: GradientPiece | None = None) -> Callable[[], None]:
        """Copy what an update with this gradient may change, 12 bytes per parameter with AdamW; returns the undo."""
        params, version = self._masters.params_of(block), block.version
        indices = range(len(params)) if piece is None else piece.views()
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


def check_rates(masters: Masters, optimizer: Optimizer) -> None:
    """Refuse an optimizer that would not take a step at its present rates and in its present mode.

    Raises:
        ValueError: a block warms up, and settings follow the rate; or its mode is one without steps.
    """
    if masters.findings.follows_rate and (warm := [block for block in masters.blocks if warmth_of(block) < 1]):
        raise ValueError(
            f"layer {warm[0].key} warms up, and {type(optimizer).__name__} keeps in its settings values that it computes from "
            "the learning rate: all layers share them, and this one needs others. Insert layers with warmup=0; nothing has been "
            "trained"
        )
    if callable(getattr(optimizer, "train", None)):
        part = slice_of(optimizer, [])  # its step changes nothing
        try:
            step_alone(part)
        except Exception as error:
            raise ValueError(
                f"{type(part).__name__} would not take a step now: {error}. If it has modes, call relay.optimizer.train() before "
                "steps, and eval() before weights are used or saved; nothing has been trained"
            ) from error


def let_have(params: list[nn.Parameter], piece: GradientPiece) -> None:
    """Give the optimizer's parameters of a block their gradients, and none to those that have none."""
    views = piece.views()
    for index, param in enumerate(params):
        param.grad = views.get(index)


def _sample(block: Block, trained: Trained) -> torch.Tensor:
    """Give evenly spaced weights of those that are trained, by which the size of an update is told: (samples,).

    They are about `_SAMPLED`; where parameters are frozen, at least one of every one that is trained.
    """
    if all(trained.flags):
        return block.master[:: -(-len(block.master) // _SAMPLED) or 1]
    places = [(block.held.pieces[i].offset, math.prod(block.held.pieces[i].size)) for i in trained.indices]
    stride = -(-trained.layout.used // _SAMPLED) or 1
    return torch.cat([block.master[start : start + numel : stride] for start, numel in places])
