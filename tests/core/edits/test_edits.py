"""Edits between steps: exact, undoable, and equal to in-core training after each of them."""

from __future__ import annotations

import copy
import gc
import math
import os
import random
import tempfile
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import assert_same, keys, make_batch, make_gpt, make_relay, state_of
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from l2l_core import (
    Depth,
    Drop,
    Duplicate,
    EmulatedDevice,
    Freeze,
    Insert,
    Interpolate,
    Move,
    Relay,
    RelayConfig,
    Replace,
    Swap,
    Unfreeze,
)
from l2l_core.edits.edit import Edit


@pytest.fixture
def relay() -> Iterator[Relay]:
    with make_relay(make_gpt()) as made:
        for seed in range(2):
            made.step(make_batch(seed))
        yield made


def new_block(relay: Relay) -> nn.Module:
    module = copy.deepcopy(relay.stack[0].module)
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(0.5)
    return module


EDITS: dict[str, tuple[Callable[[Relay], Edit], list[str]]] = {
    "insert identity": (lambda r: Insert(at=1), ["L000", "L004", "L001", "L002", "L003"]),
    "insert at the front": (lambda r: Insert(at=0, init="copy"), ["L004", "L000", "L001", "L002", "L003"]),
    "insert behind the last": (lambda r: Insert(at=4, init="identity"), ["L000", "L001", "L002", "L003", "L004"]),
    "insert fresh": (lambda r: Insert(at=2, init="fresh", warmup=3), ["L000", "L001", "L004", "L002", "L003"]),
    "insert between": (
        lambda r: Insert(at=2, init="interpolate", optimizer=0.5),
        ["L000", "L001", "L004", "L002", "L003"],
    ),
    "insert like": (
        lambda r: Insert(at="L003", like="L001", init="copy", optimizer="copy"),
        ["L000", "L001", "L002", "L004", "L003"],
    ),
    "insert a module": (lambda r: Insert(at=2, module=new_block(r)), ["L000", "L001", "L004", "L002", "L003"]),
    "duplicate one": (lambda r: Duplicate(1), ["L000", "L001", "L004", "L002", "L003"]),
    "duplicate a span on top": (
        lambda r: Duplicate(slice(0, 2), mode="top"),
        ["L000", "L001", "L002", "L003", "L004", "L005"],
    ),
    "double interleaved": (
        lambda r: Duplicate(mode="interleaved"),
        ["L000", "L004", "L001", "L005", "L002", "L006", "L003", "L007"],
    ),
    "drop": (lambda r: Drop(1), ["L000", "L002", "L003"]),
    "drop a span": (lambda r: Drop(slice(1, 4)), ["L000"]),
    "swap": (lambda r: Swap(0, -1), ["L003", "L001", "L002", "L000"]),
    "move": (lambda r: Move("transformer.h.0", 2), ["L001", "L002", "L000", "L003"]),
    "replace": (lambda r: Replace(2, new_block(r)), ["L000", "L001", "L004", "L003"]),
    "interpolate": (lambda r: Interpolate(1, 2, 0.25), ["L000", "L001", "L002", "L003"]),
    "freeze": (lambda r: Freeze(slice(0, 2)), ["L000", "L001", "L002", "L003"]),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_does_what_it_says_and_its_inverse_takes_it_back(relay: Relay, name: str) -> None:
    make, expected = EDITS[name]
    batch = make_batch(7)
    before, loss = state_of(relay), relay.evaluate(batch)
    edit = make(relay)
    inverse = relay.apply(edit)
    assert keys(relay) == expected
    assert [unit.name for unit in relay.stack] == [f"transformer.h.{i}" for i in range(len(expected))]
    assert relay.model.config.n_layer == len(expected)
    if edit.preserves_function:
        assert relay.evaluate(batch) == pytest.approx(loss, abs=1e-6)
    assert relay.verify(batch).equal, "relay and in core"
    relay.apply(inverse)
    assert_same(state_of(relay), before)
    assert relay.evaluate(batch) == loss
    assert relay.verify(batch).equal


@pytest.mark.parametrize("name", EDITS)
def test_training_goes_on_and_undo_brings_back_what_was_edited(relay: Relay, name: str) -> None:
    make, _ = EDITS[name]
    relay.apply(make(relay))
    relay.step(make_batch(3))
    assert relay.verify(make_batch(4)).equal
    relay.step(make_batch(4))
    relay.undo()
    assert keys(relay) == ["L000", "L001", "L002", "L003"] and relay.model.config.n_layer == 4
    assert relay.verify(make_batch(5)).equal
    relay.redo()
    assert keys(relay) == EDITS[name][1]
    relay.step(make_batch(6))
    assert relay.verify(make_batch(7)).equal


def test_a_relay_after_an_edit_is_a_relay_over_the_edited_model(relay: Relay) -> None:
    """The oracle knows nothing of edits: a plain copy of the edited model and of its optimizer, trained in core."""
    relay.apply(Insert(at=1, init="copy", optimizer="copy"), Drop(3), Freeze(0))
    model = copy.deepcopy(relay.model)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain.load_state_dict(copy.deepcopy(relay.optimizer.state_dict()))
    batch = make_batch(9)
    relay.config = RelayConfig(micro_batches=1)
    for module in (*model.modules(), *relay.model.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        plain.step()
        plain.zero_grad()
        assert relay.step(batch).loss == loss.item()
    for a, b in zip(relay.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_post_norm_layers_are_inserted_with_the_norm_before_them() -> None:
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=3, hidden_size=16, num_attention_heads=2, intermediate_size=32, vocab_size=32)
    model = BertForMaskedLM(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "LayerNorm" in name or name.endswith("bias"):
                param.add_(0.3 * torch.randn_like(param))
    batch = {"input_ids": torch.randint(32, (4, 8)), "labels": torch.randint(32, (4, 8))}
    with make_relay(model) as relay:
        relay.step(batch)
        before, loss = state_of(relay), relay.evaluate(batch)
        relay.apply(Insert(at=2))
        assert relay.evaluate(batch) == pytest.approx(loss, abs=1e-6)
        norm = relay.stack[1].module.output.LayerNorm
        assert torch.equal(norm.weight, torch.ones(16)) and torch.equal(norm.bias, torch.zeros(16))
        moved = relay.stack[2].module.output.LayerNorm.weight
        assert torch.equal(moved, before["bert.encoder.layer.1.output.LayerNorm.weight"])
        state = state_of(relay)
        name = "output.LayerNorm.weight/exp_avg"
        assert torch.equal(state[f"bert.encoder.layer.2.{name}"], before[f"bert.encoder.layer.1.{name}"])
        relay.step(batch)
        relay.undo()
        relay.step(batch)
        assert relay.verify(batch).equal


def test_a_group_of_edits_is_all_or_nothing(relay: Relay) -> None:
    before = state_of(relay)
    with pytest.raises(ValueError, match="out of range"):
        relay.apply(Drop(0), Swap(0, 1), Insert(at=1, init="copy"), Drop(17))
    assert keys(relay) == ["L000", "L001", "L002", "L003"] and relay.journal == ()
    assert_same(state_of(relay), before)
    assert relay.verify(make_batch()).equal
    relay.apply(Drop(0), Drop(0))
    assert keys(relay) == ["L002", "L003"] and len(relay.journal) == 1
    relay.undo()
    assert_same(state_of(relay), before)


def test_a_new_layer_warms_up_and_in_core_training_agrees(relay: Relay) -> None:
    relay.apply(Insert(at=2, init="copy", warmup=4))
    sizes = []
    for seed in range(5):
        assert relay.verify(make_batch(seed)).equal
        relay.step(make_batch(seed))
        sizes.append([unit.stats["update_ratio"] for unit in relay.stack])
    first, last = (row[2] / row[1] for row in (sizes[0], sizes[4]))  # against the layer it was copied from
    assert first < 0.5 * last


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Drop(4), "position 4 is out of range"),
        (Drop("L009"), "there are L000"),
        (Drop(slice(0, 4)), "one must stay"),
        (Insert(at=9, init="copy"), "out of range"),
        (Insert(at=0, init="interpolate"), "on both sides"),
        (Swap(0, "transformer.h.7"), "transformer.h.7"),
        (Insert(at=1, module=nn.Linear(2, 2, dtype=torch.float64)), "float64"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_has_changed(relay: Relay, edit: Edit, message: str) -> None:
    before = state_of(relay)
    with pytest.raises(ValueError, match=message):
        relay.apply(edit)
    assert_same(state_of(relay), before)
    assert relay.journal == () and relay.verify(make_batch()).equal


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Insert(at=1, init="zero"), "init='zero': must be one of 'identity'"),
        (lambda: Insert(at=1, optimizer="half"), "optimizer='half'"),
        (lambda: Insert(at=1, warmup=-1), "warmup=-1"),
        (lambda: Duplicate(1, mode="bottom"), "mode='bottom'"),
        (lambda: Drop(1, park="tape"), "park='tape'"),
        (lambda: Interpolate(0, 1, math.nan), "weight=nan: must be a finite number"),
        (lambda: Interpolate(0, 1, math.inf), "weight=inf: must be a finite number"),
        (lambda: Interpolate(0, 1, "half"), "weight='half': must be a finite number"),
        (lambda: Insert(at=1, optimizer=math.nan), "optimizer=nan: must be .* or a finite number"),
        (lambda: Duplicate(1, optimizer=math.inf), "optimizer=inf: must be .* or a finite number"),
        (lambda: Depth({0: 3}, optimizer=math.nan), "optimizer=nan: must be .* or a finite number"),
        (lambda: Depth({0: math.nan}), "depth from step 0 on is nan"),
    ],
)
def test_an_edit_that_makes_no_sense_cannot_be_made(make: Callable[[], Edit], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("edits", [("L001",), (Swap(0, 1), 2), ([Drop(0)],), (Drop,)], ids=repr)
def test_what_is_no_edit_is_refused(relay: Relay, edits: tuple[Any, ...]) -> None:
    order = keys(relay)
    with pytest.raises(TypeError, match=r"apply\(\) was given .* no edit: .*apply\(Drop\("):
        relay.apply(*edits)
    assert keys(relay) == order and relay.journal == ()


def in_two(model: nn.Module) -> list[dict[str, Any]]:
    """The first layers, and the last one with the head."""
    first, last, head = model.transformer.h[:3], model.transformer.h[3:], model.transformer.ln_f
    inside = {param for part in (*first, *last, head) for param in part.parameters()}
    rest = [param for param in model.parameters() if param not in inside]
    return [{"params": [*first.parameters(), *rest]}, {"params": [*last.parameters(), *head.parameters()], "lr": 1e-3}]


ORDERS: dict[str, Callable[[nn.Module], Any]] = {
    "of the model": lambda model: model.parameters(),
    "in two groups": in_two,
    "by name": lambda model: [param for _, param in sorted(dict(model.named_parameters()).items())],
    "backwards": lambda model: list(model.parameters())[::-1],
    "by kind": lambda model: [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == is_matrix]} for is_matrix in (True, False)
    ],
    "layers backwards": lambda model: [
        param
        for part in (
            model.transformer.ln_f,
            *list(model.transformer.h)[::-1],
            model.transformer.wpe,
            model.transformer.wte,
        )
        for param in part.parameters()
    ],
}


