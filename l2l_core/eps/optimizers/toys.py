"""Toys of a user's optimizer: the same kind and settings over small weights of their own, and gradients for them.

Nothing of the user's is within their reach. What they are for is in `blockwise.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.eps.blocks import Layout
from l2l_core.eps.optimizers.parts import copy_over
from l2l_core.eps.optimizers.states import clone_state

_WEAK = 0.001  # gradients of the second block, times those of the first: what is taken from both is then unlike
RATE = 1e-3  # for a group whose learning rate is 0, as at the beginning of a warm-up
_GROUPS = 8  # at most so many that differ in numbers alone; one after another, they cost time
_LONG = 4096  # elements of a vector; fewer where the model has none so long, since some need the square of that
_SHAPES: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    0: ((), ()),
    2: ((64, 64), (48, 96)),
    3: ((16, 16, 16), (32, 16, 9)),
    4: ((32, 16, 3, 3), (16, 32, 3, 3)),
    5: ((16, 8, 4, 3, 3), (8, 16, 4, 3, 3)),
}

Grads = list[torch.Tensor | None]


@dataclass(frozen=True)
class Toy:
    """Has an optimizer over weights of its own, in two blocks."""

    optimizer: Optimizer

    @property
    def params(self) -> list[nn.Parameter]:
        """All weights, in the order of the groups."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    @property
    def second_places(self) -> range:
        """Where the parameters of the second block are."""
        return range(1, len(self.params), 2)

    @property
    def first(self) -> list[nn.Parameter]:
        """The parameters of the first block."""
        return self.params[::2]

    @property
    def second(self) -> list[nn.Parameter]:
        """The parameters of the second block."""
        return self.params[1::2]


class Form:
    """Knows what toys of one optimizer have in common: shapes, first weights, gradients, settings."""

    def __init__(self, optimizer: Optimizer, rate: float = 0.0) -> None:
        """`rate` is the least that a group has.

        Raises:
            ValueError: see `check_keys`.
        """
        check_keys(optimizer)
        self.optimizer, self.rate, self.name = optimizer, rate, type(optimizer).__name__
        self.groups = _different(optimizer.param_groups)
        noise = torch.Generator().manual_seed(0)
        self.likes = [_likes(group["params"], optimizer.state, noise) for group in self.groups]
        every = [like for likes in self.likes for like in likes]
        self.slopes = [(_WEAK if i % 2 else 1.0) * torch.randn(x.shape, generator=noise) for i, x in enumerate(every)]
        self.noises = [slope.abs().mean() * torch.randn(slope.shape, generator=noise) for slope in self.slopes]

    def toy(self, shape: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Toy:
        """Make an optimizer over weights of its own, which lie as in a layer; with `shape` it begins without state."""
        state: Any = defaultdict(dict)
        groups, counterparts = [], {}
        for group, likes in zip(self.groups, self.likes, strict=True):
            params = _side_by_side([shape(like.detach()) if shape else like.detach() for like in likes])
            groups.append({**group, "params": params})
            counterparts |= {p: params[0] for p in group["params"]}  # nothing of the user's is within reach
            for like, param in zip(likes, params, strict=True):
                counterparts[like] = param
                if shape is None and like in self.optimizer.state:
                    state[param] = self._copied(self.optimizer.state[like])
        twin = copy_over(self.optimizer, groups, state, counterparts)
        for group in twin.param_groups:
            group.pop("param_names", None)  # of the user's parameters, which are more or fewer
            if isinstance(group.get("lr"), float | int):
                group["lr"] = max(group["lr"], self.rate) or RATE
            elif isinstance(group.get("lr"), torch.Tensor) and not group["lr"].any():
                group["lr"].fill_(RATE)
        if callable(getattr(twin, "train", None)):  # averages of weights: the mode in which it trains
            twin.train()
        return Toy(twin)

    def _copied(self, state: Any) -> Any:
        try:
            return clone_state(state)
        except Exception as error:
            raise ValueError(
                f"{self.name} keeps a state that cannot be copied ({error!r}): verify, undo, branches and saves would fail. Use "
                "an optimizer that keeps ordinary tensors"
            ) from error

    def grads(self, step: int, without: Sequence[int] = ()) -> Grads:
        """Make gradients that mostly point one way, as real ones do; None in the places `without`."""
        pairs = enumerate(zip(self.slopes, self.noises, strict=True))
        return [None if i in without else slope + (step % 3 - 1) * 0.5 * noise for i, (slope, noise) in pairs]


def check_keys(optimizer: Optimizer) -> None:
    """Refuse a state of anything but parameters.

    Raises:
        ValueError: names the key.
    """
    params = {param for group in optimizer.param_groups for param in group["params"]}
    if strange := [key for key in optimizer.state if key not in params]:
        raise ValueError(
            f"{type(optimizer).__name__} keeps a state of {strange[0]!r}, which is no parameter: it would count once per layer, "
            "and is in no save. Use an optimizer that keeps its state by parameter, and counts in its groups"
        )


def _different(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choose groups to try: all, or of many the first two of each kind, which differs in more than numbers."""
    if len(groups) <= _GROUPS:
        return list(groups)
    kinds: dict[Any, list[dict[str, Any]]] = {}
    for group in groups:
        rest = {n: v for n, v in group.items() if n not in ("params", "param_names") and not isinstance(v, float)}
        kinds.setdefault((repr(rest), tuple(sorted({p.dim() for p in group["params"]}))), []).append(group)
    return [group for alike in kinds.values() for group in alike[:2]]


def _likes(params: Sequence[nn.Parameter], state: Any, noise: torch.Generator) -> list[nn.Parameter]:
    """Choose what the weights of a toy group are like: two for every number of dimensions there.

    Those that the optimizer has a state of stand for themselves, since a count in the group belongs to such a state.
    """
    likes: list[nn.Parameter] = []
    for dims, length in dims_of(params).items():
        known = [param for param in params if param.dim() == dims and param in state]
        known.sort(key=lambda param: (param.numel() < _LONG, param.numel()))
        shapes = ((length,), (length * 3 // 4,)) if dims == 1 else _SHAPES.get(dims, ((4,) * dims, (4,) * dims))
        new = [nn.Parameter(0.1 * torch.randn(shape, generator=noise)) for shape in shapes]
        likes += known[:2] if known else new
    return likes


def dims_of(params: Sequence[nn.Parameter]) -> dict[int, int]:
    """Return how many dimensions there are, each with the length that a vector of a toy has."""
    longest: dict[int, int] = {}
    for param in params:
        longest[param.dim()] = max(param.numel(), longest.get(param.dim(), 0))
    return {dims: min(max(longest[dims], _LONG // 64), _LONG) for dims in sorted(longest)}


def _side_by_side(tensors: Sequence[torch.Tensor]) -> list[nn.Parameter]:
    """Make parameters with these values, as views of one flat buffer."""
    layout = Layout.of(tensors)
    views = layout.views(torch.zeros(layout.numel))
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    return [nn.Parameter(view) for view in views]


def mixed(tensor: torch.Tensor) -> torch.Tensor:
    """Put the same elements in other places."""
    # A function of the size alone, so that a weight, its gradient and the result are mixed alike
    order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(tensor.numel()))
    return tensor.flatten()[order].view(tensor.shape)


def fill(params: Sequence[nn.Parameter], grads: Grads) -> None:
    """Give parameters gradients of their own."""
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()  # a step may write into it, and other toys get the same
