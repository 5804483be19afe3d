"""What turns a layer into one that can be inserted without changing the model's function.

Found by running a copy of the layer (`layer_probe.py`), not by the names of classes or parameters; and proven by running it.
The copy's parameters are shaken first, so a plan holds for the layer's structure: it serves every layer built alike.

1. *Residual layers.* With every parameter at 0 the layer gives back its hidden state. Then parameters get their values
   back one by one in the order of their use; the ones that would change a single bit stay at 0. Those are the last of
   each branch: output projections, or a layer scale or the gain of a norm if it comes later. Experts that had no token
   follow their counterparts. A gain that is kept as 1 + w (Gemma) is put to w = -1, so that what feeds it can stay.
2. *Layers that end in a norm* (BERT). A parameter that, put to 0, makes the output independent of the input lies on the
   skip path: the gain of a norm. With gains 1 and all else 0 the layer is a chain of norms, which leaves alone what is
   normalised already. So the norm that makes its input, at the end of the preceding layer, is left with gain 1 and
   shift 0, and its values move to the end of the new layer. Then as in 1.

What is exact: 1 to the bit, on any processor, as what is added is 0 (`IdentityPlan.exact`; a layer that puts its sums
together in another order is off by its rounding, at most `EXACT`). That is said of runs through the same kernels: PyTorch
may take others for attention without gradients than with them, and a loss of the one kind is then not a loss of the other.
2 up to the norms' eps, which acts once more: a token whose variance is v before the
preceding norm comes out larger by eps / 2 * (1 / v - 1), relative. With BERT's 1e-12 that is nothing; with 1e-5 the loss
of small networks moved by 1e-7 as a rule and by 2e-6 at worst (weights of three times the usual size). Where
v is small it can be much more, and then the plan is refused (`TOLERANCE`).

What a layer gives out besides the hidden state (attention weights, a router's loss, T5's position bias where it is not
passed in) is the layer's own: `side_outputs` counts it, and whoever uses it sees a layer more.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from l2l_core.surgery import CallSample, capture_samples
from l2l_core.surgery.identity.identity_plan import IdentityPlan, ParameterTransfer, apply_plan
from l2l_core.surgery.identity.layer_probe import LayerProbe, clean_torch_state, first_float
from l2l_core.surgery.identity.post_norm import plan_post_norm
from l2l_core.surgery.identity.residual_layers import plan_residual
from l2l_core.surgery.identity.search import EXACT, NoIdentityError, SearchCase, is_close, zero_all

__all__ = [
    "CallSample",
    "IdentityPlan",
    "ParameterTransfer",
    "apply_plan",
    "capture_samples",
    "plan_identity",
    "sample_after",
]

# Relative to the largest element of the hidden state. A layer that ends in a norm may be this far off.
TOLERANCE = 2e-5


def plan_identity(
    layer: nn.Module,
    sample: CallSample,
    preceding: nn.Module | None = None,
    preceding_sample: CallSample | None = None,
    known: IdentityPlan | None = None,
) -> IdentityPlan:
    """Say how `layer` becomes the identity where it is called with `sample`. Changes nothing; `apply_plan` does.

    `preceding` makes the hidden state in `sample`: the layer before, or the shell's norm or embedding module at position
    0, with what that is called with. Needed for layers that end in a norm or a ReLU. Runs the layer two to five
    times per parameter, so one or two rows are enough.

    The shaken copy makes the names a matter of structure: they hold for every layer built alike, behind one built alike,
    and only the size of the error depends on the values. So a plan that is `known` for such a layer is tried first, which
    takes two runs of each.

    Raises:
        ValueError: there is no identity; the message says why and what to do instead.
    """
    kind = type(layer).__name__
    if (preceding is None) != (preceding_sample is None):
        raise ValueError("preceding= and preceding_sample= belong together: pass both, or neither")
    before = None if preceding is None or preceding_sample is None else (preceding, preceding_sample)
    try:
        with clean_torch_state():
            return _plan_by_argument(layer, sample, before, known)
    except NoIdentityError as reason:
        raise ValueError(
            f'cannot make a {kind} the identity: {reason}. Insert it with init="copy" or init="fresh" instead'
        ) from reason.__cause__


def sample_after(layer: nn.Module, sample: CallSample) -> CallSample:
    """Say what a new layer behind `layer`, the last of its stack, is called with: the same but for the hidden state.

    Raises:
        ValueError: no argument of `layer` has the shape of what it gives out.
    """
    with clean_torch_state():
        made = LayerProbe(layer, sample, -1).run()
    for leaf in sample.leaves:
        if isinstance(leaf, Tensor) and leaf.shape == made.shape and leaf.dtype == made.dtype:
            return sample.clone({id(leaf): made})
    raise ValueError(
        f"{type(layer).__name__} is given no tensor of shape {tuple(made.shape)}, which is what it gives out: a layer like it "
        "cannot stand behind it"
    )


def _plan_by_argument(
    layer: nn.Module, sample: CallSample, preceding: tuple[nn.Module, CallSample] | None, known: IdentityPlan | None
) -> IdentityPlan:
    """Try the arguments that can be the hidden state, in their order."""
    try:
        out = LayerProbe(layer, sample, -1).run()
    except Exception as error:
        raise NoIdentityError(f"it does not run on its sample ({type(error).__name__}: {error})") from error
    leaves = sample.leaves
    floats = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    slots = [i for i in floats if leaves[i].shape == out.shape and leaves[i].dtype == out.dtype]
    if not slots:
        given = tuple(leaves[floats[0]].shape) if floats else "no floating-point tensor"
        raise NoIdentityError(f"it changes the shape of the hidden state (given {given}, gives {tuple(out.shape)})")
    reasons = []
    for slot in slots:
        try:
            return _plan_case(SearchCase(layer, sample, slot, preceding), known)
        except NoIdentityError as reason:
            reasons.append(reason)
    raise reasons[0]


def _plan_case(case: SearchCase, known: IdentityPlan | None) -> IdentityPlan:
    if known is not None and _names_exist(case, known):
        try:
            return _verify_plan(case, known)
        except NoIdentityError:
            pass  # another kind of layer that has parameters of these names
    return _verify_plan(case, _search(case))


def _names_exist(case: SearchCase, known: IdentityPlan) -> bool:
    """Tell whether the parameters that the plan names are there."""
    new = {*known.zeroed, *known.ones, *known.minus_ones, *(item.new for item in known.transfers)}
    theirs = {item.preceding for item in known.transfers}
    has_theirs = not theirs or (
        case.preceding is not None and theirs <= dict(case.preceding[0].named_parameters()).keys()
    )
    return has_theirs and new <= dict(case.layer.named_parameters()).keys()


def _search(case: SearchCase) -> IdentityPlan:
    probe = case.probe()
    assert probe.hidden is not None
    order = probe.names_by_last_use()
    zeroed = zero_all(probe, order)
    if is_close(probe.run(), probe.hidden):
        return plan_residual(case, probe, order, zeroed)
    probe.restore(order)
    return plan_post_norm(case, probe, order)


def _verify_plan(case: SearchCase, plan: IdentityPlan) -> IdentityPlan:
    """Try the plan on the parameters as they are."""
    probe = case.probe(perturbed=False)
    assert probe.hidden is not None
    target, bound = probe.hidden, EXACT
    if plan.transfers:
        before = case.probe_preceding(perturbed=False)
        target, bound = before.run(), TOLERANCE
        for item in plan.transfers:
            probe.assign(item.new, before.value(item.preceding).view_as(probe.value(item.new)))
            before.assign(item.preceding, item.neutral)
        probe.hidden = before.run()  # as the layer before gives it once it has handed over
    probe.fill(plan.zeroed, 0.0)
    probe.fill(plan.ones, 1.0)
    probe.fill(plan.minus_ones, -1.0)
    outputs = probe.outputs()
    made = first_float(outputs)
    if not is_close(made, target, bound):
        raise NoIdentityError(_error_message(plan, made, target))
    given = [leaf for leaf in case.sample.leaves if isinstance(leaf, Tensor)]
    extra = [t for t in outputs if t is not made and not any(_equal(t, leaf) for leaf in given)]
    return replace(plan, max_abs_error=(made - target).abs().max().item(), side_outputs=len(extra))


def _error_message(plan: IdentityPlan, made: Tensor, target: Tensor) -> str:
    size, error = target.abs().max().item(), (made - target).abs().max().item()
    off = f"its output would be off by {error:.1e} where the hidden state reaches {size:.1e}"
    if not plan.transfers:
        return off
    return (
        f"{off}, more than {TOLERANCE:g} of it: what the preceding norm is given varies so little that the norm's eps counts, "
        "and it would act twice"
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
