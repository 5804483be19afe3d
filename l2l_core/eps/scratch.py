"""The EPS without effect: gradients are reduced as in a step, and updates are made to scratch copies of the weights.

What it costs is what a step costs, on the same thread, so that a rehearsal can time it. What it is not: a way to train.
Masters, versions, optimizer state, statistics and hooks of the real store stay as they are.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.config import RelayConfig
from l2l_core.devices import Ledger
from l2l_core.eps.blocks import Block, GradientPiece
from l2l_core.eps.optimizers import StepHooks, clone_state, over, state_bytes, step_alone
from l2l_core.eps.store import LayerStore
from l2l_core.trace import Trace


class DryStore(LayerStore):
    """A second view of a store's blocks, whose updates go to scratch memory.

    Invariant: it writes to nothing that the store holds, but for `grad` of the masters while gradients are clipped.

    Args:
        store: whose blocks and thread it uses; no step of it may be under way.
        host: gets the bytes of gradient buffers booked.
        empty: as in `LayerStore`.
    """

    def __init__(self, store: LayerStore, host: Ledger, empty: Callable[[int], torch.Tensor]) -> None:
        self.__dict__.update(store.__dict__)
        self.optimizer = over(store.optimizer, store.optimizer.param_groups, store.optimizer.state)
        self._hooks = StepHooks(self.optimizer, dict, lambda block: None, of_all=False)
        self.host, self._empty = host, empty
        self._owner = {}  # nobody's statistics
        self._pool, self._under_way, self._room = {}, set(), threading.Condition()
        self._scratch: dict[Any, _Scratch] = {}
        self.state_bytes: dict[Block, int] = {}  # of the optimizer, for every block that was updated
        self._begin(RelayConfig(), Trace())

    def _update(self, block: Block) -> None:
        piece = self._whole.pop(block, None)
        if piece is None:
            return
        scratch = self._scratch_of(block, piece)
        start_s = time.perf_counter()
        for param in self._masters[block].params:
            param.grad = None  # clipping has set it
        undo = clone_state(scratch.everything()) if self._config.rollback or self._config.update == "deferred" else None
        scratch.step(piece)
        self.updated.append(block)
        self._give_back(piece.flat)
        self._record("update", block, piece, start_s)
        self.state_bytes[block] = scratch.state_bytes + self._idle_bytes(block, piece)
        del undo

    def _idle_bytes(self, block: Block, piece: GradientPiece) -> int:
        """Bytes of the state of parameters that get no update, which they have from earlier steps."""
        side, moving = self.side_of(block), piece.views()
        return sum(state_bytes(side.state.get(p, {})) for i, p in enumerate(side.masters) if i not in moving)

    def _scratch_of(self, block: Block, piece: GradientPiece) -> _Scratch:
        """Scratch memory of the gradient's form; those of one form share it."""
        groups = self.side_of(block).groups
        form = piece.trained.layout, piece.covers, tuple(groups[i] for i in piece.trained.indices)
        if form not in self._scratch:
            masters = self._masters[block].params
            known = [self.optimizer.state.get(masters[i]) for i in piece.trained.indices]
            self._scratch[form] = _Scratch(piece, form[2], self.optimizer, known)
        return self._scratch[form]


class _Scratch:
    """Weights of the form of one gradient, and an optimizer of the user's kind over them.

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
        """The weights and all that the optimizer keeps of them."""
        state = self._part.state
        kept = {f"{i} {name}": v for i, p in enumerate(self._params) for name, v in state.get(p, {}).items()}
        return {"flat": self.flat, **kept}

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        known = self.everything()
        return sum(v.nbytes for name, v in known.items() if name != "flat" and isinstance(v, torch.Tensor))
