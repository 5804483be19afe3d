"""What there is to save of a relay, by name: its own tensors, not copies of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from l2l_core.config import RelayConfig
from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Block, Unit
from l2l_core.model import RandomState, Tensors
from l2l_core.saves.codec import Part
from l2l_core.saves.stacks import Edited
from l2l_core.surgery import ties_of


@dataclass(frozen=True, slots=True)
class State:
    """Holds what there is to save of a relay between two steps, or to restore into one.

    Attributes:
        config: of the relay.
        steps: completed steps.
        units: the shell, then the layers in order.
        store: the EPS of these units.
        random_state: the thread's generators.
        edited: what was edited.
        past: parts of what is beside the present state, by name; plain data and tensors (see `history.py`).
    """

    config: RelayConfig
    steps: int
    units: tuple[Unit, ...]
    store: LayerStore
    random_state: RandomState
    edited: Edited
    past: dict[str, Part]

    def outline(self) -> dict[str, Any]:
        """List what a relay must agree in with a save that it takes over, as plain data; versions only in their keys.

        These are keys and names of units, versions of blocks by key, names that stand for one tensor, names of what is
        trained, class of the optimizer, names of the parameters in each of its groups.
        """
        params = named_params(self.units)
        names = {param: name for name, param in params.items()}
        return {
            "units": [[unit.key, unit.name] for unit in self.units],
            "versions": {block.key: block.version for block in self.blocks},
            "ties": ties_of(self.units[0].module),
            "trainable": sorted(name for name, param in params.items() if param.requires_grad),
            "optimizer": type(self.store.optimizer).__name__,
            "groups": [[names[param] for param in group] for group in self.store.masters.groups],
        }

    @property
    def blocks(self) -> dict[Block, Unit]:
        """Every block, with the first unit that holds it."""
        held: dict[Block, Unit] = {}
        for unit in self.units:
            for block in unit.blocks:
                # The first one's file has a shared block, so that it is written once
                held.setdefault(block, unit)
        return held

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """The optimizer's parameters, by the names of the model's."""
        masters = {param: twin for unit in self.units for param, twin in self.store.masters.by_param(unit).items()}
        return {name: masters[param] for name, param in named_params(self.units).items()}

    def tensors_by_unit(self) -> dict[str, Tensors]:
        """List weights and buffers (non-persistent ones too) as they are now, by name, for each unit's key."""
        held: dict[str, Tensors] = {unit.key: {} for unit in self.units}
        for block, unit in self.blocks.items():
            held[unit.key] |= {f"weights/{n}": view for n, view in zip(block.names, block.views, strict=True)}
        shell, *layers = self.units
        for name, buffer in shell.module.named_buffers():  # the shell's module is the whole model
            unit = next((unit for unit in layers if name.startswith(f"{unit.name}.")), shell)
            held[unit.key][f"buffers/{name}"] = buffer
        return held

    def tensors(self) -> Tensors:
        """List weights and buffers of all units, by name."""
        return {name: tensor for tensors in self.tensors_by_unit().values() for name, tensor in tensors.items()}


def named_params(units: Iterable[Unit]) -> dict[str, nn.Parameter]:
    """Give the model's parameters by the names that their blocks have for them."""
    blocks = dict.fromkeys(block for unit in units for block in unit.blocks)
    return {name: param for b in blocks for name, param in zip(b.names, b.params, strict=True)}