@pytest.mark.parametrize("order", ORDERS)
def test_groups_keep_the_order_of_a_plain_optimizer(order: str) -> None:
    """A `state_dict` tells parameters apart by their place alone."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(ORDERS[order](model), lr=1e-2)

    def assert_order(model: nn.Module) -> None:
        names = {param: name for name, param in model.named_parameters()}
        held = [
            [names[relay.store.masters.model_params[p]] for p in group["params"]] for group in optimizer.param_groups
        ]
        plain = [[names[param] for param in group["params"]] for group in made(model).param_groups]
        assert held == plain

    model = make_gpt(4)
    optimizer = made(model)
    with Relay(model, optimizer, EmulatedDevice()) as relay:
        relay.step(make_batch())
        moments = {i: state["exp_avg"].clone() for i, state in optimizer.state_dict()["state"].items()}
        relay.fork("other")
        relay.apply(Drop(3))
        relay.apply(Drop(0))
        relay.fork("thin")
        for _ in range(2):
            relay.undo()
            assert order == "in two groups" or assert_order(model) is None  # where a layer is decides its group there
        assert_order(model)
        edits = [Duplicate(1, "top"), Swap(0, 2), Move(1, 3), Insert(at=0, init="copy")]
        for edit in edits if order != "in two groups" else []:
            relay.apply(edit)
            assert_order(model)
        relay.switch("other")
        relay.switch("main")
        assert_order(model)
        after = optimizer.state_dict()["state"]
        assert all(torch.equal(moment, after[i]["exp_avg"]) for i, moment in moments.items())
    names = {param: name for name, param in model.named_parameters()}
    closed = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
    assert closed == [[names[param] for param in group["params"]] for group in made(model).param_groups]


def test_the_journal_says_what_was_done(relay: Relay) -> None:
    relay.apply(Insert(at=1))
    assert relay.verify(make_batch()).equal and relay.journal[0].loss_after is None, "a trial is no step"
    relay.step(make_batch())
    relay.apply(Drop(0))
    relay.undo()
    relay.redo()
    first, second, undone, redone = relay.journal
    assert (first.step, first.kind, first.preserves_function, first.layers) == (2, "edit", True, 5)
    assert first.loss_before is not None and first.loss_after is not None and "fresh" in first.optimizer
    assert first.params == relay.stack[0].num_params and first.nbytes >= 4 * first.params
    assert (second.layers, second.loss_after) == (4, None) and "parked" in second.optimizer
    assert (undone.kind, undone.of, redone.kind, redone.of) == ("undo", 1, "redo", 1)
    with pytest.raises(ValueError, match="nothing was undone"):
        relay.redo()


def test_a_new_edit_ends_what_could_be_redone_and_frees_its_bytes(relay: Relay) -> None:
    before = relay.host.by_category()
    relay.apply(Insert(at=1, init="copy", optimizer="copy"))
    relay.undo()
    assert relay.host.by_category().get("other", 0) > 0, "parked"
    relay.apply(Swap(0, 1))
    assert relay.host.by_category() == before


@pytest.mark.parametrize(
    ("optimizer", "powers"),
    [
        (torch.optim.AdamW, {"step": 0, "exp_avg": 1, "exp_avg_sq": 2}),
        (torch.optim.NAdam, {"step": 0, "mu_product": 0, "exp_avg": 1, "exp_avg_sq": 2}),
        (partial(torch.optim.RMSprop, centered=True), {"step": 0, "grad_avg": 1, "square_avg": 2}),
        (torch.optim.Adagrad, {"step": 0, "sum": 2}),
        (torch.optim.Adafactor, {"step": 0, "row_var": 2, "col_var": 2}),
        (torch.optim.ASGD, {"step": 0, "eta": 0, "mu": 0, "ax": 0}),
    ],
)
def test_what_is_inherited_in_part_is_scaled_by_its_power(optimizer: Any, powers: dict[str, int]) -> None:
    with Relay(make_gpt(2), optimizer, EmulatedDevice()) as relay:
        relay.step(make_batch())
        relay.apply(Insert(at=1, init="copy", optimizer=0.5))
        old, new = (
            relay.optimizer.state[relay.store.masters.by_param(unit)[unit.module.mlp.c_fc.weight]]
            for unit in relay.stack[:2]
        )
        assert old.keys() == powers.keys()
        for name, power in powers.items():
            assert torch.equal(new[name], old[name] * 0.5**power), name
        relay.apply(Interpolate(0, 2))
        assert relay.verify(make_batch()).equal


def test_a_layer_dropped_for_good_gives_its_bytes_back_and_cannot_return(relay: Relay) -> None:
    before, layer = relay.host.by_category(), relay.stack[1]
    nbytes, num_params = layer.nbytes, layer.num_params
    relay.apply(Drop(1, park=None))
    after = relay.host.by_category()
    assert before["weights"] - after["weights"] == nbytes
    assert before["optimizer"] - after["optimizer"] >= 8 * num_params and "other" not in after
    assert layer.nbytes == 0 and all(param.numel() == 0 for param in layer.params), "whoever still knows the layer"
    with pytest.raises(ValueError, match="its bytes are gone"):
        relay.undo()
    relay.step(make_batch())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize(("park", "freed"), [("memory", 0), ("disk", 2), (None, 2)])
def test_bytes_of_dropped_layers_return_to_the_system(park: Any, freed: int) -> None:
    def resident_bytes() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    side = 3072  # 36 MiB a layer: more than malloc ever keeps for itself
    model = nn.Sequential(*(nn.Sequential(nn.Linear(side, side, bias=False)) for _ in range(3)))
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with Relay(model, optimizer, EmulatedDevice(), loss=lambda out, batch: out.mean()) as relay:
        relay.step((torch.ones(1, side),))
        before = resident_bytes()
        relay.apply(Drop(1, park=park))
        gone = before - resident_bytes()
        assert abs(gone - freed * 4 * side**2) < 2**20 * 8, f"{gone / 2**20:.0f} MiB"


def test_a_group_that_fails_frees_what_it_made_and_loses_nothing(relay: Relay) -> None:
    before, held = state_of(relay), relay.host.by_category()
    with pytest.raises(ValueError, match="out of range"):
        relay.apply(Drop(1, park=None), Insert(at=1, init="copy", optimizer="copy"), Drop(17))
    assert_same(state_of(relay), before)
    assert relay.host.by_category() == held
    assert relay.verify(make_batch()).equal


def test_a_group_that_fails_leaves_the_same_objects_in_the_same_order() -> None:
    model = make_gpt()
    params, config = list(model.parameters()), model.config
    optimizer = torch.optim.AdamW([{"params": params[1::2]}, {"params": params[::2][::-1], "weight_decay": 0.0}])
    layers = [f"transformer.h.{i}" for i in (2, 0, 3, 1)]
    with Relay(model, optimizer, EmulatedDevice(), layers) as relay:
        relay.step(make_batch())
        before, order, stack = state_of(relay), [list(group["params"]) for group in optimizer.param_groups], relay.stack
        configs = {name: getattr(module, "config", None) for name, module in model.named_modules()}
        with pytest.raises(ValueError, match="out of range"):
            relay.apply(
                Duplicate(0),
                Drop(1, park="disk"),
                Swap(0, 1),
                Interpolate(0, 1),
                Freeze(2),
                Drop(0, park=None),
                Drop(99),
            )
        assert model.config is config
        assert all(getattr(module, "config", None) is configs[name] for name, module in model.named_modules())
        assert [group["params"] for group in optimizer.param_groups] == order
        assert relay.stack == stack and [unit.name for unit in relay.stack] == layers
        assert_same(state_of(relay), before)
        assert relay.verify(make_batch()).equal
        relay.apply(Drop(1))
        relay.undo()
        assert_same(state_of(relay), before)


def test_a_module_that_was_refused_is_let_go(relay: Relay) -> None:
    module = new_block(relay)
    known = weakref.ref(module)
    with pytest.raises(ValueError, match="out of range"):
        relay.apply(Insert(at=1, module=module), Drop(99))
    del module
    gc.collect()
    assert known() is None


def test_what_a_person_has_frozen_in_a_module_stays_frozen(relay: Relay) -> None:
    module = new_block(relay)
    module.mlp.requires_grad_(False)
    relay.apply(Freeze(1))
    relay.apply(Insert(at=2, module=module), Insert(at=2, init="copy"))
    assert not relay.stack[2].frozen and not any(p.requires_grad for p in relay.stack[3].module.mlp.parameters())
    assert relay.stack[3].module.attn.c_attn.weight.requires_grad


def test_a_layer_dropped_for_good_that_its_group_brings_back_stays(relay: Relay) -> None:
    back = relay.apply(Drop(1))
    relay.apply(back)
    before = state_of(relay)
    relay.apply(Drop(1, park=None), back)
    assert keys(relay) == ["L000", "L001", "L002", "L003"] and len(relay.journal) == 3
    assert_same(state_of(relay), before)
    assert relay.verify(make_batch()).equal


def test_an_inverse_that_was_used_is_refused_the_second_time(relay: Relay) -> None:
    back = relay.apply(Drop(1, park="disk"))
    relay.apply(back)
    before = state_of(relay)
    with pytest.raises(ValueError, match="changed since"):
        relay.apply(back)
    assert_same(state_of(relay), before)


def test_frozen_layers_thaw_with_the_state_they_had(relay: Relay) -> None:
    before = state_of(relay)
    relay.apply(Freeze(1))
    relay.step(make_batch())
    frozen = state_of(relay)
    own = [name for name in before if name.startswith("transformer.h.1.")]
    assert all(torch.equal(before[name], frozen[name]) for name in own)
    relay.apply(Unfreeze(1))
    relay.step(make_batch())
    assert not torch.equal(state_of(relay)[own[0]], before[own[0]])
    assert relay.verify(make_batch()).equal


def test_what_the_optimizer_was_not_given_cannot_thaw() -> None:
    model = make_gpt()
    model.transformer.h[0].requires_grad_(False)
    model.transformer.h[1].ln_1.requires_grad_(False)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    with Relay(model, optimizer, EmulatedDevice()) as relay:
        relay.step(make_batch())
        with pytest.raises(ValueError, match=r"L000 \(transformer.h.0\) is in no group of the optimizer"):
            relay.apply(Unfreeze(slice(0, 2)))
        relay.apply(Freeze(1))
        relay.apply(Unfreeze(1))
        trained = {name for name, param in model.transformer.h[1].named_parameters() if param.requires_grad}
        assert trained and not any(name.startswith("ln_1") for name in trained)
        assert relay.verify(make_batch()).equal


def test_an_edited_relay_is_saved_and_goes_on_in_a_model_that_was_never_edited(relay: Relay, tmp_path: Path) -> None:
    relay.apply(Insert(at=1, init="copy", warmup=5), Swap(0, 3), Freeze(2))
    relay.step(make_batch(3))
    relay.apply(Drop("L000"))
    relay.save(tmp_path)
    losses = [relay.step(make_batch(seed)).loss for seed in (4, 5)]
    expected, journal = state_of(relay), relay.journal
    for model in (make_gpt(), make_gpt(layers=4)):
        with Relay.load(tmp_path, model, partial(torch.optim.AdamW, lr=1e-2), device=EmulatedDevice()) as again:
            assert keys(again) == keys(relay) and [e.what for e in again.journal] == [e.what for e in journal]
            assert [again.step(make_batch(seed)).loss for seed in (4, 5)] == losses
            assert_same(state_of(again), expected)
            assert again.verify(make_batch()).equal
            again.apply(Insert(at=0, init="copy"))
            assert keys(again)[0] == "L005", "keys are never given out twice"


def test_an_edited_relay_is_loaded_into_a_model_of_its_new_depth(relay: Relay, tmp_path: Path) -> None:
    relay.apply(Duplicate(mode="top"))
    relay.save(tmp_path / "relay")
    relay.model.save_pretrained(tmp_path / "model")
    deep = GPT2LMHeadModel.from_pretrained(tmp_path / "model").train()
    deep.loss_type = "ForCausalLM"
    loss = relay.step(make_batch(3)).loss
    with Relay.load(tmp_path / "relay", deep, partial(torch.optim.AdamW, lr=1e-2), device=EmulatedDevice()) as again:
        assert keys(again) == keys(relay)
        assert again.step(make_batch(3)).loss == loss


def mlp(inner: int | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4)) if inner is None else nn.Sequential(nn.Linear(4, inner), nn.Linear(inner, 4))


def test_a_layer_of_another_kind_joins_the_groups_of_its_like() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(mlp() for _ in range(3)))
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)
    with Relay(model, optimizer, EmulatedDevice(), loss=lambda out, batch: (out**2).mean()) as relay:
        batch = (torch.ones(2, 4),)
        relay.step(batch)
        relay.apply(Replace(1, mlp(6)))
        for group, is_matrix in zip(relay.optimizer.param_groups, (True, False), strict=True):
            assert len(group["params"]) == 4 and all((param.dim() > 1) == is_matrix for param in group["params"])
        assert relay.verify(batch).equal
        relay.step(batch)
        relay.apply(Drop(1))  # no other layer relies on what an edit brought in
        relay.undo()
        assert len(relay.stack) == 3 and relay.verify(batch).equal


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize(
    "edit",
    [
        Drop(1), Drop(2), Drop(0), Insert(at=2, init="copy", optimizer="copy"), Duplicate(2), Swap(1, 2), Freeze(1),
        Insert(at=2, init="interpolate"), Interpolate(1, 2, 0.3), Interpolate(0, 2),
    ],
    ids=repr,
)  # fmt: skip
def test_layers_that_share_weights(edit: Edit, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(4)))
    model[2].a.weight = model[1].a.weight
    batch = (torch.randn(4, 4),)
    options: dict[str, Any] = {"loss": lambda out, _: (out**2).mean()}
    with make_relay(model, **options) as relay:
        relay.step(batch)
        before, loss, held = state_of(relay), relay.evaluate(batch), relay.host.by_category()
        inverse = relay.apply(edit)
        assert relay.verify(batch).equal
        relay.apply(inverse)
        assert_same(state_of(relay), before)
        assert relay.evaluate(batch) == loss and relay.host.by_category()["weights"] == held["weights"]
        relay.undo()
        for _ in range(2):
            relay.step(batch)
        relay.fork("other")
        relay.step(batch)
        relay.save(tmp_path)
        names = dict(relay.model.named_parameters())
        twin = copy.deepcopy(relay.model)
        with Relay.load(
            tmp_path, twin, partial(torch.optim.AdamW, lr=1e-2), device=EmulatedDevice(), **options
        ) as again:
            assert dict(again.model.named_parameters()).keys() == names.keys()
            assert again.step(batch).loss == relay.step(batch).loss
        relay.switch("main")
        assert relay.verify(batch).equal


def test_the_last_layer_with_shared_weights_stays() -> None:
    model = nn.Sequential(*(Residual() for _ in range(4)))
    model[2].a.weight = model[1].a.weight
    with make_relay(model, loss=lambda out, _: (out**2).mean()) as relay:
        relay.apply(Drop(1))
        with pytest.raises(ValueError, match=r"layers L001, L002 share the weights 1\.a\.weight.*untie"):
            relay.apply(Drop("L002"))
        assert keys(relay) == ["L000", "L002", "L003"]
        assert relay.verify((torch.randn(4, 4),)).equal


def test_evidence_may_be_overruled() -> None:
    torch.manual_seed(0)
    with Relay(nn.Sequential(mlp(6), mlp(), mlp()), device=EmulatedDevice(), loss=lambda out, _: out.mean()) as relay:
        with pytest.raises(ValueError, match="not interchangeable.*trust=True"):
            relay.apply(Swap(0, 1))
        assert keys(relay) == ["L000", "L001", "L002"]
        relay.apply(Swap(0, 1), trust=True)
        assert keys(relay) == ["L001", "L000", "L002"]
        with pytest.raises(ValueError, match="not interchangeable"):
            relay.apply(Swap(1, 2))
        relay.undo()
        relay.redo()
        assert keys(relay) == ["L001", "L000", "L002"] and relay.verify((torch.ones(2, 4),)).equal


def test_layers_may_have_keys_of_their_own() -> None:
    model = make_gpt(2)
    with make_relay(model, layers={"low": "transformer.h.0", "high": model.transformer.h[1]}) as relay:
        assert keys(relay) == ["low", "high"]
        relay.apply(Swap("low", "high"))
        assert keys(relay) == ["high", "low"] and relay.verify(make_batch()).equal


def test_what_the_way_back_holds_is_booked(relay: Relay) -> None:
    before, layer = relay.host.by_category(), relay.stack[0]
    state = 8 * layer.num_params + 4 * len(layer.params)
    relay.apply(Interpolate(0, 1))
    assert relay.host.by_category() == {**before, "other": 4 * layer.num_params + state}
    relay.undo()
    assert relay.host.by_category() == {**before, "other": 4 * layer.num_params + state}, "for redo"
    relay.apply(Swap(0, 1))
    gc.collect()
    assert relay.host.by_category() == before


def test_state_that_an_edit_ends_is_not_booked_any_more(relay: Relay) -> None:
    relay.apply(Insert(at=2, init="copy", optimizer="fresh"))
    before = relay.host.by_category()["optimizer"]
    relay.apply(Interpolate(0, 2))
    layer = relay.stack[0]
    assert before - relay.host.by_category()["optimizer"] == 8 * layer.num_params + 4 * len(layer.params)


class Drawn(nn.Linear):
    """Initialised with Python's random numbers."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, random.random())
        nn.init.zeros_(self.bias)


