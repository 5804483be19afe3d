"""Modules of the user's own: put in if the model runs with them, refused otherwise, with nothing changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from l2l_core import EmulatedDevice, Insert, Relay, Replace
from l2l_core.edits.edit import Edit


class Adapter(nn.Module):
    """A layer with dropout and a buffer that counts its calls."""

    def __init__(self, before: int, behind: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(before, behind), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.dropout(self.linear(x))


class Pair(Adapter):
    """Gives two tensors where one is expected."""

    def forward(self, x: torch.Tensor) -> Any:
        made = super().forward(x)
        return made, made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Without a configuration, so that layers of any kind may stand in it."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 16), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4))
        self.h = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.h:
            x = layer(x)
        return self.head(x)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return Net().train()


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))


def mse(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch[1])


@pytest.fixture
def relay() -> Iterator[Relay]:
    with Relay(make_net(), partial(torch.optim.AdamW, lr=1e-2), EmulatedDevice(), loss=mse) as made:
        made.step(make_batch())
        yield made


MISFITS: dict[str, tuple[Callable[[], list[Edit]], str]] = {
    "too wide": (
        lambda: [Insert(at=2, module=Adapter(16, 24))],
        r"position 2 of h: given \(2, 8, 16\).* it returns \(2, 8, 24\).*L002 \(h.3\) after it is next",
    ),
    "takes another width": (
        lambda: [Insert(at=2, module=Adapter(24, 16))],
        r"does not accept the output of L001 \(h.1\) before it \(\(2, 8, 16\)\)",
    ),
    "in front": (lambda: [Insert(at=0, module=Adapter(24, 16))], "the part of the model before the stack"),
    "behind the last": (lambda: [Insert(at=6, module=Adapter(16, 24))], "the part of the model after the stack"),
    "replaced": (lambda: [Replace(3, Adapter(16, 24))], r"position 3 .*L004 \(h.4\) after it"),
    "another tree": (lambda: [Replace(3, Pair(16, 16))], r"it returns \(2, 8, 16\), \(2, 8, 16\)"),
    "the second of two": (
        lambda: [Insert(at=1, module=Adapter(16, 16)), Insert(at=4, module=Adapter(16, 8))],
        "position 4",
    ),
}


@pytest.mark.all_cases
@pytest.mark.parametrize("name", MISFITS)
def test_a_module_that_does_not_fit_is_refused_and_nothing_has_changed(relay: Relay, name: str) -> None:
    make, message = MISFITS[name]
    before = copy.deepcopy(relay.model.state_dict())
    stack, random = relay.stack, torch.get_rng_state()
    edits = make()
    torch.set_rng_state(random)
    with pytest.raises(ValueError, match=message):
        relay.apply(*edits)
    assert relay.stack == stack and relay.journal == () and torch.equal(torch.get_rng_state(), random)
    now = relay.model.state_dict()
    assert now.keys() == before.keys() and all(torch.equal(now[key], before[key]) for key in now)
    assert relay.verify(make_batch()).equal


def test_a_module_that_fits_is_not_touched_by_being_tried(relay: Relay) -> None:
    module = Adapter(16, 16)
    random, hooks = torch.get_rng_state(), len(module._forward_hooks)
    relay.apply(Insert(at=3, module=module))
    assert torch.equal(torch.get_rng_state(), random) and module.training and len(module._forward_hooks) == hooks
    assert module.calls.item() == 0 and relay.verify(make_batch()).equal
    assert relay.model.h[0].training


def test_modules_that_fit_together_come_in_one_group(relay: Relay) -> None:
    relay.apply(
        Insert(at=2, module=Adapter(16, 24)), Insert(at=3, module=Adapter(24, 24)), Insert(at=4, module=Adapter(24, 16))
    )
    assert relay.verify(make_batch()).equal and len(relay.stack) == 9
    with pytest.raises(ValueError, match="position 3"):
        relay.apply(Replace(3, Adapter(24, 16)))
    relay.undo()
    assert len(relay.stack) == 6 and relay.verify(make_batch()).equal


def test_a_stack_whose_shapes_change_is_tried_as_a_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 10), nn.Linear(10, 2))
    batch = (torch.randn(6, 4),)
    with Relay(model, partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), list(model), lambda y, b: y.mean()) as relay:
        relay.step(batch)
        relay.apply(Replace(2, nn.Linear(8, 8)))
        relay.apply(Replace(4, nn.Linear(10, 3)))
        with pytest.raises(ValueError, match=r"given \(2, 8\) it returns \(2, 9\)"):
            relay.apply(Replace(2, nn.Linear(8, 9)))
        assert relay.verify(batch).equal


def test_before_the_first_step_nothing_can_be_tried() -> None:
    with Relay(make_net(), device=EmulatedDevice(), loss=mse) as relay:
        relay.apply(Insert(at=2, module=Adapter(16, 24)))
        assert len(relay.stack) == 7
        relay.undo()
        relay.expect(make_batch())
        with pytest.raises(ValueError, match="does not fit"):
            relay.apply(Insert(at=2, module=Adapter(16, 24)))


def test_parameters_of_another_kind_of_layer_join_groups_by_their_dimensions() -> None:
    model = make_net()
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() < 2]}]
    with Relay(model, torch.optim.AdamW(groups, lr=1e-2), EmulatedDevice(), loss=mse) as relay:
        relay.step(make_batch())
        relay.apply(Insert(at=2, module=Adapter(16, 16)))
        own = relay.store.masters.master_by_param(relay.stack[2])
        where = [[i for i, g in enumerate(relay.optimizer.param_groups) if m in set(g["params"])] for m in own.values()]
        assert where == [[0], [1]]
        with pytest.raises(ValueError, match="cannot inherit their state"):
            relay.apply(Insert(at=2, module=Adapter(16, 16), optimizer="copy"))
        assert relay.verify(make_batch()).equal
