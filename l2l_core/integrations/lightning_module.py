"""A LightningModule in a relay: refusals before training, and the state of the module during a relay step."""

# pyright: reportMissingImports=false
# Lightning is optional
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

from l2l_core.config import RelayConfig

# Options of a relay for manual optimization; otherwise `training_step` computes the loss, and Lightning makes the batches.
MANUAL_OPTIONS = ("loss", "objective", "weight", "loss_over", "split", "join")


@contextmanager
def on_device(module: LightningModule, device: torch.device) -> Iterator[None]:
    """Set ``module.device`` for the length of a block, for tensors that its code makes."""
    before, module._device = module._device, device
    try:
        yield
    finally:
        module._device = before


@contextmanager
def metrics_hidden(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Make metrics in a module plain attributes for the length of a block; yield their modules.

    They are no part of the model that a relay trains, and their hashes follow their state, so a relay could not find them.
    """
    hidden = list(_metrics_in(module))
    holders = {each: dict(each._modules) for each, _, _ in hidden}
    try:
        for each, name, child in hidden:
            del each._modules[name]
            each.__dict__[name] = child
        yield [part for _, _, child in hidden for part in child.modules()]
    finally:
        for each, name, _ in hidden:
            del each.__dict__[name]
        for each, children in holders.items():  # in the order of before
            each._modules.clear()
            each._modules.update(children)


@contextmanager
def metrics_on_device(metrics: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Move the states of metrics to a device for the length of a block, where training steps update them."""
    away: list[Any] = [metric for metric in metrics if isinstance(metric, Metric) and metric.device != device]
    homes = [metric.device for metric in away]
    try:
        for metric in away:
            metric.to(device)
        yield
    finally:
        for metric, home in zip(away, homes, strict=True):
            metric.to(home)


def _metrics_in(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield the outermost children that are metrics, or hold metrics and no parameters, with their parents and names."""
    for name, child in module.named_children():
        is_plain = next(child.parameters(), None) is None
        if isinstance(child, Metric) or (is_plain and any(isinstance(each, Metric) for each in child.modules())):
            yield module, name, child
        else:
            yield from _metrics_in(child)


def reads_gradients(trainer: Trainer) -> bool:
    """Return whether clipping or a hook needs all gradients before the update."""
    module = trainer.lightning_module
    return (
        bool(trainer.gradient_clip_val)
        or is_overridden("configure_gradient_clipping", module)
        or any(is_overridden("on_before_optimizer_step", each) for each in (module, *trainer.callbacks))
    )


def check_module(
    module: LightningModule, optimizers: Sequence[Optimizer], config: RelayConfig, options: dict[str, Any]
) -> None:
    """Raise ValueError for a module that a relay does not train as Lightning does."""
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer) or not optimizers[0].param_groups:
        kinds = ", ".join(type(each).__name__ for each in optimizers)
        raise ValueError(
            f"configure_optimizers returned [{kinds}]: a relay has one optimizer. Return one torch Optimizer over all "
            "parameters, with parameter groups for different settings"
        )
    if not module.automatic_optimization:
        return
    trainer = module.trainer
    for name in ("backward", "on_before_backward", "on_after_backward"):
        for each in (module, *(trainer.callbacks if name != "backward" else ())):
            if is_overridden(name, each):
                raise ValueError(
                    f"{type(each).__name__}.{name} is overridden, and a relay runs backward layer by layer. Read or change "
                    "gradients in on_before_optimizer_step, which gets all of them"
                )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "training_step takes dataloader_iter, from which the strategy cannot keep the batches of an optimizer step: define "
            "training_step(self, batch, batch_idx)"
        )
    if given := [name for name in MANUAL_OPTIONS if name in options]:
        raise ValueError(
            f"RelayStrategy({given[0]}=...) with automatic optimization, where training_step returns the loss of each batch: "
            "leave it out, or set automatic_optimization = False in the module"
        )
    if config.micro_batches != 1:
        raise ValueError(
            f"RelayConfig(micro_batches={config.micro_batches}) with automatic optimization: each batch of the loader is one "
            f"micro-batch. Leave it out, and give Trainer(accumulate_grad_batches={config.micro_batches}) with smaller batches "
            "in the loader"
        )
