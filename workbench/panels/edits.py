"""Edits of the stack while it trains: a form, the queue, undo and redo, and the journal."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from l2l_core import Edit
from workbench.panels.choices import make_dropdown, make_list, offer, sized
from workbench.panels.keys import KeepsKeys
from workbench.panels.panel import Panel, failure_html
from workbench.pictures import Table, branches_table, draw_journal, journal_table, outlook_html, shorten
from workbench.session import (
    END,
    NEEDS_CODE,
    PREVIOUS,
    QUESTIONS,
    LayerRow,
    Session,
    Snapshot,
    edit_words,
    entry_words,
    foresee,
    make_edit,
    turns_of,
)

_TITLE = '<div class="l2l-heading">Edit the stack of layers</div>'
_PAIRS = {"first": "last", "layer": "other"}  # questions for two layers


class EditsPanel(Panel):
    """Grow, drop and move layers between two steps, also while a run is under way.

    Apply puts the edit of the form into the queue; its turn comes when the step under way is over. Choices change only when
    the stack does: what a person has open or chosen stays while training goes on. All controls are native ones, with
    labels: Tab reaches them, arrow keys choose, Space and Enter press.
    """

    looks_at = Session

    def build(self) -> ipywidgets.DOMWidget:
        self._layers: Sequence[LayerRow] = ()
        self._offered: object = None  # what of the layers the choices show
        self._drawn: object = None  # the journal that is shown, and what can be undone and redone
        self._following = False
        self._error = False  # a refusal that no session knows of
        self._group: list[Edit] = []
        self._title = ipywidgets.HTML()
        self._kind = make_dropdown("edit", list(QUESTIONS), "140px")
        self._stack = make_dropdown("in", [], "170px")
        self._asked = self._build_questions()
        self._outlook = ipywidgets.HTML()
        self._outlook.add_class("l2l-outlook")
        self._apply = self._button("Apply", "check", "Carry it out when the step under way is over", self._press_apply)
        self._apply.button_style = "primary"
        self._add = self._button(
            "Add to group", "plus", "Edits of a group are all carried out, or none", self._press_add
        )
        self._trust = ipywidgets.Checkbox(
            description="trust",
            tooltip="Carry out what is refused on evidence alone, as layers of other kinds at a position",
            indent=False,
            layout={"width": "auto"},
        )
        self._undo = self._button("Undo", "undo", "", self.session.undo)
        self._redo = self._button("Redo", "repeat", "", self.session.redo)
        for button in (self._undo, self._redo):
            button.layout.width = "212px"
        self._trouble = ipywidgets.HTML(layout={"display": "none"})
        for question in (self._kind, self._stack, *self._asked.values()):
            question.observe(self._guarded(lambda question=question: self._answer(question)), "value")
        self._journal = ipywidgets.HTML()
        questions = _box(ipywidgets.HBox, "l2l-questions", self._kind, self._stack, *self._asked.values())
        form = _box(ipywidgets.HBox, "l2l-form", questions, self._build_group(), self._build_queue())
        buttons = _box(ipywidgets.HBox, "l2l-buttons", self._apply, self._add, self._trust, self._undo, self._redo)
        parts = [self._title, form, self._outlook, buttons, self._trouble, self._build_branches(), self._journal]
        return _box(ipywidgets.VBox, "l2l-edits", *parts, KeepsKeys(layout={"display": "none"}))

    def _build_questions(self) -> dict[str, Any]:
        """By name, in the order in which they stand."""
        return {
            "at": make_dropdown("in front of", [], "290px"),
            "first": make_dropdown("from", [], "250px"),
            "last": make_dropdown("to", [], "250px"),
            "layer": make_dropdown("layer", [], "250px"),
            "other": make_dropdown("and", [], "250px"),
            "to": make_dropdown("to the place of", [], "290px"),
            "like": make_dropdown("like", [], "250px"),
            "init": make_dropdown("start as", ["identity", "copy", "fresh", "interpolate"], "170px"),
            "mode": make_dropdown("copies go", ["middle", "interleaved", "top"], "190px"),
            "park": make_dropdown("keep in", ["memory", "disk", "free"], "150px"),
            "weight": ipywidgets.BoundedFloatText(0.5, min=0, max=1, step=0.1, description="weight", **sized("120px")),
            "optimizer": make_dropdown("optimizer state", ["fresh", "copy", "scaled"], "200px"),
            "factor": ipywidgets.FloatText(0.5, step=0.1, description="by", **sized("90px")),
            "warmup": ipywidgets.BoundedIntText(
                0, min=0, max=10**6, description="warm-up", tooltip="Updates until its learning rate is that of the others",
                **sized("130px"),
            ),
        }  # fmt: skip

    def _build_group(self) -> ipywidgets.DOMWidget:
        self._members = make_list(5)
        self._apply_group = self._button("Apply group", "check", "All of them, or none", self._press_apply_group)
        self._leave = self._button("Remove", "times", "Take the chosen edit out of the group", self._press_leave)
        self._show_group(-1)
        buttons = _box(ipywidgets.HBox, "l2l-buttons", self._apply_group, self._leave)
        return _box(ipywidgets.VBox, "l2l-list", _words("Group: all of it, or nothing"), self._members, buttons)

    def _build_queue(self) -> ipywidgets.DOMWidget:
        self._queue = make_list(5)
        self._cancel = self._button("Remove", "times", "Take the chosen command out of the queue", self._press_cancel)
        buttons = _box(ipywidgets.HBox, "l2l-buttons", self._cancel)
        return _box(ipywidgets.VBox, "l2l-list", _words("Queue: waits for the step to end"), self._queue, buttons)

    def _build_branches(self) -> ipywidgets.DOMWidget:
        self._branches = ipywidgets.HTML()
        self._other = make_dropdown("branch", [], "240px")
        self._switch = self._button(
            "Switch", "exchange", "Go on with the chosen branch as it was left", self._press_switch
        )
        self._discard = self._button("Discard", "trash", "Free the chosen branch", self._press_discard)
        self._name = ipywidgets.Text(description="new branch", placeholder="name", **sized("240px"))
        self._fork = self._button(
            "Fork", "code-fork", "Leave this state as it is, and go on in a new branch", self._press_fork
        )
        rows = [
            _box(ipywidgets.HBox, "l2l-buttons", self._name, self._fork),
            _box(ipywidgets.HBox, "l2l-buttons", self._other, self._switch, self._discard),
        ]
        return _box(ipywidgets.HBox, "l2l-branches", _box(ipywidgets.VBox, "l2l-fork", *rows), self._branches)

    def draw(self, now: Snapshot) -> None:
        self._title.value = _TITLE
        self._follow(now.layers)
        offer(self._queue, [(words, ticket) for words, ticket in zip(now.queued, now.tickets, strict=True)])
        self._cancel.disabled = not now.queued
        offer(self._other, [(branch.name, branch.name) for branch in now.branches if not branch.active])
        self._switch.disabled = self._discard.disabled = not self._other.options
        self._branches.value = branches_table(now.branches).to_html(folded=False)
        known = now.journal, now.can_undo, now.can_redo
        if known != self._drawn:
            self._drawn, self._journal.value = known, draw_journal(now.journal)
            self._name_turns(now)
        if now.refusal is not None:
            self._say(
                f"Refused after step {now.refusal.step}: {now.refusal.message}",
                now.refusal.traceback,
                now.refusal.after,
            )
        elif not self._error:
            self._trouble.layout.display = "none"

    def still(self, now: Snapshot) -> Sequence[Table]:
        several = [branches_table(now.branches)] if len(now.branches) > 1 else []
        return [journal_table(now.journal), *several]

    # -- following the session -----------------------------------------------------------------------------------------

    def _follow(self, layers: Sequence[LayerRow]) -> None:
        """Offer the layers that there are."""
        if layers is self._layers:
            return
        self._layers = layers
        known = [(row.key, row.name, row.stack, row.nbytes) for row in layers]
        if known == self._offered:
            return
        begins, self._offered, self._following = self._offered is None, known, True
        try:
            offer(self._stack, [(row.stack or "the model", row.stack) for row in layers if row.stack is not None])
            self._offer_layers()
            if begins and self._rows:
                self._asked["at"].value = END
        finally:
            self._following = False
        self._ask()

    def _offer_layers(self) -> None:
        rows = [(f"{row.position} · {row.name} · {row.key}", row.key) for row in self._rows]
        for name in ("first", "last", "layer", "other", "to"):
            offer(self._asked[name], rows)
        if self._asked["other"].value == self._asked["layer"].value and len(rows) > 1:
            self._asked["other"].value = next(key for _, key in rows if key != self._asked["layer"].value)
        offer(self._asked["at"], [*rows, ("behind the last layer", END)] if rows else [])
        offer(self._asked["like"], [("the layer before it", PREVIOUS), *rows])

    @property
    def _rows(self) -> list[LayerRow]:
        """Of the stack that is chosen."""
        return [row for row in self._layers if row.stack is not None and row.stack == self._stack.value]

    def _name_turns(self, now: Snapshot) -> None:
        """Undo and redo, named by what they would turn to."""
        turns = turns_of(now.journal)
        for button, word, able, last in (
            (self._undo, "Undo", now.can_undo, turns.in_force),
            (self._redo, "Redo", now.can_redo, turns.undone),
        ):
            words = entry_words(last[-1], now.journal) if able and last else ""
            button.description = f"{word} {shorten(words, 22)}".strip()
            button.tooltip = f"{word} {words}" if words else f"Nothing to {word.lower()}"
            button.disabled = not able

    # -- the form ------------------------------------------------------------------------------------------------------

    def _answer(self, question: Any) -> None:
        """Somebody has chosen: keep spans in order, and say what would happen."""
        if self._following:
            return
        self._following = True
        try:
            if question is self._stack:
                self._offer_layers()
            self._keep_in_order(question)
        finally:
            self._following = False
        self._ask()

    def _keep_in_order(self, question: Any) -> None:
        first, last = self._asked["first"], self._asked["last"]
        keys = [row.key for row in self._rows]
        if first.value and last.value and keys.index(first.value) > keys.index(last.value):
            (first if question is last else last).value = question.value

    def _ask(self) -> None:
        """Show the questions of the kind, and what the edit would do."""
        kind = self._kind.value
        asked = set(QUESTIONS[kind]) - ({"factor"} if self._asked["optimizer"].value != "scaled" else set())
        for name, question in self._asked.items():
            question.layout.display = "" if name in asked else "none"
        self._stack.layout.display = "" if len(self._stack.options) > 1 else "none"
        self._asked["other"].description = "towards" if kind == "Interpolate" else "and"
        rows = self._rows
        self._apply.disabled = self._add.disabled = kind == "Replace" or not rows
        if not rows:
            self._outlook.value = outlook_html(
                "Layers in a ModuleList or Sequential can be edited; here there are none.", ()
            )
        elif kind == "Replace":
            self._outlook.value = outlook_html(NEEDS_CODE.format(key=rows[0].key), ())
        else:
            outlook = foresee(self._edit(), rows)
            self._outlook.value = outlook_html(outlook.does, outlook.facts(self._layers))

    def _edit(self) -> Edit:
        answers = {name: question.value for name, question in self._asked.items()}
        return make_edit(self._kind.value, answers, self._rows)

    # -- buttons -------------------------------------------------------------------------------------------------------

    def _press_apply(self) -> None:
        self.session.edit(self._edit(), trust=self._trust.value)

    def _press_add(self) -> None:
        self._group.append(self._edit())
        self._show_group(len(self._group) - 1)

    def _press_leave(self) -> None:
        at = self._members.value
        if at is not None:
            del self._group[at]
            self._show_group(min(at, len(self._group) - 1))

    def _press_apply_group(self) -> None:
        if self._group:
            self.session.edit(*self._group, trust=self._trust.value)
            self._group.clear()
            self._show_group(-1)

    def _show_group(self, at: int) -> None:
        self._members.options = [(edit_words(edit), i) for i, edit in enumerate(self._group)]
        self._members.value = at if at >= 0 else None
        self._apply_group.disabled = self._leave.disabled = not self._group

    def _press_cancel(self) -> None:
        if self._queue.value is not None:
            self.session.cancel(self._queue.value)

    def _press_fork(self) -> None:
        self.session.fork(self._name.value.strip())
        self._name.value = ""

    def _press_switch(self) -> None:
        self.session.switch(self._other.value)

    def _press_discard(self) -> None:
        self.session.discard(self._other.value)

    def _button(self, words: str, icon: str, tip: str, action: Callable[[], Any]) -> ipywidgets.Button:
        button = ipywidgets.Button(description=words, icon=icon, tooltip=tip, layout={"width": "auto"})
        button.on_click(self._guarded(action))
        return button

    def _guarded(self, action: Callable[[], Any]) -> Callable[..., None]:
        """A widget's callback: an error is shown below the form."""

        def callback(*_: object) -> None:
            with self._drawing:
                try:
                    self._error = False
                    action()
                except Exception as error:
                    self._error = True
                    self._say(str(error), traceback.format_exc())

        return callback

    def _say(self, message: str, details: str, after: str = "") -> None:
        self._trouble.value = failure_html(message, details, after)
        self._trouble.layout.display = ""


def _box(kind: type[ipywidgets.Box], name: str, *children: ipywidgets.DOMWidget) -> ipywidgets.DOMWidget:
    box = kind(children)
    box.add_class(name)
    return box


def _words(words: str) -> ipywidgets.HTML:
    return ipywidgets.HTML(f'<div class="l2l-caption">{words}</div>')
