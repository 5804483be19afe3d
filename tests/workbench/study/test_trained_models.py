"""The relay at the end of a run: its bits are those of plain PyTorch, and of a run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from l2l_core import Depth, EmulatedDevice, Insert, Relay
from workbench import Study, Variant


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(2))), nn.Linear(4, 1))


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def make_relay(seed: int, lr: float = 1e-2) -> tuple[Relay, Any]:
    model = make_model(seed)
    optimizer = make_optimizer(model, lr)
    relay = Relay(model, optimizer, EmulatedDevice(), layers=[*model[0]], loss=nn.MSELoss())
    return relay, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def draw(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(4, 4, generator=generator), torch.randn(4, 1, generator=generator)


VARIANTS: dict[str, Any] = {
    "plain": None,
    "short": Variant(steps=4),
    "grown": Depth({0: 2, 3: 4}, grow="top"),
    "inserted": lambda relay, step: [Insert(1, module=Block())] if step == 3 else [],
    "diverged": Variant(None, {"lr": 1e30}),
}


def make_study(folder: Path, *names: str, **options: Any) -> Study:
    given: dict[str, Any] = {"seeds": [0, 1], "steps": 6, "batches": draw, "keep_models": True} | options
    return Study(make_relay, {name: VARIANTS[name] for name in names or VARIANTS}, folder=folder, **given)


def state_of(relay: Relay) -> list[torch.Tensor]:
    """Weights and the moments of Adam."""
    parameters = [*relay.model.parameters()]
    states = [relay.optimizer.state[p] for p in parameters]
    return [*parameters, *(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))]


def train_plain(seed: int, steps: int) -> list[torch.Tensor]:
    model = make_model(seed)
    optimizer = make_optimizer(model, 1e-2)
    scheduler, batches = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), draw(seed)
    for _ in range(steps):
        x, y = next(batches)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    parameters = [*model.parameters()]
    return [*parameters, *(optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq"))]


def test_the_relay_of_a_run_is_that_of_plain_training_and_of_a_run_alone(tmp_path: Path) -> None:
    study = make_study(tmp_path / "all")
    study.run(report=None)
    assert len([*study.folder.rglob("relay")]) == 2 * 4  # of the ends alone
    before = torch.get_rng_state()
    for name in ("plain", "short"):
        with study.relay(name, 1) as relay:
            expected = train_plain(1, 4 if name == "short" else 6)
            assert all(map(torch.equal, state_of(relay), expected)) and len(expected) == 3 * 6
    with study.relay("plain", 0) as relay:
        assert not torch.equal(next(relay.model.parameters()), train_plain(1, 6)[0])
        relay.step(next(draw(0)))  # it trains on
        assert relay.steps == 7
    torch.set_rng_state(before)
    for name in ("grown", "inserted"):
        alone = make_study(tmp_path / name, name, seeds=[1])
        alone.run(report=None)
        with study.relay(name, 1) as one, alone.relay(name, 1) as other:
            assert len(one.stack) == (4 if name == "grown" else 3) and one.steps == 6
            assert all(map(torch.equal, state_of(one), state_of(other)))
    study.run(report=None)  # which leaves them
    assert len([*study.folder.rglob("relay")]) == 2 * 4
    with pytest.raises(ValueError, match="'diverged', seed 0, diverged at step 2, so there is no state at its end"):
        study.relay("diverged", 0)
    with pytest.raises(ValueError, match=r"variant='deep', seed=0: there are the variants \['plain'"):
        study.relay("deep", 0)


def test_models_that_were_not_kept_are_refused_with_a_remedy(tmp_path: Path) -> None:
    study = make_study(tmp_path / "one", "plain", keep_models=False)
    with pytest.raises(ValueError, match=r"has not ended: call run\(\) first"):
        study.relay("plain", 0)
    study.run(report=None)
    with pytest.raises(ValueError, match="was not kept: train it with keep_models=True in another folder="):
        study.relay("plain", 0)
    again = make_study(tmp_path / "two", "plain", keep_models=True)
    again.run(report=None)
    again.relay("plain", 0).close()
