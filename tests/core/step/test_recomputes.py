"""Recomputes are compared with their first runs; a GPU's comparison, which settles after the step, is tested on the CPU."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import assert_trains, chain_of, stashes
from oracle import adamw
from torch import Tensor, nn
from zoo import WIDTH, Chain, Kind

from l2l_core import Relay, RelayConfig
from l2l_core.step.guards import recompute_check
from l2l_core.step.guards.recompute_check import RecomputeCheck, checksums_of

DRAWN = random.Random()  # no part of the engine restores its state
OWN = torch.Generator()


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> RecomputeCheck:
    monkeypatch.setattr(recompute_check, "_checksum", recompute_check._checksum_on_gpu)
    return RecomputeCheck()


def test_the_first_layer_that_differs_is_named_when_the_step_is_over(compared: RecomputeCheck) -> None:
    x = torch.randn(4, 8)
    for layer, again in (("layers.0", x), ("layers.1", x + 1), ("layers.2", x + 2)):
        compared.compare(layer, checksums_of([x]), [again])
    with pytest.raises(RuntimeError, match="layer layers.1 gave other outputs"):
        compared.check_pending()


def test_the_message_tells_rounding_from_another_value() -> None:
    compared = RecomputeCheck()
    x = torch.full((4,), 0.25)
    with pytest.raises(
        RuntimeError, match=r"layer layers.0 gave other outputs .*; their sum was 1 and is 1\.00000012: it depends"
    ):
        compared.compare("layers.0", checksums_of([x]), [torch.full((1,), 1.0) + torch.finfo(torch.float32).eps])


def test_what_is_equal_or_not_finite_passes(compared: RecomputeCheck) -> None:
    x = torch.randn(4, 8)
    compared.compare("layers.0", checksums_of([x]), [x.clone()])
    compared.compare("layers.1", checksums_of([x]), [torch.full_like(x, torch.nan)])
    compared.check_pending()
    compared.check_pending()


# -- in a step -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block with its norm in front, whose end can be exchanged while it is trained."""

    end: Callable[["Block", Tensor, Tensor], Any]

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("level", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return type(self).end(self, x, self.down(F.gelu(self.up(self.norm(x)))))


def _signs(count: int) -> Tensor:
    return 1.0 - 2.0 * (torch.arange(count) % 2)


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "end",
    [
        lambda block, x, y: x + y * DRAWN.random(),
        lambda block, x, y: x + y * torch.tensor([DRAWN.random() for _ in range(WIDTH)]),
        lambda block, x, y: x * DRAWN.random() + y,
        lambda block, x, y: x + block.down(F.gelu(block.up(block.norm(x))) * DRAWN.random()),
        lambda block, x, y: x + y if DRAWN.random() < 0.5 else x - y,
        lambda block, x, y: F.layer_norm(x + y, (WIDTH,)) if DRAWN.random() < 0.5 else x + y,
        lambda block, x, y: x + y[..., DRAWN.randrange(WIDTH), None],
        lambda block, x, y: x - y if DRAWN.random() < 0.5 else y - x,
        lambda block, x, y: x + (y * 2.0 if DRAWN.random() < 0.5 else y * 3.0),
        lambda block, x, y: [x + y, x + 2 * y][DRAWN.randrange(2)],
        lambda block, x, y: x + y + (block.norm.bias if DRAWN.random() < 0.5 else block.down.bias),
        lambda block, x, y: x + y * torch.randperm(WIDTH, generator=OWN).float().sub(WIDTH // 2).sign(),
        lambda block, x, y: x + y * (torch.randperm(x.shape[0] * 2, generator=OWN)[: x.shape[0], None, None] % 2),
        lambda block, x, y: x + y * block.level.fill_(DRAWN.random()),
        lambda block, x, y: x + y * (DRAWN.choice([1.0, -1.0]) * torch.outer(_signs(x.shape[1]), _signs(WIDTH))),
        lambda block, x, y: x + y * (DRAWN.choice([1.0, -1.0]) * _signs(WIDTH)),
        lambda block, x, y: x + y[:, DRAWN.sample(range(x.shape[1]), x.shape[1])],
    ],
    ids=[
        "a scale",
        "a mask",
        "what is added",
        "before the last product",
        "a sign",
        "another end",
        "another part",
        "which way round",
        "one of two",
        "what is given out",
        "a weight",
        "a permuted mask",
        "stochastic depth",
        "a buffer",
        "a chequerboard",
        "one of two masks with the same sum",
        "a permutation",  # sums of the same numbers, which round differently
    ],
)
def test_a_layer_that_computes_something_else_in_its_recompute_is_refused(end: Callable[..., Tensor]) -> None:
    """In a step that is not metered, after two in which the layer gave the same."""
    own = type("Own", (Block,), {"end": lambda block, x, y: x + y})
    kind = chain_of(own)
    model = kind.make_model()
    DRAWN.seed(3)
    OWN.manual_seed(3)
    with Relay(
        model, adamw(model), loss=kind.loss, loss_over=kind.loss_over, config=RelayConfig(micro_batches=4)
    ) as relay:
        for seed in range(2):
            relay.step(kind.make_batch(4, seed))
        own.end = end
        with pytest.raises(RuntimeError, match="gave other outputs when it was recomputed"):
            relay.step(kind.make_batch(4, 2))


class Complex(Chain):
    def walk(self, x: Tensor) -> Tensor:
        h = torch.complex(x, 0.5 * x)
        for layer in self.layers:
            h = layer(h)
        return torch.view_as_real(h)[..., 0]


class Conjugate(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.complex(self.norm(x.real), self.norm(x.imag))
        weight = torch.complex(*self.down.weight.chunk(2, dim=1))
        return x + (h.flatten(0, 1) @ weight.conj().T).view_as(x)


@stashes
def test_complex_outputs_are_compared(stash: str) -> None:
    assert_trains(chain_of(Conjugate, shell=Complex), stash)


class Adding(Block):
    def end(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


@stashes
@pytest.mark.parametrize("kind", [chain_of(Adding), chain_of(Conjugate, shell=Complex)], ids=["real", "complex"])
def test_sums_that_wait_for_the_end_of_the_step_stay_on_the_device(
    kind: Kind, stash: str, compared: RecomputeCheck
) -> None:
    """As on a GPU, where a stash on the host took them along and freed them."""
    assert_trains(kind, stash)
