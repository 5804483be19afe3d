"""MIME bundles of pictures and tables for pages without widgets, and the styles of tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workbench.pictures.picture import Picture, Table

STYLE = """
.l2l-table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:12px;margin:4px 0}
.l2l-table th,.l2l-table td{padding:2px 10px 2px 0;text-align:right;border:0;background:none}
.l2l-table th:first-child{text-align:left}
.l2l-fold summary{cursor:pointer;font-size:12px;opacity:.75}
.l2l-fold p{font-size:12px;max-width:80ch}
""".replace("\n", "")


def with_caption(one: Picture | Table, caption: str) -> Picture | Table:
    """Return a copy with a caption, which names branch and step."""
    if isinstance(one, Picture):
        return replace(one, table=replace(one.table, caption=caption))
    return replace(one, caption=caption)


def bundle_of(shown: Sequence[Picture | Table]) -> dict[str, str]:
    """Return pictures and tables as one output by MIME type; its SVG is the first picture."""
    tables = [one.table if isinstance(one, Picture) else one for one in shown]
    pictures = [one.svg for one in shown if isinstance(one, Picture)]
    body = "".join(one.to_html() for one in shown)
    return {
        # with the style, because the widgets' style sheets are absent
        "text/html": f"<style>{STYLE}</style><div>{body}</div>",
        **({"image/svg+xml": pictures[0]} if pictures else {}),
        "text/plain": "\n\n".join(table.to_text() for table in tables),
    }
