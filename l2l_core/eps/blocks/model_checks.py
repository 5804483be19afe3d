"""Refusals of models that a relay cannot train, and of changes made to a model behind its back."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from l2l_core._torch import caches_parametrizations, data_ptr
from l2l_core.eps.blocks.units import SHELL, Block, Unit
from l2l_core.eps.blocks.used_gradients import UsedGradient
from l2l_core.model import module_name, refuse_compiled_hooks, refuse_compiled_whole

_FILE_NAME = re.compile(r"[^./\\\0][^/\\\0]*")
_RESERVED_KEYS = re.compile(r"shell|relay|history|(parked|values|branch)-.*")  # other files of a save
_SAME_OPTIMIZER = (
    "the same optimizer can be used again, with the new parameters in its groups and without those that the model no longer "
    "has"
)
_ALL_GRADIENTS = (
    "To read or change gradients, use optimizer.register_step_pre_hook with RelayConfig(update='deferred'), "
    "where param.grad has all of them"
)

Stamp = tuple[int, int]  # of a parameter: changes when it is written to or gets other data


def check_model(model: nn.Module, units: Sequence[Unit]) -> None:
    """Raise if the model no longer matches its masters, or a relay cannot run it; remove used gradients.

    Raises:
        RuntimeError: modules or parameters were added, removed, replaced, moved or cast, or a parameter has a gradient.
        ValueError: gradient checkpointing is on, layers are TorchScript or compiled together with the shell, or parametrized
            weights are cached.
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
                    f"load_state_dict(assign=True)?). Close the relay and make a new one over the changed model; "
                    f"{_SAME_OPTIMIZER}"
                )
        for block in unit.blocks:
            _refuse_thawed(block)
            check_values_in_place(block)
            for param, name in zip(block.params, block.names, strict=True):
                if isinstance(param.grad, UsedGradient):
                    param.grad = None
                elif param.grad is not None:
                    raise RuntimeError(
                        f"parameter {name} has a gradient from outside: call model.zero_grad(set_to_none=True) before a step; "
                        "a penalty that was back-propagated beside the step belongs into the loss: "
                        "Relay(..., objective=lambda model, batch: loss + penalty, config=RelayConfig(schedule='depth_first'))"
                    )


def check_values_in_place(block: Block) -> None:
    """Raise RuntimeError if a parameter's values are no longer those of the block."""
    _refuse_shared_memory(block)
    for param, home, name in zip(block.params, block.host_views, block.names, strict=True):
        if param.data_ptr() != home.data_ptr() or param.dtype != home.dtype:
            raise RuntimeError(
                f"parameter {name} ({param.dtype} of {tuple(param.shape)} on {param.device}) is no longer the EPS's "
                "master: while a relay owns it, the model was moved or cast (model.to, .half, .cuda), resized "
                "(resize_token_embeddings), or got other values (.data = ...). Write values in place (param.data.copy_(new)); "
                "or close the relay, which leaves those, and make a new one over the model as it is; leave moving to it: "
                "Relay(..., device=...)"
            )


_SHARED_MEMORY = (
    "Share a copy, and write the weights into it after steps: shared = copy.deepcopy(model).share_memory(), then "
    "shared.load_state_dict(model.state_dict())"
)


def _refuse_shared_memory(block: Block) -> None:
    """Raise RuntimeError if a parameter's memory was exchanged in place, with all its views but the master."""
    if block.local_layout is not None or block.offloaded:
        return
    start, itemsize = block.master.data_ptr(), block.master.element_size()
    for param, view, piece, name in zip(block.params, block.views, block.layout.pieces, block.names, strict=True):
        if param.numel() and view.data_ptr() != start + piece.offset * itemsize:
            raise RuntimeError(
                f"parameter {name} was moved into shared memory (model.share_memory()) while a relay owns it, so that updates "
                f"would not reach it. Close the relay, and make a new one. {_SHARED_MEMORY}"
            )


def warn_of_shared_memory(model: nn.Module) -> None:
    """Warn that a relay takes weights out of memory that is shared with other processes."""
    on_host = (
        (name, param) for name, param in model.named_parameters() if not is_lazy(param) and param.device.type == "cpu"
    )
    # A mapped file is shared, too, and has a name
    shared = (name for name, param in on_host if param.is_shared() and param.untyped_storage().filename is None)
    name = next(shared, None)
    if name is not None:
        warnings.warn(
            f"parameter {name} is in shared memory (model.share_memory(), or another process made it), and a relay keeps "
            f"the weights elsewhere: other processes see no updates. {_SHARED_MEMORY}",
            stacklevel=4,
        )


def _refuse_thawed(block: Block) -> None:
    """Raise ValueError if a parameter that travels as bytes is to be trained now."""
    for param, name in zip(block.params, block.names, strict=True):
        if block.in_bytes and param.requires_grad:
            raise ValueError(thawed_message(name, param))


