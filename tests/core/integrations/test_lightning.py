"""`RelayStrategy` beside the same `lightning.Trainer` in core, to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

L = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")

from lightning.pytorch.callbacks import BaseFinetuning, Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from l2l_core import EmulatedDevice, Relay, RelayConfig  # noqa: E402
from l2l_core.integrations.lightning import RelayStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*Checkpoint directory.*exists",
    "ignore:.*dirpath has changed",
    "ignore:You defined a .validation_step. but have no",
    "ignore:Experiment logs directory",
    "ignore:.*the hooks will not be called on every batch",
    "ignore:.*dataloader_iter",
    "ignore:.*LeafSpec.* is deprecated:FutureWarning",
)
HOST = RelayConfig(stash="host")


class Net(L.LightningModule):
    """A chain with a metric, whose training step logs by step and by epoch."""

    def __init__(self, schedule: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.valid_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.schedule = schedule

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"accuracy": self.accuracy, "index": float(batch_idx)}, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.valid_accuracy(logits, y)
        self.log("valid_loss", nn.functional.cross_entropy(logits, y))
        self.log("valid_accuracy", self.valid_accuracy)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        matrices = [param for param in self.parameters() if param.dim() > 1]
        vectors = [param for param in self.parameters() if param.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return [optimizer], [{"scheduler": scheduler, "interval": self.schedule}]


def rows(count: int, seed: int) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 8, generator=g), torch.randint(3, (count,), generator=g))


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Seven batches, the last of them smaller, and two for validation."""
    return DataLoader(rows(26, 1), 4), DataLoader(rows(8, 2), 4)


class Losses(Callback):
    """What callbacks see after every optimizer step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Any]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.seen.append((trainer.global_step, outputs["loss"].item()))
            self.seen.append((batch_idx, outputs["logits"].sum().item()))


def trainer(folder: Path, strategy: RelayStrategy | None, *callbacks: Callback, **options: Any) -> Any:
    settings = {"max_epochs": 3, "log_every_n_steps": 1, "logger": CSVLogger(folder, name="log", version=0)} | options
    return L.Trainer(
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"accelerator": "cpu"} if strategy is None else {"strategy": strategy}),
        **settings,
    )


def state_of(net: nn.Module, run: Any) -> dict[str, Any]:
    """Weights, state of optimizer and scheduler, and what was logged."""
    logged = (Path(run.logger.log_dir) / "metrics.csv").read_text()
    schedulers = [config.scheduler.state_dict() for config in run.lr_scheduler_configs]
    return {
        "weights": {name: value.clone() for name, value in net.state_dict().items()},
        "optimizer": run.optimizers[0].state_dict(),
        "schedulers": [{k: v for k, v in each.items() if k != "lr_lambdas"} for each in schedulers],
        "logged": logged,
        "callback_metrics": dict(run.callback_metrics),
        "steps": (run.global_step, run.current_epoch),
    }


def assert_same(a: Any, b: Any, at: str = "") -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b), (at, a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), (at, a.keys() ^ b.keys())
        for key in a:
            assert_same(a[key], b[key], f"{at}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), at
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{at}.{i}")
    else:
        assert a == b, (at, a, b)


def fit(folder: Path, strategy: RelayStrategy | None, make: Callable[[], Any] = Net, **options: Any) -> Any:
    """Train; return the state, and what a callback has seen."""
    torch.manual_seed(0)
    net, losses = make(), Losses()
    ckpt, callbacks = options.pop("ckpt_path", None), options.pop("callbacks", [])
    run = trainer(folder, strategy, losses, *callbacks, **options)
    run.fit(net, *loaders(), ckpt_path=ckpt)
    return state_of(net, run) | {"seen": losses.seen}, net, run


def both(tmp_path: Path, config: RelayConfig = HOST, **options: Any) -> Any:
    """Train in core and by relay; compare; return the relay's side."""
    callbacks = options.pop("callbacks", list)
    make = {name: options.pop(name) for name in ("make",) if name in options}
    ckpt = options.pop("ckpt_path", lambda folder: None)
    sides = []
    for name, strategy in (("core", None), ("relay", RelayStrategy(config, device="cpu"))):
        folder = tmp_path / name
        sides.append(fit(folder, strategy, callbacks=callbacks(), ckpt_path=ckpt(folder), **make, **options))
    assert_same(sides[0][0], sides[1][0])
    return sides[1]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("schedule", ["step", "epoch"])
