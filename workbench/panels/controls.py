"""Buttons, choices and boxes of the panels; options can change while a dropdown or list is open."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ipywidgets


def make_button(label: str, icon: str, tooltip: str, **traits: Any) -> ipywidgets.Button:
    """Return a button as wide as its label."""
    return ipywidgets.Button(description=label, icon=icon, tooltip=tooltip, layout={"width": "auto"}, **traits)


def make_dropdown(label: str, options: Iterable[Any], width: str) -> Any:
    """Return a `Dropdown` with a label in front; typed as Any, since ipywidgets declares its value as optional."""
    return ipywidgets.Dropdown(options=list(options), description=label, **control_layout(width))


def make_list(rows: int, name: str) -> ipywidgets.Select:
    """Return a list of `rows` lines in which one line can be selected; screen readers read out its name."""
    return ipywidgets.Select(options=[], rows=rows, tooltip=name, layout={"width": "auto"})


def make_checkbox(label: str, tooltip: str, value: bool = False) -> ipywidgets.Checkbox:
    """Return a checkbox with its label behind it."""
    return ipywidgets.Checkbox(value=value, description=label, tooltip=tooltip, indent=False, layout={"width": "auto"})


def make_box(kind: type[ipywidgets.Box], css_class: str, *children: ipywidgets.Widget) -> ipywidgets.Box:
    """Return a box of widgets with a class of the style sheet."""
    box = kind(children)
    box.add_class(css_class)
    return box


def make_row(*children: ipywidgets.Widget) -> ipywidgets.Box:
    """Return buttons and other small controls side by side."""
    return make_box(ipywidgets.HBox, "l2l-buttons", *children)


def control_layout(width: str) -> dict[str, Any]:
    """Return layout and style of a control with a label in front; `width`, such as "240px", includes the label."""
    return {"layout": {"width": width}, "style": {"description_width": "initial"}}


def set_options(control: Any, options: Iterable[tuple[str, Any]]) -> None:
    """Set the (label, value) pairs of a dropdown or list and keep the selected value.

    If the selected value is no longer an option, the option at the same position is selected. Repeated pairs are dropped.
    Equal options send nothing.
    """
    pairs = tuple(dict.fromkeys(options))
    if tuple(control.options) == pairs:  # new options would close an open dropdown
        return
    old, index = control.value, control.index or 0  # read first: new options make ipywidgets select the first one
    with control.hold_sync():  # one message, so that the page never shows another selection in between
        control.options = pairs
        if old in [value for _, value in pairs]:
            control.value = old
        elif pairs:
            control.index = min(index, len(pairs) - 1)
