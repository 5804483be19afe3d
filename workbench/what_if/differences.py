"""A simulated step beside a measured one: what differs, in words and as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from l2l_core.trace import CATEGORIES, LANES, format_bytes
from workbench.pictures import LANE_NAMES, Table, format_seconds
from workbench.what_if.answer import Answer
from workbench.what_if.question import Question

_SAME_SHARE = 0.02  # relative; what differs by less is called the same
_NEGLIGIBLE_EXPOSURE = 0.02  # of the step; a lane that exposes less is hidden
_LINK = ("h2d", "d2h")


def describe_differences(was: Answer, now: Answer) -> list[str]:
    """Say what differs and why, a sentence each, the step first. Settings that are the same are not named."""
    found = [_step(was, now), _device(was, now)]
    if not _is_same(was.peak_host_bytes, now.peak_host_bytes):
        found.append(
            f"Host {_describe_change(was.peak_host_bytes, now.peak_host_bytes)}: {_changed_categories(was.host_bytes, now.host_bytes)}."
        )
    if now.bound is not None and (was.bound is None or was.bound.lane != now.bound.lane):
        found.append(f"This binds the step now: {now.bound}.")
    return found


def changed_settings(was: Question, now: Question) -> list[str]:
    """List the settings that differ, as "micro-batches 4 → 8"."""
    found = []
    for name, words in _SETTINGS.items():
        old, new = getattr(was, name), getattr(now, name)
        if old != new:
            found.append(f"{words} {format_setting(name, old)} → {format_setting(name, new)}")
    if was.micro_batches != now.micro_batches:
        found.append("of the same batch" if now.same_batch else "of a batch that grows with them")
    return found


def format_setting(name: str, value: Any) -> str:
    """Write the value of a setting for people."""
    if value is None:
        return "no limit"
    if name.endswith("_bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if name == "memory_bytes":
        return format_bytes(value)
    return f"× {value:.3g}" if name == "width" else f"{value:,}" if isinstance(value, int) else str(value)


def comparison_table(was: Answer | None, now: Answer) -> Table:
    """Put figures of both and their difference into a table; without a measured step those of the answer alone."""
    held = [name for name in CATEGORIES if any(each.device_bytes.get(name) for each in (was, now) if each is not None)]
    reads: list[tuple[str, Callable[[Answer], float], Callable[[float], str]]] = [
        ("step", lambda answer: answer.seconds, format_seconds),
        ("compute at work", lambda answer: answer.summary.busy_s["compute"], format_seconds),
        *((f"{LANE_NAMES[lane]}, exposed", partial(_exposed_s, lane), format_seconds) for lane in LANES[1:]),
        ("copies hidden", lambda answer: answer.overlap, _percent),
        ("device at its peak", lambda answer: answer.peak_device_bytes, format_bytes),
        *((f"· {name}", partial(_category_bytes, name), format_bytes) for name in held),
        ("host at its peak", lambda answer: answer.peak_host_bytes, format_bytes),
    ]
    rows = [_row(name, read(was) if was is not None else None, read(now), words) for name, read, words in reads]
    measured = was.basis if was is not None else "measured"
    rows.append(("what binds", _bound(was), _bound(now), ""))
    notes = [f"{now.basis[0].upper()}{now.basis[1:]}.", *(f"By formula: {words}." for words in now.by_formula)]
    if now.per_layer > 1:
        notes.append(f"To be quick, up to {now.per_layer} layers are simulated as one.")
    return Table("What if, in figures", ("", measured, "what if, simulated", "difference"), rows, " ".join(notes))


def forecast_error(forecast: Answer, step: Answer) -> str:
    """Say how far a forecast was off from a measured step; "" for a guess, or if the step had other settings."""
    if forecast.guessed or forecast.question != step.question:
        return ""
    seconds, nbytes = step.seconds, step.peak_device_bytes
    off = f"{_signed((forecast.seconds - seconds) / seconds, _percent)}" if seconds else "–"
    change = forecast.peak_device_bytes - nbytes
    right = f"{_signed(change, format_bytes)}, {_signed(change / nbytes, _percent)}" if change and nbytes else "exact"
    return (
        f"{step.basis}: {format_seconds(seconds)}, forecast {format_seconds(forecast.seconds)} ({off}); "
        f"{format_bytes(nbytes)} on the device, forecast {format_bytes(forecast.peak_device_bytes)} ({right})"
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


def _step(was: Answer, now: Answer) -> str:
    if _is_same(was.seconds, now.seconds):
        return f"The step takes {format_seconds(now.seconds)}, as long as the measured one."
    change = now.seconds - was.seconds
    share = f"{abs(change) / was.seconds:.0%} {'less' if change < 0 else 'more'}" if was.seconds else ""
    if was.seconds and now.seconds > 2 * was.seconds:
        share = f"{now.seconds / was.seconds:.3g} times as long"
    why = "; ".join(_main_reasons(was, now))
    return f"Step {format_seconds(was.seconds)} → {format_seconds(now.seconds)}, {share}{': ' + why if why else ''}."


def _main_reasons(was: Answer, now: Answer) -> list[str]:
    """What the difference of two steps is made of, the largest part first; parts that go the other way are left out."""
    change = now.seconds - was.seconds
    parts: list[tuple[float, str]] = []
    worked = now.summary.busy_s["compute"] - was.summary.busy_s["compute"]
    parts.append((worked, f"compute works {format_seconds(abs(worked))} {'more' if worked > 0 else 'less'}"))
    for names, words in ((_LINK, "the link"), (("eps",), "the EPS")):
        before, after = (sum(answer.summary.exposed_s[name] for name in names) for answer in (was, now))
        parts.append((after - before, _describe_exposure(words, before, after, was.seconds, now.seconds)))
    telling = [part for part in parts if part[0] * change > 0 and abs(part[0]) > 0.1 * abs(change)]
    return [words for _, words in sorted(telling, key=lambda part: -abs(part[0]))]


def _describe_exposure(words: str, before: float, after: float, was_s: float, now_s: float) -> str:
    if after <= _NEGLIGIBLE_EXPOSURE * now_s and before > _NEGLIGIBLE_EXPOSURE * was_s:
        return f"{words} is hidden now"
    if before <= _NEGLIGIBLE_EXPOSURE * was_s:
        return f"{words} is no longer hidden, {format_seconds(after)} of it"
    return f"{words} is exposed for {format_seconds(after)} instead of {format_seconds(before)}"


def _device(was: Answer, now: Answer) -> str:
    before, after = was.peak_device_bytes, now.peak_device_bytes
    if _is_same(before, after):
        said = f"The device needs {format_bytes(after)}, as measured"
    else:
        said = f"Device {_describe_change(before, after)}: {_changed_categories(was.device_bytes, now.device_bytes)}"
        if was.question.stash != now.question.stash:
            where = "stays there" if now.question.stash == "device" else "leaves it"
            said += f"; the stash {where}"
    if not now.fits and now.question.memory_bytes is not None:
        said += f". That does not fit {format_bytes(now.question.memory_bytes)}: the step would fail"
    return f"{said}."


def _changed_categories(was: Mapping[str, int], now: Mapping[str, int]) -> str:
    """The categories that change most, two at most."""
    changes = {name: now.get(name, 0) - was.get(name, 0) for name in (*was, *now)}
    largest = sorted(changes.items(), key=lambda item: -abs(item[1]))[:2]
    telling = [(name, change) for name, change in largest if abs(change) >= 0.1 * abs(largest[0][1]) > 0]
    return ", ".join(f"{name} {_signed(change, format_bytes)}" for name, change in telling)


def _describe_change(before: float, after: float) -> str:
    return f"{format_bytes(before)} → {format_bytes(after)}"


def _is_same(before: float, after: float) -> bool:
    return abs(after - before) <= _SAME_SHARE * max(abs(before), abs(after))


# -- rows ------------------------------------------------------------------------------------------------------------


def _row(name: str, was: float | None, now: float, words: Callable[[float], str]) -> tuple[str, str, str, str]:
    if was is None:
        return name, "–", words(now), ""
    change = now - was
    if words is _percent:
        points = _signed(100 * change, lambda n: f"{n:.0f} points")
        return name, words(was), words(now), points if round(100 * change) else "="
    if abs(change) < 0.005 * abs(was) or not change:  # three digits are shown, in which it would hardly be seen
        return name, words(was), words(now), "="
    relative = f" ({_signed(change / was, _percent)})" if was and abs(change) < 10 * was else ""
    return name, words(was), words(now), _signed(change, words) + relative


def _exposed_s(lane: str, answer: Answer) -> float:
    return answer.summary.exposed_s[lane]


def _category_bytes(category: str, answer: Answer) -> float:
    return answer.device_bytes.get(category, 0)


def _signed(change: float, words: Callable[[float], str]) -> str:
    return f"{'+' if change > 0 else '−'}{words(abs(change))}"


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _bound(answer: Answer | None) -> str:
    bound = answer.bound if answer is not None else None
    if bound is None:
        return "–"
    return f"{bound.phase}: {LANE_NAMES.get(bound.lane, 'the host, no lane works')}"
