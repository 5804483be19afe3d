"""Settings that fit by the forecast fit in a real step; if none fit, the smallest budget is returned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from sessions import make_batches, make_relay

from l2l_core import EmulatedDevice, RelayConfig
from workbench.what_if import MeasuredStep, Question, answer_question, find_fitting_settings

BATCH = make_batches(1)[0]  # six rows


@pytest.fixture(scope="module")
def base() -> MeasuredStep:
    """A step with all layers on the device."""
    with make_relay(RelayConfig(micro_batches=1, ahead=3, meter="always")) as relay:
        relay.step(BATCH)
        return MeasuredStep.of(relay.step(BATCH).trace)


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7, 0.6])
@pytest.mark.parametrize("ahead", [2, 3])
def test_returned_settings_fit_on_a_device_of_that_size(ahead: int, share: float) -> None:
    with make_relay(RelayConfig(micro_batches=1, ahead=ahead, meter="always")) as relay:
        relay.step(BATCH)
        base = MeasuredStep.of(relay.step(BATCH).trace)
    budget = int(share * answer_question(base, Question.of(base)).peak_device_bytes)
    question = replace(Question.of(base), memory_bytes=budget)
    found = find_fitting_settings(partial(answer_question, base), question)
    if found.fastest is None:
        assert share < 0.8 and found.smallest.budget_bytes > budget
        return
    assert set(found.settings) <= {"ahead", "stash"} and found.fastest.device_bytes <= budget
    config = replace(RelayConfig(micro_batches=1, ahead=ahead), **found.settings)
    with make_relay(config, EmulatedDevice(memory_bytes=budget)) as relay:
        assert relay.step(BATCH).peak_device_bytes <= budget


def test_without_fitting_settings_the_smallest_budget_is_returned(base: MeasuredStep) -> None:
    found = find_fitting_settings(partial(answer_question, base), replace(Question.of(base), memory_bytes=100))
    assert found.fastest is None and not found.settings and found.smallest.budget_bytes > 100


def test_a_device_without_a_budget_is_refused(base: MeasuredStep) -> None:
    with pytest.raises(ValueError, match="memory_bytes=None: a device without a limit has room"):
        find_fitting_settings(partial(answer_question, base), Question.of(base))
