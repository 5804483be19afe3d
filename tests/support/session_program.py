"""A session with dropout, a scheduler, edits and a branch, saved by itself; run as a program, it kills itself half-way."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from patience import HANG_S
from sessions import WIDTH, Noisy, mse, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from l2l_core import Duplicate, EmulatedDevice, Insert, Relay, RelayConfig
from l2l_core.saves import generations
from workbench.session import Autosave, Session

TIMES = {"seconds", "overlap"}
KILL_AT = 13


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def make_relay(width: int = WIDTH, at_step: Callable[[int], Any] = id) -> Relay:
    """Four layers with dropout; `at_step` is called with the number of finished steps whenever a loss is computed."""
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    inner = (
        [Noisy() for _ in range(4)] if width == WIDTH else [nn.Sequential(nn.Linear(width, width)) for _ in range(4)]
    )
    model = nn.Sequential(nn.Linear(4, width), *inner, nn.Dropout(0.2), nn.Linear(width, 1))

    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        if made:
            at_step(made[0].steps)
        return mse(outputs, batch)

    made: list[Relay] = []
    config = RelayConfig(micro_batches=3, seed=5)
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    made.append(Relay(model, adamw, EmulatedDevice(), list(model)[1:5], loss, config=config))
    return made[0]


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(30, 4, generator=generator), torch.randn(30, 1, generator=generator))


def make_loader() -> DataLoader[Any]:
    return DataLoader(rows(), batch_size=6, shuffle=True)


def make_session(folder: Path, relay: Relay, batches: Any = None, **options: Any) -> Session:
    scheduler = torch.optim.lr_scheduler.StepLR(relay.optimizer, 3, 0.7)
    autosave = Autosave(folder, steps=2, minutes=None)
    batches = make_loader() if batches is None else batches
    return Session(relay, batches, **{"scheduler": scheduler, "autosave": autosave} | options)


def begin(session: Session) -> None:
    """Train, edit and branch, up to the run that is killed."""
    train(session, 4)
    session.edit(Insert(at=1, init="copy")).result(HANG_S)
    train(session, 3)
    session.fork("wide").result(HANG_S)
    session.edit(Duplicate(0)).result(HANG_S)
    session.reconfigure(ahead=2)


def go_on(session: Session) -> None:
    """Go on after the run that is killed: to the other branch and back, and undo."""
    session.switch("main").result(HANG_S)
    train(session, 3)
    session.switch("wide").result(HANG_S)
    session.undo().result(HANG_S)
    train(session, 2)


def facts(session: Session) -> dict[str, Any]:
    """Everything of a session that is equal in every run of it, as text; times are left out."""
    now, relay = session.snapshot(), session.relay
    state = {name: param.detach() for name, param in relay.model.named_parameters()}
    state |= dict(relay.model.named_buffers())
    for index, param in enumerate(param for group in relay.optimizer.param_groups for param in group["params"]):
        state |= {f"{index} {k}": torch.as_tensor(v) for k, v in relay.optimizer.state.get(param, {}).items()}
    statistics = [now.statistics.values(figure, now.statistics.stack).tolist() for figure in ("grad_norm", "influence")]
    return {
        "state": {name: tensor.double().tolist() for name, tensor in state.items()},
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in relay.optimizer.param_groups],
        "scheduler": session._trainer.lr_scheduler.state_dict(),
        "steps": [_without_times(asdict(row)) for row in now.steps],
        "elsewhere": {k: [_without_times(asdict(row)) for row in v] for k, v in now.elsewhere.items()},
        "changes": [_without_times(asdict(change)) for change in now.changes],
        "statistics": str(statistics),  # nan is equal as text
        "journal": [asdict(entry) for entry in now.journal],
        "branches": [asdict(branch) for branch in now.branches],
        "config": asdict(now.config),
        "probe": now.probe and (now.probe.batches, now.probe.first_step),
        "random": torch.get_rng_state().tolist(),
    }


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_times(v) for k, v in value.items() if k not in TIMES}
    return [_without_times(one) for one in value] if isinstance(value, list | tuple) else value


def kill_in_save(step: int, file: int) -> None:
    """Kill the process in the first save from this step on, after some files of the relay."""
    plain, write, files = Relay.save, generations._write_file, [-1]

    def save(self: Relay, folder: Any) -> Path:
        files[0] = 0 if self.steps >= step else -1
        return plain(self, folder)

    def write_file(*args: Any) -> Path:
        if files[0] == file:
            kill()
        files[0] += files[0] >= 0
        return write(*args)

    Relay.save, generations._write_file = save, write_file  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, how = Path(sys.argv[1]), sys.argv[2]
    if how == "in a save":
        kill_in_save(11, file=3)
    at_step = (lambda step: kill() if step == KILL_AT else None) if how == "in a step" else id
    session = make_session(folder, make_relay(at_step=at_step))
    begin(session)
    train(session, 10)
    session.close()
    print("was not killed")
