"""Differences between two simulated steps, as sentences and as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from l2l_core.trace import CATEGORIES, format_bytes
from workbench.pictures import LANE_NAMES, Table, format_seconds
from workbench.what_if.answer import Answer
from workbench.what_if.forecast_margin import (
    DEVICE,
    FIGURES,
    HIDDEN,
    SECONDS,
    ComparedAnswer,
    Figure,
    ForecastMargin,
    format_percent,
    with_margin,
)
from workbench.what_if.question import Question

_SAME_SHARE = 0.02  # relative; figures that differ by less count as equal
_NEGLIGIBLE_EXPOSURE = 0.02  # share of the step; a lane that is exposed for less counts as hidden
_LINK = ("h2d", "d2h")


def describe_differences(was: Answer, now: Answer, margin: ForecastMargin | None = None) -> list[str]:
    """Return one sentence for each difference, with its cause; the first is about the seconds of the step.

    Args:
        was, now: both simulated, so that equal settings make no difference.
        margin: margin of the figures.
    """
    found = [_describe_seconds(was, now, margin), _describe_device(was, now, margin)]
    if not _is_same(was.peak_host_bytes, now.peak_host_bytes):
        change = f"{format_bytes(was.peak_host_bytes)} → {format_bytes(now.peak_host_bytes)}"
        found.append(f"Host {change}: {_changed_categories(was.host_bytes, now.host_bytes)}.")
    if now.bound is not None and (was.bound is None or was.bound.lane != now.bound.lane):
        found.append(f"New bound: {now.bound}.")
    return found


def describe_forecast(forecast: Answer, margin: ForecastMargin | None) -> str:
    """Summarize a forecast like `Answer.__str__`, with the margins of its figures."""
    if margin is None:
        return str(forecast)
    rest = str(forecast).partition(" on the device")[2]
    limit = forecast.question.memory_bytes
    room = f" of {format_bytes(limit)}" if limit is not None else ""
    figures = f"{with_margin(SECONDS, forecast, margin)}, {with_margin(DEVICE, forecast, margin)}{room}"
    return f"{figures} on the device{rest}"


def changed_settings(was: Question, now: Question) -> list[str]:
    """Return the settings that differ, as "micro-batches 4 → 8"."""
    found = []
    for name, words in _SETTINGS.items():
        old, new = getattr(was, name), getattr(now, name)
        if old != new:
            found.append(f"{words} {format_setting(name, old)} → {format_setting(name, new)}")
    if was.micro_batches != now.micro_batches:
        found.append("of the same batch" if now.same_batch else "of a batch that grows with them")
    return found


def format_setting(name: str, value: Any) -> str:
    """Format the value of a setting with its unit."""
    if value is None:
        return "no limit"
    if name.endswith("_bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if name == "memory_bytes":
        return format_bytes(value)
    return f"× {value:.3g}" if name == "width" else f"{value:,}" if isinstance(value, int) else str(value)


def comparison_table(found: ComparedAnswer) -> Table:
    """Return a table of the figures of both steps, their differences and margins; without a measured step, of one."""
    was, now, margin = found.was, found.now, found.margin
    used = {f"· {name}" for name in CATEGORIES if any(each.device_bytes.get(name) for each in (was, now) if each)}
    rows = [_row(f, was, now, margin) for f in FIGURES if not f.name.startswith("·") or f.name in used]
    rows.append(("bound by", _bound(was), _bound(now), "", ""))
    notes = [f"{_capitalized(now.basis)}.", *(f"By formula: {note}." for note in now.by_formula)]
    if found.measured is not None:
        notes.insert(0, f"{_capitalized(found.measured.basis)}: {format_seconds(found.measured.seconds)}.")
    if now.per_layer > 1:
        notes.append(f"For speed, up to {now.per_layer} layers are simulated as one.")
    if margin is not None:
        notes.append(margin.explanation)
    title = found.was_title if was is not None else "measured"
    return Table("What if, in figures", ("", title, "what if, simulated", "±", "difference"), rows, " ".join(notes))


def forecast_error(forecast: Answer, step: Answer) -> str:
    """Return the error of a forecast of a measured step; "" for a guess, or if the settings differ."""
    if forecast.guessed or forecast.question != step.question:
        return ""
    seconds, nbytes = step.seconds, step.peak_device_bytes
    error_s = f"{_signed((forecast.seconds - seconds) / seconds, format_percent)}" if seconds else "–"
    change = forecast.peak_device_bytes - nbytes
    error = (
        f"{_signed(change, format_bytes)}, {_signed(change / nbytes, format_percent)}" if change and nbytes else "exact"
    )
    return (
        f"{step.basis}: {format_seconds(seconds)}, forecast {format_seconds(forecast.seconds)} ({error_s}); "
        f"{format_bytes(nbytes)} on the device, forecast {format_bytes(forecast.peak_device_bytes)} ({error})"
    )


_SETTINGS = {
    "depth": "layers",
    "width": "width",
    "micro_batches": "micro-batches",
    "ahead": "layers ahead",
    "resident": "weights that stay",
    "keep": "graphs kept",
    "stash": "stash on",
    "precision": "precision",
    "h2d_bytes_per_s": "link to the device",
    "d2h_bytes_per_s": "link to the host",
    "memory_bytes": "device memory",
}


# -- sentences -------------------------------------------------------------------------------------------------------


def _describe_seconds(was: Answer, now: Answer, margin: ForecastMargin | None) -> str:
    takes = with_margin(SECONDS, now, margin)
    if _is_same(was.seconds, now.seconds):
        share = abs(now.seconds - was.seconds) / was.seconds if was.seconds else 0.0
        return f"The step takes {takes}, as long as before ({share:.0%})."
    change = now.seconds - was.seconds
    share = f"{abs(change) / was.seconds:.0%} {'less' if change < 0 else 'more'}" if was.seconds else ""
    if was.seconds and now.seconds > 2 * was.seconds:
        share = f"{now.seconds / was.seconds:.3g} times as long"
    why = "; ".join(_main_reasons(was, now))
    return f"Step {format_seconds(was.seconds)} → {takes}, {share}{': ' + why if why else ''}."


def _main_reasons(was: Answer, now: Answer) -> list[str]:
    """Return the parts of the change in seconds that have its sign, the largest first."""
    change = now.seconds - was.seconds
    parts: list[tuple[float, str]] = []
    compute_s = now.summary.busy_s["compute"] - was.summary.busy_s["compute"]
    parts.append((compute_s, f"compute works {format_seconds(abs(compute_s))} {'more' if compute_s > 0 else 'less'}"))
    for names, words in ((_LINK, "the link"), (("eps",), "the EPS")):
        before, after = (sum(answer.summary.exposed_s[name] for name in names) for answer in (was, now))
        parts.append((after - before, _describe_exposure(words, before, after, was.seconds, now.seconds)))
    main = [part for part in parts if part[0] * change > 0 and abs(part[0]) > 0.1 * abs(change)]
    return [words for _, words in sorted(main, key=lambda part: -abs(part[0]))]


def _describe_exposure(words: str, before: float, after: float, was_s: float, now_s: float) -> str:
    if after <= _NEGLIGIBLE_EXPOSURE * now_s and before > _NEGLIGIBLE_EXPOSURE * was_s:
        return f"{words} is hidden now"
    if before <= _NEGLIGIBLE_EXPOSURE * was_s:
        return f"{words} is no longer hidden, {format_seconds(after)} of it"
    return f"{words} is exposed for {format_seconds(after)} instead of {format_seconds(before)}"


def _describe_device(was: Answer, now: Answer, margin: ForecastMargin | None) -> str:
    before, after = was.peak_device_bytes, with_margin(DEVICE, now, margin)
    if _is_same(before, now.peak_device_bytes):
        text = f"The device needs {after}, as before"
    else:
        categories = _changed_categories(was.device_bytes, now.device_bytes)
        text = f"Device {format_bytes(before)} → {after}: {categories}"
        if was.question.stash != now.question.stash:
            text += f"; the stash {'stays there' if now.question.stash == 'device' else 'leaves it'}"
    if not now.fits and now.question.memory_bytes is not None:
        text += f". That does not fit {format_bytes(now.question.memory_bytes)}: the step would fail"
    return f"{text}."


def _changed_categories(was: Mapping[str, int], now: Mapping[str, int]) -> str:
    """Return the one or two categories that change most."""
    changes = {name: now.get(name, 0) - was.get(name, 0) for name in (*was, *now)}
    largest = sorted(changes.items(), key=lambda item: -abs(item[1]))[:2]
    shown = [(name, change) for name, change in largest if abs(change) >= 0.1 * abs(largest[0][1]) > 0]
    return ", ".join(f"{name} {_signed(change, format_bytes)}" for name, change in shown)


def _is_same(before: float, after: float) -> bool:
    return abs(after - before) <= _SAME_SHARE * max(abs(before), abs(after))


# -- rows ------------------------------------------------------------------------------------------------------------


def _row(figure: Figure, was: Answer | None, now: Answer, margin: ForecastMargin | None) -> tuple[str, ...]:
    new, off = figure.read(now), margin.text(figure, now) if margin is not None else ""
    if was is None:
        return figure.name, "–", figure.format(new), off, ""
    old = figure.read(was)
    return figure.name, figure.format(old), figure.format(new), off, describe_change(figure, old, new)


def describe_change(figure: Figure, old: float, new: float) -> str:
    """Return the difference of a figure with its sign and its share; "=" if none is visible."""
    change = new - old
    if figure is HIDDEN:
        return _signed(100 * change, lambda n: f"{n:.0f} points") if round(100 * change) else "="
    if abs(change) < 0.005 * abs(old) or not change:  # invisible in the three digits shown
        return "="
    relative = f" ({_signed(change / old, format_percent)})" if old and abs(change) < 10 * old else ""
    return _signed(change, figure.format) + relative


def _signed(change: float, words: Callable[[float], str]) -> str:
    return f"{'+' if change > 0 else '−'}{words(abs(change))}"


def _capitalized(words: str) -> str:
    return words[:1].upper() + words[1:]


def _bound(answer: Answer | None) -> str:
    bound = answer.bound if answer is not None else None
    if bound is None:
        return "–"
    return f"{bound.phase}: {LANE_NAMES.get(bound.lane, 'the host, no lane works')}"
