"""Every layer tried out: how the loss of the probe changes without it and with it twice, as bars with their spread."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from workbench.pictures import svg
from workbench.pictures.colour_map import format_figure
from workbench.pictures.layer_card import TRIAL_LABELS, describe_age
from workbench.pictures.picture import Picture, Table
from workbench.pictures.relay_drawing import shortened
from workbench.pictures.scale import Scale, ticks
from workbench.pictures.theme import BLUE, VERMILION
from workbench.readings import LayerNumbers, full_name, short_name
from workbench.session import TRIAL_EDITS, LayerRow, LayerTrial, StateVersion, TrialKind

WIDTH, HEIGHT = 960, 210
MAX_LAYERS = 120  # trials that are drawn and listed, of more those that change most
_LEFT, _TOP, _BOTTOM = 64, 40, 180
COLOURS: dict[TrialKind, str] = {"without": VERMILION, "twice": BLUE}


def show_trials(
    layers: Sequence[LayerRow], trials: Collection[LayerTrial], numbers: LayerNumbers, current: StateVersion
) -> Picture:
    """Draw bars from 0, one or two for every layer that was tried, and make a table of the same with the verdicts.

    Args:
        layers: in order; of others nothing is shown.
        found: one trial at most for a layer and what is tried.
        now: the moment at which this is shown, so that what is of another one is said to be.
    """
    by = {(one.key, one.kind): one for one in trials}
    known = [one for row in layers for how in TRIAL_EDITS if (one := by.get((row.key, how))) is not None]
    shown = _largest_changes(known)
    whose = _describe_when([one.version for one in shown], current)
    rows = [
        (short_name(one.key, numbers), one.key, TRIAL_LABELS[one.kind], one.summary, describe_age(one.version, current))
        for one in shown
    ]
    title = "Change of the probe's loss, layer by layer"
    note = f"the {len(shown)} of {len(known)} that change most" if len(shown) < len(known) else ""
    table = Table(title, ("layer", "key", "tried", "change", "measured"), rows, note)
    drawn = "".join(_draw([row.key for row in layers], shown, numbers))
    legend = _legend("; ".join(filter(None, (whose, note))))
    return Picture(svg.document(WIDTH, HEIGHT, title, f"{title}; {whose}", [*legend, drawn]), table)


def _describe_when(versions: Sequence[StateVersion], current: StateVersion) -> str:
    """When all of them were measured: at one moment, or over several steps, as while a run goes on."""
    if len({*versions}) < 2:
        return "".join(describe_age(moment, current) for moment in {*versions})
    steps = [moment.step for moment in versions]
    branches = ", ".join(dict.fromkeys(moment.branch for moment in versions if moment.branch != current.branch))
    old = sum(moment != current for moment in versions)
    where = f" (some of {branches})" if branches else ""
    return (
        f"after steps {min(steps)}–{max(steps)}{where}; {old} of {len(versions)} are old, now it is step {current.step}"
    )


def _largest_changes(known: Sequence[LayerTrial]) -> Sequence[LayerTrial]:
    """All of a few, in order; of many those with the largest changes, and what could not be measured last."""
    # 1 for what could not be measured, which is behind all others: theirs are 0 or less
    sizes = sorted((-max(map(abs, _bar_ends(one)), default=-1.0), i) for i, one in enumerate(known))
    return [known[i] for i in sorted(i for _, i in sizes[:MAX_LAYERS])]


def _legend(caption: str) -> Iterator[str]:
    x = _LEFT
    for how, colour in COLOURS.items():
        yield svg.rect(x, 4, 10, 10, fill=colour)
        yield svg.text(x + 15, 13, TRIAL_LABELS[how], style="small")
        x += 150
    yield svg.text(_LEFT, 30, shortened(caption, 150), style="small dim")


def _draw(keys: Sequence[str], shown: Sequence[LayerTrial], numbers: LayerNumbers) -> Iterator[str]:
    heights = [bound for one in shown for bound in _bar_ends(one)]
    if not heights:
        yield svg.text(_LEFT, (_TOP + _BOTTOM) / 2, "nothing measured that is finite", style="dim")
        return
    low, high = min(0.0, *heights), max(0.0, *heights)
    up = Scale(low, high, _BOTTOM, _TOP) if high > low else Scale(-1, 1, _BOTTOM, _TOP)
    for mark in ticks(up.low, up.high, 5):
        yield svg.path(f"M{_LEFT} {up(mark):.1f}H{WIDTH}", style="rule" if mark else "axis")
        yield svg.text(_LEFT - 6, up(mark) + 4, format_figure(mark), style="small", anchor="end")
    slot = (WIDTH - _LEFT) / len(keys)
    every = math.ceil(22 / slot)
    for i, key in enumerate(keys):
        if i % every == 0:
            middle = _LEFT + (i + 0.5) * slot
            yield svg.text(middle, _BOTTOM + 16, short_name(key, numbers), style="small", anchor="middle")
    for one in shown:
        yield from _bar(one, _LEFT + keys.index(one.key) * slot, slot, up, full_name(one.key, numbers))


def _bar(one: LayerTrial, left: float, slot: float, up: Scale, name: str) -> Iterator[str]:
    """From 0 to the change, and a line as long as the spread to both sides of its end."""
    bounds = _bar_ends(one)
    if not bounds:
        return
    assert one.loss_change is not None
    wide = min(slot * 0.4, 22)
    x = left + slot / 2 - (wide if one.kind == "without" else 0)
    top, bottom = sorted((up(one.loss_change.change), up(0)))
    tip = f"{name}, {TRIAL_LABELS[one.kind]}: {one.summary}"
    # one px for no change: it was measured
    yield svg.rect(x, top, wide, max(bottom - top, 1), fill=COLOURS[one.kind], tip=tip, key=one.key)
    if bounds[0] != bounds[-1]:
        yield svg.path(
            f"M{x + wide / 2:.1f} {up(bounds[0]):.1f}V{up(bounds[-1]):.1f}", stroke="currentColor", width=1.4
        )


def _bar_ends(one: LayerTrial) -> tuple[float, ...]:
    """The ends of what a bar takes with its spread; nothing of what is not finite."""
    if one.loss_change is None or not math.isfinite(one.loss_change.change):
        return ()
    spread = one.loss_change.spread or 0.0
    return one.loss_change.change - spread, one.loss_change.change + spread
