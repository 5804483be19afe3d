"""What a run of a layer leaves behind on its modules, and in NumPy's random state."""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections import deque
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from l2l_core.step.micro_batch.module_attributes import MODULE_INTERNALS, AttributeKey, is_plain


class StateDiff:
    """What a layer's modules keep as attributes, and NumPy's random state, to see whether a run has changed any of it."""

    def __init__(self, layer: nn.Module, numpy_drawn: Callable[[], bool]) -> None:
        """`drawn` tells whether NumPy's generator has been drawn from since."""
        self._modules = list(layer.modules())
        self._before, self._numpy_drawn = self._now(), numpy_drawn

    def compare(self) -> tuple[bool, list[AttributeKey]]:
        """Look again, when it has run.

        Returns whether a recompute could find something else than this run did, as far as can be seen from outside; and where
        something else is kept than before, or what is kept has changed in place.
        """
        now = self._now()
        differs = (
            now.keys() != self._before.keys()
            or any(
                now[at].value is not held.value or now[at].extent != held.extent for at, held in self._before.items()
            )
            or self._numpy_drawn()
        )
        return differs, [at for at, held in now.items() if not held.is_same(self._before.get(at))]

    def _now(self) -> dict[AttributeKey, _AttributeState]:
        kept = (
            (m, name, value) for m in self._modules for name, value in vars(m).items() if name not in MODULE_INTERNALS
        )
        return {(module, name): _AttributeState(value, _extent(value), _content(value)) for module, name, value in kept}


class StateDiffs:
    """Whether a run of a layer has left traces, seen at a glance: what `Traces.look` finds, without a copy of everything.

    Most runs change nothing, so what each layer keeps is only compared with what it kept before, object by object.
    """

    def __init__(self) -> None:
        self._fingerprints: dict[nn.Module, _StateFingerprint] = {}
        self._numpy = _NumpyRandomDiff()

    def full_diff(self, layer: nn.Module) -> StateDiff:
        """Look closely at a layer before its run."""
        return StateDiff(layer, self._numpy.watch())

    def quick_diff(self, layer: nn.Module) -> Callable[[], bool]:
        """Look at a layer before its run; calling the result tells whether the run has changed something that may matter."""
        known = self._fingerprints.get(layer)
        if known is None or not known.is_same():
            known = self._fingerprints[layer] = _StateFingerprint.of(layer)
        else:
            known.measure()
        drawn = self._numpy.watch()

        def differs() -> bool:
            differing = not known.is_same() or known.has_grown() or drawn()
            if differing:
                del self._fingerprints[layer]  # holds on to what was there before
            return differing

        return differs


class _StateFingerprint:
    """What the modules of a layer hold, as objects, and of those that can change in place how large or how old they are."""

    __slots__ = ("_attributes", "_changing", "_extents", "_values")

    def __init__(self, attributes: list[dict[str, Any]]) -> None:
        self._attributes = attributes
        self._values = [value for held in attributes for value in held.values()]
        self._changing = [
            value
            for held in attributes
            for name, value in held.items()
            if (name not in MODULE_INTERNALS or name == "_modules")
            and _can_grow(value)  # a new module is not looked at yet
        ]
        self.measure()

    @staticmethod
    def of(layer: nn.Module) -> _StateFingerprint:
        return _StateFingerprint([vars(module) for module in layer.modules()])

    def measure(self) -> None:
        self._extents = [_extent(value) for value in self._changing]

    def is_same(self) -> bool:
        now = [value for held in self._attributes for value in held.values()]
        return len(now) == len(self._values) and all(map(is_, now, self._values))

    def has_grown(self) -> bool:
        return self._extents != [_extent(value) for value in self._changing]


class _NumpyRandomDiff:
    """Whether NumPy's global generator has drawn, seen in its memory: to read its state takes as long as a small layer."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._memory: Any = None
        self._has_spare = False  # a normal number that it can give without touching that memory
        self._last: bytes | None = None

    def watch(self) -> Callable[[], bool]:
        memory = self._find_memory()
        if memory is None:
            before = _numpy_state()
            return lambda: _numpy_state() != before
        now = bytes(memory)
        if now != self._last:
            self._has_spare, self._last = bool(sys.modules["numpy"].random.get_state(legacy=False)["has_gauss"]), now
        if self._has_spare:
            before = _numpy_state()
            return lambda: _numpy_state() != before
        return lambda: bytes(memory) != now

    def _find_memory(self) -> Any:
        """The state of a Mersenne Twister, 624 words and a position; None of any other generator."""
        numpy = sys.modules.get("numpy")
        generator = numpy and numpy.random.mtrand._rand._bit_generator
        if generator is not self._generator:
            self._generator, self._memory = generator, None
            if type(generator).__name__ == "MT19937":
                self._memory = (ctypes.c_uint32 * 625).from_address(generator.ctypes.state_address)
        return self._memory


def _can_grow(value: Any) -> bool:
    return isinstance(value, torch.Tensor | dict | set | list | deque)


class _AttributeState(NamedTuple):
    """What an attribute held when it was looked at.

    Attributes:
        extent: of a tensor its version, of a container its length. What else changes in a container need not matter to a
            recompute (a cache that is filled anew), so that this alone asks for a proof.
        content: changes with everything in it that the model could read.
    """

    value: Any
    extent: int
    content: Any

    def is_same(self, before: _AttributeState | None) -> bool:
        return before is not None and before.value is self.value and before.content == self.content


def _extent(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value._version
    return len(value) if _can_grow(value) else 0


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


def _numpy_state() -> bytes | None:
    """What NumPy's global generator will draw next, whichever it is."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))
