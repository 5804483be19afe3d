"""Whose a storage is, whether it is on the device, and how many bytes of it are booked where."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from l2l_core.devices import Device, Spot, Ticket, WaitingRoom
from l2l_core.model import key_of, keys_of, storage_of
from l2l_core.step.graph import unasked
from l2l_core.step.traffic.at_work import NOBODY, AtWork


@dataclass(eq=False, slots=True)
class Held:
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
    maker: int = NOBODY  # the micro-batch that was at work when it was made
    resident: bool = True
    covered: bool = False  # leaves or arrives
    counted: bool = False
    spot: Spot | None = None  # where its copy waits
    dirty: bool = True  # the copy is missing or old
    ticket: Ticket | None = None  # of its last copy


Moving = tuple[torch.UntypedStorage, Held]


class Images:
    """Every storage that forwards have made and still keep, by micro-batch.

    Invariant: a storage is held as long as it lives and no longer: nobody is kept alive by being counted.

    Args:
        device, room: where images live and where they wait.
        at_work: whose turn it is.
        exempt: tensors of the model, whose storages are part of no image.
    """

    def __init__(self, device: Device, room: WaitingRoom, at_work: AtWork, exempt: Iterable[torch.Tensor]) -> None:
        self._device, self._room, self._at_work = device, room, at_work
        self.held: dict[int, Held] = {}
        self._by_k: dict[int, dict[int, Held]] = {}
        self._exempt = set(keys_of(exempt))
        self.weights: set[int] = set()  # storages in which a forward may change nothing

    # -- what belongs to whom ------------------------------------------------------------------------------------------

    def of(self, k: int) -> list[Held]:
        """List what the image of micro-batch `k` consists of."""
        return list(self._by_k.get(k, {}).values())

    def find(self, tensors: Iterable[torch.Tensor]) -> list[Moving]:
        """Find the held storages in which tensors lie, each once."""
        with unasked():
            keys = dict.fromkeys(keys_of(tensors))
        return [(s, h) for key in keys if (h := self.held.get(key)) is not None and (s := h.ref()) is not None]

    def add(self, storage: torch.UntypedStorage, k: int, category: str, exact: bool, owner: str | None = None) -> Held:
        """Hold and book a storage that was made just now, as a part of image `k`."""
        key = storage._cdata
        ref = weakref.ref(storage, lambda _: self.forget(key))  # keys are addresses, and are used again
        owner = self._at_work.owner if owner is None else owner
        held = Held(key, ref, storage.nbytes(), category, owner, k, exact, self._at_work.k)
        self.count(held)
        self.held[key] = held  # only now: booking it may raise
        if k != NOBODY:
            self._by_k.setdefault(k, {})[key] = held
        return held

    def hold(self, tensor: torch.Tensor, k: int, category: str, owner: str, is_new: bool) -> None:
        """Make `tensor`'s storage part of image `k` and book it exactly; one that is not held yet if it `is_new`.

        Storages of the model itself (a slice of a weight or of a position table) are part of no image, nor are those without
        memory: zeros that forward-mode differentiation makes.
        """
        storage = storage_of(tensor)
        held = self.held.get(storage._cdata)
        if storage._cdata in self._exempt or (held is None and not is_new) or tensor._is_zerotensor():
            return
        if held is None:
            held = self.add(storage, k, category, exact=False, owner=owner)
        if held.k == NOBODY and held.k != k:
            held.k = k
            self._by_k.setdefault(k, {})[storage._cdata] = held
        self._recategorise(held, category, owner)

    def stay(self, held: Held) -> None:
        """Let a storage stay on the device: made once, at the first micro-batch, and kept by the model (a table, say)."""
        for key, other in list(self._by_k.get(held.k, {}).items()):
            if other is held:
                del self._by_k[held.k][key]
        held.k = NOBODY

    def forget(self, key: int) -> None:
        """A storage is gone, or is ours no longer."""
        held = self.held.pop(key, None)
        if held is None:
            return
        self._by_k.get(held.k, {}).pop(key, None)
        self.uncount(held)
        if held.spot is not None:
            self._room.forget(held.spot)
            held.spot = None

    def exempt(self, tensors: Iterable[torch.Tensor], weights: bool = False) -> None:
        """Keep storages of these out of all images; in those of `weights` a forward may change nothing."""
        keys = set(keys_of(tensors))
        self._exempt |= keys
        self.weights |= keys if weights else set()

    @contextmanager
    def exempting(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Keep storages of these out of all images in the block."""
        keys = set(keys_of(tensors)) - self._exempt
        self._exempt |= keys
        try:
            yield
        finally:
            self._exempt -= keys

    def is_exempt(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in a storage of the model or of the engine."""
        return key_of(tensor) in self._exempt

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def count(self, held: Held) -> None:
        """Book a storage on the device, if it is to be booked by itself."""
        if held.exact and not held.covered and not held.counted:
            self._device.ledger.book(held.category, held.owner, held.nbytes)
            held.counted = True

    def uncount(self, held: Held) -> None:
        """Book it no longer."""
        if held.counted:
            self._device.ledger.release(held.category, held.owner, held.nbytes)
            held.counted = False

    def _recategorise(self, held: Held, category: str, owner: str) -> None:
        if held.counted:
            self._device.ledger.move(held.category, held.owner, category, owner, held.nbytes)
        held.category, held.owner, held.exact = category, owner, True
        if held.resident:
            self.count(held)

    def clear(self) -> None:
        """Nothing is held any more."""
        self._by_k.clear()
