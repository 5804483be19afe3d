"""Widget that starts, shows and controls several workers on this machine."""

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
    """Widget that shows the training of several workers and controls them together.

    The views: "relays" (live pictures of the workers side by side, and their common loss), "waits" (which worker waits for
    which, and the lanes of each), "memory" (of worker 0), "edits". Models and relays are in the workers' processes, which
    end when the cell is run again, on `close`, and with the kernel.

    Attributes:
        session: has the methods of a session, and each worker in `ranks`.
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
            wait: wait until they have ended.
        """
        self.session.close(wait)
        super().close()


def launch(train: Callable[[], Session], workers: int = 2) -> RankBench:
    """Start workers on this machine, and return the widget that shows them at the end of a cell.

    Args:
        train: makes a relay with ``workers=Workers()``, and returns a `Session` over it and the worker's batches. Every
            worker's process imports the function, so it must be in a module, not in the notebook; the same program runs
            under torchrun.
        workers: number of processes, each with its share of this machine's cores.

    Raises:
        TypeError, ValueError: `train` is not such a function, or `workers` is not a valid number.
        LaunchError: a worker did not start; all workers are ended, and the message has the reason.

    Example:
        >>> from workbench import launch
        >>> launch(lambda: None)
        Traceback (most recent call last):
        TypeError: train=...: must be a function in a module, because the process of every rank imports it. In a notebook, ...
    """
    return RankBench(RankProcesses(train, workers))
