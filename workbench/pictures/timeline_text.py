"""The words under a timeline: kinds of events, figures of overlap and of the network, and what binds each phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from l2l_core.analysis import ALL_PHASES, MIDDLE
from l2l_core.trace import LANES, NETWORK_LANES
from workbench.pictures import svg
from workbench.pictures.scale import format_seconds
from workbench.pictures.theme import KIND_COLOURS, KIND_LETTERS, LANE_NAMES, kind_colour, text_colour_on
from workbench.pictures.timeline_layout import FIGURE_ROW, LEFT, RIGHT, TimelineLayout
from workbench.readings import Columns, TimelineSummary

LINE, SLOT = 15, 35  # px: from line to line and from phase to phase of what is said
COLUMNS = 132  # characters that fit beside a phase's name


def draw_legend(y: float, *shown: Columns | None) -> Iterator[str]:
    """The kinds that are there, in the order of the theme."""
    present = {kind for columns in shown if columns is not None for kind in columns.kinds}
    x = float(LEFT)
    for kind in [kind for kind in KIND_COLOURS if kind in present] + sorted(present - {*KIND_COLOURS}):
        letter = KIND_LETTERS.get(kind, "")
        name = "" if letter == kind else kind
        wide = 10 + 6.2 * len(letter)
        if x + wide + 4 + 6.4 * len(name) > RIGHT:
            return
        yield svg.rect(x, y - 11, wide, 15, fill=kind_colour(kind))
        yield svg.text(x + wide / 2, y, letter, anchor="middle", style="small", fill=text_colour_on(kind_colour(kind)))
        if name:
            yield svg.text(x + wide + 4, y, name)
        x += wide + (4 + 6.4 * len(name) if name else 0) + 12


def draw_figures(sheet: TimelineLayout, summary: TimelineSummary, now_s: float | None) -> Iterator[str]:
    """Five figures, each at its own place, and below them those of the network."""
    whole_s = summary.span_s if now_s is None else now_s
    figures = [
        ("copies hidden under compute", percent(summary.overlap)),
        *((f"{LANE_NAMES[lane]}, exposed", format_seconds(summary.exposed_s[lane])) for lane in LANES[1:]),
        ("step" if now_s is None else "step so far", format_seconds(whole_s)),
    ]
    yield svg.path(f"M{LEFT} {sheet.figures - 18}H{RIGHT}", style="rule")
    for i, (name, value) in enumerate(figures):
        yield from _draw_figure((0, 210, 400, 590, 740)[i], sheet.figures, name, value, is_hatched=1 <= i <= 3)
    for i, lane in enumerate([lane for lane in sheet.lanes if lane in NETWORK_LANES]):
        name, value = f"{LANE_NAMES[lane]}, exposed", format_seconds(summary.exposed_s[lane])
        yield from _draw_figure((210, 400)[i], sheet.figures + FIGURE_ROW, name, value, is_hatched=True)


def _draw_figure(left: float, y: float, name: str, value: str, is_hatched: bool) -> Iterator[str]:
    x = LEFT + left
    if is_hatched:
        yield svg.rect(x, y - 10, 16, 11, fill=kind_colour("shell"))
        yield svg.path(svg.hatch(x, y - 10, 16, 11, 5), style="hatch")
    yield svg.text(x + (22 if is_hatched else 0), y, name, style="dim")
    yield f'<g font-size="19">{svg.text(x, y + 23, value, style="strong")}</g>'


def sentences_height(sentences: Sequence[str]) -> int:
    """Return the height in px of what is said; what is not there yet has its place, too."""
    return len(_phase_slots(sentences)) * SLOT + 10 if sentences else 0


def _phase_slots(sentences: Sequence[str]) -> Sequence[str]:
    """The phases that have a place: a middle has one only where it is spoken of, as depth first."""
    return [name for name in ALL_PHASES if name != MIDDLE or any(one.startswith(f"{MIDDLE}: ") for one in sentences)]


def draw_sentences(sentences: Sequence[str], top: float) -> Iterator[str]:
    """One sentence per phase, each phase at its own place, two lines at most."""
    taken: set[int] = set()
    phases = _phase_slots(sentences)
    for sentence in sentences:
        name, _, rest = sentence.partition(": ")
        free = (i for i in range(len(phases)) if i not in taken)
        slot = phases.index(name) if name in phases else next(free, len(phases))
        if slot in taken or slot == len(phases):
            continue
        taken.add(slot)
        y = top + slot * SLOT + 22
        if name in phases:
            yield svg.text(LEFT - 8, y, name, anchor="end", style="strong")
        for i, line in enumerate(wrap(rest if name in phases else sentence, COLUMNS, max_lines=2, placeholder=" …")):
            yield svg.text(LEFT, y + i * LINE, line)


def percent(share: float) -> str:
    """Write a share for people, a small one with a decimal."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or not share else f"{100 * share:.1f} %"
