"""Sliders and toggle buttons of a what-if question."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import ipywidgets

from l2l_core.schedule_rules import weight_slots
from workbench.panels.controls import make_box
from workbench.panels.header_panel import AHEAD_OPTIONS, LINK_SPEEDS, MICRO_BATCH_OPTIONS
from workbench.what_if import Question, format_setting

DEPTH_OPTIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000)
STAY_FIELDS = ("resident", "keep")  # at most as many as there are layers
WIDTH_OPTIONS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
MEMORY_OPTIONS = tuple(n * 10.0**power for power in range(5, 12) for n in (1, 2, 5))  # bytes

_SLIDERS: dict[str, tuple[str, Sequence[float], str, str]] = {  # label, values, width of the label, width
    "depth": ("layers", DEPTH_OPTIONS, "44px", "204px"),
    "width": ("width", WIDTH_OPTIONS, "40px", "196px"),
    "micro_batches": ("micro-batches", MICRO_BATCH_OPTIONS, "102px", "236px"),
    "ahead": ("layers ahead", AHEAD_OPTIONS, "94px", "190px"),
    "resident": ("weights that stay", (), "124px", "248px"),
    "keep": ("graphs kept", (), "78px", "196px"),
    "h2d_bytes_per_s": ("link to device", (*LINK_SPEEDS, math.inf), "90px", "268px"),
    "d2h_bytes_per_s": ("link to host", (*LINK_SPEEDS, math.inf), "76px", "254px"),
    "memory_bytes": ("device memory", (*MEMORY_OPTIONS, math.inf), "110px", "290px"),
}
_COUNTS = {"depth", "micro_batches", "ahead", "resident", "keep"}  # fields with short values
_TIPS = {
    "resident": "Further layers whose weights stay on the device from forward to backward and are loaded once",
    "keep": "Layers whose graphs are kept from forward to backward instead of recomputed; their weights must stay",
}
# label, options, tooltips, width of the label
_CHOICES: dict[str, tuple[str, Sequence[tuple[str, Any]], Sequence[str], str]] = {
    "same_batch": (
        "of",
        (("the same batch", True), ("a larger batch", False)),
        ("More micro-batches are smaller, as in the next step", "More micro-batches make the batch larger"),
        "16px",
    ),
    "stash": ("stash on", (("device", "device"), ("host", "host")), ("", ""), "58px"),
    "precision": ("precision", (("fp32", "fp32"), ("bf16", "bf16")), ("", ""), "60px"),
}


class WhatIfControls:
    """One control for each field of a question; `on_change` is called when the user changes one.

    Attributes:
        widget: all controls.
        base: the settings that `reset` restores.
    """

    def __init__(self, base: Question, on_change: Callable[[], None]) -> None:
        self.base, self._on_change = base, on_change
        self._updating_thread: int | None = None  # thread that sets controls; its callbacks are no user input
        self._by_name: dict[str, Any] = {}
        # this order gives three rows on a page of 1440 px
        order = ("depth", "width", "memory_bytes", "ahead", "micro_batches", "same_batch", "resident", "keep", "stash")
        for name in (*order, "precision", "h2d_bytes_per_s", "d2h_bytes_per_s"):
            self._by_name[name] = control = self._slider(name) if name in _SLIDERS else self._choice(name)
            control.observe(partial(self._on_moved, name), "value")
        self.widget = make_box(ipywidgets.HBox, "l2l-settings", *self._by_name.values())
        self.widget.layout.flex_flow = "row wrap"

    def question(self) -> Question:
        """Return the question that the controls show."""
        return Question(**{name: _from_slider(widget.value) for name, widget in self._by_name.items()})

    def set_base(self, base: Question) -> None:
        """Move controls at the old base to the new one; values set by the user stay."""
        old, question, self.base = self.base, self.question(), base
        self._set_values({n: getattr(base, n) for n in self._by_name if getattr(question, n) == getattr(old, n)})

    def reset(self) -> None:
        """Set all controls to the base."""
        self._set_values({name: getattr(self.base, name) for name in self._by_name})

    def set_values(self, **settings: Any) -> None:
        """Set some controls; the values are checked by `Question`."""
        question = replace(self.question(), **settings)
        self._set_values({name: getattr(question, name) for name in settings})

    def _set_values(self, values: dict[str, Any]) -> None:
        self._updating_thread = threading.get_ident()
        try:
            for name, value in values.items():
                widget, shown = self._by_name[name], _to_slider(value)
                if name in _SLIDERS and shown not in [v for _, v in widget.options]:
                    set_slider_options(widget, name, [*(v for _, v in widget.options), shown], shown)
                else:
                    widget.value = shown
            if "depth" in values:
                self._limit_to_depth()
        finally:
            self._updating_thread = None

    def _on_moved(self, name: str, _: object) -> None:
        if self._updating_thread == threading.get_ident():
            return
        self._updating_thread = threading.get_ident()
        try:
            if name == "depth":
                self._limit_to_depth()
            self._reconcile(name)
        finally:
            self._updating_thread = None
        self._on_change()

    def _limit_to_depth(self) -> None:
        """Limit resident and kept layers to the number of layers."""
        depth = self._by_name["depth"].value
        for name in STAY_FIELDS:
            widget = self._by_name[name]
            # the settings of a session may exceed the number of layers: then all layers stay
            values = sorted({*layer_counts(depth), getattr(self.base, name)})
            set_slider_options(widget, name, values, max(n for n in values if n <= widget.value))

    def _reconcile(self, moved: str) -> None:
        """Adjust the other control, since only layers whose weights stay can keep their graphs."""
        ahead, resident, keep = (self._by_name[name] for name in ("ahead", "resident", "keep"))
        if moved == "keep" and (needed := keep.value - weight_slots(ahead.value)) > resident.value:
            resident.value = min(n for _, n in resident.options if n >= needed)
        most = weight_slots(ahead.value, resident.value)
        if moved in ("ahead", "resident", "depth") and keep.value > most:
            keep.value = max(n for _, n in keep.options if n <= most)

    def _slider(self, name: str) -> ipywidgets.SelectionSlider:
        label, values, label_width, width = _SLIDERS[name]
        values = layer_counts(self.base.depth) if name in STAY_FIELDS else values
        options = sorted({*values, _to_slider(getattr(self.base, name))})
        # continuous, unlike the sliders of the header: a question changes no setting
        slider = ipywidgets.SelectionSlider(
            options=[(format_setting(name, _from_slider(value)), value) for value in options],
            value=_to_slider(getattr(self.base, name)),
            description=label,
            tooltip=_TIPS.get(name),
            style={"description_width": label_width},
            layout={"width": width},
        )
        if name in _COUNTS:
            slider.add_class("l2l-count")
        return slider

    def _choice(self, name: str) -> ipywidgets.ToggleButtons:
        label, options, tooltips, label_width = _CHOICES[name]
        return ipywidgets.ToggleButtons(
            options=options,
            value=getattr(self.base, name),
            description=label,
            tooltips=tooltips,
            style={"description_width": label_width, "button_width": "auto"},
            layout={"width": "auto"},
        )


def layer_counts(depth: int) -> list[int]:
    """Return the options from 0 to `depth`: every number up to 32, then some."""
    return [*range(min(depth, 32) + 1), *(n for n in DEPTH_OPTIONS if 32 < n < depth), *([depth] if depth > 32 else [])]


def set_slider_options(slider: ipywidgets.SelectionSlider, name: str, values: Sequence[float], value: float) -> None:
    """Set the options of a slider and its value."""
    options = [(format_setting(name, _from_slider(one)), one) for one in sorted(set(values))]
    if (tuple(slider.options), slider.value) == (tuple(options), value):
        return
    with slider.hold_sync():  # one message: new options alone would select the first one
        slider.options = options
        slider.value = value


# every field of a question needs a control
assert {*_SLIDERS, *_CHOICES} == {field.name for field in fields(Question)}


# On sliders, infinity stands for None.
def _to_slider(value: Any) -> Any:
    return math.inf if value is None else value


def _from_slider(value: Any) -> Any:
    return None if value == math.inf else value
