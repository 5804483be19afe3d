"""Script of a session: on the same model and batches it gives the same bits without a session."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from patience import HANG_S, rarely
from sessions import assert_equal, make_batches, make_relay, mse, noisy_relay, train
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from l2l_core import (
    Delink,
    Drop,
    Duplicate,
    EmulatedDevice,
    Freeze,
    Insert,
    Relay,
    RelayConfig,
    Replace,
    Schedule,
    Swap,
)
from workbench.session.script import apply_code
from workbench.session.session import Session

BATCHES = make_batches(7)


def state_of(relay: Relay) -> list[torch.Tensor]:
    """Return the active branch, and of each branch weights, buffers, optimizer state and random state."""
    found = [torch.tensor([branch.active for branch in relay.branches])]
    for name in sorted(branch.name for branch in relay.branches):
        relay.switch(name)
        state = relay.optimizer.state
        kept = [state[p][name] for group in relay.optimizer.param_groups for p in group["params"] for name in state[p]]
        tensors = [
            *relay.model.parameters(),
            *relay.model.buffers(),
            *map(torch.as_tensor, kept),
            torch.get_rng_state(),
        ]
        found += [tensor.detach().clone() for tensor in tensors]
    return found


def read(script: str) -> dict[str, Any]:
    """Return the namespace of the script."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(script, "script", "exec"), names)
    return names


