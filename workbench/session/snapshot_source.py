"""What panels look at: a session, or a recorded run that is shown again; and what they steer."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from workbench.session.snapshot import Snapshot


@runtime_checkable
class SnapshotSource(Protocol):
    """Something with snapshots. `Session` and `Recording` are such; only a session can be steered."""

    def snapshot(self) -> Snapshot:
        """Return what is to be seen now; never waits."""

    def wait_for_change(self, number: int, timeout_s: float) -> None:
        """Wait until a snapshot would have another number than this one, at most `timeout_s`."""


@runtime_checkable
class ControllableSource(SnapshotSource, Protocol):
    """A source whose run can be steered: a `Session`, or several of them that do the same."""

    def run(self, steps: int | None = None) -> None: ...
    def step(self) -> None: ...
    def pause(self) -> None: ...
    def stop(self) -> None: ...
    def skip(self) -> None: ...
    def cancel(self, ticket: int) -> bool: ...
    def reconfigure(self, **settings: Any) -> Any: ...
