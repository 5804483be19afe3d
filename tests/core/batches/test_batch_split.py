"""``split=`` and ``join=``: each rule trains as plain accumulation over the cut written out by hand, to the bit.

Joined outputs are those of the undivided batch, in its order.
"""

from __future__ import annotations

import copy
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
from transformers import BatchEncoding, DataCollatorWithFlattening

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
    """Eight rows of six steps; the scale has eight entries by chance."""
    return {"x": noise(6, 8, 8, seed=seed), "y": whole(5, 6, 8, seed=seed), "scale": noise(8, seed=1)}


def mean_over_time(outputs: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs["logits"].flatten(0, 1), batch["y"].flatten())


def columns_of(batch: Batch) -> list[Batch]:
    cuts = ((0, 3), (3, 6), (6, 8))
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
    "dims": Case(OverTime, mean_over_time, over_time, {"x": 1, "y": 1, "scale": None}, columns_of, (8 / 3, 8 / 3, 4.0), 8,
                 ("x", "scale"), {"join": {"logits": 1, "last": 0}}),
    "chunk specs": Case(OverTime, mean_over_time, over_time, {"x": TensorChunkSpec(-2), "y": TensorChunkSpec(1), "scale": None},
                        columns_of, (8 / 3, 8 / 3, 4.0), 8, ("x", "scale")),
    "views": Case(Stack, nt_xent, views, Views(2), halves_of, (4.0,) * 4, 8, options={"loss_over": "micro-batch"}),
    "pairs": Case(Stack, preferences, views, Views(2), halves_of, (4.0,) * 4, 8),
    "sequences": Case(Packed, token_loss, packed, Sequences("cu_seqlens"), pieces_of, (17 / 10, 17 / 7), 5,
                      ("input_ids", "cu_seqlens", "max_seqlen")),
    "function": Case(Stack, pooled_loss, ragged, by_length, lambda batch: by_length(batch, 4), (4.0,) * 4, 8),
}  # fmt: skip


@pytest.mark.all_cases
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


@pytest.mark.all_cases
@pytest.mark.parametrize("name", ["dims", "chunk specs", "views", "pairs", "sequences"])
def test_joined_outputs_are_those_of_the_undivided_batch(name: str) -> None:
    case = CASES[name]
    model, batch = fresh(case.make), case.batch(0)
    with torch.no_grad():
        wanted = case.call(copy.deepcopy(model).eval(), batch)
    with case.relay(model) as relay:
        found = relay.forward(batch)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.all_cases
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


def test_a_save_continues_with_the_same_cut(tmp_path: Path) -> None:
    case = CASES["sequences"]
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


