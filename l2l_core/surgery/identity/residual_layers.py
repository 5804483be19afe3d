"""Identity plans of residual layers: parameters that set all branches to 0."""

from __future__ import annotations

import torch

from l2l_core.surgery.identity.identity_plan import IdentityPlan
from l2l_core.surgery.identity.layer_probe import LayerProbe
from l2l_core.surgery.identity.search import (
    NoIdentityError,
    SearchCase,
    check_preceding_output,
    check_trainable,
    in_definition_order,
    is_close,
    restore_unneeded,
    with_unused,
)


def plan_residual(case: SearchCase, probe: LayerProbe, order: list[str], zeroed: list[str]) -> IdentityPlan:
    """Return the plan of a layer that is the identity with `zeroed` at 0; changes `probe`.

    Args:
        case: the layer and its samples.
        probe: the layer's copy.
        order: all parameters, in the order of their last use.
        zeroed: the parameters that are 0.

    Raises:
        NoIdentityError: the layer could not be trained, or is the identity for some inputs only.
    """
    assert probe.hidden is not None
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
    assert probe.hidden is not None
    base, minus_ones = probe.run(), list[str]()
    for name in order:
        earlier = [other for other in zeroed if order.index(other) < order.index(name)]
        if name in zeroed or not earlier or probe.value(name).numel() > max(probe.hidden.shape, default=1):
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
    assert probe.hidden is not None
    for size in (1, 30, 1000):  # up to inputs against which biases are small
        output = before.run(None if before.hidden is None else size * case.random_like(before.hidden))
        if output.shape != probe.hidden.shape or not is_close(probe.run(output), output):
            raise NoIdentityError(
                "it returns only some hidden states unchanged (as with a ReLU at its end), and the "
                f"{case.preceding_name} before it does not ensure that"
            )
