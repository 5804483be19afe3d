"""Several optimizers over different parameters of a model, as one: Muon for matrices and AdamW for the rest.

    optimizer=[(lambda name, p: p.ndim == 2 and "layers" in name, partial(torch.optim.Muon, lr=0.02)),
               (lambda name, p: True, partial(torch.optim.AdamW, lr=3e-4))]

Ready optimizers may stand in the list by themselves, ``[muon, adamw]``. Groups and state are those of the optimizers at any time:
the list keeps none, so schedulers over one of them, and what is loaded into it or replaced, count as in a plain loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.eps.optimizers.wrapped_optimizer import unwrap_optimizer

Filter = Callable[[str, nn.Parameter], bool]
ListEntry = Optimizer | tuple[Filter | Iterable[nn.Parameter], Callable[[list[nn.Parameter]], Optimizer] | Optimizer]


class OptimizerList(Optimizer):
    """Optimizers over different parameters as one, whose groups and state are theirs.

    Args:
        optimizers: at least one; no parameter may be in two of them.

    Attributes:
        optimizers: as given; they remain ordinary optimizers.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self.defaults = {}
        self.__setstate__({})  # makes the dictionaries of hooks; `Optimizer.__init__` would set groups, too
        self.defaults.clear()
        vars(self)["state"] = _JointState(self.optimizers)

    def __reduce__(self) -> tuple[Any, ...]:
        return OptimizerList, (self.optimizers,)  # the copy would have no optimizers, or groups beside theirs

    def _groups(self) -> tuple[dict[str, Any], ...]:  # a tuple, since a group added to a list would be lost
        return tuple(chain.from_iterable(each.param_groups for each in self.optimizers))

    def _set_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        for each, own in self.split(groups):
            each.param_groups = own

    def _state(self) -> Any:
        return vars(self)["state"]

    def _set_state(self, state: Mapping[Any, Any]) -> None:
        for each in self.optimizers:
            each.state = state_of_groups(each.param_groups, state)

    param_groups: Any = property(_groups, _set_groups, doc="The groups of all optimizers, in order.")
    state: Any = property(_state, _set_state, doc="The state of all optimizers; a change of it changes theirs.")

    def split(self, groups: Sequence[dict[str, Any]]) -> list[tuple[Optimizer, list[dict[str, Any]]]]:
        """Return each optimizer with its groups, among those of all of them.

        Raises:
            ValueError: another number of groups.
        """
        counts = [len(each.param_groups) for each in self.optimizers]
        if len(groups) != sum(counts):
            names = ", ".join(f"{type(each).__name__} {n}" for each, n in zip(self.optimizers, counts, strict=True))
            raise ValueError(
                f"{len(groups)} groups for a list of optimizers that have {sum(counts)} ({names}): give as many groups, or set "
                "the param_groups of one optimizer"
            )
        remaining = iter(groups)
        return [(each, list(islice(remaining, n))) for each, n in zip(self.optimizers, counts, strict=True)]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each optimizer, in order, with its hooks; call those of the list before and after all."""
        given = (self,) if closure is None else (self, closure)
        for hook in [*self._optimizer_step_pre_hooks.values()]:
            hook(self, given, {})
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            if any(group["params"] for group in each.param_groups):  # a part may have none of its parameters
                each.step()
        for hook in [*self._optimizer_step_post_hooks.values()]:
            hook(self, given, {})
        return loss

    # PyTorch would wrap `step` in the hooks of all optimizers, which are called by the step of each
    vars(step)["hooked"] = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group for the list.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a group for a list of optimizers, but it must be in one of them: close the relay, add the group to one of the "
            "optimizers, and make a new relay with them"
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what `state_dict` returned, by the method of each optimizer.

        Raises:
            ValueError: it has other groups; nothing was loaded.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        parts = self.split(state_dict["param_groups"])
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if len(group["params"]) != len(loaded["params"]):
                raise ValueError(
                    f"the loaded state dict has a group of {len(loaded['params'])} parameters, and that of the optimizer has "
                    f"{len(group['params'])}: load one of the same list of optimizers"
                )
        for each, groups in parts:
            each.load_state_dict({"state": state_of_groups(groups, state_dict["state"]), "param_groups": groups})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @property
    def _opt_called(self) -> bool:
        return all(getattr(optimizer, "_opt_called", False) for optimizer in self.optimizers)

    @_opt_called.setter
    def _opt_called(self, value: bool) -> None:  # read by learning rate schedulers, which belong to one of them
        for optimizer in self.optimizers:
            vars(optimizer)["_opt_called"] = value


class _JointState(MutableMapping[Any, Any]):
    """State of all optimizers of a list, by parameter."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _state_with(self, key: Any) -> Any:
        """Return the state that has a key, or else that of the optimizer of this parameter."""
        states = (each.state for each in self._optimizers if key in each.state)
        owners = (
            each.state
            for each in self._optimizers
            if any(key is param for group in each.param_groups for param in group["params"])
        )
        if (found := next(chain(states, owners), None)) is None:
            raise KeyError(key)
        return found

    def __contains__(self, key: object) -> bool:
        return any(key in each.state for each in self._optimizers)

    def __getitem__(self, key: Any) -> Any:
        return self._state_with(key)[key]  # of an optimizer: makes an entry where there is none

    def get(self, key: Any, default: Any = None) -> Any:
        return self._state_with(key)[key] if key in self else default

    def pop(self, key: Any, *default: Any) -> Any:
        return self._state_with(key).pop(key) if key in self or not default else default[0]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state_with(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._state_with(key)[key]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(each.state for each in self._optimizers)

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)


