"""The header in HTML: what trains on what, how far it is, and what waits to be done."""

from __future__ import annotations

from html import escape

from l2l_core import Compress
from l2l_core.trace import format_bytes
from workbench.pictures import svg
from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import format_seconds
from workbench.pictures.theme import GREEN, GREY, ORANGE, SKY, VERMILION
from workbench.session import Failure, Snapshot

STATE_COLOURS = {"idle": GREY, "running": GREEN, "paused": ORANGE, "failed": VERMILION, "closed": GREY}
STATE_SIGNS = {"idle": "●", "running": "▶", "paused": "‖", "failed": "✕", "closed": "○"}
_RECENT = 10  # steps that the pace is taken from


def header_html(now: Snapshot, called: str = "") -> str:
    """Write one line: the state, or what it is called here, and the facts."""
    colour, words = STATE_COLOURS[now.state], called or state_said(now)
    state = f'<span class="l2l-state" style="border-color:{colour}">{STATE_SIGNS[now.state]} {words}</span>'
    facts = " · ".join(escape(fact) for fact in facts_of(now))
    return f'<div class="l2l-title">{state}<span>{facts}</span></div>'


_FAILED = {
    "batch": "No batch could be fetched for step {step}",
    "step": "Step {step} failed",
    "edit": "The change after step {step} failed",
    "refused": "The edit after step {step} was refused",
    "scheduler": "The learning rate's schedule failed after step {step}",
    "logger": "A logger failed after step {step}",
}


def title_of(failure: Failure, branch: str) -> str:
    """Say what failed and with which error, in a few words; on which branch, if that is not this one."""
    where = f" on branch {failure.branch}" if failure.branch != branch else ""
    return f"{_FAILED[failure.during].format(step=failure.step)}{where}: {failure.error}"


def header_picture(now: Snapshot, called: str = "") -> Picture:
    """Make a picture of the same facts, in one line, with a table of what is set."""
    words = f"{called or state_said(now)}: {' · '.join(facts_of(now))}"
    line = svg.document(960, 26, words, words, [svg.text(0, 17, words, style="strong")])
    return Picture(line, settings_table(now, words))


def settings_table(now: Snapshot, note: str = "") -> Table:
    """Make a table of the settings of the next step."""
    rows = [(name, str(value)) for name, value in _settings(now).items()]
    return Table("Settings of the next step", ("setting", "value"), rows, note)


def state_said(now: Snapshot) -> str:
    """Say the state in a word or a few."""
    return "pausing after this step" if now.pausing else now.state


def facts_of(now: Snapshot) -> list[str]:
    """Say what trains on what, how far it is, the last loss and the pace."""
    facts = [
        now.model,
        f"{len(now.layers)} layers",
        f"{count_words(now.num_params)} weights",
        now.device,
        f"step {now.step} of {now.branch}" if len(now.branches) > 1 else f"step {now.step}",
    ]
    if now.steps:
        last = now.steps[-1]
        facts += [f"loss {last.loss:.4g}", f"{format_seconds(_pace_s(now))} per step"]
    return facts


def _pace_s(now: Snapshot) -> float:
    # the median: one slow step, as the first one often is, does not count
    recent = sorted(row.seconds for row in now.steps[-_RECENT:])
    return recent[len(recent) // 2]


def waits_for(now: Snapshot) -> str:
    """Say what commands in the queue wait for."""
    return f"waits for {now.busy} to end" if now.busy else "is next"


def pending_html(now: Snapshot) -> str:
    """Write what the newest command waits for, and its place in the queue; nothing if none waits."""
    if not now.queued:
        return ""
    count = len(now.queued)
    place = f"place {count} of {count} in the queue; Remove takes it out"
    words = f"<strong>{escape(now.queued[-1])}</strong> {escape(waits_for(now))}: {place}"
    return f'<span role="status">{words}</span>'


def progress_html(now: Snapshot) -> str:
    """Write how far the run is, and what waits for which command or step to end."""
    queued = ""
    if now.queued:
        words = f"{waits_for(now)}: " if now.busy else "next: "
        listed = "; ".join(f"{i}. {what}" for i, what in enumerate(now.queued, start=1))
        said = escape(words + listed)
        queued = f'<span class="l2l-queued" role="status" title="{said}">{said}</span>'
    return f'<div class="l2l-progress">{_bar(now)}{queued}</div>'


def _bar(now: Snapshot) -> str:
    # None: without end; 0: no run so far
    if now.target is None:
        return f"<span>{now.done} steps, until stopped</span>"
    if not now.target:
        return "<span>no steps asked for</span>"
    share = now.done / now.target
    left = ""
    if now.steps and now.state == "running" and now.target > now.done:
        left = f", {format_seconds((now.target - now.done) * _pace_s(now))} left"
    return (
        f'<div class="l2l-run" role="progressbar" aria-label="steps of this run" '
        f'aria-valuemin="0" aria-valuemax="{now.target}" aria-valuenow="{now.done}">'
        f'<div style="width:{100 * share:.1f}%;background:{SKY}"></div></div>'
        f"<span>{now.done} of {now.target} steps{left}</span>"
    )


def _settings(now: Snapshot) -> dict[str, object]:
    config, figures = now.config, now.figures
    links = {
        words: "unlimited" if figures.get(name) is None else f"{format_bytes(figures[name])}/s"
        for name, words in (("h2d_bytes_per_s", "link to the device"), ("d2h_bytes_per_s", "link from the device"))
        if name in figures  # a device whose link is real need not state any
    }
    stays = {"layers that stay": config.resident, "graphs kept": config.keep}
    return {
        "micro-batches": config.micro_batches,
        **({"schedule": "depth first"} if config.schedule == "depth_first" else {}),
        "layers ahead": config.ahead,
        **{words: count for words, count in stays.items() if count},
        "stash on": config.stash,
        "update": config.update,
        "precision": config.precision,
        **({"gradients on the wire": wire_words(config.wire)} if config.wire is not None else {}),
        **links,
        "device memory": "no limit" if now.budget_bytes is None else format_bytes(now.budget_bytes),
    }


def wire_words(compress: Compress) -> str:
    """Say how gradients are compressed."""
    return f"{compress.format}, {'with' if compress.feedback else 'without'} feedback"


def count_words(number: int) -> str:
    """Write a number for people, with three digits: "1.22 M"."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * scale:  # three digits of 999,900 would be "1e+03 k"
            return f"{number / scale:.3g} {unit}"
    return str(number)
