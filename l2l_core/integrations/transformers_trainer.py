"""`RelayTrainer`: transformers' `Trainer`, whose optimizer steps are steps of a relay.

The trainer's own loop runs: data, accumulation, schedulers, callbacks, logs, evaluation and checkpoints are the trainer's. Each
batch of an accumulation is one micro-batch:

    training_step(batch 0)    kept                          returns 0
    training_step(batch K-1)  relay.step on all of them     returns the last loss, after adding the others
    clip_grad_norm            was done by the relay         returns the norm that it found
    optimizer.step()          was done by the relay         fails if it was not

The loss of a micro-batch is the one that the trainer passes to `accelerator.backward`, so that it is computed and divided as
without a relay.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import torch
from accelerate.optimizer import AcceleratedOptimizer  # pyright: ignore[reportMissingImports] - optional
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback

from l2l_core.config import RelayConfig
from l2l_core.devices import Device, DeviceOutOfMemory
from l2l_core.integrations.trainer_arguments import refuse_arguments, relay_config_of
from l2l_core.relay import Relay
from l2l_core.trace import StepResult

# Each suspended micro-batch has its own context. An epoch without a known length may end within an accumulation, and its
# batches are then divided by another number than those of the next epoch in the same step.
_batches: ContextVar[int | None] = ContextVar("batches", default=None)
RELAY_STATE_NAME = "relay_state.json"  # in a checkpoint: steps and seed of the relay


class RelayedOptimizer(AcceleratedOptimizer):
    """A relay's optimizer as its trainer sees it: `step` has nothing left to do.

    Attributes:
        is_updated: True after a step of the relay, until the trainer's `step`.
    """

    _is_accelerate_prepared = True  # accelerate wraps it no further

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay.optimizer, device_placement=False)
        self.relay, self.is_updated = relay, False

    def step(self, closure: Any = None) -> None:
        """Accept the update that the relay has made.

        Raises:
            RuntimeError: the relay has made none.
        """
        if not self.is_updated:
            raise RuntimeError(
                "optimizer.step() of a RelayTrainer without a step of its relay would train nothing: call "
                "super().training_step(model, inputs, num_items_in_batch) where a subclass overrides training_step"
            )
        self.is_updated = False


class RelayTrainer(Trainer):
    """`transformers.Trainer` that trains one layer at a time.

    Placed before another trainer it makes that one train by a relay: ``class RelaySFTTrainer(RelayTrainer, SFTTrainer): pass``.

    Every argument of the trainer keeps its meaning, or is refused. `gradient_accumulation_steps` is the number of micro-batches.
    `max_grad_norm` clips, and updates then wait for all gradients; with 0 each layer is updated at once. ``bf16=True`` is
    ``RelayConfig(precision="bf16")``: layers on the device are bfloat16, while the trainer's own bf16 keeps float32 weights
    there, so results differ in rounding. Micro-batches draw random numbers from `RelayConfig.micro_batch_seed`, with the
    trainer's seed. Caches of keys and values are off; a plain trainer leaves that of an encoder-decoder on.

    A callback's `on_pre_optimizer_step` runs after the update, with a warning, and reading a gradient in it raises. A gradient
    that is not finite raises `NonFiniteError`. A subclass may override `create_optimizer` as with the plain trainer. No step is
    compared with training in core (`RelayConfig.verify`): a `compute_loss` that counts its calls counts those of micro-batches
    that take turns.
    The relay exists from the first step or evaluation on, also after `train`; ``trainer.relay.close()`` ends it.

    Args:
        relay_config: settings of a step, without those that arguments of the trainer decide.
        relay_device: device of the relay. Default: the trainer's own, ``args.device``.
        relay_options: further arguments of `Relay`: `layers`.
        args, kwargs: those of the trainer.

    Raises:
        ValueError: an argument that a relay cannot honour; the message has a remedy.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
        >>> from l2l_core.integrations import RelayTrainer
        >>> sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 32}
        >>> gpt = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        >>> rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
        >>> settings = {"num_train_epochs": 1, "use_cpu": True, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
        >>> args = TrainingArguments("run", per_device_train_batch_size=2, gradient_accumulation_steps=2, **settings)
        >>> trainer = RelayTrainer(gpt, args, train_dataset=rows)  # otherwise as a Trainer
        >>> result = trainer.train()
        {'train_runtime': ...}
        >>> trainer.relay.steps  # each over two batches
        2
    """

    def __init__(
        self,
        *args: Any,
        relay_config: RelayConfig | None = None,
        relay_device: str | torch.device | Device | None = None,
        relay_options: Mapping[str, Any] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        self._relay_config, self._relay_device = relay_config or RelayConfig(), relay_device
        self._relay_options = dict(relay_options)
        self._relay: Relay | None = None
        self._relay_is_provisional = False  # optimizer and relay were made for an evaluation before training
        self._relay_waiting: list[dict[str, Any]] = []  # micro-batches of the accumulation that is under way
        self._relay_result: StepResult | None = None
        self._relay_loss: torch.Tensor | None = None  # taken from `accelerator.backward`
        self._relay_has_warned = False  # of callbacks before the update
        super().__init__(*args, **kwargs)
        refuse_arguments(self)
        relay_config_of(self._relay_config, self.args)

    # -- the relay -----------------------------------------------------------------------------------------------------

    @property
    def relay(self) -> Relay:
        """The relay, made at the first use, and again after it was closed."""
        if not self._is_relayed():
            self.create_optimizer()
        assert self._relay is not None
        return self._relay

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make a relay also over the optimizer of a `create_optimizer` that does not call the one below."""
        super().__init_subclass__(**kwargs)
        if cls.create_optimizer not in (RelayTrainer.create_optimizer, *_with_relays):
            type.__setattr__(cls, "create_optimizer", _with_relay(cls.create_optimizer))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        """Make the trainer's optimizer, and a relay over it."""
        super().create_optimizer(*args, **kwargs)
        return self._relayed_optimizer()

    def _relayed_optimizer(self) -> Optimizer:
        """Return the optimizer for the trainer, after making a relay over it if none is open."""
        if not self._is_relayed():
            self._replace_relay()
        made: Any = self.optimizer
        return made

    def _is_relayed(self) -> bool:
        relay = self._relay
        if relay is None or relay.is_closed or relay.model is not self.model:
            return False
        return isinstance(self.optimizer, RelayedOptimizer) and self.optimizer.relay is relay

    def _replace_relay(self) -> None:
        before, optimizer = self._relay, _without_accelerate(self.optimizer)
        assert self.model is not None, "the trainer has checked it"
        if before is not None:
            before.close()
        try:
            self._relay = Relay(
                self.model,
                optimizer,
                device=self.args.device if self._relay_device is None else self._relay_device,
                objective=self._relay_objective,
                loss_over="sum",  # the trainer has divided them
                split=_micro_batches_of,
                join=_only,
                config=relay_config_of(self._relay_config, self.args),
                **self._relay_options,
            )
        except (TypeError, ValueError) as error:
            error.add_note(f"in a trainer with optim={self.args.optim!s}, and the model and settings given to it")
            raise
        if (computes_on := self._relay.device.torch_device.type) != self.args.device.type:
            self._relay.close()
            raise ValueError(
                f"relay_device={self._relay_device!r} computes on {computes_on}, but the trainer on {self.args.device}: use "
                f"TrainingArguments(use_cpu={computes_on == 'cpu'})"
            )
        if before is not None and before.model is self.model:
            self._relay.load_state_dict(before.state_dict())
        self.optimizer = RelayedOptimizer(self._relay)

    # -- placement -----------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Make an accelerator that leaves batches and the model on the host, from which the relay copies them."""
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False
        self.accelerator.prepare_model = partial(self._prepare_model, self.accelerator.prepare_model)
        self.accelerator.backward = self._take_relay_loss

    def _prepare_model(
        self,
        prepare: Callable[..., nn.Module],
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Leave the trained model to the relay; prepare others as usual, such as a reference model."""
        if model is not self.model:
            return prepare(model, device_placement is None or device_placement, evaluation_mode)
        if model not in self.accelerator._models:
            self.accelerator._models.append(model)
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the trained model on the host."""

    # -- a step --------------------------------------------------------------------------------------------------------

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """Number of batches by which the trainer divides a loss; of a micro-batch, that when it was loaded."""
        return _batches.get() or self._relay_current_batches

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, batches: int) -> None:
        self._relay_current_batches = batches

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does, with its present arguments."""
        self._relay_waiting.clear()  # of an earlier call, as the trainer clears gradients
        refuse_arguments(self)
        self._warn_of_callbacks()
        if self._relay_is_provisional and self._relay is not None:
            self._relay.close()
            self.optimizer, self._relay_is_provisional = None, False
        if self._relay is not None and not self._relay.is_closed:
            now, config = relay_config_of(self._relay_config, self.args), self._relay.config
            self._relay.config = replace(
                config, update=now.update, max_grad_norm=now.max_grad_norm, precision=now.precision
            )
        return super().train(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Keep a micro-batch; with the last one of an accumulation, make a step of the relay and return its loss."""
        model.train()
        if isinstance(self.optimizer, RelayedOptimizer):
            self.optimizer.train()  # schedule-free ones; before the step, in which weights do not change
        self._relay_waiting.append(
            {"inputs": inputs, "num_items": num_items_in_batch, "batches": self.current_gradient_accumulation_steps}
        )
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        micro_batches, self._relay_waiting = self._relay_waiting, []
        *others, last = self._relay_step(micro_batches)
        for loss in others:  # in the trainer's order
            self._tr_loss += loss
        return last

    def _relay_step(self, micro_batches: list[dict[str, Any]]) -> torch.Tensor:
        """Train on the micro-batches of an accumulation; return their losses, as the trainer divides them, (K,)."""
        if not isinstance(self.optimizer, RelayedOptimizer):
            raise RuntimeError(
                f"{type(self).__name__} trains with a {type(self.optimizer).__name__} that was put into trainer.optimizer after "
                "create_optimizer, so no relay is over it: make it in create_optimizer, or give it to the trainer as "
                "optimizers=(optimizer, scheduler)"
            )
        relay = self.optimizer.relay
        relay.config = replace(relay.config, micro_batches=len(micro_batches))
        self._relay_loss = None  # of a step that was interrupted
        try:
            self._relay_result = relay.step(micro_batches)
        except DeviceOutOfMemory as error:
            error.add_note(
                "micro_batches of a trainer is TrainingArguments(gradient_accumulation_steps=...), beside a smaller "
                "per_device_train_batch_size; other settings are those of relay_config"
            )
            raise
        self.optimizer.is_updated = True
        return self._relay_result.extras.to(self.args.device)

    def _warn_of_callbacks(self) -> None:
        """Warn once of callbacks that would find gradients in a plain trainer."""
        before = TrainerCallback.on_pre_optimizer_step
        names = [
            type(c).__name__ for c in self.callback_handler.callbacks if type(c).on_pre_optimizer_step is not before
        ]
        if names and not self._relay_has_warned:
            self._relay_has_warned = True
            warnings.warn(
                f"{names[0]}.on_pre_optimizer_step runs after the relay's update, so it finds new weights, and reading a "
                "gradient raises. To clip, use TrainingArguments(max_grad_norm=...); the norm is logged as grad_norm. To read "
                "or change gradients, use trainer.relay.optimizer.register_step_pre_hook(hook) with "
                "relay_config=RelayConfig(update='deferred'). A callback that needs neither may stay, or use on_optimizer_step",
                stacklevel=3,
            )

    def _relay_objective(self, model: nn.Module, micro_batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of a micro-batch that the trainer's own step passes to `backward`, and its value."""
        token = _batches.set(micro_batch["batches"])
        try:
            super().training_step(model, micro_batch["inputs"], micro_batch["num_items"])
        finally:
            _batches.reset(token)
        loss, self._relay_loss = self._relay_loss, None  # no other micro-batch has run since `_take_relay_loss`
        if loss is None:
            raise RuntimeError(
                f"{type(self).__name__}.training_step calls no accelerator.backward(loss), so the relay has no loss: call it "
                "once per batch"
            )
        return loss, loss.detach().clone()

    def _take_relay_loss(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Keep the loss for the relay, which runs backward."""
        if self._relay_loss is not None:
            raise RuntimeError(
                f"{type(self).__name__}.training_step calls accelerator.backward(loss) more than once per batch: add the losses "
                "and call it once"
            )
        self._relay_loss = loss

    def _clip_grad_norm(self, model: nn.Module) -> float | None:
        """Return the norm that the relay found before it clipped."""
        return None if self._relay_result is None else self._relay_result.grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float | None:
        return self._clip_grad_norm(model)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Run the trainer's own step of a prediction, one layer at a time unless it generates text."""
        if getattr(self.args, "predict_with_generate", False):  # needs caches of keys and values
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        self._relay_is_provisional |= self.optimizer is None
        relay = self.relay
        relay.config = replace(relay.config, micro_batches=1)
        return relay.forward([{"inputs": inputs, "options": (prediction_loss_only, ignore_keys)}], self._relay_predict)

    def _relay_predict(self, model: nn.Module, micro_batch: dict[str, Any]) -> tuple[torch.Tensor | None, Any, Any]:
        return super().prediction_step(model, micro_batch["inputs"], *micro_batch["options"])

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            (Path(output_dir) / RELAY_STATE_NAME).write_text(json.dumps(self.relay.state_dict()), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load optimizer, scheduler and the relay's step count; a checkpoint of a plain trainer has the count in its state."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / RELAY_STATE_NAME
        present = self.relay.state_dict() | {"steps": self.state.global_step}
        self.relay.load_state_dict(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else present)


_with_relays: WeakSet[Callable[..., Any]] = WeakSet()  # what `_with_relay` has returned


def _with_relay(create_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `create_optimizer` that makes a relay over the optimizer that the given one has made."""

    @wraps(create_optimizer)
    def create(self: RelayTrainer, *args: Any, **kwargs: Any) -> Optimizer:
        create_optimizer(self, *args, **kwargs)
        return self._relayed_optimizer()

    _with_relays.add(create)
    return create


def _without_accelerate(optimizer: Any) -> Optimizer:
    """Return the optimizer inside of accelerate's wrapper, or the optimizer itself."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _micro_batches_of(batch: Sequence[Any], count: int) -> list[Any]:
    """Return the micro-batches, which the trainer's data loader has made."""
    return list(batch)


def _only(outputs: Sequence[Any]) -> Any:
    """Return the outputs of the one micro-batch of a prediction."""
    [output] = outputs
    return output