def thawed_message(name: str, param: torch.Tensor) -> str:
    """Return the message for a parameter that was frozen when the relay took it over, and is to be trained."""
    return (
        f"parameter {name} ({param.dtype}) was not trained when the relay was made, so it keeps its dtype and has neither a "
        "gradient nor a master: leave it frozen (requires_grad_(False)). To train it, close the relay, make it float32 "
        "(p.data = p.data.float()), and make a new relay"
    )


def check_no_stray_grads(block: Block, indices: Iterable[int]) -> None:
    """Raise RuntimeError if one of a block's parameters has a gradient that no unit's backward has made."""
    for i in indices:
        if block.params[i].grad is not None:
            raise RuntimeError(stray_grad_message(block.names[i]))


def stray_grad_message(name: str) -> str:
    """Return the error for a gradient that reaches a parameter from outside of its layer."""
    return (
        f"parameter {name} gets a gradient from code that is not in its layer (a closure, an attribute, another layer): it would "
        "be lost. Pass it as an argument of the layer that uses it"
    )


def check_structure(model: nn.Module, units: Sequence[Unit]) -> None:
    """Raise RuntimeError if layers were moved, or if the model has parameters that the relay does not train.

    Without it, a module added by hand would run but never be trained.
    """
    modules, held = list(model.modules()), {param for unit in units for _, _, param in unit.owners}
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
                    f"parameter {where} was added to the model behind the relay's back (a head? an adapter?), so it would not be "
                    f"trained. Close the relay, change the model, and make a new relay over it; {_SAME_OPTIMIZER}"
                )


def check_step(model: nn.Module, shell: Sequence[nn.Module], units: Sequence[Unit]) -> None:
    """Raise before a training step for errors that would otherwise appear in the middle of it, or never.

    Raises:
        ValueError: hooks that run during backward, sparse gradients, or modules that take another code path in a relay.
    """
    for unit in units:
        if unit.key != SHELL:
            refuse_compiled_hooks(unit.module, unit.name)
        for block in unit.blocks:
            for param, name in zip(block.params, block.names, strict=True):
                if getattr(param, "_post_accumulate_grad_hooks", None):
                    raise ValueError(
                        f"parameter {name} has a post-accumulate-grad hook (an update in backward?): in a relay "
                        "the EPS accumulates and updates. Remove the hook; the relay updates each layer as its gradient "
                        f"arrives. {_ALL_GRADIENTS}"
                    )
                if block.shared and param._backward_hooks:
                    raise ValueError(gradient_hook_message(name))
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"a {type(module).__name__} has sparse gradients, and the EPS keeps dense ones: make it with sparse=False"
            )
    fast = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
    for module in shell if torch.backends.mha.get_fastpath_enabled() else ():
        # PyTorch's own conditions; the function mode active in shell code disables that path
        if isinstance(module, fast) and not module.training and not any(p.requires_grad for p in module.parameters()):
            raise ValueError(
                f"a frozen {type(module).__name__} in evaluation mode outside of the layers takes PyTorch's fast path in plain "
                "training, but not in a relay, where it would give other bits. Call "
                "torch.backends.mha.set_fastpath_enabled(False) for both, or name it among layers="
            )


def gradient_hook_message(name: str) -> str:
    """Return the message for a gradient hook on a shared parameter."""
    return (
        f"parameter {name} has a gradient hook and is used in several places: a relay adds their gradients one by one, so the "
        "hook would see each alone. Remove the hook, and clip or scale between backward and update (max_grad_norm), or untie "
        f"it. {_ALL_GRADIENTS}"
    )


def check_keys(keys: Iterable[object]) -> list[str]:
    """Return the caller's layer keys as a list; they also name files of a save.

    Raises:
        ValueError: a key cannot be a file name or is reserved.
    """
    checked = []
    for key in keys:
        if not isinstance(key, str) or not _FILE_NAME.fullmatch(key) or _RESERVED_KEYS.fullmatch(key):
            raise ValueError(
                f"layers has the key {key!r}: a key names a file too, so it must be a string without slashes that does not begin "
                "with a dot; 'shell', 'relay', 'history' and keys that begin with 'parked-', 'values-' or 'branch-' are taken"
            )
        checked.append(key)
    return checked


def refuse_scripted(model: nn.Module) -> None:
    """Raise ValueError if a part of the model is TorchScript, whose weights cannot be exchanged."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            name = module_name(model, module)
            traced = isinstance(module, torch.jit.TracedModule)
            how = "traced (torch.jit.trace)" if traced else "scripted (torch.jit.script)"
            which = f"module {name!r}" if name else f"this {module.original_name}"
            raise ValueError(
                f"{which} is {how}: the relay stops at layers and exchanges their weights, which TorchScript does not allow. "
                "Give it the original module, and script or trace that after training; for speed use torch.compile on layers"
            )


def refuse_uninitialized(model: nn.Module) -> None:
    """Raise ValueError if a lazy module has not run yet, so that parameters or buffers have no shape."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name} is not initialized, as it belongs to a lazy module that has not run yet: run one forward on a batch "
                "first (with torch.no_grad(): model(x)), then make the optimizer and the relay"
            )


