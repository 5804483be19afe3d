"""Construction of units: a model's parameters move into masters and keep their identity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from l2l_core.devices import return_freed_memory
from l2l_core.eps.blocks.aliases import leaving_storages, refuse_shared_values
from l2l_core.eps.blocks.layout import Layout
from l2l_core.eps.blocks.module_buffers import ModuleBuffers
from l2l_core.eps.blocks.placeholders import is_placeholder
from l2l_core.eps.blocks.units import SHELL, Block, Unit

EmptyFn = Callable[..., torch.Tensor]  # (numel, dtype=...) -> host buffer
QuantisedParts = Mapping[torch.Tensor, Mapping[str, torch.Tensor]]  # of quantised parameters, by name
_PACKS, _PACKED_BEFORE = "support_avx512bf16_for_cpu", "_packed_before_relay"  # attributes of a Linear4bit


def build_units(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    init_master: Callable[[Block], None] | None = None,
    bf16: bool = False,
    keeps_dtypes: bool = True,
) -> tuple[Unit, list[Unit]]:
    """Move the model's parameters into flat masters and return the shell and the layers.

    Parameters keep their identity; their data become views of the masters.

    Args:
        layers: permanent key -> module, in stack order.
        init_master: gives a new block its master; default: in host memory.
        bf16: whether parameters may be bfloat16, because the optimizer rounds weights to it.
        keeps_dtypes: whether frozen parameters may have other dtypes, which they keep.

    Raises:
        ValueError: a parameter is not a dense tensor on the CPU, or is trained and not float32 (or permitted bfloat16).
    """
    init_master = init_master or host_master_init(torch.empty)
    module_names = {module: name for name, module in model.named_modules()}
    shell = shell_modules(model, set(layers.values()))
    members = {SHELL: shell, **{key: list(module.modules()) for key, module in layers.items()}}
    names = {param: name for name, param in model.named_parameters()}
    _check_parameters(names, bf16, keeps_dtypes)
    refuse_shared_values({**names, **{buffer: name for name, buffer in model.named_buffers()}})
    parts = quantised_parts(model.modules())
    users = Counter(param for modules in members.values() for param in _parameters(modules))
    several = [param for param, count in users.items() if count > 1]
    shared = {
        param: _make_block(shared_key(names[param]), [param], names, True, init_master, _is_kept(param, bf16), parts)
        for param in several
    }
    units = []
    for key, modules in members.items():
        module = layers.get(key, model)
        name = module_names[module] if key != SHELL else SHELL
        units.append(_make_unit(key, name, module, modules, names, shared, init_master, bf16, parts))
    return units[0], units[1:]


def build_layer(
    key: str,
    name: str,
    module: nn.Module,
    empty: EmptyFn = torch.empty,
    shared: Mapping[nn.Parameter, Block] = MappingProxyType({}),
    bf16: bool = False,
    keeps_dtypes: bool = True,
) -> Unit:
    """Build the unit of one layer: its parameters move into a flat master, as in `build_units`.

    `name` is the dotted name that it will have in the model; `shared` has the blocks of parameters that other units also use.
    """
    names = {param: f"{name}.{inner}" for inner, param in module.named_parameters()}
    _check_parameters(names, bf16, keeps_dtypes)
    refuse_shared_values({**names, **{buffer: f"{name}.{inner}" for inner, buffer in module.named_buffers()}})
    parts = quantised_parts(module.modules())
    return _make_unit(key, name, module, list(module.modules()), names, shared, host_master_init(empty), bf16, parts)


def make_masters(block: Block) -> list[nn.Parameter]:
    """Return parameters for the optimizer that are views of a block's master, with the attributes of the model's."""
    masters = [nn.Parameter(view, p.requires_grad) for p, view in zip(block.params, block.views, strict=True)]
    for master, param in zip(masters, block.params, strict=True):
        vars(master).update(vars(param))  # such as a learning rate that the optimizer reads from it
    return masters


def shell_modules(model: nn.Module, layers: Set[nn.Module]) -> list[nn.Module]:
    """Return the modules that the model reaches without passing through a layer; a layer may contain some of them too."""
    found: dict[nn.Module, None] = {}
    waiting = [model]  # a recursive local function would be a reference cycle that holds the model
    while waiting:
        module = waiting.pop()
        if module not in found and module not in layers:
            found[module] = None
            waiting += reversed(list(module.children()))
    return list(found)


def shared_key(name: str) -> str:
    """Return the key of a block that several units use, from the parameter's name in the model."""
    return f"shared:{name}"


