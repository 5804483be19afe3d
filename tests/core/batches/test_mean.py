"""The mean over the batch is the mean over the batch: what a loss is a mean over is found out, or refused.

In core is the whole batch at once, in plain torch: nothing is cut, weighed or shared with the relay there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import has_gradient
from small import make_gpt
from torch import Tensor, nn
from zoo import BY_NAME, IGNORED

from l2l_core import DeviceOutOfMemory, EmulatedDevice, Relay, RelayConfig
from l2l_core.batches.batch import BatchRows
from l2l_core.batches.loss_normaliser import LossNormaliser, weighted_divisors
from l2l_core.batches.lru_cache import LRUCache
from l2l_core.batches.target_counts import SUM, normaliser_candidates
from l2l_core.trial_forwards import TrialForwards

Batch = dict[str, Any]
sgd = partial(torch.optim.SGD, lr=0.1)
LENGTHS = (
    8,
    3,
    7,
    2,
    8,
    5,
)  # of rows: in three micro-batches these are 11, 9 and 13 targets, 9, 7 and 11 after a shift
THREE = RelayConfig(micro_batches=3)


def uneven(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Batch:
    ids = torch.randint(32, (len(lengths), 8), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row, length in enumerate(lengths):
        labels[row, length:] = IGNORED
    return {"input_ids": ids, "labels": labels}


def gpt() -> nn.Module:
    """Without dropout, so that the whole batch at once is comparable."""
    model = make_gpt(2)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.use_cache = False
    return model


# -- the rule, on losses that are sums on paper ------------------------------------------------------------------------


def by_targets(shift: int) -> Callable[[Batch], float]:
    def loss(batch: Batch) -> float:
        is_target = (batch["labels"] != IGNORED)[:, shift:]
        return float(batch["value"][:, shift:][is_target].mean())

    return loss


def by_rows(batch: Batch) -> float:
    """The mean over rows of the mean over a row's targets."""
    is_target = batch["labels"] != IGNORED
    return float(((batch["value"] * is_target).sum(1) / is_target.sum(1)).mean())


def given_count(batch: Batch) -> float:
    return float(batch["value"][batch["labels"] != IGNORED].sum() / batch["num_items_in_batch"])


PAPER = {"targets": by_targets(0), "shifted targets": by_targets(1), "rows": by_rows, "a given count": given_count}


@settings(max_examples=60)
@given(
    st.data(),
    st.sampled_from(sorted(PAPER)),
    st.lists(st.integers(2, 12), min_size=2, max_size=9),
    st.booleans(),
)
def test_parts_add_up_to_the_loss_of_the_whole(data: Any, kind: str, lengths: list[int], with_count: bool) -> None:
    micro_batches = data.draw(st.integers(2, len(lengths)))
    generator = torch.Generator().manual_seed(len(lengths))
    place = torch.arange(12)[None]
    left = torch.randint(2, (len(lengths), 1), generator=generator)  # rows that begin with a target, and others
    labels = torch.where((place < torch.tensor(lengths)[:, None]) & (place >= left), 1, IGNORED)
    batch = {"labels": labels, "value": torch.rand(labels.shape, generator=generator, dtype=torch.float64)}
    if with_count or kind == "a given count":
        batch["num_items_in_batch"] = int((labels != IGNORED).sum())
    loss, rows = PAPER[kind], BatchRows(batch)
    parts = rows.split(micro_batches)
    divisors = LossNormaliser(None, lambda small, _: [loss(each) for each in small]).divisors(rows, parts)
    added = sum(loss(part) / divisor for part, divisor in zip(parts, divisors, strict=True))
    assert added == pytest.approx(loss(batch), rel=1e-9)


def never(small: Sequence[Any], perturbed: bool) -> list[float]:
    raise AssertionError("no loss should be measured")


def constant(small: Sequence[Any], perturbed: bool) -> list[float]:
    """A mean over anything, as far as losses show."""
    return [1.0] * len(small)


