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
from workbench.panels.display import WIDGET, Bundle
from workbench.panels.fit_button import FitButton
from workbench.panels.fit_offer import FitOffer
from workbench.panels.latest import Latest
from workbench.panels.panel import Panel, failure_html
from workbench.panels.style import STYLE
from workbench.panels.what_if_offer import DepthOffer
from workbench.panels.what_if_view import View, box
from workbench.pictures import Picture, Table, bundle_of
from workbench.session import Snapshot
from workbench.what_if import (
    CONFIG,
    Answer,
    DepthFirstStep,
    Guess,
    KnownSteps,
    MeasuredStep,
    Question,
    answer,
    fitting,
    forecast_error,
    guess,
    measured,
)

PACE_S = 1.0  # between two answers that nobody asked for, while steps come fast
SHARE = 0.1  # of the time, for those
SEARCH_S = 0.5  # for settings that fit, where the next step would not


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
        self._was = measured(self._base) if self._base.trace is not None else None
        self._view = View(Question.of(self._base), self._ask)
        self._view.controls.put(**settings)
        style = ipywidgets.HTML(f"<style>{STYLE}</style>", layout={"display": "none"})
        self.widget = box(ipywidgets.VBox, "l2l-workbench", style, self._view.row, self._view.widget)

    @property
    def answer(self) -> Answer:
        """The answer to what the controls ask now."""
        return self._ask(self._view.controls.question())[1]

    def _ask(self, question: Question) -> tuple[Answer | None, Answer]:
        return self._was, answer(self._base, question)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        self._view.refresh()
        return {WIDGET: self.widget._repr_mimebundle_()[WIDGET], **bundle_of([self._view.still()])}


