"""Programs with Lightning: `RelayStrategy`, and a relay in a loop over Fabric's loaders."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from _clients import Side, case
from _clients_small import adamw, chain, gpt2, rows_of_tokens, vectors
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from l2l_core import RelayConfig

lightning_case = partial(case, "trainers", "lightning")
HOST = RelayConfig(stash="host")


def classifier(**options: Any) -> Any:
    """Return a module with a metric, whose training step logs."""
    import lightning
    import torchmetrics

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = chain()
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=5)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            logits = self.net(batch[0])
            loss = nn.functional.cross_entropy(logits, batch[1])
            self.accuracy(logits, batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("valid", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = adamw(self)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return type("Changed", (Classifier,), options)()


def loader(seed: int = 0, rows: int = 12) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*vectors(seed, rows=rows)), batch_size=2)


def fit(
    side: Side, module: Any, data: Any = None, ckpt_path: Any = None, relay_options: Any = None, **options: Any
) -> Any:
    """Fit by the trainer, with a relay strategy or without."""
    import lightning

    if side.is_relay:
        from l2l_core.integrations.lightning import RelayStrategy

        options["strategy"] = RelayStrategy(HOST, device="cpu", **relay_options or {})
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    saved = {} if "callbacks" in options else {"enable_checkpointing": False}
    accelerator = {} if side.is_relay else {"accelerator": "cpu"}
    trainer = lightning.Trainer(
        default_root_dir=side.folder, **quiet | saved | accelerator | {"max_epochs": 2} | options
    )
    side.watch(module)
    trainer.fit(module, data or loader(), loader(9, rows=4) if data is None else None, ckpt_path=ckpt_path)
    side.trained(trainer.optimizers[0], [])
    return trainer, dict(trainer.callback_metrics), trainer.global_step


@lightning_case("Trainer, automatic optimization, a metric and a scheduler by step")
def automatic(side: Side) -> Any:
    return fit(side, classifier())[1:]


@lightning_case("Trainer, accumulate_grad_batches=3 and gradient_clip_val=0.1")
def clipped(side: Side) -> Any:
    return fit(side, classifier(), accumulate_grad_batches=3, gradient_clip_val=0.1)[1:]


@lightning_case("Trainer, a GPT-2 of transformers in the module")
def words(side: Side) -> Any:
    import lightning

    class Words(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return adamw(self)

    return fit(side, Words(), DataLoader(rows_of_tokens(12), batch_size=2), accumulate_grad_batches=2)[1:]


@lightning_case("Trainer, resumed from a file of ModelCheckpoint")
def resumed(side: Side) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    keep = ModelCheckpoint(dirpath=side.folder, filename="{epoch}", save_top_k=-1)
    fit(side, classifier(), callbacks=[keep], max_epochs=1)
    path = side.folder / "epoch=0.ckpt"
    return fit(side, classifier(), ckpt_path=path, callbacks=[ModelCheckpoint(dirpath=side.folder / "again")])[1:]


@lightning_case("Trainer, StochasticWeightAveraging")
def averaged(side: Side) -> Any:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    return fit(side, classifier(), max_epochs=4, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=2)])[1:]


@lightning_case("Trainer, EMAWeightAveraging")
def exponentially_averaged(side: Side) -> Any:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return fit(side, classifier(), callbacks=[EMAWeightAveraging(decay=0.9)])[1:]


@lightning_case("Trainer, on_before_optimizer_step reads gradients")
def norms(side: Side) -> Any:
    found = []

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        found.append(sum(p.grad.norm() for p in self.parameters()).item())

    return fit(side, classifier(on_before_optimizer_step=on_before_optimizer_step))[1:], found


@lightning_case("Trainer, on_after_backward reads gradients", "on_before_optimizer_step")
def after_backward(side: Side) -> Any:
    name = "on_before_optimizer_step" if side.is_remedied else "on_after_backward"
    found = []

    def read(self: Any, *args: Any) -> None:
        found.append(sum(p.grad.norm() for p in self.parameters()).item())

    return fit(side, classifier(**{name: read}))[1:], found


@lightning_case("Trainer, precision='bf16-mixed'", "leave precision= out")
def mixed(side: Side) -> Any:
    return fit(side, classifier(), **({} if side.is_remedied or not side.is_relay else {"precision": "bf16-mixed"}))[1:]


@lightning_case("Trainer, manual optimization with two optimizers", "Return one torch Optimizer")
def manual(side: Side) -> Any:
    def configure_optimizers(self: Any) -> Any:
        first, second = [*self.net[:2].parameters()], [*self.net[2:].parameters()]
        if side.is_remedied:
            return torch.optim.SGD([{"params": first}, {"params": second}], lr=0.1)
        return [torch.optim.SGD(first, lr=0.1), torch.optim.SGD(second, lr=0.1)]

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        each = optimizers if isinstance(optimizers, list) else [optimizers]
        if side.is_relay:
            each[0].step(closure=lambda: self.trainer.strategy.relay.step(batch))
            return
        nn.functional.cross_entropy(self.net(batch[0]), batch[1]).backward()
        for optimizer in each:
            optimizer.step()
            optimizer.zero_grad()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    changed = {"configure_optimizers": configure_optimizers, "training_step": training_step, "forward": forward}
    module = classifier(**changed)
    module.automatic_optimization = False
    return fit(side, module, relay_options={"loss": nn.CrossEntropyLoss()})[1:]


@lightning_case("loaders and optimizer from Fabric.setup, in a loop of the user")
def fabric(side: Side) -> None:
    import lightning

    setup, model = lightning.Fabric(accelerator="cpu", devices=1), chain()
    batches, optimizer = setup.setup_dataloaders(loader()), setup.setup_optimizers(adamw(model))
    with side.training(model, optimizer, loss=nn.CrossEntropyLoss()) as step:
        for batch in batches:
            step(batch)


@lightning_case("model from Fabric.setup given to a relay", "module")
def fabric_model(side: Side) -> None:
    import lightning

    model, optimizer = lightning.Fabric(accelerator="cpu", devices=1).setup(
        chain(), torch.optim.SGD(chain().parameters())
    )
    model = model.module if side.is_remedied else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with side.training(model, optimizer, loss=nn.CrossEntropyLoss()) as step:
        step(vectors(0))
