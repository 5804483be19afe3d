"""The exact walk against the meter: random plans, on unlike models, at every operation."""

import random
from collections.abc import Callable

import pytest

from l2l_core.strategies import Lab
from l2l_core.strategies.plan import F0, FALL, FCK
from l2l_core.strategies.recipes import Operations, completed, mixed
from l2l_core.strategies.walk import walk


def random_plan(rng: random.Random, n: int) -> Operations:
    if rng.random() < 0.5:
        return mixed([rng.choice("KROH") for _ in range(n - 1)], ahead=rng.randint(0, 2))
    kinds = [FCK]
    for _ in range(n - 2):
        kinds.append(rng.choice([FALL, FCK] if kinds[-1] == FALL else [F0, FCK, FALL]))
    return completed([*kinds, FALL])


@pytest.mark.parametrize("name", ["gpt2", "resnet", "norm_outside"])
def test_simulated_bytes_are_the_metered_ones(lab_of: Callable[..., Lab], name: str) -> None:
    lab: Lab = lab_of(name, micro_batches=2)
    rng = random.Random(7)
    exact = operations = 0
    for _ in range(8):
        plan = lab.plan(random_plan(rng, lab.prices.stages))
        course = lab._course(lab._twins()[0])
        with course.metered() as meter:
            ran = course.run(plan.operations, lab._work, meter)
        for costs, log in zip(lab.prices.costs, ran.logs, strict=True):
            steps = walk(costs, plan.operations)
            assert [(step.after, step.host) for step in steps] == [(done.after, done.host) for done in log]
            assert max(step.high for step in steps) == max(done.high for done in log)
            # Below the peak, frames of the model may let go of something older sooner or later than was seen.
            peak = max(done.high for done in log)
            assert all(abs(step.high - done.high) < 0.01 * peak for step, done in zip(steps, log, strict=True))
            exact += sum(step.high == done.high for step, done in zip(steps, log, strict=True))
            operations += len(log)
    assert exact >= 0.9 * operations, f"{name}: {exact} of {operations} highs to the byte"


def test_a_step_peaks_where_its_plan_says(lab_of: Callable[..., Lab]) -> None:
    lab = lab_of("gpt2", micro_batches=3)
    for operations in (mixed("KROH"), mixed("OOOO", ahead=0), completed([FCK, F0, F0, F0, FALL])):
        plan = lab.plan(operations)
        for _ in range(2):  # the second has an optimizer with state
            result = lab.step(plan)
            assert result.peak_device_bytes == plan.peak_device_bytes
            assert result.peak_host_bytes == plan.peak_host_bytes
