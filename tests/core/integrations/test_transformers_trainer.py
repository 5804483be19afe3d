"""`RelayTrainer` beside transformers' own trainer in core: weights, optimizer, schedule, logs and predictions to the bit."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="accelerate, which transformers' Trainer needs, is not installed")

from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from l2l_core import DeviceOutOfMemory, EmulatedDevice, NonFiniteError, Relay, RelayConfig
from l2l_core.integrations import RelayTrainer
from l2l_core.integrations.trainer_arguments import refuse_arguments

ROWS, LENGTH, WORDS = 14, 8, 64
TIMES = ("runtime", "per_second", "preparation_time")  # in names of metrics that are times


class Rows(torch.utils.data.Dataset):
    """Rows with unequal numbers of labels."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(i))
        labels = tokens.clone()
        labels[: 1 + i % 5] = -100
        return {"input_ids": tokens, "labels": labels}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def make_model(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=WORDS, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "num_train_epochs": 3,
        "gradient_accumulation_steps": 3, "learning_rate": 1e-3, "weight_decay": 0.1, "logging_steps": 2, "seed": 0,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_nan_inf_filter": False,
    }  # fmt: skip
    return TrainingArguments(**settings | changes)


def make(kind: type[Trainer], folder: Path, model: nn.Module | None = None, **changes: Any) -> Trainer:
    """A trainer; a relay keeps its stash on the host."""
    names = (
        "callbacks", "compute_metrics", "compute_loss_func", "model_init", "optimizers", "relay_config", "relay_device",
        "train_dataset",
    )  # fmt: skip
    options = {name: changes.pop(name) for name in names if name in changes}
    if issubclass(kind, RelayTrainer):
        options.setdefault("relay_config", RelayConfig(stash="host"))
    if "model_init" not in options:
        options["model"] = make_model() if model is None else model
    args = arguments(folder / kind.__name__, **changes)
    return kind(args=args, eval_dataset=Rows(), **{"train_dataset": Rows()} | options)


def logs(trainer: Trainer) -> list[dict[str, float]]:
    history = trainer.state.log_history
    return [{name: value for name, value in each.items() if not any(t in name for t in TIMES)} for each in history]


