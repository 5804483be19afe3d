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

An emptied storage must not be read unguarded. `watch.py` guards shell code and backward through it; layers get
their inputs fetched beforehand, run without a mode, and meet guarded tensors where they read anything else (`aside.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from l2l_core.devices import Copy, Device, Spot, WaitingRoom
from l2l_core.step.traffic.at_work import AtWork
from l2l_core.step.traffic.clock import Clock
from l2l_core.step.traffic.images import Held, Images, Moving
from l2l_core.step.traffic.lanes import Lane


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
        images: Images,
        at_work: AtWork,
        room: WaitingRoom,
        moves: bool,
        overlap: bool,
        metering: bool,
        h2d: Lane,
        d2h: Lane,
        clock: Clock,
    ) -> None:
        self._device, self.images, self.at_work = device, images, at_work
        self._kind = device.torch_device.type
        self._room, self.moves, self._overlap, self.metering = room, moves, moves and overlap, metering
        self.looks_ahead = room.looks_ahead if self._overlap else 0  # turns after the next one, see `foresee`
        self._h2d, self._d2h, self._clock = h2d, d2h, clock
        self._leaving: dict[int, Moving] = {}  # parked; emptied when the next one is parked
        self._arriving: dict[int, Moving] = {}  # expected at the next turn
        self._ring_bytes = 0  # what may leave, and as much that may arrive

    @property
    def guards(self) -> bool:
        """Whether shell code, and backward through it, must run under the watch."""
        return self.moves or self.metering

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the kind of device that images live on."""
        return tensor.device.type == self._kind

    def hold(self, tensor: torch.Tensor, k: int, category: str, owner: str, fresh: bool = False) -> None:
        """Make `tensor`'s storage part of image `k` and book it exactly.

        `fresh` says that the storage was made just now, outside of what the watch sees.
        """
        self.images.hold(tensor, k, category, owner, is_new=fresh or not self.guards)

    def _reserve(self, moving: Iterable[Held]) -> None:
        """Make the ring large enough for these to leave together, or to arrive."""
        more_bytes = sum(held.nbytes for held in moving) - self._ring_bytes
        if self._overlap and more_bytes > 0:
            self._device.ledger.book("stash", "ring", 2 * more_bytes)
            self._ring_bytes += more_bytes

    # -- moving --------------------------------------------------------------------------------------------------------

    def park(self, k: int, visit: int = -1) -> None:
        """Micro-batch `k` gives way after its turn in `visit`: if images move, its image leaves the device.

        What has not changed since it last left is dropped at once; the rest when the next one is parked.
        """
        if not self.moves:
            return
        self._drop_leaving()  # its copies had a whole turn's time
        held = [h for h in self.images.of(k) if h.resident and h.key not in self._arriving]
        image = [(s, h) for h in held if (s := h.ref()) is not None and s.resizable()]  # shared with NumPy: it stays
        stale = [(s, h) for s, h in image if h.dirty]
        self._reserve(h for _, h in stale)
        for _, h in stale:
            h.spot = self._room.spot(h.nbytes) if h.spot is None else h.spot
        self._send_off(stale, k, visit)
        for storage, h in image:
            self.images.uncount(h)  # while it leaves, the ring covers it
            if h.dirty:
                h.dirty, h.covered = False, True
                self._leaving[h.key] = storage, h
            else:
                self._drop(storage, h)
        if not self._overlap:
            self._drop_leaving()
        self._d2h.turn()

    def fetch(self, tensors: Iterable[torch.Tensor], k: int, layer: str = "", visit: int = -1) -> None:
        """Micro-batch `k` takes its turn in `visit`: have the storages of `tensors` on the device."""
        if not self.moves:
            return
        wanted = self.images.find(tensors)
        self._reserve(h for _, h in wanted)  # also if nothing has to move: the peak is the same for all micro-batches
        self._restore(wanted, k, layer, visit)

    def expect(self, tensors: Iterable[torch.Tensor], k: int, layer: str, visit: int) -> None:
        """Micro-batch `k` is next: let the storages of `tensors` arrive while another one computes."""
        if not self._overlap:
            return
        self._drop_arriving()
        wanted = self.images.find(tensors)
        self._reserve(h for _, h in wanted)
        away = [(s, h) for s, h in wanted if not h.resident]
        for _, h in away:
            h.covered = True
        for storage, h in wanted:
            self._leaving.pop(h.key, None)
            self._arriving[h.key] = storage, h
        self._bring(away, k, layer, visit)
        self._h2d.turn()

    def foresee(self, turns: Iterable[tuple[Iterable[torch.Tensor], str, int, int]]) -> None:
        """Say what the turns after the next one will want: tensors, layer, micro-batch and visit of each."""
        if not self.looks_ahead:
            return
        found = ((self.images.find(tensors), *who) for tensors, *who in turns)
        self._room.expect([([_spot_of(h) for _, h in wanted if self._is_away(h)], *who) for wanted, *who in found])

    def _is_away(self, held: Held) -> bool:
        return held.spot is not None and (not held.resident or held.key in self._leaving)

    def touch(self, tensor: torch.Tensor) -> None:
        """Somebody is about to read `tensor` past the dispatcher."""
        self.restore(self.images.find([tensor]))

    def restore(self, wanted: Sequence[Moving]) -> None:
        """Let whoever is at work have these storages, which it has not told of beforehand."""
        self._restore(wanted, self.at_work.k, self.at_work.owner)

    def _restore(self, wanted: Sequence[Moving], k: int, layer: str, visit: int = -1) -> None:
        """Let a micro-batch at work have these storages: at once, or when they have arrived."""
        for _, h in wanted:
            self._leaving.pop(h.key, None)
        coming = [h for _, h in wanted if self._arriving.pop(h.key, None) is not None and not h.resident]
        for _, h in wanted:
            h.covered, h.exact = False, h.exact or h.spot is not None
            self.images.count(h)
        away = [(s, h) for s, h in wanted if not h.resident and h not in coming]
        coming += [h for _, h in away]
        if coming:
            with self._clock.stalled():
                self._bring(away, k, layer, visit)
                for h in coming:
                    h.ticket.wait()  # type: ignore[union-attr]
                    h.resident = True  # only now: should the wait fail, the copy on the host still counts

    def _bring(self, away: Sequence[Moving], k: int, layer: str, visit: int) -> None:
        if not away:
            return
        spots = [_spot_of(h) for _, h in away]
        sources = self._room.sources(spots, layer, k, visit)
        for storage, h in away:  # the storage object stays: views of it, and what autograd has saved, point to it
            storage.resize_(h.nbytes)
        copies: list[Copy] = [(_bytes_of(s), source) for (s, _), source in zip(away, sources, strict=True)]
        ticket = self._h2d.send("fetch", layer, copies, k, visit)
        self._room.lent(spots, ticket)
        for _, h in away:
            h.ticket = ticket

    def _send_off(self, stale: Sequence[Moving], k: int, visit: int) -> None:
        if not stale:
            return
        spots = [_spot_of(h) for _, h in stale]
        targets = self._room.targets(spots)
        copies: list[Copy] = [(target, _bytes_of(s)) for (s, _), target in zip(stale, targets, strict=True)]
        ticket = self._d2h.send("stash", "", copies, k, visit)
        self._room.left(spots, ticket, k, visit)
        for _, h in stale:
            h.ticket = ticket

    def _drop(self, storage: torch.UntypedStorage, held: Held) -> None:
        if held.ticket is not None:  # nothing is emptied while a copy still reads or writes it
            with self._clock.stalled():
                held.ticket.wait()
        held.resident, held.covered, held.ticket = False, False, None
        storage.resize_(0)

    def _drop_leaving(self) -> None:
        for storage, held in self._leaving.values():
            self._drop(storage, held)
        self._leaving.clear()

    def _drop_arriving(self) -> None:
        """What was expected, but not by the micro-batch that came, goes back."""
        for storage, held in self._arriving.values():
            if held.covered:
                self._drop(storage, held)
        self._arriving.clear()

    def drain(self) -> None:
        """No micro-batch will take another turn: nothing leaves or arrives any more, and the ring goes."""
        self._drop_leaving()
        self._drop_arriving()
        self._device.ledger.release("stash", "ring", 2 * self._ring_bytes)
        self._ring_bytes = 0

    def clear(self) -> None:
        """Forget every image: what somebody still holds comes back as it was, and is booked no longer.

        Raises:
            OSError: some of it could not be read back, and shows NaN (integers -1) from now on.
        """
        lost: Exception | None = None
        for held in list(self.images.held.values()):
            if held.ticket is not None:
                held.ticket.abandon()
            if not held.resident and (storage := held.ref()) is not None:
                storage.resize_(held.nbytes)
                try:
                    [source] = self._room.sources([_spot_of(held)], "", held.k, -1)
                    _bytes_of(storage).copy_(source)
                except Exception as error:  # whatever it is, the rest is cleared
                    _bytes_of(storage).fill_(255)
                    lost = lost or error
            self.images.forget(held.key)
        self._leaving.clear()
        self._arriving.clear()
        self.drain()
        self.images.clear()
        if lost is not None:
            raise lost


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    # Made anew for every copy: a tensor that is kept would keep the storage alive.
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _spot_of(held: Held) -> Spot:
    assert held.spot is not None, f"{held.category} of {held.owner} has no copy in the waiting room"
    return held.spot
