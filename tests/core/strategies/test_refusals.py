"""Refusals of models that cannot run again, of invalid plans, and of budgets that do not suffice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from l2l_core import DeviceOutOfMemory, EmulatedDevice
from l2l_core.strategies import Full, Lab, Plain, Policy, RelayPolicy, Rotor


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 2


class PrivateRandom(nn.Linear):
    """Draws from a private generator."""

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
    layer: Callable[[], nn.Module] = linear, between: Callable[[Tensor], Tensor] = torch.relu, **settings: Any
) -> Lab:
    torch.manual_seed(0)
    model = Shelled(layer, between)
    return Lab(
        model, (torch.randn(6, 4),), loss=lambda out, _: out.square().mean(), layers=list(model.layers), **settings
    )


def autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.tanh(x)


def test_shell_code_and_layers_that_cannot_run_again_are_refused() -> None:
    with pytest.raises(RuntimeError, match="custom autograd.Function"):
        lab(between=Double.apply)
    with pytest.raises(RuntimeError, match=r"stage 2 \(up to layers.2\) makes other values"):
        lab(PrivateRandom)
    with pytest.raises(RuntimeError, match="changes a tensor of an earlier stage in place"):
        lab(between=torch.relu_)
    with pytest.raises(RuntimeError, match="autocast"):
        lab(between=autocast)


class Cached(nn.Module):
    """A layer that is called with a key-value cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor, cache: DynamicCache) -> Tensor:
        return self.linear(x)


class Decoder(Shelled):
    """Passes every layer the same cache, which holds tensors."""

    def forward(self, x: Tensor) -> Tensor:
        cache = DynamicCache()
        cache.update(x[None, None], x[None, None], 0)
        for layer in self.layers:
            x = layer(x, cache)
        return x


class Frozen(Shelled):
    """Calls its layers with gradients off."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.layers[0](x)
        return self.layers[2](self.layers[1](x))


class Changing(Shelled):
    """Takes another path after `after` forwards."""

    after = 10**9
    done = 0

    def forward(self, x: Tensor) -> Tensor:
        self.done += 1
        x = super().forward(x)
        return x * 2 if self.done > self.after else x


class Leaking(nn.Module):
    """Keeps a tensor of its graph that it does not return."""

    kept: list[Tensor] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        Leaking.kept[:] = [y.square().mean()]
        return y


def lab_of_model(model: Shelled, **settings: Any) -> Lab:
    settings = {"loss": lambda out, _: out.square().mean(), "layers": list(model.layers)} | settings
    return Lab(model, (torch.randn(6, 4),), **settings)


def test_caches_and_layers_without_gradients_are_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(TypeError, match="cache"):
        lab_of_model(Decoder(Cached, torch.relu))
    with pytest.raises(RuntimeError, match="was called with gradients off"):
        lab_of_model(Frozen(linear, torch.relu))


def test_tensors_made_out_of_sight_are_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="made out of sight"):
        lab_of_model(Shelled(Leaking, torch.relu), loss=lambda out, _: out.square().mean() + Leaking.kept[0])
    model = Shelled(linear, torch.relu)
    for param in model.parameters():
        param.requires_grad_(False)
    with pytest.raises(RuntimeError, match="depends on nothing that is trained"):
        lab_of_model(model)


def test_another_path_during_training_is_refused_and_leaves_weights() -> None:
    torch.manual_seed(0)
    model = Changing(linear, torch.relu)
    subject = lab_of_model(model)
    model.after = model.done  # the next forward has one operation more
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for policy in (Plain(), Full()):
        with pytest.raises(RuntimeError, match="takes another path"):
            subject.step(subject.plan(policy))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters()) and subject.steps == 0
    assert subject.device.ledger.total == 0
    model.after = 10**9
    assert subject.verify(subject.plan(Full())).equal  # the failure left nothing behind


def test_a_model_that_recomputes_itself_or_is_scripted_is_refused() -> None:
    torch.manual_seed(0)
    model = Shelled(linear, torch.relu)
    model.__dict__["gradient_checkpointing"] = True
    with pytest.raises(ValueError, match="gradient checkpointing"):
        lab_of_model(model)
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="script"):
        lab(lambda: torch.jit.script(nn.Linear(4, 4)))


def test_a_loss_that_mixes_rows_is_refused_unless_accumulation_is_meant() -> None:
    """The relay among the strategies gets the same words."""

    def variance(outputs: Tensor, batch: Any) -> Tensor:
        return outputs.var(0).sum()

    options: dict[str, Any] = {"layers": ["0", "1", "2"], "loss": variance, "micro_batches": 2}
    model, batch = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), (torch.randn(8, 4), torch.zeros(8))
    with pytest.raises(ValueError, match="together and .* in two parts .*loss_over"):
        Lab(model, batch, **options)
    lab = Lab(model, batch, loss_over="micro-batch", **options)
    assert lab.verify(lab.plan(Full())).equal
    assert all(row.peak_device_bytes for row in lab.compare([Full(), RelayPolicy()]).rows)
    mean = sum(float(variance(model(part), None).detach()) for part in batch[0].chunk(2)) / 2
    assert lab.step(lab.plan(Full())).loss == pytest.approx(mean)


def test_a_micro_batch_without_targets_is_refused() -> None:
    def cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    options: dict[str, Any] = {"layers": ["0", "1"], "loss": cross_entropy}
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    batch = torch.randn(4, 4), torch.tensor([0, 1, -100, -100])
    with pytest.raises(ValueError, match="micro-batch 1 has no target.*fewer micro_batches"):
        Lab(model, batch, micro_batches=2, **options)
    lab = Lab(model, batch, micro_batches=1, **options)
    assert lab.verify(lab.plan(Full())).equal


def test_plans_by_hand_are_checked() -> None:
    subject = lab()
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
    assert subject.verify(subject.plan(plan)).equal
    with pytest.raises(ValueError, match="its input is not there"):
        subject.plan([*plan[:6], ("Fall", 1), *plan[7:]])
    with pytest.raises(ValueError, match="every stage needs one B"):
        subject.plan(plan[:-1])


class Experts(nn.Module):
    """The sign of the first number of a row decides which of two linear layers gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = (x[:, 0] > 0).long(), x
        for i in chosen.unique().tolist():
            out = out.index_add(0, (rows := (chosen == i).nonzero()[:, 0]), self.experts[i](x[rows]))
        return out