def assert_equal_tensors(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_equal(relayed: Trainer, plain: Trainer) -> None:
    assert relayed.state.global_step == plain.state.global_step
    assert_equal_tensors(relayed.model.state_dict(), plain.model.state_dict())
    assert_equal_tensors(relayed.optimizer.state_dict(), plain.optimizer.state_dict())
    assert relayed.lr_scheduler.state_dict() == plain.lr_scheduler.state_dict()
    for got, expected in zip(logs(relayed), logs(plain), strict=True):
        if relayed.args.max_grad_norm == 0 and "grad_norm" in expected:  # eager: of the norms of blocks
            assert got.pop("grad_norm") == pytest.approx(expected.pop("grad_norm"), rel=1e-6)
        assert got == expected


def beside(folder: Path, resume: str | None = None, **changes: Any) -> tuple[Trainer, Trainer]:
    """Train by relay and in core, and compare; return both trainers."""
    both = []
    for kind in (RelayTrainer, Trainer):
        trainer = make(kind, folder, **changes)
        trainer.train(resume_from_checkpoint=resume and str(folder / kind.__name__ / resume))
        both.append(trainer)
    assert_equal(*both)
    return both[0], both[1]


SETTINGS = {
    "as it comes": {},  # clips to 1.0, decays linearly; 7 batches per epoch, so that the last accumulation has one
    "one batch per step": {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4, "max_grad_norm": 0.5},
    "eager, cosine": {"max_grad_norm": 0.0, "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 1},
    "SGD": {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.1, "lr_scheduler_type": "constant"},
}


@pytest.mark.all_cases
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_three_epochs_with_a_resume_in_the_middle_equal_the_plain_trainer(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    settings = settings | {"save_strategy": "steps", "save_steps": 4}
    whole, _ = beside(tmp_path, **settings)
    again, _ = beside(tmp_path, resume="checkpoint-4", **settings)
    assert_equal_tensors(again.model.state_dict(), whole.model.state_dict())
    assert again.relay.steps == whole.state.global_step
    decays = [group["weight_decay"] for group in again.optimizer.param_groups]
    assert decays == [0.1, 0.0] and isinstance(again.relay.optimizer, torch.optim.Optimizer)
    for each in (whole, again):
        each.relay.close()


def test_checkpoints_are_those_of_the_plain_trainer_and_continue_in_it(tmp_path: Path) -> None:
    relayed, plain = beside(tmp_path, save_strategy="epoch")
    folders = [tmp_path / kind.__name__ / "checkpoint-3" for kind in (RelayTrainer, Trainer)]
    for name in ("model.safetensors", "scheduler.pt", "rng_state.pth", "config.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    assert_equal_tensors(*(torch.load(folder / "optimizer.pt") for folder in folders))
    assert json.loads((folders[0] / "relay_state.json").read_text()) == {"steps": 3, "seed": 0}
    crossed = [make(RelayTrainer, tmp_path / "crossed"), make(Trainer, tmp_path / "crossed")]
    for trainer, folder in zip(crossed, reversed(folders), strict=True):
        trainer.train(resume_from_checkpoint=str(folder))
        assert_equal_tensors(trainer.model.state_dict(), plain.model.state_dict())
    assert crossed[0].relay.steps == 9
    for each in (relayed, crossed[0]):
        each.relay.close()


def accuracy(predictions: Any) -> dict[str, float]:
    return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}


def test_evaluate_and_predict_equal_the_plain_trainer(tmp_path: Path) -> None:
    both = [make(kind, tmp_path, compute_metrics=accuracy) for kind in (RelayTrainer, Trainer)]
    for trainers in (both, [trainer for trainer in both if trainer.train()]):  # before training and after
        metrics = [{k: v for k, v in each.evaluate().items() if not any(t in k for t in TIMES)} for each in trainers]
        assert metrics[0] == metrics[1] and {"eval_loss", "eval_accuracy"} <= metrics[0].keys()
        outputs = [trainer.predict(Rows()) for trainer in trainers]
        assert (outputs[0].predictions == outputs[1].predictions).all()
        assert (outputs[0].label_ids == outputs[1].label_ids).all()
    assert_equal(*both)
    both[0].relay.close()


class Calls(TrainerCallback):
    """Names of the events, and learning rate and training mode at each."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return partial(self._record, name)

    def _record(self, name: str, args: Any, state: Any, control: Any, **given: Any) -> None:
        rates = [group["lr"] for group in given["optimizer"].param_groups] if given.get("optimizer") else None
        self.calls.append((name, state.global_step, rates, given["model"].training, sorted(given)))


def test_callbacks_early_stopping_and_the_best_model(tmp_path: Path) -> None:
    calls = [Calls(), Calls()]
    settings: dict[str, Any] = {
        "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "learning_rate": 0.05,
        "num_train_epochs": 6, "metric_for_best_model": "eval_loss", "save_total_limit": 2,
    }  # fmt: skip
    both = []
    for kind, callback in zip((RelayTrainer, Trainer), calls, strict=True):
        both.append(make(kind, tmp_path, callbacks=[EarlyStoppingCallback(1), callback], **settings))
        both[-1].train()
    assert_equal(*both)
    assert calls[0].calls == calls[1].calls and len(calls[0].calls) > 50
    assert (
        both[0].state.global_step < both[0].state.max_steps and both[0].state.best_metric == both[1].state.best_metric
    )
    losses = [each.evaluate()["eval_loss"] for each in both]
    assert losses[0] == losses[1] == pytest.approx(both[0].state.best_metric)
    both[0].relay.close()


def own_optimizer(kind: type[Trainer]) -> type[Trainer]:
    class Own(kind):  # type: ignore[misc, valid-type]
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            return self.optimizer

    return Own


def own_optimizer_beside(kind: type[Trainer]) -> type[Trainer]:
    """The method is that of a class that knows of no relay."""
    return type("Both", (own_optimizer(Trainer), kind), {}) if kind is RelayTrainer else own_optimizer(kind)


@pytest.mark.parametrize("of", [own_optimizer, own_optimizer_beside])
def test_a_subclass_may_make_the_optimizer(tmp_path: Path, of: Any) -> None:
    both = []
    for kind in (RelayTrainer, Trainer):
        both.append(make(of(kind), tmp_path / kind.__name__, num_train_epochs=1, max_grad_norm=0.0))
        both[-1].train()
    assert_equal(*both)
    assert isinstance(both[0].relay.optimizer, torch.optim.SGD)
    both[0].relay.close()


def test_an_optimizer_put_into_the_trainer_is_refused(tmp_path: Path) -> None:
    class PutsItIn(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)

    trainer = make(RelayTrainer, tmp_path, callbacks=[PutsItIn()])
    with pytest.raises(RuntimeError, match=r"SGD that was put into trainer\.optimizer after create_optimizer"):
        trainer.train()
    trainer.relay.close()


def test_a_schedule_free_optimizer_changes_its_mode_as_in_the_plain_trainer(tmp_path: Path) -> None:
    pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    settings: dict[str, Any] = {
        "optim": "schedule_free_adamw",
        "lr_scheduler_type": "constant",
        "eval_strategy": "epoch",
    }
    relayed, _ = beside(tmp_path, **settings)
    relayed.relay.close()


class Scales(TrainerCallback):
    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        self.scale(model.parameters())

    def scale(self, params: Any) -> None:
        for param in params:
            if param.grad is not None:
                param.grad.mul_(0.1)


def test_a_callback_on_gradients_warns_and_a_hook_trains_as_it_would(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1, "num_train_epochs": 1}
    warned = make(RelayTrainer, tmp_path / "warned", callbacks=[Scales()], **settings)
    match = r"Scales\.on_pre_optimizer_step runs after the relay's update.*reading a gradient raises.*step_pre_hook"
    with pytest.warns(UserWarning, match=match), pytest.raises(RuntimeError, match="this gradient is gone"):
        warned.train()
    warned.relay.close()
    plain = make(Trainer, tmp_path, callbacks=[Scales()], **settings)
    plain.train()
    relayed = make(RelayTrainer, tmp_path, relay_config=RelayConfig(update="deferred"), **settings)
    params = [*relayed.model.parameters()]
    relayed.relay.optimizer.register_step_pre_hook(lambda *_: Scales().scale(params))
    relayed.train()
    assert_equal(relayed, plain)
    relayed.relay.close()


def mean_over_all(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / num_items_in_batch


@pytest.mark.all_cases
@pytest.mark.parametrize("settings", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": mean_over_all}])
def test_losses_of_the_trainer(tmp_path: Path, settings: dict[str, Any]) -> None:
    relayed, _ = beside(tmp_path, num_train_epochs=1, **settings)
    relayed.relay.close()


class MeanOfMicroBatches(GPT2LMHeadModel):
    """Its loss is the mean over its own batch, which the trainer divides by the length of the accumulation."""

    accepts_loss_kwargs = False


def test_a_loss_that_the_trainer_divides(tmp_path: Path) -> None:
    relayed, _ = beside(tmp_path, model_init=lambda: MeanOfMicroBatches(make_model().config), num_train_epochs=2)
    relayed.relay.close()


class SeededTrainer(Trainer):
    """The plain trainer that draws the random numbers of a relay's micro-batches."""

    config = RelayConfig(seed=0)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.drawn = getattr(self, "drawn", 0)
        with torch.random.fork_rng():
            torch.manual_seed(self.config.micro_batch_seed(self.state.global_step, self.drawn))
            loss = super().training_step(*args, **kwargs)
        self.drawn = 0 if self.accelerator.sync_gradients else self.drawn + 1
        return loss


def test_dropout_draws_the_numbers_of_the_settings(tmp_path: Path) -> None:
    both = [make(kind, tmp_path, model=make_model(0.2)) for kind in (RelayTrainer, SeededTrainer)]
    for trainer in both:
        trainer.train()
    assert_equal(*both)
    both[0].relay.close()


def test_bf16_is_the_precision_of_the_relay(tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": 1, "num_train_epochs": 1, "max_grad_norm": 0.0, "bf16": True}
    relayed, plain = (make(kind, tmp_path, **changes) for kind in (RelayTrainer, Trainer))
    model = make_model()
    optimizer = torch.optim.AdamW(Trainer.create_optimizer(make(Trainer, tmp_path, model=model)).param_groups, lr=1e-3)
    with Relay(model, optimizer, "cpu", config=RelayConfig(precision="bf16", stash="host")) as by_hand:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 7)
        loader = relayed.get_train_dataloader()
        for trainer in (relayed, plain):
            trainer.train()
        torch.manual_seed(0)
        losses = []
        for batch in loader:
            batch["num_items_in_batch"] = (batch["labels"][:, 1:] != -100).sum()
            losses.append(by_hand.step(batch).loss)
            schedule.step()
    assert relayed.relay.config.precision == "bf16"
    assert_equal_tensors(relayed.model.state_dict(), model.state_dict())
    for name, weight in plain.model.state_dict().items():
        torch.testing.assert_close(relayed.model.state_dict()[name], weight, rtol=0, atol=0.02)
    assert all(weight.dtype == torch.float32 for weight in relayed.model.state_dict().values())
    both = [trainer.evaluate()["eval_loss"] for trainer in (relayed, plain)]
    assert both[0] == pytest.approx(both[1], rel=0.01)
    relayed.relay.close()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    both = []
    for kind in (RelayTrainer, Trainer):
        model = make_model()
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        both.append(make(kind, tmp_path, model=peft.get_peft_model(model, lora)))
        both[-1].train()
    assert_equal(*both)
    both[0].relay.close()


def test_the_device_needs_less_than_the_weights(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=32, n_head=2, vocab_size=WORDS, n_positions=16))
    nbytes = sum(4 * weight.numel() for weight in model.parameters())
    options = {"relay_config": RelayConfig(stash="host", ahead=0), "max_steps": 2}
    device = EmulatedDevice(memory_bytes=nbytes // 2)
    trainer = make(RelayTrainer, tmp_path, model=model, relay_device=device, **options)
    trainer.train()
    trainer.predict(Rows())
    assert 0 < device.ledger.peak <= nbytes // 2
    trainer.relay.close()
    trainer = make(
        RelayTrainer, tmp_path, model=model, relay_device=EmulatedDevice(memory_bytes=nbytes // 4), **options
    )
    with pytest.raises(DeviceOutOfMemory) as full:
        trainer.train()
    assert any("gradient_accumulation_steps" in note for note in full.value.__notes__)
    trainer.relay.close()


def test_a_sequence_to_sequence_model_generates(tmp_path: Path) -> None:
    both = []
    for kind in (type("RelaySeq2SeqTrainer", (RelayTrainer, Seq2SeqTrainer), {}), Seq2SeqTrainer):
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=WORDS, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0,
                decoder_start_token_id=0, pad_token_id=0,
            )
        )  # fmt: skip
        model.decoder.config.use_cache = False  # the plain trainer leaves it on, which changes strides and so rounding
        args = Seq2SeqTrainingArguments(
            output_dir=str(tmp_path / kind.__name__), per_device_train_batch_size=2, gradient_accumulation_steps=3,
            num_train_epochs=1, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
            predict_with_generate=True, generation_max_length=5,
        )  # fmt: skip
        both.append(kind(model=model, args=args, train_dataset=Rows(), eval_dataset=Rows()))
        both[-1].train()
    assert_equal(*both)
    texts = [trainer.predict(Rows()).predictions for trainer in both]
    assert (texts[0] == texts[1]).all()
    both[0].relay.close()


# Nothing is trained in silence ---------------------------------------------------------------------------------------


def test_a_plain_trainer_over_a_living_relay_trains_as_ever(tmp_path: Path) -> None:
    model = make_model()
    with Relay(model, partial(torch.optim.AdamW, lr=1e-3), "cpu") as relay:
        over = make(Trainer, tmp_path, model=model, optimizers=(relay.optimizer, None))
        over.train()
    model = make_model()
    plain = make(Trainer, tmp_path, model=model, optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-3), None))
    plain.train()
    assert_equal(over, plain)


