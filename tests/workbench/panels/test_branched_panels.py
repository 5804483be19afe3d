"""Panels of a session with two branches of different depth show one branch and name it with its step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
from panel_reading import find, html_of, shown
from patience import HANG_S
from sessions import make_batches, make_relay, train

from l2l_core import Drop, EmulatedDevice, Insert, Relay, RelayConfig, Trace
from workbench.panels.card_panel import CardPanel
from workbench.panels.edits_panel import EditsPanel
from workbench.panels.header_panel import HeaderPanel
from workbench.panels.heat_panel import HeatPanel
from workbench.panels.layers_panel import LayersPanel
from workbench.panels.loss_panel import LossPanel
from workbench.panels.memory_panel import MemoryPanel
from workbench.panels.panel import Panel
from workbench.panels.relay_panel import RelayPanel
from workbench.panels.timeline_panel import TimelinePanel
from workbench.panels.what_if_panel import WhatIfPanel
from workbench.pictures import show_timeline
from workbench.pictures.plotly_figures import timeline_figure
from workbench.runs import Recorder, load_run
from workbench.runs.html_report import render_report
from workbench.session import Snapshot
from workbench.session.branch_history import MAX_SHOWN
from workbench.session.session import Session

OF_STEPS = (RelayPanel, TimelinePanel, MemoryPanel)
OF_STATES = (LossPanel, EditsPanel, CardPanel, LayersPanel, HeatPanel)


@pytest.fixture
def branched(relay: Relay) -> Iterator[Session]:
    """Two steps of main with four layers, then three of wide with five; main is active again."""
    with Session(relay, make_batches()) as session:
        train(session, 2)
        session.fork("wide")
        session.edit(Insert(2))
        session.reconfigure(micro_batches=3)
        train(session, 3)
        session.switch("main")
        session.wait(HANG_S)
        yield session


def still_of(panel: Panel, now: Snapshot) -> str:
    return " ".join(
        one.to_html() + one.to_text() if hasattr(one, "to_text") else one.to_html() for one in panel.still_or_error(now)
    )


def keys_of(trace: Trace) -> set[str]:
    return {event.layer for event in trace.lanes["compute"] if event.kind == "forward"}


@pytest.mark.parametrize("kind", OF_STEPS)
def test_step_panels_follow_the_branch(branched: Session, kind: type[Panel]) -> None:
    panel = kind(branched)
    for branch, step, layers in (("main", 2, 4), ("wide", 5, 5), ("main", 2, 4)):
        branched.switch(branch)
        branched.wait(HANG_S)
        now = shown(panel)
        assert now.shown is not None and now.last is not None and len(keys_of(now.last)) == layers
        assert now.last.step == step - 1 and len(now.layers) == layers
        words = f"step {step} of {branch}"
        assert words in html_of(panel) and words in still_of(panel, now)
        other = "wide" if branch == "main" else "main"
        assert f"of {other}" not in html_of(panel) + still_of(panel, now)


@pytest.mark.parametrize("kind", OF_STATES)
def test_state_panels_follow_the_branch(branched: Session, kind: type[Panel]) -> None:
    panel = kind(branched)
    for branch, step in (("main", 2), ("wide", 5), ("main", 2)):
        branched.switch(branch)
        branched.wait(HANG_S)
        now = shown(panel)
        assert f"after step {step} of {branch}" in still_of(panel, now)
        assert kind is EditsPanel or f"after step {step} of {branch}" in html_of(panel)


def test_the_header_names_the_branch(branched: Session) -> None:
    panel = HeaderPanel(branched)
    now = shown(panel)
    assert (
        "4 layers" in html_of(panel) and "step 2 of main" in html_of(panel) and "step 2 of main" in still_of(panel, now)
    )
    branched.switch("wide")
    branched.wait(HANG_S)
    now = shown(panel)
    assert (
        "5 layers" in html_of(panel) and "step 5 of wide" in html_of(panel) and "step 5 of wide" in still_of(panel, now)
    )


def test_what_if_compares_forecasts_of_the_same_branch_only(branched: Session) -> None:
    panel = WhatIfPanel(branched)
    for branch, step, layers, micro_batches in (("main", 2, 4, 2), ("wide", 5, 5, 3)):
        branched.switch(branch)
        branched.wait(HANG_S)
        now = shown(panel)
        assert panel.wait_until_idle()
        page = html_of(panel) + still_of(panel, now)
        assert f"step {step} of {branch}, measured" in page and f"measured: step {step} of {branch}" in page
        assert ", forecast " not in page.replace("step, forecast<", ""), "no step of this branch was forecast"
        assert find(panel, "layers").value == layers and find(panel, "micro-batches").value == micro_batches
        assert "The settings of the last step." in page
    train(branched, 1)
    now = shown(panel)
    assert panel.wait_until_idle() and "step 6 of wide, measured: " in html_of(panel), "this step was forecast"


def test_fork_shows_the_last_step_of_its_parent(session: Session) -> None:
    panels = [kind(session) for kind in OF_STEPS]
    train(session, 2)
    shown(panels[1])
    assert "step 2<" in html_of(panels[1]), "a single branch is not named"
    session.fork("wide")
    session.wait(HANG_S)
    for panel in panels:
        now = shown(panel)
        assert now.shown_words == "step 2 of main; wide has made no step since it was forked"
        assert panel.still_or_error(now)[0].table.caption == now.shown_words  # type: ignore[union-attr]
    train(session, 1)
    assert session.snapshot().shown_words == "step 3 of wide"


def test_steps_that_a_function_made_are_named_where_an_earlier_step_is_shown(session: Session) -> None:
    batch = next(iter(make_batches()))

    def train_outside(relay: Relay) -> None:
        relay.step(batch)

    train(session, 2)
    session.edit(train_outside).result(HANG_S)
    assert session.snapshot().shown_words == "step 2; step 3 was made outside of the session"
    session.fork("wide").result(HANG_S)
    session.edit(train_outside).result(HANG_S)
    now = session.snapshot()
    assert now.shown_words == "step 2 of main; steps 3 to 4 were made outside of the session"
    assert now.step == 4 and now.state_words == "after step 4 of wide"
    train(session, 1)
    assert session.snapshot().shown_words == "step 5 of wide"


def test_a_step_has_one_number_in_every_text(session: Session) -> None:
    train(session, 2)
    now = session.snapshot()
    trace = now.last
    assert trace is not None and now.shown_words == "step 2" and now.step == 2
    timeline = show_timeline(trace)
    figure: Any = timeline_figure(trace)
    texts = (trace.summary(), repr(trace), timeline.table.title, figure.layout.title.text)
    assert [text[text.lower().index("step ") :][:6].lower() for text in texts] == ["step 2"] * 4, texts


def test_caption_names_an_edit_after_the_step(session: Session) -> None:
    train(session, 2)
    for edit in (Insert(2), Drop("L001")):
        session.edit(edit)
        now = session.wait(HANG_S)
        assert now.shown_words == "step 2, before the last edit" and now.state_words == "after step 2 and the last edit"
        session.undo()
        assert session.wait(HANG_S).shown_words == "step 2"
    session.edit(lambda relay: relay.stack[0].module.requires_grad_(False))
    assert session.wait(HANG_S).shown_words == "step 2, before the last edit", "frozen outside of the edits"
    train(session, 1)
    assert session.wait(HANG_S).shown_words == "step 3"


def test_player_keeps_its_step_and_branch(branched: Session) -> None:
    panel = RelayPanel(branched)
    shown(panel)
    find(panel, "Next event").click()
    branched.switch("wide")
    branched.wait(HANG_S)
    shown(panel)
    assert "step 2 of main" in html_of(panel) and "step 5 of wide" not in html_of(panel)
    find(panel, "Live").value = True
    assert "after step 5 of wide" in html_of(panel)


def test_in_core_bytes_and_failures_belong_to_a_branch(branched: Session) -> None:
    now = branched.snapshot()
    branched.switch("wide")
    wide = branched.wait(HANG_S)
    assert now.in_core_bytes is not None and wide.in_core_bytes is not None and now.in_core_bytes < wide.in_core_bytes
    branched.relay.model[3].error = RuntimeError("not here")
    branched.step()
    assert branched.wait(HANG_S).failure is not None
    branched.switch("main")
    branched.wait(HANG_S)
    panel = HeaderPanel(branched)
    shown(panel)
    assert "Step 6 failed on branch wide" in html_of(panel)
    branched.relay.model[3].error = None


def test_traces_of_recent_branches_are_kept(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        traces: dict[str, ref[Trace]] = {}
        for name in ["main", *(f"b{i}" for i in range(MAX_SHOWN))]:
            if name != "main":
                session.fork(name)
            train(session, 1)
            last = session.wait(HANG_S).last
            assert last is not None
            traces[name] = ref(last)
        session.discard("b0")
        session.wait(HANG_S)
        del last
        gc.collect()
        assert [name for name, trace in traces.items() if trace() is None] == ["main", "b0"]
        session.switch("main")
        now = session.wait(HANG_S)
        assert now.last is None and now.shown_words == "no step of main is kept, the next one will be shown"
        for kind in (*OF_STEPS, *OF_STATES, WhatIfPanel):
            panel = kind(session)
            now = shown(panel)
            assert "could not be drawn" not in html_of(panel) + still_of(panel, now)


def test_recording_shows_steps_of_the_current_branch(relay: Relay, tmp_path: object) -> None:
    path = f"{tmp_path}/run.jsonl"
    with Session(relay, make_batches(), loggers=[Recorder(path)]) as session:
        train(session, 2)
        session.fork("wide")
        session.edit(Insert(2))
        train(session, 2)
        session.switch("main")
        session.wait(HANG_S)
    run = load_run(path)
    assert len(run.moments) == 7, "a switch is no step"
    moments = [(now.branch, now.shown_words) for now in map(run.snapshot, range(len(run.moments)))]
    assert moments[-1] == ("main", "step 2 of main")
    assert moments[-2] == ("wide", "step 4 of wide") and moments[3][1].startswith(
        "step 2 of main, before the last edit; wide"
    )
    last = run.snapshot().last
    assert last is not None and len(keys_of(last)) == len(run.snapshot().layers) == 4
    page = render_report([run])
    assert "Step 2 of main, event by event" in page and "of wide, event" not in page


# -- a device that is too small ----------------------------------------------------------------------------------------


def too_small(budget: int) -> Session:
    device = EmulatedDevice(budget, h2d_bytes_per_s=1e9)
    return Session(make_relay(RelayConfig(micro_batches=1), device), make_batches())


def test_settings_that_fit_have_a_button() -> None:
    with too_small(2_600) as session, session.relay:
        panel = HeaderPanel(session)
        session.run(2)
        session.wait(HANG_S)
        now = shown(panel)
        assert now.failure is not None and now.failure.remedy is not None and now.failure.remedy.settings
        assert "Remedy: RelayConfig(" in html_of(panel) and "larger device" not in html_of(panel)
        (button,) = [child for child in panel._error_box.children if child is panel._fit]
        assert button.layout.display == "" and button.description.startswith("Use ")
        button.click()
        now = session.wait(HANG_S)
        assert all(getattr(now.config, name) == value for name, value in now.failure.remedy.settings.items())  # type: ignore[union-attr]
        shown(panel)
        assert button.layout.display == "none", "the settings are set"
        session.run()
        now = session.wait(HANG_S)
        assert now.failure is None and now.step == 2


def test_larger_device_is_suggested_as_code() -> None:
    with too_small(900) as session, session.relay:
        panel = HeaderPanel(session)
        session.step()
        session.wait(HANG_S)
        now = shown(panel)
        assert now.failure is not None and now.failure.remedy is not None and not now.failure.remedy.settings
        code = f"device = EmulatedDevice(memory_bytes={now.failure.remedy.least_bytes}, h2d_bytes_per_s=1000000000.0)"
        assert code in html_of(panel) and panel._fit.layout.display == "none"
        config = dict(
            part.split("=") for part in now.failure.message.partition("with ")[2].partition(";")[0].split(", ")
        )
    made: dict[str, EmulatedDevice] = {}
    exec(code, {"EmulatedDevice": EmulatedDevice}, made)
    least = RelayConfig(
        micro_batches=int(config["micro_batches"]),
        ahead=int(config["ahead"]),
        stash=config["stash"].strip("'"),  # type: ignore[arg-type]
    )
    with make_relay(least, made["device"]) as relay:
        for batch in make_batches(3):
            relay.step(batch)
