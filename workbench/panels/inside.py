"""A look inside, when somebody asks for one: which layers, which row, what to look at, and pictures of what was seen."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from html import escape
from typing import Any

import ipywidgets

from l2l_core import Inside
from l2l_core.inside import spaced
from workbench.panels.choices import make_dropdown, offer, sized
from workbench.panels.fold import Fold
from workbench.panels.keys import KeepsKeys
from workbench.panels.panel import Panel, failure_html
from workbench.pictures import (
    Picture,
    Table,
    code_line,
    cost_words,
    inside_pages,
    moment_words,
    row_words,
    show_attention,
    show_lens,
    show_spreads,
    show_stream,
    text_html,
    text_table,
)
from workbench.readings import Numbers, full_name, number_layers
from workbench.session import Moment, Session, Snapshot

_PARTS = ("stream", "spread", "attention", "lens", "text")
_OFF = (
    "Nothing is looked at until you press Look. It runs between two steps, in evaluation mode, on the first batch of the probe, "
    "and changes nothing."
)


class InsidePanel(Panel):
    """Shows activations, attention, and what the head says at each depth, of chosen layers and one row.

    Nothing runs unless Look is pressed; then it is the session's thread that looks, between two steps. All controls are native
    ones: Tab reaches them, in the list of layers arrow keys choose, with Shift several.
    """

    looks_at = Session

    def build(self) -> ipywidgets.DOMWidget:
        self._seen: Inside | None = None
        self._moment: Moment | None = None  # at which it was seen
        self._numbers: Numbers = {}  # of the layers then
        self._future: Future[Inside] | None = None
        self._why_not = ""
        self._drawn: tuple[Any, ...] = ()
        self._layers = ipywidgets.SelectMultiple(options=[], description="layers", rows=5, **sized("300px"))
        self._micro_batch = _number("micro-batch", 0, 0, "150px")
        self._row = _number("row", 0, 0, "110px")
        self._positions = _number("positions", 32, 1, "140px")
        self._attention = _check("attention maps", "Keep a map of every attention head, for one row")
        self._lens = _check("head at each depth", "Logit lens: leave out the layers above, one depth after the other")
        self._write = _number("tokens to write", 0, 0, "170px")
        self._look = ipywidgets.Button(
            description="Look",
            icon="eye",
            tooltip="Look inside after the current step",
            button_style="primary",
        )
        self._look.on_click(lambda _: self._press())
        for control in (self._layers, self._micro_batch, self._row, self._positions, self._attention, self._lens):
            control.observe(lambda _: self._redraw(), "value")
        self._write.observe(lambda _: self._redraw(), "value")
        self._code, self._said, self._trouble = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        self._part = ipywidgets.ToggleButtons(
            options=[(words.capitalize(), words) for words in _PARTS],
            description="show",
            style={"description_width": "40px", "button_width": "auto"},
            layout={"display": "none"},
        )
        self._heads_of = make_dropdown("heads of layer", [], "240px")
        for control in (self._part, self._heads_of):
            control.observe(lambda _: self._redraw(), "value")
        self._picture, self._fold = ipywidgets.HTML(), Fold("What was seen as a table")
        numbers = _flow([self._micro_batch, self._row, self._positions, self._write])
        ticks = _flow([self._attention, self._lens, self._look])
        form = ipywidgets.HBox([self._layers, ipywidgets.VBox([numbers, ticks, self._code])])
        form.add_class("l2l-form")
        turned = _flow([self._part, self._heads_of])
        turned.add_class("l2l-settings")
        keys = KeepsKeys(layout={"display": "none"})
        shown = [self._said, turned, self._picture, self._fold.widget]
        box = ipywidgets.VBox([ipywidgets.HTML(), form, self._trouble, *shown, keys])
        box.add_class("l2l-inside")
        return box

    # -- drawing -------------------------------------------------------------------------------------------------------

    def draw(self, now: Snapshot) -> None:
        # every time, since `fail` writes over it
        self.widget.children[0].value = '<div class="l2l-heading">Look inside</div>'
        numbers = number_layers(row.key for row in now.layers)
        self._offer([(full_name(row.key, numbers), row.key) for row in now.layers])
        self._micro_batch.max = max(self.session.relay.config.micro_batches - 1, 0)
        waits = self._future is not None and not self._future.done()
        self._look.disabled = waits
        self._code.value = f"{code_line(self._line())} <span class='l2l-caption'>{self._forecast(now)}</span>"
        self._say(now, waits)
        self._draw_seen(now)

    def _offer(self, options: Sequence[tuple[str, str]]) -> None:
        if tuple(self._layers.options) == tuple(options):
            return
        chosen = [key for key in self._layers.value if key in [key for _, key in options]]
        # one message: with new options alone ipywidgets chooses nothing
        with self._layers.hold_sync():
            self._layers.options = options
            self._layers.value = chosen

    def _say(self, now: Snapshot, waits: bool) -> None:
        if waits:
            words = "Looking, or waiting for the current step to end."
        elif self._why_not:
            words = f"Nothing was seen: {self._why_not}"
        elif self._seen is None or self._moment is None:
            words = _OFF
        else:
            when = moment_words(self._moment, Moment.of(now))
            words = f"{row_words(self._seen).capitalize()}, {when}; {cost_words(self._seen)}."
        self._said.value = f'<div class="l2l-caption" role="status">{escape(words)}</div>'

    def _draw_seen(self, now: Snapshot) -> None:
        seen = self._seen
        self._part.layout.display = "none" if seen is None else ""
        heads = [] if seen is None else [one.key for one in seen.passings if one.attention]
        self._heads_of.layout.display = "" if heads and self._part.value == "attention" else "none"
        offer(self._heads_of, [(full_name(key, self._numbers), key) for key in heads])
        known = seen, self._part.value, self._heads_of.value
        if known == self._drawn or seen is None:
            return
        self._drawn = known
        if self._part.value == "text":
            self._picture.value = self._text_html(seen)
            self._fold.show(lambda: text_table(seen, self._numbers, self.session.decode))
            return
        picture = self._pictures(seen)[self._part.value]
        self._picture.value = picture.svg
        self._fold.show(lambda: picture.table)

    def _text_html(self, seen: Inside) -> str:
        if not seen.written:
            return '<p class="l2l-caption">No text was asked for: say how many tokens to write, and press Look.</p>'
        return text_html(seen, self._numbers, self.session.decode)

    def _pictures(self, seen: Inside) -> Mapping[str, Picture]:
        made = {"stream": show_stream, "spread": show_spreads}
        found = {name: make(seen, self._numbers) for name, make in made.items() if name == self._part.value}
        if self._part.value == "attention":
            found["attention"] = show_attention(seen, self._numbers, self._heads_of.value)
        if self._part.value == "lens":
            found["lens"] = show_lens(seen, self._numbers, self.session.decode)
        return found

    def still(self, now: Snapshot) -> Sequence[Picture | Table]:
        seen = self._seen
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

    def _line(self) -> str:
        layers = [repr(list(self._layers.value))] if self._layers.value else []
        words = [*layers, *(f"{name}={value!r}" for name, value in self._options().items())]
        return f"seen = workbench.look({', '.join(words)}).result()"

    def _forecast(self, now: Snapshot) -> str:
        """How many passes it would take."""
        layers = len(self._layers.value) or len(spaced(len(now.layers)))
        # three find out whether the model writes from left to right
        passes = 1 + layers * (int(self._lens.value) + self._write.value) + (3 if self._write.value else 0)
        return "takes 1 pass of a micro-batch" if passes == 1 else f"takes up to {passes} passes of a micro-batch"

    def _press(self) -> None:
        try:
            self._why_not, self._trouble.value = "", ""
            self._future = self.session.look(list(self._layers.value) or None, **self._options())
            self._future.add_done_callback(self._take)
        except Exception as error:
            self._trouble.value = failure_html(str(error), traceback.format_exc())
        self._redraw()

    def _take(self, future: Future[Inside]) -> None:
        """On the session's thread, without any lock; if it was cancelled, whoever did that may hold the session's."""
        if future.cancelled():
            return
        error, now = future.exception(), self.session.snapshot()
        if error is None:
            self._seen, self._moment = future.result(), Moment.of(now)
            self._numbers = number_layers(row.key for row in now.layers)
        else:
            self._why_not = str(error).partition("\n")[0]
        self._redraw()

    def _redraw(self) -> None:
        self.show(self.session.snapshot())


def _number(words: str, value: int, least: int, width: str) -> ipywidgets.BoundedIntText:
    return ipywidgets.BoundedIntText(value=value, min=least, max=1_000_000, description=words, **sized(width))


def _check(words: str, tip: str) -> ipywidgets.Checkbox:
    return ipywidgets.Checkbox(description=words, tooltip=tip, indent=False, layout={"width": "auto"})


def _flow(children: Sequence[ipywidgets.Widget]) -> ipywidgets.Box:
    row = ipywidgets.HBox(children)
    row.add_class("l2l-buttons")
    return row