class OwnStep(RelayTrainer):
    """Runs backward by itself, as a subclass of the plain trainer may."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_subclass_that_steps_by_itself_is_refused(tmp_path: Path) -> None:
    trainer = make(OwnStep, tmp_path, gradient_accumulation_steps=1)
    with pytest.raises(RuntimeError, match=r"would train nothing: call super\(\)\.training_step"):
        trainer.train()
    trainer.relay.close()


class Generates(Trainer):
    """Chooses its inputs by the number of batches that it has trained, as GRPO's does among its generations."""

    trained = 0

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        return {**inputs, "labels": inputs["labels"].roll(self.trained % 2, 0)}

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.trained += 1
        return loss


def test_a_trainer_that_chooses_inputs_by_its_own_count_is_refused_and_the_remedy_works(tmp_path: Path) -> None:
    relayed = type("Relayed", (RelayTrainer, Generates), {})
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2: Generates prepares inputs.*_steps=1"):
        make(relayed, tmp_path, gradient_accumulation_steps=2)
    both = [make(kind, tmp_path, gradient_accumulation_steps=1) for kind in (relayed, Generates)]
    for each in both:
        each.train()
    assert_equal(*both)
    both[0].relay.close()


class Silent(Trainer):
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return self.compute_loss(model, inputs)


