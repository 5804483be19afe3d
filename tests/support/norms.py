"""An optimizer that looks at whole parameters, as LAMB and LARS do: no part of a parameter can be updated by itself."""

from typing import Any

import torch
from torch.optim import Optimizer


class ByNorms(Optimizer):
    """Momentum SGD whose step is as long as the rate times the norm of its parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                step = state["momentum_buffer"].mul_(0.9).add_(param.grad)
                w_norm, step_norm = (float(torch.linalg.vector_norm(x)) for x in (param, step))
                ratio = w_norm / step_norm if w_norm and step_norm else 1.0
                param.sub_(step, alpha=group["lr"] * ratio)
