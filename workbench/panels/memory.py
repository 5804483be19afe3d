"""What fills the device and the host during a step."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets

from workbench.panels.fold import Fold
from workbench.panels.panel import Panel
from workbench.pictures import Picture, draw_memory, memory_table, show_memory, sweep_of
from workbench.session import Snapshot


class MemoryPanel(Panel):
    """Bytes by category over the step, the device's budget, and what in-core training would need."""

    def build(self) -> ipywidgets.DOMWidget:
        self._span_s = 0.0
        self._tabled = -1
        self._picture, self._fold = ipywidgets.HTML(), Fold("The last step's peaks as a table")
        return ipywidgets.VBox([self._picture, self._fold.widget])

    def draw(self, now: Snapshot) -> None:
        sweep = sweep_of(now, self._span_s)
        if sweep is None:
            self._picture.value = '<p class="l2l-empty">Memory over time appears with the first step.</p>'
            return
        self._span_s = sweep.span_s
        self._picture.value = draw_memory(
            **sweep._asdict(), budget_bytes=now.budget_bytes, in_core_bytes=now.in_core_bytes
        )
        if (last := now.last) is not None and self._tabled != last.step:
            self._tabled = last.step
            self._fold.show(lambda: memory_table(last, now.in_core_bytes))

    def still(self, now: Snapshot) -> Sequence[Picture]:
        return [show_memory(now.last, now.in_core_bytes)] if now.last is not None else []
