"""Tensors that the relay cannot find: in key-value caches and in containers that are no pytree nodes."""

from __future__ import annotations

import gc
import types
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout, range)
_NO_DATA = (type, torch.nn.Module, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class RelayCache:
    """Base class of the caches in `empty_cache.py`, so that they are recognised without reading an attribute."""


def is_cache(value: Any) -> bool:
    """Return whether `value` is a key-value cache of transformers."""
    return isinstance(value, RelayCache) or (hasattr(value, "get_seq_length") and hasattr(value, "update"))


def cache_message(cache: Any, where: str) -> str:
    """Return the error message for a key-value cache at `where`."""
    return (
        f"{where} is a key-value cache ({type(cache).__name__}): it would carry tensors of the first run into the recompute. "
        "Train without it: pass use_cache=False in the batch, or leave it and past_key_values out; the relay turns "
        "config.use_cache off by itself. Prefix tuning (peft) works through such a cache: train a PromptTuningConfig or a "
        "LoraConfig instead"
    )


def refuse_hidden_tensors(value: Any, where: str) -> None:
    """Raise TypeError if `value`, which is not a tensor, holds tensors; `where` is its name in the message."""
    if isinstance(value, _PLAIN):
        return
    if is_cache(value):
        raise TypeError(cache_message(value, where))
    if holds_tensor(value):
        raise TypeError(
            f"{where} is a {type(value).__name__} that holds tensors, which the relay cannot find. Pass tuples, lists or "
            "dicts, or register the class with torch.utils._pytree.register_pytree_node"
        )


def holds_tensor(value: Any, depth: int = 4) -> bool:
    """Return whether `value` refers to a tensor, at most `depth` objects away and not through modules or functions."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (*_PLAIN, *_NO_DATA)):
        return False
    # Called for every object at every layer call, hence the limits.
    return any(holds_tensor(part, depth - 1) for part in gc.get_referents(value)[:200])
