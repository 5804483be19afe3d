"""Units that are loaded, run and evicted together: a layer, or the shell (the rest of the model).

A unit's weights are `Block`s: parameters that move, reduce and update together. Normally a unit has one block. A parameter that
several units use (a tied embedding) is a separate block, part of each of them: it is loaded with every one of them, and its
gradient is complete only when all have pushed theirs. Frozen parameters of other dtypes than the master's (a quantised base) are
a second block of the unit, in bytes: copies move these as they are, in every precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from l2l_core.eps.blocks.aliases import leaving_storages
from l2l_core.eps.blocks.layout import Layout, TrainedParameters
from l2l_core.eps.blocks.module_buffers import ModuleBuffers
from l2l_core.eps.blocks.placeholders import placeholder

SHELL = "shell"

# Master of every offloaded block. A single storage: passes identify storages by address, and the address of a dead one is reused.
_NO_MASTER = torch.empty(0)


@dataclass(eq=False, slots=True)
class Block:
    """Parameters side by side in one flat host buffer, the master.

    It is float32, or bfloat16 if the optimizer rounds to it, or bytes if the parameters keep their dtypes.

    Invariant: between steps every parameter's data is its view of `master`, if the whole block is in memory. With several
    workers, each may hold a part of a block. Then `master` is that part, `views` are the parts of the parameters in it, and
    between steps the model's parameters are placeholders of NaN. The same holds for an `offloaded` block, which is on disk except
    during its update.
    """

    key: str
    params: list[nn.Parameter]
    names: list[str]
    layout: Layout  # of the whole block, as in a slot
    master: torch.Tensor  # (master_layout.numel,), host
    shared: bool  # used by several units
    version: int = 0
    warmup: int = 0  # number of updates over which its learning rate rises to that of its group
    views: list[torch.Tensor] = field(default_factory=list)
    cast: torch.Tensor | None = None  # the master in the dtype of loads; see `WeightSource`
    local_layout: Layout | None = None  # layout of `master` if it is a part of the block
    offloaded: bool = False  # not in memory except during its update
    points_to_master: bool = False  # until the step ends, parameters do, and only its update sets their data
    residuals: dict[int, torch.Tensor] = field(default_factory=dict)  # by parameter, on the device; see `Residuals`
    used_gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # by parameter; see `UsedGradient`
    _trained: TrainedParameters | None = None  # cache

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in memory."""
        return self.master.nbytes

    @property
    def left_bytes(self) -> int:
        """Bytes of the master that the weights have left at the end of the relay; else 0."""
        has_weights = not self.master.nbytes and any(param.numel() for param in self.params)
        itemsize = 1 if self.in_bytes else self.params[0].element_size()
        return self.layout.numel * itemsize if has_weights else 0

    @property
    def in_bytes(self) -> bool:
        """True for frozen parameters that keep their dtypes: the master is uint8, and nothing casts or updates it."""
        return self.layout.in_bytes

    def slot_numel(self, dtype: torch.dtype) -> int:
        """Return the elements of the block in a slot of `dtype`, padding included."""
        return self.layout.numel // dtype.itemsize if self.in_bytes else self.layout.numel

    def slot_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a range of a slot, (slot_numel,), as views of the block's parameters."""
        return self.layout.views(flat.view(torch.uint8) if self.in_bytes else flat)

    @property
    def master_layout(self) -> Layout:
        """Layout of `master`: that of the whole block, or of the part held here."""
        return self.layout if self.local_layout is None else self.local_layout

    @property
    def host_views(self) -> list[torch.Tensor]:
        """Data of the parameters between steps."""
        if self.local_layout is None and not self.offloaded:
            return self.views
        return [placeholder(piece) for piece in self.layout.pieces]

    @property
    def _placeholders(self) -> list[torch.Tensor]:
        """Data of the optimizer's parameters while the block is offloaded."""
        return [placeholder(piece) for piece in self.master_layout.pieces]

    @property
    def trained(self) -> TrainedParameters:
        """Parameters that require a gradient now, and the layout of their gradients; none in bytes, see `check_model`."""
        flags = tuple([False] * len(self.params) if self.in_bytes else [param.requires_grad for param in self.params])
        if self._trained is None or self._trained.flags != flags:
            self._trained = TrainedParameters.of(self.layout, flags)
        return self._trained

    @property
    def values(self) -> torch.Tensor:
        """The current weights, (master_layout.numel,)."""
        return self.master

    def set_master(self, master: torch.Tensor, optimizer_params: Sequence[nn.Parameter]) -> torch.Tensor:
        """Make another buffer, (master_layout.numel,), the master, and `optimizer_params` its views.

        Returns:
            The previous master.
        """
        before, self.master, self.views = self.master, master, self.master_layout.separate_views(master)
        _set_data(self.params, self.host_views)
        _set_data(optimizer_params, self.views)
        return before

    def set_local_master(
        self, local_layout: Layout | None, master: torch.Tensor, optimizer_params: Sequence[nn.Parameter]
    ) -> torch.Tensor:
        """Make a buffer with a part of the block, laid out by `local_layout`, the master; None: the whole block."""
        self.local_layout = local_layout
        return self.set_master(master, optimizer_params)

    def return_params(self) -> None:
        """Point the parameters to the master until `points_to_master` is reset; visits leave them there."""
        if not self.points_to_master:
            _set_data(self.params, self.host_views)
            self.points_to_master = True

    def offload(self, optimizer_params: Sequence[nn.Parameter] = ()) -> None:
        """Drop the weights, which are stored elsewhere; parameters become placeholders."""
        self.offloaded, self.master, self.cast = True, _NO_MASTER, None
        self.views = self._placeholders
        _set_data(self.params, self.host_views)
        if optimizer_params:
            _set_data(optimizer_params, self.views)

    def bind(self, master: torch.Tensor, optimizer_params: Sequence[nn.Parameter]) -> None:
        """Make a buffer, (master_layout.numel,), the optimizer's view of an offloaded block, until `unbind`.

        The model's own parameters are unchanged, since a layer may be computing with their data.
        """
        assert self.offloaded, self.key
        self.master, self.views = master, self.master_layout.views(master)
        _set_data(optimizer_params, self.views)

    def unbind(self, optimizer_params: Sequence[nn.Parameter]) -> None:
        """Undo `bind`."""
        self.master, self.views = _NO_MASTER, self._placeholders
        _set_data(optimizer_params, self.views)

    def leave_master(self, optimizer_params: Sequence[nn.Parameter]) -> None:
        """Move each parameter to separate memory of its size, and drop the master, when the relay is closed.

        A parameter that the user has given other data (``param.data = ...``, ``model.half()``) keeps it. Does nothing without
        the whole block in memory: parameters stay placeholders.
        """
        if self.local_layout is None and not self.offloaded:
            values = [  # clones keep the strides; ordinary memory, where the master is pinned
                view.clone() if param.data_ptr() == view.data_ptr() else param.data
                for param, view in zip(self.params, self.views, strict=True)
            ]
            self.master, self.views, self.cast = _NO_MASTER, [], None
            with leaving_storages(self.params):
                _set_data(self.params, values)
            _set_data(optimizer_params, values if optimizer_params else ())

    def drop_weights(self, optimizer_params: Sequence[nn.Parameter]) -> None:
        """Drop the weights, which are on disk, until `set_master` restores them."""
        self.master, self.views, self.cast = torch.empty(0), [], None
        for param in (*self.params, *optimizer_params):
            param.data = torch.empty(0)


