"""Properties of every panel, and of the panels of a workbench."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from panel_reading import find, html_of, shown, widgets_of
from patience import HANG_S
from sessions import enter, held, make_batches, train, wait_until

from l2l_core import Relay
from workbench.app import Workbench
from workbench.panels.card_panel import CardPanel
from workbench.panels.display import WIDGET_VIEW_TYPE
from workbench.panels.edits_panel import EditsPanel
from workbench.panels.explore_panel import ExplorePanel
from workbench.panels.export_panel import ExportPanel
from workbench.panels.header_panel import HeaderPanel
from workbench.panels.heat_panel import HeatPanel
from workbench.panels.inside_panel import InsidePanel
from workbench.panels.layers_panel import LayersPanel
from workbench.panels.loss_panel import LossPanel
from workbench.panels.memory_panel import MemoryPanel
from workbench.panels.panel import Panel
from workbench.panels.race_panel import RacePanel
from workbench.panels.relay_panel import RelayPanel
from workbench.panels.timeline_panel import TimelinePanel
from workbench.panels.verdict_panel import BoundsPanel, VerdictPanel
from workbench.panels.what_if_panel import WhatIfPanel
from workbench.session.session import Session
from workbench.session.session_state import CLOSED, TAKEN_OVER
from workbench.session.snapshot import Snapshot

KINDS: Sequence[type[Panel]] = (
    HeaderPanel,
    VerdictPanel,
    RelayPanel,
    TimelinePanel,
    MemoryPanel,
    LossPanel,
    EditsPanel,
    CardPanel,
    LayersPanel,
    HeatPanel,
    InsidePanel,
    RacePanel,
    WhatIfPanel,
)


# Every panel ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_panel_stands_alone(session: Session, kind: type[Panel], capsys: pytest.CaptureFixture[str]) -> None:
    panel = kind(session)
    before = panel._repr_mimebundle_()
    assert {WIDGET_VIEW_TYPE, "text/html", "text/plain"} <= set(before)
    panel._ipython_display_()
    train(session, 2)
    wait_until(lambda: session.snapshot().step == 2)
    shown(panel)
    assert "could not be drawn" not in html_of(panel)
    bundle = panel._repr_mimebundle_()
    tables = (VerdictPanel, LayersPanel, EditsPanel, CardPanel, InsidePanel, RacePanel)
    pictures = {"image/svg+xml"} if kind not in tables else set()
    assert set(bundle) == {WIDGET_VIEW_TYPE, "text/html", "text/plain"} | pictures
    assert bundle["text/plain"].strip() and bundle["text/html"].count("<svg") == len(pictures)
    panel.close()
    panel.close()
    assert WIDGET_VIEW_TYPE not in panel._repr_mimebundle_()
    panel._ipython_display_()
    assert "<svg" not in capsys.readouterr().out
    assert session.snapshot().state == "idle"


@pytest.mark.parametrize("kind", KINDS)
def test_a_panel_takes_a_workbench_too_and_nothing_else(relay: Relay, kind: type[Panel]) -> None:
    bench = Workbench(relay, make_batches())
    panel = kind(bench)
    assert panel.session is bench.session
    for wrong in (relay, None, "session"):
        with pytest.raises(TypeError, match=f"{kind.__name__} takes a Session or a Workbench, not a "):
            kind(wrong)
    panel.close()
    bench.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_panel_is_drawn_at_any_moment(relay: Relay, kind: type[Panel]) -> None:
    with Session(relay, make_batches()) as session:
        panel = kind(session)
        shown(panel)  # without any step
        for _ in range(2):  # in the first step, and in a later one
            with held(relay):
                session.run(1)
                enter(relay)
                wait_until(lambda: session.snapshot().progress is not None)
                shown(panel)
                assert "could not be drawn" not in html_of(panel)
            session.wait(HANG_S)
            shown(panel)
        relay.model[3].error = RuntimeError("in the middle")
        session.step()
        session.wait(HANG_S)
        shown(panel)
    shown(panel)  # closed
    assert "could not be drawn" not in html_of(panel)


@pytest.mark.parametrize("kind", [*KINDS, BoundsPanel, ExplorePanel, ExportPanel])
def test_failing_panel_shows_its_error_and_recovers(session: Session, kind: type[Panel]) -> None:
    class Broken(kind):  # type: ignore[misc, valid-type]
        broken = True

        def draw(self, now: Snapshot) -> None:
            if self.broken:
                raise ZeroDivisionError("an axis of <no> length")
            super().draw(now)

    panel = Broken(session)
    train(session, 1)
    shown(panel)
    html = panel.widget.children[0].value
    assert "Broken could not be drawn" in html and "an axis of &lt;no&gt; length" in html and "Traceback" in html
    panel.broken = False
    shown(panel)
    assert "could not be drawn" not in html_of(panel)


@pytest.mark.parametrize("kind", KINDS)
def test_controls_of_an_ended_session_are_disabled(relay: Relay, kind: type[Panel]) -> None:
    with Session(relay, make_batches()) as session:
        panel = kind(session)
        train(session, 1)
        shown(panel)
        controls = [one for one in widgets_of(panel) if one.has_trait("disabled")]
        assert not controls or not all(one.disabled for one in controls)
    for _ in range(2):  # a frame does not enable them
        shown(panel)
        assert all(one.disabled for one in widgets_of(panel) if one.has_trait("disabled"))


def test_refresh_loop_survives_a_failing_panel(relay: Relay) -> None:
    bench = Workbench(relay, make_batches(), view=["relay", "loss"])
    relay_panel, loss = bench.views.visible_panels
    relay_panel.draw = lambda now: 1 / 0  # type: ignore[method-assign]
    bench._ipython_display_()
    for steps in (1, 2):
        train(bench.session, steps)
        wait_until(lambda: loss._drawn_inputs[0] == bench.snapshot().step)
    assert "could not be drawn" in relay_panel.widget.children[0].value
    assert "could not be drawn" not in html_of(loss)
    bench.close()


# The workbench --------------------------------------------------------------------------------------------------------


def test_workbench_controls_its_session(relay: Relay) -> None:
    bench = Workbench(relay, make_batches())
    bench.run(2)
    assert bench.wait(HANG_S).step == 2
    bench.step()
    bench.reconfigure(ahead=2)
    assert bench.edit(lambda relay: relay.steps, what="count").result(HANG_S) == 3
    with held(relay):
        bench.run(5)
        enter(relay)
        bench.pause()
    assert bench.wait(HANG_S).state == "paused"
    bench.stop()
    now = bench.wait(HANG_S)
    assert now.state == "idle" and [change.what for change in now.changes] == ["ahead 1 → 2", "count"]
    bench.close()
    assert bench.snapshot().state == "closed" and relay.evaluate(make_batches()[0]) > 0


def test_taken_over_workbench_is_disabled_at_once(relay: Relay) -> None:
    first = Workbench(relay, make_batches())
    first._show(first.snapshot())
    assert first._notice.widget.layout.display == "none"
    with held(relay):
        first.step()
        enter(relay)
        second = Workbench(relay, make_batches())
        first._show(first.snapshot())  # its last step is still in progress
        notice = first._notice.widget.value
        assert "was taken over by another one on the same relay: use that one, or run this cell again" in notice
        for panel in first.panels:
            assert all(one.disabled for one in widgets_of(panel) if one.has_trait("disabled")), panel
    second.wait(HANG_S)
    second._show(second.snapshot())
    assert second._notice.widget.value == "" and not find(second.panels[0], "Run").disabled
    first.close()
    assert first.snapshot().ended == TAKEN_OVER, "the first reason stays"
    second.close()
    assert second.snapshot().ended == CLOSED


def test_standalone_panel_shows_the_end_of_its_session(session: Session) -> None:
    panel = EditsPanel(session)
    panel._repr_mimebundle_()
    session.close()
    shown(panel)
    assert panel._notice is not None and "This workbench was closed: run its cell again" in panel._notice.widget.value
    panel.close()


def test_workbench_refuses_other_types() -> None:
    with pytest.raises(TypeError, match="a session takes an l2l_core.Relay"):
        Workbench(torch.nn.Linear(1, 1), [])  # type: ignore[arg-type]
