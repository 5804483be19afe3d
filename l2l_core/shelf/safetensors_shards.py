"""Reading and writing of safetensors shards, as written by ``save_pretrained`` of transformers, block by block."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from l2l_core.devices import write_tensors

_INDEX, _SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


class SafetensorsShards:
    """Initialiser that fills parameters from a safetensors file, or from a folder of such files with an index.

    Args:
        path: path of the file or folder.
        ties: groups of names of one tensor, which the files hold under one of them.

    Raises:
        ValueError: there is no such file.
    """

    def __init__(self, path: Path, ties: Iterable[Sequence[str]]) -> None:
        self._path = path
        self._aliases = {name: names for names in ties for name in names}
        self._files = _files_of(path)

    def __call__(self, name: str, into: torch.Tensor) -> None:
        found = next((each for each in self._aliases.get(name, (name,)) if each in self._files), None)
        if found is None:
            raise ValueError(
                f"{self._path} has no weights named {name}: give the files of this model. Nothing was trained"
            )
        with safe_open(self._files[found], "pt") as file:
            tensor = file.get_tensor(found)
        if tensor.shape != into.shape:
            raise ValueError(
                f"{self._path}: {found} has shape {tuple(tensor.shape)}, and {tuple(into.shape)} in the model"
            )
        into.copy_(tensor)


def write_shards(folder: Path, parts: Iterator[Mapping[str, torch.Tensor]], count: int) -> None:
    """Write `count` groups of named tensors, one shard at a time, and the index.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        write_tensors({each: tensor.contiguous() for each, tensor in tensors.items()}, folder / name)
        files |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _files_of(path: Path) -> dict[str, Path]:
    """Return the file of each tensor by name."""
    if (path / _INDEX).is_file():
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        return {name: path / file for name, file in index["weight_map"].items()}
    alone = path / _SINGLE_FILE if path.is_dir() else path
    if not alone.is_file():
        raise ValueError(f"{path} has neither {_INDEX} nor {_SINGLE_FILE}: give a safetensors file or a folder of such")
    with safe_open(alone, "pt") as file:
        return dict.fromkeys(file.keys(), alone)
