"""Broken plans of pipelines are refused with the action, the rule and a remedy; the remedy mends the plan."""

import random

import pytest

from l2l_core.pipelines import (
    SCHEDULES,
    PipelineError,
    PipelinePlan,
    check_pipeline,
    gpipe,
    one_forward_one_backward,
    simulate_pipeline,
)

BROKEN = [  # text, words of the message, the plan after the remedy
    (
        "pipeline x micro_batches=1\n0 | 0F0 0B0\n1 | 1B0 1F0",
        "action 0 of rank 1 (1B0): it needs 1F0, which runs later. Remedy: move it behind 1F0",
        "pipeline x micro_batches=1\n0 | 0F0 0B0\n1 | 1F0 1B0",
    ),
    (
        "pipeline x micro_batches=1\n0 | 0F0 1F0 0B0\n1 | 1B0",
        "(1B0): the weights of stage 1 are on rank 0. Remedy: move it to rank 0",
        "pipeline x micro_batches=1\n0 | 0F0 1F0 1B0 0B0",
    ),
    (
        "pipeline x micro_batches=1\n0 | 0F0 0F1 0B0",
        "action 1 of rank 0 (0F1): there are 1 micro-batches. Remedy: name one from 0 to 0",
        "pipeline x micro_batches=1\n0 | 0F0 0B0",
    ),
    (
        "pipeline x micro_batches=1\n0 | 0F0 0B0 0F0",
        "action 2 of rank 0 (0F0): it is in the plan twice. Remedy: remove it",
        "pipeline x micro_batches=1\n0 | 0F0 0B0",
    ),
    (
        "pipeline x micro_batches=1\n0 | 0F0 0B0 0I0 0W0",
        "action 1 of rank 0 (0B0): 0I0 is a part of the same backward. Remedy: remove it, or 0I0",
        "pipeline x micro_batches=1\n0 | 0F0 0I0 0W0",
    ),
    (
        "pipeline x micro_batches=1\n0 | 0F0 0W0",
        "action 1 of rank 0 (0W0): it needs 0I0, which is missing. Remedy: add 0I0 before it",
        "pipeline x micro_batches=1\n0 | 0F0 0I0 0W0",
    ),
    (
        "pipeline x micro_batches=1\n0 | 0F0 0I0",
        "at the end of rank 0: 0W0 is missing. Remedy: append 0W0",
        "pipeline x micro_batches=1\n0 | 0F0 0I0 0W0",
    ),
    (
        "pipeline x micro_batches=2\n0 | 0F0 0B0 0B1 0F1\n1 | 1F0 1F1 1B0 1B1",
        "action 2 of rank 0 (0B1): it needs 0F1, which runs later. Remedy: move it behind 0F1",
        "pipeline x micro_batches=2\n0 | 0F0 0F1 0B0 0B1\n1 | 1F0 1F1 1B0 1B1",
    ),
    (
        "pipeline x micro_batches=2\n0 | 0F0 0B0 0F1 0B1\n1 | 1F0 1F1 1B0 1B1",
        "action 1 of rank 0 (0B0): it needs 1B0, which never runs before it. Remedy: move 1B0 before 1F1 on rank 1, or 0B0",
        "pipeline x micro_batches=2\n0 | 0F0 0B0 0F1 0B1\n1 | 1F0 1B0 1F1 1B1",
    ),
    (
        "pipeline x micro_batches=1 weights=host\n0 | 0F0\n1 | 1F0 1B0 0B0",
        "action 2 of rank 1 (0B0): it reads what 0F0 leaves on another rank. Remedy: move it to rank 0, or add 0R0 before it",
        "pipeline x micro_batches=1 weights=host\n0 | 0F0\n1 | 1F0 1B0 0R0 0B0",
    ),
    ("pipeline x micro_batches=1\n0 |", "the plan has no action. Remedy", "pipeline x micro_batches=1\n0 | 0F0 0B0"),
]  # fmt: skip


@pytest.mark.all_cases
@pytest.mark.parametrize(("text", "words", "mended"), BROKEN)
def test_broken_plans(text: str, words: str, mended: str) -> None:
    with pytest.raises(PipelineError) as caught:
        check_pipeline(PipelinePlan.parse(text))
    assert words in str(caught.value)
    check_pipeline(PipelinePlan.parse(mended))


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plan", "first line"),
        ("pipeline x micro_batches=1\n1 | 0F0", "the line of rank 0"),
        ("pipeline x micro_batches=1\n0 | 0F", "'0F' in"),
    ],
)
def test_text_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PipelinePlan.parse(text)


def test_random_edits_are_refused_or_run() -> None:
    """Two actions exchanged, or one removed: the check refuses what the simulator could not finish, and nothing else."""
    chance, refused = random.Random(0), 0
    for _ in range(300):
        plan = SCHEDULES[chance.choice(["1F1B", "ZB-H1", "Varuna", "Relay", "Interleaved1F1B"])](3, 3, 2)
        ranks = [list(actions) for actions in plan.ranks]
        actions = chance.choice(ranks)
        i, j = chance.randrange(len(actions)), chance.randrange(len(actions))
        if chance.random() < 0.2:
            del actions[i]
        else:
            actions[i], actions[j] = actions[j], actions[i]
        edited = PipelinePlan("edited", 3, tuple(map(tuple, ranks)), plan.weights_on_host)
        try:
            check_pipeline(edited)
        except PipelineError as error:
            refused += 1
            assert "Remedy" in str(error) and 0 <= error.index <= len(edited.ranks[error.rank])
            continue
        assert simulate_pipeline(edited).seconds > 0 and all(len(r) for r in edited.ranks)
    assert 60 < refused < 290


def test_costs_for_another_plan_are_refused() -> None:
    from l2l_core.pipelines import RankSpeeds, StageCost

    with pytest.raises(ValueError, match="costs of 3 stages for a plan of 2"):
        simulate_pipeline(gpipe(2, 2), [StageCost()] * 3)
    with pytest.raises(ValueError, match="slowdown of 3 ranks for a plan of 2"):
        simulate_pipeline(one_forward_one_backward(2, 2), speeds=RankSpeeds(slowdown=(1, 1, 1)))
