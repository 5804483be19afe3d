"""Picture of a study for a notebook: mean lines with bands over seeds, and the comparison as its table."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from workbench.pictures import Picture, Scale, Table, document, path, text, ticks
from workbench.pictures.loss_chart import BOTTOM, TOP, draw_loss_axis, loss_scale
from workbench.pictures.relay_drawing import shortened
from workbench.pictures.scale import format_prefixed
from workbench.pictures.step_axis import LEFT, RIGHT, WIDTH
from workbench.pictures.svg import polyline
from workbench.study.study_figure import AXES, COLOURS, UNITS, MeanCurve, diverged_words, mean_curves
from workbench.study.study_records import StudyRecords
from workbench.study.study_table import StudyTable, compare_variants

SVG_DASHES = ("", "7 4", "8 3 2 3", "2 3")
LEGEND_LINE = 19.0  # px
PER_LINE = 3  # entries of the legend
HOVER_PX = 7.0  # around a point, where the pointer shows its values


def show_study(study: StudyRecords, x: str = "flop") -> Picture:
    """Return the mean curves of a study with its comparison."""
    return Picture(draw_study(study, x), plain_table(compare_variants(study)))


def draw_study(study: StudyRecords, x: str) -> str:
    """Draw mean curves with bands over steps, FLOP, tokens or seconds, as an SVG."""
    curves = mean_curves(study, x)
    ends = [end for curve in curves.values() for end in (min(curve.low), max(curve.high))]
    y, marks = loss_scale(ends)
    across = Scale(0.0, max((curve.x[-1] for curve in curves.values()), default=1.0), LEFT, RIGHT)
    kind = "held-out loss" if study.has_held_out else "training loss"
    diverged = diverged_words(study)
    caption = "mean over seeds; bands are ± one standard deviation over seeds"
    parts = [
        text(LEFT, 20, f"Study: {kind}", style="strong"),
        text(LEFT, 40, shortened("; ".join([caption, *diverged]), 130), style="dim"),
        *draw_loss_axis(y, marks, kind, named=bool(curves)),
        *_draw_axis(across, x),
        *(part for i, curve in enumerate(curves.values()) for part in _draw_mean(curve, across, y, i)),
        *_draw_legend(curves),
        *(part for name, curve in curves.items() for part in _draw_values(name, curve, across, y, UNITS[x])),
    ]
    if not curves:
        parts.append(text((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2, "no loss yet", style="dim", anchor="middle"))
    height = BOTTOM + 54 + LEGEND_LINE * -(-max(len(curves), 1) // PER_LINE)
    return document(WIDTH, height, f"Study: {kind} over {AXES[x]}", _describe(curves, UNITS[x], diverged), parts)


def plain_table(table: StudyTable) -> Table:
    """Return a comparison as a table of text."""
    header, *rows = table.text_cells()
    return Table("Variants compared", header, rows, " ".join(table.notes))


def _draw_mean(curve: MeanCurve, x: Scale, y: Scale, i: int) -> Iterator[str]:
    colour, places = _colour(i), [x(place) for place in curve.x]
    if curve.n > 1:
        upper = zip(places, map(y, curve.high), strict=True)
        lower = zip(reversed(places), map(y, reversed(curve.low)), strict=True)
        yield f'<path d="{polyline([*upper, *lower])}Z" fill="{colour}" fill-opacity=".18"/>'
    line = polyline(zip(places, map(y, curve.mean), strict=True))
    dash = f' stroke-dasharray="{SVG_DASHES[i % len(SVG_DASHES)]}"' if i % len(SVG_DASHES) else ""
    yield f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'


def _draw_axis(x: Scale, axis: str) -> Iterator[str]:
    marks = [mark for mark in ticks(x.low, x.high, 9) if axis != "step" or mark == int(mark)]
    lines = "".join(f"M{x(mark):.1f} {BOTTOM}v5" for mark in marks)
    yield path(f"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}{lines}", style="axis")
    for mark in marks:
        words = f"{mark:.0f}" if axis == "step" else format_prefixed(mark).strip()
        anchor = "end" if x(mark) > RIGHT - 14 else "middle"
        yield text(x(mark), BOTTOM + 19, words, style="small dim", anchor=anchor)
    yield text((LEFT + RIGHT) / 2, BOTTOM + 38, AXES[axis], style="dim", anchor="middle")


def _draw_legend(curves: dict[str, MeanCurve]) -> Iterator[str]:
    for i, (name, curve) in enumerate(curves.items()):
        left = LEFT + (RIGHT - LEFT) / PER_LINE * (i % PER_LINE)
        top = BOTTOM + 58 + LEGEND_LINE * (i // PER_LINE)
        dash = SVG_DASHES[i % len(SVG_DASHES)]
        yield path(f"M{left:.1f} {top - 4:.1f}h26", stroke=_colour(i), width=2, dash=dash)
        seeds = f"{curve.n} seed{'s' if curve.n > 1 else ''}"
        yield text(left + 32, top, f"{shortened(name, 30)} ({seeds})", style="small")


def _draw_values(name: str, curve: MeanCurve, x: Scale, y: Scale, unit: str) -> Iterator[str]:
    """Yield an invisible disc at each point, whose title the page shows under the pointer."""
    for i, (place, mean) in enumerate(zip(curve.x, curve.mean, strict=True)):
        tip = escape(f"{name}\n{_value_text(place, unit)}: {_loss_text(curve, i)}")
        yield (
            f'<circle cx="{x(place):.1f}" cy="{y(mean):.1f}" r="{HOVER_PX:g}" fill="transparent"><title>{tip}</title></circle>'
        )


def _value_text(place: float, unit: str) -> str:
    if unit == "steps":
        return f"step {place:.0f}"
    number = {"FLOP": format_prefixed(place), "tokens": f"{place:,.0f} "}.get(unit, f"{place:.3g} ")
    return f"{number}{unit}"


def _loss_text(curve: MeanCurve, i: int) -> str:
    if curve.n == 1:
        return f"loss {curve.mean[i]:.4f} (1 seed)"
    return f"loss {curve.mean[i]:.4f} ± {curve.high[i] - curve.mean[i]:.4f} ({curve.n} seeds)"


def _colour(i: int) -> str:
    """Return the colour of a variant; that of text for black, which a dark page does not show."""
    colour = COLOURS[i % len(COLOURS)]
    return "currentColor" if colour == "#000000" else colour


def _describe(curves: dict[str, MeanCurve], unit: str, diverged: list[str]) -> str:
    ends = [f"{name} at {_value_text(curve.x[-1], unit)}: {_loss_text(curve, -1)}" for name, curve in curves.items()]
    return "; ".join(["At the end: " + "; ".join(ends) if ends else "No loss yet", *diverged])