class Twice(Trainer):
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        for _ in range(2):
            self.accelerator.backward(self.compute_loss(model, inputs))
        return torch.zeros(())


@pytest.mark.all_cases
@pytest.mark.parametrize(("kind", "match"), [(Silent, "calls no accelerator.backward"), (Twice, "more than once")])
def test_a_trainer_whose_step_has_no_single_loss_is_refused(tmp_path: Path, kind: type[Trainer], match: str) -> None:
    trainer = make(type("Relayed", (RelayTrainer, kind), {}), tmp_path)
    with pytest.raises(RuntimeError, match=match):
        trainer.train()
    trainer.relay.close()


def test_a_gradient_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    trainer = make(RelayTrainer, tmp_path, learning_rate=1e30, max_grad_norm=0.0)
    with pytest.raises(NonFiniteError):
        trainer.train()
    trainer.relay.close()


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "activation_checkpointing=True": ({"activation_checkpointing": True}, {"activation_checkpointing": False}),
    "torch_compile=True": ({"torch_compile": True}, {"torch_compile": False}),
    "bf16_full_eval=True": ({"bf16_full_eval": True}, {"bf16_full_eval": False}),
    "fp16_full_eval=True": ({"fp16_full_eval": True}, {"fp16_full_eval": False, "bf16": True}),
    "micro_batches=4": ({"relay_config": RelayConfig(micro_batches=4)}, {"gradient_accumulation_steps": 4}),
    "max_grad_norm=2.0": (
        {"relay_config": RelayConfig(max_grad_norm=2.0, update="deferred")},
        {"max_grad_norm": 2.0},
    ),
    "precision='bf16'": ({"relay_config": RelayConfig(precision="bf16")}, {"bf16": True}),
}


