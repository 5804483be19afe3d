"""Join the outputs of micro-batches: each tensor along the dimension that holds the rows, in the order of the batch.

All operations are differentiable, so that a loss over joined outputs has gradients for the outputs of every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core._torch import pytree
from l2l_core.batches.containers import open_container
from l2l_core.batches.objective import divide_loss
from l2l_core.model import refuse_hidden_tensors

Join = int | Mapping[Any, Any] | Sequence[Any] | Callable[[list[Any]], Any]
DimOf = tuple[str, Any, Any]  # name of a value, the value, and the dim that holds its rows: a number, None or BY_RULE
GetDivisors = Callable[[], Sequence[float]]  # of the micro-batches' losses
BY_RULE: Any = object()  # dim of an output for which the user gave none


@dataclass(frozen=True, slots=True)
class Placing:
    """Where the tensors of micro-batches hold their rows.

    Attributes:
        dim: of the rows.
        sizes: entries of every micro-batch along `dim`.
        blocks: number of equal blocks, one behind another, in each of them and in the joined tensor.
    """

    dim: int
    sizes: Sequence[int]
    blocks: int = 1

    def fits(self, parts: Sequence[torch.Tensor]) -> bool:
        """Return whether the parts have these sizes."""
        return all(
            -part.ndim <= self.dim < part.ndim and part.shape[self.dim] == size
            for part, size in zip(parts, self.sizes, strict=True)
        )

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Concatenate the parts, each block behind the same block of the micro-batch before."""
        dim = self.dim % parts[0].ndim
        if self.blocks == 1:
            return torch.cat(list(parts), dim)
        opened = [part.unflatten(dim, (self.blocks, -1)) for part in parts]
        return torch.cat(opened, dim + 1).flatten(dim, dim + 1)


Place = Callable[
    [str, Sequence[torch.Tensor], "int | None"], "Placing | None"
]  # of (name, parts, dim given by the user)


def first_fitting(placings: Sequence[Placing], parts: Sequence[torch.Tensor]) -> Placing | None:
    """Return the first placing with the sizes of the parts."""
    return next((each for each in placings if each.fits(parts)), None)


