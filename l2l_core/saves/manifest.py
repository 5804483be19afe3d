"""A relay's state as a manifest and files of tensors, and back.

A generation of `folder.py` has these files::

    manifest.json                config, step, layers, versions, optimizer settings
    shell.safetensors            weights, buffers and optimizer state of the shell ...
    L000.safetensors             ... and of every layer, by its key; shared weights are in the first that holds them
    relay.safetensors            random generators, and settings that are tensors

and one for each part of the past that has tensors (`history.py`).

What it is not: nothing of the model's structure is saved, nor Python attributes of modules, their training mode,
NumPy's generator, or learning-rate schedulers. Save ``scheduler.state_dict()`` yourself. To resume with one, make the
optimizer and the scheduler first, pass that optimizer to `Relay.load`, then load the scheduler's state: a scheduler
made afterwards sets the learning rate back to its first value.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from l2l_core.config import RelayConfig
from l2l_core.eps.optimizers import put, to_save
from l2l_core.model import Tensors, decode, encode
from l2l_core.saves.codec import Part, plain_random, read_random
from l2l_core.saves.folder import read, write
from l2l_core.saves.stacks import Edited
from l2l_core.saves.state import State


def save(folder: Path, state: State) -> Path:
    """Save `state` to `folder` and return the folder; whatever goes wrong, the folder keeps its last good save.

    Raises:
        ValueError: the optimizer keeps something that is neither tensor nor plain data.
        OSError: disk full (says how much is needed, and free), no permission, and so on.
    """
    write(folder, state.steps, *_describe(state))
    return folder


def load(folder: Path) -> Saved:
    """Read what `save` wrote, and check every file of it.

    Raises:
        ValueError: there is no save, it is damaged or incomplete, or of another schema; names the file.
    """
    return Saved(*read(folder))


def _describe(state: State) -> tuple[dict[str, Any], dict[str, Tensors]]:
    """Make the manifest, and list the tensors of each file: those that `encode` meets join the one it is given."""
    optimizer, masters, contents = state.store.optimizer, state.masters, state.tensors_by_unit()
    optimizer_state = {}
    for tensors in contents.values():
        for name in [name.removeprefix("weights/") for name in tensors if name.startswith("weights/")]:
            if masters[name] in optimizer.state:
                optimizer_state[name] = encode(optimizer.state[masters[name]], f"optimizer/{name}", tensors)
    own_settings, settings = to_save(optimizer)
    common: Tensors = {}
    parts: dict[str, Tensors] = {name: {} for name in state.past}
    manifest = {
        "torch": torch.__version__,
        "steps": state.steps,
        "config": asdict(state.config),
        **state.outline(),
        "warmups": {block.key: block.warmup for block in state.blocks if block.warmup},
        "edits": asdict(state.edited),
        "past": {name: encode(part, f"past/{name}", parts[name]) for name, part in state.past.items()},
        "settings": encode(settings, "settings", common),
        "own_settings": encode(own_settings, "own_settings", common),  # attributes and defaults
        "optimizer_state": optimizer_state,
        "random": encode(plain_random(state.random_state), "random", common),
    }
    # Only now: encoding the manifest has put the tensors of parts and settings where they go
    contents |= {name: tensors for name, tensors in parts.items() if tensors}
    return manifest, {**contents, "relay": common}


@dataclass(frozen=True, slots=True)
class Saved:
    """Is a save whose files are complete and undamaged.

    Attributes:
        path: of the manifest.
        manifest: what `save` wrote, without tensors.
        tensors: of all files, mapped from them.
    """

    path: Path
    manifest: dict[str, Any]
    tensors: Tensors

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
    def edited(self) -> Edited:
        """What was edited; nothing, in a save that knows nothing of edits."""
        return Edited.of(self.manifest.get("edits", {}))

    def past(self) -> dict[str, Part]:
        """Decode what `State.past` was, in memory of its own; every call takes that memory anew."""
        return {name: decode(part, self.tensors, {}) for name, part in self.manifest.get("past", {}).items()}

    def restore_into(self, state: State) -> None:
        """Give the relay that `state` was taken from the saved weights, buffers, optimizer and random state.

        The relay must have passed `check` of `agreement.py`.
        """
        manifest, tensors = self.manifest, self.tensors
        known: Tensors = {}  # for all of it, so that a tensor that several settings share stays one
        masters, optimizer = state.masters, state.store.optimizer
        settings = decode(manifest["settings"], tensors, known)
        own_settings = decode(manifest.get("own_settings", []), tensors, known)
        encoded = manifest["optimizer_state"]
        optimizer_state = {masters[name]: decode(values, tensors, known) for name, values in encoded.items()}
        random_state = read_random(decode(manifest["random"], tensors, known))
        # All memory is taken and nothing can fail from here on, where the relay begins to change.
        with torch.no_grad():
            for name, tensor in state.tensors().items():
                _copy(tensor, tensors[name])
        only = bool(optimizer.state)  # it has trained before: what it has counted goes
        optimizer.state.clear()
        optimizer.state.update(optimizer_state)
        put(optimizer, [*own_settings, *settings], only)
        state.store.masters.book_state()
        for block in state.blocks:
            block.version = manifest["versions"][block.key]
            block.warmup = manifest.get("warmups", {}).get(block.key, 0)
        random_state.put()


def _copy(target: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy into `target`, which may be an expanded buffer: each element once."""
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in target.stride())
    target[once].copy_(saved[once])
