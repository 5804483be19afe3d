"""Panels of a session that trains depth first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from panel_reading import html_of, shown
from patience import HANG_S
from sessions import make_relay, train

from l2l_core import EmulatedDevice, Insert, Relay, RelayConfig
from workbench.panels.header_panel import HeaderPanel
from workbench.panels.memory_panel import MemoryPanel
from workbench.panels.panel import Panel
from workbench.panels.relay_panel import RelayPanel
from workbench.panels.timeline_panel import TimelinePanel
from workbench.panels.what_if_panel import WhatIf, WhatIfPanel
from workbench.pictures import text_view
from workbench.pictures.layer_strip import HEIGHT
from workbench.pictures.theme import KIND_COLOURS
from workbench.session.session import Session
from workbench.what_if import DepthFirstStep

CONFIG = RelayConfig(micro_batches=2, keep=4, resident=2, schedule="depth_first")


@pytest.fixture
def relay() -> Iterator[Relay]:
    with make_relay(CONFIG, EmulatedDevice(h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e6)) as made:
        yield made


def test_pictures_show_each_micro_batch_by_itself(session: Session) -> None:
    panels: list[Panel] = [kind(session) for kind in (RelayPanel, TimelinePanel, MemoryPanel)]
    session.reconfigure(micro_batches=4)
    train(session, 1)
    for _ in range(20):  # the name of the middle phase needs room, which depends on the load of the machine
        train(session, 1)
        panels[1] = TimelinePanel(session)  # a new one, since a panel keeps the axis of a longer step
        shown(panels[1])
        if ">middle<" in html_of(panels[1]):
            break
    for panel in panels:
        shown(panel)
        assert "could not be drawn" not in html_of(panel)
    player, timeline, memory = panels
    assert "for k: loss, turn around" not in html_of(player), "the algorithm is shown between two steps too"
    assert "last k: push gradient" in html_of(player) and "graphs" in html_of(player)
    assert ">middle<" in html_of(timeline)
    for kind in ("forward", "backward"):
        runs = [rect for rect in html_of(memory).split("<rect")[1:] if f'fill="{KIND_COLOURS[kind]}"' in rect]
        assert len([rect for rect in runs if f'height="{HEIGHT:.1f}"' in rect]) == 4
    assert "middle: " in text_view(session.snapshot())


def test_what_if_requires_a_breadth_first_step(session: Session) -> None:
    panel = WhatIfPanel(session)
    train(session, 1)
    now = shown(panel)
    assert panel.wait_until_idle() and html_of(panel).count("need a step with schedule=") == 2, (
        "in the forecast and in the answer"
    )
    assert "cannot be" not in html_of(panel) and "need a step with" in panel._repr_mimebundle_()["text/plain"]
    with pytest.raises(DepthFirstStep, match="step 1 runs depth first.*schedule='breadth_first'"):
        WhatIf(now.last)
    session.reconfigure(schedule="breadth_first")
    train(session, 2)
    shown(panel)
    assert (
        panel.wait_until_idle() and "next step, forecast" in html_of(panel) and "need a step with" not in html_of(panel)
    )
    session.reconfigure(schedule="depth_first")
    shown(panel)
    assert panel.wait_until_idle() and "The next step runs depth first" in html_of(panel)


def test_inserted_layer_stays_on_the_device(session: Session, header: HeaderPanel) -> None:
    assert ("schedule", "depth first") in header.still(session.snapshot())[0].table.rows
    train(session, 1)
    session.edit(Insert(2)).result(HANG_S)
    session.step()
    now = session.wait(HANG_S)
    assert (now.step, now.failure) == (2, None) and now.last is not None
    assert {event.layer for event in now.last.events if event.kind == "load"} >= {"L000", "L004"}


def test_stash_on_the_host_is_refused(session: Session) -> None:
    with pytest.raises(ValueError, match="stash='device'"):
        session.reconfigure(stash="host")
    train(session, 1)
    assert session.snapshot().failure is None
