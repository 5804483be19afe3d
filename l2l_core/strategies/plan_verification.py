"""A plan against plain training: loss, gradients, buffers, random state and the updated weights, bit by bit.

The judge is `model/reference.py`, written with torch alone, on a copy of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from l2l_core.batches import Objective
from l2l_core.model import RandomState, accumulate
from l2l_core.strategies.plan_runner import PlanInputs, PlanResult, PlanRunner
from l2l_core.strategies.staged_forward import Tensor
from l2l_core.surgery import preserve_random_state


@dataclass(frozen=True)
class PlanVerification:
    """How a step by a plan and one in core compare.

    Attributes:
        loss, reference_loss: of the step.
        different: names of gradients and buffers whose bits differ, "random state" among them.
        max_abs_diff: the largest difference of any gradient or buffer.
    """

    loss: float
    reference_loss: float
    differing: tuple[str, ...]
    max_abs_diff: float

    @property
    def equal(self) -> bool:
        """Whether loss, gradients, buffers and random state have the same bits."""
        return self.loss == self.reference_loss and not self.differing

    def __str__(self) -> str:
        if self.equal:
            return f"the plan and in-core training are bitwise equal; loss {self.loss:.8g}"
        return f"different by up to {self.max_abs_diff:.3g} in {', '.join(self.differing[:6]) or 'the loss'}"


def verify_plan(
    runner: PlanRunner, result: PlanResult, reference: nn.Module, inputs: PlanInputs, objective: Objective
) -> PlanVerification:
    """Run the same micro-batches in core on `reference`, and compare."""
    with preserve_random_state(), torch.enable_grad(), runner.without_caches(reference):
        losses = accumulate(reference, inputs.micro_batches, objective, inputs.divisors, inputs.seeds)
        after = RandomState.capture()
    ours, theirs = _named_tensors(runner.model), _named_tensors(reference)
    differing = {
        name: _max_abs_diff(ours.get(name), theirs.get(name))
        for name in {**theirs, **ours}
        if not _equal_values(ours.get(name), theirs.get(name))
    }
    assert result.random_state is not None
    if not torch.equal(result.random_state.torch_cpu, after.torch_cpu) or result.random_state.python != after.python:
        differing["random state"] = float("inf")
    return PlanVerification(
        float(sum(result.losses)), float(sum(losses)), tuple(differing), max(differing.values(), default=0.0)
    )


def _named_tensors(model: nn.Module) -> Mapping[str, Tensor]:
    grads = {f"gradient of {name}": param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {**grads, **dict(model.named_buffers())}


def _equal_values(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def _max_abs_diff(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return float("inf")
    return float((one.double() - other.double()).abs().max())
