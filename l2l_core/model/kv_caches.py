"""Key-value caches of transformers' decoders, which a pass does without.

They save work when text is generated token by token. In training every token is there at once, so they save nothing, and
what a layer has put into one would still be there when it is recomputed. So `config.use_cache` is off for the length of a
pass, whatever wraps the model. What it is not: a way to leave out a cache that the batch itself, or the model's own code,
brings along; a layer that is given one is refused (`hidden_tensors.py`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn

from l2l_core.model.modules import modules_of

logger = logging.getLogger("l2l_core")

_CONFIGURATIONS = {"PretrainedConfig", "PreTrainedConfig"}  # what transformers has called the class of all of them


class KVCaches:
    """Which configurations of a model ask for caches, and what was said of that.

    Invariant: outside of `off`, every configuration is as the user has left it.

    Args:
        model: its modules are looked at for every pass anew, because edits may change them and their configurations.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_logged = False

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Let no configuration of the model ask for a cache in the block; afterwards, however it is left, they do."""
        asking = self._enabled_configs()
        if asking and not self._is_logged:
            self._is_logged = True
            logger.info(
                "config.use_cache is off for the length of a step: a key-value cache is for generating text, and would carry "
                "one run's tensors into the recompute. Plain training with config.use_cache = False has the same bits"
            )
        try:
            for config in asking:
                config.use_cache = False
            yield
        finally:
            for config in asking:
                config.use_cache = True

    def _enabled_configs(self) -> list[Any]:
        """Find the configurations of the model and its parts, each once, with `use_cache` on."""
        found: dict[int, Any] = {}
        waiting = [vars(module).get("config") for module in modules_of(self._model)]
        while waiting:
            config = waiting.pop()
            if _is_configuration(type(config)) and id(config) not in found:
                found[id(config)] = config
                waiting += vars(config).values()  # of a part: an encoder, a text model
        return [config for config in found.values() if vars(config).get("use_cache") is True]


def no_cache_arguments(model: nn.Module) -> dict[str, Any]:
    """Say what to pass to a model that takes `use_cache` itself, and may have no configuration that says it."""
    takes = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False} if takes and hasattr(model, "config") else {}


@cache  # asked for every value of every configuration, at every step
def _is_configuration(kind: type) -> bool:
    return any(base.__name__ in _CONFIGURATIONS for base in kind.__mro__)
