"""Owner, place and booked bytes of every storage that suspended micro-batches keep."""

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
    """A storage made by a forward.

    Invariant: all its bytes are on the device (`on_device`), or its copy in the stash store is up to date, so an exception may
    occur at any moment. On the device it is booked itself (`booked`), covered by the ring, or part of the metered activations.
    """

    key: int
    ref: weakref.ref[torch.UntypedStorage]
    nbytes: int
    category: str
    owner: str
    k: int  # the micro-batch whose stash it is part of; NO_MICRO_BATCH: it stays on the device
    exact: bool  # booked itself
    made_by: int = NO_MICRO_BATCH  # the micro-batch whose turn made it
    on_device: bool = True
    in_transit: bool = False  # being offloaded or fetched
    booked: bool = False
    slot: StashSlot | None = None  # place of its copy
    dirty: bool = True  # the copy is missing or outdated
    ticket: Ticket | None = None  # of its last copy


StorageEntry = tuple[torch.UntypedStorage, TrackedStorage]


class StorageTracker:
    """All live storages that forwards have made, by micro-batch. It holds weak references only."""

    def __init__(
        self, device: Device, stash_store: StashStore, current_turn: CurrentTurn, exempt: Iterable[torch.Tensor]
    ) -> None:
        self._device, self._stash_store, self._current_turn = device, stash_store, current_turn
        self.storages: dict[int, TrackedStorage] = {}
        self._by_k: dict[int, dict[int, TrackedStorage]] = {}
        self._exempt = set(storage_keys(exempt))
        self.weight_keys: set[int] = set()  # storages that a forward must not change

    # -- ownership -----------------------------------------------------------------------------------------------------

    def storages_of(self, k: int) -> list[TrackedStorage]:
        """Return the stash of micro-batch `k`."""
        return list(self._by_k.get(k, {}).values())

    def find(self, tensors: Iterable[torch.Tensor]) -> list[StorageEntry]:
        """Return the tracked storages of the tensors, each once."""
        with unguarded():
            keys = dict.fromkeys(storage_keys(tensors))
        return [(s, h) for key in keys if (h := self.storages.get(key)) is not None and (s := h.ref()) is not None]

    def add(
        self, storage: torch.UntypedStorage, k: int, category: str, exact: bool, owner: str | None = None
    ) -> TrackedStorage:
        """Track and book a new storage as part of the stash of micro-batch `k`."""
        key = storage._cdata
        ref = weakref.ref(storage, lambda _: self.untrack(key))  # keys are addresses, which are reused
        owner = self._current_turn.owner if owner is None else owner
        tracked = TrackedStorage(key, ref, storage.nbytes(), category, owner, k, exact, self._current_turn.k)
        self.book(tracked)
        self.storages[key] = tracked  # last: booking may raise
        self._assign(tracked, k)
        return tracked

    def _assign(self, tracked: TrackedStorage, k: int) -> None:
        tracked.k = k
        if k != NO_MICRO_BATCH:
            self._by_k.setdefault(k, {})[tracked.key] = tracked

    def track(self, tensor: torch.Tensor, k: int, category: str, owner: str, is_new: bool) -> None:
        """Make the tensor's storage part of the stash of micro-batch `k` and book it; track it first if it `is_new`.

        Storages of the model (a slice of a weight or of a position table) are part of no stash, nor are those without memory
        (zero tensors of forward-mode differentiation).
        """
        storage = storage_of(tensor)
        tracked = self.storages.get(storage._cdata)
        if storage._cdata in self._exempt or (tracked is None and not is_new) or tensor._is_zerotensor():
            return
        if tracked is None:
            tracked = self.add(storage, k, category, exact=False, owner=owner)
        if tracked.k == NO_MICRO_BATCH:
            self._assign(tracked, k)
        if tracked.booked:
            self._device.ledger.move(tracked.category, tracked.owner, category, owner, tracked.nbytes)
        tracked.category, tracked.owner, tracked.exact = category, owner, True
        if tracked.on_device:
            self.book(tracked)

    def keep_on_device(self, tracked: TrackedStorage) -> None:
        """Remove a storage from its stash: the model made it for the first micro-batch and keeps it, as a table."""
        stash = self._by_k.get(tracked.k, {})
        if stash.get(tracked.key) is tracked:
            del stash[tracked.key]
        tracked.k = NO_MICRO_BATCH

    def untrack(self, key: int) -> None:
        """Forget a storage and free its copy."""
        tracked = self.storages.pop(key, None)
        if tracked is None:
            return
        self._by_k.get(tracked.k, {}).pop(key, None)
        self.unbook(tracked)
        if tracked.slot is not None:
            self._stash_store.free(tracked.slot)
            tracked.slot = None

    def exempt(self, tensors: Iterable[torch.Tensor], weights: bool = False) -> None:
        """Exclude storages from all stashes; a forward must not change those of `weights`."""
        keys = set(storage_keys(tensors))
        self._exempt |= keys
        self.weight_keys |= keys if weights else set()

    @contextmanager
    def exempting(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Exclude storages from all stashes within the block."""
        keys = set(storage_keys(tensors)) - self._exempt
        self._exempt |= keys
        try:
            yield
        finally:
            self._exempt -= keys

    def is_not_stash(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is in a storage of the model or of the engine."""
        return storage_key(tensor) in self._exempt

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def book(self, tracked: TrackedStorage) -> None:
        """Book a storage on the device, if it is booked itself."""
        if tracked.exact and not tracked.in_transit and not tracked.booked:
            self._device.ledger.book(tracked.category, tracked.owner, tracked.nbytes)
            tracked.booked = True

    def unbook(self, tracked: TrackedStorage) -> None:
        """Release the booked bytes of a storage."""
        if tracked.booked:
            self._device.ledger.release(tracked.category, tracked.owner, tracked.nbytes)
            tracked.booked = False

    def clear(self) -> None:
        """Forget all stashes."""
        self._by_k.clear()
