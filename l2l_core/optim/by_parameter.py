"""What optimizers have in common that look at one whole parameter at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class ByParameter(Optimizer, ABC):
    """Updates every parameter that has a gradient, each by itself."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; returns what the closure gives, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    @abstractmethod
    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        """Update a parameter by its gradient and the settings of its group."""
