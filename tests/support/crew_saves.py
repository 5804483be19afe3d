"""Workers of `crew.py` that save and load."""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from crew_cases import Case, relay_of, together
from crew_failures import told
from oracle import micro_batches_of
from zoo import BY_NAME

from l2l_core import Duplicate, Relay, WorkerError, WorkerLostError, Workers
from l2l_core.saves import generation_writer

SAVED = Case("gpt2", rows=(4, 4, 4, 4))


def state_of(relay: Relay) -> dict[str, torch.Tensor]:
    """All weights, and what the optimizer keeps of each, by name; the relay's own, whole."""
    found = {name: param.detach().clone() for name, param in relay.model.named_parameters()}
    names = {id(param): name for name, param in relay.model.named_parameters()}
    masters = relay.store.masters
    for param, known in ((masters.model_params[master], known) for master, known in relay.optimizer.state.items()):
        found |= {f"{names[id(param)]}/{key}": value.clone() for key, value in known.items()}
    return found


def save_and_go_on(rank: int, count: int, folder: str, case: Case, edited: bool = True) -> dict[str, Any]:
    """Train a step, edit, save, and train two more."""
    with relay_of(case, rank) as relay:
        relay.step(case.rows_of(rank, 0))
        if edited:
            relay.apply(Duplicate(0))
        host = relay.host
        host.reset_peak()
        before = host.total
        relay.save(folder)
        seen: dict[str, Any] = {"more bytes": host.peak - before}
        with relay.gathered():
            seen["state"] = state_of(relay)
        return seen | {"losses": [relay.step(case.rows_of(rank, step)).loss for step in (1, 2)]}


def load_and_go_on(rank: int, count: int, folder: str, case: Case, workers: int) -> dict[str, Any] | None:
    """Load what `workers` had saved, with as many as there are here, and train the same two steps on the same rows."""
    model = BY_NAME[case.kind].make_model()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    own = workers * case.micro_batches // count
    options = {"loss": BY_NAME[case.kind].loss, "config": replace(case.settings, micro_batches=own)}
    with Relay.load(folder, model, case.optimizer(model), workers=Workers(reduce="ordered"), **options) as relay:
        held = sum(size for owner, size in relay.host.by_owner("weights").items() if owner != "gathered")
        with relay.gathered():
            seen: dict[str, Any] = {"state": state_of(relay), "held": held, "steps": relay.steps}
        losses = []
        for step in (1, 2):
            batches = [micro_batches_of(case.rows_of(worker, step), case.micro_batches) for worker in range(workers)]
            every = [part for parts in batches for part in parts]
            losses.append(relay.step(together(every[own * rank : own * (rank + 1)])).loss)
        return seen | {"losses": losses}


def load_alone(rank: int, count: int, folder: str, case: Case, workers: int) -> dict[str, Any] | None:
    """The same in one process, without the others: worker 0's."""
    if rank:
        return None
    kind, model = BY_NAME[case.kind], BY_NAME[case.kind].make_model()
    config = replace(case.settings, micro_batches=workers * case.micro_batches)
    with Relay.load(
        folder, model, case.optimizer(model), loss=kind.loss, loss_over=kind.loss_over, config=config
    ) as relay:
        seen: dict[str, Any] = {"state": state_of(relay), "steps": relay.steps}
        batches = [together([case.rows_of(worker, step) for worker in range(workers)]) for step in (1, 2)]
        return seen | {"losses": [relay.step(batch).loss for batch in batches]}


def save_alone(rank: int, count: int, folder: str, case: Case, workers: int) -> dict[str, Any] | None:
    """Train a step in one process on the rows of all, save, and train two more."""
    if rank:
        return None
    alone = replace(case, micro_batches=workers * case.micro_batches)
    with relay_of(alone, 0, workers=None) as relay:
        batches = [together([case.rows_of(worker, step) for worker in range(workers)]) for step in range(3)]
        relay.step(batches[0])
        relay.apply(Duplicate(0))
        relay.save(folder)
        return {"state": state_of(relay), "losses": [relay.step(batch).loss for batch in batches[1:]]}


