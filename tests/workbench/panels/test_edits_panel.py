"""The panel of edits: form, groups, queue, undo, branches and probe, without kernel and browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import ipywidgets
import pytest
import torch
from panel_reading import widgets_of
from patience import HANG_S
from sessions import enter, held, make_batches, train, wait_until
from torch import nn

from l2l_core import Drop, EmulatedDevice, Insert, Relay
from workbench.panels.edits_panel import EditsPanel
from workbench.panels.layers_panel import LayersPanel
from workbench.panels.panel import Panel
from workbench.session.session import Session
from workbench.session.snapshot import Snapshot


@pytest.fixture
def panel(relay: Relay) -> Iterator[EditsPanel]:
    with Session(relay, make_batches()) as session:
        train(session, 1)
        made = EditsPanel(session)
        shown(made)
        yield made


def find(panel: Panel, words: str) -> Any:
    """Return the control with this label, or else the first whose label starts with it."""
    labels = {one: getattr(one, "description", "") for one in widgets_of(panel)}
    exact = [one for one, label in labels.items() if label == words]
    return next(iter(exact or [one for one, label in labels.items() if label.startswith(words)]))


def choose(panel: Panel, **values: Any) -> None:
    for name, value in values.items():
        panel._form.fields[name].value = value  # type: ignore[attr-defined]


def read(panel: Panel) -> str:
    """Return the visible HTML of a panel."""
    html = [one for one in widgets_of(panel) if isinstance(one, ipywidgets.HTML) and one.layout.display != "none"]
    return " ".join(one.value for one in html)


def shown(panel: Panel) -> Snapshot:
    """Wait until the session is idle, and show it."""
    now = panel.session.wait(HANG_S)
    panel.show(now)
    return now


def keys(panel: Panel) -> list[str]:
    return [row.key for row in shown(panel).layers]


def test_form_shows_the_fields_of_the_edit(panel: EditsPanel) -> None:
    visible = {}
    for kind in find(panel, "edit").options:
        find(panel, "edit").value = kind
        visible[kind] = {name for name, one in panel._form.fields.items() if one.layout.display != "none"}
    assert visible["Insert"] == {"at", "like", "init", "optimizer", "warmup"}
    assert visible["Drop"] == {"first", "last", "park"} and visible["Swap"] == {"layer", "other"}
    assert visible["Replace"] == set() and find(panel, "Apply").disabled and "YourLayer()" in read(panel)
    find(panel, "edit").value = "Duplicate"
    choose(panel, optimizer="scaled")
    assert panel._form.fields["factor"].layout.display != "none" and not find(panel, "Apply").disabled


def test_edit_is_previewed_and_applied(panel: EditsPanel) -> None:
    choose(panel, at="L002", init="identity")
    assert "A new layer in front of 2 · L002, made like 1 · L001" in read(panel)
    assert "4 → 5 layers · 288 → 360 weights" in read(panel) and "computes the same" in read(panel)
    find(panel, "Apply").click()
    assert keys(panel) == ["L000", "L001", "L004", "L002", "L003"]
    assert "inserted before 2 · L002 (identity)" in read(panel)
    assert [label for label, _ in panel._form.fields["first"].options][2] == "2 · L004"

    find(panel, "edit").value = "Drop"
    choose(panel, first="L001", last="L004", park="disk")
    find(panel, "Apply").click()
    assert keys(panel) == ["L000", "L002", "L003"]
    find(panel, "edit").value = "Swap"
    choose(panel, layer="L000", other="L003")
    find(panel, "Apply").click()
    assert keys(panel) == ["L003", "L002", "L000"]


def test_undo_and_redo_name_their_edit(panel: EditsPanel) -> None:
    undo, redo = find(panel, "Undo"), find(panel, "Redo")
    assert undo.disabled and redo.disabled and undo.description == "Undo"
    panel.session.edit(Drop("L001"))
    shown(panel)
    assert (undo.description, undo.disabled, redo.disabled) == ("Undo: dropped 1 · L001", False, True)
    undo.click()
    assert len(keys(panel)) == 4
    assert (undo.disabled, redo.description, redo.disabled) == (True, "Redo: dropped 1 · L001", False)
    redo.click()
    assert len(keys(panel)) == 3 and undo.description == "Undo: dropped 1 · L001"


def test_group_is_applied_as_a_whole_or_not_at_all(panel: EditsPanel) -> None:
    apply = find(panel, "Apply group")
    find(panel, "edit").value = "Drop"
    assert apply.disabled
    for key in ("L000", "L001", "L003"):
        choose(panel, last=key, first=key)
        find(panel, "Add to group").click()
    assert [words for words, _ in panel._members.options] == ["drop 0 · L000", "drop 1 · L001", "drop 3 · L003"]
    panel._members.value = 1
    panel._remove_button.click()
    assert len(keys(panel)) == 4, "no edit was applied yet"
    apply.click()
    now = shown(panel)
    assert [row.key for row in now.layers] == ["L001", "L002"] and len(now.journal) == 1
    assert not panel._members.options and apply.disabled
    for key in ("L001", "L002"):
        choose(panel, last=key, first=key)
        find(panel, "Add to group").click()
    apply.click()
    assert keys(panel) == ["L001", "L002"] and "one must stay" in read(panel)


def test_refusal_is_shown_until_an_edit_succeeds(panel: EditsPanel) -> None:
    find(panel, "edit").value = "Drop"
    choose(panel, first="L000", last="L003")
    panel.session.run()
    find(panel, "Apply").click()
    wait_until(lambda: panel.session.snapshot().refusal is not None)
    refused = panel.session.snapshot()
    panel.show(refused)
    page = read(panel)
    assert 'role="alert"' in page and "drop fewer" in page and "Nothing was changed." in page
    wait_until(lambda: panel.session.snapshot().step >= refused.step + 2)
    panel.session.pause()
    choose(panel, last="L000")
    find(panel, "Apply").click()
    shown(panel)
    assert 'role="alert"' not in read(panel)


def test_queued_commands_can_be_removed(panel: EditsPanel, relay: Relay) -> None:
    with held(relay):
        panel.session.step()
        enter(relay)
        panel.session.edit(Drop("L001"))
        panel.session.edit(Drop("L002"))
        panel.show(panel.session.snapshot())
        queue = panel._queue.commands
        assert [words for words, _ in queue.options] == ["drop 1 · L001", "drop 2 · L002"]
        queue.index = 0
        panel._queue.remove.click()
        assert [words for words, _ in queue.options] == ["drop 2 · L002"], "at once"
    assert keys(panel) == ["L000", "L001", "L003"]
    assert not queue.options and panel._queue.remove.disabled


def test_queued_command_is_shown_at_once(panel: EditsPanel, relay: Relay) -> None:
    panel.session.edit(Drop("L003")).result(HANG_S)
    shown(panel)
    assert panel._queue.line.value == ""
    panel._branches.name.value = "other"
    with held(relay):
        panel.session.step()
        enter(relay)
        for place, (press, words) in enumerate(
            (("Apply", "insert after the last layer (identity)"), ("Undo", "undo"), ("Fork", "fork other")), start=1
        ):
            find(panel, press).click()  # without a frame afterwards
            line = f"<strong>{words}</strong> waits for step 2 to end: place {place} of {place} in the queue"
            assert line in panel._queue.line.value
            assert panel._queue.commands.label == words, "Remove would cancel this command"
        for _ in range(3):
            panel._queue.remove.click()
        assert panel._queue.line.value == "" and not panel.session.snapshot().queued
    assert len(keys(panel)) == 3, "none of the commands ran"


def test_edit_waits_for_a_forecast(panel: EditsPanel, relay: Relay) -> None:
    proceed = threading.Event()
    panel.session.edit(lambda relay: proceed.wait(HANG_S), what="a measurement")
    wait_until(lambda: panel.session.snapshot().busy == "a measurement")
    find(panel, "Apply").click()
    assert "waits for a measurement to end" in panel._queue.line.value
    panel._queue.remove.click()
    panel.session.reconfigure(micro_batches=3)  # no such step has run, so the forecast rehearses one
    forecast = panel.session.forecast()
    with held(relay):
        proceed.set()
        enter(relay)
        wait_until(lambda: panel.session.snapshot().busy == "forecast")
        find(panel, "Apply").click()
        assert "waits for forecast to end: place 1 of 1" in panel._queue.line.value
    assert forecast.result(HANG_S) is not None and len(keys(panel)) == 5
    assert panel._queue.line.value == ""


def test_steps_do_not_update_unchanged_controls(panel: EditsPanel) -> None:
    """An open dropdown must not close at the end of a step."""
    panel.session.edit(Insert("L001"))
    train(panel.session, 1)
    shown(panel)
    sent: list[Any] = []
    for one in widgets_of(panel):
        if one is not panel._branches.table:  # it shows the loss
            one.observe(sent.append)
    train(panel.session, 3)
    shown(panel)
    assert sent == []


def test_selections_survive_edits(panel: EditsPanel) -> None:
    find(panel, "edit").value = "Drop"
    choose(panel, last="L003", first="L003")
    panel.session.edit(Drop("L000"))
    shown(panel)
    assert (panel._form.fields["first"].value, panel._form.fields["last"].value) == ("L003", "L003")
    panel.session.edit(Drop("L003"))
    shown(panel)
    assert panel._form.fields["first"].value == "L002", "the layer at the same position, or the one before"
    assert panel._form.fields["at"].value == "", "after the last layer, as before"


def test_span_is_one_layer_at_first_and_after_apply(panel: EditsPanel) -> None:
    first, last = panel._form.fields["first"], panel._form.fields["last"]
    find(panel, "edit").value = "Drop"
    assert first.value == last.value == "L000"
    for key in ("L002", "L003", "L001"):
        choose(panel, first=key)
        assert last.value == key, "the end follows the start"
    choose(panel, last="L002")
    choose(panel, first="L000")
    assert last.value == "L002", "a longer span keeps its end"
    assert "0 to 2 leave the stack" in read(panel)
    find(panel, "Apply").click()
    assert keys(panel) == ["L003"]
    panel.session.undo()
    shown(panel)
    assert first.value == last.value and "leaves the stack" in read(panel), "the next click drops one layer"

    choose(panel, first="L001")
    choose(panel, last="L003")
    find(panel, "Add to group").click()
    assert first.value == last.value == "L001"
    choose(panel, last="L003")
    panel.session.edit(Drop("L003"))
    shown(panel)
    assert first.value == last.value == "L001", "a removed end is not replaced by another layer"
    assert [words for words, _ in panel._members.options] == ["drop 1 to L003"], "L003 has no number any more"


def test_a_span_stays_in_order(panel: EditsPanel) -> None:
    find(panel, "edit").value = "Freeze"
    choose(panel, first="L002")
    assert panel._form.fields["last"].value == "L002"
    choose(panel, last="L001")
    assert panel._form.fields["first"].value == "L001"
    find(panel, "Apply").click()
    assert [row.frozen for row in shown(panel).layers] == [False, True, False, False]


class Two(nn.Module):
    """Two stacks and a layer in no stack."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        for layer in (*self.up, *self.down):
            x = x + layer(x)
        return self.last(x)


