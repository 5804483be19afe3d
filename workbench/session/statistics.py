"""Figures of every layer over the steps of a session, in bounded memory, for the heat map. No widgets.

A column is one step at first. When there are too many columns, neighbours merge in pairs, and from then on a column is
two steps, then four, and so on; a merged cell is the mean of its finite figures. A layer keeps its row when it moves,
because rows belong to permanent keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.session.snapshot_values import LayerRow

FIGURES = ("grad_norm", "update_ratio", "influence")  # fields of LayerRow
MAX_COLUMNS = 256
MAX_REMOVED = 64  # removed layers whose figures are kept

_PRESENT = len(FIGURES)  # one more plane: 1 in every step in which the layer was in the stack
_LARGEST = float(np.finfo(np.float32).max)

Cells = NDArray[np.float32]
IntArray = NDArray[np.int64]


class LayerTrack(NamedTuple):
    """Row of a layer in the statistics.

    Attributes:
        key: permanent identity.
        name: latest dotted name in the model.
        row: index in the arrays.
    """

    key: str
    name: str
    row: int


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Immutable figures of the layers up to one moment.

    Attributes:
        stack: layers in the stack, in order.
        removed: layers that were in the stack in some step, in the order of their removal.
        first, last: (columns,), first and last step of every column.
        closed: (figures + 1, columns or one less, rows), complete columns.
        open: (figures + 1, rows), the incomplete last column, if there is one.
    """

    stack: tuple[LayerTrack, ...]
    removed: tuple[LayerTrack, ...]
    first: IntArray
    last: IntArray
    closed: Cells
    open: Cells | None

    def values(self, figure: str, tracks: Sequence[LayerTrack]) -> Cells:
        """Return (tracks, columns): means over the steps of each column.

        NaN: the layer was not in the stack or had no figure, for example because it was frozen. inf: no figure was finite.

        Raises:
            ValueError: no such figure.
        """
        if figure not in FIGURES:
            raise ValueError(f"there is no figure {figure!r} of a layer; there are {', '.join(FIGURES)}")
        return self._select(FIGURES.index(figure), tracks)

    def present(self, tracks: Sequence[LayerTrack]) -> NDArray[np.bool_]:
        """Return (tracks, columns): True if the layer was in the stack in some step of the column."""
        return ~np.isnan(self._select(_PRESENT, tracks))

    def _select(self, plane: int, tracks: Sequence[LayerTrack]) -> Cells:
        rows = np.array([track.row for track in tracks], np.intp)
        columns = [self.closed[plane][:, rows], *([self.open[plane][None, rows]] if self.open is not None else [])]
        return np.concatenate(columns).T


