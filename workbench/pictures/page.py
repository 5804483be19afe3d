"""Pictures for a page without widgets: one bundle of HTML, SVG and text, and the styles of tables and panels."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.pictures.picture import Picture

STYLE = """
.l2l-table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:12px;margin:4px 0}
.l2l-table th,.l2l-table td{padding:2px 10px 2px 0;text-align:right;border:0;background:none}
.l2l-table th:first-child{text-align:left}
.l2l-fold summary{cursor:pointer;font-size:12px;opacity:.75}
.l2l-fold p{font-size:12px;max-width:80ch}
""".replace("\n", "")


def bundle_of(pictures: Sequence[Picture]) -> dict[str, str]:
    """All pictures with their tables as one output, by MIME type; the first one is the SVG."""
    body = "".join(f"{picture.svg}{picture.table.to_html()}" for picture in pictures)
    return {
        "text/html": f"<style>{STYLE}</style><div>{body}</div>",
        "image/svg+xml": pictures[0].svg,
        "text/plain": "\n\n".join(picture.table.to_text() for picture in pictures),
    }
