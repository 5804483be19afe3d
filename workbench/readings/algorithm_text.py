"""A step in a few lines, and which of them an event belongs to. Words to highlight, not code that runs.

The lines follow the loop of `l2l_core/step/loop.py`; Pudipeddi et al., https://arxiv.org/abs/2002.05645 (L2L-p). Those of a step
depth first follow `l2l_core/step/depth_first.py`.
"""

from __future__ import annotations

from typing import NamedTuple


class AlgorithmLine(NamedTuple):
    """One line of the algorithm."""

    depth: int  # of its indentation
    text: str


BREADTH_FIRST_LINES = (
    AlgorithmLine(0, "for layer in layers:"),
    AlgorithmLine(1, "load layer, ahead of time"),
    AlgorithmLine(1, "for k in micro_batches:"),
    AlgorithmLine(2, "stash input, run layer"),
    AlgorithmLine(0, "for k: loss, turn around"),
    AlgorithmLine(0, "for layer in reversed(layers):"),
    AlgorithmLine(1, "load layer, ahead of time"),
    AlgorithmLine(1, "for k in micro_batches:"),
    AlgorithmLine(2, "recompute, back-propagate"),
    AlgorithmLine(1, "push gradient to the EPS"),
    AlgorithmLine(1, "EPS: reduce, update layer"),
)

_DEPTH_FIRST_LINES = (
    AlgorithmLine(0, "for k in micro_batches:"),
    AlgorithmLine(1, "for layer in layers:"),
    AlgorithmLine(2, "first k: load, ahead of time"),
    AlgorithmLine(2, "run layer, keep its graph"),
    AlgorithmLine(1, "loss, turn around"),
    AlgorithmLine(1, "for layer in reversed(layers):"),
    AlgorithmLine(2, "back-propagate"),
    AlgorithmLine(2, "last k: push gradient"),
    AlgorithmLine(2, "EPS: reduce, update layer"),
)
_LINES_OF_SCHEDULE = {"breadth_first": BREADTH_FIRST_LINES, "depth_first": _DEPTH_FIRST_LINES}

_BACKWARD_LINE = 8
_KEPT_GRAPH_LINE = "no recompute, back-propagate"  # in its place, where the graph of forward was kept
_FIRST_FORWARD_LINE, _FIRST_BACKWARD_LINE = 0, 5  # where the two passes begin
_LINE_OF_KIND = {"forward": 3, "loss": 4, "backward": _BACKWARD_LINE, "push": 9, "reduce": 10, "update": 10, "clip": 10}
_LINE_IN_PASS = {"load": 1, "stash": 3, "fetch": 3}
_DEPTH_FIRST_LINE_OF_KIND = {"forward": 3, "loss": 4, "backward": 6, "push": 7, "reduce": 8, "update": 8, "clip": 8}


def algorithm_lines(schedule: str) -> tuple[AlgorithmLine, ...]:
    """Return the lines of a schedule of `RelayConfig`."""
    return _LINES_OF_SCHEDULE[schedule]


def line_index(kind: str, layer: str, backward: bool, schedule: str = "breadth_first") -> int:
    """Find the line of an event, as an index into the lines of its schedule.

    Args:
        kind, layer: of the event; the shell's own work and loads belong to the line that begins the pass.
        backward: whether backward had begun when the event started.
        schedule: depth first, the shell's own work belongs to its micro-batch.
    """
    if schedule == "depth_first":
        return 2 if kind == "load" and layer != "shell" else _DEPTH_FIRST_LINE_OF_KIND.get(kind, 0)
    if kind in _LINE_OF_KIND:
        return _LINE_OF_KIND[kind]
    if layer == "shell" and kind == "load":
        return _FIRST_BACKWARD_LINE if backward else _FIRST_FORWARD_LINE
    return (_FIRST_BACKWARD_LINE if backward else _FIRST_FORWARD_LINE) + _LINE_IN_PASS.get(kind, 0)


def line_text(number: int, graph_kept: bool, schedule: str = "breadth_first") -> str:
    """Write a line of the algorithm for a moment; with a kept graph, a relay's backward recomputes nothing."""
    if graph_kept and number == _BACKWARD_LINE and schedule == "breadth_first":
        return _KEPT_GRAPH_LINE
    return _LINES_OF_SCHEDULE[schedule][number].text
