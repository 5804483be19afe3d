"""The stash: tensors that suspended micro-batches keep, moved off the device and back.

The stash of a micro-batch is every storage that its forward has made and still keeps: boundary activations, masks, labels,
tensors saved by autograd in shell segments, gradients for the layer before. With ``stash="host"`` or ``"disk"`` it is offloaded
at the end of each turn: its bytes are copied to a stash store and its storages resized to zero. It is fetched before it is
used. So the device holds at most three stashes, for any number of micro-batches and layers:

                 k - 1             k             k + 1
    compute                    computes
    d2h         leaves
    h2d                                        arrives

Those that leave and arrive are covered by the *ring*, bytes reserved for the largest stash moved so far, even if none moves
now: the peak is the same with one micro-batch and with many.

Reading an emptied storage would crash the process. `stash_mode.py` fetches what shell code and backward through it read; layers
run without a mode, with their inputs fetched before, and any other tensor they read is guarded (`guarded_tensor.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from l2l_core._torch import no_dispatch
from l2l_core.devices import Copy, Device, StashSlot, StashStore
from l2l_core.step.traffic.compute_events import ComputeClock
from l2l_core.step.traffic.current_turn import CurrentTurn
from l2l_core.step.traffic.lanes import Lane
from l2l_core.step.traffic.storage_tracker import StorageEntry, StorageTracker, TrackedStorage


class Stash:
    """Moves the stashes of all micro-batches of one pass."""

    def __init__(
        self,
        device: Device,
        tracker: StorageTracker,
        current_turn: CurrentTurn,
        stash_store: StashStore,
        offloads: bool,
        overlap: bool,
        metering: bool,
        h2d: Lane,
        d2h: Lane,
        clock: ComputeClock,
    ) -> None:
        self._device, self.tracker, self.current_turn = device, tracker, current_turn
        self._kind = device.torch_device.type
        self._stash_store, self.offloads, self.metering = stash_store, offloads, metering
        self._overlap = offloads and overlap
        self.prefetch_turns = stash_store.prefetch_turns if self._overlap else 0  # see `hint_later_turns`
        self._h2d, self._d2h, self._clock = h2d, d2h, clock
        self._offloading: dict[int, StorageEntry] = {}  # being copied; emptied at the next offload
        self._prefetched: dict[int, StorageEntry] = {}  # expected at the next turn
        self._ring_bytes = 0  # for the stash that leaves, and as much for the one that arrives

    @property
    def needs_watch(self) -> bool:
        """Whether shell code, and backward through it, must run under the stash mode."""
        return self.offloads or self.metering

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on a device of this type."""
        return tensor.device.type == self._kind

    def track(self, tensor: torch.Tensor, k: int, category: str, owner: str, fresh: bool = False) -> None:
        """Make the tensor's storage part of the stash of micro-batch `k` and book it.

        `fresh` means that the storage is new and was made outside of the stash mode.
        """
        self.tracker.track(tensor, k, category, owner, is_new=fresh or not self.needs_watch)

    def _grow_ring(self, moving: Iterable[TrackedStorage]) -> None:
        """Make the ring large enough for these storages to leave or arrive together."""
        more_bytes = sum(tracked.nbytes for tracked in moving) - self._ring_bytes
        if self._overlap and more_bytes > 0:
            self._device.ledger.book("stash", "ring", 2 * more_bytes)
            self._ring_bytes += more_bytes

    # -- moving --------------------------------------------------------------------------------------------------------

    def offload(self, k: int, visit: int = -1) -> None:
        """Offload the stash of micro-batch `k` after its turn in `visit`, if stashes are offloaded.

        Storages unchanged since their last offload are emptied at once, the others at the next offload.
        """
        if not self.offloads:
            return
        self._free_offloaded()  # its copies had a whole turn's time
        tracked = [h for h in self.tracker.storages_of(k) if h.on_device and h.key not in self._prefetched]
        stash = [(s, h) for h in tracked if (s := h.ref()) is not None and s.resizable()]  # not if shared with NumPy
        dirty = [(s, h) for s, h in stash if h.dirty]
        self._grow_ring(h for _, h in dirty)
        for _, h in dirty:
            h.slot = self._stash_store.allocate(h.nbytes) if h.slot is None else h.slot
        self._copy_out(dirty, k, visit)
        for storage, h in stash:
            self.tracker.unbook(h)  # the ring covers it while it leaves
            if h.dirty:
                h.dirty, h.in_transit = False, True
                self._offloading[h.key] = storage, h
            else:
                self._free(storage, h)
        if not self._overlap:
            self._free_offloaded()
        self._d2h.send_chunk()

    def fetch(self, tensors: Iterable[torch.Tensor], k: int, layer: str = "", visit: int = -1) -> None:
        """Fetch the storages of `tensors` for the turn of micro-batch `k` in `visit`; wait for them."""
        if not self.offloads:
            return
        wanted = self.tracker.find(tensors)
        self._grow_ring(h for _, h in wanted)  # even if none has to move: the peak is the same for all micro-batches
        self._restore(wanted, k, layer, visit)

    def prefetch(self, tensors: Iterable[torch.Tensor], k: int, layer: str, visit: int) -> None:
        """Start to fetch the storages of `tensors` for the next turn, that of micro-batch `k`."""
        if not self._overlap:
            return
        self._cancel_prefetched()
        wanted = self.tracker.find(tensors)
        self._grow_ring(h for _, h in wanted)
        away = [(s, h) for s, h in wanted if not h.on_device]
        for _, h in away:
            h.in_transit = True
        for storage, h in wanted:
            self._offloading.pop(h.key, None)
            self._prefetched[h.key] = storage, h
        self._copy_in(away, k, layer, visit)
        self._h2d.send_chunk()

    def hint_later_turns(self, turns: Iterable[tuple[Iterable[torch.Tensor], str, int, int]]) -> None:
        """Pass prefetch hints for later turns to the stash store: (tensors, layer, micro-batch, visit) of each."""
        if not self.prefetch_turns:
            return
        self._stash_store.prefetch(
            [
                ([h.slot for h in self._offloaded(tensors) if h.slot is not None], layer, k, visit)
                for tensors, layer, k, visit in turns
            ]
        )

    def _offloaded(self, tensors: Iterable[torch.Tensor]) -> list[TrackedStorage]:
        return [h for _, h in self.tracker.find(tensors) if not h.on_device or h.key in self._offloading]

    def restore_tensor(self, tensor: torch.Tensor) -> None:
        """Fetch the storage of a tensor that is about to be read."""
        self.restore(self.tracker.find([tensor]))

    def restore(self, wanted: Sequence[StorageEntry]) -> None:
        """Fetch storages that the present turn reads without notice."""
        self._restore(wanted, self.current_turn.k, self.current_turn.owner)

    def _restore(self, wanted: Sequence[StorageEntry], k: int, layer: str, visit: int = -1) -> None:
        for _, h in wanted:
            self._offloading.pop(h.key, None)
        arriving = [h for _, h in wanted if self._prefetched.pop(h.key, None) is not None and not h.on_device]
        for _, h in wanted:
            h.in_transit, h.exact = False, h.exact or h.slot is not None
            self.tracker.book(h)
        away = [(s, h) for s, h in wanted if not h.on_device and h not in arriving]
        arriving += [h for _, h in away]
        if arriving:
            with self._clock.stalled():
                self._copy_in(away, k, layer, visit)
                for h in arriving:
                    assert h.ticket is not None
                    h.ticket.wait()
                    h.on_device = True  # last: if the wait fails, the copy on the host is still valid

    def _copy_in(self, entries: Sequence[StorageEntry], k: int, layer: str, visit: int) -> None:
        if not entries:
            return
        slots = [_slot_of(h) for _, h in entries]
        with (
            no_dispatch()
        ):  # a guarded tensor may be read under the stash mode, which would track buffers that the store makes
            sources = self._stash_store.sources(slots, layer, k, visit)
        for storage, h in entries:  # the storage object stays, since views and saved tensors of autograd refer to it
            storage.resize_(h.nbytes)
        copies: list[Copy] = [(_bytes_of(s), source) for (s, _), source in zip(entries, sources, strict=True)]
        ticket = self._h2d.send("fetch", layer, copies, k, visit)
        self._stash_store.read_started(slots, ticket)
        for _, h in entries:
            h.ticket = ticket

    def _copy_out(self, entries: Sequence[StorageEntry], k: int, visit: int) -> None:
        if not entries:
            return
        slots = [_slot_of(h) for _, h in entries]
        targets = self._stash_store.targets(slots)
        copies: list[Copy] = [(target, _bytes_of(s)) for (s, _), target in zip(entries, targets, strict=True)]
        ticket = self._d2h.send("stash", "", copies, k, visit)
        self._stash_store.write_started(slots, ticket, k, visit)
        for _, h in entries:
            h.ticket = ticket

    def _free(self, storage: torch.UntypedStorage, tracked: TrackedStorage) -> None:
        if tracked.ticket is not None:  # a copy may still read or write the storage
            with self._clock.stalled():
                tracked.ticket.wait()
        tracked.on_device, tracked.in_transit, tracked.ticket = False, False, None
        storage.resize_(0)

    def _free_offloaded(self) -> None:
        for storage, tracked in self._offloading.values():
            self._free(storage, tracked)
        self._offloading.clear()

    def _cancel_prefetched(self) -> None:
        """Empty storages that were prefetched for a turn that did not follow."""
        for storage, tracked in self._prefetched.values():
            if tracked.in_transit:
                self._free(storage, tracked)
        self._prefetched.clear()

    def drain(self) -> None:
        """Wait for all copies and release the ring; no turn follows."""
        self._free_offloaded()
        self._cancel_prefetched()
        self._device.ledger.release("stash", "ring", 2 * self._ring_bytes)
        self._ring_bytes = 0

    def clear(self) -> None:
        """Forget all stashes: tensors that are still referenced get their bytes back and are no longer booked.

        Raises:
            OSError: some could not be read from disk; their tensors hold NaN (integers -1) from now on.
        """
        lost: Exception | None = None
        for tracked in list(self.tracker.storages.values()):
            if tracked.ticket is not None:
                tracked.ticket.abandon()
            if not tracked.on_device and (storage := tracked.ref()) is not None:
                storage.resize_(tracked.nbytes)
                try:
                    [source] = self._stash_store.sources([_slot_of(tracked)], "", tracked.k, -1)
                    _bytes_of(storage).copy_(source)
                except Exception as error:  # of any kind: the rest must be cleared
                    _bytes_of(storage).fill_(255)
                    lost = lost or error
            self.tracker.untrack(tracked.key)
        self._offloading.clear()
        self._prefetched.clear()
        self.drain()
        self.tracker.clear()
        if lost is not None:
            raise lost


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    # A new tensor for every copy: a stored one would keep the storage alive.
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]  # absent from the stubs


def _slot_of(tracked: TrackedStorage) -> StashSlot:
    assert tracked.slot is not None, f"{tracked.category} of {tracked.owner} has no copy in the stash store"
    return tracked.slot
