"""Splitting, weighing and joining batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from l2l_core.batch import ModelCall, default_weight, join, rows_of, shares, split


@given(rows=st.integers(1, 40), parts=st.integers(1, 12))
def test_parts_cover_the_batch_in_order_and_differ_by_little(rows: int, parts: int) -> None:
    batch = {"x": torch.arange(rows), "flag": True}
    if rows < parts:
        with pytest.raises(ValueError, match=f"{rows} row"):
            split(batch, parts)
        return
    cut = split(batch, parts)
    assert len(cut) == parts
    assert torch.equal(torch.cat([part["x"] for part in cut]), batch["x"])
    assert all(part["flag"] is True and len(part["x"]) >= 1 for part in cut)
    size = -(-rows // parts)
    assert len(cut[0]["x"]) == size
    if size * (parts - 1) < rows:
        assert all(len(part["x"]) == size for part in cut[:-1]), "only the last may be smaller"


def test_nested_values_and_rows_shared_by_all() -> None:
    batch = (torch.zeros(6, 2), {"position_ids": torch.arange(4)[None], "lengths": [torch.ones(6)]}, None)
    parts = split(batch, 3)
    assert parts[1][0].shape == (2, 2)
    assert parts[2][1]["position_ids"].shape == (1, 4)
    assert parts[0][1]["lengths"][0].shape == (2,)
    assert rows_of(batch) == 6


@pytest.mark.parametrize(
    "batch, error, message",
    [
        (torch.zeros(4, 2), TypeError, "wrap a single tensor as"),
        ({}, ValueError, "empty"),
        ({"x": torch.zeros(0, 3)}, ValueError, "empty"),
        ({"x": torch.zeros(4, 3), "y": torch.zeros(5)}, ValueError, r"disagree .*x: \(4, 3\), y: \(5,\)"),
        ({"x": torch.zeros(1, 3)}, ValueError, r"RelayConfig\(micro_batches=1\)"),
    ],
)
def test_a_bad_batch_is_refused_with_its_shapes(batch: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        split(batch, 2)


def test_even_micro_batches_are_divided_by_exactly_k() -> None:
    assert shares([1, 2, 3], lambda part: 7) == [3.0, 3.0, 3.0]


def test_uneven_micro_batches_add_up_to_the_mean_over_the_batch() -> None:
    values = torch.randn(7)
    parts = split((values,), 3)
    divisors = shares(parts, lambda part: len(part[0]))
    assert sum(1 / d for d in divisors) == pytest.approx(1)
    mean = sum(float(part[0].mean()) / d for part, d in zip(parts, divisors, strict=True))
    assert mean == pytest.approx(float(values.mean()), abs=1e-6)


def test_a_micro_batch_without_targets_is_refused() -> None:
    weight = default_weight(nn.Linear(1, 1), has_loss=False)
    parts = [{"labels": torch.tensor([[1, 2]])}, {"labels": torch.full((1, 2), -100)}]
    with pytest.raises(ValueError, match="micro-batch 1 counts for 0"):
        shares(parts, weight)


def test_targets_are_counted_after_the_models_shift() -> None:
    labels = torch.tensor([[5, -100, 6, 7], [1, 2, -100, -100]])
    causal = type("TinyForCausalLM", (nn.Linear,), {})(1, 1)
    encoder_decoder = type("TinyForConditionalGeneration", (nn.Linear,), {})(1, 1)
    encoder_decoder.config = SimpleNamespace(is_encoder_decoder=True)
    for model in (nn.Linear(1, 1), encoder_decoder):
        assert default_weight(model, False)({"labels": labels}) == 5
    assert default_weight(causal, False)({"labels": labels}) == 3, "the first label of a row is never a target"


def test_rows_count_where_there_are_no_integer_labels() -> None:
    weight = default_weight(nn.Linear(1, 1), has_loss=True)
    assert weight((torch.zeros(3, 2), torch.zeros(3))) == 3
    assert weight((torch.zeros(3, 2), torch.tensor([0, -100, 1]))) == 2


class Records(nn.Module):
    """Returns what it was given."""

    def forward(self, x: Any, mask: Any = None) -> Any:
        return SimpleNamespace(loss=torch.tensor(1.0), x=x, mask=mask)


def test_with_a_loss_the_target_stays_with_the_loss() -> None:
    model, seen = Records(), []
    call = ModelCall(model, loss=lambda outputs, batch: seen.append((outputs, batch)) or torch.tensor(2.0))
    assert call.objective(model, ("x", "y")) == 2
    assert seen[-1][0].x == "x" and seen[-1][1] == ("x", "y")
    call.objective(model, {"x": 1, "target": 2})
    assert seen[-1][0].x == 1 and seen[-1][1]["target"] == 2


def test_without_a_loss_everything_goes_to_the_model() -> None:
    model = Records()
    assert ModelCall(model).outputs(model, ("x", "m")).mask == "m"
    with pytest.raises(TypeError, match="target"):
        ModelCall(model).outputs(model, {"x": 1, "target": 2})


def test_a_loss_that_is_no_scalar_or_missing_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"has no \.loss.*labels"):
        ModelCall(model).objective(model, (torch.zeros(1, 2),))
    with pytest.raises(ValueError, match=r"shape \(1, 2\).*reduce it"):
        ModelCall(model, loss=lambda outputs, batch: outputs).objective(model, (torch.zeros(1, 2), 0))
    with pytest.raises(ValueError, match="use one"):
        ModelCall(model, loss=lambda o, b: o, objective=lambda m, b: b)


def test_outputs_are_joined_by_rows_and_scalars_averaged() -> None:
    outputs = [
        {"loss": torch.tensor(1.0), "y": torch.zeros(2, 3), "n": 5},
        {"loss": torch.tensor(4.0), "y": torch.ones(1, 3), "n": 5},
    ]
    joined = join(outputs, rows=[2, 1], divisors=[3 / 2, 3.0])
    assert joined["y"].shape == (3, 3)
    assert float(joined["loss"]) == pytest.approx(2)
    assert joined["n"] == 5
