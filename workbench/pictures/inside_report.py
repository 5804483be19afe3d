"""All pictures of a look inside, for static pages, reports and replays."""

from __future__ import annotations

from collections.abc import Sequence

from l2l_core import Inside
from workbench.pictures.inside_attention import show_attention
from workbench.pictures.inside_lens import show_lens, text_table
from workbench.pictures.inside_spread import show_spreads
from workbench.pictures.inside_stream import Decode, show_stream
from workbench.pictures.picture import Picture, Table
from workbench.readings import LayerNumbers


def inside_pages(inside: Inside, numbers: LayerNumbers, decode: Decode | None) -> Sequence[Picture | Table]:
    """Return the pictures of what was recorded; `numbers` are the layer numbers at that time."""
    pages: list[Picture | Table] = [show_stream(inside, numbers), show_spreads(inside, numbers)]
    pages += [show_attention(inside, numbers, None)] if any(one.attention for one in inside.passings) else []
    pages += [show_lens(inside, numbers, decode)] if inside.depths else []
    pages += [text_table(inside, numbers, decode)] if inside.written else []
    return pages
