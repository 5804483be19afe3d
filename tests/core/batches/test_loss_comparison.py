"""Losses that are no mean over rows or targets and no sum are refused before anything is trained; the remedies work.

The oracle is plain training on the undivided batch, or plain accumulation where that is asked for.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from l2l_core import DeviceOutOfMemory, EmulatedDevice, Relay, RelayConfig
from l2l_core.batches import loss_normaliser
from l2l_core.batches.loss_comparison import compare_losses
from l2l_core.trial_forwards import TrialForwards

ROWS, K, RATE = 16, 4, 1e-2
Batch = dict[str, Tensor]
Objective = Callable[[nn.Module, Batch], Tensor]
sgd = partial(torch.optim.SGD, lr=RATE, momentum=0.9)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, inputs: int = 8, width: int = 16, outputs: int = 5) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(inputs, width), nn.Linear(width, outputs)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class OverTime(nn.Module):
    """Input (time, batch, features), as recurrent networks take it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(8, 8), nn.LSTM(8, 8)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


def model_of(kind: type[nn.Module] = Stack) -> nn.Module:
    torch.manual_seed(1)
    return kind().train()


def noise(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, seed: int = 7) -> Tensor:
    return torch.randint(5, shape, generator=torch.Generator().manual_seed(seed))


def batch_of(seed: int = 0) -> Batch:
    x = noise(ROWS, 8, seed=seed)
    return {"x": x, "other": x + 0.1 * noise(ROWS, 8, seed=seed + 50), "y": classes(ROWS, seed=seed)}


# -- losses of rows, and losses that mix rows --------------------------------------------------------------------------


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def summed(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum") / 8


def info_nce(model: nn.Module, batch: Batch) -> Tensor:
    a, b = (F.normalize(model(batch[name]), dim=-1) for name in ("x", "other"))
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def two_views(model: nn.Module, batch: Batch) -> Tensor:
    z = F.normalize(model(batch["x"]), dim=-1)
    n = len(z) // 2
    likeness = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(likeness, torch.cat([torch.arange(n) + n, torch.arange(n)]))


def same_class(model: nn.Module, batch: Batch) -> Tensor:
    """Pull rows of one class together: pairs depend on the contents of the batch."""
    z = F.normalize(model(batch["x"]), dim=-1)
    alike = batch["y"][:, None] == batch["y"]
    return ((z @ z.T - alike.float()) ** 2).mean()


def preferences(model: nn.Module, batch: Batch) -> Tensor:
    """Chosen answers in the first half, rejected ones in the second; equal to log 2 for every pair while the head is zero."""
    scores = model(batch["x"])[:, 0]
    chosen, rejected = scores.chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def dice(model: nn.Module, batch: Batch) -> Tensor:
    """Of masks of unequal size, as in segmentation."""
    found, wanted = (3 * model(batch["x"])).sigmoid(), (batch["y"][:, None] > torch.arange(5)).float()
    return 1 - 2 * (found * wanted).sum() / (found.sum() + wanted.sum())


def class_weights(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], weight=torch.tensor([1.0, 50.0, 1.0, 20.0, 1.0]))


def variance(model: nn.Module, batch: Batch) -> Tensor:
    """The variance term of VICReg."""
    return F.relu(1 - model(batch["x"]).var(0).add(1e-4).sqrt()).mean()


MIXING: dict[str, Objective] = {
    "InfoNCE": info_nce,
    "two views": two_views,
    "same class": same_class,
    "preferences": preferences,
    "class weights": class_weights,
    "variance": variance,
}


def train(
    objective: Objective, model: nn.Module | None = None, steps: int = 3, micro_batches: int = K, **options: Any
) -> tuple[nn.Module, list[float]]:
    model = model_of() if model is None else model
    config = RelayConfig(micro_batches=micro_batches)
    with Relay(model, sgd, EmulatedDevice(), objective=objective, config=config, **options) as relay:
        return model, [relay.step(batch_of(step)).loss for step in range(steps)]


def train_plain(objective: Objective, parts: int, steps: int = 3) -> tuple[nn.Module, list[float]]:
    """Plain training with accumulation over contiguous parts; one part is the undivided batch."""
    model = model_of()
    optimizer, losses = sgd(model.parameters()), []
    for step in range(steps):
        rows = zip(*(value.chunk(parts) for value in batch_of(step).values()), strict=True)
        own = [objective(model, dict(zip(batch_of(step), each, strict=True))) / parts for each in rows]
        for loss in own:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in own))
    return model, losses


