"""Text view of a session for a terminal, a log or a mail, with bars of block characters.

Colour is used only if the terminal supports it, and characters beyond ASCII only if the encoding has them.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from l2l_core.trace import format_bytes
from workbench.pictures.scale import format_seconds
from workbench.pictures.session_header import STATE_SIGNS, describe_state, failure_title, header_facts
from workbench.pictures.step_verdict import costs_of, largest_cost, plain_text, verdict_of
from workbench.pictures.theme import BLUE, GREEN, ORANGE, VERMILION
from workbench.readings import Columns, layer_usage, number_layers, short_name
from workbench.session import ShownStep, Snapshot

COLUMNS = 80
MAX_COLUMNS = 100  # wider lines are hard to read
ALL_UP_TO = 20  # of more layers, both ends are shown
ENDS = 8
MIN_COLUMNS = 76  # minimum width of the table
NAME, NUMBER, GAPS = 14, 8, 17  # characters of a name, of a number, and of the rest of a row without its two bars
CURVE = 48  # characters
LEVELS = "▁▂▃▄▅▆▇█"
# All characters that workbench and engine write, each replaced by one, so that columns stay aligned.
ASCII = str.maketrans(
    LEVELS + "▒·–—―−…●▶‖✕○µ±⑂→←⇄×≠≤≥▲▼▸▾◂◆✱✓⏎⇥",
    "_.,-~=*#" + ":|----~*>=xou~Y><~x!<>^v>v<o*+/>",
)


def text_view(now: Snapshot, *, columns: int = COLUMNS, encoding: str = "utf-8") -> str:
    """Return a session as plain text: the last step, its layers, its bottlenecks and the loss.

    Args:
        now: snapshot of the session.
        columns: width of a line.
        encoding: target encoding; without block characters, the text is ASCII.

    Example:
        >>> from workbench import Session, text_view
        >>> with Session(relay, lambda: batch) as session:
        ...     session.run(1)
        ...     print(text_view(session.wait(), encoding="ascii"))
        * idle: Sequential | 6 layers | 6.5 k weights | emulated device | step 1 | loss...
        layer  name  weights  compute  : waits ...
    """
    return _render(now, columns, encoding, None)


def print_view(snapshot: Snapshot, file: TextIO) -> None:
    """Print the text view to a file, with the width and the colours of its terminal."""
    console = Console(file=file)
    # a legacy Windows console would print colour codes as text
    coloured = console.is_terminal and not console.no_color and not console.legacy_windows
    terminal = console if coloured else None
    file.write(_render(snapshot, min(console.width, MAX_COLUMNS), file.encoding or "utf-8", terminal) + "\n")


def _render(snapshot: Snapshot, columns: int, encoding: str, terminal: Console | None) -> str:
    buffer, columns = io.StringIO(), max(columns, MIN_COLUMNS)
    colours = cast(Any, terminal.color_system if terminal is not None else None)
    # `force_terminal`, because a buffer is not a terminal; `highlight` would colour numbers
    console = Console(file=buffer, width=columns, color_system=colours, force_terminal=bool(colours), highlight=False)
    console.print(Group(*_parts(snapshot, columns)))
    return encodable("\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines()), encoding)


def encodable(text: str, encoding: str) -> str:
    """Return the text, in ASCII of the same length if the encoding cannot represent it."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.translate(ASCII).encode("ascii", "replace").decode("ascii")
    return text


