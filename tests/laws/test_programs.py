"""Random training programs hold or are refused in clear words; and the generator, the judge and the reducer do their work."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import program_batch
import program_run
import pytest
import torch
from patience import rarely
from program import Layer, Program, Settings
from program_batch import Worker, run_all
from program_blocks import FROZEN_DTYPES
from program_reduce import reduce
from program_run import BAD, Untrainable, judge
from programs import FEATURES, draw, summary

from l2l_core import Relay, StepResult, TornStep


def check(first: int, count: int, frozen: bool = False) -> None:
    outcomes = list(run_all(draw(seed, frozen) for seed in range(first, first + count)))
    assert not any(outcome.is_bad for outcome in outcomes), (
        f"python tests/support/programs.py {'--frozen ' if frozen else ''}--reduce SEED\n{summary(outcomes)}"
    )
    kinds = Counter(outcome.kind for outcome in outcomes)
    assert kinds["held"] > 0.7 * count, kinds
    assert kinds["untrainable"] < 0.1 * count, kinds


@pytest.mark.parametrize("first", [0, *map(rarely, range(50, 200, 50))])
def test_programs(first: int) -> None:
    check(first, 50)


def test_programs_with_frozen_dtypes() -> None:
    outcomes = [judge(draw(seed, frozen=True)) for seed in (0, 9, 10, 20, 38, 50)]  # every dtype
    assert {outcome.kind for outcome in outcomes} == {"held"}, summary(outcomes)
    assert {name for outcome in outcomes for name in outcome.features} >= {f"frozen {name}" for name in FROZEN_DTYPES}


@pytest.mark.slow
def test_many_programs_with_frozen_dtypes() -> None:
    check(0, 500, frozen=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(1000, 11000, 500))
def test_many_programs(first: int) -> None:
    check(first, 500)


def kept() -> list[Program]:
    """Programs that once found something, reduced."""
    corpus = Path(program_batch.__file__).with_name("program_corpus.jsonl")
    return [Program.from_json(line) for line in corpus.read_text().splitlines()]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


@pytest.mark.all_cases  # each has found something once
@pytest.mark.parametrize("program", kept(), ids=lambda program: f"{program.seed}, {program.features[0]}")
def test_kept_program(program: Program, worker: Worker) -> None:
    outcome = worker.judge(program)
    assert not outcome.is_bad, f"{outcome}\n{program.show()}\n{outcome.trace}"
    assert outcome.kind != "untrainable", outcome.trace


# --- the generator --------------------------------------------------------------------------------------------------


def test_every_feature_is_drawn() -> None:
    drawn = Counter(name for seed in range(600) for name in draw(seed).features)
    assert not set(FEATURES) - set(drawn), set(FEATURES) - set(drawn)


def test_every_frozen_dtype_is_drawn_and_never_without_being_asked_for() -> None:
    drawn = {name for seed in range(20) for name in draw(seed, frozen=True).features if name.startswith("frozen ")}
    assert {f"frozen {name}" for name in FROZEN_DTYPES} <= drawn
    assert not any("self.code" in draw(seed).source() for seed in range(20))


def test_half_of_the_programs_have_one_exotic_feature_or_none() -> None:
    counts = Counter(len(draw(seed).features) for seed in range(400))
    assert max(counts) <= 4 and 0.4 < (counts[0] + counts[1]) / 400 < 0.6, counts


def test_a_seed_is_a_program() -> None:
    for seed in range(50):
        program = draw(seed)
        assert program == draw(seed) == Program.from_json(program.to_json())


def test_settings_vary() -> None:
    settings = [draw(seed).settings for seed in range(100)]
    assert {s.micro_batches for s in settings} == {1, 2, 3, 4} and {s.ahead for s in settings} == {0, 1, 2}
    assert 10 < sum(s.schedule == "depth_first" for s in settings) < 40
    assert {s.stash for s in settings} == {"device", "host"} and {s.update for s in settings} == {"eager", "deferred"}
    assert any(s.rows[0] % s.micro_batches for s in settings) and any(len(set(s.rows)) > 1 for s in settings)


# --- the judge ------------------------------------------------------------------------------------------------------


def small(**changes: Any) -> Program:
    """Two linear layers with nothing special."""
    layer = Layer("x", ["self.a = nn.Linear(8, 8)"], ["return x + self.a(x)"])
    body = ["h1 = self.layers[0](x)", "h2 = self.layers[1](h1)", "return h2"]
    loss = ["out = model(x, y)", "return out.pow(2).mean()"]
    settings = Settings(micro_batches=2, rows=[5, 5])
    return replace(Program(0, [layer, layer], [], body, loss, settings), **changes)


def relay_that(after: Callable[[Relay], None]) -> type[Relay]:
    class Other(Relay):
        def step(self, *args: Any, **options: Any) -> StepResult:
            result = super().step(*args, **options)
            after(self)
            return result

    return Other


def nudge(tensor: torch.Tensor) -> None:
    """The smallest change that there is, of one element."""
    with torch.no_grad():
        flat = tensor.view(-1)
        flat[0] = torch.nextafter(flat[0], flat[0] + 1)


def test_nothing_special_holds() -> None:
    assert judge(small()).kind == "held"


@pytest.mark.parametrize("momentum", [False, True])
def test_one_wrong_bit_is_found(monkeypatch: pytest.MonkeyPatch, momentum: bool) -> None:
    def disturb(relay: Relay) -> None:
        state = [value for entry in relay.optimizer.state.values() for value in entry.values()]
        nudge(state[0] if momentum else next(relay.model.parameters()))

    monkeypatch.setattr(program_run, "Relay", relay_that(disturb))
    program = small(settings=Settings(optimizer="momentum"))
    assert judge(program).kind == "wrong"


def test_wrong_buffers_and_losses_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    program = small(parts=['self.register_buffer("count", torch.zeros(1))'])
    monkeypatch.setattr(program_run, "Relay", relay_that(lambda relay: relay.model.count.add_(1)))
    outcome = judge(program)
    assert outcome.kind == "wrong" and "buffers" in outcome.cause
    monkeypatch.undo()
    program = small(loss=["out = model(x, y)", "return out.pow(2).mean() + (1.0 if len(PLAIN) else 0.0)"])
    assert judge(program).kind == "untrainable"


def test_hooks_that_fire_too_often_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    program = small(parts=['self.layers[0].register_forward_hook(lambda m, a, o: seen("forward", o))'])
    assert judge(program).kind == "held"
    monkeypatch.setattr(program_run, "Relay", relay_that(lambda relay: relay.model.layers[0](torch.ones(1, 3, 8))))
    assert judge(program).cause == "number of hook calls: forward"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AssertionError("stash[layers.3, k=1] taken twice"), "ugly"),
        (KeyError("L000"), "ugly"),
        (RuntimeError("this model cannot relay: pass the mask to the layer as an argument"), "ugly"),  # not the relay's own
        (TornStep("step 0 failed after the update of L000", ["L000"]), "torn"),
    ],
)  # fmt: skip
def test_exceptions_are_judged(monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str) -> None:
    class Other(Relay):
        def step(self, *args: Any, **options: Any) -> StepResult:
            raise error

    monkeypatch.setattr(program_run, "Relay", Other)
    assert judge(small()).kind == kind


def test_an_exception_after_a_change_is_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(relay: Relay) -> None:
        raise ValueError("too late")

    monkeypatch.setattr(program_run, "Relay", relay_that(fail))
    assert judge(small()).kind == "torn"


def test_a_clear_refusal_is_none_of_the_bad() -> None:
    """The relay recomputes layers itself, and says so."""
    body = ["h1 = self.layers[0](x.clone().requires_grad_())", "return self.layers[0].a(h1) + self.layers[1](h1)"]
    assert judge(small(body=body)).kind in ("refused", "held")


def test_what_plain_training_cannot_run_does_not_count() -> None:
    for body in (
        ["return x.no_such_thing()"],
        ["return self.layers[0](x) / 0.0"],
        ["return self.layers[0](x) * id(x)"],
    ):
        assert judge(small(body=body)).kind == "untrainable"
    assert issubclass(Untrainable, Exception)


@pytest.mark.slow
def test_death_and_silence_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The culprit is named, and the programs after it run all the same."""
    with Worker() as worker:
        assert worker.judge(small()).kind == "held"
        dead = worker.judge(small(seed=1, body=['__import__("os").abort()', "return x"]))
        assert dead.kind == "crash" and worker.judge(small()).kind == "held"
        monkeypatch.setattr(program_batch, "PATIENCE_S", 2.0)
        silent = worker.judge(small(seed=2, body=["while True:", "    pass"]))
        monkeypatch.undo()
        assert silent.kind == "hang" and worker.judge(small()).kind == "held"
    assert (dead.seed, silent.seed) == (1, 2) and {dead.kind, silent.kind} < set(BAD)


# --- the reducer ----------------------------------------------------------------------------------------------------


def test_a_planted_failure_is_reduced_to_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def disturb(relay: Relay) -> None:
        if any(isinstance(module, torch.nn.GRU) for module in relay.model.modules()):
            nudge(next(relay.model.parameters()))

    program = next(
        p for p in map(draw, range(1000)) if "nn.GRU" in p.source() and len(p.layers) >= 4 and judge(p).kind == "held"
    )
    monkeypatch.setattr(program_run, "Relay", relay_that(disturb))
    reduced, outcome = reduce(program)
    lines = [line for layer in reduced.layers for line in layer.init + layer.body] + reduced.parts + reduced.body
    assert outcome.kind == "wrong" and len(lines) <= 5 and "nn.GRU" in reduced.source(), reduced.show()
    assert reduced.settings == replace(Settings(), rows=[4])
