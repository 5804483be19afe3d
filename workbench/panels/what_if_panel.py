"""What-if view: a simulated step with other settings beside the last measured step."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from html import escape
from typing import Any

import ipywidgets

from l2l_core import EmulatedDevice, Forecast, Profile, Trace
from l2l_core.forecast import WhatFits
from workbench.panels.controls import make_box, make_button, make_row
from workbench.panels.depth_suggestions import DepthSuggestions
from workbench.panels.display import WIDGET_VIEW_TYPE, Bundle, widget_view
from workbench.panels.fit_controls import FitButton, FitSuggestion
from workbench.panels.latest_executor import LatestExecutor
from workbench.panels.panel import Panel, failure_html
from workbench.panels.style import style_sheet
from workbench.panels.what_if_view import WhatIfView
from workbench.pictures import Picture, Table, bundle_of
from workbench.session import Session, Snapshot
from workbench.what_if import (
    CONFIG_FIELDS,
    Answer,
    AssumedCosts,
    ComparedAnswer,
    DepthFirstStep,
    ForecastRecord,
    MeasuredStep,
    Question,
    StepCache,
    answer_question,
    assumed_answer,
    compare_with_step,
    describe_forecast,
    find_fitting_settings,
    forecast_error,
)

MIN_INTERVAL_S = 1.0  # between two automatic forecasts during a run
TIME_SHARE = 0.1  # of processor time, for automatic forecasts
MAX_SEARCH_S = 0.5  # for a search for settings that fit


class WhatIf:
    """A what-if without a session, for lessons and for traces and profiles from files.

    Args:
        step: trace of a completed training step, or a profile.
        settings: initial settings, fields of a `Question` such as ``stash="host"``.

    Raises:
        TypeError: `step` is neither a trace nor a profile, or a setting does not exist.
        ValueError: the trace is not that of a training step, or a setting is out of range.
    """

    def __init__(self, step: Trace | Profile, **settings: Any) -> None:
        self._base = MeasuredStep.of(step)
        self._view = WhatIfView(Question.of(self._base), self._answer)
        self._view.controls.set_values(**settings)
        self.widget = make_box(ipywidgets.VBox, "l2l-workbench", style_sheet(), self._view.row, self._view.widget)

    @property
    def answer(self) -> Answer:
        """Answer to the current question."""
        return self._answer(self._view.controls.question()).now

    def _answer(self, question: Question) -> ComparedAnswer:
        return compare_with_step(self._base, question)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        self._view.refresh()
        return {WIDGET_VIEW_TYPE: widget_view(self.widget), **bundle_of([self._view.still()])}


class WhatIfPanel(Panel):
    """Forecast of the next step with the error of the last forecast, and a simulation with other settings.

    Apply sets the settings that can change between two steps; separate buttons apply edits that change the number of
    layers.
    """

    session: Session

    def build(self) -> ipywidgets.DOMWidget:
        self._snapshot = self.session.snapshot()
        self._step_cache = StepCache()
        self._step_cache.add(self._snapshot)
        self._next_s = self._cost_s = 0.0
        self._last_inputs: object = None
        self._branch = self._snapshot.branch  # of the forecast
        self._forecast: tuple[Answer, str, int] | None = None  # with its branch and step
        self._forecast_error, self._record = "", ForecastRecord()
        self._line = ipywidgets.HTML()
        tip = "Forecast the first step by a rehearsal, which trains nothing"
        self._rehearse = make_button("Rehearse", "clock-o", tip)
        self._rehearse.on_click(lambda _: self._press_rehearse())
        self._rehearsed: tuple[MeasuredStep, str] | None = None  # with its branch
        self._view: WhatIfView | None = None  # created when it is first drawn
        self._view_box, self._fit_suggestion = ipywidgets.VBox(), FitSuggestion(self.session)
        self._executor = LatestExecutor("what-if")
        fit = FitButton(self.session)
        self._row = make_row(self._rehearse, fit.button)
        return ipywidgets.VBox([self._line, self._fit_suggestion.widget, self._row, fit.proposal, self._view_box])

    def _ensure_view(self) -> WhatIfView:
        """Return the controls, built when the panel is first drawn: a hidden one needs none."""
        if self._view is None:
            self._view = self._build_view()
            self._view_box.children = (self._view.widget,)
            self._row.children = (*self._row.children, self._view.row)
        return self._view

    def _build_view(self) -> WhatIfView:
        apply = make_button("Apply", "check", "Use these settings for the next step", button_style="primary")
        apply.on_click(lambda _: self._apply())
        self._depth_suggestions = DepthSuggestions(self.session)
        base, below = Question.next_of(self._snapshot), [self._depth_suggestions.widget]
        return WhatIfView(base, self._answer, apply, below=below, on_change=self._suggest_depth_edits)

    def draw(self, snapshot: Snapshot) -> None:
        self._step_cache.add(snapshot)
        self._snapshot = snapshot
        self._rehearse.layout.display = "none" if snapshot.last is not None else ""
        following = Question.next_of(snapshot)
        inputs = snapshot.branch, snapshot.shown, following, snapshot.config.schedule
        if inputs == self._last_inputs:
            return
        if snapshot.state == "running" and snapshot.branch == self._branch and time.monotonic() < self._next_s:
            return  # a later call forecasts from the newest step
        if snapshot.branch != self._branch:
            self._branch, self._forecast_error, self._forecast = snapshot.branch, "", None
            self._record.clear()
        self._last_inputs = inputs
        self._next_s = time.monotonic() + max(MIN_INTERVAL_S, self._cost_s / TIME_SHARE)
        self._ensure_view().controls.set_base(following)
        self._suggest_depth_edits()
        self._executor.submit(self._update)

    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        self._step_cache.add(snapshot)
        self._snapshot = snapshot
        return [self._view.still()] if self._view is not None else []

    def caption(self, snapshot: Snapshot) -> str:
        return f"measured: {snapshot.shown_words}"

    def wait_until_idle(self, timeout_s: float = 10.0) -> bool:
        """Wait until every question is answered; return False after `timeout_s` seconds."""
        return self._executor.wait(timeout_s) and (self._view is None or self._view.executor.wait(timeout_s))

    def _suggest_depth_edits(self) -> None:
        """Suggest edits that lead to the depth of the layers slider."""
        assert self._view is not None
        self._depth_suggestions.update(self._snapshot.layers, self._view.controls.question().depth)

    def _answer(self, question: Question) -> ComparedAnswer:
        """Answer from the measured step nearest to the question, beside the simulation of the last step."""
        nearest = self._step_cache.nearest(question)
        if nearest is not None and (last := self._step_cache.last_step()) is not None:
            margin = self._record.margin(last.simulated, last.measured)
            return ComparedAnswer(answer_question(nearest, question), last.simulated, last.measured, margin)
        if self._rehearsed is not None and self._rehearsed[1] == self._snapshot.branch:
            return ComparedAnswer(answer_question(self._rehearsed[0], question))
        return ComparedAnswer(assumed_answer(AssumedCosts.of(self._snapshot), question))

    def _update(self) -> None:
        """Update the forecast, then answer the question of the controls: its ± includes the newest error."""
        self._update_forecast()
        if self._view is not None:
            self._view.refresh()

    def _update_forecast(self) -> None:
        """Forecast the next step and compare the last forecast with the measured step."""
        began_s = time.thread_time()
        try:
            now = self._snapshot  # read once: `draw` may replace it
            if now.config.schedule == "depth_first":
                raise DepthFirstStep("The next step")
            self._compare_forecast(now)
            found = self._answer(Question.next_of(now))
            forecast, margin = found.now, found.margin
            self._forecast = forecast, now.branch, now.step
            words = f"<strong>next step, forecast</strong> {escape(describe_forecast(forecast, margin))}"
            notes = [self._forecast_error or forecast.basis, *([margin.explanation] if margin is not None else [])]
            note = f"<br>{escape('. '.join(notes))}"
            self._line.value = f'<div class="l2l-forecast">{words}<span class="l2l-caption">{note}</span></div>'
            self._fit_suggestion.show(self._find_fit(forecast))
        except DepthFirstStep as reason:
            self._forecast, self._forecast_error = None, ""
            note = f'<span class="l2l-caption">{escape(str(reason))}.</span>'
            self._line.value = f'<div class="l2l-forecast">{note}</div>'
            self._fit_suggestion.show(None)
        except Exception as error:
            self._line.value = failure_html(f"The next step cannot be forecast: {error}", traceback.format_exc())
        self._cost_s = time.thread_time() - began_s

    def _compare_forecast(self, now: Snapshot) -> None:
        """Record the error of the last forecast if its step was measured since, on the same branch."""
        if self._forecast is None or not self._forecast[1:] < (now.branch, now.step):
            return  # `draw` drops forecasts of other branches
        if (last := self._step_cache.last_step()) is not None:
            forecast, self._forecast = self._forecast[0], None
            self._record.add(forecast, last.measured)
            self._forecast_error = forecast_error(forecast, last.measured) or self._forecast_error

    def _find_fit(self, forecast: Answer) -> WhatFits | None:
        """Find settings that fit if the next step would not; None if it fits or its costs are a guess."""
        if forecast.fits or forecast.guessed:
            return None
        return find_fitting_settings(lambda question: self._answer(question).now, forecast.question, MAX_SEARCH_S)

    def _press_rehearse(self) -> None:
        self._rehearse.disabled = True
        try:
            self.session.forecast().add_done_callback(self._on_rehearsal)
        except Exception as error:
            self._show_rehearsal_error(error)

    def _on_rehearsal(self, future: Future[Forecast]) -> None:
        """Answer from the costs of the rehearsal; called on the session's thread."""
        self._rehearse.disabled = False
        try:
            self._rehearsed = MeasuredStep(Profile.of(future.result().trace), name="a rehearsal"), self._snapshot.branch
        except Exception as error:
            self._show_rehearsal_error(error)
            return
        self._executor.submit(self._update)

    def _show_rehearsal_error(self, error: Exception) -> None:
        reason = "it was removed from the queue" if isinstance(error, CancelledError) else error
        self._line.value = failure_html(f"There is no rehearsal: {reason}", traceback.format_exc())
        self._rehearse.disabled = False

    def _apply(self) -> None:
        assert self._view is not None
        question, base = self._view.controls.question(), Question.next_of(self.session.snapshot())
        emulated = isinstance(self.session.relay.device, EmulatedDevice)
        names = (*CONFIG_FIELDS, *_LINK_FIELDS) if emulated else CONFIG_FIELDS
        settings = {name: getattr(question, name) for name in names if getattr(question, name) != getattr(base, name)}
        try:
            if settings:
                self.session.reconfigure(**settings)
            words = ["set for the next step" if settings else "no setting of the next step changes"]
            words += _manual_steps(question, base, emulated)
            self._view.note.value = f'<span class="l2l-caption">{escape("; ".join(words))}</span>'
        except Exception as error:
            self._view.note.value = failure_html(str(error), traceback.format_exc())


def _manual_steps(question: Question, base: Question, emulated: bool) -> list[str]:
    """Return instructions for changes that are no settings of a session."""
    words = [how for name, how in _MANUAL_TEXT.items() if getattr(question, name) != getattr(base, name)]
    if not emulated and any(getattr(question, name) != getattr(base, name) for name in _LINK_FIELDS):
        words.append("link: only the speed of an emulated link can be set")
    if question.micro_batches != base.micro_batches and not question.same_batch:
        words.append("a larger batch: pass batches with more rows")
    return words


_LINK_FIELDS = ("h2d_bytes_per_s", "d2h_bytes_per_s")
_MANUAL_TEXT = {
    "depth": "layers: use an edit below",
    "width": "width: use another model",
    "memory_bytes": "device memory: use another device, such as EmulatedDevice(memory_bytes=...)",
}