def state_of_groups(groups: Iterable[Mapping[str, Any]], state: Mapping[Any, Any]) -> defaultdict[Any, Any]:
    """Return the state of the parameters in some groups, or of what stands for them in a state dict."""
    held = [key for group in groups for key in group["params"]]
    return defaultdict(dict, {key: state[key] for key in held if key in state})


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of a list, or the one that is given."""
    return optimizer.optimizers if isinstance(optimizer, OptimizerList) else (optimizer,)


def with_members(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return an optimizer and, if it is a list, those in it: all that hold hooks and attributes."""
    return (optimizer, *(each for each in members_of(optimizer) if each is not optimizer))


def make_optimizer_list(entries: Sequence[ListEntry], model: nn.Module) -> OptimizerList:
    """Make one optimizer of optimizers, or of pairs of parameters (or a filter) and a factory.

    A parameter belongs to the first filter that accepts it.

    Raises:
        TypeError: an entry of another form.
        ValueError: an optimizer without parameters, or a parameter in two of them.
    """
    if not entries:
        raise TypeError("optimizer=[]: give at least one optimizer")
    taken: set[nn.Parameter] = set()
    optimizers: list[Optimizer] = []
    for place, entry in enumerate(entries):
        optimizers.append(made := _make_entry(place, entry, model, taken))
        params = [param for group in made.param_groups for param in group["params"]]
        if twice := taken.intersection(params):
            shape = tuple(next(iter(twice)).shape)
            raise ValueError(
                f"optimizer[{place}] has {len(twice)} parameters of an earlier one (first of shape {shape})"
            )
        taken.update(params)
    return OptimizerList(optimizers)


def _make_entry(place: int, entry: Any, model: nn.Module, taken: set[nn.Parameter]) -> Optimizer:
    if isinstance(entry := unwrap_optimizer(entry), Optimizer):
        return entry
    if not (isinstance(entry, tuple) and len(entry) == 2):
        raise TypeError(
            f"optimizer[{place}]={entry!r}: give an optimizer, or a pair (parameters or filter(name, parameter), factory)"
        )
    which, factory = entry
    if isinstance(factory := unwrap_optimizer(factory), Optimizer):
        return factory
    free = ((name, param) for name, param in model.named_parameters() if param not in taken)
    params = [param for name, param in free if which(name, param)] if callable(which) else list(which)
    if not params:
        raise ValueError(f"optimizer[{place}] would have no parameters: its filter accepts none that are left")
    made = unwrap_optimizer(factory(params))
    if not isinstance(made, Optimizer):
        raise TypeError(f"optimizer[{place}]: the factory returned a {type(made).__name__}, not a torch Optimizer")
    return made
