"""Facade of the engine: `Relay` trains a model whose layers are on the device one at a time.

Every public method holds one lock and delegates to the rooms; `runner.py` runs the passes.
"""

from __future__ import annotations

import re
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from l2l_core import saves
from l2l_core.batches import (
    Batch,
    Join,
    Loss,
    LossError,
    LossOver,
    ModelCall,
    RowsOfBatch,
    Split,
    UserObjective,
    Weight,
    rows_rule,
    structure_of,
)
from l2l_core.config import RelayConfig, check_int, checked_config
from l2l_core.devices import Device, ForkGuard, Ledger, free_bytes, resolve_device, serial_executor
from l2l_core.edit_check import EditCheck
from l2l_core.edits import Branch, Branches, Edit, Editor, History, JournalEntry, SampleRun
from l2l_core.edits import BranchState as BranchState
from l2l_core.eps import GradientBuffers, LayerStore, Masters, Residuals, TornStep
from l2l_core.eps.blocks import (
    Unit,
    build_units,
    check_keys,
    check_model,
    clear_used_gradients,
    disable_packing,
    refuse_checkpointing,
    refuse_scripted,
    refuse_uninitialized,
    refuse_wrapped,
    warn_of_shared_memory,
)
from l2l_core.eps.optimizers import (
    Findings,
    ListEntry,
    OptimizerFactory,
    make_optimizer,
    replaced_step,
    rounds_weights,
    settings_of,
    snapshot_optimizer,
    unwrap_optimizer,
    user_hooks,
    without_step_hooks,
)
from l2l_core.layer_evidence import LayerEvidence
from l2l_core.model import (
    KVCaches,
    LayerRef,
    RandomState,
    refuse_compiled_whole,
    resolve_layers,
    restore_all,
    snapshot_random_state,
)
from l2l_core.plan import PlanError, StepPlan, schedule_name
from l2l_core.runner import BatchProbe, OnTrial, Runner
from l2l_core.saves import EditedStacks, HistoryRestorer, Resumption, history_parts, register_restore, snapshot_parts
from l2l_core.shelf import (
    Disk,
    DiskBackend,
    FileShelf,
    check_in_core_fits,
    make_disk_backend,
    refuse_edited_save,
)
from l2l_core.step import (
    BreadthFirstRuntime,
    InCoreStep,
    PassTask,
    RelayParts,
    VerifyReport,
    defer_interrupts,
    warn_of_tensors_in_left_memory,
)
from l2l_core.step_check import (
    InCoreError,
    StepCheck,
    UnequalStepError,
    in_core_errors,
    kind_of_check,
    remedy_for_error,
)
from l2l_core.trace import StepResult, Trace
from l2l_core.trial_forwards import TrialForwards, make_normaliser
from l2l_core.workers import Network, Workers, make_backend

if TYPE_CHECKING:  # the methods that plan, analyse or inspect import these rooms when they are called
    from l2l_core.analysis import Traces
    from l2l_core.forecast import Fit, Forecast, ForecastCosts
    from l2l_core.inside import Inside, LayerObserver
    from l2l_core.simulator import Cluster

_COMPARISON = (
    7  # times the weights' bytes: copies of weights, gradients and AdamW's state, and again of weights and state
)
_FIT_SECONDS = 30.0  # time limit of a search for settings, once it has found some
_OPEN: WeakSet[Relay] = WeakSet()  # relays of this process that are not closed
_DEFAULT_OPTIMIZER = partial(torch.optim.AdamW, lr=1e-4, fused=True)


