"""The facade: a model whose layers live in the EPS and relay through a device."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from l2l_core import files
from l2l_core.ambient import Ambient, RandomState
from l2l_core.batch import Batch, ModelCall, Objective, Weight, default_weight, join, rows_of, shares, split
from l2l_core.call import Pass, set_values
from l2l_core.config import RelayConfig
from l2l_core.device import Copy, Device, Ticket
from l2l_core.gradient import Gradient, GradientSlots, Push
from l2l_core.hooks import SideOutputs, UserHooks
from l2l_core.layers import resolve_layers
from l2l_core.loop import Loop, TrainLoop
from l2l_core.memory import Ledger
from l2l_core.meter import Meter, Profile
from l2l_core.optimizers import OptimizerFactory, make_optimizer
from l2l_core.pause import Forward, Shadows
from l2l_core.prefetch import Prefetch
from l2l_core.stash import Stash
from l2l_core.store import LayerStore, TornStep
from l2l_core.trace import Event, Trace
from l2l_core.units import Unit, build_units
from l2l_core.verify import VerifyReport, compare_step

logger = logging.getLogger("l2l_core")

_DEFAULT_OPTIMIZER = partial(torch.optim.AdamW, lr=1e-4, fused=True)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one training step gave.

    Attributes:
        loss: mean loss over the batch.
        seconds: wall time of the step.
        samples: rows of the batch.
        trace: events and memory of the step.
        peak_device_bytes: highest device bytes during the step.
        bytes_loaded, bytes_pushed: weights copied to the device, gradients copied back.
    """

    loss: float
    seconds: float
    samples: int
    trace: Trace
    peak_device_bytes: int
    bytes_loaded: int
    bytes_pushed: int


