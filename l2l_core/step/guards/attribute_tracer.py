"""Descriptors on classes that report reads and writes of attributes of their instances during a pass.

Existing attributes get a descriptor; a wrapped `__setattr__` reports writes to new ones. Passes may run in several threads, on
models of the same classes: they share the descriptors, and a descriptor reports to the pass that owns the instance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any

from torch import nn

_MISSING = object()
_LOCK = RLock()
_ACTIVE: list[AttributeTracer] = []
_INSTALLED: dict[tuple[type, str], tuple[Any, Any]] = {}  # the class's own value, and ours
_UNDO = ExitStack()  # also if an interrupt arrives meanwhile


class AttributeTracer(ABC):
    """A pass that receives the reads and writes of attributes of its modules.

    Invariant: after the `end` of the last pass every class is as before.
    """

    @abstractmethod
    def owns(self, module: nn.Module) -> bool:
        """Whether a module belongs to this pass, and not to one in another thread."""

    @abstractmethod
    def on_read(self, module: nn.Module, name: str) -> Any:
        """Handle the read of an existing attribute, and return its value."""

    @abstractmethod
    def on_set(self, module: nn.Module, name: str) -> None:
        """Handle a write to an attribute."""

    def begin(self) -> None:
        """Receive reads and writes until `end`."""
        with _LOCK:
            _ACTIVE.append(self)

    def end(self) -> None:
        """Receive no more; the last pass removes everything."""
        with _LOCK:
            _ACTIVE[:] = [tracer for tracer in _ACTIVE if tracer is not self]
            if not _ACTIVE:
                _UNDO.close()

    def trace(self, cls: type, name: str) -> None:
        """Report reads and writes of the attribute `name` of instances from now on."""
        with _LOCK:
            found = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), _MISSING)
            if not hasattr(type(found), "__set__"):  # a property: instances hold no value; or traced already
                _install(cls, name, _TracedAttribute(name, found))

    def trace_all_sets(self, classes: Collection[type]) -> None:
        """Report writes to any attribute of instances of these classes."""
        with _LOCK:
            for cls in classes:
                home = next(base for base in cls.__mro__ if "__setattr__" in vars(base))
                if (home, "__setattr__") not in _INSTALLED:
                    _install(cls, "__setattr__", _traced_setattr(cls.__setattr__))

    @contextmanager
    def pause(self, classes: Collection[type]) -> Iterator[None]:
        """Restore these classes in the block, while no pass runs in another thread."""
        keys = [key for key in _INSTALLED if key[0] in classes]
        for cls, name in keys:
            _restore(cls, name)
        try:
            yield
        finally:
            for cls, name in keys:
                type.__setattr__(cls, name, _INSTALLED[cls, name][1])


def _install(cls: type, name: str, value: Any) -> None:
    _INSTALLED[cls, name] = vars(cls).get(name, _MISSING), value
    _UNDO.callback(_INSTALLED.pop, (cls, name))
    _UNDO.callback(_restore, cls, name)
    type.__setattr__(cls, name, value)  # bypasses the `__setattr__` of a metaclass


def _restore(cls: type, name: str) -> None:
    own, value = _INSTALLED[cls, name]
    if vars(cls).get(name) is not value:
        return  # replaced since, or not installed because of an interrupt
    if own is _MISSING:
        type.__delattr__(cls, name)
    else:
        type.__setattr__(cls, name, own)


def _owner_of(module: nn.Module) -> AttributeTracer | None:
    for tracer in tuple(_ACTIVE):  # a copy: passes in other threads begin and end
        if tracer.owns(module):
            return tracer
    return None


def _traced_setattr(original: Callable[..., None]) -> Callable[..., None]:
    """Return a `__setattr__` that reports writes to names without a descriptor."""

    def traced(module: nn.Module, name: str, value: Any) -> None:
        original(module, name, value)
        is_reported = isinstance(vars(type(module)).get(name), _TracedAttribute)
        if not is_reported and (tracer := _owner_of(module)) is not None:
            tracer.on_set(module, name)

    return traced


class _TracedAttribute:
    """Descriptor for an attribute of instances; `default` is the class's own value."""

    def __init__(self, name: str, default: Any) -> None:
        self._name, self._default = name, default

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is not None and self._name in vars(instance):
            tracer = _owner_of(instance)
            return vars(instance)[self._name] if tracer is None else tracer.on_read(instance, self._name)
        if self._default is _MISSING:
            raise AttributeError(f"{owner.__name__ if owner else instance!r} has no attribute {self._name!r}")
        get = getattr(type(self._default), "__get__", None)
        return self._default if get is None else get(self._default, instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = value
        if (tracer := _owner_of(instance)) is not None:
            tracer.on_set(instance, self._name)

    def __delete__(self, instance: Any) -> None:
        if vars(instance).pop(self._name, _MISSING) is _MISSING:
            raise AttributeError(self._name)