def again(script: str, relay: Relay, *more: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Run the script, whose check of losses must pass; return losses and states."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = read(script)["reproduce"](relay, itertools.cycle(BATCHES), *more)
    return losses, state_of(relay)


def work(session: Session) -> list[float]:
    """Use everything: edits measured, refused, applied, undone and redone, settings, branches, races."""

    def losses() -> list[float]:
        return [row.loss for row in session.snapshot().steps]

    train(session, 3)
    session.measure(Insert(1, init="fresh")).result(HANG_S)  # leaves no key and draws no random number
    with pytest.raises(ValueError, match="out of range"):
        session.edit(Insert(0), Drop(99)).result(HANG_S)
    session.edit(Insert(2, init="fresh", optimizer=0.5, warmup=3)).result(HANG_S)
    train(session, 2)
    session.undo().result(HANG_S)
    train(session, 1)
    session.redo().result(HANG_S)
    session.edit(Drop("L000"), Swap(0, 1)).result(HANG_S)
    session.reconfigure(micro_batches=2)
    session.reconfigure(micro_batches=6, h2d_bytes_per_s=1e9)
    session.forecast().result(HANG_S)
    train(session, 2)
    session.fork("wide").result(HANG_S)
    session.edit(Duplicate(slice(0, 2), mode="interleaved"), force=True).result(HANG_S)
    session.edit(Freeze(0)).result(HANG_S)
    train(session, 2)
    wide = losses()
    session.switch("main").result(HANG_S)
    train(session, 1)
    main = losses()[-1:]
    race = session.race("main", "wide", steps=10).result(HANG_S)
    session.fork("gone").result(HANG_S)
    session.switch("wide").result(HANG_S)
    session.discard("gone").result(HANG_S)
    train(session, 1)
    rows = [racer.steps for racer in race.racers]
    raced = [row.loss for pair in zip(*rows, strict=True) for row in pair]  # they move alternately
    return [*wide, *main, *raced, *losses()[-1:]]


def test_script_repeats_the_bits_of_a_session() -> None:
    with noisy_relay() as relay, Session(relay, BATCHES) as session:
        losses = work(session)
        script = session.script()
        session.close()
        ends = state_of(relay)
    with noisy_relay() as relay:
        found, states = again(script, relay)
    assert found == losses and len(found) == 3 + 2 + 1 + 2 + 2 + 1 + 20 + 1
    assert len(states) == len(ends)
    assert_equal(states, ends)


def test_script_repeats_the_bits_of_a_delinked_stack() -> None:
    def make() -> Relay:
        with noisy_relay() as relay:
            model = relay.model
        for place in (2, 3, 4):
            model[place] = model[1]
        config = RelayConfig(micro_batches=3, seed=5)
        return Relay(model, partial(torch.optim.AdamW, lr=1e-2), EmulatedDevice(), [model[1]], mse, config=config)

    with make() as relay, Session(relay, BATCHES) as session:
        train(session, 2)
        session.edit(Delink("L000", optimizer=0.25)).result(HANG_S)
        train(session, 2)
        losses, script = [row.loss for row in session.snapshot().steps], session.script()
        session.close()
        ends = state_of(relay)
    assert "relay.apply(Delink(layers='L000', optimizer=0.25))" in script
    with make() as relay:
        found, states = again(script, relay)
    assert found == losses
    assert_equal(states, ends)


def test_lines_of_the_script() -> None:
    with noisy_relay() as relay, Session(relay, BATCHES) as session:
        work(session)
        script = session.script()
        race = session.snapshot().race
    assert race is not None
    last = {racer.name: racer.steps[-1].loss for racer in race.racers}
    lines = [line.strip() for line in script.splitlines()]
    begin = next(i for i, line in enumerate(lines) if line.startswith("train(3, loss="))
    assert lines[begin + 1] == "relay.apply(Insert(at=2, init='fresh', optimizer=0.5, warmup=3))"
    wanted = [
        "relay.undo()",
        "relay.redo()",
        "relay.apply(Drop(layers='L000'), Swap(a=0, b=1))",
        "relay.config = replace(relay.config, micro_batches=6)",
        "relay.fork('wide')",
        "relay.apply(Duplicate(layers=slice(0, 2, None), mode='interleaved'), force=True)",
        f"race({{'main': 10, 'wide': 10}}, {last})",
        "relay.discard('gone')",
    ]
    assert [line for line in lines if line in wanted] == wanted
    assert "from l2l_core import Drop, Duplicate, Freeze, Insert, RelayConfig, Swap" in lines
    assert sum("throttle" in line for line in lines) == 1 and "Drop(layers=99)" not in script


@pytest.mark.slow
@pytest.mark.parametrize("kind", [rarely("list"), "iterator", rarely("function")])
def test_script_runs_after_its_functions_are_written(kind: str, tmp_path: Path) -> None:
    """Run it in another process, with the model of these tests and batches of each kind."""
    sources: dict[str, Callable[[], Any]] = {
        "list": lambda: BATCHES,
        "iterator": lambda: itertools.cycle(BATCHES),
        "function": lambda: itertools.cycle(BATCHES).__next__,
    }
    with make_relay() as relay, Session(relay, sources[kind](), probe=False) as session:
        train(session, 9)
        script = session.script()
        last = session.snapshot().steps[-1].loss
    (tmp_path / "bare.py").write_text(script)
    refused = run(tmp_path / "bare.py")
    assert refused.returncode != 0 and "make_relay() is not written yet: build the model" in refused.stderr
    body = {"list": "made", "iterator": "itertools.cycle(made)", "function": "next(endless)"}[kind]
    written = script.replace('\nif __name__ == "__main__":', WRITTEN.format(body=body) + '\nif __name__ == "__main__":')
    (tmp_path / "written.py").write_text(written)
    done = run(tmp_path / "written.py")
    assert done.stdout == f"9 steps were repeated; the last loss is {last!r}\n", done.stderr


WRITTEN = """
import itertools
from sessions import make_batches, make_relay
made = make_batches(7)
endless = itertools.cycle(made)
def batches():
    return {body}
"""


def run(path: Path) -> subprocess.CompletedProcess[str]:
    support = Path(__file__).parents[2] / "support"
    code = f"import sys, runpy; sys.path[:0] = [{str(support)!r}]; runpy.run_path({str(path)!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)


# Schedules and schedulers ---------------------------------------------------------------------------------------------


class Growing(Schedule):
    """Schedule that adds a layer before the third step, and skips the first layer in every second step."""

    def edits(self, relay: Any) -> Sequence[Any]:
        return [Insert(1, init="copy")] if relay.steps == 2 and len(relay.stack) == 4 else []

    def skip(self, relay: Any) -> Sequence[str]:
        return [relay.stack[0].key] if relay.steps % 2 else []


@pytest.mark.parametrize(
    "make", [lambda o: StepLR(o, 2, gamma=0.5), lambda o: ReduceLROnPlateau(o, patience=0, threshold=10.0)]
)
def test_script_takes_a_schedule_and_a_learning_rate_scheduler(make: Callable[[Any], Any]) -> None:
    with noisy_relay() as relay:
        options: dict[str, Any] = {"scheduler": make(relay.optimizer), "schedule": Growing(), "probe": False}
        with Session(relay, BATCHES, **options) as session:
            train(session, 6)
            script = session.script()
            losses = [row.loss for row in session.snapshot().steps]
        rate = relay.optimizer.param_groups[0]["lr"]
        ends = state_of(relay)
    assert "def make_schedule():" in script and "def make_scheduler(relay):" in script and "Insert" not in script
    with noisy_relay() as relay:
        found, states = again(script, relay, Growing(), make(relay.optimizer))
        assert relay.optimizer.param_groups[0]["lr"] == rate != 1e-2
    assert found == losses
    assert_equal(states, ends)


def test_script_skips_a_skipped_batch() -> None:
    bad: Any = (torch.ones(6, 5), torch.ones(6, 1))
    source = [BATCHES[0], bad, BATCHES[1]]
    with make_relay() as relay, Session(relay, source, probe=False) as session:
        session.run(2)
        assert session.wait(HANG_S).state == "failed"
        session.skip()
        session.run()
        session.wait(HANG_S)
        losses, script = [row.loss for row in session.snapshot().steps], session.script()
    with make_relay() as relay:
        assert read(script)["reproduce"](relay, iter(source)) == losses and len(losses) == 2


# Special cases --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_code_of_numpy_numbers_infinities_and_names_with_quotes() -> None:
    name = 'a\\n"""b\\'
    with make_relay() as relay:
        relay.fork(name)
        with Session(relay, BATCHES, probe=False) as session:
            session.edit(Duplicate(0, optimizer=numpy.float64(0.5))).result(HANG_S)
            session.reconfigure(h2d_bytes_per_s=math.inf, d2h_bytes_per_s=numpy.float64(1e9))
            train(session, 1)
            script = session.script()
        ends = state_of(relay)
    assert (
        "optimizer=0.5" in script
        and "h2d_bytes_per_s=float('inf')" in script
        and "numpy" not in script
        and "np." not in script
    )
    assert f"after step 0 of {name}." in (read(script)["make_relay"].__doc__ or "")
    with make_relay() as relay:
        relay.fork(name)
        assert_equal(again(script, relay)[1], ends)


def test_race_with_other_losses_warns() -> None:
    with make_relay() as relay, Session(relay, BATCHES, probe=False) as session:
        session.fork("slim").result(HANG_S)
        session.race("main", "slim", steps=1).result(HANG_S)
        script = session.script()
    with make_relay() as relay:
        halve(relay)
        with pytest.warns(UserWarning, match="the loss of step 1 of") as warnings:
            read(script)["reproduce"](relay, itertools.cycle(BATCHES))
    assert len(warnings) == 2


def test_script_returns_to_the_home_branch_after_a_race() -> None:
    with make_relay() as relay, Session(relay, BATCHES, probe=False) as session:
        session.fork("slim").result(HANG_S)
        session.race("slim", "main", steps=1).result(HANG_S)
        train(session, 1)
        script = session.script()
        session.close()
        ends = state_of(relay)
    with make_relay() as relay:
        assert_equal(again(script, relay)[1], ends)


class Fresh(Schedule):
    """Schedule that adds a fresh layer before the fifth and the thirteenth step."""

    def edits(self, relay: Any) -> Sequence[Any]:
        due = len(relay.stacks[""]) < {4: 5, 12: 6}.get(relay.steps, 0)
        return [Insert(1, init="fresh")] if due else []


def test_layers_that_a_schedule_adds_in_a_race_are_equal() -> None:
    with make_relay() as relay, Session(relay, BATCHES, probe=False, schedule=Fresh()) as session:
        session.fork("slim").result(HANG_S)
        session.race("main", "slim", steps=16).result(HANG_S)
        keys = [layer.key for layer in relay.stack]
        script = session.script()
        session.close()
        ends = state_of(relay)
    with make_relay() as relay:
        _, states = again(script, relay, Fresh())
        assert "L007" in keys or "L006" in keys
        assert_equal(states, ends)


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.cat([x for x, _ in BATCHES]), torch.cat([y for _, y in BATCHES])), 6, True)


