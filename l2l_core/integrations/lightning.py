"""Strategy that trains a LightningModule by a relay: ``lightning.Trainer(strategy=RelayStrategy())``.

Lightning calls ``training_step`` for one batch after another and steps the optimizer after ``accumulate_grad_batches`` of them.
A relay runs all micro-batches through a layer before the next layer. So the strategy keeps the batches of one optimizer step,
and `Relay.step` then runs their training steps together, each batch as one micro-batch. Loops, progress, callbacks, loggers,
schedulers and checkpoints stay Lightning's own.
"""

# pyright: reportMissingImports=false
# Lightning is optional
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from l2l_core.batches import map_tensors
from l2l_core.config import RelayConfig
from l2l_core.devices import Device
from l2l_core.integrations.lightning_module import (
    MANUAL_OPTIONS,
    check_module,
    metrics_hidden,
    metrics_on_device,
    on_device,
    reads_gradients,
)
from l2l_core.relay import Relay
from l2l_core.step import host_copy, new_state_copied

_OPTIONS = ("layers", *MANUAL_OPTIONS)
_CHECKPOINT_KEY = "relay_state"
_micro_batch: ContextVar[int | None] = ContextVar("number of the micro-batch whose training step runs", default=None)


class RelayStrategy(SingleDeviceStrategy):
    """Train by a relay in `lightning.Trainer`, with the results of the same trainer in core.

    The LightningModule is unchanged. One optimizer step of Lightning is one relay step; each of its
    ``accumulate_grad_batches`` batches is one micro-batch. Between steps the module is whole on the CPU, where validation,
    test and prediction run as in core. Three things differ:

    - ``training_step`` of all batches of an optimizer step runs with the last of them. ``on_train_batch_end`` gets no outputs
      for the others, and values of `log` arrive with the last.
    - Each micro-batch draws random numbers from its own stream (`RelayConfig.micro_batch_seed`).
    - Gradients exist within a relay step only. ``on_before_optimizer_step`` and clipping get them, with deferred updates;
      ``backward``, ``on_before_backward`` and ``on_after_backward`` are refused.

    Under manual optimization, give the options of the relay, and in ``training_step`` call
    ``self.optimizers().step(closure=lambda: self.trainer.strategy.relay.step(batch))``, which counts ``trainer.global_step``.

    Args:
        config: settings of a step, without `micro_batches` and `verify`. Clipping and ``on_before_optimizer_step`` make eager
            updates deferred.
        device: as for `Relay`. Batches stay on the CPU; the relay loads them.
        checkpoint_io: as for other strategies.
        options: `layers` of `Relay`; for manual optimization also `loss`, `objective`, `weight`, `loss_over`, `split`, `join`.

    Raises:
        ValueError, TypeError: an option that a relay in Lightning does not have.

    Example:
        >>> import lightning
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from l2l_core.integrations import RelayStrategy
        >>> class Net(lightning.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.model = nn.Sequential(*(Block() for _ in range(6)), nn.Linear(16, 4))
        ...     def training_step(self, batch, batch_idx):
        ...         inputs, targets = batch
        ...         return nn.functional.cross_entropy(self.model(inputs), targets)
        ...     def configure_optimizers(self):
        ...         return torch.optim.AdamW(self.parameters(), lr=1e-3)
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        >>> trainer = lightning.Trainer(strategy=RelayStrategy(), max_epochs=1, accumulate_grad_batches=2, **quiet)
        >>> trainer.fit(Net(), DataLoader(TensorDataset(*batch), batch_size=2))
        >>> trainer.global_step  # each step of the relay is over two batches
        2
    """

    strategy_name = "relay"

    def __init__(
        self,
        config: RelayConfig = RelayConfig(),  # noqa: B008 - frozen
        device: str | torch.device | Device = "auto",
        checkpoint_io: CheckpointIO | None = None,
        **options: Any,
    ) -> None:
        if unknown := options.keys() - {*_OPTIONS}:
            raise TypeError(
                f"RelayStrategy has no option {min(unknown)!r}: give config, device, checkpoint_io, {', '.join(_OPTIONS)}. "
                "Lightning's checkpoints need the weights in memory of one process, so there is neither shelf= nor workers="
            )
        if not isinstance(config, RelayConfig):
            raise TypeError(f"config={config!r}: give a RelayConfig")
        super().__init__("cpu", checkpoint_io=checkpoint_io)
        self._config, self._relay_device, self._options = config, device, options
        self._relay: Relay | None = None
        self._relay_state: dict[str, int] | None = None  # of a checkpoint
        self._groups: list[list[int]] = []  # of the optimizer, when the relay was made
        self._window: list[tuple[Any, ...]] = []  # arguments of the training steps before the next optimizer step
        self._output: Any = None  # of the last training step
        self._logged: list[list[tuple[Any, Any]]] = []  # arguments of `log` by micro-batch
        self._metrics: list[nn.Module] = []  # of the module, in the running step

    @property
    def relay(self) -> Relay:
        """The relay of the running fit.

        Raises:
            RuntimeError: no fit is running.
        """
        if self._relay is None:
            raise RuntimeError("the strategy has a relay from on_train_start to the end of trainer.fit only")
        return self._relay

    # -- set-up --------------------------------------------------------------------------------------------------------

    @property
    def accelerator(self) -> Accelerator | None:
        """The CPU, where the module is between steps; the relay has its own device."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        self._accelerator = CPUAccelerator()

    @property
    def precision_plugin(self) -> Precision:
        """Float32; the relay casts weights on its device."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None and type(precision_plugin) is not Precision:
            bf16 = "RelayStrategy(config=RelayConfig(precision='bf16')), and " if _is_bf16(precision_plugin) else ""
            raise ValueError(
                f"precision={precision_plugin.precision!r} with RelayStrategy, whose relay casts weights on its device and keeps "
                f"masters in float32: give {bf16}leave precision= out of the Trainer"
            )
        self._precision_plugin = precision_plugin

    def setup(self, trainer: Trainer) -> None:
        """Set up the module on the CPU, and its optimizer."""
        devices, nodes = trainer._accelerator_connector._devices_flag, trainer._accelerator_connector._num_nodes_flag
        if nodes > 1 or (devices if isinstance(devices, int) else len(devices)) > 1:
            raise ValueError(
                f"Trainer(devices={devices}, num_nodes={nodes}): a RelayStrategy trains on one device. Give devices=1 and "
                "num_nodes=1; several processes train together by Relay(..., workers='auto') in a loop without Lightning"
            )
        super().setup(trainer)

    def on_train_start(self) -> None:
        """Make the relay, when callbacks and checkpoints have changed module and optimizer."""
        super().on_train_start()
        self._make_relay(self._module())
        self._relay_state, self._window = None, []
        # Lightning's loop warns of the steps without a loss before the last of an optimizer step
        warnings.filterwarnings("ignore", message=".*training_step` returned `None`")

    def _make_relay(self, module: LightningModule) -> None:
        self._close()
        check_module(module, self.optimizers, self._config, self._options)
        options, config = self._options, replace(self._config, verify="never")  # a training step may log and count
        if module.automatic_optimization:
            options = {**options, "objective": self._objective, "split": _split, "loss_over": "sum"}
            if config.update == "eager" and reads_gradients(module.trainer):
                config = replace(config, update="deferred")
        with metrics_hidden(module):
            self._relay = Relay(module, self.optimizers[0], device=self._relay_device, config=config, **options)
        state = self._relay_state or {**self._relay.state_dict(), "steps": module.trainer.global_step}
        self._relay.load_state_dict(state)
        self._groups = _groups_of(self.optimizers[0])

    def teardown(self) -> None:
        """Close the relay; the module is an ordinary one again."""
        self._close()
        self._relay_state = None
        super().teardown()

    def _close(self) -> None:
        if self._relay is not None:
            self._relay.close()
        self._relay = None

    def _module(self) -> LightningModule:
        module = self.lightning_module
        assert module is not None, "connected by the trainer"
        return module

    # -- an optimizer step ---------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Keep a batch until the optimizer step; then train on all of them and return the last one's output."""
        module = self._module()
        trainer = module.trainer
        if not module.automatic_optimization:
            before = self.relay.steps - trainer.global_step
            output = super().training_step(*args, **kwargs)
            if self.relay.steps - trainer.global_step != before:
                raise RuntimeError(
                    "training_step made a relay step that trainer.global_step does not count, so max_steps and checkpoints would "
                    "not see it: call self.optimizers().step(closure=lambda: self.trainer.strategy.relay.step(batch))"
                )
            return output
        loop = trainer.fit_loop.epoch_loop
        if loop.batch_idx % trainer.accumulate_grad_batches == 0:
            self._window = []  # as Lightning clears gradients here
        self._window.append(args)
        if loop._should_accumulate():
            return None
        window, self._window = self._window, []
        self._train(module, window)
        output, self._output = self._output, None
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Do nothing: the relay step has run backward and the update.

        Raises:
            RuntimeError: ``manual_backward`` of manual optimization.
        """
        if not self._module().automatic_optimization:
            raise RuntimeError(
                "manual_backward runs the whole model on the CPU, and the optimizer of a relay does not step by it. Call "
                "self.optimizers().step(closure=lambda: self.trainer.strategy.relay.step(batch)) instead of forward, "
                "manual_backward and step"
            )
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, whose relay step updates the weights.

        Raises:
            RuntimeError: it makes no relay step, so nothing would be trained.
        """
        before = self.relay.steps
        output = closure()
        if self.relay.steps == before:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() without a relay step would train nothing: call "
                "optimizer.step(closure=closure) in LightningModule.optimizer_step, and under manual optimization "
                "self.optimizers().step(closure=lambda: self.trainer.strategy.relay.step(batch))"
            )
        return output

    def _train(self, module: LightningModule, window: Sequence[tuple[Any, ...]]) -> None:
        """Train on the batches of one optimizer step, then pass on the values that they logged."""
        if self._groups != _groups_of(self.optimizers[0]):  # changed by a callback that unfreezes layers
            self._relay_state = self.relay.state_dict()
            self._make_relay(module)
            self._relay_state = None
        relay, trainer = self.relay, module.trainer
        if relay.config.micro_batches != len(window):
            relay.config = replace(relay.config, micro_batches=len(window))
        self._logged = [[] for _ in window]
        with (
            metrics_hidden(module) as self._metrics,
            metrics_on_device(self._metrics, relay.device.torch_device),
            self._in_step(module),
            self._gradients_shown(module),
        ):
            relay.step([(k, *args) for k, args in enumerate(window)])
        results = trainer._results
        for args, calls in zip(window, self._logged, strict=True):
            if results is not None:  # for the batch size, by which Lightning weighs means
                results.batch, results.batch_size = args[0], None
            for arguments, keywords in calls:
                module.log(*arguments, **keywords)

    def _objective(self, module: LightningModule, micro_batch: tuple[Any, ...]) -> Tensor:
        """Run the training step of a micro-batch; return the loss as Lightning scales it."""
        k, *args = micro_batch
        token = _micro_batch.set(k)  # every suspended forward has its own context
        try:
            with new_state_copied(self._metrics):
                output = module.training_step(*args)
        finally:
            _micro_batch.reset(token)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"training_step returned {output!r}: a relay step needs the loss of every batch, as a tensor or under the key "
                "'loss' of a dict. Leave batches without a loss out in the loader's collate_fn or sampler"
            )
        if k == len(self._logged) - 1:
            self._output = map_tensors(output, host_copy)
        return loss / module.trainer.accumulate_grad_batches

    @contextmanager
    def _in_step(self, module: LightningModule) -> Iterator[None]:
        """Keep what training steps log until the step has ended, as micro-batches take turns; set ``module.device``."""
        log = module.log

        def record(*args: Any, **kwargs: Any) -> None:
            k = _micro_batch.get()
            if k is None:  # a hook of the optimizer step
                log(*args, **kwargs)
            else:
                self._logged[k].append(map_tensors((args, kwargs), host_copy))

        module.__dict__["log"] = record
        try:
            with on_device(module, self.relay.device.torch_device):
                yield
        finally:
            del module.__dict__["log"]

    @contextmanager
    def _gradients_shown(self, module: LightningModule) -> Iterator[None]:
        """Run Lightning's hooks before the optimizer step, with clipping, when all gradients are there."""
        if not reads_gradients(module.trainer):
            yield
            return

        def run_hooks(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            with on_device(module, self.root_device):  # where masters and their gradients are
                self.precision_plugin._after_closure(module, optimizer)

        handle = self.optimizers[0].register_step_pre_hook(run_hooks)
        try:
            yield
        finally:
            handle.remove()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint with the relay's number of steps and seed, which its random numbers follow."""
        if self._relay is not None:
            checkpoint[_CHECKPOINT_KEY] = self._relay.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint; the next relay continues from its state."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._relay_state = checkpoint.get(_CHECKPOINT_KEY)
        return checkpoint


def _split(window: Sequence[Any], count: int) -> list[Any]:
    """Return the batches of an optimizer step, each as one micro-batch."""
    return list(window)


def _is_bf16(plugin: Precision) -> bool:
    return str(plugin.precision).startswith(("bf16", "16"))


def _groups_of(optimizer: Optimizer) -> list[list[int]]:
    """Return the identities of the parameters in each group."""
    return [[id(param) for param in group["params"]] for group in optimizer.param_groups]
