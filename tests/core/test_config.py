"""Settings are validated once, and their errors name the value and the remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from l2l_core import EmulatedDevice, Relay, RelayConfig


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"micro_batches": 0}, "micro_batches=0: must be an integer of at least 1"),
        ({"micro_batches": 2.0}, "micro_batches=2.0"),
        ({"micro_batches": True}, "micro_batches=True"),
        ({"ahead": -1}, "ahead=-1: must be an integer of at least 0"),
        ({"stash": "tape"}, "stash='tape': must be one of 'device', 'host'"),
        ({"update": "lazy"}, "update='lazy'"),
        ({"precision": "fp16"}, "precision='fp16': must be one of 'fp32', 'bf16'"),
        ({"meter": "never"}, "meter='never'"),
        ({"rollback": 1}, "rollback=1"),
        ({"seed": -5}, "seed=-5"),
        ({"max_grad_norm": 0.0, "update": "deferred"}, "max_grad_norm=0.0: must be a positive number"),
        ({"max_grad_norm": 1.0}, "update='deferred'"),
    ],
)
def test_a_bad_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        RelayConfig(**settings)


def test_unknown_settings_are_refused_and_values_cannot_change() -> None:
    with pytest.raises(TypeError, match="microbatches"):
        RelayConfig(microbatches=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        RelayConfig().ahead = 2  # type: ignore[misc]


def test_seeds_differ_by_step_micro_batch_and_seed_and_are_stable() -> None:
    config = RelayConfig(seed=3)
    seeds = {config.micro_batch_seed(step, k) for step in range(20) for k in range(20)}
    assert len(seeds) == 400
    assert config.micro_batch_seed(1, 2) != RelayConfig(seed=4).micro_batch_seed(1, 2)
    assert RelayConfig(seed=0).micro_batch_seed(0, 0) == 2415664546, (
        "seeds are part of what makes a saved run repeatable"
    )


@pytest.mark.parametrize(
    "figures", [{"memory_bytes": 0}, {"h2d_bytes_per_s": -1.0}, {"d2h_bytes_per_s": 0}, {"latency_s": -1e-3}]
)
def test_a_device_with_impossible_figures_is_refused(figures: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(figures))):
        EmulatedDevice(**figures)


@pytest.mark.parametrize(
    "device, error, message",
    [
        ("tpu", ValueError, "device='tpu' does not exist"),
        ("cuda", ValueError, "device='cuda'"),
        (3, TypeError, "device=3"),
    ],
)
def test_a_device_that_does_not_exist_is_refused(device: Any, error: type[Exception], message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(error, match=message):
        Relay(model, device=device)
    assert all(param.is_leaf for param in model.parameters())


def test_what_cannot_relay_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match="takes a torch.nn.Module"):
        Relay("gpt2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layers="):
        Relay(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"parameter 0.weight is torch.bfloat16.*model.float\(\)"):
        Relay(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).bfloat16())


def test_the_repr_of_a_relay_is_one_line_with_size_device_steps_and_settings() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)), nn.Linear(4, 2))
    config, batch = RelayConfig(micro_batches=2, stash="host", seed=7), (torch.randn(4, 4), torch.randn(4, 2))
    with Relay(model, device="cpu", loss=nn.MSELoss(), config=config) as relay:
        assert repr(relay) == (
            "Relay(Sequential, 3 layers, 70 parameters, emulated device, 0 steps, micro_batches=2, stash='host', seed=7)"
        )
        relay.step(batch)
        relay.config = dataclasses.replace(config, schedule=relay.plan(batch))
        assert "1 steps" in repr(relay) and "schedule=" in repr(relay) and "\n" not in repr(relay)
    assert repr(relay) == repr(Relay.__new__(Relay)) == "Relay(closed)"