def place_flattened(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> Placing | None:
    """Return the placing of (rows * tokens, ...), as of transformers' router logits.

    Tensors that are equal in all micro-batches have no rows.
    """
    tokens = parts[0].shape[0] // sizes[0]
    placing = Placing(0, [tokens * size for size in sizes])
    return placing if tokens > 1 and placing.fits(parts) and not _are_equal(parts) else None


class UnknownKeyError(ValueError):
    """A key for a dim names nothing in a batch or an output."""


@dataclass(frozen=True, slots=True)
class OutputJoin:
    """Joins outputs of micro-batches, by the user's ``join=`` if it is given.

    Attributes:
        given: a function of all outputs; or the dim of the rows, or dims by key (None: equal for all micro-batches).
    """

    given: Join | None = None

    def __call__(self, outputs: Sequence[Any], place: Place, divisors: GetDivisors | None) -> Any:
        """Join outputs of one structure, (rows, ...) each.

        Scalars become their weighted mean. A tensor without rows is that of the first micro-batch. Without `divisors`, both are
        refused unless all micro-batches have the same.

        Args:
            outputs: of all micro-batches, in order.
            place: returns where a tensor has its rows; None if it has none.
            divisors: called only if there is a scalar; None for a loss, which needs the outputs of all micro-batches.

        Raises:
            ValueError: a tensor that does not have the rows in the dim given, or without `divisors` none; outputs of unlike
                structures.
        """
        if callable(self.given):
            return self.given(list(outputs))
        flat = [pytree.tree_flatten(output) for output in outputs]
        if any(spec != flat[0][1] for _, spec in flat):
            raise ValueError(
                "the outputs of micro-batches have unlike structures, so they cannot be joined: pass join=lambda outputs: ..."
            )
        given = BY_RULE if self.given is None else self.given
        dims = list(dims_in(outputs[0], given, "outputs", default=BY_RULE, opens_objects=False))
        assert len(dims) == len(flat[0][0]), (dims, flat[0][1])
        joined = [
            self._join_leaf(where, parts, dim, place, divisors)
            for (where, _, dim), parts in zip(dims, zip(*(leaves for leaves, _ in flat), strict=True), strict=True)
        ]
        return pytree.tree_unflatten(joined, flat[0][1])

    def _join_leaf(
        self,
        where: str,
        parts: Sequence[Any],
        dim: Any,
        place: Place,
        divisors: GetDivisors | None,
    ) -> Any:
        first = parts[0]
        if not isinstance(first, torch.Tensor):
            refuse_hidden_tensors(first, "the model's output")
            return first
        if first.dim() == 0 and divisors is not None:
            return torch.stack([divide_loss(part, each) for part, each in zip(parts, divisors(), strict=True)]).sum()
        placing = None if dim is None or not first.dim() else place(where, parts, None if dim is BY_RULE else dim)
        if placing is not None:
            return placing.join(parts)
        if dim is not BY_RULE and dim is not None:
            raise ValueError(
                f"join={self.given!r}: dim {dim} of {where} does not hold the rows, as the shapes of micro-batches are "
                f"{[tuple(part.shape) for part in parts]}. Give dims by key, None for a tensor that all micro-batches share, or "
                "a function of the outputs"
            )
        if divisors is None and not _are_equal(parts):
            raise ValueError(
                f'loss_over="batch": {where} of a micro-batch has no rows, as it has the shape {tuple(first.shape)}, so that '
                "those of micro-batches cannot be joined. Return a value per row, such as x.expand(rows), and reduce it in the "
                "loss; leave it out by join=lambda outputs: ..., which joins the others; read a parameter in the loss directly "
                "(model.logit_scale)"
            )
        return first


def _are_equal(parts: Sequence[torch.Tensor]) -> bool:
    """Return whether all micro-batches have one constant tensor, or there is only one micro-batch."""
    first = parts[0]
    same = (not first.requires_grad and other.shape == first.shape and torch.equal(other, first) for other in parts[1:])
    return all(same)


def dims_in(value: Any, dims: Any, where: str, default: Any = 0, opens_objects: bool = True) -> Iterator[DimOf]:
    """Yield all leaves with the dim that holds their rows; with `opens_objects`, a container with None is a leaf.

    Args:
        value: a batch or an output.
        dims: a dim, None, or dims by key or position; objects with a ``split_dim``, such as PyTorch's TensorChunkSpec, are
            dims.
        where: name of `value`.
        default: dim of keys that `dims` leaves out.
        opens_objects: True to open objects that are no pytrees, too.

    Raises:
        UnknownKeyError: a key names nothing.
        TypeError: `dims` is none of these.
    """
    found, unknown = _dims_in(value, dims, where, default, opens_objects)
    if unknown:
        opened = open_container(value)
        names = [] if opened is None else [name.strip("[].") for name in opened.names]
        raise UnknownKeyError(f"{sorted(map(repr, unknown))[0]} is not in {where}, which has {', '.join(names)}")
    yield from found


def _dims_in(value: Any, dims: Any, where: str, default: Any, opens_objects: bool) -> tuple[list[DimOf], set[Any]]:
    """Return the leaves with their dims, and the keys of `dims` that name nothing."""
    dims = getattr(dims, "split_dim", dims)
    by_key = dict(dims) if isinstance(dims, Mapping) else None
    if isinstance(dims, Sequence) and not isinstance(dims, str):
        by_key = dict(enumerate(dims))
    if by_key is None and dims not in (None, BY_RULE) and (isinstance(dims, bool) or not isinstance(dims, int)):
        raise TypeError(f"{dims!r} is no dim of {where}: give a whole number, None, or a mapping of keys to these")
    opened = open_container(value)
    if opened is None or not (opens_objects or opened.is_plain) or (opens_objects and dims is None):
        return [(where, value, default if by_key is not None else dims)], set(by_key or ())
    found, used = list[DimOf](), set[Any]()
    for part, name in zip(opened.parts, opened.names, strict=True):
        inner: Any = dims
        if by_key is not None and name:
            keys = [key for key in by_key if name in (f"[{key!r}]", f".{key}")]
            inner = by_key[keys[0]] if keys else default
            used |= {*keys}
        leaves, unknown = _dims_in(part, inner, where + name, default, opens_objects)
        if by_key is not None and not name:  # the mapping inside of a UserDict: its keys are those of `dims`
            used |= by_key.keys() - unknown
        elif unknown:
            raise UnknownKeyError(f"{sorted(map(repr, unknown))[0]} is not in {where + name}")
        found += leaves
    return found, set(by_key or ()) - used
