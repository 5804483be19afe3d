"""What there is to save of a relay, by name: its own tensors, not copies of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from l2l_core.config import RelayConfig
from l2l_core.edits import BlockSnapshot
from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Block, Layout, Piece, Unit, is_absent
from l2l_core.eps.optimizers import state_bytes
from l2l_core.model import RandomState, is_sparse
from l2l_core.saves.codec import PlainPart
from l2l_core.saves.edited_stacks import EditedStacks
from l2l_core.surgery import ties_of


class WeightPiece(NamedTuple):
    """Is a parameter of the model, as far as it is here.

    Attributes:
        name: of the model's parameter.
        whole, piece: how all of it lies in its block, and what of it is here.
        view: of the master, of the piece's size.
    """

    name: str
    whole: Piece
    piece: Piece
    view: torch.Tensor


WeightPieces = list[tuple[WeightPiece, Mapping[str, Any] | None]]  # with what the optimizer knows of each


def weights_of(names: Sequence[str], whole: Layout, here: Layout, master: torch.Tensor) -> list[WeightPiece | None]:
    """List what is in a buffer of the parameters of a block, None for those of which nothing is.

    Args:
        names: of the parameters, in a save.
        whole: how all of the block lies.
        here: how what there is of it lies in `master`.
    """
    held = map(WeightPiece, names, whole.pieces, here.pieces, here.views(master))
    return [None if is_absent(each.piece, each.whole) else each for each in held]


def _pieces(
    names: Sequence[str], whole: Layout, here: Layout, master: torch.Tensor, states: Sequence[Mapping[str, Any] | None]
) -> WeightPieces:
    pairs = zip(weights_of(names, whole, here, master), states, strict=True)
    return [(weight, known) for weight, known in pairs if weight is not None]


@dataclass(frozen=True, slots=True)
class RelayState:
    """Holds what there is to save of a relay between two steps, or to restore into one.

    Attributes:
        config: of the relay.
        steps: completed steps.
        units: the shell, then the layers in order.
        store: the EPS of these units.
        random_state: the thread's generators.
        edited: what was edited.
        past: parts of what is beside the present state, by name; plain data and tensors (see `history_parts.py`).
        values: by name, blocks and values of other branches of which a part is here.
        present: by key, blocks that have values, parked ones too.
    """

    config: RelayConfig
    steps: int
    units: tuple[Unit, ...]
    store: LayerStore
    random_state: RandomState
    edited: EditedStacks
    past: dict[str, PlainPart]
    snapshots: Mapping[str, tuple[Block, BlockSnapshot]]
    blocks_by_key: Mapping[str, Block]

    def outline(self) -> dict[str, Any]:
        """List what a relay must agree in with a save that it takes over, as plain data; versions only in their keys.

        These are keys and names of units, versions of blocks by key, shapes and types of weights and buffers, names that stand
        for one tensor, names of what is trained, class of the optimizer, names of the parameters in each of its groups.
        """
        params = named_params(self.units)
        names = {param: name for name, param in params.items()}
        return {
            "units": [[unit.key, unit.name] for unit in self.units],
            "versions": {block.key: block.version for block in self.blocks},
            "shapes": self.shapes(),
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
                # A shared block is written once, with the first one
                held.setdefault(block, unit)
        return held

    def pieces(self, block: Block) -> WeightPieces:
        """List what is here of the weights of a block that is shown, each with what the optimizer knows of it."""
        state = self.store.optimizer.state
        known = [state[master] if master in state else None for master in self.store.masters.params_of(block)]
        return _pieces(block.names, block.layout, block.master_layout, block.values, known)

    def snapshot_pieces(self, name: str) -> WeightPieces:
        """List the same of the `values` of another branch."""
        block, values = self.snapshots[name]
        assert values.local_layout is not None, f"{name} is whole"
        return _pieces(
            snapshot_param_names(name, block), block.layout, values.local_layout, values.master, values.states
        )

    @property
    def nbytes(self) -> int:
        """Bytes of weights, state and buffers that are here; without what is settings or the past."""
        custody = self.store.storage
        elsewhere = [piece for name in self.snapshots for piece in self.snapshot_pieces(name)]
        kept = sum(weight.view.nbytes + state_bytes(known or {}) for weight, known in elsewhere)
        return kept + sum(custody.nbytes(block) for block in self.blocks) + sum(b.nbytes for _, _, b in self.buffers())

    def buffers(self) -> Iterator[tuple[Unit, str, torch.Tensor]]:
        """Go through all buffers (non-persistent ones too), by name, each with the unit that it is in."""
        shell, *layers = self.units
        for name, buffer in shell.module.named_buffers():  # the shell's module is the whole model
            if is_sparse(buffer):
                raise ValueError(
                    f"buffer {name!r} is a tensor of layout {buffer.layout}, which files of safetensors do not hold: keep its "
                    "indices and values as buffers, or the tensor as a plain attribute"
                )
            yield next((unit for unit in layers if name.startswith(f"{unit.name}.")), shell), name, buffer

    def residuals(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copy what compression has left out of gradients to the host, by key of the block and index of the parameter."""
        held = {key: self.store.residuals.for_block(block) for key, block in self.blocks_by_key.items()}
        return {key: {str(i): residual.cpu() for i, residual in of.items()} for key, of in held.items() if of}

    def shapes(self) -> dict[str, str]:
        """Say of all weights and buffers, whole, what shape and type they have, by the names that saves have for them."""
        weights = {
            f"weights/{name}": describe_tensor(whole.size, block.values.dtype)
            for block in self.blocks
            for name, whole in zip(block.names, block.layout.pieces, strict=True)
        }
        return weights | {f"buffers/{name}": describe_tensor(b.shape, b.dtype) for _, name, b in self.buffers()}


def snapshot_param_names(name: str, block: Block) -> list[str]:
    """Say what the parameters of a block are called in values that have this name."""
    return [f"{name}/{index}" for index in range(len(block.params))]


def named_params(units: Iterable[Unit]) -> dict[str, nn.Parameter]:
    """Give the model's parameters by the names that their blocks have for them."""
    blocks = dict.fromkeys(block for unit in units for block in unit.blocks)
    return {name: param for b in blocks for name, param in zip(b.names, b.params, strict=True)}


def describe_tensor(size: Sequence[int], dtype: torch.dtype) -> str:
    """Describe a tensor for people."""
    return f"{tuple(size)} {str(dtype).removeprefix('torch.')}"
