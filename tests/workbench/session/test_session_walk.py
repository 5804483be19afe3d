"""Random commands to a session: it always settles, and no batch is trained twice or lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from sessions import Batch, make_relay

from l2l_core import Drop, Duplicate, Freeze, Insert, Interpolate, LayerDrop, Relay, StepResult, Swap, Unfreeze
from workbench.session.session import Session

MOST_LAYERS, TIMEOUT_S = 8, 60.0


class Source:
    """Endless numbered batches; steps on some of them always fail."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.given: list[Batch] = []
        self.bad: set[int] = set()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        number = len(self.given)
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, 4, generator=generator)
        if self._chance.random() < 0.1:
            self.bad.add(number)
            x = x * float("nan")
        self.given.append((x, torch.randn(4, 1, generator=generator)))
        return self.given[-1]

    def number_of(self, batch: Batch) -> int:
        return next(i for i, given in enumerate(self.given) if given is batch)


def watch(relay: Relay, source: Source) -> list[int]:
    """Record the numbers of the batches that the relay trains on from now on."""
    trained: list[int] = []
    step: Callable[..., StepResult] = relay.step

    def watched(batch: Batch, **options: Any) -> StepResult:
        result = step(batch, **options)
        trained.append(source.number_of(batch))
        return result

    relay.step = watched  # type: ignore[method-assign]
    return trained


def fail(relay: Relay) -> None:
    raise RuntimeError("a function of the user's own that fails")


def commands(session: Session, chance: random.Random, futures: list[Future[Any]]) -> dict[str, Callable[[], object]]:
    """Return the possible commands by name; futures are appended to `futures`."""
    places = range(6)  # includes invalid places

    def edit() -> None:
        a, b = chance.choice(places), chance.choice(places)
        made = [
            Drop(a),
            Swap(a, b),
            Interpolate(a, b),
            Freeze(a),
            Unfreeze(a),
            Insert(a, init="copy"),
            Insert(a, init="identity"),
        ]
        if len(session.snapshot().layers) < MOST_LAYERS:
            made.append(Duplicate(a))
        futures.append(session.edit(chance.choice(made)))

    def cancel() -> None:
        if tickets := session.snapshot().tickets:
            session.cancel(chance.choice(tickets))

    def switch() -> None:
        futures.append(
            session.switch(chance.choice([branch.name for branch in session.snapshot().branches] + ["none"]))
        )

    def go_on() -> None:
        session.run()
        chance.choice([session.pause, session.stop])()

    return {
        "run": lambda: session.run(chance.randint(1, 3)),
        "go on": go_on,
        "step": session.step,
        "pause": session.pause,
        "stop": session.stop,
        "skip": session.skip,
        "forecast": lambda: futures.append(session.forecast()),
        "edit": edit,
        "undo": lambda: futures.append(session.undo()),
        "redo": lambda: futures.append(session.redo()),
        "fork": lambda: futures.append(session.fork(f"branch {chance.randrange(4)}")),
        "switch": switch,
        "discard": lambda: futures.append(session.discard(f"branch {chance.randrange(4)}")),
        "reconfigure": lambda: session.reconfigure(micro_batches=chance.randint(1, 2), ahead=chance.randint(0, 2)),
        "call": lambda: futures.append(session.edit(lambda relay: relay.steps)),
        "fail": lambda: futures.append(session.edit(fail)),
        "cancel": cancel,
        "look": session.snapshot,
    }


def walk(seed: int, count: int) -> None:
    chance, source = random.Random(seed), Source(seed)
    before = set(threading.enumerate())
    futures: list[Future[Any]] = []
    done: list[str] = []
    with make_relay() as relay:
        trained = watch(relay, source)
        schedule = LayerDrop(0.2) if seed % 2 else LayerDrop(0.0)
        with Session(relay, source, schedule=schedule) as session:
            actions = commands(session, chance, futures)
            skips = 0
            for _ in range(count):
                name = chance.choice([*actions, "run", "step", "edit", "skip", "forecast"])
                skips += name == "skip"
                actions[name]()
                done.append(name)
                if chance.random() < 0.3:
                    session.wait(TIMEOUT_S)
            now = session.wait(TIMEOUT_S)
            assert now.state in ("idle", "paused", "failed") and not now.queued, done
            assert all(future.done() for future in futures), done
            good = [number for number in range(len(source.given)) if number not in source.bad]
            assert trained == good[: len(trained)], f"each once, in order, and none left out: {done}"
            assert len(good) - len(trained) <= 1, f"one may wait: {done}"
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]


@pytest.mark.parametrize("seed", range(2))
def test_session_always_settles_and_trains_every_batch_once(seed: int) -> None:
    walk(seed, 60)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(10, 20))
def test_the_same_for_thousands_of_commands(seed: int) -> None:
    walk(seed, 300)
