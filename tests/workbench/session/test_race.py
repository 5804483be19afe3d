"""Races of branches on the same batches: same bits as training alone, comparisons, failures and control."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from patience import HANG_S, rarely
from sessions import (
    WIDTH,
    assert_equal,
    enter,
    held,
    make_batches,
    make_relay,
    noisy_relay,
    train,
    wait_until,
    weights_of,
)
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from l2l_core import Drop, Relay
from workbench.session.probe_verdict import ProbeLosses
from workbench.session.race_result import Race, Racer
from workbench.session.session import Session
from workbench.session.snapshot_values import StepRow

BATCHES = make_batches(7)
HELD_OUT = make_batches(10)[7:]


def prepare(session: Session) -> None:
    """Train two common steps, then a branch with one layer less for another step."""
    train(session, 2)
    session.fork("slim").result(HANG_S)
    session.edit(Drop(1)).result(HANG_S)
    train(session, 1)
    session.switch("main").result(HANG_S)


def state_of(relay: Relay) -> list[torch.Tensor]:
    """Return weights, buffers and optimizer state."""
    state = relay.optimizer.state
    kept = [state[p][name] for group in relay.optimizer.param_groups for p in group["params"] for name in state[p]]
    return [
        *weights_of(relay),
        *(b.clone() for b in relay.model.buffers()),
        *(torch.as_tensor(k).clone() for k in kept),
    ]


def raced(session: Session, *names: str, steps: int) -> Race:
    return session.race(*names, steps=steps).result(HANG_S)


# The same bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("main", "slim"), rarely(("slim", "main"))])
@pytest.mark.parametrize("steps", [1, rarely(8), 19])
def test_every_branch_ends_with_the_bits_of_training_alone(order: Sequence[str], steps: int) -> None:
    ends = {}
    with noisy_relay() as relay, Session(relay, BATCHES, probe=HELD_OUT) as session:
        prepare(session)
        race = raced(session, *order, steps=steps)
        assert relay.branch == "main" and race.is_over and not race.ended
        for name in order:
            session.switch(name).result(HANG_S)
            ends[name] = state_of(relay), torch.get_rng_state()
    for name in order:
        with noisy_relay() as alone, Session(alone, BATCHES, probe=False) as session:
            prepare(session)
            session.switch(name).result(HANG_S)
            train(session, steps)
            assert_equal([*ends[name][0], ends[name][1]], [*state_of(alone), torch.get_rng_state()])
            losses = [row.loss for row in session.snapshot().steps[-steps:]]
        assert [row.loss for row in race[name].steps] == losses
        assert [row.branch for row in race[name].steps] == [name] * steps


def test_source_may_reuse_the_memory_of_its_batch() -> None:
    def race_on(source: Callable[[], Any]) -> Race:
        with noisy_relay() as relay, Session(relay, source, probe=False) as session:
            prepare(session)
            return raced(session, "main", "slim", steps=10)

    filled, fresh = copy.deepcopy(BATCHES[0]), iter(BATCHES * 3)

    def fill() -> Any:
        for to, out in zip(filled, next(fresh), strict=True):
            to.copy_(out)
        return filled

    lists = iter(BATCHES * 3)
    first, second = race_on(fill), race_on(lambda: next(lists))
    for a, b in zip(first.racers, second.racers, strict=True):
        assert [row.loss for row in a.steps] == [row.loss for row in b.steps]


def test_branch_outside_of_the_race_keeps_its_learning_rates() -> None:
    with noisy_relay() as relay:
        scheduler = StepLR(relay.optimizer, 3, gamma=0.5)
        with Session(relay, BATCHES, scheduler=scheduler, probe=False) as session:
            prepare(session)
            session.fork("home").result(HANG_S)
            before = scheduler.state_dict()
            raced(session, "main", "slim", steps=2)
            assert relay.branch == "home" and scheduler.state_dict() == before


# Results --------------------------------------------------------------------------------------------------------------


def test_race_has_the_results_of_each_branch() -> None:
    with noisy_relay() as relay, Session(relay, BATCHES, probe=HELD_OUT) as session:
        prepare(session)
        race = raced(session, "main", "slim", steps=10)
        now = session.snapshot()
    main, slim = race.racers
    assert now.race is race and (now.branch, now.step) == ("main", 12)
    assert (main.begun, slim.begun, main.layers, slim.layers) == (2, 3, 4, 3)
    assert (main.parent, slim.parent, slim.forked_at) == (None, "main", 2)
    assert [change.step for change in slim.changes] == [2, 2] and slim.changes[1].entry == 0 and not main.changes
    first, last, layer = 4 * WIDTH, WIDTH, WIDTH * WIDTH
    for racer in race.racers:  # per weight and row: 6, or 4 where the input needs no gradient
        assert set(racer.flop) == {6 * (6 * layer * racer.layers + 4 * first + 6 * last)}
        assert racer.spent_s[-1] == pytest.approx(sum(row.seconds for row in racer.steps))
        assert racer.peak_bytes == max(row.peak_device_bytes for row in racer.steps)
        assert [at for at, _ in racer.measured][0] == 0 and racer.at_end is racer.measured[-1][1]
    assert main.at_end is not None and len(main.at_end.losses) == 3
    found = race.difference("slim")
    assert found is not None and slim.at_end is not None and found.after.losses == slim.at_end.losses
    assert found.spread is not None and race.equal_flop("slim") == slim.spent_flop[-1] < main.spent_flop[-1]


def row(loss: float, step: int = 1) -> StepRow:
    return StepRow(step, loss, 0.5, 6, 100, 1, 1, 0.5)


def racer(name: str, flop: int, losses: Sequence[float], measured: Sequence[tuple[int, Sequence[float]]]) -> Racer:
    steps = [row(loss, i + 1) for i, loss in enumerate(losses)]
    points = [(at, ProbeLosses(tuple(found), 0.0)) for at, found in measured]
    return Racer(name, 0, 1, steps, [flop] * len(steps), points)


def test_difference_at_equal_compute_is_interpolated() -> None:
    a = racer("a", 10, [4.0, 3.0, 2.0, 1.0], [(0, (9.0,)), (2, (4.0, 6.0)), (4, (2.0, 2.0))])
    b = racer("b", 15, [5.0, 3.5], [(0, (8.0, 8.0)), (2, (3.0, 3.0))])
    race = Race(4, [a, b])
    found = race.difference("b")  # at 30: a is halfway between its measurements at 20 and 40
    assert race.equal_flop("b") == 30 and found is not None
    assert found.before.losses == (3.0, 4.0) and found.after.losses == (3.0, 3.0)
    assert found.change == -0.5 and found.spread == pytest.approx(0.5**0.5)
    assert race.train_difference("b") == 3.5 - 2.0


def test_no_difference_without_common_range() -> None:
    a = racer("a", 10, [4.0, 3.0], [(2, (4.0,))])
    late, never = racer("b", 1, [5.0, 3.5], [(0, (8.0,)), (2, (3.0,))]), racer("c", 10, [], [])
    race = Race(2, [a, late, never])
    assert race.difference("b") is None and race.train_difference("b") is None
    assert race.difference("c") is None and race.train_difference("c") is None


# Failures and control -------------------------------------------------------------------------------------------------


def test_failed_branch_leaves_the_race_and_the_others_continue(relay: Relay) -> None:
    with Session(relay, BATCHES, probe=False) as session:
        for name in ("slim", "third"):
            session.fork(name).result(HANG_S)
            session.edit(Drop(0)).result(HANG_S)
        session.switch("main").result(HANG_S)
        first: Any = relay.model[1]  # only in main
        first.error = OSError("the disk is full\nand more")
        race = raced(session, "main", "slim", "third", steps=3)
        now = session.snapshot()
    assert [len(one.steps) for one in race.racers] == [0, 3, 3] and not race.ended
    assert race["main"].left == "OSError in step 1 of the race: the disk is full"
    assert now.failure is None and now.branch == "main" and now.state == "idle"
    assert race.difference("slim") is None


def test_race_ends_with_the_batches(relay: Relay) -> None:
    with Session(relay, iter(BATCHES[:5]), probe=False) as session:
        session.fork("slim").result(HANG_S)
        race = raced(session, "main", "slim", steps=50)
    assert [len(one.steps) for one in race.racers] == [5, 5] and race.ended == "there are no more batches"


def test_commands_wait_for_the_race_except_pause_and_stop(relay: Relay) -> None:
    with Session(relay, BATCHES, probe=False) as session:
        session.fork("slim").result(HANG_S)
        with held(relay):
            race = session.race("main", "slim", steps=1000)
            enter(relay)
            dropped = session.edit(Drop(0))
            assert session.snapshot().busy == "race: step 1 of main"
            session.pause()
        now = session.wait(HANG_S)
        assert now.race is not None and now.race.is_paused and not dropped.done()
        assert len(now.queued) == 1 and not race.done()
        session.run()
        wait_until(lambda: (live := session.snapshot().race) is not None and len(live["slim"].steps) > 2)
        session.stop()
        ended = race.result(HANG_S)
        dropped.result(HANG_S)
        now = session.wait(HANG_S)
    assert ended.ended == "it was stopped" and 0 < len(ended["main"].steps) < 1000
    assert now.branch == "slim" and len(now.layers) == 3 and not now.queued, "the edit applies to the home branch"


def test_closing_the_session_ends_the_race_on_the_home_branch(relay: Relay) -> None:
    with Session(relay, BATCHES, probe=False) as session:
        session.fork("slim").result(HANG_S)
        with held(relay):
            race = session.race("main", "slim", steps=1000)
            enter(relay)
            assert relay.branch == "main"
            session.close(wait=False)
    assert race.result(HANG_S).ended == "the session was closed" and relay.branch == "slim"


def test_failed_source_ends_the_race_on_the_home_branch(relay: Relay) -> None:
    def fail() -> Any:
        raise OSError("no file")

    with Session(relay, fail, probe=False) as session:
        session.fork("slim").result(HANG_S)
        with pytest.raises(OSError, match="no file"):
            raced(session, "main", "slim", steps=2)
        now = session.wait(HANG_S)
        assert now.failure is not None and now.failure.during == "batch" and now.branch == "slim"
        assert now.race is not None and now.race.is_over
        session.fork("third").result(HANG_S)


@pytest.mark.parametrize(
    ("names", "steps", "message"),
    [
        (("main",), 2, "two branches or more"),
        (("main", "main"), 2, "'main' is named twice"),
        (("main", "slim"), 0, "steps=0: must be a positive integer"),
        (("main", ["slim"]), 2, "is not the name of a branch"),
    ],
)
def test_invalid_race_is_refused_at_once(relay: Relay, names: Any, steps: int, message: str) -> None:
    with Session(relay, BATCHES) as session:
        with pytest.raises(ValueError, match=message):
            session.race(*names, steps=steps)
        assert session.snapshot().race is None and not session.snapshot().queued


def test_an_unknown_branch_is_refused_and_nothing_starts(relay: Relay) -> None:
    with Session(relay, BATCHES) as session:
        race = session.race("main", "missing", steps=2)
        with pytest.raises(ValueError, match="no branch 'missing' to race: there are main"):
            race.result(HANG_S)
        now = session.wait(HANG_S)
        assert now.step == 0 and now.refusal is not None and now.race is None
        train(session, 1)


RATES: dict[str, Callable[[Any], Any]] = {
    "steps": lambda optimizer: StepLR(optimizer, 3, gamma=0.5),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=100),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=3, threshold=10.0),
}


@pytest.mark.parametrize("kind", RATES)
def test_every_branch_has_a_separate_scheduler_state(kind: str) -> None:
    """Compare with training each branch alone, and with the home branch after the race."""
    steps, ends = 10, {}
    with noisy_relay() as relay:
        with Session(relay, BATCHES, scheduler=RATES[kind](relay.optimizer), probe=False) as session:
            prepare(session)
            race = raced(session, "slim", "main", steps=steps)
            ends["slim"] = [row.loss for row in race["slim"].steps]
            train(session, 3)
            ends["main"] = [row.loss for row in session.snapshot().steps[-steps - 3 :]]
            script = session.script()
        rate = relay.optimizer.param_groups[0]["lr"]
    for name, more in (("slim", 0), ("main", 3)):
        with noisy_relay() as alone:
            with Session(alone, BATCHES, scheduler=RATES[kind](alone.optimizer), probe=False) as session:
                prepare(session)
                session.switch(name).result(HANG_S)
                train(session, steps + more)
                assert [row.loss for row in session.snapshot().steps[-steps - more :]] == ends[name]
            assert name == "slim" or alone.optimizer.param_groups[0]["lr"] == rate != 1e-2
    with noisy_relay() as relay:
        names: dict[str, Any] = {"__name__": "script"}
        exec(script, names)
        losses = names["reproduce"](relay, itertools.cycle(BATCHES), RATES[kind](relay.optimizer))
    raced_losses, later = losses[3 : 3 + 2 * steps], losses[3 + 2 * steps :]
    assert raced_losses[::2] == ends["slim"] and raced_losses[1::2] + later == ends["main"]


def test_scheduler_without_state_dict_cannot_race(relay: Relay) -> None:
    class Counter:
        def step(self) -> None: ...

    with Session(relay, BATCHES, scheduler=Counter()) as session:
        with pytest.raises(
            ValueError, match="a Counter, has no state_dict and no load_state_dict, so .* without a scheduler"
        ):
            session.race("main", "slim")


def test_queued_race_can_be_cancelled() -> None:
    with make_relay() as relay, Session(relay, BATCHES) as session:
        with held(relay):
            session.step()
            enter(relay)
            race = session.race("main", "slim")
            assert session.cancel(session.snapshot().tickets[-1])
        session.wait(HANG_S)
    assert race.cancelled()