def test_three_epochs_with_a_resume_in_the_middle(tmp_path: Path, accumulate: int, schedule: str) -> None:
    options = {"make": lambda: Net(schedule), "accumulate_grad_batches": accumulate}

    def keep() -> list[Callback]:
        return [ModelCheckpoint(filename="{epoch}", save_top_k=-1, monitor="valid_loss"), LearningRateMonitor()]

    whole, *_ = both(tmp_path / "whole", callbacks=keep, **options)
    assert whole["steps"] == (3 * -(-7 // accumulate), 3)
    first, _, run = both(tmp_path / "parts", callbacks=keep, max_epochs=1, **options)
    name = Path(run.checkpoint_callback.best_model_path).relative_to(tmp_path / "parts" / "relay")
    resumed, *_ = both(
        tmp_path / "rest", callbacks=keep, ckpt_path=lambda f: tmp_path / "parts" / f.name / name, **options
    )
    other = tmp_path / "parts" / "core" / name  # a checkpoint that was saved in core
    strategy = RelayStrategy(HOST, device="cpu")
    crossed, *_ = fit(tmp_path / "crossed", strategy, callbacks=keep(), ckpt_path=other, **options)
    for key in ("weights", "optimizer", "schedulers", "steps"):
        assert_same(resumed[key], whole[key])
        assert_same(crossed[key], whole[key])


# Options of the trainer ----------------------------------------------------------------------------------------------


class Norms(Callback):
    """Reads gradients before the optimizer step, and logs."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(float(sum(p.grad.norm() for p in pl_module.parameters())))
        pl_module.log("norm", self.norms[-1])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(tmp_path: Path, algorithm: str, accumulate: int) -> None:
    value = {"norm": 0.1, "value": 0.01}[algorithm]
    options = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm, "accumulate_grad_batches": accumulate}
    callbacks: list[Norms] = []

    def with_norms() -> list[Callback]:
        callbacks.append(Norms())
        return [callbacks[-1]]

    _, _, run = both(tmp_path, callbacks=with_norms, max_epochs=1, **options)
    assert callbacks[0].norms == callbacks[1].norms and len(callbacks[0].norms) == -(-7 // accumulate)
    assert run.strategy._config.update == "eager"


def test_max_steps_early_stopping_and_plateau(tmp_path: Path) -> None:
    class Plateau(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "valid_loss"}}

    state, *_ = both(tmp_path / "steps", max_steps=5, max_epochs=-1, accumulate_grad_batches=2)
    assert state["steps"][0] == 5
    stopping = lambda: [EarlyStopping("valid_loss", min_delta=1.0, patience=2)]  # noqa: E731
    state, *_ = both(tmp_path / "early", make=Plateau, callbacks=stopping, max_epochs=9, val_check_interval=3)
    assert state["steps"][1] < 9


def test_own_optimizer_step_and_accumulation_by_epoch(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    class Warm(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1.0, (self.trainer.global_step + 1) / 5)
            optimizer.step(closure=optimizer_closure)

    both(tmp_path, make=Warm, callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 3})])


def test_gpt2(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Words(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"n_layer": 3, "n_embd": 16, "n_head": 2, "vocab_size": 31, "n_positions": 12}
            off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off, use_cache=False))

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            loss = self.model(**batch).loss
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    g = torch.Generator().manual_seed(5)
    ids = [torch.randint(31, (9,), generator=g) for _ in range(10)]
    data = DataLoader([{"input_ids": each, "labels": each} for each in ids], batch_size=2)  # type: ignore[arg-type]
    sides = []
    for name, strategy in (("core", None), ("relay", RelayStrategy(HOST, device="cpu"))):
        torch.manual_seed(0)
        net, run = Words(), trainer(tmp_path / name, strategy, accumulate_grad_batches=2, max_epochs=2)
        run.fit(net, data)
        sides.append(state_of(net, run))
    assert_same(*sides)


class Finetuning(BaseFinetuning):
    """Adds two layers as a group to the optimizer in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers[:2])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[:2], optimizer, lr=1e-3)


