"""Updates without effect: what a step's updates cost, on the same thread, made to scratch copies of the weights.

What it is not: a way to train. Masters, versions, optimizer state and hooks of the real EPS stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.devices import Ledger
from l2l_core.eps.blocks import Block, GradientPiece
from l2l_core.eps.gradients import Gradients
from l2l_core.eps.masters import Masters
from l2l_core.eps.optimizers import clone_state, memory_of, over, step_alone, tensors_of
from l2l_core.eps.store import LayerStore
from l2l_core.eps.updates import Whole, check_rates


def dry_store(store: LayerStore, host: Ledger, empty: Callable[[int], torch.Tensor]) -> LayerStore:
    """Make an EPS over the same masters, on the same thread, without effect; no step of `store` may be under way.

    It writes to nothing that `store` holds, but for `grad` of the masters while gradients are clipped, and statistics.

    Args:
        store: the real one.
        host: gets the bytes of gradient buffers booked.
        empty: makes a float32 host buffer of so many elements.
    """
    return LayerStore(store.masters, Gradients(host, empty), ToScratch(store.masters), store.thread)


class ToScratch:
    """Is an `Update` that updates scratch memory of each gradient's form."""

    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        optimizer = masters.optimizer
        self._optimizer = over(optimizer, optimizer.param_groups, optimizer.state)  # without hooks
        self._scratch: dict[Any, _Scratch] = {}
        self._is_logged = False
        self.updated: list[Block] = []
        # What all blocks have in common, tables of quantised codes, say
        self._common = memory_of(
            {n: value for n, value in vars(optimizer).items() if n not in ("state", "param_groups")}
        )
        # Bytes of the state by place, of every block that was updated so far, in whatever step
        self._memory: dict[Block, dict[Hashable, int]] = {}

    def begin(self, logged: bool, deferred: bool) -> None:
        self._is_logged, self.updated = logged, []
        check_rates(self._masters, self._optimizer)

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
        # Blocks of one form share the scratch, and will have a state each
        places = {at if at in self._common else (block, at): nbytes for at, nbytes in scratch.memory.items()}
        self._memory[block] = {**places, **self._idle(block, piece)}
        return {}

    def finish(self, whole: Whole) -> None:
        pass

    def undo(self) -> None:
        self.updated = []

    def state_bytes_of(self, blocks: Iterable[Block]) -> int:
        memory: dict[Hashable, int] = {}
        for block in blocks:
            known = self._memory.get(block)
            memory.update(memory_of(*self._masters.side_of(block).state.values()) if known is None else known)
        return sum(memory.values())

    def _idle(self, block: Block, piece: GradientPiece) -> dict[int, int]:
        """Give the bytes of state that parameters without an update have from earlier steps, by address."""
        side, moving = self._masters.side_of(block), piece.views()
        return memory_of(*(side.state.get(p, {}) for i, p in enumerate(side.masters) if i not in moving))

    def _scratch_of(self, block: Block, piece: GradientPiece) -> _Scratch:
        """Find scratch memory of the gradient's form; those of one form share it."""
        groups = self._masters.side_of(block).groups
        form = piece.trained.layout, piece.covers, tuple(groups[i] for i in piece.trained.indices)
        if form not in self._scratch:
            masters = self._masters.params_of(block)
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
        numbers = range(len(optimizer.param_groups))
        members = [[p for p, i in zip(self._params, groups, strict=True) if i == number] for number in numbers]
        self._part = over(
            optimizer,
            [{**group, "params": mine} for group, mine in zip(optimizer.param_groups, members, strict=True)],
            defaultdict(dict),
        )
        states = zip(self._params, known, strict=True)
        self._copy_of: dict[int, int] = {}  # address of what it is a copy of, by its own
        for param, state in states:
            if state:
                self._part.state[param] = clone_state(state)
                pairs = zip(tensors_of(self._part.state[param]), tensors_of(state), strict=True)
                self._copy_of.update((copied.data_ptr(), tensor.data_ptr()) for copied, tensor in pairs)
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
    def memory(self) -> dict[int, int]:
        """Bytes of the optimizer's state by address; what began as a copy has that of the original."""
        return {self._copy_of.get(at, at): nbytes for at, nbytes in memory_of(*self._part.state.values()).items()}
