"""Header of a session: state, facts, progress, queue and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from html import escape

from l2l_core import Compress, RelayConfig
from l2l_core.plan import schedule_name
from l2l_core.trace import format_bytes
from workbench.pictures import svg
from workbench.pictures.picture import Picture, Table
from workbench.pictures.relay_drawing import shortened
from workbench.pictures.scale import format_prefixed, format_seconds
from workbench.pictures.theme import GREEN, GREY, ORANGE, SKY, VERMILION
from workbench.session import LOSS, Failure, Race, SearchRow, Snapshot, StepRow, WorkRow

STATE_COLOURS = {"idle": GREY, "running": GREEN, "paused": ORANGE, "failed": VERMILION, "closed": GREY}
STATE_SIGNS = {"idle": "●", "running": "▶", "paused": "‖", "failed": "×", "closed": "○"}
_DEFAULTS = RelayConfig()
_MAX_FACT = 36  # characters of one fact in the header, as of a branch's name
_PACE_STEPS = 10  # number of recent steps that define the pace


def header_html(snapshot: Snapshot, state_label: str = "") -> str:
    """Return one line of HTML with the state, or `state_label` in its place, and the facts."""
    is_busy = work_label(snapshot) and snapshot.state != "failed"
    colour, sign = (GREEN, "▶") if is_busy else (STATE_COLOURS[snapshot.state], STATE_SIGNS[snapshot.state])
    words = state_label or describe_state(snapshot)
    state = f'<span class="l2l-state" style="border-color:{colour}">{sign} {words}</span>'
    facts = " · ".join(f'<span class="l2l-fact"{tip}>{escape(fact)}</span>' for fact, tip in _with_tips(snapshot))
    return f'<div class="l2l-title">{state}<span>{facts}</span></div>'


def _with_tips(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Return short forms of the facts, each with an attribute for the words that are left out."""
    objective = f" ({snapshot.steps[-1].objective})" if snapshot.steps and snapshot.steps[-1].objective else ""
    for fact in header_facts(snapshot):
        is_loss = bool(objective) and fact.startswith("loss ") and fact.endswith(objective)
        short = fact.removesuffix(objective) if is_loss else shortened(fact, _MAX_FACT)
        yield short, "" if short == fact else f' title="{escape(fact)}"'


_FAILURE_TITLES = {
    "batch": "No batch could be fetched for step {step}",
    "step": "Step {step} failed",
    "edit": "The change after step {step} failed",
    "refused": "The edit after step {step} was refused",
    "scheduler": "The learning rate's schedule failed after step {step}",
    "logger": "A logger failed after step {step}",
    "save": "The session could not be saved after step {step}",
    "resume": "The session could not be resumed",
}


def failure_title(failure: Failure, branch: str) -> str:
    """Return the title of a failure: the part that failed, its branch if it is not `branch`, and the error."""
    where = f" on branch {failure.branch}" if failure.branch != branch else ""
    return f"{_FAILURE_TITLES[failure.during].format(step=failure.step)}{where}: {failure.error}"


def header_picture(snapshot: Snapshot, state_label: str = "") -> Picture:
    """Return a picture of the header line with a table of the settings."""
    words = f"{state_label or describe_state(snapshot)}: {' · '.join(header_facts(snapshot))}"
    line = svg.document(960, 26, words, words, [svg.text(0, 17, words, style="strong")])
    return Picture(line, settings_table(snapshot, words))


def settings_table(snapshot: Snapshot, note: str = "") -> Table:
    """Return a table of the settings of the next step."""
    rows = [(name, str(value)) for name, value in _settings(snapshot).items()]
    return Table("Settings of the next step", ("setting", "value"), rows, note)


def describe_state(snapshot: Snapshot) -> str:
    """Return the state in words."""
    if label := work_label(snapshot):
        return f"failed, {label}" if snapshot.state == "failed" else label
    return "pausing after this step" if snapshot.pausing else snapshot.state


def work_label(snapshot: Snapshot) -> str:
    """Return the name of work that is no run: a race, a search for settings or a measurement; "" without."""
    if snapshot.search is not None:
        return "searching"
    if snapshot.work is not None:
        return snapshot.work.state
    if snapshot.race is None or snapshot.race.is_over:
        return ""
    return "race paused" if snapshot.race.is_paused else "racing"


