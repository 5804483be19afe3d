"""Simulated bytes against the meter, at every operation of random plans on several models."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import BY_NAME, KINDS

from l2l_core.strategies import Lab, Operation
from l2l_core.strategies.fixed_plans import complete_plan, mixed_plan
from l2l_core.strategies.plan import F0, FALL, FCK, OFF, OFFX, PRE, PREX, B
from l2l_core.strategies.plan_memory import simulate_memory

EXACT = ["gpt2", "resnet", "norm_outside"]
# Models without a plan, or whose bytes differ from step to step (docs/STRATEGIES.md, Limits).
WITHOUT = {"random_skip", "inplace", "mixtral", "qwen3_moe", "spectral_norm_old", "mixture", "bert_classifier"}
OTHERS = [kind.name for kind in KINDS if kind.name not in WITHOUT.union(EXACT)]


class PlanDraw:
    """A valid plan that is being drawn.

    Invariant: the first stage without a record, and each that follows a record, has a kept input, so it can run again.
    """

    def __init__(self, draw: Callable[[st.SearchStrategy], Any], stages: int) -> None:
        self._draw, self._stages = draw, stages
        self.operations: list[Operation] = []
        self._records: set[int] = set()
        self._kept_inputs: set[int] = set()
        self._on_host: set[tuple[str, int]] = set()

    def first_runs(self) -> None:
        kept = FALL
        for i in range(self._stages):
            kept = self._run(i, kept, FALL if i == self._stages - 1 else None)
            for out, where in ((OFF, self._records), (OFFX, self._kept_inputs)):
                for j in sorted(where) if i < self._stages - 1 else ():
                    if (out, j) not in self._on_host and self._draw(st.integers(0, 3)) == 0:
                        self._on_host.add((out, j))
                        self.operations.append(Operation(out, j))

    def backward(self) -> None:
        for i in reversed(range(self._stages)):
            for _, j in sorted(self._on_host):
                if self._draw(st.booleans()):
                    self._fetch(j)
            if i not in self._records:
                self._rerun(i)
            self._fetch(i)
            self.operations.append(Operation(B, i))
            self._records.discard(i)
            self._kept_inputs.discard(i)

    def _rerun(self, i: int) -> None:
        least = max((j + 1 for j in self._records if j < i), default=0)
        start = self._draw(st.sampled_from([j for j in sorted(self._kept_inputs) if least <= j <= i]))
        kept = F0
        for j in range(start, i + 1):
            self._fetch(j)
            kept = self._run(j, kept, FALL if j == i else None)

    def _run(self, i: int, before: str, fixed_kind: str | None) -> str:
        any_kind = before != FALL or i in self._kept_inputs
        kind: str = fixed_kind or self._draw(st.sampled_from((F0, FCK, FALL) if any_kind else (FCK, FALL)))
        self.operations.append(Operation(kind, i))
        if kind == FALL:
            self._records.add(i)
            self._kept_inputs.discard(i)
        elif kind == FCK:
            self._kept_inputs.add(i)
        return kind

    def _fetch(self, i: int) -> None:
        for out, back in ((OFF, PRE), (OFFX, PREX)):
            if (out, i) in self._on_host:
                self._on_host.remove((out, i))
                self.operations.append(Operation(back, i))


@st.composite
def plans(draw: st.DrawFn, stages: int) -> list[Operation]:
    drawn = PlanDraw(draw, stages)
    drawn.first_runs()
    drawn.backward()
    return drawn.operations


@cache
def lab(name: str) -> Lab:
    kind = BY_NAME[name]
    return Lab(
        kind.make_model(),
        kind.make_batch(7, 0),
        loss=kind.loss,
        loss_over=kind.loss_over,
        layers=kind.layers,
        micro_batches=2,
    )


def compare(lab: Lab, operations: list[Operation]) -> None:
    plan = lab.plan(operations)
    runner = lab._make_runner(lab._copy_model()[0])
    with runner.metered() as meter:
        result = runner.run(plan.operations, lab._own_inputs, meter)
    for costs, log in zip(lab.cost_model.costs, result.logs, strict=True):
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


def test_a_step_has_the_peaks_of_its_plan(lab_of: Callable[..., Lab]) -> None:
    lab = lab_of("gpt2", micro_batches=3)
    for operations in (mixed_plan("KROH"), mixed_plan("OOOO", ahead=0), complete_plan([FCK, F0, F0, F0, FALL])):
        plan = lab.plan(operations)
        for _ in range(2):  # in the second step the optimizer has state
            result = lab.step(plan)
            assert result.peak_device_bytes == plan.peak_device_bytes
            assert result.peak_host_bytes == plan.peak_host_bytes
