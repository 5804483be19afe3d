"""The Loss view: choices of value, axis and scale, and the hint before the first held-out measurement."""

from __future__ import annotations

from typing import Any

from panel_reading import find, html_of, shown
from patience import HANG_S
from sessions import make_batches, train

from workbench.app import Workbench
from workbench.panels.header_panel import HeaderPanel
from workbench.panels.loss_panel import LossPanel
from workbench.panels.panel import Panel
from workbench.pictures import LRCurve
from workbench.session.early_stopping import EarlyStopping
from workbench.session.session import Session


def drawn(panel: Panel) -> str:
    shown(panel)
    return html_of(panel)


def absolute(outputs: Any, batch: Any) -> float:
    return float((outputs - batch[1]).abs().mean())


def test_value_axis_and_scale_can_be_chosen(session: Session) -> None:
    panel = LossPanel(session)
    train(session, 2)
    assert "evaluate(loader, every=100)" in drawn(panel)
    session.evaluate(make_batches(2), {"absolute": absolute}, every=1).result(HANG_S)
    train(session, 3)
    text = drawn(panel)
    assert "evaluate(loader" not in text and ">held out<" in text and "held-out loss" in text
    value, axis, log = panel._shown, panel._axis, panel._log
    assert [label for label, _ in value.options] == ["loss", "held-out absolute", "learning rate", "rows per second"]
    value.value = "held_out/absolute"
    assert ">absolute<" in html_of(panel)
    axis.value = "flop"
    assert "compute (FLOP)" in html_of(panel)
    before = html_of(panel)
    log.value = True
    assert html_of(panel) != before
    assert "compute (FLOP)" in panel.still(session.snapshot())[0].svg, "the still is the same view"
    session.fork("wide").result(HANG_S)
    train(session, 1)
    shown(panel)
    assert (value.value, axis.value) == ("held_out/absolute", "flop"), "choices stay"


def test_header_cancels_a_measurement_and_shows_why_a_run_paused(session: Session) -> None:
    panel = HeaderPanel(session)
    session.evaluate(
        make_batches(1), {"up": lambda *_: 1.0}, every=1, stop=EarlyStopping("up", 1, higher_is_better=True)
    )
    session.run(5)
    session.wait(HANG_S)
    assert "Stopped early: the held-out up has not improved in the last evaluation" in drawn(panel)
    assert find(panel, "Cancel").layout.display == "none"
    cancelled: list[str] = []

    def metric(outputs: Any, batch: Any) -> float:
        shown(panel)
        if find(panel, "Cancel").layout.display == "":
            cancelled.append(html_of(panel))
            find(panel, "Cancel").click()
        return 1.0

    error = session.evaluate(make_batches(2), {"mine": metric}).exception(HANG_S)
    assert "was cancelled" in str(error) and "▶ evaluating" in cancelled[0]


def test_the_workbench_evaluates_and_finds_a_rate_that_displays_itself(relay: Any) -> None:
    workbench = Workbench(relay, make_batches())
    try:
        row = workbench.evaluate(make_batches(1)).result(HANG_S)
        found = workbench.find_lr(steps=10).result(HANG_S)
        assert row is not None and isinstance(found, LRCurve) and "<svg" in found._repr_mimebundle_()["text/html"]
    finally:
        workbench.close()