def _parameters(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return list(dict.fromkeys(p for module in modules for p in module._parameters.values() if p is not None))


def _check_parameters(names: Mapping[nn.Parameter, str], bf16: bool, keeps_dtypes: bool) -> None:
    has_base = any(not param.requires_grad and _is_kept(param, bf16) for param in names)
    for param, name in names.items():
        if param.is_meta:
            raise ValueError(
                f"parameter {name} is on meta, without values: load the weights (model.to_empty(device='cpu') and "
                "load_state_dict, or from_pretrained without device_map), or train from files with shelf=FileShelf(weights=...)"
            )
        if param.device.type != "cpu" or param.layout is not torch.strided:
            raise ValueError(
                f"parameter {name} is on {param.device} ({param.layout}): the masters live in host memory as dense tensors. "
                "Call model.cpu() before the relay takes over; it moves layers to the device itself"
            )
        if hasattr(param, "__tensor_flatten__") or param.is_quantized:
            raise ValueError(
                f"parameter {name} is a {type(param.data).__name__} ({param.dtype}), whose values are in other tensors than its "
                "own: a relay moves parameters as plain memory. Give the layer its parts, integers and scales, as parameters "
                "that are not trained (nn.Parameter(integers, requires_grad=False)), and compute with them in forward"
            )
        if getattr(getattr(param, "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                f"parameter {name} was packed anew by bitsandbytes when the model was evaluated on this CPU (AVX512-BF16): its "
                "scales are rounded, and adapters get no gradient through it, in core neither. Load or quantise the base again, "
                "and evaluate it by the relay (relay.evaluate), which keeps it as it is"
            )
        if not _is_kept(param, bf16):
            continue
        if not param.requires_grad and not keeps_dtypes:
            raise ValueError(
                f"parameter {name} is {param.dtype} and not trained: it would keep its dtype, and on a shelf of several workers, "
                "or one that is filled by weights=, all parameters are float32. Make it a buffer (register_buffer), which every "
                "worker keeps whole and in memory; or leave out weights=, with one worker, to fill the shelf from the model"
            )
        if param.is_complex() and param.requires_grad:
            raise ValueError(
                f"parameter {name} is {param.dtype}, and the masters are real: keep it as pairs, nn.Parameter("
                "torch.view_as_real(weight)), and use torch.view_as_complex(self.weight) in forward"
            )
        if param.requires_grad and has_base:
            raise ValueError(
                f"parameter {name} is {param.dtype} and trained: the masters are float32. Parameters that are not trained keep "
                f"their dtypes, so either freeze it (requires_grad_(False)), or make the trained ones alone float32: for p in "
                "model.parameters(): if p.requires_grad: p.data = p.data.float()"
            )
        if param.requires_grad:
            raise ValueError(
                f"parameter {name} is {param.dtype}: the masters are float32. Call model.float() first; for bfloat16 "
                "compute use RelayConfig(precision='bf16'). For masters in bfloat16 the optimizer must round at "
                "random, as in_bf16(torch.optim.AdamW, weights=True) does. If it is not trained, freeze it first "
                "(requires_grad_(False)): then it keeps its dtype"
            )


def _is_kept(param: nn.Parameter, bf16: bool) -> bool:
    """Return whether no master has the dtype of a parameter, which keeps it if it is not trained."""
    return _is_quantised(param) or (param.dtype != torch.float32 and not (bf16 and param.dtype == torch.bfloat16))


def host_master_init(empty: EmptyFn) -> Callable[[Block], None]:
    """Return a function that copies the weights of a block from its parameters into a new host master."""

    def init_master(block: Block) -> None:
        for param, name in zip(block.params, block.names, strict=True):
            if is_placeholder(param):
                raise ValueError(
                    f"parameter {name} has no values here: the model's weights are in the files of a shelf. Resume from them "
                    "with FileShelf(..., resume=True), or load others: model.load_state_dict(weights, assign=True)"
                )
        dtype = torch.uint8 if block.in_bytes else block.params[0].dtype
        master = empty(block.layout.numel, dtype=dtype).zero_()
        for param, view in zip(block.params, block.layout.views(master), strict=True):
            view.copy_(param.detach())
        block.set_master(master, block.params)

    return init_master


def _make_unit(
    key: str,
    name: str,
    module: nn.Module,
    members: Sequence[nn.Module],
    names: Mapping[nn.Parameter, str],
    shared: Mapping[nn.Parameter, Block],
    init_master: Callable[[Block], None],
    bf16: bool,
    parts: QuantisedParts,
) -> Unit:
    params = _parameters(members)
    own = [param for param in params if param not in shared]
    kept = _kept_params(own, bf16)
    rest = [param for param in own if param not in {*kept}]
    # First in a slot, so that no other block changes its alignment: its size is a multiple of it in any dtype of the slot
    blocks = [_make_block(f"frozen:{key}", kept, names, False, init_master, True, parts)] if kept else []
    blocks += [_make_block(key, rest, names, False, init_master)] if rest else []
    blocks += [shared[param] for param in params if param in shared]
    owners = [(m, attribute, p) for m in members for attribute, p in m._parameters.items() if p is not None]
    return Unit(key, name, module, blocks, ModuleBuffers(members), owners)


def _kept_params(params: Sequence[nn.Parameter], bf16: bool) -> list[nn.Parameter]:
    """Return the parameters that are not trained and have another dtype than the unit's master."""
    usual = [param for param in params if not _is_kept(param, bf16)]
    dtypes = {param.dtype for param in usual if param.requires_grad} or {param.dtype for param in usual}
    if torch.float32 in dtypes:
        dtypes = {torch.float32}
    frozen = (param for param in params if not param.requires_grad)
    return [param for param in frozen if param.dtype not in dtypes or _is_quantised(param)]


def _make_block(
    key: str,
    params: list[nn.Parameter],
    names: Mapping[nn.Parameter, str],
    shared: bool,
    init_master: Callable[[Block], None],
    in_bytes: bool = False,
    parts: QuantisedParts = MappingProxyType({}),
) -> Block:
    kinds = {param.dtype: names[param] for param in params}
    if len(kinds) > 1 and not in_bytes:
        raise ValueError(
            f"{key} has parameters of {' and '.join(map(str, kinds))} ({', '.join(kinds.values())}), and its master is one "
            "buffer: make all that is trained in it bfloat16 or float32 (p.data = p.data.float())"
        )
    tensors: dict[Any, str] = {param: names[param] for param in params}  # parts are tensors that are no parameters
    for param in params if in_bytes else ():
        tensors |= {tensor: f"{names[param]}.{name}" for name, tensor in parts.get(param, {}).items()}
    layout = Layout.of_bytes([*tensors]) if in_bytes else Layout.of(params)
    block = Block(key, [*tensors], [*tensors.values()], layout, torch.empty(0), shared)
    with leaving_storages(tensors):
        init_master(block)
    if in_bytes:
        return_freed_memory()  # of the codes before the next layer's are copied
    return block


def quantised_parts(modules: Iterable[nn.Module]) -> QuantisedParts:
    """Return the tensors that quantised parameters need beside their own memory; they are loaded with them.

    Of bitsandbytes: the `quant_state` of a `Linear4bit`'s parameter, and the `state` with which a `Linear8bitLt` computes. These
    are ordinary tensors, so their data can be exchanged while all objects stay. State that a first forward would move is moved
    now.
    """
    found: dict[torch.Tensor, Mapping[str, torch.Tensor]] = {}
    for module in modules:
        for param in module._parameters.values():
            if param is not None and not param.requires_grad and (parts := dict(_parts_of(module, param))):
                found[param] = parts
    return found


def disable_packing(modules: Iterable[nn.Module]) -> None:
    """Keep bitsandbytes from packing weights anew in evaluation until `restore_packing`.

    It does so on CPUs with AVX512-BF16, and then adapters get no gradient.
    """
    for module in modules:
        if vars(module).get(_PACKS, False):
            vars(module).update({_PACKS: False, _PACKED_BEFORE: True})


def restore_packing(modules: Iterable[nn.Module]) -> None:
    """Let modules pack their weights in evaluation again, when they leave a relay."""
    for module in modules:
        if vars(module).pop(_PACKED_BEFORE, False):
            vars(module)[_PACKS] = True


def _is_quantised(param: nn.Parameter) -> bool:
    """Return whether a parameter holds codes of bitsandbytes, in any dtype."""
    return getattr(param, "quant_state", None) is not None


def _parts_of(module: Any, param: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if _is_quantised(param):
        state = param.quant_state
        if hasattr(module, "quant_state"):  # copies of a module have two states, and refer to the first module
            module.quant_state, param.module = state, module
        yield from (("absmax", state.absmax), ("quant_map", state.code))  # names as in its state_dict
        if state.nested:
            yield from (("nested_offset", state.offset), ("nested_absmax", state.state2.absmax))
            yield "nested_quant_map", state.state2.code
    elif hasattr(module, "init_8bit_state") and param.dtype == torch.int8:
        if param.CB is not None:
            module.init_8bit_state()
        param.data = module.state.CB  # a copy of a module has two, and its forward would exchange them
        yield from (("CB", module.state.CB), ("SCB", module.state.SCB))
