"""Loaders, optimizers and models that accelerate and Fabric have prepared, in a relay's own loop; beside the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from l2l_core import Relay, RelayConfig
from l2l_core.eps.optimizers import unwrap_optimizer

HOST = RelayConfig(stash="host")


@pytest.fixture
def accelerator() -> Any:
    accelerate = pytest.importorskip("accelerate")
    yield accelerate.Accelerator(cpu=True)
    reset(accelerate)


def reset(accelerate: Any) -> None:
    """Forget the settings that accelerate keeps for the process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def fabric(**options: Any) -> Any:
    lightning = pytest.importorskip("lightning")
    return lightning.Fabric(accelerator="cpu", devices=1, **options)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loader() -> DataLoader[Any]:
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(14, 8, generator=g), torch.randint(3, (14,), generator=g))
    return DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(2))


def plainly(epochs: int = 3) -> dict[str, torch.Tensor]:
    model, batches = chain(), loader()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
    return model.state_dict()


def by_relay(
    folder: Path, batches: Any, wrap: Callable[[Any], Any] = lambda optimizer: optimizer
) -> dict[str, torch.Tensor]:
    """Train for three epochs, with a scheduler over the wrapper; the first ends with a save, from which another relay goes on."""

    def train(relay: Relay, schedule: Any, epochs: int) -> None:
        for _ in range(epochs):
            for batch in batches:
                relay.step(batch)
                schedule.step()

    model, other = chain(), chain()
    optimizer, second = wrap(sgd(model)), wrap(sgd(other))
    schedule, resumed = (torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (optimizer, second))
    with Relay(model, optimizer, device="cpu", loss=nn.CrossEntropyLoss(), config=HOST) as relay:
        assert relay.optimizer is unwrap_optimizer(optimizer)
        train(relay, schedule, 1)
        relay.save(folder)
    with Relay.load(folder, other, second, device="cpu", loss=nn.CrossEntropyLoss()) as relay:
        resumed.load_state_dict(schedule.state_dict())
        train(relay, resumed, 2)
    return other.state_dict()


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_accelerate_loader_and_optimizer(tmp_path: Path, accelerator: Any) -> None:
    assert_same(by_relay(tmp_path / "loader", accelerator.prepare(loader())), plainly())
    both = by_relay(tmp_path / "both", accelerator.prepare(loader()), accelerator.prepare)
    assert_same(both, plainly())


def test_accelerate_scheduler(accelerator: Any) -> None:
    model = chain()
    optimizer = accelerator.prepare(sgd(model))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    with Relay(model, optimizer, device="cpu", loss=nn.CrossEntropyLoss(), config=HOST) as relay:
        for _ in range(3):
            for batch in accelerator.prepare(loader()):
                relay.step(batch)
                schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**6


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning", "ignore:.*does not have many workers")
def test_fabric_loader_and_optimizer(tmp_path: Path) -> None:
    setup = fabric()
    assert_same(by_relay(tmp_path / "loader", setup.setup_dataloaders(loader())), plainly())
    both = by_relay(tmp_path / "both", setup.setup_dataloaders(loader()), setup.setup_optimizers)
    assert_same(both, plainly())


def test_lightning_optimizer(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.core.optimizer import LightningOptimizer

    assert_same(by_relay(tmp_path, loader(), LightningOptimizer), plainly())


def test_a_factory_may_return_a_wrapper(accelerator: Any) -> None:
    def make(params: Any) -> Any:
        return accelerator.prepare(torch.optim.SGD(params, lr=0.1))

    with Relay(chain(), make, device="cpu", loss=nn.CrossEntropyLoss()) as relay:
        assert type(relay.optimizer) is torch.optim.SGD


def test_wrappers_that_change_steps_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    make = partial(Relay, device="cpu", loss=nn.CrossEntropyLoss())
    model = chain()
    try:
        accumulating = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
        with pytest.raises(ValueError, match=r"gradient_accumulation_steps=4.*RelayConfig\(micro_batches=4\)"):
            make(model, accumulating.prepare(sgd(model)))
    finally:
        reset(accelerate)
    try:
        wrapper = accelerate.Accelerator(cpu=True).prepare(sgd(model))
        wrapper.scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(ValueError, match="scales gradients by a GradScaler and skips steps"):
            make(model, wrapper)
        wrapper.scaler = None
        make(model, wrapper).close()
    finally:
        reset(accelerate)


def test_fabric_callbacks_and_models_are_refused() -> None:
    class Counts:
        def on_after_optimizer_step(self, **kwargs: Any) -> None: ...

    model, make = chain(), partial(Relay, device="cpu", loss=nn.CrossEntropyLoss())
    wrapper = fabric(callbacks=[Counts()]).setup_optimizers(sgd(model))
    with pytest.raises(ValueError, match="Counts.on_after_optimizer_step"):
        make(model, wrapper)
    make(model, wrapper.optimizer).close()  # the remedy
    wrapped, optimizer = fabric().setup(model, sgd(model))
    with pytest.raises(ValueError, match=r"_FabricModule of fabric.setup.*\(model.module\)"):
        make(wrapped, optimizer)
    make(wrapped.module, optimizer).close()


def test_a_model_with_accelerates_mixed_precision_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    make = partial(Relay, device="cpu", loss=nn.CrossEntropyLoss())
    try:
        mixed = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model = mixed.prepare(chain())
        with pytest.raises(ValueError, match="prepared by accelerate with mixed precision"):
            make(model, sgd(model))
        model = mixed.unwrap_model(model, keep_fp32_wrapper=False)
        make(model, mixed.prepare(sgd(model)), config=RelayConfig(precision="bf16")).close()
        reset(accelerate)
        model = accelerate.Accelerator(cpu=True).prepare(chain())  # in float32: unchanged
        make(model, sgd(model)).close()
    finally:
        reset(accelerate)
