"""The algorithm beside the relay picture: its lines, which of them run, and what every lane does."""

from __future__ import annotations

from collections.abc import Iterator

from l2l_core.trace import LANES
from workbench.pictures import svg
from workbench.pictures.relay_drawing import micro_batch_label, shortened, sized_text
from workbench.pictures.theme import GREY, LANE_NAMES, kind_colour
from workbench.readings import LayerNumbers, StepState, algorithm_lines, line_text, short_name

_LINE_HEIGHT, _TEXT_SIZE = 16.6, 11.0  # px from line to line, and of the words
_CHARACTER_WIDTH = 0.6  # of its size is a character of fixed width


def draw_algorithm(x: float, top: float, width: float, state: StepState, numbers: LayerNumbers) -> list[str]:
    """Draw the lines, the one that runs on a bar, and the lanes below them."""
    parts = [sized_text(x, 20, "algorithm", size=15, strong=True)]
    beside = dict(state.other_lines)
    for number, line in enumerate(algorithm_lines(state.schedule)):
        y = top + 4 + number * _LINE_HEIGHT
        here = number == state.line
        if here:
            parts += [
                svg.rect(x, y, width, _LINE_HEIGHT, style="well"),
                svg.rect(x, y, 4, _LINE_HEIGHT, fill="currentColor"),
            ]
        elif number in beside:
            parts.append(svg.rect(x, y + 3, 4, 10.6, fill=_lane_colour(state, beside[number])))
        style = "code strong" if here else "code" if number in beside else "code dim"
        words, begins = line_text(number, state.graph_kept, state.schedule), x + 9 + line.depth * 13
        size = min(_TEXT_SIZE, (x + width - begins) / (_CHARACTER_WIDTH * len(words)))
        parts.append(sized_text(begins, y + 12, words, size=round(size, 1), style=style))
    return [*parts, *_lanes(x, state, numbers)]


def _lanes(x: float, state: StepState, numbers: LayerNumbers) -> Iterator[str]:
    for row, lane in enumerate(LANES):
        y = 234.0 + row * 17
        work = state.lanes.get(lane)
        yield sized_text(x, y, LANE_NAMES.get(lane, lane), size=11, style="dim")
        yield svg.rect(x + 84, y - 9, 9, 9, **({"fill": kind_colour(work.kind)} if work else {"style": "well"}))
        if work:
            words = work.kind if work.layer in ("", work.kind) else f"{work.kind} {short_name(work.layer, numbers)}"
            words = shortened(f"{words}  {micro_batch_label(work.k, state.micro_batches)}".rstrip(), 19)
        else:
            words = _describe_waiting(state, numbers) if lane == "compute" else ""
        if words:
            yield sized_text(x + 97, y, words, size=11, style="" if work else "dim")


def _describe_waiting(state: StepState, numbers: LayerNumbers) -> str:
    if state.waits_for:
        return shortened(f"waits for {short_name(state.waits_for, numbers)}", 19)
    return "waits" if state.layer else ""


def _lane_colour(state: StepState, lane: str) -> str:
    work = state.lanes.get(lane)
    return kind_colour(work.kind) if work is not None else GREY
