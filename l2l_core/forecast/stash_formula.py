"""The storages of a stash by formula: what a shell makes beside what layers hand on, who reads it, and what of it has to move.

The counterpart of `recording_stash.py` for models that nobody has built; `l2l_core/step/traffic/stash.py` is what really moves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from l2l_core.forecast.model_shapes import ShellStorage
from l2l_core.forecast.recording_stash import mark_freed
from l2l_core.simulator import BEFORE_FIRST_STAY, Profile, StashMoves, StayCost, TurnCost

_Reader = Literal["layers", "loss", "end"] | None


@dataclass(frozen=True, slots=True)
class LiveStorages:
    """What a micro-batch keeps.

    Attributes:
        beside: storages that the shell makes before the first layer, and keeps.
        nbytes: of each of these.
        boundary_bytes: of what one layer hands to the next, and of its gradient.
    """

    shell_storages: Sequence[ShellStorage]
    shell_nbytes: Sequence[int]
    boundary_bytes: int

    def numbers_read_by(self, reader: _Reader) -> list[int]:
        """List the storages that have such a reader."""
        return [number for number, each in enumerate(self.shell_storages) if each.reader == reader]

    def nbytes_of(self, number: int) -> int:
        """Bytes of a storage; those beyond `beside` are inputs of layers and gradients."""
        return self.shell_nbytes[number] if number < len(self.shell_nbytes) else self.boundary_bytes


def add_stash_moves(profile: Profile, storages: LiveStorages, shell_is_trained: bool, overlap: bool) -> Profile:
    """Return a step by formula with what moves at every turn, and the bytes of that over the link.

    With overlap the image that leaves is on the device until the next one leaves, so that with one or two micro-batches less
    comes back.
    """
    stays, count = profile.stays, profile.micro_batches
    turning = next(index for index, stay in enumerate(stays) if stay.has("loss"))
    uses = {BEFORE_FIRST_STAY: _StorageUse((), (), range(len(storages.shell_storages) + 1))}
    uses |= {index: _storage_use(stays, index, turning, storages, shell_is_trained) for index in range(len(stays))}
    before: dict[int, tuple[int, _StorageUse]] = {}  # of every micro-batch its last turn
    places = iter(range(len(profile.turns)))

    def moves(index: int, k: int) -> StashMoves:
        place, use = next(places), uses[index]
        last, then = before.get(k, (place, uses[BEFORE_FIRST_STAY]))
        before[k] = place, use
        # of the first turn, and of one that follows its own micro-batch in forward, nobody is told before
        is_told = place > count and (count > 1 or index > turning)
        leaving = set(then.offloaded) if overlap and place - last <= (2 if is_told else 1) else set()
        # What it reads at every turn is still at work while it is expected, and then leaves: it comes back at the turn itself.
        late = set(storages.numbers_read_by("layers")) if overlap and count == 1 and is_told else set()
        wanted = [number for number in use.wanted if number not in leaving]
        asked = [(0, number) for number in wanted if number in late]
        leaving = set(then.offloaded) if overlap and place - last == 1 else set()
        asked += [(op, number) for op, number in use.demanded if number not in leaving]
        return StashMoves(
            fetched=tuple(number for number in wanted if number not in late),
            demanded=tuple((op, (number,)) for op, number in asked),
            offloaded=tuple((number, storages.nbytes_of(number)) for number in use.offloaded),
            freed=tuple(storages.numbers_read_by(None)) if index == turning else (),  # with the forward
        )

    def moving(index: int, turns: Sequence[TurnCost]) -> list[TurnCost]:
        return [_apply_moves(turn, moves(index, turn.k), storages) for turn in turns]

    return mark_freed(profile.map_turns(moving))


@dataclass(frozen=True, slots=True)
class _StorageUse:
    """What a turn does with storages: those that it is told to have, those that it asks for itself, those that leave after it."""

    wanted: Sequence[int]
    demanded: Sequence[tuple[int, int]]  # index of the operation, storage
    offloaded: Sequence[int]


def _storage_use(
    stays: Sequence[StayCost], index: int, loss_index: int, storages: LiveStorages, shell_is_trained: bool
) -> _StorageUse:
    given, inputs = storages.numbers_read_by("layers"), len(storages.shell_storages)
    gradients, is_last = inputs + loss_index + 1, index == len(stays) - 1
    layer = index if index <= loss_index else 2 * loss_index - index
    wanted = [inputs + layer, *given, *([gradients + layer + 1] if index > loss_index else [])]
    ops = stays[index].turns[0].ops
    demanded = [
        (at, number) for at, op in enumerate(ops) if op.kind == "loss" for number in storages.numbers_read_by("loss")
    ]
    if is_last and shell_is_trained:
        demanded += [(len(ops) - 1, number) for number in storages.numbers_read_by("end")]
    left = inputs + layer + 1 if index < loss_index else gradients + layer
    return _StorageUse(
        wanted, demanded, () if is_last else (left,)
    )  # the gradient of the first input goes into the shell


def _apply_moves(turn: TurnCost, moves: StashMoves, storages: LiveStorages) -> TurnCost:
    ops = list(turn.ops)
    for at, wanted in moves.demanded:
        ops[at] = ops[at]._replace(demand_bytes=ops[at].demand_bytes + sum(map(storages.nbytes_of, wanted)))
    fetch_bytes, stash_bytes = sum(map(storages.nbytes_of, moves.fetched)), sum(nbytes for _, nbytes in moves.offloaded)
    return turn._replace(ops=tuple(ops), fetch_bytes=fetch_bytes, stash_bytes=stash_bytes, moves=moves)
