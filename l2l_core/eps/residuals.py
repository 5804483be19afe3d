"""Residuals: the errors of compressed gradients, kept on the device for the next gradient of the same parameter.

A residual stays between steps and belongs to its block: a layer that is dropped and restored keeps it, a new layer has none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch

from l2l_core.devices import Device
from l2l_core.eps.blocks import Block

CATEGORY, OWNER = "gradients", "residuals"


class Residuals:
    """The residuals of a relay, on `device`.

    Invariant: the residuals of all blocks are booked in the device's ledger as gradients of the owner "residuals".
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def for_block(self, block: Block) -> dict[int, torch.Tensor]:
        """Return the residuals of a block, each (numel,), by index of the parameter; the mapping may be changed."""
        return block.residuals

    def create(self, block: Block, index: int, numel: int) -> torch.Tensor:
        """Add a residual of zeros and return it.

        Raises:
            DeviceOutOfMemory: there is no room for it.
        """
        ledger, nbytes = self.device.ledger, 4 * numel
        ledger.book(CATEGORY, OWNER, nbytes)
        residual = self.device.empty(numel).zero_()
        weakref.finalize(residual, ledger.release, CATEGORY, OWNER, nbytes)  # freed with its block
        self.for_block(block)[index] = residual
        return residual

    def snapshot(self, blocks: Iterable[Block]) -> Callable[[], None]:
        """Copy the residuals of some blocks; call the result to restore them."""
        saved = {block: {i: residual.clone() for i, residual in self.for_block(block).items()} for block in blocks}

        def undo() -> None:
            for block, old in saved.items():
                self.restore(block, dict.fromkeys(self.for_block(block)) | old)

        return undo

    def restore(self, block: Block, values: Mapping[int, torch.Tensor | None]) -> None:
        """Set residuals of a block, by index; None removes one."""
        held = self.for_block(block)
        for index, value in values.items():
            if value is None:
                held.pop(index, None)
            else:
                (held[index] if index in held else self.create(block, index, value.numel())).copy_(value)

    def close(self) -> None:
        """Release what only this object holds."""


class DryRunResiduals(Residuals):
    """Residuals for a dry run: booked like real ones, but equal sizes share memory.

    Args:
        device: as of the real ones.
        is_real: whether its ledger contains the real ones, which are not booked again.
    """

    def __init__(self, device: Device, is_real: bool) -> None:
        super().__init__(device)
        self._is_real = is_real
        self._by_block: dict[Block, dict[int, torch.Tensor]] = {}
        self._shared: dict[int, torch.Tensor] = {}
        self._booked_bytes = 0

    def for_block(self, block: Block) -> dict[int, torch.Tensor]:
        return self._by_block.setdefault(block, {})

    def create(self, block: Block, index: int, numel: int) -> torch.Tensor:
        if not (self._is_real and index in block.residuals):
            self.device.ledger.book(CATEGORY, OWNER, 4 * numel)
            self._booked_bytes += 4 * numel
        if numel not in self._shared:
            self._shared[numel] = self.device.empty(numel).zero_()
        self.for_block(block)[index] = self._shared[numel]
        return self._shared[numel]

    def close(self) -> None:
        if self._booked_bytes:
            self.device.ledger.release(CATEGORY, OWNER, self._booked_bytes)
        self._booked_bytes = 0
        self._by_block.clear()
        self._shared.clear()
