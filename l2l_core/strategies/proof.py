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
from l2l_core.strategies.course import Course, Ran, Work
from l2l_core.strategies.forward import Tensor
from l2l_core.surgery import same_random_numbers


@dataclass(frozen=True)
class Proof:
    """How a step by a plan and one in core compare.

    Attributes:
        loss, reference_loss: of the step.
        different: names of gradients and buffers whose bits differ, "random state" among them.
        max_abs_diff: the largest difference of any gradient or buffer.
    """

    loss: float
    reference_loss: float
    different: tuple[str, ...]
    max_abs_diff: float

    @property
    def equal(self) -> bool:
        """Whether loss, gradients, buffers and random state have the same bits."""
        return self.loss == self.reference_loss and not self.different

    def __str__(self) -> str:
        if self.equal:
            return f"the plan and in-core training are bitwise equal; loss {self.loss:.8g}"
        return f"different by up to {self.max_abs_diff:.3g} in {', '.join(self.different[:6]) or 'the loss'}"


def prove(course: Course, ran: Ran, reference: nn.Module, work: Work, objective: Objective) -> Proof:
    """Run the same micro-batches in core on `reference`, and compare."""
    with same_random_numbers(), torch.enable_grad(), course.caches_off(reference):
        losses = accumulate(reference, work.micro_batches, objective, work.divisors, work.seeds)
        after = RandomState.take()
    ours, theirs = _results(course.model), _results(reference)
    differing = {
        name: _difference(ours.get(name), theirs.get(name))
        for name in {**theirs, **ours}
        if not _is_same(ours.get(name), theirs.get(name))
    }
    assert ran.random is not None
    if not torch.equal(ran.random.torch_cpu, after.torch_cpu) or ran.random.python != after.python:
        differing["random state"] = float("inf")
    return Proof(float(sum(ran.losses)), float(sum(losses)), tuple(differing), max(differing.values(), default=0.0))


def _results(model: nn.Module) -> Mapping[str, Tensor]:
    grads = {f"gradient of {name}": param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {**grads, **dict(model.named_buffers())}


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def _difference(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return float("inf")
    return float((one.double() - other.double()).abs().max())
