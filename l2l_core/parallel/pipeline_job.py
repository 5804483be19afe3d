"""A model and one batch in micro-batches, as they are sent to the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from l2l_core._torch import DisableTorchDispatch
from l2l_core.batches import (
    Batch,
    Loss,
    LossNormaliser,
    LossOver,
    ModelCall,
    Objective,
    UserObjective,
    Weight,
    rows_rule,
    shapes_of,
)
from l2l_core.config import RelayConfig
from l2l_core.model import copy_tensors, resolve_layers
from l2l_core.parallel.pipeline_cut import Task
from l2l_core.strategies import measure_losses

LEAST_TORCH = TorchVersion("2.13")  # the first whose pipelines were seen to run


@dataclass(frozen=True)
class PipelineJob:
    """A model and one batch in micro-batches, as they are sent to the ranks.

    Attributes:
        model: trained on copies.
        layers: names of the layers at which stages may begin.
        objective: returns the scalar loss of a micro-batch.
        micro_batches, divisors: of the batch; losses are divided, so that gradients are those of the batch's mean.
        seed: of the random streams, as in a relay.

    Example:
        >>> from l2l_core.parallel import PipelineJob
        >>> job = PipelineJob.of(model, batch, micro_batches=4, loss=nn.CrossEntropyLoss())
        >>> len(job.micro_batches), job.divisors
        (4, [4.0, 4.0, 4.0, 4.0])
    """

    model: nn.Module
    layers: tuple[str, ...]
    objective: Objective
    micro_batches: Sequence[Any]
    divisors: Sequence[float]
    seed: int = 0

    @staticmethod
    def of(
        model: nn.Module,
        batch: Batch,
        micro_batches: int,
        loss: Loss | None = None,
        objective: UserObjective | None = None,
        weight: Weight | None = None,
        loss_over: LossOver | None = None,
        layers: Iterable[nn.Module | str] | None = None,
        seed: int = 0,
    ) -> PipelineJob:
        """Split a batch; the arguments are those of `Relay`, but no ``loss_over="batch"``.

        Raises:
            TypeError, ValueError: the batch or the layers do not fit the model, or micro-batches have different shapes.
            RuntimeError: torch is older than 2.13.
        """
        if TorchVersion(torch.__version__) < LEAST_TORCH:
            raise RuntimeError(
                f"torch {torch.__version__}: its pipelines want a gradient of every message, also of integers such as masks. "
                f"Install torch {LEAST_TORCH} or newer, or train with a Relay or run_parallel"
            )
        if loss_over == "batch":
            raise ValueError(
                'loss_over="batch": the last stage of a pipeline has the outputs of one micro-batch at a time. Use a Relay, or '
                'loss_over="micro-batch" for the mean over micro-batches'
            )
        call = ModelCall(model, loss, objective)
        call.check(batch)
        rows = rows_rule(None)(batch)
        parts = [copy_tensors(each) for each in rows.split(micro_batches)]
        shapes = [shapes_of(each) for each in parts]
        if any(each != shapes[0] for each in shapes):
            raise ValueError(
                f"micro_batches={micro_batches}: their shapes differ ({shapes[0]} and {shapes[-1]}), and the messages of a "
                "pipeline have one shape. Use a number of micro-batches that divides the number of rows"
            )
        normaliser = LossNormaliser(weight, partial(measure_losses, model, call.objective), loss_over=loss_over)
        divisors = normaliser.divisors(rows, parts)
        return PipelineJob(model, tuple(resolve_layers(model, layers)), call.objective, parts, divisors, seed)

    def task(self, model: nn.Module, k: int) -> Task:
        """Return a function that runs the model on a copy of a micro-batch, which no meter counts."""
        with DisableTorchDispatch():
            micro_batch = copy_tensors(self.micro_batches[k])
        return lambda: self.objective(model, micro_batch) / self.divisors[k]

    def seed_of(self, step: int, k: int) -> int:
        """Return the seed of a micro-batch's random stream, as in a relay."""
        return RelayConfig(micro_batches=len(self.micro_batches), seed=self.seed).micro_batch_seed(step, k)
