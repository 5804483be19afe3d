"""The picture of `_curves`: held-out loss against compute, a line for every arm's mean, a faint one for every seed.

Pure: the same runs give the same string.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from _curves import Run

from workbench.pictures import BLUE, GREEN, GREY, ORANGE, VERMILION, Scale, document, group, path, text, ticks

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 420, 84, 944, 72, 368
SHOWN_FROM = 0.1  # of the compute: the fall before it would flatten everything else
LOOKS = ((BLUE, ""), (VERMILION, "9 4"), (GREEN, "2 3"), (ORANGE, "12 3 2 3"), (GREY, "5 5"))  # colour and dash by arm


def draw_curves(done: Sequence[Run], title: str) -> str:
    """An SVG of finished runs, evaluated at the same shares of the compute."""
    arms = {name: [run for run in done if run.arm == name] for name in dict.fromkeys(run.arm for run in done)}
    assert len(arms) <= len(LOOKS), "every arm needs a colour and a dash pattern"
    shown = [point.held_out for run in done for point in run.points if point.compute >= SHOWN_FROM]
    x = Scale(SHOWN_FROM, 1.0, LEFT, RIGHT)
    marks = ticks(min(shown), max(shown), 8)
    y = Scale(min(shown) - 0.02, max(shown), BOTTOM, TOP)
    parts = [text(LEFT, 22, title, style="strong"), *_axes(x, y, marks), *_legend(arms)]
    for (colour, dash), runs in zip(LOOKS, arms.values(), strict=False):
        faint = [path(_line(_means([run]), x, y), stroke=colour, fill="none") for run in runs]
        parts.append(f'<g stroke-opacity=".3">{"".join(faint)}</g>' if len(runs) > 1 else "")
        parts.append(path(_line(_means(runs), x, y), stroke=colour, fill="none", width=2.2, dash=dash))
    last = (f"{name}: {_means(runs)[-1][1]:.4f}" for name, runs in arms.items())
    return document(WIDTH, HEIGHT, title, f"Mean held-out loss at the end, nats per byte. {'; '.join(last)}.", parts)


def _means(runs: Sequence[Run]) -> list[tuple[float, float]]:
    """Compute, and the mean of the losses of all seeds."""
    points = zip(*(run.points for run in runs), strict=True)
    means = [(same[0].compute, statistics.fmean(point.held_out for point in same)) for same in points]
    return [(compute, loss) for compute, loss in means if compute >= SHOWN_FROM]


def _line(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    return "M" + "L".join(f"{x(compute):.1f} {y(loss):.1f}" for compute, loss in points)


def _axes(x: Scale, y: Scale, marks: Sequence[float]) -> Iterator[str]:
    yield path("".join(f"M{LEFT} {y(mark):.1f}H{RIGHT}" for mark in marks), style="rule")
    yield from (text(LEFT - 8, y(mark) + 4, f"{mark:.2f}", style="small dim", anchor="end") for mark in marks)
    shares = [i / 10 for i in range(1, 11)]
    yield path(f"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" + "".join(f"M{x(s):.1f} {BOTTOM}v5" for s in shares), style="axis")
    for share in shares:
        anchor = "end" if share == 1 else "middle"
        yield text(x(share), BOTTOM + 19, f"{share:.0%}", style="small dim", anchor=anchor)
    yield text((LEFT + RIGHT) / 2, BOTTOM + 40, "compute, of what scratch spends", style="dim", anchor="middle")
    middle, said = (TOP + BOTTOM) / 2, escape("held-out loss (nats per byte)")
    turned = f'text-anchor="middle" class="dim" transform="rotate(-90 22 {middle:g})"'
    yield f'<text x="22" y="{middle:g}" {turned}>{said}</text>'


def _legend(arms: Mapping[str, Sequence[Run]]) -> Iterator[str]:
    at = LEFT
    for (colour, dash), name in zip(LOOKS, arms, strict=False):
        mark = path("M0 -4h34", stroke=colour, fill="none", width=2.2, dash=dash)
        yield group([mark, text(41, 0, name)], transform=f"translate({at:g} 48)")
        at += 66 + 7 * len(name)
