"""Schedules of the layers that are skipped in a step: at random, or all above a number of them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from l2l_core.edits.schedules import PerStep, SchedulableRelay, Schedule, check_step_values, stack_of, value_at

Rate = float | Callable[[float], float] | Callable[[float, int], float]


@dataclass(frozen=True)
class LayerDrop(Schedule):
    """Skip every layer of a stack in a step with some probability; at least one of each stack runs.

    LayerDrop (Fan et al., arXiv 1909.11556) has one rate for all layers; in stochastic depth (Huang et al., arXiv 1603.09382)
    it grows linearly with depth, ``LayerDrop(lambda x: 0.5 * x)``; in progressive layer dropping (Zhang & He, arXiv 2010.13369)
    with the step, too, ``LayerDrop(lambda x, step: 0.5 * x * (1 - math.exp(-step / 1000)))``. Outputs of layers are not
    rescaled. The choice depends on the relay's seed, the step and the layers' keys alone, so that a repeated step, or one after
    loading a save, skips the same layers.

    Args:
        rate: the probability, or a function of the relative depth (0 for the first layer of the stack, 1 for the last), or of
            the relative depth and the number of finished steps.
        stack: dotted name of the container; None for all stacks.
        force: skip the refusals that rest on evidence; see `Relay.step`.

    Example:
        >>> from l2l_core import LayerDrop
        >>> schedule = LayerDrop(0.5)
        >>> result = schedule.step(relay, batch)  # layers that the draw leaves out are not loaded
        >>> result.bytes_loaded < relay.step(batch).bytes_loaded
        True
    """

    rate: Rate
    stack: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if not callable(self.rate):
            _checked(self.rate, "")
        elif not _accepts(self.rate, 1) and not _accepts(self.rate, 2):
            raise TypeError(
                f"rate={self.rate!r}: must be a number, or a function of the relative depth, or of relative depth and step"
            )

    def skip(self, relay: SchedulableRelay) -> Sequence[str]:
        stacks = relay.stacks
        if self.stack is not None and self.stack not in stacks:
            raise ValueError(f"stack={self.stack!r}: there are {', '.join(map(repr, stacks)) or 'none'}")
        skipped = list[str]()
        for layers in stacks.values() if self.stack is None else [stacks[self.stack]]:
            rates = self.rates([unit.key for unit in layers], relay.steps)
            skipped += draw_skipped(relay.config.seed, relay.steps, rates)
        return skipped

    def rates(self, keys: Sequence[str], step: int) -> dict[str, float]:
        """Return the probability of every layer of a stack to be skipped in `step`; `keys` are its layers in order."""
        rate: Any = self.rate
        if not callable(rate):
            return dict.fromkeys(keys, float(rate))
        args, last = ((step,) if _accepts(rate, 2) else ()), max(1, len(keys) - 1)
        return {key: _checked(rate(i / last, *args), f" for {key} in step {step}") for i, key in enumerate(keys)}


@dataclass(frozen=True)
class ActiveLayers(Schedule):
    """Run the first layers of a stack and skip all others, which keep their values until they run.

    With as many layers as the stack has, it is trained as without this schedule. Layers that have not run yet have the initial
    values of the whole model and no optimizer state, so that growth by this schedule is growth by new random layers. 0 layers
    are valid where a layer's output is as its input, see `Relay.step`.

    The model that trains is the running layers, so a study measures their held-out loss, without untrained layers on top;
    so does ``relay.evaluate(batch, skip=schedule.skip_in_evaluation(relay))``. Probes of a session are of the whole model.

    Args:
        active: number of layers that run, by step, as `depth` of `Depth`.
        stack: dotted name of the container, if there are several.
        force: skip the refusals that rest on evidence; see `Relay.step`.

    Example:
        >>> from l2l_core import ActiveLayers
        >>> schedule = ActiveLayers({0: 2, 100: 6})
        >>> schedule.skip(relay)  # the layers that the next step runs without
        ['L002', 'L003', 'L004', 'L005']
    """

    active: PerStep
    stack: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        check_step_values("active", self.active, least=0)

    def skip(self, relay: SchedulableRelay) -> Sequence[str]:
        return self._skip_at(relay, relay.steps)

    def skip_in_evaluation(self, relay: SchedulableRelay) -> Sequence[str]:
        return self._skip_at(relay, max(0, relay.steps - 1))  # of the last step: new layers have not been trained yet

    def _skip_at(self, relay: SchedulableRelay, step: int) -> Sequence[str]:
        count = value_at("active", self.active, step, least=0)
        return [] if count is None else [unit.key for unit in stack_of(relay, self.stack)[count:]]


def draw_skipped(seed: int | None, step: int, rates: Mapping[str, float]) -> list[str]:
    """Draw the keys of the layers that are skipped in `step`, given the probability of each; never all of them."""
    margins = {key: _uniform(f"{seed}/{step}/{key}/skip") - rate for key, rate in rates.items()}
    skipped = [key for key, margin in margins.items() if margin < 0]
    if len(skipped) == len(rates):
        skipped.remove(max(margins, key=margins.__getitem__))
    return skipped


def _uniform(label: str) -> float:
    """Return a pseudo-random number in [0, 1) that depends on `label` alone."""
    # 48 bits, which a float holds without rounding to 1; not `hash`, which differs between processes.
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=6).digest()) / 2**48


def _accepts(function: Callable[..., object], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


def _checked(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"rate={value!r}{where}: must be a number from 0 to 1")
    return float(value)
