"""The proof that an optimizer can work block by block, be saved and be branched: by trying it on a toy.

Three optimizers of the user's kind and settings train equal weights with equal gradients for ten steps. The first takes
plain steps over all of them. The second is updated in parts, as `LayerStore` does. The third joins halfway, and knows
what a save would hold of the first. Weights, state and settings of all three must have the same bits. Matrices have 4,096
elements and more, in the dimensions that the model's have: quantised state, say, begins there. On the way a block has no
gradient for two steps, as a frozen layer has none.

What was found of one of torch's own holds for as long as the process lives, by what determines it (`known.py`).

What it is not: a proof for every input. An optimizer that couples layers from its eleventh step on is not found out here;
`settings.merge` refuses what it then makes of its settings.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from l2l_core.eps.optimizers.known import key_of
from l2l_core.eps.optimizers.parts import scale_rate, slice_of, step_alone, update_part
from l2l_core.eps.optimizers.settings import (
    Changes,
    differing_settings,
    is_same,
    merge,
    put,
    settings_of,
    settle,
    to_save,
)
from l2l_core.eps.optimizers.states import clone_state, differing
from l2l_core.eps.optimizers.toys import RATE, Form, Grads, Toy, check_keys, fill, mixed
from l2l_core.model import Tensors, copies_of, decode, encode
from l2l_core.surgery import same_random_numbers

_STEPS, _JOINS = 10, 4
_SITS_OUT = (6, 7)  # steps in which the second block has no gradient
_FOUND: dict[Hashable, Findings] = {}
_HIGH_RATE = 1e-2  # at a low one, what couples layers may be lost in rounding for ten steps, and not for a thousand


@dataclass(frozen=True, slots=True)
class Findings:
    """Holds what was found out about an optimizer that qualifies.

    Attributes:
        elementwise: whether it treats each element by itself. Otherwise it adds elements up, and bits depend on the number
            of cores that share an operation.
        newcomers: why it cannot take a parameter that has its first gradient in a later step; empty where it can.
        follows_rate: whether what it keeps in its settings depends on the learning rate, so that a layer that warms up would
            have others.
    """

    elementwise: bool = True
    newcomers: str = ""
    follows_rate: bool = False

    def refuse_warm_up(self, who: str, optimizer: Optimizer) -> NoReturn:
        """Say that no layer can warm up.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"layer {who} warms up, and {type(optimizer).__name__} keeps in its settings what it computes from the learning "
            "rate: those would be of one layer or of the others. Insert layers with warmup=0; nothing has been trained"
        )

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
    """Refuse a mode in which the optimizer takes no steps; `part` of it has no parameters.

    Raises:
        ValueError: its `step` raises without any parameter.
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
    known = key_of(optimizer)
    if known in _FOUND:
        return _FOUND[known]
    with same_random_numbers():
        form = Form(optimizer)
        _try(form)
        rates = [group.get("lr") for group in optimizer.param_groups]
        if any(isinstance(rate, float) and rate < RATE for rate in rates):
            _try_at_a_rate_that_shows(optimizer)
        findings = Findings(_is_elementwise(form), _newcomers(form), _follows_rate(form))
    if known is not None:
        _FOUND[known] = findings
    return findings


def _try_at_a_rate_that_shows(optimizer: Optimizer) -> None:
    """Refuse an optimizer that couples layers at a higher rate than the user's."""
    try:
        _try(Form(optimizer, _HIGH_RATE))
    except _CoupledError:
        raise
    except ValueError:
        pass  # it is what the user's own rate is that must work


def _try(form: Form) -> None:
    try:
        _train(form, sits_out=_SITS_OUT)
    except _NeedsGradientsError:
        _train(form, sits_out=())


def _train(form: Form, sits_out: Sequence[int]) -> None:
    whole, blocks = form.toy(), form.toy()
    parts = [slice_of(blocks.optimizer, params) for params in (blocks.second, blocks.first)]
    resumed = whole
    for step in range(_STEPS):
        grads = form.grads(step, without=whole.second_places if step in sits_out else ())
        if step == _JOINS:
            resumed = _resumed(form, whole)  # before this step, which both then take
        _step_in_core(form, whole, grads, may_need_all=bool(sits_out))
        if resumed is not whole:
            _step_in_core(form, resumed, grads)
        _step_in_parts(form, blocks, parts, grads)
    _check_moved(form, whole)
    _compare(form, whole, blocks, _CoupledError, _COUPLED)
    _compare(form, whole, resumed, ValueError, _UNSAVED)


_COUPLED = (
    "couples parameters of different layers or keeps state outside of them ({}): updating one layer at a time gives other "
    "weights than one step over all. Use an optimizer that treats each parameter by itself"
)
_UNSAVED = (
    "keeps something that a save would not hold, beside its settings and the state of its parameters ({} after a resume): "
    "training could not go on from a save, nor on a branch. Keep it in the state of each parameter, or as a number in the groups"
)


def _resumed(form: Form, toy: Toy) -> Toy:
    """Make a new optimizer that knows of `toy` what a save would hold; refuse what cannot be encoded or cloned."""
    check_keys(toy.optimizer)
    tensors: Tensors = {}
    state = toy.optimizer.state
    try:
        encoded = [encode(state.get(p, {}), f"state {i}", tensors) for i, p in enumerate(toy.params)]
        plain = [encode(part, f"settings {i}", tensors) for i, part in enumerate(to_save(toy.optimizer))]
        held = [clone_state(state[param]) for param in toy.params if param in state]  # as undo and branches do
    except Exception as error:
        raise ValueError(
            f"{form.name} keeps what a relay cannot copy or save ({error}): verify, undo, branches and saves would fail. "
            "Use an optimizer that keeps ordinary tensors and plain data"
        ) from error
    del held
    new, take = form.toy(), copies_of(tensors)
    with torch.no_grad():
        for param, value, values in zip(new.params, toy.params, encoded, strict=True):
            param.copy_(value)
            new.optimizer.state.pop(param, None)  # a toy begins with what the user's optimizer knows
            if known := decode(values, take):
                new.optimizer.state[param] = known
    put(new.optimizer, [held for part in plain for held in decode(part, take)])
    return new


