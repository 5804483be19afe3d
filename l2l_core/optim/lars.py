"""LARS: momentum SGD whose rate is, per parameter, what its norm is to that of its gradient, for large batches.

    u = lr * trust |w| / (|g| + wd |w|) * (g + wd w)                    norms over a whole parameter
    b = momentum b + u
    w = w - b

Source: You et al., Large Batch Training of Convolutional Networks, arXiv 1708.03888, algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch

from l2l_core.optim.by_parameter import ByParameter


class LARS(ByParameter):
    """Layer-wise adaptive rate scaling.

    Give biases and norms a group with ``weight_decay=0``; what begins with zeros takes SGD's steps until it has a norm. Large
    batches want a warm-up: ``LinearLR`` over the first steps.

    Args:
        params: or groups of them.
        lr: the global rate.
        momentum: decay of past steps; their rates count as they were.
        weight_decay: added to the gradient.
        trust: how much of a parameter's norm one step may change.
    """

    def __init__(
        self, params: Any, lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 0.0, trust: float = 1e-3
    ) -> None:
        """Raise ValueError for a setting out of range."""
        if not (lr >= 0 and 0 <= momentum < 1 and weight_decay >= 0 and trust > 0):
            raise ValueError(
                f"LARS: lr={lr}, momentum={momentum}, weight_decay={weight_decay}, trust={trust}: lr and weight_decay must be at "
                "least 0, momentum from 0 to below 1, trust more than 0"
            )
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state, decay = self.state[param], group["weight_decay"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        w_norm, g_norm = (float(torch.linalg.vector_norm(x)) for x in (param, param.grad))
        ratio = group["trust"] * w_norm / (g_norm + decay * w_norm) if w_norm and g_norm else 1.0
        step = param.grad.add(param, alpha=decay).mul_(group["lr"] * ratio)
        param.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(step))
