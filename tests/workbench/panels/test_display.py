"""Workbenches and panels on a page: outputs, updates, closing, and cells that run again.

The page is IPython's shell with a publisher that records outputs, without kernel and browser.
"""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from weakref import ref

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from ipywidgets.widgets.widget import _instances
from patience import HANG_S
from sessions import enter, held, make_batches, make_relay, threads_named, train, wait_until
from traitlets.config import Config

from l2l_core import Relay
from workbench.app import Workbench
from workbench.panels.display import WIDGET_VIEW_TYPE
from workbench.panels.layers_panel import LayersPanel
from workbench.panels.loss_panel import LossPanel
from workbench.panels.timeline_panel import TimelinePanel
from workbench.session.session import Session


class Page:
    """A notebook with its running cell and outputs."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.outputs: list[dict[str, Any]] = shell.display_pub.outputs
        self._run = 0
        self._parent: dict[str, Any] = {}
        shell.get_parent = lambda: self._parent  # as in a kernel

    def run(self, cell: str) -> None:
        """Start a run of a cell."""
        self._run += 1
        self._parent = {"metadata": {"cellId": cell}, "header": {"msg_id": f"run {self._run}"}}

    @property
    def stills(self) -> list[str]:
        """Texts of the still pictures and their updates."""
        return [output["data"]["text/plain"] for output in self.outputs if "text/plain" in output["data"]]


@pytest.fixture
def page(relay: Relay) -> Iterator[Page]:
    config = Config({"HistoryManager": {"enabled": False}})
    shell = InteractiveShell.instance(config=config)
    shell.display_pub = CapturingDisplayPublisher(shell=shell)
    yield Page(shell)
    InteractiveShell.clear_instance()


def header_of(bench: Workbench) -> str:
    return bench.panels[0].widget.children[0].value


def button(bench: Workbench, words: str) -> Any:
    return next(one for one in bench.panels[0].widget.children[1].children if one.description == words)


def test_workbench_has_the_methods_of_its_session(relay: Relay) -> None:
    """Signatures and docstrings are those of the session, for completion in notebooks."""
    for name in (
        "run",
        "step",
        "pause",
        "stop",
        "reconfigure",
        "edit",
        "undo",
        "redo",
        "fork",
        "switch",
        "discard",
        "wait",
    ):
        ours, theirs = getattr(Workbench, name), getattr(Session, name)
        assert inspect.signature(ours) == inspect.signature(theirs) and ours.__doc__ == theirs.__doc__, name
    with closing(Workbench(relay, make_batches())) as bench:
        bench.run(2)
        assert bench.edit(lambda relay: relay.steps, what="count").result(HANG_S) >= 1
        assert bench.wait(HANG_S).done == 2 and bench.snapshot().changes[-1].what == "count"


# Without a page -------------------------------------------------------------------------------------------------------


def test_outside_of_a_notebook_only_text_is_printed(relay: Relay, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Workbench(relay, make_batches())
    train(bench.session, 1)
    bench._ipython_display_()
    printed = capsys.readouterr().out
    bench.close()
    assert "Sequential · 4 layers" in printed and "Step 1: " in printed and "Loss " in printed
    assert "<svg" not in printed and "model_id" not in printed


def test_in_a_terminal_text_is_printed_once(relay: Relay, capsys: pytest.CaptureFixture[str]) -> None:
    InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    try:
        with closing(Workbench(relay, make_batches())) as bench:
            bench._ipython_display_()
            train(bench.session, 1)
            wait_until(lambda: "step 1" in header_of(bench))
        assert capsys.readouterr().out.count("Sequential · 4 layers") == 1, "threads print nothing"
    finally:
        InteractiveShell.clear_instance()


def test_a_workbench_as_one_output(relay: Relay) -> None:
    bench = Workbench(relay, make_batches())
    train(bench.session, 1)
    bundle = bench._repr_mimebundle_()
    assert set(bundle) == {WIDGET_VIEW_TYPE, "text/html", "image/svg+xml", "text/plain"}
    assert bundle[WIDGET_VIEW_TYPE]["model_id"] == bench.widget.model_id
    assert bundle["text/html"].count("<svg") == 6, "all views except layers, which is a table"
    bench.close()


# Drawing while visible -----------------------------------------------------------------------------------------------


def test_a_widget_and_its_still_are_two_outputs(page: Page, relay: Relay) -> None:
    page.run("a")
    bench = Workbench(relay, make_batches())
    bench._ipython_display_()
    live, still = (output["data"] for output in page.outputs)
    assert live == {WIDGET_VIEW_TYPE: {"model_id": bench.widget.model_id, "version_major": 2, "version_minor": 0}}
    assert "text/html" in still and WIDGET_VIEW_TYPE not in still
    assert "idle" in header_of(bench), "drawn at once"
    bench.close()


def test_hidden_widget_is_not_drawn(page: Page, relay: Relay) -> None:
    bench = Workbench(relay, make_batches())
    bench._ipython_display_()
    train(bench.session, 1)
    wait_until(lambda: "step 1" in header_of(bench))  # the page has not reported its views yet
    bench.widget._view_count = 1
    train(bench.session, 1)
    wait_until(lambda: "step 2" in header_of(bench))
    bench.widget._view_count = 0
    train(bench.session, 1)
    wait_until(lambda: "step 3" in page.stills[-1])  # after a frame
    assert "step 2" in header_of(bench)
    bench.close()


def test_widget_is_updated_when_it_becomes_visible(page: Page, relay: Relay) -> None:
    bench = Workbench(relay, make_batches())
    bench._ipython_display_()
    for count in (1, 0):
        bench.widget._view_count = count
    train(bench.session, 2)
    wait_until(lambda: "step 2" in page.stills[-1])
    assert "step 0" in header_of(bench)
    bench.widget._view_count = 1  # the session does not change any more
    assert "step 2" in header_of(bench)
    bench.close()


def test_still_is_updated_at_the_end_of_a_run(page: Page, relay: Relay) -> None:
    bench = Workbench(relay, make_batches())
    bench._ipython_display_()
    outputs = len(page.outputs)
    with held(relay):
        bench.run(2)
        enter(relay)
        wait_until(lambda: "running" in header_of(bench))
        assert len(page.outputs) == outputs, "no update during the run"
    bench.wait(HANG_S)
    assert "step 2" in page.stills[-1], "at the end of wait: the notebook may be saved right then"
    put, update = page.outputs[outputs - 1], page.outputs[-1]
    assert update["update"] and update["transient"]["display_id"] == put["transient"]["display_id"]
    bench.close()


def test_standalone_panel_and_its_still_are_drawn(page: Page, relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        panel = LossPanel(session)
        panel._ipython_display_()
        train(session, 2)
        wait_until(lambda: "<svg" in panel.widget.children[0].value and "2" in page.stills[-1])
        panel.close()
        assert session.snapshot().state == "idle", "the session stays open"


def test_failing_still_shows_its_error(page: Page, relay: Relay) -> None:
    class Broken(LossPanel):
        def still(self, now: Any) -> Any:
            raise ZeroDivisionError("no scale <at all>")

    with Session(relay, make_batches()) as session:
        panels = Broken(session), LayersPanel(session)
        for panel in panels:
            panel._ipython_display_()
        assert any("no scale <at all>" in still for still in page.stills)
        assert all("no scale <at all>" not in output["data"].get("text/html", "") for output in page.outputs)
        train(session, 1)
        wait_until(lambda: "<svg" in panels[0].widget.children[0].value)
        layers = panels[1].widget.children[0]
        before = layers.value
        train(session, 1)
        wait_until(lambda: layers.value != before)
        for panel in panels:
            panel.close()


def test_all_copies_of_a_still_are_updated(page: Page, relay: Relay) -> None:
    bench = Workbench(relay, make_batches())
    for cell in ("a", "b"):
        page.run(cell)
        bench._ipython_display_()
    train(bench.session, 2)
    bench.close()
    latest = {
        output["transient"]["display_id"]: output["data"]["text/plain"]
        for output in page.outputs
        if "text/plain" in output["data"]
    }
    assert latest and all("step 2" in text for text in latest.values())


# Closing --------------------------------------------------------------------------------------------------------------


def test_closing_leaves_the_still_and_no_thread(page: Page, relay: Relay) -> None:
    bench = Workbench(relay, make_batches())
    bench._ipython_display_()
    train(bench.session, 1)
    bench.close()
    assert "step 1" in page.stills[-1] and "closed" in page.stills[-1]
    outputs = len(page.outputs)
    bench.close()  # does nothing
    assert len(page.outputs) == outputs
    wait_until(lambda: not threads_named("session", "refresh loop"))


def test_closed_workbenches_leave_no_widgets_behind(page: Page, relay: Relay) -> None:
    before = dict(_instances)
    for number in range(10):
        bench = Workbench(relay, make_batches())
        if number % 2:
            bench._ipython_display_()
        assert len(_instances) > len(before)
        bench.close()
    assert [type(widget).__name__ for key, widget in _instances.items() if key not in before] == []


def test_closed_workbenches_are_freed(page: Page, relay: Relay) -> None:
    bench = Workbench(relay, make_batches())
    bench._ipython_display_()
    train(bench.session, 1)
    left = ref(bench), ref(bench.session)
    bench.close()
    wait_until(lambda: not threads_named("session", "refresh loop"))
    del bench
    gc.collect()
    assert [one() for one in left] == [None, None]


def test_closed_workbench_shows_its_still(page: Page, relay: Relay) -> None:
    bench = Workbench(relay, make_batches())
    train(bench.session, 1)
    bench.close()
    assert WIDGET_VIEW_TYPE not in bench._repr_mimebundle_() and "closed" in bench._repr_mimebundle_()["text/plain"]
    bench._ipython_display_()
    assert len(page.outputs) == 1 and "closed" in page.stills[-1]
    assert not threads_named("refresh loop")


def test_panel_of_a_closed_session_is_drawn(page: Page, relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        train(session, 1)
    panel = TimelinePanel(session)
    panel._ipython_display_()
    assert "<svg" in panel.widget.children[0].value
    panel.close()


# Cells ----------------------------------------------------------------------------------------------------------------


def test_running_a_cell_again_closes_its_widgets(page: Page, relay: Relay) -> None:
    page.run("a")
    first = Workbench(relay, make_batches())
    first._ipython_display_()
    before = len(_instances)
    page.run("a")
    with make_relay() as other:
        second = Workbench(other, make_batches())
        assert first.widget.comm is None and len(_instances) == before
        first.session._commands.join()
        assert first.snapshot().state == "closed" and second.snapshot().state == "idle"
        second.close()


def test_another_cell_closes_nothing(page: Page, relay: Relay) -> None:
    page.run("a")
    first = Workbench(relay, make_batches())
    with make_relay() as other:
        page.run("b")
        second = Workbench(other, make_batches())
        train(first.session, 1)
        assert first.snapshot().step == 1
        for bench in (first, second):
            bench.close()


def test_rerun_cell_replaces_its_panel_but_not_the_session(page: Page, relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        panels = []
        for _ in range(2):
            page.run("a")
            panels.append(LossPanel(session))
            panels[-1]._ipython_display_()
        assert panels[0].widget.comm is None and panels[1].widget.comm is not None
        train(session, 1)
        wait_until(lambda: "<svg" in panels[1].widget.children[0].value)
        panels[1].close()


def test_two_workbenches_work_in_one_cell(page: Page, relay: Relay) -> None:
    page.run("a")
    with make_relay() as other:
        benches = [Workbench(one, make_batches()) for one in (relay, other)]
        for bench in benches:
            bench._ipython_display_()
        for bench in benches:
            train(bench.session, 2)
        for bench in benches:
            wait_until(lambda bench=bench: "step 2" in header_of(bench))
            bench.close()


def test_taken_over_workbench_shows_the_reason(page: Page, relay: Relay) -> None:
    page.run("a")
    first = Workbench(relay, make_batches())
    first._ipython_display_()
    page.run("b")
    second = Workbench(relay, make_batches())
    train(second.session, 2)
    wait_until(lambda: "closed" in header_of(first))
    button(first, "Run").click()
    error_box = first.panels[0].widget.children[-1]
    assert error_box.layout.display == "" and "this session is closed" in error_box.children[0].value
    assert second.snapshot().step == 2
    for bench in (first, second):
        bench.close()


def test_rerun_cell_does_not_wait_for_a_step(page: Page, relay: Relay) -> None:
    page.run("a")
    first = Workbench(relay, make_batches())
    first._ipython_display_()
    with held(relay):
        first.run(3)
        enter(relay)
        page.run("a")
        second = Workbench(relay, make_batches())
        second._ipython_display_()
        second.run(1)
        assert threading.current_thread() is threading.main_thread() and relay.steps == 0
    second.wait(HANG_S)
    assert relay.steps == 2, "the first workbench has completed its step"
    second.close()
