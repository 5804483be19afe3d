"""Keep, recompute and offload in a pipeline: what fits a budget per rank, and which combination is fastest (simulated)."""

from itertools import product

import pytest

from l2l_core.devices import DeviceOutOfMemory
from l2l_core.pipelines import RankSpeeds, one_forward_one_backward
from l2l_core.strategies import TreatedPipeline, stage_chain, treat_pipeline
from l2l_core.strategies.fixed_plans import mixed_plan
from l2l_core.strategies.pipeline_treatments import candidates, treatment
from l2l_core.strategies.rotor import Chain

INPUT, RECORD = 10, 100
P, M = 8, 16


def chain_of(layers: int) -> Chain:
    """Layers with F of 1 s, B of 2 s, and records of ten inputs."""
    n = layers
    return Chain((INPUT,) * (n + 1), (RECORD,) * n, (1.0,) * n, (1.0,) * n, (2.0,) * n, (0,) * n, (0,) * n, (0,) * n)


CHAIN = stage_chain(chain_of(3 * P), 0, 3)


def treat(budget: int, letters: str, bytes_per_s: float = 35) -> TreatedPipeline:
    chains = [stage_chain(chain_of(3 * P), 3 * i, 3 * i + 3) for i in range(P)]
    speeds = RankSpeeds(host_bytes_per_s=bytes_per_s)
    return treat_pipeline(one_forward_one_backward(P, M), chains, budget, speeds, [50] * P, letters)


def test_costs_of_letters() -> None:
    """A record has its output, so three layers keep their input and three records; recompute keeps three inputs."""
    kept = treatment(CHAIN, mixed_plan("KKK"), "KKK").cost
    assert (kept.record_bytes, kept.host_bytes, kept.forward_s, kept.backward_s) == (310, 0, 3.0, 6.0)
    again = treatment(CHAIN, mixed_plan("RRR"), "RRR").cost
    assert (again.record_bytes, again.host_bytes, again.forward_s, again.backward_s) == (30, 0, 3.0, 9.0)
    moved = treatment(CHAIN, mixed_plan("OOO"), "OOO").cost
    assert (moved.record_bytes, moved.host_bytes, moved.backward_s) == (310, 300, 6.0)
    inputs = treatment(CHAIN, mixed_plan("HHH"), "HHH").cost
    assert (inputs.record_bytes, inputs.host_bytes, inputs.backward_s) == (30, 30, 9.0)


def test_the_program_leaves_out_no_choice_that_is_best() -> None:
    """Every word of letters has a candidate that is at least as good in seconds, bytes kept and bytes copied."""
    found = [each.cost for each in candidates(CHAIN, "KROH")]
    for word in map("".join, product("KROH", repeat=3)):
        cost = treatment(CHAIN, mixed_plan(word), word).cost
        assert any(
            each.backward_s <= cost.backward_s
            and each.host_bytes <= cost.host_bytes
            and each.record_bytes - each.host_bytes <= cost.record_bytes - cost.host_bytes
            for each in found
        ), word


@pytest.mark.parametrize("budget", [1600, 1100, 700])
@pytest.mark.all_cases
def test_together_they_are_never_slower_and_fit(budget: int) -> None:
    both, again = treat(budget, "KROH"), treat(budget, "KR")
    assert both.simulation.seconds <= again.simulation.seconds
    assert max(both.simulation.peak_bytes) <= budget >= max(again.simulation.peak_bytes)
    assert treat(10_000, "KROH").simulation.seconds == 9 * (M + P - 1) <= both.simulation.seconds


def test_together_they_beat_each_alone() -> None:
    """With a link that moves a third of the records in the time of compute."""
    seconds = {letters: treat(1600, letters, 15).simulation.seconds for letters in ("KR", "KO", "KROH")}
    assert seconds["KROH"] < min(seconds["KR"], seconds["KO"])


def test_a_budget_that_is_too_small_is_refused_with_one_that_suffices() -> None:
    with pytest.raises(DeviceOutOfMemory, match="no treatment of its stages") as caught:
        treat(100, "KR")
    least = caught.value.least_bytes
    assert least and max(treat(least, "KR").simulation.peak_bytes) <= least
