"""What panels look at: a session, or a recorded run that is shown again."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from workbench.session.snapshot import Snapshot


@runtime_checkable
class Source(Protocol):
    """Something with snapshots. `Session` and `Recording` are such; only a session can be steered."""

    def snapshot(self) -> Snapshot:
        """Return what is to be seen now; never waits."""

    def wait_for_change(self, number: int, timeout_s: float) -> None:
        """Wait until a snapshot would have another number than this one, at most `timeout_s`."""