class StatisticsLog:
    """Collects the figures of every step; `view` returns those so far.

    Invariant: a cell in a view is never written again. Columns are written once, after those of earlier views, and
    operations that move cells (merging, room for more layers) make new arrays.

    Args:
        columns: maximum number of columns; even.
    """

    def __init__(self, columns: int = MAX_COLUMNS) -> None:
        assert columns >= 2 and columns % 2 == 0, columns
        self._stack: tuple[LayerTrack, ...] = ()
        self._removed: tuple[LayerTrack, ...] = ()
        self._stack_names: tuple[list[str], list[str]] = [], []  # keys and names of the stack
        self._rows = 0  # in use, including those of dropped layers
        self._columns = 0  # complete columns
        self._stride = 1  # steps in a complete column
        self._mean = np.full((_PRESENT + 1, columns, 0), np.nan, np.float32)
        self._count = np.zeros(self._mean.shape, np.uint32)  # finite figures in a cell
        self._first, self._last = np.zeros(columns, np.int64), np.zeros(columns, np.int64)
        self._open: _StepColumn | None = None
        self._view: Statistics | None = None

    def append(self, step: int, layers: Sequence[LayerRow]) -> None:
        """Add the figures of a step; `layers` are the stack in order."""
        self.set_stack(layers)
        self._view = None
        column = _column_of(step, layers, [track.row for track in self._stack], self._mean.shape[2])
        self._open = column if self._open is None else self._open.merged_with(column)
        if self._open.steps == self._stride:
            self._store_column(self._open)

    def set_stack(self, layers: Sequence[LayerRow]) -> None:
        """Update the stack to `layers`, in order."""
        names = [layer.key for layer in layers], [layer.name for layer in layers]
        if names == self._stack_names:
            return
        self._stack_names, self._view = names, None
        keys = {layer.key for layer in layers}
        removed = [track for track in self._stack if track.key not in keys and self._was_present(track.row)]
        rows = {track.key: track.row for track in (*self._removed, *self._stack)}
        self._removed = tuple(track for track in (*self._removed, *removed) if track.key not in keys)[-MAX_REMOVED:]
        fresh = list(dict.fromkeys(layer.key for layer in layers if layer.key not in rows))
        if self._rows + len(fresh) > self._mean.shape[2]:
            rows = self._allocate_rows([key for key in rows if key in keys], rows, len(fresh))
        rows.update(zip(fresh, range(self._rows, self._rows + len(fresh)), strict=True))
        self._rows += len(fresh)
        self._stack = tuple(LayerTrack(layer.key, layer.name, rows[layer.key]) for layer in layers)

    def view(self) -> Statistics:
        """Return the statistics so far; the same object until something is added."""
        if self._view is None:
            part, closed = self._open, self._mean[:, : self._columns]
            closed.flags.writeable = False
            self._view = Statistics(
                self._stack,
                self._removed,
                np.append(self._first[: self._columns], [part.first] if part else []).astype(np.int64),
                np.append(self._last[: self._columns], [part.last] if part else []).astype(np.int64),
                closed,
                part.mean.astype(np.float32) if part else None,
            )
        return self._view

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all figures as plain data and arrays."""
        state = {name: value for name, value in vars(self).items() if name != "_view"}
        tracks = {name: [tuple(track) for track in state[name]] for name in ("_stack", "_removed")}
        return deepcopy({**state, **tracks, "_open": self._open and self._open._asdict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore figures from `state_dict`."""
        vars(self).update(deepcopy(state), _view=None)
        self._open = state["_open"] and _StepColumn(**state["_open"])
        self._stack, self._removed = (tuple(LayerTrack(*track) for track in state[n]) for n in ("_stack", "_removed"))

    def _was_present(self, row: int) -> bool:
        closed = self._count[_PRESENT, : self._columns, row].any()
        return bool(closed) or (self._open is not None and bool(self._open.count[_PRESENT, row]))

    def _allocate_rows(self, staying: Sequence[str], old_rows: dict[str, int], count: int) -> dict[str, int]:
        """Make room for `count` more layers, and return the new rows by key; other rows are dropped."""
        kept = [*staying, *(track.key for track in self._removed)]
        rows = [old_rows[key] for key in kept]
        room = (len(kept) + count) * 5 // 4

        def moved(cells: NDArray, empty: float) -> NDArray:
            new = np.full((*cells.shape[:-1], room), empty, cells.dtype)
            new[..., : len(rows)] = cells[..., rows]
            return new

        self._mean, self._count = moved(self._mean, np.nan), moved(self._count, 0)
        if self._open is not None:
            part = self._open
            self._open = part._replace(mean=moved(part.mean, np.nan), count=moved(part.count, 0))
        self._rows, new_rows = len(kept), {key: i for i, key in enumerate(kept)}
        self._removed = tuple(track._replace(row=new_rows[track.key]) for track in self._removed)
        return new_rows

    def _store_column(self, part: _StepColumn) -> None:
        at, self._open = self._columns, None
        self._mean[:, at], self._count[:, at] = part.mean, part.count
        self._first[at], self._last[at] = part.first, part.last
        self._columns += 1
        if self._columns == len(self._first):
            self._merge()

    def _merge(self) -> None:
        """Merge neighbouring columns in pairs."""
        half, old_mean, old_count = self._columns // 2, self._mean, self._count
        self._mean, self._count = np.full_like(old_mean, np.nan), np.zeros_like(old_count)
        self._mean[:, :half], self._count[:, :half] = _mean_of(
            old_mean[:, ::2], old_count[:, ::2], old_mean[:, 1::2], old_count[:, 1::2]
        )
        first, last = np.zeros_like(self._first), np.zeros_like(self._last)
        first[:half], last[:half] = self._first[::2], self._last[1::2]
        self._first, self._last = first, last
        self._columns, self._stride = half, 2 * self._stride


class _StepColumn(NamedTuple):
    """Column of consecutive steps; `mean` and `count` are (figures + 1, rows)."""

    first: int
    last: int
    steps: int
    mean: NDArray[np.float64]
    count: NDArray[np.uint32]

    def merged_with(self, later: _StepColumn) -> _StepColumn:
        mean, count = _mean_of(self.mean, self.count, later.mean, later.count)
        return _StepColumn(self.first, later.last, self.steps + later.steps, mean, count)


def _column_of(step: int, layers: Sequence[LayerRow], rows: Sequence[int], room: int) -> _StepColumn:
    given = [[getattr(layer, figure) for layer in layers] for figure in FIGURES]
    figures = np.array(given, np.float64)  # None becomes NaN, as does a figure that is NaN
    missing = np.array([[figure is None for figure in line] for line in given], bool)
    usable = np.abs(figures) <= _LARGEST
    mean, count = np.full((_PRESENT + 1, room), np.nan), np.zeros((_PRESENT + 1, room), np.uint32)
    mean[:_PRESENT, rows] = np.where(usable, figures, np.where(missing, np.nan, np.inf))
    count[:_PRESENT, rows] = usable
    mean[_PRESENT, rows] = count[_PRESENT, rows] = 1
    return _StepColumn(step, step, 1, mean, count)


def _mean_of(a: NDArray, a_count: NDArray, b: NDArray, b_count: NDArray) -> tuple[NDArray, NDArray]:
    """Return means and counts of the finite figures of two columns; the mean is inf if all figures are non-finite."""
    count = a_count + b_count
    low, high = np.where(a_count > 0, a, 0), np.where(b_count > 0, b, 0)
    share = b_count / np.maximum(count, 1)
    return np.where(count > 0, low * (1 - share) + high * share, np.fmax(a, b)), count
