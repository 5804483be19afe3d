"""An attribute that has another value for the length of a block."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


class TemporaryAttribute(AbstractContextManager[None]):
    """Lets an attribute have a value in the block. Several come with every turn: a generator would take twice as long."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner, self._name, self._value = owner, name, value

    def __enter__(self) -> None:
        self._before = getattr(self._owner, self._name)
        setattr(self._owner, self._name, self._value)

    def __exit__(self, *exc: object) -> None:
        setattr(self._owner, self._name, self._before)
