"""What a layer is called with: arguments captured from a real forward of the model.

Nothing stays behind in the model: training modes, buffers, hooks and random generators are put back. A sample is a value:
its tensors are copies on the host, so that a layer may be run on it again and again, in any copy of the model.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.model import RandomState, force_eager, is_cache

_SHARED = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, nn.Module)


class CallSample(NamedTuple):
    """Holds one call of a layer. Tensors are on the host and need no gradient."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def leaves(self) -> list[Any]:
        """The arguments, flat; what PyTorch's pytrees do not know is one leaf."""
        return pytree.tree_leaves((self.args, self.kwargs), is_leaf=is_cache)

    def clone(self, replaced: dict[int, Any] | None = None) -> CallSample:
        """Make a copy that a layer may write into; leaves whose `id` is in `replaced` give way to what stands there.

        A tensor that occurs twice occurs twice in the copy too.
        """
        memo: dict[int, Any] = {}
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs), is_leaf=is_cache)
        for leaf in leaves:
            if id(leaf) not in memo:
                memo[id(leaf)] = _copy_leaf((replaced or {}).get(id(leaf), leaf))
        return CallSample(*pytree.tree_unflatten([memo[id(leaf)] for leaf in leaves], spec))


def capture_samples(
    model: nn.Module, call: Callable[[], Any], layers: Sequence[nn.Module]
) -> dict[nn.Module, CallSample]:
    """Run `call()`, which calls `model`, and return the arguments of the first call of each of `layers`.

    The run is in eval mode, without gradients, and ends as soon as the last of `layers` has been called.

    Raises:
        ValueError: a layer was not called.
    """
    wanted, found = set(layers), dict[nn.Module, CallSample]()

    def take(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.setdefault(
            layer, CallSample(args, kwargs).clone()
        )  # a copy, at once: the layer may write into its arguments
        if len(found) == len(wanted):
            raise _CapturedAllError

    handles = []
    with preserve_module_state(model), torch.no_grad(), preserve_random_state():
        try:
            handles += [layer.register_forward_pre_hook(take, with_kwargs=True) for layer in wanted]
            if wanted:
                call()
        except _CapturedAllError:
            pass
        finally:
            for handle in handles:
                handle.remove()
    if missing := [name for name, module in model.named_modules() if module in wanted - set(found)]:
        raise ValueError(
            f"layer {missing[0]} was not called in a forward in eval mode ({len(missing)} of {len(wanted)} layers were "
            'not): what it is given is not known. Use init="copy" or "fresh"'
        )
    return {layer: found[layer] for layer in layers}


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Put the generators of torch and Python, and of NumPy where somebody uses it, back after a block."""
    numpy = sys.modules.get("numpy")  # not imported for this: where nobody has, nobody draws from it
    before, numpy_before = RandomState.capture(), numpy.random.get_state(legacy=False) if numpy is not None else None
    try:
        yield
    finally:
        before.restore()
        if numpy is not None:
            numpy.random.set_state(numpy_before)


class _CapturedAllError(BaseException):
    """Ends a forward; no model catches it by accident."""


@contextmanager
def preserve_module_state(model: nn.Module) -> Iterator[None]:
    """Run a block in eval mode, nothing compiled, then put modes and buffers back."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    for module, _ in modes:  # not model.eval(): a model may do more than that there
        module.training = False
    try:
        with force_eager():
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer  # the tensor itself, where the forward has put another in its place
                if buffer is not None and not torch.equal(buffer, value):
                    buffer.copy_(value)


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to("cpu", copy=True)
    return leaf if isinstance(leaf, _SHARED) else copy.deepcopy(leaf)
