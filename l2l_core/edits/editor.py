"""Execution of commands between two steps: in the model's containers, in the EPS and in the ledger.

Invariant: a layer is either in one stack and in the EPS, or detached.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from l2l_core.devices import Ledger
from l2l_core.edits.detached_layers import DetachedLayer, DetachedLayers
from l2l_core.edits.layer_factory import LayerFactory
from l2l_core.edits.layer_registry import LayerRegistry
from l2l_core.edits.observed_positions import ObservedPositions
from l2l_core.edits.optimizer_state import ParameterSnapshot
from l2l_core.edits.stand_ins import ReturnForm, StandIn
from l2l_core.eps import BlockContents, LayerStore, StateView
from l2l_core.eps.blocks import Block, EmptyFn, Layout, Unit
from l2l_core.eps.optimizers import GroupOrder, ParameterIndex, clone_state
from l2l_core.model import Stack
from l2l_core.surgery import (
    describe_layer,
    loop_numbers_among,
    numbers_around,
    replace_layers,
    set_numbers,
    substitute_modules,
)


class Editor:
    """Editor of the stacks of one relay.

    Args:
        agree: returns when all workers have executed a group; raises if one has failed, after which it is undone on all.
    """

    def __init__(
        self,
        model: nn.Module,
        shell: Unit,
        layers: Sequence[Unit],
        store: LayerStore,
        host: Ledger,
        empty: EmptyFn,
        seed: Callable[[], int],
        agree: Callable[[], object],
    ) -> None:
        self.store, self._host, self.agree = store, host, agree
        self.registry = LayerRegistry(model, shell, layers)
        self.detached = DetachedLayers(host, empty)
        self.layer_factory = LayerFactory(self.registry, store, self.detached, empty, seed)
        self.force = False  # skip the refusals that rest on evidence; see `replace_layers`
        self.positions = ObservedPositions()
        self.units_in_branches: Callable[[], set[Unit]] = set  # the layers that other branches need
        self.group_order = GroupOrder(store.masters.groups, ParameterIndex(model, self.registry.stacks))
        for unit in layers:
            describe_layer(unit.module)  # fills the cache, so that the first edit is fast

    def close(self) -> None:
        """Delete files of detached layers, and drop the reference to the branches."""
        self.detached.close()
        self.units_in_branches = set

    # -- what is in memory ---------------------------------------------------------------------------------------------

    @contextmanager
    def load_layers(self, units: Iterable[Unit], writable: bool = False) -> Iterator[None]:
        """Hold weights and state of layers in memory during a block, which may change them if `writable`.

        Layers made in the block are stored at its end.
        """
        views = {block: StateView(*self.optimizer_state_of(block)) for unit in units for block in unit.blocks}
        with self.store.storage.lease(views, "write" if writable else "load"):
            try:
                yield
                for unit in self.layer_factory.unstored:
                    self.store.storage.store_unit(unit, self.detached[unit].entries)
                    self.detached.add(self.detached.pop(unit))  # books its new size
            finally:
                self.layer_factory.unstored.clear()

    def contents_of(self, layer: DetachedLayer) -> dict[Block, BlockContents]:
        """Return weights and state of a detached layer by block, read-only; memory-mapped if it is on disk."""
        if layer.path is not None:
            return layer.read_spilled()
        read = self.store.storage.read
        return {block: read(block, StateView(entry.masters, entry.state)) for block, entry in layer.entries.items()}

    def commit(self) -> None:
        """Commit the edits to the storage."""
        order = self.group_order.to_plain(self.registry.first_names)
        registry = self.registry
        notes = {"made": registry.key_count, "order": order, "loops": registry.loops}
        self.store.storage.commit(registry.units, notes)

    def restore_notes(self) -> None:
        """Restore the number of keys, the group order and the numbers of loops that an earlier process committed."""
        if notes := self.store.storage.notes:
            self.registry.key_count = notes["made"]
            self.group_order.load_plain(notes["order"], self.registry.first_names)
            for name, numbers in notes.get("loops", {}).items():
                self.set_loops(name, numbers)

    # -- the order of layers -------------------------------------------------------------------------------------------

    def restack(
        self,
        name: str,
        before: Sequence[Unit],
        after: Sequence[Unit],
        like: Mapping[Unit, Unit],
        force: bool,
        temporary: bool = False,
    ) -> Callable[[], None]:
        """Replace the layers `before` of the stack `name` by `after`; removed layers become detached.

        `like` is as in `RestackCommand`, `force` as in `replace_layers`. A `temporary` change is undone before the optimizer's
        groups are used, so that they are not sorted.

        Returns:
            A function that restores the same configuration objects and order of the optimizer's groups, if no stack has
            changed since.
        """
        stack = self.registry.find_stack(name)
        if self.registry.units_of(stack) != tuple(before):
            raise ValueError(f"the stack {stack.title} has changed since: undo the later edits first")
        available = {*before, *(layer.unit for layer in self.detached)}
        if freed := [unit.key for unit in after if unit not in available]:
            raise ValueError(
                f"{', '.join(freed)} was dropped with park=None, which freed its weights: it cannot be restored"
            )
        for unit in after:
            self.detached.load(unit)  # the disk may fail, so before any change
        twins = {unit.module: like[unit].module for unit in after if unit in like}
        inserted = {unit.module for unit in before if unit.key not in self.registry.first_structure.layers}
        modules, force = [unit.module for unit in after], force or self.force
        layers, stacks = self.registry.layers, self.registry.stacks
        groups = self._snapshot_groups()
        if not force and _moves_layers(before, after):
            (self.positions.check_shorter_list if temporary else self.positions.check_move)(
                self.registry.model, stack, name
            )
        # By its name and value a number of loops may be a depth (num_hidden_layers of ALBERT), which it does not follow.
        found = dict[str, int]()
        if len(before) != len(after) and self.layer_factory.run_model is not None:
            unclear = self.registry.numbers_of_depth_or_loops(stack)
            names = loop_numbers_among(self.registry.model, stack, self.layer_factory.run_model, unclear)
            found = {
                number: value for number, value in numbers_around(self.registry.model, stack).items() if number in names
            }
        loops, known_loops = self.registry.numbers_not_of_depth(stack) | found, self.registry.loops
        # May raise without having changed anything, so it runs before EPS and ledger change.
        restore_model = replace_layers(self.registry.model, stack, modules, twins, force, inserted)
        self._update_store(name, before, after)
        restore_loops = set_numbers(self.registry.model, self.registry.find_stack(name), loops)
        self.registry.add_loops(name, found)
        if not temporary:
            places = ParameterIndex(self.registry.model, self.registry.stacks)
            self.store.masters.reorder_groups(self.group_order.sort(self.store.masters.groups, places))

        def restore() -> None:
            restore_loops()
            self.registry.loops = known_loops
            restore_model()
            self._update_store(name, after, before)
            # Exactly: `update_stack` makes the layers of a stack adjacent, `add_units` appends to the groups, and sorting
            # would change an order that the user has made.
            self.registry.layers, self.registry.stacks = layers, stacks
            self._restore_groups(groups)

        return restore

    def _snapshot_groups(self) -> list[dict[str, Any]]:
        """Return the members of the optimizer's groups, in order."""
        return [
            {name: group[name] for name in ("params", "param_names") if name in group}
            for group in self.store.optimizer.param_groups
        ]

    def _restore_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        for group, members in zip(self.store.optimizer.param_groups, groups, strict=True):
            group.update(members)

    def _update_store(self, name: str, before: Sequence[Unit], after: Sequence[Unit]) -> None:
        """Update EPS, registry and ledger for the model, which has the layers `after` in place of `before`."""
        self._exchange_units(before, after)
        shell_moves, shell = self.registry.update_stack(name, after), self.registry.shell
        stale = [block for block in self.registry.blocks if block.shared or (shell_moves and block in shell.blocks)]
        if stale:  # a shared weight has the name of its first place in the model, which may have changed
            now = {param: name for name, param in self.registry.model.named_parameters()}
            for block in stale:
                old = zip(block.params, block.names, strict=True)
                self.store.masters.rename(block, [now.get(param, name) for param, name in old])

    def _exchange_units(self, before: Sequence[Unit], after: Sequence[Unit]) -> None:
        """Detach the layers that are only in `before`, and put those that are only in `after` into the EPS."""
        staying = set(after)
        removed = dict.fromkeys(unit for unit in before if unit not in staying)
        # Removed first: that replaces the lists of the groups, so that the old lists keep their contents.
        for unit, entries in self.store.masters.remove_units(removed).items():
            self.detached.add(DetachedLayer(unit, entries))
        added = [unit for unit in after if unit in self.detached]
        self.store.masters.add_units({unit: self.detached.pop(unit).entries for unit in added})

    @contextmanager
    def without_layers(
        self, units: Collection[Unit], forms: Mapping[Unit, ReturnForm], force: bool = False
    ) -> Iterator[None]:
        """Run a block without some layers, then restore them; raise ValueError if the model needs them.

        If all layers that a stack is to lose have a form in `forms`, stand-ins take their places. Else its list is shorter in the
        block, as after a drop.
        """
        registry = self.registry
        with ExitStack() as rollbacks:
            for stack in registry.stacks:
                before = registry.units_of(stack)
                after = [unit for unit in before if unit not in units]
                removed = dict.fromkeys(unit for unit in before if unit in units)
                if not removed:
                    continue
                if {*removed} <= forms.keys() and len(removed) == len(before) - len(after):
                    rollbacks.callback(self._put_stand_ins(stack, {unit: forms[unit] for unit in removed}))
                    continue
                if not after:
                    first, *others = before
                    keys = f"{first.key} to {others[-1].key}, {len(before)} layers" if others else first.key
                    raise ValueError(
                        f"all of {stack.title} ({keys}) would be skipped, but one layer must run: skip fewer"
                    )
                rollbacks.callback(self.restack(registry.first_name(stack), before, after, {}, force, temporary=True))
            self.check_shared()
            yield

    def _put_stand_ins(self, stack: Stack, forms: Mapping[Unit, ReturnForm]) -> Callable[[], None]:
        """Put stand-ins in the places of layers, which become detached; return the way back.

        No position, name or configuration changes.
        """
        registry, before, groups = self.registry, self.registry.units_of(stack), self._snapshot_groups()
        layers, stacks = registry.layers, registry.stacks
        stand_ins = {unit.module: StandIn(unit.module, unit.name, form) for unit, form in forms.items()}
        restore_model = substitute_modules(registry.model, stand_ins)
        self._exchange_units(before, after := [unit for unit in before if unit not in forms])
        registry.layers = [unit for unit in layers if unit not in forms]
        left = replace(stack, layers=tuple(unit.module for unit in after))
        registry.stacks = tuple(left if each is stack else each for each in stacks)

        def restore() -> None:
            restore_model()
            self._exchange_units(after, before)
            registry.layers, registry.stacks = layers, stacks
            self._restore_groups(groups)

        return restore

    def check_shared(self) -> None:
        """Raise ValueError if all layers with a shared weight are detached: no single layer could keep it."""
        held = set(self.registry.blocks)
        for layer in self.detached:
            for block in layer.unit.blocks:
                if block.shared and block not in held:
                    users = [each.unit.key for each in self.detached if block in each.unit.blocks]
                    raise ValueError(
                        f"layers {', '.join(users)} share the weights {', '.join(block.names)}, and would all be removed: keep "
                        "one of them, or untie the weights before you create the relay"
                    )

    def set_loops(self, name: str, numbers: Mapping[str, int]) -> tuple[dict[str, int], Callable[[], None]]:
        """Set the numbers that determine how often the forward runs the stack `name`.

        Returns:
            The old numbers, and a function that restores the same configuration objects.

        Raises:
            ValueError: the model has no such number.
        """
        registry = self.registry
        stack, loops, first = registry.find_stack(name), registry.loops, registry.first_structure.loops
        held = numbers_around(registry.model, stack)
        restore_model = set_numbers(registry.model, stack, numbers)
        old = {number: held[number] for number in numbers}
        first[name] = {**old, **first.get(name, {})}
        registry.loops = {**loops, name: {**loops.get(name, {}), **numbers}}

        def restore() -> None:
            restore_model()
            registry.loops = loops

        return old, restore

    # -- values and flags ----------------------------------------------------------------------------------------------

    def swap_values(
        self, unit: Unit, values: Mapping[nn.Parameter, ParameterSnapshot]
    ) -> dict[nn.Parameter, ParameterSnapshot]:
        """Set values and state of parameters of a layer, which must be in a stack; return the old ones."""
        old, masters = {}, self._masters_of(unit)
        for block in unit.blocks:
            if not values.keys().isdisjoint(block.params):
                self.store.masters.before_write(block)  # branches copy the block now
        with self.load_layers([unit], writable=True), torch.no_grad():
            for param, (value, state) in values.items():
                master = masters[param]
                had = self.store.optimizer.state.pop(master, None)
                old[param] = ParameterSnapshot(param.detach().clone(), None if had is None else clone_state(had))
                param.copy_(value)
                if state is not None:
                    self.store.optimizer.state[master] = clone_state(state)  # a redo needs `state` unchanged
        self.store.masters.book_state()
        return old

    def book_snapshots(self, owner: object, values: Iterable[ParameterSnapshot]) -> None:
        """Book the bytes of snapshots while their `owner`, a command, exists."""
        nbytes = sum(held.nbytes for held in values)
        self._host.book("other", "ways back", nbytes)
        weakref.finalize(owner, self._host.release, "other", "ways back", nbytes)

    def set_trained(self, unit: Unit, flags: Mapping[nn.Parameter, bool]) -> dict[nn.Parameter, bool]:
        """Set whether parameters of a layer, which must be in a stack, are trained; return the old flags."""
        old, masters = {param: param.requires_grad for param in flags}, self._masters_of(unit)
        for param, trained in flags.items():
            param.requires_grad_(trained)
            masters[param].requires_grad_(trained)  # another tensor object with the same memory
        return old

    def _masters_of(self, unit: Unit) -> dict[nn.Parameter, nn.Parameter]:
        if unit not in self.store.masters.units:
            raise ValueError(f"layer {unit.key} is in no stack now: undo its removal first")
        return self.store.masters.master_by_param(unit)

    # -- layers in stacks and detached ones ----------------------------------------------------------------------------

    @property
    def units_with_values(self) -> set[Unit]:
        """All units with values: the shell, the layers, and the detached layers."""
        return {*self.registry.units, *(layer.unit for layer in self.detached)}

    def optimizer_state_of(
        self, block: Block
    ) -> tuple[list[nn.Parameter], MutableMapping[nn.Parameter, dict[str, Any]]]:
        """Return the optimizer's parameters of a block, in a stack or detached, and the mapping with their state."""
        if entry := self.detached.entries.get(block):
            return entry.masters, entry.state
        state: Any = self.store.optimizer.state
        return self.store.masters.params_of(block), state

    def set_master(self, block: Block, local_layout: Layout | None, master: torch.Tensor) -> torch.Tensor:
        """Call `Block.set_local_master` for a block in a stack or a detached one; return the old buffer."""
        before, held = block.nbytes, block.set_local_master(local_layout, master, self.optimizer_state_of(block)[0])
        if block not in self.detached.entries:  # detached ones are booked by layer, see `rebook`
            self._host.release("weights", block.key, before)
            self._host.book("weights", block.key, block.nbytes)
        return held

    def set_block_trained(self, block: Block, flags: Sequence[bool]) -> None:
        """Set which parameters of a block are trained."""
        for param, master, trained in zip(block.params, self.optimizer_state_of(block)[0], flags, strict=True):
            param.requires_grad_(trained)
            master.requires_grad_(trained)

    def free_detached(self, unit: Unit) -> None:
        """Free a detached layer that no other branch needs; do nothing for a layer in a stack."""
        if unit in self.detached and unit not in self.units_in_branches():
            self._free_unit(unit).free()

    def free_unneeded(self, needed: set[Unit]) -> None:
        """Free detached layers that are not in `needed` and that no other branch needs."""
        needed = needed | self.units_in_branches()
        for unit in [layer.unit for layer in self.detached if layer.unit not in needed]:
            self._free_unit(unit)

    def _free_unit(self, unit: Unit) -> DetachedLayer:
        layer = self.detached.pop(unit)
        self.registry.remove(unit)
        self.store.storage.delete(layer.entries)
        return layer


def _moves_layers(before: Sequence[Unit], after: Sequence[Unit]) -> bool:
    """Return whether layers change their position or their number, not only one for another."""
    return len(before) != len(after) or any(
        new is not old and new in before for old, new in zip(before, after, strict=True)
    )