def test_layers_that_a_callback_unfreezes(tmp_path: Path) -> None:
    class Trained(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([param for param in self.parameters() if param.requires_grad], lr=0.1, momentum=0.9)

    state, *_ = both(tmp_path, make=Trained, callbacks=lambda: [Finetuning()])
    assert len(state["optimizer"]["param_groups"]) == 2


class Collections(Net):
    """Metrics in containers, values from before the layers, and state of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        both = [
            torchmetrics.Accuracy(task="multiclass", num_classes=3),
            torchmetrics.Recall("multiclass", num_classes=3),
        ]
        self.collection = torchmetrics.MetricCollection(both, prefix="of/")
        self.by_name = nn.ModuleDict({"mean": torchmetrics.MeanMetric(), "all": torchmetrics.CatMetric()})
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        x, y = batch
        self.log("input", x.mean())
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.collection(logits, y)
        self.log_dict(self.collection, on_step=True, on_epoch=True)
        self.by_name["mean"](loss)
        self.by_name["all"].update(loss)
        self.log("mean", self.by_name["mean"], on_step=True, on_epoch=True)
        self.log("most", loss, reduce_fx="max", on_step=False, on_epoch=True, batch_size=1)
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        self.losses.append(loss.detach())
        return {"loss": loss, "logits": logits.detach()}

    def on_train_epoch_end(self) -> None:
        self.log("all", self.by_name["all"].compute().sum() + torch.stack(self.losses).sum())
        self.by_name["all"].reset()
        self.losses.clear()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_metrics_in_containers_and_state_of_the_module(tmp_path: Path, accumulate: int) -> None:
    both(tmp_path, make=Collections, max_epochs=2, accumulate_grad_batches=accumulate)


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3))


class Seeds(Callback):
    """Draws the relay's random numbers in core."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(RelayConfig(seed=7).micro_batch_seed(trainer.global_step, batch_idx % 2))


def test_random_numbers_are_those_of_the_micro_batches_also_after_a_resume(tmp_path: Path) -> None:
    options: dict[str, Any] = {"make": Dropping, "accumulate_grad_batches": 2, "max_epochs": 2}
    core, *_ = fit(tmp_path / "core", None, callbacks=[Seeds()], **options)
    seeded = RelayStrategy(RelayConfig(seed=7), device="cpu")
    keep = ModelCheckpoint(filename="{epoch}", save_top_k=-1)
    relay, *_ = fit(tmp_path / "relay", seeded, callbacks=[keep], **options)
    assert_same(relay, core)
    other = RelayStrategy(RelayConfig(seed=8), device="cpu")  # the checkpoint holds the seed
    first = Path(keep.best_model_path).with_name("epoch=0.ckpt")
    resumed, *_ = fit(tmp_path / "rest", other, ckpt_path=first, **options)
    assert_same(resumed["weights"], core["weights"])


@pytest.mark.parametrize("config", [RelayConfig(schedule="depth_first"), RelayConfig(update="whole"), HOST], ids=str)
def test_settings_and_a_small_device(tmp_path: Path, config: RelayConfig) -> None:
    core, *_ = fit(tmp_path / "core", None, max_epochs=1, gradient_clip_val=0.1, accumulate_grad_batches=2)
    strategy = RelayStrategy(config, device=EmulatedDevice(memory_bytes=2_000_000))
    relay, *_ = fit(tmp_path / "relay", strategy, max_epochs=1, gradient_clip_val=0.1, accumulate_grad_batches=2)
    assert_same(relay, core)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:GPU available but not used")  # in core it trains on the CPU
def test_on_a_gpu(tmp_path: Path) -> None:
    class Devices(Net):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
            assert torch.zeros(1, device=self.device).device == batch[0].device == self.head.weight.device
            return super().training_step(batch, batch_idx)

    core, *_ = fit(tmp_path / "core", None, max_epochs=1)
    relay, *_ = fit(tmp_path / "relay", RelayStrategy(HOST, device="cuda"), Devices, max_epochs=1)
    assert core["steps"] == relay["steps"]
    torch.testing.assert_close(relay["weights"], core["weights"], rtol=1e-3, atol=1e-4)


def test_validate_test_and_predict_after_a_fit(tmp_path: Path) -> None:
    sides = []
    for name, strategy in (("core", None), ("relay", RelayStrategy(HOST, device="cpu"))):
        _, net, run = fit(tmp_path / name, strategy, max_epochs=1)
        loader = DataLoader(rows(8, 4), 4)
        sides.append([run.validate(net, loader, verbose=False), run.test(net, loader, verbose=False)])
        sides[-1] += run.predict(net, loader)
    assert_same(*sides)


def test_a_second_fit_goes_on_and_a_failed_one_closes_the_relay(tmp_path: Path) -> None:
    class Failing(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                raise OverflowError("in a callback")

    strategy = RelayStrategy(HOST, device="cpu")
    with pytest.raises(OverflowError):
        fit(tmp_path, strategy, callbacks=[Failing()])
    with pytest.raises(RuntimeError, match="to the end of trainer.fit only"):
        strategy.relay  # noqa: B018
    _, net, run = fit(tmp_path, strategy, max_epochs=1)
    run.fit_loop.max_epochs = 2
    run.fit(net, *loaders())
    assert run.global_step == 14
    net(torch.randn(2, 8)).sum().backward()  # an ordinary module
    assert net.head.weight.grad is not None


# Refusals and their remedies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true", "16-mixed"])
def test_precision_of_the_trainer_is_refused(tmp_path: Path, precision: str) -> None:
    with warnings.catch_warnings(), pytest.raises(ValueError, match="leave precision= out of the Trainer") as raised:
        warnings.simplefilter("ignore")  # 16-mixed on a CPU
        trainer(tmp_path, RelayStrategy(device="cpu"), precision=precision)
    assert ("RelayConfig(precision='bf16')" in str(raised.value)) == (precision != "64-true")


def test_bfloat16_by_the_relay_trains(tmp_path: Path) -> None:
    state, *_ = fit(tmp_path, RelayStrategy(RelayConfig(precision="bf16", stash="host"), device="cpu"), max_epochs=1)
    assert state["steps"][0] == 7


class Hooked(Net):
    def on_after_backward(self) -> None:
        pass


class Two(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layers.parameters()), torch.optim.SGD(self.head.parameters())]


class Skipping(Net):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return None


class NoClosure(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step()


class Iterating(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


class Without(Net):
    def configure_optimizers(self) -> None:
        return None


REFUSED: list[tuple[Callable[[], Net], dict[str, Any], dict[str, Any], str]] = [
    (Hooked, {}, {}, "Hooked.on_after_backward is overridden"),
    (Two, {}, {}, r"returned \[SGD, SGD\]: a relay has one optimizer"),
    (Without, {}, {}, "a relay has one optimizer"),
    (Skipping, {}, {}, "training_step returned None"),
    (Iterating, {}, {}, r"training_step\(self, batch, batch_idx\)"),
    (NoClosure, {}, {}, "without a relay step would train nothing"),
    (Net, {"devices": 2}, {}, "devices=2.*Give devices=1"),
    (Net, {}, {"loss": nn.MSELoss()}, r"RelayStrategy\(loss=...\) with automatic"),
    (Net, {}, {"config": RelayConfig(micro_batches=2)}, r"give Trainer\(accumulate_grad_batches=2\)"),
]


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None")
@pytest.mark.parametrize(("make", "options", "strategy", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_refused(
    tmp_path: Path, make: Callable[[], Net], options: dict[str, Any], strategy: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        fit(tmp_path, RelayStrategy(device="cpu", **strategy), make, **options)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="has no option 'shelf'"):
        RelayStrategy(shelf=None)


# Manual optimization -------------------------------------------------------------------------------------------------


class Manual(Net):
    def __init__(self, by_relay: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.by_relay = False, by_relay

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if self.by_relay:
            loss = optimizer.step(closure=lambda: self.trainer.strategy.relay.step(batch)).loss
        else:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss)


def test_manual_optimization_counts_steps(tmp_path: Path) -> None:
    sides = []
    for name in ("core", "relay"):
        strategy = None if name == "core" else RelayStrategy(HOST, device="cpu", loss=nn.CrossEntropyLoss())
        torch.manual_seed(0)
        net, run = Manual(name == "relay"), trainer(tmp_path / name, strategy, max_steps=10, max_epochs=-1)
        run.fit(net, *loaders())
        sides.append(state_of(net, run))
    assert_same(*sides)
    assert sides[1]["steps"][0] == 10


def test_a_relay_in_the_module_counts_steps_without_the_strategy(tmp_path: Path) -> None:
    class Own(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization, self.relays = False, list[Relay]()

        def on_fit_start(self) -> None:
            optimizer = self.optimizers()  # a LightningOptimizer
            self.relays.append(Relay(self.layers, optimizer, device="cpu", objective=self.objective, config=HOST))

        def objective(self, layers: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            x = batch[0]
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            self.optimizers().step(closure=lambda: self.relays[0].step(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.layers.parameters())

        def on_fit_end(self) -> None:
            self.relays.pop().close()

    torch.manual_seed(0)
    net, run = Own(), trainer(tmp_path, None, max_steps=10, max_epochs=-1)
    before = net.layers[0][0].weight.detach().clone()
    run.fit(net, loaders()[0])
    assert run.global_step == 10 and not torch.equal(net.layers[0][0].weight, before)
    assert {int(state["step"]) for state in run.optimizers[0].state.values()} == {10}


def test_an_uncounted_relay_step_is_refused(tmp_path: Path) -> None:
    class Uncounted(Manual):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            self.trainer.strategy.relay.step(batch)

    with pytest.raises(RuntimeError, match="global_step does not count"):
        fit(tmp_path, RelayStrategy(device="cpu", loss=nn.CrossEntropyLoss()), lambda: Uncounted(by_relay=True))


def test_manual_backward_under_the_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="instead of forward, manual_backward and step"):
        fit(tmp_path, RelayStrategy(device="cpu", loss=nn.CrossEntropyLoss()), lambda: Manual(by_relay=False))


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_recipe_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    code = text.partition("### Lightning\n")[2].partition("```py\n")[2].partition("```")[0].replace('"auto"', '"cpu"')
    names = {"lightning": L, "RelayConfig": RelayConfig, "module": Net(), "loader": DataLoader(rows(16, 1), 4)}
    exec(compile(code, "README.md", "exec"), names)
    assert names["trainer"].global_step == 3
