"""A private copy of a layer that is run on a sample with different parameter values.

The copy runs in eval mode, from the same random state every time, without the user's hooks, and with gradients: without them
PyTorch's transformer layer takes a fused path on which the order of its parameters cannot be observed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from l2l_core._torch import TorchDispatchMode, pytree
from l2l_core.model import RandomState, ThreadState, deep_copy, force_eager, is_cache, preserve_random_state
from l2l_core.surgery import CallSample

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


class LayerProbe:
    """A copy of `layer` with its sample.

    Args:
        slot: index of the sample's leaf that is the hidden state; -1 if none is to be replaced.
        noise: perturbs the parameters, so that results do not depend on gains that are 1 or biases that are 0 by chance.
    """

    def __init__(self, layer: nn.Module, sample: CallSample, slot: int, noise: torch.Generator | None = None) -> None:
        self.sample, self.slot = sample, slot
        self.hidden: Any = sample.leaves[slot] if slot >= 0 else None  # the default of runs
        self.module = _copy(layer)
        own = self.module.named_parameters()
        # Not integers, nor floats of one byte, which are codes
        self._params = {n: p.requires_grad_() for n, p in own if p.is_floating_point() and p.dtype.itemsize > 1}
        if noise is not None:
            for parameter in self._params.values():
                _perturb(parameter, noise)
        # The values to which parameters are restored, in the order of definition.
        self.values = {name: p.detach().clone() for name, p in self._params.items()}

    def assign(self, name: str, value: torch.Tensor | float) -> None:
        """Set a parameter: to a number, or to a tensor of its shape."""
        with torch.no_grad():
            self._params[name].copy_(torch.as_tensor(value, dtype=self._params[name].dtype))

    def fill(self, names: Iterable[str], value: float) -> None:
        """Set parameters to a number."""
        for name in names:
            self.assign(name, value)

    def restore(self, names: Iterable[str]) -> None:
        """Restore the values of parameters."""
        for name in names:
            self.assign(name, self.values[name])

    def run(self, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Run the layer on its sample, or with another hidden state; return its first floating-point output."""
        return self._run_with_graph(hidden).detach()

    def find_without_gradient(self, names: Sequence[str]) -> list[str]:
        """List the parameters among `names` whose gradient is 0."""
        out = self._run_with_graph()
        # Not the sum: outputs of a norm or a softmax sum to a constant, whose gradient is 0.
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
        gradients = torch.autograd.grad(out, [self._params[n] for n in names], weights, allow_unused=True)
        return [n for n, gradient in zip(names, gradients, strict=True) if gradient is None or not gradient.any()]

    def last_use(self) -> dict[str, int]:
        """Return the order of each parameter's last use in a run; parameters that produce no elements are absent."""
        with _ReadTracker({p.untyped_storage().data_ptr(): n for n, p in self._params.items()}) as tracker:
            self._run_with_graph()
        return tracker.last

    def names_by_last_use(self) -> list[str]:
        """Sort parameters by their last use; an unused one counts as its counterparts do."""
        last = self.last_use()
        by_key: dict[Any, int] = {}
        for name, order in last.items():
            by_key[self.counterpart_key(name)] = max(order, by_key.get(self.counterpart_key(name), -1))
        return sorted(self._params, key=lambda name: last.get(name, by_key.get(self.counterpart_key(name), -1)))

    def counterpart_key(self, name: str) -> tuple[str, torch.Size]:
        """Return a key that is equal for the same parameter in different members of a ModuleList or ModuleDict."""
        module, parts = self.module, []
        for part in name.split("."):
            is_member = isinstance(module, nn.ModuleList | nn.ModuleDict)
            module = getattr(module, part)
            parts.append(f"*{type(module).__qualname__}" if is_member else part)
        return ".".join(parts), self._params[name].shape

    def _run_with_graph(self, hidden: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.hidden if hidden is None else hidden
        replaced = {} if self.slot < 0 else {id(self.sample.leaves[self.slot]): hidden}
        args, kwargs = self.sample.clone(replaced)  # copied for each run: the layer may write into its arguments
        RandomState.from_seed(0).restore()  # before each run: runs are compared to the bit
        for leaf in pytree.tree_leaves(self.module(*args, **kwargs), is_leaf=is_cache):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                return leaf
        raise ValueError("its output has no floating-point tensor")


@contextmanager
def clean_torch_state() -> Iterator[None]:
    """Run a block with gradients and without autocast, modes, hooks or compiled code; restore the state afterwards."""
    with preserve_random_state():
        outer_state = ThreadState.take()
        try:
            with torch.enable_grad(), torch.autocast("cpu", enabled=False), force_eager():
                yield
        finally:
            ThreadState.take()
            outer_state.restore()


class _ReadTracker(TorchDispatchMode):
    """Records the last read of storages, without operations that produce no elements (an expert without tokens)."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names, self._count = names, 0
        self.last: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.numel() for leaf in pytree.tree_leaves(result)):
            for leaf in pytree.tree_leaves((args, kwargs)):
                strided = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
                if strided and (name := self._names.get(leaf.untyped_storage().data_ptr())):
                    self._count += 1
                    self.last[name] = self._count
        return result


def _copy(layer: nn.Module) -> nn.Module:
    """Copy a layer in eval mode, without the user's hooks and the objects that they refer to."""
    memo: dict[int, Any] = {}
    for module in layer.modules():
        for attribute in _HOOKS:
            hooks = module.__dict__[attribute]
            # Those of PyTorch's older weight norm and spectral norm stay.
            own = {k: copy.deepcopy(h) for k, h in hooks.items() if type(h).__module__.startswith("torch.nn.utils.")}
            memo[id(hooks)] = type(hooks)(own)  # `deepcopy` takes this copy from the memo
        for value in vars(module).values():  # a weight that a hook has set, with its graph
            if isinstance(value, torch.Tensor):
                memo[id(value)] = value.detach().clone()
    twin = deep_copy(layer, memo)
    for module in twin.modules():  # not twin.eval(), which a module may override
        module.training = False
    return twin


def _perturb(parameter: torch.Tensor, noise: torch.Generator) -> None:
    """Add noise: 0.3 to vectors, half the spread to matrices."""
    if parameter.numel():
        draw = torch.randn(parameter.shape, generator=noise).to(parameter.dtype)
        spread = parameter.detach().float().std(correction=0).clamp(0.04, 0.6).item() / 2
        with torch.no_grad():
            parameter += draw * (0.3 if parameter.ndim < 2 else spread)
