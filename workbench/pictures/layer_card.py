"""Card of a layer: facts, parameters and trial results, in HTML and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import prod

from l2l_core.trace import format_bytes
from workbench.pictures.colour_map import format_figure
from workbench.pictures.picture import Table
from workbench.readings import LayerNumbers, full_name
from workbench.session import LayerFacts, LayerRow, LayerTrial, StateVersion, TrialKind

MAX_PARAMETERS = 12  # maximum number of parameters listed
_COLUMN = 4  # parameters per column
TRIAL_LABELS: Mapping[TrialKind, str] = {"without": "loss without it", "twice": "loss with it twice"}

STYLE = """
.l2l-card-facts{font-size:12.5px;line-height:1.5;font-variant-numeric:tabular-nums}
.l2l-card-facts strong{font-size:14px}
.l2l-card-parts{display:flex;flex-wrap:wrap;gap:0 20px;max-height:80px;overflow:auto;align-items:flex-start}
.l2l-card-parts table{margin:2px 0;font-size:12px;line-height:18px;border-spacing:0}
.l2l-card-facts td,.l2l-card-facts th{padding:0 14px 0 0;text-align:left;font-weight:inherit}
.l2l-code code{user-select:all;font-family:var(--jp-code-font-family,ui-monospace,monospace);font-size:12px}
""".replace("\n", "")


def describe_age(version: StateVersion, current: StateVersion) -> str:
    """Return the step of a measurement, marked as old if the state has changed since."""
    where = f" of {version.branch}" if version.branch != current.branch else ""
    if version == current:
        return f"after step {version.step}"
    # same branch and step: only edits or settings differ
    since = " and edits or settings since" if version[:2] == current[:2] else f", now it is step {current.step}"
    return f"old: after step {version.step}{where}{since}"


def facts_html(row: LayerRow, numbers: LayerNumbers, facts: LayerFacts | None) -> str:
    """Return the facts of a layer as HTML; `facts` is None until they are read."""
    words = " · ".join(map(escape, _facts(row, facts)))
    parts = []
    for name, *cells in [] if facts is None else _parameter_rows(facts):
        columns = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        parts.append(f'<tr><th scope="row">{escape(name)}</th>{columns}</tr>')
    more = 0 if facts is None else len(facts.parameters) - MAX_PARAMETERS
    parts += [f"<tr><td>… {more} more</td></tr>"] if more > 0 else []
    tables = "".join(f"<table>{''.join(parts[i : i + _COLUMN])}</table>" for i in range(0, len(parts), _COLUMN))
    box = ""
    if parts:  # focusable, so that it scrolls from the keyboard
        box = f'<div class="l2l-card-parts" tabindex="0" role="region" aria-label="Parameters">{tables}</div>'
    name = f"<strong>{escape(full_name(row.key, numbers))}</strong> {escape(row.name)}"
    return f'<div class="l2l-card-facts"><div>{name} · {words}</div>{box}</div>'


def code_line(code: str) -> str:
    """Return a line of code as HTML; a click selects all of it."""
    return f'<span class="l2l-code"><code>{escape(code)}</code></span>'


def trial_html(trial: LayerTrial | None, waiting: str, current: StateVersion) -> str:
    """Return the result of a trial and its step as HTML, or `waiting` while it is pending."""
    if waiting:
        return f'<span class="l2l-caption" role="status">{escape(waiting)}</span>'
    if trial is None:
        return ""
    when = f' <span class="l2l-caption">({escape(describe_age(trial.version, current))})</span>'
    return f"<strong>{escape(trial.summary)}</strong>{when}"


def card_table(
    row: LayerRow, numbers: LayerNumbers, facts: LayerFacts | None, trials: Sequence[LayerTrial], current: StateVersion
) -> Table:
    """Return the contents of the card as a table."""
    rows = [("name", row.name), *(("fact", words) for words in _facts(row, facts))]
    if facts is not None:
        rows += [("parameter", " ".join(cells)) for cells in _parameter_rows(facts)]
        rows.append(("spread of weights", describe_spread(facts)))
    figures = ("gradient norm", row.grad_norm), ("update / weight", row.update_ratio), ("influence", row.influence)
    rows += [(name, format_figure(figure)) for name, figure in figures]
    rows += [(TRIAL_LABELS[one.kind], f"{one.summary} ({describe_age(one.version, current)})") for one in trials]
    return Table(f"Layer {full_name(row.key, numbers)}", ("of the layer", "is"), rows)


def describe_spread(facts: LayerFacts) -> str:
    """Return mean, deviation and range of the weights, and the step of the measurement, in words."""
    broken = f"{facts.non_finite:,} weights are not finite; " if facts.non_finite else ""
    if not facts.counts:
        return f"{broken}no finite weights, after step {facts.step}"
    ends = f"from {format_figure(facts.low)} to {format_figure(facts.high)}"
    mean = f"{format_figure(facts.mean)} ± {format_figure(facts.deviation)} over the weights"
    return f"{broken}{mean}, {ends}, after step {facts.step}"


def _facts(row: LayerRow, facts: LayerFacts | None) -> list[str]:
    words = [facts.module] if facts is not None else []
    words += [f"{row.num_params:,} weights", format_bytes(row.nbytes), f"version {row.version}"]
    words.append("frozen" if row.frozen else "trained")
    return words if row.stack is not None else [*words, "not in a ModuleList or Sequential, so it cannot be edited"]


def _parameter_rows(facts: LayerFacts) -> list[tuple[str, str, str, str]]:
    rows = []
    for part in facts.parameters[:MAX_PARAMETERS]:
        count = f"{prod(part.shape):,}{'' if part.trained else ', frozen'}"
        rows.append((part.name, " × ".join(map(str, part.shape)) or "one number", part.dtype, count))
    return rows
