"""Changes of the probe's loss without each layer and with it twice, as bars with their spread."""

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
MAX_LAYERS = 120  # maximum number of trials shown; of more, the largest changes
_LEFT, _TOP, _BOTTOM = 64, 40, 180
COLOURS: dict[TrialKind, str] = {"without": VERMILION, "twice": BLUE}


def show_trials(
    layers: Sequence[LayerRow], trials: Collection[LayerTrial], numbers: LayerNumbers, current: StateVersion
) -> Picture:
    """Return bars of the changes, one or two for every tried layer, and a table of the results.

    Args:
        layers: the layers, in order; trials of other layers are ignored.
        trials: at most one trial per layer and kind.
        numbers: numbers of the layers.
        current: present state; older trials are marked as old.
    """
    by_key = {(one.key, one.kind): one for one in trials}
    found = [one for row in layers for kind in TRIAL_EDITS if (one := by_key.get((row.key, kind))) is not None]
    shown = _largest_changes(found)
    when = _describe_when([one.version for one in shown], current)
    rows = [
        (short_name(one.key, numbers), one.key, TRIAL_LABELS[one.kind], one.summary, describe_age(one.version, current))
        for one in shown
    ]
    title = "Change of the probe's loss, layer by layer"
    note = f"the {len(shown)} of {len(found)} that change most" if len(shown) < len(found) else ""
    table = Table(title, ("layer", "key", "tried", "change", "measured"), rows, note)
    parts = [*_legend("; ".join(filter(None, (when, note)))), *_draw([row.key for row in layers], shown, numbers)]
    return Picture(svg.document(WIDTH, HEIGHT, title, f"{title}; {when}", parts), table)


def _describe_when(versions: Sequence[StateVersion], current: StateVersion) -> str:
    """Return the step or the steps of the measurements, and how many are old, in words."""
    if len({*versions}) < 2:
        return "".join(describe_age(moment, current) for moment in {*versions})
    steps = [moment.step for moment in versions]
    branches = ", ".join(dict.fromkeys(moment.branch for moment in versions if moment.branch != current.branch))
    old = sum(moment != current for moment in versions)
    where = f" (some of {branches})" if branches else ""
    return (
        f"after steps {min(steps)}–{max(steps)}{where}; {old} of {len(versions)} are old, now it is step {current.step}"
    )


def _largest_changes(trials: Sequence[LayerTrial]) -> Sequence[LayerTrial]:
    """Return the `MAX_LAYERS` largest changes, in order; trials without a measurement rank last."""
    ranked = sorted((-max(map(abs, _bar_ends(one)), default=-1.0), i) for i, one in enumerate(trials))
    return [trials[i] for i in sorted(i for _, i in ranked[:MAX_LAYERS])]


def _legend(caption: str) -> Iterator[str]:
    x = _LEFT
    for kind, colour in COLOURS.items():
        yield svg.rect(x, 4, 10, 10, fill=colour)
        yield svg.text(x + 15, 13, TRIAL_LABELS[kind], style="small")
        x += 150
    yield svg.text(_LEFT, 30, shortened(caption, 150), style="small dim")


def _draw(keys: Sequence[str], shown: Sequence[LayerTrial], numbers: LayerNumbers) -> Iterator[str]:
    heights = [bound for one in shown for bound in _bar_ends(one)]
    if not heights:
        yield svg.text(_LEFT, (_TOP + _BOTTOM) / 2, "no finite measurement", style="dim")
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
    """Draw a bar from 0 to the change, and a line for its spread."""
    bounds = _bar_ends(one)
    if not bounds:
        return
    assert one.loss_change is not None
    wide = min(slot * 0.4, 22)
    x = left + slot / 2 - (wide if one.kind == "without" else 0)
    top, bottom = sorted((up(one.loss_change.change), up(0)))
    tip = f"{name}, {TRIAL_LABELS[one.kind]}: {one.summary}"
    # at least one px, so that a change of 0 is visible
    yield svg.rect(x, top, wide, max(bottom - top, 1), fill=COLOURS[one.kind], tip=tip, key=one.key)
    if bounds[0] != bounds[-1]:
        line = f"M{x + wide / 2:.1f} {up(bounds[0]):.1f}V{up(bounds[-1]):.1f}"
        yield svg.path(line, stroke="currentColor", width=1.4)


def _bar_ends(one: LayerTrial) -> tuple[float, ...]:
    """Return the ends of the spread around a change; empty if it is not finite."""
    if one.loss_change is None or not math.isfinite(one.loss_change.change):
        return ()
    spread = one.loss_change.spread or 0.0
    return one.loss_change.change - spread, one.loss_change.change + spread
