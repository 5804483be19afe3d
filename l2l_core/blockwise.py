"""The proof that an optimizer can work block by block, be saved and be branched: by trying it on a toy.

Three optimizers of the user's kind and settings train equal weights with equal gradients for ten steps. The first takes
plain steps over all of them. The second is updated in parts, as `LayerStore` does. The third joins halfway, and knows
what a save would hold of the first. Weights, state and settings of all three must have the same bits. Matrices have 4,096
elements and more, in the dimensions that the model's have: quantised state, say, begins there. On the way a block has no
gradient for two steps, as a frozen layer has none.

What it is not: a proof for every input. An optimizer that couples layers from its eleventh step on is not found out here;
`settings.merge` refuses what it then makes of its settings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.flat import Layout
from l2l_core.parts import copy_over, slice_of, step_alone, update_part
from l2l_core.plain_data import Tensors, decode, encode
from l2l_core.sample import same_random_numbers
from l2l_core.settings import Changes, differing_settings, is_same, merge, put, settings_of, settle, to_save
from l2l_core.states import clone_state, differing

_STEPS, _JOINS = 10, 4
_SITS_OUT = (6, 7)  # steps in which the second block has no gradient
_WEAK = 0.001  # gradients of the second block, beside 0.1 of the first: what is taken from both is then unlike
_RATE = 1e-3  # for a group whose learning rate is 0, as at the beginning of a warm-up
_HIGH_RATE = 1e-2
_GROUPS = 8  # at most so many that differ in numbers alone; one after another, they cost time
_LONG = (
    4096  # elements of a vector; fewer where the model has none so long, since the inverse of a Gram matrix takes long
)
_SHAPES: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    0: ((), ()),
    2: ((64, 64), (48, 96)),
    3: ((16, 16, 16), (32, 16, 9)),
    4: ((32, 16, 3, 3), (16, 32, 3, 3)),
    5: ((16, 8, 4, 3, 3), (8, 16, 4, 3, 3)),
}

Grads = list[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found out about an optimizer that qualifies.

    Attributes:
        elementwise: whether it treats each element by itself. Otherwise it adds elements up, and bits depend on the number
            of cores that share an operation.
        newcomers: why it cannot take a parameter that has its first gradient in a later step; empty where it can.
    """

    elementwise: bool = True
    newcomers: str = ""

    def refuse_newcomer(self, who: str, optimizer: Optimizer) -> NoReturn:
        """Say that the optimizer cannot train a layer that it has no state of.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{who} has no state in {type(optimizer).__name__}, which makes that in its first step alone: in a later one it "
            f"raises {self.newcomers}. Keep the layer frozen, insert it with optimizer='copy', or use another optimizer; nothing "
            "has been trained"
        )


def check_mode(part: Optimizer) -> None:
    """Whether an optimizer that has modes is in one in which it takes steps; `part` has no parameters.

    Raises:
        ValueError: it is not.
    """
    try:
        step_alone(part)
    except Exception as error:
        raise ValueError(
            f"{type(part).__name__} would not take a step now: {error}. If it has modes, call relay.optimizer.train() before "
            "steps, and eval() before weights are used or saved; nothing has been trained"
        ) from error


def check_blockwise(optimizer: Optimizer) -> Findings:
    """Try the optimizer on a toy, whole, block by block, and resumed from a save, and compare the bits.

    Raises:
        ValueError: they differ (it couples parameters, keeps state outside of them or draws random numbers), it does not
            step, or what it keeps cannot be saved or copied.
    """
    with same_random_numbers():
        form = _Form(optimizer)
        _try(form)
        rates = [group.get("lr") for group in optimizer.param_groups]
        if any(isinstance(rate, float) and rate < _RATE for rate in rates):
            _try_at_a_rate_that_shows(optimizer)
        return Findings(form.is_elementwise(), form.newcomers())


def _try_at_a_rate_that_shows(optimizer: Optimizer) -> None:
    """At a low rate, what couples layers may be lost in rounding for ten steps, and not for a thousand."""
    try:
        _try(_Form(optimizer, _HIGH_RATE))
    except _CoupledError:
        raise
    except ValueError:
        pass  # it is what the user's own rate is that must work


def _try(form: _Form) -> None:
    try:
        _train(form, sits_out=_SITS_OUT)
    except _NeedsGradientsError:
        _train(form, sits_out=())


def _train(form: _Form, sits_out: Sequence[int]) -> None:
    whole, blocks = form.toy(), form.toy()
    parts = [slice_of(blocks.optimizer, params) for params in (blocks.second, blocks.first)]
    resumed = whole
    for step in range(_STEPS):
        grads = form.grads(step, without=whole.second_places if step in sits_out else ())
        if step == _JOINS:
            resumed = form.resumed(whole)
        form.step_in_core(whole, grads, may_need_all=bool(sits_out))
        if resumed is not whole:
            form.step_in_core(resumed, grads)
        form.step_in_parts(blocks, parts, grads)
    form.check_moved(whole)
    form.compare(whole, blocks, _CoupledError, _COUPLED)
    form.compare(whole, resumed, ValueError, _UNSAVED)


_COUPLED = (
    "couples parameters of different layers or keeps state outside of them ({}): updating one layer at a time gives other "
    "weights than one step over all. Use an optimizer that treats each parameter by itself"
)
_UNSAVED = (
    "keeps something that a save would not hold, beside its settings and the state of its parameters ({} after a resume): "
    "training could not go on from a save, nor on a branch. Keep it in the state of each parameter, or as a number in the groups"
)


@dataclass(frozen=True)
class _Toy:
    optimizer: Optimizer

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    @property
    def second_places(self) -> range:
        """Where the parameters of the second block are."""
        return range(1, len(self.params), 2)

    @property
    def first(self) -> list[nn.Parameter]:
        return self.params[::2]

    @property
    def second(self) -> list[nn.Parameter]:
        return self.params[1::2]


class _Form:
    """What toys of one optimizer have in common: shapes, first weights, gradients, settings."""

    def __init__(self, optimizer: Optimizer, rate: float = 0.0) -> None:
        self.rate = rate  # at least that of every group
        _check_keys(optimizer)
        self.optimizer = optimizer
        self.name = type(optimizer).__name__
        self.groups = _different(optimizer.param_groups)
        noise = torch.Generator().manual_seed(0)
        self.likes = [_likes(group["params"], optimizer.state, noise) for group in self.groups]
        every = [like for likes in self.likes for like in likes]
        self.slopes = [(_WEAK if i % 2 else 0.1) * torch.randn(x.shape, generator=noise) for i, x in enumerate(every)]
        self.noises = [slope.abs().mean() * torch.randn(slope.shape, generator=noise) for slope in self.slopes]

    # -- toys ----------------------------------------------------------------------------------------------------------

    def toy(self, shape: Callable[[torch.Tensor], torch.Tensor] | None = None) -> _Toy:
        """An optimizer over weights of its own, which lie as in a layer; where `shape` is given it begins without state."""
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
            group.pop("param_names", None)
            if isinstance(group.get("lr"), float | int):
                group["lr"] = max(group["lr"], self.rate) or _RATE
        if callable(getattr(twin, "train", None)):  # averages of weights: the mode in which it trains
            twin.train()
        return _Toy(twin)

    def resumed(self, toy: _Toy) -> _Toy:
        """A new optimizer that knows of `toy` what a save would hold."""
        tensors: Tensors = {}
        state = toy.optimizer.state
        _check_keys(toy.optimizer)
        try:
            encoded = [encode(state.get(p, {}), f"state {i}", tensors) for i, p in enumerate(toy.params)]
            plain = [encode(part, f"settings {i}", tensors) for i, part in enumerate(to_save(toy.optimizer))]
            held = [clone_state(state[param]) for param in toy.params if param in state]
        except Exception as error:
            raise ValueError(
                f"{self.name} keeps what a relay cannot copy or save ({error}): verify, undo, branches and saves would fail. "
                "Use an optimizer that keeps ordinary tensors and plain data"
            ) from error
        del held
        new, read = self.toy(), dict[str, torch.Tensor]()
        with torch.no_grad():
            for param, value, values in zip(new.params, toy.params, encoded, strict=True):
                param.copy_(value)
                new.optimizer.state.pop(param, None)
                if known := decode(values, tensors, read):
                    new.optimizer.state[param] = known
        put(new.optimizer, [held for part in plain for held in decode(part, tensors, read)])
        return new

    def _copied(self, state: Any) -> Any:
        try:
            return clone_state(state)
        except Exception as error:
            raise ValueError(
                f"{self.name} keeps a state that cannot be copied ({error!r}): verify, undo, branches and saves would fail. Use "
                "an optimizer that keeps ordinary tensors"
            ) from error

    # -- steps ---------------------------------------------------------------------------------------------------------

    def grads(self, step: int, without: Sequence[int] = ()) -> Grads:
        """Gradients that mostly point one way, as real ones do; None in some places."""
        pairs = enumerate(zip(self.slopes, self.noises, strict=True))
        return [None if i in without else slope + (step % 3 - 1) * 0.5 * noise for i, (slope, noise) in pairs]

    def step_in_core(self, toy: _Toy, grads: Grads, may_need_all: bool = False) -> None:
        """A plain step over all weights."""
        _fill(toy.params, grads)
        before = torch.get_rng_state()
        try:
            step_alone(toy.optimizer)
        except Exception as error:
            if may_need_all and any(grad is None for grad in grads):
                raise _NeedsGradientsError from error
            raise ValueError(
                f"{self.name} cannot run block by block: its step() raised {error!r}{_hint(error)}"
            ) from error
        if not torch.equal(before, torch.get_rng_state()):
            raise ValueError(
                f"{self.name} draws random numbers in its step: layers that are updated one at a time, in another order, get "
                "others than in one step over all. Switch that off (stochastic rounding, say), or use another optimizer"
            )

    def step_in_parts(self, toy: _Toy, parts: Sequence[Optimizer], grads: Grads) -> None:
        """The same step as a relay takes it: one part after another, in the order of backward."""
        _fill(toy.params, grads)
        changes: Changes = {}
        for part in parts:
            if any(p.grad is not None for group in part.param_groups for p in group["params"]):
                try:
                    merge(changes, update_part(part, toy.optimizer))
                except Exception as error:
                    raise _CoupledError(f"{self.name} cannot run block by block: {error}") from error
        settle(toy.optimizer, changes)

    # -- judgements ----------------------------------------------------------------------------------------------------

    def check_moved(self, toy: _Toy) -> None:
        """A toy that nothing has happened to would prove nothing."""
        still = all(torch.equal(a, b) for a, b in zip(toy.params, self.toy().params, strict=True))
        if (
            still
            and not toy.optimizer.state
            and not differing_settings(*map(settings_of, (toy.optimizer, self.optimizer)))
        ):
            raise ValueError(
                f"{self.name} cannot be tried: ten steps of a copy of it, with other weights, changed nothing. It seems to hold "
                "on to its parameters outside of its groups; use an optimizer that reads them from there"
            )

    def compare(self, whole: _Toy, other: _Toy, kind: type[ValueError], message: str) -> None:
        """Refuse the optimizer if weights, states or settings differ."""
        pairs = list(zip(whole.params, other.params, strict=True))
        names = [
            f"setting {n!r}" for n in differing_settings(settings_of(whole.optimizer), settings_of(other.optimizer))
        ]
        states = [(whole.optimizer.state.get(p, {}), other.optimizer.state.get(q, {})) for p, q in pairs]
        names += dict.fromkeys(f"state {name!r}" for one, another in states for name in differing(one, another))
        names += ["weights"] if not all(is_same(p.detach(), q.detach()) for p, q in pairs) else []
        if names:
            listed = ", ".join(names[:4])
            raise kind(f"{self.name} {message.format(f'other {listed}')}")

    def is_elementwise(self) -> bool:
        """Whether weights whose elements have changed places are updated alike."""
        plain, mixed = self.toy(lambda like: like), self.toy(_mixed)
        for step in range(3):
            grads = self.grads(step)
            try:
                self.step_in_core(plain, grads)
                self.step_in_core(mixed, [_mixed(grad) for grad in grads if grad is not None])
            except ValueError:
                return False
        pairs = zip(plain.params, mixed.params, strict=True)
        return all(is_same(_mixed(p.detach()), q.detach()) for p, q in pairs)

    def newcomers(self) -> str:
        """What is raised in core where a parameter has its first gradient in the third step; empty if nothing is."""
        toy = self.toy(lambda like: like)
        try:
            for step in range(3):
                self.step_in_core(toy, self.grads(step, without=toy.second_places if step < 2 else ()))
        except ValueError as error:
            return str(error.__cause__ or error)
        return ""


class _CoupledError(ValueError):
    """Updates of parts give other weights, states or settings than one step over all."""


class _NeedsGradientsError(Exception):
    """A plain step raised where some parameters had no gradient; so it is not asked of the relay either."""


def _check_keys(optimizer: Optimizer) -> None:
    params = {param for group in optimizer.param_groups for param in group["params"]}
    if strange := [key for key in optimizer.state if key not in params]:
        raise ValueError(
            f"{type(optimizer).__name__} keeps a state of {strange[0]!r}, which is no parameter: it would count once per layer, "
            "and is in no save. Use an optimizer that keeps its state by parameter, and counts in its groups"
        )


def _different(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups to try: all of them, or where there are many, the first of those that differ in more than numbers."""
    if len(groups) <= _GROUPS:
        return list(groups)
    kinds: dict[Any, list[dict[str, Any]]] = {}
    for group in groups:
        rest = {n: v for n, v in group.items() if n not in ("params", "param_names") and not isinstance(v, float)}
        kinds.setdefault((repr(rest), tuple(sorted({p.dim() for p in group["params"]}))), []).append(group)
    return [group for alike in kinds.values() for group in alike[:2]]


