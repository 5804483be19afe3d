"""Panels of a session with a user-defined schedule."""

from __future__ import annotations

from dataclasses import replace

from panel_reading import html_of, shown
from sessions import make_batches, make_relay, train

from l2l_core import RelayConfig
from l2l_core.plan import serial
from workbench.panels.memory_panel import MemoryPanel
from workbench.panels.relay_panel import RelayPanel
from workbench.panels.timeline_panel import TimelinePanel
from workbench.session.session import Session

CONFIG = RelayConfig(seed=0, micro_batches=2, verify="never", schedule=serial)


def test_pictures_are_those_of_a_relay() -> None:
    with make_relay(CONFIG) as relay, Session(relay, make_batches(), probe=False) as session:
        panels = [kind(session) for kind in (RelayPanel, TimelinePanel, MemoryPanel)]
        for schedule in (serial, relay.plan(make_batches()[0])):
            session.reconfigure(schedule=schedule)
            train(session, 1)
            for panel in panels:
                shown(panel)
                assert "could not be drawn" not in html_of(panel)
        assert "for k: loss, turn around" in html_of(panels[0])
        assert session.snapshot().config == replace(CONFIG, schedule=session.snapshot().config.schedule)