def test_settings_are_found_for_the_cut() -> None:
    """Memory that holds the step in smaller parts only, `fit`, bytes of kept graphs, and plans without a relay."""
    case, batch = CASES["pairs"], {"x": torch.cat([noise(64, 8), noise(64, 8, seed=8)])}
    with case.relay(fresh(case.make), config=RelayConfig(micro_batches=1)) as relay:
        whole_bytes = relay.step(batch).peak_device_bytes
    small = EmulatedDevice(memory_bytes=whole_bytes // 2)
    with Relay(
        fresh(Stack), adamw, small, loss=preferences, split=Views(2), config=RelayConfig(micro_batches=1)
    ) as relay:
        with pytest.raises(DeviceOutOfMemory) as caught:
            relay.step(batch)
        assert 1 < caught.value.settings["micro_batches"] <= 64  # a micro-batch has one pair at least
        relay.fit(batch, fixed=("ahead", "stash"))
        assert 1 < relay.config.micro_batches <= 64
        relay.step(batch)
    with case.relay(fresh(case.make), config=RelayConfig(micro_batches=4, keep="1 MB")) as relay:
        relay.step(batch)
    lab = Lab(fresh(Stack), batch, adamw(fresh(Stack).parameters()), loss=preferences, split=Views(2), micro_batches=4)
    assert lab.verify(lab.plan(Plain())).equal
    assert lab.rows_of(batch).count == 64


def test_fewer_rows_than_micro_batches_run_one_by_one() -> None:
    batch = {name: value[:6] for name, value in packed(0).items() if name in ("input_ids", "labels")}
    batch |= {"cu_seqlens": torch.tensor([0, 4, 6]), "max_seqlen": 4}
    with Relay(
        fresh(Packed), adamw, loss=token_loss, split=Sequences("cu_seqlens"), config=RelayConfig(micro_batches=3)
    ) as relay:
        with pytest.warns(UserWarning, match=r"2 row\(s\), fewer than micro_batches=3"):
            assert relay.step(batch).samples == 2


# -- programs of other libraries ---------------------------------------------------------------------------------------


def train(model: nn.Module, batch: Batch, loss: Loss | None, parts: int, **options: Any) -> float:
    with Relay(model, adamw, EmulatedDevice(), loss=loss, config=RelayConfig(micro_batches=parts), **options) as relay:
        return relay.step(batch).loss


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_transformer_in_its_default_layout() -> None:
    batch = (noise(7, 6, 8), noise(5, 6, 8, seed=8), whole(5, 5, 6))
    plain = fresh(Translator)
    optimizer = adamw(plain.parameters())
    for a in (0, 2, 4):
        source, target, labels = (each[:, a : a + 2] for each in batch)
        (F.cross_entropy(plain(source, target).flatten(0, 1), labels.flatten()) / 3).backward()
    optimizer.step()
    for split in (1, (1, 1, 1), {0: 1, 1: TensorChunkSpec(1), 2: 1}):
        model = fresh(Translator)
        train(model, batch, lambda out, part: F.cross_entropy(out.flatten(0, 1), part[-1].flatten()), 3, split=split)
        assert_equal(model, plain)


@pytest.mark.parametrize("split", [Sequences("cu_seq_lens_q", "cu_seq_lens_k"), Sequences(position_ids="position_ids")])
def test_batches_of_the_flattening_collator(split: Sequences) -> None:
    """The oracle packs the sequences of each micro-batch with the same collator, and divides by targets."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=False)
    lengths = (7, 3, 2, 5, 1, 4)
    features = [{"input_ids": whole(32, n, seed=n).tolist()} for n in lengths]
    batch, parts = collate(features), [collate(features[:2]), collate(features[2:5]), collate(features[5:])]
    for found, wanted in zip(rows_rule(split)(batch).split(3), parts, strict=True):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, int):
                assert split.position_ids or found[name] == value
            elif split.cumulative or "cu_seq" not in name:
                assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name
    if split.position_ids is not None:  # transformers finds the sequences itself
        batch = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
        parts = [{name: part[name] for name in batch} for part in parts]
    plain = make_gpt(2).eval()
    optimizer = adamw(plain.parameters())
    for part, targets in zip(parts, (8, 5, 3), strict=True):
        (plain(**part, use_cache=False).loss / (16 / targets)).backward()
    optimizer.step()
    model = make_gpt(2).eval()
    train(model, batch, None, 3, split=split)
    assert_equal(model, plain)


def test_packed_tokens_without_ignored_borders_are_refused_or_warned_of() -> None:
    """A shift over the whole micro-batch also predicts the first token of a sequence from the one before it."""
    batch = packed(0)

    def shifted(outputs: Tensor, part: Batch) -> Tensor:
        return F.cross_entropy(outputs[:-1], part["labels"][1:])

    model = fresh(Packed)
    with pytest.raises(ValueError, match=r"together and .* in two parts"):
        train(model, batch, shifted, 2, split=Sequences("cu_seqlens"))
    batch["labels"][batch["cu_seqlens"][:-1].long()] = -100
    train(model, batch, shifted, 2, split=Sequences("cu_seqlens"))


# -- the remedies of the refusal ---------------------------------------------------------------------------------------


def test_the_refusal_of_mixed_rows_names_cuts_that_work() -> None:
    with pytest.raises(ValueError, match=r"split=1 or split=\{.*split=Views\(2\).*split=Sequences"):
        train(fresh(Stack), views(0), preferences, 4)
    train(fresh(Stack), views(0), preferences, 4, split=Views(2))


def test_a_function_is_compared_on_halves_of_the_first_micro_batch() -> None:
    with pytest.raises(ValueError, match=r"together and .* in two parts"):
        train(fresh(Stack), ragged(0), lambda out, part: nt_xent(out[:, 0], part), 2, split=by_length)

    def only_four(batch: Batch, count: int) -> list[Batch]:
        return by_length(batch, count) if len(batch["y"]) == 8 else [batch]

    with pytest.warns(UserWarning, match=r"not compared .*split=only_four returned 1 part\(s\) for 2 micro-batch"):
        train(fresh(Stack), ragged(0), pooled_loss, 4, split=only_four)


# -- cutting and joining, without a relay ------------------------------------------------------------------------------


def never() -> list[float]:
    raise AssertionError("there is no scalar")


@given(st.integers(1, 6), st.integers(2, 3), st.integers(1, 6))
def test_joined_parts_are_the_batch_with_gradients_in_place(rows: int, blocks: int, parts: int) -> None:
    parts = min(rows, parts)
    flat = noise(rows * blocks, 3)
    for split, x in ((Views(blocks), flat), ({"x": 1}, noise(40, rows, 3)), ({"x": 0}, flat)):
        cut = rows_rule(split)({"x": x})
        leaves = [{"x": part["x"].clone().requires_grad_()} for part in cut.split(parts)]
        joined = cut.join(leaves, never)
        assert torch.equal(joined["x"], x)
        joined["x"].backward(x)
        for leaf in leaves:
            assert torch.equal(leaf["x"].grad, leaf["x"].detach())


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 12), st.booleans())
def test_sequences_stay_whole_and_parts_balanced(lengths: list[int], parts: int, has_batch_dim: bool) -> None:
    parts, total = min(parts, len(lengths)), sum(lengths)
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    positions = torch.cat([torch.arange(n) for n in lengths])
    batch = {
        "ids": torch.arange(total),
        "positions": positions,
        "reward": torch.arange(len(lengths)),
        "one": noise(1, 50),
    }
    if has_batch_dim:
        batch |= {"ids": batch["ids"][None], "positions": positions[None]}
    by_positions = rows_rule(Sequences(position_ids="positions"))(batch)
    batch = {**batch, "cu": torch.tensor(borders), "max_seqlen": max(lengths)}
    cut = rows_rule(Sequences("cu"))(batch)
    assert cut.count == by_positions.count == len(lengths)
    micro_batches = cut.split(parts)
    found = [part["cu"].diff().tolist() for part in micro_batches]
    assert [n for each in found for n in each] == lengths and cut.sizes(parts) == [len(each) for each in found]
    if parts > 1:
        assert all(part["max_seqlen"] == max(each) for part, each in zip(micro_batches, found, strict=True))
    assert all(part["reward"].numel() == len(each) for part, each in zip(micro_batches, found, strict=True))
    joined = cut.join([{"ids": part["ids"], "reward": part["reward"]} for part in micro_batches], never)
    assert torch.equal(joined["ids"], batch["ids"])
    if parts < len(lengths):
        assert torch.equal(joined["reward"], batch["reward"])
    largest = max(map(sum, found))
    assert all(largest <= max(sum(cut) for cut in other) for other in _cuts(lengths, parts))
    again = [part["ids"] for part in by_positions.split(parts)]
    assert all(torch.equal(one["ids"], other) for one, other in zip(micro_batches, again, strict=True))


def _cuts(lengths: list[int], parts: int) -> list[list[list[int]]]:
    """All cuts of a list into non-empty parts, in order; few of them, if there are many."""
    if parts == 1:
        return [[lengths]]
    firsts = range(1, len(lengths) - parts + 2)
    return [[lengths[:i], *rest] for i in firsts for rest in _cuts(lengths[i:], parts - 1)][:2000]


def test_targets_are_counted_per_row_of_the_cut() -> None:
    labels = torch.tensor([[1, 2, -100], [3, -100, -100], [4, 5, 6], [7, 8, -100]])
    whole, shifted = "targets in batch['y']", "targets in batch['y'] after a shift by one"
    counts = rows_rule(1)({"y": labels.T}).item_counts()
    assert counts == {"rows": [1, 1, 1, 1], whole: [2, 1, 3, 2], shifted: [1, 0, 2, 1]}
    counts = rows_rule(Views(2))({"y": labels}).item_counts()
    assert counts == {"rows": [1, 1], whole: [5, 3], shifted: [3, 1]}
    packed = {"y": labels.reshape(1, -1), "cu": torch.tensor([0, 4, 5, 12])}
    counts = rows_rule(Sequences("cu"))(packed).item_counts()
    assert counts == {"rows": [1, 1, 1], whole: [3, 0, 5], shifted: [2, 0, 5]}


def test_batches_of_other_types() -> None:
    @dataclass(frozen=True)
    class Graphs:
        x: Tensor
        name: str

    first, second = rows_rule({"x": 1})(Graphs(noise(2, 4), "a")).split(2)
    assert first.x.shape == (2, 2) and second.name == "a"
    arrays = rows_rule({"x": 1})({"x": np.arange(8).reshape(2, 4), "names": ["a", "b", "c", "d"]}).split(2)
    assert arrays[1]["x"].tolist() == [[2, 3], [6, 7]] and arrays[1]["names"] == ["c", "d"]
    nested = {"inputs": {"x": noise(3, 4), "lengths": torch.arange(4)}, "table": [noise(4, 2), noise(4)]}
    [part, _] = rows_rule({"inputs": {"x": 1}, "table": None})(nested).split(2)
    assert part["inputs"]["x"].shape == (3, 2) and part["inputs"]["lengths"].tolist() == [0, 1]
    assert part["table"][0].shape == (4, 2)
    encoding = BatchEncoding({"ids": torch.arange(8).reshape(2, 4), "cu": torch.tensor([0, 3, 4])})
    part = rows_rule({"ids": 1, "cu": None})(encoding).split(2)[1]
    assert type(part) is BatchEncoding and part["ids"].tolist() == [[2, 3], [6, 7]] and len(part["cu"]) == 3
    encoding["ids"] = encoding["ids"][:1]
    part = rows_rule(Sequences("cu"))(encoding).split(2)[1]
    assert type(part) is BatchEncoding and part["ids"].tolist() == [[3]] and part["cu"].tolist() == [0, 1]
    part = rows_rule(Sequences(1))((torch.arange(4), torch.tensor([0, 3, 4]))).split(2)[0]
    assert [each.tolist() for each in part] == [[0, 1, 2], [0, 3]]
    images = rows_rule(Views(2))({"x": noise(4, 2), "names": ["a", "b", "c", "d"]}).split(2)
    assert [part["names"] for part in images] == [["a", "c"], ["b", "d"]]
    numbers = {
        "ids": np.arange(6)[None],
        "cu": np.array([0, 4, 6], np.int32),
        "texts": ["a", "b"],
        "tokens": list("abcdef"),
    }
    first, second = rows_rule(Sequences("cu"))(numbers).split(2)
    assert second["ids"].tolist() == [[4, 5]] and second["cu"].tolist() == [0, 2] and second["cu"].dtype == np.int32
    assert first["texts"] == ["a"] and second["tokens"] == ["e", "f"]


REFUSED: dict[str, tuple[Any, Batch, str]] = {
    "no such dim": (1, {"x": noise(3, 4), "n": torch.arange(4)}, r"batch\['n'\] of shape \(4,\) has no dim 1.*'lengths': 0"),
    "sizes": ({"x": 1}, {"x": noise(3, 4), "y": noise(3)}, r"disagree.*batch\['x'\] 4 in dim 1, batch\['y'\] 3 in dim 0"),
    "key": ({"z": 1}, {"x": noise(3, 4)}, r"'z' is not in batch, which has 'x'"),
    "inner key": ({"x": {"z": 1}}, {"x": {"a": noise(3, 4)}}, r"'z' is not in batch\['x'\]"),
    "position": ({2: 1}, (noise(3, 4),), r"2 is not in batch, which has 0"),
    "odd": (Views(2), {"x": noise(5, 4)}, r"Views\(count=2\): the batch has 5 row\(s\).*no multiple of 2"),
    "no borders": (Sequences("cu"), {"x": noise(5)}, r"'cu' is not in the batch, which has 'x'"),
    "falling": (Sequences("cu"), {"x": noise(5), "cu": torch.tensor([0, 3, 2, 5])}, r"0 first and then larger.*\[0, 3, 2, 5\]"),
    "total": (Sequences("cu"), {"x": noise(5), "cu": torch.tensor([0, 3, 6])}, r"6 tokens in all, but no tensor.*\(5,\)"),
    "unlike": (
        Sequences("q", "k"),
        {"x": noise(5), "q": torch.tensor([0, 3, 5]), "k": torch.tensor([0, 2, 5])},
        r"disagree: \[0, 3, 5\] and \[0, 2, 5\]",
    ),
    "a mask": (
        Sequences("cu"),
        {"x": noise(5), "mask": noise(1, 1, 5, 5), "cu": torch.tensor([0, 3, 5])},
        r"batch\['mask'\] has the shape \(1, 1, 5, 5\), which is neither",
    ),
    "longest": (
        Sequences("cu"),
        {"x": noise(5), "max_seqlen": 2, "cu": torch.tensor([0, 3, 5])},
        r"batch\['max_seqlen'\] is 2, but the longest sequence has 3",
    ),
    "rows of packed": (
        Sequences(position_ids="p"),
        {"p": torch.arange(3).expand(2, 3)},
        r"batch\['p'\] has the shape \(2, 3\).*leave split out",
    ),
    "few": (lambda batch, k: [batch], {"x": noise(5)}, r"split=<lambda> returned 1 part\(s\) for 2 micro-batch.*micro_batches=1"),
    "no list": (lambda batch, k: batch, {"x": noise(5)}, r"split=<lambda> returned a dict: return a list"),
    "no batch": (lambda batch, k: [batch["x"]] * k, {"x": noise(5)}, r"returned a Tensor among its parts"),
    "a doubt": (
        Sequences(position_ids="p"),
        {"p": torch.tensor([0, 0, 1]), "cu": torch.tensor([0, 1, 3])},
        r"batch\['cu'\] may be tokens or the cumulative lengths.*Sequences\('cu'\)",
    ),
    "too few": (Sequences("cu"), {"x": noise(5), "cu": torch.tensor([0, 5])}, r"1 sequence\(s\) but micro_batches=2"),
}  # fmt: skip


@pytest.mark.all_cases
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused(name: str) -> None:
    split, batch, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        rows_rule(split)(batch).split(2)


def test_unknown_rules_are_refused() -> None:
    for wrong in ("x", True, Views, 1.5, {"x": "dim"}):
        with pytest.raises(TypeError, match="whole number|give a dim"):
            rows_rule(wrong)({"x": noise(2, 2)})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="join='x'.*a function of the list of outputs"):
        Relay(fresh(Stack), join="x")
    with pytest.raises(ValueError, match=r"Views\(1\)"):
        Views(1)
    for arguments in ({}, {"position_ids": "p", "cumulative": ("cu",)}):
        with pytest.raises(ValueError, match="and not both"):
            Sequences(*arguments.get("cumulative", ()), position_ids=arguments.get("position_ids"))


def test_outputs_that_cannot_be_joined_are_refused_with_a_remedy() -> None:
    cut = rows_rule({"x": 1})({"x": noise(9, 4)})
    square = [noise(2, 2), noise(2, 2)]
    with pytest.raises(ValueError, match=r"dims 0 and 1 may both hold the rows: pass join=.*join=1"):
        cut.join(square, never)
    assert rows_rule({"x": 1}, join=1)({"x": noise(9, 4)}).join(square, never).shape == (2, 4)
    with pytest.raises(ValueError, match=r"join=2: dim 2 of outputs does not hold the rows"):
        rows_rule(join=2)({"x": noise(4)}).join(square, never)
    with pytest.raises(ValueError, match=r"'z' is not in outputs, which has 'y'"):
        rows_rule(join={"z": 0})({"x": noise(4)}).join([{"y": noise(2)}] * 2, never)
    with pytest.raises(ValueError, match=r"unlike structures.*join=lambda"):
        rows_rule()({"x": noise(4)}).join([{"y": noise(2)}, noise(2)], never)
    with_function = rows_rule(by_length)(ragged(0))
    parts = [noise(4, 2), noise(4, 2, seed=8)]
    with pytest.raises(ValueError, match=r"pass join=lambda outputs.*or join=0"):
        with_function.join(parts, never)
    assert torch.equal(rows_rule(by_length, join=0)(ragged(0)).join(parts, never), torch.cat(parts))
    assert rows_rule(join=len)({"x": noise(4)}).join(parts, never) == 2
    shared = rows_rule(join={"x": 1, "table": None})({"x": noise(4)})
    joined = shared.join([{"x": noise(3, 2), "table": noise(2)}] * 2, never)
    assert joined["x"].shape == (3, 4) and joined["table"].shape == (2,)


def test_a_function_puts_outputs_together_that_it_cut() -> None:
    """Of micro-batches that were trimmed: padded again, and back in order."""
    case, model = CASES["function"], fresh(Stack)

    def padded(outputs: Sequence[Tensor]) -> Tensor:
        longest = max(each.shape[1] for each in outputs)
        alike = [F.pad(each, (0, 0, 0, longest - each.shape[1])) for each in outputs]
        return torch.stack(alike, 1).flatten(0, 1)

    with torch.no_grad():
        wanted = copy.deepcopy(model).eval()(ragged(0)["x"])
    with case.relay(model, join=padded) as relay:
        found = relay.forward(ragged(0))
    inside = torch.arange(5) < ragged(0)["length"][:, None]
    torch.testing.assert_close(found[inside], wanted[inside])


# -- inspection --------------------------------------------------------------------------------------------------------


def test_a_look_names_rows_only_where_they_are() -> None:
    ids = whole(32, 8, 6)
    batch = {"input_ids": ids, "labels": ids}
    with Relay(make_gpt(2), adamw, split=Views(2), config=RelayConfig(micro_batches=2)) as relay:
        found = relay.look(batch, micro_batches=[1], row=1, generate=2)
        assert found.tokens[1].tolist() == ids[3].tolist()
        assert all(each.added_at is not None for each in found.passings) and all(each.tokens for each in found.written)
        with pytest.raises(ValueError, match=r"row=2: a chosen micro-batch has 2 row"):
            relay.look(batch, row=2)
    case = CASES["dims"]
    with case.relay(fresh(case.make)) as relay:
        found = relay.look(over_time(0))
        assert all("not the rows" in each.why_not_at for each in found.passings)
    collate = DataCollatorWithFlattening()
    batch = collate([{"input_ids": whole(32, n, seed=n).tolist()} for n in (5, 4, 3)])
    with Relay(
        make_gpt(2), adamw, split=Sequences(position_ids="position_ids"), config=RelayConfig(micro_batches=2)
    ) as relay:
        with pytest.raises(ValueError, match=r"generate: rows are not along the first dimension.*leave generate out"):
            relay.look(batch, generate=2)
        assert not relay.look(batch).tokens


def test_a_function_that_cannot_cut_a_few_rows_is_warned_of_for_a_loss_of_the_batch() -> None:
    """As for losses of micro-batches: outputs are not compared, and the step trains."""

    def cut(batch: Any, count: int) -> list[Any]:
        if len(batch["x"]) < 12:
            raise ValueError("needs twelve rows")
        return [{"x": part} for part in batch["x"].chunk(count)]

    options: dict[str, Any] = {"loss": lambda outputs, batch: outputs.pow(2).mean(), "loss_over": "batch"}
    with Relay(fresh(Stack), adamw, split=cut, join=0, config=RelayConfig(micro_batches=3), **options) as relay:
        with pytest.warns(UserWarning, match="were not compared .*needs twelve rows"):
            relay.step({"x": noise(12, 8)})
        assert relay.verify({"x": noise(12, 8)}).equal
