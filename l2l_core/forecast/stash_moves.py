"""Moves of the stash's storages at every turn: recorded in a rehearsal, or by formula.

A profile has only the sums of their bytes; a stash on the disk needs the storages. `l2l_core/step/traffic/stash.py` moves them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count

import torch

from l2l_core.devices import Device, HostStashStore, Ledger, StashSlot, Ticket
from l2l_core.forecast.model_shapes import Reader, ShellStorage
from l2l_core.simulator import BEFORE_FIRST_STAY, Profile, StashMoves, StayCost, TurnCost
from l2l_core.trace import Trace

_TurnKey = tuple[int, int]  # visit and micro-batch


class RecordingStashStore(HostStashStore):
    """Stash store in host memory that no ledger counts; it records the moves of storages, numbered by micro-batch."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, Ledger("host", "Host memory"))
        self._storage_numbers: dict[StashSlot, tuple[int, int]] = {}  # micro-batch and number
        self._counters: dict[int, Iterator[int]] = defaultdict(count)
        self._fetched: dict[_TurnKey, list[int]] = defaultdict(list)
        self._demanded: dict[int, deque[tuple[int, tuple[int, ...]]]] = defaultdict(deque)  # bytes, storages
        self._offloaded: dict[_TurnKey, list[tuple[int, int]]] = defaultdict(list)

    def begin(self, trace: Trace, stalled: Callable[[], AbstractContextManager[None]]) -> None:
        for recorded in (self._storage_numbers, self._counters, self._fetched, self._demanded, self._offloaded):
            recorded.clear()

    def write_started(self, slots: Sequence[StashSlot], ticket: Ticket, k: int, visit: int) -> None:
        for slot in slots:
            if slot not in self._storage_numbers:
                self._storage_numbers[slot] = k, next(self._counters[k])
        self._offloaded[visit, k] += [(self._storage_numbers[slot][1], slot.nbytes) for slot in slots]

    def sources(self, slots: Sequence[StashSlot], layer: str, k: int, visit: int) -> list[torch.Tensor]:
        owned = [self._storage_numbers[slot] for slot in slots]
        assert all(owner == k for owner, _ in owned), f"micro-batch {k} fetches storages of other micro-batches"
        numbers = tuple(number for _, number in owned)
        if visit < 0:
            self._demanded[k].append((sum(slot.nbytes for slot in slots), numbers))
        else:
            self._fetched[visit, k] += numbers
        return super().sources(slots, layer, k, visit)

    def free(self, slot: StashSlot) -> None:
        self._storage_numbers.pop(slot, None)
        super().free(slot)

    def add_moves(self, profile: Profile) -> Profile:
        """Return the profile of the recorded pass with the moves of every turn."""

        def moving(index: int, turns: Sequence[TurnCost]) -> list[TurnCost]:
            visit = -1 if index == BEFORE_FIRST_STAY else profile.stays[index].visit
            return [turn._replace(moves=self._moves_of_turn(visit, turn)) for turn in turns]

        return _mark_freed(profile.map_turns(moving))

    def _moves_of_turn(self, visit: int, turn: TurnCost) -> StashMoves:
        at, demands = (visit, turn.k), self._demanded[turn.k]
        demanded = []
        for number, op in enumerate(turn.ops):
            nbytes = op.demand_bytes
            while nbytes > 0 and demands:
                size, storages = demands.popleft()
                nbytes -= size
                demanded.append((number, storages))
        return StashMoves(tuple(self._fetched[at]), tuple(demanded), tuple(self._offloaded[at]))


