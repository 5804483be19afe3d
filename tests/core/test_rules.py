"""The schedule in numbers: pieces of a copy leave nothing out, and figures of the wire agree with the types that they are of."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from l2l_core.schedule_rules import (
    MIN_CHUNK_BYTES,
    chunk_bounds,
    chunks_per_copy,
    gradient_slots,
    kept_layer_count,
    weight_itemsize,
    weight_size_ratio,
)


@given(st.integers(0, 1 << 20), st.sampled_from([2, 4]), st.integers(1, 64))
def test_pieces_are_alike_and_leave_nothing_out(numel: int, itemsize: int, pieces: int) -> None:
    edges = chunk_bounds(numel, itemsize, pieces)
    sizes = [b - a for a, b in pairwise(edges)]
    assert edges[0] == 0 and edges[-1] == numel and 1 <= len(sizes) <= pieces
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == 1 or min(sizes) * itemsize >= MIN_CHUNK_BYTES, "a piece is worth its copy"


def test_a_copy_is_cut_as_often_as_it_may_be() -> None:
    least = MIN_CHUNK_BYTES // 4
    assert chunk_bounds(3 * least, 4, 3) == chunk_bounds(3 * least, 4, 8) == [0, least, 2 * least, 3 * least]
    assert chunk_bounds(3 * least - 1, 4, 3) == [0, (3 * least - 1) // 2, 3 * least - 1]


@pytest.mark.parametrize(
    ("ahead", "stash", "pieces"), [(1, "host", 5), (2, "host", 5), (0, "host", 1), (1, "device", 1)]
)
def test_layers_are_cut_where_a_stash_goes_between(ahead: int, stash: str, pieces: int) -> None:
    assert chunks_per_copy(5, ahead, stash) == pieces


def test_a_serial_relay_has_one_gradient_slot() -> None:
    assert [gradient_slots(ahead) for ahead in (0, 1, 2)] == [1, 2, 2]


def test_weights_travel_in_the_type_that_they_are_computed_with() -> None:
    for precision, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        assert weight_itemsize(precision) == dtype.itemsize
        assert weight_size_ratio(precision) == dtype.itemsize / torch.float32.itemsize


@pytest.mark.parametrize(
    "settings, layers, kept",
    [
        ({}, 4, 1),
        ({"keep": 3}, 4, 2),
        ({"keep": 3, "ahead": 0, "resident": 1}, 4, 2),
        ({"keep": 9, "resident": 9}, 4, 4),
    ],
)
def test_as_many_graphs_are_kept_as_layers_stay(settings: dict[str, int], layers: int, kept: int) -> None:
    assert kept_layer_count(settings, layers) == kept
