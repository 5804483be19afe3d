"""Attention maps: the mean over heads of every layer, and all heads of one layer; rows are queries, columns keys."""

from __future__ import annotations

from collections.abc import Iterator

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

LAYERS, HEADS, POSITIONS = 12, 16, 48  # maximum numbers drawn
_PER_LINE, _APART = 8, 12
_SIDE = (WIDTH - _APART * (_PER_LINE - 1)) / _PER_LINE  # px, side of a map
_SMALL = (WIDTH - _APART * (LAYERS - 1)) / LAYERS
_KIND = FigureKind("share of attention", logarithmic=False, aggregate="largest")


def show_attention(inside: Inside, numbers: LayerNumbers, key: str | None) -> Picture:
    """Draw attention maps of the row; `key` is the layer whose heads are shown, None the last one with maps."""
    title, shown = "Attention", drawn_layers(inside)
    with_maps = [one for one in shown if one.attention]
    table = attention_table(inside, numbers)
    if not with_maps:
        why = next((one.why_no_attention for one in shown if one.why_no_attention), "no attention maps were requested")
        return Picture(svg.document(WIDTH, 40, title, why, [svg.text(0, 20, why, style="dim")]), table)
    chosen = next((one for one in with_maps if one.key == key), with_maps[-1])
    layers = sample_evenly(with_maps, LAYERS)
    maps = chosen.attention[0].numpy()[:HEADS, :POSITIONS, :POSITIONS]
    means = [one.attention[0].numpy()[:, :POSITIONS, :POSITIONS].mean(0) for one in layers]
    # without masked positions, whose zeros would shift the scale
    shades = ColourScale.of(np.concatenate([each[each > 0].ravel() for each in (*means, maps)]), _KIND)
    parts = [svg.text(0, 12, f"mean over heads, layer by layer; {describe_rows(inside)}", style="small")]
    for i, (one, mean) in enumerate(zip(layers, means, strict=True)):
        parts += _draw_map(mean, shades, i * (_SMALL + _APART), 20, _SMALL, f"layer {short_name(one.key, numbers)}")
    top = 20 + _SMALL + 48
    parts.append(svg.text(0, top - 8, _describe_map(chosen, numbers), style="small"))
    for i, one_head in enumerate(maps):
        line, at = divmod(i, _PER_LINE)
        parts += _draw_map(one_head, shades, at * (_SIDE + _APART), top + line * (_SIDE + 26), _SIDE, f"head {i}")
    bottom = top + (1 + (len(maps) - 1) // _PER_LINE) * (_SIDE + 26) + 8
    parts += draw_colour_bar(shades, _KIND, 8, 260, bottom)
    words = "share of a position's attention; rows are queries, columns are keys"
    parts.append(svg.text(284, bottom + 9, words, style="small dim"))
    return Picture(svg.document(WIDTH, bottom + 32, title, f"{title}, {describe_rows(inside)}", parts), table)


def attention_table(inside: Inside, numbers: LayerNumbers) -> Table:
    """Return a table of the entropy of each layer's attention and its share on the first position."""
    rows = []
    for one in inside.passings:
        layer = full_name(one.key, numbers), str(one.micro_batch)
        for i, maps in enumerate(one.attention):
            shares = maps.numpy().astype(np.float64)
            logs = np.log(np.where(shares > 0, shares, 1.0))  # 0 log 0 counts as 0
            entropy, first = float(-(shares * logs).sum(-1).mean()), float(shares[..., 0].mean())
            rows.append((*layer, str(i), str(len(shares)), format_figure(entropy), f"{first:.1%}"))
        if not one.attention:
            rows.append((*layer, "–", one.why_no_attention or "–", "–", "–"))
    header = ("layer", "micro-batch", "attention", "heads", "entropy", "at the first position")
    note = "Entropy: in nats, mean over heads and positions; 0 is all attention at one position."
    return Table("Attention", header, rows, note)


def _describe_map(one: LayerObservation, numbers: LayerNumbers) -> str:
    maps = one.attention[0]
    more = f", {HEADS} shown" if maps.shape[0] > HEADS else ""
    others = f"; the first of {len(one.attention)} attentions" if len(one.attention) > 1 else ""
    heads = f"{maps.shape[0]} heads{more}{others}"
    return f"layer {full_name(one.key, numbers)}: {heads}, first {min(maps.shape[1], POSITIONS)} positions"


def _draw_map(
    values: NDArray[np.float32], shades: ColourScale, x: float, y: float, side: float, words: str
) -> Iterator[str]:
    yield svg.image(x, y, side, side, write_png(shades.pixels(values), palette()))
    yield svg.text(x + side / 2, y + side + 14, words, style="small", anchor="middle")
