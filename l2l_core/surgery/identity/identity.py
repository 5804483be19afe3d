"""Plan how a new layer becomes the identity, so that inserting it does not change the model's function.

A plan is found and verified by running a copy of the layer (`layer_probe.py`), not from the names of classes or parameters.
The copy's parameters are perturbed first, so that a plan depends on the structure alone and holds for all layers built alike.

1. *Residual layers.* With every parameter at 0 the layer returns its hidden state. Then parameters are restored one by one in
   the order of their use; those that would change a bit stay at 0. These are the last of each branch: output projections, or a
   later layer scale or gain of a norm. Experts without tokens are treated like their counterparts. A gain that is stored as
   w = gain - 1 (Gemma) is set to w = -1, so that the parameters before it keep their values.
2. *Layers that end in a norm* (BERT). If the output no longer depends on the input when a parameter is 0, the parameter is on
   the skip path: the gain of a norm. With gains 1 and all else 0 the layer is a chain of norms, which does not change a
   normalised input. So the norm that produces the input, at the end of the preceding layer, gets gain 1 and shift 0, and its
   values move to the end of the new layer. The rest is as in 1.

Exactness: 1 is exact to the bit on any processor, because 0 is added (`max_abs_error` is 0; a layer that adds in another order
differs by its rounding, at most `EXACT`). That holds between runs with the same kernels; PyTorch may use other kernels for
attention without gradients. 2 is exact up to the norms' eps, which acts once more: a token with variance v before the preceding
norm is larger by eps / 2 * (1 / v - 1), relative. With BERT's 1e-12 that has no effect; with 1e-5 the loss of small networks
changed by 1e-7 as a rule and by 2e-6 at worst (weights three times the usual size). If v is so small that the error exceeds
`TOLERANCE`, the plan is refused.

Other outputs (attention weights, a router's loss, T5's position bias if it is not an argument) are not those of the layer
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from torch import Tensor, nn

from l2l_core.surgery import CallSample
from l2l_core.surgery.identity.layer_kinds import plan_post_norm, plan_residual
from l2l_core.surgery.identity.layer_probe import LayerProbe, clean_torch_state
from l2l_core.surgery.identity.search import EXACT, IdentityPlan, NoIdentityError, SearchCase, is_close, zero_all

TOLERANCE = 2e-5  # of a layer that ends in a norm, relative to the largest element of the hidden state


def plan_identity(
    layer: nn.Module,
    sample: CallSample,
    preceding: nn.Module | None = None,
    preceding_sample: CallSample | None = None,
    known: IdentityPlan | None = None,
) -> IdentityPlan:
    """Return a plan with which `layer` is the identity when called with `sample`.

    The layer is run two to five times per parameter, so use a sample of one or two rows.

    Args:
        preceding, preceding_sample: the module whose output is the hidden state in `sample`, with its arguments: the layer
            before, or at position 0 the shell's norm or embedding. Needed for layers that end in a norm or a ReLU.
        known: plan of a layer built alike, after one built alike; it is tried first, which takes two runs of each.

    Raises:
        ValueError: the layer cannot become the identity.
    """
    if (preceding is None) != (preceding_sample is None):
        raise ValueError("preceding= and preceding_sample= belong together: pass both, or neither")
    before = None if preceding is None or preceding_sample is None else (preceding, preceding_sample)
    try:
        with clean_torch_state():
            return _plan_by_argument(layer, sample, before, known)
    except NoIdentityError as reason:
        raise ValueError(
            f'cannot make a {type(layer).__name__} the identity: {reason}. Insert it with init="copy" or init="fresh" instead; '
            'for Depth(..., grow="identity") that is grow="top" or "middle"'
        ) from reason.__cause__


def sample_after(layer: nn.Module, sample: CallSample) -> CallSample:
    """Return the arguments of a new layer after `layer`, the last of its stack.

    Raises:
        ValueError: no argument of `layer` has the shape of its output.
    """
    with clean_torch_state():
        output = LayerProbe(layer, sample, -1).run()
    for leaf in sample.leaves:
        if isinstance(leaf, Tensor) and leaf.shape == output.shape and leaf.dtype == output.dtype:
            return sample.clone({id(leaf): output})
    raise ValueError(
        f"{type(layer).__name__} has an output of shape {tuple(output.shape)} but no argument of that shape, so that no layer "
        "like it can be inserted after it; insert it at another position"
    )


def hidden_argument(layer: nn.Module, sample: CallSample, places: Sequence[int | str]) -> int | str | None:
    """Return the argument that `layer` returns with all parameters at 0; None if there is none.

    Such a layer adds to its hidden state. `places` are positions and keywords of arguments, which are tried in order.
    """
    with clean_torch_state():
        given = {**dict(enumerate(sample.args)), **sample.kwargs}
        for place in (each for each in places if each in given):  # another layer may be called in another way
            value = given[place]
            slot = next(i for i, leaf in enumerate(sample.leaves) if leaf is value)
            probe = LayerProbe(layer, sample, slot)
            zero_all(probe, [*probe.values])
            if is_close(probe.run(), probe.hidden):
                return place
    return None


def _plan_by_argument(
    layer: nn.Module, sample: CallSample, preceding: tuple[nn.Module, CallSample] | None, known: IdentityPlan | None
) -> IdentityPlan:
    """Plan for the first argument that works as the hidden state."""
    try:
        out = LayerProbe(layer, sample, -1).run()
    except Exception as error:
        raise NoIdentityError(f"it does not run on its sample ({type(error).__name__}: {error})") from error
    leaves = sample.leaves
    floats = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    slots = [i for i in floats if leaves[i].shape == out.shape and leaves[i].dtype == out.dtype]
    if not slots:
        given = tuple(leaves[floats[0]].shape) if floats else "no floating-point tensor"
        raise NoIdentityError(f"it changes the shape of the hidden state (from {given} to {tuple(out.shape)})")
    reasons = []
    for slot in slots:
        try:
            return _plan_case(SearchCase(layer, sample, slot, preceding), known)
        except NoIdentityError as reason:
            reasons.append(reason)
    raise reasons[0]


def _plan_case(case: SearchCase, known: IdentityPlan | None) -> IdentityPlan:
    if known is not None and (case.preceding or not known.transfers):
        # Another kind of layer may have parameters of the same names, or of others.
        with suppress(NoIdentityError, KeyError):
            return _verify_plan(case, known)
    probe = case.probe()
    order = probe.names_by_last_use()
    zeroed = zero_all(probe, order)
    if is_close(probe.run(), probe.hidden):
        return _verify_plan(case, plan_residual(case, probe, order, zeroed))
    probe.restore(order)
    return _verify_plan(case, plan_post_norm(case, probe, order))


def _verify_plan(case: SearchCase, plan: IdentityPlan) -> IdentityPlan:
    """Try the plan on the parameters' own values; return it with its error."""
    probe = case.probe(perturbed=False)
    target, bound = probe.hidden, EXACT
    if plan.transfers:
        before = case.probe_preceding(perturbed=False)
        target, bound = before.run(), TOLERANCE
        for item in plan.transfers:
            probe.assign(item.new, before.values[item.preceding].view_as(probe.values[item.new]))
            before.assign(item.preceding, item.neutral)
        probe.hidden = before.run()  # the output of the layer before after the transfers
    for name, value in plan.constants.items():
        probe.assign(name, value)
    output = probe.run()
    if not is_close(output, target, bound):
        size, error = target.abs().max().item(), (output - target).abs().max().item()
        message = f"its output would be off by {error:.1e} where the hidden state reaches {size:.1e}"
        if plan.transfers:
            message += (
                f", more than {TOLERANCE:g} of it: the input of the preceding norm has such a small variance that the norm's eps "
                "matters, and it would act twice"
            )
        raise NoIdentityError(message)
    return replace(plan, max_abs_error=(output - target).abs().max().item())
