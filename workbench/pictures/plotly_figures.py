"""Plotly figures to zoom and hover: the timeline, memory, and losses of several runs.

Live panels use SVG instead. Figures load nothing from the network; the page provides plotly's script. Backgrounds are
transparent and lines grey, so that figures are readable on light and dark pages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from l2l_core.trace import ALL_LANES, CATEGORIES, Trace, format_bytes
from workbench.pictures.scale import format_seconds
from workbench.pictures.theme import (
    BLUE,
    GREEN,
    KIND_COLOURS,
    LANE_NAMES,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    category_colour,
    kind_colour,
    text_colour_on,
)
from workbench.pictures.timeline_labels import label
from workbench.readings import Columns, LayerNumbers, full_name, number_layers
from workbench.session import Change, StepRow

MAX_BARS = 5_000  # more events are drawn as thick WebGL lines, because that many bars are slow to zoom

# Kinds of the same colour differ in their pattern; so do the categories, whose areas are stacked.
_KIND_PATTERNS = {"fetch": "\\", "batch": ".", "reduce": "/", "clip": "x", "backward": ""}
_CATEGORY_PATTERNS = dict(zip(CATEGORIES, ("", "/", ".", "\\", "-", "x"), strict=True))
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x")
_RUN_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
_GRID, _INK = "rgba(128,128,128,.3)", "#888"


def timeline_figure(trace: Trace) -> go.Figure:
    """Draw all events of a step on its lanes, one plotly trace per kind."""
    columns, numbers = Columns.of(trace), number_layers(trace.names)
    figure = go.Figure()
    draw = _bars_of if len(columns.kind) <= MAX_BARS else _lines_of
    for kind in sorted(columns.kinds, key=lambda kind: [*KIND_COLOURS, kind].index(kind)):
        at = np.flatnonzero(columns.kind == columns.kinds.index(kind))
        at = at[np.argsort(columns.start_s[at], kind="stable")]
        figure.add_trace(draw(columns, kind, at, _hover_texts(columns, kind, at, numbers), numbers))
    lanes = [LANE_NAMES[lane] for lane in columns.lanes]
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=lanes,
        range=[len(lanes) - 0.5, -0.5],  # compute on top
        tickmode="array",
        tickvals=lanes,
        fixedrange=True,  # zooming affects the time axis alone
    )
    if len(columns.kind) > MAX_BARS:
        figure.update_yaxes(tickvals=list(range(len(lanes))), ticktext=lanes)
    figure.update_xaxes(title="seconds since the step began", range=[0, columns.end_s or 1.0])
    # overlay, because plotly places kinds side by side by default; labels below 9 px are hidden
    figure.update_layout(barmode="overlay", bargap=0.2, uniformtext={"minsize": 9, "mode": "hide"})
    return _finish(figure, f"Step {trace.step + 1} on {trace.device or '?'}")


def memory_figure(
    trace: Trace, place: str, budget_bytes: int | None = None, in_core_bytes: int | None = None
) -> go.Figure:
    """Draw the bytes in use at a place over a step, stacked by category.

    Args:
        trace: trace of the step.
        place: "device" or "host".
        budget_bytes: memory of the place, drawn as a line.
        in_core_bytes: bytes needed by in-core training, drawn as a line.

    Raises:
        ValueError: there is no such place.
    """
    trace.peak_bytes(place)  # raises for an unknown place
    columns = Columns.of(trace)
    at = columns.samples_at(place)
    end_s = max([columns.end_s, *columns.sample_s[at].tolist()])
    times_s = np.append(columns.sample_s[at], end_s) if len(at) else columns.sample_s[at]
    figure = go.Figure()
    for i, category in enumerate(CATEGORIES):
        nbytes = columns.sample_bytes[at, i]
        if not nbytes.any():
            continue
        colour = category_colour(category)
        figure.add_trace(
            go.Scatter(
                x=times_s,
                y=np.append(nbytes, nbytes[-1]),  # the last sample is valid until the end of the step
                name=category,
                stackgroup="bytes",
                mode="lines",
                line={"shape": "hv", "width": 0, "color": colour},
                fillcolor=colour,
                fillpattern={"shape": _CATEGORY_PATTERNS[category], "fillmode": "overlay", "size": 6, "solidity": 0.2},
                hovertemplate="%{y:.3s}B",
            )
        )
    if len(at):  # the areas have no outlines, so this line shows short peaks
        total = columns.sample_bytes[at].sum(axis=1)
        style = {"shape": "hv", "width": 1, "color": _INK}
        figure.add_scatter(
            x=times_s, y=np.append(total, total[-1]), name="total", mode="lines", line=style, hovertemplate="%{y:.3s}B"
        )
    for name, level, dash in (("budget", budget_bytes, "solid"), ("in core would need", in_core_bytes, "dash")):
        if level is not None:
            x, style, name = (
                [0.0, end_s or 1.0],
                {"color": _INK, "dash": dash, "width": 2},
                f"{name} {format_bytes(level)}",
            )
            figure.add_scatter(x=x, y=[level, level], name=name, mode="lines", line=style, hoverinfo="skip")
    figure.update_xaxes(title="seconds since the step began", range=[0, end_s or 1.0])
    figure.update_yaxes(title=f"bytes on the {place}", tickformat="~s", ticksuffix="B", rangemode="tozero")
    figure.update_layout(hovermode="x unified")
    return _finish(figure, f"Memory of the {place}, step {trace.step + 1}")


def loss_figure(runs: Mapping[str, Sequence[StepRow]], changes: Sequence[Change] = ()) -> go.Figure:
    """Draw the loss over the steps of one or several runs, with a line at each change.

    Losses that are not finite are gaps.

    Args:
        runs: finished steps by name of the run.
        changes: changes between steps.
    """
    figure = go.Figure()
    styles = zip(cycle(_RUN_COLOURS), cycle(_DASHES), cycle(_SYMBOLS), strict=False)
    for (name, rows), (colour, dash, symbol) in zip(runs.items(), styles, strict=False):
        figure.add_trace(
            go.Scatter(
                x=[row.step for row in rows],
                y=[row.loss if math.isfinite(row.loss) else None for row in rows],
                name=escape(name),
                mode="lines+markers" if len(rows) <= 200 else "lines",
                line={"color": colour, "dash": dash, "width": 2},
                marker={"symbol": symbol, "size": 6},
                customdata=[(format_seconds(row.seconds), format_bytes(row.peak_device_bytes)) for row in rows],
                hovertemplate="step %{x}: loss %{y:.4g}<br>%{customdata[0]}, peak %{customdata[1]} on the device",
            )
        )
    figure.add_traces([_change_marks(changes, runs.values())] if changes else [])
    for step in sorted({change.step for change in changes}):
        figure.add_vline(x=step + 0.5, line={"color": _INK, "dash": "dot", "width": 1})
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="loss")
    return _finish(figure, "Loss")


def _bars_of(columns: Columns, kind: str, at: NDArray[np.intp], hovers: list[str], numbers: LayerNumbers) -> go.Bar:
    colour = kind_colour(kind)
    return go.Bar(
        name=kind,
        orientation="h",
        base=columns.start_s[at],
        x=columns.stop_s[at] - columns.start_s[at],
        y=[LANE_NAMES[ALL_LANES[lane]] for lane in columns.lane[at].tolist()],
        width=0.8,
        marker={
            "color": colour,
            "line": {"width": 0},
            "pattern": {"shape": _KIND_PATTERNS.get(kind, ""), "fillmode": "overlay", "size": 6, "solidity": 0.25},
        },
        text=[label(kind, columns.layers[int(layer)], numbers) for layer in columns.layer[at]],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": text_colour_on(colour)},
        hovertext=hovers,
        hovertemplate="%{hovertext}<extra></extra>",  # an empty <extra> hides the box with the name of the trace
    )


def _lines_of(columns: Columns, kind: str, at: NDArray[np.intp], hovers: list[str], _: LayerNumbers) -> go.Scattergl:
    """Return a line with start, stop and a gap for every event; lanes are numbers, which WebGL draws faster."""
    x = np.column_stack([columns.start_s[at], columns.stop_s[at], np.full(len(at), np.nan)]).ravel()
    y = np.repeat(columns.lane[at].astype(float), 3)
    return go.Scattergl(
        name=kind,
        x=x,
        y=y,
        mode="lines",
        connectgaps=False,
        line={"color": kind_colour(kind), "width": 22},
        hovertext=[text for hover in hovers for text in (hover, hover, "")],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _hover_texts(columns: Columns, kind: str, at: NDArray[np.intp], numbers: LayerNumbers) -> list[str]:
    """Return the hover text of each event; keys are escaped, because plotly interprets HTML."""
    names = [f" {escape(full_name(key, numbers))}" if key and key != kind else "" for key in columns.layers]
    values = (columns.layer, columns.k, columns.nbytes, columns.start_s, columns.stop_s)
    rows: Iterable[tuple[Any, ...]] = zip(*(column[at].tolist() for column in values), strict=True)
    return [
        f"{escape(kind)}{names[layer]}"
        + (f", micro-batch {k}" if k >= 0 else "")
        + (f", {format_bytes(nbytes)}" if nbytes else "")
        + f"<br>{format_seconds(stop_s - start_s)}, from {format_seconds(start_s)}"
        for layer, k, nbytes, start_s, stop_s in rows
    ]


def _change_marks(changes: Sequence[Change], runs: Iterable[Sequence[StepRow]]) -> go.Scatter:
    """Return one mark per step with changes, at the height of the highest loss."""
    losses = [row.loss for rows in runs for row in rows if math.isfinite(row.loss)]
    by_step: dict[int, list[str]] = defaultdict(list)
    for change in changes:
        by_step[change.step].append(escape(change.what))
    steps = sorted(by_step)
    return go.Scatter(
        x=[step + 0.5 for step in steps],
        y=[max(losses, default=0.0)] * len(steps),
        name="change",
        mode="markers",
        marker={"symbol": "triangle-down", "size": 11, "color": _INK},
        hovertext=["<br>".join(by_step[step]) for step in steps],
        hovertemplate="after step %{customdata}:<br>%{hovertext}<extra></extra>",
        customdata=steps,
    )


def _finish(figure: go.Figure, title: str) -> go.Figure:
    figure.update_layout(
        title={"text": escape(title), "font": {"size": 15}, "x": 0, "xref": "paper", "y": 0.97, "yanchor": "top"},
        template="none",
        height=380,
        margin={"l": 110, "r": 20, "t": 44, "b": 90},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": _INK},
        legend={"orientation": "h", "y": -0.3, "yanchor": "top", "x": 0, "xanchor": "left", "traceorder": "normal"},
        uirevision="l2l",  # zoom and hidden kinds stay when the data change
        showlegend=True,  # plotly hides the legend of a single trace by default
    )
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(gridcolor=_GRID, zeroline=False, linecolor=_GRID)
    return figure
