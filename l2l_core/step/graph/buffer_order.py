"""Check that micro-batches read and write the model's buffers in the order of plain training.

Plain training finishes one micro-batch before the next; in a relay they take turns at the layers. A buffer that the forward
changes (running statistics, a moving average) has the same final value if it is used in one place only. If it is used in several
places, or by micro-batches that take different paths, the step is refused before anything is trained. The same holds for tensors
outside of the model, such as the weights of a teacher that the loss averages and runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from l2l_core.eps.blocks import BufferKey, ModuleBuffers
from l2l_core.model import equal_values, storage_key

Values = Sequence[torch.Tensor | None]

_WRITES_STATISTICS = ("batch_norm", "instance_norm")  # operations that change arguments without declaring it


class BufferOrder:
    """Records which micro-batches have read and changed each buffer.

    Invariant: after a change by micro-batch k no earlier one uses the buffer, and k changes no buffer that a later one has
    read.

    Args:
        shell, layers: the buffers of this pass on the device.
        attributes: tensors in plain attributes of modules; they may be views of buffers, which then are not replaced.
    """

    def __init__(
        self, shell: ModuleBuffers, layers: Iterable[ModuleBuffers], attributes: Iterable[torch.Tensor]
    ) -> None:
        self._shell, self._shell_keys = shell, set(shell.keys)
        self._viewed = {storage_key(tensor) for tensor in attributes}
        self._keys_by_storage: defaultdict[int, set[BufferKey]] = defaultdict(set)
        self._tensors: dict[BufferKey, torch.Tensor | None] = {}  # keeps them alive, so that addresses are not reused
        for buffers in (shell, *layers):
            self._record_replaced(buffers)
        self._originals: dict[BufferKey, torch.Tensor] = {}  # shell buffers that micro-batches have private copies of
        self._changed_this_turn: set[BufferKey] = set()  # in place
        self._last_reader: dict[BufferKey, int] = {}
        self._last_writer: dict[BufferKey, int] = {}

    def __bool__(self) -> bool:
        return bool(self._keys_by_storage)

    def _record_replaced(self, buffers: ModuleBuffers) -> list[BufferKey]:
        """Record and return the buffers that are other tensor objects than before."""
        now = zip(buffers.keys, buffers.tensors(), strict=True)
        changed = [(key, tensor) for key, tensor in now if key not in self._tensors or tensor is not self._tensors[key]]
        for key, tensor in changed:
            self._set_tensor(key, tensor)
        return [key for key, _ in changed]

    def _set_tensor(self, key: BufferKey, tensor: torch.Tensor | None) -> None:
        if (before := self._tensors.get(key)) is not None:
            self._keys_by_storage[storage_key(before)].discard(key)
        self._tensors[key] = tensor
        if tensor is not None:
            self._keys_by_storage[storage_key(tensor)].add(key)

    # -- layers --------------------------------------------------------------------------------------------------------

    def record_layer(self, k: int, buffers: ModuleBuffers, before: Values, after: Values) -> list[BufferKey]:
        """Record a run of a layer and return the buffers that it changed.

        Args:
            before, after: the values of the buffers; the same list if none has changed.
        """
        self._record_read(k, buffers.keys)
        if before is after:
            return []
        changed = [key for key, old, new in zip(buffers.keys, before, after, strict=True) if not _same(old, new)]
        self._record_write(k, changed)
        self._record_replaced(buffers)
        return changed

    # -- shell code ----------------------------------------------------------------------------------------------------

    def record_compiled_region(self, k: int, buffers: ModuleBuffers, before: Values, after: Values) -> None:
        """Record a run of a compiled region of the shell; arguments as for `record_layer`."""
        self._changed_this_turn.update(self.record_layer(k, buffers, before, after))

    def begin_turn(self) -> None:
        """Give the next micro-batch private copies of buffers that the last one changed, which autograd may have saved."""
        for key in self._changed_this_turn:
            module, name = key
            buffer = module._buffers[name]
            if buffer is None or storage_key(buffer) in self._viewed:
                continue
            self._originals.setdefault(key, buffer)
            module._buffers[name] = copy = buffer.detach().clone()
            self._set_tensor(key, copy)
        self._changed_this_turn.clear()

    def record_operation(
        self, k: int, func: Any, reads: dict[int, torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> None:
        """Record an operation of shell code that reads the storages with these keys."""
        used = [storage for storage in reads if self._keys_by_storage.get(storage)]
        if not used:
            return
        self._record_read(k, [key for storage in used for key in self._keys_by_storage[storage]])
        if changed := written_by(func, args, kwargs) & set(used):
            keys = [key for storage in changed for key in self._keys_by_storage[storage]]
            self._record_write(k, keys)
            self._changed_this_turn.update(key for key in keys if key in self._shell_keys)

    def end_turn(self, k: int) -> None:
        """Record the shell buffers that micro-batch `k` has replaced by other tensors in its turn."""
        self._record_write(k, self._record_replaced(self._shell))

    def close(self) -> None:
        """Copy the final values into the model's original tensors at the end of the pass."""
        for key, original in self._originals.items():
            module, name = key
            last = module._buffers[name]
            if last is self._tensors[key] and last is not None and last.shape == original.shape:
                with torch.no_grad():
                    original.copy_(last)
                module._buffers[name] = original
        self._originals.clear()

    # -- the order -----------------------------------------------------------------------------------------------------

    def _record_read(self, k: int, keys: Iterable[BufferKey]) -> None:
        self._record_use(k, keys, self._last_reader, self._last_writer, "changed")

    def _record_write(self, k: int, keys: Iterable[BufferKey]) -> None:
        self._record_use(k, keys, self._last_writer, self._last_reader, "read")

    def _record_use(
        self, k: int, keys: Iterable[BufferKey], last: dict[BufferKey, int], last_other: dict[BufferKey, int], verb: str
    ) -> None:
        """Record the use of buffers; refuse those that a later micro-batch has already used in the other way."""
        for key in keys:
            if (later := last_other.get(key, k)) > k:
                raise RuntimeError(
                    f"micro-batch {k} uses the buffer {key[1]!r} of a {type(key[0]).__name__}, which micro-batch {later} has "
                    f"already {verb}. Micro-batches take turns at the layers, so a buffer that the forward changes can be used "
                    "in one place only: not in a layer that is called twice, nor in the model's own code both before and after "
                    "a layer. Use RelayConfig(micro_batches=1), or a separate module for each place"
                )
            last[key] = max(k, last.get(key, k))


