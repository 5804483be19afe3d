"""Updates of a block's weights and optimizer state from a gradient, their undo, and the clock that times them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core._torch import foreach_norm
from l2l_core.config import RelayConfig
from l2l_core.eps.blocks import SHELL, Block, BlockGradient, TrainedParameters, check_no_stray_grads
from l2l_core.eps.masters import Masters, warmup_factor
from l2l_core.eps.optimizers import (
    SettingChanges,
    apply_changes,
    call_after,
    call_before,
    call_torchs,
    check_hooks,
    check_own_step,
    clone_state,
    merge_changes,
    restrict_optimizer,
    snapshot_optimizer,
    step_part,
    update_part,
    user_hooks,
)
from l2l_core.trace import Event, Trace

_SAMPLES = 4096  # weights per block from which the size of an update is estimated

BlockGradients = dict[Block, BlockGradient]


class EPSClock:
    """Adds events of the lane ``eps`` to the trace of a step, from the EPS's thread.

    Invariant: at most one event is open. An event is split around waits for other workers or for a disk.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._start_s = 0.0
        self._parts: list[tuple[float, float]] = []  # finished parts of the open event

    def start(self) -> None:
        """Open an event; an earlier open event is dropped."""
        self._start_s, self._parts = time.perf_counter(), []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude a wait for other workers or a disk from the open event."""
        self._parts.append((self._start_s, time.perf_counter()))
        yield
        self._start_s = time.perf_counter()

    def stop(self, kind: str, layer: str = "", k: int = -1, nbytes: int = 0) -> None:
        """End the open event; its last part has the bytes."""
        t0, add = self.trace.began_s, self.trace.add
        for start_s, stop_s in self._parts:
            add(Event("eps", kind, start_s - t0, stop_s - t0, layer, k))
        add(Event("eps", kind, self._start_s - t0, time.perf_counter() - t0, layer, k, nbytes))


class TornStep(RuntimeError):
    """A step failed after some layers had been updated.

    Attributes:
        updated: keys of the layers with new weights.

    Example:
        >>> from l2l_core import TornStep
        >>> updates = []
        >>> class Failing(torch.optim.SGD):
        ...     def step(self, closure=None):
        ...         updates.append(super().step(closure))
        ...         if len(updates) == 3:
        ...             raise ArithmeticError("no update")
        >>> relay.close()  # a model belongs to one relay
        >>> config = RelayConfig(verify="never")
        >>> relay = Relay(model, lambda params: Failing(params, lr=0.1), "cpu", loss=nn.CrossEntropyLoss(), config=config)
        >>> try:
        ...     result = relay.step(batch)
        ... except TornStep as error:
        ...     print(error.updated)  # backward and updates begin with the last layer
        ('L005', 'L004', 'L003')
    """

    def __init__(self, message: str, updated: Sequence[str]) -> None:
        super().__init__(message)
        self.updated = tuple(updated)


class Updater:
    """Updates blocks from complete gradients, with the user's optimizer over the masters; the base of other updaters.

    One step lasts from `begin` to `finish` or `undo`. Without `can_undo` there is no undo log.

    Attributes:
        updated: blocks that may have new weights in this step.

    Invariant: changes of settings take effect once per step, at its end; an undone step leaves weights, versions, state and
    settings as they were.
    """

    def __init__(self, masters: Masters, can_undo: bool = True) -> None:
        self._masters, self._optimizer, self._can_undo = masters, masters.optimizer, can_undo
        self._reset()

    def _reset(self) -> None:
        self.updated: list[Block] = []
        self._undo_log: list[Callable[[], object]] = []
        self._kept: set[Block] = set()  # blocks with an undo
        self._setting_changes: SettingChanges = {}  # made by parts of the optimizer in this step
        self._restore_settings: Callable[[], object] = lambda: None  # as before hooks
        self._is_undoable = self._is_deferred = False
        self._has_called_hooks = False  # those of a step of the whole optimizer

    def begin(self, config: RelayConfig, clock: EPSClock) -> None:
        """Begin a step. `clock` times the thread of updates, and is paused while that waits.

        Raises:
            ValueError: the step would fail, as far as this can be checked in advance.
        """
        self._reset()
        self._is_deferred = config.update != "eager"
        self._is_undoable = self._can_undo and (config.rollback or self._is_deferred)
        if self._optimizer.state:
            check_newcomers(self._masters, self._has_state)
        check_can_step(self._masters, self._optimizer)
        check_hooks(self._optimizer, self._masters.blocks, self._is_deferred)
        if config.update != "whole":
            check_own_step(self._optimizer)
        elif warm := [block.key for block in self._masters.blocks if warmup_factor(block) < 1]:
            raise ValueError(
                f"layer {warm[0]} warms up, and update='whole', as hooks of one optimizer of a list, takes one step with one "
                "learning rate: insert it with warmup=0, or use update='deferred' without such hooks. Nothing has been trained"
            )

    def _has_state(self, block: Block) -> bool:
        groups = self._masters.part_of(block).param_groups
        trained = [param for group in groups for param in group["params"] if param.requires_grad]
        return not trained or any(param in self._optimizer.state for param in trained)

    def prefetch(self, block: Block) -> None:
        """Announce, on the training thread, an `update` or `skip` of this block after those announced earlier."""

    def skip(self, block: Block) -> None:
        """Cancel an announced update: the block has no gradient in this step."""

    def gradients_complete(self, gradients: BlockGradients) -> None:
        """Run before the updates of a deferred step; hooks may change `gradients`."""
        if user_hooks(self._optimizer):
            for block in self._masters.blocks:  # hooks may change any weight
                self._keep(block)
            # Without the state, which is in the undo log and may be larger than the weights
            self._restore_settings = snapshot_optimizer(self._optimizer)
            call_before(self._optimizer, self._masters.blocks, gradients)

    def update(self, block: Block, gradient: BlockGradient) -> Mapping[str, float]:
        """Update a block and return statistics. Calls `Masters.before_write` before it writes."""
        self._keep(block, gradient)
        if not self._is_deferred:
            check_no_stray_grads(block, block.trained.indices)
        with self._changes({block: gradient}) as stats:
            part = self._masters.part_of(block)
            merge_changes(self._setting_changes, update_part(part, self._optimizer, warmup_factor(block)))
        return stats[block]

    def update_whole(self, gradients: BlockGradients) -> Mapping[Block, Mapping[str, float]]:
        """Update all blocks by one step of the optimizer itself, with its hooks; return their statistics."""
        for block in self._masters.blocks:  # the step may change any weight
            self._keep(block)
        self._restore_settings = snapshot_optimizer(self._optimizer)
        self._has_called_hooks, self._masters.step_guard.is_active = True, False
        try:
            with self._changes(gradients) as stats:
                self._optimizer.step()
        finally:
            self._masters.step_guard.is_active = True
        return stats

    def _keep_in_master(self, block: Block) -> None:
        """Copy weights into the master that the optimizer has made anew, as ``p.data = p.data - step`` does."""
        for param, view in zip(self._masters.params_of(block), block.views, strict=True):
            if param.data_ptr() != view.data_ptr():
                view.copy_(param.detach())
                param.data = view

    @contextmanager
    def _changes(self, gradients: BlockGradients) -> Iterator[dict[Block, Mapping[str, float]]]:
        """Set gradients for the length of a block of code that updates weights, and count versions; yield statistics."""
        stats: dict[Block, Mapping[str, float]] = {}
        before: dict[Block, torch.Tensor] = {}
        try:
            for block, gradient in gradients.items():
                set_grads(self._masters.params_of(block), gradient)
                before[block] = _sample_weights(block, gradient.trained).clone()
                self.updated.append(block)  # from here on the block may have new weights
            yield stats
            for block in gradients:
                self._keep_in_master(block)
        finally:
            for block in gradients:
                clear_grads(self._masters.params_of(block))  # views of buffers that will be reused
        for block, gradient in gradients.items():
            change = _sample_weights(block, gradient.trained) - before[block]
            moved, size = (norm.item() for norm in foreach_norm([change, before[block]]))
            block.version += 1
            stats[block] = {"update_ratio": moved / size if size else math.inf if moved else 0.0}

    def finish(self, gradients: BlockGradients) -> None:
        """End the step after its last update; `gradients` are those of deferred updates."""
        if self._undo_log:  # settings change now, and a hook may still fail
            self._undo_log.append(snapshot_optimizer(self._optimizer))
        apply_changes(self._optimizer, self._setting_changes)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # set for LR schedulers
        if not self._has_called_hooks:
            if self._is_deferred and user_hooks(self._optimizer):
                call_after(self._optimizer, self._masters.blocks, gradients)
            else:
                call_torchs(self._optimizer)
        self._undo_log.clear()
        self._kept.clear()
        self._masters.book_state()

    def undo(self) -> None:
        """Undo the step's updates if they are undoable; otherwise `updated` lists them."""
        for undo in reversed(self._undo_log):
            undo()
        if self._undo_log:
            self.updated.clear()
        if self.updated:  # for them the step is done
            apply_changes(self._optimizer, self._setting_changes)
        else:
            self._restore_settings()
        updated = self.updated
        self._reset()
        self.updated = updated
        self._masters.book_state()

    def state_of(self, block: Block) -> Sequence[Mapping[str, Any]]:
        """Return the optimizer state of each of a block's parameters, read-only."""
        return [self._optimizer.state.get(param, {}) for param in self._masters.params_of(block)]

    def _keep(self, block: Block, gradient: BlockGradient | None = None) -> None:
        """Copy weights before they change, for undo and for branches."""
        if block not in self._kept:
            self._kept.add(block)
            if self._is_undoable:
                self._undo_log.append(self._snapshot(block, gradient))
            self._masters.before_write(block)

    def _snapshot(self, block: Block, gradient: BlockGradient | None = None) -> Callable[[], None]:
        """Copy everything that an update with this gradient may change (12 bytes per parameter with AdamW); return the undo."""
        params, version = self._masters.params_of(block), block.version
        indices = range(len(params)) if gradient is None else gradient.views()
        values = {params[i]: block.views[i].clone() for i in indices}
        state = {p: clone_state(self._optimizer.state[p]) for p in values if p in self._optimizer.state}

        def undo() -> None:
            block.version = version
            with torch.no_grad():
                for param, value in values.items():
                    param.copy_(value)
                    self._optimizer.state.pop(param, None)  # also if there was no state before the step
            self._optimizer.state.update(state.items())

        return undo


