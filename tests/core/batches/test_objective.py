"""What a micro-batch is to the model, and joining outputs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from l2l_core import Relay
from l2l_core.batches.batch import BatchRows
from l2l_core.batches.objective import ModelCall


class Records(nn.Module):
    """Returns what it was given."""

    def forward(self, x: Any, mask: Any = None) -> Any:
        return SimpleNamespace(loss=torch.tensor(1.0), x=x, mask=mask)


def test_with_a_loss_the_target_stays_with_the_loss() -> None:
    model, seen = Records(), []
    call = ModelCall(model, loss=lambda outputs, batch: seen.append((outputs, batch)) or torch.tensor(2.0))
    assert call.objective(model, ("x", "y")) == 2
    assert seen[-1][0].x == "x" and seen[-1][1] == ("x", "y")
    call.objective(model, {"x": 1, "target": 2})
    assert seen[-1][0].x == 1 and seen[-1][1]["target"] == 2


class TwoViews(nn.Module):
    """Needs two inputs, as a model with two encoders does."""

    def forward(self, x: Any, y: Any) -> Any:
        return x, y


def test_an_input_that_forward_needs_is_no_target() -> None:
    model, seen = TwoViews(), []
    call = ModelCall(model, loss=lambda outputs, batch: seen.append(outputs) or torch.tensor(2.0))
    call.objective(model, ("x", "y"))
    call.objective(model, ("x", "y", "target"))
    assert seen == [("x", "y")] * 2


def test_without_a_loss_everything_goes_to_the_model() -> None:
    model = Records()
    assert ModelCall(model).outputs(model, ("x", "m")).mask == "m"
    with pytest.raises(TypeError, match="target"):
        ModelCall(model).outputs(model, {"x": 1, "target": 2})


class WithLoss(nn.Module):
    """Computes its loss, and returns it in some form."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.form = form

    def forward(self, x: Tensor, y: Tensor) -> Any:
        outputs = self.layers(x)
        return self.form(outputs, nn.functional.mse_loss(outputs, y))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("form", "remedy"),
    [
        (lambda outputs, loss: loss, ""),
        (lambda outputs, loss: {"loss": loss}, ""),
        (lambda outputs, loss: (outputs, loss), r"has no .loss: if it is the scalar at 1, pass (objective=.*\[1\])"),
        (
            lambda outputs, loss: {"a": loss, "b": 2 * loss},
            r"if the loss is their sum, pass (objective=.*values\(\)\))",
        ),
    ],
)
def test_a_loss_that_the_model_returns_is_used_or_the_remedy_works(form: Any, remedy: str, named: bool) -> None:
    x = torch.randn(4, 4)
    batch = {"x": x, "y": x.sin()} if named else (x, x.sin())
    model = WithLoss(form)
    plain = copy.deepcopy(model)
    plain.form = lambda outputs, loss: loss + 2 * loss if "sum" in remedy else loss
    options = dict[str, Any]()
    if remedy:
        with Relay(model, device="cpu") as relay, pytest.raises(ValueError, match=remedy) as refused:
            relay.step(batch)
        told = re.search(remedy, str(refused.value))
        assert told is not None
        options["objective"] = eval(told[1].removeprefix("objective="))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with Relay(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu", **options) as relay:
        for _ in range(2):
            optimizer.zero_grad()
            loss = plain(**batch) if named else plain(*batch)
            loss.backward()
            optimizer.step()
            assert relay.step(batch).loss == loss.item()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_call_with_other_arguments_says_how_a_relay_calls() -> None:
    """A loader of images, kinds and labels, as a stranger passes it to a plain loop's model and loss."""

    def loss(outputs: Any, kind: Any, label: Any) -> Any:
        return outputs[0] * kind + label

    batch = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)
    for call, said in [
        (lambda: ModelCall(TwoViews()).objective(TwoViews(), batch), "without the last entry of a tuple"),
        (
            lambda: ModelCall(TwoViews()).objective(TwoViews(), {"x": 1, "label": 2}),
            "keys that its forward does not name",
        ),
        (lambda: ModelCall(TwoViews(), loss=loss).objective(TwoViews(), batch), r"calls loss\(outputs, batch\)"),
    ]:
        with pytest.raises(TypeError) as refused:
            call()
        assert re.search(said, refused.value.__notes__[0])
    remedy = ModelCall(TwoViews(), loss=lambda outputs, batch: loss(outputs, batch[1], batch[2]))
    assert remedy.objective(TwoViews(), batch) == 1 * 2 + 3
    inner = ModelCall(TwoViews(), loss=lambda outputs, batch: len(None))
    with pytest.raises(TypeError) as refused:
        inner.objective(TwoViews(), batch)
    assert not hasattr(refused.value, "__notes__"), "an error within the loss is not about the call"


