"""Comparison of one relay step with the same step in core, from the same state.

The step in core shares no code with the relay. `Relay.verify`, which undoes the relay's step, trains a deep copy of the model
with an optimizer made from copies of state, groups, defaults and attributes. The comparison of a first step trains the model
and the optimizer themselves, and puts them back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.batches import map_tensors
from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Block, Unit, put_back_params, quantised_parts
from l2l_core.eps.optimizers import clone_state, differing_settings, differing_state, is_same, settings_of
from l2l_core.model import accumulate, accumulate_together, deep_copy, is_sparse, preserve_random_state, update_after
from l2l_core.step.batch_loss import BatchLoss
from l2l_core.step.outside_gradients import OutsideGradients
from l2l_core.trace import StepResult, Trace


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """Comparison of one unit after a step."""

    key: str
    name: str
    equal: bool  # weights and buffers, to the bit
    max_abs_diff: float  # of any weight or buffer
    several_visits: tuple[str, ...]  # parameters to which several visits contribute
    different: tuple[str, ...] = ()  # parameters and buffers


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Comparison of one step in the relay and in core.

    Attributes:
        equal: losses, updated weights, buffers and the optimizer's state and settings are bitwise equal.
        max_abs_diff: largest difference of any weight or buffer.
        loss, reference_loss: loss of the relay, loss in core.
        rows: one per unit.
        optimizer: names of the optimizer's states, settings and counters that differ.
    """

    equal: bool
    max_abs_diff: float
    loss: float
    reference_loss: float
    rows: tuple[VerifyRow, ...]
    optimizer: tuple[str, ...] = ()

    def __str__(self) -> str:
        verdict = "bitwise equal" if self.equal else f"different by up to {self.max_abs_diff:.3g}"
        lines = [f"relay and in-core training are {verdict}; loss {self.loss:.8g} and {self.reference_loss:.8g}"]
        lines += [
            f"  {row.key} {row.name}: {row.max_abs_diff:.3g} ({_listed(row.different)})"
            for row in self.rows
            if not row.equal
        ]
        if self.optimizer:
            lines.append(f"  the optimizer has different values of {_listed(self.optimizer)}")
        shared = sorted({name for row in self.rows for name in row.several_visits})
        return "\n".join(lines + ([f"  parameters of several visits: {', '.join(shared)}"] if shared else []))


