"""Which dimension is the rows is not taken for granted: figures are those of the row, or it is said why there are none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from small import assert_same, make_batch, make_gpt, make_relay, whole
from torch import nn
from torch.nn import functional

from l2l_core import DeviceOutOfMemory, EmulatedDevice, Relay, RelayConfig
from l2l_core.devices import Ledger
from l2l_core.inside.activation_stats import relative_change, relative_change_by_position
from l2l_core.inside.attention_maps import AttentionMaps

ROWS, LONG, VOCABULARY = 4, 6, 11
IDS = torch.randint(1, VOCABULARY, (ROWS, LONG), generator=torch.Generator().manual_seed(0))


class Decoder(nn.Module):
    """Tokens, layers and a head; `enter` and `leave` arrange dimensions in front of the layers and behind the head."""

    def __init__(self, make_layer: Callable[[], nn.Module], enter: Any = None, leave: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.layers = nn.ModuleList(make_layer() for _ in range(2))
        self.begin_event, self.leave = enter, leave

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.stem(ids)
        x = x if self.begin_event is None else self.begin_event(x)
        for layer in self.layers:
            x = layer(x)
        x = self.head(x)
        return x if self.leave is None else self.leave(x)


def relay_of(model: Any, **options: Any) -> Relay:
    options.setdefault("device", EmulatedDevice())
    sgd = partial(torch.optim.SGD, lr=0.1)
    config = RelayConfig(micro_batches=1)
    return Relay(model, sgd, layers=list(model.layers), loss=lambda y, _: y.square().mean(), config=config, **options)


def swap(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)


def encoder_layer(batch_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)


@pytest.mark.parametrize("length", [LONG, 3])
def test_positions_that_come_first_are_not_taken_for_rows(length: int) -> None:
    ids = IDS[:, :length]
    with relay_of(Decoder(partial(encoder_layer, False), swap)) as relay, torch.no_grad():
        seen = relay.look((ids,), row=3, lens=True, attention=True, generate=1)
        expected = f"has the shape ({length}, 4, 8), and the micro-batch has 4 row(s)"
        assert all(one.added_at is None and expected in one.why_not_at for one in seen.passings)
        assert all(one.tokens is None and f"({length}, 4, 11)" in one.why_not for one in seen.depths)
        assert all("no logits of shape" in one.why_not and not one.tokens for one in seen.written)
        model: Any = relay.model.eval()
        x = model.stem(ids).transpose(0, 1)
        weights = model.layers[0].self_attn(x, x, x, average_attn_weights=False)[1]
        torch.testing.assert_close(seen.passings[0].attention[0], weights[3], rtol=1e-5, atol=1e-6)


def test_a_square_is_refused_where_tokens_tell_that_it_is_none() -> None:
    """Of 4 rows with 6 tokens, (4, 4, ...) may be rows first or four positions first."""
    with relay_of(Decoder(nn.Identity, lambda x: x[:, :4], swap)) as relay:
        seen = relay.look((IDS,), row=1, lens=True)
        assert "its first dimension may be rows or positions" in seen.passings[0].why_not_at
        assert seen.depths[0].tokens is None and "may be rows or positions" in seen.depths[0].why_not
        even = relay.look((IDS[:, :4],), row=1, lens=True)
        assert even.passings[0].added_at is not None and even.depths[0].tokens is not None


def test_rows_that_come_first_are_those_of_the_row() -> None:
    with relay_of(Decoder(partial(encoder_layer, True))) as relay, torch.no_grad():
        seen = relay.look((IDS,), row=3, lens=True, top=1)
        model: Any = relay.model.eval()
        assert seen.depths[-1].tokens is not None and not seen.depths[-1].why_not and not seen.passings[0].why_not_at
        assert torch.equal(seen.depths[-1].tokens[:, 0], model(IDS)[3].argmax(-1))


def test_flattened_logits_are_no_classes_of_rows() -> None:
    with relay_of(Decoder(partial(encoder_layer, True), leave=lambda x: x.flatten(0, 1))) as relay:
        for one in relay.look((IDS,), row=1, lens=True).depths:
            assert one.loss is not None and one.tokens is None and "(24, 11), and the micro-batch has 4" in one.why_not


def test_numbers_at_positions_are_no_tokens_where_the_batch_holds_none() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    model.layers = [model[1]]
    with relay_of(model) as relay:
        positions, rows = (relay.look((torch.randn(4, *more, 4),), lens=True).depths[0] for more in ((6,), ()))
        assert positions.tokens is None and "the batch has no tokens" in positions.why_not
        assert rows.tokens is not None and rows.tokens.shape == (1, 3)


def test_a_state_without_positions_says_so() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    model.layers = list(model)
    with relay_of(model) as relay:
        none, flat, _ = relay.look((torch.randn(4, 4),)).passings
        assert (
            "has no hidden state" in none.why_not_at and "which is not (rows, positions, features)" in flat.why_not_at
        )


# Attention ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Queries, keys and values of two heads, each (rows, heads, positions, features), mixed by a function."""

    def __init__(self, mix: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.qkv, self.mix = nn.Linear(8, 24), mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return x + self.mix(q, k, v).transpose(1, 2).flatten(2)


def maps_of(mix: Callable[..., torch.Tensor], **options: Any) -> tuple[tuple[torch.Tensor, ...], str]:
    with relay_of(Decoder(lambda: Attention(mix))) as relay:
        one = relay.look((IDS,), attention=True, **options).passings[0]
        return one.attention, one.why_no_attention


def test_a_softmax_over_features_is_no_map() -> None:
    def linear(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)

    found, why = maps_of(linear)
    assert not found and "calls no attention" in why


@pytest.mark.parametrize(
    "multiply",
    [
        lambda q, k: q @ k.mT,
        lambda q, k: torch.matmul(q, k.mT),
        lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k),
        lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, (ROWS, 2)),
    ],
    ids=["@", "matmul", "einsum", "bmm"],
)
@pytest.mark.parametrize("keys_", [LONG, 4])  # as many keys as queries, or fewer, as of a short text that is looked at
def test_a_softmax_over_products_is_a_map(multiply: Any, keys_: int) -> None:
    (found,), why = maps_of(lambda q, k, v: multiply(q, k[:, :, :keys_]).softmax(-1) @ v[:, :, :keys_], row=2)
    assert found.shape == (2, LONG, keys_) and found.sum(-1) == pytest.approx(1.0, abs=1e-5) and not why


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize(
    "attend",
    [functional.scaled_dot_product_attention, lambda q, k, v: (q @ k.mT).softmax(-1) @ v],
    ids=["fused", "softmax"],
)
def test_packed_rows_give_no_map_and_a_reason(row: int, attend: Any) -> None:
    def packed(*qkv: torch.Tensor) -> torch.Tensor:
        """All rows one behind the other, as one: (1, heads, rows * positions, features)."""
        out = attend(*(one.transpose(0, 1).flatten(1, 2)[None] for one in qkv))
        return out[0].unflatten(1, (ROWS, LONG)).transpose(0, 1)

    found, why = maps_of(packed, row=row)
    assert not found and "result has the shape (1, 2, 24" in why and "4 row(s)" in why


