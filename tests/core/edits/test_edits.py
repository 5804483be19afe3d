"""Edits between steps: exact, undoable, and equal to in-core training after each of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import assert_same, keys, make_batch, make_gpt, make_relay, new_block, state_of
from torch import nn
from transformers import GPT2LMHeadModel

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


def test_a_group_that_is_refused_takes_no_key_and_no_random_number() -> None:
    ends = []
    for tried in (False, True):
        with make_relay(make_gpt()) as relay:
            if tried:
                with pytest.raises(ValueError, match="there are L000"):
                    relay.apply(Insert(at=1, init="copy"), Drop("L009"))
            relay.apply(Insert(at=1, init="fresh"))
            ends.append((keys(relay), state_of(relay)))
    assert ends[0][0] == ends[1][0] == ["L000", "L004", "L001", "L002", "L003"]
    assert_same(ends[0][1], ends[1][1])


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
    with pytest.raises(TypeError, match=r"apply\(\) was called with .* not an edit: .*apply\(Drop\("):
        relay.apply(*edits)
    assert keys(relay) == order and relay.journal == ()


def test_the_journal_says_what_was_done(relay: Relay) -> None:
    relay.apply(Insert(at=1))
    assert relay.verify(make_batch()).equal
    relay.step(make_batch())
    relay.apply(Drop(0))
    relay.undo()
    relay.redo()
    first, second, undone, redone = relay.journal
    assert (first.step, first.kind, first.preserves_function, first.layers) == (2, "edit", True, 5)
    assert "fresh" in first.optimizer
    assert first.params == relay.stack[0].num_params and first.nbytes >= 4 * first.params
    assert second.layers == 4 and "parked" in second.optimizer
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


@settings(max_examples=4, suppress_health_check=list(HealthCheck))
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
