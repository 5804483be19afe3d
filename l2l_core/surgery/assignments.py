"""Assignments to a model's dicts that are applied and undone together."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

_MISSING = object()


class Assignments:
    """A collection of assignments to dicts: attributes of modules and members of containers."""

    def __init__(self) -> None:
        self._sets: dict[tuple[int, Any], tuple[MutableMapping[Any, Any], Any, Any]] = {}
        self._fills: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def set(self, target: MutableMapping[Any, Any], name: Any, value: Any) -> None:
        """Add the assignment ``target[name] = value``; it replaces an earlier one."""
        self._sets[id(target), name] = (target, name, value)  # `target` is kept alive, so that its id stays unique

    def fill(self, target: dict[str, Any], content: dict[str, Any]) -> None:
        """Add the replacement of a dict's whole content, in the order of `content`."""
        self._fills.append((target, content))

    def apply(self, title: str) -> Callable[[], None]:
        """Make the assignments; return a function that undoes them.

        It raises RuntimeError if a filled dict was changed since; `title` is the stack's name in the message.
        """
        before = [(target, name, target.get(name, _MISSING)) for target, name, _ in self._sets.values()]
        filled = [(target, dict(target)) for target, _ in self._fills]
        contents = [content for _, content in self._fills]
        for target, name, value in self._sets.values():
            target[name] = value
        for target, content in self._fills:
            _refill(target, content)

        def undo() -> None:
            now = [target for target, _ in filled]  # compared with the order, too: two layers may have been exchanged
            if any(list(a.items()) != list(b.items()) for a, b in zip(now, contents, strict=True)):
                raise RuntimeError(
                    f"{title} does not hold the layers that this edit put there: undo later edits first, each once"
                )
            for target, content in filled:
                _refill(target, content)
            for target, name, value in before:
                if value is _MISSING:
                    del target[name]
                else:
                    target[name] = value

        return undo


def _refill(target: dict[str, Any], content: dict[str, Any]) -> None:
    target.clear()  # the container holds this dict, and its order matters
    target.update(content)
