"""The top of the workbench: what trains and where, the buttons, the settings of the next step, and what went wrong."""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from l2l_core import TornStep
from l2l_core.trace import format_bytes
from workbench.panels.panel import Panel, code_html, failure_html
from workbench.pictures import Picture, header_html, header_picture, progress_html, title_of
from workbench.session import Failure, Remedy, Snapshot, Steered

MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
AHEAD = (0, 1, 2, 3, 4)
LINKS = tuple(n * 10.0**power for power in range(6, 11) for n in (1, 2, 5))  # bytes per second
# infinity, because an option whose value is None means that nothing is selected
_LINK_OPTIONS = (*((f"{format_bytes(value)}/s", value) for value in LINKS), ("unlimited", math.inf))
_STEPS = 100


class HeaderPanel(Panel):
    """Shows the state, the buttons and the settings.

    Sliders act on the next step. All controls are ordinary buttons and sliders: Tab reaches them, Space and Enter press
    buttons, arrow keys move sliders.
    """

    looks_at = Steered
    says_whose = True

    def build(self) -> ipywidgets.DOMWidget:
        self._refused = False
        # The thread that lets the controls follow: what they call then was done by no person. Not a flag, since a press that
        # comes from another thread meanwhile must count.
        self._follower: int | None = None
        self._told: dict[Any, Any] = {}  # by widget, the setting that it was last made to show
        self._since = 0  # older snapshots do not have yet what was set here last
        self._title, self._progress = ipywidgets.HTML(), ipywidgets.HTML()
        self._trouble = ipywidgets.HTML()
        self._skip = _button(
            "Skip this batch", "forward", "Leave out the batch that failed; the next step takes another one"
        )
        self._skip.add_class("l2l-skip")
        self._fit = _button("", "check", "Give the next step settings with which it fits")
        self._fit.add_class("l2l-fit")
        self._run = _button("Run", "play", "Train for the number of steps on the right; after a pause, go on")
        self._pause = _button("Pause", "pause", "Pause after the current step")
        self._step = _button("Step", "step-forward", "Train one step")
        self._stop = _button("Stop", "stop", "End the run after the current step")
        self._back = _button("Take back", "reply", "Remove the newest waiting command from the queue")
        # not `display`: its place stays free, so that no button moves when it comes
        self._back.layout.visibility = "hidden"
        self._steps = ipywidgets.BoundedIntText(
            _STEPS,
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
            (self._back, self._take_back),
            (self._fit, self._press_fit),
        ):
            button.on_click(self._guarded(action))
        buttons = ipywidgets.HBox(
            [self._run, self._pause, self._step, self._stop, self._steps, self._progress, self._back]
        )
        settings = ipywidgets.HBox(self._build_settings(), layout={"flex_flow": "row wrap"})
        self._trouble_box = ipywidgets.VBox([self._trouble, self._fit, self._skip], layout={"display": "none"})
        for box, name in ((buttons, "l2l-buttons"), (settings, "l2l-settings")):
            box.add_class(name)
        return ipywidgets.VBox([self._title, buttons, settings, self._trouble_box])

    def _build_settings(self) -> list[ipywidgets.DOMWidget]:
        now = self.session.snapshot()
        config = now.config
        self._micro_batches = _slider("micro-batches", MICRO_BATCHES, config.micro_batches, "100px", "226px")
        self._ahead = _slider("layers ahead", AHEAD, config.ahead, "88px", "200px")
        places = {
            "device": "Layer inputs are kept on the device",
            "host": "Layer inputs are kept in host memory: device memory does not grow with depth",
        }
        if self.session.has_shelf:
            places["disk"] = (
                "Layer inputs pass to a scratch file of the shelf: host memory does not grow with depth either"
            )
        self._stash = ipywidgets.ToggleButtons(
            options=list(places),
            value=config.stash,
            description="stash on",
            tooltips=list(places.values()),
            style={"description_width": "58px", "button_width": "60px"},
            layout={"width": "auto"},
        )
        watched = {"micro_batches": self._micro_batches, "ahead": self._ahead, "stash": self._stash}
        widgets = [*watched.values()]
        self._link: ipywidgets.SelectionSlider | None = None
        if "h2d_bytes_per_s" in now.figures:  # an emulated one: other links are what they are
            self._link = _slider("emulated link", _LINK_OPTIONS, math.inf, "94px", "260px")
            # before it is observed: new options make the first of them the value for a moment
            _move(self._link, _link_of(now))
            self._link.add_class("l2l-link")
            self._link.observe(self._guarded(self._change_link), "value")
            widgets.append(self._link)
        for name, widget in watched.items():
            change = self._guarded(lambda name=name, widget=widget: self.session.reconfigure(**{name: widget.value}))
            widget.observe(change, "value")
        return widgets

    def draw(self, now: Snapshot) -> None:
        self._draw_progress(now)
        self._run.button_style = "success" if now.state == "running" else "primary"
        self._pause.button_style = "warning" if now.state == "paused" or now.pausing else ""
        self._follow(now)
        if now.failure is not None:
            failure = now.failure
            # of a step that is torn the batch is gone: some layers have learned from it
            skips = failure.during == "step" and failure.error != TornStep.__name__
            self._say(f"{title_of(failure, now.branch)}: {failure.message}", failure.traceback, failure.after, skips)
            self._offer(now, failure)
        # what the panel itself has refused is in no snapshot: it stays until the next press
        elif self._trouble_box.layout.display != "none" and not self._refused:
            self._trouble_box.layout.display = "none"
        # last: a page gets one change after the other, and "failed" must not stand there without its reason
        self._title.value = header_html(now)

    def still(self, now: Snapshot) -> Sequence[Picture]:
        return [header_picture(now)]

    def _draw_progress(self, now: Snapshot) -> None:
        self._progress.value = progress_html(now)
        self._back.layout.visibility = "visible" if now.queued else "hidden"

    def _take_back(self) -> None:
        for ticket in self.session.snapshot().tickets[-1:]:  # of none, if its turn has come
            self.session.cancel(ticket)

    def _follow(self, now: Snapshot) -> None:
        """Let the sliders show settings that were changed elsewhere, and only those: a person may be moving another one."""
        if now.number < self._since:
            return
        values = {
            self._micro_batches: now.config.micro_batches,
            self._ahead: now.config.ahead,
            self._stash: now.config.stash,
            **({self._link: _link_of(now)} if self._link is not None else {}),
        }
        self._follower = threading.get_ident()
        try:
            for widget, value in values.items():
                if value != self._told.get(widget, widget.value):
                    _move(widget, value)
                self._told[widget] = value
        finally:
            self._follower = None

    def _offer(self, now: Snapshot, failure: Failure) -> None:
        """What helps against a device that is too small: settings at a press, or a line of code to copy."""
        remedy = failure.remedy
        if remedy is None or failure.branch != now.branch:
            return
        if remedy.settings and not self._has(now, remedy):
            self._fit.description = f"Use {', '.join(f'{n}={v}' for n, v in remedy.settings.items())}"
            self._fit.layout.display = ""
        elif remedy.code and not remedy.settings:
            self._trouble.value += code_html("Only a larger device helps. For a relay with one:", remedy.code)

    @staticmethod
    def _has(now: Snapshot, remedy: Remedy) -> bool:
        return all(getattr(now.config, name) == value for name, value in remedy.settings.items())

    def _press_fit(self) -> None:
        """Takes the settings of the failure that there is now: the one that was shown may be of the past."""
        failure = self.session.snapshot().failure
        if failure is not None and failure.remedy is not None:
            self.session.reconfigure(**failure.remedy.settings)

    def _press_run(self) -> None:
        now = self.session.snapshot()
        if now.race is not None and not now.race.is_over:
            self.session.run()  # goes on with it, or says that it does so by itself
            return
        if (now.state == "running" and not now.pausing) or {"run", "step"} & set(now.queued):
            return  # pressing twice must not train twice as long
        if now.pausing and "stop" not in now.queued:
            # After its last step a run has nothing left to go on with, and would begin one without end.
            if now.target is None or now.done + 1 < now.target:
                self.session.run()
            return
        goes_on = now.state in ("paused", "failed") and now.target != now.done
        self.session.run(None if goes_on else self._steps.value)

    def _change_link(self) -> None:
        assert self._link is not None
        bytes_per_s = None if self._link.value == math.inf else self._link.value
        self.session.reconfigure(h2d_bytes_per_s=bytes_per_s, d2h_bytes_per_s=bytes_per_s)

    def _guarded(self, action: Callable[[], Any]) -> Callable[..., None]:
        """A widget's callback: an error is shown below the buttons, where whoever pressed one looks."""

        def callback(*_: object) -> None:
            if self._follower == threading.get_ident():
                return
            try:
                self._refused = False
                action()
                now = self.session.snapshot()
                self._since = now.number
                self._draw_progress(now)  # at once, and without waiting for a frame that is being drawn
            except Exception as error:
                self._refused = True
                self._say(str(error), traceback.format_exc())
                with self._drawing:  # what was not set is not shown as if it were
                    self._told.clear()
                    self._follow(self.session.snapshot())

        return callback

    def _say(self, message: str, details: str, after: str = "", skips: bool = False) -> None:
        self._trouble.value = failure_html(message, details, after)
        self._skip.layout.display = "" if skips else "none"
        self._fit.layout.display = "none"
        self._trouble_box.layout.display = ""


