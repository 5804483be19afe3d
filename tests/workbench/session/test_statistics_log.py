"""Statistics of the layers: correct means in bounded memory, and immutable views."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from workbench.session.snapshot_values import LayerRow
from workbench.session.statistics import FIGURES, MAX_COLUMNS, MAX_REMOVED, Statistics, StatisticsLog


def layer(
    key: str, norm: float | None = 1.0, ratio: float | None = None, influence: float | None = None, name: str = ""
) -> LayerRow:
    frozen = norm is None
    return LayerRow(
        key, name or f"blocks.{key}", 10, 40, 0, frozen, norm, ratio, influence, num_trained=0 if frozen else 10
    )


def stack(keys: str, norm: float | None = 1.0) -> list[LayerRow]:
    return [layer(key, norm) for key in keys]


def lines(record: Statistics, figure: str = "grad_norm") -> dict[str, list[float]]:
    """Return the figures of all layers by key, including removed ones."""
    tracks = (*record.stack, *record.removed)
    return {track.key: line for track, line in zip(tracks, record.values(figure, tracks).tolist(), strict=True)}


def keys(tracks: Sequence) -> str:
    return "".join(track.key for track in tracks)


def same(seen: Sequence[float], expected: Sequence[float]) -> bool:
    return np.array_equal(np.float32(seen), np.float32(expected), equal_nan=True)


def test_every_step_is_a_column_up_to_the_limit() -> None:
    log = StatisticsLog()
    for step in range(1, 101):
        log.append(step, [layer("a", 0.1 * step, 1e-3 * step, step / 100), layer("b", 7.0)])
    record = log.view()
    assert record.first.tolist() == record.last.tolist() == list(range(1, 101))
    assert same(lines(record)["a"], [0.1 * step for step in range(1, 101)])
    assert same(lines(record, "update_ratio")["a"], [1e-3 * step for step in range(1, 101)])
    assert same(lines(record, "influence")["a"], [step / 100 for step in range(1, 101)])
    assert same(lines(record)["b"], [7.0] * 100) and same(lines(record, "influence")["b"], [math.nan] * 100)


def test_columns_are_merged_to_means() -> None:
    random = np.random.default_rng(0)
    figures = np.exp(random.normal(size=(10_000, 12)))
    log = StatisticsLog()
    for step, norms in enumerate(figures.tolist(), start=1):
        log.append(step, [layer(f"L{i:03d}", norm) for i, norm in enumerate(norms)])
    record = log.view()
    assert MAX_COLUMNS / 2 <= len(record.first) <= MAX_COLUMNS
    assert record.closed.size <= (len(FIGURES) + 1) * MAX_COLUMNS * 15
    assert record.first[0] == 1 and record.last[-1] == 10_000
    assert (record.first[1:] == record.last[:-1] + 1).all(), "every step is in one column"
    widths = record.last - record.first + 1
    assert {*widths[:-1].tolist()} == {64} and 1 <= widths[-1] <= 64
    starts = record.first - 1
    expected = np.add.reduceat(figures, starts) / widths[:, None]
    np.testing.assert_allclose(record.values("grad_norm", record.stack), expected.T, rtol=1e-5)


@pytest.mark.parametrize("steps", range(1, 40))
def test_means_of_finite_figures(steps: int) -> None:
    figures: list[float | None] = [
        None if step % 7 == 3 else math.inf if step % 5 == 1 else step**1.5 for step in range(40)
    ]
    log = StatisticsLog(columns=4)
    for step in range(steps):
        log.append(step, [layer("a", figures[step])])
    record = log.view()
    assert len(record.first) <= 4
    for low, high, seen in zip(record.first, record.last, lines(record)["a"], strict=True):
        present = [figure for figure in figures[low : high + 1] if figure is not None]
        finite = [figure for figure in present if math.isfinite(figure)]
        expected = np.mean(finite) if finite else math.inf if present else math.nan
        assert seen == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_inserted_layer_is_absent_before() -> None:
    log = StatisticsLog()
    for step in range(1, 101):
        log.append(step, stack("ab" if step <= 50 else "axb", norm=float(step)))
    record = log.view()
    assert keys(record.stack) == "axb"
    assert same(lines(record)["x"], [math.nan] * 50 + [float(step) for step in range(51, 101)])
    assert same(lines(record)["b"], [float(step) for step in range(1, 101)])
    assert record.present(record.stack).sum(axis=1).tolist() == [100, 50, 100]


def test_dropped_layer_returns_to_its_row() -> None:
    log = StatisticsLog()
    for now in ("abc", "ac", "cab"):
        log.append(len(log.view().first), stack(now))
    log.set_stack(stack("ca"))
    record = log.view()
    assert keys(record.stack) == "ca" and keys(record.removed) == "b"
    assert same(lines(record)["b"], [1, math.nan, 1])
    assert same(lines(record)["a"], [1, 1, 1]) and same(lines(record)["c"], [1, 1, 1])
    log.append(3, stack("bca"))
    assert keys(log.view().stack) == "bca" and not log.view().removed
    assert same(lines(log.view())["b"], [1, math.nan, 1, 1])


def test_layers_follow_the_order_of_the_stack_and_their_names() -> None:
    log = StatisticsLog()
    log.append(1, [layer("a", 1.0), layer("b", 2.0), layer("c", 3.0)])
    log.append(2, [layer("c", 30.0, name="blocks.0"), layer("a", 10.0), layer("b", 20.0)])
    record = log.view()
    assert record.values("grad_norm", record.stack).tolist() == [[3, 30], [1, 10], [2, 20]]
    assert [track.name for track in record.stack] == ["blocks.0", "blocks.a", "blocks.b"]


def test_edit_is_shown_before_the_next_step() -> None:
    log = StatisticsLog()
    log.append(1, stack("abc"))
    log.set_stack(stack("acx"))
    record = log.view()
    assert keys(record.stack) == "acx" and keys(record.removed) == "b"
    assert math.isnan(lines(record)["x"][0]) and not record.present(record.stack)[2, 0]


def test_layer_without_steps_is_not_kept() -> None:
    log = StatisticsLog()
    log.append(1, stack("ab"))
    log.set_stack(stack("axb"))
    log.set_stack(stack("ab"))
    assert not log.view().removed


def test_frozen_layer_is_present_without_a_figure() -> None:
    log = StatisticsLog()
    log.append(1, stack("ab"))
    log.append(2, [*stack("a"), *stack("b", norm=None)])
    record = log.view()
    assert same(lines(record)["b"], [1, math.nan]) and record.present(record.stack).all()


@pytest.mark.parametrize("figure", [math.inf, -math.inf, math.nan, 1e200])
def test_non_finite_figure_counts_only_alone(figure: float) -> None:
    log = StatisticsLog(columns=2)
    log.append(1, [layer("a", figure)])
    assert lines(log.view())["a"] == [math.inf]
    log.append(2, [layer("a", 3.0)])
    log.append(3, [layer("a", figure)])
    assert lines(log.view())["a"] == [3.0, math.inf]


def test_view_does_not_change() -> None:
    log, views, copies = StatisticsLog(columns=8), [], []
    for step in range(60):
        now = "abcdefgh"[: 1 + step % 8] if step % 3 else "hgfedcbaxyz"
        log.append(step, stack(now, norm=float(step)))
        view = log.view()
        views.append(view)
        copies.append((keys(view.stack), keys(view.removed), view.first.tolist(), view.last.tolist(), lines(view)))
    for view, (in_stack, gone, first, last, figures) in zip(views, copies, strict=True):
        assert (keys(view.stack), keys(view.removed)) == (in_stack, gone)
        assert (view.first.tolist(), view.last.tolist()) == (first, last)
        seen = lines(view)
        assert all(same(seen[key], figures[key]) for key in figures)
        with pytest.raises(ValueError, match="read-only"):
            view.closed[...] = 0


def test_view_is_cached() -> None:
    log = StatisticsLog()
    empty = log.view()
    assert not len(empty.first) and not empty.stack
    log.append(1, stack("a"))
    view = log.view()
    assert view is log.view() and view is not empty
    log.set_stack(stack("a"))
    assert log.view() is view, "nothing has changed"
    log.append(2, stack("a"))
    assert log.view() is not view


def test_memory_is_bounded_under_endless_edits() -> None:
    log = StatisticsLog(columns=8)
    for step in range(2000):
        log.append(step, [layer("first", float(step)), layer(f"guest {step}", 1.0)])
    record = log.view()
    assert len(record.removed) == MAX_REMOVED and record.removed[-1].key == "guest 1998"
    assert record.closed.shape[2] <= 2 * (MAX_REMOVED + 2)
    means = (record.first + record.last) / 2
    np.testing.assert_allclose(lines(record)["first"], means, rtol=1e-6)
    assert lines(record)["guest 1999"][-1] == 1.0


def test_unknown_figure_is_refused() -> None:
    with pytest.raises(ValueError, match="no figure 'loss' of a layer; there are grad_norm"):
        StatisticsLog().view().values("loss", ())
