"""State in bfloat16: what rounding does to a mean, and that a step is the formula's, by an oracle that shares no code."""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from l2l_core import Relay, RelayConfig
from l2l_core.optim import in_bf16
from l2l_core.rounding import round_at_random

STEPS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(24, 3))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(step)
    return torch.randn(4, 24, generator=noise), torch.randn(4, 3, generator=noise)


def squared_error(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch[1])


# -- the law -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_rounding_is_right_on_average_and_to_nearest_is_not(part: float) -> None:
    """A value between two neighbours is rounded up as often as it is near to the upper one."""
    low, high, count = -1.0, -1.0078125, 40_000
    value = torch.full((count,), low + part * (high - low))
    rounded = round_at_random(value.clone(), seed=1)
    assert set(rounded.tolist()) == {low, high}
    ups = (rounded == high).float().mean().item()
    assert abs(ups - part) < 5 * (part * (1 - part) / count) ** 0.5
    assert abs(value.bfloat16().float().mean().item() - value[0].item()) > 20 * abs(
        rounded.mean().item() - value[0].item()
    )


def test_what_fits_stays_and_draws_follow_from_seed_and_element() -> None:
    fits = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-126, 2.0**120])
    assert torch.equal(round_at_random(fits.clone(), seed=3), fits)
    values = torch.rand(1003)
    one, again, other = (round_at_random(values.clone(), seed) for seed in (5, 5, 6))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(round_at_random(values[:500].clone(), 5), one[:500]), "the i-th element gets the i-th number"
    assert torch.equal(one.bfloat16().float(), one)


def test_a_second_moment_follows_its_gradients_where_rounding_to_nearest_stands_still() -> None:
    """Gradients that become smaller: float32 says how fast the mean of their squares must fall."""

    def second_moment(kind: type) -> float:
        noise = torch.Generator().manual_seed(0)
        param = nn.Parameter(torch.zeros(4096))
        optimizer = kind([param], lr=0.0)
        for step in range(1200):
            param.grad = torch.randn(4096, generator=noise) * (1.0 if step < 200 else 0.5)
            optimizer.step()
            if kind is ToNearest:
                optimizer.state[param]["exp_avg_sq"] = optimizer.state[param]["exp_avg_sq"].bfloat16().float()
        return optimizer.state[param]["exp_avg_sq"].float().mean().item()

    class ToNearest(torch.optim.Adam):
        pass

    exact, at_random, nearest = map(second_moment, (torch.optim.Adam, in_bf16(torch.optim.Adam), ToNearest))
    assert abs(at_random / exact - 1) < 0.005, (exact, at_random)
    assert abs(nearest / exact - 1) > 0.05, (exact, nearest)


# -- the oracle --------------------------------------------------------------------------------------------------------


class Oracle:
    """Plain training with AdamW in float32, whose moments are rounded by NumPy after each step."""

    def __init__(self) -> None:
        self.model = model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.noise: dict[nn.Parameter, int] = {}

    def step(self, number: int) -> None:
        x, y = batch(number)
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            (nn.functional.mse_loss(self.model(part), target) / 2).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for param, state in self.optimizer.state.items():
            moment = state["exp_avg_sq"].numpy()
            self.noise.setdefault(param, zlib.crc32(moment.tobytes()) * 2**24)
            seed = zlib.crc32(b"%d/exp_avg_sq" % self.noise[param])
            drawn = torch.empty(-(-moment.size // 4), dtype=torch.int64)
            drawn.random_(-(2**63), None, generator=torch.Generator().manual_seed(seed))
            bits = moment.view(np.uint32) + drawn.numpy().view(np.uint16)[: moment.size].reshape(moment.shape)
            state["exp_avg_sq"].copy_(torch.from_numpy((bits // 65536 * 65536).astype(np.uint32).view(np.float32)))
            state["exp_avg"].copy_(state["exp_avg"].to(torch.bfloat16))
            self.noise[param] += 1


@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_a_relay_is_plain_training_whose_moments_are_rounded_by_others(update: Any) -> None:
    oracle, config = Oracle(), RelayConfig(micro_batches=2, update=update)
    with Relay(
        net := model(), partial(in_bf16(torch.optim.AdamW), lr=1e-2), loss=squared_error, config=config
    ) as relay:
        for number in range(STEPS):
            oracle.step(number)
            relay.step(batch(number))
        assert relay.verify(batch(STEPS)).equal
        for (name, mine), (param, known) in zip(net.named_parameters(), oracle.optimizer.state.items(), strict=True):
            assert torch.equal(mine, param), name
            found = next(s for m, s in relay.optimizer.state.items() if relay.store.masters.model_params[m] is mine)
            assert found["exp_avg"].dtype == found["exp_avg_sq"].dtype == torch.bfloat16
            assert all(torch.equal(found[moment].float(), known[moment]) for moment in ("exp_avg", "exp_avg_sq")), name


# -- as an optimizer of torch ------------------------------------------------------------------------------------------


def trained(kind: type, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    optimizer = kind(net.parameters(), lr=1e-2)
    for number in range(steps):
        squared_error(net(batch(number)[0]), batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def test_a_state_in_float32_is_packed_as_it_is_loaded_and_one_in_bfloat16_comes_back_to_the_bit() -> None:
    Packed = in_bf16(torch.optim.AdamW)
    net, plain = trained(torch.optim.AdamW)
    packed = Packed(net.parameters(), lr=1e-2)
    packed.load_state_dict(plain.state_dict())
    state = packed.state[next(net.parameters())]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16 and state["step"] == 2
    net, packed = trained(Packed)
    again = Packed(net.parameters(), lr=1e-2)
    again.load_state_dict(packed.state_dict())
    pairs = zip(packed.state.values(), again.state.values(), strict=True)
    assert all(torch.equal(one[n], two[n]) for one, two in pairs for n in ("exp_avg", "exp_avg_sq"))
    assert [s["noise"] for s in packed.state.values()] == [s["noise"] for s in again.state.values()]


def test_hooks_are_fired_once_and_a_closure_is_called_once() -> None:
    torch.optim.AdamW([nn.Parameter(torch.ones(2))])  # torch wraps the class's step when its first instance is made
    param = nn.Parameter(torch.ones(2))
    optimizer, heard = in_bf16(torch.optim.AdamW)([param], lr=0.1), []
    optimizer.register_step_post_hook(lambda *args: heard.append("hook"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        heard.append("closure")
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0 and heard == ["closure", "hook"]


def test_an_error_in_a_step_leaves_the_state_packed() -> None:
    class Failing(torch.optim.AdamW):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise RuntimeError("out of luck")
            return super().step(closure)

    _, optimizer = trained(in_bf16(Failing))
    before = [state["exp_avg_sq"].clone() for state in optimizer.state.values()]
    optimizer.fails = True
    for param in optimizer.state:
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="luck"):
        optimizer.step()
    after = [state["exp_avg_sq"] for state in optimizer.state.values()]
    assert all(torch.equal(a, b) and b.dtype == torch.bfloat16 for a, b in zip(before, after, strict=True))


def test_what_is_no_class_of_optimizers_is_refused() -> None:
    with pytest.raises(TypeError, match="give a class, as torch.optim.AdamW"):
        in_bf16(partial(torch.optim.AdamW, lr=1e-3))  # type: ignore[arg-type]