@dataclass(eq=False, slots=True)
class Unit:
    """A layer or the shell, with its modules, blocks and buffers; entries of `Relay.stack` are for reading.

    Schedules and functions of yours may read the attributes below, `num_params`, `num_trained`, `nbytes`, `frozen` and
    `version` (number of updates).

    Attributes:
        key: permanent identity, such as "L003"; edits do not change it.
        name: dotted name in the model, which changes with the layer's position.
        module: the layer itself.
        stats: figures of the last step: "grad_norm", norm of its gradient; "update_ratio", norm of the update over norm of the
            weights, of a sample of them; "influence", 1 minus the mean cosine between the hidden state of a token before and
            after the layer, in [0, 2] (Block Influence, arXiv 2403.03853). Influence is of the step's first calls of the layer,
            in training mode, until they have 128 tokens: evenly spread ones, about 256 of a call at most. A token is an entry of
            all dimensions but the last, so a row if there are no others. It is the mean of all workers; other figures are of a
            worker's part. A figure that was not measured is missing: all of a new layer before its first step, of a skipped one,
            and of all layers after a failed step; "influence" if no input has the
            shape of the output; the others of a frozen layer. So use ``layer.stats.get("influence")``.

    Example:
        >>> from l2l_core import Insert
        >>> result = relay.step(batch)
        >>> inverse = relay.apply(Insert(at=0))
        >>> [(layer.key, layer.num_params, sorted(layer.stats)) for layer in relay.stack[:2]]
        [('L006', 1072, []), ('L000', 1072, ['grad_norm', 'influence', 'update_ratio'])]
    """

    key: str
    name: str
    module: nn.Module
    blocks: list[Block]
    buffers: ModuleBuffers
    owners: list[tuple[nn.Module, str, nn.Parameter]]  # (module, attribute, parameter), to detect replaced parameters
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for block in self.blocks for param in block.params]

    def slot_numel(self, dtype: torch.dtype) -> int:
        """Return the elements of a slot of `dtype` for all blocks, padding included."""
        return sum(block.slot_numel(dtype) for block in self.blocks)

    @property
    def num_params(self) -> int:
        return sum(block.layout.used for block in self.blocks)

    @property
    def gradient_numel(self) -> int:
        """Elements of a gradient slot, padding included."""
        return sum(block.trained.numel for block in self.blocks)

    @property
    def num_trained(self) -> int:
        """Number of weights that are trained."""
        return sum(block.trained.layout.used for block in self.blocks)

    @property
    def trained(self) -> tuple[bool, ...]:
        """For every parameter, in the order of `params`, True if it is trained."""
        return tuple(flag for block in self.blocks for flag in block.trained.flags)

    @property
    def nbytes(self) -> int:
        """Bytes of the unit's weights, padding included; float32 is assumed for offloaded blocks that are not in bytes."""
        return sum(
            block.layout.nbytes if block.offloaded else block.nbytes or block.left_bytes for block in self.blocks
        )

    @property
    def frozen(self) -> bool:
        """True if no parameter of the unit is trained."""
        return not any(self.trained)

    @property
    def masters(self) -> list[torch.Tensor]:
        """Host buffers of the unit's weights, one per block. Do not write to them."""
        return [block.master for block in self.blocks]

    @property
    def version(self) -> int:
        """Number of updates of the unit's weights."""
        return max((block.version for block in self.blocks), default=0)

    def ranges(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Split a slot, or its beginning, into one range per block."""
        sizes = [block.slot_numel(flat.dtype) for block in self.blocks]
        return list(flat[: sum(sizes)].split(sizes))

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a slot, or its beginning, as views of the unit's parameters, in the order of `params`."""
        pairs = zip(self.blocks, self.ranges(flat), strict=True)
        return [view for block, part in pairs for view in block.slot_views(part)]

    def rename(self, name: str) -> None:
        """Set the layer's name in the model, after an edit."""
        for block in self.blocks:
            if not block.shared:
                block.names = [f"{name}{inner[len(self.name) :]}" for inner in block.names]
        self.name = name

    def set_data(self, views: Sequence[torch.Tensor]) -> None:
        """Set the parameters' data (device slots or masters), except in blocks that point to the master; their identity stays."""
        rest = iter(views)
        for block in self.blocks:
            own = [next(rest) for _ in block.params]
            if not block.points_to_master:
                _set_data(block.params, own)


def put_back_params(owners: Iterable[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Put quantised weights back that a forward has replaced by copies of the same state.

    DoRA of peft does so on a CPU.
    """
    for module, name, param in owners:
        state, now = getattr(param, "quant_state", None), module._parameters.get(name)
        if state is not None and now is not param and getattr(now, "quant_state", None) is state:
            module._parameters[name] = param


def _set_data(params: Sequence[nn.Parameter], views: Sequence[torch.Tensor]) -> None:
    for param, view in zip(params, views, strict=True):
        param.data = view
