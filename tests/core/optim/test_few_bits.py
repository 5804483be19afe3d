"""State in fewer bits in a real relay: bytes by ledger, saves, edits, branches, a torn step, forecasts.

bitsandbytes is an extra of its own (``pip install -e ".[bits]"``): 125 MB, most of it for GPUs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small import assert_same, whole
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from l2l_core import Duplicate, EmulatedDevice, Interpolate, NonFiniteError, Relay, RelayConfig
from l2l_core.eps.optimizers import state_bytes
from l2l_core.eps.optimizers.factory import make_optimizer
from l2l_core.eps.optimizers.optimizer_conformance import Trial
from l2l_core.optim import in_bf16

WIDTH = 64  # matrices of 4,096 elements: where 8-bit state begins
Make = Callable[[Any], torch.optim.Optimizer]


def eight_bit(params: Any) -> torch.optim.Optimizer:
    return importlib.import_module("bitsandbytes").optim.AdamW8bit(params, lr=1e-2)


missing = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason='needs bitsandbytes: pip install -e ".[bits]"'
)
MAKES = [
    pytest.param(partial(in_bf16(torch.optim.AdamW), lr=1e-2), id="bf16"),
    pytest.param(partial(in_bf16(torch.optim.AdamW), lr=1e-2, fused=True), id="bf16 fused"),
    pytest.param(eight_bit, id="8-bit", marks=missing),
]


class Fault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, at: list[bool]) -> torch.Tensor:
        ctx.at = at
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * (torch.nan if ctx.at[0] else 1.0), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fails = [False]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Fault.apply(torch.tanh(self.linear(self.norm(x))), self.fails)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(step)
    return torch.randn(4, WIDTH, generator=noise), torch.randn(4, 3, generator=noise)


def squared_error(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch[1])


CONFIG = RelayConfig(micro_batches=2)


def relay_of(make: Make, **options: Any) -> Relay:
    return Relay(Model(), make, EmulatedDevice(), **({"loss": squared_error, "config": CONFIG} | options))


def state(relay: Relay) -> dict[str, torch.Tensor]:
    return {name: value for name, value in whole(relay).items() if name != "random"}


def counted(relay: Relay) -> int:
    """Bytes of all storages of the optimizer's state, each once: another count than the relay's own."""
    tensors = [t for known in relay.optimizer.state.values() for t in known.values() if isinstance(t, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("make", MAKES)
def test_a_step_is_plain_training_to_the_bit_and_the_ledger_has_its_bytes(make: Make) -> None:
    core = Model()
    optimizer = make(core.parameters())
    with relay_of(make) as relay:
        foretold = [relay.forecast(batch(0)).host_bytes["optimizer"]]
        for number in range(3):
            x, y = batch(number)
            for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
                (nn.functional.mse_loss(core(part), target) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            relay.step(batch(number))
        foretold.append(relay.forecast(batch(3)).host_bytes["optimizer"])
        assert relay.verify(batch(3)).equal
        assert all(torch.equal(a, b) for a, b in zip(core.parameters(), relay.model.parameters(), strict=True))
        assert relay.host.by_category()["optimizer"] == counted(relay)
        # From a rehearsal, then from the last step. Only the table of 8-bit codes is foretold once per parameter and moment
        tables = sum(2048 for known in relay.optimizer.state.values() if "qmap1" in known)
        assert all(0 <= nbytes - counted(relay) <= tables for nbytes in foretold), (foretold, counted(relay), tables)


@pytest.mark.parametrize("make", MAKES)
def test_a_save_resumes_to_the_bit(make: Make, tmp_path: Path) -> None:
    with relay_of(make) as relay:
        for number in range(2):
            relay.step(batch(number))
        relay.save(tmp_path)
        relay.step(batch(2))
        with Relay.load(tmp_path, Model(), make, device="cpu", loss=squared_error) as resumed:
            resumed.step(batch(2))
            assert_same(state(resumed), state(relay))
            assert resumed.host.by_category()["optimizer"] == counted(resumed)


@pytest.mark.parametrize("make", MAKES)
def test_edits_and_branches_keep_the_state_and_the_books(make: Make) -> None:
    with relay_of(make) as relay:
        for number in range(2):
            relay.step(batch(number))
        before = state(relay)
        relay.apply(Duplicate(1, optimizer="copy"))
        assert relay.host.by_category()["optimizer"] == counted(relay)
        relay.undo()
        assert_same(state(relay), before)
        assert relay.host.by_category()["optimizer"] == counted(relay)
        relay.fork("aside")
        relay.apply(Interpolate(1, 2))
        relay.step(batch(7))
        assert relay.verify(batch(8)).equal
        relay.switch("main")
        assert_same(state(relay), before)
        assert relay.verify(batch(2)).equal


@pytest.mark.parametrize("make", MAKES)
def test_a_step_that_fails_halfway_is_rolled_back(make: Make) -> None:
    with relay_of(make, config=replace(CONFIG, rollback=True)) as relay:
        relay.step(batch(0))
        before = whole(relay)
        relay.model.layers[1].fails[0] = True  # the layers above are updated by then
        with pytest.raises(NonFiniteError):
            relay.step(batch(1))
        assert_same(whole(relay), before)
        relay.model.layers[1].fails[0] = False
        assert relay.verify(batch(1)).equal


@missing
def test_the_trial_reaches_8_bit_state() -> None:
    """Its matrices are so large that their state is quantised."""
    optimizer = Trial(eight_bit(Model().parameters())).copy()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    matrices = [optimizer.state[param]["state1"] for param in params if param.dim() == 2]
    assert len(matrices) == 2 and all(codes.dtype == torch.uint8 for codes in matrices)


@missing
def test_codes_cannot_be_scaled_and_nothing_has_changed() -> None:
    with relay_of(eight_bit) as relay:
        relay.step(batch(0))
        before = state(relay)
        with pytest.raises(ValueError, match="quantised.*Use optimizer='copy' or 'fresh'"):
            relay.apply(Duplicate(1, optimizer=0.5))
        assert_same(state(relay), before)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RAdam])
def test_noise_by_place_is_not_elementwise(kind: type) -> None:
    """Also where weights do not show it yet, as in RAdam's first steps; workers would cut parameters otherwise."""
    assert make_optimizer(partial(kind, lr=1e-3), Model())[1].elementwise
    assert not make_optimizer(partial(in_bf16(kind), lr=1e-3), Model())[1].elementwise


