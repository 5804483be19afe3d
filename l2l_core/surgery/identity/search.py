"""Identity plans, and common parts of their searches: the case, trials of zeroed parameters, and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from l2l_core.surgery import CallSample
from l2l_core.surgery.identity.layer_probe import LayerProbe

EXACT = 1e-6  # relative to the largest element; for sums in another order


@dataclass(frozen=True, slots=True)
class ParameterTransfer:
    """Move of a parameter's value and optimizer state to the new layer, elementwise; the old value becomes `neutral`."""

    preceding: str
    new: str
    neutral: float  # 1 for a gain, 0 for a shift


@dataclass(frozen=True, slots=True)
class IdentityPlan:
    """New values of a layer's parameters, by name; other parameters keep their values."""

    zeroed: tuple[str, ...] = ()
    ones: tuple[str, ...] = ()
    minus_ones: tuple[str, ...] = ()  # gains that are stored as gain - 1
    transfers: tuple[ParameterTransfer, ...] = ()
    max_abs_error: float = 0.0  # of the hidden state, on the sample

    @property
    def constants(self) -> dict[str, float]:
        """The parameters that are set to a number, with it."""
        parts = (self.zeroed, 0.0), (self.ones, 1.0), (self.minus_ones, -1.0)
        return {name: value for names, value in parts for name in names}


class NoIdentityError(Exception):
    """There is no identity plan; the message is a clause with the reason."""


@dataclass
class SearchCase:
    """A layer, the argument that is taken as its hidden state, the preceding module, and a random generator."""

    layer: nn.Module
    sample: CallSample
    slot: int
    preceding: tuple[nn.Module, CallSample] | None
    # Separate and seeded anew for each case, so that the plan is always the same and no other generator is used.
    noise: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def probe(self, perturbed: bool = True) -> LayerProbe:
        """Return a copy of the layer."""
        return LayerProbe(self.layer, self.sample, self.slot, self.noise if perturbed else None)

    def probe_preceding(self, perturbed: bool = True) -> LayerProbe:
        """Return a copy of the preceding module."""
        assert self.preceding is not None
        layer, sample = self.preceding
        return LayerProbe(layer, sample, _input_slot(sample), self.noise if perturbed else None)

    @property
    def preceding_name(self) -> str:
        """The class name of the preceding module, for messages."""
        assert self.preceding is not None
        return type(self.preceding[0]).__name__

    def random_like(self, hidden: Tensor, spread: float | None = None) -> Tensor:
        """Draw another hidden state with both signs, by default with the same standard deviation."""
        spread = hidden.float().std(correction=0).clamp(min=1e-3).item() if spread is None else spread
        return (torch.randn(hidden.shape, generator=self.noise) * spread).to(hidden.dtype)


def zero_all(probe: LayerProbe, names: Sequence[str]) -> list[str]:
    """Zero the parameters that can be 0 and return them; a weight that is divided by its norm cannot."""
    probe.fill(names, 0.0)
    if is_finite(probe.run()):
        return list(names)
    probe.restore(names)
    zeroed = []
    for name in reversed(names):
        probe.assign(name, 0.0)
        if is_finite(probe.run()):
            zeroed.insert(0, name)
        else:
            probe.restore([name])
    return zeroed


def restore_unneeded(probe: LayerProbe, names: Sequence[str]) -> list[str]:
    """Restore the parameters that do not change a bit of the output; return the others."""
    base, needed = probe.run(), []
    for name in names:
        probe.restore([name])
        if not torch.equal(probe.run(), base):
            probe.assign(name, 0.0)
            needed.append(name)
    return needed


def with_unused(probe: LayerProbe, changed: Sequence[str], value: float) -> list[str]:
    """Set and add the counterparts of `changed` that are unused on this sample, such as experts without tokens."""
    kinds, used = {probe.counterpart_key(name) for name in changed}, probe.last_use()
    unused = [n for n in probe.values if n not in used and n not in changed and probe.counterpart_key(n) in kinds]
    probe.fill(unused, value)
    return [*changed, *unused]


def check_trainable(probe: LayerProbe, changed: Sequence[str]) -> None:
    """Refuse a plan in which changed parameters would get no gradient."""
    if changed and (dead := probe.find_without_gradient(changed)):
        raise NoIdentityError(
            f"it would remain the identity: with {len(changed)} parameter(s) at 0, {', '.join(dead)} would get no gradient"
        )


def check_preceding_output(case: SearchCase) -> None:
    """Refuse a layer whose hidden state is not the output of the preceding module."""
    before, hidden = case.probe_preceding(perturbed=False), case.sample.leaves[case.slot]
    try:
        output = before.run()
    except Exception as error:
        raise NoIdentityError(f"the {case.preceding_name} before it does not run on its sample ({error})") from error
    if output.shape != hidden.shape or not is_close(output, hidden, 1e-5):
        raise NoIdentityError(
            f"its input is not the output of the {case.preceding_name} before it: the model changes it in between"
        )


def _input_slot(sample: CallSample) -> int:
    """Return the index of the first floating-point argument that is no vector, the hidden state; -1 if none."""
    leaves = enumerate(sample.leaves)
    return next((i for i, t in leaves if isinstance(t, Tensor) and t.is_floating_point() and t.ndim > 1), -1)


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither infinity nor NaN."""
    return bool(tensor.isfinite().all())


def is_close(one: Tensor, other: Tensor, bound: float = EXACT) -> bool:
    """Return whether all elements differ by at most `bound` times the largest one; NaN is close to nothing."""
    if one.shape != other.shape or not one.numel():
        return one.shape == other.shape
    return bool((one - other).abs().max() <= bound * other.abs().max())


def in_definition_order(probe: LayerProbe, names: Sequence[str]) -> tuple[str, ...]:
    """Sort `names` in the order in which the layer defines them."""
    return tuple(name for name in probe.values if name in names)
