"""A picture and the table behind it, as a value that any notebook page can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class Table:
    """Rows of text under a header: what a picture shows, in words.

    Attributes:
        title: what the table lists.
        header: names of the columns; the first column names the row.
        rows: as many cells each.
        note: a sentence under the table.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def to_text(self) -> str:
        """Aligned columns of plain text."""
        lines = [self.header, *self.rows]
        widths = [max(len(str(row[i])) for row in lines) for i in range(len(self.header))]
        shown = [
            "  ".join(
                str(cell).ljust(width) if i == 0 else str(cell).rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in lines
        ]
        return "\n".join([self.title, *shown, *([self.note] if self.note else [])])

    def to_html(self, *, folded: bool = True) -> str:
        """An HTML table, inside a fold unless `folded` is off."""
        head = "".join(f'<th scope="col">{escape(str(cell))}</th>' for cell in self.header)
        body = "".join(
            "<tr>"
            + "".join(
                f'<th scope="row">{escape(str(cell))}</th>' if i == 0 else f"<td>{escape(str(cell))}</td>"
                for i, cell in enumerate(row)
            )
            + "</tr>"
            for row in self.rows
        )
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        table = f'<table class="l2l-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}'
        if not folded:
            return table
        return f'<details class="l2l-fold"><summary>{escape(self.title)}</summary>{table}</details>'


@dataclass(frozen=True)
class Picture:
    """An SVG and the table behind it. At the end of a cell it shows itself, with or without widgets."""

    svg: str
    table: Table

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {
            "text/html": f'<div class="l2l-picture">{self.svg}{self.table.to_html()}</div>',
            "image/svg+xml": self.svg,
            "text/plain": self.table.to_text(),
        }
