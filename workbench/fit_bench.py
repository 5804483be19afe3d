"""Widget "Will it fit?": ways to train a model on a card, and the program of the selected one."""

from __future__ import annotations

import sys
import traceback
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets
from IPython.display import display

from l2l_core import Disk, EmulatedDevice
from workbench.fit import (
    CARDS,
    PRECISIONS,
    STYLE,
    FitRequest,
    FitTable,
    FitWay,
    GpuCard,
    card_table,
    fit_html,
    make_request,
    way_key,
)
from workbench.panels.controls import control_layout, make_box, make_dropdown
from workbench.panels.copy_script import CopyScript
from workbench.panels.display import WIDGET_VIEW_TYPE, Bundle, close_all, hide_behind_widget, widget_view
from workbench.panels.folded_table import FoldedTable
from workbench.panels.latest_executor import LatestExecutor
from workbench.panels.layer_picker import LayerPicker, make_pickable
from workbench.panels.notebook_cells import is_notebook, register_in_cell
from workbench.panels.panel import failure_html
from workbench.panels.selection import shared_selection
from workbench.panels.style import style_sheet
from workbench.pictures import encodable, page_bundle

_HINT = "Arrow keys choose a way to train; its program is shown below"


class FitBench:
    """Ways to train a model on a card, side by side: bytes, seconds, and whether each fits.

    ``workbench.Fit("llama-7b", card="RTX 4090", host="128GB", disk="2TB")`` as the last expression of a cell displays it, with
    controls for the machine and the batch. A click on a row, or an arrow key, selects a way, whose program can be copied.
    Every figure has its origin: measured, forecast or formula. A saved notebook keeps the table.

    Args:
        model: a folder with a config.json, that file, a configuration of transformers, a name such as "gpt2" or "llama-7b", or a
            module, which is measured on `batch`.
        batch: of a module.
        card: the name of a card, a `GpuCard`, an `EmulatedDevice`, or "emulated 2GB" for memory of this machine.
        host: memory of the host, as "128GB"; default: that of this machine.
        disk: free space as "2TB", a folder whose disk is measured, or a `Disk`; None for none.
        rows, length: rows of a batch, and tokens of a row.
        precision: "bf16" or "fp32". On an emulated device, and without formulas for the model, steps run in float32.
        update_params_per_s: parameters that the host updates.
        options: `layers=`, `loss=` and others, as for a `Relay` of a module.

    Raises:
        TypeError, ValueError: an argument that cannot be read; the message has the accepted values.

    Example:
        >>> from workbench import Fit
        >>> bench = Fit("gpt2", card="RTX 4090", host="64GB", length=512)  # at the end of a cell, `bench` shows it
        >>> bench.chosen.name, bench.table.fits(bench.chosen)
        ('in core', True)
        >>> bench.close()
    """

    def __init__(
        self,
        model: Any,
        batch: Any = None,
        *,
        card: str | GpuCard | EmulatedDevice = "RTX 4090 24GB",
        host: int | str | None = None,
        disk: str | Path | Disk | None = None,
        rows: int = 8,
        length: int = 1024,
        precision: str = "bf16",
        **options: Any,
    ) -> None:
        sizes = {"card": card, "host": host, "disk": disk, "rows": rows, "length": length, "precision": precision}
        self._request = make_request(model, batch, **sizes, **options)
        self._table: FitTable | None = None
        self._failure = ""
        self._selection = shared_selection(self)
        self._selection.observe(self._on_selection)
        self._executor = LatestExecutor("fit")
        self._controls = self._make_controls()
        self._html = make_pickable(ipywidgets.HTML())
        self._script = CopyScript(
            self._shown_code, "Copy", "Copy the program that starts the selected way", "Its program"
        )
        self._chosen = ipywidgets.HTML()
        controls = make_box(ipywidgets.HBox, "l2l-settings", *self._controls.values())
        controls.add_class("l2l-fit-controls")
        cards = FoldedTable("Cards and sources")
        cards.show(card_table)
        self.widget = ipywidgets.VBox(
            [
                style_sheet(),
                ipywidgets.HTML(f"<style>{STYLE}</style>", layout={"display": "none"}),
                controls,
                self._html,
                self._chosen,
                self._script,
                cards.widget,
                LayerPicker(self, hint=_HINT),
            ]
        )
        self._name = f"l2l-{self.widget.model_id[:12]}"
        for name in ("l2l-workbench", f"{self._name}-live"):
            self.widget.add_class(name)
        self._output: Any = None
        self._closed = False
        register_in_cell(self)
        self._calculate()

    # -- answers -------------------------------------------------------------------------------------------------------

    @property
    def table(self) -> FitTable:
        """The table for the present settings; waits until it is calculated.

        Raises:
            ValueError: the settings do not suit the model.
        """
        self._executor.wait()
        if self._table is None:
            raise ValueError(self._failure)
        return self._table

    @property
    def chosen(self) -> FitWay:
        """The selected way: at first the fastest that fits and trains all weights."""
        return self._chosen_of(self.table)

    def code(self, name: str | None = None) -> str:
        """Return the program that starts a way.

        Args:
            name: name of the way, such as "relay"; default: the selected one.

        Raises:
            ValueError: no way of this name.
        """
        way = self.chosen if name is None else next((way for way in self.table.ways if way.name == name), None)
        if way is None:
            raise ValueError(f"name={name!r}: choose one of {', '.join(repr(way.name) for way in self.table.ways)}")
        return self._code_of(way)

    def _shown_code(self) -> str:
        return "" if self._table is None else self._code_of(self._chosen_of(self._table))

    def _code_of(self, way: FitWay) -> str:
        return f"# {way.name} cannot start: {way.reason}\n" if way.reason else self._request.code(way)

    def close(self, wait: bool = True) -> None:
        """Remove the widget from the page and leave the still in the notebook. Does nothing the second time."""
        if not self._closed:
            self._closed = True
            close_all(self.widget)

    # -- controls ------------------------------------------------------------------------------------------------------

    def _make_controls(self) -> dict[str, Any]:
        request = self._request
        cards: list[tuple[str, GpuCard | EmulatedDevice]] = [(card.name, card) for card in CARDS.values()]
        if request.card not in CARDS.values():
            cards.insert(0, (request.card.name, request.card))
        controls: dict[str, Any] = {
            "card": make_dropdown("card", cards, "250px"),
            "host": _number("host memory, GB", request.host_bytes / 1e9, 1.0, 1e5, "190px"),
        }
        controls["card"].value = request.card
        if request.disk is not None and request.disk.disk.free_bytes is not None:
            controls["disk"] = _number("free disk, GB", request.disk.disk.free_bytes / 1e9, 1.0, 1e6, "180px")
        if request.source.module is None:
            controls["rows"] = _number("rows of a batch", request.rows, 1, 1 << 20, "180px")
            controls["length"] = _number("tokens of a row", request.length, 1, 1 << 20, "190px")
        if request.source.has_formula:
            controls["precision"] = make_dropdown("precision", PRECISIONS, "150px")
            controls["precision"].value = request.precision
        for control in controls.values():
            control.observe(lambda _: self._on_control(), "value")
        return controls

    def _on_control(self) -> None:
        values = {name: control.value for name, control in self._controls.items()}
        request, sizes = (
            self._request,
            {name: values[name] for name in ("card", "rows", "length", "precision") if name in values},
        )
        if "disk" in values and request.disk is not None:
            disk = replace(request.disk.disk, free_bytes=round(values["disk"] * 1e9))
            sizes["disk"] = replace(request.disk, disk=disk)
        self._request = replace(request, host_bytes=round(values["host"] * 1e9), **sizes)
        self._calculate()

    # -- drawing -------------------------------------------------------------------------------------------------------

    def _calculate(self) -> None:
        """Calculate the table on another thread, since measurements take seconds to minutes."""
        request = self._request
        self._html.add_class("l2l-fit-old")
        if not self._html.value:
            words = "measuring steps on this machine" if request.is_measured else "calculating"
            self._html.value = f'<div class="l2l-caption" role="status">{words}</div>'
        self._executor.submit(lambda: self._answer(request))

    def _answer(self, request: FitRequest) -> None:
        try:
            self._table, self._failure = request.table(), ""
        except ValueError as error:  # settings that do not suit the model
            self._table, self._failure = None, str(error)
        except Exception as error:
            self._table, self._failure = None, f"{type(error).__name__}: {error}"
            self._html.value = failure_html(self._failure, traceback.format_exc())
            return
        if request is self._request and not self._closed:
            self._draw()

    def _on_selection(self) -> None:
        if self._table is not None:
            self._draw()

    def _draw(self) -> None:
        self._html.remove_class("l2l-fit-old")
        table = self._table
        self._script.layout.display = "none" if table is None else ""
        if table is None:
            self._html.value = f'<div class="l2l-failure" role="alert">{escape(self._failure)}</div>'
            self._chosen.value = ""
        else:
            way = self._chosen_of(table)
            self._html.value = fit_html(table, way.name)
            self._chosen.value = f"<div>To start <strong>{escape(way.name)}</strong>:</div>"
            self._script.update()
        if self._output is not None:
            self._output.update(self._still_bundle(), raw=True)

    def _chosen_of(self, table: FitTable) -> FitWay:
        by_key = {way_key(way.name): way for way in table.ways}
        return by_key.get(self._selection.key or "", table.best or table.ways[0])

    # -- on the page ---------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return str(self.table)

    def still(self) -> Bundle:
        """Return the table and the program of the selected way for a page without a kernel."""
        if self._table is None:
            words = self._failure or "not calculated yet: run this cell again"
            return {"text/html": f"<p>{escape(words)}</p>", "text/plain": words}
        way = self._chosen_of(self._table)
        code = f'<div>To start {escape(way.name)}:</div><pre class="l2l-fit-code">{escape(self._code_of(way))}</pre>'
        html = f"<style>{page_bundle.STYLE}{STYLE}</style>{fit_html(self._table, way.name)}{code}"
        return {"text/html": html, "text/plain": str(self._table)}

    def _still_bundle(self) -> Bundle:
        return hide_behind_widget(self._name, self.still())

    def _ipython_display_(self) -> None:
        if not is_notebook():
            print(encodable(str(self.table), sys.stdout.encoding or "utf-8"))
            return
        if not self._closed:
            display({WIDGET_VIEW_TYPE: widget_view(self.widget)}, raw=True)
        same = self._output.display_id if self._output is not None else True  # one update for all copies
        self._output = display(self._still_bundle(), raw=True, display_id=same)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        self._executor.wait()
        still = self._still_bundle()
        return still if self._closed else {WIDGET_VIEW_TYPE: widget_view(self.widget), **still}


def _number(label: str, value: float, low: float, high: float, width: str) -> Any:
    """Return a field for a number with its name and unit, which a screen reader reads as its label."""
    kind = ipywidgets.BoundedIntText if isinstance(low, int) else ipywidgets.BoundedFloatText
    return kind(
        value=round(value), min=low, max=high, description=label, continuous_update=False, **control_layout(width)
    )


Fit = FitBench  # the name in notebooks; `l2l_core.Fit` is the result of `relay.fit`
