"""What is loaded, run and evicted as a unit: a layer, or the shell (everything of the model that is in no layer).

A unit's weights are `Block`s: parameters that move, reduce and update together. Normally a unit has one block of its
own. A parameter that several units use (a tied embedding) is a block by itself, part of each of them: it is loaded with
every one of them, and its gradient is complete only when all have pushed theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from l2l_core.eps.blocks.buffers import Buffers
from l2l_core.eps.blocks.layout import Layout
from l2l_core.eps.blocks.trained import Trained

SHELL = "shell"


@dataclass(eq=False, slots=True)
class Block:
    """Parameters side by side in one flat float32 master buffer on the host.

    Invariant: between steps every parameter's data is its view of `master`.
    """

    key: str
    params: list[nn.Parameter]
    names: list[str]
    layout: Layout
    master: torch.Tensor  # (numel,) float32, host
    shared: bool  # used by several units
    version: int = 0
    warmup: int = 0  # updates over which its learning rate rises to that of its group
    views: list[torch.Tensor] = field(default_factory=list)
    cast: torch.Tensor | None = None  # the master in the type in which it travels; see `l2l_core/eps/places.py`
    _trained: Trained | None = None  # as it was last asked for

    @property
    def nbytes(self) -> int:
        return self.master.nbytes

    @property
    def trained(self) -> Trained:
        """Which parameters require a gradient now, and how their gradients lie side by side."""
        flags = tuple(param.requires_grad for param in self.params)
        if self._trained is None or self._trained.flags != flags:
            self._trained = Trained.of(self.layout, flags)
        return self._trained

    @property
    def values(self) -> torch.Tensor:
        """The weights as they are now, (numel,), to be read; `hold` and `fill` give others."""
        return self.master

    def fill(self, values: torch.Tensor) -> None:
        """Let the weights have these values, (numel,)."""
        self.master.copy_(values)

    def hold(self, master: torch.Tensor, twins: Sequence[nn.Parameter]) -> torch.Tensor:
        """Let another buffer, (numel,), be the master: parameters and the optimizer's `twins` of them become its views.

        Returns:
            The buffer that was the master.
        """
        before, self.master, self.views = self.master, master, self.layout.views(master)
        for param, twin, view in zip(self.params, twins, self.views, strict=True):
            param.data = twin.data = view
        return before

    def let_go(self, twins: Sequence[nn.Parameter]) -> None:
        """Hold no weights: somebody has them, on disk, and `hold` will bring them back."""
        self.master, self.views, self.cast = torch.empty(0), [], None
        for param in (*self.params, *twins):
            param.data = torch.empty(0)


@dataclass(eq=False, slots=True)
class Unit:
    """A layer or the shell: its modules, its blocks, its buffers."""

    key: str
    name: str
    module: nn.Module
    blocks: list[Block]
    buffers: Buffers
    owners: list[tuple[nn.Module, str, nn.Parameter]]  # where the model holds each parameter, to notice replacements
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for block in self.blocks for param in block.params]

    @property
    def numel(self) -> int:
        """Elements of a slot that holds all blocks, padding included."""
        return sum(block.layout.numel for block in self.blocks)

    @property
    def num_params(self) -> int:
        return sum(block.layout.used for block in self.blocks)

    @property
    def gradient_numel(self) -> int:
        """Elements of a slot that holds the gradient of what is trained, padding included."""
        return sum(block.trained.numel for block in self.blocks)

    @property
    def num_trained(self) -> int:
        """Number of weights that are trained."""
        return sum(block.trained.layout.used for block in self.blocks)

    @property
    def trained(self) -> tuple[bool, ...]:
        """Of every parameter, in the order of `params`, whether it is trained."""
        return tuple(flag for block in self.blocks for flag in block.trained.flags)

    @property
    def nbytes(self) -> int:
        """Bytes of the unit's weights in float32, padding included."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def frozen(self) -> bool:
        """Whether no parameter of the unit is trained."""
        return not any(self.trained)

    @property
    def masters(self) -> list[torch.Tensor]:
        """Where the unit's weights lie on the host, one flat tensor per block; to know them by, not to write to."""
        return [block.master for block in self.blocks]

    @property
    def version(self) -> int:
        """Number of updates of the unit's weights so far."""
        return max((block.version for block in self.blocks), default=0)

    def ranges(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """`flat` (numel,) cut into one range per block."""
        return list(flat.split([block.layout.numel for block in self.blocks]))

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """`flat` (numel,) seen as the unit's parameters, in the order of `params`."""
        pairs = zip(self.blocks, self.ranges(flat), strict=True)
        return [view for block, part in pairs for view in block.layout.views(part)]

    def rename(self, name: str) -> None:
        """Say where in the model the layer is now."""
        for block in self.blocks:
            if not block.shared:
                block.names = [f"{name}{inner[len(self.name) :]}" for inner in block.names]
        self.name = name

    def point(self, views: Sequence[torch.Tensor]) -> None:
        """Let the parameters' data be `views` (device slots or masters); their identity stays."""
        for param, view in zip(self.params, views, strict=True):
            param.data = view


def build_units(
    model: nn.Module, layers: Mapping[str, nn.Module], empty: Callable[[int], torch.Tensor] = torch.empty
) -> tuple[Unit, list[Unit]]:
    """Move the model's parameters into flat masters and return the shell and the layers.

    Args:
        model: any module; its parameters keep their identity, their data become views of the masters.
        layers: permanent key -> module, in stack order.
        empty: makes a float32 host buffer of so many elements; a device's `host_empty` copies fast.

    Raises:
        ValueError: a parameter that is not a dense float32 tensor on the CPU.
    """
    module_names = {module: name for name, module in model.named_modules()}
    members = {key: list(module.modules()) for key, module in layers.items()}
    members = {SHELL: outside(model, set(layers.values())), **members}
    owners = {key: _owners(modules) for key, modules in members.items()}
    names = {param: name for name, param in model.named_parameters()}
    _check_parameters(names)

    users: dict[nn.Parameter, list[str]] = defaultdict(list)
    for key, held in owners.items():
        for _, _, param in held:
            if key not in users[param]:
                users[param].append(key)
    several = [param for param, keys in users.items() if len(keys) > 1]
    shared = {param: _make_block(shared_key(names[param]), [param], names, True, empty) for param in several}

    units = []
    for key, held in owners.items():
        params = list(dict.fromkeys(param for _, _, param in held))
        own = [param for param in params if param not in shared]
        blocks = [_make_block(key, own, names, False, empty)] if own else []
        blocks += [shared[param] for param in params if param in shared]
        module = layers.get(key, model)
        name = module_names[module] if key != SHELL else SHELL
        units.append(Unit(key, name, module, blocks, Buffers(members[key]), held))
    return units[0], units[1:]


def build_layer(
    key: str,
    name: str,
    module: nn.Module,
    empty: Callable[[int], torch.Tensor] = torch.empty,
    shared: Mapping[nn.Parameter, Block] = MappingProxyType({}),
) -> Unit:
    """A layer of its own: its parameters move into a flat master, as in `build_units`.

    Args:
        key: permanent identity.
        name: dotted name that it will have in the model.
        module: the layer.
        empty: makes a float32 host buffer of so many elements.
        shared: blocks of the parameters that it has in common with other units.

    Raises:
        ValueError: a parameter that is not a dense float32 tensor on the CPU.
    """
    names = {param: f"{name}.{inner}" for inner, param in module.named_parameters()}
    _check_parameters(names)
    members = list(module.modules())
    held = _owners(members)
    params = list(dict.fromkeys(param for _, _, param in held))
    own = [param for param in params if param not in shared]
    blocks = [_make_block(key, own, names, False, empty)] if own else []
    blocks += [shared[param] for param in params if param in shared]
    return Unit(key, name, module, blocks, Buffers(members), held)


def outside(model: nn.Module, layers: Set[nn.Module]) -> list[nn.Module]:
    """Modules that the model reaches without going through a layer; a layer may hold some of them too."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module not in found and module not in layers:
            found[module] = None
            for child in module.children():
                visit(child)

    visit(model)
    return list(found)


Stamp = tuple[int, int]  # of a parameter: changes when it is written to, or gets other data


def stamps_of(params: Iterable[torch.Tensor]) -> list[Stamp]:
    """Marks by which `check_stamps` recognises that nobody has changed these weights."""
    address = torch._C.TensorBase.data_ptr  # Tensor's own may be watched for reads of the model
    return [(param._version, address(param)) for param in params]


def check_stamps(params: Sequence[torch.Tensor], stamps: Sequence[Stamp], who: str) -> None:
    """Refuse weights that a forward has changed: those on the device are copies.

    Raises:
        RuntimeError: names who did it, and the remedy.
    """
    now = stamps_of(params)
    if now != stamps:
        raise RuntimeError(weights_changed(who, next(p for p, a, b in zip(params, stamps, now, strict=True) if a != b)))


def weights_changed(who: str, weight: torch.Tensor) -> str:
    """The message about weights that somebody has changed during a step."""
    return (
        f"{who} changes a weight of shape {tuple(weight.shape)} in its forward: what is on the device is a copy, and the change "
        "would be lost. Change weights between steps, under torch.no_grad(), or keep what changes in a buffer"
    )


def shared_key(name: str) -> str:
    """Key of a block that several units use, by the parameter's name in the model."""
    return f"shared:{name}"


def _owners(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [(m, name, p) for m in modules for name, p in m._parameters.items() if p is not None]


def _check_parameters(names: Mapping[nn.Parameter, str]) -> None:
    for param, name in names.items():
        if param.device.type != "cpu" or param.layout is not torch.strided:
            raise ValueError(
                f"parameter {name} is on {param.device} ({param.layout}): the masters live in host memory as dense tensors. "
                "Call model.cpu() before the relay takes over; it moves layers to the device itself"
            )
        if param.dtype != torch.float32:
            raise ValueError(
                f"parameter {name} is {param.dtype}: the masters are float32. Call model.float() first; for bfloat16 "
                "compute use RelayConfig(precision='bf16')"
            )


def _make_block(
    key: str,
    params: list[nn.Parameter],
    names: Mapping[nn.Parameter, str],
    shared: bool,
    empty: Callable[[int], torch.Tensor],
) -> Block:
    layout = Layout.of(params)
    master = empty(layout.numel).zero_()
    views = layout.views(master)
    for param, view in zip(params, views, strict=True):
        view.copy_(param.detach())
        param.data = view
    return Block(key, params, [names[param] for param in params], layout, master, shared, views=views)
