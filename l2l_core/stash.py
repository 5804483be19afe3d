"""Tensors of paused micro-batches: on the device while a micro-batch computes, otherwise where the stash is.

The *image* of a micro-batch is every storage that its forward has created and still keeps: boundary activations, masks,
labels, what autograd saved in shell segments, gradients on their way to the next layer. With ``stash="host"`` the image
is parked when its micro-batch gives way: its bytes go to the host and the storages shrink to nothing; they come back
when touched. So the device holds the image of one micro-batch, however many there are and however deep the model.

An emptied storage must not be read unguarded. The `Watch` mode guards shell segments and backward; layers get their
inputs fetched beforehand, and metered steps verify that layers read nothing else of an image.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from l2l_core.device import Device
from l2l_core.link import Link
from l2l_core.memory import Ledger
from l2l_core.trace import Trace

NOBODY = -1


@dataclass(eq=False, slots=True)
class _Held:
    """One storage. Invariant: `resident` or `host` is set; it is booked where it is."""

    ref: weakref.ref[torch.UntypedStorage]
    nbytes: int
    category: str
    owner: str
    k: int  # whose image it is part of; NOBODY: stays on the device
    booked: bool
    maker: int = NOBODY  # the micro-batch that was at work when it was made
    resident: bool = True
    host: torch.Tensor | None = None
    dirty: bool = True  # the host copy is missing or old


class Watch(TorchDispatchMode):
    """Shows a stash every operation: what it reads is brought back first, what it makes is noted."""

    def __init__(self, stash: Stash) -> None:
        super().__init__()
        self.stash = stash

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = {t.untyped_storage()._cdata: t for t in _tensors((args, kwargs))}
        self.stash.before(func, reads)
        out = func(*args, **(kwargs or {}))
        self.stash.after(reads, out)
        return out


class Stash:
    """Keeps and moves the images of all micro-batches of one step.

    Args:
        device, host: where images live and where they wait.
        on_host: park images on the host when their micro-batch gives way.
        metering: count activations operation by operation.
        trace: gets the transfers as events.
        exempt: tensors of the model and of the engine, whose storages are part of no image.
    """

    def __init__(
        self,
        device: Device,
        host: Ledger,
        on_host: bool,
        metering: bool,
        trace: Trace,
        exempt: Iterable[torch.Tensor] = (),
    ) -> None:
        self._device, self._host, self._on_host, self.metering, self._trace = device, host, on_host, metering, trace
        self._held: dict[int, _Held] = {}
        self._images: dict[int, dict[int, _Held]] = {}
        self._pool: dict[int, list[torch.Tensor]] = {}
        self._exempt = {tensor.untyped_storage()._cdata for tensor in exempt}
        self._k = NOBODY  # whose image new storages join
        self._owner = ""
        self._layer_inputs: set[int] | None = None  # set while a layer runs
        self.watch = Watch(self)
        self.undeclared = False  # whether a layer read what was not among its arguments
        self.guards_layers = False  # layers are watched, because in an earlier pass they did that
        self._shell_buffers: set[int] = set()
        self._written: dict[int, int] = {}  # buffers of the shell that were changed, and the last micro-batch to do so

    @property
    def guards(self) -> bool:
        """Whether shell segments and backward must run under `watch`."""
        return self._on_host or self.metering

    # -- what belongs to whom ------------------------------------------------------------------------------------------

    @contextmanager
    def working(self, k: int, owner: str, inputs: Iterable[torch.Tensor] | None = None) -> Iterator[None]:
        """Attribute what is made in the block to micro-batch `k` and `owner`; `inputs` are given while a layer runs."""
        before = self._k, self._owner, self._layer_inputs
        self._k, self._owner = k, owner
        self._layer_inputs = None if inputs is None else {t.untyped_storage()._cdata for t in inputs}
        try:
            yield
        finally:
            self._k, self._owner, self._layer_inputs = before

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
            held = self._note(storage, k, category, owner, booked=False)
        if held.k == NOBODY and held.k != k:
            held.k = k
            self._images.setdefault(k, {})[storage._cdata] = held
        self._recategorise(held, category, owner)

    def exempt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Storages of these are part of no image either."""
        self._exempt.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def watch_shell_buffers(self, buffers: Iterable[torch.Tensor]) -> None:
        """Buffers of the shell, which micro-batches may only change one after another."""
        self._shell_buffers = {buffer.untyped_storage()._cdata for buffer in buffers}

    def is_exempt(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in a storage of the model or of the engine."""
        return tensor.untyped_storage()._cdata in self._exempt

    def _note(self, storage: torch.UntypedStorage, k: int, category: str, owner: str, booked: bool) -> _Held:
        key = storage._cdata
        if booked:
            self._device.ledger.book(category, owner, storage.nbytes())
        ref = weakref.ref(storage, lambda _: self._forget(key))
        held = _Held(ref, storage.nbytes(), category, owner, k, booked, self._k)
        self._held[key] = held
        if k != NOBODY:
            self._images.setdefault(k, {})[key] = held
        return held

    def _recategorise(self, held: _Held, category: str, owner: str) -> None:
        ledger = self._device.ledger
        if held.booked and held.resident:
            ledger.move(held.category, held.owner, category, owner, held.nbytes)
        elif held.resident:
            ledger.book(category, owner, held.nbytes)
        held.category, held.owner, held.booked = category, owner, True

    def _forget(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is None:
            return
        self._images.get(held.k, {}).pop(key, None)
        if held.resident and held.booked:
            self._device.ledger.release(held.category, held.owner, held.nbytes)
        self._drop_host_copy(held)

    # -- moving --------------------------------------------------------------------------------------------------------

    def park(self, k: int, layer: str = "", changed: bool = True) -> None:
        """Micro-batch `k` gives way: with the stash on the host, its image leaves the device.

        `changed` says that resident storages may differ from their host copies even if no guarded operation wrote them.
        """
        if not self._on_host:
            return
        image = [(s, h) for h in self._images.get(k, {}).values() if h.resident and (s := h.ref()) is not None]
        leaving = [(s, h) for s, h in image if s.resizable()]  # memory shared with NumPy is not
        stale = [(s, h) for s, h in leaving if h.dirty]
        for _, held in stale:
            if held.host is None:
                held.host = self._host_buffer(held.nbytes)
        self._transfer("d2h", "stash", [(h.host, _bytes_of(s)) for s, h in stale], k, layer)  # type: ignore[misc]
        for storage, held in leaving:
            held.dirty = False
            held.resident = False
            storage.resize_(0)
            if held.booked:
                self._device.ledger.release(held.category, held.owner, held.nbytes)

    def touch(self, tensor: torch.Tensor) -> None:
        """Somebody is about to read `tensor` past the dispatcher."""
        self.fetch([tensor], self._k, self._owner)

    def fetch(self, tensors: Iterable[torch.Tensor], k: int, layer: str = "") -> None:
        """Bring the storages of `tensors` back to the device."""
        self._restore({t.untyped_storage()._cdata for t in tensors}, k, layer)

    def _restore(self, keys: Iterable[int], k: int, layer: str) -> None:
        coming = []
        for key in keys:
            held = self._held.get(key)
            if held is not None and not held.resident and (storage := held.ref()) is not None:
                coming.append((storage, held))
        if not coming:
            return
        for storage, held in coming:
            self._device.ledger.book(held.category, held.owner, held.nbytes)
            held.booked = True
            storage.resize_(held.nbytes)
            held.resident = True
        self._transfer("h2d", "fetch", [(_bytes_of(s), h.host) for s, h in coming], k, layer)  # type: ignore[misc]

    def _transfer(
        self, lane: str, kind: str, copies: list[tuple[torch.Tensor, torch.Tensor]], k: int, layer: str
    ) -> None:
        if not copies:
            return
        Link(self._device, self._trace, lane, kind)(layer, copies, k).join()

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

    def clear(self) -> None:
        """Forget every image: what somebody still holds comes back as it was, and is booked no longer."""
        for key, held in list(self._held.items()):
            storage = held.ref()
            if storage is not None and not held.resident:
                storage.resize_(held.nbytes)
                _bytes_of(storage).copy_(held.host)  # type: ignore[arg-type]
                held.resident, held.booked = True, False
            self._forget(key)
        self._host.release("stash", "images", sum(n * len(buffers) for n, buffers in self._pool.items()))
        self._pool.clear()
        self._images.clear()

    # -- what the watch sees -------------------------------------------------------------------------------------------

    def before(self, func: Any, reads: dict[int, torch.Tensor]) -> None:
        """An operation is about to read these storages."""
        if self.metering and self._shell_buffers and self._layer_inputs is None:
            self._check_writes(func, reads)
        known = [key for key in reads if key in self._held]
        if not known:
            return
        if self.metering and self._k != NOBODY:
            self._check_reads(known, reads)
        if any(not self._held[key].resident for key in known):
            self._restore(known, self._k, self._owner)
        if func._schema.is_mutable:
            for key in known:
                self._held[key].dirty = True

    def after(self, reads: dict[int, torch.Tensor], out: Any) -> None:
        """An operation has made `out`."""
        k = NOBODY if self._layer_inputs is not None else self._k
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in reads and key not in self._held and tensor.device.type == self._device.torch_device.type:
                self._note(storage, k, "activations", self._owner, booked=self.metering)

    def _check_writes(self, func: Any, reads: dict[int, torch.Tensor]) -> None:
        """A buffer of the shell that every micro-batch changes must not be read after a pause."""
        for key in (key for key in reads if key in self._shell_buffers):
            if self._written.get(key, NOBODY) > self._k:
                raise RuntimeError(
                    f"the model's own code reads a buffer of shape {tuple(reads[key].shape)} that micro-batch "
                    f"{self._written[key]} has already changed. Micro-batches take turns at the layers: read it before the "
                    "first layer, or keep it in a layer"
                )
            if func._schema.is_mutable:
                self._written[key] = self._k

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
                reader = f"layer {self._owner}" if self._layer_inputs is not None else "the model's own code"
                raise RuntimeError(
                    f"{reader} reads a tensor of shape {tuple(tensor.shape)} that was made for micro-batch {held.maker} and not "
                    "passed as an argument (left on an attribute or in a shared container?). Micro-batches take turns, so it "
                    "may be another micro-batch's value. Pass it as an argument of the layer, or return it"
                )
            self.undeclared |= self._layer_inputs is not None
            self._keep(held)  # made once, at the first micro-batch, and kept by the model: a table, say

    def _keep(self, held: _Held) -> None:
        """Let a storage stay on the device for good."""
        for key, other in list(self._images.get(held.k, {}).items()):
            if other is held:
                del self._images[held.k][key]
        held.k = NOBODY


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)
