"""Weight slots on the device, and their loads. A schedule decides which layer is loaded into which slot, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from l2l_core._torch import data_ptr
from l2l_core.devices import Copy, Device, Ticket
from l2l_core.eps import WeightSource
from l2l_core.eps.blocks import Block, Layout, Unit, put_back_params, weights_changed_message
from l2l_core.plan import Action
from l2l_core.step.traffic.compute_events import ComputeClock


@dataclass(eq=False, slots=True)
class SlotStay:
    """The time for which a layer's weights occupy a slot. It is over when another layer has the slot.

    A kept graph then has that layer's weights among its saved tensors, and no version counter shows it: check this before its
    backward.
    """

    is_over: bool = False


@dataclass(eq=False, slots=True)
class WeightSlot:
    """A device buffer for the weights of one layer.

    Invariant: `flat` holds the weights of `unit`, or will when `ticket` is done; that load reads the `borrowed` blocks.
    """

    number: int
    flat: torch.Tensor  # (numel of the largest layer,)
    unit: Unit | None = None
    stay: SlotStay = field(default_factory=SlotStay)
    ticket: Ticket | None = None
    borrowed: list[Block] = field(default_factory=list)
    view_cache: dict[tuple[Layout, ...], list[torch.Tensor]] = field(default_factory=dict)

    def views(self, unit: Unit) -> list[torch.Tensor]:
        """Return the unit's parameters as views of the slot; layers of one layout share them."""
        layouts = tuple(block.layout for block in unit.blocks)
        if layouts not in self.view_cache:
            self.view_cache[layouts] = unit.views(self.flat)
        return self.view_cache[layouts]


class WeightSlots:
    """Weight slots of one pass."""

    def __init__(
        self,
        device: Device,
        layers: Sequence[Unit],
        count: int,
        load: Callable[[str, list[Copy], int], Ticket],  # copies of a layer to the slot with a number
        clock: ComputeClock,
        shell: Mapping[nn.Parameter, torch.Tensor],  # on the device; a layer may share some
        weight_source: WeightSource,
        dtype: torch.dtype,  # on the device; a load casts
        on_visit: Callable[[Unit], AbstractContextManager[object]],  # entered when the weights are loaded
    ) -> None:
        self._weight_source, self._on_visit = weight_source, on_visit
        self._device, self._load, self._clock, self._shell = device, load, clock, shell
        self._units = {unit.key: unit for unit in layers}
        numel = max((unit.slot_numel(dtype) for unit in layers), default=0)
        self._nbytes = dtype.itemsize * numel * count
        device.ledger.book("weights", "slots", self._nbytes)
        self.slots = [WeightSlot(number, device.empty(numel, dtype)) for number in range(count)]

    def run(self, action: Action) -> None:
        """Run an action that announces loads (`A`), or a load (`L`)."""
        if action.kind == "A":
            self._weight_source.prefetch([self._units[layer] for layer in action.layers])
            return
        unit, slot = self._units[action.layer], self.slots[action.slot]
        self._abandon_load(slot)  # of a layer that was loaded and not visited
        slot.stay.is_over = True
        slot.unit, slot.stay, copies = unit, SlotStay(), []
        for target, block in zip(unit.ranges(slot.flat), unit.blocks, strict=True):
            with self._clock.stalled():
                copies.append((target, self._weight_source.acquire(block)))
            slot.borrowed.append(block)
        slot.ticket = self._load(unit.key, copies, slot.number)

    @contextmanager
    def visit(self, unit: Unit) -> Iterator[SlotStay]:
        """Wait for the unit's weights, and point its parameters to their slot within the block.

        Yields the layer's stay in the slot, which may last longer than the block.
        """
        slot = next((slot for slot in self.slots if slot.unit is unit), None)
        assert slot is not None and slot.ticket is not None, f"{unit.key} is in no slot"
        with self._clock.stalled():
            slot.ticket.wait()
        self._return_blocks(slot)
        _refuse_assigned(unit)
        self._set_params(unit, slot.views(unit))
        self._clock.stay += 1
        try:
            with self._on_visit(unit):
                yield slot.stay
        finally:
            put_back_params(unit.owners if any(block.in_bytes for block in unit.blocks) else ())
            self._set_params(unit, [home for block in unit.blocks for home in block.host_views])

    def _set_params(self, unit: Unit, views: Sequence[torch.Tensor]) -> None:
        """Point the unit's parameters to `views`; those shared with the shell stay there, as its code may keep views."""
        if any(block.shared for block in unit.blocks):
            views = [self._shell.get(param, view) for param, view in zip(unit.params, views, strict=True)]
        unit.set_data(views)

    def close(self) -> None:
        """Abandon loads in progress and release the slots."""
        for slot in self.slots:
            self._abandon_load(slot)
        self._device.ledger.release("weights", "slots", self._nbytes)
        for slot in self.slots:
            self._device.recycle(slot.flat)
        self.slots.clear()

    def _abandon_load(self, slot: WeightSlot) -> None:
        if slot.ticket is not None:
            slot.ticket.abandon()
        self._return_blocks(slot)

    def _return_blocks(self, slot: WeightSlot) -> None:
        for block in slot.borrowed:
            self._weight_source.release(block, slot.ticket)
        slot.borrowed = []


def _refuse_assigned(unit: Unit) -> None:
    """Raise RuntimeError if code outside of a layer has given its parameters other data since its last visit."""
    for block in unit.blocks:
        for param, home in zip(block.params, block.host_views, strict=True):
            if not block.shared and data_ptr(param) != data_ptr(home):
                raise RuntimeError(weights_changed_message("the model's own code", param, [unit]))