@pytest.mark.parametrize("loss_over", ["rows", "batch"])
@pytest.mark.parametrize(
    "criterion",
    [
        lambda logits, y: nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten()),
        lambda logits, y: nn.functional.cross_entropy(logits, y),
    ],
)
def test_a_loss_of_outputs_and_targets_is_refused_and_the_remedy_works(criterion: Any, loss_over: Any) -> None:
    torch.manual_seed(0)
    model, batch = (
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        [torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])],
    )
    options = {"loss_over": loss_over} if loss_over == "batch" else {}
    with Relay(model, device="cpu", loss=criterion, **options) as relay:
        with pytest.raises((AttributeError, TypeError)) as refused:
            relay.step(batch)
        assert relay.steps == 0
    remedy = re.findall(r"loss=(lambda outputs, batch: criterion\(outputs, batch\[1\]\))", refused.value.__notes__[0])
    with Relay(model, device="cpu", loss=eval(remedy[0], {"criterion": criterion}), **options) as relay:
        expected = criterion(model(batch[0]), batch[1]).item()
        assert relay.step(batch).loss == pytest.approx(expected)


def test_an_error_of_a_loss_that_has_another_reason_has_no_note() -> None:
    def criterion(logits: Any, y: Any) -> Any:
        return logits.no_such_attribute

    with pytest.raises(AttributeError) as refused:
        ModelCall(model := Records(), criterion).objective(model, ("x", "y"))
    assert not hasattr(refused.value, "__notes__")


def test_a_loss_that_is_no_scalar_or_missing_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"has no \.loss.*labels"):
        ModelCall(model).objective(model, (torch.zeros(1, 2),))
    with pytest.raises(ValueError, match=r"shape \(1, 2\).*reduce it"):
        ModelCall(model, loss=lambda outputs, batch: outputs).objective(model, (torch.zeros(1, 2), 0))
    with pytest.raises(ValueError, match="pass one"):
        ModelCall(model, loss=lambda o, b: o, objective=lambda m, b: b)


def test_outputs_are_joined_by_rows_and_scalars_averaged() -> None:
    outputs = [
        {"loss": torch.tensor(1.0), "y": torch.zeros(2, 3), "n": 5},
        {"loss": torch.tensor(4.0), "y": torch.ones(1, 3), "n": 5},
    ]
    joined = BatchRows((torch.zeros(3),)).join(outputs, divisors=lambda: [3 / 2, 3.0])
    assert joined["y"].shape == (3, 3)
    assert float(joined["loss"]) == pytest.approx(2)
    assert joined["n"] == 5


def test_divisors_are_asked_only_for_scalars() -> None:
    def never() -> list[float]:
        raise AssertionError

    assert BatchRows((torch.zeros(3),)).join([torch.zeros(2), torch.ones(1)], never).tolist() == [0, 0, 1]


@pytest.mark.all_cases
@pytest.mark.parametrize("where", ["in a closure", "in an object", "two calls away"])
def test_a_loss_that_scales_is_refused_before_anything_is_trained(where: str) -> None:
    scaler = torch.amp.GradScaler("cpu")

    def scaled(outputs: Any, batch: Any) -> torch.Tensor:
        return scaler.scale(outputs.mean())

    class Loss:
        def __init__(self) -> None:
            self.scaler = scaler

        def __call__(self, outputs: Any, batch: Any) -> torch.Tensor:
            return self.scaler.scale(outputs.mean())

    loss = {"in a closure": scaled, "in an object": Loss(), "two calls away": lambda o, b: scaled(o, b)}[where]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"GradScaler that is enabled.*Leave the scaler out.*precision='bf16'"):
        Relay(model, loss=loss)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    if where == "in a closure":  # as after the remedy
        with Relay(model, loss=scaled) as relay:
            relay.step((torch.ones(2, 2),))
