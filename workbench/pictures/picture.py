"""A picture and the table behind it, as a value that any notebook page can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class Table:
    """Holds rows of text under a header: what a picture shows, in words.

    Attributes:
        title: what the table lists.
        header: names of the columns; the first column names the row.
        rows: as many cells each.
        note: a sentence under the table.
        whose: of which branch and step it is, if that is to be said.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    caption: str = ""

    @property
    def heading(self) -> str:
        """The title, and whose it is."""
        return f"{self.title} ({self.caption})" if self.caption else self.title

    def to_text(self) -> str:
        """Write aligned columns of plain text."""
        lines = [self.header, *self.rows]
        # a row of another length raises, here or in the strict zip
        widths = [max(len(str(row[i])) for row in lines) for i in range(len(self.header))]
        shown = [
            "  ".join(
                str(cell).ljust(width) if i == 0 else str(cell).rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in lines
        ]
        return "\n".join([self.heading, *shown, *([self.note] if self.note else [])])

    def to_html(self, *, folded: bool = True) -> str:
        """Write an HTML table, inside a fold unless `folded` is off."""
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
        return f'<details class="l2l-fold"><summary>{escape(self.heading)}</summary>{table}</details>'


@dataclass(frozen=True)
class Picture:
    """Holds an SVG and the table behind it, which says whose both are. At the end of a cell it shows itself."""

    svg: str
    table: Table

    def to_html(self) -> str:
        """Write the picture, the table in a fold, and above them whose they are."""
        whose = f'<div class="l2l-caption">{escape(self.table.caption)}</div>' if self.table.caption else ""
        return f"{whose}{self.svg}{self.table.to_html()}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {
            "text/html": f'<div class="l2l-picture">{self.to_html()}</div>',
            "image/svg+xml": self.svg,
            "text/plain": self.table.to_text(),
        }
