"""Next words of a typed text, and a look inside: activations, attention, logit lens and text."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from html import escape
from typing import Any

import ipywidgets

from l2l_core import Inside
from l2l_core.inside import evenly_spaced
from workbench.panels.controls import control_layout, make_box, make_checkbox, make_dropdown, make_row, set_options
from workbench.panels.folded_table import FoldedTable
from workbench.panels.key_capture import KeyCapture
from workbench.panels.own_text import OwnText
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
    "Nothing is recorded until you press Look. The look runs between two steps, in evaluation mode, on the first batch of "
    "the probe, and changes nothing."
)


class InsidePanel(Panel):
    """Activations, attention and logit lens of selected layers for one row of a batch.

    A look runs only when Look is pressed, on the session's thread between two steps.
    """

    source_type = Session
    session: Session

    def build(self) -> ipywidgets.DOMWidget:
        self._inside: Inside | None = None
        self._seen_at: StateVersion | None = None  # of `_inside`
        self._numbers: LayerNumbers = {}  # of the layers in `_inside`
        self._future: Future[Inside] | None = None
        self._failure_reason = ""
        self._drawn_inputs: tuple[Any, ...] = ()
        self._layers = ipywidgets.SelectMultiple(options=[], description="layers", rows=5, **control_layout("300px"))
        self._micro_batch = _int_field("micro-batch", 0, 0, "150px")
        self._row = _int_field("row", 0, 0, "110px")
        self._positions = _int_field("positions", 32, 1, "140px")
        self._attention = make_checkbox("attention maps", "Keep a map of every attention head, for one row")
        self._lens = make_checkbox("head at each depth", "Logit lens: apply the head to the output of each layer")
        self._write = _int_field("tokens to write", 0, 0, "170px")
        tip = "Look inside after the current step"
        self._look_button = ipywidgets.Button(description="Look", icon="eye", tooltip=tip, button_style="primary")
        self._look_button.on_click(lambda _: self._look_inside())
        self._code, self._status, self._error_html = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        self._view = ipywidgets.ToggleButtons(
            options=[(name.capitalize(), name) for name in _VIEWS],
            description="show",
            style={"description_width": "40px", "button_width": "auto"},
            layout={"display": "none"},
        )
        self._heads_of = make_dropdown("heads of layer", [], "240px")
        numbers = self._micro_batch, self._row, self._positions, self._write
        for control in (self._layers, *numbers, self._attention, self._lens, self._view, self._heads_of):
            control.observe(lambda _: self._redraw(), "value")
        self._picture, self._fold = ipywidgets.HTML(), FoldedTable("The view as a table")
        ticks = make_row(self._attention, self._lens, self._look_button)
        fields = ipywidgets.VBox([make_row(*numbers), ticks, self._code])
        form = make_box(ipywidgets.HBox, "l2l-form", self._layers, fields)
        views = make_row(self._view, self._heads_of)
        views.add_class("l2l-settings")
        self._own_text = OwnText(self.session, self._redraw)
        title = ipywidgets.HTML('<div class="l2l-heading">Look inside</div>')
        parts = (
            self._own_text.widget,
            title,
            form,
            self._error_html,
            self._status,
            views,
            self._picture,
            self._fold.widget,
        )
        return make_box(ipywidgets.VBox, "l2l-inside", *parts, KeyCapture(layout={"display": "none"}))

    # -- drawing -------------------------------------------------------------------------------------------------------

    def draw(self, snapshot: Snapshot) -> None:
        numbers = number_layers(row.key for row in snapshot.layers)
        self._update_layers([(full_name(row.key, numbers), row.key) for row in snapshot.layers])
        self._micro_batch.max = max(self.session.relay.config.micro_batches - 1, 0)
        self._own_text.draw(snapshot)
        waits = self._future is not None and not self._future.done()
        self._look_button.disabled = waits
        cost = self._describe_cost(snapshot)
        self._code.value = f"{code_line(self._code_text())} <span class='l2l-caption'>{cost}</span>"
        self._update_status(snapshot, waits)
        self._draw_inside(snapshot)

    def _update_layers(self, options: Sequence[tuple[str, str]]) -> None:
        if tuple(self._layers.options) == tuple(options):
            return
        chosen = [key for key in self._layers.value if key in [key for _, key in options]]
        with self._layers.hold_sync():  # one message: new options alone clear the selection
            self._layers.options = options
            self._layers.value = chosen

    def _update_status(self, snapshot: Snapshot, waits: bool) -> None:
        if waits:
            status = "Looking, or waiting for the current step to end."
        elif self._failure_reason:
            status = f"The look failed: {self._failure_reason}"
        elif self._inside is None or self._seen_at is None:
            status = _IDLE_TEXT
        else:
            age = describe_age(self._seen_at, StateVersion.of(snapshot))
            status = f"{describe_rows(self._inside).capitalize()}, {age}; {describe_cost(self._inside)}."
        self._status.value = f'<div class="l2l-caption" role="status">{escape(status)}</div>'

    def _draw_inside(self, snapshot: Snapshot) -> None:
        inside = self._inside
        self._view.layout.display = "none" if inside is None else ""
        heads = [] if inside is None else [one.key for one in inside.passings if one.attention]
        self._heads_of.layout.display = "" if heads and self._view.value == "attention" else "none"
        set_options(self._heads_of, [(full_name(key, self._numbers), key) for key in heads])
        inputs = inside, self._view.value, self._heads_of.value
        if inputs == self._drawn_inputs or inside is None:
            return
        self._drawn_inputs = inputs
        if self._view.value == "text":
            self._picture.value = self._text_html(inside)
            self._fold.show(lambda: text_table(inside, self._numbers, self.session.decode))
            return
        picture = self._draw_view(inside)
        self._picture.value = picture.svg
        self._fold.show(lambda: picture.table)

    def _text_html(self, inside: Inside) -> str:
        if not inside.written:
            return '<p class="l2l-caption">No text was generated: set "tokens to write" and press Look.</p>'
        return text_html(inside, self._numbers, self.session.decode)

    def _draw_view(self, inside: Inside) -> Picture:
        view = self._view.value
        if view == "attention":
            return show_attention(inside, self._numbers, self._heads_of.value)
        if view == "lens":
            return show_lens(inside, self._numbers, self.session.decode)
        return (show_stream if view == "stream" else show_spreads)(inside, self._numbers)

    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        own = self._own_text.still()
        if self._inside is None:
            return own or [Table("Look inside", ("layer",), [], "Nothing was recorded.")]
        return [*own, *inside_pages(self._inside, self._numbers, self.session.decode)]

    # -- the look ------------------------------------------------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        """Return the arguments of the look that differ from their defaults."""
        options = {
            "micro_batches": [self._micro_batch.value],
            "row": self._row.value,
            "positions": self._positions.value,
            "attention": self._attention.value,
            "lens": self._lens.value,
            "generate": self._write.value,
        }
        defaults = {"micro_batches": [0], "row": 0, "positions": 32, "attention": False, "lens": False, "generate": 0}
        return {name: value for name, value in options.items() if value != defaults[name]}

    def _code_text(self) -> str:
        layers = [repr(list(self._layers.value))] if self._layers.value else []
        arguments = [*layers, *(f"{name}={value!r}" for name, value in self._options().items())]
        return f"inside = workbench.look({', '.join(arguments)}).result()"

    def _describe_cost(self, snapshot: Snapshot) -> str:
        """Return the number of passes of a look, in words."""
        layers = len(self._layers.value) or len(evenly_spaced(len(snapshot.layers)))
        # three passes test whether the model generates from left to right
        passes = 1 + layers * (int(self._lens.value) + self._write.value) + (3 if self._write.value else 0)
        return "takes 1 pass of a micro-batch" if passes == 1 else f"takes up to {passes} passes of a micro-batch"

    def _look_inside(self) -> None:
        try:
            self._failure_reason, self._error_html.value = "", ""
            self._future = future = self.session.look(list(self._layers.value) or None, **self._options())
            future.add_done_callback(self._on_result)
        except Exception as error:
            self._error_html.value = failure_html(str(error), traceback.format_exc())
        self._redraw()

    def _on_result(self, future: Future[Inside]) -> None:
        """Show a result; called on the session's thread without locks, or by the thread that cancelled the look."""
        if future.cancelled():
            return  # the thread that cancelled it may hold the session's lock
        error, now = future.exception(), self.session.snapshot()
        if error is None:
            self._inside, self._seen_at = future.result(), StateVersion.of(now)
            self._numbers = number_layers(row.key for row in now.layers)
        else:
            self._failure_reason = str(error).partition("\n")[0]
        self._redraw()


def _int_field(label: str, value: int, least: int, width: str) -> ipywidgets.BoundedIntText:
    return ipywidgets.BoundedIntText(value=value, min=least, max=1_000_000, description=label, **control_layout(width))
