"""Arguments of layer calls, captured in a forward of the model.

Capturing restores training modes, buffers, hooks and random generators. The tensors of a sample are copies on the host, so
that a layer, or a copy of it, can be run on it repeatedly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.model import is_cache, preserve_module_state, preserve_random_state

_SHARED = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, nn.Module)


class CallSample(NamedTuple):
    """Arguments of one layer call; tensors are on the host and require no gradient."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def leaves(self) -> list[Any]:
        """The arguments as a flat list of pytree leaves."""
        return pytree.tree_leaves((self.args, self.kwargs), is_leaf=is_cache)

    def clone(self, replaced: dict[int, Any] | None = None) -> CallSample:
        """Return a copy that a layer may write into; `replaced` maps the `id` of leaves to other values.

        A tensor that occurs twice is one tensor in the copy, too.
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
    """Run `call()`, which calls `model`; return the arguments of the first call of each of `layers`.

    The run is in eval mode without gradients, and ends when the last of `layers` is called.

    Raises:
        ValueError: a layer was not called.
    """
    pending, found = set(layers), dict[nn.Module, CallSample]()

    def capture(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if layer in pending:
            found[layer] = CallSample(args, kwargs).clone()  # before the layer writes into its arguments
            pending.remove(layer)
        if not pending:
            raise _CapturedAllError

    handles = []
    with preserve_module_state(model), torch.no_grad(), preserve_random_state():
        try:
            handles += [layer.register_forward_pre_hook(capture, with_kwargs=True) for layer in pending]
            if pending:
                call()
        except _CapturedAllError:
            pass
        finally:
            for handle in handles:
                handle.remove()
    if missing := [name for name, module in model.named_modules() if module in pending]:
        raise ValueError(
            f"layer {missing[0]} was not called in a forward in eval mode ({len(missing)} of {len({*layers})} layers were "
            'not), so that its arguments are missing. Use init="copy" or "fresh"'
        )
    return {layer: found[layer] for layer in layers}


class _CapturedAllError(BaseException):
    """Ends a forward; a BaseException, so that no model catches it by accident."""


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to("cpu", copy=True)
    return leaf if isinstance(leaf, _SHARED) else copy.deepcopy(leaf)
