"""Models that are made without weights: their parameters show shapes and NaN until a shelf has files for them."""

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
    """Make modules in a block whose parameters take no memory, so that a model of any size can be made.

    Each parameter goes to ``meta`` as soon as a module gets it, where initialising it costs nothing; when the block ends it is an
    ordinary parameter of its shape that shows NaN. Buffers are real, since nothing else could make them anew. It is for all
    threads of the process.
    """
    register, made = nn.Module.register_parameter, dict[nn.Module, None]()

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None:
            made[module] = None
            if not param.is_meta:
                module._parameters[name] = nn.Parameter(param.detach().to("meta"), param.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        replace_meta_params(made)


def check_buffers(model: nn.Module) -> None:
    """Refuse a model whose buffers have no values.

    Raises:
        ValueError: names one.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"buffer {name} is on meta, and no file has its values: make the model within l2l_core.empty_weights(), which "
                "leaves buffers real, or put a real tensor in its place"
            )


def replace_meta_params(modules: Iterable[nn.Module]) -> None:
    """Put parameters that show NaN in the places of those on ``meta``, which cannot be given data; ties stay."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in modules:
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                if param not in made:
                    made[param] = nn.Parameter(torch.empty(0), param.requires_grad)
                    made[param].data = nan_placeholder(
                        param.shape
                    )  # made of it, all would count their versions together
                module._parameters[name] = made[param]


def refuse_placeholder_state(folder: Path, module: nn.Module, *_: Any) -> None:
    """Refuse to give out a state of parameters without values, also when the relay is closed; copies of the model have them."""
    if any(is_placeholder(param) for param in module.parameters()):
        refuse_state(folder)


def refuse_state(folder: Path, *_: Any) -> NoReturn:
    raise RuntimeError(
        f"the weights of this model and the optimizer's state are in {folder}, and in memory there is nothing but NaN: "
        "go through them by `for name, tensor in relay.shelf.weights()`, or write them by "
        "relay.shelf.save_pretrained(folder)"
    )
