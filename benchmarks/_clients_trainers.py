"""Programs with transformers' trainers and with accelerate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _clients import Side, case, seeded
from _clients_small import WORDS, adamw, bert, chain, gpt2, tokens, vectors
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from l2l_core import Relay, RelayConfig

trainer_case = partial(case, "trainers")
TIMES = ("runtime", "per_second", "preparation_time", "step_time", "flos")  # in names of what is logged


def settings(side: Side, **more: Any) -> dict[str, Any]:
    """Return arguments of a trainer: batches of two rows, as many of them per step as the relay has micro-batches."""
    return {
        "output_dir": str(side.folder), "per_device_train_batch_size": 2, "num_train_epochs": 2,
        "gradient_accumulation_steps": side.config.micro_batches,
        "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "bf16": False,
    } | more  # fmt: skip


def rows(count: int = 12) -> list[dict[str, Any]]:
    """Return rows with unequal numbers of labels."""
    made = []
    for n in range(count):
        ids = tokens(n, rows=1)["input_ids"][0]
        labels = ids.clone()
        labels[: n % 5] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def train(side: Side, kind: type, model: nn.Module, **options: Any) -> Any:
    """Train by a trainer, or by the same one with a relay; return everything that it logs."""
    from l2l_core.integrations import RelayTrainer

    resume = options.pop("resume_from_checkpoint", None)
    side.watch(model)
    if side.is_relay:
        kind = type(f"Relay{kind.__name__}", (RelayTrainer, kind), {})
        options["relay_config"] = replace(side.config, micro_batches=1, seed=None)  # which its arguments decide
    else:
        kind = type(f"Seeded{kind.__name__}", (Seeded, kind), {})
    trainer = kind(model=model, **options)
    side.watch(trainer.model, instead_of=model)  # TRL adds adapters
    trainer.train(resume_from_checkpoint=resume)
    return finished(side, trainer)


class Seeded:
    """A plain trainer that draws the random numbers of a relay's micro-batches."""

    drawn = 0

    def training_step(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        seed = RelayConfig(seed=self.args.seed).micro_batch_seed(self.state.global_step, self.drawn)
        with seeded(seed):
            loss = super().training_step(*args, **kwargs)
        self.drawn = 0 if self.accelerator.sync_gradients else self.drawn + 1
        return loss


def finished(side: Side, trainer: Any) -> Any:
    """Keep a trainer's results."""
    logs = [{k: v for k, v in each.items() if not any(t in k for t in TIMES)} for each in trainer.state.log_history]
    if side.is_relay:
        trainer.relay.close()
    side.trained(trainer.optimizer, [each["loss"] for each in logs if "loss" in each])
    return logs


# -- transformers ----------------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, dict[str, Any]] = {
    "as it is, with clipping and linear decay": {},
    "cosine_with_min_lr after a warm-up": {
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}, "warmup_steps": 2,
    },
    "optim='adafactor'": {"optim": "adafactor"},
    "label_smoothing_factor=0.1": {"label_smoothing_factor": 0.1},
    "neftune_noise_alpha=5": {"neftune_noise_alpha": 5.0, "gradient_accumulation_steps": 1},
    "evaluation in every epoch, and load_best_model_at_end": {
        "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 3,
    },
    "optim='adamw_bnb_8bit'": {"optim": "adamw_bnb_8bit"},
    "optim='schedule_free_adamw'": {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"},
    "train_sampling_strategy='group_by_length'": {"train_sampling_strategy": "group_by_length"},
}  # fmt: skip


def trains_with_arguments(side: Side, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**settings(side, **more))
    return train(side, Trainer, gpt2(), args=args, train_dataset=rows(), eval_dataset=rows(4))


for what, more in ARGUMENTS.items():
    trainer_case("transformers", f"Trainer, {what}")(partial(trains_with_arguments, **more))


def trains_with_refused(side: Side, **more: Any) -> Any:
    """Train with arguments that are refused, and without them."""
    return trains_with_arguments(side, **({} if side.is_remedied or not side.is_relay else more))


REFUSED = {
    "fp16": ({"fp16": True}, "fp16=False"),
    "torch_compile": ({"torch_compile": True}, "torch_compile=False"),
    "activation_checkpointing": ({"activation_checkpointing": True}, "activation_checkpointing=False"),
}
for name, (more, remedy) in REFUSED.items():
    trainer_case("transformers", f"Trainer, {name}=True", remedy)(partial(trains_with_refused, **more))