def test_initialising_a_layer_takes_no_random_numbers_and_gives_the_same_each_time() -> None:
    made = []
    for seed in (1, 2):
        model = nn.Sequential(*(nn.Sequential(Drawn(4, 4)) for _ in range(2)))
        with make_relay(model, loss=lambda y, b: y.square().mean()) as relay:
            random.seed(seed)
            before = random.getstate(), torch.get_rng_state()
            relay.apply(Insert(at=1, init="fresh"))
            assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
            made.append(relay.stack[1].params[0].detach().clone())
    assert torch.equal(*made)


def test_states_that_cannot_be_mixed_start_anew() -> None:
    model = make_gpt(2)
    first = list(model.transformer.h[0].parameters())
    rest = [param for name, param in model.named_parameters() if ".h.0." not in name]
    optimizer = torch.optim.AdamW([{"params": first, "amsgrad": True}, {"params": rest}], lr=1e-2)
    with Relay(model, optimizer, EmulatedDevice()) as relay:
        relay.step(make_batch())
        relay.apply(Interpolate(0, 1))
        assert relay.verify(make_batch()).equal
        relay.undo()
        assert relay.verify(make_batch()).equal


def test_names_in_the_groups_of_the_optimizer_follow() -> None:
    model = make_gpt()
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": named[::2][::-1]}, {"params": named[1::2], "weight_decay": 0.0}])
    with Relay(model, optimizer, EmulatedDevice()) as relay:

        def names_are_right() -> bool:
            names = {param: name for name, param in model.named_parameters()}
            return all(
                group["param_names"] == [names[relay.store.masters.model_params[param]] for param in group["params"]]
                for group in optimizer.param_groups
            )

        relay.step(make_batch())
        relay.apply(Drop(0), Duplicate(1), Swap(0, 2))
        assert names_are_right()
        relay.step(make_batch(), skip=[1])
        relay.fork("other")
        relay.undo()
        assert names_are_right()
        relay.switch("main")
        assert names_are_right()


