"""A lab in a notebook: steps by plans, chosen one by one, seen like those of a relay."""

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
        "Run trains for the number of steps beside it; Step trains one. The plan that is pressed is followed from the next step "
        "on, also while it runs.",
    ),
    TourStop(
        "time",
        "See what runs and moves",
        "A plan that recomputes runs layers forward again among the backwards; one that offloads copies, and hatched copies "
        "are not hidden.",
    ),
    TourStop(
        "memory",
        "See what fits",
        "Device memory over the step by what fills it, with the budget and what plain training would need.",
    ),
)


class LabBench(Dashboard):
    """See the model of a lab train by plans, and choose the plan of the next step.

    ``LabBench(lab, batches)`` at the end of a cell shows the buttons, the plans, a line on how the last step went, and one of
    these views: "time" (lanes and overlap, and why), "memory", "loss". A step that the device has no room for changes nothing
    and is shown up to where it failed. Another bench on the same model takes it over.

    Args:
        lab, batches, ways, plan: as of `LabSession`.
        view: the view that is seen first; several names are stacked, without buttons to turn.

    Attributes:
        session: steers; a `LabSession`.

    Raises:
        TypeError, ValueError: as of `LabSession`; or there is no such view.
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
        check_view(view, VIEWS)  # first: making a session starts a thread
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
        """End the session when its step is over, and leave a still picture in the notebook. The lab can be used again.

        Args:
            wait: for the step under way.
        """
        self.session.close(wait)  # before the still is drawn: it shows how the session has ended
        super().close()
