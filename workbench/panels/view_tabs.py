"""Views: panels that are seen together, and the row of buttons that turns from one view to another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import ipywidgets

from workbench.panels.panel import Panel

PanelsByView = Mapping[str, Sequence[Panel]]


def check_view(view: str | Sequence[str] | None, names: Collection[str]) -> None:
    """Refuse a name that is no view.

    Raises:
        ValueError: names it, and those that there are.
    """
    asked = [] if view is None else [view] if isinstance(view, str) else list(view)
    if unknown := [name for name in asked if name not in names]:
        raise ValueError(f"view={view!r}: there is no view {unknown[0]!r}; there are {', '.join(map(repr, names))}")
    if view is not None and not asked:
        raise ValueError(f"view={view!r} shows nothing: give one or several of {', '.join(map(repr, names))}")


class ViewTabs:
    """Shows one view at a time behind buttons, or several stacked.

    The buttons are buttons because the bar of an `ipywidgets.Tab` cannot be reached from the keyboard.

    Args:
        made: panels by the name of their view, in order.
        first: the view that is shown at first; None stacks all of them, without buttons to turn.
        turned: called when another view is shown.

    Attributes:
        are_stacked: whether all are shown below one another, and nothing is turned.
    """

    def __init__(self, panels_by_view: PanelsByView, first: str | None, on_change: Callable[[], None]) -> None:
        self._panels_by_view, self._on_change, self.are_stacked = panels_by_view, on_change, first is None
        self._boxes = {
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
        self.widget = ipywidgets.VBox(list(self._boxes.values()))
        self._update_layout()

    @property
    def names(self) -> Sequence[str]:
        """Names of the views that can be seen."""
        return tuple(self._panels_by_view)

    @property
    def visible_panels(self) -> Iterator[Panel]:
        """Panels that are on the page now."""
        return (
            panel for name in self._panels_by_view if self._is_visible(name) for panel in self._panels_by_view[name]
        )

    @property
    def all_panels(self) -> Iterator[Panel]:
        """Panels of every view that can be seen."""
        return (panel for panels in self._panels_by_view.values() for panel in panels)

    def show_view(self, name: str) -> None:
        """Show a view; stacked ones are all seen already.

        Raises:
            ValueError: there is no such view.
        """
        if name not in self.names:
            raise ValueError(f"view={name!r}: there are {', '.join(map(repr, self.names))}")
        self.buttons.value = name

    def view_with(self, panel_type: type[Panel]) -> str | None:
        """Return the name of the view in which there is a panel of this kind, if there is one."""
        return next(
            (name for name, made in self._panels_by_view.items() if any(isinstance(one, panel_type) for one in made)),
            None,
        )

    def box_of(self, name: str) -> ipywidgets.DOMWidget:
        """Return the part of the page that a view has."""
        return self._boxes[name]

    def _on_button(self) -> None:
        self._update_layout()
        self._on_change()

    def _is_visible(self, name: str) -> bool:
        return self.are_stacked or name == self.buttons.value

    def _update_layout(self) -> None:
        self.buttons.layout.display = "none" if self.are_stacked else ""
        for name, box in self._boxes.items():
            box.layout.display = "" if self._is_visible(name) else "none"