def _mark_freed(profile: Profile) -> Profile:
    """Return the profile with each storage freed after its last fetch; a storage offloaded in its last turn stays."""
    last: dict[tuple[int, int], tuple[int, bool]] = {}  # by micro-batch and storage: last turn, and if offloaded there
    for place, turn in enumerate(profile.turns):
        moves = turn.moves
        assert moves is not None
        read = [*moves.fetched, *(number for _, numbers in moves.demanded for number in numbers)]
        last |= {(turn.k, number): (place, False) for number in read}
        last |= {(turn.k, number): (place, True) for number, _ in moves.offloaded}
    freed: dict[int, list[int]] = defaultdict(list)
    for (_, number), (place, is_offloaded) in last.items():
        if not is_offloaded:
            freed[place].append(number)
    places = count()

    def marked(_: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        for turn in turns:
            if turn.moves:
                yield turn._replace(moves=turn.moves._replace(freed=(*turn.moves.freed, *freed[next(places)])))

    return profile.map_turns(marked)


@dataclass(frozen=True, slots=True)
class LiveStorages:
    """Storages that a micro-batch keeps; inputs of layers and gradients have numbers after the shell's."""

    shell_storages: Sequence[ShellStorage]  # created before the first layer
    shell_nbytes: Sequence[int]
    boundary_bytes: int  # of a layer's output, and of its gradient

    def numbers_read_by(self, reader: Reader) -> list[int]:
        """List the shell's storages with this reader."""
        return [number for number, each in enumerate(self.shell_storages) if each.reader == reader]

    def nbytes_of(self, numbers: Sequence[int]) -> int:
        """Return the total bytes of storages."""
        count = len(self.shell_nbytes)
        return sum(self.shell_nbytes[number] if number < count else self.boundary_bytes for number in numbers)


@dataclass(frozen=True, slots=True)
class _StorageUse:
    """Storages that a turn fetches before it begins, fetches on demand, and offloads afterwards."""

    prefetched: Sequence[int]
    demanded: Sequence[tuple[int, int]]  # index of the operation, storage
    offloaded: Sequence[int]


def add_stash_moves(profile: Profile, storages: LiveStorages, shell_is_trained: bool, overlap: bool) -> Profile:
    """Return a step by formula with the moves of every turn and their bytes over the link.

    With overlap, offloaded storages stay on the device until the next ones leave, so with one or two micro-batches fewer are
    fetched.
    """
    stays, micro_batches = profile.stays, profile.micro_batches
    turning = next(index for index, stay in enumerate(stays) if stay.has("loss"))
    uses = {BEFORE_FIRST_STAY: _StorageUse((), (), range(len(storages.shell_storages) + 1))}
    uses |= {index: _storage_use(stays, index, turning, storages, shell_is_trained) for index in range(len(stays))}
    before: dict[int, tuple[int, _StorageUse]] = {}  # last turn of every micro-batch
    places = count()

    def moves(index: int, k: int) -> StashMoves:
        place, use = next(places), uses[index]
        last, previous = before.get(k, (place, uses[BEFORE_FIRST_STAY]))
        before[k] = place, use
        # No prefetch for the first turn, nor in forward for a turn that follows its own micro-batch's.
        is_prefetched = place > micro_batches and (micro_batches > 1 or index > turning)
        leaving = set(previous.offloaded) if overlap and place - last <= (2 if is_prefetched else 1) else set()
        # A storage read at every turn is in use during the prefetch and leaves afterwards: the turn fetches it on demand.
        late = set(storages.numbers_read_by("layers")) if overlap and micro_batches == 1 and is_prefetched else set()
        fetched = [number for number in use.prefetched if number not in leaving]
        demanded = [(0, number) for number in fetched if number in late]
        leaving = set(previous.offloaded) if overlap and place - last == 1 else set()
        demanded += [(op, number) for op, number in use.demanded if number not in leaving]
        return StashMoves(
            fetched=tuple(number for number in fetched if number not in late),
            demanded=tuple((op, (number,)) for op, number in demanded),
            offloaded=tuple((number, storages.nbytes_of([number])) for number in use.offloaded),
            freed=tuple(storages.numbers_read_by(None)) if index == turning else (),  # at the end of forward
        )

    def moving(index: int, turns: Sequence[TurnCost]) -> list[TurnCost]:
        return [_apply_moves(turn, moves(index, turn.k), storages) for turn in turns]

    return _mark_freed(profile.map_turns(moving))


def _storage_use(
    stays: Sequence[StayCost], index: int, turning: int, storages: LiveStorages, shell_is_trained: bool
) -> _StorageUse:
    inputs = len(storages.shell_storages)
    gradients, is_last = inputs + turning + 1, index == len(stays) - 1
    layer = index if index <= turning else 2 * turning - index
    output_gradient = [gradients + layer + 1] if index > turning else []
    prefetched = [inputs + layer, *storages.numbers_read_by("layers"), *output_gradient]
    ops = stays[index].turns[0].ops
    for_loss = storages.numbers_read_by("loss")
    demanded = [(at, number) for at, op in enumerate(ops) if op.kind == "loss" for number in for_loss]
    if is_last and shell_is_trained:
        demanded += [(len(ops) - 1, number) for number in storages.numbers_read_by("end")]
    # The shell consumes the gradient of the first input.
    offloaded = () if is_last else (inputs + layer + 1 if index < turning else gradients + layer,)
    return _StorageUse(prefetched, demanded, offloaded)


def _apply_moves(turn: TurnCost, moves: StashMoves, storages: LiveStorages) -> TurnCost:
    ops = list(turn.ops)
    for at, numbers in moves.demanded:
        ops[at] = ops[at]._replace(demand_bytes=ops[at].demand_bytes + storages.nbytes_of(numbers))
    stash_bytes = sum(nbytes for _, nbytes in moves.offloaded)
    return turn._replace(
        ops=tuple(ops), fetch_bytes=storages.nbytes_of(moves.fetched), stash_bytes=stash_bytes, moves=moves
    )
