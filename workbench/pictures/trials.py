"""Every layer tried out: how the loss of the probe changes without it and with it twice, as bars with their spread."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from workbench.pictures import svg
from workbench.pictures.card import TRIAL_WORDS, moment_words
from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import Scale, ticks
from workbench.pictures.shades import show_figure
from workbench.pictures.theme import BLUE, VERMILION
from workbench.pictures.words import shorten
from workbench.readings import Numbers, full_name, short_name
from workbench.session import TRIED, How, LayerRow, Moment, Trial

WIDTH, HEIGHT = 960, 210
MOST = 120  # trials that are drawn and listed, of more those that change most
_LEFT, _TOP, _BOTTOM = 64, 40, 180
COLOURS: dict[How, str] = {"without": VERMILION, "twice": BLUE}


def show_trials(layers: Sequence[LayerRow], found: Collection[Trial], numbers: Numbers, now: Moment) -> Picture:
    """Draw bars from 0, one or two for every layer that was tried, and make a table of the same with the verdicts.

    Args:
        layers: in order; of others nothing is shown.
        found: one trial at most for a layer and what is tried.
        now: the moment at which this is shown, so that what is of another one is said to be.
    """
    by = {(one.key, one.how): one for one in found}
    known = [one for row in layers for how in TRIED if (one := by.get((row.key, how))) is not None]
    shown = _most_telling(known)
    whose = _when([one.moment for one in shown], now)
    rows = [
        (short_name(one.key, numbers), one.key, TRIAL_WORDS[one.how], one.words, moment_words(one.moment, now))
        for one in shown
    ]
    title = "Change of the probe's loss, layer by layer"
    note = f"the {len(shown)} of {len(known)} that change most" if len(shown) < len(known) else ""
    table = Table(title, ("layer", "key", "tried", "change", "measured"), rows, note)
    drawn = "".join(_draw([row.key for row in layers], shown, numbers))
    legend = _legend("; ".join(filter(None, (whose, note))))
    return Picture(svg.document(WIDTH, HEIGHT, title, f"{title}; {whose}", [*legend, drawn]), table)


def _when(moments: Sequence[Moment], now: Moment) -> str:
    """When all of them were measured: at one moment, or over several steps, as while a run goes on."""
    if len({*moments}) < 2:
        return "".join(moment_words(moment, now) for moment in {*moments})
    steps = [moment.step for moment in moments]
    branches = ", ".join(dict.fromkeys(moment.branch for moment in moments if moment.branch != now.branch))
    old = sum(moment != now for moment in moments)
    where = f" (some of {branches})" if branches else ""
    return f"after steps {min(steps)}–{max(steps)}{where}; {old} of {len(moments)} are old, now it is step {now.step}"


def _most_telling(known: Sequence[Trial]) -> Sequence[Trial]:
    """All of a few, in order; of many those with the largest changes, and what could not be measured last."""
    # 1 for what could not be measured, which is behind all others: theirs are 0 or less
    sizes = sorted((-max(map(abs, _bounds(one)), default=-1.0), i) for i, one in enumerate(known))
    return [known[i] for i in sorted(i for _, i in sizes[:MOST])]


def _legend(whose: str) -> Iterator[str]:
    x = _LEFT
    for how, colour in COLOURS.items():
        yield svg.rect(x, 4, 10, 10, fill=colour)
        yield svg.text(x + 15, 13, TRIAL_WORDS[how], style="small")
        x += 150
    yield svg.text(_LEFT, 30, shorten(whose, 150), style="small dim")


def _draw(keys: Sequence[str], shown: Sequence[Trial], numbers: Numbers) -> Iterator[str]:
    heights = [bound for one in shown for bound in _bounds(one)]
    if not heights:
        yield svg.text(_LEFT, (_TOP + _BOTTOM) / 2, "nothing measured that is finite", style="dim")
        return
    low, high = min(0.0, *heights), max(0.0, *heights)
    up = Scale(low, high, _BOTTOM, _TOP) if high > low else Scale(-1, 1, _BOTTOM, _TOP)
    for mark in ticks(up.low, up.high, 5):
        yield svg.path(f"M{_LEFT} {up(mark):.1f}H{WIDTH}", style="rule" if mark else "axis")
        yield svg.text(_LEFT - 6, up(mark) + 4, show_figure(mark), style="small", anchor="end")
    slot = (WIDTH - _LEFT) / len(keys)
    every = math.ceil(22 / slot)
    for i, key in enumerate(keys):
        if i % every == 0:
            middle = _LEFT + (i + 0.5) * slot
            yield svg.text(middle, _BOTTOM + 16, short_name(key, numbers), style="small", anchor="middle")
    for one in shown:
        yield from _bar(one, _LEFT + keys.index(one.key) * slot, slot, up, full_name(one.key, numbers))


def _bar(one: Trial, left: float, slot: float, up: Scale, name: str) -> Iterator[str]:
    """From 0 to the change, and a line as long as the spread to both sides of its end."""
    bounds = _bounds(one)
    if not bounds:
        return
    assert one.judged is not None
    wide = min(slot * 0.4, 22)
    x = left + slot / 2 - (wide if one.how == "without" else 0)
    top, bottom = sorted((up(one.judged.change), up(0)))
    tip = f"{name}, {TRIAL_WORDS[one.how]}: {one.words}"
    # one px for no change: it was measured
    yield svg.rect(x, top, wide, max(bottom - top, 1), fill=COLOURS[one.how], tip=tip, key=one.key)
    if bounds[0] != bounds[-1]:
        yield svg.path(
            f"M{x + wide / 2:.1f} {up(bounds[0]):.1f}V{up(bounds[-1]):.1f}", stroke="currentColor", width=1.4
        )


def _bounds(one: Trial) -> tuple[float, ...]:
    """The ends of what a bar takes with its spread; nothing of what is not finite."""
    if one.judged is None or not math.isfinite(one.judged.change):
        return ()
    spread = one.judged.spread or 0.0
    return one.judged.change - spread, one.judged.change + spread