def assert_close(model: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.all_cases
@pytest.mark.parametrize("name", MIXING)
def test_a_loss_that_mixes_rows_is_refused_and_each_remedy_works(name: str) -> None:
    objective, model = MIXING[name], model_of()
    before = copy.deepcopy(model.state_dict())
    with Relay(model, sgd, EmulatedDevice(), objective=objective, config=RelayConfig(micro_batches=K)) as relay:
        with pytest.raises(
            ValueError, match=r"together and .* in two parts .*split=.*loss_over=.*micro_batches=1.*weight="
        ):
            relay.step(batch_of())
        assert relay.steps == 0
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())

    accumulated, losses = train_plain(objective, K)
    trained, found = train(objective, loss_over="micro-batch")
    assert found == pytest.approx(losses, rel=1e-5)
    assert_close(trained, accumulated)
    whole, losses = train_plain(objective, 1)
    trained, found = train(objective, micro_batches=1)
    assert found == pytest.approx(losses, rel=1e-5)
    assert_close(trained, whole)


def test_a_loss_that_mixes_rows_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other settings of the step are not tried: the loss would be compared again, and refused again."""
    compared = []

    def counting(*args: Any) -> Any:
        compared.append(args)
        return compare_losses(*args)

    monkeypatch.setattr(loss_normaliser, "compare_losses", counting)
    with pytest.raises(ValueError, match="in two parts"):
        train(variance)
    assert len(compared) == 1


def test_a_weighted_mean_is_right_with_its_weights() -> None:
    weights = torch.tensor([1.0, 50.0, 1.0, 20.0, 1.0])
    whole, losses = train_plain(class_weights, 1)
    trained, found = train(class_weights, weight=lambda part: float(weights[part["y"]].sum()))
    assert found == pytest.approx(losses, rel=1e-5)
    assert_close(trained, whole)


@pytest.mark.parametrize("objective", [cross_entropy, summed])
@pytest.mark.parametrize("micro_batches", [2, 4, 16])
def test_means_and_sums_have_the_loss_of_the_batch(objective: Objective, micro_batches: int) -> None:
    whole, losses = train_plain(objective, 1)
    trained, found = train(objective, micro_batches=micro_batches)
    assert found == pytest.approx(losses, rel=1e-5)
    assert_close(trained, whole)


def masked(model: nn.Module, batch: Batch) -> Tensor:
    """A sum in which most rows add nothing."""
    return (F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * (batch["y"] > 2)).sum()


def masked_mean(model: nn.Module, batch: Batch) -> Tensor:
    return masked(model, batch) / (batch["y"] > 2).sum().clamp(min=1)


@pytest.mark.all_cases
@pytest.mark.parametrize("labels", [[3, 0, 3, 1], [0, 1, 2, 3], [0, 3, 1, 1], [1, 0, 3, 3, 2, 0, 1, 4]])
@pytest.mark.parametrize("parts", [2, "rows"])
def test_rows_without_a_loss_do_not_make_a_mean_a_sum(labels: list[int], parts: int | str) -> None:
    """The loss of such a row and another one is the sum of their losses, and their weighted mean too."""
    batch = {"x": noise(len(labels), 8), "y": torch.tensor(labels)}
    config, twin = RelayConfig(micro_batches=len(labels) if parts == "rows" else 2), model_of()
    with (
        Relay(model_of(), sgd, objective=masked_mean, config=config) as relay,
        pytest.raises(ValueError, match=r"neither a mean.*weight=lambda micro_batch"),
    ):
        relay.step(batch)
    remedy = {"weight": lambda part: float((part["y"] > 2).sum())}
    with Relay(model_of(), sgd, objective=masked_mean, config=config, **remedy) as relay:
        assert relay.step(batch).loss == pytest.approx(masked_mean(twin, batch).item(), rel=1e-5)


def test_a_sum_in_which_most_rows_add_nothing() -> None:
    whole, losses = train_plain(masked, 1)
    trained, found = train(masked, micro_batches=ROWS)
    assert found == pytest.approx(losses, rel=1e-5)
    assert_close(trained, whole)


def test_a_small_difference_is_a_warning_with_its_figures() -> None:
    def nearly(model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model, batch) + 0.05 * dice(model, batch)

    whole, losses = train_plain(nearly, 1, steps=1)
    with pytest.warns(UserWarning, match=r"\d\.\d+ together and \d\.\d+ in two parts .*slightly different loss"):
        _, found = train(nearly, steps=1)
    assert found != losses and found == pytest.approx(losses, rel=1e-2)


def test_a_step_says_how_losses_were_put_together() -> None:
    config = RelayConfig(micro_batches=K)
    for objective, words in ((cross_entropy, "mean over rows"), (summed, "sum")):
        with Relay(model_of(), sgd, objective=objective, config=config) as relay:
            assert relay.step(batch_of()).objective.startswith(words)
            assert relay.objective_summary.startswith(words)
    with Relay(model_of(), sgd, objective=dice, loss_over="micro-batch", config=config) as relay:
        assert 'loss_over="micro-batch"' in relay.step(batch_of()).objective
    with pytest.raises(ValueError, match="loss_over='rows'"):
        Relay(model_of(), sgd, objective=dice, loss_over="rows")  # type: ignore[arg-type]


def test_time_in_the_first_dimension_is_noticed() -> None:
    batch = {"x": noise(12, 4, 8), "y": classes(12, 4)}

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    with Relay(model_of(OverTime), sgd, objective=objective, config=RelayConfig(micro_batches=3)) as relay:
        with pytest.warns(UserWarning, match=r"slightly different loss than the batch.*loss_over="):
            relay.step(batch)  # a young model remembers little, so the figures are close


def test_a_young_model_hides_nothing() -> None:
    """All pairs have the same loss under a head that is zero; a perturbed one shows that halves belong together."""
    model = model_of()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    with Relay(model, sgd, objective=preferences, config=RelayConfig(micro_batches=K)) as relay:
        with pytest.raises(ValueError, match="in two parts"):
            relay.step(batch_of())
        assert not model.head.weight.any()


@pytest.mark.parametrize("mixes", [False, True])
def test_losses_that_draw_random_numbers(mixes: bool) -> None:
    """As those of diffusion models: compared in the mean, within its error."""

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"] + 0.3 * torch.randn_like(batch["x"])
        return info_nce(model, batch | {"other": x}) if mixes else F.cross_entropy(model(x), batch["y"])

    with Relay(model_of(), sgd, objective=objective, config=RelayConfig(micro_batches=K)) as relay:
        if mixes:
            with pytest.raises(ValueError, match=r"(in two parts|cannot be determined).*loss_over="):
                relay.step(batch_of())
        else:
            assert relay.step(batch_of()).objective.startswith("mean over rows")


class Changing(Block):
    """Replaces a buffer and freezes a parameter in its forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("fixed", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach().mean(0)
        self.up.bias.requires_grad_(False)
        return super().forward(x) * self.fixed


def test_a_comparison_leaves_buffers_and_flags() -> None:
    """The loss is refused, so no step follows it."""
    model = model_of()
    model.layers[1] = Changing(16)
    before = {name: (buffer, buffer.clone(), buffer._version) for name, buffer in model.named_buffers()}
    with Relay(model, sgd, EmulatedDevice(), objective=variance, config=RelayConfig(micro_batches=K)) as relay:
        with pytest.raises(ValueError, match="mixes rows"):
            relay.step(batch_of())
        for name, buffer in model.named_buffers():
            old, value, version = before[name]
            assert buffer is old and torch.equal(buffer, value) and buffer._version == version, name
        assert all(param.requires_grad for param in model.parameters())


def test_a_device_that_is_too_small_is_reported_as_by_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With advice, and without a result that a later step on a larger device would rely on."""
    monkeypatch.setattr(TrialForwards, "_can_copy_weights", lambda self: False)  # as of a device that is not the host
    device = EmulatedDevice(memory_bytes=1000)
    with Relay(model_of(), sgd, device, objective=info_nce, config=RelayConfig(micro_batches=K)) as relay:
        with pytest.raises(DeviceOutOfMemory, match="Remedy") as caught:
            relay.step(batch_of())
        assert caught.value.least_bytes is not None
        device.ledger.limit_bytes = None
        with pytest.raises(ValueError, match="mixes rows"):
            relay.step(batch_of())


class Clamping(nn.Module):
    """A head that changes its own weights in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.head.weight.data.clamp_(-0.01, 0.01)
        return self.head(x)


def test_a_comparison_leaves_weights_that_a_forward_changes() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), Clamping())
    config = RelayConfig(micro_batches=2)
    with Relay(model, sgd, objective=lambda m, x: m(x).square().mean(), layers=["0", "1", "2"], config=config) as relay:
        before = [param.detach().clone() for param in model.parameters()]
        TrialForwards(relay._runner).losses([torch.randn(2, 8)], True)
        assert all(map(torch.equal, before, model.parameters()))


