"""Updates without effect: what a step's updates cost, on the same thread, made to scratch copies of the weights.

What it is not: a way to train. Masters, versions, optimizer state and hooks of the real EPS stay as they are.
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
from l2l_core.eps.blocks import Block, GradientPiece
from l2l_core.eps.clock import Clock
from l2l_core.eps.gradients import Gradients
from l2l_core.eps.optimizers import clone_state, over, step_alone
from l2l_core.eps.reducer import Reducer
from l2l_core.eps.residuals import Residuals
from l2l_core.eps.store import LayerStore
from l2l_core.eps.updates import Whole, check_rates


def dry_store(
    store: LayerStore, host: Ledger, empty: Callable[[int], torch.Tensor], reducer: Reducer, residuals: Residuals
) -> LayerStore:
    """Make an EPS over the same masters, on the same thread, without effect; no step of `store` may be under way.

    It writes to nothing that `store` holds, but for `grad` of the masters while gradients are clipped, and statistics.

    Args:
        store: the real one.
        host: gets the bytes of gradient buffers booked.
        empty: makes a float32 host buffer of so many elements.
        reducer: as of a store; asks no other worker.
        residuals: scratch ones.
    """
    return LayerStore(store.masters, Gradients(host, empty), ToScratch(store), store.thread, residuals, reducer)


class ToScratch:
    """Is an `Update` that updates scratch memory of each gradient's form."""

    def __init__(self, store: LayerStore) -> None:
        self._masters, self._custody = store.masters, store.custody
        optimizer = self._masters.optimizer
        self._optimizer = over(optimizer, optimizer.param_groups, optimizer.state)  # without hooks
        self._scratch: dict[Any, _Scratch] = {}
        self._is_logged = False
        self.updated: list[Block] = []
        self._states: dict[
            Block, Sequence[Mapping[str, Any]]
        ] = {}  # of every block that was updated so far, in whatever step

    def begin(self, logged: bool, deferred: bool, clock: Clock) -> None:
        self._is_logged, self.updated = logged, []
        check_rates(self._masters, self._optimizer)

    def expect(self, block: Block) -> None:
        pass

    def spare(self, block: Block) -> None:
        pass

    def gathered(self, whole: Whole) -> None:
        pass

    def update(self, block: Block, piece: GradientPiece) -> Mapping[str, float]:
        scratch = self._scratch_of(block, piece)
        for param in self._masters.params_of(block):
            param.grad = None  # clipping has set it
        undo = clone_state(scratch.everything()) if self._is_logged else None
        scratch.step(piece)
        del undo  # it was made for what it costs
        self.updated.append(block)
        idle = self._of_masters(block)  # parameters without an update have what they have from earlier steps
        self._states[block] = [scratch.states.get(i, known) for i, known in enumerate(idle)]
        return {}

    def finish(self, whole: Whole) -> None:
        pass

    def undo(self) -> None:
        self.updated = []

    def state_of(self, block: Block) -> Sequence[Mapping[str, Any]]:
        known = self._states.get(block)
        return self._of_masters(block) if known is None else known

    def _of_masters(self, block: Block) -> Sequence[Mapping[str, Any]]:
        state = self._masters.optimizer.state
        return [state.get(param, {}) for param in self._masters.params_of(block)]

    def _scratch_of(self, block: Block, piece: GradientPiece) -> _Scratch:
        """Find scratch memory of the gradient's form; those of one form share it."""
        groups = self._masters.side_of(block).groups
        form = piece.trained.layout, piece.covers, tuple(groups[i] for i in piece.trained.indices)
        if form not in self._scratch:
            masters = self._masters.params_of(block)
            with self._custody.shown(block):
                known = [self._optimizer.state.get(masters[i]) for i in piece.trained.indices]
                self._scratch[form] = _Scratch(piece, form[2], self._optimizer, known)
        return self._scratch[form]


class _Scratch:
    """Holds weights of the form of one gradient, and an optimizer of the user's kind over them.

    It begins with what the optimizer knows of such weights: what is counted in groups belongs to that.
    """

    def __init__(
        self,
        piece: GradientPiece,
        groups: tuple[int, ...],
        optimizer: Optimizer,
        known: Sequence[Mapping[str, Any] | None],
    ) -> None:
        layout = piece.trained.layout
        self.flat = torch.full((layout.numel,), 0.01)
        self._params = [nn.Parameter(view) for view in layout.views(self.flat)]
        self._by_index = dict(zip(piece.trained.indices, self._params, strict=True))
        numbers = range(len(optimizer.param_groups))
        members = [[p for p, i in zip(self._params, groups, strict=True) if i == number] for number in numbers]
        self._part = over(
            optimizer,
            [{**group, "params": mine} for group, mine in zip(optimizer.param_groups, members, strict=True)],
            defaultdict(dict),
        )
        states = zip(self._params, known, strict=True)
        self._part.state.update({param: clone_state(state) for param, state in states if state})
        self.step(replace(piece, flat=torch.full((layout.numel,), 0.01)))  # the first one makes the state

    def step(self, piece: GradientPiece) -> None:
        """Update the scratch weights with a gradient of their form."""
        views = piece.views()
        for param, index in zip(self._params, piece.trained.indices, strict=True):
            param.grad = views.get(index)
        step_alone(self._part)
        for param in self._params:
            param.grad = None

    def everything(self) -> dict[str, torch.Tensor]:
        """List the weights and all that the optimizer keeps of them, by name."""
        state = self._part.state
        kept = {f"{i} {name}": v for i, p in enumerate(self._params) for name, v in state.get(p, {}).items()}
        return {"flat": self.flat, **kept}

    @property
    def states(self) -> dict[int, Mapping[str, Any]]:
        """What the optimizer keeps of each parameter that was updated, by index in its block."""
        return {i: self._part.state[p] for i, p in self._by_index.items() if p in self._part.state}