def test_bytes_in_common_count_once_and_quantised_tensors_by_what_they_hold() -> None:
    table, one, two = torch.zeros(256), torch.zeros(10), torch.zeros(20)
    states = [{"codes": one, "table": table}, {"codes": two, "table": table, "step": 3}]
    assert state_bytes(*states) == 4 * (256 + 10 + 20)
    assert state_bytes({"m": TwoTensor(torch.zeros(6), torch.zeros(6))}) == 2 * 4 * 6


@missing
@pytest.mark.parametrize("update", ["eager", "whole"])
def test_overrides_reach_the_parameter_that_they_name(update: Any) -> None:
    """bitsandbytes finds it by identity, and keeps its place in the group."""
    from bitsandbytes.optim import GlobalOptimManager

    model, theirs = Model(), Model()
    theirs.load_state_dict(model.state_dict())
    manager = GlobalOptimManager.get_instance()
    for each in (model, theirs):
        manager.register_module_override(each.layers[-1].linear, "weight", {"optim_bits": 32})
    try:
        plain = eight_bit(theirs.parameters())
        with Relay(model, eight_bit, "cpu", loss=squared_error, config=RelayConfig(update=update)) as relay:
            for number in range(2):
                relay.step(batch(number))
                squared_error(theirs(batch(number)[0]), batch(number)).backward()
                plain.step()
                plain.zero_grad()
            kinds = [relay.optimizer.state[param]["state1"].dtype for param in model.parameters()]
            assert kinds == [plain.state[param]["state1"].dtype for param in theirs.parameters()]
            assert torch.uint8 in kinds
        assert_same(model.state_dict(), theirs.state_dict())
    finally:
        for known in (manager.module_weight_config_triple, manager.pid2config, manager.index2config):
            known.clear()
