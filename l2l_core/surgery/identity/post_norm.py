"""Identity plans of layers that end in a norm: the layer becomes a chain of norms."""

from __future__ import annotations

import torch
from torch import Tensor

from l2l_core.surgery.identity.identity_plan import IdentityPlan, ParameterTransfer
from l2l_core.surgery.identity.layer_probe import LayerProbe
from l2l_core.surgery.identity.search import (
    NoIdentityError,
    SearchCase,
    check_preceding_output,
    check_trainable,
    in_definition_order,
    is_close,
    is_finite,
    restore_unneeded,
    with_unused,
    zero_all,
)


def plan_post_norm(case: SearchCase, probe: LayerProbe, order: list[str]) -> IdentityPlan:
    """Return the plan of a layer that ends in a norm; `probe` must have its own values and is changed.

    Raises:
        NoIdentityError: there is no such plan.
    """
    gain, shift = _final_affine(probe)
    gains = [name for name in order if _is_per_feature(probe, name) and _cuts_input(case, probe, name)]
    if gain is None or gain not in gains:
        raise NoIdentityError(_no_path_reason(case, probe))
    if case.preceding is None:
        raise NoIdentityError(
            f"it ends in a norm ({gain}), which must take over the values of the norm before it. Pass preceding= and "
            "preceding_sample=: the layer before or, at position 0, the shell's norm or embedding module"
        )
    check_preceding_output(case)
    before = case.probe_preceding()
    transfers = _pair_affines(case, before, gain, shift)
    # With spread 1 eps does not matter, so that the structure decides; the verification of the plan includes eps.
    given = None if before.hidden is None else case.random_like(before.hidden, spread=1.0)
    target = before.run(given)
    for item in transfers:
        before.assign(item.preceding, item.neutral)
        probe.assign(item.new, before.value(item.preceding).view_as(probe.value(item.new)))
    probe.hidden = before.run(given)
    ones = [name for name in gains if name != gain]
    probe.fill(ones, 1.0)
    zeroed = zero_all(probe, [n for n in order if n not in gains and n not in {item.new for item in transfers}])
    if not is_close(probe.run(), target, 1e-3 if given is not None else 3e-2):
        raise NoIdentityError(_no_path_reason(case, probe))
    zeroed = restore_unneeded(probe, zeroed)
    check_trainable(probe, zeroed)
    zeroed = with_unused(probe, zeroed, 0.0)
    return IdentityPlan(in_definition_order(probe, zeroed), in_definition_order(probe, ones), (), tuple(transfers))


def _pair_affines(case: SearchCase, before: LayerProbe, gain: str, shift: str | None) -> list[ParameterTransfer]:
    """Pair gain and shift of the preceding module with those of the new layer, which take over their values."""
    its_gain, its_shift = _final_affine(before)
    if its_gain is None or (its_shift is not None and shift is None):
        difference = "does not end in a norm" if its_gain is None else f"has a shift ({its_shift})"
        raise NoIdentityError(
            f"it ends in a norm ({gain}{' without a shift' if its_gain else ''}), and the {case.preceding_name} before it "
            f"{difference}, so that no values can move to it"
        )
    pairs = [ParameterTransfer(its_gain, gain, 1.0)]
    if its_shift is not None and shift is not None:
        pairs.append(ParameterTransfer(its_shift, shift, 0.0))
    return pairs


def _cuts_input(case: SearchCase, probe: LayerProbe, name: str) -> bool:
    """Return whether the output no longer depends on the hidden state when this parameter is 0."""
    assert probe.hidden is not None
    probe.assign(name, 0.0)
    one, other = probe.run(), probe.run(case.random_like(probe.hidden))
    probe.restore([name])
    return is_finite(one) and is_close(one, other)


def _final_affine(probe: LayerProbe) -> tuple[str | None, str | None]:
    """Return gain and shift of a layer's final operation, output = gain * z + shift; None if absent."""
    out = probe.run()
    names = [name for name in reversed(probe.names_by_last_use()) if broadcast_views(probe.value(name), out)]
    shift = next((name for name in names if _moves_output(probe, name)), None)
    if shift is not None:
        probe.assign(shift, 0.0)  # the output scales with the gain only without a shift
    gain = next((name for name in names if name != shift and _scales_output(probe, name)), None)
    if shift is not None:
        probe.restore([shift])
    return gain, shift


def _moves_output(probe: LayerProbe, name: str) -> bool:
    base, step = probe.run(), _random_values(probe, name)
    probe.assign(name, probe.value(name) + step)
    moved = probe.run() - base
    probe.restore([name])
    return any(is_close(moved, each.expand_as(moved), 1e-4) for each in broadcast_views(step, base))


def _scales_output(probe: LayerProbe, name: str) -> bool:
    base, factor = probe.run(), _random_values(probe, name)
    probe.assign(name, probe.value(name) * factor)
    scaled = probe.run()
    probe.restore([name])
    return any(is_close(scaled, base * each, 1e-4) for each in broadcast_views(factor, base))


def _random_values(probe: LayerProbe, name: str) -> Tensor:
    value = probe.value(name)
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(value.dtype)


def _is_per_feature(probe: LayerProbe, name: str) -> bool:
    assert probe.hidden is not None
    return bool(broadcast_views(probe.value(name), probe.hidden))


def broadcast_views(values: Tensor, hidden: Tensor) -> list[Tensor]:
    """Return the views of `values`, one value per feature or channel, that broadcast over the hidden state."""
    found = []
    for axis in {hidden.ndim - 1, 1}:
        if hidden.ndim > 1 and hidden.shape[axis] == values.numel():
            shape = [1] * hidden.ndim
            shape[axis] = -1
            found.append(values.reshape(shape))
    return found


def _no_path_reason(case: SearchCase, probe: LayerProbe) -> str:
    probe.restore(probe.names)
    for name in probe.names:
        if not _is_per_feature(probe, name) and _cuts_input(case, probe, name):
            return f"it has no residual path: its whole output passes {name}"
    order = probe.names_by_last_use()
    if stuck := sorted({*order} - {*zero_all(probe, order)}):
        return f"{stuck[0]} cannot be 0 (the output is NaN then, as with a weight that is divided by its norm)"
    return (
        "no residual path was found: with all of its parameters at 0 (and the gains of norms at 1) it does not return its "
        "hidden state. The cause may be a branch without parameters, or a function after the last addition"
    )
