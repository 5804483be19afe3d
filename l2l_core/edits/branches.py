"""Branches: named states of one relay, trained one at a time.

A branch has a stack, weights, optimizer state, journal and count of steps. Forking copies no weights: a block is copied when
it is about to change, for the branches that share its values (copy-on-write). So a branch needs bytes for the blocks that
changed since, and for buffers. Switching exchanges references.

Weights changed by hand change in every branch that has not trained them since it forked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core.config import RelayConfig
from l2l_core.devices import Ledger
from l2l_core.edits.commands import RestackCommand, SetLoopsCommand, transaction
from l2l_core.edits.editor import Editor
from l2l_core.edits.history import History
from l2l_core.eps.blocks import Block, EmptyFn, Layout, Unit
from l2l_core.eps.optimizers import OptimizerSettings, clone_state, load_settings, settings_of, state_bytes
from l2l_core.model import RandomState

MAIN_BRANCH = "main"


@dataclass(frozen=True, slots=True)
class Branch:
    """One line of a branch list.

    Example:
        See `Relay.fork`.
    """

    name: str
    active: bool
    steps: int  # number of completed steps
    layers: int  # number of layers
    loss: float | None  # of its last step, None before the first
    nbytes: int  # on the host, besides the current weights and optimizer state; shared bytes count for each branch


@dataclass(eq=False)
class BlockSnapshot:
    """Values of a block on an inactive branch."""

    master: torch.Tensor  # shape (numel,), with the dtype of the block
    version: int  # number of updates
    states: list[dict[str, Any] | None]  # optimizer state of each parameter
    local_layout: Layout | None = None  # of `master` and `states` if they are a part of the block

    @property
    def nbytes(self) -> int:
        return self.master.nbytes + sum(state_bytes(state) for state in self.states if state)


@dataclass
class BranchState:
    """State of an inactive branch."""

    config: RelayConfig
    steps: int
    history: History
    stacks: dict[str, tuple[Unit, ...]]  # layers by the stack's first name
    snapshots: dict[Block, BlockSnapshot | None]  # None: equal to the current values
    trained: dict[Block, tuple[bool, ...]]  # for each parameter
    buffers: dict[Unit, list[torch.Tensor | None]]  # copies
    settings: OptimizerSettings  # in old saves of the optimizer's groups alone
    random: RandomState
    units: tuple[Unit, ...]  # the shell, the layers, and the layers that an undo or redo may restore
    stats: dict[Unit, dict[str, float]]  # of the last step
    loops: dict[str, dict[str, int]]  # see `LayerRegistry.loops`

    @property
    def nbytes(self) -> int:
        """Host bytes in addition to the current values."""
        buffers = sum(b.nbytes for held in self.buffers.values() for b in held if b is not None)
        return buffers + sum(values.nbytes for values in self.snapshots.values() if values is not None)


class Branches:
    """The branches of one relay.

    Invariant: the current values of a block are those of the active branch, and of each other branch with None for the block
    in `BranchState.snapshots`.
    """

    def __init__(self, editor: Editor, host: Ledger, empty: EmptyFn) -> None:
        self._editor, self._host, self._empty = editor, host, empty
        self.active = MAIN_BRANCH
        self.others: dict[str, BranchState] = {}  # by name
        editor.store.masters.before_write = self._copy_on_write
        editor.units_in_branches = lambda: {unit for state in self.others.values() for unit in state.units}

    def list_branches(self, steps: int, history: History) -> tuple[Branch, ...]:
        """List all branches by name; `steps` and `history` are those of the active one."""
        found = [Branch(self.active, True, steps, len(self._editor.registry.layers), history.loss, 0)]
        for name, state in self.others.items():
            depth = len({unit for units in state.stacks.values() for unit in units})
            found.append(Branch(name, False, state.steps, depth, state.history.loss, state.nbytes))
        return tuple(sorted(found, key=lambda branch: branch.name))

    def fork(self, name: str, now: BranchState) -> None:
        """Store the current state `now` as the active branch; make `name`, which must be new, the active one."""
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{name!r} is no name for a branch: pass a string that is not empty")
        if name in (self.active, *self.others):
            raise ValueError(f"branch {name!r} exists already: {self._list_names()}")
        self.others[self.active] = now
        self.active = name

    def switch(self, name: str, now: BranchState) -> BranchState:
        """Store the current state `now`, load another branch, and return the loaded state.

        With several workers each block has the shards that it had when it was stored.

        Raises:
            ValueError: there is no such branch.
        """
        if name == self.active:
            return now
        target = self._find(name)
        editor, registry = self._editor, self._editor.registry
        with transaction(editor) as group:
            for stack in registry.stacks:
                first_name, before = registry.first_name(stack), registry.units_of(stack)
                if before != target.stacks[first_name]:
                    group.execute(RestackCommand(first_name, before, target.stacks[first_name], proven=True))
            for looped, numbers in registry.loops.items():
                wanted = {**registry.first_structure.loops[looped], **target.loops.get(looped, {})}
                if wanted != numbers:
                    group.execute(SetLoopsCommand(looped, wanted))
            for unit in target.units:
                if any(target.snapshots[block] is not None for block in unit.blocks):
                    editor.detached.load(unit)
        # Nothing can fail from here on.
        del self.others[name]
        self.others[self.active] = now  # before values are exchanged: this branch has the current ones
        self.active = name
        for block, values in target.snapshots.items():
            if values is not None:
                self._swap_in(block, values)
        for block, flags in target.trained.items():
            editor.set_block_trained(block, flags)
        for unit, buffers in target.buffers.items():
            unit.buffers.restore(buffers)
        load_settings(editor.store.optimizer, target.settings)
        for unit, stats in target.stats.items():
            unit.stats = dict(stats)
        target.random.restore()
        editor.detached.rebook()  # values of another size may have been exchanged
        editor.store.masters.book_state()
        return target

    def discard(self, name: str) -> None:
        """Free a branch; raise ValueError if it is active or missing."""
        if name == self.active:
            raise ValueError(f"{name!r} is the active branch: switch to another one first")
        self._find(name)
        del self.others[name]

    def snapshot(self) -> Callable[[], None]:
        """Return a function that drops the copies made since, to be called once the values are restored."""
        kept = [(state, dict(state.snapshots)) for state in self.others.values()]

        def restore() -> None:
            for state, values in kept:
                state.snapshots = values

        return restore

    def capture(self, config: RelayConfig, steps: int, history: History) -> BranchState:
        """Return the current state, with copies of buffers, settings and random generators only."""
        editor, registry = self._editor, self._editor.registry
        present = editor.units_with_values
        units = tuple(u for u in dict.fromkeys([*registry.units, *history.units]) if u in present)
        blocks = list(dict.fromkeys(block for unit in units for block in unit.blocks))
        return BranchState(
            config=config,
            steps=steps,
            history=history,
            stacks={registry.first_name(stack): registry.units_of(stack) for stack in registry.stacks},
            snapshots=dict.fromkeys(blocks),
            trained={block: tuple(param.requires_grad for param in block.params) for block in blocks},
            buffers={unit: unit.buffers.copy() for unit in units},
            settings=settings_of(editor.store.optimizer),
            random=RandomState.capture(),
            units=units,
            stats={unit: dict(unit.stats) for unit in units},
            loops=registry.loops,
        )

    def restore(self, active: str, others: Mapping[str, BranchState]) -> None:
        """Take over the branches of a saved relay."""
        self.active, self.others = active, dict(others)

    def booked(self, values: BlockSnapshot) -> BlockSnapshot:
        """Return `values`; their bytes are booked while they exist."""
        self._host.book("other", "branches", values.nbytes)
        # Several branches may share it, so its bytes are released with the last reference.
        weakref.finalize(values, self._host.release, "other", "branches", values.nbytes)
        return values

    def _copy_on_write(self, block: Block) -> None:
        sharing = [state for state in self.others.values() if state.snapshots.get(block, _ABSENT) is None]
        if sharing:
            masters, state = self._editor.optimizer_state_of(block)
            states = [clone_state(state[master]) if master in state else None for master in masters]
            # One copy for all branches, in memory that loads can use: a switch makes it the master.
            copied = self._empty(block.values.numel(), dtype=block.values.dtype).copy_(block.values)
            values = self.booked(BlockSnapshot(copied, block.version, states, block.local_layout))
            for branch in sharing:
                branch.snapshots[block] = values

    def _swap_in(self, block: Block, values: BlockSnapshot) -> None:
        """Make `values` the current ones of a block; branches that shared the current ones get a snapshot of these."""
        masters, state = self._editor.optimizer_state_of(block)
        states = [state.pop(master, None) for master in masters]  # references are exchanged, nothing is copied
        part, master = block.local_layout, self._editor.set_master(block, values.local_layout, values.master)
        old = self.booked(BlockSnapshot(master, block.version, states, part))
        block.version = values.version
        state.update({m: entry for m, entry in zip(masters, values.states, strict=True) if entry is not None})
        for other in self.others.values():
            held = other.snapshots.get(block, _ABSENT)
            if held is None:
                other.snapshots[block] = old
            elif held is values:
                other.snapshots[block] = None

    def _find(self, name: str) -> BranchState:
        if name not in self.others:
            raise ValueError(f"there is no branch {name!r}: {self._list_names()}")
        return self.others[name]

    def _list_names(self) -> str:
        return f"there are {', '.join(sorted([self.active, *self.others]))}"


_ABSENT = object()  # stands for a block that a branch does not have
