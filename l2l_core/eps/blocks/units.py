"""What is loaded, run and evicted as a unit: a layer, or the shell (everything of the model that is in no layer).

A unit's weights are `Block`s: parameters that move, reduce and update together. Normally a unit has one block of its
own. A parameter that several units use (a tied embedding) is a block by itself, part of each of them: it is loaded with
every one of them, and its gradient is complete only when all have pushed theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from l2l_core.eps.blocks.layout import Layout
from l2l_core.eps.blocks.module_buffers import ModuleBuffers
from l2l_core.eps.blocks.trained_parameters import TrainedParameters

SHELL = "shell"

# What parameters show whose values are not here: never weights, always their shape
_PLACEHOLDER = torch.full((1,), torch.nan)
# The master of a block that is away: one, since passes know storages by their addresses, and one that dies gives its to another
_NO_MASTER = torch.empty(0)


@dataclass(eq=False, slots=True)
class Block:
    """Parameters side by side in one flat master buffer on the host: of float32, or of bfloat16 where the optimizer rounds to it.

    Invariant: between steps every parameter's data is its home: its view of `master`, where all of the block is there. Of
    several workers each may hold a part of a block. Then `master` is that part, `views` show of every parameter what is in it,
    and between steps the model's parameters show their shapes and nothing but NaN. So they do of a block that is `away`: on
    disk, but for the length of an update.
    """

    key: str
    params: list[nn.Parameter]
    names: list[str]
    layout: Layout  # of the whole block, as it lies in a slot
    master: torch.Tensor  # (held.numel,), host
    shared: bool  # used by several units
    version: int = 0
    warmup: int = 0  # updates over which its learning rate rises to that of its group
    views: list[torch.Tensor] = field(default_factory=list)
    cast: torch.Tensor | None = None  # the master in the type in which it travels; see `l2l_core/eps/weight_source.py`
    local_layout: Layout | None = None  # how `master` is laid out, where it is a part of the block
    offloaded: bool = False  # whether nothing of it is here, but while it is updated
    residuals: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # by parameter, on the device; see `eps/residuals.py`
    _trained: TrainedParameters | None = None  # as it was last asked for

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that are here."""
        return self.master.nbytes

    @property
    def master_layout(self) -> Layout:
        """How the block lies in `master`: as it does in a slot, unless only a part of it is here."""
        return self.layout if self.local_layout is None else self.local_layout

    @property
    def host_views(self) -> list[torch.Tensor]:
        """What the parameters' data are between steps."""
        if self.local_layout is None and not self.offloaded:
            return self.views
        return [nan_placeholder(piece.size) for piece in self.layout.pieces]

    @property
    def trained(self) -> TrainedParameters:
        """Which parameters require a gradient now, and how their gradients lie side by side."""
        flags = tuple(param.requires_grad for param in self.params)
        if self._trained is None or self._trained.flags != flags:
            self._trained = TrainedParameters.of(self.layout, flags)
        return self._trained

    @property
    def values(self) -> torch.Tensor:
        """The weights as they are now, (held.numel,), to be read; `hold` and `fill` give others."""
        return self.master

    def copy_from(self, values: torch.Tensor) -> None:
        """Let the weights have these values, (held.numel,)."""
        self.master.copy_(values)

    def set_master(self, master: torch.Tensor, optimizer_params: Sequence[nn.Parameter]) -> torch.Tensor:
        """Let another buffer, (held.numel,), be the master: the optimizer's `twins` of the parameters become its views.

        Returns:
            The buffer that was the master.
        """
        before, self.master, self.views = self.master, master, self.master_layout.views(master)
        for param, twin, view, home in zip(self.params, optimizer_params, self.views, self.host_views, strict=True):
            param.data, twin.data = home, view
        return before

    def set_local_master(
        self, local_layout: Layout | None, master: torch.Tensor, optimizer_params: Sequence[nn.Parameter]
    ) -> torch.Tensor:
        """Hold as `hold` does a buffer of which `part` says what of the block is in it; None: all of it."""
        self.local_layout = local_layout
        return self.set_master(master, optimizer_params)

    def offload(self, optimizer_params: Sequence[nn.Parameter] = ()) -> None:
        """Hold no weights, and let parameters show their shapes: somebody has the weights, for loads and for updates."""
        self.offloaded, self.master, self.cast = True, _NO_MASTER, None
        self.views = self.host_views
        for params in (self.params, optimizer_params):
            for param, view in zip(params, self.views, strict=bool(params)):
                param.data = view

    def bind(self, master: torch.Tensor, optimizer_params: Sequence[nn.Parameter]) -> None:
        """Let the optimizer see a buffer, (held.numel,), with the weights of a block that is away, until `go`.

        The model's own parameters are left alone: a layer may be computing with what they show.
        """
        assert self.offloaded, self.key
        self.master, self.views = master, self.layout.views(master)
        for twin, view in zip(optimizer_params, self.views, strict=True):
            twin.data = view

    def unbind(self, optimizer_params: Sequence[nn.Parameter]) -> None:
        """End what `come` began."""
        self.master, self.views = _NO_MASTER, self.host_views
        for twin, view in zip(optimizer_params, self.views, strict=True):
            twin.data = view

    def drop_weights(self, optimizer_params: Sequence[nn.Parameter]) -> None:
        """Hold no weights: somebody has them, on disk, and `hold` will bring them back."""
        self.master, self.views, self.cast = torch.empty(0), [], None
        for param in (*self.params, *optimizer_params):
            param.data = torch.empty(0)


@dataclass(eq=False, slots=True)
class Unit:
    """A layer or the shell: its modules, its blocks, its buffers."""

    key: str
    name: str
    module: nn.Module
    blocks: list[Block]
    buffers: ModuleBuffers
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
        """Bytes of the unit's weights, padding included: of masters here, of float32 where they are away."""
        return sum(4 * block.layout.numel if block.offloaded else block.nbytes for block in self.blocks)

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

    def set_data(self, views: Sequence[torch.Tensor]) -> None:
        """Let the parameters' data be `views` (device slots or masters); their identity stays."""
        for param, view in zip(self.params, views, strict=True):
            param.data = view


def nan_placeholder(size: Sequence[int]) -> torch.Tensor:
    """Give what a parameter of this size shows while its values are not here."""
    return _PLACEHOLDER.expand(tuple(size))


def is_placeholder(param: torch.Tensor) -> bool:
    """Tell whether a parameter shows its shape alone."""
    return param.untyped_storage()._cdata == _PLACEHOLDER.untyped_storage()._cdata