def test_optimizers_that_update_in_backward_and_loss_scaling_are_refused(tmp_path: Path) -> None:
    trainer = make(RelayTrainer, tmp_path)
    for changes, match in (
        ({"optim": "lomo"}, "optim='lomo': it updates weights during backward"),
        ({"optim": "galore_adamw_layerwise"}, "Use optim='adamw_torch_fused'"),
        ({"fp16": True}, "fp16=True: a relay has no loss scaling. Use bf16=True"),
    ):
        trainer.args = arguments(tmp_path, **changes)
        with pytest.raises(ValueError, match=match):
            refuse_arguments(trainer)


class Coupled(torch.optim.SGD):
    """Clips by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.01)
        super().step(closure)


def test_an_optimizer_that_couples_layers_is_refused_and_steps_whole(tmp_path: Path) -> None:
    both = []
    settings: dict[str, Any] = {"max_grad_norm": 0.0, "num_train_epochs": 1}
    for kind, update in ((RelayTrainer, "eager"), (RelayTrainer, "whole"), (Trainer, "")):
        model = make_model()
        options: dict[str, Any] = {"relay_config": RelayConfig(update=update)} if update else {}
        optimizer = Coupled(model.parameters(), lr=0.1)
        trainer = make(kind, tmp_path, model=model, optimizers=(optimizer, None), **settings, **options)
        if update == "eager":
            with pytest.raises(ValueError, match=r"update=.whole.") as refused:
                trainer.train()
            assert "in a trainer with optim=" in refused.value.__notes__[0]
            continue
        trainer.train()
        both.append(trainer)
    assert_equal(*both)
    both[0].relay.close()


@pytest.mark.all_cases
@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_a_relay_cannot_honour_are_refused(tmp_path: Path, name: str) -> None:
    asked, remedy = REFUSED[name]
    with pytest.raises(ValueError, match=name.replace("(", r"\(")):
        make(RelayTrainer, tmp_path, **asked)
    trainer = make(RelayTrainer, tmp_path, max_steps=1, **remedy)
    trainer.train()
    assert trainer.relay.steps == 1
    trainer.relay.close()


# A relay's life ------------------------------------------------------------------------------------------------------


def test_training_again_continues_with_the_relay_or_with_a_new_one(tmp_path: Path) -> None:
    relayed, plain = beside(tmp_path, num_train_epochs=1)
    for closes in (False, True):
        first = relayed.relay
        if closes:
            first.close()
        for trainer in (relayed, plain):
            trainer.train()
        assert (relayed.relay is first) is not closes
        assert_equal(relayed, plain)
    assert relayed.relay.steps == 9
    relayed.relay.close()


def test_arguments_that_change_between_trainings(tmp_path: Path) -> None:
    relayed, plain = beside(tmp_path, num_train_epochs=1)
    for trainer in (relayed, plain):
        trainer.args.max_grad_norm = 0.01
        trainer.train()
    assert_equal(relayed, plain)
    relayed.args.fp16 = True
    with pytest.raises(ValueError, match="fp16=True"):
        relayed.train()
    relayed.relay.close()


def test_a_model_made_for_each_training(tmp_path: Path) -> None:
    relayed, plain = beside(tmp_path, num_train_epochs=1, model_init=lambda: make_model())
    for trainer in (relayed, plain):
        trainer.train()
    assert_equal(relayed, plain)
    assert relayed.relay.steps == 3
    relayed.relay.close()


def test_the_users_optimizer_and_scheduler(tmp_path: Path) -> None:
    def optimizers(model: nn.Module) -> tuple[Any, Any]:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    both = []
    for kind in (RelayTrainer, Trainer):
        model = make_model()
        both.append(make(kind, tmp_path, model=model, optimizers=optimizers(model)))
        both[-1].train()
    assert_equal(*both)
    both[0].relay.close()


@pytest.mark.parametrize("evaluates", [False, True])
def test_weights_that_are_frozen_before_training(tmp_path: Path, evaluates: bool) -> None:
    both = []
    for kind in (RelayTrainer, Trainer):
        model = make_model()
        both.append(make(kind, tmp_path, model=model, num_train_epochs=1))
        if evaluates:
            both[-1].evaluate()
        model.transformer.h[0].requires_grad_(False)
        model.transformer.wpe.requires_grad_(False)
        both[-1].train()
    assert_equal(*both)
    both[0].relay.close()


class Stream(torch.utils.data.IterableDataset):
    """Without a length."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (Rows()[i] for i in range(self.rows))


def test_a_dataset_without_a_length(tmp_path: Path) -> None:
    relayed, _ = beside(tmp_path, train_dataset=Stream(12), max_steps=5)
    relayed.relay.close()
    # An epoch of 7 batches ends within the third accumulation: the plain trainer adds the rest to the next step.
    for model_init in (lambda: make_model(), lambda: MeanOfMicroBatches(make_model().config)):
        relayed, plain = beside(tmp_path, train_dataset=Stream(14), max_steps=7, model_init=model_init)
        for trainer in (relayed, plain):
            trainer.train()
        assert_equal(relayed, plain)
        relayed.relay.close()


def test_a_trainer_refuses_to_compare_steps(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"verify=1\): steps of a trainer are not compared.*Relay\(model, ...\).verify\(batch\)"
    ):
        make(RelayTrainer, tmp_path, relay_config=RelayConfig(verify=1))