def header_facts(snapshot: Snapshot) -> list[str]:
    """Return model, device, step, last losses, learning rate and pace, each in words."""
    facts = [
        snapshot.model,
        f"{len(snapshot.layers)} layers",
        f"{format_count(snapshot.num_params)} weights",
        snapshot.device,
        f"step {snapshot.step} of {snapshot.branch}" if len(snapshot.branches) > 1 else f"step {snapshot.step}",
    ]
    if snapshot.steps:
        last = snapshot.steps[-1]
        loss = f"loss {last.loss:.4g}" + (f" ({last.objective})" if last.objective else "")
        facts += [loss, *_held_out_fact(snapshot), *_rate_facts(last)]
        facts += [f"{format_seconds(_step_seconds(snapshot))} per step", *_pace_fact(snapshot)]
    if snapshot.saved is not None:
        facts.append(f"saved after step {snapshot.saved.step}")
    return facts


def _held_out_fact(snapshot: Snapshot) -> list[str]:
    if not snapshot.held_out:
        return []
    return [f"held out {snapshot.held_out[-1].values[LOSS]:.4g}"]


def _rate_facts(last: StepRow) -> list[str]:
    epoch = [] if last.epoch is None else [f"epoch {last.epoch}"]
    return epoch + ([] if last.lr is None else [f"lr {last.lr:.3g}"])


def _pace_fact(snapshot: Snapshot) -> list[str]:
    rates = sorted(row.per_s for row in snapshot.steps[-_PACE_STEPS:] if row.seconds)
    unit = snapshot.steps[-1].unit
    return [f"{format_prefixed(rates[len(rates) // 2])}{unit}/s"] if rates else []


def _step_seconds(snapshot: Snapshot) -> float:
    return _median_seconds(snapshot.steps)


