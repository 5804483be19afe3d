"""Adams in ten lines that count their steps wherever an optimizer can."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class ShortAdam(Optimizer):
    """Adam in ten lines. Where it counts its steps is the subclass's affair."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, **defaults: Any) -> None:
        super().__init__(params, dict(lr=lr, **defaults))

    def count(self, group: dict[str, Any]) -> float:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            t = self.count(group)
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state.setdefault(p, {"m": torch.zeros_like(p), "v": torch.zeros_like(p)})
                    state["m"].lerp_(p.grad, 0.1)
                    state["v"].lerp_(p.grad**2, 0.01)
                    p -= group["lr"] * state["m"] / (1 - 0.9**t) / ((state["v"] / (1 - 0.99**t)).sqrt() + 1e-8)


class CountsInTheGroup(ShortAdam):
    def count(self, group: dict[str, Any]) -> float:
        group["step"] = group.get("step", 0) + 1
        return group["step"]


class CountsFromADefault(ShortAdam):
    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr, step=0)

    def count(self, group: dict[str, Any]) -> float:
        group["step"] += 1
        return group["step"]


class CountsInATensor(CountsFromADefault):
    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["step"] = torch.zeros(())

    def count(self, group: dict[str, Any]) -> float:
        return float(group["step"].add_(1))


class CountsInAList(CountsFromADefault):
    def count(self, group: dict[str, Any]) -> float:
        group.setdefault("log", []).append(group["lr"])
        return len(group["log"])


class CountsAmongItsDefaults(ShortAdam):
    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr, steps=0)

    def count(self, group: dict[str, Any]) -> float:
        if group is self.param_groups[0]:
            self.defaults["steps"] += 1
        return self.defaults["steps"]


class CountsOnItself(ShortAdam):
    steps = 0

    def count(self, group: dict[str, Any]) -> float:
        if group is self.param_groups[0]:
            self.steps += 1
        return self.steps


COUNTING = [
    CountsInTheGroup,
    CountsFromADefault,
    CountsInATensor,
    CountsInAList,
    CountsAmongItsDefaults,
    CountsOnItself,
]
