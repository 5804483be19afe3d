"""What compression leaves out of gradients, kept on the device until the next one of the same parameter goes.

It stays between steps and belongs to its block: a layer that is dropped and comes back still has it, a new layer has none. On the
host there would be no use for it: whoever sends it there has sent the whole gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch

from l2l_core.devices import Device
from l2l_core.eps.blocks import Block

CATEGORY, OWNER = "gradients", "residuals"


class Residuals:
    """Makes the residuals of a relay, and finds them again.

    Invariant: what blocks hold is booked in the device's ledger as gradients of the owner "residuals".

    Args:
        device: whose memory they are in.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def for_block(self, block: Block) -> dict[int, torch.Tensor]:
        """Give those of a block, each (numel,), by index of the parameter; it may be changed."""
        return block.residuals

    def create(self, block: Block, index: int, numel: int) -> torch.Tensor:
        """Make one of zeros.

        Raises:
            DeviceOutOfMemory: there is no room for it.
        """
        ledger, nbytes = self.device.ledger, 4 * numel
        ledger.book(CATEGORY, OWNER, nbytes)
        residual = self.device.empty(numel).zero_()
        weakref.finalize(residual, ledger.release, CATEGORY, OWNER, nbytes)  # with the last block that has it
        self.for_block(block)[index] = residual
        return residual

    def snapshot(self, blocks: Iterable[Block]) -> Callable[[], None]:
        """Keep those of some blocks as they are; the result puts them back."""
        kept = {block: {i: residual.clone() for i, residual in self.for_block(block).items()} for block in blocks}

        def put_back() -> None:
            for block, old in kept.items():
                self.restore(block, dict.fromkeys(self.for_block(block)) | old)

        return put_back

    def restore(self, block: Block, values: Mapping[int, torch.Tensor | None]) -> None:
        """Give a block such values, by index; None where it is to have none."""
        held = self.for_block(block)
        for index, value in values.items():
            if value is None:
                held.pop(index, None)
            else:
                (held[index] if index in held else self.create(block, index, value.numel())).copy_(value)

    def close(self) -> None:
        """Hear that they are not needed any more."""


class DryRunResiduals(Residuals):
    """Makes residuals for steps without effect: booked as real ones are, but those of one size share their memory.

    Args:
        device: as of the real ones.
        is_real: whether its ledger has the real ones too, which are not booked again.
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
