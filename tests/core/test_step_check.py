"""Steps are compared with training in core before they train; the words name settings that work, and those do."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from l2l_core import Duplicate, EmulatedDevice, FileShelf, Relay, RelayConfig, StepResult, UnequalStepError

GLOBAL: dict[str, Tensor | float] = {}
LOCAL = threading.local()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)
        self.scale: Callable[[], Any] = lambda: 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.f(x)) * self.scale()


class Model(nn.Module):
    """A chain whose forward leaves a number somewhere, where its layers read it."""

    def __init__(
        self, leave: Callable[[float], Any] = lambda value: None, read: Callable[[], Any] = lambda: 1.0
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.leave = leave
        for layer in self.layers:
            layer.scale = read

    def forward(self, x: Tensor) -> Tensor:
        self.leave(float(x.detach().mean()))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


BATCH = (torch.arange(48.0).view(6, 8).sin(), torch.arange(6) % 3)


def relay_over(model: nn.Module, optimizer: Any = None, device: Any = "cpu", **settings: Any) -> Relay:
    made = optimizer or torch.optim.AdamW(model.parameters())
    config = RelayConfig(**{"micro_batches": 2, **settings})
    return Relay(model, made, device, loss=nn.CrossEntropyLoss(), config=config)


def trained_plainly(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in zip(*(part.chunk(2) for part in BATCH), strict=True):
        (F.cross_entropy(model(x), y) / 2).backward()
    optimizer.step()
    return [param.detach() for param in model.parameters()]


UNSEEN = {
    "a global dictionary": (lambda v: GLOBAL.update(v=v), lambda: GLOBAL["v"]),
    "a thread's local": (lambda v: setattr(LOCAL, "v", v), lambda: LOCAL.v),
}


@pytest.mark.filterwarnings("ignore:the loss of a few rows")
@pytest.mark.all_cases
@pytest.mark.parametrize(("leave", "read"), UNSEEN.values(), ids=UNSEEN)
def test_what_no_check_sees_is_refused_and_the_remedy_works(leave: Any, read: Any) -> None:
    torch.manual_seed(0)
    expected = trained_plainly(Model(leave, read))
    torch.manual_seed(0)
    model = Model(leave, read)
    before = [param.detach().clone() for param in model.parameters()]
    with relay_over(model) as relay:
        with pytest.raises(
            UnequalStepError, match=r"Nothing has been trained. RelayConfig\(schedule='depth_first'\)"
        ) as info:
            relay.step(BATCH)
        assert not info.value.report.equal and relay.steps == 0
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert not relay.optimizer.state
        relay.config = RelayConfig(micro_batches=2, schedule="depth_first")
        assert relay.step(BATCH).verified.startswith("equal to the step in core")
    assert all(torch.equal(a, b) for a, b in zip(expected, model.parameters(), strict=True))


class Counting(nn.Module):
    """A layer whose outputs depend on the number of calls of all its layers, or of itself."""

    calls = 0

    def __init__(self, period: int, of_class: bool) -> None:
        super().__init__()
        self.f, self.period, self.of_class = nn.Linear(8, 8), period, of_class

    def forward(self, x: Tensor) -> Tensor:
        (type(self) if self.of_class else self).calls += 1
        return x + torch.tanh(self.f(x)) / (1 + self.calls % self.period)


def counting(period: int, of_class: bool) -> nn.Module:
    torch.manual_seed(0)
    Counting.calls = 0
    layers = [Counting(period, of_class) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(8, 3))


@pytest.mark.parametrize("period", [2, 3])
def test_layers_that_count_calls_on_their_class_do_not_mix_rows(period: int) -> None:
    """Counts of layers that take turns are others than in core; a comparison of rows met the same count again and again."""
    expected = trained_plainly(counting(period, of_class=True))
    model = counting(period, of_class=True)
    with relay_over(model) as relay:
        with pytest.raises(RuntimeError) as info:
            relay.step(BATCH)
        words = " ".join([str(info.value), *getattr(info.value, "__notes__", [])])
        assert "rows" not in words and "RelayConfig(schedule='depth_first') trains it" in words
        assert Counting.calls == 0
        relay.config = RelayConfig(micro_batches=2, schedule="depth_first")
        relay.step(BATCH)
    assert all(torch.equal(a, b) for a, b in zip(expected, model.parameters(), strict=True))


@pytest.mark.parametrize("period", [2, 3])
def test_layers_that_count_their_own_calls_train(period: int) -> None:
    expected = trained_plainly(counting(period, of_class=False))
    model = counting(period, of_class=False)
    with relay_over(model) as relay:
        relay.step(BATCH)
    assert all(torch.equal(a, b) for a, b in zip(expected, model.parameters(), strict=True))


class ClipsSpikes(torch.optim.SGD):
    """Clips the joint norm above a threshold that small weights do not reach."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm() if grads else torch.zeros(())
        for grad in grads:
            grad.mul_(1e3 / norm.clamp(min=1e3))
        return super().step(closure)


