"""Identity plans of residual layers, and of layers that end in a norm.

In a residual layer all branches become 0. A layer that ends in a norm becomes a chain of norms, and the last one takes over the
values of the norm before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from l2l_core.surgery.identity.layer_probe import LayerProbe
from l2l_core.surgery.identity.search import (
    IdentityPlan,
    NoIdentityError,
    ParameterTransfer,
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


def plan_residual(case: SearchCase, probe: LayerProbe, order: list[str], zeroed: list[str]) -> IdentityPlan:
    """Return the plan of a layer that is the identity with `zeroed` at 0; changes `probe`.

    `order` has all parameters, in the order of their last use.
    """
    zeroed = restore_unneeded(probe, zeroed)
    zeroed, minus_ones = _move_to_offset_gains(probe, order, zeroed)
    check_trainable(probe, [*zeroed, *minus_ones])
    zeroed, minus_ones = with_unused(probe, zeroed, 0.0), with_unused(probe, minus_ones, -1.0)
    plan = IdentityPlan(in_definition_order(probe, zeroed), (), in_definition_order(probe, minus_ones))
    # The sample's hidden state may have one sign only, for which a ReLU at the end has no effect.
    if not all(is_close(probe.run(h), h) for h in (case.random_like(probe.hidden) for _ in range(2))):
        _check_range(case, probe)
    return plan


def _move_to_offset_gains(probe: LayerProbe, order: list[str], zeroed: list[str]) -> tuple[list[str], list[str]]:
    """Set a branch that ends in a norm with gain 1 + w to 0 by w = -1.

    A norm of zeros has a gradient of 1 / sqrt(eps), so that the first update would be far too large.
    """
    base, minus_ones = probe.run(), list[str]()
    for name in order:
        earlier = [other for other in zeroed if order.index(other) < order.index(name)]
        if name in zeroed or not earlier or probe.values[name].numel() > max(probe.hidden.shape, default=1):
            continue
        probe.assign(name, -1.0)
        freed = list[str]()
        if torch.equal(probe.run(), base):
            for other in earlier:
                probe.restore([other])
                if torch.equal(probe.run(), base):
                    freed.append(other)
                else:
                    probe.assign(other, 0.0)
        if freed and not probe.find_without_gradient([name]):  # without a gradient it would never be trained
            zeroed = [other for other in zeroed if other not in freed]
            minus_ones.append(name)
        else:
            probe.restore([name])
            probe.fill(freed, 0.0)
    return zeroed, minus_ones


def _check_range(case: SearchCase, probe: LayerProbe) -> None:
    """Refuse an identity for some inputs only (a ReLU at the end), unless `preceding` produces only such inputs."""
    if case.preceding is None:
        raise NoIdentityError(
            "it returns this hidden state unchanged but not every one (as with a ReLU at its end). Pass preceding= and "
            "preceding_sample=, the layer before it, which may produce only such hidden states"
        )
    check_preceding_output(case)
    before = case.probe_preceding()
    for size in (1, 30, 1000):  # up to inputs against which biases are small
        output = before.run(None if before.hidden is None else size * case.random_like(before.hidden))
        if output.shape != probe.hidden.shape or not is_close(probe.run(output), output):
            raise NoIdentityError(
                "it returns only some hidden states unchanged (as with a ReLU at its end), and the "
                f"{case.preceding_name} before it does not ensure that"
            )


# -- layers that end in a norm -----------------------------------------------------------------------------------------


def plan_post_norm(case: SearchCase, probe: LayerProbe, order: list[str]) -> IdentityPlan:
    """Return the plan of a layer that ends in a norm; `probe` must have its own values and is changed."""
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
        probe.assign(item.new, before.values[item.preceding].view_as(probe.values[item.new]))
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
    probe.assign(name, 0.0)
    one, other = probe.run(), probe.run(case.random_like(probe.hidden))
    probe.restore([name])
    return is_finite(one) and is_close(one, other)


def _final_affine(probe: LayerProbe) -> tuple[str | None, str | None]:
    """Return gain and shift of a layer's final operation, output = gain * z + shift; None if absent."""
    out = probe.run()
    names = [name for name in reversed(probe.names_by_last_use()) if _broadcast_views(probe.values[name], out)]
    shift = next((name for name in names if _moves_output(probe, name)), None)
    if shift is not None:
        probe.assign(shift, 0.0)  # the output scales with the gain only without a shift
    gain = next((name for name in names if name != shift and _scales_output(probe, name)), None)
    if shift is not None:
        probe.restore([shift])
    return gain, shift


def _moves_output(probe: LayerProbe, name: str) -> bool:
    base, step = probe.run(), _random_values(probe, name)
    probe.assign(name, probe.values[name] + step)
    moved = probe.run() - base
    probe.restore([name])
    return any(is_close(moved, each.expand_as(moved), 1e-4) for each in _broadcast_views(step, base))


def _scales_output(probe: LayerProbe, name: str) -> bool:
    base, factor = probe.run(), _random_values(probe, name)
    probe.assign(name, probe.values[name] * factor)
    scaled = probe.run()
    probe.restore([name])
    return any(is_close(scaled, base * each, 1e-4) for each in _broadcast_views(factor, base))


def _random_values(probe: LayerProbe, name: str) -> Tensor:
    value = probe.values[name]
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(value.dtype)


def _is_per_feature(probe: LayerProbe, name: str) -> bool:
    return bool(_broadcast_views(probe.values[name], probe.hidden))


def _broadcast_views(values: Tensor, hidden: Tensor) -> list[Tensor]:
    """Return the views of `values`, one value per feature or channel, that broadcast over the hidden state."""
    found = []
    for axis in {hidden.ndim - 1, 1}:
        if hidden.ndim > 1 and hidden.shape[axis] == values.numel():
            shape = [1] * hidden.ndim
            shape[axis] = -1
            found.append(values.reshape(shape))
    return found


def _no_path_reason(case: SearchCase, probe: LayerProbe) -> str:
    probe.restore(probe.values)
    for name in probe.values:
        if not _is_per_feature(probe, name) and _cuts_input(case, probe, name):
            return f"it has no residual path: its whole output passes {name}"
    order = probe.names_by_last_use()
    if stuck := sorted({*order} - {*zero_all(probe, order)}):
        return f"{stuck[0]} cannot be 0 (the output is NaN then, as with a weight that is divided by its norm)"
    return (
        "no residual path was found: with all of its parameters at 0 (and the gains of norms at 1) it does not return its "
        "hidden state. The cause may be a branch without parameters, or a function after the last addition"
    )