def _parts(snapshot: Snapshot, columns: int) -> Iterator[RenderableType]:
    state = Text(f"{STATE_SIGNS[snapshot.state]} {describe_state(snapshot)}: ", style="bold")
    yield state.append(" · ".join(header_facts(snapshot)), style="not bold")
    if snapshot.ended:
        yield Text(snapshot.ended, style="bold")
    for trouble in (snapshot.failure, snapshot.refusal):
        if trouble is not None:
            words = Text(failure_title(trouble, snapshot.branch), style=f"bold {VERMILION}")
            yield words.append(f"\n{trouble.message}\n{trouble.after}", style="not bold")
    if snapshot.target is not None and snapshot.target > snapshot.done:
        yield Text(f"{snapshot.done} of {snapshot.target} steps of this run are done.")
    if snapshot.queued:
        yield Text(f"Waiting: {'; '.join(snapshot.queued)}.")
    if snapshot.shown is None:
        yield Text("No step yet: run(10) makes ten steps, wait(progress=True) shows their progress.")
        return
    yield from _step(snapshot, snapshot.shown, (columns - NAME - 3 * NUMBER - GAPS) // 2)
    yield from _loss(snapshot)


def _step(snapshot: Snapshot, shown: ShownStep, room: int) -> Iterator[RenderableType]:
    bounds = shown.trace.bound_by()
    cost = largest_cost(costs_of(shown.trace, bounds))
    verdict = plain_text(verdict_of(shown.trace, cost, snapshot.budget_bytes, shown.in_core_bytes))
    name = snapshot.shown_words
    yield Text(f"{name[:1].upper()}{name[1:]}: ", style="bold").append(verdict, style="not bold")
    yield ""
    yield _layers(snapshot, shown, room)
    if bounds:
        yield Text("\nBottleneck of each phase, and its remedy", style="bold")
        yield from (Padding(Text(str(bound)), (0, 0, 0, 2)) for bound in bounds)


def _layers(snapshot: Snapshot, shown: ShownStep, room: int) -> Grid:
    """Return time and device memory of every layer, as numbers and as bars of at most `room` characters."""
    columns, keys = Columns.of(shown.trace), [row.key for row in shown.layers]
    costs, numbers = layer_usage(columns, keys), number_layers(keys)
    longest = max((cost.compute_s + cost.waiting_s for cost in costs), default=0.0)
    full = snapshot.budget_bytes or max((cost.device_bytes for cost in costs), default=0)
    grid = Grid(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    grid.add_column("layer", justify="right")
    grid.add_column("name", no_wrap=True)
    grid.add_column("weights", justify="right", no_wrap=True)
    grid.add_column("compute", justify="right", no_wrap=True)
    grid.add_column("▒ waits", no_wrap=True, style=GREEN)
    grid.add_column("device", justify="right", no_wrap=True)
    grid.add_column("of budget" if snapshot.budget_bytes else "of peak", no_wrap=True, style=BLUE)
    left_out = range(ENDS, len(costs) - ENDS) if len(costs) > ALL_UP_TO else range(0)
    for i, (row, cost) in enumerate(zip(shown.layers, costs, strict=True)):
        if i in left_out:
            if i == left_out.start:
                grid.add_row("", f"{len(left_out)} more", *[""] * 5)
            continue
        bar = Text(_bar(cost.compute_s, longest, room)).append(_bar(cost.waiting_s, longest, room, "▒"), style=ORANGE)
        grid.add_row(
            Text(short_name(row.key, numbers)),  # a plain string would be parsed as rich's markup
            Text(row.name if len(row.name) <= NAME else f"…{row.name[1 - NAME :]}"),
            format_bytes(row.nbytes),
            format_seconds(cost.compute_s),
            bar,
            format_bytes(cost.device_bytes),
            _bar(cost.device_bytes, full, room),
        )
    return grid


def _loss(snapshot: Snapshot) -> Iterator[RenderableType]:
    losses = [row.loss for row in snapshot.steps]
    if not losses:
        return
    first, last = snapshot.steps[0], snapshot.steps[-1]
    yield ""
    line = Text("Loss ", style="bold").append(f"{first.loss:.4g} ", style="not bold")
    line.append(sparkline(losses, CURVE), style=BLUE).append(f" {last.loss:.4g}", style="not bold")
    yield line.append(f"  steps {first.step} to {last.step}" if len(losses) > 1 else f"  step {last.step}")


def sparkline(values: Sequence[float], max_length: int) -> str:
    """Return a curve of at most `max_length` characters, each the mean of its values; "x" if none is finite."""
    groups = min(len(values), max_length)
    bounds = [round(i * len(values) / groups) for i in range(groups + 1)]
    means = []
    for low, high in pairwise(bounds):
        finite = [value for value in values[low:high] if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    drawn = [mean for mean in means if math.isfinite(mean)]
    low, high = min(drawn, default=0.0), max(drawn, default=0.0)
    step = (high - low) / (len(LEVELS) - 1)
    return "".join("x" if math.isnan(mean) else LEVELS[round((mean - low) / step) if step else 0] for mean in means)


def _bar(value: float, full: float, room: int, letter: str = "█") -> str:
    """Return a bar for the share `value / full`; at least one character above 1 %."""
    share = value / full if full else 0.0
    return letter * max(round(room * min(share, 1.0)), int(share > 0.01))