def test_an_optimizer_that_couples_for_these_gradients_is_refused_and_the_remedy_works() -> None:
    model = Model()
    optimizer, config = ClipsSpikes(model.parameters(), lr=0.1), RelayConfig(micro_batches=2)
    with Relay(
        model, optimizer, "cpu", loss=lambda out, batch: 1e6 * F.cross_entropy(out, batch[1]), config=config
    ) as relay:
        with pytest.raises(UnequalStepError, match=r"RelayConfig\(update='whole'\) trains it"):
            relay.step(BATCH)
        relay.config = RelayConfig(micro_batches=2, update="whole")
        assert relay.step(BATCH).verified.startswith("equal")


@pytest.mark.filterwarnings("ignore:the loss of a few rows")
def test_a_refused_layer_trains_as_the_note_says() -> None:
    """A gradient penalty needs second derivatives through layers."""

    def objective(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + grad.square().sum(1).mean()

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    with Relay(model, optimizer, "cpu", objective=objective, config=RelayConfig(micro_batches=2)) as relay:
        with pytest.raises(RuntimeError) as info:
            relay.step(BATCH)
        assert any("RelayConfig(schedule='depth_first') trains it" in note for note in info.value.__notes__)
        relay.config = RelayConfig(micro_batches=2, schedule="depth_first")
        assert relay.step(BATCH).verified.startswith("equal")


def test_an_error_that_passes_by_itself_is_not_said_to_need_other_settings() -> None:
    failures = []

    def loss(out: Tensor, batch: Any) -> Tensor:
        if failures:
            raise RuntimeError(failures.pop())
        return F.cross_entropy(out, batch[1])

    model = Model()
    with Relay(model, torch.optim.SGD(model.parameters(), lr=0.1), "cpu", loss=loss) as relay:
        relay.step(BATCH)
        failures.append("the disk was full")
        with pytest.raises(RuntimeError, match="the disk was full") as info:
            relay.step(BATCH)
        assert not any("trains it" in note for note in getattr(info.value, "__notes__", []))
        relay.step(BATCH)


def test_layers_with_a_generator_train_nothing() -> None:
    """Without the comparison, the last layers would hold new weights."""
    generator = torch.Generator()
    model = Model(read=lambda: torch.rand(1, generator=generator))
    before = [param.detach().clone() for param in model.parameters()]
    with relay_over(model) as relay, pytest.raises(RuntimeError, match="gave other outputs when it was recomputed"):
        relay.step(BATCH)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def results_of(relay: Relay, count: int) -> list[StepResult]:
    return [relay.step(BATCH) for _ in range(count)]


class Annealed:
    """A loss whose weight grows with each call."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, []

    def __call__(self, out: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        self.seen.append(float(out.detach().mean()))
        return (1 + 0.1 * self.calls) * F.cross_entropy(out, batch[1])


def annealed_in_a_closure() -> tuple[Callable[[Tensor, Any], Tensor], Callable[[], Any]]:
    calls, center, seen = 0, torch.zeros(3), []

    def loss(out: Tensor, batch: Any) -> Tensor:
        nonlocal calls, center
        calls += 1
        center = 0.9 * center + 0.1 * out.detach().mean(0)
        seen.append(calls)
        return (1 + 0.1 * calls) * F.cross_entropy(out, batch[1]) + (out - center).square().mean()

    return loss, lambda: (calls, center.tolist(), seen)


def annealed_in_containers() -> tuple[Callable[[Tensor, Any], Tensor], Callable[[], Any]]:
    """Also within each other, and beside the data."""
    kept: dict[str, Any] = {
        "at": {"calls": 0},
        "seen": [[0.0]],
        "data": [torch.zeros(2**21)] * 200,
        "center": torch.zeros(3),
    }

    def loss(out: Tensor, batch: Any) -> Tensor:
        kept["at"]["calls"] += 1
        kept["seen"].append([float(out.detach().mean())])
        kept["center"].mul_(0.9).add_(0.1 * out.detach().mean(0))
        return (1 + 0.1 * kept["at"]["calls"]) * F.cross_entropy(out, batch[1]) + (out - kept["center"]).square().mean()

    return loss, lambda: (kept["at"], kept["seen"], kept["center"].tolist())


def annealed_as_an_object() -> tuple[Callable[[Tensor, Any], Tensor], Callable[[], Any]]:
    loss = Annealed()
    return loss, lambda: (loss.calls, loss.seen)


@pytest.mark.all_cases
@pytest.mark.parametrize("make", [annealed_in_a_closure, annealed_in_containers, annealed_as_an_object])
def test_a_loss_that_counts_its_calls_counts_those_of_steps(make: Any) -> None:
    """Its counter, running mean and list are as in plain training, and so are the weights."""
    ends = []
    for verify in (None, "first"):
        torch.manual_seed(0)
        model, (loss, state) = Model(), make()
        optimizer = torch.optim.AdamW(model.parameters())
        if verify is None:
            for _ in range(2):
                for x, y in zip(*(part.chunk(2) for part in BATCH), strict=True):
                    (loss(model(x), (x, y)) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            config = RelayConfig(micro_batches=2)
            with Relay(model, optimizer, "cpu", loss=loss, config=config, loss_over="micro-batch") as relay:
                assert [relay.step(BATCH).verified[:5] for _ in range(2)] == ["equal", ""]
        ends.append((state(), [param.detach() for param in model.parameters()]))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("verify", "due"), [("first", [0]), ("never", []), (1, [0, 1, 2, 3]), (3, [0, 3])], ids=["first", "never", "1", "3"]
)
def test_when_a_step_is_compared(verify: Any, due: list[int]) -> None:
    with relay_over(Model(), verify=verify) as relay:
        verified = [result.verified for result in results_of(relay, 4)]
    assert [step for step, words in enumerate(verified) if words] == due
    assert all(words.startswith("equal to the step in core, to the bit; compared in ") for words in verified if words)


def test_another_shape_is_no_other_kind_and_other_layers_are() -> None:
    with relay_over(Model()) as relay:
        x, y = BATCH
        assert relay.step(BATCH).verified and not relay.step((x[:4], y[:4])).verified
        relay.model.layers[0].requires_grad_(False)
        assert relay.step(BATCH).verified and not relay.step(BATCH).verified
        relay.config = RelayConfig(micro_batches=2, stash="host")
        assert relay.step(BATCH).verified


def test_a_comparison_leaves_nothing_behind() -> None:
    """The same steps without one give the same weights, state and random numbers."""
    ends = []
    for verify in ("first", "never"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)))
        optimizer = torch.optim.AdamW(model.parameters())
        config = RelayConfig(micro_batches=2, seed=0, verify=verify)  # type: ignore[arg-type]
        with Relay(model, optimizer, "cpu", loss=lambda out, batch: out.square().mean(), config=config) as relay:
            losses = [relay.step((BATCH[0],)).loss for _ in range(3)]
            state = [value for each in relay.optimizer.state.values() for value in each.values()]
            ends.append((losses, [*model.parameters(), *state, torch.get_rng_state()]))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


@pytest.mark.parametrize("loss_over", [None, "batch"])
def test_weights_in_a_loss_get_the_gradient_of_one_step(loss_over: Any) -> None:
    """A head in the loss, with an optimizer that the user calls, over gradients that were there before."""
    torch.manual_seed(0)
    model, head = Model(), nn.Linear(3, 3)
    twin, other = copy.deepcopy((model, head))
    for each in (head, other):
        each.bias.grad = torch.ones(3)

    def loss(outputs: Tensor, batch: Any, of: nn.Module = head) -> Tensor:
        return F.cross_entropy(of(outputs), batch[1])

    parts = [*zip(*(part.chunk(2) for part in BATCH), strict=True)]
    if loss_over is None:
        for x, y in parts:
            (loss(twin(x), (x, y), other) / 2).backward()
    else:
        loss(torch.cat([twin(x) for x, _ in parts]), BATCH, other).backward()
    config = RelayConfig(micro_batches=2)
    with Relay(model, torch.optim.AdamW, "cpu", loss=loss, loss_over=loss_over, config=config) as relay:
        kept = head.bias.grad
        assert relay.verify(BATCH).equal and head.weight.grad is None
        assert head.bias.grad is kept and torch.equal(kept, torch.ones(3))
        assert relay.step(BATCH).verified.startswith("equal")
    for mine, plain in zip(head.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, plain.grad)


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"precision": "bf16"}, "precision='bf16' rounds"),
        ({"compress": "int8"}, "compressed gradients are rounded"),
    ],
    ids=str,
)
def test_why_a_step_is_not_compared(settings: dict[str, Any], reason: str) -> None:
    with relay_over(Model(), **settings) as relay:
        verified = relay.step(BATCH).verified
    assert verified.startswith("not compared with training in core: ") and reason in verified


def test_what_cannot_be_compared_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reason, and with a failure in core alone; the relay trains on."""
    with relay_over(Model(), precision="bf16") as relay:
        assert [bool(result.verified) for result in results_of(relay, 3)] == [True, False, False]
    tried: list[int] = []

    def fails(**_: Any) -> None:
        tried.append(1)
        raise OSError("no room")

    monkeypatch.setattr("l2l_core.relay.InCoreStep", fails)
    with relay_over(Model()) as relay:
        verified = [result.verified for result in results_of(relay, 3)]
    assert (
        verified == ["not compared with training in core, which failed: OSError: no room", "", ""] and len(tried) == 1
    )


def test_weights_in_files_are_not_compared(tmp_path: Any) -> None:
    model = Model()
    shelf = FileShelf(folder=tmp_path, memory_bytes=10_000_000)
    with Relay(model, torch.optim.AdamW, "cpu", loss=nn.CrossEntropyLoss(), shelf=shelf) as relay:
        assert relay.step(BATCH).verified == "not compared with training in core: weights are in files"


def test_without_the_memory_a_step_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("l2l_core.relay.free_bytes", lambda device: 1000)
    with relay_over(Model(), device=EmulatedDevice()) as relay:
        assert "bytes of host memory, and 1,000 are free" in relay.step(BATCH).verified


@pytest.mark.filterwarnings("ignore:the loss of a few rows")
def test_an_error_of_the_users_code_is_the_relays_own() -> None:
    """It names the place, and it was raised in a step, not in a comparison."""
    with relay_over(Model()) as relay, pytest.raises(IndexError, match="out of bounds") as info:
        relay.step((BATCH[0], BATCH[1] + 7))
    assert any("The relay was at" in note for note in info.value.__notes__)


@pytest.mark.parametrize("verify", ["always", 0, -1, True, None, 1.5])
def test_what_verify_may_be(verify: Any) -> None:
    with pytest.raises(ValueError, match=r"verify=.*must be"):
        RelayConfig(verify=verify)


class SoftLoss(nn.Module):
    """A loss of the user's, whose forward is like those of torch.nn."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return -(F.one_hot(target, 3) * logits.log_softmax(-1)).sum(-1).mean()


@pytest.mark.filterwarnings("ignore:the loss of a few rows")
@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), F.cross_entropy, SoftLoss()], ids=["torch.nn", "function", "own"]
)
def test_a_loss_of_outputs_and_targets_gets_the_targets_of_a_pair(loss: Any) -> None:
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(twin.parameters())
    for x, y in zip(*(part.chunk(2) for part in BATCH), strict=True):
        (loss(twin(x), y) / 2).backward()
    optimizer.step()
    with Relay(model, torch.optim.AdamW, "cpu", loss=loss, config=RelayConfig(micro_batches=2)) as relay:
        relay.step(BATCH)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        with pytest.raises(ValueError, match=r"takes outputs and targets.*loss=lambda outputs, batch"):
            relay.step({"x": BATCH[0], "target": BATCH[1]})


def test_a_criterion_gets_the_last_entry_and_the_model_all_others() -> None:
    class Scaled(nn.Sequential):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * scale

    torch.manual_seed(0)
    model = Scaled(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    twin, optimizer = copy.deepcopy(model), torch.optim.AdamW(model.parameters())
    plain = torch.optim.AdamW(twin.parameters())
    batch = torch.randn(4, 8), torch.rand(4, 1), torch.randn(4, 8)
    with Relay(model, optimizer, "cpu", loss=nn.MSELoss(), config=RelayConfig(micro_batches=2)) as relay:
        relay.step(batch)
    for x, scale, target in zip(*(part.chunk(2) for part in batch), strict=True):
        (nn.functional.mse_loss(twin(x, scale), target) / 2).backward()
    plain.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_an_edit_where_no_list_holds_the_layers_is_refused_with_nothing_else_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class TwoLinears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(torch.tanh(self.a(x)))

    class InAttributes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = TwoLinears(), TwoLinears()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    with Relay(InAttributes(), torch.optim.AdamW, "cpu", loss=nn.MSELoss()) as relay:
        relay.step((torch.randn(4, 8), torch.randn(4, 8)))
        caplog.clear()
        with pytest.raises(ValueError, match="attributes of modules, in no container"):
            relay.apply(Duplicate(0))
    assert not caplog.records
