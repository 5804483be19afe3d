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
_STANDING = RLock()
_AT_WORK: list[Spies] = []


class Listener(Protocol):
    """Whoever is told."""

    def knows(self, module: nn.Module) -> bool:
        """Tell whether a module is of its pass, and not of one in another thread."""

    def was_read(self, module: nn.Module, name: str) -> Any:
        """Somebody reads an attribute that there is; returns what is read."""

    def was_set(self, module: nn.Module, name: str) -> None:
        """Somebody has set an attribute."""


class Spies:
    """All that stand for one pass.

    Invariant: after `end` every class is as it was before, also where passes in several threads overlap.
    """

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._standing: dict[tuple[type, str], tuple[Any, Any]] = {}  # with what the class itself had there
        self._undo = ExitStack()

    def begin(self) -> None:
        """A pass begins."""
        _AT_WORK.append(self)
        self._undo.callback(_AT_WORK.remove, self)

    def end(self) -> None:
        """It is over: take all away, the last one first, also where an interrupt comes meanwhile."""
        self._undo.close()

    def see(self, cls: type, name: str) -> None:
        """See who reads and sets the attribute `name` of instances, from now on."""
        with _STANDING:  # from the look at what stands there
            if (cls, name) in self._standing:
                return
            found = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), _MISSING)
            below = found if isinstance(found, _Spy) and found.spies is not self else None
            if below is not None:
                found = below.default
            elif hasattr(type(found), "__set__"):
                return  # a property: instances hold nothing under this name
            self._stand(cls, name, _Spy(self, name, found, below))

    def see_all_sets(self, classes: Collection[type]) -> None:
        """See whatever is set on instances of these."""
        # All are looked up before any is replaced: a class may get its own from another one.
        with _STANDING:
            setters = {cls: cls.__setattr__ for cls in classes}
            for cls, plain in setters.items():
                self._stand(cls, "__setattr__", self._telling(plain))

    @contextmanager
    def away_from(self, classes: Collection[type]) -> Iterator[None]:
        """In the block these are as they are."""
        there = [(cls, name) for cls, name in self._standing if cls in classes]
        for at in there:
            self._take_away(*at)
        try:
            yield
        finally:
            for cls, name in there:
                type.__setattr__(cls, name, self._standing[cls, name][0])

    def _stand(self, cls: type, name: str, spy: Any) -> None:
        self._standing[cls, name] = spy, vars(cls).get(name, _MISSING)
        self._undo.callback(self._leave, cls, name)
        type.__setattr__(cls, name, spy)  # a metaclass may refuse, or do something else

    def _leave(self, cls: type, name: str) -> None:
        with _STANDING:
            spy, own = self._standing[cls, name]
            if vars(cls).get(name) is spy:
                self._take_away(cls, name)
            for other in _AT_WORK:  # one that began later stands before it
                above, below = other._standing.get((cls, name), (None, None))
                if below is spy:
                    other._standing[cls, name] = above, own

    def _take_away(self, cls: type, name: str) -> None:
        if (own := self._standing[cls, name][1]) is _MISSING:
            type.__delattr__(cls, name)
        else:
            type.__setattr__(cls, name, own)

    def _telling(self, plain: Callable[..., None]) -> Callable[..., None]:
        """Make a `__setattr__` that tells of every name that is assigned to, where no spy of these stands yet."""

        def setting(module: nn.Module, name: str, value: Any) -> None:
            plain(module, name, value)
            spy = vars(type(module)).get(name)
            if not isinstance(spy, _Spy) or spy.spies is not self:
                self.listener.was_set(module, name)

        return setting


class _Spy:
    """Stands on a class in place of an attribute of its instances, and before that of another pass, if there is one."""

    def __init__(self, spies: Spies, name: str, default: Any, below: _Spy | None) -> None:
        self.spies, self._name, self.default, self._below = spies, name, default, below

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if self._name in ({} if instance is None else vars(instance)):
            return self._listener_of(instance).was_read(instance, self._name)
        if self.default is _MISSING:
            raise AttributeError(f"{owner.__name__ if owner else instance!r} has no attribute {self._name!r}")
        get = getattr(type(self.default), "__get__", None)
        return self.default if get is None else get(self.default, instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = value
        self._listener_of(instance).was_set(instance, self._name)

    def __delete__(self, instance: Any) -> None:
        if vars(instance).pop(self._name, _MISSING) is _MISSING:
            raise AttributeError(self._name)

    def _listener_of(self, instance: Any) -> Listener:
        if self._below is None or self.spies.listener.knows(instance):
            return self.spies.listener
        return self._below._listener_of(instance)
