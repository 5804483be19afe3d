"""LAMB: AdamW whose step is as long as its parameter's norm says, for large batches.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + wd w
    w = w - lr * min(|w|, max_norm) / |r| * r                           norms over a whole parameter

Source: You et al., Large Batch Optimization for Deep Learning, arXiv 1904.00962, algorithm 2, with phi(z) = min(z, max_norm).
Written here because libraries differ from it: bitsandbytes' LAMB8bit is its Adam8bit, and its LAMB bounds the step's norm
instead; pytorch-optimizer's applies the bias corrections after the ratio.
"""

from __future__ import annotations

from typing import Any

import torch

from l2l_core.optim.by_parameter import ByParameter


class LAMB(ByParameter):
    """Layer-wise adaptive moments.

    Give biases and norms a group with ``weight_decay=0``, as with AdamW; what begins with zeros takes AdamW's steps until it
    has a norm. Large batches want a warm-up: ``LinearLR`` over the first steps.

    Args:
        params: or groups of them.
        lr: relative length of a step: a parameter moves by ``lr`` times its norm.
        betas: decay of both moments per step.
        eps: keeps the division finite.
        weight_decay: decoupled; part of what the ratio scales.
        max_norm: the largest norm of a parameter that counts.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_norm: float = 10.0,
    ) -> None:
        """Raise ValueError for a setting out of range."""
        if not (lr >= 0 and eps > 0 and weight_decay >= 0 and max_norm > 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(
                f"LAMB: lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}, max_norm={max_norm}: lr and weight_decay "
                "must be at least 0, eps and max_norm more than 0, betas from 0 to below 1"
            )
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "max_norm": max_norm}
        super().__init__(params, settings)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["step"] += 1
        t = float(state["step"])
        m = state["exp_avg"].lerp_(param.grad, 1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        r = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt_() + group["eps"])
        r.add_(param, alpha=group["weight_decay"])
        w_norm, r_norm = (float(torch.linalg.vector_norm(x)) for x in (param, r))
        ratio = min(w_norm, group["max_norm"]) / r_norm if w_norm and r_norm else 1.0
        param.sub_(r, alpha=group["lr"] * ratio)