def _likes(params: Sequence[nn.Parameter], state: Any, noise: torch.Generator) -> list[nn.Parameter]:
    """What the weights of a toy group are like: two for every number of dimensions there.

    Those that the optimizer has a state of stand for themselves, since a count in the group belongs to such a state.
    """
    likes: list[nn.Parameter] = []
    for dims in sorted({param.dim() for param in params}):
        known = [param for param in params if param.dim() == dims and param in state]
        known.sort(key=lambda param: (param.numel() < 4096, param.numel()))
        longest = max(param.numel() for param in params if param.dim() == dims)
        length = min(max(longest, _LONG // 64), _LONG)
        shapes = ((length,), (length * 3 // 4,)) if dims == 1 else _SHAPES.get(dims, ((4,) * dims, (4,) * dims))
        new = [nn.Parameter(0.1 * torch.randn(shape, generator=noise)) for shape in shapes]
        likes += known[:2] if known else new
    return likes


def _side_by_side(tensors: Sequence[torch.Tensor]) -> list[nn.Parameter]:
    """Parameters with these values, as views of one flat buffer."""
    layout = Layout.of(tensors)
    views = layout.views(torch.zeros(layout.numel))
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    return [nn.Parameter(view) for view in views]


def _mixed(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in other places."""
    order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(tensor.numel()))
    return tensor.flatten()[order].view(tensor.shape)


def _fill(params: Sequence[nn.Parameter], grads: Grads) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()


def _hint(error: Exception) -> str:
    words = str(error).lower()
    if "closure" in words:
        return ". It wants a closure that runs the model again, and a relay step has one forward and backward"
    if "grad" in words and ("graph" in words or "require" in words):
        return ". It wants gradients of gradients, and a relay keeps no graph"
    return ""
