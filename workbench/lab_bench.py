"""Widget for a strategy lab: the plan is chosen step by step, and shown with the panels of a relay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from l2l_core.strategies import Lab, Plan, Strategy
from workbench.panels.dashboard import Dashboard, PanelFactory, forward_and_refresh, forward_to_session
from workbench.panels.loss_panel import LossPanel
from workbench.panels.memory_panel import MemoryPanel
from workbench.panels.plan_header_panel import PlanHeaderPanel
from workbench.panels.timeline_panel import TimelinePanel
from workbench.panels.tour import TourStop
from workbench.panels.verdict_panel import BoundsPanel, VerdictPanel
from workbench.panels.view_tabs import check_view
from workbench.plans import DEFAULT_STRATEGIES, LabSession
from workbench.session import BatchSource

VIEWS: Mapping[str, Sequence[PanelFactory]] = {
    "time": (TimelinePanel, BoundsPanel),
    "memory": (MemoryPanel,),
    "loss": (LossPanel,),
}
LAB_TOUR_STOPS: Sequence[TourStop] = (
    TourStop(
        "",
        "Train",
        "Run trains the number of steps beside it; Step trains one. The selected plan is used from the next step on, also "
        "during a run.",
    ),
    TourStop(
        "time",
        "See what runs and moves",
        "A plan with recompute runs layers forward again between the backwards; a plan with offload adds copies, and hatched "
        "copies are not hidden.",
    ),
    TourStop(
        "memory",
        "See what fits",
        "Device memory over the step by category, with the budget and the need of plain training.",
    ),
)


class LabBench(Dashboard):
    """Widget that shows the training of a lab's model and selects the plan of the next step.

    ``LabBench(lab, batches)`` at the end of a cell shows the controls, the plans, a summary of the last step, and one of
    these views: "time" (lanes, overlap and bounds), "memory", "loss". A step that does not fit the device changes nothing
    and is shown up to its failure. Another bench on the same model takes it over.

    Args:
        lab, batches, ways, plan: see `LabSession`.
        view: the first view; several names are stacked, without buttons for other views.

    Attributes:
        session: the `LabSession`.

    Raises:
        TypeError, ValueError: see `LabSession`; or an unknown view.

    Example:
        >>> from l2l_core.strategies import Full, Lab, Plain
        >>> from workbench import LabBench
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model, batch, loss=nn.CrossEntropyLoss())
        >>> bench = LabBench(lab, lambda: batch, ways=[Plain(), Full()])  # at the end of a cell, `bench` shows it
        >>> bench.run(3)
        >>> bench.wait().step
        3
        >>> bench.close()
    """

    def __init__(
        self,
        lab: Lab,
        batches: BatchSource,
        *,
        ways: Sequence[Strategy | Plan] = DEFAULT_STRATEGIES,
        plan: str | None = None,
        view: str | Sequence[str] = "memory",
    ) -> None:
        check_view(view, VIEWS)  # first, since a session starts a thread
        self.session = LabSession(lab, batches, ways, plan)
        super().__init__(self.session, (PlanHeaderPanel, VerdictPanel), VIEWS, view, stops=LAB_TOUR_STOPS)

    run = forward_to_session(LabSession.run)
    step = forward_to_session(LabSession.step)
    pause = forward_to_session(LabSession.pause)
    stop = forward_to_session(LabSession.stop)
    skip = forward_to_session(LabSession.skip)
    follow = forward_to_session(LabSession.follow)
    wait = forward_and_refresh(LabSession.wait)

    def close(self, wait: bool = True) -> None:
        """End the session after its current step, and leave a still picture; the lab can be used again.

        Args:
            wait: wait for the current step.
        """
        self.session.close(wait)  # before the still picture is drawn, so that it shows the end of the session
        super().close()
