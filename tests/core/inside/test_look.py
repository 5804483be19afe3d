"""A look inside: figures are those of plain hooks on a copy in core, and training goes on to the bit as if nobody had looked."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from small import assert_same, keys, make_batch, make_gpt, make_relay, whole
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM

from l2l_core import Drop, EmulatedDevice, Relay, RelayConfig
from l2l_core.inside import BINS, ActivationStats, Inside, LayerObservation
from l2l_core.inside.attention_maps import AttentionMaps

BATCH = make_batch(5)


def in_core(relay: Relay, layers: int | None = None) -> Any:
    """A copy of the model in evaluation mode, with its first layers only."""
    model: Any = copy.deepcopy(relay.model).eval()
    model.transformer.h = model.transformer.h[: layers or len(model.transformer.h)]
    return model


def part(batch: dict[str, torch.Tensor], k: int) -> dict[str, torch.Tensor]:
    """Micro-batch k of two."""
    return {name: tensor[2 * k : 2 * k + 2] for name, tensor in batch.items()}


def hooked(model: Any, batch: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What enters and what leaves each layer in plain PyTorch."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for block in model.transformer.h:
        block.register_forward_hook(
            lambda _, args, out: found.append((args[0], out[0] if isinstance(out, tuple) else out))
        )
    with torch.no_grad():
        model(**batch, use_cache=False)
    return found


def check_spread(spread: ActivationStats | None, tensor: torch.Tensor) -> None:
    assert spread is not None
    exact = tensor.double()
    assert spread.count == tensor.numel() and spread.broken == 0
    for mine, theirs in (
        (spread.mean, exact.mean()),
        (spread.deviation, exact.std(correction=0)),
        (spread.rms, exact.square().mean().sqrt()),
        (spread.zeros, (exact == 0).double().mean()),
    ):
        assert mine == pytest.approx(float(theirs), rel=1e-9, abs=1e-12)
    low, high = (
        max(float(exact.min()), spread.mean - 4 * spread.deviation),
        min(float(exact.max()), spread.mean + 4 * spread.deviation),
    )
    assert (spread.low, spread.high) == pytest.approx((low, high), rel=1e-9)
    edges = torch.linspace(spread.low, spread.high, BINS + 1, dtype=torch.float64)
    counts = [
        int(((exact >= a) & ((exact < b) if i < BINS - 1 else (exact <= b))).sum())
        for i, (a, b) in enumerate(zip(edges[:-1], edges[1:], strict=True))
    ]
    assert sum(abs(a - b) for a, b in zip(spread.counts, counts, strict=True)) <= 2, "an edge may round"
    assert sum(spread.counts) + spread.outside == tensor.numel()


@pytest.mark.parametrize("stash", ["device", "host"])
def test_figures_are_those_of_plain_hooks(stash: Any) -> None:
    with make_relay(make_gpt(), config=RelayConfig(micro_batches=2, stash=stash)) as relay:
        relay.step(make_batch())
        seen = relay.look(BATCH, micro_batches=[1, 0], row=1, positions=5)
        assert [(one.key, one.micro_batch, one.visit) for one in seen.passings] == [
            (key, k, visit) for visit, key in enumerate(keys(relay)) for k in (0, 1)
        ]
        for k in (0, 1):
            expected = hooked(in_core(relay), part(BATCH, k))
            for one, (came, left) in zip([p for p in seen.passings if p.micro_batch == k], expected, strict=True):
                check_spread(one.entered, came)
                check_spread(one.left, left)
                added = float((left - came).double().norm() / came.double().norm())
                cosine = float(functional.cosine_similarity(came.double(), left.double(), dim=-1).mean())
                assert (one.added, one.cosine) == pytest.approx((added, cosine), rel=1e-6)
                at = ((left - came).norm(dim=-1) / came.norm(dim=-1))[1, :5]
                assert one.added_at is not None
                torch.testing.assert_close(one.added_at, at, rtol=1e-5, atol=0)
            assert torch.equal(seen.tokens[k], part(BATCH, k)["input_ids"][1])
        assert seen.step == 1 and seen.branch == "main" and seen.passes == 2 and seen.seconds > 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_maps_are_those_of_the_model(attention: str) -> None:
    model: Any = make_gpt()
    model.set_attn_implementation(attention)
    with make_relay(model) as relay:
        for _ in range(3):
            relay.step(make_batch())
        seen = relay.look(BATCH, [0, 3], row=1, positions=6, attention=True)
        plain = in_core(relay)
        plain.set_attn_implementation("eager")
        with torch.no_grad():
            expected = plain(**part(BATCH, 0), output_attentions=True, use_cache=False).attentions
        assert [one.key for one in seen.passings] == ["L000", "L003"]
        for one, at in zip(seen.passings, (0, 3), strict=True):
            (found,) = one.attention
            assert found.shape == (2, 6, 6) and not one.why_no_attention
            torch.testing.assert_close(found, expected[at][1, :, :6, :6], rtol=1e-5, atol=1e-6)
            assert found.sum(-1) == pytest.approx(1.0, abs=1e-5) and found[0, 0, 1] == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.7},
        {"attn_mask": torch.randn(5, 5, generator=torch.Generator().manual_seed(1))},
        {"attn_mask": torch.ones(2, 1, 5, 5).tril().bool()},
        {"enable_gqa": True},
    ],
    ids=str,
)
def test_maps_of_a_fused_attention_are_its_weights(options: dict[str, Any]) -> None:
    """With the identity for values, what the attention gives out is its weights."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8), torch.eye(5).expand(2, 4, 5, 5)
    k, v = (k[:, :2], v[:, :2]) if "enable_gqa" in options else (k, v)
    with AttentionMaps(2, 1, 5) as maps:
        out = functional.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(maps.maps[0], out[1], rtol=1e-5, atol=1e-6)


