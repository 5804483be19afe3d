"""Assignments that are made and undone together: what putting other layers into a model changes in its dicts."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

_MISSING = object()


class Assignments:
    """Collects assignments to dicts (attributes of modules, members of the container), to be made and undone as one."""

    def __init__(self) -> None:
        self._sets: dict[tuple[int, Any], tuple[MutableMapping[Any, Any], Any, Any]] = {}
        self._fills: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def set(self, target: MutableMapping[Any, Any], name: Any, value: Any) -> None:
        """Let a dict have `value` under `name`; the last one counts."""
        self._sets[id(target), name] = (target, name, value)  # the dict too: held, so that no other gets its id

    def fill(self, target: dict[str, Any], content: dict[str, Any]) -> None:
        """Let a dict have `content` and nothing else, in its order."""
        self._fills.append((target, content))

    def apply(self, title: str) -> Callable[[], None]:
        """Make them; the result undoes them, and raises RuntimeError if a dict that was filled has been changed since.

        Args:
            title: of the stack, for the message.
        """
        before = [(target, name, target.get(name, _MISSING)) for target, name, _ in self._sets.values()]
        filled = [(target, dict(target)) for target, _ in self._fills]
        ours = [content for _, content in self._fills]
        for target, name, value in self._sets.values():
            target[name] = value
        for target, content in self._fills:
            _refill(target, content)

        def undo() -> None:
            now = [target for target, _ in filled]  # in the same order, too: two layers may have changed places
            if any(list(a.items()) != list(b.items()) for a, b in zip(now, ours, strict=True)):
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
    target.clear()  # the same dict, since the container holds it; emptied, since its order counts
    target.update(content)
