"""Tensors outside of the model that each micro-batch changes: a teacher in the objective, a running mean in a closure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_state, copy_state
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from zoo import WIDTH

from l2l_core import Relay, RelayConfig

K, STEPS = 2, 4
CLASSES = 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(3)), nn.Linear(WIDTH, CLASSES))


def make_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, WIDTH, generator=generator), torch.randint(CLASSES, (8,), generator=generator)


class MeanTeacher:
    """An objective with a teacher that begins as the student, so that a first step does not show when it was averaged."""

    def __init__(self, student: nn.Module, how: str, when: str) -> None:
        self.how, self.when = how, when
        self.teacher = (
            AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.5)) if how == "swa" else copy.deepcopy(student)
        )
        self.teacher.requires_grad_(False)

    def average(self, student: nn.Module) -> None:
        if isinstance(self.teacher, AveragedModel):
            self.teacher.update_parameters(student)
            return
        pairs = list(zip(self.teacher.parameters(), student.parameters(), strict=True))
        with torch.no_grad():
            if self.how == "foreach":
                torch._foreach_lerp_([mine for mine, _ in pairs], [other for _, other in pairs], 0.5)
            for mine, other in pairs if self.how in ("data", "assigned") else ():
                mean = torch.lerp(mine, other, 0.5)
                if self.how == "data":
                    mine.data.copy_(mean)
                else:
                    mine.data = mean

    def __call__(self, student: nn.Module, batch: Any) -> Tensor:
        if self.when == "first":
            self.average(student)
        out = student(batch[0])
        with torch.no_grad():
            target = self.teacher(batch[0])
        loss = F.cross_entropy(out, batch[1]) + F.mse_loss(out, target)
        if self.when == "last":
            self.average(student)
        return loss


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_plainly(model: nn.Module, objective: Callable[[nn.Module, Any], Tensor]) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        x, y = make_batch(step)
        for part in zip(x.chunk(K), y.chunk(K), strict=True):
            (objective(model, part) / K).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize(
    ("when", "schedule"), [("last", "breadth_first"), ("last", "depth_first"), ("first", "depth_first")]
)
@pytest.mark.parametrize("how", ["swa", "foreach", "data", "assigned"])
def test_a_teacher_is_averaged_once_per_micro_batch(how: str, when: str, schedule: Any, verify: Any) -> None:
    """Comparisons of a few rows and of the first step call the objective, too."""
    expected = make_model()
    plain = MeanTeacher(expected, how, when)
    train_plainly(expected, plain)
    model = make_model()
    objective, config = MeanTeacher(model, how, when), RelayConfig(micro_batches=K, schedule=schedule, verify=verify)
    with Relay(model, sgd(model), "cpu", objective=objective, config=config) as relay:
        for step in range(STEPS):
            relay.step(make_batch(step))
    assert_state(model, copy_state(expected))
    assert_state(objective.teacher, copy_state(plain.teacher))


@pytest.mark.parametrize("how", ["swa", "foreach", "data"])
def test_a_teacher_that_is_averaged_before_the_layers_is_refused(how: str) -> None:
    """Both micro-batches begin before a layer runs; the teacher of the first would be averaged twice."""
    model = make_model()
    objective = MeanTeacher(model, how, "first")
    before = copy_state(model), copy_state(objective.teacher)
    with Relay(model, sgd(model), "cpu", objective=objective, config=RelayConfig(micro_batches=K)) as relay:
        with pytest.raises(RuntimeError, match="outside of the model.*already changed.*micro_batches=1") as caught:
            relay.step(make_batch(0))
        assert any("schedule='depth_first'" in note for note in caught.value.__notes__)
        assert_state(model, before[0])
        assert_state(objective.teacher, before[1])
        relay.config = RelayConfig(micro_batches=1)
        relay.step(make_batch(0))


def test_a_target_of_a_teacher_that_changes_after_the_layers_is_refused() -> None:
    """The second micro-batch would read the teacher before the first has averaged it."""
    model = make_model()
    teacher = MeanTeacher(model, "foreach", "")

    def objective(student: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            target = teacher.teacher(batch[0])
        loss = F.mse_loss(student(batch[0]), target) + F.cross_entropy(target, batch[1])
        teacher.average(student)
        return loss

    with Relay(model, sgd(model), "cpu", objective=objective, config=RelayConfig(micro_batches=K)) as relay:
        with pytest.raises(RuntimeError, match="micro-batch 0 uses .* which micro-batch 1 has already read"):
            relay.step(make_batch(0))


def test_a_running_mean_in_a_closure_is_as_in_plain_training() -> None:
    means = []
    for by_relay in (False, True):
        model, mean = make_model(), torch.zeros(CLASSES)

        def objective(model: nn.Module, batch: Any, mean: Tensor = mean) -> Tensor:
            out = model(batch[0])
            mean.lerp_(out.detach().mean(0), 0.1)
            return F.cross_entropy(out - mean, batch[1])

        if by_relay:
            config = RelayConfig(micro_batches=K)
            with Relay(model, sgd(model), "cpu", objective=objective, config=config) as relay:
                for step in range(STEPS):
                    relay.step(make_batch(step))
        else:
            train_plainly(model, objective)
        means.append(mean)
    assert torch.equal(*means)