def _step_in_core(form: Form, toy: Toy, grads: Grads, may_need_all: bool = False) -> None:
    """Take a plain step over all weights."""
    fill(toy.params, grads)
    before = torch.get_rng_state()
    try:
        step_alone(toy.optimizer)
    except Exception as error:
        if may_need_all and any(grad is None for grad in grads):
            raise _NeedsGradientsError from error
        raise ValueError(f"{form.name} cannot run block by block: its step() raised {error!r}{_hint(error)}") from error
    if not torch.equal(before, torch.get_rng_state()):
        raise ValueError(
            f"{form.name} draws random numbers in its step: layers that are updated one at a time, in another order, get "
            "others than in one step over all. Switch that off (stochastic rounding, say), or use another optimizer"
        )


def _step_in_parts(form: Form, toy: Toy, parts: Sequence[Optimizer], grads: Grads) -> None:
    """Take the same step as a relay does: one part after another, in the order of backward."""
    fill(toy.params, grads)
    changes: Changes = {}
    for part in parts:  # without a gradient a block is not updated, in a relay either
        if any(p.grad is not None for group in part.param_groups for p in group["params"]):
            try:
                merge(changes, update_part(part, toy.optimizer))
            except Exception as error:
                raise _CoupledError(f"{form.name} cannot run block by block: {error}") from error
    settle(toy.optimizer, changes)


def _check_moved(form: Form, toy: Toy) -> None:
    """Refuse an optimizer whose toy nothing has happened to: it would prove nothing."""
    new = form.toy()
    still = all(torch.equal(a, b) for a, b in zip(toy.params, new.params, strict=True))
    if still and not toy.optimizer.state and not differing_settings(*map(settings_of, (toy.optimizer, new.optimizer))):
        raise ValueError(
            f"{form.name} cannot be tried: ten steps of a copy of it, with other weights, changed nothing. It seems to hold "
            "on to its parameters outside of its groups; use an optimizer that reads them from there"
        )


def _compare(form: Form, whole: Toy, other: Toy, kind: type[ValueError], message: str) -> None:
    """Refuse the optimizer if weights, states or settings differ."""
    pairs = list(zip(whole.params, other.params, strict=True))
    names = [f"setting {n!r}" for n in differing_settings(settings_of(whole.optimizer), settings_of(other.optimizer))]
    states = [(whole.optimizer.state.get(p, {}), other.optimizer.state.get(q, {})) for p, q in pairs]
    names += dict.fromkeys(f"state {name!r}" for one, another in states for name in differing(one, another))
    names += ["weights"] if not all(is_same(p.detach(), q.detach()) for p, q in pairs) else []
    if names:
        listed = ", ".join(names[:4])
        raise kind(f"{form.name} {message.format(f'other {listed}')}")


def _is_elementwise(form: Form) -> bool:
    """Tell whether weights whose elements have changed places are updated alike, and so is what is known of them."""
    plain, other = form.toy(lambda like: like), form.toy(mixed)
    for step in range(3):
        grads = form.grads(step)
        try:
            _step_in_core(form, plain, grads)
            _step_in_core(form, other, [mixed(grad) for grad in grads if grad is not None])
        except ValueError:
            return False
    pairs = list(zip(plain.params, other.params, strict=True))
    states = [(plain.optimizer.state.get(p, {}), other.optimizer.state.get(q, {})) for p, q in pairs]
    return all(is_same(mixed(p.detach()), q.detach()) for p, q in pairs) and not any(
        differing({name: _mixed_if_like(p, value) for name, value in one.items()}, another)
        for (p, _), (one, another) in zip(pairs, states, strict=True)
    )


def _mixed_if_like(param: torch.Tensor, value: Any) -> Any:
    """Mix what has an element for each of the parameter's."""
    return mixed(value) if isinstance(value, torch.Tensor) and value.shape == param.shape else value


def _newcomers(form: Form) -> str:
    """Find what is raised in core where a parameter has its first gradient in the third step; empty if nothing is."""
    toy = form.toy(lambda like: like)
    try:
        for step in range(3):
            _step_in_core(form, toy, form.grads(step, without=toy.second_places if step < 2 else ()))
    except ValueError as error:
        return str(error.__cause__ or error)
    return ""


def _follows_rate(form: Form) -> bool:
    """Tell whether settings but for the rate itself are others where the rate is."""
    toys = [form.toy(lambda like: like) for _ in range(2)]
    if not all("lr" in group for group in form.groups):
        return False
    scale_rate(toys[1].optimizer, 0.5)
    try:
        for toy in toys:
            _step_in_core(form, toy, form.grads(0))
    except ValueError:
        return False
    return differing_settings(*(settings_of(toy.optimizer) for toy in toys)) not in ([], ["lr"])


class _CoupledError(ValueError):
    """Says that updates of parts give other weights, states or settings than one step over all."""


class _NeedsGradientsError(Exception):
    """Says that a plain step raised where some parameters had no gradient; so it is not asked of the relay either."""


def _hint(error: Exception) -> str:
    words = str(error).lower()
    if "closure" in words:
        return ". It wants a closure that runs the model again, and a relay step has one forward and backward"
    if "grad" in words and ("graph" in words or "require" in words):
        return ". It wants gradients of gradients, and a relay keeps no graph"
    return ""
