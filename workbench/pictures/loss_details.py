"""Details of a loss chart: borders of epochs, values under the pointer, and the table of steps."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from workbench.pictures.picture import Table
from workbench.pictures.relay_drawing import shortened
from workbench.pictures.scale import format_prefixed, format_seconds
from workbench.pictures.step_axis import LEFT, RIGHT
from workbench.pictures.svg import outlined_text, path, rect, text
from workbench.session import LOSS, Change, HeldOutRow, StepRow

MAX_STRIPS = 80  # with values under the pointer
MAX_ROWS = 20  # of the table
MIN_EPOCH = 52.0  # px, between borders of epochs
_STRIDES = [factor * 10**power for power in range(9) for factor in (1, 2, 5)]

PlaceStep = Callable[[float], float]  # step -> px


def draw_epochs(steps: Sequence[Any], x: PlaceStep, top: float, bottom: float) -> Iterator[str]:
    """Draw a line where an epoch begins, or every few epochs if they are short, with its number."""
    borders = [(b.epoch, a.step) for a, b in pairwise(steps) if _epoch(b) > _epoch(a) > 0]
    if not borders:
        return
    places = {epoch: x(step + 0.5) for epoch, step in borders}
    for stride in _STRIDES:
        shown = {epoch: place for epoch, place in places.items() if epoch % stride == 0}
        if all(b - a >= MIN_EPOCH for a, b in pairwise(shown.values())):
            break
    yield path("".join(f"M{place:.1f} {top:g}V{bottom:g}" for place in shown.values()), style="axis", dash="1 3")
    for epoch, place in shown.items():
        if place < RIGHT - 48:
            yield outlined_text(text(place + 3, bottom - 5, f"epoch {epoch}", style="small dim"))


def _epoch(row: Any) -> int:
    return getattr(row, "epoch", None) or 0


def draw_hover_strips(
    steps: Sequence[Any], points: Sequence[tuple[float, float]], metric: str, x: PlaceStep, top: float, bottom: float
) -> Iterator[str]:
    """Draw invisible strips whose titles have the values of a step, and of the last measurement up to it."""
    if not steps or not isinstance(steps[0], StepRow):
        return
    count = min(len(steps), MAX_STRIPS)
    chosen = [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]
    places = [x(row.step) for row in chosen]
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(places)), RIGHT]
    measured = [step for step, _ in points]
    yield '<g fill-opacity="0">'
    for row, (left, right) in zip(chosen, pairwise(edges), strict=True):
        last = bisect_right(measured, row.step) - 1
        held_out = f"held-out {metric} {points[last][1]:.4g} (step {points[last][0]:g})" if last >= 0 else ""
        yield rect(left, top, max(0.0, right - left), bottom - top, tip=_describe_step(row, held_out))
    yield "</g>"


def _describe_step(row: StepRow, held_out: str) -> str:
    parts = [f"step {row.step}", f"loss {row.loss:.4g}", held_out]
    parts += [f"lr {row.lr:.3g}"] if row.lr is not None else []
    parts += [f"epoch {row.epoch}"] if row.epoch is not None else []
    parts += [format_seconds(row.seconds), f"{format_prefixed(row.per_s)}{row.unit}/s"] if row.seconds else []
    return " · ".join(part for part in parts if part)


def loss_table(steps: Sequence[StepRow], changes: Sequence[Change] = (), held_out: Sequence[HeldOutRow] = ()) -> Table:
    """Return a table of at most 20 evenly spaced steps, with measurements and changes since the previous row."""
    count = min(len(steps), MAX_ROWS)
    shown = [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]
    metrics = list(dict.fromkeys(name for row in held_out for name in row.values))
    has_lr, has_epoch = any(row.lr is not None for row in shown), any(row.epoch is not None for row in shown)
    header = ["step", "loss", *(f"held-out {name}" for name in metrics), *["learning rate"] * has_lr]
    header += [*["epoch"] * has_epoch, "time", *["per second"] * bool(held_out or has_lr), "changed before"]
    rows, since = [], -math.inf
    for row in shown:
        changed = ", ".join(change.what for change in changes if since <= change.step < row.step)
        measured = [one for one in held_out if since < one.step <= row.step]
        values = [f"{measured[-1].values.get(name, math.nan):.4g}" if measured else "" for name in metrics]
        cells = [str(row.step), f"{row.loss:.4g}", *values]
        cells += [f"{row.lr:.3g}" if row.lr is not None else "–"] * has_lr
        cells += [str(row.epoch) if row.epoch is not None else "–"] * has_epoch
        cells += [format_seconds(row.seconds)]
        cells += [f"{format_prefixed(row.per_s)}{row.unit}"] * bool(held_out or has_lr)
        rows.append((*cells, shortened(changed, 60)))
        since = row.step
    notes = [f"{len(rows)} of {len(steps)} steps."] if len(rows) < len(steps) else []
    notes += ["Held out: the last measurement since the row before."] if held_out else []
    if held_out and LOSS in held_out[-1].values:
        best = min(held_out, key=lambda row: row.values[LOSS] if row.values[LOSS] == row.values[LOSS] else math.inf)
        notes.append(f"Lowest held-out loss: {best.values[LOSS]:.4g} after step {best.step}.")
    return Table("Loss", tuple(header), rows, " ".join(notes))