class Relay:
    """Train a model one layer at a time, with the same result as plain training.

    Args:
        model: any module with dense float32 parameters on the CPU. It stays the user's: between steps its parameters
            are views of the masters, so ``state_dict`` and evaluation work as ever.
        optimizer: a factory, called once with all parameters, or a ready torch Optimizer, whose groups and state are
            adopted. Default AdamW with a learning rate of 1e-4.
        device: "auto", "cpu" (emulated, without limits), "cuda", or a Device.
        layers: the layers, as modules or dotted names; default `find_layers(model)`.
        loss: ``loss(outputs, batch) -> scalar``; default ``outputs.loss``.
        objective: ``objective(model, micro_batch) -> scalar``, in place of both.
        weight: what a micro-batch counts for; default its targets that are not -100, or else its rows.
        config: how to run; may be exchanged between steps (``relay.config = ...``).

    Raises:
        ValueError, TypeError: a model, optimizer or setting that cannot relay; the message has the remedy.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory | Optimizer = _DEFAULT_OPTIMIZER,
        device: str | Device = "auto",
        layers: Iterable[nn.Module | str] | None = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        objective: Objective | None = None,
        weight: Weight | None = None,
        config: RelayConfig = RelayConfig(),  # noqa: B008 - frozen
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}: the relay takes a torch.nn.Module")
        _refuse_checkpointing(model)
        found = resolve_layers(model, layers)
        self.model, self.config = model, config
        self._call = ModelCall(model, loss, objective)
        self._weight = weight or default_weight(model, loss is not None)
        self.device = resolve_device(device)
        self.host = Ledger("host", "Host memory")
        made = make_optimizer(optimizer, model)
        order = list(model.parameters())
        self._shell, self._layers = build_units(model, {f"L{i:03d}": module for i, module in enumerate(found.values())})
        self._store = LayerStore([self._shell, *self._layers], made, order, self.host)
        self._steps = 0
        self._predicted: list[Unit] = []
        self._profile: tuple[Any, Profile] | None = None
        self._busy = threading.Lock()
        self._closed = False

    # -- what a relay is -----------------------------------------------------------------------------------------------

    @property
    def stack(self) -> tuple[Unit, ...]:
        """The layers in order, with permanent key, name, sizes, version and statistics of the last step."""
        return tuple(self._layers)

    @property
    def shell(self) -> Unit:
        """What of the model is in no layer and stays on the device during a step."""
        return self._shell

    @property
    def store(self) -> LayerStore:
        """The eager param-server."""
        return self._store

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, over the masters; for schedulers, logging and ``state_dict``."""
        return self._store.optimizer

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        return self._steps

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Join every thread; the model and the optimizer are ordinary ones again. Calling it twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._store.close()
        self.device.close()

    # -- what a relay does ---------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> StepResult:
        """Train on one batch.

        Raises:
            TornStep: an error after the first eager update; names the updated layers. Any other exception leaves weights
                and optimizer state as they were.
            DeviceOutOfMemory: the device's byte budget does not suffice; says what fills it and what would help.
            KeyboardInterrupt: after the step has finished; a second interrupt ends it at once.
        """
        with self._exclusive(), _interrupts_wait():
            return self._step(batch)

    def forward(self, batch: Batch) -> Any:
        """The model's outputs for a batch in evaluation mode, concatenated over micro-batches; nothing changes."""
        with self._exclusive():
            micro_batches = self._split(batch)
            outputs = self._infer(micro_batches, self._call.outputs)
            return join(outputs, [rows_of(m) for m in micro_batches], shares(micro_batches, self._weight))

    def evaluate(self, batch: Batch) -> float:
        """Mean loss of a batch in evaluation mode; no effect on weights, buffers or random state."""
        with self._exclusive():
            micro_batches = self._split(batch)
            losses = self._infer(micro_batches, self._call.objective)
            divisors = shares(micro_batches, self._weight)
            return float(sum(loss / divisor for loss, divisor in zip(losses, divisors, strict=True)))

    def verify(self, batch: Batch) -> VerifyReport:
        """Train one step by relay and in core from the same state, compare, and put everything back as it was."""
        micro_batches = self._split(batch)
        with self._preserved():
            return compare_step(
                model=self.model,
                store=self._store,
                units=[self._shell, *self._layers],
                relay_step=lambda: self.step(batch),
                micro_batches=micro_batches,
                objective=self._call.objective,
                divisors=shares(micro_batches, self._weight),
                seeds=[self.config.micro_batch_seed(self._steps, k) for k in range(len(micro_batches))],
                max_grad_norm=self.config.max_grad_norm,
            )

    def save(self, folder: str | Path) -> Path:
        """Save weights, optimizer, random state and step to `folder`, atomically; returns the folder.

        A crash while saving keeps the previous save.
        """
        with self._exclusive():
            return files.save(Path(folder), self._saved_state())

    @classmethod
    def load(
        cls,
        folder: str | Path,
        model: nn.Module,
        optimizer: OptimizerFactory | Optimizer = _DEFAULT_OPTIMIZER,
        **options: Any,
    ) -> Relay:
        """A relay that continues, bit by bit, where the saved one stood.

        Args:
            folder: what `save` wrote.
            model: a model of the same structure; its weights are replaced.
            optimizer: of the same kind and groups; its state and settings are replaced.
            options: `device`, `layers`, `loss`, `objective`, `weight`, `config` of the constructor; the saved config is
                the default, and the saved layers are.

        Raises:
            ValueError: the folder is damaged, incomplete or of another model; names the file.
        """
        state = files.load(Path(folder))
        options.setdefault("config", RelayConfig(**state.config))
        options.setdefault("layers", state.layer_names)
        relay = cls(model, optimizer, **options)
        try:
            state.restore_into(relay._saved_state())
        except BaseException:
            relay.close()
            raise
        relay._steps = state.steps
        return relay

    # -- a step --------------------------------------------------------------------------------------------------------

    def _step(self, batch: Batch) -> StepResult:
        began_s = time.perf_counter()
        config = self.config
        micro_batches = self._split(batch)
        divisors = shares(micro_batches, self._weight)
        self._check_model()
        trace = Trace(
            step=self._steps, device=self.device.name, names={u.key: u.name for u in [self._shell, *self._layers]}
        )
        shape = self._shape_of(micro_batches)
        replay = (
            self._profile[1] if self._profile and self._profile[0] == shape and config.meter == "on_change" else None
        )
        self.device.ledger.reset_peak()
        self._store.begin(config, trace)
        old_buffers = [(b, b.clone()) for unit in [self._shell, *self._layers] for b in unit.buffers]
        loads = _Loads(self.device, trace)
        push = Push(self.device, trace)
        seeds = [config.micro_batch_seed(self._steps, k) for k in range(len(micro_batches))]
        try:
            with ExitStack() as stack:
                run, shadows, prefetch = self._open(stack, trace, loads, replay, config)
                numel = max((unit.numel for unit in self._layers), default=0)
                slots = GradientSlots(self.device, numel, 2 if config.ahead else 1)
                stack.callback(slots.close)
                shell_flat = self._load_shell(stack, loads)
                shell_gradient = self._shell_gradient(stack)
                run.stash.exempt([*slots.flats, shell_flat, shell_gradient.flat, *(s.flat for s in prefetch.slots)])
                forwards = self._forwards(run, shadows, micro_batches, self._call.objective, seeds)
                loop = TrainLoop(run, forwards, self._layers, self._predicted or self._layers, prefetch)
                losses = loop.train(self._store, slots, shell_gradient, push, divisors, self._inside())
                self._store.finish()
                assert run.stash.is_empty, "the stash is not empty after the step"
        except BaseException as error:
            self._undo_step(old_buffers, error)
            raise
        finally:
            for param in self.model.parameters():
                param.grad = None
        self.device.settle()
        self._predicted = [visit.unit for visit in loop.visits]
        if replay is None:
            self._profile = (shape, run.meter.profile)
        self._steps += 1
        return StepResult(
            loss=float(sum(losses)),
            seconds=time.perf_counter() - began_s,
            samples=rows_of(batch),
            trace=trace,
            peak_device_bytes=self.device.ledger.peak,
            bytes_loaded=loads.nbytes,
            bytes_pushed=push.nbytes,
        )

    def _undo_step(self, old_buffers: Sequence[tuple[torch.Tensor, torch.Tensor]], error: BaseException) -> None:
        self._store.roll_back()
        updated = [block.key for block in self._store.updated]
        if not updated:
            set_values([b for b, _ in old_buffers], [old for _, old in old_buffers])
            return
        names = {unit.key: unit.name for unit in [self._shell, *self._layers]}
        raise TornStep(
            f"step {self._steps} failed with {type(error).__name__} after {len(updated)} update(s) of "
            f"{', '.join(names.get(key, key) for key in updated[:6])}{' ...' if len(updated) > 6 else ''}: these hold new weights, "
            "the others old ones. Training can go on; update='deferred' or rollback=True keeps steps whole",
            updated,
        ) from error

    def _open(
        self, stack: ExitStack, trace: Trace, loads: _Loads, replay: Profile | None, config: RelayConfig
    ) -> tuple[Pass, Shadows, Prefetch]:
        """What every pass needs; closed in reverse order when the stack unwinds."""
        random_state = RandomState.take()
        stack.callback(random_state.put)
        numel = max((unit.numel for unit in self._layers), default=0)
        prefetch = Prefetch(self.device, numel, config.ahead, loads)
        stack.callback(prefetch.close)
        stash = Stash(self.device, self.host, config.stash == "host", replay is None, trace, self._model_tensors())
        meter = Meter(self.device.ledger, self.host, trace, replay)
        stack.callback(meter.close)
        stack.callback(stash.clear)
        modules = {unit.module: unit for unit in self._layers}
        hooks = stack.enter_context(UserHooks({unit.key: unit.module for unit in self._layers}))
        sides = stack.enter_context(SideOutputs())
        shadows = stack.enter_context(Shadows(modules))
        stack.callback(shadows.cancel)
        self.device.ledger.advise = partial(_advise, self.device.ledger, config)
        return Pass(self.device, stash, trace, sides, hooks, meter), shadows, prefetch

    def _forwards(
        self,
        run: Pass,
        shadows: Shadows,
        micro_batches: Sequence[Any],
        call: Callable[[nn.Module, Any], Any],
        seeds: Sequence[int],
    ) -> list[Forward]:
        base = Ambient.take()
        base.put()
        base = replace(base, grad_enabled=torch.is_grad_enabled())
        if run.stash.guards:
            base = replace(base, dispatch_modes=(*base.dispatch_modes, run.stash.watch))
        for k, micro_batch in enumerate(micro_batches):
            main = partial(self._main, run, call, k, micro_batch)
            shadows.forwards.append(Forward(k, main, base.reseeded(RandomState.seeded(seeds[k])), run))
        return shadows.forwards

    def _main(self, run: Pass, call: Callable[[nn.Module, Any], Any], k: int, micro_batch: Any) -> Any:
        """One micro-batch's forward, from the batch on the host to its loss or outputs."""
        return call(self.model, self._to_device(run, k, micro_batch))

    def _to_device(self, run: Pass, k: int, micro_batch: Any) -> Any:
        leaves, spec = pytree.tree_flatten(micro_batch)
        copies: list[Copy] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[index] = target = torch.empty_like(leaf, device=self.device.torch_device)
                run.stash.hold(target, k, "other", "", fresh=True)
                copies.append((target, leaf.detach()))
        t0, nbytes = run.trace.began_s, sum(target.nbytes for target, _ in copies)
        if copies:
            record = lambda a, b: run.trace.add(Event("h2d", "batch", a - t0, b - t0, "", k, nbytes))  # noqa: E731
            self.device.issue("h2d", copies, record).wait()
        return pytree.tree_unflatten(leaves, spec)

    def _load_shell(self, stack: ExitStack, loads: _Loads) -> torch.Tensor:
        """Put the shell on the device for the length of a pass."""
        shell, ledger = self._shell, self.device.ledger
        flat = self.device.empty(shell.numel)
        ledger.book("weights", shell.key, flat.nbytes)
        stack.callback(ledger.release, "weights", shell.key, flat.nbytes)
        loads(
            shell, [(part, block.master) for part, block in zip(shell.ranges(flat), shell.blocks, strict=True)]
        ).wait()
        masters = [view for block in shell.blocks for view in block.views]
        stack.callback(shell.point, masters)
        shell.point(shell.views(flat))
        return flat

    def _shell_gradient(self, stack: ExitStack) -> Gradient:
        slots = GradientSlots(self.device, self._shell.numel, 1)
        stack.callback(slots.close)
        gradient = slots.take(self._shell, lambda block: block.shared)
        stack.callback(gradient.stop)
        return gradient

    def _infer(self, micro_batches: Sequence[Any], call: Callable[[nn.Module, Any], Any]) -> list[Any]:
        """A forward relay without gradients, in evaluation mode."""
        self._check_model()
        trace = Trace(step=self._steps, device=self.device.name)
        loads = _Loads(self.device, trace)
        modes = {module: module.training for module in self.model.modules()}
        with ExitStack() as stack, torch.no_grad():
            stack.callback(lambda: [setattr(module, "training", mode) for module, mode in modes.items()])
            self.model.eval()
            run, shadows, prefetch = self._open(stack, trace, loads, Profile(), self.config)
            flat = self._load_shell(stack, loads)
            run.stash.exempt([flat, *(slot.flat for slot in prefetch.slots)])
            seeds = [self.config.micro_batch_seed(self._steps, k) for k in range(len(micro_batches))]
            forwards = self._forwards(run, shadows, micro_batches, call, seeds)
            Loop(run, forwards, self._layers, self._predicted or self._layers, prefetch).forward()
            results = [forward.result for forward in forwards]
            run.stash.clear()
            return [
                pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu().clone(), result) for result in results
            ]

    # -- checks and helpers --------------------------------------------------------------------------------------------

    def _split(self, batch: Batch) -> list[Any]:
        return split(batch, self.config.micro_batches)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._closed:
            raise RuntimeError("this relay is closed: make a new Relay over the model")
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                "this relay is in the middle of a step in another thread: wait for it, or stop the session"
            )
        try:
            yield
        finally:
            self._busy.release()

    def _check_model(self) -> None:
        """Notice a model that was moved, cast or rebuilt behind the relay's back."""
        _refuse_checkpointing(self.model)
        for unit in [self._shell, *self._layers]:
            for module, name, param in unit.owners:
                if module._parameters.get(name) is not param:
                    raise RuntimeError(
                        f"parameter {name!r} in {unit.name} was replaced behind the relay's back (load_state_dict(assign=True)? "
                        "a new layer?). Close the relay and make a new one over the changed model"
                    )
            for block in unit.blocks:
                for param, view, name in zip(block.params, block.views, block.names, strict=True):
                    if param.data_ptr() != view.data_ptr() or param.dtype != view.dtype:
                        raise RuntimeError(
                            f"parameter {name} is no longer the EPS's master ({param.dtype} on {param.device}): the model was "
                            "moved or cast (model.to, .half, .cuda) while a relay owns it. Close the relay first, or leave "
                            "moving to it: Relay(..., device=...)"
                        )
                    if param.grad is not None:
                        raise RuntimeError(
                            f"parameter {name} has a gradient from outside: call model.zero_grad() before relay.step"
                        )

    def _inside(self) -> dict[torch.Tensor, str]:
        return {
            p: unit.name for unit in self._layers for block in unit.blocks if not block.shared for p in block.params
        }

    def _model_tensors(self) -> list[torch.Tensor]:
        modules = list(self.model.modules())
        held = [v for m in modules for v in [*m._buffers.values(), *vars(m).values()] if isinstance(v, torch.Tensor)]
        return held + [block.master for unit in [self._shell, *self._layers] for block in unit.blocks]

    def _shape_of(self, micro_batches: Sequence[Any]) -> Any:
        """What the course of a step depends on; a change of it calls for metering."""
        leaves = [leaf for m in micro_batches for leaf in pytree.tree_leaves(m)]
        shapes = tuple((tuple(t.shape), t.dtype) for t in leaves if isinstance(t, torch.Tensor))
        keys = tuple((unit.key, unit.frozen) for unit in [self._shell, *self._layers])
        return replace(self.config, seed=0), shapes, keys, self.model.training

    @contextmanager
    def _preserved(self) -> Iterator[None]:
        """Whatever the block trains is undone."""
        weights, random_state = self._store.snapshot(), RandomState.take()
        buffers = [(b, b.clone()) for unit in [self._shell, *self._layers] for b in unit.buffers]
        stats = [(unit, dict(unit.stats)) for unit in [self._shell, *self._layers]]
        steps = self._steps
        try:
            yield
        finally:
            weights()
            set_values([b for b, _ in buffers], [old for _, old in buffers])
            for unit, old in stats:
                unit.stats.clear()
                unit.stats.update(old)
            random_state.put()
            self._steps = steps

    def _saved_state(self) -> files.State:
        return files.State.of(self.config, self._steps, self._shell, self._layers, self._store, RandomState.take())