def test_even_micro_batches_are_divided_by_exactly_k() -> None:
    assert weighted_divisors([1, 2, 3], lambda part: 7) == [3.0, 3.0, 3.0]
    rows = BatchRows(uneven((8, 2, 2, 8, 5, 5)))
    assert LossNormaliser(None, constant).divisors(rows, rows.split(3)) == [3.0, 3.0, 3.0], (
        "ten targets each, eight after the shift"
    )
    assert LossNormaliser(None, never, loss_over="micro-batch").divisors(rows, rows.split(3)) == [3.0, 3.0, 3.0]
    assert LossNormaliser(None, never, loss_over="sum").divisors(rows, rows.split(3)) == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match='weight= with loss_over="sum"'):
        LossNormaliser(lambda part: 1.0, never, loss_over="sum")
    rows = BatchRows(uneven((8, 2)))
    assert LossNormaliser(None, never).divisors(rows, rows.split(1)) == [1.0]


def test_a_smaller_last_micro_batch_has_one_weight_under_every_candidate() -> None:
    """The quotients of whole numbers are equal to the bit."""
    batch = {"input_ids": torch.ones(7, 12, dtype=torch.long), "labels": torch.ones(7, 12, dtype=torch.long)}
    rows = BatchRows(batch)
    assert LossNormaliser(None, constant).divisors(rows, rows.split(3)) == [7 / 3, 7 / 3, 7.0]


def test_what_was_found_out_is_used_again_until_candidates_disagree_once_more() -> None:
    looked: list[int] = []

    def measure(small: Sequence[Batch], shaken: bool) -> list[float]:
        looked.append(len(small))
        return [by_targets(1)(each) for each in small]

    mean = LossNormaliser(None, measure)

    def divisors(first: Sequence[int]) -> list[float]:
        """Of rows of these lengths, of which not all begin with a target."""
        batch = uneven()
        batch["value"] = torch.rand(6, 8, generator=torch.Generator().manual_seed(5))
        for row, start in enumerate(first):
            batch["labels"][row, :start] = IGNORED
        rows = BatchRows(batch)
        return mean.divisors(rows, rows.split(3))

    divisors([1] * 6)
    assert len(looked) == 2, "rows are out; whether there is a shift cannot be seen"
    divisors([1] * 6)
    assert len(looked) == 2
    found = divisors([0] * 6)
    assert len(looked) == 3 and found == [27 / 9, 27 / 7, 27 / 11]
    assert divisors([0, 1] * 3) == found and len(looked) == 3


def test_pixels_are_no_targets() -> None:
    """Nor is sound: small whole numbers are no classes, and are many."""
    images = torch.zeros(5, 3, 4, 4, dtype=torch.uint8)
    for pixels in (images, images.numpy(), images.bool(), images.to(torch.int16)):
        rows = BatchRows({"pixels": pixels, "labels": torch.arange(5)})
        assert list(normaliser_candidates(rows)) == ["rows", "targets in batch['labels']", SUM]
        assert LossNormaliser(None, constant).divisors(rows, rows.split(2)) == [5 / 3, 5 / 2]
    hashes = BatchRows({"x": torch.zeros(2), "hash": [2**64 - 1, 5], "label": [1, IGNORED]})
    assert list(normaliser_candidates(hashes)) == ["rows", "targets in batch['label']", SUM], (
        "numbers that no tensor holds are no classes"
    )


def test_uneven_micro_batches_add_up_to_the_mean_over_the_batch() -> None:
    values = torch.randn(7)
    rows = BatchRows((values,))
    parts = rows.split(3)
    losses = lambda small, _: [float(part[0].mean()) for part in small]  # noqa: E731
    divisors = LossNormaliser(None, losses).divisors(rows, parts)
    assert sum(1 / d for d in divisors) == pytest.approx(1)
    mean = sum(float(part[0].mean()) / d for part, d in zip(parts, divisors, strict=True))
    assert mean == pytest.approx(float(values.mean()), abs=1e-6)


def test_targets_that_are_first_alone() -> None:
    """After a shift nothing is left of some rows, the ones with most targets among them."""
    labels = torch.full((4, 6, 2), IGNORED)
    labels[:, :, 0] = 1
    labels[1, 3:] = labels[3, 2:] = IGNORED
    labels[2, :2, 1] = 1
    rows = BatchRows({"labels": labels, "value": torch.rand(labels.shape)})
    loss = lambda part: float(part["value"][part["labels"] != IGNORED].mean())  # noqa: E731
    divisors = LossNormaliser(None, lambda small, _: [loss(each) for each in small]).divisors(rows, rows.split(2))
    assert divisors == [19 / 9, 19 / 10]


