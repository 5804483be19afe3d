"""Several workers on this machine, started, seen and steered from a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from workbench.panels.board import Board, Kind, awaited, steered
from workbench.panels.header import HeaderPanel
from workbench.panels.loss import LossPanel
from workbench.panels.memory import MemoryPanel
from workbench.panels.rank_edits import RankEditsPanel
from workbench.panels.ranks import RanksPanel
from workbench.panels.waits import LaunchedWaitsPanel
from workbench.ranks import Conductor, Ranks
from workbench.session import Session

VIEWS: Mapping[str, Sequence[Kind]] = {
    "relays": (RanksPanel, LossPanel),
    "waits": (LaunchedWaitsPanel,),
    "memory": (MemoryPanel,),
    "edits": (RankEditsPanel,),
}


class Launched(Board):
    """See several workers train, and steer them as one: Run, Pause, Step, settings and edits go to all.

    The views: "relays" (the workers' live pictures side by side, and the loss, which is one), "waits" (who waits for whom, and
    every worker's lanes), "memory" (of worker 0), "edits". Ranks hold models and relays; here is what they tell. Running the
    cell again, `close`, and the end of the kernel end all of them.

    Attributes:
        session: steers; it has a session's verbs, and each rank in `ranks`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.session = Conductor(ranks)
        super().__init__(self.session, (HeaderPanel,), VIEWS, "relays")

    run = steered(Conductor.run)
    step = steered(Conductor.step)
    pause = steered(Conductor.pause)
    stop = steered(Conductor.stop)
    skip = steered(Conductor.skip)
    edit = steered(Conductor.edit)
    undo = steered(Conductor.undo)
    redo = steered(Conductor.redo)
    fork = steered(Conductor.fork)
    switch = steered(Conductor.switch)
    discard = steered(Conductor.discard)
    reconfigure = steered(Conductor.reconfigure)
    wait = awaited(Conductor.wait)

    def close(self, wait: bool = True) -> None:
        """End all workers, and leave a still picture in the notebook.

        Args:
            wait: until they have ended.
        """
        self.session.close(wait)
        super().close()


def launch(train: Callable[[], Session], workers: int = 2) -> Launched:
    """Start workers on this machine and show them; what is returned, at the end of a cell, is their workbench.

    Args:
        train: makes a worker's relay, with ``workers=Workers()``, and returns a `Session` over it and the worker's batches. Every
            worker's process imports it, so it stands in a module, not in the notebook; the same program runs under torchrun.
        workers: how many processes, each with its share of this machine's cores.

    Raises:
        TypeError, ValueError: no such function or number.
        LaunchError: a worker could not begin; says which and why, and all are ended.
    """
    return Launched(Ranks(train, workers))
