"""HTML preview of an edit: its effect, its figures and its code."""

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
    """Return three lines: the effect of an edit, its figures, and its code; the last two may be empty."""
    # an empty line keeps its height, so that the buttons below do not move
    code_html = f"<p>{code_line(code) if code else '&nbsp;'}</p>"
    # the style truncates a long line; the tooltip has all of it
    texts = (escape(effect), " · ".join(map(escape, facts)))
    return "".join(f'<p title="{text}">{text or "&nbsp;"}</p>' for text in texts) + code_html