def test_targets_in_lists_and_arrays() -> None:
    """One item per row, of different lengths: a mean over boxes is no mean over images."""
    boxes = [5, 1, 2, 2, 3, 7]
    value = torch.rand(6, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def loss(part: Batch) -> float:
        return torch.cat([v[: len(t["class"])] for v, t in zip(part["v"], part["t"], strict=True)]).mean().item()

    for make in (torch.ones, lambda n, dtype: torch.ones(n, dtype=dtype).numpy()):
        batch = {"v": value, "t": [{"class": make(n, dtype=torch.long)} for n in boxes]}
        rows = BatchRows(batch)
        parts = rows.split(3)
        divisors = LossNormaliser(None, lambda small, _: [loss(each) for each in small]).divisors(rows, parts)
        assert divisors == [20 / 6, 20 / 4, 20 / 10]


def test_a_micro_batch_without_targets_has_no_weight() -> None:
    batch = uneven((8, 3, 0, 0, 8, 5)) | {"value": torch.rand(6, 8)}
    rows = BatchRows(batch)
    mean = LossNormaliser(None, lambda small, _: [by_targets(1)(each) for each in small])
    found = mean.divisors(rows, rows.split(3))
    assert found[1] == math.inf and 1 / found[0] + 1 / found[2] == pytest.approx(1)
    assert weighted_divisors([1, 0], lambda part: part) == [1.0, math.inf]
    with pytest.raises(ValueError, match="the batch counts nothing"):
        weighted_divisors([1, 2], lambda part: 0)
    with pytest.raises(ValueError, match="weight= returned -1 for micro-batch 0"):
        weighted_divisors([1, 2], lambda part: -1)


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_rounding_does_not_hide_the_mean(size: float) -> None:
    """A small loss is a difference of logits, and off by their rounding; a large one by its own."""
    batch = uneven() | {"value": torch.rand(6, 8) * size}
    rows = BatchRows(batch)

    def loss(part: Batch) -> float:
        is_target = part["labels"] != IGNORED
        return float(((part["value"] + 10) - 10)[is_target].mean())

    divisors = LossNormaliser(None, lambda small, _: [loss(each) for each in small]).divisors(rows, rows.split(3))
    assert divisors == [33 / 11, 33 / 9, 33 / 13]


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "loss, message",
    [
        (lambda part: by_targets(0)(part) + by_rows(part), ""),
        (lambda part: 1.0, "rows with different counts have the same loss"),
        (lambda part: float("nan"), "rows with different counts have the same loss"),
    ],
    ids=["two means", "always the same", "never finite"],
)
def test_what_cannot_be_found_out_is_refused(loss: Callable[[Batch], float], message: str) -> None:
    rows = BatchRows(uneven() | {"value": torch.rand(6, 8)})
    mean = LossNormaliser(None, lambda small, _: [loss(each) for each in small])
    for _ in range(2):
        figures = "rows: .2, 2, 2.; targets.*11, 9, 13" if message else "together is not the mean of their losses"
        with pytest.raises(ValueError, match=f"{figures}.*{message}.*weight=lambda"):
            mean.divisors(rows, rows.split(3))
    by_hand = LossNormaliser(lambda part: len(part["labels"]), never)
    assert by_hand.divisors(rows, rows.split(3)) == [3.0] * 3


def test_what_is_remembered_is_bounded() -> None:
    recent: LRUCache[int] = LRUCache(3)
    for key in range(5):
        recent.put(key, key)
        recent.get(0)
    assert [recent.get(key) for key in range(5)] == [0, None, None, 3, 4] and len(recent) == 3


# -- the relay against the whole batch in core -------------------------------------------------------------------------


class Around(nn.Module):
    """Somebody's own module around a language model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


class Adapted(nn.Linear):
    """A linear layer with an adapter of rank 2, of which the rest is frozen."""

    def __init__(self, inner: nn.Module) -> None:
        rows, columns = inner.weight.shape  # a Conv1D: (in, out)
        super().__init__(rows, columns)
        self.inner = inner
        generator = torch.Generator().manual_seed(1)
        self.down = nn.Parameter(torch.randn(rows, 2, generator=generator))
        self.up = nn.Parameter(torch.randn(2, columns, generator=generator))
        del self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.down @ self.up


class PeftModel(Around):
    """As peft makes one without a task type: adapters in the layers, and a name that says nothing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        inner.requires_grad_(False)
        for block in inner.transformer.h:
            block.attn.c_attn = Adapted(block.attn.c_attn)


