"""The optimizer's side of edits: groups, their order and names, and states that are inherited."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from small import make_batch, make_gpt
from torch import nn

from l2l_core import Drop, Duplicate, EmulatedDevice, Insert, Interpolate, Move, Relay, Swap


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
            relay.optimizer.state[relay.store.masters.master_by_param(unit)[unit.module.mlp.c_fc.weight]]
            for unit in relay.stack[:2]
        )
        assert old.keys() == powers.keys()
        for name, power in powers.items():
            assert torch.equal(new[name], old[name] * 0.5**power), name
        relay.apply(Interpolate(0, 2))
        assert relay.verify(make_batch()).equal


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
