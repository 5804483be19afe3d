"""Python's collector of reference cycles rests during a pass, but for young objects, and is as it was afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from small import make_relay
from torch import nn

from l2l_core import RelayConfig

CONFIG = RelayConfig(micro_batches=2, verify="never")  # no other forwards than those of steps


class Tangled(nn.Module):
    """Leaves a tensor behind that only a cycle of references holds."""

    left: list[weakref.ref[torch.Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        alive = sum(ref() is not None for ref in self.left)
        assert alive <= 4, (
            f"{alive} tensors of earlier visits are there"
        )  # two micro-batches of this visit, and of its forward
        cycle = [x.detach().clone()]
        cycle.append(cycle)
        self.left.append(weakref.ref(cycle[0]))
        return self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Tangled() for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    Tangled.left.clear()
    gc.collect()
    yield
    gc.enable()


def step(loss: object = None) -> None:
    with make_relay(  # whose first step has no other forwards
        Model(), loss=loss or (lambda out, _: (out**2).mean()), loss_over="micro-batch", config=CONFIG
    ) as relay:
        for _ in range(2):
            relay.step((torch.ones(4, 4),))


def test_what_a_cycle_holds_goes_with_the_visit() -> None:
    step()
    assert len(Tangled.left) == 2 * 2 * (12 + 11)
    assert gc.isenabled()


def test_old_objects_are_left_alone_meanwhile() -> None:
    ran: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            ran.append(info["generation"])

    def loss(out: torch.Tensor, _: object) -> torch.Tensor:
        assert not gc.isenabled()
        return (out**2).mean()

    gc.callbacks.append(note)
    try:
        with make_relay(Model(), loss=loss, loss_over="micro-batch", config=CONFIG) as relay:
            relay.step((torch.ones(4, 4),))
            ran.clear()
            relay.step((torch.ones(4, 4),))
    finally:
        gc.callbacks.remove(note)
    assert 12 + 11 <= len(ran) <= 12 + 11 + 2 and sum(ran) <= 3  # one may come after the step


def test_it_is_on_again_after_a_step_that_fails() -> None:
    def loss(out: torch.Tensor, _: object) -> torch.Tensor:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        step(loss)
    assert gc.isenabled()


def test_who_has_turned_it_off_finds_it_so() -> None:
    gc.disable()
    with make_relay(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), layers=["0", "1"], loss=lambda out, _: out.mean()
    ) as relay:
        relay.step((torch.ones(4, 4),))
    assert not gc.isenabled()
