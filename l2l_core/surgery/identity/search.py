"""Trying what a layer does when parameters are zeroed: one case, the moves that every search makes, and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from l2l_core.surgery import CallSample
from l2l_core.surgery.identity.layer_probe import LayerProbe

EXACT = 1e-6  # relative to the largest element; for sums that are made in another order


class NoIdentityError(Exception):
    """Says why there is no identity, as a part of a sentence."""


@dataclass
class SearchCase:
    """Holds one layer, which of its arguments is taken as the hidden state, and random numbers to try it with."""

    layer: nn.Module
    sample: CallSample
    slot: int
    preceding: tuple[nn.Module, CallSample] | None
    # A generator of its own, begun anew for each case: the same plan every time, and nobody else's draws
    noise: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def probe(self, perturbed: bool = True) -> LayerProbe:
        """Copy the layer to try things with."""
        return LayerProbe(self.layer, self.sample, self.slot, self.noise if perturbed else None)

    def probe_preceding(self, perturbed: bool = True) -> LayerProbe:
        """Copy the preceding module."""
        assert self.preceding is not None
        layer, sample = self.preceding
        return LayerProbe(layer, sample, _input_slot(sample), self.noise if perturbed else None)

    @property
    def preceding_name(self) -> str:
        """What the preceding module is called in messages."""
        assert self.preceding is not None
        return type(self.preceding[0]).__name__

    def random_like(self, hidden: Tensor, spread: float | None = None) -> Tensor:
        """Draw another hidden state, of the same spread unless told, and with both signs."""
        spread = hidden.float().std(correction=0).clamp(min=1e-3).item() if spread is None else spread
        return (torch.randn(hidden.shape, generator=self.noise) * spread).to(hidden.dtype)


def zero_all(probe: LayerProbe, names: Sequence[str]) -> list[str]:
    """Zero what can be zeroed: a weight that is divided by its norm cannot."""
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
    """Restore what can be restored without changing the output at all; return the rest."""
    base, needed = probe.run(), []
    for name in names:
        probe.restore([name])
        if not torch.equal(probe.run(), base):  # to the bit: what is added must be 0, not small
            probe.assign(name, 0.0)
            needed.append(name)
    return needed


def with_unused(probe: LayerProbe, changed: Sequence[str], value: float) -> list[str]:
    """Add counterparts, unused on this sample, of what was changed (experts that got no token); change them too."""
    kinds, used = {probe.counterpart_key(name) for name in changed}, probe.last_use()
    spare = [n for n in probe.names if n not in used and n not in changed and probe.counterpart_key(n) in kinds]
    probe.fill(spare, value)
    return [*changed, *spare]


def check_trainable(probe: LayerProbe, changed: Sequence[str]) -> None:
    """Refuse a layer that does nothing and could not learn to do anything."""
    if changed and (dead := probe.find_without_gradient(changed)):
        raise NoIdentityError(
            f"it would stay the identity for ever: with {len(changed)} parameter(s) at 0, {', '.join(dead)} would get no gradient"
        )


def check_preceding_output(case: SearchCase) -> None:
    """Refuse a layer whose hidden state is not what the preceding module gives out, with nothing in between."""
    before, hidden = case.probe_preceding(perturbed=False), case.sample.leaves[case.slot]
    try:
        made = before.run()
    except Exception as error:
        raise NoIdentityError(f"the {case.preceding_name} before it does not run on its sample ({error})") from error
    if made.shape != hidden.shape or not is_close(made, hidden, 1e-5):
        raise NoIdentityError(
            f"what the {case.preceding_name} before it gives out is not what this layer is given: something comes between them"
        )


def _input_slot(sample: CallSample) -> int:
    """Find the preceding module's hidden state: its first floating-point argument that is no vector; -1: none."""
    leaves = enumerate(sample.leaves)
    return next((i for i, t in leaves if isinstance(t, Tensor) and t.is_floating_point() and t.ndim > 1), -1)


def is_finite(tensor: Tensor) -> bool:
    """Tell whether it holds neither infinity nor NaN."""
    return bool(tensor.isfinite().all())


def is_close(one: Tensor, other: Tensor, bound: float = EXACT) -> bool:
    """Tell whether no element is off by more than `bound` times the largest one; NaN is close to nothing."""
    if one.shape != other.shape or not one.numel():
        return one.shape == other.shape
    return bool((one - other).abs().max() <= bound * other.abs().max())


def in_definition_order(probe: LayerProbe, names: Sequence[str]) -> tuple[str, ...]:
    """Sort `names` as the layer defines them."""
    return tuple(sorted(names, key=probe.names.index))