def test_undoing_an_interpolation_leaves_weights_alone_that_both_layers_share() -> None:
    class Sharing(nn.Module):
        def __init__(self, shared: nn.Parameter) -> None:
            super().__init__()
            self.own, self.shared = nn.Linear(4, 4), shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.own(x) @ self.shared)

    shared = nn.Parameter(torch.eye(4))
    model, batch = nn.Sequential(*(Sharing(shared) for _ in range(3))), (torch.ones(2, 4),)
    with make_relay(model, loss=lambda y, b: y.square().mean(), config=RelayConfig()) as relay:
        relay.step(batch)
        relay.apply(Interpolate(0, 1))
        relay.step(batch)
        learned = shared.detach().clone()
        relay.undo()
        assert torch.equal(shared, learned)


def test_no_key_is_given_out_twice() -> None:
    layers = {f"L{i:03d}": f"transformer.h.{i - 1}" for i in range(1, 5)}
    with make_relay(make_gpt(), layers=layers) as relay:
        relay.apply(Duplicate(0), Duplicate(0))
        assert sorted(keys(relay)) == ["L001", "L002", "L003", "L004", "L005", "L006"]


@pytest.mark.parametrize("key", ["shell", "relay", "history", "parked-L001", "a/b", "../a", "", 3])
def test_a_key_that_cannot_name_a_file_is_refused(key: Any) -> None:
    model = make_gpt(2)
    before = model.transformer.h[0].mlp.c_fc.weight.data_ptr()
    with pytest.raises(ValueError, match="layers has the key"):
        make_relay(model, layers={key: "transformer.h.0", "high": "transformer.h.1"})
    assert model.transformer.h[0].mlp.c_fc.weight.data_ptr() == before


