"""Relay pictures of all events of a step, packed for the player of an HTML report.

Successive frames differ in a few pieces of markup. Each distinct piece is stored once, and a frame is a list of indices of
pieces, compressed by gzip.
"""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Sequence
from typing import NamedTuple

from l2l_core.trace import Trace
from workbench.pictures.relay_picture import describe_state, draw_relay, relay_table
from workbench.readings import StateTimeline
from workbench.session import LayerRow

MAX_FRAMES = 1_500
_PARTS = "\x00"  # between picture, table and sentence of a frame
_PIECE_BOUNDARY = re.compile(r"(?<=>)(?=<)|(?<=\x00)|(?=\x00)")  # between tags, and around separators


class PackedFrames(NamedTuple):
    """Frames of a step.

    Attributes:
        pieces: distinct pieces of markup.
        frames: indices into `pieces` of each frame.
        visits: frames at which a visit begins, ascending.
        start: frame shown first, in mid-backward with every lane busy.
        events: number of events of the step; larger than the number of frames if events are skipped.
    """

    pieces: Sequence[str]
    frames: Sequence[Sequence[int]]
    visits: Sequence[int]
    start: int
    events: int

    def frame(self, number: int) -> tuple[str, str, str]:
        """Return a frame's picture, its table in HTML, and its sentence, as the page's script does."""
        picture, table, words = "".join(self.pieces[i] for i in self.frames[number]).split(_PARTS)
        return picture, table, words

    def pack(self) -> str:
        """Return the frames as gzipped JSON in base64, deterministically."""
        text = json.dumps(self._asdict(), ensure_ascii=False, separators=(",", ":"))
        return b64encode(gzip.compress(text.encode(), mtime=0)).decode()  # mtime=0: no time stamp


def relay_frames(
    trace: Trace, layers: Sequence[LayerRow], budget_bytes: int | None = None, at_most: int = MAX_FRAMES
) -> PackedFrames:
    """Draw all events of a finished step, or every n-th if there are more than `at_most`."""
    names = {layer.key: layer.name for layer in layers}
    frozen = [layer.key for layer in layers if layer.frozen]
    moments = StateTimeline.of(trace)
    keys = moments.keys
    pace = max(1, -(-moments.count // at_most))
    pieces: dict[str, int] = {}
    frames = []
    for i in range(0, moments.count, pace):
        moment = moments.at_event(i)
        drawn = draw_relay(moment, keys, names=names, frozen=frozen, device=trace.device, budget_bytes=budget_bytes)
        text = _PARTS.join((drawn, relay_table(moment, keys).to_html(folded=False), describe_state(moment, keys)))
        frames.append([pieces.setdefault(piece, len(pieces)) for piece in _PIECE_BOUNDARY.split(text)])
    # rounded up to the first frame in which the visit has begun
    visits = sorted({-(-i // pace) for i in moments.visit_starts()} & set(range(len(frames))))
    start = min(moments.busiest_event() // pace, len(frames) - 1) if frames else 0
    return PackedFrames(tuple(pieces), frames, visits, start, moments.count)
