"""Segments of a study that are left to train, in an order in which each one's parent has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench.study.segment import SharedSegment


@dataclass(frozen=True)
class SegmentTask:
    """A segment to train, and the variants that share it."""

    segment: SharedSegment
    names: list[str]

    def __str__(self) -> str:
        return f"seed {self.segment.seed}, {' + '.join(self.names)}"


class SegmentQueue:
    """Segments to train; those that continue from one are added when it has ended.

    Args:
        folder: folder of the study.
        roots: variants of the first segments, by name.
    """

    def __init__(self, folder: Path, roots: Mapping[str, list[str]]) -> None:
        self._ready: list[SegmentTask] = []
        for name, names in roots.items():
            self._add(SegmentTask(SharedSegment(folder, name), names))

    def take(self) -> SegmentTask | None:
        """Return the next segment; None if none is ready."""
        return self._ready.pop(0) if self._ready else None

    def give_back(self, task: SegmentTask) -> None:
        """Put a segment back, which was not trained."""
        self._ready.insert(0, task)

    def finish(self, task: SegmentTask) -> None:
        """Add the segments that continue from a trained one, and remove saves that are not needed any more."""
        before, self._ready = self._ready, []
        self._add_children(task)
        self._ready += before
        _drop_states(task.segment)

    def _add(self, task: SegmentTask) -> None:
        if task.segment.end is None:
            self._ready.append(task)
        else:
            self._add_children(task)

    def _add_children(self, task: SegmentTask) -> None:
        end = task.segment.end
        assert end is not None, f"segment {task.segment.name} has not ended"
        for child, names in zip(task.segment.children, end["children"], strict=True):
            self._add(SegmentTask(child, names))


def _needs_no_parent(child: SharedSegment) -> bool:
    """Return True if a segment and those that continue from it have ended."""
    end = child.end
    return end is not None and (not end["children"] or not child.state.exists())


def _drop_states(segment: SharedSegment) -> None:
    """Remove the saves of ancestors whose descendants have all ended."""
    parent = segment.parent
    while parent is not None and all(_needs_no_parent(child) for child in parent.children):
        parent.drop_state()
        parent = parent.parent