class Remembering(nn.Module):
    """Adds its last output, if it has as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        last, self.last = self.last, x.detach()
        return x + 10 * last if last is not None and len(last) == len(x) == 2 else x


def test_rows_that_read_what_others_left_are_no_mixed_rows() -> None:
    """A few rows ran one after another in core, and the second part read the state of the first."""
    options: Any = {"objective": lambda m, batch: m(batch[0]).square().mean(), "config": RelayConfig(micro_batches=2)}
    with Relay(Remembering(), sgd, EmulatedDevice(), **options) as relay:
        with pytest.warns(UserWarning, match="not compared"):
            relay.step((torch.randn(4, 8),))


def test_context_variables_that_a_forward_sets_in_a_comparison_are_not_the_callers() -> None:
    count = ContextVar("count", default=0)

    def objective(model: nn.Module, batch: Any) -> torch.Tensor:
        count.set(count.get() + 1)
        return model(batch[0]).square().mean()

    config = RelayConfig(micro_batches=2, verify="never")
    with Relay(Remembering(), sgd, EmulatedDevice(), objective=objective, config=config) as relay:
        TrialForwards(relay._runner).losses([(torch.randn(2, 8),)], False)
    assert count.get() == 0


@pytest.mark.parametrize("settings", [{}, {"schedule": "depth_first"}])
def test_a_comparison_fits_where_a_step_does(settings: Any) -> None:
    """With twice the bytes per weight of a step in bfloat16."""
    config = RelayConfig(micro_batches=K, precision="bf16", **settings)
    options: dict[str, Any] = {"objective": cross_entropy, "config": config}
    with Relay(model_of(), sgd, EmulatedDevice(), loss_over="micro-batch", **options) as relay:
        budget = relay.step(batch_of()).peak_device_bytes
    with Relay(model_of(), sgd, EmulatedDevice(memory_bytes=budget), **options) as relay:
        assert relay.step(batch_of()).peak_device_bytes == budget


def test_a_batch_with_fewer_rows_than_micro_batches_runs_by_rows() -> None:
    small = {name: value[:3] for name, value in batch_of().items()}
    model, twin = model_of(), model_of()
    optimizer = sgd(twin.parameters())
    with Relay(model, sgd, objective=cross_entropy, config=RelayConfig(micro_batches=K)) as relay:
        with pytest.warns(UserWarning, match=r"has 3 row\(s\), fewer than micro_batches=4"):
            relay.step(small)
        relay.step(small)
        assert relay.verify(small).equal and relay.forecast(small).peak_device_bytes > 0
    for _ in range(2):
        cross_entropy(twin, small).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(model, twin)


@pytest.mark.parametrize("settings", [{}, {"stash": "host"}, {"schedule": "depth_first", "keep": 3, "resident": 2}])
def test_a_micro_batch_without_targets_adds_nothing(settings: Any) -> None:
    batch = batch_of()
    batch["y"][4:8] = -100  # the second of four micro-batches
    batch["y"][13] = -100
    model, twin = model_of(), model_of()
    optimizer = sgd(twin.parameters())
    with Relay(model, sgd, objective=cross_entropy, config=RelayConfig(micro_batches=K, **settings)) as relay:
        losses = [relay.step(batch).loss for _ in range(2)]
        assert relay.verify(batch).equal
        batch["y"][:] = -100
        with pytest.raises(ValueError, match="the batch counts nothing"):
            relay.step(batch)
        batch["y"] = batch_of()["y"]
    expected = []
    batch["y"][4:8] = batch["y"][13] = -100
    for _ in range(2):
        loss = cross_entropy(twin, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(model, twin)


@pytest.mark.parametrize("count", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_random_losses_are_right_or_refused(count: int) -> None:
    """Random terms on random rows: the loss and the weights of the undivided batch, or a refusal or a warning."""
    trained = 0
    for seed in range(count):
        draw = random.Random(seed)
        terms = draw.choices([cross_entropy, summed, *MIXING.values()], weights=[6, 6, *[1] * len(MIXING)], k=2)
        factors = [draw.choice([0.0, 0.3, 1.0]), 1.0]

        def objective(model: nn.Module, batch: Batch, terms: Any = terms, factors: Any = factors) -> Tensor:
            parts = [factor * term(model, batch) for factor, term in zip(factors, terms, strict=True) if factor]
            return torch.stack(parts).sum()

        micro_batches = draw.choice([2, 4])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                model, losses = train(objective, steps=2, micro_batches=micro_batches)
            except ValueError as error:
                assert "in two parts" in str(error) or "cannot be determined" in str(error), (seed, error)
                continue
        if not warned:
            trained += 1
            whole, expected = train_plain(objective, 1, steps=2)
            assert losses == pytest.approx(expected, rel=1e-4), (seed, terms, factors)
            assert_close(model, whole)
    assert trained > count // 5


# -- tensors that all rows share -----------------------------------------------------------------------------------------


class Positioned(nn.Module):
    """As many tokens as rows: position indices, or a mask between tokens, are as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.body = nn.Embedding(ROWS, 8), Stack()

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = x + self.positions(positions)
        return self.body((x @ x.mT).masked_fill(~mask, -1e9).softmax(-1) @ x)