def drawn() -> Any:
    return torch.randn(6, 4), torch.ones(6, 1)


@pytest.mark.parametrize("kind", ["loader", "function"])
@pytest.mark.parametrize("home", ["main", "slim"])
@pytest.mark.filterwarnings("error")
def test_random_batches_are_drawn_at_the_same_time_as_in_the_session(kind: str, home: str) -> None:
    source: Any = {"loader": shuffled, "function": lambda: drawn}[kind]
    with make_relay() as relay:
        torch.manual_seed(7)
        with Session(relay, source(), probe=False) as session:
            train(session, 1)
            session.fork("slim").result(HANG_S)
            train(session, 1)
            session.switch(home).result(HANG_S)
            session.race("main", "slim", steps=10).result(HANG_S)
            train(session, 1)
            session.forecast().result(HANG_S)  # draws its batch here, and trains on it elsewhere
            session.switch({"main": "slim", "slim": "main"}[home]).result(HANG_S)
            train(session, 2)
            script = session.script()
        ends = state_of(relay)
    with make_relay() as relay:
        torch.manual_seed(7)
        made = source()
        batches = iter(made, object()) if callable(made) else itertools.chain.from_iterable(itertools.repeat(made))
        read(script)["reproduce"](relay, batches)
        assert_equal(state_of(relay), ends)


