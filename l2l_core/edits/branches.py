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
from l2l_core.edits.change import Restack, all_or_nothing
from l2l_core.edits.editor import Editor
from l2l_core.edits.history import History
from l2l_core.eps.blocks import Block, Empty, Layout, Unit
from l2l_core.eps.optimizers import Settings, clone_state, put, settings_of, state_bytes
from l2l_core.model import RandomState

FIRST = "main"


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
class Values:
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
    part: Layout | None = None

    @property
    def nbytes(self) -> int:
        return self.master.nbytes + sum(state_bytes(state) for state in self.states if state)


@dataclass
class State:
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
    values: dict[Block, Values | None]
    trained: dict[Block, tuple[bool, ...]]
    buffers: dict[Unit, list[torch.Tensor | None]]
    settings: Settings
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
        return buffers + sum(values.nbytes for values in self.values.values() if values is not None)


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

    def __init__(self, editor: Editor, host: Ledger, empty: Empty) -> None:
        self._editor, self._host, self._empty = editor, host, empty
        self.active = FIRST
        self.others: dict[str, State] = {}
        editor.store.masters.before_write = self._copy_on_write
        editor.needed_elsewhere = lambda: {unit for state in self.others.values() for unit in state.units}

    def rows(self, steps: int, history: History) -> tuple[Branch, ...]:
        """List all branches by name; `steps` and `history` are those of the active one."""
        others = [
            Branch(name, False, state.steps, state.depth, state.history.loss, state.nbytes)
            for name, state in self.others.items()
        ]
        active = Branch(self.active, True, steps, len(self._editor.lineup.layers), history.loss, 0)
        return tuple(sorted([active, *others], key=lambda branch: branch.name))

    def fork(self, name: str, now: State) -> None:
        """Leave the present state `now` as it is under its name, and go on under another one.

        Raises:
            ValueError: no name, or one that there is.
        """
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"a branch needs a name, and {name!r} is none")
        if name in (self.active, *self.others):
            raise ValueError(f"there is a branch {name!r} already: {self._listed()}")
        self.others[self.active] = now
        self.active = name

    def switch(self, name: str, now: State, agree: Callable[[], object] = lambda: None) -> State:
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
        editor, lineup = self._editor, self._editor.lineup
        with all_or_nothing(editor) as group:
            for stack in lineup.stacks:
                before, after = lineup.units_of(stack), target.stacks[lineup.name_of(stack)]
                if before != after:
                    group.do(Restack(lineup.name_of(stack), before, after, proven=True))
            for unit in target.units:
                if any(target.values[block] is not None for block in unit.blocks):
                    editor.parking.fetch(unit)
            agree()
        # Nothing can fail from here on.
        del self.others[name]
        self.others[self.active] = now  # before values are exchanged: this branch counts on the live ones
        self.active = name
        for block, values in target.values.items():
            if values is not None:
                self._exchange(block, values)
        for block, flags in target.trained.items():
            editor.train_only(block, flags)
        for unit, buffers in target.buffers.items():
            unit.buffers.restore(buffers)
        put(editor.store.optimizer, target.settings)
        for unit, stats in target.stats.items():
            unit.stats = dict(stats)
        target.random.put()
        editor.book_again()
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
        kept = {name: dict(state.values) for name, state in self.others.items()}

        def put_back() -> None:
            for name, values in kept.items():
                self.others[name].values = values

        return put_back

    def take(self, config: RelayConfig, steps: int, history: History) -> State:
        """Take the present state; nothing is copied but buffers, settings and random generators."""
        editor, lineup = self._editor, self._editor.lineup
        present = editor.present
        units = tuple(u for u in dict.fromkeys([*lineup.units, *history.units]) if u in present)
        blocks = list(dict.fromkeys(block for unit in units for block in unit.blocks))
        return State(
            config=config,
            steps=steps,
            history=history,
            stacks={lineup.name_of(stack): lineup.units_of(stack) for stack in lineup.stacks},
            values=dict.fromkeys(blocks),
            trained={block: tuple(param.requires_grad for param in block.params) for block in blocks},
            buffers={unit: unit.buffers.copy() for unit in units},
            settings=settings_of(editor.store.optimizer),
            random=RandomState.take(),
            units=units,
            stats={unit: dict(unit.stats) for unit in units},
        )

    def adopt(self, active: str, others: Mapping[str, State]) -> None:
        """Take over the branches of a saved relay."""
        self.active, self.others = active, dict(others)

    def keep(
        self,
        master: torch.Tensor,
        version: int,
        states: Sequence[dict[str, Any] | None],
        part: Layout | None = None,
    ) -> Values:
        """Keep values of a block, or of the part that `part` says, booked for as long as somebody has them."""
        values = Values(master, version, list(states), part)
        self._host.book("other", "branches", values.nbytes)
        # Several branches may hold it, so its bytes go with the last of them
        weakref.finalize(values, self._host.release, "other", "branches", values.nbytes)
        return values

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _copy_on_write(self, block: Block) -> None:
        counting = [state for state in self.others.values() if state.values.get(block, _ABSENT) is None]
        if counting:
            masters, state = self._editor.optimizer_side(block)
            states = [clone_state(state[master]) if master in state else None for master in masters]
            # One copy for all of them, in memory that loads copy from: a switch makes it the master
            copied = self._empty(block.values.numel(), dtype=block.values.dtype).copy_(block.values)
            values = self.keep(copied, block.version, states, block.part)
            for state in counting:
                state.values[block] = values

    def _exchange(self, block: Block, values: Values) -> None:
        """Make values of a block the live ones; branches that counted on the live ones keep these."""
        masters, state = self._editor.optimizer_side(block)
        states = [state.pop(master, None) for master in masters]  # taken out, not copied: pointers change places
        part = block.part
        old = self.keep(self._editor.hold(block, values.part, values.master), block.version, states, part)
        block.version = values.version
        state.update({m: known for m, known in zip(masters, values.states, strict=True) if known is not None})
        for other in self.others.values():
            held = other.values.get(block, _ABSENT)
            if held is None:
                other.values[block] = old
            elif held is values:
                other.values[block] = None

    def _find(self, name: str) -> State:
        if name not in self.others:
            raise ValueError(f"there is no branch {name!r}: {self._listed()}")
        return self.others[name]

    def _listed(self) -> str:
        return f"there are {', '.join(sorted([self.active, *self.others]))}"


_ABSENT = object()  # a block that a branch does not know