def test_one_of_several_stacks_is_selected() -> None:
    model = Two()
    layers = [*model.up, *model.down, model.last]
    with Relay(
        model, device=EmulatedDevice(), layers=layers, loss=lambda y, batch: (y - batch[1]).square().mean()
    ) as relay:
        with Session(relay, make_batches()) as session:
            panel = EditsPanel(session)
            now = shown(panel)
            assert [row.stack for row in now.layers] == ["up"] * 2 + ["down"] * 3 + [None]
            stack = find(panel, "in")
            assert stack.layout.display != "none" and [words for words, _ in stack.options] == ["up", "down"]
            stack.value = "down"
            assert [key for _, key in panel._form.fields["first"].options] == ["L002", "L003", "L004"]
            choose(panel, init="copy", at="")
            find(panel, "Apply").click()
            assert [row.name for row in shown(panel).layers if row.key == "L006"] == ["down.3"]
            assert stack.value == "down"


def test_layers_outside_of_stacks_cannot_be_edited() -> None:
    model = Two()
    with Relay(model, device=EmulatedDevice(), layers=[model.last], loss=lambda y, batch: y.mean()) as relay:
        with Session(relay, make_batches()) as session:
            panel = EditsPanel(session)
            shown(panel)
            for kind in find(panel, "edit").options:
                find(panel, "edit").value = kind
                assert find(panel, "Apply").disabled and "so none can be edited" in read(panel)


