"""Widget for ways to train a large model over many ranks: bytes, seconds, what fits, and the fastest."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets

from l2l_core.pipelines import (
    MEGATRON_ROWS,
    LayoutSearch,
    RankCluster,
    TransformerShape,
    WayTable,
    compare_ways,
    find_layout,
)
from l2l_core.trace import format_bytes
from workbench.panels.controls import control_layout, make_box
from workbench.panels.display import Bundle, StillDisplay
from workbench.panels.folded_table import FoldedTable
from workbench.panels.latest_executor import LatestExecutor
from workbench.panels.layer_picker import LayerPicker, make_pickable
from workbench.panels.notebook_cells import register_in_cell
from workbench.panels.panel import failure_html
from workbench.panels.selection import shared_selection
from workbench.panels.style import style_sheet
from workbench.pictures import Picture, layout_chart, page_bundle, rank_chart

if TYPE_CHECKING:
    from l2l_core.parallel import ParallelRun, PipelineRun

_MODELS = {f"{row.billions:g}B": row.shape for row in MEGATRON_ROWS}
_RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096)
_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_HINT = "Arrow keys choose a way to train; it is explained below"


class ParallelBench:
    """Ways to train a large model over many ranks, side by side: bytes per rank, messages, seconds, and what fits.

    ``workbench.Parallel("7.5B", ranks=64)`` as the last expression of a cell displays it, with sliders for the model, the
    ranks, their links and their memory. A click on a row, or an arrow key, selects a way and explains it. Below is the finder:
    the fastest of all layouts that fits, and why others lose. Nothing of it is run: bytes are formulas, seconds are simulated
    (`l2l_core/pipelines/layout_cost.py`). A small run of `run_parallel` or `run_pipeline` can be shown below: rows, lanes and
    memory of its ranks, measured.

    Args:
        model: a size of Megatron-LM's table, from "1.7B" to "1008B", or a `TransformerShape`.
        ranks: number of devices.
        rows: rows of a batch, over all ranks.
        cluster: figures of ranks and links; default: A100 with 80 GB in nodes of eight.
        run: a run to show, as by `show`.

    Raises:
        ValueError: no such model, or numbers below 1.

    Example:
        >>> from l2l_core.pipelines import TransformerShape
        >>> from workbench import Parallel
        >>> bench = Parallel(TransformerShape(layers=4, width=1024, heads=16), ranks=4, rows=8)
        >>> bench.chosen  # at the end of a cell, `bench` shows all ways
        'few-bit activations'
        >>> bench.close()
    """

    def __init__(
        self,
        model: str | TransformerShape = "7.5B",
        ranks: int = 64,
        *,
        rows: int = 512,
        cluster: RankCluster | None = None,
        run: ParallelRun | PipelineRun | None = None,
    ) -> None:
        if isinstance(model, str) and model not in _MODELS:
            raise ValueError(f"model={model!r}: choose one of {', '.join(_MODELS)}, or give a TransformerShape")
        if min(ranks, rows) < 1:
            raise ValueError(f"ranks={ranks}, rows={rows}: each is 1 or more")
        self._shapes = dict(_MODELS)
        if isinstance(model, TransformerShape):
            name = f"yours, {model.parameters / 1e9:.3g}B"
            self._shapes = {name: model, **_MODELS}
            model = name
        self._name, self._rows = model, rows
        self._cluster = replace(cluster or RankCluster(ranks), ranks=ranks)
        self._executor = LatestExecutor("parallel")
        self._failure = ""
        self._table, self._found = self._costs(self._request)
        self._selection = shared_selection(self)
        self._selection.observe(self._on_selection)
        self._controls = self._make_controls()
        self._picture, self._html = make_pickable(ipywidgets.HTML()), ipywidgets.HTML()
        self._explanation, self._finder = ipywidgets.HTML(), FoldedTable("The finder: why this layout?")
        controls = make_box(ipywidgets.HBox, "l2l-settings", *self._controls.values())
        controls.layout.flex_flow = "row wrap"
        style = ipywidgets.HTML(f"<style>{layout_chart.STYLE}</style>", layout={"display": "none"})
        self._title = ipywidgets.HTML()
        published = FoldedTable("Megatron-LM's table, simulated")
        published.show(layout_chart.published_table)
        for scrolls in (self._html, self._explanation, self._finder.widget, published.widget):
            scrolls.add_class("l2l-layouts")
        self._run: Sequence[Picture] = ()
        self._run_html = ipywidgets.HTML(layout={"display": "none"})
        self._run_html.add_class("l2l-layouts")
        tables = [self._explanation, self._html, self._finder.widget, published.widget]
        parts = [self._title, self._picture, *tables, self._run_html]
        self.widget = ipywidgets.VBox([style_sheet(), style, controls, *parts, LayerPicker(self, hint=_HINT)])
        self.widget.add_class("l2l-workbench")
        self._display = StillDisplay(self.widget, self.still)
        register_in_cell(self)
        self._draw()
        if run is not None:
            self.show(run)

    # -- answers -------------------------------------------------------------------------------------------------------

    @property
    def table(self) -> WayTable:
        """All ways for the present settings; waits until they are costed."""
        self._executor.wait()
        return self._table

    @property
    def found(self) -> LayoutSearch:
        """The finder's layouts for the present settings; waits until they are costed."""
        self._executor.wait()
        return self._found

    @property
    def chosen(self) -> str:
        """Name of the selected way: at first the fastest that fits."""
        return self.table.ways[self._chosen_at(self._table)].name

    def select(self, name: str) -> None:
        """Select a way by its name, such as "ZeRO 3".

        Raises:
            ValueError: no way of this name.
        """
        names = [way.name for way in self._table.ways]
        if name not in names:
            raise ValueError(f"name={name!r}: choose one of {', '.join(names)}")
        self._selection.choose(layout_chart.layout_key(names.index(name)))

    def show(self, run: ParallelRun | PipelineRun) -> None:
        """Show a run below the table: a row per rank, then lanes and memory of each; another run replaces it."""
        self._run = rank_chart.show_ranks(run)
        self._run_html.value, self._run_html.layout.display = self._draw_run(), ""
        self._display.update()

    def close(self, wait: bool = True) -> None:
        """Remove the widget from the page and leave the still in the notebook. Does nothing the second time."""
        self._display.close()

    # -- controls ------------------------------------------------------------------------------------------------------

    def _make_controls(self) -> dict[str, Any]:
        cluster = self._cluster
        controls: dict[str, Any] = {
            "model": _choice("model", list(self._shapes), self._name, "250px"),
            "ranks": _choice("ranks", sorted({*_RANKS, cluster.ranks}), cluster.ranks, "230px"),
            "rows": _choice("rows of a batch", sorted({*_ROWS, self._rows}), self._rows, "270px"),
            "memory": ipywidgets.IntSlider(
                round(cluster.memory_bytes / 1e9),
                min=1,
                max=max(192, round(cluster.memory_bytes / 1e9)),
                description="memory of a rank, GB",
                continuous_update=False,
                **control_layout("330px"),
            ),
            "link": _log_slider("link between nodes, GB/s", (cluster.link_bytes_per_s or 1e12) / 1e9, "360px"),
            "host": _log_slider("link to the host, GB/s", cluster.host_bytes_per_s / 1e9, "340px"),
        }
        for control in controls.values():
            control.observe(lambda _: self._on_control(), "value")
        return controls

    def _on_control(self) -> None:
        values = {name: control.value for name, control in self._controls.items()}
        self._name, self._rows = values["model"], values["rows"]
        figures = {
            "memory_bytes": values["memory"],
            "link_bytes_per_s": values["link"],
            "host_bytes_per_s": values["host"],
        }
        changed = {name: value * 1e9 for name, value in figures.items()}
        self._cluster = replace(self._cluster, ranks=values["ranks"], **changed)
        request = self._request
        self._executor.submit(lambda: self._answer(request))

    # -- drawing -------------------------------------------------------------------------------------------------------

    @property
    def _request(self) -> tuple[TransformerShape, RankCluster, int]:
        return self._shapes[self._name], self._cluster, self._rows

    @staticmethod
    def _costs(request: tuple[TransformerShape, RankCluster, int]) -> tuple[WayTable, LayoutSearch]:
        return compare_ways(*request), find_layout(*request)

    def _answer(self, request: tuple[TransformerShape, RankCluster, int]) -> None:
        try:
            costs = self._costs(request)
        except Exception as error:
            self._html.value = failure_html(f"{type(error).__name__}: {error}", traceback.format_exc())
            return
        if request == self._request:
            self._table, self._found = costs
            self._draw()

    def _on_selection(self) -> None:
        self._draw()

    def _draw(self) -> None:
        table, at = self._table, self._chosen_at(self._table)
        self._title.value = f'<div class="l2l-layout-title">{escape(self._headline)}</div>'
        self._picture.value = layout_chart.draw_layouts(table, at)
        self._explanation.value = layout_chart.layout_html(table, at)
        self._html.value = layout_chart.layouts_html(table, self._settings, at)
        found = self._found
        self._finder.show(lambda: layout_chart.finder_table(found))
        self._display.update()

    @property
    def _headline(self) -> str:
        best = self._found.best
        finder = (
            "The finder has no layout that divides model and rows, and fits."
            if best is None
            else f"Finder: {best.layout}; {self._seconds(best)}."
        )
        return f"{layout_chart.describe_best_layout(self._table)} {finder}"

    @staticmethod
    def _seconds(best: Any) -> str:
        return f"{best.step_s:.3g} s, {format_bytes(best.device_bytes)} per rank"

    @property
    def _settings(self) -> str:
        """The model, the batch and the figures of the ranks as text."""
        shape, cluster = self._shapes[self._name], self._cluster
        link = "in no time" if cluster.link_bytes_per_s is None else f"{format_bytes(cluster.link_bytes_per_s)}/s"
        return (
            f"{shape.parameters / 1e9:.3g} billion parameters ({shape.layers} layers, {shape.width} wide, {shape.heads} heads), "
            f"{self._rows} rows of {shape.sequence} tokens; {cluster.ranks} ranks with {format_bytes(cluster.memory_bytes)}, "
            f"{cluster.flop_per_s / 1e12:.3g} TFLOP/s reached; links: in a node of {cluster.node}: "
            f"{format_bytes(cluster.node_bytes_per_s)}/s, between nodes {link}, to the host "
            f"{format_bytes(cluster.host_bytes_per_s)}/s"
        )

    def _chosen_at(self, table: WayTable) -> int:
        keys = [layout_chart.layout_key(at) for at in range(len(table.ways))]
        if self._selection.key in keys:
            return keys.index(self._selection.key)
        best = table.search.best or table.search.costs[0]
        return next(at for at, cost in enumerate(table.costs) if cost is best)

    def _draw_run(self) -> str:
        if not self._run:
            return ""
        first, *others = self._run
        title = f'<div class="l2l-layout-title">{escape(first.table.title)}</div>'
        return f"{title}{first.svg}{first.table.to_html(folded=False)}{''.join(each.svg for each in others)}"

    # -- on the page ---------------------------------------------------------------------------------------------------

    def still(self) -> Bundle:
        """Return picture and tables for a page without a kernel."""
        table = self.table
        at = self._chosen_at(table)
        drawn = layout_chart.show_layouts(table, self._settings, at)
        finder = layout_chart.finder_table(self._found)
        html = (
            f"<style>{page_bundle.STYLE}{layout_chart.STYLE}</style>"
            f'<div class="l2l-layout-title">{escape(self._headline)}</div>{drawn.svg}{layout_chart.layout_html(table, at)}'
            f"{layout_chart.layouts_html(table, self._settings, at)}{finder.to_html()}{self._draw_run()}"
        )
        tables = [drawn.table, finder, *(each.table for each in self._run[:1])]
        text = f"{self._headline}\n" + "\n\n".join(table.to_text() for table in tables)
        return {"text/html": html, "image/svg+xml": drawn.svg, "text/plain": text}

    def __str__(self) -> str:
        return self.still()["text/plain"]

    def _ipython_display_(self) -> None:
        self._display.open()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return self._display.bundle()


def _choice(label: str, options: Sequence[Any], value: Any, width: str) -> Any:
    """Return a slider over given values."""
    return ipywidgets.SelectionSlider(
        options=list(options), value=value, description=label, continuous_update=False, **control_layout(width)
    )


def _log_slider(label: str, value: float, width: str) -> Any:
    """Return a slider from 0.1 to 1000 on a logarithmic scale."""
    return ipywidgets.FloatLogSlider(
        value=value,
        min=-1,
        max=3,
        step=0.05,
        readout_format=".3g",
        description=label,
        continuous_update=False,
        **control_layout(width),
    )


Parallel = ParallelBench  # the name in notebooks; `l2l_core.parallel` runs pipelines
