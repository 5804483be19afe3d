"""The workbench: a session and its panels as one widget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from html import escape

import ipywidgets

from l2l_core import Relay, Schedule
from workbench.panels.card_panel import CardPanel
from workbench.panels.controls import make_box
from workbench.panels.dashboard import Dashboard, PanelFactory, forward_and_refresh, forward_to_session
from workbench.panels.edits_panel import EditsPanel
from workbench.panels.explore_panel import ExplorePanel
from workbench.panels.export_panel import ExportPanel
from workbench.panels.header_panel import HeaderPanel
from workbench.panels.heat_panel import HeatPanel
from workbench.panels.inside_panel import InsidePanel
from workbench.panels.layers_panel import LayersPanel
from workbench.panels.loss_panel import LossPanel
from workbench.panels.memory_panel import MemoryPanel
from workbench.panels.panel import ControlPanel
from workbench.panels.race_panel import RacePanel
from workbench.panels.relay_panel import RelayPanel
from workbench.panels.timeline_panel import TimelinePanel
from workbench.panels.verdict_panel import BoundsPanel, VerdictPanel
from workbench.panels.view_tabs import check_view
from workbench.panels.what_if_panel import WhatIfPanel
from workbench.pictures import LRCurve, Table
from workbench.session import Autosave, BatchSource, Logger, ProbeBatches, Scheduler, Session, Snapshot

VIEWS: Mapping[str, Sequence[PanelFactory]] = {
    "relay": (RelayPanel,),
    "time": (TimelinePanel, BoundsPanel, ExplorePanel, ExportPanel),
    "memory": (MemoryPanel, ExportPanel),
    "layers": (LayersPanel, CardPanel),
    "edits": (EditsPanel,),
    "loss": (LossPanel,),
    "figures": (HeatPanel,),
    "inside": (InsidePanel,),
    "race": (RacePanel,),
    "what if": (WhatIfPanel,),
}


class Workbench(Dashboard):
    """Widget that shows and controls the training of a relay.

    ``Workbench(relay, batches)`` at the end of a cell shows the controls, a summary of the last step, and one of these
    views: "relay" (live picture), "time" (lanes, overlap and bounds), "memory", "layers" (table, and card of one layer),
    "edits" (edits, branches and their journal), "loss", "figures" (figures of the layers over the steps), "inside"
    (activations, attention and logit lens, on request), "race" (branches on the same batches) and "what if".
    ``view="time"`` begins with another view, ``view=["relay", "memory"]`` stacks several.
    Running the cell again replaces the workbench; another workbench on the same relay takes it over. Training runs in a
    background thread, so other cells can run. With ``autosave=Autosave("folder")``, the same cells in a new kernel offer to
    resume the session.

    Args:
        relay, batches, loggers, scheduler, schedule, probe, decode, autosave: see `Session`.
        view: the first view; several names are stacked, without buttons for other views.

    Raises:
        TypeError: `relay`, `batches` or `probe` has the wrong type.
        ValueError: an unknown view, or an empty `probe`.

    Example:
        >>> from workbench import Workbench
        >>> wb = Workbench(relay, lambda: batch)  # in a notebook, `wb` at the end of the cell shows it
        >>> wb.run(3)
        >>> state = wb.wait()
        >>> relay.steps
        3
        >>> wb.close()
    """

    def __init__(
        self,
        relay: Relay,
        batches: BatchSource,
        *,
        loggers: Sequence[Logger] = (),
        scheduler: Scheduler | None = None,
        schedule: Schedule = Schedule(),  # noqa: B008 - keeps no state; this one edits nothing
        probe: ProbeBatches = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        autosave: Autosave | None = None,
        view: str | Sequence[str] = "relay",
    ) -> None:
        check_view(view, VIEWS)  # first, since a session takes the relay over and starts a thread
        self.session = Session(
            relay,
            batches,
            loggers=loggers,
            scheduler=scheduler,
            schedule=schedule,
            probe=probe,
            decode=decode,
            autosave=autosave,
        )
        offers = () if autosave is None else (ResumePanel,)
        super().__init__(self.session, (*offers, HeaderPanel, VerdictPanel), VIEWS, view)

    run = forward_to_session(Session.run)
    step = forward_to_session(Session.step)
    pause = forward_to_session(Session.pause)
    stop = forward_to_session(Session.stop)
    reconfigure = forward_to_session(Session.reconfigure)
    edit = forward_to_session(Session.edit)
    undo = forward_to_session(Session.undo)
    redo = forward_to_session(Session.redo)
    measure = forward_to_session(Session.measure)
    inspect = forward_to_session(Session.inspect)
    look = forward_to_session(Session.look)
    evaluate = forward_to_session(Session.evaluate)
    race = forward_to_session(Session.race)
    race_variant = forward_to_session(Session.race_variant)
    fork = forward_to_session(Session.fork)
    switch = forward_to_session(Session.switch)
    discard = forward_to_session(Session.discard)
    script = forward_to_session(Session.script)
    save = forward_to_session(Session.save)
    start_afresh = forward_to_session(Session.start_afresh)
    resume = forward_and_refresh(Session.resume)
    wait = forward_and_refresh(Session.wait)

    def find_lr(self, lowest: float = 1e-7, highest: float = 1.0, steps: int = 60) -> Future[LRCurve]:
        """Find a learning rate and rewind, see `Session.find_lr`; the result displays its curve.

        Args:
            lowest, highest: rates of the first and of the last step.
            steps: number of steps; fewer if the loss diverges.

        Raises:
            ValueError: the range is empty, or there are too few steps.
        """
        return self.session.find_lr(lowest, highest, steps, result=LRCurve)

    def close(self, wait: bool = True) -> None:
        """End the session after its current step, and leave a still picture in the notebook. The relay stays open.

        Args:
            wait: wait for the current step.
        """
        self.session.close(wait)  # before the still picture is drawn, so that it shows the end of the session
        super().close()


class ResumePanel(ControlPanel):
    """The line above the header that offers to resume a saved session; hidden without one."""

    source_type = Session
    has_own_caption = True

    def build(self) -> ipywidgets.Box:
        self._words = ipywidgets.HTML()
        tip = "Continue the saved session: weights, optimizer, data, loss curve and edits are as they were"
        self._resume = self._button("Resume", "play", tip, self.session.resume)
        self._resume.button_style = "primary"
        tip = "Begin a new session; the folder of the saved one is renamed and kept"
        self._afresh = self._button("Start afresh", "file-o", tip, self._start_afresh)
        self._error_html = ipywidgets.HTML(layout={"display": "none"})
        self._buttons = make_box(ipywidgets.HBox, "l2l-resume", self._words, self._resume, self._afresh)
        return ipywidgets.VBox([self._buttons, self._error_html])

    def draw(self, snapshot: Snapshot) -> None:
        offer = snapshot.offer
        self._buttons.layout.display = "none" if offer is None else ""
        if offer is None:
            return
        words = escape(offer.words[0].upper() + offer.words[1:])
        lacks = f" The save lacks {escape(offer.lost)}." if offer.lost else ""
        why_not = f'<div class="l2l-caption">It cannot be resumed here: {escape(offer.why_not)}.</div>'
        self._words.value = f'<div role="status"><strong>{words}.</strong>{lacks}{why_not * bool(offer.why_not)}</div>'
        self._resume.layout.display = "none" if offer.why_not else ""

    def still(self, snapshot: Snapshot) -> Sequence[Table]:
        return []

    def _start_afresh(self) -> None:
        self.session.start_afresh()
