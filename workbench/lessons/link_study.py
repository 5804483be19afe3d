"""Comparison of recompute and offload over links of different speed, for one model and budget.

For each link, the fastest plans that only recompute, only offload, or do both are found among all plans and run for a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ipywidgets as widgets

from l2l_core import EmulatedDevice
from l2l_core.strategies import Combined, Lab, Offload, Plain, StrategyResult
from workbench.panels.display import Bundle, StillDisplay
from workbench.pictures import BLUE, GREEN, VERMILION, Picture, Scale, Table, show_strategy, svg, ticks

WAYS: Mapping[str, str] = {"recompute only": "KR", "offload only": "KO", "both": "KRO"}  # letters of `Combined`
_COLOURS = {"recompute only": (GREEN, "7 4"), "offload only": (VERMILION, "2 4"), "both": (BLUE, "")}
_LABEL_OFFSETS = {"recompute only": 4, "offload only": -10, "both": 6}  # px from the end of a curve to its name
_CLIP_FACTOR = 3.0  # overheads above this multiple of the largest one of "both" are clipped
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 296, 92, 830, 40, 196


@dataclass(frozen=True)
class LinkResult:
    """The best plans on one link.

    Attributes:
        bytes_per_s: speed of the link in each direction.
        share: share of all records that the link can copy during a plain step.
        plain_s: simulated seconds of the plain step.
        rows: best plan by the names in `WAYS`.
    """

    bytes_per_s: float
    share: float
    plain_s: float
    rows: Mapping[str, StrategyResult]

    def overhead(self, name: str) -> float | None:
        """Return the time over that of the plain step, as a share of it; None if there is no plan."""
        row = self.rows[name]
        return None if row.why else row.seconds / self.plain_s - 1

    def letters(self, name: str) -> str:
        """Return a letter for each layer's record: K kept, R recomputed, O offloaded to the host."""
        plan = self.rows[name].plan
        if plan is None:
            return "–"
        letters = {i: {"Fck": "R", "Off": "O"}[kind] for kind, i in plan.operations if kind in ("Fck", "Off")}
        return "".join(letters.get(i, "K") for i in range(plan.stages - 1))


def compare_links(lab: Lab, budget_bytes: int, shares: Sequence[float] = (0.5, 1.0, 1.5, 2.0, 4.0)) -> LinkStudy:
    """Find the best plans on links of several speeds.

    Args:
        lab: lab of at most eight layers, since all plans are tried.
        budget_bytes: memory of the device, too small for plain training.
        shares: speeds from slow to fast, as the multiple of all records that a link can copy during a plain step.

    Raises:
        ValueError: no plan fits the budget, or there are too many layers.
    """
    plain_s, records_bytes = lab.plan(Plain()).seconds, lab.plan(Offload()).peak_host_bytes
    found = []
    for share in shares:
        speed = share * records_bytes / plain_s
        device = EmulatedDevice(memory_bytes=budget_bytes, h2d_bytes_per_s=speed, d2h_bytes_per_s=speed)
        table = lab.on_device(device).compare([Combined(choices=letters) for letters in WAYS.values()])
        if table.rows[-1].why:
            raise ValueError(table.rows[-1].why)
        found.append(LinkResult(speed, share, plain_s, dict(zip(WAYS, table.rows, strict=True))))
    return LinkStudy(found, budget_bytes)


