"""Controls, picture, words and figures of a what-if, with or without a session behind it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from html import escape

import ipywidgets

from workbench.panels.fold import Fold
from workbench.panels.latest import Latest
from workbench.panels.panel import failure_html
from workbench.panels.what_if_controls import Controls
from workbench.pictures import Picture, Table, round_up
from workbench.what_if import (
    Answer,
    DepthFirstStep,
    Question,
    changed_settings,
    differences,
    draw_what_if,
    row_of,
    what_if_table,
)

Ask = Callable[[Question], tuple[Answer | None, Answer]]


class View:
    """Shows controls, picture, words and figures of a what-if, whatever the costs come from.

    A slider that moves asks anew; the answer is made on a thread of its own, the newest question first.

    Args:
        base: where the controls begin.
        ask: the measured step and the answer to a question.
        buttons: before Reset.
        below: widgets under the controls.
        moved: is called when a person has moved something.

    Attributes:
        row: the buttons and a place for words, which its owner puts on the page where there is room.
    """

    def __init__(
        self,
        base: Question,
        ask: Ask,
        *buttons: ipywidgets.DOMWidget,
        below: Sequence[ipywidgets.DOMWidget] = (),
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._ask, self._moved, self.latest = ask, moved, Latest("what-if")
        self.controls = Controls(base, self._ask_anew)
        self._span_s = 0.0
        self._picture, self._words, self._fold = ipywidgets.HTML(), ipywidgets.HTML(), Fold("What if, in figures")
        reset = ipywidgets.Button(
            description="Reset", icon="undo", tooltip="Back to the settings of the next step", layout={"width": "auto"}
        )
        reset.on_click(lambda _: self.reset())
        self.note = ipywidgets.HTML()
        self.row = box(ipywidgets.HBox, "l2l-buttons", *buttons, reset, self.note)
        self._words.add_class("l2l-words")
        self._fold.widget.add_class("l2l-figures")
        shown = box(ipywidgets.HBox, "l2l-what-if-answer", self._picture, self._words)
        self.widget = box(ipywidgets.VBox, "l2l-what-if", self.controls.widget, *below, shown, self._fold.widget)

    def refresh(self) -> None:
        """Answer what the controls ask now; returns at once."""
        self.latest.ask(self._show)

    def reset(self) -> None:
        """Put the controls back to the base, and answer that."""
        self.controls.reset()
        self._ask_anew()  # controls call it only when a person moves them

    def _ask_anew(self) -> None:
        """Answer anew, since a person has moved something; what Apply said is of the past."""
        self.note.value = ""
        self._moved()
        self.refresh()

    def still(self) -> Picture | Table:
        """Return picture and table of the present question, or the words why it has no answer."""
        try:
            was, now = self._ask(self.controls.question())
        except DepthFirstStep as why_not:
            return _said(why_not)
        return Picture(draw_what_if(row_of(was) if was else None, row_of(now)), what_if_table(was, now))

    def _show(self) -> None:
        try:
            was, now = self._ask(self.controls.question())
            end_s = max(each.columns.end_s for each in (was, now) if each is not None)
            if not end_s <= self._span_s <= 2.5 * end_s:  # the axis moves only when it must
                self._span_s = round_up(1.05 * end_s)
            self._picture.value = draw_what_if(row_of(was) if was else None, row_of(now), self._span_s)
            self._words.value = words_html(was, now)
            self._fold.show(lambda: what_if_table(was, now))
        except DepthFirstStep as why_not:
            said = _said(why_not)
            self._picture.value, self._words.value = "", f'<p class="l2l-caption">{escape(said.note)}</p>'
            self._fold.show(lambda: said)
        except Exception as error:
            self._words.value = failure_html(f"This cannot be answered: {error}", traceback.format_exc())


def _said(why_not: DepthFirstStep) -> Table:
    return Table("What if, in figures", ("figure", ""), [], f"{why_not}.")


def words_html(was: Answer | None, now: Answer) -> str:
    """Write what is asked and what differs, as a list in HTML."""
    head = "The settings of the measured step." if was is not None else "No step has been measured yet."
    if was is not None and (asked := changed_settings(was.question, now.question)):
        head = escape("; ".join(asked))
    said = differences(was, now) if was is not None else [f"{now}."]
    lines = "".join(f"<li>{escape(line)}</li>" for line in said)
    note = f'<p class="l2l-caption">{escape(what_if_table(was, now).note)}</p>'
    return f'<div class="l2l-what-if-words" aria-live="polite"><strong>{head}</strong><ul>{lines}</ul>{note}</div>'


def box(kind: type[ipywidgets.Box], name: str, *children: ipywidgets.DOMWidget) -> ipywidgets.Box:
    """Put widgets together, with a class of the style sheet."""
    made = kind(children)
    made.add_class(name)
    return made
