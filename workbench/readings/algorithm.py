"""The relay in eleven lines, and which of them an event belongs to. Words to highlight, not code that runs.

The lines follow the loop of `l2l_core/step/loop.py`; Pudipeddi et al., https://arxiv.org/abs/2002.05645 (L2L-p).
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

_BACKWARD_RUNS = 8
_KEPT = "no recompute, back-propagate"  # in its place, where the graph of forward was kept
_FORWARD, _BACKWARD = 0, 5  # where the two passes begin
_ALWAYS = {"forward": 3, "loss": 4, "backward": _BACKWARD_RUNS, "push": 9, "reduce": 10, "update": 10, "clip": 10}
_IN_PASS = {"load": 1, "stash": 3, "fetch": 3}


def line_of(kind: str, layer: str, backward: bool) -> int:
    """Find the line of an event, as an index into `LINES`.

    Args:
        kind, layer: of the event; the shell's own work and loads belong to the line that begins the pass.
        backward: whether backward had begun when the event started.
    """
    if kind in _ALWAYS:
        return _ALWAYS[kind]
    if layer == "shell" and kind == "load":
        return _BACKWARD if backward else _FORWARD
    return (_BACKWARD if backward else _FORWARD) + _IN_PASS.get(kind, 0)


def line_words(number: int, graph_kept: bool) -> str:
    """Write a line of the algorithm for a moment; with a kept graph, backward recomputes nothing."""
    return _KEPT if graph_kept and number == _BACKWARD_RUNS else LINES[number].words
