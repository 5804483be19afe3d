"""Pictures and tables as values that notebooks can display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class Table:
    """Rows of text under a header, with the contents of a picture.

    Attributes:
        title: title of the table.
        header: names of the columns; the first column names the row.
        rows: cells of each row, as many as `header`.
        note: text under the table.
        caption: branch and step of the table, if shown.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    caption: str = ""

    @property
    def heading(self) -> str:
        """The title with the caption."""
        return f"{self.title} ({self.caption})" if self.caption else self.title

    def to_text(self) -> str:
        """Return aligned columns of plain text."""
        lines, texts = [[str(cell) for cell in row] for row in (self.header, *self.rows)], [self.heading]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for name, *cells in lines:
            padded = [name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]
            texts.append("  ".join(padded).rstrip())
        return "\n".join([*texts, self.note] if self.note else texts)

    def to_html(self, *, folded: bool = True) -> str:
        """Return an HTML table, in a collapsed `<details>` element if `folded`."""
        head = "".join(f'<th scope="col">{escape(str(cell))}</th>' for cell in self.header)
        body = ""
        for name, *cells in self.rows:
            columns = "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
            body += f'<tr><th scope="row">{escape(str(name))}</th>{columns}</tr>'
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        table = f'<table class="l2l-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}'
        if not folded:
            return table
        return f'<details class="l2l-fold"><summary>{escape(self.heading)}</summary>{table}</details>'


@dataclass(frozen=True)
class Picture:
    """An SVG and its table; notebooks display both. The caption is the table's."""

    svg: str
    table: Table

    def to_html(self) -> str:
        """Return the caption, the picture, and the table in a collapsed element."""
        caption = f'<div class="l2l-caption">{escape(self.table.caption)}</div>' if self.table.caption else ""
        return f"{caption}{self.svg}{self.table.to_html()}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {
            "text/html": f'<div class="l2l-picture">{self.to_html()}</div>',
            "image/svg+xml": self.svg,
            "text/plain": self.table.to_text(),
        }