class Relay:
    """Train a model one layer at a time, with the same result as plain training.

    Several workers call each method together, each with different rows as its batch.

    Args:
        model: module with dense float32 parameters on the CPU. Between steps its parameters are views of the masters, so
            ``state_dict``, evaluation and files of parts work as usual. An open relay over some of the parameters is closed, with
            a warning. Parameters may be bfloat16 if the optimizer rounds them as `in_bf16` does with ``weights=True``.
        optimizer: factory, called once with all parameters; a torch Optimizer, whose groups and state are adopted, also inside a
            wrapper by accelerate, Lightning or Fabric; or a list of optimizers and of pairs (parameters or filter, factory),
            see `optimizer_list.py`. Default: AdamW with a learning rate of 1e-4.
        device: "auto" (a GPU if PyTorch finds one, else "cpu"), "cpu" (emulated, no limits), "cuda", "cuda:n", a
            `torch.device` with such a name, or a Device.
        layers: modules or dotted names, or a mapping from keys to them. Default: `find_layers(model)`.
        loss: ``loss(outputs, batch) -> scalar``, or ``(scalar, extras)`` for `StepResult.extras`. Default: ``outputs.loss``, or
            the outputs themselves if they are one scalar.
        objective: ``objective(model, micro_batch) -> scalar`` or ``(scalar, extras)``, instead of calling the model and `loss`.
        weight: weight of a micro-batch in the mean loss. Default: measured before the first step, see `loss_normaliser.py`: rows,
            targets other than -100, shifted or not, or a sum. A weighted mean (``cross_entropy(weight=...)``) needs it: the
            sum of the weights of the targets.
        loss_over: for a loss that mixes rows. "batch": `loss` gets the outputs of all micro-batches, joined, and the whole batch;
            the device holds those outputs. "micro-batch": trains on the mean over micro-batches, as plain accumulation does,
            weighted by the items of the loss if these can be determined.
            "sum": the losses of micro-batches add up as they are; `loss` or `objective` has divided them. Default: such a loss
            is refused.
        split: how a batch is cut, if its rows are not along dim 0: their dim, or dims by key, as ``{"x": 1, "mask": None}``;
            ``Views(n)`` for n blocks of rows that belong together; ``Sequences(...)`` for packed tokens; or a function
            ``(batch, k) -> micro_batches``, called several times per step. See `batch_split.py`.
        join: how outputs of micro-batches are put together: the dim of their rows, dims by key, or a function of the list of
            outputs. Default: by the rule of `split`.
        config: settings of a step; may be replaced between steps (``relay.config = ...``). With "auto", the first step runs
            `fit` before it trains.
        workers: "auto", a process group, or `Workers`: several processes train together, each on its own rows. All start
            with the weights and buffers of worker 0. Each worker keeps a shard of every layer, so between steps the model's
            parameters are NaN; `gathered` shows their values, and `close` restores them.
        shelf: keep weights and optimizer state in files, see `FileShelf`. The model's parameters are NaN, also after `close`.
            Each of several workers has files of its shard.

    Raises:
        ValueError, TypeError: the model, the optimizer or a setting is not supported; the message has a remedy.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from l2l_core import Relay, RelayConfig
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)), nn.Linear(16, 4))
        >>> batch = torch.randn(8, 16), torch.randint(4, (8,))  # rows and their targets
        >>> with Relay(model, device="cpu", loss=nn.CrossEntropyLoss(), config=RelayConfig(micro_batches=4)) as relay:
        ...     losses = [relay.step(batch).loss for _ in range(3)]
        >>> losses == sorted(losses, reverse=True)  # it learns
        True
        >>> weights = model.state_dict()  # an ordinary model again
    """

    _closed = True  # until it is made
    _why_closed = ""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory | Optimizer | Sequence[ListEntry] = _DEFAULT_OPTIMIZER,
        device: str | torch.device | Device = "auto",
        layers: Iterable[nn.Module | str] | Mapping[str, nn.Module | str] | None = None,
        loss: Loss | None = None,
        objective: UserObjective | None = None,
        weight: Weight | None = None,
        loss_over: LossOver | None = None,
        split: Split | None = None,
        join: Join | None = None,
        config: RelayConfig | Literal["auto"] = RelayConfig(),  # noqa: B008 - frozen
        workers: Workers | ProcessGroup | Literal["auto"] | None = None,
        shelf: FileShelf | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}: the relay takes a torch.nn.Module")
        refuse_wrapped(model)
        refuse_checkpointing(model)
        warn_of_shared_memory(model)
        refuse_scripted(model)
        refuse_uninitialized(model)
        keys, layers = (check_keys(layers), layers.values()) if isinstance(layers, Mapping) else (None, layers)
        rule = rows_rule(split, join)
        found = resolve_layers(model, layers)
        refuse_compiled_whole(model, found)
        _close_owners(model)
        self.model = model
        self._auto_fit, self._loss_over = config == "auto", loss_over
        settings = RelayConfig() if config == "auto" else checked_config(config, has_disk=shelf is not None)
        self._model_call, self._kv_caches = ModelCall(model, loss, objective), KVCaches(model)
        self._backend = make_backend(workers, model)
        if shelf is not None:
            own_loss = bool(self._model_call.functions)
            self._backend = make_disk_backend(shelf, self._backend, model, config, own_loss)
        settings = settings.with_seed(self._backend.initial_seed())
        self._check_config(settings, ())
        if loss_over == "batch" and split is not None:
            self._backend.refuse(
                f'split={split!r} with loss_over="batch"', "give rows along dim 0, or train with one worker"
            )
        if any(param.dtype == torch.bfloat16 and param.requires_grad for param in model.parameters()):
            self._backend.refuse("a model in bfloat16", "call model.float()")
        self.device, self._owns_device = resolve_device(device), not isinstance(device, Device)
        self.host = Ledger("host", "Host memory")
        # Before parameters move into masters: a refused optimizer leaves the model unchanged.
        made, findings = make_optimizer(optimizer, model, self._model_call.loss_modules)
        _check_update(settings, findings)
        modules = dict(zip(keys or self._backend.layer_keys([*found]), found.values(), strict=True))
        init_master = self._backend.master_init(self.device.host_empty)
        shell, units = build_units(
            model, modules, init_master, rounds_weights(made), keeps_dtypes=self._backend.keeps_dtypes
        )
        source = self._backend.make_weight_source(self.device, self.host)
        disk_stash = self._backend.make_disk_stash(self.device, self.host)
        parts = RelayParts(model, self.device, self.host, shell, units, source, disk_stash)
        if self.shelf is None and self.workers == 1:  # else the optimizer has parameters over the same memory
            warn_of_tensors_in_left_memory(model, parts.units)
        # If layers compute on the same cores, updates beside them use one. An optimizer that sums over elements gets as many as
        # in core, since the order of its sums depends on the number.
        cores = 1 if self.device.in_host_memory else max(1, torch.get_num_threads() * 3 // 4)
        thread = serial_executor("eps", cores if findings.elementwise else torch.get_num_threads())
        masters = Masters(
            parts.units,
            made,
            model.parameters,
            self.host,
            findings,
            self._backend.shares_params,
            self._backend.keeps_dtypes,
        )
        gradients = GradientBuffers(self.host, self.device.host_empty)
        self._store = LayerStore(masters, gradients, Residuals(self.device), thread)
        self._store.reducer = self._backend.make_reducer(loss_over == "batch")
        self._runner = Runner(
            parts,
            self._store,
            self._model_call,
            partial(make_normaliser, weight, loss_over),
            loss_over == "batch",
            self._backend,
            self._kv_caches,
            settings,
            rule,
        )
        agree = partial(self._backend.gather_items, list[None](), "change the stack")
        self._editor = Editor(
            model, shell, units, self._store, self.host, self.device.host_empty, self._runner.seed, agree
        )
        self._evidence = LayerEvidence(self._runner, self._editor, self._backend.gather_items)
        self._edit_check = EditCheck(self._editor, self._evidence)
        self._history = History(self._editor)
        self._branches = Branches(self._editor, self.host, self.device.host_empty)
        self._step_check = StepCheck()
        self._process, self._busy = ForkGuard(), threading.Lock()
        try:
            self._runner.steps = self._backend.adopt_blocks(
                parts.units, self._store, self.host, self.device, self._shared_facts
            )
            if self.shelf is not None:
                self._model_call.continue_run(self.shelf.folder, self.shelf.own_loss)
            self._editor.restore_notes()
            disable_packing(model.modules())  # last, since a failure leaves the model as it was
        except BaseException:
            self._shut_down()
            raise
        self._closed = False
        _OPEN.add(self)

    # -- state ---------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        if self._closed:  # or not made, as in the traceback of an error in `__init__`
            return "Relay(closed)"
        layers, parameters = len(self._runner.parts.layers), sum(param.numel() for param in self.model.parameters())
        size = f"{type(self.model).__name__}, {layers} layers, {parameters:,} parameters"
        return f"Relay({', '.join([size, self.device.name, f'{self.steps} steps', *self.config.differences()])})"

    @property
    def stack(self) -> tuple[Unit, ...]:
        """Layers in order, with permanent key, name, sizes, version and statistics of the last step; see `Unit`."""
        return tuple(self._runner.parts.layers)

    @property
    def stacks(self) -> dict[str, tuple[Unit, ...]]:
        """Layers in order, by dotted name of their container; a layer is listed once per use."""
        return {stack.name: tuple(self._editor.registry.units_of(stack)) for stack in self._editor.registry.stacks}

    @property
    def loops(self) -> Mapping[str, int]:
        """How often the model's forward runs the stacks for which an edit has set or found it, by their names."""
        registry = self._editor.registry
        return {s.name: max(n.values()) for s in registry.stacks if (n := registry.loops.get(registry.first_name(s)))}

    @property
    def shell(self) -> Unit:
        """The parameters and buffers outside of layers; they stay on the device during a step."""
        return self._runner.parts.shell

    @property
    def objective(self) -> Callable[[nn.Module, Any], torch.Tensor]:
        """Function of a model and a micro-batch that runs the model and returns its scalar loss, as a step does."""
        return self._model_call.objective

    @property
    def objective_summary(self) -> str:
        """How the losses of the last batch's micro-batches were put together, in words; empty before the first."""
        return self._runner.normaliser.summary

    @property
    def store(self) -> LayerStore:
        """The eager param-server."""
        return self._store

    @property
    def shelf(self) -> DiskBackend | None:
        """The files with weights and optimizer state; None if they are in memory."""
        return self._backend if isinstance(self._backend, DiskBackend) else None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer over the masters, for schedulers, logging and ``state_dict``."""
        return self._store.optimizer

    @property
    def config(self) -> RelayConfig:
        """Settings of the next step; may be replaced between steps. With "auto", the defaults until the first step."""
        return self._runner.config

    @config.setter
    def config(self, config: RelayConfig) -> None:
        config = checked_config(config, has_disk=self.shelf is not None)
        config = config.with_seed(self._runner.seed())
        self._check_config(config, self._branches.others)
        _check_update(config, self._store.masters.findings)
        self._runner.config, self._auto_fit = config, False

    @property
    def fits_itself(self) -> bool:
        """True if the next step runs `fit` first: made with "auto", and `config` not set since."""
        return self._auto_fit

    @property
    def on_trial(self) -> OnTrial | None:
        """Function that is called before a search tries settings, with an error and the settings; None for none.

        The error is that of the step that did not fit, while settings that fit are searched; None in `fit`. An exception of
        the function ends the search: `fit` raises it, and the error of the step gets it as a note.
        """
        return self._runner.on_trial

    @on_trial.setter
    def on_trial(self, function: OnTrial | None) -> None:
        self._runner.on_trial = function

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        return self._runner.steps

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a relay has threads and cannot be copied or pickled: save it with relay.save(folder) and make another one with "
            "Relay.load, or copy its model, relay.model, and the state_dict of its optimizer"
        )

    def state_dict(self) -> dict[str, int]:
        """Return the number of completed steps and the seed, from which the random numbers of the next step follow.

        With those of model, optimizer and scheduler it rewinds a relay to the bit, as after a search for a learning rate.

        Example:
            >>> result = relay.step(batch)
            >>> relay.state_dict()
            {'steps': 1, 'seed': 0}
        """
        return {"steps": self.steps, "seed": self._runner.seed()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after as many steps, with the seed, of a `state_dict`; several workers call it together.

        Raises:
            ValueError: another number of steps than an integer of at least 0, another seed, or other keys; or weights are in
                files, which hold the number of steps.

        Example:
            >>> before = relay.state_dict()
            >>> weights = {name: value.clone() for name, value in model.state_dict().items()}
            >>> losses = [relay.step(batch).loss for _ in range(2)]  # a trial
            >>> relay.load_state_dict(before)
            >>> keys = model.load_state_dict(weights)  # likewise the optimizer's
            >>> relay.steps
            0
        """
        if self.shelf is not None:
            raise ValueError(
                "load_state_dict of a relay with a shelf: its files hold the number of steps, restored with the weights: "
                "copy the folder between steps and resume from the copy, with RelayConfig(seed=...) as before"
            )
        if not isinstance(state, Mapping) or state.keys() != {"steps", "seed"}:
            raise ValueError(
                f"state={state!r}: give what relay.state_dict() returned, a mapping with 'steps' and 'seed'"
            )
        for name, value in state.items():
            check_int(name, value, least=0)
        with self._exclusive():
            self._runner.config = replace(self.config, seed=state["seed"])
            self._runner.steps = state["steps"]

    @property
    def workers(self) -> int:
        """Number of workers that train together; 1 without workers."""
        return self._backend.count

    @property
    def rank(self) -> int:
        """Rank of this worker, from 0."""
        return self._backend.rank

    @property
    def trace(self) -> Trace | None:
        """Trace of the current or last step; None before the first. `Trace.events_since` follows it live.

        After a failed step it holds the events until the failure, and `Trace.failed` has the error.
        """
        return self._runner.trace

    def traces(self) -> Traces:
        """Gather the traces of all workers for the last step, on every worker.

        Raises:
            ValueError: no step was made yet.

        Example:
            >>> result = relay.step(batch)
            >>> [trace.worker.rank for trace in relay.traces()]  # of all workers, on every worker
            [0]
        """
        from l2l_core.analysis import Traces

        with self._exclusive(), self._backend.synchronized("put traces together", self._shared_facts):
            if self.trace is None:
                raise ValueError("no step was made yet, so there is no trace: make one with `relay.step(batch)`")
            return Traces(self._backend.gather_items([self.trace]))

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all threads and make model and optimizer ordinary again. A second call does nothing.

        Each parameter then has separate memory. With one worker, a relay is also closed when its last reference is gone.

        Layers kept on disk for undo are deleted. Workers close together and then hold all weights; if a worker is lost or
        does not close within half a minute, the others keep only their shards. In a forked process this does nothing.

        Example:
            >>> relay.close()
            >>> loss = nn.functional.cross_entropy(model(batch[0]), batch[1])  # the model is an ordinary one again
            >>> relay.step(batch)
            Traceback (most recent call last):
            RuntimeError: this relay is closed: make a new Relay over the model
        """
        if self._closed or not self._process.is_current:
            return
        self._backend.leave()
        self._shut_down()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be gone by then
        if is_finalizing() or self._closed or self.workers > 1 or not self._process.is_current:
            return
        # Another relay may be in the middle of a step on the caller's device, whose threads end with it
        self._shut_down(with_device=self._owns_device)

    def _shut_down(self, with_device: bool = True) -> None:
        self._closed = True
        _OPEN.discard(self)
        clear_used_gradients(self.model.parameters())
        self._runner.close()
        self._store.close()
        self._editor.close()
        if with_device:
            self.device.close()  # after the EPS, whose work may wait for copies
        self._backend.close()

    @property
    def journal(self) -> tuple[JournalEntry, ...]:
        """Edits made so far, oldest first."""
        return self._history.journal

    @property
    def branch(self) -> str:
        """Name of the current branch; "main" until another is made."""
        return self._branches.active

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All branches, by name."""
        return self._branches.list_branches(self.steps, self._history)

    @property
    def can_undo(self) -> bool:
        """True if `undo` has an edit to undo."""
        return bool(self._history.undo_stack)

    @property
    def can_redo(self) -> bool:
        """True if `redo` has an edit to redo."""
        return bool(self._history.redo_stack)

    # -- operations ----------------------------------------------------------------------------------------------------

    def step(
        self, batch: Batch, skip: Iterable[LayerRef] = (), force: bool = False, plan: StepPlan | None = None
    ) -> StepResult:
        """Train on one batch. With several workers, each passes its own rows, and all return the loss over all rows.

        Args:
            batch: rows to slice into micro-batches, see `batch.py`. If micro-batches hold unequal shares of targets, the
                first such step evaluates a few rows to find the divisor of the mean loss.
            skip: layers, named as in edits, that this step runs without: they are neither loaded nor updated. The model's
                code around a layer runs, and the layer returns its input, so that every other layer keeps its position and
                what is read by it. All layers may be skipped. Layers whose output is not like their input (a residual sum
                outside of the layer) are taken out of their list, one must stay, and nothing may depend on positions, as far as
                forwards on a few rows show. Of hidden states that transformers collects, the entry of a layer that keeps its
                place is its input. For LayerDrop (Fan et al., arXiv 1909.11556) and stochastic depth (Huang et al.,
                arXiv 1603.09382).
            force: skip layers even if the check of the model's structure is against it; see `apply`.
            plan: run these actions, made by `plan` and perhaps edited, in place of the relay's own schedule. Number of layers
                ahead, of slots and of kept graphs are the plan's; `update` and the place of the stash are the relay's.

        Raises:
            PlanError: the plan breaks a rule of a step, or the model calls other layers. Nothing has changed.
            ValueError, TypeError: `skip` has an unknown layer or one that cannot be left out, or the batch cannot be split or
                weighed. Nothing has changed.
            TornStep: an error after the first eager update; names the updated layers. After any other exception, weights and
                optimizer state are as before the step.
            WorkerError: another worker failed, runs another operation, or is lost; after an error on this worker, the
                others raise it. Either all workers keep the state before the step, or all raise TornStep.
            DeviceOutOfMemory: the device's byte budget is too small. The message lists the largest tensors, settings that
                fit, and the smallest sufficient budget; to find them, a few micro-batches are rehearsed as in `forecast`.
            KeyboardInterrupt: after the step has finished; a second interrupt ends it at once.

        Example:
            >>> result = relay.step(batch)
            >>> result.verified  # the first step of a kind is compared with training in core
            'equal to the step in core, to the bit; compared in ... s'
            >>> result = relay.step(batch, skip=[2, 3])  # without two of the layers
            >>> relay.steps
            2
        """
        with (
            defer_interrupts(),  # outermost: it raises when the others have restored everything
            self._exclusive(),
            torch.enable_grad(),
            self._kv_caches.disabled(),
        ):
            if self._auto_fit:
                self._fit(batch, None, None, (), _FIT_SECONDS)
            skip = _reusable(skip)
            with self._backend.synchronized("make a step", partial(self._shared_facts, batch, skip)):
                if self._store.has_hooks:  # inside: if only one worker has hooks, the others raise at once
                    why = "hooks would see shards of parameters; do it between steps, in `with relay.gathered()`"
                    self._backend.refuse("a hook around the optimizer's step", why)
                config = self._with_given_plan(plan)
                self._refuse_own_schedule(config, bool(skip))
                config = self._runner.resolve_config(config, batch)
                if skip:
                    with self._skipping(skip, batch, force) as skipped:
                        result = self._step(batch, config)
                    for unit in skipped:
                        unit.stats.clear()  # they are of the last step
                    return result
                return self._checked_step(batch, config)

    def forward(self, batch: Batch, function: PassTask | None = None) -> Any:
        """Run the model in evaluation mode and return its outputs, joined over micro-batches. Nothing changes.

        Args:
            batch: as for `step`.
            function: ``function(model, micro_batch)`` to run instead of the model alone; its results are joined. Default: the
                model is called from the micro-batch.

        Example:
            >>> relay.forward(batch).shape  # rows, classes
            torch.Size([8, 4])
        """
        with self._together("run forward", batch):
            rows, micro_batches = self._runner.split(batch)
            outputs = self._runner.infer(micro_batches, self._model_call.outputs if function is None else function)
            # Divisors may need evaluations of the loss: at most once, and only if an output is a scalar.
            return rows.join(outputs, cache(partial(self._runner.normaliser.divisors, rows, micro_batches)))

    def evaluate(self, batch: Batch, skip: Iterable[LayerRef] = (), force: bool = False) -> float:
        """Return the mean loss of a batch in evaluation mode. Weights, buffers and random state do not change.

        All layers run, those too that a schedule skips in training: right for LayerDrop, whose model is the whole one. For
        `ActiveLayers`, whose model is the layers that run, pass ``skip=schedule.skip_in_evaluation(relay)``.

        Args:
            batch: as for `step`.
            skip: layers that do not run, as for `step`.
            force: as for `step`.

        Example:
            >>> before = relay.evaluate(batch)
            >>> result = relay.step(batch)
            >>> relay.evaluate(batch) < before
            True
        """
        skip = _reusable(skip)
        with (
            self._together("evaluate", facts=partial(self._shared_facts, batch, skip)),
            self._skipping(skip, batch, force),
        ):
            self._model_call.check_loss()
            return self._runner.evaluate(batch, self._runner.normaliser)

    def probe(
        self, batches: Iterable[Batch], *edits: Edit, force: bool = False, skip: Iterable[LayerRef] = ()
    ) -> list[float]:
        """Return the losses of batches, as `evaluate`, without any effect on later steps.

        Restores everything that a forward changes in evaluation mode too (buffers, plain attributes of modules, NumPy's
        random state, metrics that are modules); measurements of batches and layers are not kept for steps. Hooks on modules,
        `objective` and `loss` do run, and other state that they keep outside of the model is not restored. Workers pass the
        same number of batches.

        Args:
            batches: as for `evaluate`.
            edits: applied as one group before the losses are measured, and reverted after: weights, optimizer, journal,
                layer keys and redo history are as before.
            force: as for `apply`.
            skip: layers that do not run, as for `evaluate`; named as in the stack after the edits.

        Raises:
            ValueError, TypeError: an edit cannot be applied, or a batch cannot be evaluated.
            DeviceOutOfMemory: as for `step`.

        Example:
            >>> from l2l_core import Drop
            >>> (now,) = relay.probe([batch])
            >>> (without,) = relay.probe([batch], Drop(2))  # the loss if layer 2 were not there
            >>> len(relay.stack)
            6
        """
        batches, skip = list(batches), _reusable(skip)  # workers compare the number before they apply edits
        with (
            defer_interrupts(),
            self._exclusive(),
            self._restored_state(),
            ExitStack() as trial,
        ):
            if not force and batches:
                self._check_positions(edits, self._few_rows(self._runner.rows_of(batches[0])))
            trial.enter_context(self._trial_edits(edits, force, len(batches)))
            return [self._probe(batch, skip, force) for batch in batches]

    def probe_batch(self, batch: Batch, *, outputs: bool = False) -> BatchProbe:
        """Return loss and outputs of one batch in evaluation mode, without any effect on later steps.

        Restores all that `probe` does, and what hooks, `objective` and `loss` keep outside of the model.

        Args:
            batch: as for `evaluate`.
            outputs: whether to return the model's outputs too; they come from the pass that computes the loss, or from a
                second one with `objective=` or `loss_over="batch"`.

        Raises:
            ValueError, TypeError: the batch cannot be evaluated.
            DeviceOutOfMemory: as for `step`.

        Example:
            >>> probe = relay.probe_batch(batch, outputs=True)
            >>> probe.loss == relay.evaluate(batch), probe.outputs.shape
            (True, torch.Size([8, 4]))
        """
        with (
            defer_interrupts(),
            self._exclusive(),
            self._restored_state(self._runner.snapshot_user_state()),
            self._backend.synchronized("probe", partial(self._shared_facts, batch)),
        ):
            return self._runner.probe_batch(batch, outputs)

    def look(
        self,
        batch: Batch,
        layers: Iterable[LayerRef] | None = None,
        *,
        micro_batches: Sequence[int] = (0,),
        row: int = 0,
        positions: int = 32,
        attention: bool = False,
        lens: bool = False,
        generate: int = 0,
        top: int = 3,
        leave_out: Iterable[LayerRef] = (),
        force: bool = False,
    ) -> Inside:
        """Inspect activations, attention and logit lens in evaluation mode, without any effect on later steps, as `probe`.

        The chosen micro-batches run through all layers once. Each chosen layer is reduced to a few figures (its input, its
        output and their difference) while it is on the device, so device memory does not grow with depth. All workers
        inspect the rows of worker 0.

        Args:
            batch: as for `step`, split into as many micro-batches; only the chosen ones run.
            layers: layers to inspect, named as in edits. Default: up to 12, evenly spaced.
            micro_batches: numbers of the micro-batches to run, from 0.
            row: row of each of them whose attention and tokens are kept.
            positions: number of positions of the row to keep, from the first.
            attention: keep attention maps. They are computed beside the layers, which run unchanged; except PyTorch's own
                `TransformerEncoderLayer`, which takes an equivalent path that may round differently.
            lens: for each chosen layer, run the micro-batches again without the layers after it, as if they had been
                dropped, and keep the loss and the predictions of the model's own head.
            generate: number of tokens to generate with the model cut after each chosen layer, from the row's first
                `positions` tokens (fewer if there is no room). They replace tokens of the row. Takes one pass of one row
                per token and layer, and three that test whether the model is causal.
            top: number of tokens that `lens` keeps at each position.
            leave_out: layers that do not run, as in ``step(skip=...)``.
            force: as for `step`, of the layers that `leave_out` and `lens` leave out.

        Raises:
            ValueError, TypeError: an unknown layer, a number out of range, or a batch that cannot be evaluated.
            DeviceOutOfMemory: as for `step`.

        Example:
            >>> inside = relay.look(batch, layers=[0, 5])
            >>> inside.keys
            ('L000', 'L005')
        """
        from l2l_core.inside import InspectionPasses, InspectionRequest, MicroBatchRows, check_arguments, run_inspection

        began_s = time.perf_counter()
        layers, leave_out, micro_batches = map(_reusable, (layers, leave_out, micro_batches))
        numbers = micro_batches, row, positions, attention, lens, generate, top

        def facts() -> dict[str, str]:
            keys = [unit.key for unit in self._observed_units(layers)]
            return {**self._shared_facts(batch, leave_out), "what is inspected": repr((keys, numbers))}

        with (
            self._together("look inside", facts=facts),
            self._restored_state(),
            self._skipping(leave_out, batch, force),
        ):
            [batch] = self._backend.gather_items([batch] if self.rank == 0 else [], "send the rows of worker 0")
            rows, parts = self._runner.split(batch)
            sizes = rows.sizes(len(parts))
            chosen, row, positions, generate, top = check_arguments(sizes, micro_batches, row, positions, generate, top)
            units = self._observed_units(layers)
            of_each = tuple(MicroBatchRows.of(parts[k], sizes[k], rows.leading(sizes[k])) for k in chosen)
            request = InspectionRequest(
                frozenset(unit.key for unit in units), chosen, of_each, row, positions, attention
            )
            passes = InspectionPasses(
                self._run_observed,
                partial(self._skipping, batch=batch, force=force),
                tuple(self._runner.parts.layers),
                self._runner.objective,
                self._runner.rows_of,
            )
            inside = run_inspection(
                passes, units, [parts[k] for k in chosen], request, lens=lens, generate=generate, top=top
            )
        return replace(inside, step=self.steps, branch=self.branch, seconds=time.perf_counter() - began_s)

    def verify(self, batch: Batch, host_bytes: int | None = None) -> VerifyReport:
        """Train one step by relay and in core from the same state, compare the results, and restore the state.

        Compares loss, weights, buffers and optimizer state. Afterwards weights, buffers, versions, optimizer state,
        settings and counters, random generators, statistics, plain attributes of modules and meter records are as before.
        Step hooks of the optimizer run on neither side, so their effect is not compared. Hooks on modules, `objective` and
        `loss` run on both sides; metrics that are modules are restored, other state outside of the model is not.

        The in-core side runs in float32 on the same kind of device, which needs room for the whole model. On a GPU, expect
        agreement to float32 rounding, not equal bits. With ``precision="bf16"`` or `compress` the report shows their error.

        Each worker runs the whole in-core side, on the micro-batches of all, and needs room for the model twice. Only
        ``reduce="ordered"`` gives equal bits. Buffers are not compared if each worker has its own.

        With a shelf, the relay's step runs from files without changing them and is compared block by block; the in-core
        side is in host memory.

        Args:
            batch: as for `step`.
            host_bytes: limit for weights, gradients and optimizer state of the in-core side; activations are not counted.
                Default: the free host memory with a shelf, else no limit.

        Raises:
            ValueError: the in-core side needs more than `host_bytes`, or the optimizer's step was replaced on the object.
                Nothing was run.

        Example:
            >>> report = relay.verify(batch)
            >>> report.equal, report.max_abs_diff
            (True, 0.0)
            >>> relay.steps  # nothing was trained
            0
        """
        with self._together("verify", batch), torch.enable_grad():
            if host_bytes is not None or self.shelf is not None:
                check_in_core_fits(self._store.masters, free_bytes(None) if host_bytes is None else host_bytes)
            if name := replaced_step(self.optimizer):
                raise ValueError(
                    f"optimizer.step was replaced by {name}, which cannot be called for the in-core side: put it into a class, "
                    "or remove it (del optimizer.step)"
                )
            try:
                return self._compare(batch, self.config, in_place=False)
            except InCoreError as error:
                raise error.error from None

    def expect(self, batch: Batch) -> AbstractContextManager[object]:
        """Set an example of the next batch, so that edits that run layers (``init="identity"``) need no step before them.

        As a context manager it is in force until the block ends; then the previous example is restored, unless a step has
        succeeded in the block.

        Example:
            >>> from l2l_core import Insert
            >>> example = relay.expect(batch)  # no step was made yet
            >>> before = relay.evaluate(batch)
            >>> inverse = relay.apply(Insert(at=3, init="identity"))
            >>> relay.evaluate(batch) == before
            True
        """
        factory = self._editor.layer_factory
        with self._exclusive():
            before, expected = factory.run_model, self._sample_call(self._runner.split(batch)[0])
            factory.run_model = expected

        def restore() -> None:
            if factory.run_model is expected:
                factory.run_model = before

        block = ExitStack()
        block.callback(restore)
        return block

    def plan(self, batch: Batch, config: RelayConfig | None = None) -> StepPlan:
        """Return the actions of a step on this batch in the order of issue, without training; `print` shows them.

        Layers are taken to be called in the order of the last step, by all micro-batches; before the first step, in the
        order of the stack.

        Args:
            batch: as for `step`.
            config: settings of the step. Default: the relay's own.

        Raises:
            ValueError: the schedule is "depth_first", where autograd decides the order.

        Example:
            >>> print(relay.plan(batch))
            plan micro_batches=2 ahead=1 slots=2
            -   -     I0 I1
            0   L000  L:L000>0 L:L001>1 | F0 F1
            1   L001  L:L002>0 | F0 F1
            ...
        """
        with self._exclusive():
            config = self._runner.resolve_config(self.config if config is None else config, batch)
            if config.schedule == "depth_first":
                raise ValueError(
                    "schedule='depth_first' has no plan: autograd decides the order of its actions. Use "
                    "plan(batch, RelayConfig(schedule='breadth_first')), or read the trace of a step"
                )
            return self._runner.plan(config)

    def forecast(
        self,
        batch: Batch,
        config: RelayConfig | None = None,
        *,
        device: Device | Mapping[str, Any] | None = None,
        host_bytes: int | None = None,
        workers: int | None = None,
        network: Network | None = None,
        stragglers: Mapping[int, float] | None = None,
        wire: str | None = None,
        reduce: str | None = None,
        rank: int | None = None,
        disk: Disk | None = None,
    ) -> Forecast:
        """Return the memory and time that a step on this batch needs, without training.

        If the last step was of the same kind (shapes of micro-batches, precision, place of the stash, updates) and not
        metered, its costs are replayed, which takes milliseconds. Otherwise up to four micro-batches per shape are
        rehearsed, forward and backward, without a budget and with an unlimited link: once metered, then timed up to five
        times or for two seconds. Hooks on modules run. A rehearsal also records the order in which layers are called.

        If the step does not fit the device, other settings are rehearsed too; `Forecast.advice` lists those that fit. Each
        worker holds the whole model meanwhile, rehearses, and returns its own forecast.

        Args:
            batch: as for `step`.
            config: settings of the step. Default: the relay's own.
            device: assumed link and budget: a Device, or figures as in `Device.figures`. Default: the relay's own.
            host_bytes: host memory, for `Forecast.largest_depth`.
            workers: assumed number of workers, each with a batch like this one. Default: as many as there are.
            network: between them. Default: as given to `Workers`; without workers, one that takes no time.
            stragglers: by rank, the factor by which compute and EPS are slower than on this worker.
            wire, reduce: as for `Workers`. Default: this relay's; without workers "fp32" and "sum".
            rank: worker to forecast. Default: this one.
            disk: speed of the shelf. Default: measured by writing and reading 64 MB in its folder, see `Disk.of`.

        Raises:
            TypeError, ValueError: a config, batch or figure that no step accepts.
            Exception: errors of the model itself on the batch.

        Example:
            >>> forecast = relay.forecast(batch)
            >>> forecast.peak_device_bytes == relay.step(batch).peak_device_bytes
            True
        """
        from l2l_core.forecast import forecast_step, last_recording

        cluster = self._runner.cluster(
            count=workers, network=network, stragglers=stragglers, wire=wire, reduce=reduce, rank=rank
        )
        with (
            self._together("forecast", batch),
            torch.enable_grad(),
            self._kv_caches.disabled(),
            self._backend.storage_unsharded(),
            self._runner.rehearsing(batch, cluster) as rehearsal,
        ):
            check_model(self.model, self._runner.parts.units)
            self._runner.rows_of(batch)
            recording = last_recording(
                self._runner.trace,
                self.steps - 1,
                self._runner.pass_cache.last_kind,
                self._runner.kind_of((), self.config),
            )
            config = self.config if config is None else config
            _refuse_to_forecast("forecast", config)
            config = self._runner.resolve_config(config, batch)
            device = self.device if device is None else device
            disk_costs = self._disk_costs(config, disk, cluster)
            return forecast_step(rehearsal, batch, config, device, host_bytes, recording, cluster, *disk_costs)

    def fit(
        self,
        batch: Batch,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        *,
        fixed: Iterable[str] = (),
        most_s: float = _FIT_SECONDS,
    ) -> Fit:
        """Find the fastest settings with which a step on this batch fits, and use them from the next step on.

        Steps are rehearsed as in `forecast`; nothing is trained. For each number of micro-batches, and each place of the
        stash if necessary, one rehearsal keeps no graphs and one keeps many; costs in between are computed, and the best
        settings are timed again. If everything fits, depth first is chosen. Results do not depend on these settings, except
        that other micro-batches draw other random numbers.

        The worker with the largest batch rehearses, for the memory of the worker with the least,
        and all use its choice. All hold the whole model meanwhile.

        Args:
            batch: as for `step`; the settings fit batches of its shapes.
            device_bytes: device memory for the step. Default: the device's budget; without one, its free memory.
            host_bytes: host memory, masters and optimizer included. Default: total of used and free. A device that computes
                in host memory shares it.
            fixed: settings to keep: any of "micro_batches", "ahead", "stash", "resident", "keep", "update", "schedule".
                Deferred updates become eager only if the host has no room for all gradients, and never with clipping or
                with hooks around the optimizer's step.
            most_s: time limit in seconds, once settings that fit are found.

        Returns:
            The choice, with its forecast; `str` explains it and lists the needs of the next better settings.

        Raises:
            NothingFits: no settings fit; the message has the memory needed. The settings are unchanged.
            ValueError, TypeError: an unknown name, or a number of bytes out of range.
            Exception: errors of the model itself on the batch.

        Example:
            >>> fit = relay.fit(batch, device_bytes=1_000_000)
            >>> relay.config == fit.config  # used from the next step on; print(fit) gives the reason
            True
        """
        with defer_interrupts(), self._exclusive(), torch.enable_grad(), self._kv_caches.disabled():
            return self._fit(batch, device_bytes, host_bytes, fixed, most_s)

    def apply(self, *edits: Edit, force: bool = False) -> Edit:
        """Edit the stack of layers between two steps. Several edits are one group: all are applied, or none.

        Workers apply the same edits together, and hold all layers whole meanwhile. New layers are those of worker 0. Layers
        that undo may restore stay whole on every worker. With a shelf, an edit is committed like a step and holds a few
        blocks in memory.

        Args:
            edits: in order.
            force: apply an edit that is refused only because of the model's structure: layers of different kinds at a
                position, modules beside the stack with one member per layer, things that the model reads by the position of
                a layer or does with its outputs (found by forwards on rows of the last batch, one of them with the edits), a
                configuration without the depth.

        Returns:
            The inverse edit: applied next, it restores weights, optimizer state and loss to the bit.

        Raises:
            ValueError, TypeError: an edit cannot be applied; the message lists valid ones. Nothing has changed.
            OSError: a shelf's disk fails or has no room for new layers. Nothing has changed.

        Example:
            >>> from l2l_core import Drop, Insert
            >>> inverse = relay.apply(Insert(at=3, init="copy"), Drop(0))
            >>> [layer.key for layer in relay.stack]
            ['L001', 'L002', 'L006', 'L003', 'L004', 'L005']
            >>> inverse = relay.apply(inverse)
            >>> [layer.key for layer in relay.stack]
            ['L000', 'L001', 'L002', 'L003', 'L004', 'L005']
        """
        if not force and (sample := self._editor.layer_factory.run_model) is not None:
            with self._exclusive():
                self._check_positions(edits, sample.rows)
        with self._editing_together("edit", edits):
            self._editor.force = force
            return self._history.apply(edits, self.steps)

    def undo(self) -> JournalEntry:
        """Undo the last edit. Layers that it changed are restored to the bit; other layers keep later training.

        Raises:
            ValueError: there is no edit to undo, or its layers were deleted.

        Example:
            >>> from l2l_core import Drop
            >>> inverse = relay.apply(Drop(0))
            >>> entry = relay.undo()
            >>> len(relay.stack), len(relay.journal)
            (6, 2)
        """
        with self._editing_together("undo"):
            return self._history.undo(self.steps)

    def redo(self) -> JournalEntry:
        """Redo the edit that was undone last.

        Raises:
            ValueError: no edit was undone since the last edit.

        Example:
            >>> from l2l_core import Drop
            >>> inverse = relay.apply(Drop(0))
            >>> entry = relay.undo()
            >>> entry = relay.redo()
            >>> len(relay.stack)
            5
        """
        with self._editing_together("redo"):
            return self._history.redo(self.steps)

    def fork(self, name: str) -> Branch:
        """Make a branch of the present state and switch to it; the old branch keeps the state.

        Copies no weights: a block is copied when a branch that shares it changes it.

        Raises:
            ValueError: the name is empty or taken, or `compress` has feedback.

        Example:
            >>> from l2l_core import Drop
            >>> branch = relay.fork("slim")
            >>> inverse = relay.apply(Drop(0))
            >>> [(branch.name, branch.layers) for branch in relay.branches]
            [('main', 6), ('slim', 5)]
        """
        with self._together("make a branch", branch=name):
            self._check_config(self.config, [name])
            self._branches.fork(name, self._branch_state())
            self._history = self._history.copy()
            return self._current_branch()

    def switch(self, name: str) -> Branch:
        """Switch to another branch: its stack, weights, optimizer, journal, step count, settings and random state.

        Learning rates are restored, but no other state of a learning rate scheduler, which keeps its position: load that of the
        branch, as in the example.

        Raises:
            ValueError: no branch has this name; lists the branches.

        Example:
            >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(relay.optimizer, T_max=100)
            >>> branch = relay.fork("slim")
            >>> positions = {"main": scheduler.state_dict()}
            >>> result = relay.step(batch)
            >>> scheduler.step()
            >>> positions["slim"] = scheduler.state_dict()
            >>> relay.switch("main").active
            True
            >>> scheduler.load_state_dict(positions["main"])
            >>> scheduler.last_epoch  # no step of this branch yet
            0
        """
        with self._together("switch", branch=name):
            with self._editing():
                state = self._branches.switch(name, self._branch_state())
                self.config, self._runner.steps, self._history = state.config, state.steps, state.history
            self._backend.reshard(self._editor.detached.entries)
            self._editor.detached.rebook()
            return self._current_branch()

    def discard(self, name: str) -> None:
        """Delete a branch other than the current one.

        Raises:
            ValueError: no branch has this name, or it is the current one.

        Example:
            >>> branch = relay.fork("slim")
            >>> branch = relay.switch("main")
            >>> relay.discard("slim")
            >>> [branch.name for branch in relay.branches]
            ['main']
        """
        with self._together("discard a branch", branch=name):
            self._branches.discard(name)
            self._history.free_unreachable()

    def save(self, folder: str | Path) -> Path:
        """Save weights, optimizer, random state and step count to `folder`, atomically; return the folder.

        A failure while saving keeps the previous save. Save the `state_dict` of a learning rate scheduler yourself. With a
        shelf, one block at a time is in memory; the save is the same as without. Workers save together to one folder, each
        its shard; any number of workers can load it. If one fails, all raise and the previous save is kept.

        Raises:
            OSError: disk full (with the bytes needed and free), no permission, or workers that see different folders.
            ValueError: the optimizer's state holds a value that is neither a tensor nor plain data.
            WorkerError: saving failed on another worker.

        Example:
            >>> result = relay.step(batch)
            >>> relay.save("run")
            PosixPath('run')
        """
        with (
            self._exclusive(),
            self.device.current(),
            saves.GenerationWriter(Path(folder), self._backend) as new,
            self._backend.synchronized("save", self._shared_facts),
        ):
            saves.write_save(new, self._saved_state())
        return Path(folder)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        model: nn.Module,
        optimizer: OptimizerFactory | Optimizer | Sequence[ListEntry] = _DEFAULT_OPTIMIZER,
        modules: Mapping[str, nn.Module] = MappingProxyType({}),
        **options: Any,
    ) -> Relay:
        """Make a relay that continues, to the bit, from a save.

        With a learning rate scheduler: make optimizer and scheduler, pass that optimizer, then load the scheduler's state. A
        scheduler made after `load` would reset the learning rate.

        Args:
            folder: folder given to `save`.
            model: a model with the structure of the saved one when its relay was made, or when it was saved. Edits since
                then are applied to it, and its weights are replaced.
            optimizer: of the same kind and groups; its state and settings are replaced.
            modules: by key, layers that edits inserted and that resemble none of the model's: a save has no code.
            options: `device`, `layers`, `loss`, `objective`, `weight`, `loss_over`, `split`, `join`, `config`,
                `workers`, `shelf` of the constructor.
                Default for `config` and `layers`: as saved. After training on a loss of yours, a step without one is refused.
                All workers need the folder, and each reads its shard. A shelf is filled block by block, so nothing is whole in
                memory, and the model may be one of `empty_weights`.

        Raises:
            ValueError: the folder is damaged, incomplete, of another model (names the file), or not the same for all workers.
            WorkerError: loading failed on another worker.

        Example:
            >>> from copy import deepcopy
            >>> twin = deepcopy(model)  # any model of this structure
            >>> folder = relay.save("run")
            >>> with Relay.load("run", twin, device="cpu", loss=nn.CrossEntropyLoss()) as resumed:
            ...     resumed.step(batch).loss == relay.step(batch).loss
            True
        """
        shelf, workers, optimizer = options.pop("shelf", None), options.get("workers"), unwrap_optimizer(optimizer)
        with ExitStack() as back:  # a failure restores the caller's model and optimizer
            options["workers"] = backend = make_backend(workers, model)
            back.callback(backend.close)
            register_restore(model, optimizer, back)
            with backend.synchronized("load a save", dict):
                saved = saves.load_save(Path(folder), backend)
                if "config" not in options:
                    options["config"] = saved.config()
                config = options["config"]
                seed = config.seed if isinstance(config, RelayConfig) else None
                edited, parts = saved.edited, saved.past()
                resumption = Resumption(saved, edited, parts, modules)
                options.setdefault("layers", resumption.prepare(model, optimizer, back))
            if shelf is not None:
                refuse_edited_save(saved)
                own_loss = saved.own_loss or any(options.get(name) is not None for name in ("loss", "objective"))
                options["workers"] = backend = make_disk_backend(
                    shelf, backend, model, options["config"], own_loss, from_save=True
                )
                back.callback(backend.close)
            relay = cls(model, optimizer, **options)
            back.callback(relay.close)
            relay._adopt(saved, resumption, back)
            back.pop_all()
        relay._history.free_unreachable()  # layers of the model that the save lacks
        if seed is None:
            relay._runner.config = replace(relay.config, seed=saved.seed)
        return relay

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        optimizer: OptimizerFactory | Sequence[ListEntry] = _DEFAULT_OPTIMIZER,
        *,
        quantize: Any = None,
        adapters: Any = None,
        dtype: torch.dtype = torch.float32,
        model_class: Any = None,
        **options: Any,
    ) -> Relay:
        """Make a relay over a model of transformers in a local folder, quantised while it is read, with adapters.

        Each tensor is quantised before the next one is read, so the host needs the memory of the quantised model. It needs
        transformers, and bitsandbytes and peft for the names below (``pip install -e ".[quant]"``).

        Args:
            folder: as written by ``save_pretrained``: config.json and safetensors files.
            optimizer: factory, called once with the trained parameters; or a list as in the constructor.
            quantize: "nf4" (with nested statistics), "int8", or a configuration of transformers such as
                ``BitsAndBytesConfig``. Quantised weights are not trained. Default: nothing is quantised.
            adapters: a configuration of peft such as ``LoraConfig``; then only the adapters are trained.
            dtype: of the parameters that are not quantised. Trained ones must be float32, as peft makes adapters; frozen ones
                keep theirs, so ``torch.bfloat16`` halves embeddings and norms beside adapters.
            model_class: class of the model. Default: the first of ``architectures`` in config.json.
            options: of the constructor. For a `shelf` the quantised model is mapped from files beside the records, so host
                memory need not hold it; the disk needs room for both.

        Raises:
            ValueError: no such files, another `quantize`, or a model that the constructor refuses.
            ImportError: transformers, bitsandbytes, accelerate or peft is not installed.

        Example:
            >>> from transformers import GPT2Config, GPT2LMHeadModel
            >>> sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 32}
            >>> config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
            >>> GPT2LMHeadModel(config).save_pretrained("tiny")
            >>> tokens = torch.arange(8).repeat(4, 1)
            >>> with Relay.from_pretrained("tiny", device="cpu") as relay:  # also quantised, with adapters
            ...     relay.step({"input_ids": tokens, "labels": tokens}).samples
            4
        """
        from l2l_core.integrations import load_pretrained

        shelf = options.get("shelf")
        model = load_pretrained(folder, quantize, adapters, dtype, model_class, None if shelf is None else shelf.folder)
        trained = [param for param in model.parameters() if param.requires_grad]
        made: Any = optimizer(trained) if callable(optimizer) else optimizer
        return cls(model, made, **options)

    def restore(self, folder: str | Path, modules: Mapping[str, nn.Module] = MappingProxyType({})) -> None:
        """Continue, to the bit, from a save in this relay, which has made no step, edit or branch.

        As `load`, for a relay that exists: model, optimizer and other arguments are this relay's, and its settings become those
        of the save. Load the state of a learning rate scheduler afterwards.

        Args:
            folder: folder given to `save`.
            modules: see `load`.

        Raises:
            ValueError: the relay has trained, has several workers or a shelf; or the folder is damaged or of another model.

        Example:
            >>> from copy import deepcopy
            >>> twin = Relay(deepcopy(model), device="cpu", loss=nn.CrossEntropyLoss())
            >>> result = relay.step(batch)
            >>> twin.restore(relay.save("run"))
            >>> twin.step(batch).loss == relay.step(batch).loss
            True
            >>> twin.close()
        """
        if self.shelf is not None or self.workers > 1:
            raise ValueError(
                "restore of a relay with a shelf or several workers: make the relay by Relay.load(folder, model, optimizer, ...)"
            )
        if self.steps or self.journal or self._branches.others:
            raise ValueError(
                f"this relay has made {self.steps} steps, {len(self.journal)} edits and {len(self._branches.others)} branches: "
                "a save is restored into a new relay. Make the model and the relay again, and restore then"
            )
        with self._exclusive(), ExitStack() as back:
            register_restore(self.model, self.optimizer, back)
            saved = saves.load_save(Path(folder))
            resumption = Resumption(saved, saved.edited, saved.past(), modules)
            resumption.match(self._editor)
            if not saved.edited.is_edited:  # else the stacks are compared after the edits
                saves.check_compatible(saved, self._saved_state())
            settings = self.config, self._auto_fit
            self.config = saved.config(self.config)
            back.callback(self._set_config, *settings)
            self._why_closed = " since restoring a save into it failed half-way"
            back.callback(self._shut_down)
            self._adopt(saved, resumption, back)
            back.pop_all()
        self._why_closed = ""
        self._history.free_unreachable()

    def _set_config(self, config: RelayConfig, auto_fit: bool) -> None:
        self._runner.config, self._auto_fit = config, auto_fit

    def _adopt(self, saved: saves.SavedRelay, resumption: Resumption, back: ExitStack) -> None:
        """Take over a save, over the model and optimizer with which it was made; `back` receives the way back."""
        backend, edited = self._backend, saved.edited
        back.callback(snapshot_optimizer(self.optimizer))
        back.callback(self._runner.parts.snapshot_buffers())
        back.callback(RandomState.capture().restore)
        with self.device.current(), backend.synchronized("take a save over", dict):
            with backend.unsharded() if edited.is_edited else nullcontext():
                with self._editing():
                    resumption.restack(self._editor, back)
                edited.restore_into(self._editor, self._history)
                saves.check_compatible(saved, self._saved_state())
                past = HistoryRestorer(
                    self._editor,
                    self._history,
                    self._branches,
                    resumption,
                    self.device.host_empty,
                    saved.read_snapshot,
                    backend.shard_of,
                    self.config,
                )
                fill = past.restore(resumption.parts)
                self._check_config(self.config, self._branches.others)
            present = self._saved_state()
            saved.restore_into(present)  # changes the caller's model; in memory nothing can fail from here on
            fill()
        self._runner.steps = saved.steps
        self._model_call.continue_run(saved.path.parent, saved.own_loss)

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Gather all weights and optimizer state on this worker for the length of a block; yield the model.

        All workers enter it together, and each needs the host memory of a relay without workers. Values written to weights
        must be the same on all workers: each keeps its own shard. With one worker in memory this does nothing. A shelf is read
        at the beginning and written at the end; an error in the block leaves its files as they were.

        Raises:
            ValueError: the weights are in files, and there is no room for all of them.
            WorkerError: a worker does not enter it.

        Example:
            >>> with relay.gathered() as whole:  # on each of several workers, or from a shelf: all weights
            ...     torch.save(whole.state_dict(), "weights.pt")
        """
        with (
            self._exclusive(),
            self._backend.synchronized("gather weights", self._shared_facts),
            self._backend.unsharded(),
        ):
            yield self.model

    def _step(self, batch: Batch, config: RelayConfig) -> StepResult:
        """Train on a batch and keep a few of its rows for edits."""
        first_call = self._sample_call(self._runner.rows_of(batch))
        result = self._runner.step(batch, config)
        self._editor.layer_factory.run_model = first_call
        self._editor.registry.runs = Counter(unit.key for unit in self._runner.pass_cache.layer_order)
        self._history.loss = result.loss
        return result

    def _with_given_plan(self, plan: StepPlan | None) -> RelayConfig:
        """Return the relay's settings, with the plan that a step was given."""
        if plan is None:
            return self.config
        if self.config.schedule == "depth_first":
            raise ValueError(
                "step(batch, plan=...) with schedule='depth_first', where autograd decides the order, is not possible: leave out "
                "the plan"
            )
        return replace(self.config, schedule=plan)

    def _refuse_own_schedule(self, config: RelayConfig, skips: bool) -> None:
        """Refuse a function or plan in a step that cannot run by one."""
        case = "with several workers" if self.workers > 1 else "with `skip`" if skips else ""
        if config.has_own_schedule and case:
            raise ValueError(
                f"a step by a user-defined schedule ({schedule_name(config.schedule)}) {case} is not possible: leave out the "
                "plan, or set RelayConfig(schedule='breadth_first')"
            )

    def _checked_step(self, batch: Batch, config: RelayConfig) -> StepResult:
        """Train on a batch, after a comparison with training in core if one is due."""
        result, verified = None, ""
        self._model_call.check_loss()
        try:
            kind = partial(self._kind_of_check, batch, config)
            if config.verify != "never" and self._step_check.is_due(config, kind, self.steps):
                reason = self._reason_not_to_compare(config)
                result, verified = self._step_check.run(
                    self._compared_step, self._compare, batch, config, kind(), reason
                )
            if result is None:
                result = self._step(batch, config)
        except (RuntimeError, TypeError, ValueError) as error:
            has_remedy = isinstance(error, TornStep | UnequalStepError | PlanError | LossError)
            if config.verify != "never" and not has_remedy and not self._reason_not_to_compare(config):
                for remedy in filter(None, [remedy_for_error(self._compare, batch, config)]):
                    error.add_note(remedy)
            raise
        return replace(result, verified=verified)

    def _kind_of_check(self, batch: Batch, config: RelayConfig) -> Hashable:
        trained = tuple((unit.key, unit.trained) for unit in self._runner.parts.units)
        layers = trained, self.model.training, *sorted(self.loops.items())
        return kind_of_check(batch, config, layers)

    def _reason_not_to_compare(self, config: RelayConfig) -> str:
        """Return why a step is not compared with training in core; empty if it can be."""
        if self.workers > 1 or self.shelf is not None:
            return f"not compared with training in core: {'several workers' if self.workers > 1 else 'weights are in files'}"
        reasons = {
            "a GPU adds in another order": not self.device.in_host_memory,
            f"precision={config.precision!r} rounds": config.precision != "fp32",
            "compressed gradients are rounded": config.compress is not None,
            "the optimizer has step hooks": bool(user_hooks(self.optimizer)),
            "weights are bfloat16": any(
                block.values.dtype != torch.float32 for block in self._store.masters.blocks if not block.in_bytes
            ),
            "a layer warms up": any(block.warmup for block in self._store.masters.blocks),
        }
        reason = next((reason for reason, holds in reasons.items() if holds), "")
        needed = _COMPARISON * sum(block.nbytes for block in self._store.masters.blocks)
        if not reason and needed > (free := free_bytes(None)):
            reason = f"it takes {needed:,} bytes of host memory, and {free:,} are free"
        return reason and f"not compared with training in core: {reason}"

    def _compare(self, batch: Batch, config: RelayConfig, in_place: bool = True) -> VerifyReport:
        """Train a batch in core, in place or on copies, and by relay; undo both, and return the differences."""
        with without_step_hooks(self.optimizer):
            return self._step_beside_core(batch, config, in_place, lambda report: False)[1]

    def _compared_step(self, batch: Batch, config: RelayConfig) -> tuple[StepResult, VerifyReport]:
        """Train a batch in core, undo that, and train it by relay, which is undone unless it is equal."""
        return self._step_beside_core(batch, config, True, lambda report: report.equal)

    def _step_beside_core(
        self, batch: Batch, config: RelayConfig, in_place: bool, is_kept: Callable[[VerifyReport], bool]
    ) -> tuple[StepResult, VerifyReport]:
        with self.device.current(), self._kv_caches.disabled():  # in the copy, too
            with self._preserved(), without_step_hooks(self.optimizer):
                in_core = self._train_in_core(batch, self._runner.resolve_config(config, batch), in_place)
            with self._preserved() as keep, ExitStack() as gradients:
                gradients.callback(clear_used_gradients, self.model.parameters())
                gradients.callback(in_core.outside.restore)
                try:
                    result = self._step(batch, self._runner.resolve_config(config, batch))
                    with self._backend.storage_unsharded():
                        same_buffers = self._backend.settings.buffers == "same"
                        report = in_core.compare(result, self._runner.parts.units, with_buffers=same_buffers)
                except TornStep as error:  # what it trained is undone
                    raise error.__cause__ or error from None
                if is_kept(report):
                    keep()
                    gradients.pop_all()
                return result, report

    def _train_in_core(self, batch: Batch, config: RelayConfig, in_place: bool) -> InCoreStep:
        self._runner.check_can_step(batch)  # before gradients are added to those of the user
        gather = self._backend.gather_items
        rows, own = self._runner.split(batch)
        micro_batches = gather(own, "verify")
        divisors = gather(self._runner.normaliser.divisors(rows, own), "verify")
        with self._backend.storage_unsharded(), in_core_errors():
            return InCoreStep(
                model=self.model,
                store=self._store,
                micro_batches=micro_batches,
                objective=self._model_call.objective,
                batch_loss=self._runner.batch_loss_in_core(rows, len(own)),
                divisors=divisors,
                seeds=[config.micro_batch_seed(self.steps, k) for k in range(len(micro_batches))],
                max_grad_norm=config.max_grad_norm,
                torch_device=self.device.torch_device,
                in_place=in_place,
            )

    def _fit(
        self, batch: Batch, device_bytes: int | None, host_bytes: int | None, fixed: Iterable[str], most_s: float
    ) -> Fit:
        """Find settings and set them."""
        _refuse_to_forecast("fit", self.config)
        fixed = _reusable(fixed)
        arguments = repr((device_bytes, host_bytes, sorted(fixed), most_s))  # the order of a set differs by process
        with self._backend.synchronized("fit", lambda: {**self._shared_facts(batch), "arguments of fit": arguments}):
            fit = self._runner.fit(batch, device_bytes, host_bytes, fixed, most_s)
            self.config = fit.config
            return fit

    def _probe(self, batch: Batch, skip: Iterable[LayerRef], force: bool) -> float:
        """Measure the loss of a batch without a trace in the normaliser of steps."""
        with (
            self._backend.synchronized("probe", partial(self._shared_facts, batch, skip)),
            self._skipping(skip, batch, force),
        ):
            self._model_call.check_loss()
            return self._runner.evaluate(batch, self._runner.probe_normaliser)

    def _disk_costs(
        self, config: RelayConfig, disk: Disk | None, cluster: Cluster
    ) -> tuple[Callable[[ForecastCosts], ForecastCosts], ...]:
        """Return functions that add the shelf's costs to those of a step: one with a shelf, else none."""
        from l2l_core.forecast import add_shelf_costs, relay_shelf_costs

        checked_config(config, has_disk=self.shelf is not None)
        if (shelf := self.shelf) is None:
            if disk is not None:
                raise ValueError(
                    f"disk={disk!r}, but this relay has no shelf: its weights are in memory. Leave disk out"
                )
            return ()
        if cluster.count > 1:
            self._backend.refuse("a forecast of several workers", "")
        self._check_config(config, ())
        disk = Disk.of(shelf.folder) if disk is None else disk
        return (partial(add_shelf_costs, relay_shelf_costs(shelf, config, disk)),)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _check_config(self, config: RelayConfig, others: Collection[str]) -> None:
        """Refuse settings that workers, a shelf or branches do not support; `others` are the branches besides the current one."""
        if config.schedule == "depth_first":
            if self._loss_over == "batch":
                raise ValueError(
                    "schedule='depth_first' runs one micro-batch after another, and loss_over=\"batch\" needs the outputs of all "
                    "of them: leave schedule out of RelayConfig"
                )
            instead = "it keeps all weights in this process's memory: leave schedule out of RelayConfig"
            self._backend.refuse("schedule='depth_first'", instead)
        if config.has_own_schedule and self.workers > 1:
            raise ValueError(
                f"schedule={schedule_name(config.schedule)} with several workers: a user-defined schedule does not order their "
                "exchanges. Leave schedule out of RelayConfig, or train with one worker"
            )
        if config.update == "whole":
            self._backend.refuse("update='whole'", "the optimizer's step needs all weights: use update='deferred'")
        if config.wire is None:
            return
        instead = "leave compress out of RelayConfig; workers send fewer bits to one another by Workers(wire='bf16')"
        self._backend.refuse(f"compress={config.compress!r}", instead)
        if config.wire.feedback and others:
            raise ValueError(
                f"compress={config.compress!r} with branches ({', '.join(others)}): the residuals on the device cannot be kept "
                f"per branch. Use Compress({config.wire.format!r}, feedback=False), or make no branches"
            )

    def _observed_units(self, layers: Iterable[LayerRef] | None) -> list[Unit]:
        """Return the layers to inspect, in order, each once."""
        from l2l_core.inside import evenly_spaced

        if not self._runner.parts.layers:
            raise ValueError("all layers are left out, so that none can be inspected: leave out fewer")
        if layers is None:
            return [self._runner.parts.layers[i] for i in evenly_spaced(len(self._runner.parts.layers))]
        if isinstance(layers, str | nn.Module) or not isinstance(layers, Iterable):
            raise TypeError(f"layers={layers!r} is not a collection of layers: give a list, as [{layers!r}]")
        wanted = {self._editor.registry.unit_at(where) for where in layers}
        if not wanted:
            raise ValueError("layers=[] names no layer: name one or more, or leave layers out to inspect up to 12")
        return [unit for unit in self._runner.parts.layers if unit in wanted]

    def _run_observed(
        self, micro_batches: Sequence[Any], task: PassTask, observers: Sequence[LayerObserver]
    ) -> list[Any]:
        def prepare(runtime: BreadthFirstRuntime) -> None:
            runtime.ctx.observers.extend(observers)

        config = replace(self.config, micro_batches=len(micro_batches))
        return self._runner.infer(micro_batches, task, config, prepare)

    def _shared_facts(self, batch: Batch | None = None, skip: Iterable[LayerRef] = ()) -> dict[str, str]:
        """Return the state that must be equal on all workers, by name."""
        units = self._runner.parts.units
        layers = [f"{u.key} {u.slot_numel(torch.float32)} {''.join('-+'[flag] for flag in u.trained)}" for u in units]
        return {
            "branch": self.branch,
            "number of the step": str(self.steps),
            "settings": 'config="auto"' if self._auto_fit else repr(self.config),
            "layers, sizes, trained parameters": ", ".join(layers),
            "edits": str(len(self._history.journal)),
            "skip": ", ".join(sorted(unit.key for unit in self._editor.registry.units_at(skip))),
            "training mode": "".join("-+"[module.training] for module in self.model.modules()),
            "optimizer": f"{type(self.optimizer).__name__} {settings_of(self.optimizer)}",
            "structure of the batch": "" if batch is None else str(structure_of(self._runner.rows_of(batch).batch)),
        }

    def _edit_facts(self, edits: Sequence[Edit], probes: int = 0) -> dict[str, str]:
        """Return the shared facts with edits, described without addresses, which differ between processes."""
        edits_to_make = re.sub(r" at 0x[0-9a-f]+", "", repr(edits))
        return {**self._shared_facts(), "edits to make": edits_to_make, "number of batches": str(probes)}

    @contextmanager
    def _together(
        self,
        what: str,
        batch: Batch | None = None,
        branch: str = "",
        facts: Callable[[], dict[str, str]] | None = None,
    ) -> Iterator[None]:
        """Run a block as one operation of all workers, with equal facts; an interrupt is raised after it."""

        def own_facts() -> dict[str, str]:
            return {**self._shared_facts(batch), "name of the branch": repr(branch)}

        with defer_interrupts(), self._exclusive(), self._backend.synchronized(what, facts or own_facts):
            yield

    @contextmanager
    def _editing_together(self, what: str, edits: Sequence[Edit] = ()) -> Iterator[None]:
        """Change whole layers on all workers in a block; afterwards all have the values of worker 0."""
        with self._together(what, facts=partial(self._edit_facts, edits)), self._backend.storage_unsharded():
            with self._editing():
                yield
            self._backend.broadcast_state(self._runner.parts.units)

    @contextmanager
    def _editing(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._editor.force = False
            self._runner.set_layers(self._editor.registry.layers)

    @contextmanager
    def _trial_edits(self, edits: Sequence[Edit], force: bool, probes: int) -> Iterator[None]:
        """Apply edits for the length of a block that evaluates `probes` batches."""
        if not edits:
            yield
            return
        self._editor.force = force
        try:
            with (
                self._backend.synchronized("try edits", partial(self._edit_facts, edits, probes)),
                self._backend.storage_unsharded(),
                ExitStack() as undo,
            ):
                undo.enter_context(self._history.try_edits(edits))
                self._runner.set_layers(self._editor.registry.layers)
                self._backend.broadcast_state(self._runner.parts.units)  # returns when all workers have applied them
                trial = undo.pop_all()
            try:
                yield
            finally:  # an error in the block was raised on all workers
                with (
                    self._backend.synchronized("take edits back", self._shared_facts),
                    self._backend.storage_unsharded(),
                ):
                    trial.close()
        finally:
            self._editor.force = False

    @contextmanager
    def _skipping(self, skip: Iterable[LayerRef], batch: Batch, force: bool = False) -> Iterator[Collection[Unit]]:
        """Run a block without some layers, which are yielded; meter records of the full stack are kept."""
        if not (units := self._editor.registry.units_at(skip)):
            yield ()
            return
        with self._restored_state():
            forms = self._evidence.forms(units, self._few_rows(self._runner.rows_of(batch)))
        with (
            self._editor.without_layers(units, forms, force),
            self._runner.without(units, self._editor.registry.layers),
        ):
            yield units

    def _check_positions(self, edits: Sequence[Edit], rows: Any) -> None:
        """Refuse edits after which layers would get what the model keeps for the position of others; see `EditCheck`."""
        if any(getattr(edit, "moves_layers", False) for edit in edits):
            self._backend.require("edit")  # else its refusal would be taken for a failure of the rows
            self._edit_check.check(edits, rows, self._observing, partial(self._trying, edits))

    @contextmanager
    def _trying(self, edits: Sequence[Edit]) -> Iterator[None]:
        """Make edits for a block that observes, and undo them."""
        with self._restored_state(), self._trial_edits(edits, False, 1), self._observing():
            yield

    @contextmanager
    def _observing(self) -> Iterator[None]:
        with self._restored_state(), self._backend.synchronized("observe layers", self._shared_facts):
            yield

    def _sample_call(self, rows: RowsOfBatch) -> SampleRun:
        """Return a function that runs the model on a few rows, for edits that must run layers."""
        run = TrialForwards(self._runner).run  # no method of the relay, which would not be freed
        return SampleRun(run, self._few_rows(rows))

    def _few_rows(self, rows: RowsOfBatch) -> Any:
        """Return one or two rows of a batch, on which edits and evidence of layers rest."""
        return rows.first(min(2, rows.sizes(rows.most_parts(self.config.micro_batches))[0]))

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._closed:
            raise RuntimeError(f"this relay is closed{self._why_closed}: make a new Relay over the model")
        self._process.check("this relay")
        if not self._busy.acquire(blocking=False):  # waiting would hang if a hook or the loss calls the relay
            raise RuntimeError(
                "this relay is in the middle of a step, or of a session's measurement, in another thread: wait for it, as with "
                "session.wait(), or stop the session; session.edit(lambda relay: ...).result() calls it in between"
            )
        try:
            yield
        finally:
            self._busy.release()

    @contextmanager
    def _preserved(self) -> Iterator[Callable[[], object]]:
        """Undo the training of a block, unless the function that it is given is called."""
        trained = [
            self._runner.snapshot_user_state(),
            self._store.storage.snapshot(),
            self._store.residuals.snapshot(self._store.masters.blocks),
            self._history.snapshot(),
            self._branches.snapshot(),
        ]
        with self._restored_state(*trained) as keep:
            yield keep

    @contextmanager
    def _restored_state(self, *more: Callable[[], object]) -> Iterator[Callable[[], object]]:
        """Restore everything but weights that a forward may change in a block; then call `more`.

        Nothing is restored if the function that the block is given was called.
        """
        parts, factory = self._runner.parts, self._editor.layer_factory
        restores = [self._runner.snapshot_attributes(), parts.snapshot_buffers(), self._runner.snapshot(), *more]
        restores.append(partial(setattr, factory, "run_model", factory.run_model))
        with ExitStack() as undo:
            undo.callback(restore_all([*restores, snapshot_random_state()]))
            yield undo.pop_all

    def _branch_state(self) -> BranchState:
        return self._branches.capture(self.config, self.steps, self._history)

    def _current_branch(self) -> Branch:
        return next(branch for branch in self.branches if branch.active)

    def _saved_state(self) -> saves.RelayState:
        return saves.RelayState(
            self.config,
            self.steps,
            bool(self._model_call.functions or self._model_call.refusal),
            tuple(self._runner.parts.units),
            self._store,
            RandomState.capture(),
            EditedStacks.from_editor(self._editor, self._history, self._runner.pass_cache.layer_order),
            history_parts(self._editor, self._history, self._branches),
            snapshot_parts(self._branches),
            {block.key: block for unit in self._editor.units_with_values for block in unit.blocks},
        )


def _close_owners(model: nn.Module) -> None:
    """Close the open relays of this process that own parameters of `model`, with a warning.

    Raises:
        ValueError: one of them is in the middle of a step.
    """
    names = {param: name for name, param in model.named_parameters()}
    for relay in [relay for relay in _OPEN if relay._process.is_current]:
        own = relay._store.masters.model_params.values()
        if not (shared := [names[param] for param in own if param in names]):
            continue
        first = f"a relay of {len(relay.stack)} layers on {relay.device.name}, after {relay.steps} steps,"
        whose = "this model" if len(shared) == len(names) == len(own) else f"{shared[0]}, a parameter of this model"
        if not relay._busy.acquire(blocking=False):
            raise ValueError(
                f"{first} owns {whose} and is in the middle of a step: wait for it, or train a copy (copy.deepcopy)"
            )
        try:
            relay.close()
        finally:
            relay._busy.release()
        relay._why_closed = ", because another relay was made over its model"
        warnings.warn(
            f"{first} owned {whose} and was closed, since a parameter belongs to one relay. Its weights stay as trained; pass "
            "its optimizer, relay.optimizer, to keep the state. Close a relay before another one is made over its model; to "
            "train both, give one of them a copy of what they share (copy.deepcopy)",
            stacklevel=3,
        )


def _reusable(values: Any) -> Any:
    """Return an iterable that can be read more than once."""
    return tuple(values) if isinstance(values, Iterator) else values


def _refuse_to_forecast(verb: str, config: object) -> None:
    """Refuse a user-defined schedule where steps are simulated by the relay's."""
    if isinstance(config, RelayConfig) and config.has_own_schedule:
        remedy = {
            "forecast": "relay.forecast(batch, replace(relay.config, schedule='breadth_first')) forecasts the same layers in it, "
            "and relay.step(batch) measures a step by yours",
            "fit": "set relay.config = replace(relay.config, schedule='breadth_first') first",
        }[verb]
        raise ValueError(
            f"{verb} with schedule={schedule_name(config.schedule)}: costs are computed for the relay's own order of actions. "
            f"Remedy: {remedy}"
        )


def _check_update(config: RelayConfig, findings: Findings) -> None:
    """Refuse updates of one block at a time by an optimizer that couples blocks."""
    if findings.couples and config.update != "whole":
        raise ValueError(findings.couples)
