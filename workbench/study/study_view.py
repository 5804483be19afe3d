"""Live view of a study in a notebook: progress, curves over a chosen axis, and the comparison.

A thread reads the folder and draws it anew when it has changed, so the view follows a study in any process.
"""

from __future__ import annotations

import sys
import threading
import time
from html import escape
from typing import Any

import ipywidgets
from IPython.display import display

from workbench.panels.controls import make_button, make_dropdown, make_row
from workbench.panels.display import WIDGET_VIEW_TYPE, Bundle, close_all, hide_behind_widget, widget_view
from workbench.panels.notebook_cells import is_notebook, register_in_cell
from workbench.panels.panel import failure_html
from workbench.panels.style import style_sheet
from workbench.pictures import bundle_of, encodable
from workbench.pictures.theme import SKY
from workbench.study.study_figure import AXES
from workbench.study.study_picture import draw_study, plain_table, show_study
from workbench.study.study_records import StudyRecords
from workbench.study.study_table import compare_variants

WAIT_S = 1.0  # at least, between two drawings
CPU_SHARE = 0.03  # of a core


class StudyView:
    """Widget of one study, and its thread.

    Invariant: `_drawing` is held while widgets are set.

    Args:
        study: the study; buttons are shown if it can run.
    """

    def __init__(self, study: StudyRecords) -> None:
        self._study, self._drawing, self._closed = study, threading.RLock(), threading.Event()
        self._axis = make_dropdown("Horizontal axis", [(words, name) for name, words in AXES.items()], "270px")
        self._axis.value = "flop"
        self._axis.observe(lambda _: self._draw(), "value")
        self._state, self._picture, self._table = (ipywidgets.HTML() for _ in range(3))
        self._run_button = make_button("Run", "play", "Train what is left of the study")
        self._cancel_button = make_button("Cancel", "ban", "Stop after the current step; Run resumes there")
        self._run_button.on_click(lambda _: self._run())
        runnable: Any = study
        self._cancel_button.on_click(lambda _: runnable.stop())
        buttons = [self._run_button, self._cancel_button] if hasattr(study, "run") else []
        parts = [style_sheet(), make_row(*buttons, self._axis), self._state, self._picture, self._table]
        self.widget = ipywidgets.VBox(parts)
        self._name = f"l2l-{self.widget.model_id[:12]}"
        for name in ("l2l-workbench", f"{self._name}-live"):
            self.widget.add_class(name)
        self._output: Any = None
        self._drawn: object = None
        self._failure = ""

    def open(self) -> None:
        """Display the view below the running cell; outside of a notebook, print the comparison."""
        if not is_notebook():
            print(encodable(self._still()["text/plain"], sys.stdout.encoding or "utf-8"))
            return
        register_in_cell(self)
        self._draw()
        display({WIDGET_VIEW_TYPE: widget_view(self.widget)}, raw=True)
        self._output = display(hide_behind_widget(self._name, self._still()), raw=True, display_id=True)
        threading.Thread(target=self._follow, name="study view", daemon=True).start()

    def close(self, wait: bool = True) -> None:
        """Remove the widget, and leave the still picture."""
        if not self._closed.is_set():
            self._closed.set()
            with self._drawing:
                close_all(self.widget)

    # -- on the view's thread ------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        pause = WAIT_S
        while not self._closed.wait(pause):
            began_s = time.thread_time()
            if self._read_state() != self._drawn:
                self._draw()
                if self._output is not None and not self._study.is_running:
                    self._output.update(hide_behind_widget(self._name, self._still()), raw=True)
            cost_s = time.thread_time() - began_s
            pause = max(WAIT_S, cost_s / CPU_SHARE)

    def _read_state(self) -> object:
        """Return a value that changes with the folder and the progress."""
        paths = [path for folder in self._study.folders for path in folder.glob("segments/*/rows.jsonl")]
        sizes = {path: path.stat().st_size for path in paths}
        return sizes, self._study.progress_line, self._study.is_running, self._failure

    def _draw(self) -> None:
        with self._drawing:
            if self._closed.is_set():
                return
            self._drawn = self._read_state()
            running, line = self._study.is_running, self._study.progress_line
            self._state.value = self._failure or _progress_html(
                line or self._study.finished_runs(), self._study.share_done()
            )
            self._run_button.disabled, self._cancel_button.disabled = running, not running
            self._picture.value = draw_study(self._study, self._axis.value)
            self._table.value = plain_table(compare_variants(self._study)).to_html(folded=False)

    def _still(self) -> Bundle:
        return bundle_of([show_study(self._study, self._axis.value)])

    # -- buttons -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._run_button.disabled, self._failure = True, ""
        threading.Thread(target=self._run_study, name="study", daemon=True).start()

    def _run_study(self) -> None:
        study: Any = self._study
        try:
            study.run(report=None)
        except Exception as error:
            notes = "; ".join(getattr(error, "__notes__", []))
            self._failure = failure_html(f"{type(error).__name__}: {error}", notes)


def _progress_html(line: str, share: float) -> str:
    """Return a bar of the trained share, and a line that screen readers read when it changes."""
    percent = round(100 * share)
    bar = (
        f'<div class="l2l-run" role="progressbar" aria-label="trained share of the study" aria-valuenow="{percent}" '
        f'aria-valuetext="{percent} percent"><div style="width:{percent}%;background:{SKY}"></div></div>'
    )
    return f'<div class="l2l-progress" style="white-space:normal">{bar}<span role="status">{escape(line)}</span></div>'
