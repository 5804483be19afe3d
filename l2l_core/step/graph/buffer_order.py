"""Whether micro-batches meet the model's buffers in the order of plain training.

Plain training finishes one micro-batch before it begins the next; in a relay they take turns at the layers. A buffer that
a forward changes (running statistics, a moving average) and that is met in one place comes out the same. One that is met
in several places, or by micro-batches that go different ways, does not: that is refused before anything is trained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from l2l_core.eps.blocks import BufferKey, ModuleBuffers
from l2l_core.model import equal_values, storage_key

_WRITES_STATISTICS = ("batch_norm", "instance_norm")  # operations that change arguments without saying so


class BufferOrder:
    """Notes which micro-batches read and changed each buffer.

    Invariant: after a change by micro-batch k nothing of an earlier one touches the buffer, and k changes nothing that a
    later one has read.

    Args:
        shell, layers: the buffers, as they stand on the device for this pass.
        attributes: tensors that modules keep as plain attributes; they may be views of buffers, and then follow them.
    """

    def __init__(
        self, shell: ModuleBuffers, layers: Iterable[ModuleBuffers], attributes: Iterable[torch.Tensor]
    ) -> None:
        self._shell, self._of_shell = shell, set(shell.keys)
        self._viewed = {storage_key(tensor) for tensor in attributes}
        self._keys_by_storage: defaultdict[int, set[BufferKey]] = defaultdict(set)  # by storage
        self._tensors: dict[BufferKey, torch.Tensor | None] = {}  # held, so that nothing else gets their addresses
        for buffers in (shell, *layers):
            self._record_replaced(buffers)
        self._originals: dict[
            BufferKey, torch.Tensor
        ] = {}  # of buffers of the shell that each micro-batch has for itself
        self._changed_this_turn: set[BufferKey] = set()  # changed in place in this turn
        self._last_reader: dict[BufferKey, int] = {}
        self._last_writer: dict[BufferKey, int] = {}

    def __bool__(self) -> bool:
        return bool(self._keys_by_storage)

    def _record_replaced(self, buffers: ModuleBuffers) -> list[BufferKey]:
        """Find where another tensor stands now than before, and note it."""
        now = zip(buffers.keys, buffers.tensors(), strict=True)
        changed = [(at, tensor) for at, tensor in now if at not in self._tensors or tensor is not self._tensors[at]]
        for place, tensor in changed:
            self._set_tensor(place, tensor)
        return [place for place, _ in changed]

    def _set_tensor(self, key: BufferKey, tensor: torch.Tensor | None) -> None:
        if (before := self._tensors.get(key)) is not None:
            self._keys_by_storage[storage_key(before)].discard(key)
        self._tensors[key] = tensor
        if tensor is not None:
            self._keys_by_storage[storage_key(tensor)].add(key)

    # -- what layers do ------------------------------------------------------------------------------------------------

    def record_layer(
        self,
        k: int,
        buffers: ModuleBuffers,
        before: Sequence[torch.Tensor | None],
        after: Sequence[torch.Tensor | None],
    ) -> None:
        """A layer has run, with these values of its buffers before and after (the same list if nothing changed)."""
        self.record_read(k, buffers.keys)
        if before is not after:
            trios = zip(buffers.keys, before, after, strict=True)
            self.record_write(k, [place for place, old, new in trios if not _same(old, new)])
            self._record_replaced(buffers)

    def record_compiled_region(
        self,
        k: int,
        buffers: ModuleBuffers,
        before: Sequence[torch.Tensor | None],
        after: Sequence[torch.Tensor | None],
    ) -> None:
        """A compiled part of the shell has run, which nobody could watch: as `layer_ran`, for buffers of the shell."""
        self.record_layer(k, buffers, before, after)
        trios = zip(buffers.keys, before, after, strict=True)
        self._changed_this_turn.update(place for place, old, new in trios if not _same(old, new))

    # -- what shell code does ------------------------------------------------------------------------------------------

    def begin_turn(self) -> None:
        """A micro-batch goes on. What the one before has changed in place, and autograd may have saved, is its own."""
        for place in self._changed_this_turn:
            module, name = place
            buffer = module._buffers[name]
            if buffer is None or storage_key(buffer) in self._viewed:
                continue
            self._originals.setdefault(place, buffer)
            module._buffers[name] = own = buffer.detach().clone()
            self._set_tensor(place, own)
        self._changed_this_turn.clear()

    def record_operation(self, k: int, func: Any, reads: dict[int, torch.Tensor], args: Sequence[Any]) -> None:
        """An operation of the shell reads these storages, by key."""
        met = [key for key in reads if self._keys_by_storage.get(key)]
        if not met:
            return
        self.record_read(k, [place for key in met for place in self._keys_by_storage[key]])
        if changed := written_by(func, args) & set(met):
            places = [place for key in changed for place in self._keys_by_storage[key]]
            self.record_write(k, places)
            self._changed_this_turn.update(place for place in places if place in self._of_shell)

    def end_turn(self, k: int) -> None:
        """A micro-batch gives way: buffers that it has replaced by other tensors are changed too."""
        self.record_write(k, self._record_replaced(self._shell))

    def close(self) -> None:
        """The pass is over: the model's own tensors have the last values."""
        for (module, name), home in self._originals.items():
            last = module._buffers[name]
            if last is self._tensors[module, name] and last is not None and last.shape == home.shape:
                with torch.no_grad():
                    home.copy_(last)
                module._buffers[name] = home
        self._originals.clear()

    # -- the order -----------------------------------------------------------------------------------------------------

    def record_read(self, k: int, keys: Iterable[BufferKey]) -> None:
        """Micro-batch `k` reads buffers.

        Raises:
            RuntimeError: a later one has changed them already.
        """
        for place in keys:
            if self._last_writer.get(place, k) > k:
                self._refuse(place, k, f"micro-batch {self._last_writer[place]} has already changed")
            self._last_reader[place] = max(k, self._last_reader.get(place, k))

    def record_write(self, k: int, keys: Iterable[BufferKey]) -> None:
        """Micro-batch `k` changes buffers.

        Raises:
            RuntimeError: a later one has met them already.
        """
        for place in keys:
            if self._last_reader.get(place, k) > k:
                self._refuse(place, k, f"micro-batch {self._last_reader[place]} has already read")
            self._last_writer[place] = max(k, self._last_writer.get(place, k))

    def _refuse(self, key: BufferKey, k: int, reason: str) -> None:
        module, name = key
        raise RuntimeError(
            f"micro-batch {k} meets the buffer {name!r} of a {type(module).__name__}, which {reason}. Micro-batches take turns at "
            "the layers, so a buffer that the forward changes can be met in one place only: not in a layer that is called "
            "twice, nor in the model's own code both before and after a layer. Use RelayConfig(micro_batches=1), or a module of "
            "its own for each place"
        )


def written_by(func: Any, args: Sequence[Any]) -> set[int]:
    """Find the storages that an operation changes, by key."""
    changed = (args[at] for at in _written_positions(func) if at < len(args))
    return {storage_key(value) for value in changed if isinstance(value, torch.Tensor)}


@cache
def _written_positions(func: Any) -> tuple[int, ...]:
    """Say which arguments of an operation it changes: it is asked for each time that one runs."""
    schema = func._schema
    hidden = not schema.is_mutable and any(part in schema.name for part in _WRITES_STATISTICS)
    return tuple(
        at
        for at, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (hidden and argument.name.startswith("running_"))
    )


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and equal_values(a, b))