class _Loads:
    """Issues loads of weights and records them."""

    def __init__(self, device: Device, trace: Trace) -> None:
        self._device, self._trace = device, trace
        self.nbytes = 0

    def __call__(self, unit: Unit, copies: list[Copy]) -> Ticket:
        nbytes = sum(target.nbytes for target, _ in copies)
        self.nbytes += nbytes
        t0, trace = self._trace.began_s, self._trace
        return self._device.issue(
            "h2d", copies, lambda a, b: trace.add(Event("h2d", "load", a - t0, b - t0, unit.key, -1, nbytes))
        )


def resolve_device(device: str | Device) -> Device:
    """A device from its name: "auto" (CUDA if there is one, else "cpu"), "cpu" (emulated without limits), "cuda[:n]".

    Raises:
        ValueError: no such device here.
        TypeError: neither a name nor a Device.
    """
    from l2l_core.emulated import EmulatedDevice

    if isinstance(device, Device):
        return device
    if not isinstance(device, str):
        raise TypeError(f"device={device!r}: give 'auto', 'cpu', 'cuda', EmulatedDevice(...) or CudaDevice(...)")
    if device in ("auto", "cpu"):
        return EmulatedDevice()
    raise ValueError(
        f"device={device!r} does not exist: give 'auto', 'cpu', 'cuda', EmulatedDevice(...) or CudaDevice(...)"
    )


