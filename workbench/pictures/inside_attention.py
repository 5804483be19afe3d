"""Attention maps: of every layer the mean over its heads, and of one layer all heads. Rows look, columns are looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from l2l_core import Inside
from l2l_core.inside import LayerObservation
from workbench.pictures import svg
from workbench.pictures.colour_map import ColourScale, FigureKind, draw_colour_bar, format_figure, palette
from workbench.pictures.inside_stream import WIDTH, describe_rows, drawn_layers, sample_evenly
from workbench.pictures.picture import Picture, Table
from workbench.pictures.png import write_png
from workbench.readings import LayerNumbers, full_name, short_name

LAYERS, HEADS, POSITIONS = 12, 16, 48  # that are drawn at most
_PER_LINE, _APART = 8, 12
_SIDE = (WIDTH - _APART * (_PER_LINE - 1)) / _PER_LINE  # px of a map
_SMALL = (WIDTH - _APART * (LAYERS - 1)) / LAYERS
_KIND = FigureKind("share of attention", logarithmic=False, aggregate="largest")


def show_attention(inside: Inside, numbers: LayerNumbers, key: str | None) -> Picture:
    """Draw maps of the row; `key` is the layer whose heads are shown, None the last one that has any."""
    title, shown = "Attention", drawn_layers(inside)
    having = [one for one in shown if one.attention]
    table = attention_table(inside, numbers)
    if not having:
        why = next((one.why_no_attention for one in shown if one.why_no_attention), "no attention maps were asked for")
        words = [svg.text(0, 20, words, style="dim") for words in (why,)]
        return Picture(svg.document(WIDTH, 40, title, why, words), table)
    chosen = next((one for one in having if one.key == key), having[-1])
    few = sample_evenly(having, LAYERS)
    maps = chosen.attention[0].numpy()[:HEADS, :POSITIONS, :POSITIONS]
    means = [one.attention[0].numpy()[:, :POSITIONS, :POSITIONS].mean(0) for one in few]
    looked_at = np.concatenate(
        [each[each > 0].ravel() for each in (*means, maps)]
    )  # what a mask hides makes none darker
    shades = ColourScale.of(looked_at, _KIND)
    parts = [svg.text(0, 12, f"mean over heads, layer by layer; {describe_rows(inside)}", style="small")]
    for i, (one, mean) in enumerate(zip(few, means, strict=True)):
        parts += _draw_map(mean, shades, i * (_SMALL + _APART), 20, _SMALL, f"layer {short_name(one.key, numbers)}")
    top = 20 + _SMALL + 48
    parts.append(svg.text(0, top - 8, _describe_map(chosen, numbers), style="small"))
    for i, one_head in enumerate(maps):
        line, at = divmod(i, _PER_LINE)
        parts += _draw_map(one_head, shades, at * (_SIDE + _APART), top + line * (_SIDE + 26), _SIDE, f"head {i}")
    bottom = top + (1 + (len(maps) - 1) // _PER_LINE) * (_SIDE + 26) + 8
    parts += draw_colour_bar(shades, _KIND, 8, 260, bottom)
    parts.append(
        svg.text(
            284, bottom + 9, "share of a position's attention; rows look, columns are looked at", style="small dim"
        )
    )
    return Picture(svg.document(WIDTH, bottom + 32, title, f"{title}, {describe_rows(inside)}", parts), table)


def attention_table(inside: Inside, numbers: LayerNumbers) -> Table:
    """Say of each layer how spread out its heads look, and how much they look at the first position."""
    rows = []
    for one in inside.passings:
        for at, maps in enumerate(one.attention):
            held = maps.numpy().astype(np.float64)
            rows.append(
                (full_name(one.key, numbers), str(one.micro_batch), str(at), str(len(held)), *_attention_figures(held))
            )
        if not one.attention:
            rows.append((full_name(one.key, numbers), str(one.micro_batch), "–", one.why_no_attention or "–", "–", "–"))
    header = ("layer", "micro-batch", "attention", "heads", "entropy", "at the first position")
    note = "Entropy: in nats, mean over heads and positions; 0 is all attention at one position."
    return Table("Attention", header, rows, note)


def _attention_figures(maps: NDArray[np.float64]) -> Sequence[str]:
    logs = np.log(np.where(maps > 0, maps, 1.0))  # 0 log 0 counts as 0
    return format_figure(float(-(maps * logs).sum(-1).mean())), f"{float(maps[..., 0].mean()):.1%}"


def _describe_map(one: LayerObservation, numbers: LayerNumbers) -> str:
    maps = one.attention[0]
    more = f", of which {HEADS} are shown" if maps.shape[0] > HEADS else ""
    others = f"; the first of {len(one.attention)} attentions" if len(one.attention) > 1 else ""
    heads = f"{maps.shape[0]} heads{more}{others}"
    return f"layer {full_name(one.key, numbers)}: {heads}, first {min(maps.shape[1], POSITIONS)} positions"


def _draw_map(
    values: NDArray[np.float32], shades: ColourScale, x: float, y: float, side: float, words: str
) -> Iterator[str]:
    yield svg.image(x, y, side, side, write_png(shades.pixels(values), palette()))
    yield svg.text(x + side / 2, y + side + 14, words, style="small", anchor="middle")
