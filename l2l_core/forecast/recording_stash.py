"""Which storages of a stash move at which turn, noted while a step is rehearsed: events have the sums of their bytes alone."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count

import torch

from l2l_core.devices import Device, HostStashStore, Ledger, StashSlot, Ticket
from l2l_core.simulator import BEFORE_FIRST_STAY, Profile, StashMoves, TurnCost
from l2l_core.trace import Trace

_TurnKey = tuple[int, int]  # visit and micro-batch


class RecordingStashStore(HostStashStore):
    """Lets storages wait in host memory that counts for nothing, and notes their moves, each by its number in the image."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, Ledger("host", "Host memory"))
        self._storage_numbers: dict[StashSlot, tuple[int, int]] = {}  # micro-batch and number
        self._counters: dict[int, Iterator[int]] = defaultdict(count)
        self._fetched: dict[_TurnKey, list[int]] = defaultdict(list)
        self._demanded: dict[int, deque[tuple[int, tuple[int, ...]]]] = defaultdict(deque)  # with their bytes, in order
        self._offloaded: dict[_TurnKey, list[tuple[int, int]]] = defaultdict(list)

    def begin(self, trace: Trace, stalled: Callable[[], AbstractContextManager[None]]) -> None:
        for noted in (self._storage_numbers, self._counters, self._fetched, self._demanded, self._offloaded):
            noted.clear()  # type: ignore[attr-defined]

    def write_started(self, slots: Sequence[StashSlot], ticket: Ticket, k: int, visit: int) -> None:
        for spot in slots:
            if spot not in self._storage_numbers:
                self._storage_numbers[spot] = k, next(self._counters[k])
        self._offloaded[visit, k] += [(self._storage_numbers[spot][1], spot.nbytes) for spot in slots]

    def sources(self, slots: Sequence[StashSlot], layer: str, k: int, visit: int) -> list[torch.Tensor]:
        names = [self._storage_numbers[spot] for spot in slots]
        assert all(owner == k for owner, _ in names), f"k={k} fetches storages of other micro-batches"
        numbers = tuple(number for _, number in names)
        if visit < 0:
            self._demanded[k].append((sum(spot.nbytes for spot in slots), numbers))
        else:
            self._fetched[visit, k] += numbers
        return super().sources(slots, layer, k, visit)

    def free(self, slot: StashSlot) -> None:
        self._storage_numbers.pop(slot, None)
        super().free(slot)

    def add_moves(self, profile: Profile) -> Profile:
        """Return the profile of the pass that was noted, with the storages of every turn."""

        def moving(index: int, turns: tuple[TurnCost, ...]) -> list[TurnCost]:
            visit = -1 if index == BEFORE_FIRST_STAY else profile.stays[index].visit
            return [turn._replace(moves=self._moves_of_turn(visit, turn)) for turn in turns]

        return mark_freed(profile.map_turns(moving))

    def _moves_of_turn(self, visit: int, turn: TurnCost) -> StashMoves:
        at, demands = (visit, turn.k), self._demanded[turn.k]
        demanded = []
        for number, op in enumerate(turn.ops):
            nbytes = op.demand_bytes
            while nbytes > 0 and demands:
                size, wanted = demands.popleft()
                nbytes -= size
                demanded.append((number, wanted))
        return StashMoves(tuple(self._fetched[at]), tuple(demanded), tuple(self._offloaded[at]))


def mark_freed(profile: Profile) -> Profile:
    """Return the profile with storages that go after they have been fetched for the last time; those that never are stay."""
    last: dict[
        tuple[int, int], tuple[int, bool]
    ] = {}  # by micro-batch and storage: its last turn, and whether it leaves there
    turns = list(profile.turns)
    for place, turn in enumerate(turns):
        assert turn.moves is not None
        last |= {(turn.k, number): (place, False) for number in _storages_read(turn.moves)}
        last |= {(turn.k, number): (place, True) for number, _ in turn.moves.offloaded}
    gone: dict[int, list[int]] = defaultdict(list)
    for (_, number), (place, leaves) in last.items():
        if not leaves:
            gone[place].append(number)
    places = iter(range(len(turns)))

    def parted(_: int, some: Iterable[TurnCost]) -> list[TurnCost]:
        return [
            turn._replace(moves=turn.moves._replace(freed=(*turn.moves.freed, *gone[next(places)])))
            for turn in some
            if turn.moves
        ]

    return profile.map_turns(parted)


def _storages_read(moves: StashMoves) -> list[int]:
    return [*moves.fetched, *(number for _, wanted in moves.demanded for number in wanted)]
