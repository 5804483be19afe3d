"""Predictions with and without a layer on its card, compared with the model in core."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from html import unescape
from typing import Any

import pytest
import torch
from panel_reading import find, html_of, shown
from patience import HANG_S
from sessions import train, wait_until
from small import make_batch, make_gpt
from small import make_relay as make_decoder

from l2l_core import Drop, Relay
from workbench.panels.card_panel import CardPanel
from workbench.session.session import Session

BATCH = make_batch(5)


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


@pytest.fixture
def panel() -> Iterator[CardPanel]:
    """Card of the second of four layers of a decoder after two steps."""
    with (
        make_decoder(make_gpt()) as relay,
        Session(relay, [make_batch(0)], probe=[BATCH], decode=letters) as session,
    ):
        train(session, 2)
        made = CardPanel(session)
        shown(made)
        find(made, "card of").value = "L001"
        session.wait(HANG_S)
        shown(made)
        yield made


def press(panel: CardPanel) -> str:
    before = panel._predictions.found
    find(panel, "Predictions without it").click()
    wait_until(lambda: panel._predictions.found is not before)
    panel.session.wait(HANG_S)
    shown(panel)
    return unescape(html_of(panel))


def in_core(relay: Relay, without: int | None = None) -> torch.Tensor:
    """Return the most likely tokens of the probe's first row, (positions,), with plain PyTorch."""
    model: Any = copy.deepcopy(relay.model).eval()
    if without is not None:
        del model.transformer.h[without]
    with torch.no_grad():
        return model(**{name: tensor[:2] for name, tensor in BATCH.items()}, use_cache=False).logits[0].argmax(-1)


def test_predictions_equal_those_in_core(panel: CardPanel) -> None:
    assert "predictions differ" not in html_of(panel)
    output = press(panel)
    rows = dict(re.findall(r'<tr><th scope="row">([^<]+)</th>(.*?)</tr>', output))
    whole, without = in_core(panel.session.relay), in_core(panel.session.relay, 1)
    for words, tokens in (("in the row", BATCH["input_ids"][0]), ("with it", whole), ("without it", without)):
        cells = re.findall(r"<td[^>]*>([^<]*)</td>", rows[words])
        assert cells == [letters([token]) for token in tokens.tolist()][: len(cells)] and len(cells) == len(tokens)
    differ = int((whole != without).sum())
    assert f"{differ} of {len(whole)} predictions differ" in output and rows["with it"].count("l2l-differs") == differ
    assert "(after step 2)" in output
    table = panel.still(panel.session.snapshot())[1]
    assert table.to_text().count("differs") == differ


def test_different_tokens_with_equal_text_count_as_different(panel: CardPanel) -> None:
    panel.session.decode = lambda tokens: "x" * len(tokens)
    output = press(panel)
    differ = int((in_core(panel.session.relay) != in_core(panel.session.relay, 1)).sum())
    assert differ and f"{differ} of " in output and output.count('class="l2l-differs"') == 2 * differ
    assert panel.still(panel.session.snapshot())[1].to_text().count("differs") == differ


def test_code_gives_the_same_predictions(panel: CardPanel) -> None:
    output = press(panel)
    (line,) = re.findall(r"<code>(workbench\.look\(.*?\))</code>", output)
    seen = eval(line, {"workbench": panel.session}).result(HANG_S)
    found = panel._predictions.found["L001"].examples
    assert found is not None and torch.equal(seen.depths[0].tokens, found.without.depths[0].tokens)


def test_last_layer_and_old_predictions(panel: CardPanel) -> None:
    find(panel, "card of").value = "L003"
    press(panel)
    found = panel._predictions.found["L003"].examples
    assert found is not None
    assert torch.equal(found.without.depths[0].tokens[:, 0], in_core(panel.session.relay, 3))  # type: ignore[index]
    train(panel.session, 1)
    shown(panel)
    assert "old: after step 2" in html_of(panel)


def test_refused_look_shows_the_reason(panel: CardPanel) -> None:
    panel.session.edit(Drop("L000"), Drop("L002"), Drop("L003"))
    panel.session.wait(HANG_S)
    shown(panel)
    assert "all layers are left out" in press(panel)
    assert panel.session.snapshot().refusal is None


def test_hint_shows_how_to_get_text(panel: CardPanel) -> None:
    assert "pass Workbench(relay, batches, decode=" not in press(panel)
    panel.session.decode = None
    shown(panel)
    assert "pass Workbench(relay, batches, decode=tokenizer.decode)" in html_of(panel)
