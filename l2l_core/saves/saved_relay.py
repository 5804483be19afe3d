"""A save as it is found in a folder, and how a relay gets its values: all of them, or a worker its pieces.

Pieces of a save need not be those of whoever loads it: each value is taken from wherever it is, so any number of workers
loads what any number has saved. Files are mapped, and what is not needed is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

# Entries of every manifest, besides its schema and files
_ENTRIES = (
    "torch", "steps", "config", "units", "versions", "shapes", "ties", "trainable", "optimizer", "groups", "warmups", "edits",
    "past", "settings", "own_settings", "residuals", "random",
)  # fmt: skip
PartPiece = tuple[Piece, int]  # what a part has of a parameter, and the number of the part


def load_save(folder: Path) -> SavedRelay:
    """Read what `save` wrote, and check every file of it.

    Raises:
        ValueError: there is no save, it is damaged or incomplete, or of another schema; names the file.
    """
    return _read(folder)


def load_save_together(folder: Path, group: SaveGroup) -> SavedRelay:
    """Read it with all workers, who share out among them what takes long: the comparing of files.

    Raises:
        ValueError: the same as `load`, or workers have found different saves.
    """
    saved = _read(folder, group.rank, group.count)
    found = group.gather_items([saved.path.parent.name], "find a save")
    if len({*found}) > 1:
        listed = ", ".join(f"worker {rank}: {name}" for rank, name in enumerate(found))
        raise ValueError(
            f"workers find different saves in {folder} ({listed}): all must read one folder, on a file system that all machines "
            "share, and nobody may save to it meanwhile. Nothing has been loaded"
        )
    return saved


def _read(folder: Path, rank: int = 0, count: int = 1) -> SavedRelay:
    saved = SavedRelay(*read_current(folder, rank, count))
    edits = saved.manifest.get("edits", {})
    absent = [name for name in _ENTRIES if name not in saved.manifest]
    absent += [f"edits.{field.name}" for field in fields(EditedStacks) if field.name not in edits]
    if absent:
        raise ValueError(
            f"{saved.path} has no {', '.join(absent)}: a version of l2l_core from before the first release wrote it. Load it "
            "with that version, or train and save again with this one"
        )
    return saved


@dataclass(frozen=True, slots=True)
class SavedRelay:
    """Is a save whose files are complete and undamaged.

    Attributes:
        path: of the manifest.
        manifest: what `save` wrote, without tensors.
        tensors: what is there once, mapped from files; of one worker alone all there is.
        parts: of each worker, by its number.
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
        """What was edited."""
        return EditedStacks.from_plain(self.manifest["edits"])

    def past(self) -> dict[str, PlainPart]:
        """Decode what `State.past` was, in memory of its own; every call takes that memory anew."""
        past = self.manifest["past"]
        return {name: decode(part, tensor_copier(self.tensors)) for name, part in past.items()}

    def restore_into(self, state: RelayState) -> None:
        """Give the relay that `state` was taken from the saved weights, buffers, optimizer and random state.

        The relay must have passed `check` of `compatibility.py`.
        """
        manifest, take = self.manifest, tensor_copier(self.tensors)
        optimizer = state.store.optimizer
        settings = decode(manifest["settings"], take)
        own_settings = decode(manifest["own_settings"], take)
        random_state = read_random(decode(manifest["random"], take))
        residuals = decode(manifest["residuals"], take)
        for key, left_out in residuals.items():  # first: the device may have no room
            if key in state.blocks_by_key:  # else it is of a parked layer that nobody can build
                held = {int(index): residual for index, residual in left_out.items()}
                state.store.residuals.restore(state.blocks_by_key[key], held)
        only = bool(optimizer.state)  # it has trained before: what it has counted goes
        state.store.storage.load(state.blocks, self._block_states, self._fill_block)
        with torch.no_grad():
            for _, name, buffer in state.buffers():
                _copy(buffer, self.parts[0].tensors[f"buffers/{name}"])
        load_settings(optimizer, [*own_settings, *settings], only)
        for block in state.blocks:
            block.version = manifest["versions"][block.key]
            block.warmup = manifest["warmups"].get(block.key, 0)
        random_state.restore()
        state.store.storage.commit_load(self.steps)

    def read_snapshot(
        self, name: str, block: Block, local_layout: Layout | None, master: torch.Tensor
    ) -> list[dict[str, Any] | None]:
        """Read the values that another branch has of a block, of which each worker that saved had a part.

        Args:
            name: of the values in the save.
            block: that they are of.
            part: what of it is wanted; None: all of it.
            master: gets the weights.

        Returns:
            What the optimizer knows of each parameter, None where nothing.
        """
        names, here = snapshot_param_names(name, block), block.layout if local_layout is None else local_layout
        for weight in weights_of(names, block.layout, here, master):
            self._fill(weight)
        return self._states_of(names, block.layout, here)

    def _fill_block(self, block: Block) -> None:
        """Give what is here of a block its saved weights."""
        for weight in weights_of(block.names, block.layout, block.master_layout, block.values):
            self._fill(weight)

    def _block_states(self, block: Block) -> BlockStates:
        """Decode what the optimizer knew of a block, as far as it is here."""
        return self._states_of(block.names, block.layout, block.master_layout)

    def _states_of(self, names: Sequence[str], whole: Layout, here: Layout) -> BlockStates:
        takes = [
            tensor_copier(each.tensors) for each in self.parts
        ]  # one each, so that what parameters share stays one
        weights = weights_of(names, whole, here, torch.empty(here.numel, device="meta"))
        return [
            None if weight is None else self._param_state(weight, self._find_pieces(weight), takes)
            for weight in weights
        ]

    def _fill(self, weight: WeightPiece | None) -> None:
        """Give a weight its saved values, if it is here."""
        if weight is None:
            return
        sources = [(piece, self.parts[i].tensors[f"weights/{weight.name}"]) for piece, i in self._find_pieces(weight)]
        assemble(weight.view, weight.piece, weight.whole, sources)

    def _find_pieces(self, weight: WeightPiece) -> list[PartPiece]:
        """Find the parts that have something of a parameter, and what."""

        def pieces() -> Iterator[PartPiece]:
            for number, part in enumerate(self.parts):
                if weight.name in (ranges := part.plain["ranges"]):
                    first, numel = ranges[weight.name]
                    yield Piece(0, (numel,), (1,), first), number
                elif f"weights/{weight.name}" in part.tensors:
                    yield Piece(0, weight.whole.size, weight.whole.stride), number

        return list(pieces())

    def _param_state(
        self, weight: WeightPiece, pieces: Sequence[PartPiece], takes: Sequence[TensorReader]
    ) -> dict[str, Any] | None:
        """Decode what an optimizer knew of a parameter, for the piece of it that is here.

        A tensor of the size of each piece is of the parameter's elements, and is cut as the parameter is; anything else is the
        same in all parts.
        """
        piece, number = pieces[0]
        encoded, take = self.parts[number].plain["optimizer_state"], takes[number]
        as_it_is = weight.piece.size == weight.whole.size == piece.size

        def taken(name: str, stride: Sequence[int]) -> torch.Tensor:
            sources = [] if as_it_is else [(piece, self.parts[i].tensors.get(name)) for piece, i in pieces]
            found = [(piece, tensor) for piece, tensor in sources if tensor is not None and tensor.shape == piece.size]
            return (
                assemble_new(weight.piece, weight.whole, found)
                if found and len(found) == len(pieces)
                else take(name, stride)
            )

        return decode(encoded[weight.name], taken) if weight.name in encoded else None


def _copy(target: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy into `target`, which may be an expanded buffer: each element once."""
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in target.stride())
    target[once].copy_(saved[once])
