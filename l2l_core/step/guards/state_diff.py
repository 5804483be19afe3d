"""Changes that a layer's run makes to attributes of its modules and to NumPy's random state."""

from __future__ import annotations

import copy
import ctypes
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from l2l_core.devices import NoTorchModes
from l2l_core.model import MOST_ITEMS, is_state, snapshot_user_state, version_of
from l2l_core.step.graph import unguarded
from l2l_core.step.guards.module_attributes import MODULE_INTERNALS, AttributeKey, attributes_of, is_plain

StateDiff = Callable[[], tuple[bool, list[AttributeKey]]]


class StateDiffs:
    """Finds changes that a run of a layer makes: all in the metered pass, fewer later.

    A diff is taken before the run, and compares when it is called after it. It returns whether a recompute could find another
    state than this run did, and the attributes that were replaced or changed in place.
    """

    def __init__(self) -> None:
        self._fingerprints: dict[int, _StateFingerprint] = {}
        self._numpy = _NumpyRandomDiff()

    def full_diff(self, layer: nn.Module) -> StateDiff:
        """Compare every attribute."""
        modules, drawn = list(layer.modules()), self._numpy.watch()
        before = _states_of(modules)

        def compare() -> tuple[bool, list[AttributeKey]]:
            now = _states_of(modules)
            pairs = [(key, before.get(key, _NO_STATE), new) for key, new in now.items()]
            differs = len(now) != len(before) or any(
                a.value is not b.value or a.extent != b.extent for _, a, b in pairs
            )
            changed = [key for key, a, b in pairs if a.value is not b.value or a.content != b.content]
            return differs or drawn(), changed

        return compare

    def quick_diff(self, layer: nn.Module) -> StateDiff:
        """Compare by identity with the attributes before the last run, since most runs change nothing; list none."""
        fingerprint = self._fingerprints.get(id(layer))
        if fingerprint is None or not fingerprint.is_same():
            fingerprint = self._fingerprints[id(layer)] = _StateFingerprint(layer)
        extents, drawn = fingerprint.extents(), self._numpy.watch()

        def compare() -> tuple[bool, list[AttributeKey]]:
            differs = not fingerprint.is_same() or fingerprint.extents() != extents or drawn()
            if differs:
                del self._fingerprints[id(layer)]  # it keeps the old values alive
            return differs, []

        return compare


class LayerState:
    """Plain attributes of a layer's modules as a run finds them, with the values in containers, tensors and objects.

    A layer may count its calls, or keep a running mean in an attribute. Its recompute must find the values that its first run
    found, and leave those of after it.
    """

    def __init__(self, layer: nn.Module) -> None:
        with unguarded(), NoTorchModes():  # no mode must track the copies
            self._restore = snapshot_user_state((), layer.modules(), for_recompute=True)

    def restore(self) -> None:
        """Give the attributes their values of then."""
        with unguarded(), NoTorchModes():
            self._restore()

    @staticmethod
    def includes(keys: Iterable[AttributeKey]) -> bool:
        """Whether one of these attributes belongs to such a state."""
        return any(is_state(name, vars(module).get(name), for_recompute=True) for module, name in keys)


class _StateFingerprint:
    """Values in a layer's modules by identity, and the extents of those that can change in place."""

    def __init__(self, layer: nn.Module) -> None:
        self._attributes = [vars(module) for module in layer.modules()]
        self._values = self._now()
        named = (item for attributes in self._attributes for item in attributes.items())
        self._changing = [
            v for name, v in named if (name not in MODULE_INTERNALS or name == "_modules") and _can_grow(v)
        ]

    def _now(self) -> list[Any]:
        return [value for attributes in self._attributes for value in attributes.values()]

    def is_same(self) -> bool:
        now = self._now()
        return len(now) == len(self._values) and all(map(is_, now, self._values))

    def extents(self) -> list[int]:
        return [_extent(value) for value in self._changing]


