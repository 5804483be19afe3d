"""What the panel of edits says beside its controls, in HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from workbench.pictures.layer_card import code_line

STYLE = """
.l2l-outlook p{margin:0;font-size:13px;line-height:1.5;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.l2l-outlook p+p{font-size:12px;opacity:.75;font-variant-numeric:tabular-nums}
.l2l-heading{font-size:13px;font-weight:600;border-bottom:1px solid var(--jp-border-color2,#8884);padding:2px 0}
""".replace("\n", "")


def preview_html(effect: str, facts: Sequence[str], code: str = "") -> str:
    """Write three lines, of which the last two may be empty: what an edit would do, what that means in figures, and its code."""
    lines = [" · ".join(map(escape, facts)), code_line(code) if code else ""]
    # an empty line keeps its height, so that the buttons below stay where they are
    more = "".join(f"<p>{line or '&nbsp;'}</p>" for line in lines)
    # the style cuts a long line off: the whole of it is shown under the pointer
    return f'<p title="{escape(effect)}">{escape(effect)}</p>{more}'