def signs(*rows: float) -> tuple[Tensor]:
    return (torch.rand(len(rows), 64, generator=torch.Generator().manual_seed(3)) * torch.tensor(rows)[:, None],)


@pytest.mark.parametrize("measured", [(1.0, 1.0, 1.0), (1.0, -1.0, 1.0)], ids=["one expert", "both"])
@pytest.mark.parametrize("policy", [Plain(), Full()], ids=["plain", "full"])
def test_the_smallest_budget_of_a_step_that_needs_more_than_the_measured_batch_runs(
    measured: tuple[float, ...], policy: Policy
) -> None:
    """Experts without a row in the measured batch get gradients and optimizer state later."""

    def make(device: EmulatedDevice) -> Lab:
        torch.manual_seed(0)
        model = nn.Sequential(Experts(), Experts())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return Lab(
            model, signs(*measured), optimizer, device, loss=lambda out, _: out.square().mean(), loss_over="micro-batch"
        )

    for batch in (signs(-1.0, -1.0, -1.0), signs(1.0, -1.0, -1.0)):
        free = make(EmulatedDevice())
        plan = free.plan(policy)
        expected = [free.step(plan, each).loss for each in (signs(*measured), batch, batch)]
        tight, losses = make(EmulatedDevice(budget := plan.peak_device_bytes)), list[float]()
        for each in (signs(*measured), batch, batch):
            before = [param.clone() for param in tight.model.parameters()]
            try:
                losses.append(tight.step(plan, each).loss)
            except DeviceOutOfMemory as refused:
                least = refused.least_bytes
                assert least is not None and least > budget
                assert all(map(torch.equal, tight.model.parameters(), before))
                assert tight.device.ledger.total == 0
                tight.device = EmulatedDevice(least - 1)
                with pytest.raises(DeviceOutOfMemory, match=f"{least} bytes"):
                    tight.step(plan, each)
                tight.device = EmulatedDevice(budget := least)  # the remedy
                losses.append(tight.step(plan, each).loss)
        assert losses == expected


def test_a_budget_that_does_not_suffice_leaves_weights_and_names_one_that_would() -> None:
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
    assert least is not None and tight.plan(Rotor(least)).peak_device_bytes == least
    assert least <= tight.plan(Full()).peak_device_bytes
