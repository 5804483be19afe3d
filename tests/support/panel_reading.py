"""A panel as a person reads and uses it: its controls by the words on them, and what it says. No kernel, no browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ipywidgets

from workbench.panels.panel import Panel
from workbench.session.snapshot import Snapshot


def widgets_of(panel: Panel) -> list[Any]:
    """All widgets of a panel, from left to right and from top to bottom."""

    def walk(widget: Any) -> Iterator[Any]:
        yield widget
        for child in getattr(widget, "children", ()):
            yield from walk(child)

    return list(walk(panel.widget))


def find(panel: Panel, words: str) -> Any:
    """The control with these words on it, or else under the pointer."""
    found = [one for one in widgets_of(panel) if words == getattr(one, "description", "")]
    found += [one for one in widgets_of(panel) if words == getattr(one, "tooltip", "")]
    assert found, f"no {words!r} in {type(panel).__name__}"
    return found[0]


def html_of(panel: Panel) -> str:
    """What is to be read in a panel."""
    return " ".join(one.value for one in widgets_of(panel) if isinstance(one, ipywidgets.HTML))


def shown(panel: Panel) -> Snapshot:
    """Show the session as it is now."""
    now = panel.session.snapshot()
    panel.show(now)
    return now