def own_loss(outputs: Any, batch: Batch) -> Tensor:
    """On labels that the collator has shifted already."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten())


def of_rows(outputs: Any, batch: Batch) -> Tensor:
    each = F.cross_entropy(outputs.logits.transpose(1, 2), batch["labels"], reduction="none").sum(1)
    return (each / (batch["labels"] != IGNORED).sum(1)).mean()


def shifted_by_hand(outputs: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["target"][:, 1:].flatten())


def with_count(batch: Batch) -> Batch:
    return batch | {"num_items_in_batch": int((batch["labels"][:, 1:] != IGNORED).sum())}


def renamed(batch: Batch) -> Batch:
    return {"input_ids": batch["input_ids"], "target": batch["labels"]}


CASES: dict[str, tuple[Callable[[nn.Module], nn.Module], Any, Callable[[Batch], Batch]]] = {
    "causal model": (lambda model: model, None, lambda batch: batch),
    "module around it": (Around, None, lambda batch: batch),
    "adapters": (PeftModel, None, lambda batch: batch),
    "labels shifted already": (lambda model: model, own_loss, lambda batch: batch),
    "labels of another name": (Around, shifted_by_hand, renamed),
    "mean over rows": (lambda model: model, of_rows, lambda batch: batch),
    "count in the batch": (lambda model: model, None, with_count),
    "count as a tensor": (Around, None, lambda batch: batch | {"num_items_in_batch": torch.tensor(27)}),
    "count in the batch, rows even": (lambda model: model, None, lambda batch: with_count(uneven((8,) * 6))),
    "count for another loss": (lambda model: model, own_loss, with_count),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_one_on_the_whole_batch(case: str) -> None:
    """Three steps of the relay on three micro-batches, and of plain training on all rows at once."""
    wrap, loss, prepare = CASES[case]
    model = wrap(gpt())
    twin = copy.deepcopy(model)
    optimizer = sgd(twin.parameters())
    batch = prepare(uneven())

    def objective(model: nn.Module, part: Batch) -> Tensor:
        return model(**part).loss if loss is None else loss(model(input_ids=part["input_ids"]), part)

    losses = []
    for _ in range(3):
        mean = objective(twin, batch)
        mean.backward()
        losses.append(mean.item())
        optimizer.step()
        optimizer.zero_grad()
    with Relay(model, sgd, objective=objective, config=THREE) as relay:
        assert relay.evaluate(batch) == pytest.approx(losses[0], rel=2e-6)
        assert [relay.step(batch).loss for _ in range(3)] == pytest.approx(losses, rel=2e-6)
        assert relay.verify(batch).equal
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


class TwoMeans(Around):
    """A language model with a second loss, of rows; the first is a mean over targets."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.judge = nn.Linear(32, 2)

    def forward(self, score: Tensor, **inputs: Any) -> Any:
        outputs = self.inner(**inputs)
        outputs.loss = outputs.loss + F.cross_entropy(self.judge(outputs.logits[:, -1]), score)
        return outputs


@pytest.mark.parametrize("lengths", [LENGTHS, (8, 3, 4, 2, 1, 4), (6, 1, 2, 1, 1, 2), (4, 3, 4, 2, 1, 4)])
def test_a_second_mean_over_something_else_is_refused(lengths: Sequence[int]) -> None:
    """One divisor cannot serve both; and what of a loss does not change with the targets is not overlooked."""
    batch = uneven(lengths) | {"score": torch.tensor([0, 1, 0, 1, 1, 0])}
    with Relay(TwoMeans(gpt()), sgd, config=THREE) as relay:
        with pytest.raises(ValueError, match="(in two parts|sum of several means).*weight="):
            relay.step(batch)
        assert relay.steps == 0


def with_large_logits(outputs: Any, batch: Batch) -> Tensor:
    """Cross entropy over targets, and the z-loss over all positions."""
    tokens = F.cross_entropy(outputs.logits.flatten(0, 1), batch["target"].flatten())
    return tokens + 0.1 * outputs.logits.logsumexp(-1).pow(2).mean()


