"""Programs that change tensors in place after a layer call: equal to plain training to the bit, or refused for what they do."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from l2l_core import Relay, RelayConfig
from l2l_core.model.reference import train_step


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Program(nn.Module):
    """A model whose forward is one of the programs below; `run` is (model, y) -> hidden state."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head, self.run = nn.Linear(8, 8), nn.Linear(8, 1), run
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self, self.stem(x) * 2)).square().mean()


PROGRAMS: list[Callable[[Any, Tensor], Tensor]] = []


def program(run: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    PROGRAMS.append(run)
    return run


@program
def change_a_view_at_once(m: Any, y: Tensor) -> Tensor:
    h = m.layers[0](y * 1)
    y[:, 0].mul_(2)
    return h + y


@program
def change_a_view_and_read_the_whole_later(m: Any, y: Tensor) -> Tensor:
    h = m.layers[0](y * 1)
    y[:, 0].mul_(2)
    return m.layers[1](h) + y


@program
def change_a_view_by_a_function(m: Any, y: Tensor) -> Tensor:
    h = m.layers[0](y * 1)
    F.relu(y[:, 0], inplace=True)
    return m.layers[1](h) + y


@program
def change_a_view_and_give_the_whole_to_a_layer(m: Any, y: Tensor) -> Tensor:
    h = m.layers[0](y * 1)
    y[:, 0].mul_(2)
    return h + m.layers[1](y)


@program
def change_a_view_of_a_layers_output(m: Any, y: Tensor) -> Tensor:
    z = m.layers[0](y)
    z[:, 0].mul_(2)
    return m.layers[1](z) + z


@program
def change_a_view_of_an_older_output(m: Any, y: Tensor) -> Tensor:
    z = m.layers[0](y)
    h = m.layers[1](z * 1)
    z[:, 0].mul_(2)
    return m.layers[2](h) + z


@program
def change_the_base_of_a_view(m: Any, y: Tensor) -> Tensor:
    view = y[:, 0]
    h = m.layers[0](y * 1)
    y.mul_(2)
    return h + y + view[:, None]


@program
def change_the_base_and_go_on(m: Any, y: Tensor) -> Tensor:
    view = y[:, 0]
    h = m.layers[0](y * 1)
    y.mul_(2)
    h = m.layers[1](h)
    return h + y + view[:, None]


@program
def change_the_base_twice(m: Any, y: Tensor) -> Tensor:
    view = y[:, 0]
    h = m.layers[0](y * 1)
    y.mul_(2)
    h = m.layers[1](h)
    y.add_(h)
    return y + view[:, None]


@program
def change_a_new_base(m: Any, y: Tensor) -> Tensor:
    base = torch.zeros_like(y)
    view = base[:, 0]
    base.add_(y)
    h = m.layers[0](y * 1)
    base.mul_(2)
    return m.layers[1](h) + view[:, None]


@program
def change_a_base_that_is_filled_later(m: Any, y: Tensor) -> Tensor:
    base = torch.zeros_like(y)
    view = base[:, 0]
    h = m.layers[0](y * 1)
    base.add_(y)
    return m.layers[1](h) + view[:, None] + base


@program
def set_items_of_the_base(m: Any, y: Tensor) -> Tensor:
    view = y[:, 1:]
    h = m.layers[0](y * 1)
    y[:, 0] = h[:, 0]
    return m.layers[1](h) + y + view.sum(1, keepdim=True)


@program
def change_a_view_of_a_view(m: Any, y: Tensor) -> Tensor:
    outer = y[:, 1:]
    inner = outer[:, 1:]
    h = m.layers[0](y * 1)
    outer.mul_(2)
    return h + inner.sum(1, keepdim=True)


@program
def change_the_innermost_view(m: Any, y: Tensor) -> Tensor:
    outer = y[:, 1:]
    inner = outer[:, 1:]
    h = m.layers[0](y * 1)
    inner.mul_(2)
    return m.layers[1](h) + outer.sum(1, keepdim=True)


@program
def change_a_view_and_read_it(m: Any, y: Tensor) -> Tensor:
    view = y[:, :2]
    h = m.layers[0](y * 1)
    view.mul_(2)
    return m.layers[1](h) + view.sum(1, keepdim=True)


@program
def change_a_view_that_was_read(m: Any, y: Tensor) -> Tensor:
    h = m.layers[0](y * 1)
    view = y[:, :2]
    h = m.layers[1](h)
    view.mul_(2)
    return h + y


@program
def two_views_of_an_entry(m: Any, y: Tensor) -> Tensor:
    h = m.layers[0](y * 1)
    first, second = y[:, 0], y[:, 1]
    first.mul_(2)
    h = m.layers[1](h)
    return h + second[:, None] + first[:, None]


@program
def change_without_gradients(m: Any, y: Tensor) -> Tensor:
    h = m.layers[0](y * 1)
    with torch.no_grad():
        y[:, 0].mul_(2)
    return m.layers[1](h) + y


REFUSED = {
    change_a_view_and_read_the_whole_later, change_a_view_by_a_function, change_a_view_and_give_the_whole_to_a_layer,
    change_a_view_of_an_older_output, change_a_new_base, change_a_base_that_is_filled_later, set_items_of_the_base,
    change_a_view_of_a_view, change_the_innermost_view, change_a_view_that_was_read, change_the_base_and_go_on,
    two_views_of_an_entry,
}  # fmt: skip


def objective(model: nn.Module, part: Any) -> Tensor:
    return model(part[0])


sgd = partial(torch.optim.SGD, lr=0.1)
# Beside plain accumulation: some of the programs mix rows.
TRAINED: dict[str, Any] = {"objective": objective, "loss_over": "micro-batch"}


def batch(step: int) -> tuple[Tensor]:
    return (torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(step)),)


