"""Interactive comparison of strategies: chart, table and the plan of the selected strategy."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets

from l2l_core.strategies import StrategyResult, StrategyTable
from workbench.panels.controls import make_box
from workbench.panels.display import Bundle, StillDisplay
from workbench.panels.folded_table import FoldedTable
from workbench.panels.layer_picker import LayerPicker, make_pickable
from workbench.panels.notebook_cells import register_in_cell
from workbench.panels.selection import shared_selection
from workbench.panels.style import style_sheet
from workbench.pictures import (
    Picture,
    best_strategy,
    bundle_of,
    draw_strategies,
    page_bundle,
    round_up,
    row_key,
    show_strategies,
    show_strategy,
    strategies_html,
    strategy_comparison,
)

_STILL_STYLE = page_bundle.STYLE + strategy_comparison.STYLE
_PICKER_HINT = "Arrow keys choose a strategy; its plan is shown below"


class Ways:
    """Memory and time of strategies, and the step of the selected one.

    ``Ways(lab.compare([...]))`` as the last expression of a cell displays it. A click on a mark or row, or an arrow key,
    selects a strategy; at first, the fastest that fits is selected. A saved notebook keeps the picture of the selection.

    Args:
        table: the table that `Lab.compare` returns.

    Raises:
        TypeError: `table` is no `StrategyTable`.

    Example:
        >>> from l2l_core.strategies import Full, Lab, Plain
        >>> from workbench import Ways
        >>> relay.close()  # a model has one trainer at a time
        >>> ways = Ways(Lab(model, batch, loss=nn.CrossEntropyLoss()).compare([Plain(), Full()]))
        >>> ways.chosen.name  # the fastest that fits
        'Plain'
        >>> ways.close()
    """

    def __init__(self, table: StrategyTable) -> None:
        if not isinstance(table, StrategyTable):
            raise TypeError(f"Ways takes the table that lab.compare([...]) returns, not a {type(table).__name__}")
        self.table = table
        self._selection = shared_selection(self)
        best = best_strategy(table)
        self._selection.key = None if best is None else row_key(best)
        self._selection.observe(self._on_selection)
        self._plan, self._fold = ipywidgets.HTML(), FoldedTable("The plan as a table")
        self._plan.add_class("l2l-way")
        pictures = [make_pickable(ipywidgets.HTML(html)) for html in (draw_strategies(table), strategies_html(table))]
        side_by_side = make_box(ipywidgets.Box, "l2l-ways", *pictures)
        picker = LayerPicker(self, hint=_PICKER_HINT)
        self.widget = ipywidgets.VBox([style_sheet(), side_by_side, self._plan, self._fold.widget, picker])
        self.widget.add_class("l2l-workbench")
        self._display = StillDisplay(self.widget, self.still)
        self._draw()
        register_in_cell(self)

    @property
    def chosen(self) -> StrategyResult | None:
        """Result of the selected strategy, or None."""
        index = self._row_index
        return None if index is None else self.table.rows[index]

    def close(self, wait: bool = True) -> None:
        """Remove the widget from the page and leave the still in the notebook. Does nothing the second time."""
        self._display.close()

    # -- drawing -------------------------------------------------------------------------------------------------------

    @property
    def _row_index(self) -> int | None:
        return next((i for i in range(len(self.table.rows)) if row_key(i) == self._selection.key), None)

    def _on_selection(self) -> None:
        self._draw()
        self._display.update()

    def _draw(self) -> None:
        row, plan = self.chosen, self._plan_picture()
        reason = "" if row is None else f"<p>{escape(f'{row.name}: {row.why}')}</p>"
        self._plan.value = plan.svg if plan is not None else reason
        self._fold.widget.layout.display = "none" if plan is None else ""
        if plan is not None:
            self._fold.show(lambda: plan.table)

    def _plan_picture(self) -> Picture | None:
        """Return the plan of the selected strategy; all plans have the same axes."""
        if self.chosen is None or self.chosen.trace is None:
            return None
        rows = [row for row in self.table.rows if row.trace is not None]
        span_s = round_up(max(row.seconds for row in rows))
        peak = max(row.peak_device_bytes for row in rows)
        budget = self.table.memory_bytes or 0
        top_bytes = round_up(1.06 * max(peak, budget if budget <= 2 * peak else 0))
        return show_strategy(self.chosen, self.table.memory_bytes, span_s, top_bytes)

    # -- on the page ---------------------------------------------------------------------------------------------------

    def still(self) -> Bundle:
        """Return the pictures and tables for a page without a kernel."""
        picture, plan = show_strategies(self.table, self._row_index), self._plan_picture()
        bundle = bundle_of([picture] if plan is None else [picture, plan])
        below = f'<div class="l2l-way">{plan.to_html()}</div>' if plan is not None else ""
        beside = f"<div>{picture.svg}</div><div>{strategies_html(self.table, self._row_index)}</div>"
        return {**bundle, "text/html": f'<style>{_STILL_STYLE}</style><div class="l2l-ways">{beside}</div>{below}'}

    def _ipython_display_(self) -> None:
        self._display.open()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return self._display.bundle()
