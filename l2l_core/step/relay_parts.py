"""Parts of a relay that outlive a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from l2l_core.config import RelayConfig
from l2l_core.devices import Device, HostStashStore, Ledger, StashStore
from l2l_core.eps import WeightSource
from l2l_core.eps.blocks import Unit, shell_modules
from l2l_core.trace import Trace


@dataclass(frozen=True, slots=True)
class RelayParts:
    """The model, split into shell and layers, with its device and its stores."""

    model: nn.Module
    device: Device
    host: Ledger
    shell: Unit
    layers: Sequence[Unit]
    weight_source: WeightSource
    disk_stash: StashStore | None = None

    def stash_store(self, stash: str) -> StashStore:
        """Return the stash store for a setting of `RelayConfig.stash`."""
        if stash != "disk":
            return HostStashStore(self.device, self.host)
        assert self.disk_stash is not None, "stash='disk' without a shelf is refused where it is set"
        return self.disk_stash

    @property
    def units(self) -> list[Unit]:
        """The shell and the layers."""
        return [self.shell, *self.layers]

    @property
    def names(self) -> dict[str, str]:
        """Dotted name of every unit by key."""
        return {unit.key: unit.name for unit in self.units}

    def shell_modules(self) -> list[nn.Module]:
        """Return the modules that are in no layer."""
        return shell_modules(self.model, {unit.module for unit in self.layers})

    def layer_only_params(self) -> dict[torch.Tensor, str]:
        """Return the parameters that only layers use, each with the name of a layer."""
        own = set(self.shell.params)
        return {param: unit.name for unit in self.layers for param in unit.params if param not in own}

    def snapshot_buffers(self) -> Callable[[], None]:
        """Copy the values of all buffers; return a function that restores them."""
        values = [unit.buffers.copy() for unit in self.units]

        def restore() -> None:
            for unit, old in zip(self.units, values, strict=True):
                unit.buffers.restore(old)

        return restore

    @property
    def slot_numel(self) -> int:
        """Elements of the largest layer."""
        return max((unit.numel for unit in self.layers), default=0)

    def new_trace(self, config: RelayConfig, step: int = 0) -> Trace:
        """Make the empty trace of a pass that begins now."""
        settings = {**asdict(config), **self.device.figures()}
        return Trace(step=step, device=self.device.name, names=self.names, settings=settings)
