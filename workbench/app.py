"""The workbench: a session and its panels, as one widget at the end of a cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from l2l_core import Edit, Relay, Schedule
from l2l_core.edits import Branch, Entry
from workbench.panels.board import Board
from workbench.panels.edits import EditsPanel
from workbench.panels.explore import ExplorePanel
from workbench.panels.header import HeaderPanel
from workbench.panels.heat import HeatPanel
from workbench.panels.layers import LayersPanel
from workbench.panels.loss import LossPanel
from workbench.panels.memory import MemoryPanel
from workbench.panels.relay import RelayPanel
from workbench.panels.timeline import TimelinePanel
from workbench.panels.what_if import WhatIfPanel
from workbench.session import BatchSource, Logger, Scheduler, Session, Snapshot


class Workbench(Board):
    """See a relay train, and steer it.

    ``Workbench(relay, batches)`` at the end of a cell shows header, relay picture, timeline, memory, loss, edits, layers and
    their figures over the steps.
    Running the cell again replaces it; another workbench on the same relay takes it over. Training goes on in a thread of
    its own, so cells stay free.

    Args:
        relay, batches, loggers, scheduler, schedule: as of `Session`.

    Raises:
        TypeError: not a relay, or batches of no known kind.
    """

    def __init__(
        self,
        relay: Relay,
        batches: BatchSource,
        *,
        loggers: Sequence[Logger] = (),
        scheduler: Scheduler | None = None,
        schedule: Schedule = Schedule(),  # noqa: B008 - keeps no state; this one edits nothing
    ) -> None:
        self.session = Session(relay, batches, loggers=loggers, scheduler=scheduler, schedule=schedule)
        kinds = (
            *(HeaderPanel, RelayPanel, TimelinePanel, MemoryPanel, LossPanel),
            *(EditsPanel, LayersPanel, HeatPanel, WhatIfPanel, ExplorePanel),
        )
        super().__init__(self.session, kinds)

    # -- steering: see `Session` ---------------------------------------------------------------------------------------

    def run(self, steps: int | None = None) -> None:
        """Train for so many steps; see `Session.run`."""
        self.session.run(steps)

    def step(self) -> None:
        """Train one step."""
        self.session.step()

    def pause(self) -> None:
        """Pause when the step under way is over."""
        self.session.pause()

    def stop(self) -> None:
        """End the run when the step under way is over."""
        self.session.stop()

    def reconfigure(self, **settings: Any) -> None:
        """Give the next step other settings; see `Session.reconfigure`."""
        self.session.reconfigure(**settings)

    def edit(self, *changes: Edit | Callable[[Relay], Any], what: str = "", trust: bool = False) -> Future[Any]:
        """Edit the stack of layers, or do something else with the relay, between two steps; see `Session.edit`."""
        return self.session.edit(*changes, what=what, trust=trust)

    def undo(self) -> Future[Entry]:
        """Undo the last edit; see `Session.undo`."""
        return self.session.undo()

    def redo(self) -> Future[Entry]:
        """Do again what was undone last."""
        return self.session.redo()

    def fork(self, name: str) -> Future[Branch]:
        """Make a branch of the present state and go on there; see `Session.fork`."""
        return self.session.fork(name)

    def switch(self, name: str) -> Future[Branch]:
        """Go on with another branch."""
        return self.session.switch(name)

    def discard(self, name: str) -> Future[None]:
        """Free a branch that is not the present one."""
        return self.session.discard(name)

    def wait(self, timeout_s: float | None = None, *, progress: bool = False) -> Snapshot:
        """Wait until nothing runs; see `Session.wait`."""
        return self.session.wait(timeout_s, progress=progress)

    def close(self, wait: bool = True) -> None:
        """End the session when its step is over, and leave a still picture in the notebook. The relay stays open.

        Args:
            wait: for the step under way.
        """
        self.session.close(wait)
        super().close()
