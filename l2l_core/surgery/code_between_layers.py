"""Check whether the model's own code treats the positions of a stack's layers alike.

In a forward, every layer returns the same tensors. Then the arguments of the next layer show the code between them alone: a
factor, an embedding, a window, read from a table or computed from the position. A second forward, in which all outputs are
doubled, shows which arguments depend on them. No weights of layers are needed.

Where the code carries more than the last outputs on, as a residual sum outside of the layers does, the growth of the hidden state
is compared in its place, if it doubles with the outputs.

Code after the last layer that uses the outputs of several earlier ones (a weighted mean of all hidden states) must not care which
of them returned what: two forwards give them different tensors, in one order and in the reverse one.

Not found: code that depends on the position inside layers and their hooks, or in training alone; after the last layer, if the
code between carries on more than the last outputs; and changes of the hidden state where the code between draws random numbers,
or carries on what is no such sum (reversible layers, states of other kinds).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.model import is_cache

Arguments = dict[str, Any]  # by name or position, with tensors on the host

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


class EqualOutputs:
    """Returns the same tensors for every call of a layer, and records the calls.

    Args:
        outputs: what every call returns.
        factor: of its floating-point tensors.
        factor_first: of those that the first call returns.
        rolls: places by which those of each call are rolled along their last dimension; 0 for further calls.
    """

    def __init__(
        self, outputs: Any, factor: float = 1.0, factor_first: float | None = None, *, rolls: Sequence[int] = ()
    ) -> None:
        self._outputs, self._factor, self._rolls = outputs, factor, rolls
        self._factor_first = factor if factor_first is None else factor_first
        self.calls: list[tuple[nn.Module, Arguments]] = []

    def call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record a call and return copies of the outputs, on the device of the arguments."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.calls.append((layer, copy_arguments(args, kwargs)))
        device = tensors[0].device if tensors else torch.device("cpu")
        factor = self._factor_first if len(self.calls) == 1 else self._factor
        roll = self._rolls[len(self.calls) - 1] if len(self.calls) <= len(self._rolls) else 0
        return pytree.tree_map(lambda leaf: _changed_copy(leaf, device, factor, roll), self._outputs)


@contextmanager
def ignored_hook_results(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Ignore the results of hooks on layers in a block: a hook belongs to its layer and moves with it."""
    held = [hooks for layer in layers for hooks in (layer._forward_hooks, layer._forward_pre_hooks)]
    before = [dict[int, Any](hooks) for hooks in held]
    try:
        for hooks in held:
            hooks.update({key: partial(_call_without_result, hook) for key, hook in hooks.items()})
        yield
    finally:
        for hooks, own in zip(held, before, strict=True):
            hooks.update(own)


