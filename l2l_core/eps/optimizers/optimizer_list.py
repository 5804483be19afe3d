"""Several optimizers over different parameters of a model, as one: Muon for matrices and AdamW for the rest.

    optimizer=[(lambda name, p: p.ndim == 2 and "layers" in name, partial(torch.optim.Muon, lr=0.02)),
               (lambda name, p: True, partial(torch.optim.AdamW, lr=3e-4))]

Ready optimizers may stand in the list by themselves, ``[muon, adamw]``. Each keeps its own groups, which are also groups of the
list, so learning rate schedulers over it work as in a plain loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.eps.optimizers.partial_optimizer import clone_shallow, step_part
from l2l_core.eps.optimizers.wrapped_optimizer import unwrap_optimizer

Filter = Callable[[str, nn.Parameter], bool]
ListEntry = Optimizer | tuple[Filter | Iterable[nn.Parameter], Callable[[list[nn.Parameter]], Optimizer] | Optimizer]

_MEMBER = "optimizer"  # key in a group: index of its optimizer in the list


class OptimizerList(Optimizer):
    """Optimizers over different parameters, with one list of groups and one state.

    Args:
        optimizers: at least one; no parameter may be in two of them.

    Attributes:
        optimizers: as given; their groups and state are those of the list.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        for index, optimizer in enumerate(optimizers):
            for group in optimizer.param_groups:
                group[_MEMBER] = index
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers = tuple(optimizers)
        for optimizer in optimizers:
            self.state.update(optimizer.state)
        self.link()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with each optimizer, in order."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, optimizer in enumerate(self.optimizers):
            groups = self._groups_of(index)
            if any(group["params"] for group in groups):  # a part may have none of its parameters
                part = clone_shallow(optimizer, [], self.state)
                part.param_groups = groups  # the same objects: a step may change settings
                step_part(part)
        return loss

    def link(self) -> None:
        """Give each optimizer its groups and a view of its state; keep the values that it has loaded.

        Raises:
            ValueError: groups were added to one of them.
        """
        for index, optimizer in enumerate(self.optimizers):
            groups = self._groups_of(index)
            if not (isinstance(optimizer.state, _StateOf) and optimizer.state.whole is self):
                self._take_over(optimizer, groups)
            elif len(optimizer.param_groups) != len(groups):
                raise ValueError(
                    f"{type(optimizer).__name__} has {len(optimizer.param_groups)} groups and had {len(groups)} "
                    "(add_param_group?): close the relay, change the groups, and make a new relay with the same optimizers"
                )
            optimizer.param_groups = groups
            vars(optimizer)["state"] = _StateOf(self, index)

    def unlink(self) -> None:
        """Make the optimizers ordinary again, when the relay is closed."""
        for index, optimizer in enumerate(self.optimizers):
            optimizer.param_groups = self._groups_of(index)
            vars(optimizer)["state"] = defaultdict(dict, dict(optimizer.state))
        for group in self.param_groups:
            group.pop(_MEMBER, None)

    def _groups_of(self, index: int) -> list[dict[str, Any]]:
        members = [group for group in self.param_groups if group.get(_MEMBER) == index]
        return members or self.optimizers[index].param_groups  # after `unlink`

    def _take_over(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        """Take settings and state that `load_state_dict` has put into new objects of one optimizer."""
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key not in ("params", _MEMBER)})
        for param in (param for group in groups for param in group["params"]):
            if param in optimizer.state:
                self.state[param] = optimizer.state[param]

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what `state_dict` returned."""
        super().load_state_dict(state_dict)
        self.link()

    @property
    def _opt_called(self) -> bool:
        return all(getattr(optimizer, "_opt_called", False) for optimizer in self.optimizers)

    @_opt_called.setter
    def _opt_called(self, value: bool) -> None:  # read by learning rate schedulers, which belong to one of them
        for optimizer in self.optimizers:
            vars(optimizer)["_opt_called"] = value


class _StateOf(MutableMapping[Any, Any]):
    """State of one optimizer of a list: that of its parameters."""

    def __init__(self, whole: OptimizerList, index: int) -> None:
        self.whole, self._index = whole, index

    def _params(self) -> set[nn.Parameter]:
        return {
            param for group in self.whole.param_groups if group[_MEMBER] == self._index for param in group["params"]
        }

    def __getitem__(self, param: Any) -> Any:
        return self.whole.state[param]

    def __setitem__(self, param: Any, value: Any) -> None:
        self.whole.state[param] = value

    def __delitem__(self, param: Any) -> None:
        del self.whole.state[param]

    def __iter__(self) -> Iterator[Any]:
        own = self._params()
        return iter([param for param in self.whole.state if param in own])

    def __len__(self) -> int:
        return len(list(iter(self)))


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
