"""A save that has been read from a folder, its comparison with a relay, and its transfer to it.

The number of workers that load may differ from the number that saved: each value is assembled from the parts that contain it.
Files are mapped, so unused values are not read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from l2l_core.config import RelayConfig
from l2l_core.eps import BlockStates
from l2l_core.eps.blocks import Block, Layout, Piece, assemble, assemble_new
from l2l_core.eps.optimizers import load_settings
from l2l_core.model import TensorReader, decode, tensor_copier
from l2l_core.saves.codec import PlainPart as PlainPart
from l2l_core.saves.codec import read_random
from l2l_core.saves.edited_stacks import EditedStacks
from l2l_core.saves.generation_writer import SaveGroup
from l2l_core.saves.generations import Generation, read_current
from l2l_core.saves.relay_state import RelayState, WeightPiece, snapshot_param_names, weights_of

# Required entries of a manifest, besides schema and files
_REQUIRED = (
    "torch", "steps", "config", "units", "versions", "shapes", "ties", "trainable", "optimizer", "groups", "warmups", "edits",
    "past", "settings", "own_settings", "residuals", "random",
)  # fmt: skip
PartPiece = tuple[Piece, int]  # piece of a parameter, and index of the part that contains it


def load_save(folder: Path, group: SaveGroup | None = None) -> SavedRelay:
    """Read the save in a folder and check all of its files; workers share the checksums.

    Raises:
        ValueError: there is no save, it is damaged or incomplete, has another schema (names the file), or workers have found
            different saves.
    """
    saved = SavedRelay(*(read_current(folder) if group is None else read_current(folder, group.rank, group.count)))
    edits = saved.manifest.get("edits", {})
    absent = [name for name in _REQUIRED if name not in saved.manifest]
    absent += [f"edits.{field.name}" for field in fields(EditedStacks) if field.name not in edits]
    if absent:
        raise ValueError(
            f"{saved.path} has no {', '.join(absent)}: it was written by a version of l2l_core before the first release. Load it "
            "with that version, or train and save again with this one"
        )
    found = [] if group is None else group.gather_items([saved.path.parent.name], "find a save")
    if len({*found}) > 1:
        listed = ", ".join(f"worker {rank}: {name}" for rank, name in enumerate(found))
        raise ValueError(
            f"workers find different saves in {folder} ({listed}): all must read one folder, on a file system that all machines "
            "share, and no process may save to it at the same time. Nothing has been loaded"
        )
    return saved


class SavedRelay(Generation):
    """A save with complete and undamaged files."""

    __slots__ = ()

    def config(self, known: RelayConfig | None = None) -> RelayConfig:
        """Return the settings; a schedule that is a function is that of `known`, see `RelayConfig.from_plain`."""
        return RelayConfig.from_plain(self.manifest["config"], known)

    @property
    def seed(self) -> int:
        return self.manifest["config"]["seed"]

    @property
    def steps(self) -> int:
        return self.manifest["steps"]

    @property
    def own_loss(self) -> bool:
        """True if the loss or the objective was the user's, not the model's."""
        return self.manifest.get("own_loss", False)  # saves of 0.2.0 lack the entry

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
        """Read the weights of a sharded block snapshot of another branch into `master`, all of them without `local_layout`.

        Returns:
            The optimizer state of each parameter, or None.
        """
        names, here = snapshot_param_names(name, block), block.layout if local_layout is None else local_layout
        self._fill(names, block.layout, here, master)
        return self._states_of(names, block.layout, here)

    def _fill_block(self, block: Block) -> None:
        self._fill(block.names, block.layout, block.master_layout, block.values)

    def _block_states(self, block: Block) -> BlockStates:
        return self._states_of(block.names, block.layout, block.master_layout)

    def _states_of(self, names: Sequence[str], whole: Layout, here: Layout) -> BlockStates:
        """Return the optimizer state of this worker's part of a block."""
        # One copier per part for all parameters, so that tensors they share stay shared
        takes = [tensor_copier(part.tensors) for part in self.parts]
        dtype = torch.uint8 if here.in_bytes else torch.float32
        weights = weights_of(names, whole, here, torch.empty(here.numel, dtype=dtype, device="meta"))
        return [
            None if weight is None else self._param_state(weight, self._find_pieces(weight), takes)
            for weight in weights
        ]

    def _fill(self, names: Sequence[str], whole: Layout, here: Layout, master: torch.Tensor) -> None:
        """Fill this worker's part of a block with the saved weights."""
        for weight in weights_of(names, whole, here, master):
            if weight is not None:
                pieces, name = self._find_pieces(weight), f"weights/{weight.name}"
                sources = [(piece, self.parts[index].tensors[name]) for piece, index in pieces]
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


logger = logging.getLogger("l2l_core")


def check_compatible(saved: SavedRelay, state: RelayState) -> None:
    """Refuse a save that does not match the relay with the given state.

    Raises:
        ValueError: it belongs to another model or optimizer.
    """
    manifest, live = saved.manifest, state.outline()
    for entry, (what, listed) in _COMPARED.items():
        _compare(saved.path, what, listed(manifest[entry]), listed(live[entry]))
    if manifest["torch"] != torch.__version__:
        message = "%s was written with torch %s, and this is %s: results may differ in rounding"
        logger.warning(message, saved.path, manifest["torch"], torch.__version__)


def compare_layers(path: Path, saved: Iterable[Sequence[str]], live: Iterable[Sequence[str]]) -> None:
    """Compare keys and names of units; `path` is the save, for the message.

    Raises:
        ValueError: they differ.
    """
    _compare(path, "layers", _index_units(saved), _index_units(live))


def describe_differences(where: str, saved: Mapping[str, str], live: Mapping[str, str]) -> str:
    """Return the number of items that differ and the first three, or ""; `where` is the place of `saved`."""
    pairs = {name: (saved.get(name, "absent"), live.get(name, "absent")) for name in {**saved, **live}}
    unlike = [f"{name}: {a} in the {where}, {b} here" for name, (a, b) in pairs.items() if a != b]
    return f"{len(unlike)} differ: {'; '.join(unlike[:3])}" if unlike else ""


def _compare(path: Path, what: str, saved: Mapping[str, str], live: Mapping[str, str]) -> None:
    if unlike := describe_differences("save", saved, live):
        raise ValueError(
            f"{path} was saved with other {what} ({unlike}). Build the model and the optimizer as they were when it was saved, "
            "and change them after loading"
        )


def _index_units(units: Iterable[Sequence[str]]) -> dict[str, str]:
    return {f"[{index}]": f"{key} {name}" for index, (key, name) in enumerate(units)}


def _list_ties(ties: Iterable[Sequence[str]]) -> dict[str, str]:
    return {name: f"one with {', '.join(sorted({*names} - {name}))}" for names in ties for name in names}


def _list_groups(groups: Sequence[Sequence[str]]) -> dict[str, str]:
    members = {name: f"group {index}" for index, names in enumerate(groups) for name in names}
    return members | {"number of groups": str(len(groups))}


# Entries of the manifest to compare, in this order: the name for messages, and a function that lists the items
_COMPARED: dict[str, tuple[str, Callable[[Any], dict[str, str]]]] = {
    "units": ("layers", _index_units),
    "shapes": ("parameters and buffers", dict),
    "ties": ("shared weights", _list_ties),
    "versions": ("blocks of weights", lambda versions: dict.fromkeys(versions, "present")),
    "trainable": ("frozen parameters", lambda names: dict.fromkeys(names, "trained")),
    "optimizer": ("the optimizer", lambda name: {"class": name}),
    "groups": ("parameter groups", _list_groups),
}
