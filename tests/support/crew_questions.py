"""What worker processes of `crew.py` ask of a relay: verify, fit, probe, look; beside one worker alone."""

from dataclasses import replace
from typing import Any

import torch
from crew_cases import Case, relay_of, together
from oracle import InCore, micro_batches_of
from torch import nn
from zoo import BY_NAME, loss_of

from l2l_core import (
    Depth,
    Drop,
    Duplicate,
    Insert,
    LayerDrop,
    NothingFits,
    Relay,
    RelayConfig,
    WorkerError,
    Workers,
)


def alone_of(case: Case, count: int) -> Relay:
    """Make a relay that trains alone on the batches of all."""
    kind, model = BY_NAME[case.kind], BY_NAME[case.kind].make_model()
    config = replace(case.settings, micro_batches=count * case.micro_batches)
    return Relay(
        model, case.optimizer(model), loss=kind.loss, loss_over=kind.loss_over, layers=kind.layers, config=config
    )


def state_here(relay: Relay) -> list[torch.Tensor]:
    """Copy what this worker has of weights and of the optimizer's state."""
    blocks = [block.values for unit in (relay.shell, *relay.stack) for block in unit.blocks]
    state = relay.optimizer.state  # whose own order is no matter
    of_each = [state[param] for group in relay.optimizer.param_groups for param in group["params"] if param in state]
    known = [value for each in of_each for value in each.values() if isinstance(value, torch.Tensor)]
    return [tensor.clone() for tensor in (*blocks, *known)]


def is_as_before(relay: Relay, before: list[torch.Tensor]) -> bool:
    """Whether all of it is the same."""
    after = state_here(relay)
    return len(after) == len(before) and all(map(torch.equal, after, before))


def verified(rank: int, count: int, case: Case, **options: Any) -> dict[str, Any]:
    """Verify before any step and after one; nothing of it stays."""
    with relay_of(case, rank, **options) as relay:
        first = relay.verify(case.rows_of(rank, 0))
        loss = relay.step(case.rows_of(rank, 0)).loss
        before, steps = state_here(relay), relay.steps
        second = relay.verify(case.rows_of(rank, 1))
        unchanged = is_as_before(relay, before) and relay.steps == steps
        return {
            "reports": [first, second],
            "loss": loss,
            "unchanged": unchanged,
            "next": relay.step(case.rows_of(rank, 1)).loss,
        }


def asked_beside_alone(rank: int, count: int) -> dict[str, Any]:
    """Probe with edits and without, and look inside, together and alone."""
    case = Case("gpt2", rows=(4, 4))
    batches = [[case.rows_of(worker, step) for worker in range(count)] for step in (1, 2)]
    edits = Duplicate(0), Drop(2), Insert(at=1, like=0, init="identity")
    with relay_of(case, rank) as relay, alone_of(case, count) as alone:
        relay.step(case.rows_of(rank, 0))
        alone.step(together([case.rows_of(worker, 0) for worker in range(count)]))
        before = state_here(relay)
        mine, whole = [each[rank] for each in batches], [together(each) for each in batches]
        seen: dict[str, Any] = {
            "probes": relay.probe(mine) + relay.probe(mine, *edits),
            "expected": alone.probe(whole) + alone.probe(whole, *edits),
        }
        told = {"micro_batches": [0], "attention": True, "lens": True, "generate": 2, "positions": 4}
        inside = relay.look(mine[0], **told)
        alone.config = case.settings
        seen |= {"inside": inside, "inside alone": alone.look(batches[0][0], **told)}
        seen["unchanged"] = is_as_before(relay, before) and [unit.key for unit in relay.stack] == [
            unit.key for unit in alone.stack
        ]
        try:
            relay.probe(mine[: 1 + rank], Drop(1))
        except WorkerError as error:
            seen["told"] = str(error)
        seen["keys"] = [unit.key for unit in relay.stack]
        alone.config = replace(case.settings, micro_batches=count * case.micro_batches)
        seen["next"] = relay.step(mine[0]).loss, alone.step(whole[0]).loss
        return seen


def influence_beside_alone(rank: int, count: int) -> dict[str, Any]:
    """Measure the influence of layers together and alone, before updates; ask which layer is to be dropped."""
    case = Case("gpt2", rows=(4, 4))
    with relay_of(case, rank) as relay, alone_of(case, count) as alone:
        relay.step(case.rows_of(rank, 0))
        alone.step(together([case.rows_of(worker, 0) for worker in range(count)]))
        dropped = Depth({1: len(relay.stack) - 1}, shrink="influence").edits(relay)
        together_, alone_ = [[unit.stats["influence"] for unit in each.stack] for each in (relay, alone)]
    return {"together": together_, "alone": alone_, "dropped": dropped}


