"""Modules that are to become layers: whether they may, and what values a fresh one begins with."""

from __future__ import annotations

import zlib
from collections.abc import Collection

import torch
from torch import nn

from l2l_core.eps.blocks import refuse_scripted
from l2l_core.model import RandomState
from l2l_core.surgery import same_random_numbers


def check_new(model: nn.Module, params: Collection[nn.Parameter], module: object) -> nn.Module:
    """A module that is to become a layer of `model`, which holds `params`.

    Raises:
        TypeError: no module.
        ValueError: it is TorchScript; it, or a parameter of it, is part of the model already.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module is a {type(module).__name__}: give a torch.nn.Module, or leave it out for one like another layer"
        )
    refuse_scripted(module)
    if module in set(model.modules()) or not set(params).isdisjoint(module.parameters()):
        raise ValueError(
            f"this {type(module).__name__} is part of the model already: give a module of its own, as copy.deepcopy(...)"
        )
    return module


def initialise(model: nn.Module, module: nn.Module, seed: str) -> None:
    """Give a module the values that it would have in a new `model`; the same ones for the same seed.

    Raises:
        ValueError: nobody says how to initialise some of its parameters.
    """
    with same_random_numbers():
        RandomState.seeded(zlib.crc32(seed.encode())).put()
        before = {name: param.detach().clone() for name, param in module.named_parameters()}
        init = getattr(model, "_init_weights", None)  # of transformers' models
        for inner in module.modules():
            if init is not None:
                init(inner)
            elif callable(reset := getattr(inner, "reset_parameters", None)):
                reset()
    constant = [
        name for name, param in module.named_parameters() if param.dim() > 1 and torch.equal(param, before[name])
    ]
    if constant:
        raise ValueError(
            f"init='fresh': neither the model's _init_weights nor reset_parameters() sets {constant[0]}. Initialise a module "
            "yourself and pass it as module="
        )
