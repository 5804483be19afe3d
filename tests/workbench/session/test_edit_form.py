"""The form of edits: the edits that answers define, and previews that match the result."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from sessions import make_batches, make_relay, mse
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel
from zoo import BY_NAME, WIDTH, Chain, Looped, ResidualMlp, loss_of

from l2l_core import (
    Delink,
    Drop,
    Duplicate,
    EmulatedDevice,
    Freeze,
    Insert,
    Interpolate,
    Loops,
    Move,
    Relay,
    Swap,
    Unfreeze,
    Unroll,
)
from workbench.session.edit_form import END, FORM_FIELDS, PREVIOUS, make_edit, preview_edit
from workbench.session.edit_text import describe_entry
from workbench.session.snapshot_rows import layer_rows
from workbench.session.snapshot_values import StepFlop
from workbench.session.step_estimates import FlopCounter

NEW = {"optimizer": "fresh", "factor": 0.5, "warmup": 3}
MADE: list[tuple[str, dict[str, Any], Any]] = [
    ("Insert", {"at": "L002", "like": PREVIOUS, "init": "identity", **NEW}, Insert("L002", warmup=3)),
    ("Insert", {"at": END, "like": "L000", "init": "copy", **NEW, "optimizer": "scaled"},
     Insert(("", 4), like="L000", init="copy", optimizer=0.5, warmup=3)),
    ("Insert", {"at": "L000", "like": PREVIOUS, "init": "fresh", **NEW}, Insert("L000", init="fresh", warmup=3)),
    ("Duplicate", {"first": "L001", "last": "L002", "mode": "top", **NEW, "optimizer": "copy"},
     Duplicate(("L001", "L002"), "top", "copy", 3)),
    ("Drop", {"first": "L001", "last": "L001", "park": "disk"}, Drop("L001", "disk")),
    ("Drop", {"first": "L001", "last": "L003", "park": "free"}, Drop(("L001", "L003"), None)),
    ("Swap", {"layer": "L000", "other": "L003"}, Swap("L000", "L003")),
    ("Move", {"layer": "L000", "to": "L003"}, Move("L000", "L003")),
    ("Interpolate", {"layer": "L000", "other": "L003", "weight": 0.25}, Interpolate("L000", "L003", 0.25)),
    ("Freeze", {"first": "L000", "last": "L003"}, Freeze(("L000", "L003"))),
    ("Unfreeze", {"first": "L000", "last": "L000"}, Unfreeze("L000")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "answers", "edit"), MADE, ids=[f"{i} {made[0]}" for i, made in enumerate(MADE)])
def test_preview_matches_the_edit(kind: str, answers: dict[str, Any], edit: Any) -> None:
    assert set(answers) == set(FORM_FIELDS[kind])
    with make_relay() as relay:
        relay.step(make_batches()[0])
        before = layer_rows(relay)
        made = make_edit(kind, answers, before)
        assert made == edit
        outlook = preview_edit(made, before, {})
        relay.apply(made)
        after = layer_rows(relay)
        entry = relay.journal[-1]
    assert outlook.layers == len(after) - len(before)
    assert (
        outlook.params == sum(row.num_params for row in after) - sum(row.num_params for row in before) == entry.params
    )
    assert outlook.nbytes == sum(row.nbytes for row in after) - sum(row.nbytes for row in before)
    assert (outlook.keeps_function, outlook.optimizer) == (entry.preserves_function, entry.optimizer)
    assert outlook.effect.endswith(".") and all(outlook.facts(before))


def test_facts_describe_the_changes() -> None:
    with make_relay() as relay:
        rows = layer_rows(relay)
        drop = preview_edit(Drop(("L001", "L002")), rows, {}).facts(rows)
        swap = preview_edit(Swap("L001", "L002"), rows, {}).facts(rows)
    assert drop[:3] == ("computes something else", "4 → 2 layers", "288 → 144 weights")
    assert swap[1] == "4 layers"


def test_preview_of_delink_has_no_sizes() -> None:
    with make_relay() as relay:
        rows = layer_rows(relay)
        made = make_edit("Delink", {"first": "L000", "last": "L002", **NEW, "optimizer": "copy"}, rows)
        outlook = preview_edit(made, rows, {})
    assert made == Delink(("L000", "L002"), "copy", 3)
    assert (outlook.layers, outlook.params, outlook.nbytes) == (None, None, None) and outlook.keeps_function
    assert outlook.facts(rows)[:2] == ("computes the same", "a layer for every place")


def test_form_delinks_all_places_of_a_layer() -> None:
    with make_relay() as relay:
        model = relay.model
    for place in (2, 3, 4):
        model[place] = model[1]
    with Relay(model, device=EmulatedDevice(), layers=[model[1]], loss=mse) as relay:
        rows = layer_rows(relay)
        assert [(row.key, row.position) for row in rows] == [("L000", 0)]
        relay.apply(make_edit("Delink", {"first": "L000", "last": "L000", **NEW}, rows))
        assert [(row.key, row.position) for row in layer_rows(relay)] == [(f"L00{i}", i) for i in range(4)]


def test_form_changes_and_unrolls_loops() -> None:
    kind = BY_NAME["looped"]
    with Relay(kind.make_model(), device=EmulatedDevice(), loss=kind.loss) as relay:
        relay.step(kind.make_batch(4))
        made = make_edit("Loops", {"count": 3}, rows := layer_rows(relay))
        outlook = preview_edit(made, rows, {})
        assert made == Loops(3, "layers") and (outlook.layers, outlook.params) == (0, 0) and not outlook.keeps_function
        relay.apply(made)
        assert describe_entry(relay.journal[-1], relay.journal) == "looped layers 3 times (n_loops)"
        unroll = make_edit("Unroll", {**NEW, "optimizer": "scaled"}, rows)
        outlook = preview_edit(unroll, rows, {})
        assert unroll == Unroll("layers", optimizer=0.5, warmup=3) and outlook.layers is None and outlook.keeps_function
        relay.apply(unroll)
        assert len(layer_rows(relay)) == 6


def test_preview_has_the_operations_of_a_model_built_anew() -> None:
    rows, edits = layer_rows, {"Drop": {"first": "L000", "last": "L001", "park": "memory"}, "Insert": MADE[0][1]}
    edits["Duplicate"] = {"first": "L000", "last": "L002", "mode": "top", **NEW}
    tokens = torch.randint(50, (4, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    with Relay(make_gpt(4), partial(torch.optim.SGD, lr=0.1), EmulatedDevice()) as relay:
        flop = counted(relay, batch)
        assert flop is not None and flop.total == counted_anew(make_gpt(4), batch)
        for kind, answers in edits.items():
            outlook = preview_edit(make_edit(kind, answers, rows(relay)), rows(relay), {}, flop)
            assert outlook.layers is not None
            assert outlook.flop == (flop.total, counted_anew(make_gpt(4 + outlook.layers), batch)), kind
            assert " per step" in " ".join(outlook.facts(rows(relay)))
        relay.apply(Freeze("L002"))
        copied = preview_edit(Duplicate("L002"), rows(relay), {}, counted(relay, batch))
        assert copied.flop is None and "FLOP not known: the copy of a frozen layer" in " ".join(copied.facts(()))
        assert copied.effect == "A copy of L002, after it."


def test_preview_of_loops_has_the_operations_of_a_model_built_anew() -> None:
    kind = BY_NAME["looped"]
    with Relay(kind.make_model(), device=EmulatedDevice(), loss=kind.loss) as relay:
        batch = kind.make_batch(4)
        flop, stack, plain = counted(relay, batch), layer_rows(relay), kind.make_model()
        assert flop is not None
        plain.n_loops = 5
        with FlopCounterMode(display=False) as counter:
            loss_of(kind, plain, batch).backward()
        assert preview_edit(Loops(5, "layers"), stack, {}, flop).flop == (flop.total, counter.get_total_flops())
        assert preview_edit(Unroll("layers"), stack, {}, flop).flop == (flop.total, flop.total)


def test_operations_that_are_not_known_are_left_out_with_the_reason() -> None:
    with make_relay() as relay:
        for param in relay.shell.params:
            param.requires_grad_(False)
        flop, rows = counted(relay, make_batches()[0]), layer_rows(relay)
        outlook = preview_edit(Drop("L000"), rows, {}, flop)
        assert outlook.flop is None and "another one may become the first" in outlook.flop_unknown
        relay.apply(Insert(1, init="copy"))
        assert (
            "none counted since the last edit" == preview_edit(Drop("L000"), layer_rows(relay), {}, flop).flop_unknown
        )
        assert "or they depend on values" in preview_edit(Drop("L000"), rows, {}).flop_unknown
        assert preview_edit(Freeze("L000"), rows, {}).flop_unknown == ""


class Supervised(Chain):
    """Deep supervision: one head on what each layer returns."""

    def __init__(self, depth: int) -> None:
        super().__init__([ResidualMlp() for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, h = list[torch.Tensor](), self.embed(x)
        for layer in self.layers:
            outputs.append(h := layer(h))
        return torch.stack([self.head(each.mean(1)) for each in outputs]).mean(0)


class Gated(Chain):
    """A projection for every layer, in a list beside them."""

    def __init__(self, depth: int) -> None:
        super().__init__([ResidualMlp() for _ in range(depth)])
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(depth))

    def walk(self, h: torch.Tensor) -> torch.Tensor:
        for layer, gate in zip(self.layers, self.gates, strict=False):
            h = layer(h * torch.sigmoid(gate(h)))
        return h


class Mixed(Chain):
    """A learned sum of what all layers return."""

    def __init__(self, depth: int) -> None:
        super().__init__([ResidualMlp() for _ in range(depth)])
        self.mix = nn.Linear(depth, 1)

    def walk(self, h: torch.Tensor) -> torch.Tensor:
        outputs = [h := layer(h) for layer in self.layers]
        return self.mix(torch.stack(outputs, -1))[..., 0]


class Adapted(Looped):
    """A projection in every loop."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def walk(self, h: torch.Tensor) -> torch.Tensor:
        for _ in range(self.n_loops):
            h = Chain.walk(self, self.adapter(h))
        return h


