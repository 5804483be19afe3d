"""Whose a storage is, whether it is on the device, and how many bytes of it are booked where."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from l2l_core.devices import Device, StashSlot, StashStore, Ticket
from l2l_core.model import storage_key, storage_keys, storage_of
from l2l_core.step.graph import unguarded
from l2l_core.step.traffic.current_turn import NO_MICRO_BATCH, CurrentTurn


@dataclass(eq=False, slots=True)
class TrackedStorage:
    """One storage.

    Invariant: its bytes are on the device (`resident`), all of them, or its copy in the waiting room is up to date; so an
    exception may come at any moment. On the device they are booked by themselves (`counted`), or covered by the ring, or are
    activations that a profile includes.
    """

    key: int
    ref: weakref.ref[torch.UntypedStorage]
    nbytes: int
    category: str
    owner: str
    k: int  # whose image it is part of; NOBODY: stays on the device
    exact: bool  # to be booked by itself
    made_by: int = NO_MICRO_BATCH  # the micro-batch that was at work when it was made
    on_device: bool = True
    in_transit: bool = False  # leaves or arrives
    booked: bool = False
    slot: StashSlot | None = None  # where its copy waits
    dirty: bool = True  # the copy is missing or old
    ticket: Ticket | None = None  # of its last copy


StorageEntry = tuple[torch.UntypedStorage, TrackedStorage]


class StorageTracker:
    """Every storage that forwards have made and still keep, by micro-batch.

    Invariant: a storage is held as long as it lives and no longer: nobody is kept alive by being counted.

    Args:
        device, room: where images live and where they wait.
        at_work: whose turn it is.
        exempt: tensors of the model, whose storages are part of no image.
    """

    def __init__(
        self, device: Device, stash_store: StashStore, current_turn: CurrentTurn, exempt: Iterable[torch.Tensor]
    ) -> None:
        self._device, self._stash_store, self._current_turn = device, stash_store, current_turn
        self.storages: dict[int, TrackedStorage] = {}
        self._by_k: dict[int, dict[int, TrackedStorage]] = {}
        self._exempt = set(storage_keys(exempt))
        self.weight_keys: set[int] = set()  # storages in which a forward may change nothing

    # -- what belongs to whom ------------------------------------------------------------------------------------------

    def storages_of(self, k: int) -> list[TrackedStorage]:
        """List what the image of micro-batch `k` consists of."""
        return list(self._by_k.get(k, {}).values())

    def find(self, tensors: Iterable[torch.Tensor]) -> list[StorageEntry]:
        """Find the held storages in which tensors lie, each once."""
        with unguarded():
            keys = dict.fromkeys(storage_keys(tensors))
        return [(s, h) for key in keys if (h := self.storages.get(key)) is not None and (s := h.ref()) is not None]

    def add(
        self, storage: torch.UntypedStorage, k: int, category: str, exact: bool, owner: str | None = None
    ) -> TrackedStorage:
        """Hold and book a storage that was made just now, as a part of image `k`."""
        key = storage._cdata
        ref = weakref.ref(storage, lambda _: self.untrack(key))  # keys are addresses, and are used again
        owner = self._current_turn.owner if owner is None else owner
        held = TrackedStorage(key, ref, storage.nbytes(), category, owner, k, exact, self._current_turn.k)
        self.book(held)
        self.storages[key] = held  # only now: booking it may raise
        if k != NO_MICRO_BATCH:
            self._by_k.setdefault(k, {})[key] = held
        return held

    def track(self, tensor: torch.Tensor, k: int, category: str, owner: str, is_new: bool) -> None:
        """Make `tensor`'s storage part of image `k` and book it exactly; one that is not held yet if it `is_new`.

        Storages of the model itself (a slice of a weight or of a position table) are part of no image, nor are those without
        memory: zeros that forward-mode differentiation makes.
        """
        storage = storage_of(tensor)
        held = self.storages.get(storage._cdata)
        if storage._cdata in self._exempt or (held is None and not is_new) or tensor._is_zerotensor():
            return
        if held is None:
            held = self.add(storage, k, category, exact=False, owner=owner)
        if held.k == NO_MICRO_BATCH and held.k != k:
            held.k = k
            self._by_k.setdefault(k, {})[storage._cdata] = held
        self._recategorise(held, category, owner)

    def keep_on_device(self, storage: TrackedStorage) -> None:
        """Let a storage stay on the device: made once, at the first micro-batch, and kept by the model (a table, say)."""
        for key, other in list(self._by_k.get(storage.k, {}).items()):
            if other is storage:
                del self._by_k[storage.k][key]
        storage.k = NO_MICRO_BATCH

    def untrack(self, key: int) -> None:
        """A storage is gone, or is ours no longer."""
        held = self.storages.pop(key, None)
        if held is None:
            return
        self._by_k.get(held.k, {}).pop(key, None)
        self.unbook(held)
        if held.slot is not None:
            self._stash_store.free(held.slot)
            held.slot = None

    def exempt(self, tensors: Iterable[torch.Tensor], weights: bool = False) -> None:
        """Keep storages of these out of all images; in those of `weights` a forward may change nothing."""
        keys = set(storage_keys(tensors))
        self._exempt |= keys
        self.weight_keys |= keys if weights else set()

    @contextmanager
    def exempting(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Keep storages of these out of all images in the block."""
        keys = set(storage_keys(tensors)) - self._exempt
        self._exempt |= keys
        try:
            yield
        finally:
            self._exempt -= keys

    def is_exempt(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in a storage of the model or of the engine."""
        return storage_key(tensor) in self._exempt

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def book(self, storage: TrackedStorage) -> None:
        """Book a storage on the device, if it is to be booked by itself."""
        if storage.exact and not storage.in_transit and not storage.booked:
            self._device.ledger.book(storage.category, storage.owner, storage.nbytes)
            storage.booked = True

    def unbook(self, storage: TrackedStorage) -> None:
        """Book it no longer."""
        if storage.booked:
            self._device.ledger.release(storage.category, storage.owner, storage.nbytes)
            storage.booked = False

    def _recategorise(self, storage: TrackedStorage, category: str, owner: str) -> None:
        if storage.booked:
            self._device.ledger.move(storage.category, storage.owner, category, owner, storage.nbytes)
        storage.category, storage.owner, storage.exact = category, owner, True
        if storage.on_device:
            self.book(storage)

    def clear(self) -> None:
        """Nothing is held any more."""
        self._by_k.clear()
