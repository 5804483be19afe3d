"""Tensors that the relay cannot see: in caches and in containers that PyTorch's pytrees do not know."""

from __future__ import annotations

import gc
import types
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout, range)
_NO_DATA = (type, torch.nn.Module, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class RelayCache:
    """Marks caches that `empty_cache.py` has made or changed: no attribute of them may be asked for."""


def is_cache(value: Any) -> bool:
    """Whether `value` is a key-value cache as transformers has them."""
    return isinstance(value, RelayCache) or (hasattr(value, "get_seq_length") and hasattr(value, "update"))


def cache_message(cache: Any, where: str) -> str:
    """Say why a layer may not have this cache."""
    return (
        f"{where} is a key-value cache ({type(cache).__name__}): it would carry one run's tensors into the recompute. "
        "Train without it: pass use_cache=False in the batch, or leave it and past_key_values out; config.use_cache is off "
        "by itself. Prefix tuning (peft) is nothing but such a cache: train a PromptTuningConfig or a LoraConfig instead"
    )


def refuse_hidden_tensors(value: Any, where: str) -> None:
    """Raise TypeError if `value`, which is no tensor, leads to tensors; `where` names it."""
    if isinstance(value, _PLAIN):
        return
    if is_cache(value):
        raise TypeError(cache_message(value, where))
    if holds_tensor(value):
        raise TypeError(
            f"{where} is a {type(value).__name__} that holds tensors where the relay cannot see them. Pass tuples, lists or "
            "dicts, or register the class with torch.utils._pytree.register_pytree_node"
        )


def holds_tensor(value: Any, depth: int = 4) -> bool:
    """Whether plain data (not modules, classes or functions) leads to a tensor."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (*_PLAIN, *_NO_DATA)):
        return False
    # Asked of every object at every layer call, hence a few things and not deep.
    return any(holds_tensor(part, depth - 1) for part in gc.get_referents(value)[:200])
