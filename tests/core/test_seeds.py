"""PyTorch's seed decides a relay's random numbers, and a state dict of two numbers rewinds them."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from oracle import seeded
from torch import Tensor, nn

from l2l_core import FileShelf, Relay, RelayConfig

adam = partial(torch.optim.Adam, lr=1e-2)
CONFIG = RelayConfig(micro_batches=2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(x)))


def model_of() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(Block() for _ in range(4)))


def relay_of(model: nn.Module, config: RelayConfig = CONFIG) -> Relay:
    return Relay(model, adam, layers=[str(i) for i in range(4)], loss=square, config=config)


def square(outputs: Tensor, batch: object) -> Tensor:
    return outputs.pow(2).mean()


def batch_of(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def losses_of(seed: int, config: RelayConfig = CONFIG) -> list[float]:
    model = model_of()
    torch.manual_seed(seed)
    with relay_of(model, config) as relay:
        return [relay.step((batch_of(step),)).loss for step in range(3)]


def plain_losses(seed: int) -> list[float]:
    """Plain accumulation with the documented seeds."""
    model = model_of()
    torch.manual_seed(seed)
    config, optimizer, losses = seeded(CONFIG), adam(model.parameters()), []
    for step in range(3):
        parts = []
        for k, part in enumerate(batch_of(step).split(2)):
            torch.manual_seed(config.micro_batch_seed(step, k))
            parts.append(square(model(part), part) / 2)
            parts[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(part.detach() for part in parts)))
    return losses


def test_the_seed_of_pytorch_decides() -> None:
    one = losses_of(1)
    assert one == losses_of(1) == plain_losses(1)
    assert one != losses_of(2) == plain_losses(2)
    fixed = RelayConfig(micro_batches=2, seed=1)
    assert losses_of(1, fixed) == losses_of(2, fixed) == one


def test_settings_without_a_seed_keep_the_one_of_the_relay() -> None:
    torch.manual_seed(7)
    with relay_of(model_of()) as relay:
        assert relay.config.seed == 5, "model_of seeds"
        torch.manual_seed(8)
        relay.config = RelayConfig(micro_batches=4)
        assert relay.config == RelayConfig(micro_batches=4, seed=5)
        relay.config = RelayConfig(micro_batches=4, seed=9)
        assert relay.config.seed == 9


def test_a_seed_that_no_relay_has_taken_is_no_seed() -> None:
    with pytest.raises(ValueError, match=r"seed=None.*relay\.config"):
        CONFIG.micro_batch_seed(0, 0)


def test_a_save_keeps_the_seed(tmp_path: Path) -> None:
    torch.manual_seed(3)
    with relay_of(model := model_of()) as relay:
        relay.step((batch_of(0),))
        relay.save(tmp_path / "save")
        expected = relay.step((batch_of(1),)).loss
    torch.manual_seed(4)
    for options in ({}, {"config": CONFIG}):
        with Relay.load(tmp_path / "save", copy.deepcopy(model), adam, loss=square, **options) as relay:
            assert relay.config.seed == 5
            assert relay.step((batch_of(1),)).loss == expected


def test_a_search_for_a_learning_rate_leaves_no_trace() -> None:
    with relay_of(model_of()) as relay:
        expected = [relay.step((batch_of(step),)).loss for step in range(3)]
    model = model_of()
    with relay_of(model) as relay:
        before = copy.deepcopy((model.state_dict(), relay.optimizer.state_dict(), relay.state_dict()))
        for step in range(3):
            relay.optimizer.param_groups[0]["lr"] = 10.0 ** (step - 4)
            relay.step((batch_of(step),))
        assert relay.state_dict() == {"steps": 3, "seed": 5}
        model.load_state_dict(before[0])
        relay.optimizer.load_state_dict(before[1])
        relay.load_state_dict(before[2])
        assert [relay.step((batch_of(step),)).loss for step in range(3)] == expected


def test_files_hold_the_number_of_steps(tmp_path: Path) -> None:
    shelf = FileShelf(folder=tmp_path / "shelf", memory_bytes=10**6)
    with Relay(model_of(), adam, layers=[str(i) for i in range(4)], loss=square, shelf=shelf) as relay:
        with pytest.raises(ValueError, match="its files hold the number of steps"):
            relay.load_state_dict({"steps": 0, "seed": 0})


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"steps": 1}, r"relay\.state_dict\(\)"),
        ({"steps": -1, "seed": 0}, "steps=-1"),
        ({"steps": 1, "seed": None}, "seed=None"),
        ([1, 2], "mapping"),
    ],
)
def test_other_states_are_refused(state: object, words: str) -> None:
    with relay_of(model_of()) as relay:
        relay.step((batch_of(0),))
        with pytest.raises(ValueError, match=words):
            relay.load_state_dict(state)  # type: ignore[arg-type]
        assert relay.state_dict() == {"steps": 1, "seed": 5}
