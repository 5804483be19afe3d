"""Edits of a group are all made or none is, and an inverse is used once."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from small import assert_same, keys, make_batch, make_gpt, new_block, state_of

from l2l_core import Drop, Duplicate, EmulatedDevice, Freeze, Insert, Interpolate, Relay, Swap


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
