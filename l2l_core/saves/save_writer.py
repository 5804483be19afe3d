"""Manifest and tensor files of a relay's state.

A generation (`generations.py`) has these files::

    manifest.json                config, step, layers, versions, optimizer settings
    shell.safetensors            weights, buffers and optimizer state of the shell ...
    L000.safetensors             ... and of each layer, by key
    shared%3A*.safetensors       shared weights and their optimizer state
    residuals.safetensors        residuals of compressed gradients, by block and parameter, if there are any
    relay.safetensors            random generators, and settings that are tensors

and one for each part beside the present state that has tensors (`history_parts.py`). With several workers, each has files of the
shell, the layers, and the block snapshots of other branches, with its shards; `part.json` gives the first element and number of
elements of each piece. Buffers are in the files of worker 0.

Not saved: the structure of the model, Python attributes and training mode of modules, NumPy's generator, and learning-rate
schedulers. Save ``scheduler.state_dict()`` yourself. To resume with a scheduler, make the optimizer and the scheduler, pass that
optimizer to `Relay.load`, and then load the scheduler's state: a scheduler made later resets the learning rate.

`torch.distributed.checkpoint` is not used: its metadata is pickled, its pieces are boxes instead of ranges, and its saves are
neither checked by content nor committed atomically.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

import torch

from l2l_core.eps.blocks import Unit
from l2l_core.eps.optimizers import settings_to_save
from l2l_core.model import Tensors, encode
from l2l_core.saves.codec import plain_random
from l2l_core.saves.generation_writer import FolderContent, GenerationWriter
from l2l_core.saves.relay_state import RelayState, WeightPieces


def write_save(writer: GenerationWriter, state: RelayState) -> None:
    """Write this worker's part of `state` into a new generation, together with all workers.

    Raises:
        ValueError: the optimizer state contains a value that is neither a tensor nor plain data.
        OSError: the disk is full, permission is denied, or the folder is not shared.
    """
    own = _own_content(state, with_buffers=writer.is_rank_zero)
    writer.write(state.steps, own, _common_content(state) if writer.is_rank_zero else None)


def _own_content(state: RelayState, with_buffers: bool) -> FolderContent:
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
        for unit, name, buffer in state.buffers() if with_buffers else ():
            buffers[unit][f"buffers/{name}"] = buffer
        with_block = {unit for block, unit in state.blocks.items() if not block.shared}
        for unit in state.units:
            if unit not in with_block:
                yield unit.key, buffers[unit]
        for block, unit in state.blocks.items():
            with state.store.storage.lease(block):
                name = quote(block.key, safe=" ") if block.shared else unit.key
                yield name, file_of(state.pieces(block), {} if block.shared else buffers[unit])
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
        "config": asdict(state.config),
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
