"""Several workers train what one would with all micro-batches: to the bit with reduce="ordered", to rounding with "sum"."""

from typing import Any

import pytest
import torch
from crew import Crew
from crew_cases import (
    Case,
    adafactor,
    bytes_held,
    fused,
    in_bf16_by_norms,
    look_at_batches,
    sgd,
    train_beside_alone,
    train_beside_plain,
    train_quantised_beside_plain,
)
from zoo import KINDS

# What changes buffers in its forward is refused, and so is what takes another way for every micro-batch
CANNOT = {"batch_norm", "resnet", "spectral_norm", "spectral_norm_old", "random_skip"}
BY_DEFAULT = ["chain", "gpt2", "bert"]
CLIPPED = {"update": "deferred", "max_grad_norm": 0.1}
CASES = [
    Case("frozen_layer", config=CLIPPED),
    Case("gpt2", config=CLIPPED | {"stash": "host"}, optimizer=fused),
    Case("chain", optimizer=sgd, micro_batches=1),
    Case("chain", optimizer=adafactor, config=CLIPPED),
    Case("chain", config={"ahead": 2, "resident": 1, "keep": 1, "rollback": True}, micro_batches=3, rows=(6, 5)),
    Case("chain", config={"ahead": 0, "stash": "host"}),
    Case("lora_int8", config=CLIPPED),
]
SLOW_CASES = [
    Case("gpt2", optimizer=adafactor),
    Case("gpt2", optimizer=in_bf16_by_norms),
    Case("gpt2_padded", micro_batches=1),
    Case("bert", config=CLIPPED | {"stash": "host"}, optimizer=fused),
    Case("tied_layers", config=CLIPPED),
    Case("albert", config={"ahead": 2}),
    Case("llama", config=CLIPPED),
]


def assert_equal(answers: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(answers):
        assert seen["losses"] == seen["expected"], f"worker {rank}: {seen}"
        assert not seen["differences"] and not seen["state differs in"], f"worker {rank}: {seen}"
        assert seen["nan"] and seen["left whole"], f"worker {rank}: {seen}"


@pytest.mark.all_cases
@pytest.mark.parametrize("name", BY_DEFAULT)
def test_two_workers_equal_plain_training(name: str, two: Crew) -> None:
    assert_equal(two.run(train_beside_plain, Case(name)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_workers_with_other_settings(case: Case, two: Crew) -> None:
    assert_equal(two.run(train_beside_plain, case))


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_adapters_on_a_quantised_base(bits: int, two: Crew) -> None:
    """Its codes, scales and tables are whole on both workers, and those of worker 0."""
    for library in ("bitsandbytes", "peft"):
        pytest.importorskip(library, reason="the extra quant is not installed")
    assert_equal(two.run(train_quantised_beside_plain, "llama", "LoRA", bits))


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
def test_two_workers_with_other_settings_of_larger_models(case: Case, two: Crew) -> None:
    assert_equal(two.run(train_beside_plain, case))


@pytest.mark.slow
@pytest.mark.parametrize("name", [k.name for k in KINDS if k.name not in CANNOT and k.name not in BY_DEFAULT])
def test_every_kind_on_two_workers(name: str, two: Crew) -> None:
    assert_equal(two.run(train_beside_plain, Case(name)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case("gpt2"), Case("bert"), Case("lora"), Case("chain", optimizer=adafactor)], ids=str
)
def test_four_workers_equal_plain_training(case: Case, four: Crew) -> None:
    assert_equal(four.run(train_beside_plain, case))


def test_layers_sit_steps_out(two: Crew) -> None:
    """As on one worker, which is compared with: layers that sit out are in no optimizer's step."""
    case = Case("gpt2", rows=(4, 4), skips=((), ("L001",), ()))
    assert_equal(two.run(train_beside_alone, case))


@pytest.mark.parametrize("name", ["chain", "gpt2"])
def test_bfloat16_weights_have_the_bits_of_one_worker(name: str, two: Crew) -> None:
    """They are cast before they are gathered."""
    assert_equal(two.run(train_beside_alone, Case(name, rows=(4, 4), config={"precision": "bf16"})))


@pytest.mark.parametrize("name", ["chain", "bert"])
def test_evaluation_is_of_the_whole_batch_and_outputs_of_each_ones_rows(name: str, two: Crew) -> None:
    for rank, seen in enumerate(two.run(look_at_batches, name)):
        assert seen["loss"] == seen["expected"]
        assert torch.equal(seen["outputs"], seen["alone"][4 * rank : 4 * rank + 4])


@pytest.mark.parametrize("name", ["chain", "gpt2"])
def test_sums_differ_by_rounding_alone(name: str, two: Crew) -> None:
    """Losses of three AdamW steps agree to 1e-6, weights to a thirtieth of a step of the learning rate, 1e-3.

    A gradient near zero makes much of its rounding in AdamW's first steps: by instruction set, 1e-6 to 2e-5 of a weight.
    """
    for seen in two.run(train_beside_plain, Case(name, reduce="sum")):
        assert seen["losses"] == pytest.approx(seen["expected"], rel=1e-6)
        assert max(seen["differences"].values(), default=0.0) < 3e-5
        assert seen["differences"], "sums were added in the order of one worker: what does this test show?"


@pytest.mark.parametrize("reduce", ["ordered", "sum"])
def test_each_worker_holds_its_share(reduce: str, two: Crew) -> None:
    """Of masters and AdamW's state, by the ledger, within 2 % of a half; gradients that wait are shares too."""
    for seen in two.run(bytes_held, reduce):
        assert seen["weights"] == pytest.approx(seen["weights alone"] / 2, rel=0.02)
        assert seen["optimizer"] == pytest.approx(seen["optimizer alone"] / 2, rel=0.02)
        assert seen["gathered"] <= 4 * seen["largest layer"] + seen["shell"]  # ahead + 2, one to spare; the shell