class LinkStudy:
    """Picture of the overhead of each way over the link, with a slider for the best plan.

    Attributes:
        results: results from the slowest link to the fastest.
    """

    def __init__(self, results: Sequence[LinkResult], budget_bytes: int) -> None:
        self.results, self._budget_bytes = results, budget_bytes

    @cached_property
    def picture(self) -> Picture:
        """The overheads over links, with a table."""
        header = ("link", *(f"{name}, simulated" for name in WAYS), "both: layer by layer")
        rows = [
            (_describe_link(one), *(_percent(one.overhead(name)) for name in WAYS), one.letters("both"))
            for one in self.results
        ]
        note = "K: the layer's record is kept, R: recomputed, O: offloaded to the host."
        table = Table("How much longer than the plain step, which does not fit", header, rows, note)
        return Picture(_draw(self.results), table)

    def plan_picture(self, one: LinkResult) -> Picture:
        """Return the picture of a step by the best plan on a link."""
        rows = [row for each in self.results for row in each.rows.values() if row.trace is not None]
        both = [each.rows["both"] for each in self.results]
        span_s = 1.02 * max(row.seconds for row in both)
        top_bytes = 1.1 * max(self._budget_bytes, *(row.peak_device_bytes for row in rows))
        return show_strategy(one.rows["both"], self._budget_bytes, span_s, top_bytes)

    def still(self) -> Bundle:
        """Return the overheads and the best plan on the fastest link for a page without a kernel."""
        still = self.picture._repr_mimebundle_()
        fast = self.plan_picture(self.results[-1])
        return {**still, "text/html": f"{still['text/html']}<p>The best plan on the fastest link:</p>{fast.svg}"}

    def _ipython_display_(self) -> None:
        self._display.open()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return self._display.bundle()

    @cached_property
    def _display(self) -> StillDisplay:
        options = [(f"{one.bytes_per_s / 1e6:.3g} MB/s", i) for i, one in enumerate(self.results)]
        self.slider = widgets.SelectionSlider(
            options=options, value=len(options) - 1, description="link", layout={"width": "620px"}
        )
        self.plan_output = widgets.HTML()
        self.slider.observe(lambda _: self._show_plan(), "value")
        self._show_plan()
        return StillDisplay(
            widgets.VBox([widgets.HTML(self.picture.to_html()), self.slider, self.plan_output]), self.still
        )

    def _show_plan(self) -> None:
        one = self.results[self.slider.value]
        words = "; ".join(f"{name} {_percent(one.overhead(name))}" for name in WAYS)
        caption = f"{_describe_link(one)}: {words}; layer by layer: <strong>{one.letters('both')}</strong>"
        self.plan_output.value = f"<p>{caption}</p>{self.plan_picture(one).svg}"


def _percent(share: float | None) -> str:
    return "no plan" if share is None else f"{100 * share:+.0f} %"


def _describe_link(one: LinkResult) -> str:
    return f"{one.bytes_per_s / 1e6:.3g} MB/s ({one.share:g} × per step)"


def _draw(results: Sequence[LinkResult]) -> str:
    overheads = [100 * value for one in results for name in WAYS if (value := one.overhead(name)) is not None]
    both = [100 * value for one in results if (value := one.overhead("both")) is not None]
    top = min(max(overheads, default=10.0), _CLIP_FACTOR * max(both, default=10.0))
    across = Scale(math.log2(results[0].share), math.log2(results[-1].share), LEFT + 40, RIGHT - 40)
    up = Scale(0.0, 1.1 * max(top, 10.0), BOTTOM, TOP)
    marks = ticks(0.0, up.high, 6)
    parts = [svg.text(0, 14, "overhead over the plain step, simulated", style="small strong")]
    parts += [svg.rect(LEFT, TOP, RIGHT - LEFT, BOTTOM - TOP, style="well")]
    parts += [svg.path("".join(f"M{LEFT} {up(mark):.1f}H{RIGHT}" for mark in marks), style="rule")]
    parts += [svg.text(LEFT - 8, up(mark) + 4, f"{mark:g} %", style="small dim", anchor="end") for mark in marks]
    for one in results:
        x = across(math.log2(one.share))
        parts.append(svg.text(x, BOTTOM + 16, f"{one.bytes_per_s / 1e6:.3g} MB/s", style="small dim", anchor="middle"))
        parts.append(svg.text(x, BOTTOM + 56, one.letters("both"), style="code strong", anchor="middle"))
    parts.append(svg.text(RIGHT, BOTTOM + 32, "link, each way", style="small strong", anchor="end"))
    parts.append(svg.text(0, BOTTOM + 56, "both, by layer", style="small strong"))
    parts.append(svg.text(LEFT, BOTTOM + 82, "K kept · R recomputed · O offloaded to the host", style="small dim"))
    for name in WAYS:
        parts += _curve(name, results, across, up)
    description = "; ".join(
        f"{_describe_link(one)}: " + ", ".join(f"{n} {_percent(one.overhead(n))}" for n in WAYS) for one in results
    )
    return svg.document(WIDTH, HEIGHT, "Overhead over the link", description, parts)


def _curve(name: str, results: Sequence[LinkResult], across: Scale, up: Scale) -> Iterator[str]:
    values = [
        (across(math.log2(one.share)), 100 * value) for one in results if (value := one.overhead(name)) is not None
    ]
    if not values:
        return
    points = [(x, max(up(percent), TOP)) for x, percent in values]
    colour, dash = _COLOURS[name]
    d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    yield svg.path(d, stroke=colour, fill="none", width=3.0 if name == "both" else 2.0, dash=dash)
    for (x, y), (_, percent) in zip(points, values, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
        if percent > up.high:
            yield svg.text(x + 9, TOP - 5, f"▲ {percent:.0f} %", style="small")
    yield svg.outlined_text(svg.text(RIGHT + 8, points[-1][1] + _LABEL_OFFSETS[name], name, style="small strong"))
