"""A recorded step with its player as one script for any page: no kernel, no server, no other file.

The script holds the frames of `packed_frames.py` and the player of the HTML report, in a shadow root, so that styles of the
page and of the player do not meet.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from l2l_core import Trace
from l2l_core.trace import format_bytes
from workbench.pictures import PackedFrames, format_count, relay_frames
from workbench.runs.html_report import page_file, page_template
from workbench.runs.recorded_run import RecordedRun
from workbench.runs.run_loader import load_run

MAX_BYTES = 300_000

# `player.js` is the first part, so that its "use strict" holds for the whole function.
_SCRIPT = """// {title}
// A step of a layer relay, recorded, with its player. Show it where this line stands in a page: <script src="{name}"></script>
// Made by `python -m workbench player` of l2l-workbench, Apache-2.0. It loads nothing.
(() => {{
{player}
const here = document.currentScript;
const host = document.createElement("div");
host.className = "l2l-player";
const shadow = host.attachShadow({{ mode: "open" }});
shadow.innerHTML = {markup};
if (here && document.body?.contains(here)) here.after(host);
else document.addEventListener("DOMContentLoaded", () => document.body.append(host));
playAll(shadow);
}})();
"""


class _Step(NamedTuple):
    """A step to play, with the words below it."""

    trace: Trace
    layers: tuple = ()
    budget_bytes: int | None = None
    title: str = "One step of a layer relay"


def main(path: Path, out: Path | None) -> int:
    """Write the player of a recorded run; return 0, or 2 if there is none to write."""
    try:
        run = load_run(path)
        destination = out or run.path.parent / "player.js"
        write_player(run, destination)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    size = format_bytes(destination.stat().st_size)
    print(f'Written: {destination} ({size}); show it in a page with <script src="{destination.name}"></script>')
    return 0


def write_player(step: RecordedRun | Trace, path: str | Path, max_bytes: int = MAX_BYTES) -> None:
    """Write one script that plays a recorded step in any page, without a kernel.

    Put `<script src="step.js"></script>` where the picture belongs; the script needs no other file and no network.

    Args:
        step: a recorded run (`workbench.load_run`), shown by its last step, or a step's trace (`StepResult.trace`).
        path: the script; its folder is created.
        max_bytes: largest size of the script. Events are left out, evenly, until it is met.

    Raises:
        ValueError: no step was recorded, or even two frames take more than `max_bytes`.

    Example:
        >>> from workbench import write_player
        >>> write_player(relay.step(batch).trace, "step.js")
    """
    path = Path(path)
    text = _render(_step_of(step), path.name, max_bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _step_of(step: RecordedRun | Trace) -> _Step:
    if isinstance(step, Trace):
        return _Step(step)
    snapshot = step.snapshot()
    if snapshot.shown is None:
        raise ValueError(f"{step.path}: the run was recorded without the events of a step; run at least one step")
    words = f"{step.title}: {snapshot.shown_words}, {len(snapshot.layers)} layers, {format_count(snapshot.num_params)} weights"
    return _Step(snapshot.shown.trace, tuple(snapshot.shown.layers), snapshot.budget_bytes, words)


def _render(step: _Step, name: str, max_bytes: int) -> str:
    """Return the script with as many frames as `max_bytes` has room for."""
    frames = relay_frames(step.trace, step.layers, step.budget_bytes)
    if not frames.frames:
        raise ValueError("the trace has no events: pass that of a step which ran (`relay.step(batch).trace`)")
    while len((text := _script(step, frames, name)).encode()) > max_bytes:
        if len(frames.frames) <= 2:
            size = format_bytes(len(text.encode()))
            raise ValueError(
                f"max_bytes={max_bytes}: two frames of this step take {size}; a model of fewer layers takes less"
            )
        frames = relay_frames(step.trace, step.layers, step.budget_bytes, at_most=len(frames.frames) * 3 // 4)
    return text


def _script(step: _Step, frames: PackedFrames, name: str) -> str:
    sampled = len(frames.frames) < frames.events
    markup = page_template("player_embed.html").render(
        style=page_file("player.css"),
        title=step.title,
        step={
            "first": frames.frame(frames.start),
            "packed": frames.pack(),
            "sampled": f"{len(frames.frames):,} of {frames.events:,} events, evenly spaced." if sampled else "",
        },
    )
    quoted = json.dumps(markup).replace("</", "<\\/")  # the script may stand inside of a page, too
    title = " ".join(step.title.split())  # in one line
    return _in_ascii(_SCRIPT.format(title=title, name=name, player=page_file("player.js"), markup=quoted))


def _in_ascii(script: str) -> str:
    """Escape other characters, which stand in strings and comments alone: the page's encoding is unknown."""
    return "".join(char if char.isascii() else json.dumps(char)[1:-1] for char in script)
