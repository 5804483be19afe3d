"""Logit lens: the head's likeliest tokens after each depth, and the text that each depth generates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from l2l_core import Inside
from l2l_core.inside import Continuation, LensResult
from workbench.pictures import svg
from workbench.pictures.colour_map import format_figure
from workbench.pictures.inside_stream import NO_DECODE, WIDTH, Decode, describe_rows, sample_evenly, show_token
from workbench.pictures.picture import Picture, Table
from workbench.pictures.relay_drawing import shortened
from workbench.pictures.theme import BLUE
from workbench.readings import LayerNumbers, full_name

POSITIONS, DEPTHS = 16, 12  # maximum numbers drawn
_LEFT, _TOP, _HIGH, _RIGHT = 96, 62, 17, 88  # px

STYLE = """
.l2l-inside-text{font-size:12.5px;border-spacing:0;margin:4px 0}
.l2l-inside-text td,.l2l-inside-text th{padding:2px 14px 2px 0;text-align:left;font-weight:inherit;vertical-align:top}
.l2l-inside-text td{font-family:var(--jp-code-font-family,ui-monospace,monospace);white-space:pre-wrap;word-break:break-word}
.l2l-inside-text mark{background:color-mix(in srgb,@BLUE 22%,transparent);color:inherit}
""".replace("\n", "").replace("@BLUE", BLUE)


def show_lens(inside: Inside, numbers: LayerNumbers, decode: Decode | None) -> Picture:
    """Draw the logit lens: positions from top to bottom, depths from left to right, darker for likelier tokens."""
    title = "Head output at each depth"
    depths = [one for one in inside.depths if one.micro_batch == inside.micro_batches[0]]
    shown = sample_evenly(depths, DEPTHS)
    table = lens_table(inside, numbers, decode)
    length = max((len(one.tokens) for one in shown if one.tokens is not None), default=0)
    if not length:
        why = next((one.why_not for one in depths if one.why_not), "the head was not requested")
        return Picture(svg.document(WIDTH, 40, title, why, [svg.text(0, 20, shortened(why, 150), style="dim")]), table)
    first = f", the first {POSITIONS} positions of {length}" if length > POSITIONS else ""
    length = min(length, POSITIONS)
    row = inside.tokens.get(inside.micro_batches[0])
    # One token more than shown, for the last "next"; a single prediction belongs to the whole row, not to a token.
    row_tokens = [] if row is None or length == 1 else [show_token(t, decode) for t in row[: length + 1].tolist()]
    wide = (WIDTH - _LEFT - _RIGHT) / len(shown)
    parts = [
        svg.text(0, 12, f"{title}: {describe_rows(inside)}{first}", style="small"),
        *_draw_row_tokens(row_tokens, length),
    ]
    for i, one in enumerate(shown):
        parts += _column(one, _LEFT + i * wide, wide, length, decode)
    height = _TOP + _HIGH * length + 12
    return Picture(svg.document(WIDTH, height, title, f"{title}, {describe_rows(inside)}", parts), table)


def lens_table(inside: Inside, numbers: LayerNumbers, decode: Decode | None) -> Table:
    """Return a table of the first micro-batch's loss and likeliest token per depth and recorded position."""
    depths = [one for one in inside.depths if one.micro_batch == inside.micro_batches[0]]
    row = inside.tokens.get(inside.micro_batches[0])
    row_tokens = [] if row is None else [show_token(token, decode) for token in row.tolist()]
    header = ("position", "in the row", *(_layers(one.layers) for one in depths))
    rows = [("loss", "", *(format_figure(one.loss) for one in depths))]
    length = max((len(one.tokens) for one in depths if one.tokens is not None), default=0)
    for i in range(length):
        tokens = (_likeliest_token(one, i, decode) for one in depths)
        rows.append((str(i), row_tokens[i] if i < len(row_tokens) else "–", *tokens))
    notes = ["The layers above each depth are left out, as if they had been dropped."]
    notes += [f"{_layers(one.layers)} end with {full_name(one.key, numbers)}." for one in depths[-1:]]
    notes += [f"{_layers(one.layers)}: {one.why_not}." for one in depths if one.why_not]
    notes += [NO_DECODE] if decode is None and length else []
    return Table("Head output at each depth", header, rows, " ".join(notes))


def _hint(decode: Decode | None) -> str:
    return f" {NO_DECODE}" if decode is None else ""


