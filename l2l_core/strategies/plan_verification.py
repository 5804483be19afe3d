"""Comparison of a plan with plain training, to the bit: loss, gradients, buffers and random state.

The reference is `model/reference.py`, which uses torch alone, on a copy of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from l2l_core.batches import Objective
from l2l_core.model import KVCaches, RandomState, accumulate, preserve_random_state
from l2l_core.strategies.plan_runner import PlanInputs, PlanResult
from l2l_core.strategies.staged_forward import Tensor


@dataclass(frozen=True)
class PlanVerification:
    """Differences between a step by a plan and a step in core.

    Attributes:
        loss, reference_loss: losses of the two steps.
        differing: names of gradients and buffers whose bits differ, and "random state" if that differs.
        max_abs_diff: largest difference of any gradient or buffer.

    Example:
        >>> from l2l_core.strategies import Full, Lab
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model, batch, loss=nn.CrossEntropyLoss())
        >>> report = lab.verify(lab.plan(Full()))
        >>> report.equal, report.differing
        (True, ())
    """

    loss: float
    reference_loss: float
    differing: tuple[str, ...]
    max_abs_diff: float

    @property
    def equal(self) -> bool:
        """True if loss, gradients, buffers and random state have the same bits."""
        return self.loss == self.reference_loss and not self.differing

    def __str__(self) -> str:
        if self.equal:
            return f"the plan and in-core training are bitwise equal; loss {self.loss:.8g}"
        return f"different by up to {self.max_abs_diff:.3g} in {', '.join(self.differing[:6]) or 'the loss'}"


def verify_plan(
    model: nn.Module, result: PlanResult, reference: nn.Module, inputs: PlanInputs, objective: Objective
) -> PlanVerification:
    """Run the same micro-batches in core on `reference`, and compare it with `model` after a plan."""
    with preserve_random_state(), torch.enable_grad(), KVCaches(reference).disabled():
        losses = accumulate(reference, inputs.micro_batches, objective, inputs.divisors, inputs.seeds)
        after = RandomState.capture()
    ours, theirs = _named_tensors(model), _named_tensors(reference)
    differing = {}
    for name in {**theirs, **ours}:
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None or one.shape != other.shape:
            differing[name] = float("inf")
        elif not equal_or_nan(one, other):
            differing[name] = float((one.double() - other.double()).abs().max())
    assert result.random_state is not None
    if not torch.equal(result.random_state.torch_cpu, after.torch_cpu) or result.random_state.python != after.python:
        differing["random state"] = float("inf")
    return PlanVerification(
        float(sum(result.losses)), float(sum(losses)), tuple(differing), max(differing.values(), default=0.0)
    )


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    grads = {f"gradient of {name}": param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {**grads, **dict(model.named_buffers())}


def equal_or_nan(one: Tensor, other: Tensor) -> bool:
    """Return True if the tensors have one shape, equal values, and NaN in the same places."""
    same_nan = one.shape == other.shape and torch.equal(one.isnan(), other.isnan())
    return same_nan and torch.equal(one.nan_to_num(), other.nan_to_num())