def test_layers_changed_by_the_last_edit_are_marked(panel: EditsPanel) -> None:
    table = LayersPanel(panel.session)
    shown(table)
    assert "l2l-changed" not in read(table)
    panel.session.edit(Insert("L002"))
    shown(table)
    assert read(table).count("l2l-changed") == 1
    train(panel.session, 1)
    shown(table)
    assert "l2l-changed" in read(table)


def test_force_applies_an_edit_that_the_check_refuses() -> None:
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    stack = nn.Sequential(other, *(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    with Relay(stack, device=EmulatedDevice(), loss=lambda y, batch: y.mean()) as relay:
        with Session(relay, make_batches()) as session:
            panel = EditsPanel(session)
            shown(panel)
            find(panel, "edit").value = "Swap"
            find(panel, "Apply").click()
            assert keys(panel) == ["L000", "L001", "L002"] and "force=True" in read(panel)
            find(panel, "force").value = True
            find(panel, "Apply").click()
            assert keys(panel) == ["L001", "L000", "L002"] and 'role="alert"' not in read(panel)


def test_branches_are_forked_and_switched(panel: EditsPanel) -> None:
    assert find(panel, "Switch").disabled and find(panel, "Discard").disabled
    panel._branches.name.value = "wide"
    find(panel, "Fork").click()
    panel.session.edit(Insert("L002"))
    now = shown(panel)
    assert now.branch == "wide" and panel._branches.name.value == ""
    assert [name for _, name in panel._branches.other.options] == ["main"]
    assert "<td>present</td><td>1</td><td>5</td>" in read(panel)
    find(panel, "Switch").click()
    now = shown(panel)
    assert now.branch == "main" and len(now.layers) == 4 and find(panel, "Undo").disabled
    assert "No edit yet" in read(panel), "on this branch"
    assert len(panel.still(now)) == 2
    find(panel, "Discard").click()
    assert [branch.name for branch in shown(panel).branches] == ["main"]
    assert find(panel, "Discard").disabled and panel._branches.other.value is None


def test_empty_branch_name_is_refused(panel: EditsPanel) -> None:
    find(panel, "Fork").click()
    shown(panel)
    assert "is no name for a branch" in read(panel)


def test_numbers_in_the_form_follow_other_edits(panel: EditsPanel) -> None:
    find(panel, "edit").value = "Drop"
    choose(panel, first="L002")
    find(panel, "Add to group").click()
    panel.session.edit(Insert("L001"))
    shown(panel)
    assert [words for words, _ in panel._members.options] == ["drop 3 · L002"]
    assert panel._form.fields["first"].label == "3 · L002" and "3 · L002 leaves the stack" in read(panel)


def test_closed_session_refuses_with_its_reason(panel: EditsPanel) -> None:
    panel.session.close()
    find(panel, "Apply").click()
    assert "this session is closed" in read(panel)


def test_the_still_is_the_journal(panel: EditsPanel) -> None:
    panel.session.edit(Drop("L001"))
    (table,) = panel.still(shown(panel))
    assert "dropped 1 · L001" in table.to_text()


# The probe ------------------------------------------------------------------------------------------------------------


def test_journal_shows_the_verdict_of_the_probe(panel: EditsPanel) -> None:
    panel.session.edit(Insert("L002"))
    shown(panel)
    assert "no change (0 exactly)" in read(panel)
    panel.session.edit(Drop("L001"))
    now = shown(panel)
    assert now.changes[1].judged is not None and now.changes[1].verdict in read(panel)
    assert "(one batch)" in read(panel), "a single batch has no spread"


def test_probe_is_switched_and_described(panel: EditsPanel) -> None:
    switch = find(panel, "judge edits on the probe")
    assert switch.value and "up to 4 batches, cost not measured yet: the training batches from step 1 on" in read(panel)
    assert "probe=[...]" in read(panel)
    switch.value = False
    assert not panel.session.probe_on
    panel.session.edit(Drop("L001"))
    shown(panel)
    assert "not measured: the probe is off" in read(panel)
    panel.session.probe_on = True
    shown(panel)
    assert switch.value, "switched elsewhere"
    panel.session.edit(Drop("L002"))
    shown(panel)
    assert "s per measurement" in read(panel)


def test_probe_description_names_given_batches(relay: Relay) -> None:
    with Session(relay, make_batches(), probe=make_batches(1)) as session:
        panel = EditsPanel(session)
        shown(panel)
        assert "1 batch, cost not measured yet: the batches given as probe=[...]" in read(panel)
    with Session(relay, make_batches(), probe=False) as session:
        panel = EditsPanel(session)
        shown(panel)
        assert not find(panel, "judge edits on the probe").value and "from the next step on" in read(panel)