def test_edits_of_a_schedule_before_a_failed_step_are_made() -> None:
    bad: Any = (torch.ones(6, 5), torch.ones(6, 1))
    source = [BATCHES[0], BATCHES[1], bad, *BATCHES[2:]]
    with make_relay() as relay, Session(relay, source, probe=False, schedule=Growing()) as session:
        session.run(4)
        assert session.wait(HANG_S).state == "failed"
        session.skip()
        session.undo().result(HANG_S)
        session.edit(Drop(0)).result(HANG_S)
        script = session.script()
        session.close()
        ends = state_of(relay)
    assert script.count("attempt(take())") == 1
    with make_relay() as relay:
        read(script)["reproduce"](relay, iter(source), Growing())
        assert_equal(state_of(relay), ends)


def test_edits_of_a_schedule_in_a_failed_race_step_are_made() -> None:
    def fail(*_: Any) -> None:
        if relay.branch == "slim" and relay.steps == 2:
            raise ArithmeticError("too hot")

    with make_relay() as relay, Session(relay, BATCHES, probe=False, schedule=Growing()) as session:
        session.fork("slim").result(HANG_S)
        session.switch("main").result(HANG_S)
        hook = relay.model.register_forward_pre_hook(fail)
        relay.stack[0].module.register_forward_pre_hook(fail)
        race = session.race("slim", "main", steps=4).result(HANG_S)
        assert race["slim"].left and race["slim"].tried and not race["main"].left
        hook.remove()
        script = session.script()
        keys = {branch.name: branch.layers for branch in relay.branches}
        session.close()
    assert "tried=['slim']" in script
    with make_relay() as relay:
        again(script, relay, Growing())
        assert {branch.name: branch.layers for branch in relay.branches} == keys and keys["slim"] == 5


# Changes without code -------------------------------------------------------------------------------------------------


def halve(relay: Relay) -> None:
    with torch.no_grad():
        relay.stack[0].params[0].mul_(0.5)


