"""Partition and swap within two budgets, on models of growing depth, length and batch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from l2l_core import DeviceOutOfMemory, EmulatedDevice
from l2l_core.strategies import Lab, PartitionSwap, Plain, RelayPolicy
from l2l_core.strategies.fixed_plans import partition_plan
from l2l_core.strategies.plan import check_operations

LINK = EmulatedDevice(h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8)


class Residual(nn.Module):
    """Block of a small ResNet: two convolutions with BatchNorm."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.other = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.other(self.two(torch.relu(self.norm(self.one(x))))))


def resnet(depth: int, rows: int) -> Lab:
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(depth)))
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    return Lab(model, (torch.randn(rows, 4, 8, 8),), sgd, LINK, list(model), lambda out, _: out.square().mean())


class Recurrent(nn.Module):
    """A cell that is called for each item of a sequence."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for item in x.unbind(1):
            state = self.cell(item, state)
        return state


def recurrent(length: int, link: EmulatedDevice = LINK) -> Lab:
    torch.manual_seed(0)
    model = Recurrent()
    batch = (torch.randn(8, length, 16),)
    return Lab(model, batch, None, link, [model.cell], lambda out, _: out.square().mean())


def host_bytes(lab: Lab) -> int:
    """Return the host bytes of the plan that offloads most."""
    return lab.cost_model.peak_host_bytes(partition_plan(lab.cost_model.stages, 1, 1))


def deepest(make: Callable[[int], Lab], host: int) -> Lab:
    """Return the deepest model whose records fit the host; every block adds the same bytes."""
    first, second = (host_bytes(make(depth)) for depth in (4, 6))
    depth = 4 + 2 * (host - first) // (second - first)
    found, more = make(depth), make(depth + 1)
    assert host_bytes(found) <= host < host_bytes(more)
    return found


def has_plan(lab: Lab, policy: PartitionSwap) -> bool:
    try:
        lab.plan(policy)
    except DeviceOutOfMemory:
        return False
    return True


def test_partitions_are_valid_plans_of_any_size() -> None:
    for n in (2, 3, 5, 9):
        for size in range(1, n + 2):
            for near in range(1, n + 2):
                check_operations(partition_plan(n, size, near), n)


def test_a_step_stays_within_both_budgets_and_errors_name_the_one_that_binds() -> None:
    lab = resnet(6, 4)
    most = lab.plan(Plain()).peak_device_bytes
    assert lab.plan(PartitionSwap()).operations == lab.plan(Plain()).operations  # without need nothing is offloaded
    plan = lab.plan(PartitionSwap(most * 3 // 4, 10**9))
    assert lab.verify(plan).equal
    result = lab.step(plan)
    assert result.peak_device_bytes == plan.peak_device_bytes <= most * 3 // 4
    assert 0 < result.peak_host_bytes == plan.peak_host_bytes
    with pytest.raises(DeviceOutOfMemory, match="on the device"):
        lab.plan(PartitionSwap(most * 3 // 4, plan.peak_host_bytes // 4))
    with pytest.raises(DeviceOutOfMemory, match="on the device"):
        lab.plan(PartitionSwap(most // 8))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_depth_within_a_device_and_a_host_budget() -> None:
    plain = 9
    cap = resnet(plain, 8).plan(Plain()).peak_device_bytes
    host = cap * 64 // 12  # the ratio of a host of 64 GB to a device of 12 GB
    assert resnet(plain + 1, 8).plan(Plain()).peak_device_bytes > cap
    lab, doubled = deepest(lambda depth: resnet(depth, 8), host), deepest(lambda depth: resnet(depth, 16), host)
    assert lab.cost_model.stages - 1 >= 3.8 * plain
    assert 1.8 < (lab.cost_model.stages - 1) / (doubled.cost_model.stages - 1) < 2.2
    for each in (lab, doubled):
        step = each.step(each.plan(partition_plan(each.cost_model.stages, 1, 1)))
        assert step.peak_device_bytes <= cap and 0.9 * host < step.peak_host_bytes <= host


@pytest.mark.slow
def test_a_recurrent_networks_seconds_are_linear_in_its_length() -> None:
    cap = recurrent(16).plan(Plain()).peak_device_bytes
    lengths = (16, 24, 32, 48)
    # Copies take longer than compute, whose measured seconds are noisy.
    slow = EmulatedDevice(h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e6)
    labs = [recurrent(length, slow) for length in lengths]
    assert [lab.plan(Plain()).peak_device_bytes <= cap for lab in labs] == [True, False, False, False]
    seconds = [lab.plan(partition_plan(lab.cost_model.stages, 2, 1)).seconds for lab in labs]
    fit = np.corrcoef(lengths, seconds)[0, 1] ** 2
    assert fit > 0.99
    assert has_plan(labs[-1], PartitionSwap(cap))


class Mixture(nn.Module):
    """A dense mixture: the sum of all experts, weighted by a gate."""

    def __init__(self, experts: int, width: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1).unsqueeze(-1)
        out = x
        for number, expert in enumerate(self.experts):
            out = out + shares[:, number] * expert(x)
        return out


def test_four_times_the_experts_fit_if_their_weights_are_on_the_host_too() -> None:
    def lab(experts: int) -> Lab:
        torch.manual_seed(0)
        model = Mixture(experts)
        return Lab(model, (torch.randn(4, 8),), None, LINK, list(model.experts), lambda out, _: out.square().mean())

    few, many = lab(3), lab(12)
    cap = few.plan(Plain()).peak_device_bytes
    with pytest.raises(DeviceOutOfMemory):
        many.plan(PartitionSwap(cap))  # weights stay on the device
    (row,) = many.compare([RelayPolicy()]).rows
    assert row.peak_device_bytes <= cap
    assert row.peak_host_bytes > 12 * sum(
        param.numel() for param in many.model.parameters()
    )  # master weights, gradients, Adam's state
