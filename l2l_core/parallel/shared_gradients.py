"""Gradients of parameters that several stages of a pipeline read, such as tied embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from l2l_core.parallel.pipeline_cut import PipelineCut
from l2l_core.pipelines import PipelinePlan

Tensor = torch.Tensor


class SharedGradients:
    """Gradients of parameters that several stages or layers read, apart by stage and micro-batch until the step ends.

    Added as they come they would round differently than in plain training, which adds all gradients of a micro-batch first.

    Args:
        cut: which parameters each stage reads.
        params: of the model, by name.
        plan: which rank has each stage.
        rank: this one.
    """

    def __init__(self, cut: PipelineCut, params: Mapping[str, nn.Parameter], plan: PipelinePlan, rank: int) -> None:
        rank_of = {action.stage: number for number, actions in enumerate(plan.ranks) for action in actions}
        self._rank, self._micro_batches = rank, plan.micro_batches
        self._readers: dict[str, list[int]] = {}  # by name, stages in the order of backward
        self._groups: dict[tuple[int, ...], Any] = {}  # process groups by ranks
        self._rank_of = rank_of
        for name, param in params.items():
            if param.requires_grad and sum(name in names for names in cut.parameters) > 1:
                stages = [stage for stage in reversed(range(cut.stages)) if name in cut.parameters_of(stage)]
                self._readers[name] = stages
                ranks = tuple(sorted({rank_of[stage] for stage in stages}))
                if len(ranks) > 1 and ranks not in self._groups:
                    self._groups[ranks] = dist.new_group(list(ranks))
        self._params = {name: params[name] for name in self._readers}
        self._kept: dict[tuple[str, int, int], Tensor] = {}

    def kept(self) -> list[Tensor]:
        """Return the gradients that are set aside."""
        return list(self._kept.values())

    def set_aside(self, stage: int, k: int) -> None:
        """Take the gradients that a stage's backward has left."""
        for name, param in self._params.items():
            if param.grad is not None:
                self._kept[name, stage, k], param.grad = param.grad, None

    def exchange(self) -> int:
        """Send gradients to the other ranks that read a parameter, and add all of them; return the bytes sent."""
        sent = 0
        for name, stages in self._readers.items():
            param = self._params[name]
            ranks = tuple(sorted({self._rank_of[stage] for stage in stages}))
            if self._rank not in ranks:
                continue
            parts = {}
            for stage in stages:
                mine = [self._kept.pop((name, stage, k), None) for k in range(self._micro_batches)]
                part = torch.stack([torch.zeros_like(param) if grad is None else grad for grad in mine])
                if len(ranks) > 1:
                    dist.broadcast(part, self._rank_of[stage], group=self._groups[ranks])
                    sent += part.nbytes * (len(ranks) - 1) * (self._rank_of[stage] == self._rank)
                parts[stage] = part
            for k in range(self._micro_batches):
                total = parts[stages[0]][k].clone()
                for stage in stages[1:]:
                    total += parts[stage][k]
                param.grad = total if param.grad is None else param.grad.add_(total)
        return sent
