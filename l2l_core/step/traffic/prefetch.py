"""Weight slots on the device, and loads that run ahead of compute.

The plan is the list of visits still to come: forward as predicted from the last step, then the same layers in reverse.
While one layer computes, the next `ahead` of the plan are loading. A slot is reused for the layer whose next visit is
farthest away, so at the turn the last layers of forward are still there when backward begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from l2l_core.devices import Copy, Device, Ticket
from l2l_core.eps import WeightSource
from l2l_core.eps.blocks import Block, Layout, Unit
from l2l_core.schedule_rules import weight_slots
from l2l_core.step.traffic.compute_clock import ComputeClock


class SlotStay:
    """A layer's time in one slot.

    Attributes:
        is_over: whether the slot was given to another layer. What a graph has saved of the weights is that layer's then, and
            no version counter tells: whoever keeps a graph asks here.
    """

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


@dataclass(eq=False, slots=True)
class WeightSlot:
    """A device buffer that holds one layer's weights.

    Invariant: `unit` is the layer whose weights are in `flat`, or on their way there until `ticket` is done; `lent` is what
    that load still reads. `seen_as` is what has been asked for by `views`.
    """

    number: int
    flat: torch.Tensor  # (numel of the largest layer,)
    unit: Unit | None = None
    stay: SlotStay = field(default_factory=SlotStay)
    ticket: Ticket | None = None
    borrowed: list[Block] = field(default_factory=list)
    view_cache: dict[tuple[Layout, ...], list[torch.Tensor]] = field(default_factory=dict)

    def views(self, unit: Unit) -> list[torch.Tensor]:
        """See the slot as the parameters of a unit; layers of one layout share the views."""
        layouts = tuple(block.layout for block in unit.blocks)
        if layouts not in self.view_cache:
            self.view_cache[layouts] = unit.views(self.flat[: unit.numel])
        return self.view_cache[layouts]


class Prefetch:
    """`ahead + 1` slots for the layers of one step, and as many more as layers shall stay.

    Args:
        device: where the slots are.
        numel: elements of the largest layer.
        ahead: how many layers are loaded ahead of the one that computes.
        load: issues the copies of one layer to the slot of a number, and returns their ticket.
        clock: of compute, which may have to wait for a load.
        shell: parameters of the shell, and where they are on the device; a layer may share one.
        place: lends what a load copies from.
        dtype: of the weights on the device; a load casts.
        visiting: entered for the length of a visit, when the weights are there; brings the layer's buffers.
        resident: slots besides those that streaming needs.
    """

    def __init__(
        self,
        device: Device,
        numel: int,
        ahead: int,
        load: Callable[[str, list[Copy], int], Ticket],
        clock: ComputeClock,
        shell: Mapping[nn.Parameter, torch.Tensor],
        weight_source: WeightSource,
        dtype: torch.dtype = torch.float32,
        on_visit: Callable[[Unit], AbstractContextManager[object]] = lambda unit: nullcontext(),
        resident: int = 0,
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
        """Start a step whose visits are expected to be `plan`; what earlier steps left in the slots is old."""
        for slot in self.slots:
            slot.unit = None
        self._plan, self._position = list(plan), 0

    def replan(self, rest: Sequence[Unit]) -> None:
        """Say what comes after the visit that just ended, as soon as it is known better than predicted."""
        self._plan[self._position :] = rest

    @contextmanager
    def visit(self, unit: Unit) -> Iterator[SlotStay]:
        """Let `unit` compute: its weights are in a slot and its parameters point there until the block ends.

        Yields the layer's stay in that slot, which may go on after the block.
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
        """Let a unit's parameters be `views`; what the shell has too is read there, since its code may keep a view."""
        if any(block.shared for block in unit.blocks):
            views = [self._shell.get(param, view) for param, view in zip(unit.params, views, strict=True)]
        unit.set_data(views)

    def drain(self) -> None:
        """Wait for loads that are still on their way."""
        for slot in self.slots:
            self._abandon_load(slot)
            slot.unit = slot.ticket = None

    def close(self) -> None:
        """Give the slots' bytes back."""
        self.drain()
        self._device.ledger.release("weights", "slots", self._nbytes)
        for slot in self.slots:
            self._device.recycle(slot.flat)
        self.slots.clear()

    def _advance_to(self, unit: Unit) -> None:
        """Move along the plan to `unit`; a visit that was not expected is put in."""
        try:
            self._position = self._plan.index(unit, self._position)
        except ValueError:
            self._plan.insert(self._position, unit)

    def _slot_of(self, unit: Unit) -> WeightSlot | None:
        return next((slot for slot in self.slots if slot.unit is unit), None)

    def _start_load(self, unit: Unit, keep: Sequence[Unit]) -> None:
        free = [slot for slot in self.slots if slot.unit not in keep]
        slot = max(free, key=self._next_use)  # Belady: what is wanted last goes first, and the plan knows the future
        self._abandon_load(slot)  # perhaps a load that nobody came for
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
            return len(rest) + 1  # before one whose layer the plan does not have: it may compute until the step ends
        return rest.index(slot.unit) if slot.unit in rest else len(rest)
