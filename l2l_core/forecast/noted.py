"""Which storages of a stash move at which turn, noted while a step is rehearsed: events have the sums of their bytes alone."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count

import torch

from l2l_core.devices import Device, HostRoom, Ledger, Spot, Ticket
from l2l_core.simulator import START, Moves, Profile, TurnCost
from l2l_core.trace import Trace

_At = tuple[int, int]  # visit and micro-batch


class NotedRoom(HostRoom):
    """Lets storages wait in host memory that counts for nothing, and notes their moves, each by its number in the image."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, Ledger("host", "Host memory"))
        self._names: dict[Spot, tuple[int, int]] = {}  # micro-batch and number
        self._numbers: dict[int, Iterator[int]] = defaultdict(count)
        self._fetched: dict[_At, list[int]] = defaultdict(list)
        self._demanded: dict[int, deque[tuple[int, tuple[int, ...]]]] = defaultdict(deque)  # with their bytes, in order
        self._left: dict[_At, list[tuple[int, int]]] = defaultdict(list)

    def begin(self, trace: Trace, stalled: Callable[[], AbstractContextManager[None]]) -> None:
        for noted in (self._names, self._numbers, self._fetched, self._demanded, self._left):
            noted.clear()  # type: ignore[attr-defined]

    def left(self, spots: Sequence[Spot], ticket: Ticket, k: int, visit: int) -> None:
        for spot in spots:
            if spot not in self._names:
                self._names[spot] = k, next(self._numbers[k])
        self._left[visit, k] += [(self._names[spot][1], spot.nbytes) for spot in spots]

    def sources(self, spots: Sequence[Spot], layer: str, k: int, visit: int) -> list[torch.Tensor]:
        names = [self._names[spot] for spot in spots]
        assert all(owner == k for owner, _ in names), f"k={k} fetches storages of other micro-batches"
        numbers = tuple(number for _, number in names)
        if visit < 0:
            self._demanded[k].append((sum(spot.nbytes for spot in spots), numbers))
        else:
            self._fetched[visit, k] += numbers
        return super().sources(spots, layer, k, visit)

    def forget(self, spot: Spot) -> None:
        self._names.pop(spot, None)
        super().forget(spot)

    def told(self, profile: Profile) -> Profile:
        """Return the profile of the pass that was noted, with the storages of every turn."""

        def moving(index: int, turns: tuple[TurnCost, ...]) -> list[TurnCost]:
            visit = -1 if index == START else profile.stays[index].visit
            return [turn._replace(moves=self._moves(visit, turn)) for turn in turns]

        return without_gone(profile.with_turns(moving))

    def _moves(self, visit: int, turn: TurnCost) -> Moves:
        at, demands = (visit, turn.k), self._demanded[turn.k]
        demanded = []
        for number, op in enumerate(turn.ops):
            nbytes = op.demand_bytes
            while nbytes > 0 and demands:
                size, wanted = demands.popleft()
                nbytes -= size
                demanded.append((number, wanted))
        return Moves(tuple(self._fetched[at]), tuple(demanded), tuple(self._left[at]))


def without_gone(profile: Profile) -> Profile:
    """Return the profile with storages that go after they have been fetched for the last time; those that never are stay."""
    last: dict[
        tuple[int, int], tuple[int, bool]
    ] = {}  # by micro-batch and storage: its last turn, and whether it leaves there
    turns = list(profile.turns)
    for place, turn in enumerate(turns):
        assert turn.moves is not None
        last |= {(turn.k, number): (place, False) for number in _read(turn.moves)}
        last |= {(turn.k, number): (place, True) for number, _ in turn.moves.left}
    gone: dict[int, list[int]] = defaultdict(list)
    for (_, number), (place, leaves) in last.items():
        if not leaves:
            gone[place].append(number)
    places = iter(range(len(turns)))

    def parted(_: int, some: Iterable[TurnCost]) -> list[TurnCost]:
        return [
            turn._replace(moves=turn.moves._replace(gone=(*turn.moves.gone, *gone[next(places)])))
            for turn in some
            if turn.moves
        ]

    return profile.with_turns(parted)


def _read(moves: Moves) -> list[int]:
    return [*moves.fetched, *(number for _, wanted in moves.demanded for number in wanted)]
