"""Make any torch optimizer work block by block, over masters instead of the model's own parameters.

An optimizer qualifies if updating blocks one at a time, in any order, gives the same bits as one `step` over all of
them. That is not looked up in a list: `check_blockwise` runs the optimizer on a toy and compares.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

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
    """An optimizer of the same kind and settings over other parameter groups; its hooks and wrappers stay behind."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    for name in ("step", "zero_grad"):
        twin.__dict__.pop(name, None)  # a scheduler's wrapper around the instance's own method
    twin.param_groups, twin.state = groups, state
    twin._optimizer_step_pre_hooks = type(optimizer._optimizer_step_pre_hooks)()
    twin._optimizer_step_post_hooks = type(optimizer._optimizer_step_post_hooks)()
    return twin


def replace_params(optimizer: Optimizer, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let `optimizer` update `new[p]` wherever it updated `p`; groups, order and state are kept."""
    for group in optimizer.param_groups:
        group["params"] = [new.get(param, param) for param in group["params"]]
    for old, param in new.items():
        if old in optimizer.state:
            optimizer.state[param] = optimizer.state.pop(old)


def slice_of(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> Optimizer:
    """`optimizer` restricted to some of its parameters; state is shared with it."""
    wanted = set(params)
    groups = [{**g, "params": [p for p in g["params"] if p in wanted]} for g in optimizer.param_groups]
    return over(optimizer, groups, optimizer.state)


def sync_settings(part: Optimizer, whole: Optimizer) -> None:
    """Take over the settings of each group (learning rates move between steps), and the state (loading exchanges it)."""
    part.state = whole.state
    for mine, theirs in zip(part.param_groups, whole.param_groups, strict=True):
        mine.update((name, value) for name, value in theirs.items() if name != "params")


def scale_rate(part: Optimizer, factor: float) -> None:
    """Multiply the learning rate of every group, until the settings are taken over again."""
    if factor != 1.0:
        for group in part.param_groups:
            group["lr"] = group["lr"] * factor


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
            whole.step()
            for part in parts:
                part.step()
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
            twin.__dict__[name] = copy.copy(value)
    return twin


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _fill_grads(params: Sequence[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for scale, param in enumerate(params, start=1):
        param.grad = scale * torch.randn(param.shape, generator=generator)


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
