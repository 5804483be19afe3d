"""All that there is to see of a look inside, one below the other: for stills, reports and replays."""

from __future__ import annotations

from collections.abc import Sequence

from l2l_core import Inside
from workbench.pictures.inside import Decode, show_stream
from workbench.pictures.inside_attention import show_attention
from workbench.pictures.inside_lens import show_lens, text_table
from workbench.pictures.inside_spread import show_spreads
from workbench.pictures.picture import Picture, Table
from workbench.readings import Numbers


def inside_pages(seen: Inside, numbers: Numbers, decode: Decode | None) -> Sequence[Picture | Table]:
    """List the pictures of what was asked for; `numbers` are those that the layers had then."""
    pages: list[Picture | Table] = [show_stream(seen, numbers), show_spreads(seen, numbers)]
    pages += [show_attention(seen, numbers, None)] if any(one.attention for one in seen.passings) else []
    pages += [show_lens(seen, numbers, decode)] if seen.depths else []
    pages += [text_table(seen, numbers, decode)] if seen.written else []
    return pages
