"""A relay's state as a manifest and files of tensors.

A generation of `generations.py` has these files::

    manifest.json                config, step, layers, versions, optimizer settings
    shell.safetensors            weights, buffers and optimizer state of the shell ...
    L000.safetensors             ... and of every layer, by its key
    shared%3A*.safetensors       weights that several of them share, and their state
    residuals.safetensors        what compression has left out of gradients, by block and parameter; if there is any
    relay.safetensors            random generators, and settings that are tensors

and one for each part of the past that has tensors (`history_parts.py`). Of several workers each has files of the shell and of every
layer, with its pieces of weights and their state, and of the values that other branches have; `part.json` says of each piece
where it begins and how many elements it has.
Buffers are worker 0's, in its files.

What it is not: nothing of the model's structure is saved, nor Python attributes of modules, their training mode,
NumPy's generator, or learning-rate schedulers. Save ``scheduler.state_dict()`` yourself. To resume with one, make the
optimizer and the scheduler first, pass that optimizer to `Relay.load`, then load the scheduler's state: a scheduler
made afterwards sets the learning rate back to its first value.

`torch.distributed.checkpoint` is not used: its metadata is pickled, its pieces are boxes and not ranges, and a save of it is
neither checked by content nor switched to at one moment.
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
    """Write `state`, as far as it is here, into a new generation, together with all workers.

    Raises:
        ValueError: the optimizer keeps something that is neither tensor nor plain data.
        OSError: disk full (says how much is needed, and free), no permission, no common folder, and so on.
    """
    mine = _own_content(state, with_buffers=writer.is_rank_zero)
    writer.write(state.steps, mine, _common_content(state) if writer.is_rank_zero else None)


def _own_content(state: RelayState, with_buffers: bool) -> FolderContent:
    """List what this worker has of weights and of their state; block by block, since not all of it may be in memory at once."""
    plain: dict[str, Any] = {"ranges": {}, "optimizer_state": {}}

    def file_of(pieces: WeightPieces, beside: Tensors) -> Tensors:
        """Put into `beside` the tensors of weights and of their state, and into `plain` what is no tensor."""
        for weight, _ in pieces:
            beside[f"weights/{weight.name}"] = weight.view
            if weight.piece.size != weight.whole.size:
                plain["ranges"][weight.name] = [weight.piece.first, weight.view.numel()]
        for weight, known in pieces:
            if known is not None:
                plain["optimizer_state"][weight.name] = encode(known, f"optimizer/{weight.name}", beside)
        return beside

    def files() -> Iterator[tuple[str, Tensors]]:
        buffers: dict[Unit, Tensors] = {unit: {} for unit in state.units}
        for unit, name, buffer in state.buffers() if with_buffers else ():
            buffers[unit][f"buffers/{name}"] = buffer
        with_own = {unit for block, unit in state.blocks.items() if not block.shared}
        for unit in state.units:
            if unit not in with_own:
                yield unit.key, buffers[unit]
        for block, unit in state.blocks.items():
            with state.store.storage.lease(block):
                name = quote(block.key, safe=" ") if block.shared else unit.key
                yield name, file_of(state.pieces(block), {} if block.shared else buffers[unit])
        for name in state.snapshots:
            yield name, file_of(state.snapshot_pieces(name), {})

    return FolderContent(plain, files(), state.nbytes)


def _common_content(state: RelayState) -> FolderContent:
    """Make the manifest of what all workers have alike, or what one of them has for all."""
    own_settings, settings = settings_to_save(state.store.optimizer)
    common: Tensors = {}
    parts: dict[str, Tensors] = {name: {} for name in state.past}
    left_out: Tensors = {}
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
        "residuals": encode(state.residuals(), "residuals", left_out),
        "random": encode(plain_random(state.random_state), "random", common),
    }
    # Only now: encoding the manifest has put the tensors of parts and settings where they go
    files = {name: tensors for name, tensors in {**parts, "residuals": left_out}.items() if tensors} | {"relay": common}
    return FolderContent(manifest, files.items(), sum(t.nbytes for tensors in files.values() for t in tensors.values()))
