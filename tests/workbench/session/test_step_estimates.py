"""Counts of operations against formulas, and the estimate for a model that cannot run without values."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import zoo
from sessions import WIDTH, make_batches, noisy_relay
from transformers import GPT2Config, GPT2LMHeadModel

from l2l_core import EmulatedDevice, Freeze, Loops, Relay, RelayConfig, StepResult, Unfreeze, Unroll
from workbench.session.step_estimates import FLOP_ESTIMATE, FLOP_FORMULA, FlopCounter, count_tokens, estimate_flop

LAYERS, WORDS, LENGTH, ROWS, DIM = 3, 50, 16, 4, 32


def counted(counter: FlopCounter, batch: Any, result: StepResult) -> int:
    return counter.count(batch, result.trace, result.samples)


@pytest.mark.all_cases
@pytest.mark.parametrize("dropout", [0.0, 0.1])  # fused attention, and attention of plain products
def test_gpt2_has_the_operations_of_its_formula(dropout: float) -> None:
    shape = {"n_layer": LAYERS, "n_embd": DIM, "n_head": 2, "vocab_size": WORDS, "n_positions": LENGTH}
    rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    model = GPT2LMHeadModel(GPT2Config(**shape, **rates, bos_token_id=0, eos_token_id=0)).train()
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(WORDS, (ROWS, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    config = RelayConfig(micro_batches=2, verify="never")
    with Relay(model, partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), config=config) as relay:
        counter, result = FlopCounter(relay), relay.step(batch)
        before = torch.get_rng_state()
        flop = counted(counter, batch, result)
        assert torch.equal(torch.get_rng_state(), before)
    # Per token: weights of attention (4 d²) and of the MLP (8 d²), and two products of attention with `LENGTH` positions.
    layer = ROWS * LENGTH * 2 * (12 * DIM**2 + 2 * LENGTH * DIM)
    head = ROWS * LENGTH * 2 * DIM * WORDS
    # Backward has twice the products of forward; the relay's recompute does not count.
    assert flop == 3 * (LAYERS * layer + head)
    assert counter.formula == FLOP_FORMULA


def test_frozen_layers_below_the_first_trained_one_have_no_backward() -> None:
    batch = make_batches(1)[0]
    with noisy_relay() as relay:
        for param in relay.shell.params:
            param.requires_grad_(False)
        relay.apply(Freeze(0), Freeze(1))
        counter, result = FlopCounter(relay), relay.step(batch)
        layer, first, last = WIDTH * WIDTH, 4 * WIDTH, WIDTH
        # Two layers run forward only. The third, whose input needs no gradient, has one product in backward, the last has two.
        # The end of the shell, which is frozen, has one.
        assert counted(counter, batch, result) == 6 * 2 * (first + 2 * last + 2 * layer + 2 * layer + 3 * layer)
        relay.apply(Unfreeze(0), Unfreeze(1))
        whole = counted(counter, batch, relay.step(batch))
        assert counted(counter, batch, relay.step(batch, skip=[2])) == whole - 6 * 2 * 3 * layer


def test_an_edit_is_counted_anew_and_a_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.session import step_estimates

    runs, count = [], step_estimates._count_products
    monkeypatch.setattr(step_estimates, "_count_products", lambda *args: runs.append(1) or count(*args))
    batch, short = make_batches(1)[0], tuple(part[:3] for part in make_batches(1)[0])
    with noisy_relay() as relay:
        counter = FlopCounter(relay)
        whole = [counted(counter, batch, relay.step(batch)) for _ in range(2)]
        half = counted(counter, short, relay.step(short))
        assert whole[0] == whole[1] == 2 * half and len(runs) == 2
        with noisy_relay() as other:
            assert (
                counted(FlopCounter(other, counter._counted), batch, other.step(batch)) == whole[0] and len(runs) == 2
            )
        relay.apply(Freeze(3))
        assert counted(counter, batch, relay.step(batch)) == whole[0] - 6 * 2 * WIDTH * WIDTH and len(runs) == 3


def test_a_model_that_needs_values_is_estimated() -> None:
    kind = zoo.BY_NAME["mixture"]
    batch = kind.make_batch()
    settings: dict[str, Any] = {"loss": kind.loss, "layers": kind.layers, "loss_over": "micro-batch"}
    with Relay(kind.make_model(), partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), **settings) as relay:
        counter, result = FlopCounter(relay), relay.step(batch)
        params = sum(p.numel() for p in relay.model.parameters())
        expected = count_tokens(batch, result.samples) * 6 * params
        assert counted(counter, batch, result) == expected and counter.formula == FLOP_ESTIMATE


def test_tokens_are_the_elements_of_the_integer_tensor() -> None:
    assert count_tokens({"input_ids": torch.ones(3, 7, dtype=torch.long), "labels": torch.ones(3)}, 3) == 21
    assert count_tokens((torch.ones(3, 7), torch.ones(3, dtype=torch.long)), 3) == 3


def test_loops_have_the_operations_of_as_many_layers() -> None:
    kind = zoo.BY_NAME["looped"]
    batch, config = kind.make_batch(4), RelayConfig(micro_batches=2, verify="never")
    with Relay(kind.make_model(), device=EmulatedDevice(), loss=kind.loss, config=config) as relay:
        counter, seen = FlopCounter(relay), list[tuple[int, int]]()
        for edit in (Loops(2), Loops(3), Unroll(), Loops(2)):
            relay.expect(batch)
            relay.apply(edit)
            result = relay.step(batch)
            seen.append((counted(counter, batch, result), estimate_flop(relay, batch, result.trace, result.samples)))
    (two, about_two), (three, about_three), unrolled, (six_twice, _) = seen
    assert unrolled == (three, about_three) and two < three < six_twice and about_two < about_three
    assert six_twice - three == 3 * (three - two)
