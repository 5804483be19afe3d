"""Relay against in-core accumulation, from the same state: the proof, in one call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from l2l_core.reference import train_step
from l2l_core.store import LayerStore
from l2l_core.units import Unit


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One unit after a step: largest difference of weights, and parameters that several visits contribute to."""

    key: str
    name: str
    equal: bool
    max_abs_diff: float
    several_visits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Relay and in-core training of one step, compared.

    Attributes:
        equal: losses and all updated weights are bitwise equal.
        max_abs_diff: largest difference of any weight.
        loss, reference_loss: of the step.
        rows: one per unit.
    """

    equal: bool
    max_abs_diff: float
    loss: float
    reference_loss: float
    rows: tuple[VerifyRow, ...]

    def __str__(self) -> str:
        verdict = "bitwise equal" if self.equal else f"different by up to {self.max_abs_diff:.3g}"
        lines = [f"relay and in-core training are {verdict}; loss {self.loss:.8g} and {self.reference_loss:.8g}"]
        lines += [f"  {row.key} {row.name}: {row.max_abs_diff:.3g}" for row in self.rows if not row.equal]
        shared = sorted({name for row in self.rows for name in row.several_visits})
        return "\n".join(lines + ([f"  parameters of several visits: {', '.join(shared)}"] if shared else []))


def compare_step(
    *,
    model: nn.Module,
    store: LayerStore,
    units: Sequence[Unit],
    relay_step: Callable[[], Any],
    micro_batches: Sequence[Any],
    objective: Callable[[nn.Module, Any], torch.Tensor],
    divisors: Sequence[float],
    seeds: Sequence[int],
    max_grad_norm: float | None,
    torch_device: torch.device,
) -> VerifyReport:
    """Run the step on a copy in core, on `torch_device`, then by relay, and compare losses and weights."""
    twin = copy.deepcopy(model)
    optimizer = store.plain_optimizer(list(twin.parameters()), model)
    parts = micro_batches
    counterpart = dict(zip(model.parameters(), twin.parameters(), strict=True))
    if torch_device.type != "cpu":
        twin.to(torch_device)
        optimizer.load_state_dict(optimizer.state_dict())  # puts the state where the parameters are now
        parts = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(torch_device), list(micro_batches))
    losses = train_step(twin, optimizer, parts, objective, divisors, seeds, max_grad_norm)
    reference_loss = float(sum(losses))
    twin.cpu()  # before the relay needs the room
    del optimizer, losses, parts
    result = relay_step()
    rows = tuple(_row(unit, counterpart, _visits(result.trace)) for unit in units)
    return VerifyReport(
        equal=result.loss == reference_loss and all(row.equal for row in rows),
        max_abs_diff=max((row.max_abs_diff for row in rows), default=0.0),
        loss=result.loss,
        reference_loss=reference_loss,
        rows=rows,
    )


def _visits(trace: Any) -> dict[str, int]:
    visits: dict[str, set[int]] = {}
    for event in trace.events:
        if event.kind == "forward":
            visits.setdefault(event.layer, set()).add(event.visit)
    return {key: len(indices) for key, indices in visits.items()}


def _row(unit: Unit, counterpart: dict[nn.Parameter, nn.Parameter], visits: dict[str, int]) -> VerifyRow:
    worst = max(
        (float((p.detach() - counterpart[p].detach()).abs().max()) for p in unit.params if p.numel()), default=0.0
    )
    equal = all(torch.equal(p, counterpart[p]) for p in unit.params)
    several = tuple(n for b in unit.blocks if b.shared or visits.get(unit.key, 0) > 1 for n in b.names)
    return VerifyRow(unit.key, unit.name, equal, worst, several)
