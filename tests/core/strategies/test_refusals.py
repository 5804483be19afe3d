"""What no plan can do again is refused, by its name and with a remedy; budgets that do not suffice too."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from l2l_core import DeviceOutOfMemory, EmulatedDevice
from l2l_core.strategies import Full, Lab, Plain, Rotor


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 2


class Own(nn.Linear):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.drawn = iter(range(1000))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + next(self.drawn))


class Shelled(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module], between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.between = nn.ModuleList(layer() for _ in range(3)), between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def lab(
    layer: Callable[[], nn.Module] = linear, between: Callable[[Tensor], Tensor] = torch.relu, **settings: object
) -> Lab:
    torch.manual_seed(0)
    model = Shelled(layer, between)
    return Lab(
        model, (torch.randn(6, 4),), loss=lambda out, _: out.square().mean(), layers=list(model.layers), **settings
    )


def autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.tanh(x)


def test_what_cannot_run_again_is_named() -> None:
    with pytest.raises(RuntimeError, match="custom autograd.Function"):
        lab(between=Twice.apply)
    with pytest.raises(RuntimeError, match=r"stage 2 \(up to layers.2\) makes other values"):
        lab(Own)
    with pytest.raises(RuntimeError, match="changes a tensor of an earlier stage in place"):
        lab(between=torch.relu_)
    with pytest.raises(RuntimeError, match="autocast"):
        lab(between=autocast)


def test_plans_by_hand_are_checked() -> None:
    tried = lab()
    plan = [
        ("Fck", 0),
        ("F0", 1),
        ("Fall", 2),
        ("Fall", 3),
        ("B", 3),
        ("B", 2),
        ("Fall", 0),
        ("Fall", 1),
        ("B", 1),
        ("B", 0),
    ]
    assert tried.verify(tried.plan(plan)).equal
    with pytest.raises(ValueError, match="its input is not there"):
        tried.plan([*plan[:6], ("Fall", 1), *plan[7:]])
    with pytest.raises(ValueError, match="every stage needs one B"):
        tried.plan(plan[:-1])


def test_a_budget_that_does_not_suffice_leaves_weights_and_says_what_would() -> None:
    need = lab().plan(Plain()).peak_device_bytes
    tight = lab(device=EmulatedDevice(need - 1))
    before = {name: value.clone() for name, value in tight.model.state_dict().items()}
    with pytest.raises(DeviceOutOfMemory):
        tight.step(tight.plan(Plain()))
    assert all(torch.equal(value, before[name]) for name, value in tight.model.state_dict().items())
    assert tight.device.ledger.total == 0
    with pytest.raises(DeviceOutOfMemory, match="the smallest budget for which it has one is") as caught:
        tight.plan(Rotor(1))
    least = caught.value.least_bytes
    assert tight.plan(Rotor(least)).peak_device_bytes == least
    assert least <= tight.plan(Full()).peak_device_bytes