@pytest.mark.parametrize("shape", [(6, 8), (6, 8, 1)])
@pytest.mark.parametrize("lengths", [LENGTHS, (8, 3, 4, 2, 1, 4)])
def test_a_second_mean_is_found_in_whatever_shape_the_targets_are(
    shape: tuple[int, ...], lengths: Sequence[int]
) -> None:
    batch = uneven(lengths)
    rows = {"x": F.one_hot(batch["input_ids"], 32).float(), "target": batch["labels"].reshape(shape)}

    def two_means(outputs: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["target"].flatten()) + outputs.square().mean()

    model = Stacked()
    with (
        Relay(model, sgd, loss=two_means, config=THREE) as relay,
        pytest.raises(ValueError, match="sum of several means"),
    ):
        relay.step(rows)


def test_targets_in_the_first_column_alone_end_in_no_error_of_another_kind() -> None:
    target = torch.full((4, 6, 4), IGNORED)
    target[0, :, 0], target[1, 0, :2], target[2, 0, :3], target[3, 1, :2] = 1, 2, 0, 0
    batch = {"x": torch.randn(4, 6, 4, 32), "target": target}
    model = Stacked()
    expected = F.cross_entropy(copy.deepcopy(model)(batch["x"]).flatten(0, 2), target.flatten()).item()
    config = RelayConfig(micro_batches=2)
    loss = lambda outputs, batch: F.cross_entropy(outputs.flatten(0, 2), batch["target"].flatten())  # noqa: E731
    with Relay(model, sgd, loss=loss, config=config) as relay:
        assert relay.step(batch).loss == pytest.approx(expected, abs=1e-6)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_second_mean_that_comes_with_padding_is_refused_and_the_remedy_is_the_whole_batch() -> None:
    batches = [renamed(uneven((8,) * 6)), renamed(uneven((8, 3, 4, 2, 1, 4), seed=1))]
    with Relay(gpt(), sgd, loss=with_large_logits, config=THREE) as relay:
        relay.step(batches[0])
        with pytest.raises(ValueError, match=r'sum of several means.*loss_over="batch" with loss='):
            relay.step(batches[1])
    model = gpt()
    in_core = copy.deepcopy(model)
    optimizer = sgd(in_core.parameters())
    with Relay(model, sgd, loss=with_large_logits, loss_over="batch", config=THREE) as relay:
        for batch in batches:
            optimizer.zero_grad()
            loss = with_large_logits(in_core(batch["input_ids"]), batch)
            loss.backward()
            optimizer.step()
            assert relay.step(batch).loss == pytest.approx(loss.item(), abs=1e-6)
    for ours, theirs in zip(model.parameters(), in_core.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "bert", "t5"])
def test_stock_models_with_padded_targets_train(kind: str) -> None:
    """A router's auxiliary loss is a mean over nothing that could be weighed: a warning, and the figure is kept."""
    model, batch = BY_NAME[kind].make_model(), BY_NAME[kind].make_batch(6, 0)
    batch["labels"][0, 3:] = IGNORED
    routed = kind in ("mixtral", "qwen3_moe")
    with Relay(model, sgd, config=THREE) as relay:
        with pytest.warns(UserWarning, match="slightly different loss") if routed else nullcontext():
            result = relay.step(batch)
        assert ("away from the loss of the whole batch" in result.objective) == routed, result.objective
        assert relay.step(batch).samples == 6, "once"


# -- looking leaves no trace -------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Whatever a look could disturb: dropout, statistics, counts, generators; and nothing of it is a buffer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 32)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.seen: list[int] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        self.calls += 1
        self.seen.append(len(input_ids))
        return self.head(self.norm(x.flatten(0, 1))).view(*input_ids.shape, -1)


