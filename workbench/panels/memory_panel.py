"""Memory of the device and the host over a step."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets

from l2l_core import Trace
from workbench.panels.folded_table import FoldedTable
from workbench.panels.layer_picker import make_pickable
from workbench.panels.panel import Panel
from workbench.pictures import (
    Picture,
    Sweep,
    describe_sweep,
    draw_memory,
    failed_trace,
    make_failed_sweep,
    make_sweep,
    memory_table,
    show_memory,
)
from workbench.session import Snapshot


class MemoryPanel(Panel):
    """Bytes by category over the step, the device's budget, and the bytes that in-core training would need.

    A step that ran out of device memory is shown up to its failure until the next step starts.
    """

    def build(self) -> ipywidgets.DOMWidget:
        self._span_s = 0.0
        self._table_trace: Trace | None = None
        self._sweep: Sweep | None = None
        self._picture, self._fold = make_pickable(ipywidgets.HTML()), FoldedTable("The last step's peaks as a table")
        return ipywidgets.VBox([self._picture, self._fold.widget])

    def draw(self, snapshot: Snapshot) -> None:
        failed = failed_trace(snapshot)
        self._sweep = sweep = make_failed_sweep(snapshot, self._span_s) or make_sweep(snapshot, self._span_s)
        if sweep is None:
            self._picture.value = '<p class="l2l-empty">Memory over time appears with the first step.</p>'
            return
        self._span_s = sweep.span_s
        self._picture.value = draw_memory(
            **sweep._asdict(),
            budget_bytes=snapshot.budget_bytes,
            in_core_bytes=snapshot.in_core_bytes,
            failed=failed.failed if failed is not None else None,
        )
        shown = failed or snapshot.last
        if shown is not None and self._table_trace is not shown:
            self._table_trace = shown
            self._fold.show(lambda: memory_table(shown, snapshot.in_core_bytes))

    def still(self, snapshot: Snapshot) -> Sequence[Picture]:
        trace = failed_trace(snapshot) or snapshot.last
        return [show_memory(trace, snapshot.in_core_bytes)] if trace is not None else []

    def caption(self, snapshot: Snapshot) -> str:
        return describe_sweep(snapshot, self._sweep)

    def _still_caption(self, snapshot: Snapshot) -> str:
        return snapshot.failed_words if failed_trace(snapshot) is not None else snapshot.shown_words
