"""Tensors of paused micro-batches: on the device while a micro-batch computes, otherwise where the stash is.

The *image* of a micro-batch is every storage that its forward has created and still keeps: boundary activations, masks,
labels, what autograd saved in shell segments, gradients on their way to the next layer. With ``stash="host"`` or ``"disk"``
the image is parked when its micro-batch gives way: its bytes go to a waiting room and the storages shrink to nothing; they
come back when touched. So the device holds few images, however many micro-batches there are and however deep the model: the one
that computes, the one that leaves, and the one that arrives.

                 k - 1             k             k + 1
    compute                    computes
    d2h         leaves
    h2d                                        arrives

The images that leave and arrive are covered by the *ring*, bytes reserved for the largest image that has moved so far,
whether or not there is anything to move: the peak is the same with one micro-batch and with many.

An emptied storage must not be read unguarded. `stash_mode.py` guards shell code and backward through it; layers get
their inputs fetched beforehand, run without a mode, and meet guarded tensors where they read anything else (`guarded_tensor.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from l2l_core.devices import Copy, Device, StashSlot, StashStore
from l2l_core.step.traffic.compute_clock import ComputeClock
from l2l_core.step.traffic.current_turn import CurrentTurn
from l2l_core.step.traffic.lanes import Lane
from l2l_core.step.traffic.storage_tracker import StorageEntry, StorageTracker, TrackedStorage


class Stash:
    """Moves the images of all micro-batches of one pass.

    Args:
        device: where images live.
        images: whose is what.
        at_work: whose turn it is.
        room: where images wait.
        moves: park images there when their micro-batch gives way.
        overlap: let images leave and arrive while others compute.
        metering: count activations operation by operation.
        h2d, d2h: lanes for the transfers.
        clock: of compute, which may have to wait for a transfer.
    """

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
        self._stash_store, self.offloads, self._overlap, self.metering = (
            stash_store,
            offloads,
            offloads and overlap,
            metering,
        )
        self.prefetch_turns = (
            stash_store.prefetch_turns if self._overlap else 0
        )  # turns after the next one, see `foresee`
        self._h2d, self._d2h, self._clock = h2d, d2h, clock
        self._offloading: dict[int, StorageEntry] = {}  # parked; emptied when the next one is parked
        self._prefetched: dict[int, StorageEntry] = {}  # expected at the next turn
        self._ring_bytes = 0  # what may leave, and as much that may arrive

    @property
    def needs_watch(self) -> bool:
        """Whether shell code, and backward through it, must run under the watch."""
        return self.offloads or self.metering

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the kind of device that images live on."""
        return tensor.device.type == self._kind

    def track(self, tensor: torch.Tensor, k: int, category: str, owner: str, fresh: bool = False) -> None:
        """Make `tensor`'s storage part of image `k` and book it exactly.

        `fresh` says that the storage was made just now, outside of what the watch sees.
        """
        self.tracker.track(tensor, k, category, owner, is_new=fresh or not self.needs_watch)

    def _grow_ring(self, moving: Iterable[TrackedStorage]) -> None:
        """Make the ring large enough for these to leave together, or to arrive."""
        more_bytes = sum(held.nbytes for held in moving) - self._ring_bytes
        if self._overlap and more_bytes > 0:
            self._device.ledger.book("stash", "ring", 2 * more_bytes)
            self._ring_bytes += more_bytes

    # -- moving --------------------------------------------------------------------------------------------------------

    def offload(self, k: int, visit: int = -1) -> None:
        """Micro-batch `k` gives way after its turn in `visit`: if images move, its image leaves the device.

        What has not changed since it last left is dropped at once; the rest when the next one is parked.
        """
        if not self.offloads:
            return
        self._free_offloaded()  # its copies had a whole turn's time
        held = [h for h in self.tracker.storages_of(k) if h.on_device and h.key not in self._prefetched]
        image = [(s, h) for h in held if (s := h.ref()) is not None and s.resizable()]  # shared with NumPy: it stays
        stale = [(s, h) for s, h in image if h.dirty]
        self._grow_ring(h for _, h in stale)
        for _, h in stale:
            h.slot = self._stash_store.allocate(h.nbytes) if h.slot is None else h.slot
        self._copy_out(stale, k, visit)
        for storage, h in image:
            self.tracker.unbook(h)  # while it leaves, the ring covers it
            if h.dirty:
                h.dirty, h.in_transit = False, True
                self._offloading[h.key] = storage, h
            else:
                self._free(storage, h)
        if not self._overlap:
            self._free_offloaded()
        self._d2h.send_chunk()

    def fetch(self, tensors: Iterable[torch.Tensor], k: int, layer: str = "", visit: int = -1) -> None:
        """Micro-batch `k` takes its turn in `visit`: have the storages of `tensors` on the device."""
        if not self.offloads:
            return
        wanted = self.tracker.find(tensors)
        self._grow_ring(h for _, h in wanted)  # also if nothing has to move: the peak is the same for all micro-batches
        self._restore(wanted, k, layer, visit)

    def prefetch(self, tensors: Iterable[torch.Tensor], k: int, layer: str, visit: int) -> None:
        """Micro-batch `k` is next: let the storages of `tensors` arrive while another one computes."""
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
        """Say what the turns after the next one will want: tensors, layer, micro-batch and visit of each."""
        if not self.prefetch_turns:
            return
        found = ((self.tracker.find(tensors), *who) for tensors, *who in turns)
        self._stash_store.prefetch(
            [([_slot_of(h) for _, h in wanted if self._is_offloaded(h)], *who) for wanted, *who in found]
        )

    def _is_offloaded(self, storage: TrackedStorage) -> bool:
        return storage.slot is not None and (not storage.on_device or storage.key in self._offloading)

    def restore_tensor(self, tensor: torch.Tensor) -> None:
        """Somebody is about to read `tensor` past the dispatcher."""
        self.restore(self.tracker.find([tensor]))

    def restore(self, wanted: Sequence[StorageEntry]) -> None:
        """Let whoever is at work have these storages, which it has not told of beforehand."""
        self._restore(wanted, self.current_turn.k, self.current_turn.owner)

    def _restore(self, wanted: Sequence[StorageEntry], k: int, layer: str, visit: int = -1) -> None:
        """Let a micro-batch at work have these storages: at once, or when they have arrived."""
        for _, h in wanted:
            self._offloading.pop(h.key, None)
        coming = [h for _, h in wanted if self._prefetched.pop(h.key, None) is not None and not h.on_device]
        for _, h in wanted:
            h.in_transit, h.exact = False, h.exact or h.slot is not None
            self.tracker.book(h)
        away = [(s, h) for s, h in wanted if not h.on_device and h not in coming]
        coming += [h for _, h in away]
        if coming:
            with self._clock.stalled():
                self._copy_in(away, k, layer, visit)
                for h in coming:
                    h.ticket.wait()  # type: ignore[union-attr]
                    h.on_device = True  # only now: should the wait fail, the copy on the host still counts

    def _copy_in(self, entries: Sequence[StorageEntry], k: int, layer: str, visit: int) -> None:
        if not entries:
            return
        spots = [_slot_of(h) for _, h in entries]
        sources = self._stash_store.sources(spots, layer, k, visit)
        for storage, h in entries:  # the storage object stays: views of it, and what autograd has saved, point to it
            storage.resize_(h.nbytes)
        copies: list[Copy] = [(_bytes_of(s), source) for (s, _), source in zip(entries, sources, strict=True)]
        ticket = self._h2d.send("fetch", layer, copies, k, visit)
        self._stash_store.read_started(spots, ticket)
        for _, h in entries:
            h.ticket = ticket

    def _copy_out(self, entries: Sequence[StorageEntry], k: int, visit: int) -> None:
        if not entries:
            return
        spots = [_slot_of(h) for _, h in entries]
        targets = self._stash_store.targets(spots)
        copies: list[Copy] = [(target, _bytes_of(s)) for (s, _), target in zip(entries, targets, strict=True)]
        ticket = self._d2h.send("stash", "", copies, k, visit)
        self._stash_store.write_started(spots, ticket, k, visit)
        for _, h in entries:
            h.ticket = ticket

    def _free(self, storage: torch.UntypedStorage, tracked: TrackedStorage) -> None:
        if tracked.ticket is not None:  # nothing is emptied while a copy still reads or writes it
            with self._clock.stalled():
                tracked.ticket.wait()
        tracked.on_device, tracked.in_transit, tracked.ticket = False, False, None
        storage.resize_(0)

    def _free_offloaded(self) -> None:
        for storage, held in self._offloading.values():
            self._free(storage, held)
        self._offloading.clear()

    def _cancel_prefetched(self) -> None:
        """What was expected, but not by the micro-batch that came, goes back."""
        for storage, held in self._prefetched.values():
            if held.in_transit:
                self._free(storage, held)
        self._prefetched.clear()

    def drain(self) -> None:
        """No micro-batch will take another turn: nothing leaves or arrives any more, and the ring goes."""
        self._free_offloaded()
        self._cancel_prefetched()
        self._device.ledger.release("stash", "ring", 2 * self._ring_bytes)
        self._ring_bytes = 0

    def clear(self) -> None:
        """Forget every image: what somebody still holds comes back as it was, and is booked no longer.

        Raises:
            OSError: some of it could not be read back, and shows NaN (integers -1) from now on.
        """
        lost: Exception | None = None
        for held in list(self.tracker.storages.values()):
            if held.ticket is not None:
                held.ticket.abandon()
            if not held.on_device and (storage := held.ref()) is not None:
                storage.resize_(held.nbytes)
                try:
                    [source] = self._stash_store.sources([_slot_of(held)], "", held.k, -1)
                    _bytes_of(storage).copy_(source)
                except Exception as error:  # whatever it is, the rest is cleared
                    _bytes_of(storage).fill_(255)
                    lost = lost or error
            self.tracker.untrack(held.key)
        self._offloading.clear()
        self._prefetched.clear()
        self.drain()
        self.tracker.clear()
        if lost is not None:
            raise lost


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    # Made anew for every copy: a tensor that is kept would keep the storage alive.
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _slot_of(storage: TrackedStorage) -> StashSlot:
    assert storage.slot is not None, f"{storage.category} of {storage.owner} has no copy in the waiting room"
    return storage.slot
