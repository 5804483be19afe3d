"""Who may read what: every operation of shell code, and of backward through it, is seen before it runs.

An emptied storage that is read would end the process, and another micro-batch's value would train the model wrongly. So
what is away is brought back first, and what was made for another micro-batch is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from l2l_core._torch import TorchDispatchMode
from l2l_core.eps.blocks import weights_changed_message
from l2l_core.model import dense_parts, storage_key
from l2l_core.step.graph import BufferOrder, written_by
from l2l_core.step.traffic.current_turn import NO_MICRO_BATCH
from l2l_core.step.traffic.stash import Stash
from l2l_core.step.traffic.storage_tracker import TrackedStorage


class StashMode(TorchDispatchMode):
    """Sees every operation that runs while it is on: what it reads is brought back first, what it makes is noted.

    Args:
        stash: brings what is away.
        order: told of what shell code does to buffers.
    """

    def __init__(self, stash: Stash, buffer_order: BufferOrder) -> None:
        super().__init__()
        self.stash, self.current_turn, self._buffer_order = stash, stash.current_turn, buffer_order
        self._tracker = stash.tracker

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code shall be what it is in plain training; of what runs in it, the watch sees what PyTorch runs."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = {t.untyped_storage()._cdata: t for t in _tensors_in(*args, kwargs)}
        self._prepare_reads(func, reads, args)
        out = func(*args, **(kwargs or {}))
        self.track_outputs(out, reads)
        return out

    @property
    def is_active_in_shell(self) -> bool:
        """Whether shell code is at work that may read what is not on the device."""
        return self.stash.offloads and self.current_turn.in_shell and not self.current_turn.in_compiled_region

    @property
    def needed_in_shell(self) -> bool:
        """Whether shell code must run under the watch."""
        return self.stash.needs_watch or bool(self._buffer_order)

    # -- operations ----------------------------------------------------------------------------------------------------

    def _prepare_reads(self, func: Any, reads: dict[int, torch.Tensor], args: Sequence[Any]) -> None:
        """An operation is about to read these storages."""
        here, stash, images = self.current_turn, self.stash, self._tracker
        if here.in_forward and here.in_shell and self._buffer_order:
            self._buffer_order.record_operation(here.k, func, reads, args)
        if stash.metering and here.in_forward and (changed := written_by(func, args) & images.weight_keys):
            raise RuntimeError(weights_changed_message(here.reader, reads[changed.pop()]))
        known = [key for key in reads if key in images.storages]
        if not known:
            return
        if stash.metering and here.k != NO_MICRO_BATCH and here.in_forward:
            self._check_reads(known, reads)
        moved = [h for key in known if not (h := images.storages[key]).on_device or h.in_transit]
        if moved:
            stash.restore([(s, h) for h in moved if (s := h.ref()) is not None])
        if func._schema.is_mutable:
            for held in (images.storages[key] for key in known):
                if held.ticket is not None:
                    held.ticket.wait()  # it may still be leaving, though it stays
                held.dirty = True

    def track_outputs(self, out: Any, reads: dict[int, torch.Tensor]) -> None:
        """An operation has made `out` of what it has read."""
        if not self.stash.needs_watch:
            return
        here, images = self.current_turn, self._tracker
        # What a layer or backward makes is counted, but part of no image before it crosses to the shell (`hold`).
        k = here.k if here.in_shell and here.in_forward else NO_MICRO_BATCH
        for tensor in _tensors_in(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            is_new = key not in reads and key not in images.storages
            if is_new and self.stash.is_on_device(tensor) and not tensor._is_zerotensor():
                images.add(storage, k, "activations", exact=self.stash.metering)

    # -- whose it is ---------------------------------------------------------------------------------------------------

    def check_guarded_read(self, tensor: torch.Tensor, made_by: int) -> None:
        """Somebody is about to do something with a tensor that micro-batch `maker` has made and left.

        Raises:
            RuntimeError: another micro-batch, or a layer that was not given it.
        """
        key, here = storage_key(tensor), self.current_turn
        is_given = made_by == here.k and (here.layer_inputs is None or key in here.layer_inputs)
        if here.k != NO_MICRO_BATCH and not is_given:
            mark = tensor._relay_aside  # type: ignore[attr-defined]
            if made_by > 0 or mark.is_replaced:  # what the first one leaves, and no other replaces, may be a table
                raise RuntimeError(self._foreign_message(tensor, made_by))
            mark.is_shared = here.k != made_by
            if key in self._tracker.storages:
                self._tracker.keep_on_device(self._tracker.storages[key])
        self.stash.restore_tensor(tensor)

    def _check_reads(self, known: list[int], reads: dict[int, torch.Tensor]) -> None:
        """Refuse what another micro-batch has made and left; what the first one left stays: it may be a table."""
        given = self.current_turn.layer_inputs or set()
        for held, tensor in ((self._tracker.storages[key], reads[key]) for key in known if key not in given):
            if held.made_by == NO_MICRO_BATCH or self._is_own(held):
                continue
            if held.made_by > 0:
                raise RuntimeError(self._foreign_message(tensor, held.made_by))
            self._tracker.keep_on_device(held)

    def _is_own(self, storage: TrackedStorage) -> bool:
        here = self.current_turn
        return storage.made_by == here.k and (
            here.in_shell or (storage.k == NO_MICRO_BATCH and storage.owner == here.owner)
        )

    def _foreign_message(self, tensor: torch.Tensor, made_by: int) -> str:
        return (
            f"{self.current_turn.reader} reads a tensor of shape {tuple(tensor.shape)} that was made for micro-batch {made_by} and not "
            "passed as an argument (left on an attribute or in a shared container?). Micro-batches take turns, so it "
            "may be another micro-batch's value. Pass it as an argument of the layer, or return it"
        )


def _tensors_in(*trees: Any) -> list[torch.Tensor]:
    """List the tensors among an operation's arguments or results, in order; of sparse ones indices and values."""
    found: list[torch.Tensor] = []
    for tree in trees:  # a loop and no generator: every operation that is watched comes by here
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
