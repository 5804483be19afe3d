"""What a run of a layer leaves behind on its modules, and in NumPy's random state."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import nn

from l2l_core.step.micro_batch.attributes import OF_MODULES, Place, is_plain


class Traces:
    """What a layer's modules keep as attributes, and NumPy's random state, to see whether a run has changed any of it."""

    def __init__(self, layer: nn.Module) -> None:
        self._modules = list(layer.modules())
        self._before, self._random = self._now(), _numpy_state()

    def differ(self) -> bool:
        """Whether a recompute could find something else than this run did, as far as can be seen from outside."""
        now = self._now()
        return (
            now.keys() != self._before.keys()
            or any(
                now[at].value is not held.value or now[at].extent != held.extent for at, held in self._before.items()
            )
            or _numpy_state() != self._random
        )

    def changed(self) -> list[Place]:
        """Find where something else is kept than before, or what is kept has changed in place."""
        return [at for at, held in self._now().items() if not held.is_same(self._before.get(at))]

    def _now(self) -> dict[Place, _Held]:
        kept = ((m, name, value) for m in self._modules for name, value in vars(m).items() if name not in OF_MODULES)
        return {(module, name): _Held(value, _extent(value), _content(value)) for module, name, value in kept}


class _Held(NamedTuple):
    """What an attribute held when it was looked at.

    Attributes:
        extent: of a tensor its version, of a container its length. What else changes in a container need not matter to a
            recompute (a cache that is filled anew), so that this alone asks for a proof.
        content: changes with everything in it that the model could read.
    """

    value: Any
    extent: int
    content: Any

    def is_same(self, before: _Held | None) -> bool:
        return before is not None and before.value is self.value and before.content == self.content


def _extent(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value._version
    return len(value) if isinstance(value, dict | set | list | deque) else 0


def _content(value: Any, depth: int = 2) -> Any:
    """Return what shows a change in place: a tensor's version, an array's bytes, what containers and objects hold."""
    if isinstance(value, torch.Tensor):
        return value._version
    if depth and isinstance(value, dict):
        return [(key if is_plain(key) else id(key), _content(item, depth - 1)) for key, item in value.items()]
    if depth and isinstance(value, list | tuple | deque):
        return [_content(item, depth - 1) for item in value]
    if isinstance(value, set | dict | list | deque):
        return len(value)
    if is_plain(value):
        return value
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return value.tobytes() if value.nbytes < 1 << 16 else id(value)
    is_object = depth and type(value).__module__ != "builtins" and not isinstance(value, nn.Module | type)
    if is_object and hasattr(value, "__dict__") and not callable(value):
        return _content(vars(value), depth - 1)
    return id(value)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, position, *rest = numpy.random.get_state()
    return name, keys.tobytes(), position, *rest
