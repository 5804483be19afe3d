"""Weight slots on the device, and loads that run ahead of compute.

The plan is the list of remaining visits: forward as predicted from the last step, then the same layers in reverse order.
While a layer computes, the next `ahead` layers of the plan are loaded. A load takes the slot of the layer whose next visit is
farthest away, so the last layers of forward are still in their slots when backward begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from l2l_core.devices import Copy, Device, Ticket
from l2l_core.eps import WeightSource
from l2l_core.eps.blocks import Block, Layout, Unit
from l2l_core.schedule_rules import weight_slots
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
            self.view_cache[layouts] = unit.views(self.flat[: unit.numel])
        return self.view_cache[layouts]


class Prefetch:
    """Weight slots and their loads: `ahead + 1` slots, and `resident` further ones."""

    def __init__(
        self,
        device: Device,
        numel: int,
        ahead: int,
        load: Callable[[str, list[Copy], int], Ticket],  # copies of a layer to the slot with a number
        clock: ComputeClock,
        shell: Mapping[nn.Parameter, torch.Tensor],  # on the device; a layer may share some
        weight_source: WeightSource,
        dtype: torch.dtype,  # on the device; a load casts
        on_visit: Callable[[Unit], AbstractContextManager[object]],  # entered when the weights are loaded
        resident: int,
    ) -> None:
        self._weight_source, self._on_visit = weight_source, on_visit
        self._device, self._ahead, self._load, self._clock, self._shell = device, ahead, load, clock, shell
        count = weight_slots(ahead, resident)
        self._nbytes = dtype.itemsize * numel * count
        device.ledger.book("weights", "slots", self._nbytes)
        self.slots = [WeightSlot(number, device.empty(numel, dtype)) for number in range(count)]
        self._plan: list[Unit] = []
        self._position = 0

    def begin(self, plan: Sequence[Unit]) -> None:
        """Set the expected visits."""
        self._plan = list(plan)

    def replan(self, rest: Sequence[Unit]) -> None:
        """Replace the visits after the one that just ended."""
        self._plan[self._position :] = rest

    @contextmanager
    def visit(self, unit: Unit) -> Iterator[SlotStay]:
        """Point the unit's parameters to a slot with its weights, within the block.

        Yields the layer's stay in the slot, which may last longer than the block.
        """
        self._advance_to(unit)
        rest = self._plan[self._position : self._position + self._ahead + 2]
        self._weight_source.prefetch([each for each in dict.fromkeys(rest) if self._slot_of(each) is None])
        window = list(dict.fromkeys(rest[: self._ahead + 1]))
        for wanted in window:
            if self._slot_of(wanted) is None:
                self._start_load(wanted, keep=window)
        slot = self._slot_of(unit)
        assert slot is not None and slot.ticket is not None, f"{unit.key} is in no slot"
        with self._clock.stalled():
            slot.ticket.wait()
        self._return_blocks(slot)
        self._set_params(unit, slot.views(unit))
        self._clock.stay += 1
        try:
            with self._on_visit(unit):
                yield slot.stay
        finally:
            self._set_params(unit, [home for block in unit.blocks for home in block.host_views])
            self._position += 1

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

    def _advance_to(self, unit: Unit) -> None:
        """Move to the next visit of `unit` in the plan; insert one if none is expected."""
        try:
            self._position = self._plan.index(unit, self._position)
        except ValueError:
            self._plan.insert(self._position, unit)

    def _slot_of(self, unit: Unit) -> WeightSlot | None:
        return next((slot for slot in self.slots if slot.unit is unit), None)

    def _start_load(self, unit: Unit, keep: Sequence[Unit]) -> None:
        free = [slot for slot in self.slots if slot.unit not in keep]
        slot = max(free, key=self._next_use)  # Belady: evict the layer needed last
        self._abandon_load(slot)  # of a layer that was loaded and not visited
        slot.stay.is_over = True
        slot.unit, slot.stay, copies = unit, SlotStay(), []
        for target, block in zip(unit.ranges(slot.flat[: unit.numel]), unit.blocks, strict=True):
            with self._clock.stalled():
                copies.append((target, self._weight_source.acquire(block)))
            slot.borrowed.append(block)
        slot.ticket = self._load(unit.key, copies, slot.number)

    def _abandon_load(self, slot: WeightSlot) -> None:
        if slot.ticket is not None:
            slot.ticket.abandon()
        self._return_blocks(slot)

    def _return_blocks(self, slot: WeightSlot) -> None:
        for block in slot.borrowed:
            self._weight_source.release(block, slot.ticket)
        slot.borrowed = []

    def _next_use(self, slot: WeightSlot) -> int:
        rest = self._plan[self._position :]
        if slot.unit is None:
            return len(rest) + 1  # before a layer outside of the plan, which may compute until the step ends
        return rest.index(slot.unit) if slot.unit in rest else len(rest)
