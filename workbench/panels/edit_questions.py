"""The form of an edit: what it asks for each kind, which layers it offers, and what the edit would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from l2l_core import Edit
from workbench.panels.choices import make_dropdown, offer, sized
from workbench.pictures import outlook_html
from workbench.readings import Numbers, full_name, number_layers
from workbench.session import END, NEEDS_CODE, PREVIOUS, QUESTIONS, LayerRow, apply_code, foresee, make_edit


class EditQuestions:
    """Holds the controls of the form. Choices change only when the stack does, and keep what a person has chosen.

    Args:
        guarded: makes a widget's callback of an action, and shows its error.
        changed: is called when `is_complete` may have changed.

    Attributes:
        asked: the controls by name of the question, in the order in which they stand.
        widget, outlook: the questions, and what the edit would do.
        numbers: of all layers, as they are now.
    """

    def __init__(self, guarded: Callable[[Callable[[], Any]], Callable[..., None]], changed: Callable[[], Any]) -> None:
        self._changed = changed
        self._layers: Sequence[LayerRow] = ()
        self.numbers: Numbers = {}
        self._first: str | None = None  # where a span began before somebody chose
        self._offered: object = None  # what of the layers the choices show
        self._following = False  # whether it is the form itself that sets its choices
        self._kind = make_dropdown("edit", list(QUESTIONS), "140px")
        self._stack = make_dropdown("in", [], "170px")
        self.asked = _build()
        self.outlook = ipywidgets.HTML()
        self.outlook.add_class("l2l-outlook")
        questions = (self._kind, self._stack, *self.asked.values())
        for question in questions:
            question.observe(guarded(lambda question=question: self._answer(question)), "value")
        self.widget = ipywidgets.HBox(questions)
        self.widget.add_class("l2l-questions")

    @property
    def is_complete(self) -> bool:
        """Tells whether the answers make an edit."""
        return self._kind.value != "Replace" and bool(self._rows)

    def edit(self) -> Edit:
        """Return the edit that the answers make.

        Raises:
            ValueError: as of `make_edit`.
        """
        return make_edit(self._kind.value, {name: one.value for name, one in self.asked.items()}, self._rows)

    def follow(self, layers: Sequence[LayerRow]) -> bool:
        """Offer the layers that there are; return whether they are others than before."""
        if layers is self._layers:
            return False
        self._layers = layers
        # rows are new ones after every step; what the choices show of them changes with edits alone
        known = [(row.key, row.name, row.stack, row.nbytes) for row in layers]
        if known == self._offered:
            return False
        self.numbers = number_layers(row.key for row in layers)
        begins, self._offered, self._following = self._offered is None, known, True
        try:
            offer(self._stack, [(row.stack or "the model", row.stack) for row in layers if row.stack is not None])
            self._offer_layers()
            if begins and self._rows:
                self.asked["at"].value = END
        finally:
            self._following = False
        self._ask()
        return True

    def reset(self) -> None:
        """Make a span one layer again, since an edit was taken from the form: the next press takes no more than one."""
        self._following = True
        try:
            self._take_one()
        finally:
            self._following = False
        self._ask()

    def _take_one(self) -> None:
        first, last = self.asked["first"], self.asked["last"]
        self._first = last.value = first.value

    def _offer_layers(self) -> None:
        rows, ends = [(full_name(row.key, self.numbers), row.key) for row in self._rows], self._ends
        for name in ("first", "last", "layer", "other", "to"):
            offer(self.asked[name], rows)
        if self._ends != ends:  # an end of the span is gone, and what stands in its place is nothing that was chosen
            self._take_one()
        if self.asked["other"].value == self.asked["layer"].value and len(rows) > 1:
            self.asked["other"].value = next(key for _, key in rows if key != self.asked["layer"].value)
        places = [(f"before {name}", key) for name, key in rows]
        offer(self.asked["at"], [*places, ("after the last layer", END)] if rows else [])
        offer(self.asked["like"], [("the layer before it", PREVIOUS), *rows])

    @property
    def _rows(self) -> list[LayerRow]:
        """Of the stack that is chosen."""
        return [row for row in self._layers if row.stack is not None and row.stack == self._stack.value]

    @property
    def _ends(self) -> tuple[str | None, str | None]:
        """Keys of the first and the last layer of the span."""
        return self.asked["first"].value, self.asked["last"].value

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
        """The end of a span goes along with its beginning while it is one layer; a longer one stays as it was chosen."""
        first, last = self.asked["first"], self.asked["last"]
        keys = [row.key for row in self._rows]
        if question is first and last.value == self._first:
            last.value = first.value
        self._first = first.value
        if first.value and last.value and keys.index(first.value) > keys.index(last.value):
            (first if question is last else last).value = question.value

    def _ask(self) -> None:
        """Show the questions of the kind, and what the edit would do."""
        kind = self._kind.value
        asked = set(QUESTIONS[kind]) - ({"factor"} if self.asked["optimizer"].value != "scaled" else set())
        for name, question in self.asked.items():
            question.layout.display = "" if name in asked else "none"
        self._stack.layout.display = "" if len(self._stack.options) > 1 else "none"
        self.asked["other"].description = "towards" if kind == "Interpolate" else "and"
        rows = self._rows
        self._changed()
        if not rows:
            self.outlook.value = outlook_html(
                "Layers in a ModuleList or Sequential can be edited; here there are none.", ()
            )
        elif kind == "Replace":
            self.outlook.value = outlook_html(NEEDS_CODE.format(key=rows[0].key), ())
        else:
            edit = self.edit()
            outlook = foresee(edit, rows, self.numbers)
            self.outlook.value = outlook_html(outlook.does, outlook.facts(self._layers), apply_code([edit]) or "")


def _build() -> dict[str, Any]:
    return {
        "at": make_dropdown("where", [], "290px"),
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
        # without a `max` it would be 100
        "warmup": ipywidgets.BoundedIntText(
            0, min=0, max=10**6, description="warm-up", tooltip="Number of updates until it learns at the full learning rate",
            **sized("130px"),
        ),
    }  # fmt: skip
