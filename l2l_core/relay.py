"""The facade: a model whose layers live in the EPS and relay through a device.

What a person may ask of a relay, one verb after the other, under one lock; the work is done in the rooms, and passes are run by
`runner.py`. It is long because every verb says here what it takes, gives and raises.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from l2l_core import saves
from l2l_core.batches import (
    Batch,
    BatchRows,
    ModelCall,
    Objective,
    Weight,
    join_outputs,
    structure_of,
)
from l2l_core.config import RelayConfig, checked_config
from l2l_core.devices import Device, ForkGuard, Ledger, free_bytes, resolve_device
from l2l_core.edits import Branch, Branches, Edit, Editor, History, JournalEntry
from l2l_core.edits import BranchState as BranchState
from l2l_core.eps import GradientBuffers, LayerStore, Masters, Residuals
from l2l_core.eps.blocks import (
    Unit,
    build_units,
    check_keys,
    check_model,
    refuse_checkpointing,
    refuse_scripted,
)
from l2l_core.eps.optimizers import OptimizerFactory, make_optimizer, rounds_weights, settings_of, without_step_hooks
from l2l_core.model import (
    KVCaches,
    LayerRef,
    RandomState,
    refuse_compiled_whole,
    resolve_layers,
    snapshot_attributes,
    snapshot_except,
)
from l2l_core.runner import Runner
from l2l_core.saves import EditedStacks, HistoryRestorer, Resumption, history_parts, register_restore, snapshot_parts
from l2l_core.shelf import (
    Disk,
    DiskBackend,
    FileShelf,
    SaveImportBackend,
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
)
from l2l_core.surgery import preserve_random_state
from l2l_core.trace import StepResult, Trace
from l2l_core.workers import Network, Workers, make_backend

if TYPE_CHECKING:  # of verbs that plan, analyse or look inside; these import the rooms when they are called
    from l2l_core.analysis import Traces
    from l2l_core.forecast import Fit, Forecast, ForecastCosts
    from l2l_core.inside import Inside, LayerObserver
    from l2l_core.simulator import Cluster

_FIT_SECONDS = 30.0  # a search for settings ends after so many seconds, once it has found some
_DEFAULT_OPTIMIZER = partial(torch.optim.AdamW, lr=1e-4, fused=True)


class Relay:
    """Train a model one layer at a time, with the same result as plain training.

    Args:
        model: any module with dense float32 parameters on the CPU. It stays the user's: between steps its parameters
            are views of the masters, so ``state_dict`` and evaluation work as ever. Parameters may be of bfloat16, and so the
            masters, if the optimizer rounds them as `in_bf16` does with ``weights=True``.
        optimizer: a factory, called once with all parameters, or a ready torch Optimizer, whose groups and state are
            adopted. Default AdamW with a learning rate of 1e-4.
        device: "auto" (a GPU if PyTorch finds one, else "cpu"), "cpu" (emulated, without limits), "cuda", "cuda:n", or a
            Device.
        layers: the layers, as modules or dotted names, or a mapping from keys of your own; default `find_layers(model)`.
        loss: ``loss(outputs, batch) -> scalar``; default ``outputs.loss``.
        objective: ``objective(model, micro_batch) -> scalar``, in place of both.
        weight: what a micro-batch counts for; default what the model's loss is found to be a mean over: targets that are not
            -100, shifted or not, or rows. See `loss_normaliser.py`. Where all count alike nothing is looked for, so a mean over weighed
            targets (``cross_entropy(weight=...)``) has to say so: the sum of their weights.
        config: how to run; may be exchanged between steps (``relay.config = ...``). With "auto", the first step begins by
            looking for the fastest settings that fit, as `fit` does.
        workers: other processes that train along, each with its own rows; see `Workers`. "auto", a process group, or
            Workers(...). Worker 0's weights and buffers are what all begin with. Each keeps a part of every layer, so between
            steps the model's parameters show nothing but NaN; `gathered` shows them, and `close` leaves them whole.
        shelf: keep weights and optimizer state in files; see `FileShelf`. The model's parameters show nothing but NaN then, also
            after `close`.

    Raises:
        ValueError, TypeError: a model, optimizer or setting that cannot relay; the message has the remedy.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory | Optimizer = _DEFAULT_OPTIMIZER,
        device: str | Device = "auto",
        layers: Iterable[nn.Module | str] | Mapping[str, nn.Module | str] | None = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        objective: Objective | None = None,
        weight: Weight | None = None,
        config: RelayConfig | Literal["auto"] = RelayConfig(),  # noqa: B008 - frozen
        workers: Workers | ProcessGroup | Literal["auto"] | None = None,
        shelf: FileShelf | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}: the relay takes a torch.nn.Module")
        refuse_checkpointing(model)
        refuse_scripted(model)
        keys, layers = (check_keys(layers), layers.values()) if isinstance(layers, Mapping) else (None, layers)
        found = resolve_layers(model, layers)
        refuse_compiled_whole(model, found)
        self.model = model
        self._auto_fit = config == "auto"
        asked, config = (
            config,
            RelayConfig() if config == "auto" else checked_config(config, has_disk=shelf is not None),
        )
        self._model_call = ModelCall(model, loss, objective)
        self._kv_caches = KVCaches(model)
        self._backend = (
            make_backend(workers, model) if shelf is None else make_disk_backend(shelf, workers, model, asked)
        )
        self._check_config(config, {})
        if any(param.dtype == torch.bfloat16 for param in model.parameters()):
            self._backend.refuse("a model in bfloat16", "call model.float()")
        self.device = resolve_device(device)
        self.host = Ledger("host", "Host memory")
        # Before parameters move into masters: an optimizer that is refused leaves the model as it was.
        made, findings = make_optimizer(optimizer, model)
        modules = dict(zip(keys or self._backend.layer_keys([*found]), found.values(), strict=True))
        settle = self._backend.master_init(self.device.host_empty)
        shell, units = build_units(model, modules, settle, rounds_weights(made))
        place = self._backend.make_weight_source(self.device, self.host)
        scratch = self._backend.make_disk_stash(self.device, self.host)
        parts = RelayParts(model, self.device, self.host, shell, units, place, scratch)
        # Where layers compute on these cores too, updates behind them take one.
        cores = 1 if self.device.in_host_memory else max(1, torch.get_num_threads() * 3 // 4)
        masters = Masters(parts.units, made, model.parameters, self.host, findings)
        gradients = GradientBuffers(self.host, self.device.host_empty)
        self._store = LayerStore.create(masters, gradients, Residuals(self.device), cores)
        self._store.reducer = self._backend.make_reducer()
        self._runner = Runner(parts, self._store, self._model_call, weight, self._backend, self._kv_caches, config)
        self._editor = Editor(model, shell, units, self._store, self.host, self.device.host_empty, config.seed)
        self._history = History(self._editor)
        self._branches = Branches(self._editor, self.host, self.device.host_empty)
        self._process, self._busy = ForkGuard(), threading.Lock()
        self._closed = False
        try:
            self._runner.steps = self._backend.adopt_blocks(
                parts.units, self._store, self.host, self.device, self._shared_facts
            )
            self._editor.restore_notes()
        except BaseException:
            self._shut_down()
            raise

    # -- what a relay is -----------------------------------------------------------------------------------------------

    @property
    def stack(self) -> tuple[Unit, ...]:
        """The layers in order, with permanent key, name, sizes, version and statistics of the last step."""
        return tuple(self._runner.parts.layers)

    @property
    def stacks(self) -> dict[str, tuple[Unit, ...]]:
        """The layers in order by the dotted name of their container; a layer that is in none is not among them.

        A layer that stands in several places of a container is there several times.
        """
        return {stack.name: tuple(self._editor.registry.units_of(stack)) for stack in self._editor.registry.stacks}

    @property
    def shell(self) -> Unit:
        """What of the model is in no layer and stays on the device during a step."""
        return self._runner.parts.shell

    @property
    def store(self) -> LayerStore:
        """The eager param-server."""
        return self._store

    @property
    def shelf(self) -> DiskBackend | None:
        """The files that weights and optimizer state are in; None where they are in memory."""
        return self._backend if isinstance(self._backend, DiskBackend) else None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, over the masters; for schedulers, logging and ``state_dict``."""
        return self._store.optimizer

    @property
    def config(self) -> RelayConfig:
        """How it runs; may be exchanged between steps. With "auto", the defaults until the first step."""
        return self._runner.config

    @config.setter
    def config(self, config: RelayConfig) -> None:
        config = checked_config(config, has_disk=self.shelf is not None)
        self._check_config(config, self._branches.others)
        self._runner.config, self._auto_fit = config, False

    @property
    def fits_itself(self) -> bool:
        """Whether it will look for settings at its first step: made with "auto", and not told any since."""
        return self._auto_fit

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        return self._runner.steps

    @property
    def workers(self) -> int:
        """Number of workers that train together; 1 for a relay that trains alone."""
        return self._backend.count

    @property
    def rank(self) -> int:
        """Number of this worker among them, from 0."""
        return self._backend.rank

    @property
    def trace(self) -> Trace | None:
        """The trace of the step under way, or of the last one; None before the first. `Trace.events_since` follows it live.

        Of a step that failed it holds what happened until then, and `Trace.failed` says so.
        """
        return self._runner.trace

    def traces(self) -> Traces:
        """Put the traces of the last step of all workers together, on every one of them; all workers do it together.

        Raises:
            ValueError: there was no step yet.
        """
        from l2l_core.analysis import Traces

        with self._exclusive(), self._backend.synchronized("put traces together", self._shared_facts):
            if self.trace is None:
                raise ValueError("no step was made yet, so there is no trace: make one with `relay.step(batch)`")
            return Traces(self._backend.gather_items([self.trace]))

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Join every thread; the model and the optimizer are ordinary ones again. Calling it twice is fine.

        Layers that wait on disk are gone. Several workers close together, and have all weights then; one that does not come
        within half a minute, or was lost, leaves the others with the parts that they have. In a process that was forked
        nothing happens: threads and files are not its own.
        """
        if self._closed or not self._process.is_current:
            return
        self._backend.leave()
        self._shut_down()

    def _shut_down(self) -> None:
        self._closed = True
        self._runner.parts.weight_source.close()
        self._store.close()
        self._editor.detached.close()
        self.device.close()  # after the EPS, whose work may wait for copies
        self._backend.close()

    @property
    def journal(self) -> tuple[JournalEntry, ...]:
        """What was edited so far, oldest first."""
        return self._history.journal

    @property
    def branch(self) -> str:
        """Name of the branch that is trained now; "main" until another one is made."""
        return self._branches.active

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All branches, by name."""
        return self._branches.list_branches(self.steps, self._history)

    @property
    def can_undo(self) -> bool:
        """Whether there is an edit that `undo` would undo."""
        return bool(self._history.undo_stack)

    @property
    def can_redo(self) -> bool:
        """Whether there is an edit that `redo` would do again."""
        return bool(self._history.redo_stack)

    # -- what a relay does ---------------------------------------------------------------------------------------------

    def step(self, batch: Batch, skip: Iterable[LayerRef] = (), force: bool = False) -> StepResult:
        """Train on one batch; each of several workers on its own rows of one, whose loss all return.

        Args:
            batch: sliced along its rows into micro-batches; see `batch.py`. Where these hold unequal shares of targets, the
                first such step looks at the losses of a few rows in evaluation mode, to find out what the loss is a mean over.
            skip: layers that sit this one step out, as edits name layers. The model runs as if they had been dropped; they
                are neither loaded nor updated. LayerDrop (Fan et al., arXiv 1909.11556), stochastic depth (Huang et al.,
                arXiv 1603.09382).
            force: let layers sit out even where that is refused on evidence alone; see `apply`.

        Raises:
            ValueError, TypeError: `skip` names no layer, or all of a stack; or the batch cannot be cut, or not be weighed.
                Nothing has changed.
            TornStep: an error after the first eager update; names the updated layers. Any other exception leaves weights
                and optimizer state as they were.
            WorkerError: another worker has failed, does something else, or is lost; on a failure here the others get it. As for
                any error, the old step is there on all of them, or all raise TornStep.
            DeviceOutOfMemory: the device's byte budget does not suffice; says what fills it, the settings that fit, and the
                smallest budget that would do. To find these, a few micro-batches are rehearsed as in `forecast`.
            KeyboardInterrupt: after the step has finished; a second interrupt ends it at once.
        """
        with (
            defer_interrupts(),  # outermost: it raises when the others have put everything back
            self._exclusive(),
            torch.enable_grad(),
            self._kv_caches.disabled(),
        ):
            if self._auto_fit:
                self._fit(batch, None, None, (), _FIT_SECONDS)
            skip = _reusable(skip)
            with self._backend.synchronized("make a step", partial(self._shared_facts, batch, skip)):
                if self._store.has_hooks:  # in here: where one worker alone has any, the others are told at once
                    why = "hooks would see parts of parameters; do it between steps, in `with relay.gathered()`"
                    self._backend.refuse("a hook around the optimizer's step", why)
                config = self._runner.resolve_config(self.config, batch)
                with self._skipping(skip, force):
                    return self._step(batch, config)

    def forward(self, batch: Batch) -> Any:
        """Run the model in evaluation mode; return its outputs, concatenated over micro-batches. Nothing changes.

        Several workers do it together, each for its own rows.
        """
        with (
            defer_interrupts(),
            self._exclusive(),
            self._backend.synchronized("run forward", partial(self._shared_facts, batch)),
        ):
            rows, micro_batches = self._runner.split(batch)
            outputs = self._runner.infer(micro_batches, self._model_call.outputs)
            # Divisors may cost looks at the loss: asked for once at most, and only if an output is a scalar.
            return join_outputs(
                outputs,
                rows.sizes(len(micro_batches)),
                cache(partial(self._runner.normaliser.divisors, rows, micro_batches)),
            )

    def evaluate(self, batch: Batch) -> float:
        """Return the mean loss of a batch in evaluation mode; no effect on weights, buffers or random state.

        Several workers do it together, each with its own rows of the batch.
        """
        with (
            defer_interrupts(),
            self._exclusive(),
            self._backend.synchronized("evaluate", partial(self._shared_facts, batch)),
        ):
            return self._runner.evaluate(batch, self._runner.normaliser)

    def probe(self, batches: Iterable[Batch], *edits: Edit, force: bool = False) -> list[float]:
        """Losses of batches as `evaluate` gives them, as if nobody had looked.

        What a forward changes in evaluation mode too (buffers, plain attributes of modules, NumPy's random numbers) is put
        back, and what is found out here about batches and layers is not known to steps. Hooks on modules do run, and
        `objective` and `loss` are called: what those keep outside of the model is theirs.

        Several workers do it together, each with its own rows of as many batches.

        Args:
            batches: as for `evaluate`.
            edits: are in force meanwhile, as one group, and taken back: weights, optimizer, journal, keys of layers and the
                way to redo are as before.
            force: as of `apply`.

        Raises:
            ValueError, TypeError: an edit that cannot be carried out, or a batch that cannot be evaluated.
            DeviceOutOfMemory: as of `step`.
        """
        batches = list(batches)  # workers that try edits must know before how many there are
        with (
            defer_interrupts(),
            self._exclusive(),
            self._restored_state(),
            self._trial_edits(edits, force, len(batches)),
        ):
            return [self._probe(batch) for batch in batches]

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
    ) -> Inside:
        """Look inside of the model in evaluation mode, as if nobody had looked: what `probe` puts back is put back here too.

        The chosen micro-batches go through all layers once, and each chosen layer is reduced to a few figures while it is on the
        device, so device memory does not grow with depth: what enters and leaves it, and what it adds.

        Several workers do it together, and all look at the rows of worker 0.

        Args:
            batch: as for `step`, cut into as many micro-batches; only the chosen ones are run.
            layers: those that are looked at, as edits name layers; default up to 12, evenly chosen.
            micro_batches: their numbers, from 0.
            row: of each of them: whose attention and tokens.
            positions: how many of the row, the first ones.
            attention: keep the attention maps too. Layers run as they are, and the maps are computed beside them; only PyTorch's
                own `TransformerEncoderLayer` takes another, equivalent way meanwhile, which may round otherwise.
            lens: run the micro-batches once more for each chosen layer, with the layers above it left out, as if they had been
                dropped, and keep the loss and what the model's own head says.
            generate: with so many layers each, go on writing from the row's first `positions` tokens, or fewer where there is no
                room: as many passes of one row for each layer, and three to try whether the model writes from left to right at
                all. The tokens take the places of those that the row has there.
            top: how many tokens `lens` keeps at each position.
            leave_out: layers that sit all of it out, as in ``step(skip=...)``: the model as if they had been dropped.

        Raises:
            ValueError, TypeError: a layer or number that there is not, or a batch that cannot be evaluated.
            DeviceOutOfMemory: as of `step`.
        """
        from l2l_core.inside import InspectionPasses, InspectionRequest, MicroBatchRows, check_arguments, run_inspection

        began_s = time.perf_counter()
        layers, leave_out, micro_batches = map(_reusable, (layers, leave_out, micro_batches))
        numbers = micro_batches, row, positions, attention, lens, generate, top

        def facts() -> dict[str, str]:
            seen = [unit.key for unit in self._observed_units(layers)]
            return {**self._shared_facts(batch, leave_out), "what is looked at": repr((seen, numbers))}

        with (
            defer_interrupts(),
            self._exclusive(),
            self._backend.synchronized("look inside", facts),
            self._restored_state(),
            self._skipping(leave_out, force=False),
        ):
            [batch] = self._backend.gather_items([batch] if self.rank == 0 else [], "look at the rows of worker 0")
            rows, parts = self._runner.split(batch)
            sizes = rows.sizes(len(parts))
            chosen, row, positions, generate, top = check_arguments(sizes, micro_batches, row, positions, generate, top)
            units = self._observed_units(layers)
            of_each = tuple(MicroBatchRows.of(parts[k], sizes[k]) for k in chosen)
            asked = InspectionRequest(frozenset(unit.key for unit in units), chosen, of_each, row, positions, attention)
            passes = InspectionPasses(
                self._run_observed, self._without_layers, tuple(self._runner.parts.layers), self._model_call.objective
            )
            seen = run_inspection(
                passes, units, [parts[k] for k in chosen], asked, lens=lens, generate=generate, top=top
            )
        return replace(seen, step=self.steps, branch=self.branch, seconds=time.perf_counter() - began_s)

    def verify(self, batch: Batch, host_bytes: int | None = None) -> VerifyReport:
        """Train one step by relay and in core from the same state, compare, and put everything back as it was.

        Compared are the loss, weights, buffers, and what the optimizer keeps. Nothing of either step stays: weights,
        buffers, versions, the optimizer's state, settings and counters, random generators, statistics, plain attributes of
        modules, what is known for metering. Step hooks of the optimizer are not fired on either side, so what they count
        goes on as if `verify` had not been called, and what they would change is not judged. Hooks on modules do run, on
        both sides, and `objective` and `loss` are called: what those keep outside of the model is theirs.

        The in-core side runs on the device's kind of hardware: on a GPU, which must have room for the whole model, equal
        bits are not to be expected, but losses and weights that agree to float32 rounding are. It is float32 in any case,
        so with ``precision="bf16"`` the report shows what the precision costs, and with `compress` what fewer bits cost.

        Several workers do it together, and each does all of the in-core side, on the micro-batches of all: it must have room for
        the model twice. Only ``reduce="ordered"`` gives equal bits. Buffers are not compared where each worker has its own.

        With a shelf the relay's step runs from files, as ever, and is then compared with the in-core side block by block; it does
        not become the folder's. The in-core side is whole in host memory.

        Args:
            batch: as for `step`.
            host_bytes: what weights, gradients and optimizer state of the in-core side may take of host memory; what it runs
                with comes on top. Default with a shelf: what is free now; else they are not counted.

        Raises:
            ValueError: they take more; says how much. Nothing was done.
        """
        with (
            defer_interrupts(),
            self._exclusive(),
            self.device.current(),
            self._backend.synchronized("verify", partial(self._shared_facts, batch)),
            self._preserved(),
            torch.enable_grad(),
            self._kv_caches.disabled(),  # in the copy as well
        ):
            check_model(self.model, self._runner.parts.units)  # the in-core side comes first
            if host_bytes is not None or self.shelf is not None:
                check_in_core_fits(self._store.masters, free_bytes(None) if host_bytes is None else host_bytes)
            config, every = self._runner.resolve_config(self.config, batch), self._backend.gather_items
            rows, own = self._runner.split(batch)
            micro_batches = every(own, "verify")
            divisors = every(self._runner.normaliser.divisors(rows, own), "verify")
            with self._backend.storage_unsharded():
                in_core = InCoreStep(
                    model=self.model,
                    store=self._store,
                    micro_batches=micro_batches,
                    objective=self._model_call.objective,
                    divisors=divisors,
                    seeds=[self.config.micro_batch_seed(self.steps, k) for k in range(len(micro_batches))],
                    max_grad_norm=self.config.max_grad_norm,
                    torch_device=self.device.torch_device,
                )
            result = self._step(batch, config)
            with self._backend.storage_unsharded():
                alike = self._backend.settings.buffers == "same"
                return in_core.compare(result, self._runner.parts.units, with_buffers=alike)

    def expect(self, batch: Batch) -> AbstractContextManager[object]:
        """Say what the next batch is like, so that an edit that runs layers (``init="identity"``) needs no step before it.

        In a ``with`` statement it holds until the block ends; then what was known before holds again, unless a step has
        succeeded meanwhile.
        """
        new_layers = self._editor.layer_factory
        with self._exclusive():
            before, expected = new_layers.run_model, self._sample_call(self._runner.split(batch)[0])
            new_layers.run_model = expected

        def put_back() -> None:
            if new_layers.run_model is expected:
                new_layers.run_model = before

        until = ExitStack()
        until.callback(put_back)
        return until

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
        """Say what a step on this batch would need and how long it would take. Trains nothing and changes nothing; a
        relay that does not know yet in which order its layers are called knows it then.

        If the last step was of the same kind (micro-batches of the same shapes, same precision, place of the stash, updates;
        not metered, as the first of a shape is), its costs are replayed, which takes milliseconds. Otherwise at most four
        micro-batches per shape are rehearsed through all layers, forward and backward, without a budget and with the link
        unlimited: once metered, then timed up to five times or two seconds. That takes about as long as those micro-batches do,
        twice; hooks of the user's own on modules run.

        Args:
            batch: as for `step`.
            config: how the step would run; default the relay's own.
            device: whose link and budget to assume: a Device, or figures as in `Device.figures`; default the relay's own.
            host_bytes: what the host has, for `Forecast.largest_depth`.
            workers: how many such steps are planned to be made together, each on a batch like this one; default as many as
                there are.
            network: between them; default that of this relay's `Workers`, and without workers one that costs no time.
            stragglers: by rank, how many times as long as here compute and the EPS take there.
            wire, reduce: as of `Workers`; default those of this relay's, and without workers "fp32" and "sum".
            rank: of the worker that is told of; default this one.
            disk: of the shelf, if there is one: figures of reading and writing; default those that it has now, for which 64 MB
                are written to its folder and read, see `Disk.of`.

        Several workers do it together. Each holds the whole model meanwhile, rehearses on its own, and is told of itself.

        Where the step does not fit the device, other settings are rehearsed too; `Forecast.advice` says which fit.

        Raises:
            TypeError, ValueError: a config, batch or figure that no step could have.
            Whatever the model itself raises on the batch.
        """
        from l2l_core.forecast import LastStep, forecast_step

        fleet = self._runner.cluster(
            count=workers, network=network, stragglers=stragglers, wire=wire, reduce=reduce, rank=rank
        )
        with (
            defer_interrupts(),
            self._exclusive(),
            torch.enable_grad(),
            self._kv_caches.disabled(),
            self._backend.synchronized("forecast", partial(self._shared_facts, batch)),
            self._backend.storage_unsharded(),
            self._runner.rehearsing(fleet) as rehearsal,
        ):
            check_model(self.model, self._runner.parts.units)
            self._runner.rows_of(batch)
            last = LastStep(
                self._runner.trace,
                self.steps - 1,
                self._runner.pass_cache.last_kind,
                self._runner.kind_of((), self.config),
            )
            asked = self._runner.resolve_config(self.config if config is None else config, batch)
            where = self._disk_costs(asked, disk, fleet)
            return forecast_step(
                rehearsal,
                batch,
                asked,
                self.device if device is None else device,
                host_bytes,
                last,
                fleet,
                *where,
            )

    def fit(
        self,
        batch: Batch,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        *,
        fixed: Iterable[str] = (),
        most_s: float = _FIT_SECONDS,
    ) -> Fit:
        """Look for the fastest settings with which a step on this batch fits, and run with them from the next step on.

        Steps are rehearsed as in `forecast`, and nothing is trained: for each number of micro-batches one that keeps no graph and
        one that keeps many, for each place of the stash if need be. What lies between them follows; the best are timed once more.
        Where all of it fits, a step depth first is the choice.
        Results are the same with all of these settings, but for other random numbers with other micro-batches.

        Several workers do it together. The one with the largest batch rehearses, for the room of the one that has least; its
        choice is that of all, and the others wait for it. All of them hold the whole model meanwhile.

        Args:
            batch: as for `step`; the search is for batches of its shapes.
            device_bytes: what the step may take of the device; default its budget, and without one what is free now.
            host_bytes: of host memory, masters and optimizer included; default what is there and free now. A device that computes
                in host memory shares that.
            fixed: settings that stay as they are, of "micro_batches", "ahead", "stash", "resident", "keep", "update", "schedule".
                Deferred updates become eager ones only where the host has too little room for all gradients, and not with
                clipping or with hooks around the optimizer's step.
            most_s: after so many seconds nothing further is tried, once something is found that fits.

        Returns:
            The choice, with its forecast; `str` says why, and what the next better settings would need.

        Raises:
            NothingFits: no settings were found to fit; says what would be needed. The settings are as before.
            ValueError, TypeError: an unknown name, or a number of bytes that there cannot be.
            Whatever the model itself raises on the batch.
        """
        with defer_interrupts(), self._exclusive(), torch.enable_grad(), self._kv_caches.disabled():
            return self._fit(batch, device_bytes, host_bytes, fixed, most_s)

    def apply(self, *edits: Edit, force: bool = False) -> Edit:
        """Edit the stack of layers between two steps; several edits are one group: all of them, or none.

        Several workers make the same edits together, on whole layers, which all of them hold meanwhile; new layers are those that
        worker 0 has made. Layers that undo may bring back stay whole on every worker.

        With a shelf an edit is committed as a step is, whole or not at all, and holds a few blocks in memory.

        Args:
            edits: in order.
            force: do what is refused on evidence alone: layers of other kinds at a position, modules beside the stack with
                one member per layer, a configuration that does not tell the depth.

        Returns:
            The inverse edit: applied next, it brings weights, optimizer state and loss back to the bit.

        Raises:
            ValueError, TypeError: an edit that cannot be carried out; lists what would be valid. Nothing is changed then.
            OSError: a shelf's disk refuses, or has no room for new layers; the stack is as it was.
        """
        with defer_interrupts(), self._exclusive(), self._editing_together("edit", edits), self._editing():
            self._editor.force = force
            return self._history.apply(edits, self.steps)

    def undo(self) -> JournalEntry:
        """Undo the last edit: what it changed comes back to the bit, other layers keep what they have learned since.

        Raises:
            ValueError: there is none, or its layers were dropped for good.
        """
        with defer_interrupts(), self._exclusive(), self._editing_together("undo"), self._editing():
            return self._history.undo(self.steps)

    def redo(self) -> JournalEntry:
        """Do again what was undone last.

        Raises:
            ValueError: nothing was undone since the last edit.
        """
        with defer_interrupts(), self._exclusive(), self._editing_together("redo"), self._editing():
            return self._history.redo(self.steps)

    def fork(self, name: str) -> Branch:
        """Make a branch of the present state, and go on there; the one that is left stays as it is.

        Costs no weights: a block is copied when one of the branches that share it changes it.

        Raises:
            ValueError: no name, or one that there is; or `compress` has feedback.
        """
        with defer_interrupts(), self._exclusive(), self._together_on_branch("make a branch", name):
            self._check_config(self.config, [name])
            self._branches.fork(name, self._branch_state())
            self._history = self._history.copy()
            return self._current_branch()

    def switch(self, name: str) -> Branch:
        """Go on with the whole state of another branch: stack, weights, optimizer, journal, steps, settings, random state.

        What belongs to a learning rate scheduler is the user's own, but for the rates themselves.

        Raises:
            ValueError: there is no such branch; lists those that there are.
        """
        with defer_interrupts(), self._exclusive(), self._together_on_branch("switch", name):
            agree = partial(self._backend.gather_items, [], "switch")
            with self._editing():
                state = self._branches.switch(name, self._branch_state(), agree)
                self.config, self._runner.steps, self._history = state.config, state.steps, state.history
            self._backend.reshard(self._editor.detached.entries)
            self._editor.detached.rebook()
            return self._current_branch()

    def discard(self, name: str) -> None:
        """Free a branch that is not the present one.

        Raises:
            ValueError: there is no such branch, or it is the present one.
        """
        with defer_interrupts(), self._exclusive(), self._together_on_branch("discard a branch", name):
            self._branches.discard(name)
            self._history.free_unreachable()

    def save(self, folder: str | Path) -> Path:
        """Save weights, optimizer, random state and step to `folder`, atomically; returns the folder.

        A crash while saving keeps the previous save. A learning rate scheduler is the user's own: save its `state_dict`
        beside it. With a shelf one block at a time is in memory, and the save is as one of a relay in memory. Several workers
        save together, at once and to one folder, each its part of weights and state: any number of them loads it. If one fails
        or dies, all raise and the previous save is kept.

        Raises:
            OSError: disk full (says how much is needed, and free), no permission, or workers that do not see one folder.
            ValueError: the optimizer keeps something that is neither tensor nor plain data.
            WorkerError: it failed on another worker.
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
        optimizer: OptimizerFactory | Optimizer = _DEFAULT_OPTIMIZER,
        modules: Mapping[str, nn.Module] = MappingProxyType({}),
        **options: Any,
    ) -> Relay:
        """Make a relay that continues, bit by bit, where the saved one stood.

        With a learning rate scheduler: make optimizer and scheduler first, pass that optimizer, then load the scheduler's
        state; a scheduler made afterwards would start the learning rate anew.

        Args:
            folder: what `save` wrote.
            model: a model of the structure that the saved one had when its relay was made, or has now; layers that were
                inserted, dropped or moved since are so here, and weights are replaced.
            optimizer: of the same kind and groups; its state and settings are replaced.
            modules: by key, layers that edits brought in and that are like none of the model's: a save has no code.
            options: `device`, `layers`, `loss`, `objective`, `weight`, `config`, `workers`, `shelf` of the constructor; the saved
                config is the default, and the saved layers are. Several workers all see the folder, and each reads what it needs
                of it. A shelf, in a folder of its own, gets the save block by block, so nothing is whole in memory; the model may
                be one of `empty_weights`.

        Raises:
            ValueError: the folder is damaged, incomplete or of another model; names the file. Or workers see different folders.
            WorkerError: it failed on another worker.
        """
        shelf, workers = options.pop("shelf", None), options.get("workers")
        with ExitStack() as back:  # what fails leaves the caller's model and optimizer as they were
            options["workers"] = who = make_backend(workers, model)
            back.callback(who.close)
            register_restore(model, optimizer, back)
            with who.synchronized("load a save", dict):
                saved = saves.load_save_together(Path(folder), who)
                options.setdefault("config", saved.config)
                edited, parts = saved.edited, saved.past()
                resumption = Resumption(saved, edited, parts, modules)
                options.setdefault("layers", resumption.prepare(model, optimizer, back))
            if shelf is not None:
                refuse_edited_save(saved)
                options["workers"] = who = make_disk_backend(
                    shelf, workers, model, options["config"], SaveImportBackend
                )
                back.callback(who.close)
            relay = cls(model, optimizer, **options)
            back.callback(relay.close)
            back.callback(snapshot_except(vars(relay.optimizer), {"state"}))
            back.callback(relay._runner.parts.snapshot_buffers())
            back.callback(RandomState.capture().restore)
            with relay.device.current(), who.synchronized("take a save over", dict):
                with who.unsharded() if edited.is_edited else nullcontext():
                    with relay._editing():
                        resumption.restack(relay._editor, back)
                    edited.restore_into(relay._editor, relay._history)
                    saves.check_compatible(saved, relay._saved_state())
                    past = HistoryRestorer(
                        relay._editor,
                        relay._history,
                        relay._branches,
                        resumption,
                        relay.device.host_empty,
                        saved.read_snapshot,
                        who.shard_of,
                    )
                    fill = past.restore(parts)
                    relay._check_config(relay.config, relay._branches.others)
                present = relay._saved_state()
                saved.restore_into(present)  # from here on the caller's model changes; in memory nothing can fail
                fill()
            back.pop_all()
        relay._history.free_unreachable()  # layers of the model that the save has no more
        relay._runner.steps = saved.steps
        return relay

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Let this worker have all weights and all of the optimizer's state for the length of a block; yields the model.

        All workers enter it together. It takes the host memory of a relay that trains alone. What is written to weights must be
        the same on all workers: each keeps its own part of what it has. With one worker nothing happens.

        Raises:
            WorkerError: a worker does not enter it.
        """
        with (
            self._exclusive(),
            self._backend.synchronized("gather weights", self._shared_facts),
            self._backend.unsharded(),
        ):
            yield self.model

    def _step(self, batch: Batch, config: RelayConfig) -> StepResult:
        """Train on a batch, and let edits know of it."""
        first_call = self._sample_call(self._runner.rows_of(batch))
        result = self._runner.step(batch, config)
        self._editor.layer_factory.run_model = first_call
        self._history.record_loss(result.loss)
        return result

    def _fit(
        self, batch: Batch, device_bytes: int | None, host_bytes: int | None, fixed: Iterable[str], most_s: float
    ) -> Fit:
        """Look for settings, and run with them."""
        fixed = _reusable(fixed)
        asked = repr((device_bytes, host_bytes, sorted(fixed), most_s))  # sets have another order in every process
        with self._backend.synchronized("fit", lambda: {**self._shared_facts(batch), "what is to fit": asked}):
            found = self._runner.fit(batch, device_bytes, host_bytes, fixed, most_s)
            self.config = found.config
            return found

    def _probe(self, batch: Batch) -> float:
        """Measure the loss of a batch, which steps must not learn from."""
        with self._backend.synchronized("probe", partial(self._shared_facts, batch)):
            return self._runner.evaluate(batch, self._runner.probe_normaliser)

    def _disk_costs(
        self, config: RelayConfig, disk: Disk | None, cluster: Cluster
    ) -> tuple[Callable[[ForecastCosts], ForecastCosts], ...]:
        """Give what puts this relay's files under the costs of a step, if it has any."""
        from l2l_core.forecast import add_shelf_costs, relay_shelf_costs

        checked_config(config, has_disk=self.shelf is not None)
        if (shelf := self.shelf) is None:
            if disk is not None:
                raise ValueError("disk= is that of a shelf, and this relay has its weights in memory: leave it out")
            return ()
        if cluster.count > 1:
            self._backend.refuse("a forecast of several workers", "")
        self._check_config(config, ())  # a step could not have it either
        figures = Disk.of(shelf.folder) if disk is None else disk
        return (partial(add_shelf_costs, relay_shelf_costs(shelf, config, figures)),)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _check_config(self, config: RelayConfig, others: Collection[str]) -> None:
        """Refuse what gradients would not stay whole in; `others` are the branches besides the present one."""
        if config.schedule == "depth_first":
            instead = "weights that are not all in this process's memory come and go: leave schedule out of RelayConfig"
            self._backend.refuse("schedule='depth_first'", instead)
        if config.wire is None:
            return
        instead = "leave compress out of RelayConfig; workers send fewer bits to one another by Workers(wire='bf16')"
        self._backend.refuse(f"compress={config.compress!r}", instead)
        if config.wire.feedback and others:
            raise ValueError(
                f"compress={config.compress!r} with branches ({', '.join(others)}): what the device keeps of gradients is there "
                f"once, and not for each branch. Use Compress({config.wire.format!r}, feedback=False), or make no branches"
            )

    def _observed_units(self, layers: Iterable[LayerRef] | None) -> list[Unit]:
        """Find the layers that are looked at, in order, each once."""
        from l2l_core.inside import evenly_spaced

        if layers is None:
            return [self._runner.parts.layers[i] for i in evenly_spaced(len(self._runner.parts.layers))]
        if isinstance(layers, str | nn.Module) or not isinstance(layers, Iterable):
            raise TypeError(f"layers={layers!r} is one layer, or none: give a collection of layers, as [{layers!r}]")
        wanted = {self._editor.registry.unit_at(where) for where in layers}
        if not wanted:
            raise ValueError("layers=[] names no layer: name one or more, or leave it out to look at up to 12")
        return [unit for unit in self._runner.parts.layers if unit in wanted]

    def _run_observed(
        self, micro_batches: Sequence[Any], task: PassTask, observers: Sequence[LayerObserver]
    ) -> list[Any]:
        def prepare(stage: BreadthFirstRuntime) -> None:
            for observer in observers:
                stage.add_observer(observer)

        config = replace(self.config, micro_batches=len(micro_batches))
        return self._runner.infer(micro_batches, task, config, prepare)

    def _without_layers(self, keys: Sequence[str]) -> AbstractContextManager[None]:
        return self._skipping(keys, force=False)

    def _shared_facts(self, batch: Batch | None = None, skip: Sequence[LayerRef] = ()) -> dict[str, str]:
        """Say what must be the same for all workers, by name."""
        units = self._runner.parts.units
        layers = [f"{u.key} {u.numel} {''.join('-+'[flag] for flag in u.trained)}" for u in units]
        return {
            "branch": self.branch,
            "number of the step": str(self.steps),
            "settings": 'config="auto"' if self._auto_fit else repr(self.config),
            "layers, sizes, what is trained": ", ".join(layers),
            "edits": str(len(self._history.journal)),
            "skip": ", ".join(unit.key for unit in self._editor.registry.units_at(skip)),
            "training mode": "".join("-+"[module.training] for module in self.model.modules()),
            "optimizer": f"{type(self.optimizer).__name__} {settings_of(self.optimizer)}",
            "structure of the batch": "" if batch is None else str(structure_of(self._runner.rows_of(batch).batch)),
        }

    def _together_on_branch(self, what: str, name: str) -> AbstractContextManager[None]:
        """Let all workers do something with one branch."""
        return self._backend.synchronized(what, lambda: {**self._shared_facts(), "branch to do it with": repr(name)})

    @contextmanager
    def _editing_together(self, what: str, edits: Sequence[Edit] = ()) -> Iterator[None]:
        """Let all workers change whole layers in a block; they have what worker 0 has afterwards."""
        with (
            self._backend.synchronized(what, lambda: {**self._shared_facts(), **_edit_facts(edits)}),
            self._backend.editable(),
        ):
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
        """Edits are in force in a block, for so many probes; what they let the relay forget is put back by `_unseen`."""
        if not edits:
            yield
            return
        self._editor.force = force
        told = {"number of batches": str(probes)}
        try:
            with (
                self._backend.synchronized("try edits", lambda: {**self._shared_facts(), **_edit_facts(edits), **told}),
                self._backend.editable(),
                ExitStack() as way_back,
            ):
                way_back.enter_context(self._history.try_edits(edits))
                self._runner.set_layers(self._editor.registry.layers)
                self._backend.broadcast_state(
                    self._runner.parts.units
                )  # who comes past this knows that all have edited
                trial = way_back.pop_all()
            try:
                yield
            finally:  # what fails in the block has failed on all
                with self._backend.synchronized("take edits back", self._shared_facts), self._backend.editable():
                    trial.close()
        finally:
            self._editor.force = False

    @contextmanager
    def _skipping(self, skip: Iterable[LayerRef], force: bool) -> Iterator[None]:
        """Run a step without some layers; what is known of steps with all of them stays known."""
        if not (units := self._editor.registry.units_at(skip)):
            yield
            return
        with self._editor.without_layers(units, force), self._runner.without(units, self._editor.registry.layers):
            yield
        for unit in units:
            unit.stats.clear()

    def _sample_call(self, rows: BatchRows) -> Callable[[], Any]:
        """Return what edits run that have to run the model."""
        few = min(2, rows.sizes(self.config.micro_batches)[0])
        return partial(self._call_model, rows.first(few))

    def _call_model(self, rows: Any) -> torch.Tensor:
        """Run the model on a few rows, as edits do to see what layers are given."""
        rows = self._backend.gather_items([rows])[0]  # workers that edit together see the same
        with self._kv_caches.disabled():
            return self._model_call.objective(self.model, rows)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._closed:
            raise RuntimeError("this relay is closed: make a new Relay over the model")
        self._process.check("this relay")
        if not self._busy.acquire(blocking=False):  # waiting would hang where a hook or the loss calls the relay
            raise RuntimeError(
                "this relay is in the middle of a step in another thread: wait for it, or stop the session"
            )
        try:
            yield
        finally:
            self._busy.release()

    @contextmanager
    def _preserved(self) -> Iterator[None]:
        """Undo whatever the block trains; no step hook of the optimizer is fired."""
        back = [
            snapshot_attributes(self.model.modules()),
            self._store.storage.snapshot(),
            self._store.residuals.snapshot(self._store.masters.blocks),
            self._runner.parts.snapshot_buffers(),
            self._snapshot_passes(),
            self._history.snapshot(),
            self._branches.snapshot(),
        ]
        with preserve_random_state(), without_step_hooks(self.optimizer):
            try:
                yield
            finally:
                for put_back in back:
                    put_back()

    @contextmanager
    def _restored_state(self) -> Iterator[None]:
        """What a forward may change in a block is as it was after it; weights are not looked at."""
        back = [
            snapshot_attributes(self.model.modules()),
            self._runner.parts.snapshot_buffers(),
            self._snapshot_passes(),
        ]
        with preserve_random_state():
            try:
                yield
            finally:
                for put_back in back:
                    put_back()

    def _snapshot_passes(self) -> Callable[[], None]:
        """Keep what passes leave in this relay; the result puts it back."""
        put_back, call = self._runner.snapshot(), self._editor.layer_factory.run_model

        def put_back_all() -> None:
            put_back()
            self._editor.layer_factory.run_model = call

        return put_back_all

    def _branch_state(self) -> BranchState:
        return self._branches.capture(self.config, self.steps, self._history)

    def _current_branch(self) -> Branch:
        return next(branch for branch in self.branches if branch.active)

    def _saved_state(self) -> saves.RelayState:
        return saves.RelayState(
            self.config,
            self.steps,
            tuple(self._runner.parts.units),
            self._store,
            RandomState.capture(),
            EditedStacks.from_editor(self._editor, self._history),
            history_parts(self._editor, self._history, self._branches),
            snapshot_parts(self._branches),
            {block.key: block for unit in self._editor.units_with_values for block in unit.blocks},
        )


def _edit_facts(edits: Sequence[Edit]) -> dict[str, str]:
    """Say which edits are to be made, without addresses, which are other ones in every process."""
    return {"edits to make": re.sub(r" at 0x[0-9a-f]+", "", repr(edits))}


def _reusable(values: Any) -> Any:
    """Give values that can be gone through more than once."""
    return tuple(values) if isinstance(values, Iterator) else values
