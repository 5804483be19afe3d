"""Dispatch mode that fetches offloaded tensors before shell code, or backward through it, reads them.

Reading an emptied storage would crash the process, and reading another micro-batch's value would train the model wrongly. So
the first are fetched and the second refused.

A dispatch mode does not intercept reads as Python numbers or NumPy views, such as `tolist` or `numpy`. A function mode does,
but under one nn.TransformerEncoder takes another path, with other bits. So `raw_read_hook` wraps the methods themselves.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from l2l_core._torch import EngineDispatchMode
from l2l_core.eps.blocks import Unit, weights_changed_message
from l2l_core.model import dense_parts, storage_key, storage_keys
from l2l_core.step.graph import BufferOrder, OutsideOrder, written_by
from l2l_core.step.traffic.current_turn import NO_MICRO_BATCH
from l2l_core.step.traffic.stash import Stash
from l2l_core.step.traffic.storage_tracker import TrackedStorage

_RAW_READS = ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr")
_lock = threading.Lock()
_hooks: list[Callable[[torch.Tensor], None]] = []
_originals: dict[str, Any] = {}  # methods that torch.Tensor itself defines; it inherits the rest


class StashMode(EngineDispatchMode):
    """Before each operation, fetches the tensors that it reads; after it, tracks the tensors that it makes.

    Args:
        units: of the model, to name a weight that changes.
    """

    def __init__(self, stash: Stash, buffer_order: BufferOrder, units: Sequence[Unit]) -> None:
        super().__init__()
        self._units, self._outside_order = units, OutsideOrder()
        self.stash, self.current_turn, self._buffer_order = stash, stash.current_turn, buffer_order
        self._tracker = stash.tracker

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled code as it is in plain training; the mode gets the operations that PyTorch runs in it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = {t.untyped_storage()._cdata: t for t in _tensors_in(*args, kwargs)}
        self._prepare_reads(func, reads, args, kwargs)
        out = func(*args, **(kwargs or {}))
        self.track_outputs(out, reads)
        return out

    @property
    def is_active_in_shell(self) -> bool:
        """Whether shell code runs that may read offloaded tensors."""
        return self.stash.offloads and self.current_turn.in_shell and not self.current_turn.in_compiled_region

    @property
    def needed_in_shell(self) -> bool:
        """Whether shell code must run under this mode."""
        return self.stash.needs_watch or bool(self._buffer_order)

    @functools.cached_property
    def _weight_keys(self) -> set[int]:
        """Storages that a forward must not change: weights on the device, and those of layers that are not loaded."""
        blocks = (block for unit in self._units for block in unit.blocks)
        return self._tracker.weight_keys | set(storage_keys(view for block in blocks for view in block.host_views))

    # -- operations ----------------------------------------------------------------------------------------------------

    def _prepare_reads(
        self, func: Any, reads: dict[int, torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> None:
        """Check and fetch the storages that an operation is about to read."""
        turn, stash, tracker = self.current_turn, self.stash, self._tracker
        if turn.in_forward and turn.in_shell and self._buffer_order:
            self._buffer_order.record_operation(turn.k, func, reads, args, kwargs)
        changed = written_by(func, args, kwargs) if turn.in_forward else set()
        if changed and (weights := changed & self._weight_keys):
            raise RuntimeError(weights_changed_message(turn.reader, reads[weights.pop()], self._units))
        if stash.metering and turn.in_forward and turn.in_shell and turn.k != NO_MICRO_BATCH:
            outside = {
                key: t for key, t in reads.items() if key not in tracker.storages and not tracker.is_not_stash(t)
            }
            self._outside_order.record(turn.k, outside, changed)
        tracked_keys = [key for key in reads if key in tracker.storages]
        if not tracked_keys:
            return
        if stash.metering and turn.k != NO_MICRO_BATCH and turn.in_forward:
            self._check_reads(tracked_keys, reads)
        moved = [h for key in tracked_keys if not (h := tracker.storages[key]).on_device or h.in_transit]
        if moved:
            stash.restore([(s, h) for h in moved if (s := h.ref()) is not None])
        if func._schema.is_mutable:
            for tracked in (tracker.storages[key] for key in tracked_keys):
                if tracked.ticket is not None:
                    tracked.ticket.wait()  # a copy may still read it
                tracked.dirty = True

    def track_outputs(self, out: Any, reads: dict[int, torch.Tensor]) -> None:
        """Track the results `out` of an operation that read `reads`."""
        if not self.stash.needs_watch:
            return
        turn, tracker = self.current_turn, self._tracker
        # Results of layers and of backward are counted, but belong to no stash before the shell gets them (`Stash.track`).
        k = turn.k if turn.in_shell and turn.in_forward else NO_MICRO_BATCH
        for tensor in _tensors_in(out):
            storage = tensor.untyped_storage()
            is_new = storage._cdata not in reads and storage._cdata not in tracker.storages
            if is_new and self.stash.is_on_device(tensor) and not tensor._is_zerotensor():
                tracker.add(storage, k, "activations", exact=self.stash.metering)

    # -- ownership -----------------------------------------------------------------------------------------------------

    def check_guarded_read(self, tensor: torch.Tensor, made_by: int) -> None:
        """Check and fetch a guarded tensor that is about to be used; micro-batch `made_by` made it.

        Raises:
            RuntimeError: another micro-batch uses it, or a layer that did not get it as an argument.
        """
        key, turn = storage_key(tensor), self.current_turn
        is_allowed = made_by == turn.k and (turn.layer_inputs is None or key in turn.layer_inputs)
        if turn.k != NO_MICRO_BATCH and not is_allowed:
            mark = vars(tensor)["_relay_guard"]  # set by TensorGuard
            if made_by > 0 or mark.is_replaced:  # a tensor that only the first micro-batch makes may be a table
                raise RuntimeError(self._foreign_message(tensor, made_by))
            mark.is_shared = turn.k != made_by
            if key in self._tracker.storages:
                self._tracker.keep_on_device(self._tracker.storages[key])
        self.stash.restore_tensor(tensor)

    def _check_reads(self, tracked_keys: list[int], reads: dict[int, torch.Tensor]) -> None:
        """Refuse tensors of other micro-batches; those of the first one stay on the device, as they may be tables."""
        inputs = self.current_turn.layer_inputs or set()
        for tracked, tensor in ((self._tracker.storages[key], reads[key]) for key in tracked_keys if key not in inputs):
            if tracked.made_by == NO_MICRO_BATCH or self._is_own(tracked):
                continue
            if tracked.made_by > 0:
                raise RuntimeError(self._foreign_message(tensor, tracked.made_by))
            self._tracker.keep_on_device(tracked)

    def _is_own(self, tracked: TrackedStorage) -> bool:
        turn = self.current_turn
        return tracked.made_by == turn.k and (
            turn.in_shell or (tracked.k == NO_MICRO_BATCH and tracked.owner == turn.owner)
        )

    def _foreign_message(self, tensor: torch.Tensor, made_by: int) -> str:
        return (
            f"{self.current_turn.reader} reads a tensor of shape {tuple(tensor.shape)} that was made for micro-batch {made_by} "
            "and not passed as an argument (left on an attribute or in a shared container?). Micro-batches take turns, so "
            "it may be another micro-batch's value. Keep it in a local variable, and pass it as an argument of the layer, or "
            "return it; a loss may return (scalar, extras)"
        )


def _tensors_in(*trees: Any) -> list[torch.Tensor]:
    """Return the tensors among an operation's arguments or results, in order; sparse ones as indices and values."""
    found: list[torch.Tensor] = []
    for tree in trees:  # a loop and no generator, since it runs for every operation under the mode
        if isinstance(tree, torch.Tensor):
            if tree.layout is torch.strided:
                found.append(tree)
            else:
                found += dense_parts(tree)
        elif isinstance(tree, (tuple, list)):
            found += _tensors_in(*tree)
        elif isinstance(tree, dict):
            found += _tensors_in(*tree.values())
    return found


@contextmanager
def raw_read_hook(hook: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `hook` with every tensor about to be read in such a way, in any thread, within the block."""
    with _lock:
        _hooks.append(hook)
        if len(_hooks) == 1:
            _wrap()
    try:
        yield
    finally:
        with _lock:
            _hooks.remove(hook)
            if not _hooks:
                _unwrap()


def _wrap() -> None:
    for name in _RAW_READS:
        if name in vars(torch.Tensor):
            _originals[name] = vars(torch.Tensor)[name]
        setattr(torch.Tensor, name, _hooked(getattr(torch.Tensor, name)))


def _unwrap() -> None:
    for name in _RAW_READS:
        if name in _originals:
            setattr(torch.Tensor, name, _originals.pop(name))
        else:
            delattr(torch.Tensor, name)


def _hooked(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def hooked_read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for hook in tuple(_hooks):  # a copy: other threads add and remove hooks
            hook(tensor)
        return read(tensor, *args, **kwargs)

    return hooked_read
