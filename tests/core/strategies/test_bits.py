"""Every plan gives the bits of plain training: loss, gradients, buffers and random state."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from zoo import KINDS

from l2l_core.strategies import Full, Lab, Offload, Periodic, Plain
from l2l_core.strategies.fixed_plans import mixed_plan

POLICIES = [Plain(), Full(), Periodic(), Offload(ahead=1)]
REFUSED = {
    "inplace": "in place",
    "random_skip": "another path",
    "mixtral": "out of sight",
    "qwen3_moe": "out of sight",
}
CASES = [(kind.name, count) for kind in KINDS for count in (1, 3) if kind.name not in REFUSED]


@pytest.mark.parametrize(("name", "micro_batches"), CASES)
def test_plans_equal_plain_training(lab_of: Callable[..., Lab], name: str, micro_batches: int) -> None:
    lab = lab_of(name, micro_batches=micro_batches)  # 7 rows: the last micro-batch is smaller
    layers = lab.cost_model.stages - 1
    for policy in [*POLICIES, mixed_plan(("ROHK" * layers)[:layers])]:
        plan = lab.plan(policy)
        proof = lab.verify(plan)
        assert proof.equal, f"{plan.name}: {proof}"


class Unrolled(nn.Module):
    """Calls one layer again and again, which reads its weights three times in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Sequential(*[nn.Linear(24, 24), nn.Tanh()] * 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.cell(x)
        return x


@pytest.mark.all_cases
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_contributions_to_shared_weights_are_added_in_the_order_of_plain_training(micro_batches: int) -> None:
    torch.manual_seed(0)
    model, batch = Unrolled(), (torch.randn(16, 24),)
    layers, loss = [model.cell], lambda out, _: out.square().mean()
    lab = Lab(model, batch, layers=layers, loss=loss, micro_batches=micro_batches)
    for policy in [*POLICIES, mixed_plan("ROHK")]:
        plan = lab.plan(policy)
        proof = lab.verify(plan)
        assert proof.equal, f"{plan.name}: {proof}"
        assert lab.step(plan).peak_device_bytes == plan.peak_device_bytes


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_run_again_are_refused_before_training(lab_of: Callable[..., Lab], name: str) -> None:
    with pytest.raises(RuntimeError, match=REFUSED[name]):
        lab_of(name, micro_batches=2)


def test_forwards_follow_the_formulas(lab_of: Callable[..., Lab]) -> None:
    lab = lab_of("gpt2")
    layers = lab.cost_model.stages - 1
    last = (lab.cost_model.stages - 1) // 2 * 2  # the first stage of the last segment
    expected = {Plain(): layers, Full(): 2 * layers, Periodic(2): layers + last, Offload(): layers}
    for policy, forwards in expected.items():
        plan = lab.plan(policy)
        assert lab.step(plan).layer_forwards == plan.layer_forwards == forwards
