"""The scheduler of the learning rate: told of every step, and kept and put back where branches take turns."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Protocol

from torch.optim.lr_scheduler import ReduceLROnPlateau


class Scheduler(Protocol):
    """What a session asks of a learning rate scheduler, as those of `torch.optim.lr_scheduler` have it."""

    def step(self) -> None: ...


class LRSchedulerAdapter:
    """What a session does with its scheduler, if it has one. The rates themselves are the optimizer's, by branch.

    Args:
        scheduler: of the session.
    """

    def __init__(self, scheduler: Scheduler | None) -> None:
        self._scheduler: Any = scheduler

    @property
    def why_not_restorable(self) -> str:
        """Why branches cannot each have a state of it; "" if they can."""
        lacks = [name for name in ("state_dict", "load_state_dict") if not hasattr(self._scheduler, name)]
        if self._scheduler is None or not lacks:
            return ""
        return (
            f"its scheduler of the learning rate, a {type(self._scheduler).__name__}, has no {' and no '.join(lacks)}"
        )

    def step(self, loss: float) -> None:
        """A step is done, with this loss."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(loss)
        elif self._scheduler is not None:
            self._scheduler.step()

    def state_dict(self) -> Any:
        """Return the scheduler's state as it is now, for `put`."""
        # A copy: a `state_dict` of torch holds the scheduler's own lists, which its next step may change.
        return None if self._scheduler is None else deepcopy(self._scheduler.state_dict())

    def load_state_dict(self, state: Any) -> None:
        """Put the scheduler back to a state that `keep` returned."""
        if self._scheduler is not None:
            # A copy: the scheduler takes the very objects over, and all branches of a race begin with the same ones.
            self._scheduler.load_state_dict(deepcopy(state))
