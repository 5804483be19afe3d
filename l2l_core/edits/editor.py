"""Carries changes out, between two steps: in the model's containers, in the EPS, and in the books.

Invariant: a layer is in exactly one stack or parked, and the EPS holds it in the first case only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from l2l_core.devices import Ledger
from l2l_core.edits.detached_layers import DetachedLayer, DetachedLayers
from l2l_core.edits.layer_factory import LayerFactory
from l2l_core.edits.layer_registry import LayerRegistry
from l2l_core.edits.optimizer_state import ParameterSnapshot
from l2l_core.eps import BlockContents, LayerStore, StateView
from l2l_core.eps.blocks import Block, EmptyFn, Layout, Unit
from l2l_core.eps.optimizers import GroupOrder, ParameterIndex, clone_state
from l2l_core.surgery import describe_layer, replace_layers


class Editor:
    """Edits the stacks of one relay.

    Args:
        model: the user's.
        shell: the rest of the model.
        layers: the relay's, in order.
        store: the EPS.
        host: gets parked layers booked.
        empty: makes a host buffer of so many elements of a `dtype`.
        seed: of what is initialised anew.

    Attributes:
        lineup: which layers stand where.
        parking: the layers that are in no stack.
        new_layers: makes those that edits bring in.
        force: whether layers may stand where the evidence says that they cannot; see `rearrange`.
        needed_elsewhere: gives the layers that other branches need.
        group_order: of the optimizer's groups.
    """

    def __init__(
        self,
        model: nn.Module,
        shell: Unit,
        layers: Sequence[Unit],
        store: LayerStore,
        host: Ledger,
        empty: EmptyFn,
        seed: int,
    ) -> None:
        self.store, self._host = store, host
        self.registry = LayerRegistry(model, shell, layers)
        self.detached = DetachedLayers(host, empty)
        self.layer_factory = LayerFactory(self.registry, store, self.detached, empty, seed)
        self.force = False
        self.units_in_branches: Callable[[], set[Unit]] = set
        self.group_order = GroupOrder(store.masters.groups, ParameterIndex(model, self.registry.stacks))
        for unit in layers:
            describe_layer(unit.module)  # now rather than when the first edit has to wait for it

    # -- what is in memory ---------------------------------------------------------------------------------------------

    @contextmanager
    def load_layers(self, units: Iterable[Unit], writable: bool = False) -> Iterator[None]:
        """Let weights and state of layers be in memory in a block; new layers are whole when it ends, and are put away.

        Args:
            units: in a stack or parked, or the shell.
            changes: whether these change.
        """
        blocks = dict.fromkeys(block for unit in units for block in unit.blocks)
        with self.store.edit_storage.lease(
            {block: StateView(*self.optimizer_state_of(block)) for block in blocks}, writable
        ):
            try:
                yield
                for unit in self.layer_factory.unstored:
                    self.store.edit_storage.store_unit(unit, self.detached[unit].entries)
                    self.detached.add(self.detached.pop(unit))  # booked as it is now
            finally:
                self.layer_factory.unstored.clear()

    def contents_of(self, layer: DetachedLayer) -> dict[Block, BlockContents]:
        """Give weights and state of a parked layer, by block, to be read; what is on disk is mapped from there."""
        if layer.path is not None:
            return layer.read_spilled()
        held = {block: StateView(side.masters, side.state) for block, side in layer.entries.items()}
        return {block: self.store.edit_storage.read(block, known) for block, known in held.items()}

    def commit(self) -> None:
        """Let what was edited count."""
        order = self.group_order.to_plain(self.registry.first_names)
        self.store.edit_storage.commit(self.registry.units, {"made": self.registry.key_count, "order": order})

    def restore_notes(self) -> None:
        """Take over what edits of a process before this one have left."""
        if notes := self.store.edit_storage.notes:
            self.registry.key_count = notes["made"]
            self.group_order.load_plain(notes["order"], self.registry.first_names)

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
        """Put the layers `after` in place of `before` in a stack; parked ones come back, those that leave are parked.

        Args:
            name: that the stack had first.
            before, after, like, force: as of `Restack` and `rearrange`.
            passing: it will be taken back before anybody sees the optimizer's groups, whose order need not follow.

        Returns:
            What puts everything back, if nothing else was restacked since: to the same configuration objects, and to the same
            order of the optimizer's groups.
        """
        stack = self.registry.find_stack(name)
        if self.registry.units_of(stack) != tuple(before):
            raise ValueError(f"the stack {stack.title} has changed since: undo the later edits first")
        known = {*before, *(parked.unit for parked in self.detached)}
        if gone := [unit.key for unit in after if unit not in known]:
            raise ValueError(f"{', '.join(gone)} was dropped for good: its bytes are gone, it cannot come back")
        for unit in after:
            self.detached.load(unit)  # the disk may fail, so before anything has changed
        twins = {unit.module: like[unit].module for unit in after if unit in like}
        brought = {unit.module for unit in before if unit.key not in self.registry.first_structure.layers}
        modules = [unit.module for unit in after]
        force = force or self.force
        layers, stacks = self.registry.layers, self.registry.stacks
        groups = list(map(_group_members, self.store.optimizer.param_groups))
        # May refuse, and has changed nothing then: so it comes before the EPS and the books
        put_model_back = replace_layers(
            self.registry.model, stack, modules, like=twins, force=force, without_role=brought
        )
        self._update_store(name, before, after)
        if not temporary:
            places = ParameterIndex(self.registry.model, self.registry.stacks)
            self.store.masters.reorder_groups(self.group_order.sort(self.store.masters.groups, places))

        def put_back() -> None:
            put_model_back()
            self._update_store(name, after, before)
            # Exactly what was there: `follow` lets the layers of a stack stand side by side, `admit` appends to the groups,
            # and `arrange` would undo what somebody has done to their order by hand.
            self.registry.layers, self.registry.stacks = layers, stacks
            for group, members in zip(self.store.optimizer.param_groups, groups, strict=True):
                group.update(members)

        return put_back

    def _update_store(self, name: str, before: Sequence[Unit], after: Sequence[Unit]) -> None:
        """Let the EPS and the books follow the model, which holds the layers `after` in place of `before`."""
        staying = set(after)
        # Dismissed first: that gives the groups new lists, and what was there is put back from the old ones
        for unit, sides in self.store.masters.remove_units(
            dict.fromkeys(unit for unit in before if unit not in staying)
        ).items():
            self.detached.add(DetachedLayer(unit, sides))
        for unit in after:
            if unit in self.detached:
                self.store.masters.add_unit(unit, self.detached.pop(unit).entries)
        shell_moves, shell = self.registry.update_stack(name, after), self.registry.shell
        stale = [block for block in self.registry.blocks if block.shared or (shell_moves and block in shell.blocks)]
        if stale:  # a shared weight is called by its first place in the model, which may be another one now
            now = {param: name for name, param in self.registry.model.named_parameters()}
            for block in stale:
                known = zip(block.params, block.names, strict=True)
                self.store.masters.rename(block, [now.get(param, name) for param, name in known])

    @contextmanager
    def without_layers(self, units: Collection[Unit], force: bool = False) -> Iterator[None]:
        """Let layers sit out in a block: parked where they are, as if dropped; afterwards everything is as it was.

        Args:
            units: the layers.
            force: let them sit out against the evidence too; see `rearrange`.

        Raises:
            ValueError: a stack would be left without layers, or the model cannot be without one of these.
        """
        lineup = self.registry
        with ExitStack() as way_back:
            for stack in lineup.stacks:
                before = lineup.units_of(stack)
                after = [unit for unit in before if unit not in units]
                if not after:
                    raise ValueError(
                        f"all of {stack.title} ({_list_units(before)}) would sit out, and one layer must run: leave one of them in"
                    )
                if len(after) < len(before):
                    name = lineup.first_name(stack)
                    way_back.callback(self.restack(name, before, after, {}, force=force, temporary=True))
            self.check_shared()
            yield

    def check_shared(self) -> None:
        """Refuse to have let all users of a shared weight go: it would be in no layer, and could not be parked with one.

        Raises:
            ValueError: they have; names them.
        """
        held = set(self.registry.blocks)
        for parked in self.detached:
            for block in parked.unit.blocks:
                if block.shared and block not in held:
                    users = [each.unit.key for each in self.detached if block in each.unit.blocks]
                    raise ValueError(
                        f"layers {', '.join(users)} share the weights {', '.join(block.names)}, and would all leave: let one "
                        "of them stay, or untie them before the relay takes over"
                    )

    # -- values and flags ----------------------------------------------------------------------------------------------

    def swap_values(
        self, unit: Unit, values: Mapping[nn.Parameter, ParameterSnapshot]
    ) -> dict[nn.Parameter, ParameterSnapshot]:
        """Give parameters of a layer in a stack other values and state; returns what they had.

        Raises:
            ValueError: the layer is in no stack; nothing has changed.
        """
        old, masters = {}, self._masters_of(unit)
        for block in unit.blocks:
            if not values.keys().isdisjoint(block.params):
                self.store.masters.before_write(block)  # before any value: branches copy the block now
        with self.load_layers([unit], writable=True), torch.no_grad():
            for param, (value, state) in values.items():
                master = masters[param]
                known = self.store.optimizer.state.pop(master, None)
                old[param] = ParameterSnapshot(
                    param.detach().clone(), clone_state(known) if known is not None else None
                )
                param.copy_(value)
                if state is not None:
                    self.store.optimizer.state[master] = clone_state(state)  # its change may be done again
        self.store.masters.book_state()
        return old

    def book_snapshots(self, owner: object, values: Iterable[ParameterSnapshot]) -> None:
        """Book what somebody, a change, holds for as long as it is there itself."""
        nbytes = sum(held.nbytes for held in values)
        self._host.book("other", "ways back", nbytes)
        weakref.finalize(owner, self._host.release, "other", "ways back", nbytes)

    def set_trained(self, unit: Unit, flags: Mapping[nn.Parameter, bool]) -> dict[nn.Parameter, bool]:
        """Let parameters of a layer in a stack be trained or not; returns what they were.

        Raises:
            ValueError: the layer is in no stack; nothing has changed.
        """
        old, masters = {param: param.requires_grad for param in flags}, self._masters_of(unit)
        for param, trained in flags.items():
            param.requires_grad_(trained)
            masters[param].requires_grad_(trained)  # a second object over the same memory, with a flag of its own
        return old

    def _masters_of(self, unit: Unit) -> dict[nn.Parameter, nn.Parameter]:
        if unit not in self.store.masters.units:
            raise ValueError(f"layer {unit.key} is in no stack now: bring it back first")
        return self.store.masters.master_by_param(unit)

    # -- layers in stacks and parked ones ------------------------------------------------------------------------------

    @property
    def units_with_values(self) -> set[Unit]:
        """All units that have values: the shell, the layers, and the parked ones."""
        return {*self.registry.units, *(parked.unit for parked in self.detached)}

    def optimizer_state_of(
        self, block: Block
    ) -> tuple[list[nn.Parameter], MutableMapping[nn.Parameter, dict[str, Any]]]:
        """Give the optimizer's parameters of a block, in a stack or parked, and the mapping with their state."""
        if (side := self.detached.entry_of(block)) is not None:
            return side.masters, side.state
        return self.store.masters.params_of(block), self.store.optimizer.state

    def set_master(self, block: Block, local_layout: Layout | None, master: torch.Tensor) -> torch.Tensor:
        """Let a block, in a stack or parked, hold another buffer, as `Block.set_local_master`; returns the one that it held."""
        before, held = block.nbytes, block.set_local_master(local_layout, master, self.optimizer_state_of(block)[0])
        if self.detached.entry_of(block) is None:  # those of parked ones are booked by layer, see `book_again`
            self._host.release("weights", block.key, before)
            self._host.book("weights", block.key, block.nbytes)
        return held

    def set_block_trained(self, block: Block, flags: Sequence[bool]) -> None:
        """Say which parameters of a block are trained."""
        for param, master, trained in zip(block.params, self.optimizer_state_of(block)[0], flags, strict=True):
            param.requires_grad_(trained)
            master.requires_grad_(trained)

    def rebook(self) -> None:
        """Book anew what layers hold, after values have been exchanged: it may have another size."""
        self.detached.rebook()
        self.store.masters.book_state()

    def free_detached(self, unit: Unit) -> None:
        """Free a parked layer, for good; one that another branch has stays parked, one that is in a stack stays there."""
        if unit in self.detached and unit not in self.units_in_branches():
            self._free_unit(unit).free()

    def free_unneeded(self, needed: set[Unit]) -> None:
        """Free parked layers that no change can bring back any more, and no other branch has."""
        needed = needed | self.units_in_branches()
        for unit in [parked.unit for parked in self.detached if parked.unit not in needed]:
            self._free_unit(unit)

    def _free_unit(self, unit: Unit) -> DetachedLayer:
        parked = self.detached.pop(unit)
        self.registry.remove(unit)
        self.store.edit_storage.delete(parked.entries)
        return parked


def _group_members(group: Mapping[str, Any]) -> dict[str, Any]:
    """Give what a group of the optimizer holds, and their names if it was told them."""
    return {name: group[name] for name in ("params", "param_names") if name in group}


def _list_units(units: Sequence[Unit]) -> str:
    return units[0].key if len(units) == 1 else f"{units[0].key} to {units[-1].key}, {len(units)} layers"
