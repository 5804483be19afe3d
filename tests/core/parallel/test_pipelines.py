"""Pipelines of two real processes equal plain training to the bit, with the bytes that are foreseen."""

from typing import Any

import pytest
from crew import Crew
from crew_pipelines import PipelineCase, foreseen_bytes, gradients_in_order, refused, train_in_pipeline

CASES = [
    PipelineCase("gpt2"),
    PipelineCase("bert", "GPipe"),
    PipelineCase("t5"),
    PipelineCase("resnet"),
    PipelineCase("llama", "Varuna"),
    PipelineCase("chain", "Interleaved1F1B", v=2),
    PipelineCase("chain", "ZB-H1"),
    PipelineCase("gpt2", "ZBV", v=2),
    PipelineCase("chain", "DualPipeV", v=2),
    PipelineCase("chain", "GPipe-recompute", options={"bounds": [0, 2]}),
    PipelineCase("chain", "1F1B", schedule="1F1B"),
]
SLOW_KINDS = ["residual_outside", "tied_layers", "batch_norm", "albert", "bart", "whisper", "vit", "swin", "mixtral"]


def check(answers: list[dict[str, Any]], case: PipelineCase) -> None:
    for rank, answer in enumerate(answers):
        assert not answer["differ"], (rank, answer["differ"])
    losses = [answer["losses"] for answer in answers if answer["losses"][0] is not None]
    assert losses == [answers[0]["expected"]]
    assert sorted({name for answer in answers for name in answer["names"]}) == answers[0]["every"]
    m, messages = case.micro_batches, answers[0]["messages"]
    sent = sum(answer["report"].sent_bytes for answer in answers)
    local = {len(messages) // 2} if case.plan in ("ZBV", "DualPipeV") else set()  # from one stage to the next on a rank
    assert sent == m * sum(sum(each) for stage, each in enumerate(messages) if stage not in local)


@pytest.mark.all_cases
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_equal_plain_training(case: PipelineCase, two: Crew) -> None:
    answers = two.run(train_in_pipeline, case)
    if case.plan != "GPipe-recompute":  # its backward begins with the last micro-batch
        check(answers, case)
    for rank, answer in enumerate(answers):
        kinds = [event.kind for event in answer["report"].trace.events if event.lane == "compute"]
        assert {"forward", "backward"} == {*kinds}, rank


def test_gradients_are_added_in_the_order_of_the_schedule(two: Crew) -> None:
    case = PipelineCase("chain", "LoopedBFS", v=2)
    assert two.run(gradients_in_order, case, [3, 2, 1, 0]) == [[], []]
    assert any(two.run(gradients_in_order, case, [0, 1, 2, 3]))
    case = PipelineCase("chain", "GPipe-recompute", options={"bounds": [0, 2]})
    assert two.run(gradients_in_order, case, [3, 2, 1, 0]) == [[], []]


@pytest.mark.all_cases
@pytest.mark.parametrize("letters", ["KKKKK", "RRRRK", "OOOOK", "HHHHK", "KROHK"])
def test_treated_stages_keep_the_bits_and_the_foreseen_bytes(letters: str, two: Crew) -> None:
    case = PipelineCase("chain", letters=letters, options={"bounds": [0, 2]})
    answers = two.run(train_in_pipeline, case)
    check(answers, case)
    print([(a["report"].held_bytes, a["report"].peak_bytes, a["report"].host_bytes) for a in answers])
    print(two.run(foreseen_bytes, case))
