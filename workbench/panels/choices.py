"""Choices that follow a list which changes now and then, while a person may have them open."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ipywidgets


def set_options(control: Any, options: Iterable[tuple[str, Any]]) -> None:
    """Let a dropdown or a list offer these pairs of words and values, without repetition.

    Nothing is sent if they are the same. What was chosen stays chosen if it is still there; otherwise the choice stays at
    its place.
    """
    pairs = tuple(dict.fromkeys(options))
    # setting options closes a list that somebody has open
    if tuple(control.options) == pairs:
        return
    # before the options are set: ipywidgets then chooses the first one
    old, at = control.value, control.index or 0
    with control.hold_sync():  # one message, so that the page never shows another choice in between
        control.options = pairs
        if old in [value for _, value in pairs]:
            control.value = old
        elif pairs:
            control.index = min(at, len(pairs) - 1)


def make_dropdown(label: str, options: Iterable[Any], width: str) -> ipywidgets.Dropdown:
    """Make a dropdown with its words before it."""
    return ipywidgets.Dropdown(options=list(options), description=label, **control_layout(width))


def make_list(rows: int) -> ipywidgets.Select:
    """Make a list that is `rows` lines high, of which one line is chosen."""
    return ipywidgets.Select(options=[], rows=rows, layout={"width": "auto"})


def control_layout(width: str) -> dict[str, Any]:
    """Return the layout of a control with its words before it; `width` is that of both together, as "240px"."""
    return {"layout": {"width": width}, "style": {"description_width": "initial"}}
