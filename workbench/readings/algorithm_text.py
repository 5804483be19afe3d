"""Pseudocode of a step for display, and the line that each event belongs to.

The lines follow `l2l_core/step/loop.py` and `l2l_core/step/depth_first.py`; Pudipeddi et al., https://arxiv.org/abs/2002.05645
(L2L-p).
"""

from __future__ import annotations

from typing import NamedTuple


class AlgorithmLine(NamedTuple):
    """One line of the pseudocode."""

    depth: int  # of the indentation
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

_BACKWARD_LINE = 8
_KEPT_GRAPH_LINE = "no recompute, back-propagate"  # replaces the line if the graph of forward was kept
_FIRST_FORWARD_LINE, _FIRST_BACKWARD_LINE = 0, 5
_LINE_OF_KIND = {"forward": 3, "loss": 4, "backward": _BACKWARD_LINE, "push": 9, "reduce": 10, "update": 10, "clip": 10}
_LINE_IN_PASS = {"load": 1, "stash": 3, "fetch": 3}
_DEPTH_FIRST_LINE_OF_KIND = {"forward": 3, "loss": 4, "backward": 6, "push": 7, "reduce": 8, "update": 8, "clip": 8}


def algorithm_lines(schedule: object) -> tuple[AlgorithmLine, ...]:
    """Return the lines of a schedule of `RelayConfig`; one of the user's own has those of the relay."""
    return _DEPTH_FIRST_LINES if schedule == "depth_first" else BREADTH_FIRST_LINES


def line_index(kind: str, layer: str, backward: bool, schedule: object = "breadth_first") -> int:
    """Return the line of an event, as an index into the lines of its schedule.

    Args:
        kind, layer: kind and layer of the event. Compute and loads of the shell belong to the first line of the pass, or,
            depth first, to the line of the micro-batches.
        backward: True if backward had begun when the event started.
        schedule: as in `RelayConfig`.
    """
    if schedule == "depth_first":
        return 2 if kind == "load" and layer != "shell" else _DEPTH_FIRST_LINE_OF_KIND.get(kind, 0)
    if kind in _LINE_OF_KIND:
        return _LINE_OF_KIND[kind]
    if layer == "shell" and kind == "load":
        return _FIRST_BACKWARD_LINE if backward else _FIRST_FORWARD_LINE
    return (_FIRST_BACKWARD_LINE if backward else _FIRST_FORWARD_LINE) + _LINE_IN_PASS.get(kind, 0)


def line_text(number: int, graph_kept: bool, schedule: object = "breadth_first") -> str:
    """Return the text of a line; breadth first, the backward of a kept graph has no recompute."""
    if graph_kept and number == _BACKWARD_LINE and schedule != "depth_first":
        return _KEPT_GRAPH_LINE
    return algorithm_lines(schedule)[number].text