def positioned_batch(seed: int) -> Batch:
    y = classes(ROWS, ROWS, seed=seed)
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    return {"x": noise(ROWS, ROWS, 8, seed=seed), "positions": torch.arange(ROWS), "mask": mask[None], "y": y}


def token_loss(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), batch["y"].flatten())


KINDS_OF_LOSS: dict[str, dict[str, Any]] = {
    "compared": {},
    "batch": {"loss_over": "batch"},
    "micro-batch": {"loss_over": "micro-batch"},
    "weight": {"weight": lambda part: float(part["y"].numel())},
}


@pytest.mark.all_cases
@pytest.mark.parametrize("name", ["positions", "mask"])
@pytest.mark.parametrize("kind", KINDS_OF_LOSS)
@pytest.mark.parametrize("micro_batches", [K, ROWS])
def test_a_tensor_that_all_rows_share_is_not_cut(name: str, kind: str, micro_batches: int) -> None:
    """With as many micro-batches as tokens each had one index, the model ran, and trained on others."""
    shared = {"positions": torch.arange(ROWS), "mask": torch.ones(ROWS, ROWS, dtype=torch.bool).tril()}[name]
    batches = [positioned_batch(seed) | {"positions": torch.arange(ROWS)[None]} for seed in range(3)]
    model = model_of(Positioned)
    oracle = copy.deepcopy(model)
    optimizer = sgd(oracle.parameters())
    config = RelayConfig(micro_batches=micro_batches)
    options = {"loss": token_loss, "config": config, **KINDS_OF_LOSS[kind]}
    with Relay(model, sgd(model.parameters()), EmulatedDevice(), **options) as relay:
        for _ in range(2):  # also when it is tried again
            with pytest.raises(ValueError, match=rf"batch\['{name}'\]\[None\], of shape \(1, {ROWS}") as refused:
                relay.step(batches[0] | {name: shared})
        assert "Nothing was trained" in str(refused.value)
        assert all(map(torch.equal, model.state_dict().values(), oracle.state_dict().values()))
        for batch in batches:
            one = batch | {name: shared[None]}  # as the message says
            optimizer.zero_grad()
            loss = token_loss(oracle(one["x"], one["positions"], one["mask"]), one)
            loss.backward()
            optimizer.step()
            assert relay.step(one).loss == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize("tokens", [ROWS, ROWS + 1])
