"""Values that a loss returns beside the scalar, copied to the host and joined over the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.devices import NoTorchModes
from l2l_core.model import refuse_hidden_tensors

CallWithExtras = Callable[[nn.Module, Any], tuple[torch.Tensor, Any]]


class StepExtras:
    """Extras of the micro-batches of one step, which may finish in any order.

    Extras that cannot be joined are refused when the loss returns them, before anything is trained.

    Args:
        call: returns the loss of a micro-batch and its extras.
        modules: metrics that the loss updates; a micro-batch may read what another one left in them.
    """

    def __init__(self, call: CallWithExtras, modules: Sequence[nn.Module]) -> None:
        self._call, self._modules = call, modules
        self._leaves: dict[int, list[Any]] = {}  # by micro-batch
        self._structure: Any = None  # of the first micro-batch, with the shapes of its tensors
        self._of_batch: Any = None  # of a loss over the whole batch

    def run(self, model: nn.Module, numbered: tuple[int, Any]) -> torch.Tensor:
        """Return the loss of a micro-batch, given with its number, and keep its extras.

        Raises:
            ValueError: its extras cannot be joined with those of another micro-batch.
            TypeError: an object among its extras holds tensors.
        """
        k, micro_batch = numbered
        with new_state_copied(self._modules):
            loss, extras = self._call(model, micro_batch)
        leaves, spec = pytree.tree_flatten(extras, is_leaf=_is_list_of_values)
        structure = spec, [_shape_without_rows(leaf) for leaf in leaves]
        self._structure = self._structure or structure
        if structure != self._structure:
            raise ValueError(
                f"the extras of micro-batch {k} have other keys, types or shapes (beyond dim 0) than those of another one, so "
                f"they cannot be joined: {structure[1]} and {self._structure[1]}. Return the same tree of values for each, with "
                "tensors padded to one shape, or figures computed from them"
            )
        self._leaves[k] = [host_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return loss

    def run_once(self, call: Callable[..., tuple[torch.Tensor, Any]], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss of the whole batch, from `call` with the other arguments, and keep its extras."""
        loss, extras = call(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(extras, is_leaf=_is_list_of_values)
        for leaf in leaves:
            _shape_without_rows(leaf)
        kept = [host_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._of_batch = pytree.tree_unflatten(kept, spec)
        return loss

    def join(self) -> Any:
        """Return the extras of all micro-batches in ascending order, or those of the batch; None without any."""
        if not self._leaves:
            return self._of_batch
        rows = [self._leaves[k] for k in sorted(self._leaves)]
        if all(leaf is None for leaves in rows for leaf in leaves):
            return None
        return pytree.tree_unflatten([_join(column) for column in zip(*rows, strict=True)], self._structure[0])


def _is_list_of_values(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _shape_without_rows(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim(), *leaf.shape[1:]
    if not isinstance(leaf, list):
        refuse_hidden_tensors(leaf, "a value among the loss's extras")
    return "a value"


def _join(column: Sequence[Any]) -> Any:
    if not isinstance(column[0], torch.Tensor):
        return list(column)
    return torch.cat([part if part.dim() else part[None] for part in column])


# -- copies ------------------------------------------------------------------------------------------------------------


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor that a micro-batch made into host memory that belongs to no micro-batch."""
    return _copy(tensor, torch.device("cpu"))


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor that a micro-batch made into memory that belongs to no micro-batch."""
    with NoTorchModes():
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    with torch.no_grad():
        target.copy_(tensor)  # under the modes of the pass, which fetch an offloaded tensor
    with NoTorchModes():
        return target.detach()  # they register `target`, but not another tensor of its storage


@contextmanager
def new_state_copied(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run a block; afterwards replace tensors that it set on modules, in buffers or in lists there, by copies.

    Otherwise they would belong to the micro-batch that made them, and others could not read them.
    """
    # Modules of torch have no such state.
    modules = [module for module in modules if not type(module).__module__.startswith("torch.nn.")]
    held: list[dict[str, Any]] = []
    for module in modules:
        held += [vars(module), module._buffers]
    before = [{name: _contents(value) for name, value in values.items()} for values in held]
    yield
    for values, old in zip(held, before, strict=True):
        for name, value in list(values.items()):
            known = set(map(id, old.get(name, ())))
            new = [each for each in _contents(value) if id(each) not in known]
            copies = {id(each): _copy(each, each.device) for each in new}
            if isinstance(value, list) and copies:
                value[:] = [copies.get(id(each), each) for each in value]
            elif copies:
                values[name] = copies[id(value)]


def _contents(value: Any) -> list[torch.Tensor]:
    """Return a tensor, or the tensors of a list."""
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, torch.Tensor)]
