"""Selecting, opening, moving and inserting layers with the pointer or keyboard in every picture."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from l2l_core import Insert, Move
from workbench.panels.selection import shared_selection
from workbench.session import Session, Snapshot, SnapshotSource, edits_for_layer


class LayerPicker(anywidget.AnyWidget):
    """Invisible widget with which a click on an element that has a layer's key selects that layer.

    The page marks the selected layer with a style rule, so no picture is redrawn. If the source is a session, cells of the
    relay picture can be dragged to another position, and layers can be inserted between two cells.

    Args:
        source: source of the layers, or another object with a selection whose pictures have keys.
        open_card: shows the card of the selected layer.
        hint: ARIA label of a focused picture, which names the keys.

    Attributes:
        chosen: key of the selected layer, or "".
        can_edit: the layers are those of a session.
        disabled: the session has ended.
    """

    _esm = Path(__file__).with_name("layer_picker.js").read_text()
    chosen = traitlets.Unicode("").tag(sync=True)
    can_edit = traitlets.Bool(False).tag(sync=True)
    disabled = traitlets.Bool(False).tag(sync=True)
    hint = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        source: SnapshotSource | Hashable,
        open_card: Callable[[], None] = lambda: None,
        hint: str = "Arrow keys choose a layer, Enter opens its card",
    ) -> None:
        super().__init__(can_edit=isinstance(source, Session), hint=hint, layout={"display": "none"})
        self._source, self._open_card, self._selection = source, open_card, shared_selection(source)
        self._selection.observe(self._show_selection)
        self._show_selection()
        self.observe(lambda change: self._selection.choose(change["new"] or None), "chosen")
        self.on_msg(self._on_message)

    def draw(self, snapshot: Snapshot) -> None:
        """Clear the selection if its layer is gone, and disable edits if the session has ended."""
        self.disabled = bool(snapshot.ended)
        self._selection.find_in(snapshot.layers)
        self._show_selection()

    def _show_selection(self) -> None:
        self.chosen = self._selection.key or ""

    def _on_message(self, _: object, content: Mapping[str, Any], __: object) -> None:
        if "open" in content:
            self._open_card()
        elif not isinstance(self._source, Session) or self.disabled:
            return
        elif "move" in content:
            self._source.edit(Move(*content["move"]))
        else:
            layers = self._source.snapshot().layers
            row = next((row for row in layers if row.key == content["insert"]), None)
            if row is not None:  # None: the layer was removed under the pointer
                label = "Insert after" if content["behind"] else "Insert before"
                # a layer in no stack has no such edit: `Insert` is then refused with the reason
                self._source.edit(edits_for_layer(row, layers).get(label, Insert(row.key)))


def make_pickable(picture: ipywidgets.HTML) -> ipywidgets.HTML:
    """Make a picture focusable, so that arrow keys select its layers; return the picture."""
    picture.tabbable = True
    picture.add_class("l2l-picks")
    return picture
