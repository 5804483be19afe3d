"""Construction of the optimizer, and refusal of optimizers that cannot update layer by layer.

An optimizer qualifies if block-by-block updates, in any order, give the same bits as one `step` over all blocks, and if all its
state can be saved. Torch's own optimizers are in a table; any other is tried (`optimizer_conformance.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.eps.optimizers.optimizer_conformance import Findings, changed_attributes, try_blockwise
from l2l_core.eps.optimizers.optimizer_list import ListEntry, OptimizerList, make_optimizer_list
from l2l_core.eps.optimizers.wrapped_optimizer import unwrap_optimizer

logger = logging.getLogger("l2l_core")

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]

_ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_OF_TORCH: dict[str, Findings] = {name: Findings() for name in _ELEMENTWISE}
_OF_TORCH |= {name: Findings(elementwise=False) for name in ("Adafactor", "Muon")}


def make_optimizer(
    optimizer: OptimizerFactory | Optimizer | Sequence[ListEntry],
    model: nn.Module,
    loss_modules: Callable[[], Iterable[nn.Module]] = list,
) -> tuple[Optimizer, Findings]:
    """Adopt an optimizer over the model's parameters, or make one with a factory or from a list.

    Wrappers of training frameworks are left out if they only forward, see `wrapped_optimizer.py`. `loss_modules` finds the
    modules that the loss uses beside the model, for a message.

    Returns:
        The optimizer, and the findings about it.

    Raises:
        TypeError: neither an Optimizer nor a factory that returns one.
        ValueError: the optimizer has parameters of another model, or cannot work block by block.
    """
    made: Any = unwrap_optimizer(optimizer)
    if not isinstance(made, Optimizer):
        if isinstance(optimizer, list | tuple):
            made = make_optimizer_list(optimizer, model)
            _check_parameters(made, model, loss_modules)
            return made, _findings_of_list(made)
        if not callable(optimizer):
            raise TypeError(
                f"optimizer={optimizer!r}: give a torch Optimizer or a factory such as partial(torch.optim.AdamW, lr=1e-4)"
            )
        made = unwrap_optimizer(optimizer(model.parameters()))
        if not isinstance(made, Optimizer):
            raise TypeError(f"the optimizer factory returned a {type(made).__name__}, not a torch Optimizer")
    _check_kind(made)
    _check_parameters(made, model, loss_modules)
    findings = known_findings(made) or try_blockwise(made)
    if isinstance(made, torch.optim.AdamW | torch.optim.Adam) and made.defaults.get("fused") is None:
        logger.info(
            "%s runs unfused, as torch does by default on the CPU; fused=True is many times faster", type(made).__name__
        )
    return made, findings


def _findings_of_list(optimizers: OptimizerList) -> Findings:
    """Return what holds for all optimizers of a list together."""
    found: list[Findings] = []
    for optimizer in optimizers.optimizers:
        _check_kind(optimizer)
        if (known := known_findings(optimizer)) is None and (names := changed_attributes(optimizer)):
            raise ValueError(
                f"{type(optimizer).__name__} changes its attribute {names[0]!r} in a step, and in a list of optimizers a relay "
                "keeps only settings of groups and the state of parameters: keep it there, or give that optimizer by itself"
            )
        found.append(known or try_blockwise(optimizer))
    return Findings(
        elementwise=all(each.elementwise for each in found),
        newcomers=next((each.newcomers for each in found if each.newcomers), ""),
        follows_rate=any(each.follows_rate for each in found),
        couples=next((each.couples for each in found if each.couples), ""),
    )


def _check_parameters(made: Optimizer, model: nn.Module, loss_modules: Callable[[], Iterable[nn.Module]]) -> None:
    """Raise ValueError if the optimizer holds parameters that are not the model's."""
    own = set(model.parameters())  # by identity, as tensors hash
    held = [param for group in made.param_groups for param in group["params"]]
    foreign = [param for param in held if param not in own]
    if not foreign:
        return
    begin = (
        f"the optimizer holds {len(foreign)} parameter(s) that are not the model's (first of shape "
        f"{tuple(foreign[0].shape)}): "
    )
    of_loss = [module for module in loss_modules() if any(param is foreign[0] for param in module.parameters())]
    if of_loss:
        name, in_sequence = type(of_loss[0]).__name__, isinstance(model, nn.Sequential)
        part = (
            "a part of a model that holds both" if in_sequence else "a part of the model (model.criterion = criterion)"
        )
        raise ValueError(
            f"{begin}they belong to {name} in the loss. Make it {part}, and the optimizer after that; or leave them out of this "
            "optimizer and give them another one, which is not passed to the relay: call its step() and zero_grad() after "
            "relay.step(batch)"
        )
    if len(foreign) == len(held):
        raise ValueError(
            f"{begin}none of its parameters is. Build a new optimizer over this model's parameters(); if their number and order "
            "are those of before (load_state_dict(assign=True)), new.load_state_dict(optimizer.state_dict()) keeps the state"
        )
    raise ValueError(
        f"{begin}they were parts of the model before (a replaced head, tied weights, weight_norm), or are of another one. "
        f"Take them out; the others keep their state:\n{_WITHOUT_OTHERS}"
    )


_WITHOUT_OTHERS = """\
own = set(model.parameters())
for group in optimizer.param_groups:
    for param in set(group["params"]) - own:
        optimizer.state.pop(param, None)
    group["params"] = [param for param in group["params"] if param in own]"""


def known_findings(optimizer: Optimizer) -> Findings | None:
    """Return the findings about one of torch's own optimizers; None if they also depend on its options or attributes."""
    kind, groups = type(optimizer), optimizer.param_groups
    if getattr(torch.optim, kind.__name__, None) is not kind or not kind.step.__module__.startswith("torch.optim."):
        return None
    # LR schedulers wrap `step`; parts use the method of the class
    changed = [name for name, value in vars(optimizer).items() if callable(value) and name not in ("step", "zero_grad")]
    # Fused SGD with momentum raises for a parameter whose first gradient is in a later step
    unusual = ("capturable", "differentiable", *(("fused",) if kind is torch.optim.SGD else ()))
    strange = [
        key for key in optimizer.state if not isinstance(key, torch.Tensor)
    ]  # state of old parameters may remain
    if changed or strange or any(group.get(option) for group in groups for option in unusual):
        return None
    return _OF_TORCH.get(kind.__name__)


def rounds_weights(optimizer: Optimizer) -> bool:
    """Return whether the optimizer declares that it rounds weights stochastically, so that they may be bfloat16."""
    return bool(getattr(optimizer, "rounds_weights", False))


def _check_kind(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS re-evaluates the loss inside step() and couples all parameters: it cannot update one layer at a time. "
            "Use AdamW or SGD"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam needs sparse gradients, and the EPS keeps dense ones. Use AdamW, and Embedding(sparse=False)"
        )
    if callable(getattr(optimizer, "first_step", None)) and callable(getattr(optimizer, "second_step", None)):
        raise ValueError(
            f"{name} needs two gradients per step (first_step, second_step), and a relay step has one forward and backward. Use "
            "the optimizer inside of it by itself"
        )
    inner = [key for key, value in vars(optimizer).items() if isinstance(value, Optimizer)]
    if inner:
        raise ValueError(
            f"{name} is a wrapper around a {type(vars(optimizer)[inner[0]]).__name__} in .{inner[0]}, whose settings and state a "
            "relay cannot divide by layer, save or branch. Give that optimizer by itself"
        )
