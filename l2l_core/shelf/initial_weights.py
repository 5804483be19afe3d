"""Weights before the first step: models without any, the first records, and safetensors files to fill them from."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.optim import Optimizer

from l2l_core.devices import write_tensors
from l2l_core.eps import Masters
from l2l_core.eps.blocks import Block, is_placeholder, nan_placeholder
from l2l_core.saves import SavedRelay
from l2l_core.shelf.direct_io import round_to_pages
from l2l_core.shelf.file_shelf import FileShelf, Initialiser
from l2l_core.shelf.memory_sizes import MemoryBudget, StateSizes
from l2l_core.shelf.record_store import RecordLayout, RecordStore, weights_in


@contextmanager
def empty_weights() -> Iterator[None]:
    """Make modules without memory for their parameters, so that a model of any size can be made.

    Each parameter moves to ``meta`` when it is registered, where initialising it costs nothing; at the end of the context it
    becomes an ordinary parameter of the same shape, filled with NaN, that takes no memory. Buffers are real, as no file holds
    them. The context affects all threads of the process.

    Example:
        >>> from l2l_core import empty_weights
        >>> with empty_weights():
        ...     model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(1000)))  # 4 GB, if it were filled
        >>> model[999].weight.shape
        torch.Size([1000, 1000])
    """
    register, modules = nn.Module.register_parameter, dict[nn.Module, None]()

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None:
            modules[module] = None
            if not param.is_meta:
                module._parameters[name] = nn.Parameter(param.detach().to("meta"), param.requires_grad)

    module_class: Any = nn.Module
    module_class.register_parameter = register_on_meta
    try:
        yield
    finally:
        module_class.register_parameter = register
        replace_meta_params(modules)


def check_buffers(model: nn.Module) -> None:
    """Refuse a model with a buffer on ``meta``.

    Raises:
        ValueError: names the buffer.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"buffer {name} is on meta, and no file has its values: make the model within l2l_core.empty_weights(), which "
                "leaves buffers real, or replace it by a real tensor"
            )


def replace_meta_params(modules: Iterable[nn.Module]) -> None:
    """Replace parameters on ``meta``, which cannot be given data, by placeholders of NaN; ties stay."""
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for module in modules:
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                if not param.requires_grad and param.dtype != torch.float32:
                    raise ValueError(
                        f"parameter {name} of a {type(module).__name__} is {param.dtype} and not trained: it would keep its "
                        "dtype, and weights in files are float32. Make it a buffer (register_buffer), which stays in memory, "
                        "or train without a shelf"
                    )
                if param not in replacements:
                    new = replacements[param] = nn.Parameter(torch.empty(0), param.requires_grad)
                    # Not made from the placeholder: all parameters would share one version counter
                    new.data = nan_placeholder(param.shape)
                module._parameters[name] = replacements[param]


def refuse_placeholder_state(folder: Path, owner: nn.Module | Optimizer, *_: Any) -> None:
    """Refuse the state dict of a module or an optimizer whose parameters have no values; a state-dict pre-hook.

    Raises:
        RuntimeError: weights and optimizer state are on disk.
    """
    groups = [owner.parameters()] if isinstance(owner, nn.Module) else [group["params"] for group in owner.param_groups]
    if any(is_placeholder(param) for params in groups for param in params):
        raise RuntimeError(
            f"the weights of this model and the optimizer's state are in {folder}; in memory they are NaN. Read weights with "
            "`for name, tensor in relay.shelf.weights()`, or write them with relay.shelf.save_pretrained(folder)"
        )


InitialWeights = dict[Block, list[torch.Tensor]]  # parameters of each block before it was offloaded


def check_weights_source(shelf: FileShelf, model: nn.Module, from_save: bool) -> None:
    """Check that the first records have one source of weights, which may be the model.

    Raises:
        ValueError: there are two, or a parameter of the model has no values.
    """
    if from_save and (shelf.weights is not None or shelf.resume):
        raise ValueError(
            "Relay.load fills the shelf with the weights of the save, but weights= or resume= of FileShelf give it others: "
            "leave them out, or continue the existing shelf with Relay(..., shelf=FileShelf(..., resume=True))"
        )
    if from_save or shelf.weights is not None or shelf.resume:
        return
    name = next((name for name, param in model.named_parameters() if param.is_meta or is_placeholder(param)), None)
    if name is not None:
        raise ValueError(
            f"parameter {name} has no values (it is on meta, or shows NaN): give FileShelf(weights=...) a function that fills a "
            "parameter, given its name, or safetensors files; or resume=True"
        )


