"""Attention maps: of every layer the mean over its heads, and of one layer all heads. Rows look, columns are looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from l2l_core import Inside
from l2l_core.inside import Passing
from workbench.pictures import svg
from workbench.pictures.inside import WIDTH, drawn_of, evenly, row_words
from workbench.pictures.picture import Picture, Table
from workbench.pictures.png import write_png
from workbench.pictures.shades import Kind, Shades, draw_bar, palette, show_figure
from workbench.readings import Numbers, full_name, short_name

LAYERS, HEADS, POSITIONS = 12, 16, 48  # that are drawn at most
_PER_LINE, _APART = 8, 12
_SIDE = (WIDTH - _APART * (_PER_LINE - 1)) / _PER_LINE  # px of a map
_SMALL = (WIDTH - _APART * (LAYERS - 1)) / LAYERS
_KIND = Kind("share of attention", logarithmic=False, over="largest")


def show_attention(seen: Inside, numbers: Numbers, key: str | None) -> Picture:
    """Draw maps of the row; `key` is the layer whose heads are shown, None the last one that has any."""
    title, shown = "Attention", drawn_of(seen)
    having = [one for one in shown if one.attention]
    table = attention_table(seen, numbers)
    if not having:
        why = next((one.why_no_attention for one in shown if one.why_no_attention), "no attention maps were asked for")
        words = [svg.text(0, 20, words, style="dim") for words in (why,)]
        return Picture(svg.document(WIDTH, 40, title, why, words), table)
    chosen = next((one for one in having if one.key == key), having[-1])
    few = evenly(having, LAYERS)
    maps = chosen.attention[0].numpy()[:HEADS, :POSITIONS, :POSITIONS]
    means = [one.attention[0].numpy()[:, :POSITIONS, :POSITIONS].mean(0) for one in few]
    looked_at = np.concatenate(
        [each[each > 0].ravel() for each in (*means, maps)]
    )  # what a mask hides makes none darker
    shades = Shades.of(looked_at, _KIND)
    parts = [svg.text(0, 12, f"mean over heads, layer by layer; {row_words(seen)}", style="small")]
    for i, (one, mean) in enumerate(zip(few, means, strict=True)):
        parts += _map(mean, shades, i * (_SMALL + _APART), 20, _SMALL, f"layer {short_name(one.key, numbers)}")
    top = 20 + _SMALL + 48
    parts.append(svg.text(0, top - 8, _words(chosen, numbers), style="small"))
    for i, one_head in enumerate(maps):
        line, at = divmod(i, _PER_LINE)
        parts += _map(one_head, shades, at * (_SIDE + _APART), top + line * (_SIDE + 26), _SIDE, f"head {i}")
    bottom = top + (1 + (len(maps) - 1) // _PER_LINE) * (_SIDE + 26) + 8
    parts += draw_bar(shades, _KIND, 8, 260, bottom)
    parts.append(
        svg.text(
            284, bottom + 9, "share of a position's attention; rows look, columns are looked at", style="small dim"
        )
    )
    return Picture(svg.document(WIDTH, bottom + 32, title, f"{title}, {row_words(seen)}", parts), table)


def attention_table(seen: Inside, numbers: Numbers) -> Table:
    """Say of each layer how spread out its heads look, and how much they look at the first position."""
    rows = []
    for one in seen.passings:
        for at, maps in enumerate(one.attention):
            held = maps.numpy().astype(np.float64)
            rows.append((full_name(one.key, numbers), str(one.micro_batch), str(at), str(len(held)), *_figures(held)))
        if not one.attention:
            rows.append((full_name(one.key, numbers), str(one.micro_batch), "–", one.why_no_attention or "–", "–", "–"))
    header = ("layer", "micro-batch", "attention", "heads", "entropy", "at the first position")
    note = "Entropy: in nats, mean over heads and positions; 0 is all attention at one position."
    return Table("Attention", header, rows, note)


def _figures(maps: NDArray[np.float64]) -> Sequence[str]:
    logs = np.log(np.where(maps > 0, maps, 1.0))  # 0 log 0 counts as 0
    return show_figure(float(-(maps * logs).sum(-1).mean())), f"{float(maps[..., 0].mean()):.1%}"


def _words(one: Passing, numbers: Numbers) -> str:
    maps = one.attention[0]
    more = f", of which {HEADS} are shown" if maps.shape[0] > HEADS else ""
    others = f"; the first of {len(one.attention)} attentions" if len(one.attention) > 1 else ""
    heads = f"{maps.shape[0]} heads{more}{others}"
    return f"layer {full_name(one.key, numbers)}: {heads}, first {min(maps.shape[1], POSITIONS)} positions"


def _map(values: NDArray[np.float32], shades: Shades, x: float, y: float, side: float, words: str) -> Iterator[str]:
    yield svg.image(x, y, side, side, write_png(shades.pixels(values), palette()))
    yield svg.text(x + side / 2, y + side + 14, words, style="small", anchor="middle")
