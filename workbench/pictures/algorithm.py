"""The algorithm beside the relay picture: its lines, which of them run, and what every lane does."""

from __future__ import annotations

from collections.abc import Iterator

from l2l_core.trace import LANES
from workbench.pictures import svg
from workbench.pictures.theme import GREY, LANE_NAMES, kind_colour
from workbench.pictures.words import say, shorten, turn_of
from workbench.readings import Moment, Numbers, line_words, lines_of, short_name

_LINE, _SIZE = 16.6, 11.0  # px from line to line, and of the words
_WIDE = 0.6  # of its size is a character of fixed width


def draw_algorithm(x: float, top: float, width: float, moment: Moment, numbers: Numbers) -> list[str]:
    """Draw the lines, the one that runs on a bar, and the lanes below them."""
    parts = [say(x, 20, "algorithm", size=15, strong=True)]
    beside = dict(moment.beside)
    for number, line in enumerate(lines_of(moment.schedule)):
        y = top + 4 + number * _LINE
        here = number == moment.line
        if here:
            parts += [svg.rect(x, y, width, _LINE, style="well"), svg.rect(x, y, 4, _LINE, fill="currentColor")]
        elif number in beside:
            parts.append(svg.rect(x, y + 3, 4, 10.6, fill=_lane_colour(moment, beside[number])))
        style = "code strong" if here else "code" if number in beside else "code dim"
        words, begins = line_words(number, moment.graph_kept, moment.schedule), x + 9 + line.depth * 13
        size = min(_SIZE, (x + width - begins) / (_WIDE * len(words)))
        parts.append(say(begins, y + 12, words, size=round(size, 1), style=style))
    return [*parts, *_lanes(x, moment, numbers)]


def _lanes(x: float, moment: Moment, numbers: Numbers) -> Iterator[str]:
    for row, lane in enumerate(LANES):
        y = 234.0 + row * 17
        work = moment.lanes.get(lane)
        yield say(x, y, LANE_NAMES.get(lane, lane), size=11, style="dim")
        yield svg.rect(x + 84, y - 9, 9, 9, **({"fill": kind_colour(work.kind)} if work else {"style": "well"}))
        if work:
            words = work.kind if work.layer in ("", work.kind) else f"{work.kind} {short_name(work.layer, numbers)}"
            words = shorten(f"{words}  {turn_of(work.k, moment.micro_batches)}".rstrip(), 19)
        else:
            words = _why_compute_rests(moment, numbers) if lane == "compute" else ""
        if words:
            yield say(x + 97, y, words, size=11, style="" if work else "dim")


def _why_compute_rests(moment: Moment, numbers: Numbers) -> str:
    if moment.waits_for:
        return shorten(f"waits for {short_name(moment.waits_for, numbers)}", 19)
    return "waits" if moment.layer else ""


def _lane_colour(moment: Moment, lane: str) -> str:
    work = moment.lanes.get(lane)
    return kind_colour(work.kind) if work is not None else GREY