def test_layers_may_be_given_in_any_order() -> None:
    names = [f"transformer.h.{i}" for i in (2, 0, 3, 1)]
    with make_relay(make_gpt(), layers=names) as relay:
        relay.step(make_batch())
        relay.apply(Drop(0))  # the stack's first, the relay's second
        assert sorted(keys(relay)) == ["L000", "L002", "L003"]
        relay.apply(Duplicate(0))
        assert sorted(keys(relay)) == ["L000", "L002", "L003", "L004"] and relay.verify(make_batch()).equal


POSITION = st.integers(min_value=-3, max_value=6)
ANY_EDIT = st.one_of(
    st.builds(Insert, at=POSITION, init=st.sampled_from(["copy", "fresh", "interpolate"]), warmup=st.integers(0, 3)),
    st.builds(Insert, at=POSITION, init=st.just("copy"), optimizer=st.sampled_from(["copy", 0.5])),
    st.builds(Duplicate, POSITION, mode=st.sampled_from(["top", "middle", "interleaved"])),
    st.builds(Drop, POSITION),
    st.builds(Swap, POSITION, POSITION),
    st.builds(Move, POSITION, POSITION),
    st.builds(Interpolate, POSITION, POSITION, weight=st.floats(0, 1)),
    st.builds(Freeze, POSITION),
    st.builds(Unfreeze, POSITION),
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(edits=st.lists(ANY_EDIT, min_size=1, max_size=30), every=st.integers(3, 9))
def test_any_sequence_of_edits_can_be_undone_to_the_bit(edits: list[Edit], every: int) -> None:
    with make_relay(make_gpt(3)) as relay:
        relay.step(make_batch(0))
        before, loss = state_of(relay), relay.evaluate(make_batch(1))
        for number, edit in enumerate(edits):
            now = keys(relay)
            try:
                relay.apply(edit)
            except ValueError:
                assert keys(relay) == now, "a refused edit changes nothing"
            if number % every == 0 and any(not unit.frozen for unit in relay.stack):
                assert relay.verify(make_batch(2)).equal
        while any(entry.kind == "edit" for entry in relay.journal):
            try:
                relay.undo()
            except ValueError:
                break
        assert_same(state_of(relay), before)
        assert relay.evaluate(make_batch(1)) == loss
        assert relay.verify(make_batch(2)).equal


def test_a_layer_parked_on_disk_needs_no_memory_and_comes_back_to_the_bit(relay: Relay) -> None:
    before, held, layer = state_of(relay), relay.host.by_category(), relay.stack[1]
    nbytes = layer.nbytes
    relay.apply(Drop(1, park="disk"))
    after = relay.host.by_category()
    assert held["weights"] - after["weights"] == nbytes and "other" not in after
    assert layer.blocks[0].master.numel() == 0 and all(param.numel() == 0 for param in layer.params)
    assert held["optimizer"] - after["optimizer"] >= 8 * 4 * 100
    relay.step(make_batch(3))
    relay.undo()
    now = state_of(relay)
    own = [name for name in before if name.startswith("transformer.h.1.")]
    assert own and all(torch.equal(now[name], before[name]) for name in own)
    assert relay.verify(make_batch()).equal
    relay.redo()
    assert layer.blocks[0].master.numel() == 0
    relay.undo()
    assert relay.verify(make_batch()).equal


def test_a_closed_relay_leaves_nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with make_relay(make_gpt()) as relay:
        relay.apply(Drop(1, park="disk"))
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "vit"])
def test_an_identity_layer_does_not_move_the_loss(family: str) -> None:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    tokens = torch.randint(64, (4, 8))
    batch = {"input_ids": tokens, "labels": tokens}
    if family == "gpt2":
        model = make_gpt(3)
        batch = make_batch(1)
    elif family == "bert":
        model = BertForMaskedLM(BertConfig(vocab_size=64, **small))
    elif family == "llama":
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **small))
        model.loss_type = "ForCausalLM"
    else:
        model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=5, **small))
        batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(5, (4,))}
    with make_relay(model.train()) as relay:
        for _ in range(3):
            relay.step(batch)
        for at in (3, 1, 2):
            loss = relay.evaluate(batch)
            relay.apply(Insert(at=at))
            assert relay.evaluate(batch) == pytest.approx(loss, abs=1e-6)
            assert relay.verify(batch).equal
        relay.step(batch)
        relay.step(batch)
        assert all(unit.stats["update_ratio"] > 0 for unit in relay.stack), "the new layers learn"


