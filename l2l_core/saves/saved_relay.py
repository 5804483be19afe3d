"""A save that has been read from a folder, and its transfer to a relay.

The number of workers that load may differ from the number that saved: each value is assembled from the parts that contain it.
Files are mapped, so unused values are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from l2l_core.config import RelayConfig
from l2l_core.eps import BlockStates
from l2l_core.eps.blocks import Block, Layout, Piece, assemble, assemble_new
from l2l_core.eps.optimizers import load_settings
from l2l_core.model import TensorReader, Tensors, decode, tensor_copier
from l2l_core.saves.codec import PlainPart as PlainPart
from l2l_core.saves.codec import read_random
from l2l_core.saves.edited_stacks import EditedStacks
from l2l_core.saves.generation_writer import SaveGroup
from l2l_core.saves.generations import WorkerPart, read_current
from l2l_core.saves.relay_state import RelayState, WeightPiece, snapshot_param_names, weights_of

# Required entries of a manifest, besides schema and files
_ENTRIES = (
    "torch", "steps", "config", "units", "versions", "shapes", "ties", "trainable", "optimizer", "groups", "warmups", "edits",
    "past", "settings", "own_settings", "residuals", "random",
)  # fmt: skip
PartPiece = tuple[Piece, int]  # piece of a parameter, and index of the part that contains it


def load_save(folder: Path) -> SavedRelay:
    """Read the save in a folder and check all of its files.

    Raises:
        ValueError: there is no save, it is damaged or incomplete, or has another schema; names the file.
    """
    return _read(folder)


def load_save_together(folder: Path, group: SaveGroup) -> SavedRelay:
    """Read the save on all workers, which divide the comparison of checksums between them.

    Raises:
        ValueError: as in `load_save`, or workers have found different saves.
    """
    saved = _read(folder, group.rank, group.count)
    found = group.gather_items([saved.path.parent.name], "find a save")
    if len({*found}) > 1:
        listed = ", ".join(f"worker {rank}: {name}" for rank, name in enumerate(found))
        raise ValueError(
            f"workers find different saves in {folder} ({listed}): all must read one folder, on a file system that all machines "
            "share, and no process may save to it at the same time. Nothing has been loaded"
        )
    return saved


def _read(folder: Path, rank: int = 0, count: int = 1) -> SavedRelay:
    saved = SavedRelay(*read_current(folder, rank, count))
    edits = saved.manifest.get("edits", {})
    absent = [name for name in _ENTRIES if name not in saved.manifest]
    absent += [f"edits.{field.name}" for field in fields(EditedStacks) if field.name not in edits]
    if absent:
        raise ValueError(
            f"{saved.path} has no {', '.join(absent)}: it was written by a version of l2l_core before the first release. Load it "
            "with that version, or train and save again with this one"
        )
    return saved


@dataclass(frozen=True, slots=True)
class SavedRelay:
    """A save with complete and undamaged files.

    Attributes:
        path: path of the manifest.
        manifest: plain data of the save.
        tensors: common tensors, mapped from files; all tensors if one worker saved alone.
        parts: part of each worker, by rank.
    """

    path: Path
    manifest: dict[str, Any]
    tensors: Tensors
    parts: Sequence[WorkerPart]

    @property
    def config(self) -> RelayConfig:
        return RelayConfig(**self.manifest["config"])

    @property
    def steps(self) -> int:
        return self.manifest["steps"]

    @property
    def layers(self) -> dict[str, str]:
        """Dotted names of the layers by key, in order."""
        return dict(self.manifest["units"][1:])

    @property
    def edited(self) -> EditedStacks:
        """Edits of the stacks."""
        return EditedStacks.from_plain(self.manifest["edits"])

    def past(self) -> dict[str, PlainPart]:
        """Return `RelayState.past` with copies of its tensors, made anew in each call."""
        past = self.manifest["past"]
        return {name: decode(part, tensor_copier(self.tensors)) for name, part in past.items()}

    def restore_into(self, state: RelayState) -> None:
        """Restore weights, buffers, optimizer and random state in the relay with the given state.

        The relay must have passed `check_compatible`.
        """
        manifest, take = self.manifest, tensor_copier(self.tensors)
        optimizer = state.store.optimizer
        settings = decode(manifest["settings"], take)
        own_settings = decode(manifest["own_settings"], take)
        random_state = read_random(decode(manifest["random"], take))
        residuals = decode(manifest["residuals"], take)
        for key, tensors in residuals.items():  # first, since the device may have no room
            if key in state.blocks_by_key:  # else of a detached layer that could not be built
                by_index = {int(index): tensor for index, tensor in tensors.items()}
                state.store.residuals.restore(state.blocks_by_key[key], by_index)
        exact = bool(optimizer.state)  # it has trained before: drop settings that are not in the save
        state.store.storage.load(state.blocks, self._block_states, self._fill_block)
        with torch.no_grad():
            for _, name, buffer in state.buffers():
                _copy(buffer, self.parts[0].tensors[f"buffers/{name}"])
        load_settings(optimizer, [*own_settings, *settings], exact)
        for block in state.blocks:
            block.version = manifest["versions"][block.key]
            block.warmup = manifest["warmups"].get(block.key, 0)
        random_state.restore()
        state.store.storage.commit_load(self.steps)

    def read_snapshot(
        self, name: str, block: Block, local_layout: Layout | None, master: torch.Tensor
    ) -> list[dict[str, Any] | None]:
        """Read a sharded block snapshot of another branch.

        Args:
            name: name of the snapshot in the save.
            block: block of the snapshot.
            local_layout: part to be read, or None for the whole block.
            master: receives the weights.

        Returns:
            The optimizer state of each parameter, or None.
        """
        names, here = snapshot_param_names(name, block), block.layout if local_layout is None else local_layout
        for weight in weights_of(names, block.layout, here, master):
            self._fill(weight)
        return self._states_of(names, block.layout, here)

    def _fill_block(self, block: Block) -> None:
        """Fill this worker's part of a block with the saved weights."""
        for weight in weights_of(block.names, block.layout, block.master_layout, block.values):
            self._fill(weight)

    def _block_states(self, block: Block) -> BlockStates:
        """Return the optimizer state of this worker's part of a block."""
        return self._states_of(block.names, block.layout, block.master_layout)

    def _states_of(self, names: Sequence[str], whole: Layout, here: Layout) -> BlockStates:
        # One copier per part for all parameters, so that tensors they share stay shared
        takes = [tensor_copier(part.tensors) for part in self.parts]
        weights = weights_of(names, whole, here, torch.empty(here.numel, device="meta"))
        return [
            None if weight is None else self._param_state(weight, self._find_pieces(weight), takes)
            for weight in weights
        ]

    def _fill(self, weight: WeightPiece | None) -> None:
        """Fill a weight with its saved values."""
        if weight is None:
            return
        sources = [(piece, self.parts[i].tensors[f"weights/{weight.name}"]) for piece, i in self._find_pieces(weight)]
        assemble(weight.view, weight.piece, weight.whole, sources)

    def _find_pieces(self, weight: WeightPiece) -> list[PartPiece]:
        """Return the saved pieces of a parameter."""
        pieces: list[PartPiece] = []
        for index, part in enumerate(self.parts):
            if weight.name in (ranges := part.plain["ranges"]):
                first, numel = ranges[weight.name]
                pieces.append((Piece(0, (numel,), (1,), first), index))
            elif f"weights/{weight.name}" in part.tensors:
                pieces.append((Piece(0, weight.whole.size, weight.whole.stride), index))
        return pieces

    def _param_state(
        self, weight: WeightPiece, pieces: Sequence[PartPiece], takes: Sequence[TensorReader]
    ) -> dict[str, Any] | None:
        """Return the optimizer state of this worker's piece of a parameter.

        State tensors of the size of their piece are divided like the parameter; other state is equal in all parts.
        """
        piece, index = pieces[0]
        encoded, take = self.parts[index].plain["optimizer_state"], takes[index]
        unchanged = weight.piece.size == weight.whole.size == piece.size

        def taken(name: str, stride: Sequence[int]) -> torch.Tensor:
            sources = [] if unchanged else [(piece, self.parts[i].tensors.get(name)) for piece, i in pieces]
            shaped = [(piece, tensor) for piece, tensor in sources if tensor is not None and tensor.shape == piece.size]
            if shaped and len(shaped) == len(pieces):
                return assemble_new(weight.piece, weight.whole, shaped)
            return take(name, stride)

        return decode(encoded[weight.name], taken) if weight.name in encoded else None


def _copy(target: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy into `target`, writing each element of an expanded buffer once."""
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in target.stride())
    target[once].copy_(saved[once])
