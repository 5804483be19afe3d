"""Pipelines of two real processes equal plain training to the bit, with the bytes that are foreseen."""

from typing import Any

import pytest
from crew import Crew
from crew_pipelines import PipelineCase, foreseen_bytes, gradients_in_order, refused, train_in_pipeline
from zoo import BY_NAME

from l2l_core.parallel import PipelineJob

CASES = [
    PipelineCase("gpt2"),
    PipelineCase("t5"),
    PipelineCase("resnet"),
    PipelineCase("llama", "Varuna"),
    PipelineCase("chain", "Interleaved1F1B", v=2),
    PipelineCase("chain", "ZB-H1"),
    PipelineCase("gpt2", "ZBV", v=2),
    PipelineCase("chain", "1F1B", schedule="1F1B"),
]
SLOW_CASES = [
    PipelineCase("bert", "GPipe"),
    PipelineCase("chain", "DualPipeV", v=2),
    PipelineCase("bert", schedule="GPipe"),
]
SLOW_KINDS = ["residual_outside", "tied_layers", "batch_norm", "albert", "bart", "whisper", "vit", "swin"]


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


def test_treated_stages_keep_the_bits_and_save_the_foreseen_bytes(two: Crew) -> None:
    """torch's runtime keeps the output of every micro-batch in flight, which a record contains and a kept input does not."""
    held, foreseen, outputs = {}, {}, 0
    for letters in ("KKKKK", "RRRRK", "OOOOK", "KROHK"):
        case = PipelineCase("chain", letters=letters, options={"bounds": [0, 2]})
        answers = two.run(train_in_pipeline, case)
        check(answers, case)
        outputs = answers[0]["messages"][1][1]
        held[letters] = [answer["report"].held_bytes for answer in answers]
        host = [answer["report"].host_bytes for answer in answers]
        foreseen[letters] = two.run(foreseen_bytes, case)
        assert all(
            (nbytes > 0) == (stage[1] > 0) for nbytes, stage in zip(host[1:], foreseen[letters][1:], strict=True)
        )
    for rank, in_flight in enumerate((2, 0)):
        saved = foreseen["KKKKK"][rank][0] - foreseen["RRRRK"][rank][0] - in_flight * outputs
        assert held["KKKKK"][rank] - held["RRRRK"][rank] == pytest.approx(saved, abs=16) and saved > 20_000
        assert held["RRRRK"][rank] < held["KROHK"][rank] + 5000 and held["OOOOK"][rank] < held["KKKKK"][rank]


REFUSALS = {
    PipelineCase("chain", micro_batches=3): ("shapes differ", 7),
    PipelineCase("chain", v=3, plan="Interleaved1F1B"): ("layer calls for 6 stages", 0),
    PipelineCase("chain", "ZB-H1", letters="RRRRK", options={"bounds": [0, 2]}): ("choose one_forward_one_backward", 0),
    PipelineCase("mixtral"): (
        "return the tensor from the layer",
        0,
    ),  # its router's logits leave the layers through hooks
    PipelineCase("chain", "Varuna", schedule="1F1B"): ("leave schedule out", 0),
    PipelineCase("chain", "Relay"): ("Choose another schedule", 0),
    PipelineCase("chain", options={"bounds": [1, 2]}): ("from 0 to", 0),
}


@pytest.mark.all_cases
@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_refusals_have_a_remedy(case: PipelineCase, two: Crew) -> None:
    words, rows = REFUSALS[case]
    assert all(words in message for message in two.run(refused, case, rows))


def test_a_torch_whose_pipelines_take_no_integers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = BY_NAME["chain"]
    monkeypatch.setattr("torch.__version__", "2.11.0+cu130")
    with pytest.raises(RuntimeError, match="Install torch 2.13 or newer, or train with a Relay or run_parallel"):
        PipelineJob.of(kind.make_model(), kind.make_batch(4, 0), 2, kind.loss)


def test_one_loss_over_the_batch_is_refused() -> None:
    kind, words = BY_NAME["chain"], 'loss_over="micro-batch" for the mean'
    model, batch = kind.make_model(), kind.make_batch(4, 0)
    with pytest.raises(ValueError, match=words):
        PipelineJob.of(model, batch, 2, loss=kind.loss, loss_over="batch")
    assert PipelineJob.of(model, batch, 2, loss=kind.loss, loss_over="micro-batch").divisors == [2.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SLOW_CASES, *map(PipelineCase, SLOW_KINDS)], ids=str)
def test_more_kinds_equal_plain_training(case: PipelineCase, two: Crew) -> None:
    check(two.run(train_in_pipeline, case), case)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["GPipe", "1F1B", "Varuna", "ZB-H1"])
def test_four_ranks_equal_plain_training(plan: str, four: Crew) -> None:
    case = PipelineCase("chain", plan)
    check(four.run(train_in_pipeline, case), case)
