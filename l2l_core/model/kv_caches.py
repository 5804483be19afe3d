"""Turn off the key-value caches of transformers' decoders during a pass.

In training a cache saves nothing, and its tensors would still be there when a layer is recomputed, so `config.use_cache`
is off during a pass. A cache that the batch or the model's own code passes to a layer is refused (`hidden_tensors.py`).
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
                "the first run into the recompute. Plain training with config.use_cache = False has the same bits"
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
        waiting = [vars(module).get("config") for module in modules_of(self._model)]
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
