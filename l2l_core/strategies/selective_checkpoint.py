"""Torch's selective checkpoint as one more way: layers are recomputed but for the outputs of chosen operations.

It is no plan: PyTorch decides inside of a layer what is saved. Every layer runs under `torch.utils.checkpoint`, the step is plain
accumulation, and the same meter counts. What a layer does besides computing, such as moving BatchNorm's statistics, it does
twice; plans do it once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from l2l_core.batches import Objective
from l2l_core.model import accumulate
from l2l_core.strategies.plan_runner import PlanInputs
from l2l_core.strategies.strategy_table import StrategyBench, StrategyResult

aten = torch.ops.aten
SAVED_OPERATIONS: tuple[Any, ...] = (  # what costs most per byte
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)
TIMED_STEPS = 3  # steps, whose median is told


@dataclass(frozen=True)
class SelectiveCheckpoint:
    """Recompute every layer, but keep what `save` makes: `torch.utils.checkpoint` with a policy.

    Args:
        save: operations of torch (`torch.ops.aten.mm.default`); default products of matrices, convolutions, attention.
    """

    save: Sequence[Any] = SAVED_OPERATIONS

    def measure(self, bench: StrategyBench) -> StrategyResult:
        """Make steps on a copy, and say what one needed."""
        return bench.run_wrapped("Selective checkpoint", self.wrap)

    def wrap(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """Return a layer's forward under the checkpoint."""
        contexts = partial(create_selective_checkpoint_contexts, self._checkpoint_policy)
        return partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)

    def _checkpoint_policy(self, _: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in self.save else CheckpointPolicy.PREFER_RECOMPUTE


class WrappedModel:
    """A model whose layers run in a wrap, trained by plain accumulation.

    Args:
        model: a copy; it is changed.
        layers: names of what is wrapped.
        wrap: is given a layer's forward.

    Attributes:
        layer_forwards: how often layers have run forward.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[str], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self.model, self.layer_forwards = model, 0
        for name in layers:
            layer = model.get_submodule(name)
            layer.forward = wrap(partial(self._count_forward, layer.forward))  # type: ignore[method-assign]

    def _count_forward(self, layer_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.layer_forwards += 1
        return layer_forward(*args, **kwargs)

    def run(self, inputs: PlanInputs, objective: Objective) -> float:
        """Forward and backward of all micro-batches; returns the median seconds of several such passes."""
        took = []
        for _ in range(TIMED_STEPS):
            self.model.zero_grad(set_to_none=True)
            self.layer_forwards, began_s = 0, time.perf_counter()
            accumulate(self.model, inputs.micro_batches, objective, inputs.divisors, inputs.seeds)
            took.append(time.perf_counter() - began_s)
        return median(took)
