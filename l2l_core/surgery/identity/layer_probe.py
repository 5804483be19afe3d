"""A private copy of a layer, run on its sample again and again while its parameters are set to this and that.

The layer itself is only read. The copy runs in eval mode, from the same random state every time, and with gradients on:
without them PyTorch's transformer layer takes a fused path on which the order of its parameters cannot be seen. The
user's hooks do not run in it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from l2l_core._torch import TorchDispatchMode, pytree
from l2l_core.model import RandomState, ThreadState, deep_copy, force_eager, is_cache
from l2l_core.surgery import CallSample, preserve_random_state

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


class LayerProbe:
    """Copies `layer`, with values of its own. With a `noise` generator they are shaken, so that what is said of it does
    not rest on gains that happen to be 1 or biases that happen to be 0.
    """

    def __init__(self, layer: nn.Module, sample: CallSample, slot: int, noise: torch.Generator | None = None) -> None:
        """`slot` is the leaf of the sample that is the hidden state; -1 if there is none to be replaced."""
        self.sample, self.slot = sample, slot
        self.hidden: torch.Tensor | None = sample.leaves[slot] if slot >= 0 else None  # what runs get unless told
        self.module = _copy(layer)
        self._params = {n: p.requires_grad_() for n, p in self.module.named_parameters() if p.is_floating_point()}
        if noise is not None:
            for parameter in self._params.values():
                _perturb(parameter, noise)
        self._values = {name: p.detach().clone() for name, p in self._params.items()}

    @property
    def names(self) -> list[str]:
        """Floating-point parameters, in the order of definition."""
        return list(self._params)

    def value(self, name: str) -> torch.Tensor:
        """Give what the parameter is when it is restored."""
        return self._values[name]

    def assign(self, name: str, value: torch.Tensor | float) -> None:
        """Set a parameter: to a number, or to a tensor of its shape."""
        with torch.no_grad():
            self._params[name].copy_(torch.as_tensor(value, dtype=self._params[name].dtype))

    def fill(self, names: Iterable[str], value: float) -> None:
        """Set parameters to a number."""
        for name in names:
            self.assign(name, value)

    def restore(self, names: Iterable[str]) -> None:
        """Give parameters their own values again."""
        for name in names:
            self.assign(name, self._values[name])

    def outputs(self, hidden: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Run the layer and list all tensors that it gives out, on its sample or with another hidden state in it."""
        return [leaf.detach() for leaf in self._run_leaves(hidden) if isinstance(leaf, torch.Tensor)]

    def run(self, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Run the layer and give its hidden state: the first floating-point tensor that it gives out."""
        return first_float(self.outputs(hidden))

    def find_without_gradient(self, names: Sequence[str]) -> list[str]:
        """Find those of `names` that have no influence on the output where they stand, not even to first order."""
        out = first_float([leaf for leaf in self._run_leaves(None) if isinstance(leaf, torch.Tensor)])
        # Not the sum: what a norm or a softmax gives sums to a constant, whose gradient is 0 everywhere
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
        gradients = torch.autograd.grad(out, [self._params[n] for n in names], weights, allow_unused=True)
        return [n for n, gradient in zip(names, gradients, strict=True) if gradient is None or not gradient.any()]

    def last_use(self, hidden: torch.Tensor | None = None) -> dict[str, int]:
        """Count, in operations, when each parameter is last used in a run; absent: not, or for no elements."""
        with _ReadTracker({p.untyped_storage().data_ptr(): n for n, p in self._params.items()}) as watch:
            self._run_leaves(hidden)
        return watch.last

    def names_by_last_use(self) -> list[str]:
        """Sort parameters by their last use; one that was not used stands where its counterparts do."""
        last = self.last_use()
        alike: dict[Any, int] = {}
        for name, at in last.items():
            alike[self.counterpart_key(name)] = max(at, alike.get(self.counterpart_key(name), -1))
        return sorted(self._params, key=lambda name: last.get(name, alike.get(self.counterpart_key(name), -1)))

    def counterpart_key(self, name: str) -> tuple[str, torch.Size]:
        """Give what counterparts have in common: parameters at one place in members of a ModuleList or ModuleDict."""
        module, parts = self.module, []
        for part in name.split("."):
            is_member = isinstance(module, nn.ModuleList | nn.ModuleDict)
            module = getattr(module, part)
            parts.append(f"*{type(module).__qualname__}" if is_member else part)
        return ".".join(parts), self._params[name].shape

    def _run_leaves(self, hidden: torch.Tensor | None) -> list[Any]:
        hidden = self.hidden if hidden is None else hidden
        replaced = {} if self.slot < 0 else {id(self.sample.leaves[self.slot]): hidden}
        args, kwargs = self.sample.clone(replaced)  # a copy each time: the layer may write into a cache among them
        RandomState.from_seed(0).restore()  # before each run: two of them are compared to the bit
        return pytree.tree_leaves(self.module(*args, **kwargs), is_leaf=is_cache)


@contextmanager
def clean_torch_state() -> Iterator[None]:
    """Run a block without autocast, modes, saved-tensor hooks or compiled code and with gradients; nothing stays behind."""
    with preserve_random_state():
        outside = ThreadState.take()
        try:
            with torch.enable_grad(), torch.autocast("cpu", enabled=False), force_eager():
                yield
        finally:
            ThreadState.take()
            outside.restore()


def first_float(leaves: Iterable[Any]) -> torch.Tensor:
    """Find the first floating-point tensor.

    Raises:
        ValueError: there is none.
    """
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    raise ValueError("it gives out no floating-point tensor")


class _ReadTracker(TorchDispatchMode):
    """Notes which storages operations read. Those that make nothing (an expert without tokens) do not count."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names, self._count = names, 0
        self.last: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.numel() for leaf in pytree.tree_leaves(result)):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and (name := self._names.get(_storage(leaf))) is not None:
                    self._count += 1
                    self.last[name] = self._count
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _copy(layer: nn.Module) -> nn.Module:
    """Copy a layer in eval mode, without the hooks that others put there, and what those hooks would drag along."""
    memo: dict[int, Any] = {}
    for module in layer.modules():
        for attribute in _HOOKS:
            hooks = module.__dict__[attribute]
            own = {key: copy.deepcopy(hook) for key, hook in hooks.items() if _is_torch_hook(hook)}
            memo[id(hooks)] = type(hooks)(own)  # deepcopy takes what the memo has, so the others are never copied
        for value in vars(module).values():  # a weight that a hook left there, with its graph
            if isinstance(value, torch.Tensor):
                memo[id(value)] = value.detach().clone()
    twin = deep_copy(layer, memo)
    for module in twin.modules():  # not twin.eval(): a module may do more than that there
        module.training = False
    return twin


def _is_torch_hook(hook: Any) -> bool:
    """Tell whether a hook is one of PyTorch's own (the older weight norm and spectral norm)."""
    return type(hook).__module__.startswith("torch.nn.utils.")


def _perturb(parameter: nn.Parameter, noise: torch.Generator) -> None:
    """Add noise: 0.3 to vectors, half the spread to matrices."""
    if parameter.numel():
        draw = torch.randn(parameter.shape, generator=noise).to(parameter.dtype)
        spread = parameter.detach().float().std(correction=0).clamp(0.04, 0.6).item() / 2
        with torch.no_grad():
            parameter += draw * (0.3 if parameter.ndim < 2 else spread)
