"""What several workers do otherwise where they are asked to: buffers of their own, gradients in bfloat16 on the way."""

from pathlib import Path

import pytest
from crew import Crew
from crew_cases import Case, sgd
from crew_modes import refuse_schedules, train_in_bfloat16, train_with_own_buffers

from l2l_core import Workers


@pytest.mark.parametrize("name", ["batch_norm", pytest.param("resnet", marks=pytest.mark.slow)])
def test_buffers_of_each_one_are_those_of_its_own_micro_batches(name: str, two: Crew, tmp_path: Path) -> None:
    """Batch statistics do not depend on running ones, so weights and losses are those of one worker with all micro-batches."""
    for rank, seen in enumerate(two.run(train_with_own_buffers, Case(name, rows=(4, 6)), str(tmp_path))):
        assert seen["losses"] == seen["expected"], seen
        assert not [each for each in seen["differences"] if each not in seen["buffers differ in"]], seen
        assert not seen["buffers differ in"] and seen["others"] and seen["saved"], f"worker {rank}: {seen}"


def test_spectral_norm_goes_on_each_with_its_own(two: Crew, tmp_path: Path) -> None:
    """Its buffers scale the weights: not what one worker trains, but what one would that had the buffers of each in turn."""
    for seen in two.run(train_with_own_buffers, Case("spectral_norm", rows=(4, 4)), str(tmp_path)):
        assert seen["losses"] == seen["expected"] and not seen["buffers differ in"] and not seen["differences"], seen


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["sum", "ordered"])
def test_gradients_travel_in_bfloat16(reduce: str, two: Crew) -> None:
    """Half the bytes; of three steps losses agree to 1e-5, and weights to 1/256 of what the most moved one has moved."""
    for seen in two.run(train_in_bfloat16, Case("gpt2", reduce=reduce, optimizer=sgd)):
        full, half = seen["fp32"], seen["bf16"]
        assert 2 * half["sent"] == full["sent"] > 0
        assert half["losses"] == pytest.approx(seen["expected"], rel=1e-5)
        assert full["largest difference"] < half["largest difference"] / 10 < seen["moved"] / 2560, seen


@pytest.mark.parametrize("setting", ["reduce", "wire", "buffers"])
def test_unknown_settings_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting}='fp16': must be one of"):
        Workers(**{setting: "fp16"})


def test_schedules_of_the_user_are_refused_on_every_worker(two: Crew) -> None:
    for seen in two.run(refuse_schedules, Case("chain", rows=(4, 4))):
        setting, plan = seen["messages"]
        assert "schedule=serial with several workers" in setting
        assert "(plan) with several workers is not possible: leave out the plan" in plan and seen["loss"] > 0
