"""The view Inside: looks on demand and their pictures, without kernel and browser."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from panel_reading import find, html_of, shown
from patience import HANG_S
from sessions import enter, held, make_batches, train, wait_until
from small import make_batch, make_gpt
from small import make_relay as make_decoder

from l2l_core import Drop, Insert, Inside, Relay
from workbench.app import VIEWS
from workbench.panels.inside_panel import InsidePanel
from workbench.session.session import Session


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


@pytest.fixture
def panel() -> Iterator[InsidePanel]:
    """Panel of a decoder with four layers after two steps."""
    with make_decoder(make_gpt()) as relay, Session(relay, [make_batch(0)], decode=letters) as session:
        train(session, 2)
        made = InsidePanel(session)
        shown(made)
        yield made


def press(panel: InsidePanel) -> Inside:
    """Press Look, wait for the result, show and return it."""
    before = panel._inside
    find(panel, "Look").click()
    wait_until(lambda: panel._inside is not before or bool(panel._failure_reason))
    shown(panel)
    assert panel._inside is not None
    return panel._inside


def code(panel: InsidePanel) -> str:
    found = re.search(r"<code>(.*?)</code>", html_of(panel))
    assert found
    return html.unescape(found[1])


def test_nothing_runs_before_look_is_pressed(panel: InsidePanel, monkeypatch: Any) -> None:
    calls: list[object] = []
    monkeypatch.setattr(Relay, "look", lambda *_, **__: calls.append(1))
    assert VIEWS["inside"] == (InsidePanel,)
    train(panel.session, 2)
    shown(panel)
    assert "Nothing is recorded until you press Look" in html_of(panel) and "<svg" not in html_of(panel)
    assert not calls and panel.still(panel.session.snapshot())[0].to_text().endswith("Nothing was recorded.")  # type: ignore[union-attr]


def test_look_shows_the_stream_and_its_cost(panel: InsidePanel) -> None:
    seen = press(panel)
    assert seen.keys == ("L000", "L001", "L002", "L003") and not seen.depths and not seen.written
    output = html_of(panel)
    assert "Micro-batch 0, row 0, after step 2; took" in output and "1 pass of a micro-batch, keeps" in output
    assert 'aria-label="The stream over depth"' in output
    find(panel, "show").value = "spread"
    assert 'aria-label="Activations after each layer"' in html_of(panel)
    find(panel, "show").value = "attention"
    assert "no attention maps were requested" in html_of(panel)
    find(panel, "show").value = "text"
    assert "No text was generated" in html_of(panel)
    find(panel, "The view as a table").value = True


def test_look_uses_the_controls_and_its_code_does_the_same(panel: InsidePanel) -> None:
    assert code(panel) == "inside = workbench.look().result()" and "takes 1 pass" in html_of(panel)
    find(panel, "layers").value = ["L001", "L003"]
    find(panel, "micro-batch").value = 1
    find(panel, "row").value = 1
    find(panel, "positions").value = 4
    find(panel, "attention maps").value = True
    find(panel, "head at each depth").value = True
    find(panel, "tokens to write").value = 2
    assert "takes up to 10 passes" in html_of(panel)
    seen = press(panel)
    assert (seen.keys, seen.micro_batches, seen.row, seen.passes) == (("L001", "L003"), (1,), 1, 10)
    line = code(panel)
    assert line == (
        "inside = workbench.look(['L001', 'L003'], micro_batches=[1], row=1, positions=4, attention=True, lens=True, "
        "generate=2).result()"
    )
    scope: dict[str, Any] = {"workbench": panel.session}
    exec(line, scope)
    again: Inside = scope["inside"]
    assert [one.left for one in again.passings] == [one.left for one in seen.passings]
    assert [one.loss for one in again.depths] == [one.loss for one in seen.depths] and again.written == seen.written
    for part, label in (("attention", "Attention"), ("lens", "Head output at each depth")):
        find(panel, "show").value = part
        assert f'aria-label="{label}"' in html_of(panel)
    find(panel, "show").value = "text"
    prompt = letters(seen.tokens[1][:4].tolist())
    assert f"<mark>{prompt}</mark>{letters(seen.written[0].tokens)}" in html_of(panel)
    assert len(panel.still(panel.session.snapshot())) == 5


def test_heads_of_the_selected_layer_are_shown(panel: InsidePanel) -> None:
    find(panel, "attention maps").value = True
    press(panel)
    heads = find(panel, "heads of layer")
    assert heads.layout.display == "none"
    find(panel, "show").value = "attention"
    assert heads.layout.display == "" and "layer 0 · L000: 2 heads" in html_of(panel)
    heads.value = "L002"
    assert "layer 2 · L002: 2 heads" in html_of(panel)


def test_old_look_is_marked_and_keeps_its_numbers(panel: InsidePanel) -> None:
    press(panel)
    train(panel.session, 1)
    panel.session.edit(Insert(0))
    panel.session.wait(HANG_S)
    shown(panel)
    assert "old: after step 2, now it is step 3" in html_of(panel)
    assert "layer 3 · L003" in html_of(panel), "numbers at the time of the look"
    assert find(panel, "layers").options[0][1] == "L004"
    find(panel, "layers").value = ["L000", "L002"]
    panel.session.edit(Drop("L000"))
    panel.session.wait(HANG_S)
    shown(panel)
    assert find(panel, "layers").value == ("L002",), "the remaining layer stays selected"


def test_look_waits_for_the_current_step(relay: Relay) -> None:
    with Session(relay, make_batches(), probe=make_batches(8)[5:]) as session:
        panel = InsidePanel(session)
        with held(relay):
            session.run(3)
            enter(relay)
            find(panel, "Look").click()
            assert "Looking, or waiting" in html_of(panel) and find(panel, "Look").disabled
        now = session.wait(HANG_S)
        wait_until(lambda: panel._inside is not None)
        shown(panel)
        assert (
            now.step == 3 and panel._inside is not None and panel._inside.step == 1 and not find(panel, "Look").disabled
        )


def test_failed_look_shows_the_reason(relay: Relay) -> None:
    with Session(relay, make_batches(), probe=False) as session:
        panel = InsidePanel(session)
        find(panel, "Look").click()
        wait_until(lambda: bool(panel._failure_reason))
        shown(panel)
        assert "The look failed: no batch has been trained on yet" in html_of(panel)
        assert session.wait(HANG_S).state == "idle"
        relay.model[2].error = RuntimeError("in the middle")
        future = session.look(batch=make_batches()[0])
        with pytest.raises(ValueError, match="in the middle"):
            future.result(HANG_S)
        relay.model[2].error = None
        train(session, 2)
        assert session.snapshot().state == "idle" and session.snapshot().step == 2
        with pytest.raises(ValueError, match="row=9"):
            session.look(batch=make_batches()[0], row=9).result(HANG_S)
        assert session.look(batch=make_batches()[0]).result(HANG_S).step == 2
