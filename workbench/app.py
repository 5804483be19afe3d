"""The workbench: a session and its panels, as one widget at the end of a cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from l2l_core import Relay, Schedule
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
from workbench.session import BatchSource, Logger, Scheduler, Session

P = ParamSpec("P")
T = TypeVar("T")


def _steer(verb: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Workbench, P], T]:
    """A verb of the session as one of the workbench, with its signature and docstring, which notebooks complete and show."""

    @wraps(verb)
    def steer(self: Workbench, *args: P.args, **kwargs: P.kwargs) -> T:
        return verb(self.session, *args, **kwargs)

    steer.__qualname__ = f"Workbench.{verb.__name__}"
    return steer


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

    run = _steer(Session.run)
    step = _steer(Session.step)
    pause = _steer(Session.pause)
    stop = _steer(Session.stop)
    reconfigure = _steer(Session.reconfigure)
    edit = _steer(Session.edit)
    undo = _steer(Session.undo)
    redo = _steer(Session.redo)
    fork = _steer(Session.fork)
    switch = _steer(Session.switch)
    discard = _steer(Session.discard)
    wait = _steer(Session.wait)

    def close(self, wait: bool = True) -> None:
        """End the session when its step is over, and leave a still picture in the notebook. The relay stays open.

        Args:
            wait: for the step under way.
        """
        self.session.close(wait)
        super().close()
