"""Layers that add branches to their hidden state: what silences the branches."""

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
    """Plan for a layer that is the identity now, with `zeroed` at 0. Leaves the probe changed. Raises Refusal.

    `order`: all parameters, in the order of their last use.
    """
    assert probe.hidden is not None
    zeroed = restore_unneeded(probe, zeroed)
    zeroed, minus_ones = _move_to_offset_gains(probe, order, zeroed)
    check_trainable(probe, [*zeroed, *minus_ones])
    zeroed, minus_ones = with_unused(probe, zeroed, 0.0), with_unused(probe, minus_ones, -1.0)
    plan = IdentityPlan(in_definition_order(probe, zeroed), (), in_definition_order(probe, minus_ones))
    # The sample's hidden state may all have one sign, where a ReLU at the end does not show
    if not all(is_close(probe.run(h), h) for h in (case.random_like(probe.hidden) for _ in range(2))):
        _check_range(case, probe)
    return plan


def _move_to_offset_gains(probe: LayerProbe, order: list[str], zeroed: list[str]) -> tuple[list[str], list[str]]:
    """Silence a branch that ends in a norm with gain 1 + w there, instead of feeding it zeros.

    A norm of zeros has a gradient of 1 / sqrt(eps): the first update would make the branch as loud as any other.
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
        if freed and not probe.find_without_gradient([name]):  # what gets no gradient there would never learn
            zeroed = [other for other in zeroed if other not in freed]
            minus_ones.append(name)
        else:
            probe.restore([name])
            probe.fill(freed, 0.0)
    return zeroed, minus_ones


def _check_range(case: SearchCase, probe: LayerProbe) -> None:
    """Refuse an identity that holds for some input only (a ReLU at the end), unless `preceding` makes only such."""
    if case.preceding is None:
        raise NoIdentityError(
            "it gives back its hidden state here, but not any (as a ReLU at its end would do), and the layer before it, "
            "which might see to that, was not given"
        )
    check_preceding_output(case)
    before = case.probe_preceding()
    assert probe.hidden is not None
    for size in (1, 30, 1000):  # large enough for its biases not to decide
        made = before.run(None if before.hidden is None else size * case.random_like(before.hidden))
        if made.shape != probe.hidden.shape or not is_close(probe.run(made), made):
            raise NoIdentityError(
                "it gives back its hidden state only if that is of a certain kind (as a ReLU at its end would do), and the "
                f"{case.preceding_name} before it does not make sure of that"
            )
