"""Inputs of a pass: the relay's parts, micro-batches, and a plan: the weights and graphs that stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from l2l_core.config import RelayConfig
from l2l_core.devices import Device, HostStashStore, Ledger, StashStore
from l2l_core.eps import WeightSource
from l2l_core.eps.blocks import Unit, shell_modules
from l2l_core.plan import ScheduleSettings, schedule_name
from l2l_core.schedule_rules import kept_layers, weight_slots
from l2l_core.step.batch_loss import BatchLoss
from l2l_core.trace import Trace

WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # on the device, by `RelayConfig.precision`
PassTask = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True, slots=True)
class RelayParts:
    """The model, split into shell and layers, with its device and its stores. They outlive a pass."""

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

    def snapshot_buffers(self) -> Callable[[], None]:
        """Copy the values of all buffers; return a function that restores tensors and values."""
        restores = [unit.buffers.snapshot() for unit in self.units]

        def restore() -> None:
            for each in restores:
                each()

        return restore

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a weight slot of `dtype`, which fits the largest layer."""
        return dtype.itemsize * max((unit.slot_numel(dtype) for unit in self.layers), default=0)

    def new_trace(self, config: RelayConfig, step: int = 0) -> Trace:
        """Make the empty trace of a pass that begins now."""
        settings = {**config.to_plain(), **self.device.figures()}
        if config.has_own_schedule:  # its passes are of the same kind
            settings |= {"schedule": "breadth_first", "schedule_name": schedule_name(config.schedule)}
        if any(block.in_bytes for unit in self.units for block in unit.blocks):
            settings |= {"keeps_dtypes": True}  # then bytes do not follow from numbers of elements
        return Trace(step=step, device=self.device.name, names=self.names, settings=settings)


@dataclass(frozen=True)
class PassPlan:
    """Plan of a pass. By default all weights are streamed, and all layers but the last one are recomputed."""

    layer_order: Sequence[Unit]  # the expected order of visits
    resident: int = 0  # weight slots besides those that streaming needs
    kept_graphs: int = 0  # number of last visits whose graphs stay on the device until backward
    loss_per_micro_batch: bool = (
        True  # else one loss of the batch, after all forwards: the last layer is recomputed too
    )

    @staticmethod
    def of(config: RelayConfig, layer_order: Sequence[Unit], loss_per_micro_batch: bool = True) -> PassPlan:
        """Make the plan for these settings; `keep` must be a number of layers."""
        assert isinstance(config.keep, int), f"keep={config.keep!r} was not resolved to a number of layers"
        kept = kept_layers(config.keep, config.ahead, config.resident)
        return PassPlan(layer_order, config.resident, kept, loss_per_micro_batch)

    def settings(self, config: RelayConfig, parts: RelayParts) -> ScheduleSettings:
        """Return the settings of the pass's schedule."""
        offloads = config.stash != "device"
        return ScheduleSettings(
            micro_batches=config.micro_batches,
            ahead=config.ahead,
            slots=weight_slots(config.ahead, self.resident),
            kept_graphs=self.kept_graphs,
            loss_per_micro_batch=self.loss_per_micro_batch,
            offloads=offloads,
            later_turns=parts.stash_store(config.stash).prefetch_turns if offloads and config.ahead else 0,
            announces_loads=parts.weight_source.reads_ahead,
        )


@dataclass(frozen=True, slots=True)
class PassSpec:
    """Inputs of a pass."""

    config: RelayConfig
    plan: PassPlan
    task: (
        PassTask  # returns the result of a micro-batch; in training its loss, or its outputs if there is a `batch_loss`
    )
    micro_batches: Sequence[Any]
    seeds: Sequence[int]  # one per micro-batch, for its random stream
    check: Callable[[], None] = lambda: None  # called after each forward; it may raise to refuse the step
    batch_loss: BatchLoss | None = None