class InCoreStep:
    """A step in core on a copy of the relay's model, and its result; see `update_after`.

    With `in_place`, the model and the optimizer themselves are trained, so that what depends on the identity of parameters or
    modules is as in a plain loop. They must be in host memory, and the caller undoes the step.

    Attributes:
        outside: gradients of leaves outside of the model, as before this step.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        store: LayerStore,
        micro_batches: Sequence[Any],
        objective: Callable[[nn.Module, Any], torch.Tensor],
        batch_loss: BatchLoss | None,
        divisors: Sequence[float],
        seeds: Sequence[int],
        max_grad_norm: float | None,
        torch_device: torch.device,
        in_place: bool = False,
    ) -> None:
        self._store = store
        twin, optimizer = (model, store.optimizer) if in_place else self._make_copies(model, torch_device)
        self._weights = _pair_weights(model, twin)
        buffers = _named_buffers(model, twin)
        self.outside = OutsideGradients((*model.parameters(), *twin.parameters()))
        objective = self.outside.keeping(objective)
        with preserve_random_state():  # of NumPy too: both steps begin with the same state
            copied = partial(map_tensors, change=lambda tensor: tensor.detach().to(torch_device, copy=True))
            if batch_loss is None:
                add_gradients = partial(accumulate, twin, micro_batches, objective, divisors, seeds, copied)
            else:
                together = self.outside.keeping(partial(batch_loss.compute, batch=copied(batch_loss.batch)))
                outputs, after = self.outside.keeping(batch_loss.outputs), self._move_gradients
                add_gradients = partial(
                    accumulate_together, twin, micro_batches, outputs, together, seeds, copied, after
                )
            with self._sharing_values(), _restored_params(twin):
                try:
                    losses = update_after(add_gradients, twin, optimizer, max_grad_norm)
                finally:
                    self.outside.restore()
        self._loss = float(sum(losses))
        twin.cpu()  # frees device memory for the relay
        self._buffers = {id(own): (name, own, module._buffers.get(key)) for name, own, module, key in buffers}
        self._expected: dict[torch.Tensor, Any] = {
            param: pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), dict(optimizer.state.get(own, {})))
            for param, own in self._weights.items()
        }
        self._settings = settings_of(optimizer)
        if in_place:
            self._keep_results()

    def _make_copies(self, model: nn.Module, torch_device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Copy the model and its optimizer to a device, with weights and state of the relay's."""
        twin, store = _copy_model(model), self._store
        weights = _pair_weights(model, twin)
        states: dict[nn.Parameter, dict[str, Any]] = {}
        for block in store.masters.blocks:  # weights and state may be in files
            with store.storage.lease(store.storage.views([block]), "read"):
                for param, master, view in zip(block.params, store.masters.params_of(block), block.views, strict=True):
                    # Masters may be bfloat16; the step computes in float32. Bytes keep their dtypes.
                    dtype = view.dtype if block.in_bytes else torch.float32
                    weights[param].data = view.detach().to(dtype, copy=True)
                    if master in store.optimizer.state:
                        states[master] = clone_state(store.optimizer.state[master])
        optimizer = store.masters.copy_optimizer(twin, model, states)
        if torch_device.type != "cpu":
            twin.to(torch_device)
            optimizer.load_state_dict(optimizer.state_dict())  # moves the state to the parameters' device
        return twin, optimizer

    def _keep_results(self) -> None:
        """Copy what the step has changed in the model and its optimizer, before it is undone."""
        self._weights = {param: param.detach().clone() for param in self._weights}
        self._expected = {param: clone_state(state) for param, state in self._expected.items()}
        self._buffers = {
            key: (name, own, None if trained is None else trained.clone())
            for key, (name, own, trained) in self._buffers.items()
        }
        for block in self._store.masters.blocks:  # an optimizer may have made new tensors
            for param, view in zip(block.params, block.views, strict=True):
                param.data = view

    @contextmanager
    def _sharing_values(self) -> Iterator[None]:
        """Give the relay's parameters the copy's values in the block, for a loss that reads `model.scale`."""
        values = [param.data for param in self._weights]
        try:
            for param, own in self._weights.items():
                if own is not param:
                    param.data = own.data
            yield
        finally:
            for (param, own), data in zip(self._weights.items(), values, strict=True):
                if own is not param:
                    param.data = data

    def _move_gradients(self) -> None:
        """Move the gradients that such a loss has given to the relay's parameters to those of the copy."""
        for param, own in self._weights.items():
            if own is not param and param.grad is not None:
                own.grad, param.grad = param.grad.to(own.device), None

    def compare(self, result: StepResult, units: Sequence[Unit], with_buffers: bool) -> VerifyReport:
        """Compare this step with the relay's; buffers only if the relay's see the whole batch, as in core."""
        buffers = self._buffers if with_buffers else {}
        visits = _visit_counts(result.trace)
        differences, optimizer = self._compare_weights()
        rows = tuple(_row(unit, differences, buffers, visits) for unit in units)
        found = settings_of(self._store.optimizer)
        if len(self._settings) == len(found):  # during warm-up a layer has its own group, in core only
            optimizer += [f"setting {name!r}" for name in differing_settings(self._settings, found)]
        return VerifyReport(
            equal=result.loss == self._loss and all(row.equal for row in rows) and not optimizer,
            max_abs_diff=max((row.max_abs_diff for row in rows), default=0.0),
            loss=result.loss,
            reference_loss=self._loss,
            rows=rows,
            optimizer=tuple(optimizer),
        )

    def _compare_weights(self) -> tuple[dict[Block, dict[str, float]], list[str]]:
        """Return differences of weights by block and name, and names of optimizer state that differs."""
        weights: dict[Block, dict[str, float]] = {}
        names: list[str] = []
        store = self._store
        for block in store.masters.blocks:
            with store.storage.lease(store.storage.views([block]), "read"):
                expected = [self._weights[param].detach() for param in block.params]
                if block.in_bytes:
                    pairs = zip(block.names, block.views, expected, strict=True)
                    weights[block] = {name: math.inf for name, ours, theirs in pairs if not _same_bytes(ours, theirs)}
                else:
                    # An optimizer that rounds to bfloat16 does so in float32 memory too: the cast is exact.
                    views = (view.detach().float() for view in block.views)
                    weights[block] = _differing(zip(block.names, views, expected, strict=True))
                for param, master in zip(block.params, store.masters.params_of(block), strict=True):
                    names += differing_state(self._expected[param], store.optimizer.state.get(master, {}))
        return weights, list(dict.fromkeys(f"state {name!r}" for name in names))


