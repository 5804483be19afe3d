"""Sessions that are saved by themselves, and resumed after the end of their process: equal to the bit, or refused in words."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from patience import HANG_S, wait_until
from session_program import begin, facts, go_on, make_loader, make_relay, make_session, rows
from sessions import train
from torch import nn
from torch.utils.data import DataLoader, Dataset

from l2l_core import Insert, Replace
from workbench.session.save_folder import Autosave, SaveFolder
from workbench.session.session import Session

SUPPORT = Path(__file__).parents[2] / "support"


@cache
def undisturbed() -> dict[str, Any]:
    """Facts of the session that nothing interrupts, and that saves nothing."""
    with make_relay() as relay, make_session(Path(), relay, autosave=None) as session:
        begin(session)
        train(session, 10)
        go_on(session)
        return facts(session)


def run_killed(folder: Path, how: str) -> None:
    command = [sys.executable, str(SUPPORT / "session_program.py"), str(folder), how]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == -9, done.stdout + done.stderr


@pytest.mark.parametrize("how", ["in a step", pytest.param("in a save", marks=pytest.mark.slow)])
def test_a_killed_session_is_resumed_to_the_bit(how: str, tmp_path: Path) -> None:
    run_killed(tmp_path / "saves", how)
    with make_relay() as relay, make_session(tmp_path / "saves", relay) as session:
        offer = session.snapshot().offer
        assert offer is not None and not offer.why_not and 7 < offer.step < 13, offer
        assert (tmp_path / "saves" / "unfinished").exists() == (how == "in a save")
        session.resume()
        now = session.snapshot()
        assert now.step == offer.step and now.offer is None and len(now.steps) == now.step
        assert (now.branch, now.state, now.done, now.target) == ("wide", "paused", offer.step - 7, 10)
        session.run()
        session.wait(HANG_S)
        go_on(session)
        assert facts(session) == undisturbed()


# -- sources of batches ------------------------------------------------------------------------------------------------


class Shuffling(Dataset[Any]):
    """Rows with noise of a generator of its own, as augmentation."""

    def __init__(self) -> None:
        self.rows, self.noise = rows(), numpy.random.default_rng(4)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return x + float(self.noise.random()) + random.random() + float(torch.rand(())), y


class Stateful:
    """A loader that saves its position itself, with the methods of torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.at, self.rows = 0, make_batches()

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.rows):
            self.at += 1
            yield self.rows[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def make_batches() -> list[Any]:
    return list(DataLoader(rows(), batch_size=6))


def generate() -> Iterator[Any]:
    order = list(range(5))
    while True:
        random.shuffle(order)  # each order depends on all before
        for index in order:
            yield make_batches()[index]


def make_function() -> Callable[[], Any]:
    batches = itertools.cycle(make_batches())
    return lambda: next(batches)


SOURCES: dict[str, Callable[[], Any]] = {
    "list": make_batches,
    "shuffled": make_loader,
    "with a generator": lambda: DataLoader(rows(), 6, shuffle=True, generator=torch.Generator().manual_seed(2)),
    "noise": lambda: DataLoader(Shuffling(), 6, shuffle=True),
    "state_dict": Stateful,
    "generator": generate,
    "function": make_function,
    "random function": lambda: lambda: (torch.randn(6, 4), torch.from_numpy(numpy.random.rand(6, 1)).float()),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("steps", [pytest.param(5, marks=pytest.mark.slow), 8])
def test_batches_go_on_where_they_were(name: str, steps: int, tmp_path: Path) -> None:
    """After 5 steps an epoch is over, and the next one has not begun."""
    with make_relay() as relay, make_session(tmp_path, relay, SOURCES[name](), autosave=None) as session:
        train(session, steps)
        train(session, 7)
        expected = facts(session)
    with make_relay() as relay, make_session(tmp_path, relay, SOURCES[name]()) as session:
        train(session, steps)
    with make_relay() as relay, make_session(tmp_path, relay, SOURCES[name]()) as session:
        torch.rand(3), random.random(), numpy.random.rand()  # other cells
        session.resume()
        train(session, 7)
        assert facts(session) == expected


def test_a_batch_that_was_taken_is_the_next_one(tmp_path: Path) -> None:
    with make_relay() as relay, make_session(tmp_path, relay) as session:
        train(session, 3)
        session.forecast().result(HANG_S)
        batch = session._batches.pending[0]
        session.edit(Insert(at=0)).result(HANG_S)
    with make_relay() as relay, make_session(tmp_path, relay) as session:
        session.resume()
        assert torch.equal(session._batches.pending[0][0], batch[0])


def test_batches_in_another_order_are_refused(tmp_path: Path) -> None:
    with make_relay() as relay, make_session(tmp_path, relay, make_batches()) as session:
        train(session, 3)
    refusals: dict[str, Any] = {
        "number 3 is another one": make_batches()[1:],
        "end after 2 of 3": make_batches()[:2],
        "are a generator here": (batch for batch in make_batches()),
    }
    for words, batches in refusals.items():
        with make_relay() as relay, make_session(tmp_path, relay, batches) as session:
            state = torch.get_rng_state()
            with pytest.raises(ValueError, match=words):
                session.resume()
            assert (
                relay.steps == 0 and session.snapshot().offer is not None and torch.equal(state, torch.get_rng_state())
            )
    with make_relay() as relay, make_session(tmp_path, relay, make_batches()) as session:  # the remedy
        session.resume()
        assert relay.steps == 3


# -- the choice --------------------------------------------------------------------------------------------------------


def test_nothing_is_trained_or_written_before_the_choice(tmp_path: Path) -> None:
    folder = tmp_path / "saves"
    with make_relay() as relay, make_session(folder, relay) as session:
        train(session, 3)
    saved = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with make_relay() as relay, make_session(folder, relay) as session:
        calls: list[Callable[[], Any]] = [
            lambda: session.run(2),
            session.step,
            lambda: session.edit(Insert(at=1)),
            session.undo,
            lambda: session.fork("b"),
            lambda: session.reconfigure(ahead=2),
            session.save,
            lambda: session.forecast().result(HANG_S),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=r"a session of 3 steps was saved on .* resume\(\) .*start_afresh\(\)"):
                call()
    assert saved == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with make_relay() as relay, make_session(folder, relay) as session:
        aside = session.start_afresh()
        assert session.snapshot().offer is None
        train(session, 1)
    assert {aside / path.relative_to(folder) for path in saved} == {p for p in aside.rglob("*") if p.is_file()}
    assert [save.step for save in SaveFolder(folder).saves()] == [1]
    with make_relay() as relay, make_session(tmp_path / "other", relay) as session:
        with pytest.raises(ValueError, match="no session that waits"):
            session.start_afresh()


def test_a_cell_that_is_run_again_resumes_its_own_relay(tmp_path: Path) -> None:
    with make_relay() as relay:
        first = make_session(tmp_path, relay, make_batches())
        train(first, 3)
        again = make_session(tmp_path, relay, make_batches())  # takes the relay over
        wait_until(lambda: (offer := again.snapshot().offer) is not None and offer.step == 3)
        again.resume()
        train(again, 2)
        assert [row.step for row in again.snapshot().steps] == [1, 2, 3, 4, 5]
        again.close()


def test_a_save_of_something_else_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with make_relay() as relay, make_session(tmp_path, relay) as session:
        train(session, 3)
    with make_relay(width=6) as relay, make_session(tmp_path, relay) as session:
        offer = session.snapshot().offer
        assert (
            offer is not None
            and "of another model (23 differ: 0.weight" in offer.why_not
            and "(8, 4) float32 in the save" in offer.why_not
        )
        with pytest.raises(ValueError, match="make the model as it was then, or start afresh"):
            session.resume()
    with make_relay() as relay, make_session(tmp_path, relay, scheduler=None) as session:
        with pytest.raises(ValueError, match="saved with the learning rate scheduler StepLR, .* give scheduler="):
            session.resume()
    with make_relay() as relay:
        relay.step(make_batches()[0])
        with make_session(tmp_path, relay) as session, pytest.raises(ValueError, match="has made 1 steps and 0 edits"):
            session.resume()
    with make_relay() as relay, make_session(tmp_path, relay) as session:  # the remedy of all
        session.resume()


def test_a_layer_of_another_kind_needs_its_module(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with make_relay() as relay, make_session(tmp_path, relay) as session:
        train(session, 2)
        session.edit(Replace(1, module)).result(HANG_S)
        key = relay.stack[1].key
    with make_relay() as relay, make_session(tmp_path, relay) as session, pytest.raises(ValueError, match="modules="):
        session.resume()
    with make_relay() as relay, make_session(tmp_path, relay) as session:
        session.resume(modules={key: nn.Sequential(nn.Linear(8, 8), nn.Tanh())})
        train(session, 1)
        assert relay.steps == 3


def test_wrong_arguments_and_sources_are_refused(tmp_path: Path) -> None:
    for arguments, words in (
        ({"steps": 0}, "steps=0"),
        ({"keep": 0}, "keep=0"),
        ({"minutes": None}, "give one of them"),
    ):
        with pytest.raises(ValueError, match=words):
            Autosave(tmp_path, **arguments)
    with make_relay() as relay, Session(relay, make_batches()) as session:
        for call in (session.resume, session.save, session.start_afresh):
            with pytest.raises(ValueError, match="autosave=Autosave"):
                call()
    with make_relay() as relay, pytest.raises(ValueError, match="no state_dict"):
        make_session(tmp_path, relay, scheduler=type("Own", (), {"step": id})())
    with make_relay() as relay, make_session(tmp_path, relay) as session:
        with pytest.raises(ValueError, match="no session to resume"):
            session.resume()


# -- saves -------------------------------------------------------------------------------------------------------------


def test_the_last_saves_and_the_best_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 4.0, 4: 5.0, 5: 6.0}
    with make_relay() as relay:
        options = {"autosave": Autosave(tmp_path, minutes=None, steps=100, keep=2), "probe": make_batches()[:2]}
        with make_session(tmp_path, relay, **options) as session:
            monkeypatch.setattr(session._saver, "_held_out_loss", lambda: losses[relay.steps])
            for _ in range(5):
                train(session, 1)
                session.save().result(HANG_S)
    saves = SaveFolder(tmp_path)
    assert {save.step: save.loss for save in saves.saves()} == {2: 1.0, 4: 5.0, 5: 6.0}
    with make_relay() as relay, make_session(tmp_path, relay, **options) as session:
        assert session.resume("best").step == 2
        train(session, 1)
        assert relay.steps == 3


def test_a_save_that_fails_stops_the_run_and_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_relay() as relay, make_session(tmp_path, relay) as session:
        train(session, 2)
        wait_until(lambda: session.snapshot().saved is not None)

        def full(*_: Any) -> None:
            raise OSError("No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(relay, "save", full)
            session.run(6)
            now = session.wait(HANG_S)
        assert now.failure is not None and (now.failure.during, now.state, now.step) == ("save", "failed", 4)
        assert [save.step for save in SaveFolder(tmp_path).saves()] == [2]
        session.run()
        assert session.wait(HANG_S).step == 8
    assert SaveFolder(tmp_path).saves()[-1].step == 8 and not (tmp_path / "unfinished").exists()


def test_two_sessions_do_not_save_in_one_folder(tmp_path: Path) -> None:
    with make_relay() as relay, make_session(tmp_path, relay) as session:
        with make_relay() as other, make_session(tmp_path, other) as second:
            train(second, 2)
        session.run(2)
        now = session.wait(HANG_S)
        assert now.failure is not None and "saved by another session" in now.failure.message
        saved = {path.name for path in tmp_path.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == saved


def test_batches_of_the_probe_that_cannot_be_saved_are_named(tmp_path: Path) -> None:
    class Own(UserDict[str, Any]):
        pass

    batches = [Own(zip(("x", "y"), batch, strict=True)) for batch in make_batches()]
    with make_relay() as relay, make_session(tmp_path, relay) as session:
        relay._model_call.model_call = lambda batch: relay.model(batch["x"])  # type: ignore[attr-defined]
        saver = session._saver
        assert saver is not None
        saver._probe._batches = tuple(batches)
        packed, lost = saver._pack_probe({})
        assert "training batches for the probe" in lost and "Own" in lost and json.dumps(packed)
