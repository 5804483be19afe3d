"""The relay picture, live or replayed event by event."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from workbench.panels.controls import make_box, make_dropdown
from workbench.panels.folded_table import FoldedTable
from workbench.panels.layer_picker import make_pickable
from workbench.panels.panel import Panel
from workbench.pictures import Picture, RelayScene, relay_html, relay_table, show_relay
from workbench.readings import Columns, StateTimeline, StepState
from workbench.session import LayerRow, ShownStep, Snapshot

LIVE_GRACE_S = 0.7  # after a click on Live, positions of the player may still arrive from the page
_PLAY_INTERVALS_MS = {"slow": 600, "normal": 200, "fast": 50}  # milliseconds per event


class RelayPanel(Panel):
    """Place of every layer, work of every lane and the current line of the algorithm.

    In live mode it follows the session. The player replays the last completed step by event, by visit or continuously;
    the picture then stays at that step until Live is pressed.
    """

    def build(self) -> ipywidgets.DOMWidget:
        self._snapshot: Snapshot | None = None
        self._played_step: ShownStep | None = None  # the step of the player
        self._timeline: StateTimeline | None = None  # of `_played_step`
        self._relabelled_timeline: StateTimeline | None = (
            None  # the same with the layers of the current step, after an edit
        )
        self._visits: Sequence[int] = ()  # first event of each visit
        self._setting_slider = False
        self._live_pressed_s = -LIVE_GRACE_S
        self._picture = make_pickable(ipywidgets.HTML())
        self._live = ipywidgets.ToggleButton(
            value=True, description="Live", icon="circle", tooltip="Follow the session", layout={"width": "auto"}
        )
        self._play = ipywidgets.Play(
            max=0, interval=_PLAY_INTERVALS_MS["normal"], show_repeat=False, layout={"width": "auto"}
        )
        # in the page, the End key sets the initial `max`, limited to the current one
        self._slider = ipywidgets.IntSlider(
            max=10**9, description="event", readout=False, continuous_update=True, layout={"width": "320px"}
        )
        self._speed = make_dropdown("speed", list(_PLAY_INTERVALS_MS), "130px")
        self._speed.value = "normal"
        self._fold = FoldedTable("The moment in words")
        link = ipywidgets.jslink((self._play, "value"), (self._slider, "value"))  # in the page: plays smoothly
        self._play.observe(lambda change: link.close() if change["new"] is None else None, "comm")  # the only reference
        moves = [
            _button("fast-backward", "Previous visit", lambda: self._move_visits(-1)),
            _button("step-backward", "Previous event", lambda: self._move_events(-1)),
            self._play,
            _button("step-forward", "Next event", lambda: self._move_events(1)),
            _button("fast-forward", "Next visit", lambda: self._move_visits(1)),
        ]
        self._live.observe(lambda _: self._on_live(), "value")
        self._slider.observe(lambda _: self._on_slider(), "value")
        self._speed.observe(self._set_speed, "value")
        player = make_box(ipywidgets.HBox, "l2l-player", self._live, *moves, self._slider, self._speed)
        return ipywidgets.VBox([self._picture, player, self._fold.widget])

    def draw(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        if self._live.value:
            self._load_step(snapshot.shown)
            self._draw_live(snapshot)

    def still(self, snapshot: Snapshot) -> Sequence[Picture]:
        return [show_relay(snapshot.last)] if snapshot.last is not None else []

    def caption(self, snapshot: Snapshot) -> str:
        if not self._live.value and self._played_step is not None:
            return snapshot.words_of(self._played_step)
        return snapshot.state_words if snapshot.progress is None else snapshot.progress_words

    def _still_caption(self, snapshot: Snapshot) -> str:
        return snapshot.shown_words

    # -- the player ----------------------------------------------------------------------------------------------------

    def _set_speed(self, change: dict[str, Any]) -> None:
        self._play.interval = _PLAY_INTERVALS_MS[change["new"]]

    def _load_step(self, step: ShownStep | None) -> None:
        """Set the step that the player replays."""
        if step is self._played_step:
            return
        self._played_step, self._timeline, self._visits = step, None, ()
        if step is None:
            return
        self._relabelled_timeline = None
        self._setting_slider = True  # a smaller range moves the slider, which is no user input
        try:
            last = max(1, step.trace.counts[0] - 1)
            for widget in (self._play, self._slider):
                widget.max = last
        finally:
            self._setting_slider = False

    def _load_timeline(self) -> StateTimeline | None:
        """Return the timeline of the player's step, which is created on first use."""
        if self._timeline is None and self._played_step is not None:
            keys = [layer.key for layer in self._played_step.layers]
            self._timeline = StateTimeline.of(self._played_step.trace, keys)
            self._visits = self._timeline.visit_starts()
        return self._timeline

    def _on_slider(self) -> None:
        with self._drawing:
            late = self._live.value and time.monotonic() < self._live_pressed_s + LIVE_GRACE_S
            if self._setting_slider or late or (timeline := self._load_timeline()) is None:
                return
            self._live.value = False
            assert self._played_step is not None, "it has a timeline"
            index = min(self._slider.value, timeline.count - 1)
            self._draw_state(timeline.at_event(index), self._played_step.layers)
            if self._snapshot is not None:
                self._update_caption(self._snapshot)

    def _move_events(self, by: int) -> None:
        with self._drawing:
            if self._load_timeline() is None:
                return
            self._live.value = False
            self._slider.value = min(max(self._slider.value + by, 0), self._slider.max)

    def _move_visits(self, by: int) -> None:
        with self._drawing:
            if self._load_timeline() is None:
                return
            event = self._slider.value
            index = bisect_left(self._visits, event) - 1 if by < 0 else bisect_right(self._visits, event)
            self._move_events(self._visits[min(max(index, 0), len(self._visits) - 1)] - event)

    def _on_live(self) -> None:
        with self._drawing:
            if not self._live.value:
                return
            self._play.playing, self._live_pressed_s = False, time.monotonic()
            if self._snapshot is not None:
                self.show(self._snapshot)

    def _draw_state(self, state: StepState | None, layers: Sequence[LayerRow]) -> None:
        """Draw a state of a step that had these layers; None draws the layers between two steps."""
        now = self._snapshot
        if now is None:
            return
        keys = [layer.key for layer in layers]
        scene = RelayScene(
            keys=keys,
            names={layer.key: layer.name for layer in layers},
            versions={layer.key: layer.version for layer in layers},
            frozen=[layer.key for layer in layers if layer.frozen],
            device=now.device,
            budget_bytes=now.budget_bytes,
            idle=state is None,
        )
        self._picture.value = relay_html(state or StepState(schedule=now.config.schedule), scene)
        if state is not None:
            self._fold.show(lambda: relay_table(state, keys))

    def _previous_timeline(self, keys: Sequence[str]) -> StateTimeline | None:
        """Return the last step with the layers of the current one, which predicts the rest of the current step."""
        timeline = self._load_timeline()
        if timeline is None or self._played_step is None or timeline.keys == tuple(keys):
            return timeline
        if self._relabelled_timeline is None or self._relabelled_timeline.keys != tuple(keys):
            self._relabelled_timeline = StateTimeline.of(self._played_step.trace, keys)
        return self._relabelled_timeline

    def _draw_live(self, snapshot: Snapshot) -> None:
        """Draw the current state of the step in progress, or the layers between two steps."""
        keys = [layer.key for layer in snapshot.layers]
        if snapshot.progress is None:
            self._draw_state(None, snapshot.layers)
            return
        progress, settings = snapshot.progress, snapshot.progress.trace.settings
        timeline = StateTimeline(
            Columns.of(progress.trace, progress.events, progress.samples),
            keys,
            **{name: settings[name] for name in ("micro_batches", "ahead", "resident", "keep", "stash")},
            schedule=settings.get("schedule", "breadth_first"),
            previous=self._previous_timeline(keys),
            live=True,
        )
        self._draw_state(timeline.at_time(progress.now_s), snapshot.layers)


def _button(icon: str, tooltip: str, action: Callable[[], None]) -> ipywidgets.Button:
    button = ipywidgets.Button(icon=icon, tooltip=tooltip, layout={"width": "38px"})
    button.on_click(lambda _: action())
    return button
