"""Layout of many cells in a box, and SVG paths that draw several cells at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from workbench.pictures import svg


class CellGrid:
    """Grid of `count` cells in a box, few large or many narrow ones; sizes are in px."""

    def __init__(self, count: int, x: float, y: float, width: float, height: float) -> None:
        count = max(count, 1)  # a stack without layers is drawn as one box
        # with many cells, each is about 1.5 times as high as wide
        rows = 1 if count <= 8 else 2 if count <= 32 else max(2, round(math.sqrt(count * height / width / 1.5)))
        self.columns = -(-count // rows)
        rows = -(-count // self.columns)
        self.count, self.x, self.y = count, x, y
        self.pitch_x = min(76.0, width / self.columns)
        self.legible = self.pitch_x >= 6.4 * len(str(count - 1)) + 4
        if not self.legible:  # room for the number of a row's first layer, left of the row
            self.x += 24.0
            self.pitch_x = (width - 24.0) / self.columns
        self.pitch_y = min(84.0, height / rows)
        if count <= 32:
            self.x += (width - self.pitch_x * self.columns) / 2
            self.y += (height - self.pitch_y * rows) / 2
        self.gap = min(4.0, self.pitch_x * 0.2)
        self.frame = 2.5 if self.pitch_x > 12 else 1.4
        self.mark = min(0.3, max(4.0, self.pitch_y * 0.1) / self.pitch_y)

    def all_boxes(self) -> str:
        """Return the commands of a path that draws all cells."""
        # Relative moves are short; five digits, because their rounding errors add up.
        wide, high = _format_number(self.pitch_x - self.gap), _format_number(self.pitch_y - self.gap)
        box = f"h{wide}v{high}h-{wide}z"
        return "".join(
            f"M{_format_number(self.x)} {_format_number(self.y + first // self.columns * self.pitch_y)}{box}"
            + f"m{self.pitch_x:.5g} 0{box}" * (min(self.columns, self.count - first) - 1)
            for first in range(0, self.count, self.columns)
        )

    def boxes(self, cells: Sequence[int], high: float = 1.0, grow: float = 0.0) -> str:
        """Return path commands that draw cells up to the share `high` of their height, `grow` px larger on each side."""
        parts = []
        for x, y, width, height in self._cell_boxes(cells):
            top, wide, tall = y + height * (1 - high) - grow, _format_number(width + 2 * grow), height * high + 2 * grow
            parts.append(f"M{_format_number(x - grow)} {_format_number(top)}h{wide}v{_format_number(tall)}h-{wide}z")
        return "".join(parts)

    def hatch(self, cells: Sequence[int], high: float = 1.0) -> str:
        """Return path commands that hatch cells up to the share `high` of their height; small cells get one level line."""
        if not self.legible:
            return "".join(f"M{x:.1f} {y + h * (1 - high / 2):.1f}h{w:.1f}" for x, y, w, h in self._cell_boxes(cells))
        pitch = max(3.0, min(6.0, self.pitch_x / 3))
        return "".join(
            svg.hatch(x, y + height * (1 - high), width, height * high, pitch)
            for x, y, width, height in self._cell_boxes(cells)
        )

    def _cell_boxes(self, cells: Sequence[int]) -> list[tuple[float, float, float, float]]:
        """Return (x, y, width, height) of cells; neighbours too small for numbers are joined."""
        runs: list[list[int]] = []
        for i in sorted(cells):
            if runs and not self.legible and i == runs[-1][1] + 1 and i % self.columns:
                runs[-1][1] = i
            else:
                runs.append([i, i])
        return [
            (*self._position(first), (last - first + 1) * self.pitch_x - self.gap, self.pitch_y - self.gap)
            for first, last in runs
        ]

    def _position(self, i: int) -> tuple[float, float]:
        row, column = divmod(i, self.columns)
        return self.x + column * self.pitch_x, self.y + row * self.pitch_y

    def numbers(self, keys: Sequence[str], inks: Mapping[str, str], strong: str | None) -> list[str]:
        """Return the cells' numbers as text, or one number left of each row if the cells are too small."""
        if not self.legible:
            step = -(-11 // int(self.pitch_y + 1))  # low rows share a number
            rows = range(0, self.count, self.columns * step)
            places = [(i, self._position(i)[1] + self.pitch_y / 2 + 3) for i in rows]
            return [svg.text(self.x - 4, y, str(i), size=9, style="dim", anchor="end") for i, y in places]
        size, parts = max(8.5, min(20.0, self.pitch_x * 0.46)), []
        for i, key in enumerate(keys):
            (x, y), ink = self._number_position(i), inks.get(key, "")
            y += size * 0.36
            parts.append(svg.text(x, y, str(i), size=size, anchor="middle", strong=key == strong, fill=ink))
        return parts

    def versions(self, keys: Sequence[str], inks: Mapping[str, str], versions: Mapping[str, int]) -> list[str]:
        """Return the number of updates of each layer as text below its number; nothing if the cells are too small."""
        longest = max((len(str(version)) for version in versions.values()), default=99) + 1
        if self.pitch_y <= 50 or self.pitch_x < 5.4 * longest + 3:
            return []
        parts = []
        for i, key in enumerate(keys):
            if key in versions:
                (x, y), ink = self._number_position(i), inks.get(key, "")
                words, style = f"v{versions[key]}", "" if ink else "dim"
                parts.append(svg.text(x, y + 22, words, size=8.5, anchor="middle", style=style, fill=ink))
        return parts

    def _number_position(self, i: int) -> tuple[float, float]:
        """Return the centre of a cell's number."""
        x, y = self._position(i)
        up = 0.36 if self.pitch_y > 40 else 0.5
        return x + (self.pitch_x - self.gap) / 2, y + (self.pitch_y - self.gap) * up

    def tip(self, i: int, key: str, words: str) -> str:
        """Return a transparent cell with a tooltip and the layer's key."""
        cell = f'<path d="{self.boxes([i])}" fill-opacity="0"{svg.layer_attribute(key)} data-cell="">'
        return f"{cell}<title>{escape(words)}</title></path>"


def _format_number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
