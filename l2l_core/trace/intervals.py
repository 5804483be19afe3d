"""Arithmetic on intervals (start, stop): union, intersection, difference, length."""

from __future__ import annotations

import math
from collections.abc import Iterable

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals: sorted, without overlaps, touching ones joined, empty ones dropped."""
    union: list[Interval] = []
    for start, stop in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        else:
            union.append((start, stop))
    return union


def intersect(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Return the intersection of two merged lists of intervals, merged."""
    common: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            common.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Return the parts of a merged list of intervals that are outside of another one, merged."""
    edges = [-math.inf, *(edge for interval in b for edge in interval), math.inf]
    return intersect(a, list(zip(edges[::2], edges[1::2], strict=True)))


def total_length(intervals: list[Interval]) -> float:
    """Return the total length of a merged list of intervals."""
    return math.fsum(stop - start for start, stop in intervals)
