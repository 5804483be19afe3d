"""Workers that fail, differ or die: an error on every one of them that says who and why, and never a hang."""

from typing import Any

import pytest
from crew import Crew
from crew_failures import disagree, one_dies, one_raises, refused

# how they differ, and what both must be told
WAYS = {
    "settings": "settings: worker 0: RelayConfig",
    "seed": "settings: worker 0: RelayConfig",
    "rate": "optimizer: worker 0: AdamW",
    "frozen": "layers, sizes, trained parameters: worker 0: shell",
    "mode": "training mode: worker 0: +",
    "verb": "next operation: worker 0: make a step, worker 1: evaluate",
    "batch": "structure of the batch: worker 0:",
    "skip": "skip: worker 0: , worker 1: L001",
}


@pytest.mark.parametrize("how", WAYS)
def test_workers_that_differ_are_told_in_what(how: str, two: Crew) -> None:
    for seen in two.run(disagree, how):
        assert seen["type"] == "WorkerError" and WAYS[how] in seen["text"], seen
        assert seen["losses"] == seen["expected"]  # they go on as if nothing had been


def test_a_batch_that_cannot_be_cut_on_one_worker(two: Crew) -> None:
    here, there = two.run(disagree, "rows")[::-1]
    assert here["type"] == "ValueError" and "the batch has 1 row(s) but micro_batches=2" in here["text"]
    assert there["type"] == "WorkerError" and "worker 1: ValueError: the batch has 1 row(s)" in there["text"]
    assert here["losses"] == there["losses"] == here["expected"]


def test_a_hook_around_the_optimizers_step_on_one_worker(two: Crew) -> None:
    here, there = two.run(disagree, "hook")[::-1]
    assert here["type"] == "ValueError" and "hooks would see shards of parameters" in here["text"]
    assert (
        there["type"] == "WorkerError" and "worker 1: ValueError: a hook around the optimizer's step" in there["text"]
    )
    assert here["losses"] == there["losses"] == here["expected"]


OLD_STEP = [
    ("forward", {}),
    ("forward", {"update": "deferred"}),
    ("backward", {"update": "deferred", "stash": "host"}),
    ("backward", {"rollback": True}),
    ("update", {"rollback": True}),
    ("update", {"update": "deferred"}),
]


@pytest.mark.parametrize("where, config", OLD_STEP, ids=str)
def test_one_worker_raises_and_all_have_the_old_step(where: str, config: dict[str, Any], two: Crew) -> None:
    there, here = two.run(one_raises, where, config)
    assert here["type"] == "ArithmeticError" and here["old"] and here["equal"], here
    assert there["type"] == "WorkerError" and "worker 1: ArithmeticError: broken here" in there["text"], there
    assert there["old"] and there["equal"], there


@pytest.mark.parametrize("where", ["backward", "update"])
def test_one_worker_raises_after_an_update_and_all_raise_torn_step(where: str, two: Crew) -> None:
    there, here = two.run(one_raises, where, {})
    for seen in (here, there):
        assert seen["type"] == "TornStep" and "ArithmeticError: broken here" in seen["text"], seen
        assert seen["updated"] == here["updated"] and "L003" in seen["updated"], seen


PHASES = ["compute", "gather", "reduce", "update", "end"]


def assert_lost(seen: dict[str, Any], who: int) -> None:
    assert "WorkerLostError" in (seen["type"], seen.get("cause")), seen
    assert f"worker {who} of" in seen["text"] or "TornStep" == seen["type"], seen
    assert f"worker {who} of" in seen["again"] and seen["seconds"] < 15 and seen["closing_s"] < 15, seen


@pytest.mark.parametrize("phase", [pytest.param("gather", marks=pytest.mark.slow), "reduce"])
def test_a_worker_is_killed(phase: str) -> None:
    with Crew(2) as crew:
        assert_lost(crew.run_while_one_dies(one_dies, phase, 1)[0], 1)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_one_of_four_workers_is_killed(phase: str) -> None:
    with Crew(4) as crew:
        for seen in crew.run_while_one_dies(one_dies, phase, 3)[:3]:
            assert_lost(seen, 3)


@pytest.mark.parametrize(
    "phase", ["gather", *(pytest.param(phase, marks=pytest.mark.slow) for phase in PHASES if phase != "gather")]
)
def test_the_worker_that_holds_the_store_is_killed(phase: str) -> None:
    """Started by hand, worker 0 holds the store in which the others leave word of what is lost."""
    with Crew(3, by_hand=True) as crew:
        for seen in crew.run_while_one_dies(one_dies, phase, 0)[1:]:
            assert_lost(seen, 0)


@pytest.mark.slow
def test_another_worker_is_killed_where_one_holds_the_store() -> None:
    with Crew(3, by_hand=True) as crew:
        for seen in crew.run_while_one_dies(one_dies, "reduce", 2)[:2]:
            assert_lost(seen, 2)


@pytest.mark.parametrize("what", ["batch_norm", "spectral_norm", "hook", "bfloat16"])
def test_what_several_workers_cannot_do_is_refused_before_anything_is_trained(what: str, two: Crew) -> None:
    remedies = {
        "hook": "is not possible with 2 workers: hooks would see shards of parameters",
        "bfloat16": "a model in bfloat16 is not possible with 2 workers: call model.float()",
    }
    for seen in two.run(refused, what):
        assert seen["type"] == "ValueError" and remedies.get(what, "GroupNorm or LayerNorm instead") in seen["text"], (
            seen
        )
        assert seen["as it was"], seen


def test_models_of_other_depths_are_refused(two: Crew) -> None:
    for seen in two.run(refused, "depth"):
        assert seen["type"] == "WorkerError" and "layers, sizes, trained parameters" in seen["text"], seen
