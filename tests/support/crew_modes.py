"""Workers of `crew.py` with buffers of their own, or gradients in bfloat16 on the way."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from crew_cases import Case, plain, relay_of
from oracle import InCore, differences, micro_batches_of
from torch import nn
from zoo import BY_NAME

from l2l_core import Relay, Workers
from l2l_core.plan import serial


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def put(buffers: dict[str, torch.Tensor], model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def train_with_own_buffers(rank: int, count: int, case: Case, folder: str) -> dict[str, Any]:
    """Train together, each with buffers of its own; then in core, where they are exchanged between micro-batches."""
    kind = BY_NAME[case.kind]
    workers = Workers(reduce=case.reduce, buffers="own")
    with relay_of(case, rank, workers=workers) as relay:
        losses = [relay.step(case.rows_of(rank, step)).loss for step in range(case.steps)]
        relay.save(folder)
        mine = buffers_of(relay.model)
    model = kind.make_model()
    optimizer, of_each, turn = case.optimizer(model), [buffers_of(model) for _ in range(count)], [0]

    def objective(model: nn.Module, micro_batch: Any) -> torch.Tensor:
        worker = turn[0] // case.micro_batches % count
        turn[0] += 1
        put(of_each[worker], model)
        loss = in_core._loss(model, micro_batch)
        of_each[worker] = buffers_of(model)
        return loss

    in_core = InCore(kind, model, optimizer, case.settings)
    in_core.objective = objective
    expected = []
    for step in range(case.steps):
        every = [micro_batches_of(case.rows_of(other, step), case.micro_batches) for other in range(count)]
        expected.append(in_core.step_on([part for parts in every for part in parts]))
    put(of_each[rank], model)
    seen = {"losses": losses, "expected": expected, "differences": differences(relay.model, model)}
    seen["buffers differ in"] = [name for name, value in mine.items() if not torch.equal(value, of_each[rank][name])]
    seen["others"] = [name for name, value in mine.items() if not torch.equal(value, of_each[1 - rank][name])]
    again = kind.make_model()
    with Relay.load(
        folder,
        again,
        case.optimizer(again),
        loss=kind.loss,
        loss_over=kind.loss_over,
        layers=kind.layers,
        workers=workers,
    ):
        loaded = buffers_of(again)
    return seen | {"saved": all(torch.equal(value, of_each[0][name]) for name, value in loaded.items())}


def train_in_bfloat16(rank: int, count: int, case: Case) -> dict[str, Any]:
    """Train with gradients in bfloat16 on the way, beside plain; count what is sent with and without."""
    seen: dict[str, Any] = {}
    for wire in ("fp32", "bf16"):
        workers = Workers(reduce=case.reduce, wire=wire)
        with relay_of(case, rank, workers=workers) as relay:
            channel, sent = relay._backend._group.reduces, []
            exchange = channel.all_to_all

            def counted(come: Any, comes: Any, go: torch.Tensor, *rest: Any, **_: Any) -> None:
                if go.is_floating_point():  # and not what workers tell one another before
                    sent.append(go.nbytes)  # noqa: B023 - called before the next turn
                exchange(come, comes, go, *rest)  # noqa: B023

            channel.all_to_all = counted
            losses = [relay.step(case.rows_of(rank, step)).loss for step in range(case.steps)]
            del channel.all_to_all
        model, _, expected = plain(case, count)
        largest = max(differences(relay.model, model).values(), default=0.0)
        seen[wire] = {"losses": losses, "sent": sum(sent), "largest difference": largest}
    moved = max(differences(model, BY_NAME[case.kind].make_model()).values())
    return seen | {"expected": expected, "moved": moved}


def refuse_schedules(rank: int, count: int, case: Case) -> dict[str, Any]:
    """Try user-defined schedules in every way; return the messages, and the loss of a step by the relay's own."""
    messages: list[str] = []
    with relay_of(case, rank) as relay:
        batch = case.rows_of(rank, 0)
        plan = relay.plan(batch)

        def refused(act: Callable[[], object]) -> None:
            try:
                act()
            except ValueError as error:
                messages.append(str(error))

        refused(lambda: setattr(relay, "config", replace(relay.config, schedule=serial)))
        refused(lambda: relay.step(batch, plan=plan))
        return {"messages": messages, "loss": relay.step(batch).loss}
