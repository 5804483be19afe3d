"""Controls, picture, text and table of a what-if, with or without a session."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from html import escape

import ipywidgets

from workbench.panels.controls import make_box, make_button, make_row
from workbench.panels.folded_table import FoldedTable
from workbench.panels.latest_executor import LatestExecutor
from workbench.panels.panel import failure_html
from workbench.panels.what_if_controls import WhatIfControls
from workbench.pictures import Picture, Table, round_up
from workbench.what_if import (
    ComparedAnswer,
    DepthFirstStep,
    Question,
    changed_settings,
    comparison_table,
    describe_differences,
    draw_what_if,
    pictured_steps,
)

AnswerFunction = Callable[[Question], ComparedAnswer]


class WhatIfView:
    """Controls of a question, and its answer as picture, text and table.

    Every change of a control starts a new answer on a separate thread; only the newest question is answered.

    Args:
        base: initial values of the controls.
        answer: returns the answer to a question, beside the last step.
        buttons: buttons in front of Reset.
        below: widgets below the controls.
        on_change: called when the user changes a control.

    Attributes:
        row: the buttons and the note, placed on the page by the owner of the view.
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
        reset = make_button("Reset", "undo", "Restore the settings of the next step")
        reset.on_click(lambda _: self.reset())
        self.note = ipywidgets.HTML()
        self.row = make_row(*buttons, reset, self.note)
        self._text.add_class("l2l-words")
        self._fold.widget.add_class("l2l-figures")
        shown = make_box(ipywidgets.HBox, "l2l-what-if-answer", self._picture, self._text)
        self.widget = make_box(ipywidgets.VBox, "l2l-what-if", self.controls.widget, *below, shown, self._fold.widget)

    def refresh(self) -> None:
        """Start to answer the current question; returns at once."""
        self.executor.submit(self._show)

    def reset(self) -> None:
        """Reset the controls to the base and answer that question."""
        self.controls.reset()
        self._on_controls()  # the controls call it only for changes by the user

    def _on_controls(self) -> None:
        """Clear the note of an earlier Apply and answer the new question."""
        self.note.value = ""
        self._on_change()
        self.refresh()

    def still(self) -> Picture | Table:
        """Return picture and table of the current question, or a table with the reason why it has no answer."""
        try:
            found = self._answer(self.controls.question())
        except DepthFirstStep as reason:
            return _no_answer_table(reason)
        return Picture(draw_what_if(*pictured_steps(found)), comparison_table(found))

    def _show(self) -> None:
        try:
            found = self._answer(self.controls.question())
            end_s = max(each.columns.end_s for each in (found.was, found.now) if each is not None)
            if not end_s <= self._span_s <= 2.5 * end_s:  # keep the axis while the steps fit well
                self._span_s = round_up(1.05 * end_s)
            self._picture.value = draw_what_if(*pictured_steps(found), self._span_s)
            self._text.value = differences_html(found)
            self._fold.show(lambda: comparison_table(found))
        except DepthFirstStep as reason:
            table = _no_answer_table(reason)
            self._picture.value, self._text.value = "", f'<p class="l2l-caption">{escape(table.note)}</p>'
            self._fold.show(lambda: table)
        except Exception as error:
            self._text.value = failure_html(f"This question cannot be answered: {error}", traceback.format_exc())


def _no_answer_table(reason: DepthFirstStep) -> Table:
    return Table("What if, in figures", ("figure", ""), [], f"{reason}.")


def differences_html(found: ComparedAnswer) -> str:
    """Return the changed settings and a list of the differences in HTML."""
    was, now = found.was, found.now
    head = "The settings of the last step." if was is not None else "No step has been measured yet."
    if was is not None and (changed := changed_settings(was.question, now.question)):
        head = escape("; ".join(changed))
    differences = describe_differences(was, now, found.margin) if was is not None else [f"{now}."]
    lines = "".join(f"<li>{escape(line)}</li>" for line in differences)
    note = f'<p class="l2l-caption">{escape(comparison_table(found).note)}</p>'
    return f'<div class="l2l-what-if-words" aria-live="polite"><strong>{head}</strong><ul>{lines}</ul>{note}</div>'
