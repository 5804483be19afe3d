"""Tensors of paused micro-batches: on the device while a micro-batch computes, otherwise where the stash is.

The *image* of a micro-batch is every storage that its forward has created and still keeps: boundary activations, masks,
labels, what autograd saved in shell segments, gradients on their way to the next layer. With ``stash="host"`` the image
is parked when its micro-batch gives way: its bytes go to the host and the storages shrink to nothing; they come back
when touched. So the device holds few images, however many micro-batches there are and however deep the model: the one
that computes, the one that leaves, and the one that arrives.

                 k - 1             k             k + 1
    compute                    computes
    d2h         leaves
    h2d                                        arrives

The images that leave and arrive are covered by the *ring*, bytes reserved for the largest image that has moved so far,
whether or not there is anything to move: the peak is the same with one micro-batch and with many.

An emptied storage must not be read unguarded. The `Watch` mode guards shell code and backward through it; layers get
their inputs fetched beforehand, run without a mode, and meet guarded tensors where they read anything else (`aside.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from l2l_core.devices import Copy, Device, Ledger, Ticket
from l2l_core.eps.blocks import weights_changed
from l2l_core.step.graph import BufferOrder, unasked, written_by
from l2l_core.step.traffic.clock import Clock
from l2l_core.step.traffic.lanes import Lane

NOBODY = -1


@dataclass(eq=False, slots=True)
class _Held:
    """One storage.

    Invariant: its bytes are on the device (`resident`), all of them, or its host copy is up to date; so an exception may
    come at any moment. On the device they are booked by themselves (`counted`), or covered by the ring, or are activations
    that a profile includes.
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
    host: torch.Tensor | None = None
    dirty: bool = True  # the host copy is missing or old
    ticket: Ticket | None = None  # of its last copy


_Moving = tuple[torch.UntypedStorage, _Held]


class Watch(TorchDispatchMode):
    """Shows a stash every operation: what it reads is brought back first, what it makes is noted."""

    def __init__(self, stash: Stash) -> None:
        super().__init__()
        self.stash = stash

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code shall be what it is in plain training; of what runs in it, the watch sees what PyTorch runs."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = {t.untyped_storage()._cdata: t for t in _tensors((args, kwargs))}
        self.stash.before(func, reads, args)
        out = func(*args, **(kwargs or {}))
        self.stash.after(reads, out)
        return out