@pytest.fixture
def by_hand() -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Return the script of a session with a function and a module, and the final state."""
    with make_relay() as relay, Session(relay, BATCHES, probe=False) as session:
        train(session, 1)
        session.edit(halve, what="halved").result(HANG_S)
        session.edit(Replace(1, nn.Identity())).result(HANG_S)
        train(session, 1)
        script = session.script()
        session.close()
        yield script, state_of(relay)


def test_change_without_code_raises(by_hand: tuple[str, list[torch.Tensor]]) -> None:
    script, _ = by_hand
    assert "by_hand('halved', relay)" in script and "Replace(layer=1, module=Identity()" in script
    with make_relay() as relay, pytest.raises(NotImplementedError, match="write it there: halved"):
        again(script, relay)


def test_change_without_code_can_be_written(by_hand: tuple[str, list[torch.Tensor]]) -> None:
    script, ends = by_hand
    names = read(script)
    do = {"halved": halve}
    names["by_hand"] = lambda what, relay: do.get(what, lambda r: r.apply(Replace(1, nn.Identity())))(relay)
    with make_relay() as relay:
        names["reproduce"](relay, itertools.cycle(BATCHES))
        assert_equal(state_of(relay), ends)


@pytest.mark.parametrize(
    ("edit", "is_written"),
    [
        (Insert("L001", like=("blocks", 2)), True),
        (Drop(range(2)), True),
        (Insert(0, optimizer=0.25), True),
        (Insert(0, nn.Identity()), False),
        (Replace(0, nn.Identity()), False),
    ],
)
def test_only_edits_without_modules_are_written(edit: Any, is_written: bool) -> None:
    code = apply_code([edit])
    assert (code is not None) == is_written
    if code is not None:
        applied: list[Any] = []
        names = {
            "relay": type("R", (), {"apply": lambda _, *edits: applied.extend(edits)})(),
            "Insert": Insert,
            "Drop": Drop,
        }
        exec(code, names)
        assert applied == [edit]


def test_edit_class_of_the_user_has_no_code() -> None:
    class Insert(Drop):  # a name in use by the engine
        pass

    assert apply_code([Insert(0)]) is None


def test_other_relay_is_refused_and_other_seed_warns() -> None:
    with make_relay() as relay, Session(relay, BATCHES, probe=False) as session:
        train(session, 2)
        script = session.script()
    with (
        make_relay(RelayConfig(seed=0, micro_batches=3)) as relay,
        pytest.raises(ValueError, match="return such a relay from"),
    ):
        again(script, relay)
    with make_relay() as relay:
        halve(relay)
        with pytest.warns(UserWarning, match="the loss of step 2 of main is .* in the session"):
            read(script)["reproduce"](relay, itertools.cycle(BATCHES))


def test_script_begins_at_the_takeover() -> None:
    with make_relay() as relay:
        with Session(relay, BATCHES, probe=False) as session:
            train(session, 2)
            session.edit(Insert(0)).result(HANG_S)
            with Session(relay, BATCHES, probe=False) as second:
                train(second, 1)
                script = second.script()
        ends = state_of(relay)
    assert (
        "begun = 2, 'main', 1, RelayConfig(micro_batches=2, seed=0, verify='never'), [" in script
        and "train(1, loss=" in script
    )
    with make_relay() as relay:
        with Session(relay, BATCHES, probe=False) as session:
            train(session, 2)
            session.edit(Insert(0)).result(HANG_S)
        _, states = again(script, relay)
    assert_equal(states, ends)


@pytest.mark.slow
def test_found_settings_are_in_the_script() -> None:
    """A repeated search, by a call or by a relay that fits itself, could find other settings."""
    with noisy_relay("auto") as relay, Session(relay, iter(BATCHES)) as session:
        train(session, 2)
        first = relay.config
        session.reconfigure(micro_batches=3, keep=0, resident=0)
        train(session, 1)
        session.reconfigure(**session.fit().result(HANG_S).settings)
        train(session, 1)
        script, losses, states = session.script(), [row.loss for row in session.snapshot().steps], state_of(relay)
    assert first.keep == 4 and "keep=4" in script and "auto" not in script and ".fit(" not in script
    found = again(script, noisy_relay(RelayConfig()))  # with the seed of its generator, as "auto"
    assert found[0] == losses
    assert_equal(found[1], states)
