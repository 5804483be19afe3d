"""The selected layer, shared by all panels of a source."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from weakref import WeakKeyDictionary, WeakMethod

from workbench.session import LayerRow, SnapshotSource


class Selection:
    """Key of the selected layer, or None.

    The key stays the same when edits change the layer's number. Panels read it when they draw; observers are called after
    `choose`. A caller of `choose` must not hold the lock of a panel.

    Attributes:
        key: key of the layer that was selected last; `find_in` resets it if the layer is gone.
    """

    def __init__(self) -> None:
        self.key: str | None = None
        # weak: a selection exists as long as its source, panels only as long as their cells' output
        self._callbacks: list[WeakMethod[Callable[[], None]]] = []

    def find_in(self, layers: Sequence[LayerRow]) -> LayerRow | None:
        """Return the selected layer; if it is not among `layers`, reset the selection and return None."""
        row = next((row for row in layers if row.key == self.key), None)
        if row is None:
            self.key = None  # without calling observers: panels call this while they hold their locks
        return row

    def choose(self, key: str | None) -> None:
        """Select a layer or, with None, no layer; call the observers if the selection changes."""
        if key == self.key:
            return
        self.key = key
        for callback in [method() for method in self._callbacks]:
            if callback is not None:
                callback()

    def observe(self, callback: Callable[[], None]) -> None:
        """Call a method after every change of the selection, as long as its object exists."""
        self._callbacks = [method for method in self._callbacks if method() is not None] + [WeakMethod(callback)]


def shared_selection(source: SnapshotSource | Hashable) -> Selection:
    """Return the selection that all panels of a source, or all pictures of another object, share."""
    with _selections_lock:
        return _selections.setdefault(source, Selection())


_selections: WeakKeyDictionary[SnapshotSource | Hashable, Selection] = WeakKeyDictionary()
_selections_lock = threading.Lock()
