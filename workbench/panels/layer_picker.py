"""Layers that can be touched wherever they are drawn: chosen, opened, dragged to another place, inserted between."""

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
    """Makes every part of a board that carries a layer's key a way to choose that layer. It is invisible.

    Which one is chosen is marked in the page itself, so no picture is drawn again for it. Where the source is a session,
    a cell of the relay picture can be dragged to another one's place, and between two cells a layer can be inserted.

    Args:
        source: whose layers they are; or anything else whose parts carry keys, on which a selection is kept.
        open_card: turns to where the card of the chosen layer is.
        says: what keys do in a picture, for those who hear it.

    Attributes:
        chosen: key of the chosen layer, or "".
        steers: whether the layers can be edited.
        disabled: whether they can no longer.
    """

    _esm = Path(__file__).with_name("layer_picker.js").read_text()
    chosen = traitlets.Unicode("").tag(sync=True)
    steers = traitlets.Bool(False).tag(sync=True)
    disabled = traitlets.Bool(False).tag(sync=True)
    says = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        source: SnapshotSource | Hashable,
        open_card: Callable[[], None] = lambda: None,
        says: str = "Arrow keys choose a layer, Enter opens its card",
    ) -> None:
        super().__init__(steers=isinstance(source, Session), says=says, layout={"display": "none"})
        self._source, self._open_card, self._selection = source, open_card, shared_selection(source)
        self._selection.observe(self._show_selection)
        self._show_selection()
        self.observe(lambda change: self._selection.choose(change["new"] or None), "chosen")
        self.on_msg(self._on_message)

    def draw(self, snapshot: Snapshot) -> None:
        """Choose nothing any more if the chosen layer has gone, and edit nothing any more if the session has ended."""
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
            if row is not None:  # else it has gone while the pointer was over it
                words = "Insert after" if content["behind"] else "Insert before"
                self._source.edit(
                    edits_for_layer(row, layers).get(words, Insert(row.key))
                )  # in no stack: refused with the reason


def make_pickable(picture: ipywidgets.HTML) -> ipywidgets.HTML:
    """Let layers be chosen in a picture with the keyboard too; return the picture."""
    picture.tabbable = True
    picture.add_class("l2l-picks")
    return picture
