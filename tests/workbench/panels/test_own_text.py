"""A text of the user in the view Inside: tokens, next words by depth, and layers pulled out and put back."""

from __future__ import annotations

import html
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from panel_reading import find, html_of, shown
from patience import HANG_S
from sessions import train, wait_until
from small import keys, make_batch, make_gpt, whole
from small import make_relay as make_decoder

from l2l_core import Drop, Relay
from workbench.panels.inside_panel import InsidePanel
from workbench.session.session import Session
from workbench.session.tokenizer import find_encode

LETTERS = "abcdefghijklmnopqrstuvwxyz .,-()"


def letters(tokens: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


@pytest.fixture
def panel() -> Iterator[InsidePanel]:
    """Panel of a decoder with four layers after two steps."""
    with make_decoder(make_gpt()) as relay, Session(relay, [make_batch(0)], decode=letters) as session:
        train(session, 2)
        made = InsidePanel(session)
        shown(made)
        yield made


def type_text(panel: InsidePanel, text: str) -> None:
    panel._own_text.text.value = text
    wait(panel)


def pull_out(panel: InsidePanel, *layers: str) -> None:
    panel._own_text.switches.left_out = list(layers)
    wait(panel)


def wait(panel: InsidePanel) -> None:
    wait_until(lambda: panel._own_text._running is None)
    shown(panel)


def words(panel: InsidePanel) -> str:
    return html.unescape(re.sub("<[^>]+>", "", panel._own_text._words.value))


def test_next_word_is_that_of_the_model(panel: InsidePanel) -> None:
    type_text(panel, "abc")
    relay = panel.session.relay
    tokens = torch.tensor([[0, 1, 2]])
    table = panel._own_text.still()[0].table
    assert [row[0] for row in table.rows] == ["up to layer 0", "up to layer 1", "up to layer 2", "all layers"]
    batch = {"input_ids": tokens.expand(4, -1), "labels": tokens.expand(4, -1)}
    depth = relay.look(batch, ["L003"], lens=True, top=5).depths[0]
    assert depth.tokens is not None and depth.chances is not None
    best = zip(depth.tokens[-1].tolist(), depth.chances[-1].tolist(), strict=True)
    shown_words = [f"{letters([token]).replace(' ', '(space)')} {chance:.0%}" for token, chance in best]
    assert list(table.rows[-1][1:]) == shown_words
    assert words(panel).startswith("abcNext: ") and 'aria-label="Next words by depth"' in html_of(panel)


def test_layers_are_pulled_out_and_put_back_without_an_edit(panel: InsidePanel) -> None:
    session = panel.session
    before = whole(session.relay)
    type_text(panel, "a cat")
    with_all = panel._own_text.still()[0].table.rows
    pull_out(panel, "L002", "L000")
    table = panel._own_text.still()[0].table
    assert [row[0] for row in table.rows] == ["up to layer 1", "without 0, 2", "with all layers"]
    assert table.rows[-1][1:] == with_all[-1][1:] != table.rows[-2][1:]
    assert "with all layers" in words(panel)
    line = re.search(r"<code>(.*?)</code>", panel._own_text._code.value)
    assert line
    scope: dict[str, Any] = {"workbench": session}
    exec(html.unescape(line[1]), scope)
    assert scope["inside"].keys == ("L001", "L003") and len(scope["inside"].tokens[0]) == 5
    pull_out(panel, *keys(session.relay))
    assert "No next words: every layer is pulled out: put one back" in html_of(panel)
    find(panel, "Put all back").click()
    wait(panel)
    assert panel._own_text.still()[0].table.rows == with_all
    after = whole(session.relay)
    assert all(torch.equal(before[name], after[name]) for name in before) and not session.snapshot().journal


def test_newest_text_is_shown_and_a_dropped_layer_is_put_back(panel: InsidePanel, monkeypatch: Any) -> None:
    gate, texts = threading.Event(), list[str]()
    look = panel.session.look
    monkeypatch.setattr(
        panel.session, "look", lambda *args, **options: texts.append(options["text"]) or look(*args, **options)
    )
    panel.session.edit(lambda _: gate.wait(HANG_S))
    for text in ("a", "ab", "abc"):
        panel._own_text.text.value = text
    gate.set()
    wait(panel)
    assert words(panel).startswith("abcNext") and texts == ["a", "abc", "abc"], "no look at what is old"
    pull_out(panel, "L001")
    panel.session.edit(Drop("L001")).result()
    shown(panel)
    wait(panel)
    assert panel._own_text.switches.left_out == [] and "without" not in html_of(panel)
    assert len(panel._own_text.switches.layers) == 3
    train(panel.session, 1)
    shown(panel)
    assert "old: after step 2, now it is step 3" in panel._own_text._status.value
    find(panel, "Look again").click()
    wait(panel)
    assert "With the weights after step 3." in panel._own_text._status.value


def test_text_without_tokens_is_refused_with_a_remedy_that_works(panel: InsidePanel) -> None:
    type_text(panel, "aé")
    assert "No next words: text='aé': no token of the model stands for 'é': leave it out" in html.unescape(
        html_of(panel)
    )
    type_text(panel, "a")
    assert words(panel).startswith("aNext") and "No next words" not in html_of(panel)
    type_text(panel, "abcdefghij")  # a row has eight positions
    assert words(panel).startswith("cdefghijNext")
    with pytest.raises(ValueError, match="at least one character"):
        panel.session.look(text="").result()
    with make_decoder(make_gpt()) as relay, Session(relay, [make_batch(0)]) as session:
        mute = InsidePanel(session)
        shown(mute)
        assert "A text cannot be typed here: no tokenizer was found" in html_of(mute)
        with pytest.raises(ValueError, match=re.escape("decode=tokenizer.decode)")):
            session.look(text="a")
    with make_decoder(make_gpt()) as relay, Session(relay, [make_batch(0)], decode=letters) as session:
        train(session, 1)
        assert len(session.look(text="a").result().tokens[0]) == 1


def test_nothing_runs_before_a_text_is_typed(panel: InsidePanel, monkeypatch: Any) -> None:
    calls: list[object] = []
    monkeypatch.setattr(Relay, "look", lambda *_, **__: calls.append(1))
    train(panel.session, 1)
    shown(panel)
    find(panel, "Look again").click()
    shown(panel)
    assert not calls and keys(panel.session.relay)


def test_decoder_without_an_inverse_says_so() -> None:
    model = make_gpt()
    encode = find_encode(letters, model)
    assert encode is not None and encode("a cat") == [0, 26, 2, 0, 19]
    once = find_encode(lambda tokens: letters(tokens[:1]), model)
    assert once is not None
    with pytest.raises(ValueError, match=r"tokens decode to 'a'.*pass decode="):
        once("ab")
    assert find_encode(None, model) is None and find_encode(letters, torch.nn.Linear(2, 2)) is None
