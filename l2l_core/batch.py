"""Split a batch into micro-batches, weigh them, call the model on one, and put outputs together again.

The step's loss is the mean over the whole batch. A micro-batch therefore counts by its number of targets, not by 1/K:
its loss is divided by ``n / n_k`` before backward, which is exactly ``K`` when micro-batches are even.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from l2l_core.caches import arguments_without
from l2l_core.hidden import refuse_hidden

_SHIFTING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # names of transformers' model classes

Batch = Mapping[str, Any] | Sequence[Any]
Objective = Callable[[nn.Module, Any], torch.Tensor]
Weight = Callable[[Any], float]


def split(batch: Batch, micro_batches: int) -> list[Any]:
    """Cut every tensor of `batch` along dim 0 into `micro_batches` parts of equal size, the last possibly smaller.

    Tensors with a single row beside others with more (a shared ``position_ids``, say), scalars and other values go to
    every micro-batch as they are.

    Raises:
        TypeError: the batch is neither a mapping nor a sequence.
        ValueError: it is empty, its tensors disagree on the number of rows, or it has fewer rows than micro-batches.
    """
    if not isinstance(batch, Mapping | tuple | list):
        raise TypeError(
            f"batch is a {type(batch).__name__}: the relay takes a dict of keyword arguments or a tuple of positional "
            "ones; wrap a single tensor as (tensor,)"
        )
    leaves, spec = pytree.tree_flatten(dict(batch) if isinstance(batch, Mapping) else tuple(batch))
    rows = _count_rows(batch, leaves)
    if rows < micro_batches:
        raise ValueError(
            f"the batch has {rows} row(s) but micro_batches={micro_batches}: give a larger batch, or use "
            f"RelayConfig(micro_batches={rows})"
        )
    parts = [_cut(leaf, rows, micro_batches) for leaf in leaves]
    return [pytree.tree_unflatten([part[k] for part in parts], spec) for k in range(micro_batches)]


def first_rows(batch: Batch, count: int) -> Any:
    """The first `count` rows of a batch, or all of them if there are fewer."""
    rows = rows_of(batch)
    leaves, spec = pytree.tree_flatten(dict(batch) if isinstance(batch, Mapping) else tuple(batch))
    parts = [_cut(leaf, rows, max(1, -(-rows // count)))[0] for leaf in leaves]
    return pytree.tree_unflatten(parts, spec)


def rows_of(batch: Batch) -> int:
    """Number of rows (samples) of a batch."""
    return _count_rows(batch, pytree.tree_leaves(batch))


def _count_rows(batch: Batch, leaves: list[Any]) -> int:
    sizes = sorted({leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0})
    if not sizes or sizes == [0]:
        raise ValueError(f"the batch is empty: no tensor with at least one row in {_describe(batch)}")
    if len([s for s in sizes if s != 1]) > 1 or 0 in sizes:
        raise ValueError(f"tensors of the batch disagree on dim 0, the number of rows: {_describe(batch)}")
    return sizes[-1]


def _describe(batch: Batch) -> str:
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    shown = [f"{name}: {tuple(v.shape) if isinstance(v, torch.Tensor) else type(v).__name__}" for name, v in items]
    return "{" + ", ".join(shown) + "}"


def _cut(leaf: Any, rows: int, parts: int) -> Sequence[Any]:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] != rows:
        return [leaf] * parts
    size = -(-rows // parts)
    if size * (parts - 1) < rows:
        return leaf.split(size)
    return leaf.tensor_split(parts)  # 5 rows in 4 parts: 2, 1, 1, 1


def default_weight(model: nn.Module, has_loss: bool) -> Weight:
    """What a micro-batch counts for: its targets that are not -100 (after the model's shift), or else its rows.

    Targets are ``batch["labels"]``, or the last element of a tuple when a `loss` function takes it.
    """
    shifts = _shifts_labels(model)

    def weight(micro_batch: Any) -> float:
        labels = micro_batch.get("labels") if isinstance(micro_batch, Mapping) else None
        if has_loss and not isinstance(micro_batch, Mapping) and len(micro_batch) > 1:
            labels = micro_batch[-1]
        if not isinstance(labels, torch.Tensor) or labels.dtype != torch.long:
            return float(rows_of(micro_batch))
        targets = labels[..., 1:] if shifts and labels.dim() > 1 else labels
        return float((targets != -100).sum())

    return weight


def _shifts_labels(model: nn.Module) -> bool:
    """Whether the model compares position i with label i + 1, as decoder-only models of transformers do."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    name = type(model).__name__
    return name.endswith(_SHIFTING) and not name.startswith(("XLNet", "XLM"))


def shares(micro_batches: Sequence[Any], weight: Weight) -> list[float]:
    """Divisor of each micro-batch's loss, ``n / n_k``; their reciprocals add up to one.

    Raises:
        ValueError: a micro-batch counts for nothing, so its mean loss does not exist.
    """
    counts = [float(weight(micro_batch)) for micro_batch in micro_batches]
    for k, count in enumerate(counts):
        if not count > 0:
            raise ValueError(
                f"micro-batch {k} counts for {count:g}: it has no target (all labels -100?), so its mean loss is not "
                "defined. Use fewer micro_batches, drop such rows, or pass weight="
            )
    if len(set(counts)) == 1:
        return [float(len(counts))] * len(counts)
    total = sum(counts)
    return [total / count for count in counts]


class ModelCall:
    """How a micro-batch becomes the arguments of the model and a scalar loss.

    A dict gives keyword arguments; with `loss`, keys that the model's ``forward`` does not take are left to the loss. A
    tuple gives positional arguments; with `loss`, its last element is the target and stays with the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        objective: Objective | None = None,
    ) -> None:
        if loss is not None and objective is not None:
            raise ValueError(
                "loss= and objective= are both given: use one, objective(model, micro_batch) includes the loss"
            )
        self._loss, self._objective = loss, objective
        parameters = inspect.signature(model.forward).parameters
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._names = frozenset(parameters)
        self._fixed = arguments_without(model)

    def objective(self, model: nn.Module, micro_batch: Any) -> torch.Tensor:
        """The scalar loss of one micro-batch."""
        if self._objective is not None:
            return _check_scalar(self._objective(model, micro_batch), "objective(model, micro_batch)")
        outputs = self.outputs(model, micro_batch)
        if self._loss is not None:
            return _check_scalar(self._loss(outputs, micro_batch), "loss(outputs, batch)")
        return _check_scalar(_loss_of(outputs), "outputs.loss")

    def outputs(self, model: nn.Module, micro_batch: Any) -> Any:
        """The model's own outputs for one micro-batch."""
        if isinstance(micro_batch, Mapping):
            taken = self._taken(micro_batch)
            return model(**{**self._fixed, **taken})
        has_target = self._loss is not None and len(micro_batch) > 1
        return model(*(micro_batch[:-1] if has_target else micro_batch), **self._fixed)

    def _taken(self, micro_batch: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._loss is None or self._takes_any:
            return micro_batch
        return {name: value for name, value in micro_batch.items() if name in self._names}


def _loss_of(outputs: Any) -> Any:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise ValueError(
            f"the model's output ({type(outputs).__name__}) has no .loss: put labels into the batch, or pass "
            "loss=lambda outputs, batch: ... or objective=lambda model, micro_batch: ..."
        )
    return loss


def _check_scalar(loss: Any, source: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(
            f"{source} gave {got}: the relay needs one scalar tensor per micro-batch, reduce it (mean) first"
        )
    return loss


def join(outputs: Sequence[Any], rows: Sequence[int], divisors: Sequence[float]) -> Any:
    """Concatenate the outputs of micro-batches along dim 0; scalars become their weighted mean.

    Tensors whose dim 0 is not the number of rows are returned as the first micro-batch gave them.
    """
    flat = [pytree.tree_flatten(output) for output in outputs]
    leaves = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_join_leaf(parts, rows, divisors) for parts in leaves], flat[0][1])


def _join_leaf(parts: Sequence[Any], rows: Sequence[int], divisors: Sequence[float]) -> Any:
    if not isinstance(parts[0], torch.Tensor):
        refuse_hidden(parts[0], "the model's output")
        return parts[0]
    if parts[0].dim() == 0:
        return torch.stack([part / divisor for part, divisor in zip(parts, divisors, strict=True)]).sum()
    if all(part.shape[0] == n for part, n in zip(parts, rows, strict=True)):
        return torch.cat(list(parts))
    return parts[0]
