"""Forwards on a few rows, to compare losses, to observe layers, and to try edits.

Nothing is trained, and all state is as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from l2l_core.batches import LossNormaliser, LossOver, Weight, map_tensors, snapshot_modules
from l2l_core.devices import free_bytes
from l2l_core.eps.blocks import Block, Unit, check_model, put_back_params
from l2l_core.model import RandomState, force_eager, full_precision, preserve_random_state, version_of
from l2l_core.runner import PassMode, Runner, change_nothing
from l2l_core.step import BreadthFirstRuntime, CallObserver, PassTask, RelayParts, StateDiffs, perturb


def _perturb_shell(runtime: BreadthFirstRuntime) -> None:
    """Perturb the shell's weights on the device; the masters stay unchanged."""
    perturb(runtime.parts.shell)


@contextmanager
def _weights_copied(model: nn.Module, units: Sequence[Unit]) -> Iterator[None]:
    """Give parameters copies of their weights in float32 in the block, which a forward may change; bytes are not copied."""
    owners = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    caches_casts = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)  # a cast would outlive the copy
        for unit in units:
            unit.set_data([view for block in unit.blocks for view in _copies_of(block)])
        yield
    finally:
        torch.set_autocast_cache_enabled(caches_casts)
        put_back_params(owners)
        try:
            _point_home(units)
        except BaseException:  # an interrupt, between two parameters
            _point_home(units)
            raise


def _point_home(units: Sequence[Unit]) -> None:
    for unit in units:
        unit.set_data([home for block in unit.blocks for home in block.host_views])


def _copies_of(block: Block) -> list[torch.Tensor]:
    return block.host_views if block.in_bytes else block.layout.views(block.values.to(torch.float32, copy=True))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


