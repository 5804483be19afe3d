"""Models of transformers from a folder of safetensors, quantised one tensor at a time while they are read, with adapters.

transformers quantises each tensor before it reads the next one, if it gets them as slices of open files. They are read, not
mapped: mapped pages of the whole folder would count as memory of the process. Memory of tensors that are quantised by then
is returned to the system before the next one is read, which glibc does not do while small codes lie among them: a third less
at the peak. So the host needs the memory of the quantised model, and of one tensor.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn

from l2l_core.devices import return_freed_memory
from l2l_core.shelf import safetensors_files

_NAMES = ("nf4", "int8")


def load_pretrained(
    folder: str | Path, quantize: Any, adapters: Any, dtype: torch.dtype, model_class: Any = None
) -> nn.Module:
    """Load a model for training, with the arguments of `Relay.from_pretrained`.

    Raises:
        ValueError: no such files, an unknown name of a quantisation, or a model of a class that transformers lacks.
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
