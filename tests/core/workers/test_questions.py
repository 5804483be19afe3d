"""What several workers ask together: verify, probe, look, fit. One answer for all, and nothing of it stays."""

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from crew import Crew
from crew_cases import Case
from crew_questions import asked_beside_alone, fitted, influence_beside_alone, settled, skipped_beside_plain, verified

from l2l_core import Drop

CLIPPED = {"update": "deferred", "max_grad_norm": 0.1}
SLOW_CASES = [
    Case("gpt2", config=CLIPPED),
    Case("bert"),
    Case("t5"),
    Case("lora_tied", config=CLIPPED),
    Case("frozen_prefix"),
    Case("swin"),
]


def is_same(one: Any, other: Any) -> bool:
    """Whether two results have the same bits; how long they took is no matter."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if is_dataclass(one):
        names = [field.name for field in fields(one) if field.name != "seconds"]
        return all(is_same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return one == other


def assert_verified(answers: list[dict[str, Any]]) -> None:
    for seen in answers:
        first, second = seen["reports"]
        assert first.equal and second.equal, f"{first}\n{second}"
        assert first.loss == seen["loss"] and second.loss == seen["next"]  # of the step that it was of
        assert seen["unchanged"]


@pytest.mark.parametrize("case", [Case("chain", rows=(4, 4), config=CLIPPED)], ids=str)
def test_verify_finds_equal_bits_and_leaves_nothing_behind(case: Case, two: Crew) -> None:
    assert_verified(two.run(verified, case))


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
def test_verify_with_other_models(case: Case, two: Crew) -> None:
    assert_verified(two.run(verified, case))


@pytest.mark.slow
def test_verify_tells_sums_from_equal_bits(two: Crew) -> None:
    for seen in two.run(verified, Case("gpt2", reduce="sum")):
        second = seen["reports"][1]
        assert not second.equal and 0 < second.max_abs_diff < 1e-4 and seen["unchanged"]


def test_probes_and_looks_are_those_of_one_worker(two: Crew) -> None:
    for seen in two.run(asked_beside_alone):
        assert seen["probes"] == seen["expected"] and len({*seen["probes"]}) == 4
        assert is_same(seen["inside"], seen["inside alone"]) and seen["inside"].passings
        assert seen["unchanged"] and seen["next"][0] == seen["next"][1]
        assert "number of batches: worker 0: 1, worker 1: 2" in seen["told"]


def test_influence_is_the_mean_of_all_workers(two: Crew) -> None:
    """Else each worker would drop another layer."""
    one, other = two.run(influence_beside_alone)
    assert one["together"] == other["together"] and one["dropped"] == other["dropped"]
    assert one["together"] == pytest.approx(one["alone"], rel=1e-9)
    assert one["dropped"] == [Drop(f"L{one['together'].index(min(one['together'])):03d}")]


@pytest.mark.parametrize("name", ["chain", "residual_outside", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_layers_that_do_not_run_are_left_out_as_of_the_list(name: str, two: Crew) -> None:
    """In steps by LayerDrop, and in evaluations; where a residual sum is outside, the place of a layer is not kept."""
    for seen in two.run(skipped_beside_plain, Case(name, rows=(4, 4))):
        assert any(seen["skipped"]) and seen["losses"] == seen["expected"]
        assert seen["evaluated"] == seen["expected of them"] and len({*seen["evaluated"]}) == 9
        assert "skip: worker 0: L000, worker 1: L001" in seen["told"] and seen["verified"]


def test_settings_are_found_by_one_and_are_those_of_all(two: Crew) -> None:
    first, second = two.run(fitted)
    assert first["config"] == first["found"] == second["config"] == second["found"]
    assert first["config"].micro_batches <= 4, "the second worker has four rows"
    assert first["planned"] == second["planned"] == 2 and first["words"] == second["words"]
    for told in (first["told"], second["told"]):
        assert "worker 0: (1000000000" in told[0] and "worker 1: (1000000001" in told[0]
        assert "No settings were found" in told[1]
    assert first["told"][1].startswith("NothingFits") and second["told"][1].startswith("WorkerError")


@pytest.mark.slow
def test_settings_that_are_found_on_the_way_are_those_of_all(two: Crew) -> None:
    first, second = two.run(settled)
    assert first == second
    assert 0 < first["kept"] < 4, "some graphs fit, and not all"
    assert first["auto"] != first["default"] and not first["fits itself"]
