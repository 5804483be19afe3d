"""Construction of units: a model's parameters move into masters and keep their identity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType

import torch
from torch import nn

from l2l_core.eps.blocks.layout import Layout
from l2l_core.eps.blocks.module_buffers import ModuleBuffers
from l2l_core.eps.blocks.units import SHELL, Block, Unit, is_placeholder

EmptyFn = Callable[..., torch.Tensor]  # (numel, dtype=...) -> host buffer


def build_units(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    init_master: Callable[[Block], None] | None = None,
    bf16: bool = False,
) -> tuple[Unit, list[Unit]]:
    """Move the model's parameters into flat masters and return the shell and the layers.

    Parameters keep their identity; their data become views of the masters.

    Args:
        layers: permanent key -> module, in stack order.
        init_master: gives a new block its master; default: in host memory.
        bf16: whether parameters may be bfloat16, because the optimizer rounds weights to it.

    Raises:
        ValueError: a parameter is not a dense float32 (or permitted bfloat16) tensor on the CPU.
    """
    init_master = init_master or host_master_init(torch.empty)
    module_names = {module: name for name, module in model.named_modules()}
    shell = shell_modules(model, set(layers.values()))
    members = {SHELL: shell, **{key: list(module.modules()) for key, module in layers.items()}}
    names = {param: name for name, param in model.named_parameters()}
    _check_parameters(names, bf16)
    users = Counter(param for modules in members.values() for param in _parameters(modules))
    several = [param for param, count in users.items() if count > 1]
    shared = {param: _make_block(shared_key(names[param]), [param], names, True, init_master) for param in several}
    units = []
    for key, modules in members.items():
        module = layers.get(key, model)
        name = module_names[module] if key != SHELL else SHELL
        units.append(_make_unit(key, name, module, modules, names, shared, init_master))
    return units[0], units[1:]


def build_layer(
    key: str,
    name: str,
    module: nn.Module,
    empty: EmptyFn = torch.empty,
    shared: Mapping[nn.Parameter, Block] = MappingProxyType({}),
    bf16: bool = False,
) -> Unit:
    """Build the unit of one layer: its parameters move into a flat master, as in `build_units`.

    `name` is the dotted name that it will have in the model; `shared` has the blocks of parameters that other units also use.
    """
    names = {param: f"{name}.{inner}" for inner, param in module.named_parameters()}
    _check_parameters(names, bf16)
    return _make_unit(key, name, module, list(module.modules()), names, shared, host_master_init(empty))


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


def _check_parameters(names: Mapping[nn.Parameter, str], bf16: bool) -> None:
    for param, name in names.items():
        if param.is_meta:
            raise ValueError(
                f"parameter {name} is on meta, without values: load the weights (model.to_empty(device='cpu') and "
                "load_state_dict, or from_pretrained without device_map), or train from files with shelf=FileShelf(weights=...)"
            )
        if param.is_complex():
            raise ValueError(
                f"parameter {name} is {param.dtype}, and the masters are real: keep it as pairs, nn.Parameter("
                "torch.view_as_real(weight)), and use torch.view_as_complex(self.weight) in forward"
            )
        if not param.is_floating_point():
            raise ValueError(
                f"parameter {name} is {param.dtype}, and the masters are float32: integers are not trained, so make it a buffer "
                "(register_buffer); quantised layers need their own float32 weights"
            )
        if param.device.type != "cpu" or param.layout is not torch.strided:
            raise ValueError(
                f"parameter {name} is on {param.device} ({param.layout}): the masters live in host memory as dense tensors. "
                "Call model.cpu() before the relay takes over; it moves layers to the device itself"
            )
        if param.dtype != torch.float32 and not (bf16 and param.dtype == torch.bfloat16):
            raise ValueError(
                f"parameter {name} is {param.dtype}: the masters are float32. Call model.float() first; for bfloat16 "
                "compute use RelayConfig(precision='bf16'). For masters in bfloat16 the optimizer must round at "
                "random, as in_bf16(torch.optim.AdamW, weights=True) does"
            )


def host_master_init(empty: EmptyFn) -> Callable[[Block], None]:
    """Return a function that copies the weights of a block from its parameters into a new host master."""

    def init_master(block: Block) -> None:
        for param, name in zip(block.params, block.names, strict=True):
            if is_placeholder(param):
                raise ValueError(
                    f"parameter {name} has no values here: the model's weights are in the files of a shelf. Resume from them "
                    "with FileShelf(..., resume=True), or load others: model.load_state_dict(weights, assign=True)"
                )
        master = empty(block.layout.numel, dtype=block.params[0].dtype).zero_()
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
) -> Unit:
    params = _parameters(members)
    own = [param for param in params if param not in shared]
    blocks = [_make_block(key, own, names, False, init_master)] if own else []
    blocks += [shared[param] for param in params if param in shared]
    owners = [(m, attribute, p) for m in members for attribute, p in m._parameters.items() if p is not None]
    return Unit(key, name, module, blocks, ModuleBuffers(members), owners)


def _make_block(
    key: str,
    params: list[nn.Parameter],
    names: Mapping[nn.Parameter, str],
    shared: bool,
    init_master: Callable[[Block], None],
) -> Block:
    kinds = {param.dtype: names[param] for param in params}
    if len(kinds) > 1:
        raise ValueError(
            f"{key} has parameters of {' and '.join(map(str, kinds))} ({', '.join(kinds.values())}), and its master is one "
            "buffer: make the whole layer bfloat16 (model.bfloat16()) or float32"
        )
    block = Block(key, params, [names[param] for param in params], Layout.of(params), torch.empty(0), shared)
    init_master(block)
    return block