def test_a_query_that_sees_no_key_has_weights_of_0() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool).tril() & (torch.arange(5) > 1)  # two tokens of padding on the left
    for attn_mask in (mask, torch.zeros(5, 5).masked_fill(~mask, -torch.inf)):
        with AttentionMaps(2, 1, 5) as maps:
            out = functional.scaled_dot_product_attention(q, k, torch.eye(5).expand(2, 4, 5, 5), attn_mask=attn_mask)
        assert (out[1, :, :2] == 0).all(), "PyTorch's own weights"
        torch.testing.assert_close(maps.maps[0], out[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [(1, 2), (2, 1)], ids=["queries", "keys"])
def test_queries_or_keys_may_be_the_same_for_all_rows(rows: tuple[int, int]) -> None:
    q, k = (torch.randn(n, 4, 5, 8) for n in rows)
    with AttentionMaps(2, 1, 5) as maps:
        out = functional.scaled_dot_product_attention(
            q, k, torch.eye(5).expand(2, 4, 5, 5), torch.ones(2, 1, 5, 5).tril().bool()
        )
    torch.testing.assert_close(maps.maps[0], out[1], rtol=1e-5, atol=1e-6)


def test_so_it_is_in_pytorchs_own_module() -> None:
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)
    mask = ~(torch.ones(5, 5, dtype=torch.bool).tril() & (torch.arange(5) > 1))
    with torch.no_grad(), AttentionMaps(2, 1, 5) as maps:
        out, _ = module(x, x, x, attn_mask=mask, need_weights=False)
    assert out.isfinite().all() and (maps.maps[0][:, :2] == 0).all()
    assert maps.maps[0][:, 2:].sum(-1) == pytest.approx(1.0, abs=1e-5)


