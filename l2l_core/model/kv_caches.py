"""Key-value caches of transformers, and other containers whose tensors the relay cannot find.

In training a cache saves nothing, and its tensors would still be there when a layer is recomputed, so `config.use_cache`
is off during a pass. A cache that the batch or the model's own code passes to a layer is refused.
"""

from __future__ import annotations

import gc
import inspect
import logging
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

logger = logging.getLogger("l2l_core")

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout, range)
_NO_DATA = (type, torch.nn.Module, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_CONFIGURATIONS = {"PretrainedConfig", "PreTrainedConfig"}  # base class of configurations in versions of transformers


class KVCaches:
    """The `use_cache` settings of a model's configurations; outside of `disabled` they are as the user set them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_logged = False

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Set `use_cache` to False in all configurations inside the block; restore it afterwards."""
        configs = self._enabled_configs()
        if configs and not self._is_logged:
            self._is_logged = True
            logger.info(
                "config.use_cache is off during a step: a key-value cache is for generating text, and would carry tensors of "
                "the first run into the recompute. Plain training has the same bits with use_cache = False in the "
                "configuration of every part (T5's decoder has its own)"
            )
        try:
            for config in configs:
                config.use_cache = False
            yield
        finally:
            for config in configs:
                config.use_cache = True

    def _enabled_configs(self) -> list[Any]:
        """List the configurations of the model and its parts with `use_cache` on, each once."""
        found: dict[int, Any] = {}
        waiting = [vars(module).get("config") for module in self._model.modules()]
        while waiting:
            config = waiting.pop()
            if _is_configuration(type(config)) and id(config) not in found:
                found[id(config)] = config
                waiting += vars(config).values()  # of a part: an encoder, a text model
        return [config for config in found.values() if vars(config).get("use_cache") is True]


def no_cache_arguments(model: nn.Module) -> dict[str, Any]:
    """Return the `use_cache=False` argument for a model whose forward takes it, else no argument."""
    takes = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False} if takes and hasattr(model, "config") else {}


@cache  # called for every value of every configuration, at every step
def _is_configuration(kind: type) -> bool:
    return any(base.__name__ in _CONFIGURATIONS for base in kind.__mro__)


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
