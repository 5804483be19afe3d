"""The card of a layer: selection, trials and edits, without kernel and browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from panel_reading import find, html_of, shown, widgets_of
from patience import HANG_S
from sessions import enter, held, make_batches, train, wait_until

from l2l_core import Drop, Insert, Relay
from workbench.app import VIEWS
from workbench.panels.card_panel import CardPanel
from workbench.panels.layers_panel import LayersPanel
from workbench.panels.selection import shared_selection
from workbench.session.session import Session
from workbench.session.snapshot import Snapshot


@pytest.fixture
def panel(relay: Relay) -> Iterator[CardPanel]:
    with Session(relay, make_batches(), probe=make_batches(8)[5:]) as session:
        train(session, 2)
        made = CardPanel(session)
        shown(made)
        yield made
        made._trials.stop()
    assert made._trials.wait_until_idle(HANG_S)


def choose(panel: CardPanel, key: str) -> None:
    find(panel, "card of").value = key
    show_idle(panel)


def show_idle(panel: CardPanel) -> Snapshot:
    """Show the idle session, wait for the facts that this requests, and show it again."""
    panel.session.wait(HANG_S)
    shown(panel)
    panel.session.wait(HANG_S)
    key = panel._selection.key
    wait_until(lambda: key is None or (panel._facts is not None and panel._facts.key == key))
    return shown(panel)


def test_card_is_below_the_table() -> None:
    assert VIEWS["layers"] == (LayersPanel, CardPanel)


def test_layer_is_selected_in_the_list_or_with_buttons(panel: CardPanel) -> None:
    listed = find(panel, "card of")
    assert listed.options[1:3] == (("0 · L000 1", "L000"), ("1 · L001 2", "L001")) and listed.label == "choose a layer"
    assert "No layer is chosen" in html_of(panel) and find(panel, "Read again").disabled
    find(panel, "Next layer").click()
    assert listed.value == "L000" and find(panel, "Previous layer").disabled
    find(panel, "Next layer").click()
    assert listed.value == "L001" and "No layer is chosen" not in html_of(panel)
    choose(panel, "L003")
    assert find(panel, "Next layer").disabled and not find(panel, "Previous layer").disabled
    find(panel, "Previous layer").click()
    assert shared_selection(panel.session).key == "L002" == listed.value


def test_selection_during_a_redraw_counts(panel: CardPanel) -> None:
    choose(panel, "L001")
    listed, now = find(panel, "card of"), panel.session.snapshot()
    user = threading.Thread(target=lambda: setattr(listed, "index", 0))
    with panel._drawing:
        user.start()
        wait_until(lambda: listed.label == "choose a layer")
        panel.draw(now)  # a snapshot from before the selection
    user.join(HANG_S)
    assert shared_selection(panel.session).key is None and listed.label == "choose a layer"


def test_card_shows_the_facts_of_the_layer(panel: CardPanel) -> None:
    choose(panel, "L002")
    page = html_of(panel)
    for words in ("2 · L002", "Layer · 72 weights", "version 2", "linear.weight", "8 × 8", "float32", "after step 2"):
        assert words in page, words
    assert page.count("<svg") == 2 and "gradient norm" in page and "influence" in page
    (table,) = panel.still(panel.session.snapshot())
    assert "linear.weight 8 × 8 float32 64" in table.to_text() and "Layer 2 · L002" in table.to_text()


def test_selection_is_shared_and_cleared_with_its_layer(panel: CardPanel) -> None:
    other = CardPanel(panel.session)
    choose(panel, "L002")
    assert find(other, "card of").value == "L002", "the other panel is notified"
    panel.session.edit(Insert("L000"))
    show_idle(panel)
    assert find(panel, "card of").value == "L002" and find(panel, "card of").label == "3 · L002 4"
    assert "3 · L002" in html_of(panel)
    panel.session.edit(Drop("L002"))
    show_idle(panel)
    assert shared_selection(panel.session).key is None
    assert find(panel, "card of").label == "choose a layer" and find(panel, "card of").index == 0, (
        "the list is not blank"
    )
    panel.session.undo()
    show_idle(panel)
    assert find(panel, "card of").label == "choose a layer" and "No layer is chosen" in html_of(panel)


def test_weights_are_read_after_edits_and_on_demand(panel: CardPanel) -> None:
    choose(panel, "L001")
    first = panel._facts
    train(panel.session, 2)
    show_idle(panel)
    assert panel._facts is first and "after step 2" in html_of(panel)
    find(panel, "Read again").click()
    show_idle(panel)
    assert panel._facts is not first and panel._facts is not None and panel._facts.step == 4
    second = panel._facts
    panel.session.edit(Drop("L003"))
    panel.session.wait(HANG_S)
    shown(panel)
    wait_until(lambda: panel._facts is not second)


@pytest.mark.parametrize(
    "words, code, after",
    [
        ("Drop", "Drop(layers=&#x27;L001&#x27;)", "L000 L002 L003"),
        ("Duplicate", "Duplicate(layers=&#x27;L001&#x27;)", "L000 L001 L004 L002 L003"),
        ("Insert before", "Insert(at=&#x27;L001&#x27;, like=&#x27;L001&#x27;)", "L000 L004 L001 L002 L003"),
        ("Insert after", "Insert(at=&#x27;L002&#x27;, like=&#x27;L001&#x27;)", "L000 L001 L004 L002 L003"),
        ("Move earlier", "Move(layer=&#x27;L001&#x27;, to=&#x27;L000&#x27;)", "L001 L000 L002 L003"),
        ("Move later", "Move(layer=&#x27;L001&#x27;, to=&#x27;L002&#x27;)", "L000 L002 L001 L003"),
    ],
)
def test_button_does_the_same_as_its_code(panel: CardPanel, words: str, code: str, after: str) -> None:
    choose(panel, "L001")
    assert f"<code>relay.apply({code})</code>" in html_of(panel)
    find(panel, words).click()
    assert [row.key for row in panel.session.wait(HANG_S).layers] == after.split()


def test_layer_is_frozen_and_unfrozen(panel: CardPanel) -> None:
    choose(panel, "L001")
    for words, frozen in (("Freeze", True), ("Unfreeze", False)):
        assert f"relay.apply({words}(" in html_of(panel)
        find(panel, words).click()
        assert show_idle(panel).layers[1].frozen is frozen
    find(panel, "Freeze")


def test_queued_command_is_shown_at_once(panel: CardPanel, relay: Relay) -> None:
    choose(panel, "L001")
    with held(relay):
        panel.session.step()
        enter(relay)
        find(panel, "Drop").click()
        assert "<strong>drop 1 · L001</strong> waits for step 3 to end: place 1 of 1" in html_of(panel)
        find(panel, "Loss without it").click()
        assert find(panel, "Loss without it").disabled and "waits in the queue" in html_of(panel)
    panel.session.wait(HANG_S)


def test_trials_measure_the_loss_on_the_probe(panel: CardPanel) -> None:
    choose(panel, "L001")
    before = panel.session.snapshot()
    find(panel, "Loss without it").click()
    find(panel, "Loss with it twice").click()
    now = show_idle(panel)
    assert now.layers == before.layers and now.journal == before.journal == ()
    found = {how: panel._trials.found["L001", how] for how in ("without", "twice")}  # type: ignore[index]
    judged = panel.session.measure(Drop("L001")).result(HANG_S)
    assert found["without"].loss_change is not None and found["without"].loss_change.after.losses == judged.after.losses
    for one in found.values():
        assert (
            one.loss_change is not None
            and one.loss_change.verdict in one.summary
            and f"<strong>{one.summary}" in html_of(panel)
        )
    train(panel.session, 1)
    show_idle(panel)
    assert "old: after step 2, now it is step 3" in html_of(panel)


def test_sweep_measures_all_layers_during_a_run(panel: CardPanel) -> None:
    panel.session.run()
    find(panel, "Measure all layers").click()
    assert find(panel, "Measure all layers").disabled and "8 measurements left" in html_of(panel)
    assert panel._trials.wait_until_idle(HANG_S)
    panel.session.pause()
    show_idle(panel)
    steps = [one.version.step for one in panel._trials.found.values()]
    assert len(steps) == 8 and steps == sorted({*steps}), "a step of the run between any two"
    assert not find(panel, "Measure all layers").disabled and find(panel, "Stop measuring").disabled
    (_, picture) = panel.still(panel.session.snapshot())
    assert [row[0] for row in picture.table.rows] == ["0", "0", "1", "1", "2", "2", "3", "3"]  # type: ignore[union-attr]
    assert html_of(panel).count("loss with it twice: ") == 4, "a bar for every layer"


def test_sweep_stops_on_request_and_without_probe(panel: CardPanel, relay: Relay) -> None:
    with held(relay):
        panel.session.step()
        enter(relay)
        find(panel, "Measure all layers").click()
        wait_until(lambda: bool(panel._trials.waiting))
        (queued,) = panel.session.snapshot().queued
        assert queued == "measure without 0 · L000, and 7 more after it"
        find(panel, "Stop measuring").click()
    assert panel._trials.wait_until_idle(HANG_S)
    show_idle(panel)
    assert len(panel._trials.found) == 1 and "stopped with 7 left" in html_of(panel)
    panel.session.probe_on = False
    find(panel, "Measure all layers").click()
    assert panel._trials.wait_until_idle(HANG_S)
    show_idle(panel)
    assert "the probe is off" in html_of(panel) and len(panel._trials.found) == 1


def test_sweep_ends_when_it_is_cancelled_or_the_session_closes(panel: CardPanel, relay: Relay) -> None:
    for end in (lambda: panel.session.cancel(panel.session.snapshot().tickets[-1]), lambda: panel.session.close(False)):
        with held(relay):
            panel.session.step()
            enter(relay)
            panel._trials.request_all(["L000", "L001"])
            wait_until(lambda: bool(panel.session.snapshot().queued))
            end()
        assert panel._trials.wait_until_idle(HANG_S)
        panel.session.wait(HANG_S)
        assert panel._trials.stop_reason == "removed from the queue" and not panel._trials.found
    shown(panel)
    assert all(one.disabled for one in widgets_of(panel) if one.has_trait("disabled"))


def test_steps_do_not_update_the_controls(panel: CardPanel) -> None:
    """An open list must not close at the end of a step."""
    choose(panel, "L001")
    sent: list[object] = []
    for one in widgets_of(panel):
        if one.has_trait("disabled"):
            one.observe(sent.append)
    train(panel.session, 2)
    shown(panel)
    assert sent == []
