"""Several workers on this machine, started, seen and steered from a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from workbench.panels.dashboard import Dashboard, PanelFactory, forward_and_refresh, forward_to_session
from workbench.panels.header_panel import HeaderPanel
from workbench.panels.loss_panel import LossPanel
from workbench.panels.memory_panel import MemoryPanel
from workbench.panels.rank_edits_panel import RankEditsPanel
from workbench.panels.ranks_panel import RanksPanel
from workbench.panels.waits_panel import RankWaitsPanel
from workbench.ranks import RankController, RankProcesses
from workbench.session import Session

VIEWS: Mapping[str, Sequence[PanelFactory]] = {
    "relays": (RanksPanel, LossPanel),
    "waits": (RankWaitsPanel,),
    "memory": (MemoryPanel,),
    "edits": (RankEditsPanel,),
}


class RankBench(Dashboard):
    """See several workers train, and steer them as one: Run, Pause, Step, settings and edits go to all.

    The views: "relays" (the workers' live pictures side by side, and the loss, which is one), "waits" (who waits for whom, and
    every worker's lanes), "memory" (of worker 0), "edits". Ranks hold models and relays; here is what they tell. Running the
    cell again, `close`, and the end of the kernel end all of them.

    Attributes:
        session: steers; it has a session's verbs, and each rank in `ranks`.
    """

    def __init__(self, ranks: RankProcesses) -> None:
        self.session = RankController(ranks)
        super().__init__(self.session, (HeaderPanel,), VIEWS, "relays")

    run = forward_to_session(RankController.run)
    step = forward_to_session(RankController.step)
    pause = forward_to_session(RankController.pause)
    stop = forward_to_session(RankController.stop)
    skip = forward_to_session(RankController.skip)
    edit = forward_to_session(RankController.edit)
    undo = forward_to_session(RankController.undo)
    redo = forward_to_session(RankController.redo)
    fork = forward_to_session(RankController.fork)
    switch = forward_to_session(RankController.switch)
    discard = forward_to_session(RankController.discard)
    reconfigure = forward_to_session(RankController.reconfigure)
    wait = forward_and_refresh(RankController.wait)

    def close(self, wait: bool = True) -> None:
        """End all workers, and leave a still picture in the notebook.

        Args:
            wait: until they have ended.
        """
        self.session.close(wait)
        super().close()


def launch(train: Callable[[], Session], workers: int = 2) -> RankBench:
    """Start workers on this machine and show them; what is returned, at the end of a cell, is their workbench.

    Args:
        train: makes a worker's relay, with ``workers=Workers()``, and returns a `Session` over it and the worker's batches. Every
            worker's process imports it, so it stands in a module, not in the notebook; the same program runs under torchrun.
        workers: how many processes, each with its share of this machine's cores.

    Raises:
        TypeError, ValueError: no such function or number.
        LaunchError: a worker could not begin; says which and why, and all are ended.
    """
    return RankBench(RankProcesses(train, workers))
