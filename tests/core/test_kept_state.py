"""What users' code keeps (counters, logs, running means) is as after plain training, whatever else a relay runs.

A relay also compares losses of a few rows, compares its first step with training in core, forecasts, tries optimizers, and
recomputes layers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import SGD

from l2l_core import Relay, RelayConfig
from l2l_core.model import snapshot_user_state

STEPS, ROWS = 4, 4
RISES = 5  # calls after which what is kept begins to act


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 8, generator=generator), torch.randint(3, (ROWS,), generator=generator)


def cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1])


class Case:
    """A model, an optimizer, a loss, and what they keep."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = Model() if model is None else model
        self.make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: SGD(
            model.parameters(), lr=0.1
        )
        self.loss: Callable[[Tensor, Any], Tensor] = cross_entropy
        self.kept: Callable[[], Any] = lambda: None


def hooked(add: Callable[[nn.Module, Callable[[Tensor], Tensor]], Any]) -> Callable[[], Case]:
    """A hook that counts its calls in a closure, logs them, and changes what it gets from some call on."""

    def make() -> Case:
        case, calls, log = Case(), 0, deque(maxlen=100)

        def hook(value: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            log.append(float(value.detach().sum()))
            return value * 0.5 if calls > RISES else value

        add(case.model, hook)
        case.kept = lambda: (calls, list(log))
        return case

    return make


def of_parameter(model: Any, hook: Any) -> None:
    model.head.weight.register_hook(hook)


def of_forward(model: Any, hook: Any) -> None:
    model.head.register_forward_hook(lambda module, args, out: hook(out))


def of_backward(model: Any, hook: Any) -> None:
    model.head.register_full_backward_hook(lambda module, grads, outs: tuple(map(hook, grads)))


HANDLES: list[Any] = []  # of hooks that torch keeps for all modules


@pytest.fixture(autouse=True)
def remove_hooks() -> Iterator[None]:
    yield
    while HANDLES:
        HANDLES.pop().remove()


def of_all_modules(model: Any, hook: Any) -> None:
    HANDLES.append(register_module_forward_hook(lambda module, args, out: hook(out) if module is model.head else None))


class CountingBlock(Block):
    """Halves its output after some calls, counted by `count`."""

    def __init__(self, count: Callable[[Any, Tensor], float]) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        calls = self.count(self, x)
        return super().forward(x) * (0.5 if calls > RISES else 1.0)


def number(layer: Any, x: Tensor) -> float:
    layer.calls = getattr(layer, "calls", 0) + 1
    return layer.calls


def entry(layer: Any, x: Tensor) -> float:
    vars(layer).setdefault("load", Counter())["calls"] += 1
    return layer.load["calls"]


def item(layer: Any, x: Tensor) -> float:
    vars(layer).setdefault("seen", []).append(len(x))
    return len(layer.seen)


def tensor(layer: Any, x: Tensor) -> float:
    if not hasattr(layer, "usage"):
        layer.usage = torch.zeros(())
    layer.usage += 1
    return layer.usage.item()


def namespace(layer: Any, x: Tensor) -> float:
    if not hasattr(layer, "state"):
        layer.state = SimpleNamespace(calls=0)
    layer.state.calls += 1
    return layer.state.calls


def layered(count: Callable[[Any, Tensor], float]) -> Callable[[], Case]:
    def make() -> Case:
        case = Case(Model(lambda: CountingBlock(count)))
        hidden = {"linear", "count", "training"}
        case.kept = lambda: [
            {name: str(value) for name, value in vars(layer).items() if name[0] != "_" and name not in hidden}
            for layer in case.model.layers
        ]
        return case

    return make


def loss_object() -> Case:
    class Annealed:
        calls = 0

        def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
            self.calls += 1
            return cross_entropy(outputs, batch) * (0.5 if self.calls > RISES else 1.0)

    case = Case()
    case.loss = loss = Annealed()
    case.kept = lambda: loss.calls
    return case


def optimizer_class() -> Case:
    class Warm(SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            Warm.calls += 1
            for group in self.param_groups:
                group["lr"] = 0.1 * min(1.0, Warm.calls / 4)
            return super().step(closure)

    case = Case()
    case.make_optimizer = lambda model: Warm(model.parameters(), lr=0.1)
    case.kept = lambda: Warm.calls
    return case


def generator_of_a_hook() -> Case:
    case, drawn = Case(), torch.Generator().manual_seed(0)
    case.model.head.weight.register_hook(lambda grad: grad + 0.01 * torch.randn(grad.shape, generator=drawn))
    case.kept = lambda: drawn.get_state().tolist()
    return case


CASES: dict[str, Callable[[], Case]] = {
    "parameter hook": hooked(of_parameter),
    "forward hook": hooked(of_forward),
    "backward hook": hooked(of_backward),
    "hook of all modules": hooked(of_all_modules),
    **{f"layer's {count.__name__}": layered(count) for count in (number, entry, item, tensor, namespace)},
    "loss object": loss_object,
    "optimizer class": optimizer_class,
    "generator of a hook": generator_of_a_hook,
}


SETTINGS: list[dict[str, Any]] = [{}, {"verify": "never", "stash": "host"}, {"keep": 1, "ahead": 0}]


def in_core(case: Case) -> list[Any]:
    optimizer = case.make_optimizer(case.model)
    for step in range(STEPS):
        for x, y in zip(*(part.chunk(2) for part in batch_of(step)), strict=True):
            (case.loss(case.model(x), (x, y)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [case.kept(), *case.model.parameters()]


@pytest.mark.all_cases
@pytest.mark.parametrize(("make", "settings"), [*zip(CASES.values(), cycle(SETTINGS), strict=False)], ids=CASES)
def test_it_is_as_after_plain_training(make: Callable[[], Case], settings: dict[str, Any]) -> None:
    kept, *weights = in_core(make())
    case = make()
    config = RelayConfig(micro_batches=2, update="whole" if make is optimizer_class else "eager", **settings)
    optimizer = case.make_optimizer(case.model)
    with Relay(case.model, optimizer, "cpu", loss=case.loss, config=config) as relay:
        relay.forecast(batch_of(0))
        for step in range(STEPS):
            relay.step(batch_of(step))
    assert case.kept() == kept
    assert all(torch.equal(a, b) for a, b in zip(case.model.parameters(), weights, strict=True))


class Merging(Block):
    """Merges its adapter into the weight in evaluation mode, as loralib's layers do in `train`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.requires_grad_(False)
        self.adapter, self.is_merged = nn.Parameter(torch.randn(8, 8) / 10), False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.is_merged == mode:
            with torch.no_grad():
                self.linear.weight.add_(self.adapter, alpha=-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        adapter = 0 if self.is_merged else F.linear(x, self.adapter)
        return x + torch.tanh(self.linear(x) + adapter)


@pytest.mark.parametrize("verify", ["first", "never"])
def test_modules_that_merge_weights_in_evaluation_mode_are_left_as_they_are(verify: Any) -> None:
    case, plain = Case(Model(Merging)), Case(Model(Merging))
    _, *weights = in_core(plain)
    with Relay(case.model, SGD, "cpu", loss=case.loss, config=RelayConfig(micro_batches=2, verify=verify)) as relay:
        for group in relay.optimizer.param_groups:
            group["lr"] = 0.1
        for step in range(STEPS):
            relay.step(batch_of(step))
            relay.evaluate(batch_of(step))
    assert all(torch.equal(a, b) for a, b in zip(case.model.parameters(), weights, strict=True))


class NumpyDrop(Model):
    """Drops layers by NumPy's generator, from the second step on."""

    rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or numpy.random.rand() >= self.rate:
                x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("verify", ["first", "never"])
def test_micro_batches_that_draw_from_numpy_in_turns_are_refused_and_the_remedy_works(verify: Any) -> None:
    numpy.random.seed(0)
    plain = Case(NumpyDrop())
    plain.model.rate = 0.4
    _, *weights = in_core(plain)

    numpy.random.seed(0)
    model = NumpyDrop()
    model.rate = 0.4
    before = [param.clone() for param in model.parameters()]
    config = RelayConfig(micro_batches=2, verify=verify)
    with Relay(model, lambda params: SGD(params, lr=0.1), "cpu", loss=cross_entropy, config=config) as relay:
        with pytest.raises(RuntimeError, match=r"NumPy's random generator.*schedule='depth_first'"):
            relay.step(batch_of(0))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        relay.config = RelayConfig(micro_batches=2, schedule="depth_first", seed=relay.config.seed)
        numpy.random.seed(0)
        for step in range(STEPS):
            relay.step(batch_of(step))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))


# -- state that methods and slots keep -----------------------------------------------------------------------------------

CALLS = {"loss": 0}
NUMBERS = itertools.count()


class ModuleLoss(nn.Module):
    """Counts in a global that its forward alone names."""

    def forward(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        CALLS["loss"] += 1
        return nn.functional.mse_loss(outputs, batch["y"])


class CallableLoss:
    def __call__(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        CALLS["loss"] += 1
        return nn.functional.mse_loss(outputs, batch["y"])


class SlottedLoss:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        CALLS["loss"] = self.calls
        return nn.functional.mse_loss(outputs, batch["y"])


def counting_loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    CALLS["loss"] = next(NUMBERS) + 1
    return nn.functional.mse_loss(outputs, batch["y"])


@pytest.mark.all_cases
@pytest.mark.parametrize("make_loss", [ModuleLoss, CallableLoss, SlottedLoss, lambda: counting_loss])
def test_a_loss_is_called_once_per_micro_batch_as_far_as_it_knows(make_loss: Any) -> None:
    CALLS["loss"] = 0
    loss = make_loss()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    batch = {"input": torch.randn(4, 4), "y": torch.randn(4, 4)}
    config = RelayConfig(micro_batches=2)
    with Relay(
        model, torch.optim.SGD(model.parameters(), 0.1), "cpu", loss=lambda o, b: loss(o, b), config=config
    ) as relay:
        for _ in range(2):
            relay.step(batch)
    assert CALLS["loss"] == 4


def test_globals_of_a_library_whose_wrapper_is_around_a_users_function_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper says that it is of the module of what it wraps, and its globals are those of the library."""

    @contextlib.contextmanager
    def of_a_user() -> Iterator[None]:
        yield

    name = "_GeneratorContextManager"  # which the wrapper names
    made = type("Made", (getattr(contextlib, name),), {})
    restore = snapshot_user_state([of_a_user])
    monkeypatch.setattr(contextlib, name, made)
    restore()
    assert getattr(contextlib, name) is made


class Remembers(Model):
    """Appends what it has seen to a long memory, and reads none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = deque([(torch.zeros(1), k) for k in range(10_001)])

    def forward(self, x: Tensor) -> Tensor:
        self.memory.append((x.detach().mean(), len(self.memory)))
        return super().forward(x)


def test_a_long_memory_is_restored_without_copies_of_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying a replay buffer for each comparison took minutes."""
    copied = []
    original = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, *a, **k: copied.append(1) or original(self, *a, **k))
    model = Remembers()
    with Relay(
        model, SGD(model.parameters(), lr=0.1), "cpu", loss=cross_entropy, config=RelayConfig(micro_batches=2)
    ) as relay:
        for step in range(2):
            relay.step(batch_of(step))
    assert len(model.memory) == 10_001 + 2 * 2 and [number for _, number in model.memory] == list(range(10_005))
    assert len(copied) < 10_000