def token_loss(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def count(batch: Batch) -> float:
    return float((batch["labels"] != IGNORED).sum())


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_look_leaves_no_trace(stash: Any) -> None:
    """A relay that has to find the weight out, and one that is told it, are the same afterwards, bit by bit."""
    ends = []
    for weight in (None, count):
        torch.manual_seed(3)
        model = Noisy()
        config = RelayConfig(micro_batches=3, stash=stash)
        with Relay(model, partial(torch.optim.AdamW, lr=0.1), layers=["layers.0", "layers.1"], loss=token_loss,
                   weight=weight, config=config) as relay:  # fmt: skip
            losses = [relay.step(uneven(seed=step)).loss for step in range(2)]
            assert all(module.training for module in model.modules())
            assert not any(map(has_gradient, model.parameters()))
            ends.append((losses, model.seen, torch.get_rng_state(), relay.steps, {**model.state_dict()}))
    (losses, seen, random, steps, state), (other_losses, other_seen, other_random, other_steps, other_state) = ends
    assert losses == other_losses and seen == other_seen == [2] * 6 and steps == other_steps == 2
    assert torch.equal(random, other_random) and int(state["calls"]) == 6
    assert all(torch.equal(state[name], other_state[name]) for name in state)


def test_losses_are_measured_once_per_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = TrialForwards.losses
    monkeypatch.setattr(TrialForwards, "losses", lambda self, *small: made.append(small) or real(self, *small))
    with Relay(gpt(), sgd, config=THREE) as relay:
        relay.step(uneven((8,) * 6))
        relay.step(uneven((8, 3, 3, 8, 8, 3)))
        assert len(made) == 2, "with the model's weights, and with perturbed ones"
        for seed in range(3):
            relay.step(uneven(seed=seed))
            relay.evaluate(uneven((2, 3, 4, 5, 6, 7), seed))
        assert len(made) == 3, "targets are uneven now"
        relay.step(uneven() | {"mask": torch.ones(6, dtype=torch.long)})
        assert len(made) > 4, "another structure"
        before = len(made)
        relay.step(uneven())
        assert len(made) == before


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batches", [2, 6])
def test_a_look_needs_no_more_memory_than_a_step(micro_batches: int, precision: Any, stash: Any) -> None:
    config = RelayConfig(micro_batches=micro_batches, precision=precision, stash=stash)
    shifted = lambda part: float((part["labels"][:, 1:] != IGNORED).sum())  # noqa: E731
    with Relay(gpt(), sgd, EmulatedDevice(), weight=shifted, config=config) as relay:
        peak = max(relay.step(uneven()).peak_device_bytes for _ in range(2))
        whole = sum(unit.nbytes for unit in (relay.shell, *relay.stack))
    with Relay(gpt(), sgd, EmulatedDevice(memory_bytes=peak), config=config) as relay:
        assert relay.step(uneven()).samples == 6
    small = EmulatedDevice(memory_bytes=whole // 4)
    with Relay(gpt(), sgd, small, config=config) as relay, pytest.raises(DeviceOutOfMemory):
        relay.step(uneven())


def test_bfloat16_does_not_hide_what_the_loss_is_a_mean_over() -> None:
    with Relay(gpt(), sgd, config=RelayConfig(micro_batches=3, precision="bf16")) as relay:
        expected = relay.model(**uneven()).loss.item()
        assert relay.evaluate(uneven()) == pytest.approx(expected, rel=1e-2)
        assert list(relay._runner.normaliser._remaining._values.values()) == [
            {"targets in batch['labels'] after a shift by one"}
        ]


PRECISIONS = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul)


@pytest.fixture
def low_precisions() -> Iterator[list[str]]:
    """As a caller may have set them."""
    before = [kind.fp32_precision for kind in PRECISIONS]
    low = ["tf32", "tf32", "bf16"]
    for kind, precision in zip(PRECISIONS, low, strict=True):
        kind.fp32_precision = precision
    yield low
    for kind, precision in zip(PRECISIONS, before, strict=True):
        kind.fp32_precision = precision


def test_a_look_is_in_full_precision_whatever_is_set(low_precisions: list[str]) -> None:
    """TF32 would round what is compared, and so would autocast; both are the caller's again in the step."""
    told: SimpleQueue[tuple[bool, list[str]]] = SimpleQueue()  # a list would be as before after a look

    class Told(Around):
        def forward(self, **inputs: Any) -> Any:
            told.put((torch.is_autocast_enabled("cpu"), [kind.fp32_precision for kind in PRECISIONS]))
            return super().forward(**inputs)

    config = replace(THREE, verify="never")
    with Relay(Told(gpt()), sgd, config=config) as relay, torch.autocast("cpu", torch.bfloat16):
        relay.step(uneven())
    seen = [told.get() for _ in range(told.qsize())]
    looks, step = seen[:-3], seen[-3:]
    assert looks and all(not autocast and precisions == ["ieee"] * 3 for autocast, precisions in looks)
    assert step == [(True, low_precisions)] * 3


class OnlyTrains(nn.Module):
    """A model that has a loss in training mode alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids, labels=labels if self.training else None)


def test_a_failing_look_is_refused_with_the_remedy() -> None:
    model = OnlyTrains(gpt())
    before = [param.detach().clone() for param in model.parameters()]
    with Relay(model, sgd, config=THREE) as relay:
        with pytest.raises(ValueError, match=r"has no \.loss") as refused:
            relay.step(uneven())
        assert any("weight=" in note and "Nothing was trained" in note for note in refused.value.__notes__)
        assert relay.steps == 0 and model.training
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    shifted = lambda part: float((part["labels"][:, 1:] != IGNORED).sum())  # noqa: E731
    with Relay(model, sgd, weight=shifted, config=THREE) as relay:
        relay.step(uneven())


def test_a_head_that_is_all_zero_tells_nothing_until_it_is_shaken() -> None:
    """Every token has the same loss under it. What is shaken is the copy on the device."""
    model = gpt()
    nn.init.zeros_(model.lm_head.weight)
    twin = copy.deepcopy(model)
    optimizer = sgd(twin.parameters())
    with Relay(model, sgd, config=THREE) as relay:
        assert relay.evaluate(uneven()) == pytest.approx(float(torch.log(torch.tensor(32.0))), rel=1e-6)
        assert not model.lm_head.weight.any()
        for _ in range(2):
            mean = twin(**uneven()).loss
            mean.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert relay.step(uneven()).loss == pytest.approx(mean.item(), rel=2e-6)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def flat_loss(outputs: Any, batch: Batch) -> Tensor:
    """The same of every token, whatever the weights."""
    return (outputs.logits * 0 + 1).mean() * (batch["labels"] != IGNORED).any()


def test_a_refused_step_has_trained_nothing() -> None:
    model = gpt()
    before = [param.detach().clone() for param in model.parameters()]
    with Relay(model, sgd, loss=flat_loss, config=THREE) as relay:
        with pytest.raises(ValueError, match="rows with different counts have the same loss.*weight="):
            relay.step(uneven())
        assert relay.steps == 0
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_outputs_are_joined_without_a_look_where_they_have_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose mean cannot be found out is none to the outputs, unless there is a loss among them."""
    monkeypatch.setattr(TrialForwards, "losses", lambda self, small, shaken: [1.0] * len(small))
    with Relay(Around(gpt().transformer), sgd, config=THREE) as relay:
        batch = {"input_ids": uneven()["labels"].clamp(min=0), "position_ids": uneven()["labels"].clamp(0, 7)}
        batch["token_type_ids"] = uneven()["labels"].clamp(min=0)
        assert relay.forward(batch).last_hidden_state.shape[0] == 6
    with Relay(gpt(), sgd, config=THREE) as relay, pytest.raises(ValueError, match="cannot be determined"):
        relay.forward(uneven())


def test_a_sum_of_two_means_is_averaged_over_micro_batches_on_request() -> None:
    """As in detection: a mean over queries, and a sum over boxes divided by their number, which differs."""

    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        boxes = batch[1]
        apart = sum((row - each["boxes"]).abs().sum() for row, each in zip(outputs, boxes, strict=True))
        return outputs.square().mean() + apart / sum(len(each["boxes"]) for each in boxes)

    def boxes_of(count: int) -> dict[str, torch.Tensor]:
        return {"labels": torch.randint(3, (count,)), "boxes": torch.rand(count, 4)}

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), *[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)], nn.Linear(16, 4)
    )
    plain = copy.deepcopy(model)
    optimizer, twin = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain))
    with Relay(model, optimizer, loss=loss, loss_over="micro-batch", config=RelayConfig(micro_batches=2)) as relay:
        for step in range(3):
            x, boxes = torch.randn(8, 8), [boxes_of(1 + (7 * i + step) % 3) for i in range(8)]
            found = relay.step((x, boxes))
            assert found.objective == 'mean over micro-batches (loss_over="micro-batch")'
            for half in (slice(0, 4), slice(4, 8)):
                (loss(plain(x[half]), (x[half], boxes[half])) / 2).backward()
            twin.step()
            twin.zero_grad()
            assert all(map(torch.equal, model.parameters(), plain.parameters()))
        assert relay.evaluate((x, boxes)) > 0
