"""Buffers of modules (running statistics, position tables, masks): values, snapshots, and copies on the device.

Between passes a model's buffers are host tensors. A device with separate memory gets copies while it computes with them: the
shell's for a pass, a layer's for a visit. Tensors that modules keep as plain attributes stay in place, as with `Module.to`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from l2l_core.devices import Device
from l2l_core.model import ModuleKey, equal_values, is_sparse, nbytes_of

BufferKey = ModuleKey

_CPU = torch.device("cpu")


class ModuleBuffers:
    """Buffers of modules by module and name, since a module may write into a buffer or replace it.

    Invariant: copied values are on the host.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.keys: list[BufferKey] = [BufferKey(m, name) for m in modules for name in m._buffers]
        self._device = _CPU  # of the tensors now

    def __bool__(self) -> bool:
        return bool(self.keys)

    def tensors(self) -> list[torch.Tensor | None]:
        """Return the current tensors."""
        return [module._buffers[name] for module, name in self.keys]

    def copy(self) -> list[torch.Tensor | None]:
        """Return copies of the values on the host."""
        return [None if buffer is None else buffer.detach().to(_CPU, copy=True) for buffer in self.tensors()]

    def equal(self, values: Sequence[torch.Tensor | None]) -> bool:
        """Compare by value, since BatchNorm changes its statistics without a new version. Waits for a GPU."""
        return all(
            a is b if a is None or b is None else equal_values(a.to(_CPU), b)
            for a, b in zip(self.tensors(), values, strict=True)
        )

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores tensors and values; it does not write to tensors that are unchanged."""
        tensors, values = self.tensors(), self.copy()

        def restore() -> None:
            self._assign(tensors, self._device)
            if not self.equal(values):
                self.restore(values)

        return restore

    def restore(self, values: Sequence[torch.Tensor | None]) -> None:
        """Write values back, into the same tensors where they fit."""
        for (module, name), buffer, value in zip(self.keys, self.tensors(), values, strict=True):
            if buffer is None or value is None or not _fits(buffer, value):
                module._buffers[name] = None if value is None else value.to(self._device, copy=True)
            else:
                with torch.no_grad():
                    buffer.copy_(value)

    @contextmanager
    def on_device(self, device: Device, owner: str) -> Iterator[list[torch.Tensor]]:
        """Replace the buffers by copies on `device` inside the block; then write the new values to the host's tensors.

        Yields the copies and books their bytes to `owner`. Does nothing on a device that computes on host memory.

        Raises:
            DeviceOutOfMemory: the copies exceed the device's budget.
        """
        if device.in_host_memory or not self.keys:
            yield []
            return
        homes = self.tensors()
        nbytes = sum(map(nbytes_of, {id(home): home for home in homes if home is not None}.values()))
        device.ledger.book("weights", owner, nbytes)
        copies: dict[int, torch.Tensor] = {}  # one tensor under two names stays one
        try:
            for home in homes:
                if home is not None and id(home) not in copies:
                    copies[id(home)] = home.detach().to(device.torch_device, non_blocking=True, copy=True)
            self._assign([None if home is None else copies[id(home)] for home in homes], device.torch_device)
            yield list(copies.values())
        finally:
            after = self.tensors()
            self._assign(homes, _CPU)  # first, since the rest may fail
            device.ledger.release("weights", owner, nbytes)
            self._copy_back(homes, after)

    def _assign(self, tensors: Sequence[torch.Tensor | None], device: torch.device) -> None:
        for (module, name), tensor in zip(self.keys, tensors, strict=True):
            module._buffers[name] = tensor
        self._device = device

    def _copy_back(self, homes: Sequence[torch.Tensor | None], after: Sequence[torch.Tensor | None]) -> None:
        for (module, name), home, buffer in zip(self.keys, homes, after, strict=True):
            value = None if buffer is None else buffer.detach().to(_CPU)
            # Into the host's own tensor, which others may hold; an unchanged buffer also keeps its version counter
            if home is None or value is None or home.dtype != value.dtype:
                module._buffers[name] = value
            elif not equal_values(home, value):
                if _fits(home, value):
                    with torch.no_grad():
                        home.copy_(value)
                else:
                    module._buffers[name] = value


def _fits(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether `value` can be written into `buffer`; an expanded tensor has fewer places than elements."""
    if is_sparse(buffer) or is_sparse(value):
        return buffer.layout is value.layout is torch.sparse_coo and buffer.shape == value.shape
    return buffer.shape == value.shape and 0 not in buffer.stride()