def refuse_cached(model: nn.Module) -> None:
    """Raise ValueError inside ``parametrize.cached()`` if the model has parametrized weights."""
    if caches_parametrizations() and any(isinstance(m, parametrize.ParametrizationList) for m in model.modules()):
        raise ValueError(
            "the model has parametrized weights and runs in torch.nn.utils.parametrize.cached(), which keeps each weight after "
            "its first use: micro-batches take turns, and a recomputed layer needs its weight with a new graph. Do not use "
            "cached() around the relay or in the model's forward; within one layer's forward it may stay"
        )


def refuse_wrapped(model: nn.Module) -> None:
    """Raise ValueError if wrappers by PyTorch, Fabric or accelerate hold the model, or a part of it."""
    for name, module in model.named_modules():
        _refuse_prepared(name, module)
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if found := kinds & {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}:
            instead = "give the module inside (model.module)" if found & _WITH_MODULE else "do not shard it"
            raise ValueError(
                f"the model{f' ({name})' if name else ''} is in {min(found)}, which synchronises gradients in backward, and a "
                f"relay runs it layer by layer: {instead}. Several processes train one model by Relay(..., workers='auto')"
            )


def _refuse_prepared(name: str, module: nn.Module) -> None:
    """Raise ValueError for a model that Fabric or accelerate runs with its precision."""
    where, instead = f"the model{f' ({name})' if name else ''}", "with RelayConfig(precision='bf16') for bfloat16"
    if any(kind.__name__ == "_FabricModule" for kind in type(module).__mro__):
        raise ValueError(
            f"{where} is a _FabricModule of fabric.setup, which casts inputs and outputs around the whole forward: give the "
            f"module inside (model.module), {instead}"
        )
    if "_original_forward" in vars(module):
        raise ValueError(
            f"{where} was prepared by accelerate with mixed precision, which runs the whole forward under autocast: give "
            f"accelerator.unwrap_model(model, keep_fp32_wrapper=False), or do not prepare it, {instead}"
        )


_WITH_MODULE = {"DistributedDataParallel", "DataParallel"}


def refuse_checkpointing(model: nn.Module) -> None:
    """Raise ValueError if the model uses gradient checkpointing."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            "the model has gradient checkpointing on, and the relay recomputes layers itself: call "
            "model.gradient_checkpointing_disable()"
        )


def stamps_of(params: Iterable[torch.Tensor]) -> list[Stamp]:
    """Return stamps by which `check_stamps` detects changed weights."""
    return [(param._version, data_ptr(param)) for param in params]


def check_stamps(unit: Unit, stamps: Sequence[Stamp], who: str) -> None:
    """Raise RuntimeError if `who` changed a weight of a unit in its forward; weights on the device are copies."""
    now = stamps_of(unit.params)
    if now != stamps:
        changed = next(p for p, a, b in zip(unit.params, stamps, now, strict=True) if a != b)
        raise RuntimeError(weights_changed_message(who, changed, [unit]))


def weights_changed_message(who: str, weight: torch.Tensor, units: Iterable[Unit]) -> str:
    """Return the message for a weight of `units` that changed in a forward, or whose view did."""
    found = [each for unit in units for each in _named_owners(unit) if _is_whole(each[2], weight)]
    name, module = found[0][:2] if found else ("one", None)
    begin = f"{who} changes a weight, {name} of shape {tuple(weight.shape)}, in its forward: "
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        path = name.rpartition(".")[0]
        return (
            f"{begin}{type(module).__name__}(max_norm={module.max_norm}) rescales rows before it reads them, and what is on the "
            f"device is a copy. Set {path}.max_norm = None, and rescale them before each step, as its forward would: "
            f"torch.embedding_renorm_({path}.weight.detach(), tokens, {module.max_norm}, {module.norm_type}) with all tokens of "
            "the batch"
        )
    return (
        f"{begin}what is on the device is a copy, and the change would be lost. Change weights between steps, under "
        "torch.no_grad(), or keep what changes in a buffer"
    )


def _named_owners(unit: Unit) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield the parameters of a unit with their names and the modules that hold them."""
    names = {param: name for block in unit.blocks for param, name in zip(block.params, block.names, strict=True)}
    for module, _, param in unit.owners:
        if param in names:
            yield names[param], module, param


def _is_whole(param: nn.Parameter, tensor: torch.Tensor) -> bool:
    return param is tensor or (param.shape == tensor.shape and param.data_ptr() == tensor.data_ptr())
