"""Notice a model that was changed behind the relay's back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from l2l_core.units import Unit


def check_model(model: nn.Module, units: Sequence[Unit]) -> None:
    """Compare the model with the masters by pointer.

    Raises:
        RuntimeError: parameters were replaced, moved, cast, or hold a gradient; the message has the remedy.
        ValueError: gradient checkpointing is on.
    """
    refuse_checkpointing(model)
    for unit in units:
        for module, name, param in unit.owners:
            if module._parameters.get(name) is not param:
                raise RuntimeError(
                    f"parameter {name!r} in {unit.name} was replaced behind the relay's back (a new module? "
                    "load_state_dict(assign=True)?). Close the relay and make a new one over the changed model"
                )
        for block in unit.blocks:
            for param, view, name in zip(block.params, block.views, block.names, strict=True):
                if param.data_ptr() != view.data_ptr() or param.dtype != view.dtype:
                    raise RuntimeError(
                        f"parameter {name} ({param.dtype} on {param.device}) is no longer the EPS's master: the model was "
                        "moved or cast (model.to, .half, .cuda) while a relay owns it. Close the relay first, and leave "
                        "moving to it: Relay(..., device=...)"
                    )
                if param.grad is not None:
                    raise RuntimeError(
                        f"parameter {name} has a gradient from outside: call model.zero_grad() before a step"
                    )


def refuse_checkpointing(model: nn.Module) -> None:
    """Raise ValueError if the model recomputes layers itself."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            "the model has gradient checkpointing on, and the relay recomputes layers itself: call "
            "model.gradient_checkpointing_disable()"
        )