# From left to right ---------------------------------------------------------------------------------------------------


class Weak(nn.Module):
    """Sees a little of all positions."""

    def __init__(self, effect: float) -> None:
        super().__init__()
        self.linear, self.effect = nn.Linear(8, 8), effect

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.effect * torch.tanh(self.linear(x.mean(1, keepdim=True)))


@pytest.mark.parametrize("effect", [1e-1, 1e-3, 1e-4])
def test_a_little_of_what_is_behind_is_too_much(effect: float) -> None:
    with relay_of(Decoder(partial(Weak, effect))) as relay:
        assert all("not causal" in one.why_not for one in relay.look((IDS,), generate=2).written)


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"row": True}, "row=True: .* whole number from 0 to 1"),
        ({"row": 0.0}, "row=0.0: .* whole number from 0 to 1"),
        ({"row": -1}, "row=-1: .* whole number from 0 to 1"),
        ({"micro_batches": 0}, r"micro_batches=0 is not a collection: .* \[0\]"),
        ({"micro_batches": "0"}, "micro_batches='0' is not a collection"),
        ({"micro_batches": (0.0,)}, r"micro_batches=\[0.0\]: .* whole numbers 0 to 1"),
        ({"micro_batches": (0, "a")}, r"micro_batches=\[0, 'a'\]: .* whole numbers 0 to 1"),
        ({"micro_batches": (False,)}, r"micro_batches=\[False\]: .* whole numbers 0 to 1"),
        ({"top": True}, "top=True: must be a whole number"),
        ({"positions": 2.0}, "positions=2.0: must be a whole number"),
    ],
    ids=str,
)
def test_numbers_of_another_kind_are_refused(options: dict[str, Any], words: str) -> None:
    with make_relay(make_gpt()) as relay, pytest.raises((ValueError, TypeError), match=words):
        relay.look(make_batch(), **options)


def test_whole_numbers_of_numpy_are_taken() -> None:
    one, two = np.int64(1), np.int64(2)
    with make_relay(make_gpt()) as relay:
        seen = relay.look(make_batch(), micro_batches=[one], row=one, positions=two, generate=one, top=two, lens=True)
        plain = relay.look(make_batch(), micro_batches=[1], row=1, positions=2, generate=1, top=2, lens=True)
        assert seen.micro_batches == (1,) and type(seen.row) is int and type(seen.micro_batches[0]) is int
        assert seen.written == plain.written and torch.equal(seen.depths[0].tokens, plain.depths[0].tokens)


def test_figures_of_nothing() -> None:
    nothing, some = torch.zeros(1, 3), torch.ones(1, 3)
    assert np.isnan(relative_change(nothing, some)[0]) and relative_change(nothing, some)[1] == 0.0
    assert relative_change(some, nothing) == (1.0, 0.0)
    assert (
        relative_change_by_position(nothing, some).isnan().all() and relative_change_by_position(some, nothing) == 1.0
    )


# Too small a device ---------------------------------------------------------------------------------------------------


class Filling(nn.Module):
    """In its second run the device has no room any more."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.linear, self.ledger, self.runs = nn.Linear(8, 8), ledger, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if self.runs == 2:
            self.ledger.limit_bytes = 1
        return x + self.linear(x)


def test_a_device_too_small_for_a_depth_is_told_and_all_is_put_back() -> None:
    device = EmulatedDevice()
    model: Any = Decoder(nn.Identity)
    model.layers = nn.ModuleList([Filling(device.ledger), nn.Linear(8, 8)])  # its second run is that of the first depth
    with relay_of(model, device=device) as relay:
        before, modes = whole(relay), [module.training for module in model.modules()]
        with pytest.raises(DeviceOutOfMemory):
            relay.look((IDS,), lens=True)
        device.ledger.limit_bytes, model.layers[0].runs = None, 2
        assert_same(whole(relay), before)
        assert [module.training for module in model.modules()] == modes and len(relay.stack) == 2
        assert all(one.loss is not None for one in relay.look((IDS,), lens=True).depths)
