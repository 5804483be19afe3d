"""``split=`` and ``join=``: each rule trains as plain accumulation over the cut written out by hand, to the bit.

Joined outputs are those of the undivided batch, in its order.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from small import make_gpt
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from transformers import DataCollatorWithFlattening

from l2l_core import DeviceOutOfMemory, EmulatedDevice, Relay, RelayConfig, Sequences, Views
from l2l_core.batches import Split, rows_rule
from l2l_core.strategies import Lab, Plain

RATE, STEPS = 1e-2, 2
Batch = Any
Loss = Callable[[Any, Batch], Tensor]
adamw = partial(torch.optim.AdamW, lr=RATE)


def noise(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(high: int, *shape: int, seed: int = 7) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def fresh(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make().train()


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 5)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class OverTime(nn.Module):
    """(time, batch, features), as recurrent networks take it by default, and the last state of every row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.LSTM(8, 8), nn.LSTM(8, 8)]), nn.Linear(8, 5)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        for layer in self.layers:
            x, _ = layer(x)
        x = x if scale is None else x * scale
        return {"logits": self.head(x), "last": x[-1]}


class Translator(nn.Module):
    """`nn.Transformer` in its default layout: (length, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0)
        self.head = nn.Linear(8, 5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.inner(source, target))


class Attending(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out((q @ k.T / 4).masked_fill(~mask, float("-inf")).softmax(-1) @ v)


class Packed(nn.Module):
    """Tokens without a batch dimension; cumulative lengths give the sequences, as in code for FlashAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.layers = nn.ModuleList(Attending() for _ in range(3))

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        lengths = cu_seqlens.diff()
        assert cu_seqlens[0] == 0 and cu_seqlens[-1] == len(input_ids) and int(lengths.max()) == max_seqlen
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths.long())
        order = torch.arange(len(input_ids))
        mask = (sequence[:, None] == sequence) & (order[:, None] >= order)
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


# -- steps, each beside plain accumulation over a cut that is written out ----------------------------------------------


@dataclass
class Case:
    """A program with its cut: `parts` are the micro-batches of a batch, `shares` their parts of the mean."""

    make: Callable[[], nn.Module]
    loss: Loss
    batch: Callable[[int], Batch]
    split: Split
    parts: Callable[[Batch], list[Batch]]
    shares: Sequence[float]  # what the loss of each part is divided by
    rows: int
    inputs: Sequence[str] = ("x",)
    options: dict[str, Any] | None = None

    @property
    def count(self) -> int:
        return len(self.shares)

    def call(self, model: nn.Module, part: Batch) -> Any:
        return model(**{name: part[name] for name in self.inputs})

    def relay(self, model: nn.Module, **options: Any) -> Relay:
        options = {"config": RelayConfig(micro_batches=self.count)} | (self.options or {}) | options
        return Relay(model, adamw, EmulatedDevice(), loss=self.loss, split=self.split, **options)

    def plain(self, steps: int = STEPS) -> tuple[nn.Module, list[float]]:
        model = fresh(self.make)
        optimizer, losses = adamw(model.parameters()), []
        for step in range(steps):
            parts = self.parts(self.batch(step))
            own = [self.loss(self.call(model, part), part) / n for part, n in zip(parts, self.shares, strict=True)]
            for loss in own:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(sum(loss.detach() for loss in own)))
        return model, losses


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for (name, ours), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def over_time(seed: int) -> Batch:
    return {"x": noise(6, 9, 8, seed=seed), "y": whole(5, 6, 9, seed=seed), "scale": noise(8, seed=1)}


def mean_over_time(outputs: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs["logits"].flatten(0, 1), batch["y"].flatten())


def columns_of(batch: Batch) -> list[Batch]:
    """Nine rows in dim 1, four, four and one."""
    return [{**batch, "x": batch["x"][:, a:b], "y": batch["y"][:, a:b]} for a, b in ((0, 4), (4, 8), (8, 9))]


def thirds_of(batch: Batch) -> list[Batch]:
    cuts = ((0, 3), (3, 6), (6, 9))
    return [{**batch, "x": batch["x"][:, a:b], "y": batch["y"][:, a:b]} for a, b in cuts]


def views(seed: int) -> Batch:
    x = noise(8, 8, seed=seed)
    return {"x": torch.cat([x, x + 0.1 * noise(8, 8, seed=seed + 50)])}


def halves_of(batch: Batch) -> list[Batch]:
    """Each half of all tensors in four, one of each in a micro-batch."""
    cut = {name: [half.chunk(4) for half in value.chunk(2)] for name, value in batch.items()}
    return [{name: torch.cat([first[k], second[k]]) for name, (first, second) in cut.items()} for k in range(4)]


def preferences(outputs: Tensor, batch: Batch) -> Tensor:
    """As DPO: chosen answers in the first half, rejected ones in the second."""
    chosen, rejected = outputs[:, 0].chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def nt_xent(outputs: Tensor, batch: Batch) -> Tensor:
    z, n = F.normalize(outputs, dim=-1), len(outputs) // 2
    likeness = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    return F.cross_entropy(likeness, torch.cat([torch.arange(n) + n, torch.arange(n)]))


LENGTHS = (6, 4, 3, 3, 1)


