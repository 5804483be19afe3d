"""The model's next words after a text of the user, at several depths, with all layers or without some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from l2l_core import Inside
from l2l_core.inside import LensResult
from workbench.pictures import svg
from workbench.pictures.inside_stream import WIDTH, Decode, show_token
from workbench.pictures.picture import Picture, Table
from workbench.pictures.relay_drawing import shortened
from workbench.pictures.theme import BLUE, ORANGE
from workbench.readings import LayerNumbers, short_name

TOP_TOKENS = 5
_TITLE = "Next words by depth"
_TOP, _HIGH, _APART = 24, 24, 10  # px

STYLE = (
    """
.l2l-own-text{border-bottom:1px solid var(--jp-border-color2,#8884);margin-bottom:6px;padding-bottom:4px}
.l2l-own-text .l2l-next{font-size:15px;padding:2px 0;overflow-wrap:anywhere}
.l2l-own-text .l2l-next strong,.l2l-tokens span{font-family:var(--jp-code-font-family,ui-monospace,monospace);white-space:pre}
.l2l-own-text .l2l-next strong{padding:0 5px;border-radius:3px;background:color-mix(in srgb,@BLUE 30%,transparent)}
.l2l-own-text .l2l-next strong.l2l-changed{background:color-mix(in srgb,@ORANGE 55%,transparent)}
.l2l-tokens{font-size:13px;line-height:1.7;max-height:5.2em;overflow:auto}
.l2l-tokens span{display:inline-block;padding:0 4px;margin:0 2px 2px 0;border-radius:3px;
background:color-mix(in srgb,currentColor 9%,transparent)}
.l2l-workbench:fullscreen .l2l-own-text .l2l-next{font-size:21px}
""".replace("\n", "")
    .replace("@BLUE", BLUE)
    .replace("@ORANGE", ORANGE)
)


class NextWords(NamedTuple):
    """Two looks inside with one text; the head's output at its last position is drawn.

    Attributes:
        inside: the look, with one or several depths, without the layers `left_out`.
        whole: the look with all layers; equal to `inside` if none is left out.
        left_out: keys of the layers that did not run.
    """

    inside: Inside
    whole: Inside
    left_out: Sequence[str] = ()

    @property
    def missing_reason(self) -> str:
        """Why there are no next words; "" if there are some."""
        last = self.inside.depths[-1]
        for one in (last, self.whole.depths[-1]):
            if one.why_not:
                return one.why_not
        if last.tokens is not None and len(last.tokens) < len(self.inside.tokens[self.inside.micro_batches[0]]):
            return "the model predicts one class of a row, and no next word at each position"
        return ""


def next_words_html(found: NextWords, decode: Decode | None) -> str:
    """Return the tokens of the text, and the likeliest next word without and with the layers left out, as HTML."""
    row = found.inside.tokens[found.inside.micro_batches[0]].tolist()
    shown = "".join(f'<span title="token {token}">{escape(show_token(token, decode))}</span>' for token in row)
    tokens = f'<div class="l2l-tokens" role="group" aria-label="Tokens of the text" tabindex="0">{shown}</div>'
    if found.missing_reason:
        return f'{tokens}<div class="l2l-next" role="status">No next words: {escape(found.missing_reason)}</div>'
    (word, chance), (before, chance_before) = (
        _best(each.depths[-1], decode)[0] for each in (found.inside, found.whole)
    )
    words = f"Next: {_marked(word, chance, word != before)}"
    if found.left_out:
        same = "the same with all layers" if word == before else "with all layers"
        words += f", {same} {_marked(before, chance_before, False)}"
    return f'{tokens}<div class="l2l-next" role="status">{words}</div>'


def _marked(word: str, chance: float, is_changed: bool) -> str:
    marked = ' class="l2l-changed"' if is_changed else ""
    return f"<strong{marked}>{escape(word)}</strong> {chance:.0%}"


def show_next_words(found: NextWords, numbers: LayerNumbers, decode: Decode | None) -> Picture:
    """Draw a column of bars per depth: the likeliest next words, as wide as they are likely."""
    table = next_words_table(found, numbers, decode)
    columns = [(_describe_depth(one, found, numbers), one) for one in found.inside.depths]
    columns += [("with all layers", found.whole.depths[-1])] if found.left_out else []
    wide = (WIDTH + _APART) / len(columns)
    before = {word for word, _ in _best(found.whole.depths[-1], decode)}
    parts: list[str] = []
    for i, (name, one) in enumerate(columns):
        is_last = one is found.inside.depths[-1]
        new = before if is_last and found.left_out else None
        parts += _column(name, one, i * wide, wide - _APART, decode, new, is_last)
    height = _TOP + _HIGH * TOP_TOKENS + 4
    return Picture(svg.document(WIDTH, height, _TITLE, table.to_text(), parts), table)


def next_words_table(found: NextWords, numbers: LayerNumbers, decode: Decode | None) -> Table:
    """Return a table with a row per depth."""
    header = ("depth", *(f"word {i}" for i in range(1, TOP_TOKENS + 1)))
    looks = [(_describe_depth(one, found, numbers), one) for one in found.inside.depths]
    looks += [("with all layers", found.whole.depths[-1])] if found.left_out else []
    rows = []
    for name, one in looks:
        words = [f"{word} {chance:.0%}" for word, chance in _best(one, decode)]
        rows.append((name, *words, *["–"] * (TOP_TOKENS - len(words))))
    return Table(_TITLE, header, rows, "The layers after each depth are left out, as if they had been dropped.")


def _describe_depth(one: LensResult, found: NextWords, numbers: LayerNumbers) -> str:
    if one is not found.inside.depths[-1]:
        return f"up to layer {short_name(one.key, numbers)}"
    if not found.left_out:
        return "all layers"
    left = [short_name(key, numbers) for key in found.left_out]
    return f"without {', '.join(left)}" if len(left) < 4 else f"without {len(left)} layers"


def _best(one: LensResult, decode: Decode | None) -> list[tuple[str, float]]:
    """Return the likeliest words after the last position with their probabilities."""
    if one.tokens is None or one.chances is None:
        return []
    pairs = zip(one.tokens[-1].tolist(), one.chances[-1].tolist(), strict=True)
    return [(_name(token, decode), chance) for token, chance in pairs]


def _name(token: int, decode: Decode | None) -> str:
    """Return a token as a word; a space alone would hardly be seen."""
    word = show_token(token, decode)
    return "(space)" if word == "·" else word


def _column(
    name: str, one: LensResult, x: float, wide: float, decode: Decode | None, before: set[str] | None, is_strong: bool
) -> Iterator[str]:
    """Draw one depth; words that are not in `before` have another colour."""
    yield svg.text(x, 13, shortened(name, int(wide / 6.5)), strong=is_strong)
    if one.why_not:
        yield svg.rect(x, _TOP, wide, _HIGH * TOP_TOKENS, style="well", tip=one.why_not)
        yield svg.text(x + 6, _TOP + 16, "no words", style="small dim")
    for i, (word, chance) in enumerate(_best(one, decode)):
        y = _TOP + i * _HIGH
        colour = ORANGE if before is not None and word not in before else BLUE
        yield svg.rect(x, y, wide, _HIGH - 3, style="well", tip=f"{name}: {word} {chance:.1%}")
        bar = svg.rect(x, y, max(wide * chance, 1), _HIGH - 3, fill=colour)
        yield f'<g fill-opacity="{0.75 if is_strong else 0.45}">{bar}</g>'
        text = svg.text(x + 6, y + 15, shortened(word, max(2, int((wide - 32) / 8))), style="code", size=13)
        yield svg.outlined_text(text + svg.text(x + wide - 4, y + 15, f"{chance:.0%}", style="small", anchor="end"), 2)
