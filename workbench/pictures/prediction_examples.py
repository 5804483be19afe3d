"""Predictions of the model for one row, with and without a layer."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from l2l_core import Inside
from l2l_core.inside import LensResult
from workbench.pictures.inside_stream import NO_DECODE, Decode, show_token
from workbench.pictures.picture import Table

STYLE = """
.l2l-examples{overflow-x:auto;margin:4px 0}
.l2l-examples table{border-spacing:0;font:12px var(--jp-code-font-family,ui-monospace,monospace)}
.l2l-examples th{font:12px var(--jp-ui-font-family,system-ui,sans-serif);text-align:left;padding-right:12px;white-space:nowrap}
.l2l-examples td{padding:1px 3px;text-align:center;white-space:pre}
.l2l-examples .l2l-differs{background:color-mix(in srgb,currentColor 22%,transparent);font-weight:600}
""".replace("\n", "")


class Examples(NamedTuple):
    """Two looks inside at one row, with and without a layer, each with the head's output after the last layer."""

    with_layer: Inside
    without: Inside

    @property
    def missing_reason(self) -> str:
        """Why predictions are missing; "" if both exist."""
        return next((one.why_not for one in self.depths if one.why_not), "")

    @property
    def depths(self) -> tuple[LensResult, LensResult]:
        """The head's outputs with and without the layer."""
        return self.with_layer.depths[0], self.without.depths[0]


def examples_html(examples: Examples, decode: Decode | None) -> str:
    """Return an HTML table with a column per position: the row's token, and the likeliest with and without the layer."""
    if examples.missing_reason:
        return f'<p class="l2l-caption">No predictions: {escape(examples.missing_reason)}</p>'
    rows = [("in the row", _row_tokens(examples, decode)), *_predicted_tokens(examples, decode)]
    differs, lines = _differing_positions(examples), []
    for i, (name, tokens) in enumerate(rows):
        cells = "".join(_cell(token, i > 0 and differs[position]) for position, token in enumerate(tokens))
        lines.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    return (
        f'<div class="l2l-caption">{escape(_with_hint(_describe(examples), decode))}</div>'
        f'<div class="l2l-examples"><table>{"".join(lines)}</table></div>'
    )


def _with_hint(words: str, decode: Decode | None) -> str:
    return f"{words} {NO_DECODE}" if decode is None else words


def examples_table(examples: Examples, decode: Decode | None) -> Table:
    """Return a table with a row per position."""
    if examples.missing_reason:
        return Table("Predictions with and without the layer", ("position",), [], f"None: {examples.missing_reason}")
    (_, whole), (_, without) = _predicted_tokens(examples, decode)
    tokens = [words for words, _ in _row_tokens(examples, decode)]
    rows = [
        (str(i), tokens[i], " ".join(whole[i]), " ".join(without[i]), "differs" if differs else "")
        for i, differs in enumerate(_differing_positions(examples))
    ]
    header = ("position", "in the row", "with it", "without it", "")
    return Table("Predictions with and without the layer", header, rows, _with_hint(_describe(examples), decode))


def _differing_positions(examples: Examples) -> Sequence[bool]:
    """Return True for each position with different tokens; two tokens may have the same text."""
    whole, without = examples.depths
    assert whole.tokens is not None and without.tokens is not None, examples.missing_reason
    return (whole.tokens[:, 0] != without.tokens[:, 0]).tolist()


def _describe(examples: Examples) -> str:
    whole, without = examples.depths
    differs = _differing_positions(examples)
    losses = [f"{one.loss:.5g} {words}" for one, words in ((whole, "with it"), (without, "without it")) if one.loss]
    return f"{sum(differs)} of {len(differs)} predictions differ; loss of this micro-batch: {', '.join(losses)}."


def _row_tokens(examples: Examples, decode: Decode | None) -> Sequence[tuple[str, str]]:
    whole, _ = examples.depths
    row = examples.with_layer.tokens.get(examples.with_layer.micro_batches[0])
    count = 0 if whole.tokens is None else len(whole.tokens)
    if row is None or count == 1:  # no tokens, or one prediction for all of them
        return [("–", "")] * count
    return [(show_token(token, decode), "") for token in row[:count].tolist()]


def _predicted_tokens(examples: Examples, decode: Decode | None) -> list[tuple[str, Sequence[tuple[str, str]]]]:
    """Return the likeliest tokens and their probabilities, with and without the layer."""
    predictions = []
    for words, one in zip(("with it", "without it"), examples.depths, strict=True):
        assert one.tokens is not None and one.chances is not None, examples.missing_reason
        pairs = zip(one.tokens[:, 0].tolist(), one.chances[:, 0].tolist(), strict=True)
        predictions.append((words, [(show_token(token, decode), f"{chance:.0%}") for token, chance in pairs]))
    return predictions


def _cell(prediction: tuple[str, str], differs: bool) -> str:
    token, chance = prediction
    named = ' class="l2l-differs"' if differs else ""
    tip = f' title="{chance}"' if chance else ""
    return f"<td{named}{tip}>{escape(token)}</td>"