def _copy_model(model: nn.Module) -> nn.Module:
    """Copy the model deeply, with hooks of parameters; tensors with a graph, left on modules by a forward, without it."""
    # `deepcopy` refuses tensors with a graph.
    values = [value for module in model.modules() for value in vars(module).values()]
    copies = {id(v): v.detach().clone() for v in values if isinstance(v, torch.Tensor) and not v.is_leaf}
    twin = deep_copy(model, copies)
    for param, own in zip(model.parameters(), twin.parameters(), strict=True):
        for hook in (param._backward_hooks or {}).values() if own.requires_grad else ():
            own.register_hook(hook)  # `deepcopy` drops them
    return twin


def _pair_weights(model: nn.Module, twin: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """Pair the parameters of a model, and the scales and tables of quantised ones, with those of its copy."""
    pairs: dict[torch.Tensor, torch.Tensor] = dict(zip(model.parameters(), twin.parameters(), strict=True))
    ours, theirs = quantised_parts(model.modules()), quantised_parts(twin.modules())
    for param, parts in ours.items():
        copies = theirs[pairs[param]]
        pairs |= {tensor: copies[name] for name, tensor in parts.items()}
    return pairs


def _visit_counts(trace: Trace) -> dict[str, int]:
    visits: dict[str, set[int]] = {}
    for event in trace.events:
        if event.kind == "forward":
            visits.setdefault(event.layer, set()).add(event.visit)
    return {key: len(indices) for key, indices in visits.items()}


TensorPair = tuple[str, torch.Tensor | None, torch.Tensor | None]  # name, tensor of the relay, tensor in core


def _row(
    unit: Unit,
    weights: Mapping[Block, Mapping[str, float]],
    buffers: Mapping[int, TensorPair],
    visits: Mapping[str, int],
) -> VerifyRow:
    unlike = {name: by for block in unit.blocks for name, by in weights[block].items()}
    unlike |= _differing(buffers[id(buffer)] for buffer in unit.buffers.tensors() if id(buffer) in buffers)
    several = tuple(n for b in unit.blocks if b.shared or visits.get(unit.key, 0) > 1 for n in b.names)
    return VerifyRow(unit.key, unit.name, not unlike, max(unlike.values(), default=0.0), several, tuple(unlike))


def _differing(pairs: Iterable[TensorPair]) -> dict[str, float]:
    """Return the largest difference of each pair that differs, by name."""
    alike = ((name, *_of_one_class(ours, theirs)) for name, ours, theirs in pairs)
    return {name: _difference(ours, theirs) for name, ours, theirs in alike if not is_same(ours, theirs)}


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of any dtype have the same dtype, shape and bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    ours, theirs = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(ours, theirs)


def _of_one_class(
    one: torch.Tensor | None, other: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return two tensors as ordinary ones if they differ in class, which a copy may have lost."""
    if one is None or other is None or type(one) is type(other):
        return one, other
    return one.detach().as_subclass(torch.Tensor), other.detach().as_subclass(torch.Tensor)


@contextmanager
def _restored_params(model: nn.Module) -> Iterator[None]:
    """Restore a model's parameters and autograd's marks on them after a block, and remove gradients."""
    flags = [(param, param.requires_grad) for param in model.parameters()]
    owners = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    try:
        yield
    finally:
        torch.clear_autocast_cache()  # of casts with a graph
        put_back_params(owners)
        for param, flag in flags:
            param.grad = None
            if not param.is_leaf:  # the model has changed it in place from another one
                param.detach_()
            param.requires_grad_(flag)


def _named_buffers(model: nn.Module, other: nn.Module) -> list[tuple[str, torch.Tensor, nn.Module, str]]:
    """Return name and tensor of each buffer, with the module of the copy that has it, and its name there.

    Training may replace a buffer, and so does moving a module to a GPU and back.
    """
    return [
        (f"{prefix}.{name}" if prefix else name, buffer, own, name)
        for (prefix, module), own in zip(model.named_modules(), other.modules(), strict=True)
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _difference(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Return the largest difference of two tensors that differ; infinite if they cannot be subtracted."""
    if one is None or other is None or one.shape != other.shape or one.layout is not other.layout:
        return math.inf
    if is_sparse(one):
        one, other = one.to_dense(), other.to_dense()
    differ = one != other
    off = (one[differ].double() - other[differ].double()).abs()
    return float(off.nan_to_num(math.inf).max()) if off.numel() else 0.0


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
