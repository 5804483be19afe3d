"""Learning rate scheduler of a session: stepped after each training step, and saved and restored per branch in a race."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Protocol

from torch.optim.lr_scheduler import ReduceLROnPlateau


class Scheduler(Protocol):
    """A learning rate scheduler with the interface of `torch.optim.lr_scheduler`."""

    def step(self) -> None: ...


class LRSchedulerAdapter:
    """Optional learning rate scheduler with a copied state. The rates themselves belong to the optimizer, per branch.

    Args:
        scheduler: the session's, or None.
    """

    def __init__(self, scheduler: Scheduler | None) -> None:
        self._scheduler: Any = scheduler

    @property
    def name(self) -> str | None:
        """Name of the scheduler's class; None without one."""
        return None if self._scheduler is None else type(self._scheduler).__name__

    @property
    def why_not_restorable(self) -> str:
        """Reason why the scheduler's state cannot be saved and restored; "" if it can."""
        lacks = [name for name in ("state_dict", "load_state_dict") if not hasattr(self._scheduler, name)]
        if self._scheduler is None or not lacks:
            return ""
        return f"its learning rate scheduler, a {type(self._scheduler).__name__}, has no {' and no '.join(lacks)}"

    def step(self, loss: float) -> None:
        """Step the scheduler after a training step with this loss."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(loss)
        elif self._scheduler is not None:
            self._scheduler.step()

    def state_dict(self) -> Any:
        """Return a copy of the scheduler's state."""
        # A copy: the `state_dict` of torch holds the scheduler's own lists, which its next step may change.
        return None if self._scheduler is None else deepcopy(self._scheduler.state_dict())

    def load_state_dict(self, state: Any) -> None:
        """Restore a state from `state_dict`."""
        if self._scheduler is not None:
            # A copy: the scheduler adopts the objects, and all branches of a race begin with the same ones.
            self._scheduler.load_state_dict(deepcopy(state))