def check_newcomers(masters: Masters, has_state: Callable[[Block], bool]) -> None:
    """Refuse to train a layer without state if the optimizer creates state only in its first step.

    Raises:
        ValueError: names the layer.
    """
    for block, unit in masters.owner.items() if masters.findings.newcomers else ():
        if unit.key != SHELL and any(block.trained.flags) and not has_state(block):
            raise ValueError(
                f"layer {unit.key} ({unit.name}) has no state in {type(masters.optimizer).__name__}, which cannot take a "
                f"parameter after its first step ({masters.findings.newcomers}). Keep the layer frozen, insert it with "
                "optimizer='copy', or use another optimizer; nothing has been trained"
            )


def check_can_step(masters: Masters, optimizer: Optimizer) -> None:
    """Refuse a step that the optimizer cannot take with its present learning rates or in its present mode.

    Raises:
        ValueError: a block warms up although settings depend on the learning rate, or the optimizer is not in train mode.
    """
    if masters.findings.follows_rate and (warm := [block for block in masters.blocks if warmup_factor(block) < 1]):
        raise ValueError(
            f"layer {warm[0].key} warms up, and {type(optimizer).__name__} keeps in its settings values computed from the "
            "learning rate: all layers share them, and this one needs others. Insert layers with warmup=0; nothing has been "
            "trained"
        )
    if callable(getattr(optimizer, "train", None)):
        part = restrict_optimizer(optimizer, [])  # its step changes nothing
        try:
            step_part(part)
        except Exception as error:
            raise ValueError(
                f"{type(part).__name__} would not take a step now: {error}. If it has modes, call relay.optimizer.train() before "
                "steps, and eval() before weights are used or saved; nothing has been trained"
            ) from error


def set_grads(params: list[nn.Parameter], gradient: BlockGradient) -> None:
    """Set `grad` of a block's parameters to views of its gradient, which is float32, or None."""
    views = gradient.views()
    for index, param in enumerate(params):
        if param.dtype != torch.float32:
            param.grad_dtype = torch.float32
        param.grad = views.get(index)


def clear_grads(params: Iterable[nn.Parameter]) -> None:
    """Set `grad` to None, and allow gradients of any dtype again: a slot of a bfloat16 parameter may be float32."""
    for param in params:
        param.grad = None
        if param.dtype != torch.float32:
            param.grad_dtype = None


def _sample_weights(block: Block, trained: TrainedParameters) -> torch.Tensor:
    """Return about `_SAMPLES` evenly spaced trained weights, (samples,); with frozen parameters, at least one of each other."""
    if all(trained.flags):
        return block.master[:: -(-len(block.master) // _SAMPLES) or 1]
    pieces = [block.master_layout.pieces[i] for i in trained.indices]
    stride = -(-trained.layout.used // _SAMPLES) or 1
    return torch.cat([block.master[p.offset : p.offset + math.prod(p.size) : stride] for p in pieces])
