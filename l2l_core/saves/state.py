"""What there is to save of a relay, by name: its own tensors, not copies of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from l2l_core.config import RelayConfig
from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Block, Unit
from l2l_core.model import RandomState, Tensors
from l2l_core.surgery import ties_of


@dataclass(frozen=True, slots=True)
class State:
    """What there is to save of a relay, or to restore into one: its own tensors, not copies of them.

    Attributes:
        config: fields of the relay's configuration.
        steps: completed steps.
        units: the shell, then the layers in order.
        store: the EPS of these units.
        random_state: the thread's generators.
        edits: what was edited, as plain data.
        past: parts of what is beside the present state, by name; plain data and tensors (see `history.py`).
    """

    config: dict[str, Any]
    steps: int
    units: tuple[Unit, ...]
    store: LayerStore
    random_state: RandomState
    edits: dict[str, Any]
    past: dict[str, dict[str, Any]]

    @staticmethod
    def of(
        config: RelayConfig,
        steps: int,
        shell: Unit,
        layers: Sequence[Unit],
        store: LayerStore,
        random_state: RandomState,
        edits: dict[str, Any],
        past: dict[str, dict[str, Any]],
    ) -> State:
        """The state of a relay between two steps."""
        return State(asdict(config), steps, (shell, *layers), store, random_state, edits, past)

    @property
    def keys_and_names(self) -> list[list[str]]:
        """Permanent key and dotted name of every unit."""
        return [[unit.key, unit.name] for unit in self.units]

    @property
    def blocks(self) -> dict[Block, Unit]:
        """Every block, with the first unit that holds it."""
        held: dict[Block, Unit] = {}
        for unit in self.units:
            for block in unit.blocks:
                held.setdefault(block, unit)
        return held

    @property
    def versions(self) -> dict[str, int]:
        return {block.key: block.version for block in self.blocks}

    @property
    def trainable(self) -> list[str]:
        """Names of the parameters that are not frozen."""
        return sorted(n for b in self.blocks for n, p in zip(b.names, b.params, strict=True) if p.requires_grad)

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """The optimizer's parameters, by the names of the model's."""
        names = {p: name for b in self.blocks for name, p in zip(b.names, b.params, strict=True)}
        return {names[param]: master for master, param in self.store._model_params.items()}

    @property
    def ties(self) -> list[list[str]]:
        """Names that stand for one tensor."""
        return ties_of(self.units[0].module)

    @property
    def optimizer_class(self) -> str:
        return type(self.store.optimizer).__name__

    def groups(self) -> list[list[str]]:
        """Names of the parameters in every group of the optimizer."""
        names = {master: name for name, master in self.masters.items()}
        return [[names[param] for param in group["params"]] for group in self.store.optimizer.param_groups]

    def tensors_by_unit(self) -> dict[str, Tensors]:
        """Weights and buffers (non-persistent ones too) as they are now, by name, for each unit's key."""
        held: dict[str, Tensors] = {unit.key: {} for unit in self.units}
        for block, unit in self.blocks.items():
            held[unit.key] |= {f"weights/{n}": view for n, view in zip(block.names, block.views, strict=True)}
        shell, *layers = self.units
        for name, buffer in shell.module.named_buffers():
            unit = next((unit for unit in layers if name.startswith(f"{unit.name}.")), shell)
            held[unit.key][f"buffers/{name}"] = buffer
        return held

    @property
    def tensors(self) -> Tensors:
        """Weights and buffers of all units, by name."""
        return {name: tensor for tensors in self.tensors_by_unit().values() for name, tensor in tensors.items()}