def _refuse_checkpointing(model: nn.Module) -> None:
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            "the model has gradient checkpointing on, and the relay recomputes layers itself: call "
            "model.gradient_checkpointing_disable()"
        )


def _advise(ledger: Ledger, config: RelayConfig, missing_bytes: int) -> str:
    """Which setting would make it fit."""
    now = ledger.by_category()
    slot_bytes = max(ledger.by_owner("weights").values(), default=0) + max(
        ledger.by_owner("gradients").values(), default=0
    )
    if config.stash == "device" and now.get("stash", 0) + now.get("other", 0) > missing_bytes:
        return f"Remedy: RelayConfig(stash='host') keeps {now.get('stash', 0):,} bytes of stash on the host."
    if config.ahead > 0 and slot_bytes > missing_bytes:
        return f"Remedy: RelayConfig(ahead=0) needs one weight slot and one gradient slot less ({slot_bytes:,} bytes), without overlap."
    activations = now.get("activations", 0)
    if activations > 0:
        return (
            f"Remedy: more micro-batches than {config.micro_batches} make activations smaller "
            f"(RelayConfig(micro_batches={config.micro_batches * 2})), or give the device {missing_bytes:,} bytes more."
        )
    return (
        f"Remedy: the weights alone are too large. Make big parts of the shell layers too (layers=[...]), or give the device "
        f"{missing_bytes:,} bytes more."
    )


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C (or a kernel interrupt) wait for the end of the block; a second one does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    pressed = False

    def handler(signum: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        logger.warning("interrupt: the step finishes first; interrupt again to stop at once")

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