def _median_seconds(steps: Sequence[StepRow]) -> float:
    # the median, which ignores single slow steps, such as the first one
    recent = sorted(row.seconds for row in steps[-_PACE_STEPS:])
    return recent[len(recent) // 2]


def describe_wait(snapshot: Snapshot) -> str:
    """Return the wait of the queue in words."""
    return f"waits for {snapshot.busy} to end" if snapshot.busy else "is next"


def pending_html(snapshot: Snapshot) -> str:
    """Return the newest waiting command as HTML, with its place in the queue; empty if none waits."""
    if not snapshot.queued:
        return ""
    count = len(snapshot.queued)
    place = f"place {count} of {count} in the queue; Remove takes it out"
    words = f"<strong>{escape(snapshot.queued[-1])}</strong> {escape(describe_wait(snapshot))}: {place}"
    return f'<span role="status">{words}</span>'


def progress_html(snapshot: Snapshot) -> str:
    """Return the progress of the run and the queue as HTML."""
    queued = ""
    if snapshot.queued:
        words = f"{describe_wait(snapshot)}: " if snapshot.busy else "next: "
        words += "; ".join(f"{i}. {what}" for i, what in enumerate(snapshot.queued, start=1))
        queued = f'<span class="l2l-queued" role="status" title="{escape(words)}">{escape(words)}</span>'
    notice = f'<div class="l2l-notice" role="status">{escape(snapshot.notice)}</div>' if snapshot.notice else ""
    return f'<div class="l2l-progress">{_progress_bar(snapshot)}{queued}</div>{notice}'


def _search_progress(search: SearchRow) -> str:
    left_s = search.limit_s - search.elapsed_s
    left = f"at most {left_s:.0f} s left once some fit" if left_s > 0 else "until some fit"
    return f"settings that fit: {search.tried} tried in {search.elapsed_s:.0f} s, {left}"


def _work_progress(work: WorkRow) -> str:
    of = f" of {work.total}" if work.total is not None else ""
    left = f", {format_seconds(work.left_s)} left" if work.left_s is not None else ""
    return f"{work.done}{of} {work.unit}{left}"


def _race_progress(race: Race) -> str:
    counts = ", ".join(f"{racer.name} {len(racer.steps)}/{race.asked}" for racer in race.racers)
    paces = [_median_seconds(racer.steps) for racer in race.racers if racer.steps]
    if not paces or race.is_paused:
        return counts
    mean_s = sum(paces) / len(paces)
    racing = [racer for racer in race.racers if not racer.left]
    left_s = sum((race.asked - len(r.steps)) * (_median_seconds(r.steps) if r.steps else mean_s) for r in racing)
    return f"{counts}, {format_seconds(left_s)} left"


def _progress_bar(snapshot: Snapshot) -> str:
    if snapshot.search is not None:
        return f'<span role="status">{escape(_search_progress(snapshot.search))}</span>'
    if snapshot.work is not None:
        return f'<span role="status">{escape(_work_progress(snapshot.work))}</span>'
    if snapshot.race is not None and not snapshot.race.is_over:
        return f'<span role="status">{escape(_race_progress(snapshot.race))}</span>'
    # target None: a run without end; 0: no run yet
    if snapshot.target is None:
        return f"<span>{snapshot.done} steps, until stopped</span>"
    if not snapshot.target:
        return "<span>no run yet</span>"
    share = snapshot.done / snapshot.target
    left = f", stopped ({snapshot.target + snapshot.dropped} requested)" if snapshot.dropped else ""
    if snapshot.steps and snapshot.state == "running" and snapshot.target > snapshot.done:
        left = f", {format_seconds((snapshot.target - snapshot.done) * _step_seconds(snapshot))} left"
    return (
        f'<div class="l2l-run" role="progressbar" aria-label="steps of this run" '
        f'aria-valuemin="0" aria-valuemax="{snapshot.target}" aria-valuenow="{snapshot.done}">'
        f'<div style="width:{100 * share:.1f}%;background:{SKY}"></div></div>'
        f"<span>{snapshot.done} of {snapshot.target} steps{left}</span>"
    )


def in_force_html(snapshot: Snapshot) -> str:
    """Return every setting of the next step that differs from its default, and its value before a change, as HTML."""
    shown, changed = {f.name: getattr(snapshot.config, f.name) for f in fields(RelayConfig)}, snapshot.changed_from
    defaults = {**vars(_DEFAULTS), "seed": shown["seed"]}  # without a seed, the relay draws one
    listed = [name for name, value in shown.items() if name in changed or value != defaults[name]]
    listed += [name for name in changed if name not in shown]  # figures of the link
    values = {**snapshot.figures, **shown}
    words = [_describe_setting(name, values[name], changed) for name in listed]
    text = " · ".join(words) or "all at their defaults"
    return f'<span class="l2l-caption l2l-in-force">settings in force: {text}</span>'


def _describe_setting(name: str, value: object, changed: Mapping[str, object]) -> str:
    words = escape(f"{name}={_value_text(name, value)}")
    return f"<strong>{words}</strong> (was {escape(_value_text(name, changed[name]))})" if name in changed else words


def _value_text(name: str, value: object) -> str:
    return schedule_name(value) if name == "schedule" else str(value)


def _settings(snapshot: Snapshot) -> dict[str, object]:
    config, figures = snapshot.config, snapshot.figures
    links = {
        words: "unlimited" if figures.get(name) is None else f"{format_bytes(figures[name])}/s"
        for name, words in (("h2d_bytes_per_s", "link to the device"), ("d2h_bytes_per_s", "link from the device"))
        if name in figures  # a real link may have no stated bandwidth
    }
    stays = {"layers that stay": config.resident, "graphs kept": config.keep}
    schedule = schedule_name(config.schedule)
    return {
        "micro-batches": config.micro_batches,
        **({"schedule": schedule.replace("_", " ")} if schedule != _DEFAULTS.schedule else {}),
        "layers ahead": config.ahead,
        **{words: count for words, count in stays.items() if count},
        "stash on": config.stash,
        "update": config.update,
        "precision": config.precision,
        **({"gradients on the wire": _describe_compression(config.wire)} if config.wire is not None else {}),
        **links,
        "device memory": "no limit" if snapshot.budget_bytes is None else format_bytes(snapshot.budget_bytes),
    }


def _describe_compression(compress: Compress) -> str:
    return f"{compress.format}, {'with' if compress.feedback else 'without'} feedback"


def format_count(number: int) -> str:
    """Return a number with three digits and a unit prefix, as in "1.22 M"."""
    return format_prefixed(number).strip()
