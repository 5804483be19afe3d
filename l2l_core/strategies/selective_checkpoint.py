"""PyTorch's selective checkpoint as a strategy: layers are recomputed except for the outputs of chosen operations.

It is not a plan, because PyTorch decides inside a layer which tensors are saved. Every layer runs under
`torch.utils.checkpoint`, the step is plain accumulation, and the same meter counts. Side effects of a layer, such as new
statistics of BatchNorm, occur twice; in plans they occur once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from l2l_core.strategies.strategy_table import StrategyBench, StrategyResult

aten = torch.ops.aten
SAVED_OPERATIONS: tuple[Any, ...] = (  # the most expensive ones per byte
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)


@dataclass(frozen=True)
class SelectiveCheckpoint:
    """Recompute every layer except the outputs of `save`, by `torch.utils.checkpoint` with a policy.

    Args:
        save: operations (`torch.ops.aten.mm.default`); default matrix products, convolutions and attention.

    Example:
        >>> from l2l_core.strategies import Lab, Plain, SelectiveCheckpoint
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model, batch, loss=nn.CrossEntropyLoss())
        >>> lab.compare([SelectiveCheckpoint(save=[torch.ops.aten.addmm.default])]).rows[0].layer_forwards
        12
    """

    save: Sequence[Any] = SAVED_OPERATIONS

    def measure(self, bench: StrategyBench) -> StrategyResult:
        """Run steps on a copy of the model."""
        return bench.run_wrapped("Selective checkpoint", self.wrap)

    def wrap(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """Return a layer's forward under the checkpoint."""
        contexts = partial(create_selective_checkpoint_contexts, self._checkpoint_policy)
        return partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)

    def _checkpoint_policy(self, _: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in self.save else CheckpointPolicy.PREFER_RECOMPUTE


def wrap_layers(
    model: nn.Module, layers: Sequence[str], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> list[str]:
    """Wrap the forwards of layers in place; return a list to which every run adds its layer's name."""
    forwards: list[str] = []

    def count_forward(name: str, layer_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        forwards.append(name)
        return layer_forward(*args, **kwargs)

    for name in layers:
        layer: Any = model.get_submodule(name)
        layer.forward = wrap(partial(count_forward, name, layer.forward))
    return forwards