@pytest.mark.parametrize("made", [Supervised, Gated, Mixed])
def test_operations_that_change_outside_of_the_layers_are_not_given_as_those_of_the_step(made: Any) -> None:
    batch = BY_NAME["chain"].make_batch(4)
    with Relay(made(4), device=EmulatedDevice(), loss=nn.CrossEntropyLoss()) as relay:
        flop, rows = counted(relay, batch), layer_rows(relay)
        assert flop is not None and flop.total == counted_with_loss(made(4), batch)
        of_layers = sum(layer.flop for layer in flop.layers.values())
        assert flop.total - of_layers // 4 != counted_with_loss(made(3), batch)
        for edit in (Drop("L003"), Insert(at=4, init="copy"), Duplicate("L000")):
            outlook = preview_edit(edit, rows, {}, flop)
            assert outlook.flop is None and "own code makes products for every layer" in outlook.flop_unknown


@pytest.mark.parametrize("count", [1, 3])
def test_operations_of_every_loop_outside_of_the_layers_are_not_left_out(count: int) -> None:
    batch = BY_NAME["chain"].make_batch(4)
    with Relay(Adapted(), device=EmulatedDevice(), loss=nn.CrossEntropyLoss()) as relay:
        flop, rows = counted(relay, batch), layer_rows(relay)
        outlook = preview_edit(Loops(count, "layers"), rows, {}, flop)
        assert outlook.flop is None and "own code makes products in every loop" in outlook.flop_unknown
        relay.apply(Loops(1))
        outlook = preview_edit(Loops(count, "layers"), rows, {}, counted(relay, batch))
        assert outlook.flop is None and "in every loop, or may do so" in outlook.flop_unknown


def counted_with_loss(model: nn.Module, batch: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    return counter.get_total_flops()


def counted(relay: Relay, batch: Any) -> StepFlop | None:
    return FlopCounter(relay).count_layers(batch, relay.step(batch).trace)


def make_gpt(layers: int) -> GPT2LMHeadModel:
    """Return a model whose attention is made of plain products, which PyTorch counts on every device."""
    shape = {"n_layer": layers, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 16, "attn_pdrop": 0.1}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).train()
    model.loss_type = "ForCausalLM"
    return model


def counted_anew(model: GPT2LMHeadModel, batch: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    return counter.get_total_flops()


def test_replace_needs_code() -> None:
    with make_relay() as relay, pytest.raises(ValueError, match=r"Replace\('L003', YourLayer\(\)\)"):
        make_edit("Replace", {}, layer_rows(relay))