def _likeliest_token(one: LensResult, position: int, decode: Decode | None) -> str:
    if one.tokens is None or one.chances is None:
        return "–"
    return f"{show_token(int(one.tokens[position, 0]), decode)} {float(one.chances[position, 0]):.0%}"


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"


def text_html(inside: Inside, numbers: LayerNumbers, decode: Decode | None) -> str:
    """Return the text that each depth generates as HTML, with the common prompt marked."""
    row, lines = inside.tokens.get(inside.micro_batches[0]), ""
    prompt = "" if row is None else _decode_tokens(row[: inside.prompt].tolist(), decode)
    for one in inside.written:
        written = f"<mark>{escape(prompt)}</mark>{escape(_decode_tokens(one.tokens, decode))}"
        written = escape(one.why_not) if one.why_not else written
        lines += f'<tr><th scope="row">{escape(_describe_depth(one, numbers))}</th><td>{written}</td></tr>'
    caption = f'<div class="l2l-caption">{escape(_describe_text(inside) + _hint(decode))}</div>'
    return f'{caption}<table class="l2l-inside-text">{lines}</table>'


def text_table(inside: Inside, numbers: LayerNumbers, decode: Decode | None) -> Table:
    """Return a table of the text that each depth generates."""
    rows = [
        (_describe_depth(one, numbers), one.why_not or _decode_tokens(one.tokens, decode)) for one in inside.written
    ]
    return Table("Text at each depth", ("depth", "continues with"), rows, _describe_text(inside) + _hint(decode))


def _draw_row_tokens(row_tokens: Sequence[str], length: int) -> Iterator[str]:
    """Draw the row's tokens on the left, and the next token at each position on the right."""
    if row_tokens:
        yield svg.text(_LEFT - 8, _TOP - 8, "given", style="small dim", anchor="end")
        yield svg.text(WIDTH - _RIGHT + 8, _TOP - 8, "next in the row", style="small dim")
    for i in range(length):
        y = _TOP + _HIGH * (i + 0.5) + 4
        words = f"{i}  {shortened(row_tokens[i], 10)}" if row_tokens else str(i)
        yield svg.text(_LEFT - 8, y, words, style="small code", anchor="end")
        if i + 1 < len(row_tokens):
            yield svg.text(WIDTH - _RIGHT + 8, y, shortened(row_tokens[i + 1], 10), style="small code")


def _column(one: LensResult, x: float, wide: float, length: int, decode: Decode | None) -> Iterator[str]:
    middle = x + wide / 2
    yield svg.text(middle, _TOP - 26, _layers(one.layers), style="small", anchor="middle")
    loss = "–" if one.loss is None else f"loss {format_figure(one.loss)}"
    yield svg.text(middle, _TOP - 10, loss, style="small dim", anchor="middle")
    if one.tokens is None or one.chances is None:
        tip = f"{_layers(one.layers)}: {one.why_not}"
        yield svg.rect(x + 1, _TOP, wide - 2, _HIGH * length, style="well", tip=tip)
        return
    for i, (tokens, chances) in enumerate(zip(one.tokens.tolist(), one.chances.tolist(), strict=True)):
        if i == length:
            break
        words = ", ".join(f"{show_token(t, decode)} {p:.0%}" for t, p in zip(tokens, chances, strict=True))
        y = _TOP + i * _HIGH
        share = 0.0 if not math.isfinite(chances[0]) else chances[0]
        cell = svg.rect(x + 1, y + 0.5, wide - 2, _HIGH - 1, fill=BLUE, tip=words)
        yield f'<g fill-opacity="{0.08 + 0.52 * share:.2f}">{cell}</g>'
        token = shortened(show_token(tokens[0], decode), max(2, int(wide / 7)))
        yield svg.text(middle, y + _HIGH / 2 + 4, token, style="small code", anchor="middle")


def _describe_depth(one: Continuation, numbers: LayerNumbers) -> str:
    return f"{_layers(one.layers)}, up to {full_name(one.key, numbers)}"


def _describe_text(inside: Inside) -> str:
    return f"Greedy decoding after the first {inside.prompt} tokens of the row (marked)."


def _decode_tokens(tokens: Sequence[int], decode: Decode | None) -> str:
    return decode(list(tokens)) if decode is not None else "".join(f" {token}" for token in tokens)
