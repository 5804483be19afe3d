"""Branches of the EPS: several whole states of one relay, of which one is trained at a time.

A branch is a line of training with a stack, weights, optimizer state, journal and count of steps of its own. Making one
copies no weights. Only when a block is about to change are its present values copied for the branches that still count
on them (copy-on-write), so a branch costs bytes for what has changed since, and for buffers. To switch is to exchange
pointers, not to copy.

Weights that somebody changes by hand count for every branch that has not trained them since it forked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core.config import RelayConfig
from l2l_core.devices import Ledger
from l2l_core.edits.commands import RestackCommand, transaction
from l2l_core.edits.editor import Editor
from l2l_core.edits.history import History
from l2l_core.eps.blocks import Block, EmptyFn, Layout, Unit
from l2l_core.eps.optimizers import OptimizerSettings, clone_state, load_settings, settings_of, state_bytes
from l2l_core.model import RandomState

MAIN_BRANCH = "main"


@dataclass(frozen=True, slots=True)
class Branch:
    """Is one line of a branch list.

    Attributes:
        name: of the branch.
        active: whether it is the one that is trained now.
        steps: number of completed steps.
        layers: number of layers.
        loss: of its last step, None before the first.
        nbytes: host bytes that it holds beside the present weights and optimizer state; what several branches have in
            common counts for each of them.
    """

    name: str
    active: bool
    steps: int
    layers: int
    loss: float | None
    nbytes: int


@dataclass(eq=False)
class BlockSnapshot:
    """Holds what a block has on a branch that is not trained now.

    Attributes:
        master: (numel,), of the type and part of the block.
        version: number of updates.
        states: what the optimizer knows of each parameter, None where nothing.
        part: how `master` is laid out, where it is a part of the block; states are of the same part.
    """

    master: torch.Tensor
    version: int
    states: list[dict[str, Any] | None]
    local_layout: Layout | None = None

    @property
    def nbytes(self) -> int:
        return self.master.nbytes + sum(state_bytes(state) for state in self.states if state)


@dataclass
class BranchState:
    """Holds a branch that is not trained now.

    Attributes:
        config, steps, history: as of the relay.
        stacks: layers by the stack's first name.
        values: by block, None where it holds the present values.
        trained: which parameters are, by block.
        buffers: copies, by unit.
        settings: of the optimizer, see `settings.py`; of its groups alone where a save is from before there were others.
        random: generators.
        units: the shell, layers that it has, and layers that it may bring back.
        stats: what its last step told of each layer.
    """

    config: RelayConfig
    steps: int
    history: History
    stacks: dict[str, tuple[Unit, ...]]
    snapshots: dict[Block, BlockSnapshot | None]
    trained: dict[Block, tuple[bool, ...]]
    buffers: dict[Unit, list[torch.Tensor | None]]
    settings: OptimizerSettings
    random: RandomState
    units: tuple[Unit, ...]
    stats: dict[Unit, dict[str, float]]

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len({unit for units in self.stacks.values() for unit in units})

    @property
    def nbytes(self) -> int:
        """Host bytes beside what is live."""
        buffers = sum(b.nbytes for held in self.buffers.values() for b in held if b is not None)
        return buffers + sum(values.nbytes for values in self.snapshots.values() if values is not None)


class Branches:
    """Keeps the branches of one relay.

    Invariant: the live values of a block are those of the active branch, and of each other branch whose `State.values`
    says None for it.

    Args:
        editor: of the relay.
        host: gets copies booked.
        empty: makes a host buffer of so many elements of a `dtype`.

    Attributes:
        active: name of the branch that is trained.
        others: the other ones, by name.
    """

    def __init__(self, editor: Editor, host: Ledger, empty: EmptyFn) -> None:
        self._editor, self._host, self._empty = editor, host, empty
        self.active = MAIN_BRANCH
        self.others: dict[str, BranchState] = {}
        editor.store.masters.before_write = self._copy_on_write
        editor.units_in_branches = lambda: {unit for state in self.others.values() for unit in state.units}

    def list_branches(self, steps: int, history: History) -> tuple[Branch, ...]:
        """List all branches by name; `steps` and `history` are those of the active one."""
        others = [
            Branch(name, False, state.steps, state.depth, state.history.loss, state.nbytes)
            for name, state in self.others.items()
        ]
        active = Branch(self.active, True, steps, len(self._editor.registry.layers), history.loss, 0)
        return tuple(sorted([active, *others], key=lambda branch: branch.name))

    def fork(self, name: str, now: BranchState) -> None:
        """Leave the present state `now` as it is under its name, and go on under another one.

        Raises:
            ValueError: no name, or one that there is.
        """
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"a branch needs a name, and {name!r} is none")
        if name in (self.active, *self.others):
            raise ValueError(f"there is a branch {name!r} already: {self._list_names()}")
        self.others[self.active] = now
        self.active = name

    def switch(self, name: str, now: BranchState, agree: Callable[[], object] = lambda: None) -> BranchState:
        """Leave the present state `now`, and make another branch's the present one; returns what it was left in.

        Of several workers a block that comes back may be whole afterwards where the others are in parts, and one that is parked
        may be in parts: each as it was when it was kept.

        Args:
            name: of the branch.
            now: the present state.
            agree: called when nothing can fail any more but this; if it raises, nothing has changed.

        Raises:
            ValueError: no such branch.
        """
        if name == self.active:
            return now
        target = self._find(name)
        editor, lineup = self._editor, self._editor.registry
        with transaction(editor) as group:
            for stack in lineup.stacks:
                before, after = lineup.units_of(stack), target.stacks[lineup.first_name(stack)]
                if before != after:
                    group.execute(RestackCommand(lineup.first_name(stack), before, after, proven=True))
            for unit in target.units:
                if any(target.snapshots[block] is not None for block in unit.blocks):
                    editor.detached.load(unit)
            agree()
        # Nothing can fail from here on.
        del self.others[name]
        self.others[self.active] = now  # before values are exchanged: this branch counts on the live ones
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
        editor.rebook()
        return target

    def discard(self, name: str) -> None:
        """Free a branch.

        Raises:
            ValueError: there is no such branch, or it is the active one.
        """
        if name == self.active:
            raise ValueError(f"{name!r} is the present branch: switch to another one first")
        self._find(name)
        del self.others[name]

    def snapshot(self) -> Callable[[], None]:
        """Keep what branches count on; the result forgets copies that were made since, for values that are back."""
        kept = {name: dict(state.snapshots) for name, state in self.others.items()}

        def put_back() -> None:
            for name, values in kept.items():
                self.others[name].snapshots = values

        return put_back

    def capture(self, config: RelayConfig, steps: int, history: History) -> BranchState:
        """Take the present state; nothing is copied but buffers, settings and random generators."""
        editor, lineup = self._editor, self._editor.registry
        present = editor.units_with_values
        units = tuple(u for u in dict.fromkeys([*lineup.units, *history.units]) if u in present)
        blocks = list(dict.fromkeys(block for unit in units for block in unit.blocks))
        return BranchState(
            config=config,
            steps=steps,
            history=history,
            stacks={lineup.first_name(stack): lineup.units_of(stack) for stack in lineup.stacks},
            snapshots=dict.fromkeys(blocks),
            trained={block: tuple(param.requires_grad for param in block.params) for block in blocks},
            buffers={unit: unit.buffers.copy() for unit in units},
            settings=settings_of(editor.store.optimizer),
            random=RandomState.capture(),
            units=units,
            stats={unit: dict(unit.stats) for unit in units},
        )

    def restore(self, active: str, others: Mapping[str, BranchState]) -> None:
        """Take over the branches of a saved relay."""
        self.active, self.others = active, dict(others)

    def make_snapshot(
        self,
        master: torch.Tensor,
        version: int,
        states: Sequence[dict[str, Any] | None],
        local_layout: Layout | None = None,
    ) -> BlockSnapshot:
        """Keep values of a block, or of the part that `part` says, booked for as long as somebody has them."""
        values = BlockSnapshot(master, version, list(states), local_layout)
        self._host.book("other", "branches", values.nbytes)
        # Several branches may hold it, so its bytes go with the last of them
        weakref.finalize(values, self._host.release, "other", "branches", values.nbytes)
        return values

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _copy_on_write(self, block: Block) -> None:
        counting = [state for state in self.others.values() if state.snapshots.get(block, _ABSENT) is None]
        if counting:
            masters, state = self._editor.optimizer_state_of(block)
            states = [clone_state(state[master]) if master in state else None for master in masters]
            # One copy for all of them, in memory that loads copy from: a switch makes it the master
            copied = self._empty(block.values.numel(), dtype=block.values.dtype).copy_(block.values)
            values = self.make_snapshot(copied, block.version, states, block.local_layout)
            for state in counting:
                state.snapshots[block] = values

    def _swap_in(self, block: Block, values: BlockSnapshot) -> None:
        """Make values of a block the live ones; branches that counted on the live ones keep these."""
        masters, state = self._editor.optimizer_state_of(block)
        states = [state.pop(master, None) for master in masters]  # taken out, not copied: pointers change places
        part = block.local_layout
        old = self.make_snapshot(
            self._editor.set_master(block, values.local_layout, values.master), block.version, states, part
        )
        block.version = values.version
        state.update({m: known for m, known in zip(masters, values.states, strict=True) if known is not None})
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


_ABSENT = object()  # a block that a branch does not know
