"""Ways to train side by side, live: the picture, its table, and below them the plan of the way that is chosen."""

from __future__ import annotations

import sys
from html import escape
from typing import Any

import ipywidgets
from IPython.display import display

from l2l_core.strategies import Row, Table
from workbench.panels.cells import belongs_to_cell, has_cells
from workbench.panels.display import WIDGET, Bundle, behind, close_all, view_of
from workbench.panels.fold import Fold
from workbench.panels.selection import selection_of
from workbench.panels.style import STYLE
from workbench.panels.touch import Touch, touched
from workbench.pictures import (
    Picture,
    best_way,
    bundle_of,
    draw_ways,
    key_of,
    page,
    readable,
    round_up,
    show_way,
    show_ways,
    ways,
    ways_html,
)

_STILL = page.STYLE + ways.STYLE
_SAYS = "Arrow keys choose a way; its plan is shown below"


class Ways:
    """See what ways to train need and take, and how the chosen one spends its step.

    ``Ways(lab.compare([...]))`` at the end of a cell shows it. A mark or a row is chosen by pointer, or with the arrow keys; the
    fastest way that fits is chosen at first. A saved notebook keeps the picture of what was chosen.

    Args:
        table: from `Lab.compare`.

    Raises:
        TypeError: something else.
    """

    def __init__(self, table: Table) -> None:
        if not isinstance(table, Table):
            raise TypeError(f"Ways takes the table that lab.compare([...]) returns, not a {type(table).__name__}")
        self.table = table
        self._selection = selection_of(self)
        best = best_way(table)
        self._selection.key = None if best is None else key_of(best)
        self._selection.watch(self._follow)
        self._plan, self._fold = ipywidgets.HTML(), Fold("The plan as a table")
        self._plan.add_class("l2l-way")
        style = ipywidgets.HTML(f"<style>{STYLE}</style>", layout={"display": "none"})
        picture = touched(ipywidgets.HTML(draw_ways(table)))
        side_by_side = ipywidgets.Box([picture, touched(ipywidgets.HTML(ways_html(table)))])
        side_by_side.add_class("l2l-ways")
        self.widget = ipywidgets.VBox([style, side_by_side, self._plan, self._fold.widget, Touch(self, says=_SAYS)])
        self._name = f"l2l-{self.widget.model_id[:12]}"
        for name in ("l2l-workbench", f"{self._name}-live"):
            self.widget.add_class(name)
        self._output: Any = None
        self._closed = False
        self._draw()
        belongs_to_cell(self)

    @property
    def chosen(self) -> Row | None:
        """The way whose plan is shown."""
        at = self._at
        return None if at is None else self.table.rows[at]

    def close(self, wait: bool = True) -> None:
        """Take the widget off the page, and leave a still picture in the notebook. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            close_all(self.widget)

    # -- drawn ---------------------------------------------------------------------------------------------------------

    @property
    def _at(self) -> int | None:
        return next((i for i in range(len(self.table.rows)) if key_of(i) == self._selection.key), None)

    def _follow(self) -> None:
        self._draw()
        if self._output is not None and not self._closed:
            self._output.update(self._page(), raw=True)

    def _draw(self) -> None:
        row, plan = self.chosen, self._show_plan()
        self._plan.value = (
            plan.svg if plan is not None else "" if row is None else f"<p>{escape(f'{row.name}: {row.why}')}</p>"
        )
        self._fold.widget.layout.display = "none" if plan is None else ""
        if plan is not None:
            self._fold.show(lambda: plan.table)

    def _show_plan(self) -> Picture | None:
        """The plan of the chosen way, on axes that are the same for all."""
        if self.chosen is None or self.chosen.trace is None:
            return None
        made = [row for row in self.table.rows if row.trace is not None]
        span_s = round_up(max(row.seconds for row in made))
        most = max(row.peak_device_bytes for row in made)
        near = self.table.memory_bytes or 0
        top_bytes = round_up(1.06 * max(most, near if near <= 2 * most else 0))
        return show_way(self.chosen, self.table.memory_bytes, span_s, top_bytes)

    # -- on the page ---------------------------------------------------------------------------------------------------

    def still(self) -> Bundle:
        """Return the pictures and tables for a page without a kernel."""
        pictures = [show_ways(self.table, self._at)]
        plan = self._show_plan()
        bundle = bundle_of([*pictures, *([plan] if plan is not None else [])])
        below = f'<div class="l2l-way">{plan.to_html()}</div>' if plan is not None else ""
        beside = f"<div>{pictures[0].svg}</div><div>{ways_html(self.table, self._at)}</div>"
        return {**bundle, "text/html": f'<style>{_STILL}</style><div class="l2l-ways">{beside}</div>{below}'}

    def _page(self) -> Bundle:
        return behind(self._name, self.still())

    def _ipython_display_(self) -> None:
        if not has_cells():
            print(readable(self.still()["text/plain"], sys.stdout.encoding or "utf-8"))
            return
        if not self._closed:
            display({WIDGET: view_of(self.widget)}, raw=True)
        same = self._output.display_id if self._output is not None else True  # so that one update reaches all
        self._output = display(self._page(), raw=True, display_id=same)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return self._page() if self._closed else {WIDGET: view_of(self.widget), **self._page()}