def _button(words: str, icon: str, tip: str) -> ipywidgets.Button:
    return ipywidgets.Button(description=words, icon=icon, tooltip=tip, layout={"width": "auto"})


def _slider(words: str, options: Sequence[Any], value: Any, label: str, width: str) -> ipywidgets.SelectionSlider:
    pairs = [option if isinstance(option, tuple) else (str(option), option) for option in options]
    # a relay may have been made with a number that is not offered
    if value not in [v for _, v in pairs]:
        pairs = sorted([*pairs, (str(value), value)], key=lambda pair: pair[1])
    return ipywidgets.SelectionSlider(
        options=pairs,
        value=value,
        description=words,
        continuous_update=False,  # each value that the handle passes would be a setting of the next step
        style={"description_width": label},
        layout={"width": width},
    )


def _link_of(now: Snapshot) -> float:
    return float(now.figures["h2d_bytes_per_s"] or math.inf)


def _move(widget: Any, value: Any) -> None:
    """Let a slider or a choice show a value, which its options need not have yet."""
    options = [option if isinstance(option, tuple) else (str(option), option) for option in widget.options]
    if value not in [v for _, v in options]:
        name = str(value) if isinstance(value, int) else f"{format_bytes(round(value))}/s"
        widget.options = sorted([*options, (name, value)], key=lambda pair: pair[1])
    widget.value = value
