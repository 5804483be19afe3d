"""Make any torch optimizer work block by block, over masters instead of the model's own parameters.

An optimizer qualifies if updating blocks one at a time, in any order, gives the same bits as one `step` over all of
them. That is not looked up in a list: `check_blockwise` runs the optimizer on a toy and compares.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from l2l_core.settings import Changes, changes_of, lend, own, settings_of, settle

logger = logging.getLogger("l2l_core")

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


def make_optimizer(optimizer: OptimizerFactory | Optimizer, model: nn.Module) -> Optimizer:
    """The optimizer over the model's parameters: a ready one is adopted, a factory is called once with all of them.

    Raises:
        TypeError: neither an Optimizer nor a factory that returns one.
        ValueError: a ready optimizer holds parameters of some other model, or the optimizer cannot work block by block.
    """
    made = optimizer if isinstance(optimizer, Optimizer) else _call_factory(optimizer, model)
    known = set(model.parameters())
    foreign = [p for group in made.param_groups for p in group["params"] if p not in known]
    if foreign:
        raise ValueError(
            f"the optimizer holds {len(foreign)} parameter(s) that are not the model's (first of shape "
            f"{tuple(foreign[0].shape)}): build it from this model's parameters()"
        )
    _check_kind(made)
    check_blockwise(made)
    if isinstance(made, torch.optim.AdamW | torch.optim.Adam) and made.defaults.get("fused") is None:
        logger.info(
            "%s runs unfused, as torch does by default on the CPU; fused=True is many times faster", _name(made)
        )
    return made


def _call_factory(factory: Any, model: nn.Module) -> Optimizer:
    if not callable(factory):
        raise TypeError(
            f"optimizer={factory!r}: give a torch Optimizer or a factory such as partial(torch.optim.AdamW, lr=1e-4)"
        )
    made = factory(model.parameters())
    if not isinstance(made, Optimizer):
        raise TypeError(f"the optimizer factory returned a {type(made).__name__}, not a torch Optimizer")
    return made


def _check_kind(optimizer: Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS re-evaluates the loss inside step() and couples all parameters: it cannot update one layer at a time. "
            "Use AdamW or SGD"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam needs sparse gradients, and the EPS keeps dense ones. Use AdamW, and Embedding(sparse=False)"
        )


def over(optimizer: Optimizer, groups: list[dict[str, Any]], state: Any) -> Optimizer:
    """An optimizer of the same kind over other parameter groups, with settings of its own.

    Its hooks and wrappers stay behind. What is no plain value (a dictionary by parameter, say) it has in common with
    `optimizer`, as a part must; `copy_over` shares nothing.
    """
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({name: own(value) for name, value in optimizer.__dict__.items() if name not in _ITS_OWN})
    twin.defaults = {name: own(value) for name, value in optimizer.defaults.items()}
    twin.param_groups, twin.state = [{name: own(value) for name, value in group.items()} for group in groups], state
    for name in _hooks_of(optimizer):
        twin.__dict__[name] = OrderedDict()
    return twin


def copy_over(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: Any, counterparts: Mapping[Any, Any]
) -> Optimizer:
    """An optimizer of the same kind over other parameter groups that shares nothing with `optimizer`; it has no hooks.

    Args:
        groups: with the new parameters; the other values are copied, however deep.
        state: of the new parameters.
        counterparts: what stands for what, wherever the optimizer refers to it: parameters, the model.
    """
    twin = object.__new__(type(optimizer))
    memo = {id(old): new for old, new in counterparts.items()} | {id(optimizer): twin}
    kept = {name: value for name, value in optimizer.__dict__.items() if name not in (*_ITS_OWN, *_hooks_of(optimizer))}
    twin.__dict__.update({name: _deep_copy(value, memo) for name, value in kept.items()})
    twin.param_groups = [
        {name: value if name == "params" else _deep_copy(value, memo) for name, value in group.items()}
        for group in groups
    ]
    twin.state = state
    for name in _hooks_of(optimizer):
        twin.__dict__[name] = OrderedDict()
    return twin


_ITS_OWN = ("param_groups", "state", "step", "zero_grad")  # the last two: a scheduler's wrappers around the methods


def _hooks_of(optimizer: Optimizer) -> list[str]:
    return [name for name in optimizer.__dict__ if name.startswith("_optimizer_") and name.endswith("_hooks")]


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # of anybody's class: a lock, a file, a tensor with a graph
        return value


@contextmanager
def silent(optimizer: Optimizer) -> Iterator[None]:
    """Fire no step hooks in the block, neither the optimizer's nor those of all optimizers."""
    hooks = [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        optimizer_module._global_optimizer_pre_hooks,
        optimizer_module._global_optimizer_post_hooks,
    ]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, known in zip(hooks, kept, strict=True):
            each.update(known)