@dataclass(slots=True)
class _Uses:
    """The last micro-batches that have read and changed a storage; `alive` keeps its address from being reused."""

    alive: StorageWeakRef
    reader: int = -1
    writer: int = -1


class OutsideOrder:
    """Records which micro-batches have read and changed tensors that were made outside of a pass.

    Invariant: after a change by micro-batch k no earlier one uses the tensor, and k changes none that a later one has read.
    """

    def __init__(self) -> None:
        self._uses: dict[int, _Uses] = {}

    def record(self, k: int, tensors: Mapping[int, torch.Tensor], written: Collection[int]) -> None:
        """Record an operation of micro-batch `k` on tensors, by storage; it changes those in `written`.

        Raises:
            RuntimeError: a later micro-batch has already used one in the other way.
        """
        for key, tensor in tensors.items():
            uses = self._uses.get(key)
            if uses is None:
                uses = self._uses[key] = _Uses(StorageWeakRef(tensor.untyped_storage()))
            if uses.writer > k or (key in written and uses.reader > k):
                later, verb = (uses.writer, "changed") if uses.writer > k else (uses.reader, "read")
                raise RuntimeError(
                    f"micro-batch {k} uses a tensor of shape {tuple(tensor.shape)} outside of the model (of a teacher? a running "
                    f"mean?), which micro-batch {later} has already {verb}. Micro-batches take turns at the layers, so a tensor "
                    "that changes with each of them has other values than in plain training. Change it between steps (a "
                    "teacher's average after relay.step), or use RelayConfig(micro_batches=1)"
                )
            uses.reader = max(k, uses.reader)
            if key in written:
                uses.writer = max(k, uses.writer)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> set[int]:
    """Return the keys of the storages that an operation changes."""
    named = kwargs or {}
    changed = (args[i] if i < len(args) else named.get(name) for i, name in _written_arguments(func))
    tensors = (each for value in changed for each in (value if isinstance(value, list | tuple) else [value]))
    return {storage_key(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)}


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that an operation changes, which may be lists of tensors."""
    schema = func._schema
    undeclared = not schema.is_mutable and any(part in schema.name for part in _WRITES_STATISTICS)
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (undeclared and argument.name.startswith("running_"))
    )


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and equal_values(a, b))
