"""Models without weights: their parameters have shapes and NaN until a shelf fills them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from l2l_core.eps.blocks import is_placeholder, nan_placeholder


@contextmanager
def empty_weights() -> Iterator[None]:
    """Make modules without memory for their parameters, so that a model of any size can be made.

    Each parameter moves to ``meta`` when it is registered, where initialising it costs nothing; at the end of the context it
    becomes an ordinary parameter of the same shape, filled with NaN, that takes no memory. Buffers are real, as no file holds
    them. The context affects all threads of the process.
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
                if param not in replacements:
                    new = replacements[param] = nn.Parameter(torch.empty(0), param.requires_grad)
                    # Not made from the placeholder: all parameters would share one version counter
                    new.data = nan_placeholder(param.shape)
                module._parameters[name] = replacements[param]


def refuse_placeholder_state(folder: Path, module: nn.Module, *_: Any) -> None:
    """Refuse the state dict of a module whose parameters have no values; a state-dict pre-hook."""
    if any(is_placeholder(param) for param in module.parameters()):
        refuse_state(folder)


def refuse_state(folder: Path, *_: Any) -> NoReturn:
    """Raise the error for a state dict while weights and optimizer state are on disk."""
    raise RuntimeError(
        f"the weights of this model and the optimizer's state are in {folder}; in memory they are NaN. Read weights with "
        "`for name, tensor in relay.shelf.weights()`, or write them with relay.shelf.save_pretrained(folder)"
    )
