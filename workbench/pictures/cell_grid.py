"""Places of many cells in a box, and paths that draw some of them at once. What a cell means is the caller's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from workbench.pictures import svg
from workbench.pictures.relay_drawing import sized_text


class CellGrid:
    """Finds places of `count` cells in a box: few large ones in one or two rows, many narrow ones in more. Sizes are in px."""

    def __init__(self, count: int, x: float, y: float, width: float, height: float) -> None:
        count = max(count, 1)  # a stack without layers has a box as well
        # of many cells each is about one and a half times as high as wide
        rows = 1 if count <= 8 else 2 if count <= 32 else max(2, round(math.sqrt(count * height / width / 1.5)))
        self.columns = -(-count // rows)
        rows = -(-count // self.columns)
        self.count, self.x, self.y = count, x, y
        self.pitch_x = min(76.0, width / self.columns)
        self.legible = self.pitch_x >= 6.4 * len(str(count - 1)) + 4
        if not self.legible:  # the number of a row's first layer stands before it
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
        # from cell to cell by relative moves, which are short; with five digits, since their roundings add up
        wide, high = _format_number(self.pitch_x - self.gap), _format_number(self.pitch_y - self.gap)
        box = f"h{wide}v{high}h-{wide}z"
        return "".join(
            f"M{_format_number(self.x)} {_format_number(self.y + first // self.columns * self.pitch_y)}{box}"
            + f"m{self.pitch_x:.5g} 0{box}" * (min(self.columns, self.count - first) - 1)
            for first in range(0, self.count, self.columns)
        )

    def boxes(self, cells: Sequence[int], high: float = 1.0, grow: float = 0.0) -> str:
        """Return commands that draw some cells, each up to a share of its height, `grow` px larger on each side."""
        parts = []
        for x, y, width, height in self._cell_boxes(cells):
            top, wide, tall = y + height * (1 - high) - grow, _format_number(width + 2 * grow), height * high + 2 * grow
            parts.append(f"M{_format_number(x - grow)} {_format_number(top)}h{wide}v{_format_number(tall)}h-{wide}z")
        return "".join(parts)

    def hatch(self, cells: Sequence[int], high: float = 1.0) -> str:
        """Return commands of slanted lines over cells, up to a share of their height; of one level line where they are small."""
        if not self.legible:
            return "".join(f"M{x:.1f} {y + h * (1 - high / 2):.1f}h{w:.1f}" for x, y, w, h in self._cell_boxes(cells))
        pitch = max(3.0, min(6.0, self.pitch_x / 3))
        return "".join(
            svg.hatch(x, y + height * (1 - high), width, height * high, pitch)
            for x, y, width, height in self._cell_boxes(cells)
        )

    def _cell_boxes(self, cells: Sequence[int]) -> list[tuple[float, float, float, float]]:
        """x, y, width and height of cells; neighbours that are too small for numbers are drawn as one."""
        runs: list[list[int]] = []
        for i in sorted(cells):
            if runs and not self.legible and i == runs[-1][1] + 1 and i % self.columns:
                runs[-1][1] = i
            else:
                runs.append([i, i])
        return [
            (*self._position(first), (last - first) * self.pitch_x + self.pitch_x - self.gap, self.pitch_y - self.gap)
            for first, last in runs
        ]

    def _position(self, i: int) -> tuple[float, float]:
        row, column = divmod(i, self.columns)
        return self.x + column * self.pitch_x, self.y + row * self.pitch_y

    def numbers(self, keys: Sequence[str], inks: Mapping[str | None, str], strong: str | None) -> list[str]:
        """Write numbers into cells that have room for them, or one before each row."""
        if not self.legible:
            step = -(-11 // int(self.pitch_y + 1))  # rows that are too low for a number each
            return [
                sized_text(
                    self.x - 4,
                    self._position(i)[1] + self.pitch_y / 2 + 3,
                    str(i),
                    size=9,
                    style="dim",
                    anchor="end",
                )
                for j, i in enumerate(range(0, self.count, self.columns))
                if j % step == 0
            ]
        size = max(8.5, min(20.0, self.pitch_x * 0.46))
        places = [self._number_position(i) for i in range(self.count)]
        return [
            sized_text(
                x,
                y + size * 0.36,
                str(i),
                size=size,
                anchor="middle",
                strong=key == strong,
                fill=inks.get(key, ""),
            )
            for i, (key, (x, y)) in enumerate(zip(keys, places, strict=True))
        ]

    def versions(self, keys: Sequence[str], inks: Mapping[str | None, str], versions: Mapping[str, int]) -> list[str]:
        """Write how often each layer was updated, into cells that have room for it below the number."""
        longest = max((len(str(version)) for version in versions.values()), default=99) + 1  # of none, none has room
        if self.pitch_y <= 50 or self.pitch_x < 5.4 * longest + 3:
            return []
        parts = []
        for i, key in enumerate(keys):
            if key in versions:
                (x, y), ink = self._number_position(i), inks.get(key, "")
                words, style = f"v{versions[key]}", "" if ink else "dim"
                parts.append(sized_text(x, y + 22, words, size=8.5, anchor="middle", style=style, fill=ink))
        return parts

    def _number_position(self, i: int) -> tuple[float, float]:
        """Where the middle of a cell's number is."""
        x, y = self._position(i)
        up = 0.36 if self.pitch_y > 40 else 0.5
        return x + (self.pitch_x - self.gap) / 2, y + (self.pitch_y - self.gap) * up

    def tip(self, i: int, key: str, words: str) -> str:
        """Put words under the pointer, over a whole cell, which can be touched."""
        cell = f'<path d="{self.boxes([i])}" fill-opacity="0"{svg.layer_attribute(key)} data-cell="">'
        return f"{cell}<title>{escape(words)}</title></path>"


def _format_number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
