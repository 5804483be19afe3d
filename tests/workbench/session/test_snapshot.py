"""Snapshots: a consistent state at one moment, also in the middle of a step."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator

import torch
from patience import HANG_S
from sessions import WIDTH, Layer, make_batches, mse
from torch import nn

from l2l_core import EmulatedDevice, Relay
from workbench.readings.memory_estimate import estimate_in_core_bytes
from workbench.session.session import Session
from workbench.session.snapshot import Snapshot


def test_snapshot_in_mid_step_does_not_change(relay: Relay) -> None:
    last = relay.model[4]
    last.gate = threading.Event()
    with Session(relay, make_batches()) as session:
        session.step()
        assert last.entered.wait(HANG_S)
        now = session.snapshot()
        assert now.progress is not None and now.state == "running" and now.steps == ()
        events = now.progress.events
        part = now.progress.trace.events_since(0)[0][:events]
        assert {event.layer for event in part if event.kind == "forward"} == {"L000", "L001", "L002"}
        last.gate.set()
        session.wait(HANG_S)
    assert now.progress.events == events < len(now.progress.trace.events)
    assert now.progress.trace.events_since(0)[0][:events] == part


def test_snapshots_show_the_queue(relay: Relay) -> None:
    first = relay.model[1]
    first.gate = threading.Event()
    with Session(relay, make_batches()) as session:
        session.step()
        assert first.entered.wait(HANG_S)
        session.reconfigure(ahead=2)
        assert session.snapshot().queued == ("ahead 1 → 2",)
        first.gate.set()
        session.wait(HANG_S)


def test_in_core_estimate_after_the_first_step(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        assert session.snapshot().in_core_bytes is None
        session.step()
        now = session.wait(HANG_S)
    assert now.in_core_bytes is not None and now.in_core_bytes > 16 * now.num_params


class Watched(nn.Sequential):
    """Model that takes a snapshot when its buffers are read, as after a step."""

    session: Session | None = None

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        if self.session is not None:
            self.seen.append(self.session.snapshot())
        return super().buffers(recurse)


def test_step_and_its_row_are_added_together() -> None:
    model = Watched(nn.Linear(4, WIDTH), *(Layer() for _ in range(2)), nn.Linear(WIDTH, 1))
    model.seen = []
    with Relay(model, device=EmulatedDevice(), layers=list(model)[1:3], loss=mse) as relay:
        with Session(relay, make_batches()) as session:
            model.session = session
            session.run(2)
            session.wait(HANG_S)
            model.session = None
    assert model.seen
    assert all(now.step == len(now.steps) for now in model.seen)


class Unusual(nn.Sequential):
    """Model whose buffers cannot be read."""

    was_read = False

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        self.was_read = True
        raise RuntimeError("no buffers here")


def test_step_counts_without_in_core_estimate() -> None:
    model = Unusual(nn.Linear(4, WIDTH), *(Layer() for _ in range(2)), nn.Linear(WIDTH, 1))
    with Relay(model, device=EmulatedDevice(), layers=list(model)[1:3], loss=mse) as relay:
        with Session(relay, make_batches()) as session:
            session.run(2)
            now = session.wait(HANG_S)
    assert model.was_read
    assert (now.state, now.failure, now.done, now.in_core_bytes) == ("idle", None, 2, None)


def test_in_core_estimate_depends_on_the_batch(relay: Relay) -> None:
    short, long = ((torch.randn(6, length, 4), torch.randn(6, length, 1)) for length in (2, 50))
    with Session(relay, [short, long]) as session:
        session.step()
        first = session.wait(HANG_S)
        session.step()
        second = session.wait(HANG_S)
    assert first.in_core_bytes is not None and second.in_core_bytes is not None
    assert second.in_core_bytes == estimate_in_core_bytes(relay, second.last) > 2 * first.in_core_bytes


def test_in_core_estimate_depends_on_trained_weights(relay: Relay) -> None:
    def freeze(relay: Relay) -> None:
        for param in relay.model[1].parameters():
            param.requires_grad_(False)

    with Session(relay, make_batches()) as session:
        session.step()
        whole = session.wait(HANG_S)
        session.edit(freeze, what="freeze")
        session.step()
        frozen = session.wait(HANG_S)
    assert frozen.in_core_bytes is not None and whole.in_core_bytes is not None
    assert frozen.in_core_bytes == estimate_in_core_bytes(relay, frozen.last) != whole.in_core_bytes
    assert whole.layers[0].grad_norm and frozen.layers[0].frozen
    assert frozen.layers[0].grad_norm is None and frozen.layers[0].update_ratio is None, "statistics of the last step"


def test_snapshots_are_consistent_under_concurrent_commands(relay: Relay) -> None:
    seen: list[Snapshot] = []
    with Session(relay, make_batches()) as session:
        over = threading.Event()

        def look() -> None:
            while not over.is_set():
                seen.append(session.snapshot())
                time.sleep(1e-4)  # releases the interpreter

        looker = threading.Thread(target=look)
        looker.start()
        session.run(30)
        for ahead in (2, 0, 1):
            session.reconfigure(ahead=ahead)
        session.wait(HANG_S)
        over.set()
        looker.join()
    for one in seen:
        assert one.done <= len(one.steps) <= 30 and len(one.changes) <= 3
        assert one.target in (0, 30)
    numbers = [one.number for one in seen]
    assert numbers == sorted(numbers)
    assert copy.copy(seen[-1]).steps == seen[-1].steps