def refuse_edited_save(saved: SavedRelay) -> None:
    """Refuse a save with edits or branches.

    Raises:
        ValueError: the model was edited, or has branches.
    """
    if saved.edited.is_edited or saved.manifest["past"].keys() - {"history"}:
        raise ValueError(
            f"{saved.path} has edits or branches, which can only be loaded into memory: load it without shelf=. To put its "
            "present weights on a shelf, without the optimizer's state, write them with model.save_pretrained and give "
            "FileShelf(weights=...). Nothing has been loaded"
        )


def check_disk_space(folder: Path, blocks: Sequence[Block], state_sizes: StateSizes) -> None:
    """Check that the disk has room for two copies of blocks and their state, one of those in bytes.

    Raises:
        OSError: it has not; gives the bytes needed and free.
    """
    needed = sum(
        (1 if block.in_bytes else 2)  # nothing writes bytes again
        * (round_to_pages(block.master_layout.nbytes) + round_to_pages(state_sizes(block, only_trained=True)))
        for block in blocks
    )
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"two copies of {len(blocks)} blocks with their state take {needed:,} bytes, and {free:,} are free there: make room, "
            "give a folder on a larger disk, or an optimizer with less state (in_bf16). Nothing was written",
            str(folder),
        )


def write_initial(
    masters: Masters,
    records: RecordStore,
    budget: MemoryBudget,
    weights: InitialWeights,
    fill: Callable[[Block, torch.Tensor], None],
) -> None:
    """Write the first record of every block, and free its weights and optimizer state in memory.

    `fill` writes the weights of a block into a record; its entry in `weights` is then removed.

    Raises:
        ValueError: a parameter has no values.
        OSError: a record cannot be written.
    """
    state = masters.optimizer.state
    for block in masters.blocks:
        params = masters.params_of(block)
        layout, tensors = RecordLayout.of(block.master_layout, [state.get(param) for param in params])
        with budget.lease_record(block, layout.nbytes) as flat:
            fill(block, weights_in(flat, block).zero_())
            layout.write_states(flat, tensors, layout)
            records.write(block, layout, flat[: layout.nbytes])
            records.wait_for_writes()
        del weights[block]
        for param in params:
            state.pop(param, None)


@torch.no_grad()
def fill_block(weights: torch.Tensor, block: Block, values: Sequence[torch.Tensor], fill: Initialiser | None) -> None:
    """Fill the weights of a whole block, (block.layout.numel,), with `values` of its parameters, or by `fill`.

    Raises:
        ValueError: a parameter has no values.
    """
    for name, view, value in zip(block.names, block.layout.views(weights), values, strict=True):
        if fill is None:
            view.copy_(value)
            continue
        view.fill_(torch.nan)
        fill(name, view)
        if bool(view.isnan().any()):
            raise ValueError(f"weights= of the shelf sets no values for {name}, or NaN. Nothing was trained")


_INDEX, _SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


class SafetensorsShards:
    """Initialiser that fills parameters from a safetensors file, or from a folder of such files with an index.

    `ties` are groups of names of one tensor, which the files hold under one of them.

    Raises:
        ValueError: there is no such file.
    """

    def __init__(self, path: Path, ties: Iterable[Sequence[str]]) -> None:
        self._path = path
        self._aliases = {name: names for names in ties for name in names}
        self._files = safetensors_files(path)

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


def safetensors_files(path: Path) -> dict[str, Path]:
    """Return the file of each tensor by name, from a safetensors file or a folder of such files.

    Raises:
        ValueError: there is no such file.
    """
    if (path / _INDEX).is_file():
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        return {name: path / file for name, file in index["weight_map"].items()}
    alone = path / _SINGLE_FILE if path.is_dir() else path
    if not alone.is_file():
        raise ValueError(f"{path} has neither {_INDEX} nor {_SINGLE_FILE}: give a safetensors file or a folder of such")
    with safe_open(alone, "pt") as file:
        return dict.fromkeys(file.keys(), alone)