class TrialForwards:
    """Forwards of a runner's model on a few rows, which leave all state as it was.

    Args:
        runner: of the passes; the caller holds the relay's lock.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner, self._model = runner, runner.parts.model
        self._model_call, self._backend = runner.model_call, runner.backend

    @property
    def _parts(self) -> RelayParts:
        return self._runner.parts  # with the layers of now

    def losses(self, batches: Sequence[Any], perturbed: bool) -> list[float]:
        """Return the losses of a few rows each; see `_measure`."""
        return [float(loss) for loss in self._measure(batches, perturbed, self._runner.objective)]

    def outputs(self, batches: Sequence[Any], perturbed: bool) -> list[Any]:
        """Return the outputs of a few rows each; see `_measure`."""
        return self._measure(batches, perturbed, self._model_call.outputs)

    def _measure(self, batches: Sequence[Any], perturbed: bool, task: PassTask) -> list[Any]:
        """Return the results of a few rows each, in evaluation mode and float32; all state is as before.

        With `perturbed`, the shell's weights are perturbed, in copies. Where layers compute in host memory the model's own
        forward runs, in a tenth of the time. Elsewhere one layer and one micro-batch are on the device at a time: in float32,
        weights need twice the memory of bfloat16.
        """
        try:
            if self._can_copy_weights() and (results := self._measure_in_core(batches, perturbed, task)) is not None:
                return results
            prepare = _perturb_shell if perturbed else change_nothing
            return self._infer_apart(batches, task, prepare)
        except Exception as error:
            error.add_note(
                "The relay ran a few rows, to compare them with the same rows in parts. Nothing was trained. With weight=... or "
                'loss_over="micro-batch", this is not needed'
            )
            raise

    def _can_copy_weights(self) -> bool:
        """Whether all weights are in the host's memory, where layers compute, and there is room for a copy in float32."""
        blocks = [block for unit in self._parts.units for block in unit.blocks]
        if not self._parts.device.in_host_memory or any(block.local_layout or block.offloaded for block in blocks):
            return False
        return 2 * sum(4 * block.layout.numel for block in blocks if not block.in_bytes) <= free_bytes(None)

    def _measure_in_core(self, batches: Sequence[Any], perturbed: bool, task: PassTask) -> list[Any] | None:
        """Return the results of the model's own forward on copies of the weights.

        None if it fails, or changes state that the next small batch may read: a relay explains the one, and sees the other.
        """
        check_model(self._model, self._parts.units)
        results: list[Any] = []
        with (
            self._apart(),
            self._runner.without_gradients("evaluation"),
            _weights_copied(self._model, self._parts.units),
        ):
            if perturbed:
                perturb(self._parts.shell)
            differs, versions = StateDiffs().full_diff(self._model), self._tensor_versions()
            try:
                for batch, seed in zip(batches, self._runner.seeds_of(len(batches), self._runner.config), strict=True):
                    RandomState.from_seed(seed).restore()
                    # In a copied context, as a suspended forward's: variables that it sets are not those of the caller.
                    result = copy_context().run(task, self._model, map_tensors(batch, _copied))
                    results.append(map_tensors(result, _copied))
            except Exception:
                return None
            may_differ, changed = differs()
            return None if may_differ or changed or self._tensor_versions() != versions else results

    def _tensor_versions(self) -> list[tuple[int, int]]:
        """Return the identity and autograd's version of each parameter and buffer."""
        return [(id(tensor), version_of(tensor)) for tensor in (*self._model.parameters(), *self._model.buffers())]

    def observe(self, rows: Any, task: PassTask, observers: Sequence[CallObserver], mode: PassMode = "present") -> Any:
        """Run a task on a few rows with observers, and return its result; all state is as before.

        All workers run the rows of worker 0, with the same random numbers, so that they find the same and make the same passes.
        """

        def prepare(runtime: BreadthFirstRuntime) -> None:
            runtime.ctx.observers.extend(observers)

        try:
            # Also, a worker that makes another pass is an error then, and the others do not wait for it.
            if self._backend.count > 1:  # clones, since a slice is sent with the memory of the whole batch
                [rows, *_] = self._backend.gather_items([map_tensors(rows, torch.Tensor.clone)], "observe layers")
            return self._infer_apart([rows], task, prepare, mode=mode, first=0)[0]
        except Exception as error:
            error.add_note(
                "The relay ran a few rows, to find what the model reads by the position of a layer. Nothing was trained"
            )
            raise

    def _infer_apart(
        self, batches: Sequence[Any], task: PassTask, prepare: Callable[[BreadthFirstRuntime], None], **options: Any
    ) -> list[Any]:
        """Return the results of a few rows each, in float32; all state is as before.

        One layer is on the device at a time.
        """
        least = {"schedule": "breadth_first", "ahead": 0, "resident": 0, "keep": 0, "stash": "host"}
        config = replace(self._runner.config, micro_batches=len(batches), precision="fp32", **least)
        with self._apart():
            return self._runner.infer(batches, task, config, prepare, **options)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Restore all state after a block, which computes in full precision and without compiled code."""
        restores = [
            self._parts.snapshot_buffers(),
            self._runner.snapshot_attributes(),
            self._runner.snapshot_user_state(),
        ]
        restores += [partial(param.requires_grad_, param.requires_grad) for param in self._model.parameters()]
        try:
            # Eager: compiled code would be compiled anew for these shapes.
            with preserve_random_state(), full_precision(self._parts.device.torch_device), force_eager():
                yield
        finally:
            for restore in restores:
                restore()

    def run(self, rows: Any) -> torch.Tensor:
        """Run the model on a few rows, the same on all workers; no relay around it."""
        [rows, *_] = self._backend.gather_items([rows])
        restore = snapshot_modules(self._model_call.loss_modules())
        try:
            with self._runner.kv_caches.disabled():
                return self._runner.objective(self._model, rows)
        finally:
            restore()


def make_normaliser(weight: Weight | None, loss_over: LossOver | None, runner: Runner) -> LossNormaliser:
    """Return a normaliser that measures losses by forwards of this runner; see `Relay` for `weight` and `loss_over`."""
    forwards, call = TrialForwards(runner), runner.model_call
    return LossNormaliser(
        weight, forwards.losses, runner.backend.batch_peers, loss_over, forwards.outputs, call.settings
    )