@contextmanager
def failing(where: str, then: Callable[[], None]) -> Iterator[None]:
    """Call `then` in this worker ahead of one step of its next save."""
    name = {"files": "write_files", "part": "write_json", "switch": "set_current", "end": "delete_generations"}[where]
    real, calls = getattr(generation_writer, name), []

    def replaced(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if where != "end" or len(calls) == 2:  # leftovers are deleted before and after
            then()
        return real(*args, **kwargs)

    setattr(generation_writer, name, replaced)
    try:
        yield
    finally:
        setattr(generation_writer, name, real)


def save_that_fails(rank: int, count: int, folder: str, where: str, who: int) -> dict[str, Any]:
    """One worker's disk is full in the second save. What all raise, what is left in the folder, and how they go on."""

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    case = Case("chain")
    with relay_of(case, rank) as relay:
        losses = [relay.step(case.rows_of(rank, 0)).loss]
        relay.save(folder)
        losses.append(relay.step(case.rows_of(rank, 1)).loss)
        try:
            if rank == who:
                with failing(where, full):
                    relay.save(folder)
            else:
                relay.save(folder)
            seen: dict[str, Any] = {"type": None}
        except (OSError, WorkerError) as error:
            seen = told(error)
        relay.evaluate(case.rows_of(rank, 0))  # together: afterwards nobody deletes any more
        seen["left"] = sorted(path.name for path in Path(folder).glob("step-*"))
        relay.evaluate(case.rows_of(rank, 0))
        relay.save(folder)
        return seen | {"saved": sorted(path.name for path in Path(folder).glob("step-*"))}


def save_to_other_folders(rank: int, count: int, folder: str) -> dict[str, Any]:
    """Workers that do not see one file system: each has a folder of its own under the same path, as it were."""
    case = Case("chain", rows=(4, 4))
    with relay_of(case, rank) as relay:
        relay.step(case.rows_of(rank, 0))
        relay.save(f"{folder}/common")
        try:
            relay.save(f"{folder}/{rank}")
            seen: dict[str, Any] = {"type": None}
        except (OSError, WorkerError) as error:
            seen = told(error)
    for name, where in {"none": f"{folder}/common{rank or ''}", "other": f"{folder}/copy-{rank}"}.items():
        if name == "other":
            with relay_of(case, 0, workers=None) as alone:
                alone.save(where)
        model = BY_NAME[case.kind].make_model()
        try:
            Relay.load(where, model, case.optimizer(model), workers=Workers(timeout_s=20.0)).close()
            seen[name] = {"type": None}
        except (ValueError, WorkerError) as error:
            seen[name] = told(error)
    return seen


def one_dies_in_a_save(rank: int, count: int, folder: str, where: str, who: int) -> dict[str, Any]:
    """A worker kills itself in its second save: what the others raise, and after how long."""
    case = Case("chain")
    relay = relay_of(case, rank, workers=Workers(reduce="ordered", timeout_s=20.0))
    relay.step(case.rows_of(rank, 0))
    relay.save(folder)
    relay.step(case.rows_of(rank, 1))
    began_s = time.monotonic()
    try:
        if rank == who:
            with failing(where, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                relay.save(folder)
        else:
            relay.save(folder)
        seen: dict[str, Any] = {"type": None}
    except WorkerLostError as error:
        seen = told(error)
    seen["seconds"] = time.monotonic() - began_s
    relay.close()
    return seen


def resume(rank: int, count: int, folder: str, steps: int) -> dict[str, Any]:
    """Load the last save, and train until so many steps are done."""
    case = Case("chain")
    model = BY_NAME[case.kind].make_model()
    options = {"loss": BY_NAME[case.kind].loss, "workers": Workers(reduce="ordered")}
    with Relay.load(folder, model, case.optimizer(model), **options) as relay:
        began = relay.steps
        losses = [relay.step(case.rows_of(rank, step)).loss for step in range(began, steps)]
        relay.save(folder)
        with relay.gathered():
            return {"began": began, "losses": losses, "state": state_of(relay)}


def uninterrupted(rank: int, count: int, steps: int) -> dict[str, Any]:
    """Train so many steps."""
    case = Case("chain")
    with relay_of(case, rank) as relay:
        losses = [relay.step(case.rows_of(rank, step)).loss for step in range(steps)]
        with relay.gathered():
            return {"losses": losses, "state": state_of(relay)}
