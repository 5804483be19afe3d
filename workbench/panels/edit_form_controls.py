"""The form of an edit: what it asks for each kind, which layers it offers, and what the edit would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from l2l_core import Edit
from workbench.panels.choices import control_layout, make_dropdown, set_options
from workbench.pictures import preview_html
from workbench.readings import LayerNumbers, full_name, number_layers
from workbench.session import END, FORM_FIELDS, NEEDS_CODE, PREVIOUS, LayerRow, apply_code, make_edit, preview_edit


class EditFormControls:
    """Holds the controls of the form. Choices change only when the stack does, and keep what a person has chosen.

    Args:
        guarded: makes a widget's callback of an action, and shows its error.
        changed: is called when `is_complete` may have changed.

    Attributes:
        asked: the controls by name of the question, in the order in which they stand.
        widget, outlook: the questions, and what the edit would do.
        numbers: of all layers, as they are now.
    """

    def __init__(self, guard: Callable[[Callable[[], Any]], Callable[..., None]], on_change: Callable[[], Any]) -> None:
        self._on_change = on_change
        self._layers: Sequence[LayerRow] = ()
        self.numbers: LayerNumbers = {}
        self._span_start: str | None = None  # where a span began before somebody chose
        self._shown_layers: object = None  # what of the layers the choices show
        self._updating = False  # whether it is the form itself that sets its choices
        self._kind = make_dropdown("edit", list(FORM_FIELDS), "140px")
        self._stack = make_dropdown("in", [], "170px")
        self.fields = _build_fields()
        self.preview = ipywidgets.HTML()
        self.preview.add_class("l2l-outlook")
        questions = (self._kind, self._stack, *self.fields.values())
        for question in questions:
            question.observe(guard(lambda question=question: self._on_choice(question)), "value")
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
        return make_edit(self._kind.value, {name: one.value for name, one in self.fields.items()}, self._rows)

    def set_layers(self, layers: Sequence[LayerRow]) -> bool:
        """Offer the layers that there are; return whether they are others than before."""
        if layers is self._layers:
            return False
        self._layers = layers
        # rows are new ones after every step; what the choices show of them changes with edits alone
        known = [(row.key, row.name, row.stack, row.nbytes) for row in layers]
        if known == self._shown_layers:
            return False
        self.numbers = number_layers(row.key for row in layers)
        begins, self._shown_layers, self._updating = self._shown_layers is None, known, True
        try:
            set_options(self._stack, [(row.stack or "the model", row.stack) for row in layers if row.stack is not None])
            self._update_choices()
            if begins and self._rows:
                self.fields["at"].value = END
        finally:
            self._updating = False
        self._update_preview()
        return True

    def reset(self) -> None:
        """Make a span one layer again, since an edit was taken from the form: the next press takes no more than one."""
        self._updating = True
        try:
            self._reset_span()
        finally:
            self._updating = False
        self._update_preview()

    def _reset_span(self) -> None:
        first, last = self.fields["first"], self.fields["last"]
        self._span_start = last.value = first.value

    def _update_choices(self) -> None:
        rows, ends = [(full_name(row.key, self.numbers), row.key) for row in self._rows], self._span
        for name in ("first", "last", "layer", "other", "to"):
            set_options(self.fields[name], rows)
        if self._span != ends:  # an end of the span is gone, and what stands in its place is nothing that was chosen
            self._reset_span()
        if self.fields["other"].value == self.fields["layer"].value and len(rows) > 1:
            self.fields["other"].value = next(key for _, key in rows if key != self.fields["layer"].value)
        places = [(f"before {name}", key) for name, key in rows]
        set_options(self.fields["at"], [*places, ("after the last layer", END)] if rows else [])
        set_options(self.fields["like"], [("the layer before it", PREVIOUS), *rows])

    @property
    def _rows(self) -> list[LayerRow]:
        """Of the stack that is chosen."""
        return [row for row in self._layers if row.stack is not None and row.stack == self._stack.value]

    @property
    def _span(self) -> tuple[str | None, str | None]:
        """Keys of the first and the last layer of the span."""
        return self.fields["first"].value, self.fields["last"].value

    def _on_choice(self, question: Any) -> None:
        """Somebody has chosen: keep spans in order, and say what would happen."""
        if self._updating:
            return
        self._updating = True
        try:
            if question is self._stack:
                self._update_choices()
            self._order_span(question)
        finally:
            self._updating = False
        self._update_preview()

    def _order_span(self, question: Any) -> None:
        """The end of a span goes along with its beginning while it is one layer; a longer one stays as it was chosen."""
        first, last = self.fields["first"], self.fields["last"]
        keys = [row.key for row in self._rows]
        if question is first and last.value == self._span_start:
            last.value = first.value
        self._span_start = first.value
        if first.value and last.value and keys.index(first.value) > keys.index(last.value):
            (first if question is last else last).value = question.value

    def _update_preview(self) -> None:
        """Show the questions of the kind, and what the edit would do."""
        kind = self._kind.value
        asked = set(FORM_FIELDS[kind]) - ({"factor"} if self.fields["optimizer"].value != "scaled" else set())
        for name, question in self.fields.items():
            question.layout.display = "" if name in asked else "none"
        self._stack.layout.display = "" if len(self._stack.options) > 1 else "none"
        self.fields["other"].description = "towards" if kind == "Interpolate" else "and"
        rows = self._rows
        self._on_change()
        if not rows:
            self.preview.value = preview_html(
                "Layers in a ModuleList or Sequential can be edited; here there are none.", ()
            )
        elif kind == "Replace":
            self.preview.value = preview_html(NEEDS_CODE.format(key=rows[0].key), ())
        else:
            edit = self.edit()
            outlook = preview_edit(edit, rows, self.numbers)
            self.preview.value = preview_html(outlook.effect, outlook.facts(self._layers), apply_code([edit]) or "")


def _build_fields() -> dict[str, Any]:
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
        "weight": ipywidgets.BoundedFloatText(0.5, min=0, max=1, step=0.1, description="weight", **control_layout("120px")),
        "optimizer": make_dropdown("optimizer state", ["fresh", "copy", "scaled"], "200px"),
        "factor": ipywidgets.FloatText(0.5, step=0.1, description="by", **control_layout("90px")),
        # without a `max` it would be 100
        "warmup": ipywidgets.BoundedIntText(
            0, min=0, max=10**6, description="warm-up", tooltip="Number of updates until it learns at the full learning rate",
            **control_layout("130px"),
        ),
    }  # fmt: skip
