"""Refuse what a relay cannot work with: keys that cannot name a layer, a model that was changed behind its back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.utils import parametrize

from l2l_core._torch import caches_parametrizations
from l2l_core.eps.blocks.units import SHELL, Unit
from l2l_core.model import module_name, modules_of, refuse_compiled_hooks, refuse_compiled_whole

_FILE_NAME = re.compile(r"[^./\\\0][^/\\\0]*")
_RESERVED_KEYS = re.compile(r"shell|relay|history|(parked|values|branch)-.*")  # files of a save that are no layer's


def check_model(model: nn.Module, units: Sequence[Unit]) -> None:
    """Compare the model with the masters by pointer, and refuse what a relay cannot run at all.

    Raises:
        RuntimeError: modules or parameters came, went, or were replaced, moved or cast, or one holds a gradient; the message
            has the remedy.
        ValueError: gradient checkpointing is on, layers were compiled together with what is around them or are TorchScript, or
            parametrized weights are cached.
    """
    refuse_checkpointing(model)
    refuse_scripted(model)
    refuse_cached(model)
    refuse_compiled_whole(model, {unit.name: unit.module for unit in units if unit.key != SHELL})
    check_structure(model, units)
    for unit in units:
        for module, name, param in unit.owners:
            if module._parameters.get(name) is not param:
                raise RuntimeError(
                    f"parameter {name!r} in {unit.name} was replaced behind the relay's back (a new module? "
                    "load_state_dict(assign=True)?). Close the relay and make a new one over the changed model"
                )
        for block in unit.blocks:
            for param, home, name in zip(block.params, block.host_views, block.names, strict=True):
                if param.data_ptr() != home.data_ptr() or param.dtype != home.dtype:
                    raise RuntimeError(
                        f"parameter {name} ({param.dtype} on {param.device}) is no longer the EPS's master: the model was "
                        "moved or cast (model.to, .half, .cuda) while a relay owns it, or got other values (.data = ...). "
                        "Close the relay first, and leave moving to it: Relay(..., device=...)"
                    )
                if param.grad is not None:
                    raise RuntimeError(
                        f"parameter {name} has a gradient from outside: call model.zero_grad() before a step"
                    )


def check_structure(model: nn.Module, units: Sequence[Unit]) -> None:
    """Refuse a model whose layers are not where they were, or that has parameters which the relay does not hold.

    Without it a module that was put into the model by hand would run, and never learn.

    Raises:
        RuntimeError: names the first; the message has the remedy.
    """
    modules, held = modules_of(model), {param for unit in units for _, _, param in unit.owners}
    gone = {unit.module: unit.name for unit in units if unit.key != SHELL}
    for module in modules:
        gone.pop(module, None)
    if gone:
        raise RuntimeError(
            f"layer {next(iter(gone.values()))} was taken out of the model, or exchanged, behind the relay's back. Let the relay "
            "do it (relay.apply with Drop, Replace, ...), or close it and make a new one over the changed model"
        )
    for module in modules:
        for name, param in module._parameters.items():
            if param is not None and param not in held:
                where = f"{module_name(model, module)}.{name}".lstrip(".")
                raise RuntimeError(
                    f"parameter {where} came into the model behind the relay's back (a head? an adapter?), so it would not be "
                    "trained. Close the relay, change the model, and make a new relay over it; the same optimizer can be given "
                    "again, with the new parameters in its groups"
                )


def check_step(model: nn.Module, shell: Sequence[nn.Module], units: Sequence[Unit]) -> None:
    """Refuse before a training step what could only be refused in the middle of it, or not at all.

    Raises:
        ValueError: hooks that run in the middle of backward, sparse gradients, code that looks for function modes.
    """
    for unit in units:
        if unit.key != SHELL:
            refuse_compiled_hooks(unit.module, unit.name)
        for block in unit.blocks:
            for param, name in zip(block.params, block.names, strict=True):
                if getattr(param, "_post_accumulate_grad_hooks", None):
                    raise ValueError(
                        f"parameter {name} has a hook for when its gradient is accumulated (an update in backward?): in a relay "
                        "the EPS accumulates and updates. Remove the hook; the relay updates each layer as its gradient arrives"
                    )
                if block.shared and param._backward_hooks:
                    raise ValueError(gradient_hook_message(name))
    for module in modules_of(model):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"a {type(module).__name__} gives sparse gradients, and the EPS keeps dense ones: sparse=False"
            )
    fast = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
    for module in shell if torch.backends.mha.get_fastpath_enabled() else ():
        # PyTorch's own conditions; the function mode that is in force in shell code keeps it off that path
        if isinstance(module, fast) and not module.training and not any(p.requires_grad for p in module.parameters()):
            raise ValueError(
                f"a frozen {type(module).__name__} in evaluation mode outside of the layers takes PyTorch's fast path in plain "
                "training, and another one with other bits here. Call torch.backends.mha.set_fastpath_enabled(False) for both, "
                "or name it among layers="
            )


def gradient_hook_message(name: str) -> str:
    """Word the message about a parameter's hook that would see parts of the gradient one by one."""
    return (
        f"parameter {name} has a gradient hook and is used in several places: a relay adds their gradients one by one, so the "
        "hook would see each alone. Remove the hook, and clip or scale between backward and update (max_grad_norm), or untie it"
    )


def check_keys(keys: Iterable[object]) -> list[str]:
    """Check the keys that a caller gives to layers; they name the layers' files in a save.

    Raises:
        ValueError: one that cannot.
    """
    checked = []
    for key in keys:
        if not isinstance(key, str) or not _FILE_NAME.fullmatch(key) or _RESERVED_KEYS.fullmatch(key):
            raise ValueError(
                f"layers has the key {key!r}: a key names a file too, so it is a string without slashes that does not begin "
                "with a dot; 'shell', 'relay', 'history' and what begins with 'parked-', 'values-' or 'branch-' are taken"
            )
        checked.append(key)
    return checked


def refuse_scripted(model: nn.Module) -> None:
    """Raise ValueError if a part of the model is TorchScript: its forward and its weights are not Python's to exchange."""
    for module in modules_of(model):
        if isinstance(module, torch.jit.ScriptModule):
            name = module_name(model, module)
            how = (
                "traced (torch.jit.trace)"
                if isinstance(module, torch.jit.TracedModule)
                else "scripted (torch.jit.script)"
            )
            which = f"module {name!r}" if name else f"this {module.original_name}"
            raise ValueError(
                f"{which} is {how}: the relay stops at layers and exchanges their weights, which TorchScript does not allow. "
                "Give it the module as it was before, and script or trace it when it is trained; for speed use torch.compile on "
                "layers"
            )


def refuse_cached(model: nn.Module) -> None:
    """Raise ValueError in the middle of ``parametrize.cached()``, if the model has parametrized weights."""
    if caches_parametrizations() and any(isinstance(m, parametrize.ParametrizationList) for m in modules_of(model)):
        raise ValueError(
            "the model has parametrized weights and runs in torch.nn.utils.parametrize.cached(), which keeps each of them from "
            "its first use on: micro-batches take turns, and a layer that is recomputed needs its weight with a graph of its "
            "own. Leave that block out around the relay and in the model's forward; within one layer's forward it may stay"
        )


def refuse_checkpointing(model: nn.Module) -> None:
    """Raise ValueError if the model recomputes layers itself."""
    if any(getattr(module, "gradient_checkpointing", False) for module in modules_of(model)):
        raise ValueError(
            "the model has gradient checkpointing on, and the relay recomputes layers itself: call "
            "model.gradient_checkpointing_disable()"
        )
