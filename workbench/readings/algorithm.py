"""A step in a few lines, and which of them an event belongs to. Words to highlight, not code that runs.

The lines follow the loop of `l2l_core/step/loop.py`; Pudipeddi et al., https://arxiv.org/abs/2002.05645 (L2L-p). Those of a step
depth first follow `l2l_core/step/depth_first.py`.
"""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """One line of the algorithm."""

    depth: int  # of its indentation
    words: str


LINES = (
    Line(0, "for layer in layers:"),
    Line(1, "load layer, ahead of time"),
    Line(1, "for k in micro_batches:"),
    Line(2, "stash input, run layer"),
    Line(0, "for k: loss, turn around"),
    Line(0, "for layer in reversed(layers):"),
    Line(1, "load layer, ahead of time"),
    Line(1, "for k in micro_batches:"),
    Line(2, "recompute, back-propagate"),
    Line(1, "push gradient to the EPS"),
    Line(1, "EPS: reduce, update layer"),
)

_DEPTH_FIRST = (
    Line(0, "for k in micro_batches:"),
    Line(1, "for layer in layers:"),
    Line(2, "first k: load, ahead of time"),
    Line(2, "run layer, keep its graph"),
    Line(1, "loss, turn around"),
    Line(1, "for layer in reversed(layers):"),
    Line(2, "back-propagate"),
    Line(2, "last k: push gradient"),
    Line(2, "EPS: reduce, update layer"),
)
_LINES = {"breadth_first": LINES, "depth_first": _DEPTH_FIRST}

_BACKWARD_RUNS = 8
_KEPT = "no recompute, back-propagate"  # in its place, where the graph of forward was kept
_FORWARD, _BACKWARD = 0, 5  # where the two passes begin
_ALWAYS = {"forward": 3, "loss": 4, "backward": _BACKWARD_RUNS, "push": 9, "reduce": 10, "update": 10, "clip": 10}
_IN_PASS = {"load": 1, "stash": 3, "fetch": 3}
_DEPTH_FIRST_OF = {"forward": 3, "loss": 4, "backward": 6, "push": 7, "reduce": 8, "update": 8, "clip": 8}


def lines_of(schedule: str) -> tuple[Line, ...]:
    """Return the lines of a schedule of `RelayConfig`."""
    return _LINES[schedule]


def line_of(kind: str, layer: str, backward: bool, schedule: str = "breadth_first") -> int:
    """Find the line of an event, as an index into the lines of its schedule.

    Args:
        kind, layer: of the event; the shell's own work and loads belong to the line that begins the pass.
        backward: whether backward had begun when the event started.
        schedule: depth first, the shell's own work belongs to its micro-batch.
    """
    if schedule == "depth_first":
        return 2 if kind == "load" and layer != "shell" else _DEPTH_FIRST_OF.get(kind, 0)
    if kind in _ALWAYS:
        return _ALWAYS[kind]
    if layer == "shell" and kind == "load":
        return _BACKWARD if backward else _FORWARD
    return (_BACKWARD if backward else _FORWARD) + _IN_PASS.get(kind, 0)


def line_words(number: int, graph_kept: bool, schedule: str = "breadth_first") -> str:
    """Write a line of the algorithm for a moment; with a kept graph, a relay's backward recomputes nothing."""
    if graph_kept and number == _BACKWARD_RUNS and schedule == "breadth_first":
        return _KEPT
    return _LINES[schedule][number].words
