"""A look inside, when somebody asks for one: which layers, which row, what to look at, and pictures of what was seen."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from html import escape
from typing import Any

import ipywidgets

from l2l_core import Inside
from l2l_core.inside import evenly_spaced
from workbench.panels.choices import control_layout, make_dropdown, set_options
from workbench.panels.folded_table import FoldedTable
from workbench.panels.key_capture import KeyCapture
from workbench.panels.panel import Panel, failure_html
from workbench.pictures import (
    Picture,
    Table,
    code_line,
    describe_age,
    describe_cost,
    describe_rows,
    inside_pages,
    show_attention,
    show_lens,
    show_spreads,
    show_stream,
    text_html,
    text_table,
)
from workbench.readings import LayerNumbers, full_name, number_layers
from workbench.session import Session, Snapshot, StateVersion

_VIEWS = ("stream", "spread", "attention", "lens", "text")
_IDLE_TEXT = (
    "Nothing is looked at until you press Look. It runs between two steps, in evaluation mode, on the first batch of the probe, "
    "and changes nothing."
)


class InsidePanel(Panel):
    """Shows activations, attention, and what the head says at each depth, of chosen layers and one row.

    Nothing runs unless Look is pressed; then it is the session's thread that looks, between two steps. All controls are native
    ones: Tab reaches them, in the list of layers arrow keys choose, with Shift several.
    """

    source_type = Session

    def build(self) -> ipywidgets.DOMWidget:
        self._inside: Inside | None = None
        self._seen_at: StateVersion | None = None  # at which it was seen
        self._numbers: LayerNumbers = {}  # of the layers then
        self._future: Future[Inside] | None = None
        self._failure_reason = ""
        self._drawn_inputs: tuple[Any, ...] = ()
        self._layers = ipywidgets.SelectMultiple(options=[], description="layers", rows=5, **control_layout("300px"))
        self._micro_batch = _int_field("micro-batch", 0, 0, "150px")
        self._row = _int_field("row", 0, 0, "110px")
        self._positions = _int_field("positions", 32, 1, "140px")
        self._attention = _checkbox("attention maps", "Keep a map of every attention head, for one row")
        self._lens = _checkbox(
            "head at each depth", "Logit lens: leave out the layers above, one depth after the other"
        )
        self._write = _int_field("tokens to write", 0, 0, "170px")
        self._look_button = ipywidgets.Button(
            description="Look",
            icon="eye",
            tooltip="Look inside after the current step",
            button_style="primary",
        )
        self._look_button.on_click(lambda _: self._look_inside())
        for control in (self._layers, self._micro_batch, self._row, self._positions, self._attention, self._lens):
            control.observe(lambda _: self._redraw(), "value")
        self._write.observe(lambda _: self._redraw(), "value")
        self._code, self._status, self._error_html = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        self._view = ipywidgets.ToggleButtons(
            options=[(words.capitalize(), words) for words in _VIEWS],
            description="show",
            style={"description_width": "40px", "button_width": "auto"},
            layout={"display": "none"},
        )
        self._heads_of = make_dropdown("heads of layer", [], "240px")
        for control in (self._view, self._heads_of):
            control.observe(lambda _: self._redraw(), "value")
        self._picture, self._fold = ipywidgets.HTML(), FoldedTable("What was seen as a table")
        numbers = _button_row([self._micro_batch, self._row, self._positions, self._write])
        ticks = _button_row([self._attention, self._lens, self._look_button])
        form = ipywidgets.HBox([self._layers, ipywidgets.VBox([numbers, ticks, self._code])])
        form.add_class("l2l-form")
        turned = _button_row([self._view, self._heads_of])
        turned.add_class("l2l-settings")
        keys = KeyCapture(layout={"display": "none"})
        shown = [self._status, turned, self._picture, self._fold.widget]
        box = ipywidgets.VBox([ipywidgets.HTML(), form, self._error_html, *shown, keys])
        box.add_class("l2l-inside")
        return box

    # -- drawing -------------------------------------------------------------------------------------------------------

    def draw(self, snapshot: Snapshot) -> None:
        # every time, since `fail` writes over it
        self.widget.children[0].value = '<div class="l2l-heading">Look inside</div>'
        numbers = number_layers(row.key for row in snapshot.layers)
        self._update_layers([(full_name(row.key, numbers), row.key) for row in snapshot.layers])
        self._micro_batch.max = max(self.session.relay.config.micro_batches - 1, 0)
        waits = self._future is not None and not self._future.done()
        self._look_button.disabled = waits
        self._code.value = (
            f"{code_line(self._code_text())} <span class='l2l-caption'>{self._describe_cost(snapshot)}</span>"
        )
        self._update_status(snapshot, waits)
        self._draw_inside(snapshot)

    def _update_layers(self, options: Sequence[tuple[str, str]]) -> None:
        if tuple(self._layers.options) == tuple(options):
            return
        chosen = [key for key in self._layers.value if key in [key for _, key in options]]
        # one message: with new options alone ipywidgets chooses nothing
        with self._layers.hold_sync():
            self._layers.options = options
            self._layers.value = chosen

    def _update_status(self, snapshot: Snapshot, waits: bool) -> None:
        if waits:
            words = "Looking, or waiting for the current step to end."
        elif self._failure_reason:
            words = f"Nothing was seen: {self._failure_reason}"
        elif self._inside is None or self._seen_at is None:
            words = _IDLE_TEXT
        else:
            when = describe_age(self._seen_at, StateVersion.of(snapshot))
            words = f"{describe_rows(self._inside).capitalize()}, {when}; {describe_cost(self._inside)}."
        self._status.value = f'<div class="l2l-caption" role="status">{escape(words)}</div>'

    def _draw_inside(self, snapshot: Snapshot) -> None:
        seen = self._inside
        self._view.layout.display = "none" if seen is None else ""
        heads = [] if seen is None else [one.key for one in seen.passings if one.attention]
        self._heads_of.layout.display = "" if heads and self._view.value == "attention" else "none"
        set_options(self._heads_of, [(full_name(key, self._numbers), key) for key in heads])
        known = seen, self._view.value, self._heads_of.value
        if known == self._drawn_inputs or seen is None:
            return
        self._drawn_inputs = known
        if self._view.value == "text":
            self._picture.value = self._text_html(seen)
            self._fold.show(lambda: text_table(seen, self._numbers, self.session.decode))
            return
        picture = self._pictures(seen)[self._view.value]
        self._picture.value = picture.svg
        self._fold.show(lambda: picture.table)

    def _text_html(self, inside: Inside) -> str:
        if not inside.written:
            return '<p class="l2l-caption">No text was asked for: say how many tokens to write, and press Look.</p>'
        return text_html(inside, self._numbers, self.session.decode)

    def _pictures(self, inside: Inside) -> Mapping[str, Picture]:
        made = {"stream": show_stream, "spread": show_spreads}
        found = {name: make(inside, self._numbers) for name, make in made.items() if name == self._view.value}
        if self._view.value == "attention":
            found["attention"] = show_attention(inside, self._numbers, self._heads_of.value)
        if self._view.value == "lens":
            found["lens"] = show_lens(inside, self._numbers, self.session.decode)
        return found

    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        seen = self._inside
        if seen is None:
            return [Table("Look inside", ("layer",), [], "Nothing was looked at.")]
        return inside_pages(seen, self._numbers, self.session.decode)

    # -- asking --------------------------------------------------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        """What is asked for, without what is so anyway."""
        asked = {
            "micro_batches": [self._micro_batch.value],
            "row": self._row.value,
            "positions": self._positions.value,
            "attention": self._attention.value,
            "lens": self._lens.value,
            "generate": self._write.value,
        }
        usual = {"micro_batches": [0], "row": 0, "positions": 32, "attention": False, "lens": False, "generate": 0}
        return {name: value for name, value in asked.items() if value != usual[name]}

    def _code_text(self) -> str:
        layers = [repr(list(self._layers.value))] if self._layers.value else []
        words = [*layers, *(f"{name}={value!r}" for name, value in self._options().items())]
        return f"seen = workbench.look({', '.join(words)}).result()"

    def _describe_cost(self, snapshot: Snapshot) -> str:
        """How many passes it would take."""
        layers = len(self._layers.value) or len(evenly_spaced(len(snapshot.layers)))
        # three find out whether the model writes from left to right
        passes = 1 + layers * (int(self._lens.value) + self._write.value) + (3 if self._write.value else 0)
        return "takes 1 pass of a micro-batch" if passes == 1 else f"takes up to {passes} passes of a micro-batch"

    def _look_inside(self) -> None:
        try:
            self._failure_reason, self._error_html.value = "", ""
            self._future = self.session.look(list(self._layers.value) or None, **self._options())
            self._future.add_done_callback(self._on_result)
        except Exception as error:
            self._error_html.value = failure_html(str(error), traceback.format_exc())
        self._redraw()

    def _on_result(self, future: Future[Inside]) -> None:
        """On the session's thread, without any lock; if it was cancelled, whoever did that may hold the session's."""
        if future.cancelled():
            return
        error, now = future.exception(), self.session.snapshot()
        if error is None:
            self._inside, self._seen_at = future.result(), StateVersion.of(now)
            self._numbers = number_layers(row.key for row in now.layers)
        else:
            self._failure_reason = str(error).partition("\n")[0]
        self._redraw()

    def _redraw(self) -> None:
        self.show(self.session.snapshot())


def _int_field(label: str, value: int, least: int, width: str) -> ipywidgets.BoundedIntText:
    return ipywidgets.BoundedIntText(value=value, min=least, max=1_000_000, description=label, **control_layout(width))


def _checkbox(label: str, tip: str) -> ipywidgets.Checkbox:
    return ipywidgets.Checkbox(description=label, tooltip=tip, indent=False, layout={"width": "auto"})


def _button_row(children: Sequence[ipywidgets.Widget]) -> ipywidgets.Box:
    row = ipywidgets.HBox(children)
    row.add_class("l2l-buttons")
    return row
