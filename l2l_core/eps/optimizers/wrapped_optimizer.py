"""Optimizers inside the wrappers of training frameworks that only forward to them: accelerate's, Lightning's and Fabric's.

A relay updates with the optimizer inside; a scheduler over the wrapper changes the same groups. Classes are found by name, so
no framework is imported.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

_WRAPPERS = {
    ("accelerate", "AcceleratedOptimizer"),
    ("lightning", "LightningOptimizer"),
    ("pytorch_lightning", "LightningOptimizer"),
    ("lightning", "_FabricOptimizer"),
    ("lightning_fabric", "_FabricOptimizer"),
}


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside the wrapper of a framework, or `optimizer` if it is none.

    Raises:
        ValueError: the wrapper changes steps: it scales gradients, skips steps, or calls callbacks.
    """
    while _is_wrapper(optimizer):
        _refuse_changed_steps(optimizer)
        inner = optimizer.optimizer
        if "_opt_called" not in vars(optimizer):
            optimizer._opt_called = True  # else a scheduler over the wrapper warns that it makes no step
        optimizer = inner
    return optimizer


def _is_wrapper(optimizer: Any) -> bool:
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(optimizer).__mro__}
    return isinstance(optimizer, Optimizer) and not kinds.isdisjoint(_WRAPPERS)


def _refuse_changed_steps(wrapper: Any) -> None:
    held = vars(wrapper)
    strategy = held.get("_strategy")
    precision = getattr(strategy, "precision", None) or getattr(strategy, "precision_plugin", None)
    scaler = held.get("scaler") or getattr(precision, "scaler", None)
    steps = getattr(held.get("gradient_state"), "num_steps", 1)
    callbacks = [each for each in held.get("_callbacks") or () if hasattr(each, "on_after_optimizer_step")]
    why, remedy = "", ""
    if scaler is not None:
        why = f"scales gradients by a {type(scaler).__name__} and skips steps (fp16)"
        remedy = "train without mixed precision, or with RelayConfig(precision='bf16') instead of the framework's"
    elif steps > 1:
        why = f"skips steps while gradients accumulate (gradient_accumulation_steps={steps})"
        remedy = (
            f"leave that out, and use RelayConfig(micro_batches={steps}) with {steps} times as many rows in a batch"
        )
    elif callbacks:
        why = f"calls {type(callbacks[0]).__name__}.on_after_optimizer_step, which a relay step does not"
        remedy = "call it after relay.step(batch), and give the optimizer inside (wrapper.optimizer)"
    if why:
        raise ValueError(f"the optimizer is a {type(wrapper).__name__}, which {why}: {remedy}")
