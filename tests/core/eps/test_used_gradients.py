"""Reading `param.grad` after a step raises with a remedy that works; clearing it works as in plain training."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from l2l_core import Freeze, Relay, RelayConfig

BATCH = torch.linspace(-1, 1, 24).view(4, 6), torch.linspace(1, -1, 24).view(4, 6)
READERS: dict[str, Callable[[nn.Module], object]] = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "a norm to log": lambda model: sum(p.grad.norm() for p in model.parameters() if p.grad is not None),
    "grad.data": lambda model: next(model.parameters()).grad.data.abs().max(),
    "numpy": lambda model: next(model.parameters()).grad.numpy(),
    "tolist": lambda model: next(model.parameters()).grad.tolist(),
    "copy": lambda model: copy.deepcopy(next(model.parameters()).grad),
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def make_relay(model: nn.Module, **settings: Any) -> Relay:
    config = RelayConfig(micro_batches=2, **settings)
    return Relay(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss=nn.MSELoss(), config=config)


def loss_of(model: nn.Module) -> Tensor:
    return nn.MSELoss()(model(BATCH[0]), BATCH[1])


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "settings", [{}, {"update": "deferred"}, {"update": "whole"}, {"schedule": "depth_first"}], ids=str
)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_reading_a_gradient_after_a_step_raises(read: Callable[[nn.Module], object], settings: dict[str, Any]) -> None:
    model = make_model()
    with make_relay(model, **settings) as relay:
        for _ in range(2):
            relay.step(BATCH)
            with pytest.raises(RuntimeError, match=r"RelayConfig\(update='deferred', max_grad_norm=\.\.\.\)"):
                read(model)


def test_both_remedies_equal_a_plain_loop_that_clips() -> None:
    plain = make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        for x, y in zip(*(tensor.split(2) for tensor in BATCH), strict=True):
            (nn.MSELoss()(plain(x), y) / 2).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()

    by_setting, by_hook = make_model(), make_model()
    norms: list[Tensor] = []
    with make_relay(by_setting, update="deferred", max_grad_norm=0.1) as relay:
        results = [relay.step(BATCH) for _ in range(3)]
    with make_relay(by_hook, update="deferred") as relay:
        relay.optimizer.register_step_pre_hook(
            lambda *_: norms.append(nn.utils.clip_grad_norm_(by_hook.parameters(), 0.1))
        )
        for _ in range(3):
            relay.step(BATCH)
    assert results[-1].grad_norm == norms[-1] == norm
    for model in (by_setting, by_hook):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


CLEARS: dict[str, Callable[[nn.Module, Relay], object]] = {
    "model.zero_grad()": lambda model, relay: model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda model, relay: model.zero_grad(set_to_none=False),
    "optimizer.zero_grad(set_to_none=False)": lambda model, relay: relay.optimizer.zero_grad(set_to_none=False),
    "foreach": lambda model, relay: torch.optim.SGD(model.parameters(), foreach=True).zero_grad(set_to_none=False),
    "evaluate": lambda model, relay: relay.evaluate(BATCH),
    "verify": lambda model, relay: relay.verify(BATCH),
    "forecast": lambda model, relay: relay.forecast(BATCH),
    "close": lambda model, relay: relay.close(),
}


@pytest.mark.all_cases
@pytest.mark.parametrize("clear", CLEARS.values(), ids=CLEARS)
def test_what_clears_gradients_leaves_none(clear: Callable[[nn.Module, Relay], object]) -> None:
    model = make_model()
    with make_relay(model) as relay:
        relay.step(BATCH)
        clear(model, relay)
        assert all(param.grad is None for param in model.parameters())
        if clear is not CLEARS["close"]:
            relay.step(BATCH)


def test_a_backward_between_steps_begins_at_zero() -> None:
    model, other = make_model(), make_model()
    with make_relay(model) as relay:
        relay.step(BATCH)
        other.load_state_dict(model.state_dict())
        loss_of(model).backward()
        loss_of(other).backward()
        for mine, right in zip(model.parameters(), other.parameters(), strict=True):
            assert mine.grad is not None and right.grad is not None
            assert torch.equal(mine.grad, right.grad)
        with pytest.raises(RuntimeError, match=r"call model\.zero_grad\(set_to_none=True\) before a step"):
            relay.step(BATCH)
        model.zero_grad()
        relay.step(BATCH)


def test_only_what_was_trained_has_a_used_gradient() -> None:
    model = make_model()
    with make_relay(model) as relay:
        relay.step(BATCH)
        relay.apply(Freeze(1))
        relay.step(BATCH, skip=[2])
        has_gradient = [layer.weight.grad is not None for layer in model]
    assert has_gradient == [True, False, False, True]


@pytest.mark.all_cases
@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.float, nn.Module.cpu], ids=lambda f: f.__name__)
def test_conversions_and_copies_of_the_model_go_on(convert: Callable[[nn.Module], nn.Module]) -> None:
    model = make_model()
    with make_relay(model) as relay:
        relay.step(BATCH)
        copied = copy.deepcopy(model)
        assert all(param.grad is None for param in copied.parameters())
        weights = [param.detach().clone() for param in model.parameters()]
        convert(model)
        for param, before in zip(model.parameters(), weights, strict=True):
            assert torch.equal(param, before.to(param.dtype))


def test_a_model_in_shared_memory_is_refused_while_a_relay_owns_it_and_the_remedy_works() -> None:
    """Its storages are exchanged in place, so that every view of them moves, and the EPS's master does not."""
    model = make_model()
    with make_relay(model) as relay:
        relay.step(BATCH)
        model.share_memory()
        with pytest.raises(RuntimeError, match=r"parameter 0.weight was moved into shared memory.*Share a copy"):
            relay.step(BATCH)
    with pytest.raises(ValueError, match="is not initialized, .*run one forward"):
        Relay(nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.LazyLinear(4)), loss=nn.MSELoss())
    with pytest.warns(UserWarning, match="is in shared memory .* other processes see no updates. Share a copy"):
        make_relay(make_model().share_memory()).close()
    with make_relay(model) as relay:
        shared = copy.deepcopy(model).share_memory()
        memory = [param.data_ptr() for param in shared.parameters()]
        for _ in range(2):
            relay.step(BATCH)
            shared.load_state_dict(model.state_dict())
        assert all(param.is_shared() for param in shared.parameters())
        assert memory == [param.data_ptr() for param in shared.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), shared.parameters(), strict=True))


def test_its_repr_says_what_it_is() -> None:
    model = make_model()
    with make_relay(model) as relay:
        relay.step(BATCH)
        assert repr(model[0].bias.grad) == "UsedGradient(shape=(6,): relay.step has used and freed it)"
