"""Models of transformers from a folder of safetensors, quantised one tensor at a time while they are read, with adapters.

transformers quantises each tensor before it reads the next one, if it gets them as slices of open files. They are read, not
mapped: mapped pages of the whole folder would count as memory of the process. Memory of tensors that are quantised by then
is returned to the system before the next one is read, which glibc does not do while small codes lie among them: a third less
at the peak. So the host needs the memory of the quantised model, and of one tensor.

For a shelf, each tensor is moved to a file when a module gets it, and is mapped from there until it is in a record: the system
may take its memory back at any time. So the host needs the memory of one layer, and a model may exceed it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from l2l_core.devices import explain_full_disk, return_freed_memory
from l2l_core.shelf import safetensors_files

_NAMES = ("nf4", "int8")
_PAGE = 4096  # bytes; a smaller tensor stays in memory


def load_pretrained(
    folder: str | Path,
    quantize: Any,
    adapters: Any,
    dtype: torch.dtype,
    model_class: Any = None,
    map_in: str | Path | None = None,
) -> nn.Module:
    """Load a model for training, with the arguments of `Relay.from_pretrained`.

    Args:
        map_in: folder on a disk with room for the quantised model, whose parameters are then mapped from files there. These
            have no names, and are freed with the tensors. Default: parameters are in memory.

    Raises:
        OSError: the disk of `map_in` is full.
        ValueError: no such files, an unknown name of a quantisation, or a model of a class that transformers lacks.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from l2l_core.integrations import load_pretrained
        >>> sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 32}
        >>> config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        >>> GPT2LMHeadModel(config).save_pretrained("tiny")
        >>> tiny = load_pretrained("tiny", quantize=None, adapters=None, dtype=torch.float32)
        >>> type(tiny).__name__, tiny.training
        ('GPT2LMHeadModel', True)
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    options: dict[str, Any] = {"config": config, "dtype": dtype}
    if quantize is not None:
        options |= {"quantization_config": _quantization(quantize, dtype), "device_map": {"": "cpu"}}
    files = safetensors_files(Path(folder))
    with ExitStack() as stack:
        opened = {
            path: stack.enter_context(safe_open(path, "pt", backend="pread")) for path in dict.fromkeys(files.values())
        }
        if map_in is not None:
            stack.enter_context(_mapping_parameters(Path(map_in)))
        slices = {name: _StoredTensor(opened[path].get_slice(name)) for name, path in files.items()}
        made = _class_of(model_class, config, folder).from_pretrained(None, state_dict=slices, **options)
    if adapters is not None:
        import peft  # pyright: ignore[reportMissingImports] - optional

        made = peft.get_peft_model(made, adapters)
    return made.train()


class _StoredTensor:
    """A tensor in an open file, read when it is indexed; freed memory is returned to the system first."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def __getitem__(self, index: Any) -> torch.Tensor:
        return_freed_memory()
        return self._stored[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)


@contextmanager
def _mapping_parameters(folder: Path) -> Iterator[None]:
    """Move the values of each parameter that a module gets to a file, with the statistics of its quantisation."""
    folder.mkdir(parents=True, exist_ok=True)

    def move(module: nn.Module, name: str, param: Any) -> None:
        if param is None or param.is_meta:
            return
        codes = param.data.data_ptr()
        param.data = _in_file(param.data, folder)
        if (state := getattr(param, "quant_state", None)) is not None:  # of a Linear4bit
            for part in (state, state.state2) if state.nested else (state,):
                part.absmax = _in_file(part.absmax, folder)
        if (CB := getattr(param, "CB", None)) is not None and CB.data_ptr() == codes:  # of a Linear8bitLt
            param.CB = param.data

    handle = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()


def _in_file(tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    """Return a tensor mapped from a new file; small ones, and mapped ones, as they are."""
    if tensor.nbytes < _PAGE or not tensor.is_contiguous() or tensor.untyped_storage().filename is not None:
        return tensor
    descriptor, path = tempfile.mkstemp(dir=folder)
    try:
        remedy = "Give a folder with room for the quantised model twice: once while it is loaded, once in records"
        with open(descriptor, "wb") as file, explain_full_disk(folder, tensor.nbytes, remedy):
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        mapped = torch.from_file(path, shared=True, size=tensor.nbytes, dtype=torch.uint8)
    finally:
        os.unlink(path)
    return mapped.view(tensor.dtype).view(tensor.shape)


def _quantization(quantize: Any, dtype: torch.dtype) -> Any:
    """Return a configuration of transformers for a name; other values as they are."""
    if not isinstance(quantize, str):
        return quantize
    if quantize not in _NAMES:
        raise ValueError(
            f"quantize={quantize!r}: give one of {', '.join(map(repr, _NAMES))}, or a configuration of transformers, such as "
            "BitsAndBytesConfig(load_in_4bit=True)"
        )
    if quantize == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _class_of(model_class: Any, config: Any, folder: str | Path) -> Any:
    """Return the class of the model that is given, or that the configuration names."""
    if model_class is not None and not issubclass(model_class, transformers.PreTrainedModel):
        with torch.device("meta"):  # an AutoModel chooses the class
            return type(model_class.from_config(config))
    if model_class is not None:
        return model_class
    name = next(iter(config.architectures or ()), None)
    if name is None or not hasattr(transformers, name):
        raise ValueError(
            f"{folder}: config.json names {name!r} as the model's class, which transformers lacks: give the class, for example "
            "model_class=transformers.AutoModelForCausalLM"
        )
    return getattr(transformers, name)
