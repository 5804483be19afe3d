"""What worker processes of `crew.py` ask of a relay: verify, fit, probe, look; beside one worker alone."""

from dataclasses import replace
from typing import Any

import torch
from crew_cases import Case, relay_of, together
from zoo import BY_NAME

from l2l_core import Drop, Duplicate, Insert, NothingFits, Relay, RelayConfig, WorkerError, Workers


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