def test_what_an_identity_layer_is_called_with_is_found_without_running_the_whole_stack() -> None:
    with make_relay(make_gpt(8)) as relay:
        relay.step(make_batch())
        config, ran = relay.model.config, []
        hooks = [unit.module.register_forward_hook(lambda m, *_: ran.append(m)) for unit in relay.stack]
        stack = relay._editor.lineup.stacks[0]
        relay._editor.new_layers.plan_identity(copy.deepcopy(relay.stack[5].module), stack, 6)
        assert len(ran) <= 3 and relay.model.config is config and len(relay.model.transformer.h) == 8
        for hook in hooks:
            hook.remove()
        loss = relay.evaluate(make_batch(1))
        for at in (6, 0, 10, 3):
            relay.apply(Insert(at=at))
            assert relay.evaluate(make_batch(1)) == pytest.approx(loss, abs=1e-6)
        assert relay.verify(make_batch()).equal


def test_a_layer_that_cannot_be_the_identity_is_refused_whatever_is_known_of_others_built_alike() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.shift = nn.Linear(8, 8), 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x) + self.shift

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(5)))
    with Relay(model, partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), list(model), lambda y, b: y.mean()) as relay:
        relay.step((torch.randn(4, 8),))
        relay.apply(Insert(at=3))
        model[4].shift = 0.5  # looked at before, so nothing but running it shows the difference
        with pytest.raises(ValueError, match="cannot make a Block the identity"):
            relay.apply(Insert(at=5))
        assert len(relay.stack) == 6