class NumpyDrawOrder:
    """Checks that micro-batches draw from NumPy's global generator one after another, as in plain training.

    PyTorch's and Python's generators have a stream per micro-batch; NumPy's has one, and micro-batches take turns.
    """

    def __init__(self) -> None:
        self._diff, self._trains = _NumpyRandomDiff(), torch.is_grad_enabled()
        self._has_drawn: Callable[[], bool] = lambda: False
        self._last = -1  # the last micro-batch that has drawn

    def begin_turn(self) -> None:
        """Begin a turn of a micro-batch."""
        if self._trains:
            self._has_drawn = self._diff.watch()

    def end_turn(self, k: int) -> None:
        """End it; raise RuntimeError if micro-batch `k` has drawn after a later one."""
        if not self._has_drawn():
            return
        if k < self._last:
            raise RuntimeError(
                f"the model draws from NumPy's random generator for micro-batch {k} after it has drawn for micro-batch "
                f"{self._last}, since micro-batches take turns at each layer; in plain training one draws after another. Draw "
                "from torch or Python's random, which have a stream per micro-batch, or use "
                "RelayConfig(schedule='depth_first')"
            )
        self._last = k


class _NumpyRandomDiff:
    """Detects draws from NumPy's global generator in its memory; reading its state takes as long as a small layer."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._memory: Any = None
        self._has_spare = False  # a normal number that is drawn without a change of that memory
        self._last: bytes | None = None

    def watch(self) -> Callable[[], bool]:
        memory = self._find_memory()
        if memory is not None:
            now = bytes(memory)
            if now != self._last:
                state = sys.modules["numpy"].random.get_state(legacy=False)
                self._has_spare, self._last = bool(state["has_gauss"]), now
            if not self._has_spare:
                return lambda: bytes(memory) != now
        before = _numpy_state()
        return lambda: _numpy_state() != before

    def _find_memory(self) -> Any:
        """Return the state of a Mersenne Twister, 624 words and a position; None for other generators."""
        numpy = sys.modules.get("numpy")
        generator: Any = numpy and numpy.random.mtrand._rand._bit_generator
        if generator is not self._generator:
            self._generator, self._memory = generator, None
            if type(generator).__name__ == "MT19937":
                self._memory = (ctypes.c_uint32 * 625).from_address(generator.ctypes.state_address)
        return self._memory


def _states_of(modules: Sequence[nn.Module]) -> dict[AttributeKey, _AttributeState]:
    found = attributes_of(modules)
    return {key: _AttributeState(value, _extent(value), _content(value)) for key, value in found.items()}


def _can_grow(value: Any) -> bool:
    return isinstance(value, torch.Tensor | dict | set | list | deque)


class _AttributeState(NamedTuple):
    """State of an attribute.

    Attributes:
        extent: version of a tensor, length of a container. Other changes in a container (a cache that is filled again) need not
            affect a recompute, so only this one requires a check.
        content: changes with every part that the model could read.
    """

    value: Any
    extent: int
    content: Any


_NO_STATE = _AttributeState(object(), 0, None)  # of an attribute that did not exist


def _extent(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return version_of(value)
    return len(value) if _can_grow(value) else 0


def _is_long(value: Any) -> bool:
    """Whether it is a container that holds data."""
    return isinstance(value, set | dict | list | deque | tuple) and len(value) > MOST_ITEMS


def _content(value: Any, depth: int = 2) -> Any:
    """Return a value that changes with in-place changes: a tensor's version, an array's bytes, contents of containers."""
    if isinstance(value, torch.Tensor):
        return version_of(value)
    if _is_long(value):
        return len(value)
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


def _numpy_state() -> bytes | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))


@contextmanager
def preserved_attributes(layer: nn.Module) -> Iterator[None]:
    """Undo changes to attributes of a layer's modules, and to the containers in them, after the block."""
    before = [(module, dict(vars(module))) for module in layer.modules()]
    values = [value for _, attributes in before for value in attributes.values()]
    contents = [(value, copy.copy(value)) for value in values if isinstance(value, list | dict | set | deque)]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        for container, content in contents:
            if len(container) != len(content):
                container.clear()
                container.extend(content) if isinstance(container, list | deque) else container.update(content)