class Stash:
    """Keeps and moves the images of all micro-batches of one step.

    Args:
        device, host: where images live and where they wait.
        on_host: park images on the host when their micro-batch gives way.
        overlap: let images leave and arrive while others compute.
        metering: count activations operation by operation.
        h2d, d2h: lanes for the transfers.
        clock: of compute, which may have to wait for a transfer.
        exempt: tensors of the model and of the engine, whose storages are part of no image.
    """

    def __init__(
        self,
        device: Device,
        host: Ledger,
        on_host: bool,
        overlap: bool,
        metering: bool,
        h2d: Lane,
        d2h: Lane,
        clock: Clock,
        exempt: Iterable[torch.Tensor] = (),
    ) -> None:
        self._device, self._host, self._on_host, self._overlap = device, host, on_host, on_host and overlap
        self.metering, self._h2d, self._d2h, self._clock = metering, h2d, d2h, clock
        self._held: dict[int, _Held] = {}
        self._images: dict[int, dict[int, _Held]] = {}
        self._leaving: dict[int, _Moving] = {}  # parked; emptied when the next one is parked
        self._arriving: dict[int, _Moving] = {}  # expected at the next turn
        self._ring_bytes = 0  # what may leave, and as much that may arrive
        self._pool: dict[int, list[torch.Tensor]] = {}
        self._exempt = {tensor.untyped_storage()._cdata for tensor in exempt}
        self._weights: set[int] = set()
        self._k = NOBODY  # whose image new storages join
        self._owner = ""
        self._layer_inputs: set[int] | None = None  # set while a layer runs
        self.watch = Watch(self)
        self._in_forward = True
        self._in_part = False  # a compiled part runs, to which everything was brought
        self.guards_layers = False  # layers are watched: in inference, where nobody else is on guard
        self.order: BufferOrder | None = None  # told of what shell code does

    @property
    def at_work(self) -> int:
        """The micro-batch at work, or NOBODY."""
        return self._k

    @property
    def needs_watch(self) -> bool:
        """Whether shell code is at work that may read what is not on the device."""
        return self._on_host and self._layer_inputs is None and not self._in_part

    @contextmanager
    def in_part(self) -> Iterator[None]:
        """A compiled part runs in the block; what it reads has been brought."""
        before, self._in_part = self._in_part, True
        try:
            yield
        finally:
            self._in_part = before

    @property
    def guards(self) -> bool:
        """Whether backward through shell segments must run under `watch`."""
        return self._on_host or self.metering

    @property
    def guards_forward(self) -> bool:
        """Whether shell code must run under `watch`."""
        return self.guards or bool(self.order)

    # -- what belongs to whom ------------------------------------------------------------------------------------------

    @contextmanager
    def working(self, k: int, owner: str, inputs: Iterable[torch.Tensor] | None = None) -> Iterator[None]:
        """Attribute what is made in the block to micro-batch `k` and `owner`; `inputs` are given while a layer runs."""
        before = self._k, self._owner, self._layer_inputs
        self._k, self._owner = k, owner
        with unasked():
            self._layer_inputs = None if inputs is None else {t.untyped_storage()._cdata for t in inputs}
        try:
            yield
        finally:
            self._k, self._owner, self._layer_inputs = before

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """What is read in the block is not read by the model's own code."""
        before, self._in_forward = self._in_forward, False
        try:
            yield
        finally:
            self._in_forward = before

    def hold(self, tensor: torch.Tensor, k: int, category: str, owner: str, fresh: bool = False) -> None:
        """Make `tensor`'s storage part of image `k` and book it exactly.

        `fresh` says that the storage was made just now, outside of what the watch sees. Storages of the model itself
        (a slice of a weight or of a position table) are part of no image.
        """
        storage = tensor.untyped_storage()
        held = self._held.get(storage._cdata)
        if storage._cdata in self._exempt or (held is None and self.guards and not fresh):
            return
        if held is None:
            held = self._note(storage, k, category, owner, exact=False)
        if held.k == NOBODY and held.k != k:
            held.k = k
            self._images.setdefault(k, {})[storage._cdata] = held
        self._recategorise(held, category, owner)

    def exempt(self, tensors: Iterable[torch.Tensor], weights: bool = False) -> None:
        """Storages of these are part of no image either; in those of `weights` a forward may change nothing."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._exempt |= keys
        self._weights |= keys if weights else set()

    @contextmanager
    def exempting(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Storages of these are part of no image in the block."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors} - self._exempt
        self._exempt |= keys
        try:
            yield
        finally:
            self._exempt -= keys

    def is_exempt(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in a storage of the model or of the engine."""
        return tensor.untyped_storage()._cdata in self._exempt

    def _note(self, storage: torch.UntypedStorage, k: int, category: str, owner: str, exact: bool) -> _Held:
        key = storage._cdata
        ref = weakref.ref(storage, lambda _: self._forget(key))
        held = _Held(key, ref, storage.nbytes(), category, owner, k, exact, self._k)
        self._count(held)
        self._held[key] = held
        if k != NOBODY:
            self._images.setdefault(k, {})[key] = held
        return held

    def _recategorise(self, held: _Held, category: str, owner: str) -> None:
        if held.counted:
            self._device.ledger.move(held.category, held.owner, category, owner, held.nbytes)
        held.category, held.owner, held.exact = category, owner, True
        if held.resident:
            self._count(held)

    def _forget(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is None:
            return
        self._images.get(held.k, {}).pop(key, None)
        self._uncount(held)
        self._drop_host_copy(held)

    # -- counting ------------------------------------------------------------------------------------------------------

    def _count(self, held: _Held) -> None:
        if held.exact and not held.covered and not held.counted:
            self._device.ledger.book(held.category, held.owner, held.nbytes)
            held.counted = True

    def _uncount(self, held: _Held) -> None:
        if held.counted:
            self._device.ledger.release(held.category, held.owner, held.nbytes)
            held.counted = False

    def _reserve(self, moving: Iterable[_Held]) -> None:
        """Make the ring large enough for these to leave together, or to arrive."""
        more_bytes = sum(held.nbytes for held in moving) - self._ring_bytes
        if self._overlap and more_bytes > 0:
            self._device.ledger.book("stash", "ring", 2 * more_bytes)
            self._ring_bytes += more_bytes

    # -- moving --------------------------------------------------------------------------------------------------------

    def park(self, k: int, visit: int = -1) -> None:
        """Micro-batch `k` gives way after its turn in `visit`: with the stash on the host, its image leaves the device.

        What has not changed since it was last on the host is dropped at once; the rest when the next one is parked.
        """
        if not self._on_host:
            return
        self._drop_leaving()
        held = [h for h in list(self._images.get(k, {}).values()) if h.resident and h.key not in self._arriving]
        image = [(s, h) for h in held if (s := h.ref()) is not None and s.resizable()]  # shared with NumPy: it stays
        stale = [(s, h) for s, h in image if h.dirty]
        self._reserve(h for _, h in stale)
        for _, h in stale:
            h.host = self._host_buffer(h.nbytes) if h.host is None else h.host
        self._send(self._d2h, "stash", "", [(_copy_of(h), _bytes_of(s)) for s, h in stale], stale, k, visit)
        for storage, h in image:
            self._uncount(h)
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
        wanted = self._find(tensors)
        self._reserve(h for _, h in wanted)  # also if nothing has to move: the peak is the same for all micro-batches
        self._restore(wanted, k, layer, visit)

    def expect(self, tensors: Iterable[torch.Tensor], k: int, layer: str, visit: int) -> None:
        """Micro-batch `k` is next: let the storages of `tensors` arrive while another one computes."""
        if not self._overlap:
            return
        self._drop_arriving()
        wanted = self._find(tensors)
        self._reserve(h for _, h in wanted)
        away = [(s, h) for s, h in wanted if not h.resident]
        for _, h in away:
            h.covered = True
        for storage, h in wanted:
            self._leaving.pop(h.key, None)
            self._arriving[h.key] = storage, h
        self._bring(away, k, layer, visit)
        self._h2d.turn()

    def asked(self, tensor: torch.Tensor, maker: int) -> None:
        """Somebody is about to do something with a tensor that micro-batch `maker` has made and left.

        Raises:
            RuntimeError: another micro-batch, or a layer that was not given it.
        """
        key = tensor.untyped_storage()._cdata
        if self._k != NOBODY and not self._is_for(key, maker):
            mark = tensor._relay_aside  # type: ignore[attr-defined]
            if maker > 0 or mark.is_replaced:  # what the first one leaves, and no other replaces, may be a table
                raise RuntimeError(self._not_for(tensor, maker))
            mark.is_lent = self._k != maker
            if key in self._held:
                self._keep(self._held[key])
        self.touch(tensor)

    def _is_for(self, key: int, maker: int) -> bool:
        return maker == self._k and (self._layer_inputs is None or key in self._layer_inputs)

    def touch(self, tensor: torch.Tensor) -> None:
        """Somebody is about to read `tensor` past the dispatcher."""
        self._restore(self._find([tensor]), self._k, self._owner)

    def _find(self, tensors: Iterable[torch.Tensor]) -> list[_Moving]:
        with unasked():
            keys = dict.fromkeys([t.untyped_storage()._cdata for t in tensors])
        return [(s, h) for key in keys if (h := self._held.get(key)) is not None and (s := h.ref()) is not None]

    def _restore(self, wanted: Sequence[_Moving], k: int, layer: str, visit: int = -1) -> None:
        """Let a micro-batch at work have these storages: at once, or when they have arrived."""
        for _, h in wanted:
            self._leaving.pop(h.key, None)
        coming = [h for _, h in wanted if self._arriving.pop(h.key, None) is not None and not h.resident]
        for _, h in wanted:
            h.covered, h.exact = False, h.exact or h.host is not None
            self._count(h)
        away = [(s, h) for s, h in wanted if not h.resident and h not in coming]
        self._bring(away, k, layer, visit)
        coming += [h for _, h in away]
        if coming:
            with self._clock.stalled():
                for h in coming:
                    h.ticket.wait()  # type: ignore[union-attr]
                    h.resident = True

    def _bring(self, away: Sequence[_Moving], k: int, layer: str, visit: int) -> None:
        for storage, h in away:
            storage.resize_(h.nbytes)
        self._send(self._h2d, "fetch", layer, [(_bytes_of(s), _copy_of(h)) for s, h in away], away, k, visit)

    def _send(
        self, lane: Lane, kind: str, layer: str, copies: list[Copy], moving: Sequence[_Moving], k: int, visit: int
    ) -> None:
        if copies:
            ticket = lane.send(kind, layer, copies, k, visit)
            for _, h in moving:
                h.ticket = ticket

    def _drop(self, storage: torch.UntypedStorage, held: _Held) -> None:
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

    def _host_buffer(self, nbytes: int) -> torch.Tensor:
        free = self._pool.get(nbytes)
        if free:
            return free.pop()
        self._host.book("stash", "images", nbytes)
        return self._device.host_empty(nbytes, torch.uint8)

    def _drop_host_copy(self, held: _Held) -> None:
        if held.host is not None:
            self._pool.setdefault(held.nbytes, []).append(held.host)
            held.host = None

    def drain(self) -> None:
        """No micro-batch will take another turn: nothing leaves or arrives any more, and the ring goes."""
        self._drop_leaving()
        self._drop_arriving()
        self._device.ledger.release("stash", "ring", 2 * self._ring_bytes)
        self._ring_bytes = 0

    def clear(self) -> None:
        """Forget every image: what somebody still holds comes back as it was, and is booked no longer."""
        for held in list(self._held.values()):
            if held.ticket is not None:
                held.ticket.abandon()
            if not held.resident and (storage := held.ref()) is not None:
                storage.resize_(held.nbytes)
                _bytes_of(storage).copy_(_copy_of(held))
            self._forget(held.key)
        self._leaving.clear()
        self._arriving.clear()
        self.drain()
        self._host.release("stash", "images", sum(n * len(buffers) for n, buffers in self._pool.items()))
        self._pool.clear()
        self._images.clear()

    # -- what the watch sees -------------------------------------------------------------------------------------------

    def before(self, func: Any, reads: dict[int, torch.Tensor], args: Sequence[Any]) -> None:
        """An operation is about to read these storages."""
        if self._in_forward and self._layer_inputs is None and self.order:
            self.order.shell_does(self._k, func, reads, args)
        if self.metering and self._in_forward and (changed := written_by(func, args) & self._weights):
            who = f"layer {self._owner}" if self._layer_inputs is not None else "the model's own code"
            raise RuntimeError(weights_changed(who, reads[changed.pop()]))
        known = [key for key in reads if key in self._held]
        if not known:
            return
        if self.metering and self._k != NOBODY and self._in_forward:
            self._check_reads(known, reads)
        moved = [h for key in known if not (h := self._held[key]).resident or h.covered]
        if moved:
            self._restore([(s, h) for h in moved if (s := h.ref()) is not None], self._k, self._owner)
        if func._schema.is_mutable:
            for held in (self._held[key] for key in known):
                if held.ticket is not None:
                    held.ticket.wait()  # it may still be leaving, though it stays
                held.dirty = True

    def after(self, reads: dict[int, torch.Tensor], out: Any) -> None:
        """An operation has made `out`."""
        if not self._on_host and not self.metering:
            return
        k = self._k if self._layer_inputs is None and self._in_forward else NOBODY
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in reads and key not in self._held and tensor.device.type == self._device.torch_device.type:
                self._note(storage, k, "activations", self._owner, exact=self.metering)

    def _check_reads(self, known: list[int], reads: dict[int, torch.Tensor]) -> None:
        """Micro-batches take turns: what one has made and left somewhere is not what another expects to find there."""
        given = self._layer_inputs or set()
        for held, tensor in ((self._held[key], reads[key]) for key in known if key not in given):
            mine = held.maker == self._k and (
                self._layer_inputs is None or (held.k == NOBODY and held.owner == self._owner)
            )
            if mine or held.maker == NOBODY:
                continue
            if held.maker > 0:
                raise RuntimeError(self._not_for(tensor, held.maker))
            self._keep(held)

    def _not_for(self, tensor: torch.Tensor, maker: int) -> str:
        reader = f"layer {self._owner}" if self._layer_inputs is not None else "the model's own code"
        return (
            f"{reader} reads a tensor of shape {tuple(tensor.shape)} that was made for micro-batch {maker} and not "
            "passed as an argument (left on an attribute or in a shared container?). Micro-batches take turns, so it "
            "may be another micro-batch's value. Pass it as an argument of the layer, or return it"
        )

    def _keep(self, held: _Held) -> None:
        """Let a storage stay on the device: made once, at the first micro-batch, and kept by the model (a table, say)."""
        for key, other in list(self._images.get(held.k, {}).items()):
            if other is held:
                del self._images[held.k][key]
        held.k = NOBODY


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _copy_of(held: _Held) -> torch.Tensor:
    assert held.host is not None, f"{held.category} of {held.owner} has no copy on the host"
    return held.host


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)
