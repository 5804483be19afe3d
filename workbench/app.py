"""The workbench: a session and its panels, as one widget at the end of a cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from l2l_core import Relay, Schedule
from workbench.panels.board import Board, Kind, awaited, steered
from workbench.panels.card import CardPanel
from workbench.panels.edits import EditsPanel
from workbench.panels.explore import ExplorePanel
from workbench.panels.export import ExportPanel
from workbench.panels.header import HeaderPanel
from workbench.panels.heat import HeatPanel
from workbench.panels.inside import InsidePanel
from workbench.panels.layers import LayersPanel
from workbench.panels.loss import LossPanel
from workbench.panels.memory import MemoryPanel
from workbench.panels.race import RacePanel
from workbench.panels.relay import RelayPanel
from workbench.panels.timeline import TimelinePanel
from workbench.panels.verdict import VerdictPanel, WhyPanel
from workbench.panels.views import check_view
from workbench.panels.what_if import WhatIfPanel
from workbench.session import BatchSource, Given, Logger, Scheduler, Session

VIEWS: Mapping[str, Sequence[Kind]] = {
    "relay": (RelayPanel,),
    "time": (TimelinePanel, WhyPanel, ExplorePanel, ExportPanel),
    "memory": (MemoryPanel, ExportPanel),
    "layers": (LayersPanel, CardPanel),
    "edits": (EditsPanel,),
    "loss": (LossPanel,),
    "figures": (HeatPanel,),
    "inside": (InsidePanel,),
    "race": (RacePanel,),
    "what if": (WhatIfPanel,),
}


class Workbench(Board):
    """See a relay train, and steer it.

    ``Workbench(relay, batches)`` at the end of a cell shows the buttons, a line on how the last step went, and one of these
    views: "relay" (the live picture), "time" (lanes and overlap, and why), "memory", "layers" (the table, and the card of one
    layer), "edits" (edits, branches and their journal), "loss", "figures" (of the layers, over the steps), "inside"
    (activations, attention and what the head says of each depth, when asked for), "race" (branches on the same batches) and
    "what if". ``view="time"`` begins with another one, ``view=["relay", "memory"]`` stacks several.
    Running the cell again replaces it; another workbench on the same relay takes it over. Training goes on in a thread of
    its own, so cells stay free.

    Args:
        relay, batches, loggers, scheduler, schedule, probe, decode: as of `Session`.
        view: the view that is seen first; several names are stacked, without buttons to turn.

    Raises:
        TypeError: not a relay, or batches or a probe of no known kind.
        ValueError: there is no such view, or a probe without batches.
    """

    def __init__(
        self,
        relay: Relay,
        batches: BatchSource,
        *,
        loggers: Sequence[Logger] = (),
        scheduler: Scheduler | None = None,
        schedule: Schedule = Schedule(),  # noqa: B008 - keeps no state; this one edits nothing
        probe: Given = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        view: str | Sequence[str] = "relay",
    ) -> None:
        check_view(view, VIEWS)  # first: making a session takes the relay over and starts a thread
        self.session = Session(
            relay, batches, loggers=loggers, scheduler=scheduler, schedule=schedule, probe=probe, decode=decode
        )
        super().__init__(self.session, (HeaderPanel, VerdictPanel), VIEWS, view)

    run = steered(Session.run)
    step = steered(Session.step)
    pause = steered(Session.pause)
    stop = steered(Session.stop)
    reconfigure = steered(Session.reconfigure)
    edit = steered(Session.edit)
    undo = steered(Session.undo)
    redo = steered(Session.redo)
    measure = steered(Session.measure)
    inspect = steered(Session.inspect)
    look = steered(Session.look)
    race = steered(Session.race)
    fork = steered(Session.fork)
    switch = steered(Session.switch)
    discard = steered(Session.discard)
    script = steered(Session.script)
    wait = awaited(Session.wait)

    def close(self, wait: bool = True) -> None:
        """End the session when its step is over, and leave a still picture in the notebook. The relay stays open.

        Args:
            wait: for the step under way.
        """
        self.session.close(wait)  # before the still is drawn: it shows how the session has ended
        super().close()
