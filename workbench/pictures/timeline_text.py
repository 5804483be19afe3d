"""Layout of a timeline and the text under it: legend, figures, and the bottleneck of each phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from l2l_core.analysis import ALL_PHASES, MIDDLE
from l2l_core.trace import LANES, NETWORK_LANES
from workbench.pictures import svg
from workbench.pictures.scale import format_seconds
from workbench.pictures.theme import KIND_COLOURS, KIND_LETTERS, LANE_NAMES, kind_colour, text_colour_on
from workbench.readings import Columns, TimelineSummary

WIDTH, LEFT, RIGHT = 960, 96, 944  # px; the time axis spans LEFT to RIGHT
TOP, LANE, PITCH = 30, 34, 44  # px: top of the first lane, height of a lane, distance between lanes
FIGURE_ROW = 44  # px
LINE, SLOT = 15, 35  # px: height of a line and of a phase
COLUMNS = 132  # characters that fit beside the name of a phase


@dataclass(frozen=True)
class TimelineLayout:
    """Vertical positions of a timeline's parts, in pixels, for lanes from the top."""

    lanes: Sequence[str]

    @property
    def rows(self) -> Iterator[tuple[str, float]]:
        """Every lane with its upper edge."""
        return ((lane, TOP + i * PITCH) for i, lane in enumerate(self.lanes))

    @property
    def axis(self) -> float:
        """Line below the lanes."""
        return TOP + (len(self.lanes) - 1) * PITCH + LANE + 8

    @property
    def legend(self) -> float:
        """Baseline of the legend of event kinds."""
        return self.axis + 44

    @property
    def figures(self) -> float:
        """Baseline of the names of figures; figures of the network are in a second row."""
        return self.axis + 84

    @property
    def text(self) -> float:
        """Top of the text, which is the height of a timeline without text."""
        has_two_rows = self.has_copies and not set(self.lanes).isdisjoint(NETWORK_LANES)
        return self.axis + 118 + (FIGURE_ROW if has_two_rows else 0)

    @property
    def has_copies(self) -> bool:
        """True if the lanes of a relay's copies and updates are drawn."""
        return not set(self.lanes).isdisjoint(LANES[1:])


def draw_legend(y: float, *shown: Columns | None) -> Iterator[str]:
    """Draw the legend of event kinds, in the order of the theme."""
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
    """Draw the five figures at fixed positions, and those of the network below, or in their place without copies."""
    whole_s = summary.span_s if now_s is None else now_s
    figures = [
        ("copies hidden under compute", percent(summary.overlap)),
        *((f"{LANE_NAMES[lane]}, exposed", format_seconds(summary.exposed_s[lane])) for lane in LANES[1:]),
        ("step" if now_s is None else "step so far", format_seconds(whole_s)),
    ]
    yield svg.path(f"M{LEFT} {sheet.figures - 18}H{RIGHT}", style="rule")
    for i, (name, value) in enumerate(figures if sheet.has_copies else figures[-1:]):
        yield from _draw_figure((0, 210, 400, 590, 740)[i], sheet.figures, name, value, is_hatched=1 <= i <= 3)
    for i, lane in enumerate([lane for lane in sheet.lanes if lane in NETWORK_LANES]):
        name, value = f"{LANE_NAMES[lane]}, exposed", format_seconds(summary.exposed_s[lane])
        y = sheet.figures + (FIGURE_ROW if sheet.has_copies else 0)
        yield from _draw_figure((210, 400)[i], y, name, value, is_hatched=True)


def _draw_figure(left: float, y: float, name: str, value: str, is_hatched: bool) -> Iterator[str]:
    x = LEFT + left
    if is_hatched:
        yield svg.rect(x, y - 10, 16, 11, fill=kind_colour("shell"))
        yield svg.path(svg.hatch(x, y - 10, 16, 11, 5), style="hatch")
    yield svg.text(x + (22 if is_hatched else 0), y, name, style="dim")
    yield f'<g font-size="19">{svg.text(x, y + 23, value, style="strong")}</g>'


def sentences_height(sentences: Sequence[str]) -> int:
    """Return the height of the sentences in px, with room for phases that have none yet."""
    return len(_phase_slots(sentences)) * SLOT + 10 if sentences else 0


def _phase_slots(sentences: Sequence[str]) -> Sequence[str]:
    """Return the phases with room for a sentence; the middle, as of depth first, only if it has one."""
    return [name for name in ALL_PHASES if name != MIDDLE or any(one.startswith(f"{MIDDLE}: ") for one in sentences)]


def draw_sentences(sentences: Sequence[str], top: float) -> Iterator[str]:
    """Draw one sentence per phase at a fixed position, in at most two lines."""
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
    """Return a share in percent, with one decimal if it is small."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or not share else f"{100 * share:.1f} %"
