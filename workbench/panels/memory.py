"""What fills the device and the host during a step."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets

from l2l_core import Trace
from workbench.panels.fold import Fold
from workbench.panels.panel import Panel
from workbench.panels.touch import touched
from workbench.pictures import (
    Picture,
    Sweep,
    draw_memory,
    failed_trace,
    memory_table,
    show_memory,
    sweep_of,
    sweep_of_failed,
    words_of_sweep,
)
from workbench.session import Snapshot


class MemoryPanel(Panel):
    """Shows bytes by category over the step, the device's budget, and what in-core training would need.

    A step that the device had no room for is shown up to where it failed, until something runs again.
    """

    def build(self) -> ipywidgets.DOMWidget:
        self._span_s = 0.0
        self._tabled: Trace | None = None
        self._sweep: Sweep | None = None
        self._picture, self._fold = touched(ipywidgets.HTML()), Fold("The last step's peaks as a table")
        return ipywidgets.VBox([self._picture, self._fold.widget])

    def draw(self, now: Snapshot) -> None:
        failed = failed_trace(now)
        self._sweep = sweep = sweep_of_failed(now, self._span_s) or sweep_of(now, self._span_s)
        if sweep is None:
            self._picture.value = '<p class="l2l-empty">Memory over time appears with the first step.</p>'
            return
        self._span_s = sweep.span_s
        self._picture.value = draw_memory(
            **sweep._asdict(),
            budget_bytes=now.budget_bytes,
            in_core_bytes=now.in_core_bytes,
            failed=failed.failed if failed is not None else None,
        )
        shown = failed or now.last
        if shown is not None and self._tabled is not shown:
            self._tabled = shown
            needed = now.in_core_bytes
            self._fold.show(lambda: memory_table(shown, needed))

    def still(self, now: Snapshot) -> Sequence[Picture]:
        trace = failed_trace(now) or now.last
        return [show_memory(trace, now.in_core_bytes)] if trace is not None else []

    def whose(self, now: Snapshot) -> str:
        return words_of_sweep(now, self._sweep)

    def _whose_still(self, now: Snapshot) -> str:
        return now.failed_words if failed_trace(now) is not None else now.shown_words
