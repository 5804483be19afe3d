"""Header of the workbench: model and device, buttons, settings of the next step, and failures."""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import ipywidgets

from l2l_core import TornStep
from l2l_core.trace import format_bytes
from workbench.panels.controls import make_box, make_button, make_row
from workbench.panels.panel import Panel, failure_html
from workbench.pictures import (
    Picture,
    failure_title,
    header_html,
    header_picture,
    in_force_html,
    progress_html,
    work_label,
)
from workbench.session import ControllableSource, Failure, Snapshot

MICRO_BATCH_OPTIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
AHEAD_OPTIONS = (0, 1, 2, 3, 4)
LINK_SPEEDS = tuple(n * 10.0**power for power in range(6, 11) for n in (1, 2, 5))  # bytes per second
# infinity, because an option whose value is None means that nothing is selected
_LINK_OPTIONS = (*((f"{format_bytes(value)}/s", value) for value in LINK_SPEEDS), ("unlimited", math.inf))
_DEFAULT_STEPS = 100


class HeaderPanel(Panel):
    """State of the session, buttons, and sliders for the settings of the next step."""

    source_type = ControllableSource
    has_own_caption = True

    def build(self) -> ipywidgets.DOMWidget:
        self._has_error = False
        # The thread that sets the controls: its callbacks are no user input. Not a flag, since a click handled on another
        # thread at the same time counts.
        self._updating_thread: int | None = None
        self._shown_settings: dict[Any, Any] = {}  # by widget, the setting that it was last set to
        self._min_number = 0  # older snapshots lack the last change made here
        self._title, self._progress = ipywidgets.HTML(), ipywidgets.HTML()
        self._error_html = ipywidgets.HTML()
        self._skip = make_button("Skip this batch", "forward", "Skip the failed batch and continue with the next one")
        self._skip.add_class("l2l-skip")
        self._fit = make_button("", "check", "Use settings with which the next step fits")
        self._fit.add_class("l2l-fit")
        self._run = make_button("Run", "play", "Train for the number of steps on the right; after a pause, continue")
        self._pause = make_button("Pause", "pause", "Pause after the current step")
        self._step = make_button("Step", "step-forward", "Train one step")
        self._stop = make_button("Stop", "stop", "End the run after the current step")
        self._take_back_button = make_button("Take back", "reply", "Remove the newest waiting command from the queue")
        self._cancel = make_button("Cancel", "ban", "End the race, the search or the measurement; nothing is lost")
        # not `display`: the hidden button keeps its space, so that no other button moves
        self._take_back_button.layout.visibility = "hidden"
        self._steps = ipywidgets.BoundedIntText(
            _DEFAULT_STEPS,
            min=1,
            max=10**9,
            description="steps",
            layout={"width": "150px"},
            style={"description_width": "42px"},
        )
        for button, action in (
            (self._run, self._press_run),
            (self._pause, self.session.pause),
            (self._step, self.session.step),
            (self._stop, self.session.stop),
            (self._skip, self.session.skip),
            (self._take_back_button, self._take_back),
            (self._fit, self._press_fit),
            (self._cancel, self._press_cancel),
        ):
            button.on_click(self._guard(action))
        run_buttons = self._run, self._pause, self._step, self._stop
        self._train_buttons = run_buttons
        buttons = make_row(*run_buttons, self._steps, self._progress, self._cancel, self._take_back_button)
        settings = make_box(ipywidgets.HBox, "l2l-settings", *self._build_settings())
        settings.layout.flex_flow = "row wrap"
        self._in_force = ipywidgets.HTML()
        tip = "Restore the settings that were in force when this workbench was opened"
        self._reset = make_button("Reset settings", "undo", tip)
        self._reset.on_click(self._guard(self._reset_settings))
        in_force = make_row(self._in_force, self._reset)
        self._error_box = ipywidgets.VBox([self._error_html, self._fit, self._skip], layout={"display": "none"})
        return ipywidgets.VBox([self._title, buttons, settings, in_force, self._error_box])

    def _build_settings(self) -> list[ipywidgets.DOMWidget]:
        snapshot = self.session.snapshot()
        config = snapshot.config
        self._micro_batches = _slider("micro-batches", MICRO_BATCH_OPTIONS, config.micro_batches, "100px", "226px")
        self._ahead = _slider("layers ahead", AHEAD_OPTIONS, config.ahead, "88px", "200px")
        places = {
            "device": "Layer inputs are kept on the device",
            "host": "Layer inputs are kept in host memory: device memory does not grow with depth",
        }
        if self.session.has_shelf:
            places["disk"] = "Layer inputs are kept in a scratch file: neither device nor host memory grows with depth"
        self._stash = ipywidgets.ToggleButtons(
            options=list(places),
            value=config.stash,
            description="stash on",
            tooltips=list(places.values()),
            style={"description_width": "58px", "button_width": "60px"},
            layout={"width": "auto"},
        )
        by_setting = {"micro_batches": self._micro_batches, "ahead": self._ahead, "stash": self._stash}
        widgets = [*by_setting.values()]
        self._link: ipywidgets.SelectionSlider | None = None
        if "h2d_bytes_per_s" in snapshot.figures:  # only the speed of an emulated link can be set
            self._link = _slider("emulated link", _LINK_OPTIONS, _link_speed(snapshot), "94px", "260px")
            self._link.add_class("l2l-link")
            self._link.observe(self._guard(self._change_link), "value")
            widgets.append(self._link)
        for name, widget in by_setting.items():
            change = self._guard(lambda name=name, widget=widget: self.session.reconfigure(**{name: widget.value}))
            widget.observe(change, "value")
        return widgets

    def draw(self, snapshot: Snapshot) -> None:
        self._draw_progress(snapshot)
        self._in_force.value = in_force_html(snapshot)
        self._reset.layout.display = "" if snapshot.changed_from else "none"
        for button in self._train_buttons:  # not before a saved session is resumed or put aside
            button.disabled = snapshot.offer is not None
        self._run.button_style = "success" if snapshot.state == "running" else "primary"
        self._pause.button_style = "warning" if snapshot.state == "paused" or snapshot.pausing else ""
        self._update_controls(snapshot)
        if snapshot.failure is not None:
            failure = snapshot.failure
            # the batch of a torn step cannot be skipped: some layers were updated with it
            skips = failure.during == "step" and failure.error != TornStep.__name__
            self._show_error(
                f"{failure_title(failure, snapshot.branch)}: {failure.message}", failure.traceback, failure.after, skips
            )
            self._show_remedy(snapshot, failure)
        # an error of a button is in no snapshot: it stays until the next click
        elif self._error_box.layout.display != "none" and not self._has_error:
            self._error_box.layout.display = "none"
        # last: changes reach the page in order, and the state "failed" must not appear before its reason
        self._title.value = header_html(snapshot)

    def still(self, snapshot: Snapshot) -> Sequence[Picture]:
        return [header_picture(snapshot)]

    def _draw_progress(self, snapshot: Snapshot) -> None:
        self._progress.value = progress_html(snapshot)
        self._cancel.layout.display = "" if work_label(snapshot) else "none"
        self._take_back_button.layout.visibility = "visible" if snapshot.queued else "hidden"

    def _press_cancel(self) -> None:
        snapshot = self.session.snapshot()
        if snapshot.search is not None or snapshot.work is not None:
            self.session.cancel_search()
        else:
            self.session.stop()

    def _take_back(self) -> None:
        for ticket in self.session.snapshot().tickets[-1:]:  # none, if the command has started
            self.session.cancel(ticket)

    def _update_controls(self, snapshot: Snapshot) -> None:
        """Update the sliders of settings that were changed elsewhere; the user may be moving another slider."""
        if snapshot.number < self._min_number:
            return
        values = {
            self._micro_batches: snapshot.config.micro_batches,
            self._ahead: snapshot.config.ahead,
            self._stash: snapshot.config.stash,
            **({self._link: _link_speed(snapshot)} if self._link is not None else {}),
        }
        self._updating_thread = threading.get_ident()
        try:
            for widget, value in values.items():
                if value != self._shown_settings.get(widget, widget.value):
                    _set_value(widget, value)
                self._shown_settings[widget] = value
        finally:
            self._updating_thread = None

    def _show_remedy(self, snapshot: Snapshot, failure: Failure) -> None:
        """Show the remedy for a device that is too small: a button with settings, or code to copy."""
        remedy = failure.remedy
        if remedy is None or failure.branch != snapshot.branch:
            return
        if any(getattr(snapshot.config, name) != value for name, value in remedy.settings.items()):
            self._fit.description = f"Use {', '.join(f'{n}={v}' for n, v in remedy.settings.items())}"
            self._fit.layout.display = ""
        elif remedy.code and not remedy.settings:
            self._error_html.value += (
                f'<div class="l2l-caption">No settings fit. Use a larger device:<pre>{escape(remedy.code)}</pre></div>'
            )

    def _press_fit(self) -> None:
        """Apply the remedy of the current failure, which may differ from the one shown."""
        failure = self.session.snapshot().failure
        if failure is not None and failure.remedy is not None:
            self.session.reconfigure(**failure.remedy.settings)

    def _reset_settings(self) -> None:
        """Restore the settings with which the session began."""
        self.session.reconfigure(**self.session.snapshot().changed_from)

    def _press_run(self) -> None:
        snapshot = self.session.snapshot()
        if snapshot.race is not None and not snapshot.race.is_over:
            self.session.run()  # resumes a paused race, otherwise raises
            return
        if (snapshot.state == "running" and not snapshot.pausing) or {"run", "step"} & set(snapshot.queued):
            return  # a second click must not train twice as long
        if snapshot.pausing and "stop" not in snapshot.queued:
            # after the last step, `run()` would start a run without end
            if snapshot.target is None or snapshot.done + 1 < snapshot.target:
                self.session.run()
            return
        resumes = snapshot.state in ("paused", "failed") and snapshot.target != snapshot.done
        self.session.run(None if resumes else self._steps.value)

    def _change_link(self) -> None:
        assert self._link is not None
        bytes_per_s = None if self._link.value == math.inf else self._link.value
        self.session.reconfigure(h2d_bytes_per_s=bytes_per_s, d2h_bytes_per_s=bytes_per_s)

    def _guard(self, action: Callable[[], Any]) -> Callable[..., None]:
        """Return a widget's callback for an action; an exception is shown below the buttons."""

        def callback(*_: object) -> None:
            if self._updating_thread == threading.get_ident():
                return
            try:
                self._has_error = False
                action()
                snapshot = self.session.snapshot()
                self._min_number = snapshot.number
                self._draw_progress(snapshot)  # at once, without the lock of a frame in progress
            except Exception as error:
                self._has_error = True
                self._show_error(str(error), traceback.format_exc())
                with self._drawing:  # reset a slider whose setting was refused
                    self._shown_settings.clear()
                    self._update_controls(self.session.snapshot())

        return callback

    def _show_error(self, message: str, details: str, after: str = "", skips: bool = False) -> None:
        self._error_html.value = failure_html(message, details, after)
        self._skip.layout.display = "" if skips else "none"
        self._fit.layout.display = "none"
        self._error_box.layout.display = ""


def _slider(label: str, options: Sequence[Any], value: Any, label_width: str, width: str) -> ipywidgets.SelectionSlider:
    slider = ipywidgets.SelectionSlider(
        options=options,
        description=label,
        continuous_update=False,  # otherwise each value during a drag would become a setting
        style={"description_width": label_width},
        layout={"width": width},
    )
    _set_value(slider, value)
    return slider


def _link_speed(snapshot: Snapshot) -> float:
    return float(snapshot.figures["h2d_bytes_per_s"] or math.inf)


def _set_value(widget: Any, value: Any) -> None:
    """Set the value of a slider or of toggle buttons; add it to the options if it is missing."""
    options = [option if isinstance(option, tuple) else (str(option), option) for option in widget.options]
    if value not in [v for _, v in options]:
        name = str(value) if isinstance(value, int) else f"{format_bytes(round(value))}/s"
        widget.options = sorted([*options, (name, value)], key=lambda pair: pair[1])
    widget.value = value
