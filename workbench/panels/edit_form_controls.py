"""The form of an edit: fields of each kind of edit, layers to select, and a preview of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from l2l_core import Edit
from workbench.panels.controls import control_layout, make_box, make_dropdown, set_options
from workbench.pictures import preview_html
from workbench.readings import LayerNumbers, full_name, number_layers
from workbench.session import (
    END,
    FORM_FIELDS,
    NEEDS_CODE,
    PREVIOUS,
    LayerRow,
    StepFlop,
    apply_code,
    make_edit,
    preview_edit,
)


class EditFormControls:
    """Controls of the form. Options change only with the layers and keep the user's selection.

    Args:
        guard: returns a widget's callback for an action and shows its exceptions.
        on_change: called when `is_complete` may have changed.

    Attributes:
        fields: controls by name of the field, in their order in the form.
        widget, preview: the fields, and a preview of the edit.
        numbers: numbers of all layers.
    """

    def __init__(self, guard: Callable[[Callable[[], Any]], Callable[..., None]], on_change: Callable[[], Any]) -> None:
        self._on_change = on_change
        self._layers: Sequence[LayerRow] = ()
        self._flop: StepFlop | None = None
        self.numbers: LayerNumbers = {}
        self._span_start: str | None = None  # first layer of the span before the user's selection
        self._shown_layers: object = None  # the layers' attributes that the options show
        self._updating = False  # the form itself sets its controls
        self._kind = make_dropdown("edit", list(FORM_FIELDS), "140px")
        self._stack = make_dropdown("in", [], "170px")
        self.fields = _build_fields()
        self.preview = ipywidgets.HTML()
        self.preview.add_class("l2l-outlook")
        controls = (self._kind, self._stack, *self.fields.values())
        for control in controls:
            control.observe(guard(lambda control=control: self._on_choice(control)), "value")
        self.widget = make_box(ipywidgets.HBox, "l2l-questions", *controls)

    @property
    def is_complete(self) -> bool:
        """True if the fields describe an edit."""
        return self._kind.value != "Replace" and bool(self._rows)

    def edit(self) -> Edit:
        """Return the edit that the fields describe.

        Raises:
            ValueError: `make_edit` refused the values.
        """
        return make_edit(self._kind.value, {name: one.value for name, one in self.fields.items()}, self._rows)

    def set_layers(self, layers: Sequence[LayerRow]) -> bool:
        """Update the options; return True if keys, names, stacks or sizes of the layers have changed."""
        if layers is self._layers:
            return False
        self._layers = layers
        # rows are replaced after every step; the attributes shown change only with edits
        shown = [(row.key, row.name, row.stack, row.nbytes) for row in layers]
        if shown == self._shown_layers:
            return False
        self.numbers = number_layers(row.key for row in layers)
        is_first, self._shown_layers, self._updating = self._shown_layers is None, shown, True
        try:
            set_options(self._stack, [(row.stack or "the model", row.stack) for row in layers if row.stack is not None])
            self._update_choices()
            if is_first and self._rows:
                self.fields["at"].value = END
        finally:
            self._updating = False
        self._update_preview()
        return True

    def set_flop(self, flop: StepFlop | None) -> None:
        """Update the preview with the operations of the last step; None if they were not counted."""
        if flop != self._flop:
            self._flop = flop
            self._update_preview()

    def reset(self) -> None:
        """Reset the span to one layer after an edit was taken from the form."""
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
        if self._span != ends:  # an end of the span was removed: do not replace it by another layer
            self._reset_span()
        if self.fields["other"].value == self.fields["layer"].value and len(rows) > 1:
            self.fields["other"].value = next(key for _, key in rows if key != self.fields["layer"].value)
        places = [(f"before {name}", key) for name, key in rows]
        set_options(self.fields["at"], [*places, ("after the last layer", END)] if rows else [])
        set_options(self.fields["like"], [("the layer before it", PREVIOUS), *rows])

    @property
    def _rows(self) -> list[LayerRow]:
        """Layers of the selected stack."""
        return [row for row in self._layers if row.stack is not None and row.stack == self._stack.value]

    @property
    def _span(self) -> tuple[str | None, str | None]:
        """Keys of the first and the last layer of the span."""
        return self.fields["first"].value, self.fields["last"].value

    def _on_choice(self, control: Any) -> None:
        """Keep the span in order after the user changed a control, and update the preview."""
        if self._updating:
            return
        self._updating = True
        try:
            if control is self._stack:
                self._update_choices()
            self._order_span(control)
        finally:
            self._updating = False
        self._update_preview()

    def _order_span(self, control: Any) -> None:
        """Move the end of a span of one layer with its start; keep the other end of a longer span."""
        first, last = self.fields["first"], self.fields["last"]
        keys = [row.key for row in self._rows]
        if control is first and last.value == self._span_start:
            last.value = first.value
        self._span_start = first.value
        if first.value and last.value and keys.index(first.value) > keys.index(last.value):
            (first if control is last else last).value = control.value

    def _update_preview(self) -> None:
        """Show the fields of the selected kind and a preview of the edit."""
        kind = self._kind.value
        visible = set(FORM_FIELDS[kind]) - ({"factor"} if self.fields["optimizer"].value != "scaled" else set())
        for name, control in self.fields.items():
            control.layout.display = "" if name in visible else "none"
        self._stack.layout.display = "" if len(self._stack.options) > 1 else "none"
        self.fields["other"].description = "towards" if kind == "Interpolate" else "and"
        rows = self._rows
        self._on_change()
        if not rows:
            reason = "The model has no layers in a ModuleList or Sequential, so none can be edited."
            self.preview.value = preview_html(reason, ())
        elif kind == "Replace":
            self.preview.value = preview_html(NEEDS_CODE.format(key=rows[0].key), ())
        else:
            edit = self.edit()
            preview = preview_edit(edit, rows, self.numbers, self._flop)
            self.preview.value = preview_html(preview.effect, preview.facts(self._layers), apply_code([edit]) or "")


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
        "mode": make_dropdown("place copies", ["middle", "interleaved", "top"], "190px"),
        "park": make_dropdown("keep in", ["memory", "disk", "free"], "150px"),
        "weight": ipywidgets.BoundedFloatText(0.5, min=0, max=1, step=0.1, description="weight", **control_layout("120px")),
        "optimizer": make_dropdown("optimizer state", ["fresh", "copy", "scaled"], "200px"),
        "factor": ipywidgets.FloatText(0.5, step=0.1, description="by", **control_layout("90px")),
        "count": ipywidgets.BoundedIntText(2, min=1, max=10**6, description="loops", **control_layout("110px")),
        # the default `max` is 100
        "warmup": ipywidgets.BoundedIntText(
            0, min=0, max=10**6, description="warm-up", tooltip="Updates until the full learning rate is reached",
            **control_layout("130px"),
        ),
    }  # fmt: skip
