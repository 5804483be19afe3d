"""Controls, picture, words and figures of a what-if, with or without a session behind it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from html import escape

import ipywidgets

from workbench.panels.folded_table import FoldedTable
from workbench.panels.latest_executor import LatestExecutor
from workbench.panels.panel import failure_html
from workbench.panels.what_if_controls import WhatIfControls
from workbench.pictures import Picture, Table, round_up
from workbench.what_if import (
    Answer,
    DepthFirstStep,
    Question,
    changed_settings,
    comparison_table,
    describe_differences,
    draw_what_if,
    pictured_step,
)

AnswerFunction = Callable[[Question], tuple[Answer | None, Answer]]


class WhatIfView:
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
        answer: AnswerFunction,
        *buttons: ipywidgets.DOMWidget,
        below: Sequence[ipywidgets.DOMWidget] = (),
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._answer, self._on_change, self.executor = answer, on_change, LatestExecutor("what-if")
        self.controls = WhatIfControls(base, self._on_controls)
        self._span_s = 0.0
        self._picture, self._text, self._fold = ipywidgets.HTML(), ipywidgets.HTML(), FoldedTable("What if, in figures")
        reset = ipywidgets.Button(
            description="Reset", icon="undo", tooltip="Back to the settings of the next step", layout={"width": "auto"}
        )
        reset.on_click(lambda _: self.reset())
        self.note = ipywidgets.HTML()
        self.row = make_box(ipywidgets.HBox, "l2l-buttons", *buttons, reset, self.note)
        self._text.add_class("l2l-words")
        self._fold.widget.add_class("l2l-figures")
        shown = make_box(ipywidgets.HBox, "l2l-what-if-answer", self._picture, self._text)
        self.widget = make_box(ipywidgets.VBox, "l2l-what-if", self.controls.widget, *below, shown, self._fold.widget)

    def refresh(self) -> None:
        """Answer what the controls ask now; returns at once."""
        self.executor.submit(self._show)

    def reset(self) -> None:
        """Put the controls back to the base, and answer that."""
        self.controls.reset()
        self._on_controls()  # controls call it only when a person moves them

    def _on_controls(self) -> None:
        """Answer anew, since a person has moved something; what Apply said is of the past."""
        self.note.value = ""
        self._on_change()
        self.refresh()

    def still(self) -> Picture | Table:
        """Return picture and table of the present question, or the words why it has no answer."""
        try:
            was, now = self._answer(self.controls.question())
        except DepthFirstStep as why_not:
            return _no_answer_table(why_not)
        return Picture(
            draw_what_if(pictured_step(was) if was else None, pictured_step(now)), comparison_table(was, now)
        )

    def _show(self) -> None:
        try:
            was, now = self._answer(self.controls.question())
            end_s = max(each.columns.end_s for each in (was, now) if each is not None)
            if not end_s <= self._span_s <= 2.5 * end_s:  # the axis moves only when it must
                self._span_s = round_up(1.05 * end_s)
            self._picture.value = draw_what_if(pictured_step(was) if was else None, pictured_step(now), self._span_s)
            self._text.value = differences_html(was, now)
            self._fold.show(lambda: comparison_table(was, now))
        except DepthFirstStep as why_not:
            said = _no_answer_table(why_not)
            self._picture.value, self._text.value = "", f'<p class="l2l-caption">{escape(said.note)}</p>'
            self._fold.show(lambda: said)
        except Exception as error:
            self._text.value = failure_html(f"This cannot be answered: {error}", traceback.format_exc())


def _no_answer_table(why_not: DepthFirstStep) -> Table:
    return Table("What if, in figures", ("figure", ""), [], f"{why_not}.")


def differences_html(was: Answer | None, now: Answer) -> str:
    """Write what is asked and what differs, as a list in HTML."""
    head = "The settings of the measured step." if was is not None else "No step has been measured yet."
    if was is not None and (asked := changed_settings(was.question, now.question)):
        head = escape("; ".join(asked))
    said = describe_differences(was, now) if was is not None else [f"{now}."]
    lines = "".join(f"<li>{escape(line)}</li>" for line in said)
    note = f'<p class="l2l-caption">{escape(comparison_table(was, now).note)}</p>'
    return f'<div class="l2l-what-if-words" aria-live="polite"><strong>{head}</strong><ul>{lines}</ul>{note}</div>'


def make_box(kind: type[ipywidgets.Box], name: str, *children: ipywidgets.DOMWidget) -> ipywidgets.Box:
    """Put widgets together, with a class of the style sheet."""
    made = kind(children)
    made.add_class(name)
    return made