class WhatIfPanel(Panel):
    """Shows the forecast of the next step, what became of it, and, unfolded, what other settings would give.

    Apply hands those settings to the next step that can be set between two steps; another number of layers is an edit, which
    has a button of its own. Alone the panel begins unfolded.
    """

    def build(self) -> ipywidgets.DOMWidget:
        self._now = self.session.snapshot()
        self._steps = KnownSteps()
        self._steps.note(self._now)
        self._next_s = self._cost_s = 0.0
        self._told: object = None
        self._branch = self._now.branch  # of what is foreseen
        self._foreseen: tuple[Answer, str, int] | None = None  # and the branch, and its steps at that time
        self._said = self._error = ""
        self._line = ipywidgets.HTML()
        self._open = ipywidgets.ToggleButton(
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
        self._view: View | None = None  # made when it is first wanted
        self._place, self._fit = ipywidgets.VBox(), FitOffer(self.session)
        self._forecasts = Latest("what-if")
        fit = FitButton(self.session)
        self._row = box(ipywidgets.HBox, "l2l-buttons", self._open, self._rehearse, fit.button)
        self._open.observe(lambda _: self._turn(), "value")
        self._turn()
        self._open.add_class("l2l-opens")
        return ipywidgets.VBox([self._line, self._fit.widget, self._row, fit.words, self._place])

    def _build_view(self) -> View:
        apply = ipywidgets.Button(
            description="Apply",
            icon="check",
            button_style="primary",
            tooltip="Use these settings for the next step",
            layout={"width": "auto"},
        )
        apply.on_click(lambda _: self._apply())
        self._offer = DepthOffer(self.session)
        below = [self._offer.widget]
        return View(Question.next_of(self._now), self._ask, apply, below=below, moved=self._offer_depth)

    def draw(self, now: Snapshot) -> None:
        self._steps.note(now)
        # `fail` writes into the line, so it is set to what was said last
        self._now, self._line.value = now, self._said
        self._rehearse.layout.display = "none" if now.last is not None else ""
        following = Question.next_of(now)
        told = now.branch, now.shown, following, now.config.schedule
        if told == self._told:
            return
        if now.state == "running" and now.branch == self._branch and time.monotonic() < self._next_s:
            return  # the newest step is looked at when it is due, or when the run is over
        if now.branch != self._branch:
            self._branch, self._error, self._foreseen = now.branch, "", None
        self._told = told
        self._next_s = time.monotonic() + max(PACE_S, self._cost_s / SHARE)
        self._forecasts.ask(self._foresee)
        if self._view is not None:
            self._view.controls.follow(following)
            self._offer_depth()
            if self._open.value:
                self._view.refresh()

    def still(self, now: Snapshot) -> Sequence[Picture | Table]:
        self._steps.note(now)
        self._now = now
        return [self._view.still()] if self._view is not None and self._open.value else []

    def whose(self, now: Snapshot) -> str:
        return f"measured: {now.shown_words}"

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Wait until what was asked is answered."""
        return self._forecasts.wait(timeout_s) and (self._view is None or self._view.latest.wait(timeout_s))

    def _shown(self) -> Any:
        if self._display is None:
            self._open.value = True
        return super()._shown()

    def _turn(self) -> None:
        is_open = self._open.value
        self._open.description = f"{'▾' if is_open else '▸'} What if"
        if is_open and self._view is None:
            self._view = self._build_view()
            self._place.children = (self._view.widget,)
            self._row.children = (*self._row.children, self._view.row)
        for part in (self._place, self._view.row) if self._view is not None else (self._place,):
            part.layout.display = "" if is_open else "none"
        if is_open:
            assert self._view is not None
            self._view.refresh()

    def _offer_depth(self) -> None:
        """The edit that the layers slider means, of the layers that there are."""
        assert self._view is not None
        self._offer.follow(self._now.layers, self._view.controls.question().depth)

    def _ask(self, question: Question) -> tuple[Answer | None, Answer]:
        """From the measured step that is nearest to the question, beside the last one."""
        if (nearest := self._steps.nearest(question)) is not None:
            return self._steps.last(), answer(nearest, question)
        if self._rehearsed is not None and self._rehearsed[1] == self._now.branch:
            return None, answer(self._rehearsed[0], question)
        return None, guess(Guess.of(self._now), question)

    def _foresee(self) -> None:
        """One line: what the next step will need, and how far off that was the last time."""
        began_s = time.thread_time()
        try:
            now = self._now  # once: `draw` replaces it while this thread works
            if now.config.schedule == "depth_first":
                raise DepthFirstStep("The next step")
            last, foreseen = self._ask(Question.next_of(now))
            # of the same branch, since `draw` forgets what was foreseen on another one; and at least one step later
            if last is not None and self._foreseen is not None and self._foreseen[1:] < (now.branch, now.step):
                self._error = forecast_error(self._foreseen[0], last) or self._error
            self._foreseen = foreseen, now.branch, now.step
            words = f"<strong>next step, forecast</strong> {escape(str(foreseen))}"
            said = f"<br>{escape(self._error or foreseen.basis)}"
            self._said = f'<div class="l2l-forecast">{words}<span class="l2l-caption">{said}</span></div>'
            self._fit.show(self._what_fits(foreseen))
        except DepthFirstStep as why_not:
            self._foreseen, self._error = None, ""
            self._said = f'<div class="l2l-forecast"><span class="l2l-caption">{escape(str(why_not))}.</span></div>'
            self._fit.show(None)
        except Exception as error:
            self._said = failure_html(f"The next step cannot be forecast: {error}", traceback.format_exc())
        self._line.value, self._cost_s = self._said, time.thread_time() - began_s

    def _what_fits(self, foreseen: Answer) -> WhatFits | None:
        """Find what helps if the next step would not fit; not on a guess."""
        if foreseen.fits or foreseen.guessed:
            return None
        return fitting(lambda asked: self._ask(asked)[1], foreseen.question, SEARCH_S)

    def _press_rehearse(self) -> None:
        self._rehearse.disabled = True
        try:
            self.session.forecast().add_done_callback(self._take_rehearsal)
        except Exception as error:
            self._refuse(error)

    def _take_rehearsal(self, future: Future[Forecast]) -> None:
        """The rehearsal is over: what is asked now rests on it. On the session's thread."""
        self._rehearse.disabled = False
        try:
            self._rehearsed = MeasuredStep(Profile.of(future.result().trace), name="a rehearsal"), self._now.branch
        except Exception as error:
            self._refuse(error)
            return
        self._forecasts.ask(self._foresee)
        if self._view is not None:
            self._view.refresh()

    def _refuse(self, error: Exception) -> None:
        why = "it was taken out of the queue" if isinstance(error, CancelledError) else error
        self._said = failure_html(f"There is no rehearsal: {why}", traceback.format_exc())
        self._line.value, self._rehearse.disabled = self._said, False

    def _apply(self) -> None:
        assert self._view is not None
        asked, base = self._view.controls.question(), Question.next_of(self.session.snapshot())
        emulated = isinstance(self.session.relay.device, EmulatedDevice)
        names = (*CONFIG, *_LINK) if emulated else CONFIG
        settings = {name: getattr(asked, name) for name in names if getattr(asked, name) != getattr(base, name)}
        try:
            if settings:
                self.session.reconfigure(**settings)
            words = ["handed to the next step" if settings else "nothing to hand to the next step"]
            words += _left_to_do(asked, base, emulated)
            self._view.note.value = f'<span class="l2l-caption">{escape("; ".join(words))}</span>'
        except Exception as error:
            self._view.note.value = failure_html(str(error), traceback.format_exc())


def _left_to_do(asked: Question, base: Question, emulated: bool) -> list[str]:
    """How to get what no setting of a session gives."""
    words = [how for name, how in _BY_HAND.items() if getattr(asked, name) != getattr(base, name)]
    if not emulated and any(getattr(asked, name) != getattr(base, name) for name in _LINK):
        words.append("the link is real: only an emulated one can be set")
    if asked.micro_batches != base.micro_batches and not asked.same_batch:
        words.append("the batch does not grow by itself: let your batches have more rows")
    return words


_LINK = ("h2d_bytes_per_s", "d2h_bytes_per_s")
_BY_HAND = {
    "depth": "layers: an edit, offered below",
    "width": "width: with another model",
    "memory_bytes": "device memory: with another device, as EmulatedDevice(memory_bytes=...)",
}