@trainer_case("transformers", "Trainer, resumed from a checkpoint")
def resumed(side: Side) -> Any:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**settings(side, save_strategy="steps", save_steps=2))
    train(side, Trainer, gpt2(), args=args, train_dataset=rows())
    side.losses.clear()
    again = {"resume_from_checkpoint": str(side.folder / "checkpoint-2")}
    return train(side, Trainer, gpt2(), args=args, train_dataset=rows(), **again)


@trainer_case("transformers", "Trainer with the user's optimizer and scheduler, early stopping and metrics")
def own_optimizer(side: Side) -> Any:
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, get_cosine_schedule_with_warmup

    model = bert()
    data = [{"input_ids": tokens(n, rows=1)["input_ids"][0], "labels": n % 2} for n in range(12)]
    optimizer = adamw(model, lr=0.1)
    more = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 6}
    return train(
        side, Trainer, model, args=TrainingArguments(**settings(side, **more)), train_dataset=data, eval_dataset=data,
        optimizers=(optimizer, get_cosine_schedule_with_warmup(optimizer, 2, 18)), callbacks=[EarlyStoppingCallback(1)],
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )  # fmt: skip


@trainer_case("transformers", "plain Trainer given relay.model and relay.optimizer")
def plain_trainer(side: Side) -> Any:
    from transformers import Trainer, TrainingArguments

    model, options = gpt2(), {"args": TrainingArguments(**settings(side)), "train_dataset": rows()}
    side.watch(model)
    optimizer = adamw(model)
    if not side.is_relay:
        trainer = Trainer(model=model, optimizers=(optimizer, None), **options)
        trainer.train()
    else:
        with Relay(model, optimizer, "cpu", config=side.config) as relay:
            trainer = Trainer(model=relay.model, optimizers=(relay.optimizer, None), **options)
            trainer.train()
    side.trained(optimizer, [each["loss"] for each in trainer.state.log_history if "loss" in each])


@trainer_case("transformers", "Seq2SeqTrainer with a T5")
def sequence_to_sequence(side: Side) -> Any:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    torch.manual_seed(0)
    config = T5Config(vocab_size=WORDS, decoder_start_token_id=0, pad_token_id=0, **sizes)
    model = T5ForConditionalGeneration(config)
    model.decoder.config.use_cache = False  # as in a relay: a cache gives other strides, by which kernels round
    args = Seq2SeqTrainingArguments(**settings(side))
    return train(side, Seq2SeqTrainer, model, args=args, train_dataset=rows())


# -- accelerate ------------------------------------------------------------------------------------------------------


@trainer_case("accelerate", "loader, optimizer and scheduler from Accelerator.prepare")
def prepared(side: Side) -> Any:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), chain()
    loader = DataLoader(TensorDataset(*vectors(0, rows=12)), batch_size=4, shuffle=True)
    optimizer, loader = accelerator.prepare(adamw(model), loader)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    with side.training(model, optimizer, loss=nn.CrossEntropyLoss()) as step:
        for _ in range(2):
            for batch in loader:
                step(batch)
                schedule.step()
    return schedule.get_last_lr()


@trainer_case(
    "accelerate", "model prepared with mixed_precision='bf16', then given to a relay", "keep_fp32_wrapper=False"
)
def autocast_model(side: Side) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(chain())
    if side.is_remedied:
        model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    with side.training(model, adamw(model), loss=nn.CrossEntropyLoss()) as step:
        for n in range(3):
            step(vectors(n))


def trains_with_states(side: Side, **options: Any) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(chain())
    optimizer = accelerator.prepare(adamw(model))
    with side.training(model, optimizer, loss=nn.CrossEntropyLoss()) as step:
        step(vectors(0))
        accelerator.save_state(str(side.folder / "state"), **options)
        step(vectors(1))
        accelerator.load_state(str(side.folder / "state"))
        step(vectors(2))


trainer_case("accelerate", "save_state and load_state between steps")(trains_with_states)
trainer_case("accelerate", "save_state(safe_serialization=False) and load_state between steps")(
    partial(trains_with_states, safe_serialization=False)
)
