"""The EPS without effect: gradients are reduced as in a step, and updates are made to scratch copies of the weights.

What it costs is what a step costs, on the same thread, so that a rehearsal can time it. What it is not: a way to train.
Masters, versions, optimizer state, statistics and hooks of the real store stay as they are.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.config import RelayConfig
from l2l_core.flat import Layout
from l2l_core.memory import Ledger
from l2l_core.parts import over, step_alone
from l2l_core.states import clone_state
from l2l_core.step_hooks import StepHooks
from l2l_core.store import LayerStore
from l2l_core.trace import Trace
from l2l_core.units import Block


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
        grad, touched = piece
        scratch = self._scratch_of(block, touched)
        start_s = time.perf_counter()
        for param in self._masters[block].params:
            param.grad = None  # clipping has set it
        undo = clone_state(scratch.everything()) if self._config.rollback or self._config.update == "deferred" else None
        scratch.step(block.layout.views(grad), touched)
        self.updated.append(block)
        self._give_back(grad)
        self._record("update", block, start_s)
        self.state_bytes[block] = scratch.state_bytes
        del undo

    def _scratch_of(self, block: Block, touched: tuple[bool, ...]) -> _Scratch:
        """Scratch memory of the block's form; blocks of one form share it."""
        form = block.layout, touched, tuple(self.side_of(block).groups)
        if form not in self._scratch:
            known = [self.optimizer.state.get(master) for master in self._masters[block].params]
            self._scratch[form] = _Scratch(block.layout, form[2], touched, self.optimizer, known)
        return self._scratch[form]


class _Scratch:
    """Weights of one block's form, and an optimizer of the user's kind over them.

    It begins with what the optimizer knows of such a block: what is counted in groups belongs to that.
    """

    def __init__(
        self,
        layout: Layout,
        groups: tuple[int, ...],
        touched: tuple[bool, ...],
        optimizer: Optimizer,
        known: Sequence[Mapping[str, Any] | None],
    ) -> None:
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
        warm = layout.views(torch.full((layout.numel,), 0.01))
        self.step(warm, touched)  # the first one makes the state

    def step(self, views: list[torch.Tensor], touched: tuple[bool, ...]) -> None:
        """Update the scratch weights with a gradient, given by parameter."""
        for param, view, has in zip(self._params, views, touched, strict=True):
            param.grad = view if has else None
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