@pytest.mark.parametrize("run", PROGRAMS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("stash", ["device", "host"])
def test_equal_or_refused_for_the_true_reason(run: Callable[[Any, Tensor], Tensor], stash: Any) -> None:
    model, twin = Program(run), Program(run)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    config = RelayConfig(seed=0, micro_batches=2, stash=stash)
    before = [param.detach().clone() for param in model.parameters()]
    with Relay(model, sgd, config=config, **TRAINED) as relay:
        for step in range(2):
            parts = [(half,) for half in batch(step)[0].chunk(2)]
            seeds = [config.micro_batch_seed(step, k) for k in range(2)]
            expected = float(sum(train_step(twin, plain, parts, objective, [2, 2], seeds)))
            if run in REFUSED:
                with pytest.raises(RuntimeError, match=r"changes a .* in place, after a layer call.*Change a copy"):
                    relay.step(batch(step))
                assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
                return
            assert relay.step(batch(step)).loss == expected
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


# -- views that layers give out ----------------------------------------------------------------------------------------


class GivesView(nn.Module):
    """BatchNorm in evaluation mode sums the gradient of its bias in an order that depends on the gradient's strides."""

    def __init__(self, shown: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.shown = nn.BatchNorm1d(8).eval(), shown

    def forward(self, x: Tensor) -> Tensor:
        return self.shown(self.norm(x.transpose(1, 2)))


class ChangesView(nn.Module):
    def __init__(self, shown: Callable[[Tensor], Tensor], in_order: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(GivesView(shown) for _ in range(2))
        self.weight, self.in_order = nn.Parameter(torch.randn(40)), in_order

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            h += 0.1
            x = x + h.mean() * torch.sin(x)
        h = h if self.in_order else h.transpose(-1, -2).reshape(len(h), -1)
        return (h.reshape(len(h), -1) * self.weight[: h[0].numel()]).sin().pow(2).mean()


SHOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: y.transpose(1, 2),
    "flat": lambda y: y.view(len(y), 1, -1),
    "unsqueezed": lambda y: y.unsqueeze(1).transpose(2, 3),
    "part": lambda y: y[:, :, 1:],
    "part, transposed": lambda y: y.transpose(1, 2)[:, 1:],
    "no view": lambda y: y * 2,
}


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("shown", SHOWN)
@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_view_that_a_layer_gives_out_is_changed(shown: str, in_order: bool, stash: Any) -> None:
    """Autograd then brings the gradient into the strides of the view's base."""
    model, twin = ChangesView(SHOWN[shown], in_order), ChangesView(SHOWN[shown], in_order)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    config = RelayConfig(seed=0, micro_batches=2, stash=stash)
    with Relay(model, sgd, config=config, **TRAINED) as relay:
        for step in range(3):
            parts = [(half,) for half in batch(step)[0].chunk(2)]
            seeds = [config.micro_batch_seed(step, k) for k in range(2)]
            if shown == "part, transposed":
                with pytest.raises(RuntimeError, match="changes a view in place.*Change a copy"):
                    relay.step(batch(step))
                continue
            expected = float(sum(train_step(twin, plain, parts, objective, [2, 2], seeds)))
            assert relay.step(batch(step)).loss == expected
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def overlapping(m: Any, x: Tensor) -> Tensor:
    left, right = m.parts(x)
    left.mul_(0.5)
    return left + right


def view_and_whole(m: Any, x: Tensor) -> Tensor:
    whole, view = m.both(x)
    whole.mul_(0.5)
    return whole + view.transpose(1, 2)


def hooked_before(m: Any, x: Tensor) -> Tensor:
    y = m.turned(x)
    y.register_hook(lambda grad: grad * 2)
    y.mul_(0.5)
    return y.transpose(1, 2)


def broadcast(m: Any, x: Tensor) -> Tensor:
    y = m.turned(x)
    y.mul_(x.mean(-1).unsqueeze(1))
    return y.transpose(1, 2)


def added(m: Any, x: Tensor) -> Tensor:
    y, residual = m.turned(x), m.skip(x).transpose(1, 2)
    y += residual
    return y.transpose(1, 2)


def put(m: Any, x: Tensor) -> Tensor:
    y = m.turned(x)
    y.index_put_((torch.tensor([0, 1]),), x.mean())
    return y.transpose(1, 2)


class Outputs(Block):
    """What a layer gives out by `of`."""

    def __init__(self, of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Any:
        return self.of(super().forward(x))


class ChangesOutputs(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = Outputs(lambda y: (lambda b: (b[..., :8], b[..., 4:12]))(torch.cat([y, y], -1)))
        self.both = Outputs(lambda y: (y, y.transpose(1, 2)))
        self.turned = Outputs(lambda y: y.transpose(1, 2))
        self.skip, self.run = nn.Linear(8, 8), run

    def forward(self, x: Tensor) -> Tensor:
        x = self.skip(x)
        return self.run(self, self.run(self, x)).sin().pow(2).mean()


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("run", [overlapping, view_and_whole, hooked_before, broadcast, added, put])
def test_outputs_that_share_and_operations_that_sum(run: Callable[[Any, Tensor], Tensor], stash: Any) -> None:
    model, twin = ChangesOutputs(run), ChangesOutputs(run)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    config, layers = RelayConfig(seed=0, micro_batches=2, stash=stash), ["parts", "both", "turned"]
    before = [param.detach().clone() for param in model.parameters()]
    with Relay(model, sgd, config=config, **TRAINED, layers=layers) as relay:
        for step in range(2):
            parts = [(half,) for half in batch(step)[0].chunk(2)]
            seeds = [config.micro_batch_seed(step, k) for k in range(2)]
            if run in (overlapping, view_and_whole, hooked_before):
                with pytest.raises(RuntimeError, match="changes a view in place.*Change a copy"):
                    relay.step(batch(step))
                assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
                continue
            expected = float(sum(train_step(twin, plain, parts, objective, [2, 2], seeds)))
            assert relay.step(batch(step)).loss == expected
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
