"""The relay picture at every event of a step, small enough to put all of it into a page: what the report's player shows.

One frame differs from the next in a few pieces of markup. So each distinct piece is kept once and a frame is a list of
numbers of pieces; what these lists have in common is left to gzip, and is nearly everything.
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
_PIECE_BOUNDARY = re.compile(r"(?<=>)(?=<)|(?<=\x00)|(?=\x00)")  # tags apart, and the separators as pieces of their own


class PackedFrames(NamedTuple):
    """Holds the frames of a step.

    Attributes:
        pieces: of markup, each once.
        frames: numbers of the pieces of each.
        visits: frames with which a visit begins, ascending.
        start: a frame in mid-backward at which every lane works, to begin with.
        events: of the step; as many as frames, if there are not too many.
    """

    pieces: Sequence[str]
    frames: Sequence[Sequence[int]]
    visits: Sequence[int]
    start: int
    events: int

    def frame(self, number: int) -> tuple[str, str, str]:
        """Return picture, table in HTML, and a sentence; the page's script does the same."""
        picture, table, words = "".join(self.pieces[i] for i in self.frames[number]).split(_PARTS)
        return picture, table, words

    def pack(self) -> str:
        """Return everything as JSON, compressed, in base64; the same for the same step."""
        text = json.dumps(self._asdict(), ensure_ascii=False, separators=(",", ":"))
        return b64encode(gzip.compress(text.encode(), mtime=0)).decode()  # without mtime, gzip notes the time of day


def relay_frames(
    trace: Trace, layers: Sequence[LayerRow], budget_bytes: int | None = None, at_most: int = MAX_FRAMES
) -> PackedFrames:
    """Draw all events of a finished step, or every second, third, ... if there are more than `at_most`."""
    names = {layer.key: layer.name for layer in layers}
    frozen = [layer.key for layer in layers if layer.frozen]
    moments = StateTimeline.of(trace)
    keys = moments.keys
    pace = max(1, -(-moments.count // at_most))
    known: dict[str, int] = {}
    frames = []
    for i in range(0, moments.count, pace):
        moment = moments.at_event(i)
        drawn = draw_relay(moment, keys, names=names, frozen=frozen, device=trace.device, budget_bytes=budget_bytes)
        text = _PARTS.join((drawn, relay_table(moment, keys).to_html(folded=False), describe_state(moment, keys)))
        frames.append([known.setdefault(piece, len(known)) for piece in _PIECE_BOUNDARY.split(text)])
    # rounded up: the first frame in which the visit has begun, if there is one
    visits = sorted({-(-i // pace) for i in moments.visit_starts()} & set(range(len(frames))))
    start = min(moments.busiest_event() // pace, len(frames) - 1) if frames else 0
    return PackedFrames(tuple(known), frames, visits, start, moments.count)
