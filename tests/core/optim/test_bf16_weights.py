"""Weights in bfloat16, rounded at random: what that does to learning, and masters of 2 bytes with the bits of float32's.

The oracle trains in core in float32, and NumPy rounds moments and weights after each step.
"""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import assert_same, whole
from torch import nn

from l2l_core import Delink, Drop, Duplicate, EmulatedDevice, Interpolate, Relay, RelayConfig
from l2l_core.optim import in_bf16

WIDTH, K = 24, 2
AllInBf16 = in_bf16(torch.optim.AdamW, weights=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.linear = nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.drop(self.norm(x))))


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The same values of bfloat16, in that type or in float32."""
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, 3)).bfloat16().to(dtype)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(step)
    return torch.randn(2 * K, WIDTH, generator=noise), torch.randn(2 * K, 3, generator=noise)


def squared_error(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch[1])


def relay_of(net: nn.Module, make: Any = AllInBf16, **settings: Any) -> Relay:
    config = RelayConfig(seed=0, micro_batches=K, **settings)
    return Relay(net, partial(make, lr=1e-2), EmulatedDevice(), loss=squared_error, config=config)


# -- the law -----------------------------------------------------------------------------------------------------------


def test_a_weight_moves_by_steps_that_are_too_small_for_bfloat16() -> None:
    """A thousand steps of a 2560th, where neighbours are a 128th apart: to nearest the weight would never leave 1."""
    param = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = in_bf16(torch.optim.SGD, weights=True)([param], lr=1.0)
    for _ in range(1000):
        param.grad = torch.full_like(param, -1 / 2560)
        optimizer.step()
    assert param.dtype == param.grad.dtype == torch.bfloat16
    assert (torch.ones(1) + 1 / 2560).bfloat16() == 1
    step = float(torch.tensor(1 / 2560).bfloat16())
    assert abs(param.float().mean().item() - (1 + 1000 * step)) < 0.005
    assert param.float().std() > 0.01, "each weight has random numbers of its own"


# -- the oracle --------------------------------------------------------------------------------------------------------


def rounded(values: torch.Tensor, seed: int) -> torch.Tensor:
    """To bfloat16 at random, in integers of NumPy."""
    drawn = torch.empty(-(-values.numel() // 4), dtype=torch.int64)
    drawn.random_(-(2**63), None, generator=torch.Generator().manual_seed(seed))
    noise = drawn.numpy().view(np.uint16)[: values.numel()].reshape(values.shape)
    bits = values.numpy().view(np.uint32) + noise
    return torch.from_numpy((bits // 65536 * 65536).astype(np.uint32).view(np.float32))


class Oracle:
    """Training in core in float32, and rounding."""

    def __init__(self, kind: type, **settings: Any) -> None:
        self.model = model(torch.float32)
        self.optimizer = kind(self.model.parameters(), lr=1e-2, **settings)
        self.noise: dict[nn.Parameter, int] = {}

    def step(self, number: int, config: RelayConfig) -> float:
        losses = []
        for k, part in enumerate(zip(*(each.chunk(K) for each in batch(number)), strict=True)):
            torch.manual_seed(config.micro_batch_seed(number, k))
            loss = squared_error(self.model(part[0]), part) / K
            loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        for param in self.model.parameters():
            moments = self.optimizer.state.get(param, {})
            self._round(param, moments.get("exp_avg_sq"), "exp_avg_sq")
            for name in {"exp_avg", "momentum_buffer"} & moments.keys():
                moments[name].copy_(moments[name].to(torch.bfloat16))
            self._round(param, param.detach(), "weights")
            self.noise[param] += 1
        return float(sum(losses))

    def _round(self, param: nn.Parameter, value: torch.Tensor | None, name: str) -> None:
        if value is not None:
            self.noise.setdefault(param, zlib.crc32(value.numpy().tobytes()) * 2**24)
            value.copy_(rounded(value, zlib.crc32(b"%d/%s" % (self.noise[param], name.encode()))))


@pytest.mark.parametrize("stash", ["host", "device"])
@pytest.mark.parametrize("update", ["eager", "deferred"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9), torch.optim.SGD])
def test_masters_of_two_bytes_have_the_bits_of_training_whose_weights_are_rounded_by_others(
    kind: Any, update: Any, stash: Any
) -> None:
    settings = getattr(kind, "keywords", {})
    of = getattr(kind, "func", kind)
    oracle, net = Oracle(of, **settings), model()
    with relay_of(net, partial(in_bf16(of, weights=True), **settings), update=update, stash=stash) as relay:
        for number in range(5):
            assert relay.step(batch(number)).loss == oracle.step(number, relay.config)
            for (name, mine), theirs in zip(net.named_parameters(), oracle.model.parameters(), strict=True):
                assert mine.dtype == torch.bfloat16 and torch.equal(mine.float(), theirs), name
        assert relay.verify(batch(5)).equal


def test_the_memory_that_weights_lie_in_changes_no_bit_and_the_ledger_has_its_bytes() -> None:
    count = sum(param.numel() for param in model().parameters())
    seen: dict[torch.dtype, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        with relay_of(net := model(dtype)) as relay:
            foretold = relay.forecast(batch(0))
            losses = [relay.step(batch(number)).loss for number in range(4)]
            held = relay.host.by_category()
            assert {name: foretold.host_bytes[name] for name in ("weights", "optimizer")} == {
                name: held[name] for name in ("weights", "optimizer")
            }
            masters = sum(
                master.untyped_storage().nbytes() for unit in (relay.shell, *relay.stack) for master in unit.masters
            )
            assert held["weights"] == masters
            assert held["weights"] / count == pytest.approx(dtype.itemsize, rel=0.15)  # buffers are padded
            seen[dtype] = losses, [param.detach().float().clone() for param in net.parameters()]
    assert seen[torch.bfloat16][0] == seen[torch.float32][0]
    assert all(map(torch.equal, seen[torch.bfloat16][1], seen[torch.float32][1]))


def test_compute_in_bfloat16_loads_masters_as_they_are() -> None:
    with relay_of(model(), precision="bf16") as relay, relay_of(model(torch.float32), precision="bf16") as wide:
        for number in range(3):
            assert relay.step(batch(number)).loss == wide.step(batch(number)).loss
        pairs = zip(relay.model.parameters(), wide.model.parameters(), strict=True)
        assert all(torch.equal(mine.float(), theirs) for mine, theirs in pairs)


# -- between steps -----------------------------------------------------------------------------------------------------


def state(relay: Relay) -> dict[str, torch.Tensor]:
    return {name: value for name, value in whole(relay).items() if name != "random"}


def test_edits_branches_and_saves_keep_masters_of_two_bytes(tmp_path: Path) -> None:
    def are_narrow(relay: Relay) -> bool:
        masters = [master for unit in (relay.shell, *relay.stack) for master in unit.masters]
        held = relay.host.by_category()["weights"]
        return {master.dtype for master in masters} == {torch.bfloat16} and held == sum(m.nbytes for m in masters)

    with relay_of(model()) as relay:
        for number in range(2):
            relay.step(batch(number))
        before = state(relay)
        for edit in (Duplicate(1, optimizer="copy"), Drop(0, park="disk")):
            relay.apply(edit)
            assert are_narrow(relay) and relay.verify(batch(2)).equal
            relay.undo()
            assert_same(state(relay), before)
        relay.fork("aside")
        relay.apply(Interpolate(1, 2))
        relay.step(batch(3))
        relay.save(tmp_path)
        relay.switch("main")
        assert_same(state(relay), before)
        assert are_narrow(relay)
        relay.switch("aside")
        with Relay.load(tmp_path, model(), partial(AllInBf16, lr=1e-2), device="cpu", loss=squared_error) as again:
            assert_same(state(again), state(relay))
            assert again.step(batch(4)).loss == relay.step(batch(4)).loss
            assert_same(state(again), state(relay))
            again.switch("main")
            assert_same(state(again), before)
            assert are_narrow(again)
        with pytest.raises(ValueError, match=r"bfloat16 in the save, .* float32 here"):
            Relay.load(tmp_path, model(torch.float32), partial(AllInBf16, lr=1e-2), device="cpu", loss=squared_error)


def test_layers_that_share_weights_in_bfloat16_are_delinked() -> None:
    net = model()
    net[2] = net[3] = net[1]
    config = RelayConfig(seed=0, micro_batches=K)
    with Relay(net, partial(AllInBf16, lr=1e-2), EmulatedDevice(), [net[1]], squared_error, config=config) as relay:
        relay.step(batch(0))
        relay.apply(Delink(optimizer=1 / 3))
        assert relay.verify(batch(1)).equal


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_would_lose_weights_is_refused() -> None:
    for make in (torch.optim.AdamW, in_bf16(torch.optim.AdamW)):
        with pytest.raises(ValueError, match=r"torch.bfloat16: the masters are float32.*weights=True"):
            relay_of(model(), make)
    mixed = model()
    mixed[1].norm.float()
    with pytest.raises(ValueError, match=r"L000 has parameters of torch\.\w+ and torch\.\w+ \(.*one buffer"):
        relay_of(mixed)
    with relay_of(model()) as relay:
        relay.optimizer.register_step_pre_hook(lambda *_: None)
        with pytest.raises(ValueError, match=r"torch.bfloat16 weights .* remove the hook"):
            relay.step(batch(0))
