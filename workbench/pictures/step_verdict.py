"""Verdict on a step in one line: its bottleneck, the share of hidden copies, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from l2l_core.analysis import Bound
from l2l_core.trace import NETWORK_LANES, Trace, format_bytes
from workbench.pictures.glossary import term_html
from workbench.pictures.picture import Table
from workbench.pictures.scale import format_seconds
from workbench.pictures.theme import LANE_NAMES
from workbench.readings import Columns, summarize_timeline

COPY_LANES = ("h2d", "d2h")
_MIN_SHARE = 0.05  # phases shorter than this share of a step are ignored


class GlossaryTerm(NamedTuple):
    """A term of the glossary; `text` replaces it on the page."""

    word: str
    text: str = ""


Sentence = Sequence[str | GlossaryTerm]


def verdict_of(trace: Trace, bounds: Sequence[Bound], budget_bytes: int | None, in_core_bytes: int | None) -> Sentence:
    """Return one line on a step's bottleneck, the share of hidden copies, and its memory.

    Args:
        trace: trace of a finished step.
        bounds: bottlenecks of its phases, `trace.bound_by()`.
        budget_bytes: memory of the device; None if it has no limit.
        in_core_bytes: bytes needed by in-core training, if available.
    """
    overlap = summarize_timeline(Columns.of(trace)).overlap
    copies = f" · {100 * overlap:.0f} % of copies ", GlossaryTerm("hidden"), " · "
    fit = _describe_fit(trace.peak_bytes("device"), budget_bytes, in_core_bytes)
    return [*_describe_bound(trace, bounds), *copies, *fit]


def plain_text(sentence: Sentence) -> str:
    """Return the line as plain text."""
    return "".join(one if isinstance(one, str) else one.text or one.word for one in sentence)


def verdict_html(step_label: str, sentence: Sentence) -> str:
    """Return the line as HTML with explained terms, preceded by `step_label` unless empty."""
    words = "".join(escape(one) if isinstance(one, str) else term_html(*one) for one in sentence)
    step = f'<span class="l2l-step">{escape(step_label)}</span>' if step_label else ""
    return f'<div class="l2l-verdict">{step}{words}</div>'


def bounds_table(bounds: Sequence[Bound], title: str) -> Table:
    """Return a table of each phase's bottleneck and its remedy."""
    rows = []
    for bound in bounds:
        share = f"{100 * bound.idle_s / bound.span_s:.0f} %" if bound.span_s else "–"
        rows.append((bound.phase, format_seconds(bound.span_s), share, str(bound).partition(": ")[2]))
    header = ("phase", "lasts", "compute waits", "what binds it, and what would help")
    return Table(title, header, rows)


def _describe_bound(trace: Trace, bounds: Sequence[Bound]) -> Sentence:
    counted = [bound for bound in bounds if bound.span_s >= _MIN_SHARE * trace.span_s]
    slowed = [bound for bound in counted if bound.lane != "compute"]
    if not slowed:
        return [GlossaryTerm("compute-bound")]
    worst = max(slowed, key=lambda bound: bound.exposed_s)
    share = f"{100 * worst.exposed_s / worst.span_s:.0f} % of the time"
    if worst.lane in COPY_LANES:
        return [GlossaryTerm("link-bound"), f": in {worst.phase} compute waits {share} for {LANE_NAMES[worst.lane]}"]
    if worst.lane == "eps":
        return ["bound by the ", GlossaryTerm("EPS"), f": in {worst.phase} compute waits {share} for it"]
    if worst.lane in NETWORK_LANES:
        return [f"bound by the network: in {worst.phase} compute waits {share} for {LANE_NAMES[worst.lane]}"]
    if worst.lane == "others":
        return [f"bound by other workers: in {worst.phase} compute waits {share} for another worker"]
    return [f"bound by the host: in {worst.phase} no lane is busy {share}"]


def _describe_fit(peak_bytes: int, budget_bytes: int | None, in_core_bytes: int | None) -> Sentence:
    if budget_bytes is None:
        fit: Sentence = [f"takes {format_bytes(peak_bytes)} of device memory"]
    else:
        fit = [GlossaryTerm("budget", "fits"), f" with {format_bytes(budget_bytes - peak_bytes)} to spare"]
    if in_core_bytes is None or in_core_bytes <= peak_bytes:
        return fit
    return [*fit, f" ({format_bytes(in_core_bytes)} ", GlossaryTerm("in core"), ")"]


# On narrow pages two lines are reserved, so that the page does not move when the text wraps.
STYLE = """
@container l2l (max-width:1050px){.l2l-verdict{min-height:2.7em}}
.l2l-verdict{font-size:13.5px;padding:2px 2px 4px;white-space:normal}
.l2l-verdict .l2l-step{opacity:.7;margin-right:10px;font-variant-numeric:tabular-nums}
.l2l-why td:last-child{text-align:left;white-space:normal}
""".replace("\n", "")
