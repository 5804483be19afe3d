"""Recorded runs for tests of what is made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patience import HANG_S
from sessions import make_batches, make_relay, train

from l2l_core import EmulatedDevice, Move, RelayConfig
from workbench.runs.recorder import Recorder
from workbench.session.loggers import Logger
from workbench.session.session import Session


def record(path: Path, *others: Logger, micro_batches: int = 2, **options: Any) -> Path:
    """Five steps, new settings, two steps, another order of layers, three steps; on a device of 10 kB."""
    relay = make_relay(RelayConfig(micro_batches=micro_batches), EmulatedDevice(memory_bytes=10_000))
    with relay, Session(relay, make_batches(), loggers=[Recorder(path, **options), *others]) as session:
        train(session, 5)
        session.reconfigure(micro_batches=3)
        train(session, 2)
        session.edit(Move(0, 2)).result(HANG_S)
        train(session, 3)
    return path
