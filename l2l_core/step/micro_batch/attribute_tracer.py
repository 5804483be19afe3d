"""Spies on classes, for the length of a pass: they tell who reads and who sets an attribute of an instance.

A spy is a descriptor on the class, and a `__setattr__` tells of attributes that are new. Relays may step in several threads at
once, on models of the same classes: then the spies of one pass stand before those of another, and go from wherever they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any, Protocol

from torch import nn

_MISSING = object()
_LOCK = RLock()
_ACTIVE: list[AttributeTracer] = []


class AccessListener(Protocol):
    """Whoever is told."""

    def owns(self, module: nn.Module) -> bool:
        """Tell whether a module is of its pass, and not of one in another thread."""

    def on_read(self, module: nn.Module, name: str) -> Any:
        """Somebody reads an attribute that there is; returns what is read."""

    def on_set(self, module: nn.Module, name: str) -> None:
        """Somebody has set an attribute."""


class AttributeTracer:
    """All that stand for one pass.

    Invariant: after `end` every class is as it was before, also where passes in several threads overlap.
    """

    def __init__(self, listener: AccessListener) -> None:
        self.listener = listener
        self._installed: dict[tuple[type, str], tuple[Any, Any]] = {}  # with what the class itself had there
        self._undo = ExitStack()

    def begin(self) -> None:
        """A pass begins."""
        _ACTIVE.append(self)
        self._undo.callback(_ACTIVE.remove, self)

    def end(self) -> None:
        """It is over: take all away, the last one first, also where an interrupt comes meanwhile."""
        self._undo.close()

    def trace(self, cls: type, name: str) -> None:
        """See who reads and sets the attribute `name` of instances, from now on."""
        with _LOCK:  # from the look at what stands there
            if (cls, name) in self._installed:
                return
            found = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), _MISSING)
            below = found if isinstance(found, _TracedAttribute) and found.tracer is not self else None
            if below is not None:
                found = below.default
            elif hasattr(type(found), "__set__"):
                return  # a property: instances hold nothing under this name
            self._install(cls, name, _TracedAttribute(self, name, found, below))

    def trace_all_sets(self, classes: Collection[type]) -> None:
        """See whatever is set on instances of these."""
        # All are looked up before any is replaced: a class may get its own from another one.
        with _LOCK:
            setters = {cls: cls.__setattr__ for cls in classes}
            for cls, plain in setters.items():
                self._install(cls, "__setattr__", self._traced_setattr(plain))

    @contextmanager
    def pause(self, classes: Collection[type]) -> Iterator[None]:
        """In the block these are as they are."""
        there = [(cls, name) for cls, name in self._installed if cls in classes]
        for at in there:
            self._restore(*at)
        try:
            yield
        finally:
            for cls, name in there:
                type.__setattr__(cls, name, self._installed[cls, name][0])

    def _install(self, cls: type, name: str, descriptor: Any) -> None:
        self._installed[cls, name] = descriptor, vars(cls).get(name, _MISSING)
        self._undo.callback(self._uninstall, cls, name)
        type.__setattr__(cls, name, descriptor)  # a metaclass may refuse, or do something else

    def _uninstall(self, cls: type, name: str) -> None:
        with _LOCK:
            spy, own = self._installed[cls, name]
            if vars(cls).get(name) is spy:
                self._restore(cls, name)
            for other in _ACTIVE:  # one that began later stands before it
                above, below = other._installed.get((cls, name), (None, None))
                if below is spy:
                    other._installed[cls, name] = above, own

    def _restore(self, cls: type, name: str) -> None:
        if (own := self._installed[cls, name][1]) is _MISSING:
            type.__delattr__(cls, name)
        else:
            type.__setattr__(cls, name, own)

    def _traced_setattr(self, original: Callable[..., None]) -> Callable[..., None]:
        """Make a `__setattr__` that tells of every name that is assigned to, where no spy of these stands yet."""

        def setting(module: nn.Module, name: str, value: Any) -> None:
            original(module, name, value)
            spy = vars(type(module)).get(name)
            if not isinstance(spy, _TracedAttribute) or spy.tracer is not self:
                self.listener.on_set(module, name)

        return setting


class _TracedAttribute:
    """Stands on a class in place of an attribute of its instances, and before that of another pass, if there is one."""

    def __init__(self, tracer: AttributeTracer, name: str, default: Any, below: _TracedAttribute | None) -> None:
        self.tracer, self._name, self.default, self._below = tracer, name, default, below

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if self._name in ({} if instance is None else vars(instance)):
            return self._listener_of(instance).on_read(instance, self._name)
        if self.default is _MISSING:
            raise AttributeError(f"{owner.__name__ if owner else instance!r} has no attribute {self._name!r}")
        get = getattr(type(self.default), "__get__", None)
        return self.default if get is None else get(self.default, instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = value
        self._listener_of(instance).on_set(instance, self._name)

    def __delete__(self, instance: Any) -> None:
        if vars(instance).pop(self._name, _MISSING) is _MISSING:
            raise AttributeError(self._name)

    def _listener_of(self, instance: Any) -> AccessListener:
        if self._below is None or self.tracer.listener.owns(instance):
            return self.tracer.listener
        return self._below._listener_of(instance)