def _call_without_result(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    hook(*args, **kwargs)


def _changed_copy(leaf: Any, device: torch.device, factor: float, roll: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    copied = leaf.to(device, copy=True)
    if not copied.is_floating_point():
        return copied
    return (copied.roll(roll, -1) if roll and copied.ndim else copied) * factor


def copy_outputs(outputs: Any) -> Any | None:
    """Copy a layer's outputs to the host; return None if they are not tensors and plain data alone."""
    leaves, spec = pytree.tree_flatten(outputs)
    if not all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves):
        return None
    copies = [leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(copies, spec)


def outputs_are_alike(a: Any, b: Any) -> bool:
    """Return whether two outputs have the same structure, shapes and types, so that one may stand for the other."""
    (ours, spec), (theirs, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other and all(_form_of(x) == _form_of(y) for x, y in zip(ours, theirs, strict=True))


@dataclass(frozen=True)
class CodeBetweenLayers:
    """Arguments that the model's own code gives to the layers of a stack if all of them return equal outputs.

    Attributes:
        odd_position: first position before which it changes the hidden state otherwise than before an earlier one; None if it
            changes it alike everywhere, or carries other state on.
        arguments: by layer, the arguments that are not made of the hidden state.
    """

    odd_position: int | None
    arguments: Mapping[nn.Module, Arguments]

    @classmethod
    def of(cls, layers: Sequence[nn.Module], one: EqualOutputs, doubled: EqualOutputs) -> CodeBetweenLayers | None:
        """Compare two forwards; return None if they call the layers otherwise than once each, in order."""
        order = [layer for layer, _ in one.calls]
        if order != list(layers) or order != [layer for layer, _ in doubled.calls]:
            return None
        changed = [{*different_arguments(a, b)} for (_, a), (_, b) in zip(one.calls, doubled.calls, strict=True)]
        odd, seen = None, dict[frozenset[str], Arguments]()
        for i, (_, given) in enumerate(one.calls):
            hidden = {name: value for name, value in given.items() if name in changed[i]}
            # Of three layers, code that carries two streams (reversible layers) would look odd
            if i > 0 and len(order) > 3 and different_arguments(seen.setdefault(frozenset(hidden), hidden), hidden):
                odd = i
                break
        first = set[str]().union(*changed[1:])  # of the first layer, these are made of the model's input
        rest = {
            layer: {n: v for n, v in given.items() if n not in (changed[i] if i else first)}
            for i, (layer, given) in enumerate(one.calls)
        }
        return cls(odd, rest)

    def settled(
        self, one: EqualOutputs, doubled: EqualOutputs, first_doubled: EqualOutputs, other_random: EqualOutputs
    ) -> CodeBetweenLayers:
        """Return the same without what proves nothing.

        That are arguments that depend on random numbers, and an odd position if there are any. If arguments beyond position 1
        depend on the first outputs, the position is that of an odd growth, see `_odd_growth`.
        """
        drawn = [different_arguments(a, b) for (_, a), (_, b) in zip(one.calls, other_random.calls, strict=True)]
        carries = any(
            different_arguments(a, b) for (_, a), (_, b) in zip(one.calls[2:], first_doubled.calls[2:], strict=True)
        )
        rest = {
            layer: {name: value for name, value in given.items() if name not in random}
            for (layer, given), random in zip(self.arguments.items(), drawn, strict=True)
        }
        odd = _odd_growth(one, doubled) if carries else self.odd_position
        return CodeBetweenLayers(None if any(drawn) else odd, rest)

    @property
    def has_equal_arguments(self) -> bool:
        """Whether all layers are given the same, besides the hidden state."""
        first, *others = self.arguments.values()
        return not any(different_arguments(first, other) for other in others)


def _odd_growth(one: EqualOutputs, doubled: EqualOutputs) -> int | None:
    """Return the first position before which a sum of all outputs grows otherwise than before position 1.

    None if the growth is the same everywhere up to rounding, or does not double with the outputs, so that it is no such sum.
    """
    for name, first in one.calls[0][1].items():
        values: list[list[Any]] = [[given.get(name) for _, given in each.calls] for each in (one, doubled)]
        if not all(_is_floating(value) and value.shape == first.shape for each in values for value in each):
            continue
        growth, of_doubled = ([after - before for before, after in pairwise(each)] for each in values)
        rounding = 1e-5 * max(float(value.abs().max()) for value in values[1])
        doubles = all(_is_close(b, 2 * a, rounding) for a, b in zip(growth, of_doubled, strict=True))
        if not doubles or max(float(each.abs().max()) for each in growth) < 100 * rounding:
            continue
        odd = [i for i, each in enumerate(growth, 1) if not _is_close(each, growth[0], rounding)]
        if odd:
            return odd[0]
    return None


def _is_close(a: torch.Tensor, b: torch.Tensor, atol: float) -> bool:
    return bool(torch.allclose(a, b, rtol=0, atol=atol))


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


def results_are_close(a: Any, b: Any) -> bool:
    """Return whether results of two forwards have the same tensors, up to 5e-5 of the largest element of each."""
    ours, theirs = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(ours) == len(theirs) and all(_is_close_result(x, y) for x, y in zip(ours, theirs, strict=True))


def _is_close_result(a: Any, b: Any) -> bool:
    if not (_is_floating(a) and _is_floating(b) and a.shape == b.shape):
        return _is_equal(a, b)
    return bool(torch.allclose(a, b, rtol=0, atol=5e-5 * float(a.abs().max().nan_to_num()), equal_nan=True))


def different_arguments(a: Arguments, b: Arguments) -> list[str]:
    """List the names of arguments that are not equal to the bit, or that only one of the calls has."""
    return [name for name in {**a, **b} if name not in a or name not in b or not _is_equal(a[name], b[name])]


def copy_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Copy the arguments of a layer call to the host, by name or position."""
    found: Arguments = {}
    for name, value in [*enumerate(args), *kwargs.items()]:
        leaves = pytree.tree_leaves(value, is_leaf=is_cache)
        for i, leaf in enumerate(leaves):
            copied = leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf
            found[f"{name}" if len(leaves) == 1 else f"{name}[{i}]"] = copied
    return found


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if _form_of(a) != _form_of(b) or a.layout != b.layout:
            return False
        if a.layout not in (torch.strided, torch.jagged):  # sparse ones cannot be compared
            a, b = a.to_dense(), b.to_dense()
        return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
    if isinstance(a, _PLAIN) or isinstance(b, _PLAIN):
        return type(a) is type(b) and bool(a == b)
    return type(a) is type(b)  # such as a cache or a module


def _form_of(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