def skipped_beside_plain(rank: int, count: int, case: Case) -> dict[str, Any]:
    """Train by LayerDrop and evaluate without layers, together and in core without these layers in the list."""
    kind = BY_NAME[case.kind]
    model = kind.make_model()
    in_core = InCore(kind, model, case.optimizer(model), case.settings)
    holder, at = (model.transformer, "h") if case.kind == "gpt2" else (model, "layers")
    whole = getattr(holder, at)

    def parts_of(step: int) -> list[Any]:
        return [p for r in range(count) for p in micro_batches_of(case.rows_of(r, step), case.micro_batches)]

    def evaluate(step: int) -> float:
        extra = {"use_cache": False} if case.kind == "gpt2" else {}
        with torch.no_grad():
            parts = [part | extra if extra else part for part in parts_of(step)]
            losses = [loss_of(kind, model.eval(), part) for part in parts]
        model.train()
        return float(sum(loss / len(parts) for loss in losses))

    seen: dict[str, Any] = {name: [] for name in ("losses", "expected", "evaluated", "expected of them", "skipped")}
    with relay_of(case, rank) as relay:
        schedule = LayerDrop(0.5)
        for step in range(case.steps):
            skip = [int(key[1:]) for key in schedule.skip(relay)]
            seen["skipped"].append(skip)
            seen["losses"].append(schedule.step(relay, case.rows_of(rank, step)).loss)
            setattr(holder, at, nn.ModuleList(layer for i, layer in enumerate(whole) if i not in skip))
            seen["expected"].append(in_core.step_on(parts_of(step)))
            before = state_here(relay)
            for without in ([], [1], [0, 2]):
                rows = case.rows_of(rank, 20 + step)
                setattr(holder, at, nn.ModuleList(layer for i, layer in enumerate(whole) if i not in without))
                seen["expected of them"] += 2 * [evaluate(20 + step)]
                seen["evaluated"] += [relay.evaluate(rows, skip=without), *relay.probe([rows], skip=without)]
            assert is_as_before(relay, before)
        try:
            relay.evaluate(case.rows_of(rank, 0), skip=[rank])
        except WorkerError as error:
            seen["told"] = str(error)
        seen["verified"] = relay.verify(case.rows_of(rank, 0)).equal
    return seen


def fitted(rank: int, count: int) -> dict[str, Any]:
    """Look for settings; then workers that ask for other things, and in a room in which nothing fits."""
    case = Case("chain", rows=(6, 4))
    with relay_of(case, rank) as relay:
        found = relay.fit(case.rows_of(rank, 0), fixed={"update", "ahead"})
        seen: dict[str, Any] = {"config": relay.config, "found": found.config, "words": str(found)}
        seen["planned"] = found.forecast.worker is not None and found.forecast.worker.cluster.count
        relay.step(case.rows_of(rank, 0))
        told = []
        for device_bytes in (10**9 + rank, 10):
            try:
                relay.fit(case.rows_of(rank, 0), device_bytes=device_bytes)
            except (WorkerError, NothingFits) as error:
                told.append(f"{type(error).__name__}: {error}")
        return seen | {"told": told}


def settled(rank: int, count: int) -> dict[str, Any]:
    """Keep graphs by bytes, and look for settings at the first step; the second worker's batches are smaller."""
    case = Case("chain", rows=(6, 4))
    kind = BY_NAME[case.kind]
    with relay_of(case, rank) as relay:
        relay.config = replace(case.settings, resident=3, keep="60 kB")
        losses = [relay.step(case.rows_of(rank, step)).loss for step in (0, 1)]
        seen: dict[str, Any] = {"kept": relay.trace.settings["keep"] if relay.trace is not None else None}
    model = kind.make_model()
    auto = {"config": "auto", "workers": Workers(reduce="ordered")}
    with Relay(
        model, case.optimizer(model), loss=kind.loss, loss_over=kind.loss_over, layers=kind.layers, **auto
    ) as relay:
        relay.step(case.rows_of(rank, 0))
        seen |= {"auto": relay.config, "fits itself": relay.fits_itself, "default": RelayConfig(seed=0)}
    return seen | {"losses": losses}