def test_looking_at_attention_changes_no_bit_of_what_flows() -> None:
    with make_relay(make_gpt()) as relay:
        without, with_maps = relay.look(BATCH), relay.look(BATCH, attention=True)
        for a, b in zip(without.passings, with_maps.passings, strict=True):
            assert (a.entered, a.left, a.added) == (b.entered, b.left, b.added)


class Encoder(nn.Module):
    """PyTorch's own layers: with maps of fused attention, of `MultiheadAttention` with its own, and none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        make = {
            "fused": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True),
            "none": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        }[kind]
        self.layers = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


def make_encoder(kind: str) -> Relay:
    torch.manual_seed(0)
    model = Encoder(kind)
    return Relay(
        model,
        partial(torch.optim.SGD, lr=0.1),
        EmulatedDevice(),
        list(model.layers),
        lambda y, batch: functional.cross_entropy(y, batch[1]),
        config=RelayConfig(micro_batches=2),
    )


VECTORS = (torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0]))


def test_pytorchs_own_layers_give_maps() -> None:
    with make_encoder("fused") as relay:
        model: Any = relay.model
        seen = relay.look(VECTORS, attention=True, row=1)
        plain = copy.deepcopy(model).eval()
        with torch.no_grad():
            x = plain.stem(VECTORS[0][:2])
            for one, layer in zip(seen.passings, plain.layers, strict=True):
                expected = layer.self_attn(x, x, x, average_attn_weights=False)[1]
                torch.testing.assert_close(one.attention[0], expected[1], rtol=1e-5, atol=1e-6)
                x = layer(x)


def test_a_layer_without_attention_says_so() -> None:
    with make_encoder("none") as relay:
        seen = relay.look(VECTORS, attention=True)
        assert all(not one.attention and "calls no attention" in one.why_no_attention for one in seen.passings)
        assert not any(one.why_no_attention for one in relay.look(VECTORS).passings)


def test_a_compiled_layer_says_so() -> None:
    with make_encoder("none") as made:
        model: Any = made.model
    for layer in model.layers:
        layer.compile(backend="eager")
    with Relay(model, device=EmulatedDevice(), layers=list(model.layers), objective=objective_of_rows) as relay:
        assert "is compiled" in relay.look(VECTORS, attention=True).passings[0].why_no_attention


def objective_of_rows(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


# The head at each depth -----------------------------------------------------------------------------------------------


def test_the_lens_is_the_model_with_its_first_layers() -> None:
    with make_relay(make_gpt()) as relay:
        for _ in range(3):
            relay.step(make_batch())
        seen = relay.look(BATCH, [0, 2, 3], micro_batches=[0, 1], row=1, positions=5, lens=True, top=4)
        assert [(one.layers, one.micro_batch) for one in seen.depths] == [(n, k) for n in (1, 3, 4) for k in (0, 1)]
        for one in seen.depths:
            with torch.no_grad():
                outputs = in_core(relay, one.layers)(**part(BATCH, one.micro_batch), use_cache=False)
            assert one.loss == float(outputs.loss) and not one.why_not
            best = outputs.logits[1, :5].softmax(-1).topk(4)
            assert torch.equal(one.tokens, best.indices) and torch.equal(one.chances, best.values)
        assert seen.passes == 2 + 6


def test_layers_that_are_left_out_are_as_if_they_had_been_dropped() -> None:
    with make_relay(make_gpt()) as relay:
        relay.step(BATCH)
        core: Any = in_core(relay)
        del core.transformer.h[1]
        with torch.no_grad():
            said = core(**part(BATCH, 0), use_cache=False)
        seen = relay.look(BATCH, lens=True, generate=2, leave_out=[keys(relay)[1]])
        assert keys(relay)[1] not in seen.keys and len(seen.depths) == len(keys(relay)) - 1
        last = seen.depths[-1]
        assert last.loss == float(said.loss) and last.tokens is not None
        assert torch.equal(last.tokens[:, 0], said.logits[0].argmax(-1)[: len(last.tokens)])
        whole = relay.look(BATCH, lens=True).depths[-1]
        assert whole.loss != last.loss and whole.layers == last.layers + 1
        with pytest.raises(ValueError, match="all layers are left out, so that none can be inspected"):
            relay.look(BATCH, leave_out=keys(relay))
        with pytest.raises(ValueError, match="no layer"):
            relay.look(BATCH, [keys(relay)[1]], leave_out=[keys(relay)[1]])


def test_what_is_written_is_greedy_decoding_with_the_first_layers() -> None:
    model = make_gpt()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(8)  # so that each layer has something to say
    with make_relay(model) as relay:
        seen = relay.look(BATCH, [0, 3], micro_batches=[1], row=1, positions=4, generate=3)
        assert seen.prompt == 4 and [one.layers for one in seen.written] == [1, 4]
        for one in seen.written:
            row = part(BATCH, 1)["input_ids"][1:, :4]
            for _ in range(3):
                with torch.no_grad():
                    logits = in_core(relay, one.layers)(row, use_cache=False).logits
                row = torch.cat([row, logits[:, -1:].argmax(-1)], 1)
            assert one.tokens == tuple(row[0, 4:].tolist())
        assert len({one.tokens for one in seen.written}) == 2, "depths that say the same show nothing"


def test_a_model_that_does_not_write_from_left_to_right_says_so() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=0.5,
    )
    with make_relay(BertForMaskedLM(config)) as relay:
        (one, two) = relay.look(BATCH, generate=2).written
        assert "its attention is not causal" in one.why_not == two.why_not and not one.tokens


def test_a_prompt_gives_way_to_what_is_written() -> None:
    with make_relay(make_gpt()) as relay:
        assert relay.look(BATCH, [0], positions=8, generate=6).prompt == 2


def test_a_classifier_has_a_lens_of_one_position() -> None:
    with make_encoder("fused") as relay:
        seen = relay.look(VECTORS, lens=True, row=1)
        whole_model = seen.depths[-1]
        with torch.no_grad():
            logits = relay.model.eval()(VECTORS[0][:2])
        assert whole_model.tokens is not None and whole_model.tokens.shape == (1, 3)
        assert whole_model.tokens[0, 0] == logits[1].argmax() and not seen.tokens


def test_an_output_of_one_number_is_none_of_tokens() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    with Relay(
        model, device=EmulatedDevice(), layers=list(model)[:2], loss=lambda y, batch: y.square().mean()
    ) as relay:
        batch = torch.randn(4, 4), torch.zeros(4)
        last = relay.look(batch, lens=True).depths[-1]
        assert last.loss == relay.evaluate(batch) and last.tokens is None and "no logits of shape" in last.why_not


def test_a_depth_that_cannot_be_run_says_why() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    layers = [model[0], model[1]]
    loss = partial(_cross_entropy)
    with Relay(model, partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), layers, loss) as relay:
        batch = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
        before = whole(relay)
        short, full = relay.look(batch, lens=True).depths
        assert short.loss is None and short.why_not and full.loss == pytest.approx(relay.evaluate(batch))
        assert_same(whole(relay), before)


def _cross_entropy(outputs: torch.Tensor, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(outputs, batch[1])


# Nothing changes ------------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout and BatchNorm; counts its calls in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        torch.rand(1)
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


def make_noisy(stash: Any, depth: int = 3) -> Relay:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), *(Noisy() for _ in range(depth)), nn.Linear(8, 3))
    config = RelayConfig(micro_batches=2, stash=stash)
    adam = partial(torch.optim.AdamW, lr=1e-2)
    # No other evaluations than those of a test.
    options: dict[str, Any] = {"config": config, "loss_over": "micro-batch"}
    return Relay(model, adam, EmulatedDevice(), list(model)[1:-1], _cross_entropy, **options)


def noisy_batch(seed: int, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_training_goes_on_as_if_nobody_had_looked(stash: Any) -> None:
    with make_noisy(stash) as relay, make_noisy(stash) as alone:
        for step in range(4):
            before, stats = whole(relay), [dict(unit.stats) for unit in relay.stack]
            modes, counted = [m.training for m in relay.model.modules()], [m.seen for m in list(relay.model)[1:-1]]
            held = relay.trace, relay.host.by_category(), relay.device.ledger.by_category()
            relay.look(noisy_batch(9), attention=True, lens=True, micro_batches=[1], row=1)
            assert_same(whole(relay), before)
            assert [unit.stats for unit in relay.stack] == stats
            assert [m.training for m in relay.model.modules()] == modes
            assert [m.seen for m in list(relay.model)[1:-1]] == counted
            assert not any(module._forward_hooks for module in relay.model.modules())
            assert (relay.trace, relay.host.by_category(), relay.device.ledger.by_category()) == held
            assert relay.step(noisy_batch(step)).loss == alone.step(noisy_batch(step)).loss
        assert_same(whole(relay), whole(alone))


def test_a_decoder_trains_on_as_if_nobody_had_looked() -> None:
    """With dropout, after edits, and with one to do again."""
    with make_relay(make_gpt()) as relay, make_relay(make_gpt()) as alone:
        for each in (relay, alone):
            each.step(make_batch(0))
            each.apply(Drop(1))
            each.undo()
        for step in range(3):
            relay.look(BATCH, attention=True, lens=True, generate=2, positions=4)
            assert relay.step(make_batch(step)).loss == alone.step(make_batch(step)).loss
        relay.redo(), alone.redo()
        assert keys(relay) == keys(alone)
        assert_same(whole(relay), whole(alone))


def test_device_memory_does_not_grow_with_depth() -> None:
    peaks = []
    for depth in (3, 12):
        with make_noisy("host", depth) as relay:
            relay.device.ledger.reset_peak()
            relay.look(noisy_batch(0, 400))
            peaks.append(relay.device.ledger.peak)
    assert peaks[0] == peaks[1]


def test_no_activation_is_held_while_layers_pass_by() -> None:
    """As many are alive in the last layer of a look as in that of an evaluation."""
    alive: list[int] = []

    def count(*_: object) -> None:
        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.shape == (200, 8)]
        alive.append(len(tensors))

    with make_noisy("device", 8) as relay:
        list(relay.model)[-2].linear.register_forward_hook(count)
        relay.evaluate(noisy_batch(0, 400))
        relay.look(noisy_batch(0, 400), micro_batches=[0, 1])
        assert alive[:2] == alive[2:]


def test_what_is_kept_is_small_and_counted() -> None:
    with make_relay(make_gpt()) as relay:
        seen = relay.look(BATCH, [1], positions=4, attention=True, lens=True, top=2)
        (one,) = seen.passings
        assert one.nbytes == 2 * 4 * 4 * 4 + 4 * 4 + 2 * BINS * 8
        assert seen.depths[0].nbytes == 4 * 2 * (8 + 4)
        assert seen.nbytes == one.nbytes + seen.depths[0].nbytes + 8 * 8
        for tensor in held_tensors(one, seen):
            assert tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() == tensor.nbytes, (
                "it holds a batch"
            )


def held_tensors(one: LayerObservation, seen: Inside) -> list[torch.Tensor]:
    found = [*one.attention, one.added_at, seen.depths[0].tokens, seen.depths[0].chances, *seen.tokens.values()]
    return [tensor for tensor in found if tensor is not None]


# Numbers that are hard ------------------------------------------------------------------------------------------------


def test_numbers_that_are_not_finite_are_counted_apart() -> None:
    with make_noisy("device", 2) as relay:
        x, y = noisy_batch(0)
        x[0, 0] = float("inf")
        seen = relay.look((x, y)).passings[0].left
        assert seen is not None and seen.broken > 0 and sum(seen.counts) + seen.outside == seen.count - seen.broken
        nothing = relay.look((x * float("nan"), y)).passings[0].left
        assert nothing is not None and nothing.broken == nothing.count and nothing.counts == ()


def test_a_constant_has_a_bin_of_its_own() -> None:
    with make_noisy("device", 2) as relay:
        for param in relay.model.parameters():
            with torch.no_grad():
                param.zero_()
        spread = relay.look(noisy_batch(0)).passings[0].left
        assert spread is not None and spread.zeros == 1.0 and spread.counts[BINS // 2] == spread.count


# Refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": [9]}, "9"),
        ({"layers": "L001"}, "is not a collection of layers: give a list"),
        ({"layers": []}, "names no layer"),
        ({"micro_batches": [2]}, "numbers 0 to 1"),
        ({"micro_batches": []}, "numbers 0 to 1"),
        ({"row": 2}, "from 0 to 1"),
        ({"positions": 0}, "at least 1"),
        ({"top": 0}, "at least 1"),
        ({"generate": -1}, "at least 0"),
        ({"generate": 8}, "at most 7"),
    ],
)
def test_what_there_is_not_is_refused(options: dict[str, Any], words: str) -> None:
    with make_relay(make_gpt()) as relay:
        before = whole(relay)
        with pytest.raises((ValueError, TypeError, IndexError), match=words):
            relay.look(BATCH, **options)
        assert_same(whole(relay), before)


def test_without_tokens_nothing_is_written() -> None:
    with make_noisy("device") as relay, pytest.raises(ValueError, match="the batch has no tokens"):
        relay.look(noisy_batch(0), generate=1)


# Other batches, other settings ----------------------------------------------------------------------------------------


def test_an_objective_over_tuples_is_looked_at_alike() -> None:
    def objective(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        logits = model(batch[0], use_cache=False).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[1][:, 1:].flatten())

    options: dict[str, Any] = {"lens": True, "generate": 2, "positions": 4, "row": 1}
    tokens = BATCH["input_ids"]
    with make_relay(make_gpt()) as relay, make_relay(make_gpt(), objective=objective) as other:
        mine, its = relay.look(BATCH, **options), other.look((tokens, tokens), **options)
    assert [one.left for one in mine.passings] == [one.left for one in its.passings]
    assert [one.loss for one in mine.depths] == pytest.approx([one.loss for one in its.depths])
    assert mine.written == its.written and not mine.written[0].why_not


def test_in_bfloat16_figures_are_those_of_the_low_precision() -> None:
    with make_relay(make_gpt(), config=RelayConfig(micro_batches=2, precision="bf16")) as relay:
        seen = relay.look(BATCH, attention=True, lens=True, generate=1)
        with make_relay(make_gpt()) as exact:
            other = exact.look(BATCH, attention=True)
        for low, high in zip(seen.passings, other.passings, strict=True):
            assert low.left is not None and high.left is not None
            assert low.left.rms == pytest.approx(high.left.rms, rel=0.02) and low.left.rms != high.left.rms
            torch.testing.assert_close(low.attention[0], high.attention[0], rtol=0, atol=0.01)


def test_the_batch_stays_as_it_is() -> None:
    with make_relay(make_gpt(), config=RelayConfig(micro_batches=1)) as relay:  # one that is not cut
        batch = make_batch(5)
        relay.look(batch, generate=3, row=2)
        assert torch.equal(batch["input_ids"], BATCH["input_ids"])


def test_micro_batches_that_take_turns_after_the_head_are_not_mixed_up() -> None:
    def objective(model: Any, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        outputs = model(batch[0])
        again = model.layers[0](model.stem(batch[0]))  # the other micro-batch has its outputs before this one goes on
        return functional.cross_entropy(outputs, batch[1]) + 0 * again.sum()

    torch.manual_seed(0)
    model = Encoder("none")
    config = RelayConfig(micro_batches=2)
    with Relay(model, device=EmulatedDevice(), layers=list(model.layers), objective=objective, config=config) as relay:
        both = relay.look(VECTORS, [2], micro_batches=[0, 1], lens=True).depths
        for k, one in enumerate(both):
            (alone,) = relay.look(VECTORS, [2], micro_batches=[k], lens=True).depths
            assert alone.chances is not None and torch.equal(one.chances, alone.chances)
        assert not torch.equal(both[0].chances, both[1].chances)
