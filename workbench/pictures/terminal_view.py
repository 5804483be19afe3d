"""A session as text for a terminal, a log or a mail: what a page shows, in 80 columns, with bars of letters.

Colour is added only where the reader's terminal has it, and letters beyond ASCII only where it can write them.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from l2l_core.trace import format_bytes
from workbench.pictures.scale import format_seconds
from workbench.pictures.session_header import STATE_SIGNS, describe_state, failure_title, header_facts
from workbench.pictures.step_verdict import plain_text, verdict_of
from workbench.pictures.theme import BLUE, GREEN, ORANGE, VERMILION
from workbench.readings import Columns, layer_usage, number_layers, short_name
from workbench.session import Failure, ShownStep, Snapshot

COLUMNS = 80
MAX_COLUMNS = 100  # wider lines are hard to read
ALL_UP_TO = 20  # layers; of more, the ends are shown
ENDS = 8
MIN_COLUMNS = 76  # below, a terminal wraps
NAME, NUMBER, GAPS = (
    14,
    8,
    17,
)  # letters: of a name, of a number, of all else in a line of the table but for its two bars
CURVE = 48  # letters
LEVELS = "▁▂▃▄▅▆▇█"
# One letter for one, so that columns stay where they are: every sign that the workbench and the engine write.
ASCII = str.maketrans(
    LEVELS + "▒·–—―−…●▶‖✕○µ±⑂→←⇄×≠≤≥▲▼▸▾◂◆✱✓⏎⇥",
    "_.,-~=*#" + ":|----~*>=xou~Y><~x!<>^v>v<o*+/>",
)


def text_view(now: Snapshot, *, columns: int = COLUMNS, encoding: str = "utf-8") -> str:
    """Write a session as plain text: how the last step went, its layers, the loss, what binds it.

    Args:
        now: the session.
        columns: width of a line.
        encoding: of whoever reads it; one without block letters gets ASCII.
    """
    return _render(now, columns, encoding, None)


def print_view(snapshot: Snapshot, file: TextIO) -> None:
    """Print the same to a file: as wide as its terminal, and with colour if that has it."""
    console = Console(file=file)
    # an old console of Windows would show the codes for colours as letters
    writes_ansi = console.is_terminal and not console.no_color and not console.legacy_windows
    system = console.color_system if writes_ansi else None
    file.write(_render(snapshot, min(console.width, MAX_COLUMNS), file.encoding or "utf-8", system) + "\n")


def _render(snapshot: Snapshot, columns: int, encoding: str, colours: str | None) -> str:
    # forced, because a buffer is no terminal; without highlight, because rich would colour numbers of its own accord
    buffer, columns = io.StringIO(), max(columns, MIN_COLUMNS)
    console = Console(
        file=buffer, width=columns, color_system=colours, force_terminal=colours is not None, highlight=False
    )  # type: ignore[arg-type]
    console.print(Group(*_parts(snapshot, columns)))
    return encodable("\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines()), encoding)


def encodable(text: str, encoding: str) -> str:
    """Return the text itself, or in ASCII where the encoding cannot write it; every letter stays one letter."""
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
            yield _failure_text(trouble, snapshot.branch)
    if snapshot.target is not None and snapshot.target > snapshot.done:
        yield Text(f"{snapshot.done} of {snapshot.target} steps of this run are done.")
    if snapshot.queued:
        yield Text(f"Waiting: {'; '.join(snapshot.queued)}.")
    if snapshot.shown is None:
        yield Text("No step yet: run(10) trains ten, wait(progress=True) shows how far it is.")
        return
    yield from _step(snapshot, snapshot.shown, (columns - NAME - 3 * NUMBER - GAPS) // 2)
    yield from _loss(snapshot)


def _failure_text(failure: Failure, branch: str) -> Text:
    words = Text(failure_title(failure, branch), style=f"bold {VERMILION}")
    return words.append(f"\n{failure.message}\n{failure.after}", style="not bold")


def _step(snapshot: Snapshot, shown: ShownStep, room: int) -> Iterator[RenderableType]:
    found = shown.trace.bound_by()
    said = plain_text(verdict_of(shown.trace, found, snapshot.budget_bytes, shown.in_core_bytes))
    name = snapshot.shown_words
    yield Text(f"{name[:1].upper()}{name[1:]}: ", style="bold").append(said, style="not bold")
    yield ""
    yield _layers(snapshot, shown, room)
    if found:
        yield Text("\nWhat binds each phase, and what would help", style="bold")
        yield from (Padding(Text(str(bound)), (0, 0, 0, 2)) for bound in found)


def _layers(snapshot: Snapshot, shown: ShownStep, room: int) -> Grid:
    """Time and device memory of every layer, as numbers and as bars of at most `room` letters."""
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
            Text(short_name(row.key, numbers)),  # as it is: a cell that is no Text is read as rich's markup
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
    """Return a curve of at most so many letters, each the mean of its steps; "x" where none of them is finite."""
    groups = min(len(values), max_length)
    bounds = [round(i * len(values) / groups) for i in range(groups + 1)]
    means = []
    for low, high in zip(bounds, bounds[1:], strict=False):
        finite = [value for value in values[low:high] if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    known = [mean for mean in means if math.isfinite(mean)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = (high - low) / (len(LEVELS) - 1)
    return "".join("x" if math.isnan(mean) else LEVELS[round((mean - low) / step) if step else 0] for mean in means)


def _bar(value: float, full: float, room: int, letter: str = "█") -> str:
    """Letters for a share of what is full; at least one for more than a hundredth of it."""
    share = value / full if full else 0.0
    return letter * max(round(room * min(share, 1.0)), int(share > 0.01))
