"""What the model predicts for one row, with a layer and without it, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from l2l_core import Inside
from l2l_core.inside import Depth
from workbench.pictures.inside import Decode, show_token
from workbench.pictures.picture import Table
from workbench.pictures.shades import show_figure

STYLE = """
.l2l-examples{overflow-x:auto;margin:4px 0}
.l2l-examples table{border-spacing:0;font:12px var(--jp-code-font-family,ui-monospace,monospace)}
.l2l-examples th{font:12px var(--jp-ui-font-family,system-ui,sans-serif);text-align:left;padding-right:12px;white-space:nowrap}
.l2l-examples td{padding:1px 3px;text-align:center;white-space:pre}
.l2l-examples .l2l-differs{background:color-mix(in srgb,currentColor 22%,transparent);font-weight:600}
""".replace("\n", "")


class Examples(NamedTuple):
    """Holds two looks at one row, of the whole model and without a layer, each with what the head says after the last layer."""

    whole: Inside
    without: Inside

    @property
    def why_not(self) -> str:
        """Why there is nothing to compare; "" if there is."""
        return next((one.why_not for one in self.depths if one.why_not), "")

    @property
    def depths(self) -> tuple[Depth, Depth]:
        """What the head says, with the layer and without it."""
        return self.whole.depths[0], self.without.depths[0]


def examples_html(found: Examples, decode: Decode | None) -> str:
    """Write a column for every position: what the row has there, and the likeliest token with and without the layer."""
    if found.why_not:
        return f'<p class="l2l-caption">No predictions: {escape(found.why_not)}</p>'
    rows = [("in the row", _given(found, decode)), *_said(found, decode)]
    differs, lines = _differs(found), []
    for i, (words, said) in enumerate(rows):
        cells = "".join(_cell(each, i > 0 and differs[at]) for at, each in enumerate(said))
        lines.append(f'<tr><th scope="row">{words}</th>{cells}</tr>')
    return (
        f'<div class="l2l-caption">{escape(_words(found))}</div>'
        f'<div class="l2l-examples"><table>{"".join(lines)}</table></div>'
    )


def examples_table(found: Examples, decode: Decode | None) -> Table:
    """Make a table of the same, with a row for every position."""
    if found.why_not:
        return Table("Predictions with and without the layer", ("position",), [], f"None: {found.why_not}")
    (_, whole), (_, without) = _said(found, decode)
    given = [words for words, _ in _given(found, decode)]
    rows = [
        (str(i), given[i], " ".join(whole[i]), " ".join(without[i]), "differs" if differs else "")
        for i, differs in enumerate(_differs(found))
    ]
    header = ("position", "in the row", "with it", "without it", "")
    return Table("Predictions with and without the layer", header, rows, _words(found))


def _differs(found: Examples) -> Sequence[bool]:
    """Whether the two looks predict different tokens, by position; two tokens may be the same text."""
    whole, without = found.depths
    assert whole.tokens is not None and without.tokens is not None, "there is something to compare"
    return (whole.tokens[:, 0] != without.tokens[:, 0]).tolist()


def _words(found: Examples) -> str:
    whole, without = found.depths
    differs = _differs(found)
    losses = [
        f"{show_figure(one.loss)} {words}" for one, words in ((whole, "with it"), (without, "without it")) if one.loss
    ]
    return f"{sum(differs)} of {len(differs)} predictions differ; loss of this micro-batch: {', '.join(losses)}."


def _given(found: Examples, decode: Decode | None) -> Sequence[tuple[str, str]]:
    whole, _ = found.depths
    row = found.whole.tokens.get(found.whole.micro_batches[0])
    count = 0 if whole.tokens is None else len(whole.tokens)
    if row is None or count == 1:  # no tokens, or one prediction for all of them
        return [("–", "")] * count
    return [(show_token(token, decode), "") for token in row[:count].tolist()]


def _said(found: Examples, decode: Decode | None) -> list[tuple[str, Sequence[tuple[str, str]]]]:
    """The likeliest tokens and their chances, with the layer and without it."""
    said = []
    for words, one in zip(("with it", "without it"), found.depths, strict=True):
        assert one.tokens is not None and one.chances is not None, "there is something to compare"
        pairs = zip(one.tokens[:, 0].tolist(), one.chances[:, 0].tolist(), strict=True)
        said.append((words, [(show_token(token, decode), f"{chance:.0%}") for token, chance in pairs]))
    return said


def _cell(said: tuple[str, str], differs: bool) -> str:
    token, chance = said
    named = ' class="l2l-differs"' if differs else ""
    tip = f' title="{chance}"' if chance else ""
    return f"<td{named}{tip}>{escape(token)}</td>"