def packed(seed: int) -> Batch:
    borders = torch.tensor([0, 6, 10, 13, 16, 17], dtype=torch.int32)
    return {
        "input_ids": whole(11, 17, seed=seed),
        "cu_seqlens": borders,
        "max_seqlen": 6,
        "labels": whole(11, 17, seed=seed + 50),
    }


def pieces_of(batch: Batch) -> list[Batch]:
    first, second = torch.tensor([0, 6, 10], dtype=torch.int32), torch.tensor([0, 3, 6, 7], dtype=torch.int32)
    ids, labels = batch["input_ids"], batch["labels"]
    return [
        {"input_ids": ids[:10], "labels": labels[:10], "cu_seqlens": first, "max_seqlen": 6},
        {"input_ids": ids[10:], "labels": labels[10:], "cu_seqlens": second, "max_seqlen": 3},
    ]


def token_loss(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs, batch["labels"])


def by_length(batch: Batch, count: int) -> list[Batch]:
    """A cut of a user: every second row, and padding trimmed."""
    picked = [{name: value[k::count] for name, value in batch.items()} for k in range(count)]
    return [{**each, "x": each["x"][:, : int(each["length"].max())]} for each in picked]


def ragged(seed: int) -> Batch:
    length = torch.tensor([3, 5, 2, 4, 3, 5, 1, 2])
    x = noise(8, 5, 8, seed=seed) * (torch.arange(5) < length[:, None])[..., None]
    return {"x": x, "length": length, "y": whole(5, 8, seed=seed)}


def pooled_loss(outputs: Tensor, batch: Batch) -> Tensor:
    inside = torch.arange(outputs.shape[1]) < batch["length"][:, None]
    pooled = (outputs * inside[..., None]).sum(1) / batch["length"][:, None]
    return F.cross_entropy(pooled, batch["y"])


CASES = {
    "dims": Case(OverTime, mean_over_time, over_time, {"x": 1, "y": 1, "scale": None}, columns_of, (9 / 4, 9 / 4, 9.0), 9,
                 ("x", "scale"), {"join": {"logits": 1, "last": 0}}),
    "chunk specs": Case(OverTime, mean_over_time, over_time, {"x": TensorChunkSpec(-2), "y": TensorChunkSpec(1), "scale": None},
                        thirds_of, (3.0,) * 3, 9, ("x", "scale"), {"join": {"logits": 1}}),
    "views": Case(Stack, nt_xent, views, Views(2), halves_of, (4.0,) * 4, 8, options={"loss_over": "micro-batch"}),
    "pairs": Case(Stack, preferences, views, Views(2), halves_of, (4.0,) * 4, 8),
    "sequences": Case(Packed, token_loss, packed, Sequences("cu_seqlens"), pieces_of, (17 / 10, 17 / 7), 5,
                      ("input_ids", "cu_seqlens", "max_seqlen")),
    "function": Case(Stack, pooled_loss, ragged, by_length, lambda batch: by_length(batch, 4), (4.0,) * 4, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_plain_accumulation_over_the_cut(name: str) -> None:
    case = CASES[name]
    plain, losses = case.plain()
    model = fresh(case.make)
    with case.relay(model) as relay:
        results = [relay.step(case.batch(step)) for step in range(STEPS)]
        assert [result.samples for result in results] == [case.rows] * STEPS
    assert [result.loss for result in results] == pytest.approx(losses, rel=1e-6)
    assert_equal(model, plain)


@pytest.mark.parametrize("name", ["dims", "views", "pairs", "sequences"])
def test_joined_outputs_are_those_of_the_undivided_batch(name: str) -> None:
    case = CASES[name]
    model, batch = fresh(case.make), case.batch(0)
    with torch.no_grad():
        wanted = case.call(copy.deepcopy(model).eval(), batch)
    with case.relay(model) as relay:
        found = relay.forward(batch)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_the_other_verbs_cut_alike(name: str) -> None:
    """What they return is that of the parts, and `verify` compares a step over the same micro-batches to the bit."""
    case = CASES[name]
    model, batch = fresh(case.make), case.batch(0)
    with torch.no_grad():
        judge = copy.deepcopy(model).eval()
        wanted = sum(
            float(case.loss(case.call(judge, part), part)) / share
            for part, share in zip(case.parts(batch), case.shares, strict=True)
        )
    with case.relay(model) as relay:
        assert relay.evaluate(batch) == pytest.approx(wanted, rel=1e-5)
        assert relay.probe([batch]) == pytest.approx([wanted], rel=1e-5)
        assert relay.verify(batch).equal
        forecast = relay.forecast(batch)
        relay.step(batch)
        assert relay.forecast(batch).peak_device_bytes == pytest.approx(forecast.peak_device_bytes, rel=0.05)
        found = relay.look(batch, micro_batches=[1])
        assert found.passings and all(each.entered is not None for each in found.passings)


@pytest.mark.parametrize("name", ["dims", "views", "sequences"])
def test_a_save_continues_with_the_same_cut(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    plain, _ = case.plain(2)
    model = fresh(case.make)
    with case.relay(model) as relay:
        relay.step(case.batch(0))
        relay.save(tmp_path / "save")
    later = fresh(case.make)
    options = {"loss": case.loss, "split": case.split, **(case.options or {})}
    with Relay.load(tmp_path / "save", later, adamw, device=EmulatedDevice(), **options) as relay:
        relay.step(case.batch(1))
    assert_equal(later, plain)
