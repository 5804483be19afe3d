"""Panels are redrawn only when their data changes, and closed folds never."""

from __future__ import annotations

from dataclasses import replace

import ipywidgets
import numpy as np
import pytest
from panel_reading import find, html_of, shown, widgets_of
from patience import HANG_S
from sessions import enter, held, train

from l2l_core import Drop, Freeze
from workbench.panels.heat_panel import HeatPanel
from workbench.panels.layers_panel import LayersPanel
from workbench.panels.loss_panel import LossPanel
from workbench.panels.memory_panel import MemoryPanel
from workbench.panels.panel import Panel
from workbench.panels.relay_panel import RelayPanel
from workbench.panels.timeline_panel import TimelinePanel
from workbench.pictures.heat_map import draw_heat
from workbench.pictures.memory_chart import memory_table
from workbench.session.session import Session


@pytest.mark.parametrize("kind", [RelayPanel, TimelinePanel, MemoryPanel, LossPanel, HeatPanel])
def test_a_fold_draws_its_table_only_while_it_is_open(session: Session, kind: type[Panel]) -> None:
    panel = kind(session)
    button, table = panel.widget.children[-2].children
    train(session, 1)
    shown(panel)
    if isinstance(panel, RelayPanel):
        find(panel, "Next event").click()
    assert table.value == "" and table.layout.display == "none" and button.icon == "caret-right"
    button.value = True
    first = table.value
    assert "<table" in first and table.layout.display == "" and button.icon == "caret-down"
    button.value = False
    session.reconfigure(micro_batches=3)
    train(session, 1)
    if isinstance(panel, RelayPanel):
        find(panel, "Live").value = True
    shown(panel)
    if isinstance(panel, RelayPanel):
        find(panel, "Next visit").click()
    assert table.value == first, "a closed fold is not redrawn"
    button.value = True
    assert table.value != first and "<table" in table.value


@pytest.mark.parametrize("kind", [LayersPanel, LossPanel, HeatPanel])
def test_step_data_is_drawn_once_per_step(session: Session, kind: type[Panel]) -> None:
    panel = kind(session)
    train(session, 1)
    shown(panel)
    content = panel.widget.children[0]
    drawn, content.value = content.value, "as it was"
    session.pause()
    session.wait(HANG_S)
    with held(session.relay):
        session.step()
        enter(session.relay)
        shown(panel)
        shown(panel)
        assert content.value == "as it was"
    session.wait(HANG_S)
    shown(panel)
    assert content.value not in ("as it was", drawn)


def test_heat_map_shows_the_selected_figure(session: Session) -> None:
    panel = HeatPanel(session)
    shown(panel)
    assert "appear with the first step" in html_of(panel)
    train(session, 2)
    now = shown(panel)
    picture, choice = panel.widget.children[0], panel.widget.children[1].children[0]
    assert picture.value == draw_heat(now.statistics, "grad_norm", now.changes)
    choice.value = "update_ratio"  # redrawn at once, without a step
    assert picture.value == draw_heat(now.statistics, "update_ratio", now.changes)
    assert panel.still(now)[0].svg == picture.value
    choice.value = "influence"
    assert "could not be drawn" not in picture.value


def test_an_edit_changes_the_heat_map_at_once(session: Session) -> None:
    panel = HeatPanel(session)
    train(session, 2)
    before = shown(panel)
    drawn = panel.widget.children[0].value
    session.edit(Drop(1)).result(HANG_S)
    session.wait(HANG_S)
    now = shown(panel)
    assert panel.widget.children[0].value != drawn
    assert [track.key for track in now.statistics.stack] == ["L000", "L002", "L003"]
    assert [track.key for track in now.statistics.removed] == ["L001"] and not before.statistics.removed


def test_a_session_keeps_the_figures_of_all_its_steps(session: Session) -> None:
    rows = []
    for _ in range(3):
        train(session, 1)
        rows.append(session.snapshot().layers)
    session.edit(Freeze(2)).result(HANG_S)
    train(session, 1)
    rows.append(session.snapshot().layers)
    record = session.snapshot().statistics
    assert record.first.tolist() == record.last.tolist() == [1, 2, 3, 4]
    for figure in ("grad_norm", "update_ratio"):
        expected = np.array([[getattr(layer, figure) for layer in step] for step in rows], np.float64).T
        np.testing.assert_allclose(record.values(figure, record.stack), expected, rtol=1e-6)
        assert np.argwhere(np.isnan(expected)).tolist() == [[2, 3]], "the layer was frozen before the last step"


def test_a_change_of_settings_is_marked_in_the_loss_at_once(session: Session) -> None:
    panel = LossPanel(session)
    train(session, 2)
    shown(panel)
    before = panel.widget.children[0].value
    session.reconfigure(ahead=2)
    session.wait(HANG_S)
    shown(panel)
    once = panel.widget.children[0].value
    assert once != before
    session.reconfigure(ahead=3)
    session.wait(HANG_S)
    shown(panel)
    assert panel.widget.children[0].value != once, "still one change, with another value"


def test_memory_table_matches_the_picture(session: Session) -> None:
    panel = MemoryPanel(session)
    fold = next(one for one in widgets_of(panel) if isinstance(one, ipywidgets.ToggleButton))
    fold.value = True
    train(session, 1)
    first = session.snapshot()
    session.reconfigure(micro_batches=1, stash="host")
    train(session, 1)
    last = session.snapshot()
    panel.show(first)
    panel.show(replace(first, step=last.step))  # the relay has completed a step, the session has not recorded it
    panel.show(last)
    assert last.last is not None
    assert memory_table(last.last, last.in_core_bytes).to_html(folded=False) in html_of(panel)
