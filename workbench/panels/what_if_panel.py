"""What if: sliders for settings that need not have run, and the step that they would give beside the last measured one."""

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
from workbench.panels.depth_suggestions import DepthSuggestions
from workbench.panels.display import WIDGET_VIEW_TYPE, Bundle
from workbench.panels.fit_controls import FitButton
from workbench.panels.fit_offer import FitSuggestion
from workbench.panels.latest_executor import LatestExecutor
from workbench.panels.panel import Panel, failure_html
from workbench.panels.style import STYLE
from workbench.panels.what_if_view import WhatIfView, make_box
from workbench.pictures import Picture, Table, bundle_of
from workbench.session import Snapshot
from workbench.what_if import (
    CONFIG_FIELDS,
    Answer,
    AssumedCosts,
    DepthFirstStep,
    MeasuredStep,
    Question,
    StepCache,
    answer_question,
    assumed_answer,
    find_fitting_settings,
    forecast_error,
    measured_answer,
)

MIN_INTERVAL_S = 1.0  # between two answers that nobody asked for, while steps come fast
TIME_SHARE = 0.1  # of the time, for those
MAX_SEARCH_S = 0.5  # for settings that fit, where the next step would not


class WhatIf:
    """Answers "what if" without a session: for lessons, and for traces and profiles from files.

    Args:
        step: the trace of a finished training step, or a profile.
        settings: of a `Question`, to begin with, as ``stash="host"``.

    Raises:
        TypeError, ValueError: no step, or settings out of range.
    """

    def __init__(self, step: Trace | Profile, **settings: Any) -> None:
        self._base = MeasuredStep.of(step)
        self._measured_answer = measured_answer(self._base) if self._base.trace is not None else None
        self._view = WhatIfView(Question.of(self._base), self._answer)
        self._view.controls.set_values(**settings)
        style = ipywidgets.HTML(f"<style>{STYLE}</style>", layout={"display": "none"})
        self.widget = make_box(ipywidgets.VBox, "l2l-workbench", style, self._view.row, self._view.widget)

    @property
    def answer(self) -> Answer:
        """The answer to what the controls ask now."""
        return self._answer(self._view.controls.question())[1]

    def _answer(self, question: Question) -> tuple[Answer | None, Answer]:
        return self._measured_answer, answer_question(self._base, question)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        self._view.refresh()
        return {WIDGET_VIEW_TYPE: self.widget._repr_mimebundle_()[WIDGET_VIEW_TYPE], **bundle_of([self._view.still()])}


