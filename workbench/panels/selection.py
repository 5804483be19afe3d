"""Which layer is chosen: one for all panels on a source, so that a board has one selection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from weakref import WeakKeyDictionary, WeakMethod

from workbench.session import LayerRow, SnapshotSource


class Selection:
    """Holds the key of the chosen layer, or None.

    It stays with its layer through edits, whatever its number is then, and falls to None when the layer goes. Panels ask
    when they draw. Whoever watches is told of what a person chooses, and must hold no lock of another panel when choosing.

    Attributes:
        key: the last one chosen; `among` says whether it is still there.
    """

    def __init__(self) -> None:
        self.key: str | None = None
        # weak: a selection lives as long as its source, while panels come and go with their cells
        self._callbacks: list[WeakMethod[Callable[[], None]]] = []

    def find_in(self, layers: Sequence[LayerRow]) -> LayerRow | None:
        """Return the chosen one of these layers; if it is not among them, nothing is chosen from now on."""
        row = next((row for row in layers if row.key == self.key), None)
        if row is None:
            self.key = None  # and nobody is told: this is asked while panels draw, under their locks
        return row

    def choose(self, key: str | None) -> None:
        """Choose a layer, or none, and tell whoever watches if it is another one."""
        if key == self.key:
            return
        self.key = key
        for told in [method() for method in self._callbacks]:
            if told is not None:
                told()

    def observe(self, callback: Callable[[], None]) -> None:
        """Call this method after every choice, as long as its object lives."""
        self._callbacks = [method for method in self._callbacks if method() is not None] + [WeakMethod(callback)]


def shared_selection(source: SnapshotSource | Hashable) -> Selection:
    """Return the selection that all panels on a source share; or all pictures of anything else that has one."""
    with _selections_lock:
        return _selections.setdefault(source, Selection())


_selections: WeakKeyDictionary[SnapshotSource | Hashable, Selection] = WeakKeyDictionary()
_selections_lock = threading.Lock()
