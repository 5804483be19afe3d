"""Relay against in-core accumulation, from the same state: the proof, in one call.

The judge shares nothing with what it judges: the in-core side is a deep copy of the model with an optimizer of its own,
made of copies of state, groups, defaults and attributes. `Relay.verify` sees to it that the step leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.batches import map_tensors
from l2l_core.eps import LayerStore
from l2l_core.eps.blocks import Block, Unit
from l2l_core.eps.optimizers import clone_state, differing_settings, differing_state, is_same, settings_of
from l2l_core.model import deep_copy, is_sparse, train_step
from l2l_core.surgery import preserve_random_state
from l2l_core.trace import StepResult


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One unit after a step.

    Attributes:
        key, name: of the unit.
        equal: its weights and buffers have the same bits.
        max_abs_diff: largest difference of any weight or buffer.
        several_visits: parameters that several visits contribute to.
        different: parameters and buffers that differ.
    """

    key: str
    name: str
    equal: bool
    max_abs_diff: float
    several_visits: tuple[str, ...]
    different: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Relay and in-core training of one step, compared.

    Attributes:
        equal: losses, all updated weights, all buffers and what the optimizer keeps are bitwise equal.
        max_abs_diff: largest difference of any weight or buffer.
        loss, reference_loss: of the step.
        rows: one per unit.
        optimizer: what differs of the optimizer: names in its state, and its settings and counters.
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
            lines.append(f"  the optimizer keeps other values of {_listed(self.optimizer)}")
        shared = sorted({name for row in self.rows for name in row.several_visits})
        return "\n".join(lines + ([f"  parameters of several visits: {', '.join(shared)}"] if shared else []))


class InCoreStep:
    """A step in core, made on a copy of a model that is whole; keeps what came of it.

    Args:
        model, store: the relay's.
        micro_batches, objective, divisors, seeds, max_grad_norm: as of `train_step`.
        torch_device: where it runs.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        store: LayerStore,
        micro_batches: Sequence[Any],
        objective: Callable[[nn.Module, Any], torch.Tensor],
        divisors: Sequence[float],
        seeds: Sequence[int],
        max_grad_norm: float | None,
        torch_device: torch.device,
    ) -> None:
        self._store, self._copy = store, (twin := _copy_model(model))
        self._weights = dict(zip(model.parameters(), twin.parameters(), strict=True))
        self._buffers = _pair_buffers(model, twin)
        states: dict[nn.Parameter, dict[str, Any]] = {}
        for block in store.masters.blocks:  # weights and state may be in files
            with store.storage.lease(block):
                for param, master, view in zip(block.params, store.masters.params_of(block), block.views, strict=True):
                    # Masters may be of bfloat16; computed is in float32
                    self._weights[param].data = view.detach().to(torch.float32, copy=True)
                    if master in store.optimizer.state:
                        states[master] = clone_state(store.optimizer.state[master])
        optimizer = store.masters.copy_optimizer(twin, model, states)
        if torch_device.type != "cpu":
            twin.to(torch_device)
            optimizer.load_state_dict(optimizer.state_dict())  # puts the state where the parameters are now
        with preserve_random_state():  # NumPy's too: both sides begin with the same ones
            copied = partial(map_tensors, change=lambda tensor: tensor.detach().to(torch_device, copy=True))
            losses = train_step(twin, optimizer, micro_batches, objective, divisors, seeds, max_grad_norm, copied)
        self._loss = float(sum(losses))
        twin.cpu()  # before the relay needs the room
        self._expected = {
            param: pytree.tree_map_only(torch.Tensor, _on_host, dict(optimizer.state.get(own, {})))
            for param, own in self._weights.items()
        }
        self._settings = settings_of(optimizer)

    def compare(self, result: StepResult, units: Sequence[Unit], with_buffers: bool) -> VerifyReport:
        """Compare it with the relay, which is whole again and has made the same step.

        Args:
            result: of that step.
            units: the shell and the layers.
            with_buffers: whether buffers are of the whole batch, as they are in core.
        """
        buffers = self._buffers if with_buffers else {}
        visits = _visit_counts(result.trace)
        unlike, kept = self._compare_weights()
        rows = tuple(_row(unit, unlike, buffers, visits) for unit in units)
        found = settings_of(self._store.optimizer)
        if len(self._settings) == len(found):  # a layer that warms up has a group of its own in core
            kept += [f"setting {name!r}" for name in differing_settings(self._settings, found)]
        return VerifyReport(
            equal=result.loss == self._loss and all(row.equal for row in rows) and not kept,
            max_abs_diff=max((row.max_abs_diff for row in rows), default=0.0),
            loss=result.loss,
            reference_loss=self._loss,
            rows=rows,
            optimizer=tuple(kept),
        )

    def _compare_weights(self) -> tuple[dict[Block, dict[str, float]], list[str]]:
        """List by block the weights that differ, and by how much; and names in the optimizer's state that differ anywhere."""
        weights: dict[Block, dict[str, float]] = {}
        names: list[str] = []
        store = self._store
        for block in store.masters.blocks:
            with store.storage.lease(block):
                # What is rounded to bfloat16 by the optimizer is so whatever memory it lies in: the cast changes no value
                views = (view.detach().float() for view in block.views)
                theirs = (self._weights[param].detach() for param in block.params)
                weights[block] = _differing(zip(block.names, views, theirs, strict=True))
                for param, master in zip(block.params, store.masters.params_of(block), strict=True):
                    names += differing_state(self._expected[param], store.optimizer.state.get(master, {}))
        return weights, list(dict.fromkeys(f"state {name!r}" for name in names))


def _copy_model(model: nn.Module) -> nn.Module:
    """Copy the model deeply; a tensor with a graph, which a forward has left on a module, is copied without it."""
    # `deepcopy` refuses tensors with a graph.
    held = [value for module in model.modules() for value in vars(module).values()]
    graphs = {
        id(value): value.detach().clone() for value in held if isinstance(value, torch.Tensor) and not value.is_leaf
    }
    return deep_copy(model, graphs)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _visit_counts(trace: Any) -> dict[str, int]:
    visits: dict[str, set[int]] = {}
    for event in trace.events:
        if event.kind == "forward":
            visits.setdefault(event.layer, set()).add(event.visit)
    return {key: len(indices) for key, indices in visits.items()}


TensorPair = tuple[str, torch.Tensor | None, torch.Tensor | None]  # name, the relay's tensor, the one in core


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
    """Give by how much tensors differ, by name, if they do."""
    return {name: _difference(ours, theirs) for name, ours, theirs in pairs if not is_same(ours, theirs)}


def _pair_buffers(model: nn.Module, other: nn.Module) -> dict[int, TensorPair]:
    """List the model's buffers by identity, beside those of its copy at the same place."""
    modules = zip(model.named_modules(), other.modules(), strict=True)
    return {
        id(buffer): (f"{prefix}.{name}" if prefix else name, buffer, own._buffers.get(name))
        for (prefix, module), own in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def _difference(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Return the largest difference of two tensors that differ; infinite if they cannot be subtracted."""
    if one is None or other is None or one.shape != other.shape or one.layout is not other.layout:
        return math.inf
    if is_sparse(one):
        one, other = one.to_dense(), other.to_dense()
    differ = one != other
    off = (one[differ].double() - other[differ].double()).abs()
    return float(off.nan_to_num(math.inf).max()) if off.numel() else 0.0


def _listed(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
