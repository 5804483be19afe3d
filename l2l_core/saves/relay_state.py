"""State of a relay to be saved or restored, and its files; tensors are the relay's, not copies.

A generation (`generations.py`) has these files::

    manifest.json                config, step, layers, versions, optimizer settings
    shell.safetensors            weights, buffers and optimizer state of the shell ...
    L000.safetensors             ... and of each layer, by key
    frozen%3A*.safetensors       frozen weights that keep their dtypes, of the shell and of each layer
    shared%3A*.safetensors       shared weights and their optimizer state
    residuals.safetensors        residuals of compressed gradients, by block and parameter, if there are any
    relay.safetensors            random generators, and settings that are tensors

and one for each part beside the present state that has tensors (`history_parts.py`). With several workers, each has files of the
shell, the layers, and the block snapshots of other branches, with its shards; `part.json` gives the first element and number of
elements of each piece. Buffers and weights that keep their dtypes are in the files of worker 0.

Not saved: the structure of the model, Python attributes and training mode of modules, NumPy's generator, and learning-rate
schedulers. Save ``scheduler.state_dict()`` yourself. To resume with a scheduler, make the optimizer and the scheduler, pass that
optimizer to `Relay.load`, and then load the scheduler's state: a scheduler made later resets the learning rate.

`torch.distributed.checkpoint` is not used: its metadata is pickled, its pieces are boxes instead of ranges, and its saves are
neither checked by content nor committed atomically.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

import torch
from torch import nn

from l2l_core.config import RelayConfig
from l2l_core.edits import BlockSnapshot
from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Block, Layout, Piece, Unit, is_absent
from l2l_core.eps.optimizers import settings_to_save, state_bytes
from l2l_core.model import RandomState, Tensors, encode, is_sparse
from l2l_core.saves.codec import PlainPart, plain_random
from l2l_core.saves.edited_stacks import EditedStacks
from l2l_core.saves.generation_writer import FolderContent, GenerationWriter
from l2l_core.surgery import ties_of


class WeightPiece(NamedTuple):
    """Part of a parameter that this worker holds.

    Attributes:
        name: name of the parameter.
        whole: the parameter in the layout of its whole block.
        piece: the part of it that this worker holds.
        view: view of the master, of the size of `piece`.
    """

    name: str
    whole: Piece
    piece: Piece
    view: torch.Tensor


WeightPieces = list[tuple[WeightPiece, Mapping[str, Any] | None]]  # each with its optimizer state


def weights_of(names: Sequence[str], whole: Layout, here: Layout, master: torch.Tensor) -> list[WeightPiece | None]:
    """Return the parts of a block's parameters in a buffer, None for one with none or in another's place."""
    weights = [*map(WeightPiece, names, whole.pieces, here.pieces, here.views(master))]
    first = {(w.whole if w.whole.dtype is not None else i): i for i, w in reversed([*enumerate(weights)])}
    own = set(first.values())
    return [None if i not in own or is_absent(w.piece, w.whole) else w for i, w in enumerate(weights)]


def _pieces(
    names: Sequence[str], whole: Layout, here: Layout, master: torch.Tensor, states: Sequence[Mapping[str, Any] | None]
) -> WeightPieces:
    pairs = zip(weights_of(names, whole, here, master), states, strict=True)
    return [(weight, state) for weight, state in pairs if weight is not None]


@dataclass(frozen=True, slots=True)
class RelayState:
    """State of a relay between two steps.

    Attributes:
        config: settings of the relay.
        steps: number of completed steps.
        own_loss: True if the loss or the objective is the user's, not the model's.
        units: the shell, then the layers in order.
        store: the EPS of these units.
        random_state: random generators of the thread.
        edited: edits of the stacks.
        past: parts beside the present state, by name: plain data with tensors (see `history_parts.py`).
        snapshots: sharded block snapshots of other branches, by name.
        blocks_by_key: blocks that have values, also of detached layers.
    """

    config: RelayConfig
    steps: int
    own_loss: bool
    units: tuple[Unit, ...]
    store: LayerStore
    random_state: RandomState
    edited: EditedStacks
    past: dict[str, PlainPart]
    snapshots: Mapping[str, tuple[Block, BlockSnapshot]]
    blocks_by_key: Mapping[str, Block]

    def outline(self) -> dict[str, Any]:
        """Return the properties that a relay must share with a save that it loads, as plain data.

        Of "versions" only the keys must agree.
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
        """All blocks, each with its first unit."""
        blocks: dict[Block, Unit] = {}
        for unit in self.units:
            for block in unit.blocks:
                blocks.setdefault(block, unit)
        return blocks

    def pieces(self, block: Block) -> WeightPieces:
        """Return this worker's parts of a leased block's weights, each with its optimizer state."""
        states = [self.store.optimizer.state.get(master) for master in self.store.masters.params_of(block)]
        return _pieces(block.names, block.layout, block.master_layout, block.values, states)

    def snapshot_pieces(self, name: str) -> WeightPieces:
        """Return the same of a sharded snapshot."""
        block, values = self.snapshots[name]
        assert values.local_layout is not None, f"{name} is whole"
        names = snapshot_param_names(name, block)
        return _pieces(names, block.layout, values.local_layout, values.master, values.states)

    @property
    def nbytes(self) -> int:
        """Bytes of this worker's weights, optimizer state and buffers, without settings and `past`."""
        pieces = [piece for name in self.snapshots for piece in self.snapshot_pieces(name)]
        snapshots = sum(weight.view.nbytes + state_bytes(state or {}) for weight, state in pieces)
        blocks = self.store.storage.nbytes(self.blocks)
        return snapshots + blocks + sum(buffer.nbytes for _, _, buffer in self.buffers())

    def buffers(self) -> Iterator[tuple[Unit, str, torch.Tensor]]:
        """Yield each buffer, non-persistent ones too, with its unit and name."""
        shell, *layers = self.units
        for name, buffer in shell.module.named_buffers():  # the shell's module is the whole model
            if is_sparse(buffer):
                raise ValueError(
                    f"buffer {name!r} is a tensor of layout {buffer.layout}, which safetensors cannot store: keep its indices "
                    "and values as buffers, or the tensor as a plain attribute"
                )
            yield next((unit for unit in layers if name.startswith(f"{unit.name}.")), shell), name, buffer

    def residuals(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return host copies of the residuals of compressed gradients, by key of the block and index of the parameter."""
        by_key = {key: self.store.residuals.for_block(block) for key, block in self.blocks_by_key.items()}
        return {key: {str(i): tensor.cpu() for i, tensor in own.items()} for key, own in by_key.items() if own}

    def shapes(self) -> dict[str, str]:
        """Return shape and type of all whole weights and buffers, by their names in a save."""
        weights = {
            f"weights/{name}": describe_tensor(whole.size, whole.dtype or block.values.dtype)
            for block in self.blocks
            for name, whole in zip(block.names, block.layout.pieces, strict=True)
        }
        return weights | {f"buffers/{name}": describe_tensor(b.shape, b.dtype) for _, name, b in self.buffers()}


def snapshot_param_names(name: str, block: Block) -> list[str]:
    """Return the names of a block's parameters in the snapshot `name`."""
    return [f"{name}/{index}" for index in range(len(block.params))]


def named_params(units: Iterable[Unit]) -> dict[str, nn.Parameter]:
    """Return the parameters of the model by name."""
    blocks = dict.fromkeys(block for unit in units for block in unit.blocks)
    return {name: param for b in blocks for name, param in zip(b.names, b.params, strict=True)}


def describe_tensor(size: Sequence[int], dtype: torch.dtype) -> str:
    """Return shape and type of a tensor as text."""
    return f"{tuple(size)} {str(dtype).removeprefix('torch.')}"


def write_save(writer: GenerationWriter, state: RelayState) -> None:
    """Write this worker's part of `state` into a new generation, together with all workers.

    Raises:
        ValueError: the optimizer state contains a value that is neither a tensor nor plain data.
        OSError: the disk is full, permission is denied, or the folder is not shared.
    """
    own = _own_content(state, writer.is_rank_zero)
    writer.write(state.steps, own, _common_content(state) if writer.is_rank_zero else None)


def _own_content(state: RelayState, is_rank_zero: bool) -> FolderContent:
    """Return this worker's weights and optimizer state, block by block, since they may exceed memory."""
    plain: dict[str, Any] = {"ranges": {}, "optimizer_state": {}}

    def file_of(pieces: WeightPieces, tensors: Tensors) -> Tensors:
        """Add weights and state tensors to `tensors`, and other state to `plain`."""
        for weight, _ in pieces:
            tensors[f"weights/{weight.name}"] = weight.view
            if weight.piece.size != weight.whole.size:
                plain["ranges"][weight.name] = [weight.piece.first, weight.view.numel()]
        for weight, param_state in pieces:
            if param_state is not None:
                plain["optimizer_state"][weight.name] = encode(param_state, f"optimizer/{weight.name}", tensors)
        return tensors

    def files() -> Iterator[tuple[str, Tensors]]:
        buffers: dict[Unit, Tensors] = {unit: {} for unit in state.units}
        for unit, name, buffer in state.buffers() if is_rank_zero else ():
            buffers[unit][f"buffers/{name}"] = buffer
        with_block = {unit for block, unit in state.blocks.items() if block.key == unit.key}
        for unit in state.units:
            if unit not in with_block:
                yield unit.key, buffers[unit]
        storage = state.store.storage
        for block, unit in state.blocks.items():
            if block.in_bytes and not is_rank_zero:  # every worker has it whole
                continue
            with storage.lease(storage.views([block]), "read"):
                is_own = block.key == unit.key
                name = unit.key if is_own else quote(block.key, safe=" ")
                yield name, file_of(state.pieces(block), buffers[unit] if is_own else {})
        for name in state.snapshots:
            yield name, file_of(state.snapshot_pieces(name), {})

    return FolderContent(plain, files(), state.nbytes)


def _common_content(state: RelayState) -> FolderContent:
    """Return the data that all workers have in common, or that worker 0 writes for all."""
    own_settings, settings = settings_to_save(state.store.optimizer)
    common: Tensors = {}
    parts: dict[str, Tensors] = {name: {} for name in state.past}
    residuals: Tensors = {}
    manifest: dict[str, Any] = {
        "torch": torch.__version__,
        "steps": state.steps,
        "own_loss": state.own_loss,
        "config": state.config.to_plain(),
        **state.outline(),
        "warmups": {block.key: block.warmup for block in state.blocks if block.warmup},
        "edits": asdict(state.edited),
        "past": {name: encode(part, f"past/{name}", parts[name]) for name, part in state.past.items()},
        "settings": encode(settings, "settings", common),
        "own_settings": encode(own_settings, "own_settings", common),  # attributes and defaults
        "residuals": encode(state.residuals(), "residuals", residuals),
        "random": encode(plain_random(state.random_state), "random", common),
    }
    # Last: `encode` has added tensors to `parts`, `residuals` and `common`
    files = {name: tensors for name, tensors in {**parts, "residuals": residuals}.items() if tensors} | {
        "relay": common
    }
    return FolderContent(manifest, files.items(), sum(t.nbytes for tensors in files.values() for t in tensors.values()))
