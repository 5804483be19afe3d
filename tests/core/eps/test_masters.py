"""The optimizer's side of blocks: two parameters over one memory, and layers that go and come back as if they had stayed."""

from __future__ import annotations

import copy
from itertools import chain

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from l2l_core.devices import Ledger
from l2l_core.eps.blocks import build_units
from l2l_core.eps.masters import Masters, warmup_factor


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


@pytest.fixture
def host() -> Ledger:
    return Ledger("host", "The host")


@pytest.fixture
def masters(model: nn.Sequential, host: Ledger) -> Masters:
    """Over a shell and two layers, in two groups, after one update."""
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}]
    groups.append({"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0})
    shell, layers = build_units(model, {"L000": model[1], "L001": model[2]})
    made = Masters([shell, *layers], AdamW(groups, lr=0.1), model.parameters, host)
    update(made)
    return made


def update(masters: Masters) -> None:
    for param in masters.params_in_model_order():
        param.grad = torch.ones_like(param)
    masters.optimizer.step()
    masters.optimizer.zero_grad()
    masters.book_state()


def everything(masters: Masters, host: Ledger) -> list[object]:
    """Weights, groups, state and bytes, comparable by ==."""
    known = [
        {name: value.tolist() for name, value in state.items()} for state in map(dict, masters.optimizer.state.values())
    ]
    return [
        [block.master.tolist() for block in masters.blocks],
        [[id(param) for param in group] for group in masters.groups],
        sorted(known, key=str),
        (host.by_owner("weights"), host.by_category(), masters.state_bytes),
    ]


def test_an_update_through_the_optimizer_is_one_of_the_models_weights(masters: Masters, model: nn.Module) -> None:
    before = copy.deepcopy(model.state_dict())
    update(masters)
    assert not any(torch.equal(before[name], now) for name, now in model.state_dict().items())
    in_groups = list(chain.from_iterable(group["params"] for group in masters.optimizer.param_groups))
    assert len({*in_groups}) == len(in_groups) == len([*model.parameters()])
    assert not {*in_groups} & {*model.parameters()}, "the model's may point to a device meanwhile"


def test_parameters_come_in_the_models_order_not_in_that_of_blocks(masters: Masters, model: nn.Module) -> None:
    by_block = [id(param) for block in masters.blocks for param in block.params]
    in_order = [id(masters.model_params[param]) for param in masters.params_in_model_order()]
    assert in_order == [id(param) for param in model.parameters()] != by_block


def test_a_layer_that_goes_and_comes_back_is_as_if_it_had_stayed(masters: Masters, host: Ledger) -> None:
    before, groups = everything(masters, host), masters.groups
    layer = masters.units[-1]
    kept = masters.remove_units([layer])
    gone = {*chain.from_iterable(masters.groups)}
    assert not gone & {*layer.params} and layer.key not in host.by_owner("weights")
    masters.add_units(kept)
    masters.reorder_groups(groups)
    assert everything(masters, host) == before


def test_a_snapshot_puts_everything_back_bit_by_bit(masters: Masters, host: Ledger) -> None:
    before = everything(masters, host)
    undo = masters.snapshot()
    update(masters)
    masters.blocks[0].version += 1
    assert everything(masters, host) != before
    undo()
    assert everything(masters, host) == before and masters.blocks[0].version == 0


def test_the_models_own_parameters_are_given_back(masters: Masters, model: nn.Module, host: Ledger) -> None:
    masters.restore_model_params()
    in_groups = chain.from_iterable(group["params"] for group in masters.optimizer.param_groups)
    assert {*in_groups} == {*model.parameters()}
    assert not host.by_category().get("weights")


def test_warmth_rises_to_one_and_stays(masters: Masters) -> None:
    block = masters.blocks[0]
    assert warmup_factor(block) == 1.0, "without a warm-up"
    block.warmup, warmth = 4, []
    for block.version in range(6):
        warmth.append(warmup_factor(block))
    assert warmth == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("change", ["gone", "moved", "twice"])
def test_groups_that_are_changed_by_hand_are_refused(masters: Masters, change: str) -> None:
    masters.check_groups()
    first, second = (group["params"] for group in masters.optimizer.param_groups)
    param = first.pop() if change != "twice" else first[0]
    if change != "gone":
        (second if change == "moved" else first).append(param)
    with pytest.raises(ValueError, match="behind the relay's back: group 0 has"):
        masters.check_groups()
