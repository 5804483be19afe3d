"""Layers that sit steps out at random: a regulariser, and models that bear being shortened.

Which ones is a function of the relay's seed, the step and the layer's key alone, so that a step that is tried again, or made
after loading, leaves out the same.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from l2l_core.edits.schedules import SchedulableRelay, Schedule

Rate = float | Callable[[float], float] | Callable[[float, int], float]


@dataclass(frozen=True)
class LayerDrop(Schedule):
    """Every layer of a stack sits a step out with some probability; one of each stack always runs.

    LayerDrop (Fan et al., arXiv 1909.11556) has one rate for all; stochastic depth (Huang et al., arXiv 1603.09382) a rate that
    grows linearly with depth, ``LayerDrop(lambda x: 0.5 * x)``; progressive layer dropping (Zhang & He, arXiv 2010.13369) one
    that grows with the step too, ``LayerDrop(lambda x, step: 0.5 * x * (1 - math.exp(-step / 1000)))``. Outputs of layers are
    not rescaled.

    Args:
        rate: the probability, or a function of the relative depth (0 for the first layer of the stack, 1 for the last) that
            gives it, or of the relative depth and the number of finished steps.
        stack: dotted name of the container; None for all stacks.
        force: let layers sit out even where that is refused on evidence alone; see `Relay.step`.
    """

    rate: Rate
    stack: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if not callable(self.rate):
            _checked(self.rate, "")
        elif not _accepts(self.rate, 1) and not _accepts(self.rate, 2):
            raise TypeError("rate must be a number, or a function of the relative depth, or of relative depth and step")

    def skip(self, relay: SchedulableRelay) -> Sequence[str]:
        stacks = relay.stacks
        if self.stack is not None and self.stack not in stacks:
            raise ValueError(f"stack={self.stack!r}: there are {', '.join(map(repr, stacks)) or 'none'}")
        chosen = stacks.values() if self.stack is None else [stacks[self.stack]]
        keys = ([unit.key for unit in layers] for layers in chosen)
        return [
            key for each in keys for key in draw_skipped(relay.config.seed, relay.steps, self.rates(each, relay.steps))
        ]

    def rates(self, keys: Sequence[str], step: int) -> dict[str, float]:
        """Give the probability of every layer of a stack, given in order, to sit out `step`."""
        last, rates = max(1, len(keys) - 1), {}
        for i, key in enumerate(keys):
            args = (i / last, step)
            value = self.rate if not callable(self.rate) else self.rate(*args[: 2 if _accepts(self.rate, 2) else 1])
            rates[key] = _checked(value, f" for {key} in step {step}")
        return rates


def draw_skipped(seed: int, step: int, rates: Mapping[str, float]) -> list[str]:
    """Draw the keys of the layers that sit `step` out, given the probability of each; never all of them."""
    spared = {key: _uniform(f"{seed}/{step}/{key}/skip") - rate for key, rate in rates.items()}
    out = [key for key, margin in spared.items() if margin < 0]
    if len(out) == len(rates):
        out.remove(max(spared, key=spared.__getitem__))
    return out


def _uniform(label: str) -> float:
    """Make a number from 0 to 1, without 1, of `label` alone."""
    # Of 48 bits, which a float holds without rounding, so it never becomes 1; Python's hash differs between processes
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=6).digest()) / 2**48


def _accepts(function: Callable[..., float], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


def _checked(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"rate={value!r}{where}: must be a number from 0 to 1")
    return float(value)