def replace_params(optimizer: Optimizer, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let `optimizer` update `new[p]` wherever it updated `p`; groups, order and state are kept."""
    for group in optimizer.param_groups:
        group["params"] = [new.get(param, param) for param in group["params"]]
    for old, param in new.items():
        if old in optimizer.state:
            optimizer.state[param] = optimizer.state.pop(old)


def slice_of(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> Optimizer:
    """`optimizer` restricted to some of its parameters; state is shared with it, and settings are lent (`settings.py`)."""
    wanted = set(params)
    groups = [{**g, "params": [p for p in g["params"] if p in wanted]} for g in optimizer.param_groups]
    return over(optimizer, groups, optimizer.state)


def scale_rate(part: Optimizer, factor: float) -> None:
    """Multiply the learning rate of every group, until the settings are taken over again."""
    if factor != 1.0:
        for group in part.param_groups:
            group["lr"] = group["lr"] * factor


def update_part(part: Optimizer, whole: Optimizer, rate: float = 1.0) -> Changes:
    """Let a part of an optimizer update its parameters, at `rate` times the learning rate.

    Returns what it made of the settings; `settle` them when all parts of the step have had their turn.
    """
    lend(whole, part)
    scale_rate(part, rate)
    given = settings_of(part)
    part.step()
    changes = changes_of(part, given)
    return changes if rate == 1.0 else {place: value for place, value in changes.items() if place[1] != "lr"}


def fire_hooks(hooks: Mapping[int, Callable[..., Any]], optimizer: Optimizer) -> None:
    """Call the user's step hooks once for a whole step of the relay."""
    for hook in hooks.values():
        hook(optimizer, (), {})


def check_blockwise(optimizer: Optimizer) -> None:
    """Run the optimizer on a toy, whole and block by block, and compare the bits.

    Raises:
        ValueError: the results differ: it couples parameters or keeps state outside of them.
    """
    whole, blocks = _toy(optimizer), _toy(optimizer)
    parts = [slice_of(blocks, params[half::2]) for half in (1, 0) for params in [_params(blocks)]]
    for step in range(3):
        _fill_grads(_params(whole), step)
        _fill_grads(_params(blocks), step)
        try:
            with silent(optimizer):
                whole.step()
                settle(blocks, {place: value for part in parts for place, value in update_part(part, blocks).items()})
        except Exception as error:
            raise ValueError(f"{_name(optimizer)} cannot run block by block: its step() raised {error!r}") from error
    if not all(torch.equal(a, b) for a, b in zip(_params(whole), _params(blocks), strict=True)):
        raise ValueError(
            f"{_name(optimizer)} couples parameters of different layers or keeps state outside of them: updating one layer "
            "at a time gives other weights than one step over all. Use an optimizer that treats each parameter by itself"
        )


def _toy(optimizer: Optimizer) -> Optimizer:
    generator = torch.Generator().manual_seed(0)
    groups = []
    for group in optimizer.param_groups:
        dims = max((p.dim() for p in group["params"]), default=1)
        params = [nn.Parameter(torch.randn((3,) * dims, generator=generator)) for _ in range(4)]
        settings = {
            name: copy.deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")
        }
        groups.append({**settings, "params": params})
    twin = over(optimizer, groups, defaultdict(dict))
    for name, value in list(twin.__dict__.items()):
        if name not in ("param_groups", "state", "defaults") and isinstance(value, dict | list | torch.Tensor):
            twin.__dict__[name] = copy.copy(value)  # what is no plain value, and so not its own yet
    return twin


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _fill_grads(params: Sequence[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for scale, param in enumerate(params, start=1):
        param.grad = scale * torch.randn(param.shape, generator=generator)


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