def test_where_no_losses_are_compared_rows_run_only_if_a_tensor_may_be_shared(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, real = [], TrialForwards.losses
    monkeypatch.setattr(TrialForwards, "losses", lambda self, *given: runs.append(given) or real(self, *given))
    batch, config = {"x": noise(ROWS, tokens, 8), "y": classes(ROWS, seed=0)}, RelayConfig(micro_batches=K)
    options: Any = {"objective": lambda m, b: m(b["x"]).square().mean(), "loss_over": "sum", "config": config}
    with Relay(model_of(), sgd, EmulatedDevice(), **options) as relay:
        relay.step(batch)
        relay.step(batch)
    assert len(runs) == (tokens == ROWS)


def test_a_tensor_that_rows_need_is_not_taken_for_a_shared_one() -> None:
    """A model that does not run with few rows says nothing of its labels and weights."""

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        if len(batch["x"]) < ROWS // 2:
            raise RuntimeError("half the rows at least")
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (losses * batch["weight"].square()).mean()

    model, batch = model_of(), batch_of() | {"weight": noise(ROWS)}
    with Relay(
        model, sgd(model.parameters()), EmulatedDevice(), objective=objective, config=RelayConfig(micro_batches=2)
    ) as relay:
        with pytest.warns(UserWarning, match="not compared .*half the rows at least"):
            relay.step(batch)


class InEights(Stack):
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 2 and len(x) % 8:
            raise RuntimeError("no multiple of eight")
        return super().forward(x)


def test_outputs_of_another_shape_are_no_sign_of_a_shared_tensor() -> None:
    def loss(outputs: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs, batch["y"])

    model, config = model_of(InEights), RelayConfig(micro_batches=2)
    optimizer = sgd(model.parameters())
    with Relay(model, optimizer, EmulatedDevice(), loss=loss, loss_over="batch", config=config) as relay:
        with pytest.warns(UserWarning, match="not compared .*no multiple of eight"):
            relay.step({name: column for name, column in batch_of().items() if name != "other"})
