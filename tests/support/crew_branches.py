"""What worker processes of `crew.py` do with branches: the same as one worker alone, step by step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from crew_cases import Case, relay_of, together, unlike_state
from oracle import differences
from patience import HANG_S
from zoo import BY_NAME

from l2l_core import Drop, Duplicate, Freeze, Insert, Relay, WorkerError, Workers

Do = Callable[[Relay], Any]


def lower_rate(relay: Relay) -> None:
    """Change what a branch has of its own, and no other."""
    relay.config = replace(relay.config, max_grad_norm=0.5, update="deferred")
    for group in relay.optimizer.param_groups:
        group["lr"] *= 0.5


# What is done before each step. "a" drops a layer that "main" goes on training, "b" has one that the others have not
DEEDS: list[Do | None] = [
    None,
    lambda relay: relay.fork("a"),
    lambda relay: relay.apply(Drop(1)),
    lambda relay: relay.switch("main"),
    lambda relay: relay.fork("b"),
    lambda relay: relay.apply(Duplicate(0), Freeze(2)),
    lambda relay: relay.switch("a"),
    lower_rate,
    lambda relay: relay.undo(),
    lambda relay: relay.switch("b"),
    lambda relay: relay.apply(Insert(at=1, like=0)),
    lambda relay: relay.switch("main"),
    lambda relay: relay.switch("b"),
    lambda relay: relay.undo(),
    lambda relay: relay.switch("a"),
    lambda relay: relay.discard("main"),
    lambda relay: relay.redo() if relay.can_redo else None,
]


def branches_beside_alone(rank: int, count: int, case: Case, folder: str | None = None) -> dict[str, Any]:
    """Do all of it together, then on one worker; a step after each, and at last a look at every branch.

    Args:
        case: all workers have as many rows.
        folder: where to save and load on the way.
    """
    kind = BY_NAME[case.kind]
    whole = replace(case.settings, micro_batches=count * case.micro_batches)

    def make_alone() -> Relay:
        model = kind.make_model()
        return Relay(
            model, case.optimizer(model), loss=kind.loss, loss_over=kind.loss_over, layers=kind.layers, config=whole
        )

    def batch_of(step: int) -> Any:
        return together([case.rows_of(worker, step) for worker in range(count)])

    relay, alone = relay_of(case, rank), make_alone()
    losses, expected = [], []
    for step, deed in enumerate(DEEDS):
        for one in (relay, alone) if deed is not None else ():
            deed(one)
        losses.append(relay.step(case.rows_of(rank, step)).loss)
        expected.append(alone.step(batch_of(step)).loss)
        if folder is not None and step in (8, 13):
            relay = saved_and_loaded(relay, case, Path(folder) / str(step))
    seen: dict[str, Any] = {"unlike": [], "whole bytes": [], "losses": losses, "expected": expected}
    for name in [branch.name for branch in alone.branches]:
        relay.switch(name)
        alone.switch(name)
        seen["unlike"] += [a for a, b in zip(relay.stack, alone.stack, strict=True) if a.key != b.key]
        seen["whole bytes"].append(
            [unit.key for unit in relay.stack if any(b.local_layout is None for b in unit.blocks)]
        )
        with relay.gathered() as model:
            seen["unlike"] += [*differences(model, alone.model), *unlike_state(relay.optimizer, alone.optimizer)]
            seen["unlike"] += [unit.key for unit in relay.stack if unit.version != by_key(alone)[unit.key].version]
    seen["ledger"] = relay.host.by_category()
    seen["steps"] = [(each.name, each.steps, each.layers) for each in relay.branches]
    seen["expected steps"] = [(each.name, each.steps, each.layers) for each in alone.branches]
    relay.close()
    alone.close()
    return seen


def by_key(relay: Relay) -> dict[str, Any]:
    """Give the layers by their keys."""
    return {unit.key: unit for unit in relay.stack}


def saved_and_loaded(relay: Relay, case: Case, folder: Path) -> Relay:
    """Save a relay, close it, and give one that was loaded."""
    relay.save(folder)
    relay.close()
    model = BY_NAME[case.kind].make_model()
    options = {"loss": BY_NAME[case.kind].loss, "workers": Workers(reduce="ordered")}
    return Relay.load(folder, model, case.optimizer(model), **options)


def switch_apart(rank: int, count: int) -> dict[str, Any]:
    """Workers go to different branches: what they raise, and that all go on where they were."""
    case = Case("chain", rows=(4, 4))
    with relay_of(case, rank) as relay:
        relay.step(case.rows_of(rank, 0))
        relay.fork("a")
        relay.step(case.rows_of(rank, 1))
        relay.fork("b")
        told = []
        for wanted in ("main", "a")[rank], ("nowhere", "a")[rank]:
            try:
                relay.switch(wanted)
            except (WorkerError, ValueError) as error:
                told.append(f"{type(error).__name__}: {error}")
        return {"told": told, "branch": relay.branch, "loss": relay.step(case.rows_of(rank, 2)).loss}


def raced_beside_alone(rank: int, count: int) -> dict[str, Any]:
    """Let branches of a session race, on workers and on one alone: losses of each, and what they end with."""
    from workbench.session import Session  # noqa: PLC0415 - the other cases need no workbench

    case = Case("chain", rows=(4, 4))
    mine = [case.rows_of(rank, step) for step in range(12)]
    whole = [together([case.rows_of(worker, step) for worker in range(count)]) for step in range(12)]
    seen: dict[str, Any] = {"losses": [], "ends": []}
    kind, model = BY_NAME[case.kind], BY_NAME[case.kind].make_model()
    config = replace(case.settings, micro_batches=count * case.micro_batches)
    alone = Relay(
        model, case.optimizer(model), loss=kind.loss, loss_over=kind.loss_over, layers=kind.layers, config=config
    )
    for relay, batches in ((relay_of(case, rank), mine), (alone, whole)):
        with relay, Session(relay, batches, probe=False) as session:
            session.run(2)
            session.wait(HANG_S)
            session.fork("slim").result(HANG_S)
            session.edit(Drop(1)).result(HANG_S)
            race = session.race("main", "slim", steps=5).result(HANG_S)
            seen["losses"].append([[row.loss for row in race[name].steps] for name in ("main", "slim")])
            for name in ("main", "slim"):
                session.switch(name).result(HANG_S)
                with relay.gathered() as whole_model:
                    seen["ends"].append([param.detach().clone() for param in whole_model.parameters()])
    return seen
