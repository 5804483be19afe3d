"""The relay picture: live, or one event after another through the last step."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import ipywidgets

from workbench.panels.fold import Fold
from workbench.panels.panel import Panel
from workbench.panels.touch import touched
from workbench.pictures import Picture, Scene, relay_html, relay_table, show_relay
from workbench.readings import Columns, Moment, Moments
from workbench.session import LayerRow, ShownStep, Snapshot

LATE_S = 0.7  # after Live was pressed, the page may still send where the player was
_PACES = {"slow": 600, "normal": 200, "fast": 50}  # milliseconds per event


class RelayPanel(Panel):
    """Shows where every layer is and what every lane does, with the line of the algorithm.

    Live, it follows the session. The player goes through the last finished step: event by event, visit by visit, or
    playing; the picture then stays with that step, whatever the session does, until Live is pressed.
    """

    def build(self) -> ipywidgets.DOMWidget:
        self._now: Snapshot | None = None
        self._step: Moments | None = None  # that the player goes through
        self._played: ShownStep | None = None  # whose that is
        self._as_now: Moments | None = None  # that step with the layers of the one under way, if an edit lies between
        self._visits: Sequence[int] = ()  # events with which a visit begins
        self._placing = False
        self._live_since_s = -LATE_S
        self._picture = touched(ipywidgets.HTML())
        self._live = ipywidgets.ToggleButton(
            value=True, description="Live", icon="circle", tooltip="Follow the session", layout={"width": "auto"}
        )
        self._play = ipywidgets.Play(max=0, interval=_PACES["normal"], show_repeat=False, layout={"width": "auto"})
        self._at = ipywidgets.IntSlider(  # in the page, the End key goes to the first `max` there was, cut to today's
            max=10**9, description="event", readout=False, continuous_update=True, layout={"width": "320px"}
        )
        self._pace = ipywidgets.Dropdown(options=list(_PACES), value="normal", layout={"width": "90px"})
        self._fold = Fold("The moment in words")
        link = ipywidgets.jslink((self._play, "value"), (self._at, "value"))  # in the page: playing does not stutter
        self._play.observe(lambda change: link.close() if change["new"] is None else None, "comm")  # nobody else has it
        moves = [
            _button("fast-backward", "Previous visit", lambda: self._visit(-1)),
            _button("step-backward", "Previous event", lambda: self._move(-1)),
            self._play,
            _button("step-forward", "Next event", lambda: self._move(1)),
            _button("fast-forward", "Next visit", lambda: self._visit(1)),
        ]
        self._live.observe(lambda _: self._turn_live(), "value")
        self._at.observe(lambda _: self._scrub(), "value")
        self._pace.observe(lambda _: setattr(self._play, "interval", _PACES[self._pace.value]), "value")
        player = ipywidgets.HBox([self._live, *moves, self._at, self._pace])
        player.add_class("l2l-player")
        return ipywidgets.VBox([self._picture, player, self._fold.widget])

    def draw(self, now: Snapshot) -> None:
        self._now = now
        if self._live.value:
            self._take(now.shown)
            self._put_live(now)

    def still(self, now: Snapshot) -> Sequence[Picture]:
        return [show_relay(now.last)] if now.last is not None else []

    def whose(self, now: Snapshot) -> str:
        if not self._live.value and self._played is not None:
            return now.words_of(self._played)
        return now.state_words if now.progress is None else now.progress_words

    def _whose_still(self, now: Snapshot) -> str:
        return now.shown_words

    # -- the player ----------------------------------------------------------------------------------------------------

    def _take(self, shown: ShownStep | None) -> None:
        """Let the player go through this step."""
        if shown is self._played:
            return
        self._played, self._step, self._visits = shown, None, ()
        if shown is None:
            return
        self._as_now = None
        self._placing = True  # a range that shrinks moves the slider, and no person has
        try:
            last = max(1, shown.trace.counts[0] - 1)
            for widget in (self._play, self._at):
                widget.max = last
        finally:
            self._placing = False

    def _moments(self) -> Moments | None:
        """The step of the player; what it needs is made when it is first used."""
        if self._step is None and self._played is not None:
            self._step = Moments.of(self._played.trace, [layer.key for layer in self._played.layers])
            self._visits = self._step.visits()
        return self._step

    def _scrub(self) -> None:
        with self._drawing:
            late = self._live.value and time.monotonic() < self._live_since_s + LATE_S
            if self._placing or late or (step := self._moments()) is None:
                return
            self._live.value = False
            assert self._played is not None, "there are moments"
            self._put(step.at(min(self._at.value, step.count - 1)), self._played.layers)
            if self._now is not None:
                self._say_whose(self._now)

    def _move(self, by: int) -> None:
        with self._drawing:
            if self._moments() is None:
                return
            self._live.value = False
            self._at.value = min(max(self._at.value + by, 0), self._at.max)

    def _visit(self, by: int) -> None:
        with self._drawing:
            if self._moments() is None:
                return
            index = (
                bisect_left(self._visits, self._at.value) - 1 if by < 0 else bisect_right(self._visits, self._at.value)
            )
            self._move(self._visits[min(max(index, 0), len(self._visits) - 1)] - self._at.value)

    def _turn_live(self) -> None:
        with self._drawing:
            if not self._live.value:
                return
            self._play.playing, self._live_since_s = False, time.monotonic()
            if self._now is not None:
                self.show(self._now)

    def _put(self, moment: Moment | None, layers: Sequence[LayerRow]) -> None:
        """Draw a moment of a step, with the layers that there were in it; None: no step, and the layers that there are."""
        now = self._now
        if now is None:
            return
        keys = [layer.key for layer in layers]
        scene = Scene(
            keys=keys,
            names={layer.key: layer.name for layer in layers},
            versions={layer.key: layer.version for layer in layers},
            frozen=[layer.key for layer in layers if layer.frozen],
            device=now.device,
            budget_bytes=now.budget_bytes,
            idle=moment is None,
        )
        self._picture.value = relay_html(moment or Moment(schedule=now.config.schedule), scene)
        if moment is not None:
            self._fold.show(lambda: relay_table(moment, keys))

    def _before(self, keys: Sequence[str]) -> Moments | None:
        """The last step, read with the layers of the one under way: what happened in it says what is still to come."""
        step = self._moments()
        if step is None or self._played is None or step.keys == tuple(keys):
            return step
        if self._as_now is None or self._as_now.keys != tuple(keys):
            self._as_now = Moments.of(self._played.trace, keys)
        return self._as_now

    def _put_live(self, now: Snapshot) -> None:
        """Draw the step under way, as far as it is; between steps all layers rest."""
        keys = [layer.key for layer in now.layers]
        if now.progress is None:
            self._put(None, now.layers)
            return
        progress, settings = now.progress, now.progress.trace.settings
        part = Columns.of(progress.trace, progress.events, progress.samples)
        moments = Moments(
            part,
            keys,
            micro_batches=settings["micro_batches"],
            ahead=settings["ahead"],
            resident=settings["resident"],
            keep=settings["keep"],
            stash=settings["stash"],
            schedule=settings.get("schedule", "breadth_first"),
            before=self._before(keys),
            live=True,
        )
        self._put(moments.when(progress.now_s), now.layers)


def _button(icon: str, tip: str, action: object) -> ipywidgets.Button:
    button = ipywidgets.Button(icon=icon, tooltip=tip, layout={"width": "38px"})
    button.on_click(lambda _: action())  # type: ignore[operator]
    return button