class WhatIfPanel(Panel):
    """Shows the forecast of the next step, what became of it, and, unfolded, what other settings would give.

    Apply hands those settings to the next step that can be set between two steps; another number of layers is an edit, which
    has a button of its own. Alone the panel begins unfolded.
    """

    def build(self) -> ipywidgets.DOMWidget:
        self._snapshot = self.session.snapshot()
        self._step_cache = StepCache()
        self._step_cache.add(self._snapshot)
        self._next_s = self._cost_s = 0.0
        self._last_inputs: object = None
        self._branch = self._snapshot.branch  # of what is foreseen
        self._forecast: tuple[Answer, str, int] | None = None  # and the branch, and its steps at that time
        self._line_html = self._forecast_error = ""
        self._line = ipywidgets.HTML()
        self._toggle = ipywidgets.ToggleButton(
            layout={"width": "auto"}, tooltip="Sliders for the settings of a simulated step; nothing runs"
        )
        self._rehearse = ipywidgets.Button(
            description="Rehearse",
            icon="clock-o",
            tooltip="Forecast the first step by a rehearsal, which trains nothing",
            layout={"width": "auto"},
        )
        self._rehearse.on_click(lambda _: self._press_rehearse())
        self._rehearsed: tuple[MeasuredStep, str] | None = None  # and on which branch
        self._view: WhatIfView | None = None  # made when it is first wanted
        self._view_box, self._fit_suggestion = ipywidgets.VBox(), FitSuggestion(self.session)
        self._executor = LatestExecutor("what-if")
        fit = FitButton(self.session)
        self._row = make_box(ipywidgets.HBox, "l2l-buttons", self._toggle, self._rehearse, fit.button)
        self._toggle.observe(lambda _: self._on_toggle(), "value")
        self._on_toggle()
        self._toggle.add_class("l2l-opens")
        return ipywidgets.VBox([self._line, self._fit_suggestion.widget, self._row, fit.text, self._view_box])

    def _build_view(self) -> WhatIfView:
        apply = ipywidgets.Button(
            description="Apply",
            icon="check",
            button_style="primary",
            tooltip="Use these settings for the next step",
            layout={"width": "auto"},
        )
        apply.on_click(lambda _: self._apply())
        self._depth_suggestions = DepthSuggestions(self.session)
        below = [self._depth_suggestions.widget]
        return WhatIfView(
            Question.next_of(self._snapshot), self._answer, apply, below=below, on_change=self._suggest_depth_edits
        )

    def draw(self, snapshot: Snapshot) -> None:
        self._step_cache.add(snapshot)
        # `fail` writes into the line, so it is set to what was said last
        self._snapshot, self._line.value = snapshot, self._line_html
        self._rehearse.layout.display = "none" if snapshot.last is not None else ""
        following = Question.next_of(snapshot)
        told = snapshot.branch, snapshot.shown, following, snapshot.config.schedule
        if told == self._last_inputs:
            return
        if snapshot.state == "running" and snapshot.branch == self._branch and time.monotonic() < self._next_s:
            return  # the newest step is looked at when it is due, or when the run is over
        if snapshot.branch != self._branch:
            self._branch, self._forecast_error, self._forecast = snapshot.branch, "", None
        self._last_inputs = told
        self._next_s = time.monotonic() + max(MIN_INTERVAL_S, self._cost_s / TIME_SHARE)
        self._executor.submit(self._update_forecast)
        if self._view is not None:
            self._view.controls.set_base(following)
            self._suggest_depth_edits()
            if self._toggle.value:
                self._view.refresh()

    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        self._step_cache.add(snapshot)
        self._snapshot = snapshot
        return [self._view.still()] if self._view is not None and self._toggle.value else []

    def caption(self, snapshot: Snapshot) -> str:
        return f"measured: {snapshot.shown_words}"

    def wait_until_idle(self, timeout_s: float = 10.0) -> bool:
        """Wait until what was asked is answered."""
        return self._executor.wait(timeout_s) and (self._view is None or self._view.executor.wait(timeout_s))

    def _standalone_display(self) -> Any:
        if self._display is None:
            self._toggle.value = True
        return super()._standalone_display()

    def _on_toggle(self) -> None:
        is_open = self._toggle.value
        self._toggle.description = f"{'▾' if is_open else '▸'} What if"
        if is_open and self._view is None:
            self._view = self._build_view()
            self._view_box.children = (self._view.widget,)
            self._row.children = (*self._row.children, self._view.row)
        for part in (self._view_box, self._view.row) if self._view is not None else (self._view_box,):
            part.layout.display = "" if is_open else "none"
        if is_open:
            assert self._view is not None
            self._view.refresh()

    def _suggest_depth_edits(self) -> None:
        """The edit that the layers slider means, of the layers that there are."""
        assert self._view is not None
        self._depth_suggestions.update(self._snapshot.layers, self._view.controls.question().depth)

    def _answer(self, question: Question) -> tuple[Answer | None, Answer]:
        """From the measured step that is nearest to the question, beside the last one."""
        if (nearest := self._step_cache.nearest(question)) is not None:
            return self._step_cache.last_answer(), answer_question(nearest, question)
        if self._rehearsed is not None and self._rehearsed[1] == self._snapshot.branch:
            return None, answer_question(self._rehearsed[0], question)
        return None, assumed_answer(AssumedCosts.of(self._snapshot), question)

    def _update_forecast(self) -> None:
        """One line: what the next step will need, and how far off that was the last time."""
        began_s = time.thread_time()
        try:
            now = self._snapshot  # once: `draw` replaces it while this thread works
            if now.config.schedule == "depth_first":
                raise DepthFirstStep("The next step")
            last, foreseen = self._answer(Question.next_of(now))
            # of the same branch, since `draw` forgets what was foreseen on another one; and at least one step later
            if last is not None and self._forecast is not None and self._forecast[1:] < (now.branch, now.step):
                self._forecast_error = forecast_error(self._forecast[0], last) or self._forecast_error
            self._forecast = foreseen, now.branch, now.step
            words = f"<strong>next step, forecast</strong> {escape(str(foreseen))}"
            said = f"<br>{escape(self._forecast_error or foreseen.basis)}"
            self._line_html = f'<div class="l2l-forecast">{words}<span class="l2l-caption">{said}</span></div>'
            self._fit_suggestion.show(self._find_fit(foreseen))
        except DepthFirstStep as why_not:
            self._forecast, self._forecast_error = None, ""
            self._line_html = (
                f'<div class="l2l-forecast"><span class="l2l-caption">{escape(str(why_not))}.</span></div>'
            )
            self._fit_suggestion.show(None)
        except Exception as error:
            self._line_html = failure_html(f"The next step cannot be forecast: {error}", traceback.format_exc())
        self._line.value, self._cost_s = self._line_html, time.thread_time() - began_s

    def _find_fit(self, foreseen: Answer) -> WhatFits | None:
        """Find what helps if the next step would not fit; not on a guess."""
        if foreseen.fits or foreseen.guessed:
            return None
        return find_fitting_settings(lambda asked: self._answer(asked)[1], foreseen.question, MAX_SEARCH_S)

    def _press_rehearse(self) -> None:
        self._rehearse.disabled = True
        try:
            self.session.forecast().add_done_callback(self._on_rehearsal)
        except Exception as error:
            self._show_rehearsal_error(error)

    def _on_rehearsal(self, future: Future[Forecast]) -> None:
        """The rehearsal is over: what is asked now rests on it. On the session's thread."""
        self._rehearse.disabled = False
        try:
            self._rehearsed = MeasuredStep(Profile.of(future.result().trace), name="a rehearsal"), self._snapshot.branch
        except Exception as error:
            self._show_rehearsal_error(error)
            return
        self._executor.submit(self._update_forecast)
        if self._view is not None:
            self._view.refresh()

    def _show_rehearsal_error(self, error: Exception) -> None:
        why = "it was taken out of the queue" if isinstance(error, CancelledError) else error
        self._line_html = failure_html(f"There is no rehearsal: {why}", traceback.format_exc())
        self._line.value, self._rehearse.disabled = self._line_html, False

    def _apply(self) -> None:
        assert self._view is not None
        asked, base = self._view.controls.question(), Question.next_of(self.session.snapshot())
        emulated = isinstance(self.session.relay.device, EmulatedDevice)
        names = (*CONFIG_FIELDS, *_LINK_FIELDS) if emulated else CONFIG_FIELDS
        settings = {name: getattr(asked, name) for name in names if getattr(asked, name) != getattr(base, name)}
        try:
            if settings:
                self.session.reconfigure(**settings)
            words = ["handed to the next step" if settings else "nothing to hand to the next step"]
            words += _manual_steps(asked, base, emulated)
            self._view.note.value = f'<span class="l2l-caption">{escape("; ".join(words))}</span>'
        except Exception as error:
            self._view.note.value = failure_html(str(error), traceback.format_exc())


def _manual_steps(asked: Question, base: Question, emulated: bool) -> list[str]:
    """How to get what no setting of a session gives."""
    words = [how for name, how in _MANUAL_TEXT.items() if getattr(asked, name) != getattr(base, name)]
    if not emulated and any(getattr(asked, name) != getattr(base, name) for name in _LINK_FIELDS):
        words.append("the link is real: only an emulated one can be set")
    if asked.micro_batches != base.micro_batches and not asked.same_batch:
        words.append("the batch does not grow by itself: let your batches have more rows")
    return words


_LINK_FIELDS = ("h2d_bytes_per_s", "d2h_bytes_per_s")
_MANUAL_TEXT = {
    "depth": "layers: an edit, offered below",
    "width": "width: with another model",
    "memory_bytes": "device memory: with another device, as EmulatedDevice(memory_bytes=...)",
}
