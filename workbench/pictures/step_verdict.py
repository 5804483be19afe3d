"""Verdict on a step in one line: memory, hidden copies, the largest cost beside compute, and a remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from l2l_core.analysis import Bound
from l2l_core.trace import NETWORK_LANES, Trace, format_bytes
from workbench.pictures.glossary import term_html
from workbench.pictures.picture import Table
from workbench.pictures.scale import format_seconds
from workbench.readings import Columns, summarize_timeline

MIN_SHARE = 0.05  # smaller shares of a step are not worth a remedy
_MAX_MICRO_BATCHES = 64  # more are no practical advice


class GlossaryTerm(NamedTuple):
    """A term of the glossary; `text` replaces it on the page."""

    word: str
    text: str = ""


Sentence = Sequence[str | GlossaryTerm]


class Cost(NamedTuple):
    """Time of a step in which compute waits for one cause.

    Attributes:
        lane: the lane that it waits for, "idle", "others" or, if nothing is worth a remedy, "compute".
        share: of the step.
        settings: settings that would help, as in `Bound`.
    """

    lane: str
    share: float
    settings: Mapping[str, Any]


def costs_of(trace: Trace, bounds: Sequence[Bound]) -> Sequence[Cost]:
    """Return the costs of a step by cause, with the remedy of its longest phase."""
    costs = []
    for lane in dict.fromkeys(bound.lane for bound in bounds if bound.lane != "compute"):
        phases = sorted((bound for bound in bounds if bound.lane == lane), key=lambda bound: -bound.exposed_s)
        share = sum(bound.exposed_s for bound in phases) / trace.span_s
        costs.append(Cost(lane, share, phases[0].settings))
    return costs


def largest_cost(costs: Sequence[Cost]) -> Cost:
    """Return the largest of the costs, or that of compute if none is worth a remedy."""
    largest = max(costs, key=lambda cost: cost.share, default=_NO_COST)
    return largest if largest.share >= MIN_SHARE else _NO_COST


_NO_COST = Cost("compute", 0.0, {})


def verdict_of(trace: Trace, cost: Cost, budget_bytes: int | None, in_core_bytes: int | None) -> Sentence:
    """Return one line on a step's memory, the share of hidden copies, its largest cost, and what would help.

    Args:
        trace: trace of a finished step.
        cost: the largest cost of this step, or of several like it.
        budget_bytes: memory of the device; None if it has no limit.
        in_core_bytes: bytes needed by in-core training, if available.
    """
    overlap = summarize_timeline(Columns.of(trace)).overlap
    copies = f" · {100 * overlap:.0f} % of copies ", GlossaryTerm("hidden"), " · "
    fit = _describe_fit(trace.peak_bytes("device"), budget_bytes, in_core_bytes)
    return [*fit, *copies, *_describe_cost(cost)]


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


def _describe_cost(cost: Cost) -> Sentence:
    """Return the cost and a remedy: "waiting for the EPS costs 18 % of the step; ... would help"."""
    if cost.lane == "compute":
        return [GlossaryTerm("compute-bound", "compute hardly ever waits"), "; a faster device would help"]
    cause, remedy = _CAUSES["network" if cost.lane in NETWORK_LANES else cost.lane]
    return [
        *cause,
        f" costs {100 * cost.share:.0f} % of the step; {_describe_settings(cost.settings) or remedy} would help",
    ]


_CAUSES: Mapping[str, tuple[Sentence, str]] = {  # the cause, and a remedy where no setting is one
    "h2d": ([GlossaryTerm("link-bound", "waiting for copies to the device")], "a faster link or a larger batch"),
    "d2h": ([GlossaryTerm("link-bound", "waiting for copies to the host")], "a faster link or a larger batch"),
    "eps": (["waiting for the ", GlossaryTerm("EPS")], "a faster optimizer or a larger batch"),
    "disk read": (["waiting for reads from disk"], "a faster disk or a larger batch"),
    "disk write": (["waiting for writes to disk"], "a faster disk or a larger batch"),
    "network": (["waiting for the network"], "a faster network or a larger batch"),
    "others": (["waiting for other workers"], "equally many rows for every worker"),
    "idle": (["Python between operations"], "larger micro-batches"),
}


def _describe_settings(settings: Mapping[str, Any]) -> str:
    """Return settings that help in words; "" without, or if one is not practical."""
    words = {
        "ahead": "{} layers ahead",
        "stash": "the stash on {}",
        "update": "update={!r}",
        "micro_batches": "a batch of {} such micro-batches",
    }
    if settings.get("micro_batches", 0) > _MAX_MICRO_BATCHES:
        return ""
    return " with ".join(text.format(settings[name]) for name, text in words.items() if name in settings)


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
.l2l-why td{white-space:nowrap}
.l2l-why :is(th,td):last-child{text-align:left;white-space:normal}
""".replace("\n", "")
