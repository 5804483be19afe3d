"""Views, which are groups of panels, and the row of buttons that selects one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import ipywidgets

from workbench.panels.panel import Panel

PanelsByView = Mapping[str, Sequence[Panel]]


def check_view(view: str | Sequence[str] | None, names: Collection[str]) -> None:
    """Check names of views.

    Raises:
        ValueError: a name is not in `names`, or `view` is empty.
    """
    chosen = [] if view is None else [view] if isinstance(view, str) else list(view)
    if unknown := [name for name in chosen if name not in names]:
        raise ValueError(f"view={view!r}: there is no view {unknown[0]!r}; there are {', '.join(map(repr, names))}")
    if view is not None and not chosen:
        raise ValueError(f"view={view!r} shows nothing: give one or several of {', '.join(map(repr, names))}")


class ViewTabs:
    """Shows one view, selected with buttons, or all views stacked.

    Toggle buttons, because the bar of an `ipywidgets.Tab` cannot be reached with the keyboard. `page_roles.js` makes them tabs
    for screen readers and arrow keys.

    Args:
        panels_by_view: panels by name of their view, in order.
        first: the view shown first; None stacks all views and hides the buttons.
        on_change: called after another view was selected.

    Attributes:
        are_stacked: all views are shown.
        boxes: widgets of the views by name.
    """

    def __init__(self, panels_by_view: PanelsByView, first: str | None, on_change: Callable[[], None]) -> None:
        self._panels_by_view, self._on_change, self.are_stacked = panels_by_view, on_change, first is None
        self.boxes = {
            name: ipywidgets.VBox([panel.widget for panel in panels]) for name, panels in panels_by_view.items()
        }
        self.buttons = ipywidgets.ToggleButtons(
            options=[(name.capitalize(), name) for name in panels_by_view],
            value=first,
            tooltips=[f"Show the view {name!r}" for name in panels_by_view],
            style={"button_width": "auto"},
        )
        self.buttons.add_class("l2l-tabs")
        self.buttons.observe(lambda _: self._on_button(), "value")
        self.widget = ipywidgets.VBox(list(self.boxes.values()))
        self.widget.add_class("l2l-views")
        self._update_layout()

    @property
    def names(self) -> Sequence[str]:
        """Names of the views."""
        return tuple(self._panels_by_view)

    @property
    def visible_panels(self) -> Iterator[Panel]:
        """Panels of the visible views."""
        return (one for name, panels in self._panels_by_view.items() if self._is_visible(name) for one in panels)

    def show_view(self, name: str) -> None:
        """Show a view; does nothing if all are stacked.

        Raises:
            ValueError: no view has this name.
        """
        check_view(name, self.names)
        self.buttons.value = name

    def view_with(self, panel_type: type[Panel]) -> str | None:
        """Return the name of the first view with a panel of this type, or None."""
        names = (n for n, panels in self._panels_by_view.items() if any(isinstance(one, panel_type) for one in panels))
        return next(names, None)

    def _on_button(self) -> None:
        self._update_layout()
        self._on_change()

    def _is_visible(self, name: str) -> bool:
        return self.are_stacked or name == self.buttons.value

    def _update_layout(self) -> None:
        self.buttons.layout.display = "none" if self.are_stacked else ""
        for name, box in self.boxes.items():
            box.layout.display = "" if self._is_visible(name) else "none"
