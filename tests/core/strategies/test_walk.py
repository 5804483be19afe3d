"""The exact walk against the meter: random plans, on unlike models, at every operation."""

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import BY_NAME, KINDS

from l2l_core.strategies import Lab, Operation
from l2l_core.strategies.fixed_plans import complete_plan, mixed_plan
from l2l_core.strategies.plan import F0, FALL, FCK, OFF, OFFX, PRE, PREX, B
from l2l_core.strategies.plan_memory import simulate_memory

EXACT = ["gpt2", "resnet", "norm_outside"]
# Without a plan, or with bytes that differ from step to step: docs/STRATEGIES.md says why.
WITHOUT = {"random_skip", "inplace", "mixtral", "qwen3_moe", "spectral_norm_old", "mixture", "bert_classifier"}
OTHERS = [kind.name for kind in KINDS if kind.name not in WITHOUT.union(EXACT)]


class Drawn:
    """A valid plan being drawn.

    Invariant: after a record, and at the start, the next stage that has no record has a kept input: it can be run again.
    """

    def __init__(self, draw: Callable[[st.SearchStrategy], object], stages: int) -> None:
        self._draw, self._stages = draw, stages
        self.operations: list[Operation] = []
        self._records: set[int] = set()
        self._held: set[int] = set()
        self._away: set[tuple[str, int]] = set()

    def first_runs(self) -> None:
        kept = FALL
        for i in range(self._stages):
            kept = self._run(i, kept, FALL if i == self._stages - 1 else None)
            for out, where in ((OFF, self._records), (OFFX, self._held)):
                for j in sorted(where) if i < self._stages - 1 else ():
                    if (out, j) not in self._away and self._draw(st.integers(0, 3)) == 0:
                        self._away.add((out, j))
                        self.operations.append(Operation(out, j))

    def backward(self) -> None:
        for i in reversed(range(self._stages)):
            for _, j in sorted(self._away):
                if self._draw(st.booleans()):
                    self._comes(j)
            if i not in self._records:
                self._run_again(i)
            self._comes(i)
            self.operations.append(Operation(B, i))
            self._records.discard(i)
            self._held.discard(i)

    def _run_again(self, i: int) -> None:
        least = max((j + 1 for j in self._records if j < i), default=0)
        start = self._draw(st.sampled_from([j for j in sorted(self._held) if least <= j <= i]))
        kept = F0
        for j in range(start, i + 1):
            self._comes(j)
            kept = self._run(j, kept, FALL if j == i else None)

    def _run(self, i: int, before: str, kind: str | None) -> str:
        any_kind = before != FALL or i in self._held
        kind = kind or self._draw(st.sampled_from((F0, FCK, FALL) if any_kind else (FCK, FALL)))
        self.operations.append(Operation(kind, i))
        if kind == FALL:
            self._records.add(i)
            self._held.discard(i)
        elif kind == FCK:
            self._held.add(i)
        return kind

    def _comes(self, i: int) -> None:
        for out, back in ((OFF, PRE), (OFFX, PREX)):
            if (out, i) in self._away:
                self._away.remove((out, i))
                self.operations.append(Operation(back, i))


@st.composite
def plans(draw: st.DrawFn, stages: int) -> list[Operation]:
    drawn = Drawn(draw, stages)
    drawn.first_runs()
    drawn.backward()
    return drawn.operations


@cache
def lab(name: str) -> Lab:
    kind = BY_NAME[name]
    return Lab(kind.make_model(), kind.make_batch(7, 0), loss=kind.loss, layers=kind.layers, micro_batches=2)


def compare(lab: Lab, operations: list[Operation]) -> None:
    plan = lab.plan(operations)
    course = lab._make_runner(lab._copy_model()[0])
    with course.metered() as meter:
        ran = course.run(plan.operations, lab._own_inputs, meter)
    for costs, log in zip(lab.cost_model.costs, ran.logs, strict=True):
        simulated = [
            (str(step.operation), step.peak_bytes, step.bytes_after, step.host_bytes)
            for step in simulate_memory(costs, plan.operations)
        ]
        assert simulated == [(str(done.operation), done.peak_bytes, done.bytes_after, done.host_bytes) for done in log]


@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
@settings(max_examples=8)
def test_simulated_bytes_are_the_metered_ones(name: str, data: st.DataObject) -> None:
    compare(lab(name), data.draw(plans(lab(name).cost_model.stages)))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
@settings(max_examples=150)
def test_simulated_bytes_are_the_metered_ones_of_many_plans(name: str, data: st.DataObject) -> None:
    plan = data.draw(plans(lab(name).cost_model.stages))
    compare(lab(name), plan)
    assert lab(name).verify(lab(name).plan(plan)).equal


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@given(data=st.data())
@settings(max_examples=8)
def test_simulated_bytes_are_the_metered_ones_on_the_zoo(name: str, data: st.DataObject) -> None:
    compare(lab(name), data.draw(plans(lab(name).cost_model.stages)))


def test_a_step_peaks_where_its_plan_says(lab_of: Callable[..., Lab]) -> None:
    lab = lab_of("gpt2", micro_batches=3)
    for operations in (mixed_plan("KROH"), mixed_plan("OOOO", ahead=0), complete_plan([FCK, F0, F0, F0, FALL])):
        plan = lab.plan(operations)
        for _ in range(2):  # the second has an optimizer with state
            result = lab.step(plan)
            assert result.peak_device_bytes == plan.peak_device_bytes
            assert result.peak_host_bytes == plan.peak_host_bytes
