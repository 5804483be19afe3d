"""The eager param-server (EPS): masters, gradients, optimizer state and version of every layer, on the host.

It hands out masters to load, takes gradients back, reduces them and updates each block of weights on a thread of its
own, the lane ``eps``. What it is not: it knows nothing of devices or of the order of layers.

Gradients of a block come in one piece (already summed over micro-batches), or, where several visits contribute, one
piece per micro-batch: those are kept apart and added in ascending k when all have come, the order of plain training.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.config import RelayConfig
from l2l_core.devices import Ledger, Ticket, serial_thread
from l2l_core.eps.blocks import SHELL, Block, GradientPiece, Trained, Unit, shared_key
from l2l_core.eps.optimizers import (
    Changes,
    Findings,
    StepHooks,
    check_mode,
    clone_state,
    copy_over,
    merge,
    over,
    replace_params,
    settle,
    slice_of,
    spares_others,
    state_bytes,
    update_part,
)
from l2l_core.model import keep, keep_without
from l2l_core.rules import MAX_UNDER_WAY
from l2l_core.trace import Event, Trace

_SAMPLED = 4096


class TornStep(RuntimeError):
    """An error came after some layers had been updated and others not.

    Attributes:
        updated: keys of the layers that hold the new weights.
    """

    def __init__(self, message: str, updated: Sequence[str]) -> None:
        super().__init__(message)
        self.updated = tuple(updated)


class NonFiniteError(FloatingPointError):
    """A loss or gradient is infinite or not a number; names the layer that produced it first."""


@dataclass(slots=True)
class _Master:
    """The optimizer's side of a block."""

    params: list[nn.Parameter]  # over the same memory as the block's master
    part: Optimizer  # the optimizer restricted to them


@dataclass(eq=False)
class Side:
    """What the optimizer holds of a block: its masters, the group of each (-1: in none), and their state."""

    masters: list[nn.Parameter]
    groups: list[int]
    state: dict[nn.Parameter, dict[str, Any]]

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(map(state_bytes, self.state.values()))


class LayerStore:
    """Masters and optimizer of all units.

    Invariant: a block is updated at most once per step, after all of its gradient has come, and `Block.version` counts
    those updates. Only the ``eps`` thread writes masters while a step runs.

    Args:
        units: the shell and the layers.
        optimizer: over the model's parameters; from now on over the masters.
        order: gives the model's parameters in the model's own order.
        host: gets the bytes booked.
        empty: makes a float32 host buffer of so many elements for a gradient; a device's `host_empty` copies fast.
        cores: for reducing and updating. One where compute is on the CPU too; most of them beside a GPU.
        findings: about the optimizer. One that adds elements up gets as many cores as it would have in core, since the order
            in which they are added depends on that.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        optimizer: Optimizer,
        order: Callable[[], Iterable[nn.Parameter]],
        host: Ledger,
        empty: Callable[[int], torch.Tensor] = torch.empty,
        cores: int = 1,
        findings: Findings = Findings(),  # noqa: B008 - frozen
    ) -> None:
        self.units = list(units)
        self.optimizer = optimizer
        self.host = host
        self._empty = empty
        self._blocks = list(dict.fromkeys(block for unit in units for block in unit.blocks))
        masters = {
            p: nn.Parameter(v, p.requires_grad) for b in self._blocks for p, v in zip(b.params, b.views, strict=True)
        }
        self._model_params = {master: param for param, master in masters.items()}
        replace_params(optimizer, masters)
        self._owner = {block: unit for unit in units for block in unit.blocks if not block.shared}
        self._masters = {
            block: _Master(own := [masters[p] for p in block.params], slice_of(optimizer, own))
            for block in self._blocks
        }
        self._findings = findings
        self._thread = serial_thread("eps", cores if findings.elementwise else torch.get_num_threads())
        self._room = threading.Condition()
        self._under_way: set[int] = set()
        self._in_order = order
        self._order: dict[nn.Parameter, int] = {}  # made when it is needed
        self._pool: dict[int, list[torch.Tensor]] = {}
        self._optimizer_bytes = 0
        self._spares_others = spares_others(optimizer)
        for block in self._blocks:
            host.book("weights", block.key, block.nbytes)
        self.book_optimizer()
        self.before_write: Callable[[Block], None] = lambda block: None  # called before a block's master changes
        self._hooks = StepHooks(optimizer, self._all_masters, self._before_hook_writes)
        self._begin(RelayConfig(), Trace())

    # -- one step ------------------------------------------------------------------------------------------------------

    def begin(self, config: RelayConfig, trace: Trace) -> None:
        """Open a step.

        Raises:
            ValueError: a step hook wants what there will be in deferred updates only, or the optimizer would not step.
        """
        self._begin(config, trace)
        self._check_ready()
        if config.update == "eager":
            self._fire_before(self._hooks.fire_before_gradients)

    def _fire_before(self, fire: Callable[[], None]) -> None:
        """Fire pre-hooks; what they make of the settings is taken back with the step."""
        if self._hooks.has_pre:
            self._settings_back = keep_without(vars(self.optimizer), {"state"})
            try:
                fire()
            except BaseException:
                self._settings_back()
                raise

    def _check_ready(self) -> None:
        """Whether the optimizer would take a step now, as far as that can be known before it."""
        state = self.optimizer.state
        if self._findings.newcomers and state:
            for block, unit in self._owner.items():
                params = [
                    p for group in self._masters[block].part.param_groups for p in group["params"] if p.requires_grad
                ]
                if unit.key != SHELL and params and not any(param in state for param in params):
                    self._findings.refuse_newcomer(f"layer {unit.key} ({unit.name})", self.optimizer)
        if self._findings.follows_rate and (warm := [block for block in self._blocks if warmth_of(block) < 1]):
            self._findings.refuse_warm_up(warm[0].key, self.optimizer)
        if callable(getattr(self.optimizer, "train", None)):
            check_mode(slice_of(self.optimizer, []))

    def _begin(self, config: RelayConfig, trace: Trace) -> None:
        self._config, self._trace = config, trace
        for unit in self.units:
            unit.stats.clear()  # what this step does not tell is not known
        self._whole: dict[Block, GradientPiece] = {}
        self._apart: dict[Block, dict[int, GradientPiece]] = {}
        self._came: set[tuple[Block, int]] = set()  # of which blocks and micro-batches there are such pieces
        self._jobs: list[Future[None]] = []
        self._undo: list[Callable[[], None]] = []
        self._settings: Changes = {}  # what parts of the optimizer have made of settings in this step
        self._settings_back: Callable[[], None] = lambda: None  # to what they were before hooks
        self._failed = False
        self.updated: list[Block] = []

    def buffer(self, numel: int, bounded: bool = False) -> torch.Tensor:
        """A host buffer for one gradient, shape (numel,); it returns to the pool when the gradient has been used.

        A `bounded` buffer is handed out only while few gradients of eager updates are under way, so that the EPS falling
        behind slows backward down instead of filling the host.
        """
        with self._room:
            if bounded and self._config.update == "eager":
                self._room.wait_for(lambda: len(self._under_way) < MAX_UNDER_WAY or self._failed)
            free = self._pool.setdefault(numel, [])
            buffer = free.pop() if free else self._new_buffer(numel)
            if bounded:
                self._under_way.add(id(buffer))
            return buffer

    def _new_buffer(self, numel: int) -> torch.Tensor:
        buffer = self._empty(numel)
        self.host.book("gradients", "buffers", buffer.nbytes)
        weakref.finalize(buffer, self.host.release, "gradients", "buffers", buffer.nbytes)
        return buffer

    def reduce(self, unit: Unit, block: Block, piece: GradientPiece, pushed: Ticket) -> None:
        """Take the whole gradient of `block`, once `pushed` is done; update it now or at the end of the step."""
        eager = self._config.update == "eager"

        def work() -> None:
            pushed.join()
            start_s = time.perf_counter()
            self._note(block, grad_norm=self._check_finite(unit, block, piece))
            self._whole[block] = piece
            self._record("reduce", block, piece, start_s)
            if eager:
                self._update(block)

        self._submit(work)

    def reduce_part(self, unit: Unit, block: Block, k: int, piece: GradientPiece, pushed: Ticket) -> None:
        """Add one visit's gradient of micro-batch `k` to those of the same micro-batch; it is kept apart from others."""

        def work() -> None:
            pushed.join()
            start_s = time.perf_counter()
            self._check_finite(unit, block, piece)
            parts = self._apart.setdefault(block, {})
            parts[k] = self._add(parts.get(k), piece)
            self._record("reduce", block, piece, start_s, k)

        self._came.add((block, k))
        self._submit(work)

    def has_part(self, block: Block, k: int) -> bool:
        """Whether a visit has brought a gradient of micro-batch `k` that is kept apart."""
        return (block, k) in self._came

    def lend_part(self, block: Block, k: int, wanted: Sequence[int]) -> dict[int, torch.Tensor]:
        """Give out what has come for some of the block's parameters, by index; the next part brings it back, and more."""
        lent: dict[int, torch.Tensor] = {}

        def work() -> None:
            piece = self._apart[block][k]
            lent.update({i: view.clone() for i, view in piece.views().items() if i in wanted})
            self._apart[block][k] = piece.without(list(lent))

        self._submit(work)
        self._jobs[-1].exception()
        return lent

    def complete(self, block: Block) -> None:
        """Say that no more parts of `block` will come; eager updates do not wait any longer."""
        if self._config.update == "eager":
            self._submit(lambda: self._fold(block) or self._update(block))

    def finish(self) -> None:
        """Wait for all gradients and updates; deferred updates happen here.

        Raises:
            NonFiniteError, or whatever the optimizer raised.
        """
        self.wait()
        for block in list(self._apart):
            self._submit(lambda block=block: self._fold(block))  # type: ignore[misc]
        self.wait()
        if self._config.max_grad_norm is not None:
            self._submit(self._clip)
        self.wait()
        deferred = self._config.update == "deferred"
        if deferred:
            self._fire_before(lambda: self._hooks.fire_with_gradients(self._whole))
        whole = dict(self._whole)
        for block in whole:
            self._submit(lambda block=block: self._update(block))  # type: ignore[misc]
        self.wait()
        if self._undo:  # a hook may still fail
            self._undo.append(keep_without(vars(self.optimizer), {"state"}))
        settle(self.optimizer, self._settings)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look at
        self._hooks.fire_after(whole, deferred)
        self._undo.clear()
        self.book_optimizer()

    def wait(self) -> None:
        """Wait for the work submitted so far; the first error is raised, the rest of the work was skipped."""
        errors = [error for job in self._jobs if (error := job.exception()) is not None]
        self._jobs = []  # only now: whoever interrupts the wait finds them there, and waits for them before it undoes any
        if errors:
            raise errors[0]

    def raise_failure(self) -> None:
        """Raise an error of the background work if one has happened, without waiting."""
        if self._failed:
            self.wait()

    def roll_back(self) -> None:
        """Undo this step's updates where an undo log was kept, and forget its gradients."""
        self._failed = True
        for job in self._jobs:
            job.exception()
        for undo in reversed(self._undo):
            undo()
        if self._undo:
            self.updated.clear()
        if self.updated:  # for them the step has counted
            settle(self.optimizer, self._settings)
        else:
            self._settings_back()
        for master in self._model_params:
            master.grad = None  # clipping may have set it; the next step's norm must not see it
        self._pool.clear()  # gradients under way are lost with the step, and their buffers with them
        self._under_way.clear()
        updated = self.updated
        self._begin(self._config, self._trace)
        self.updated = updated
        self.book_optimizer()

    def _submit(self, work: Callable[[], Any]) -> None:
        def guarded() -> None:
            if self._failed:
                return
            try:
                work()
            except BaseException:
                with self._room:
                    self._failed = True
                    self._room.notify_all()
                raise

        job = self._thread.submit(guarded)
        self._jobs.append(job)
        if self._config.ahead == 0:
            job.exception()  # the serial relay: nothing runs in the background

    # -- on the eps thread ---------------------------------------------------------------------------------------------

    def _add(self, sum_: GradientPiece | None, piece: GradientPiece) -> GradientPiece:
        if sum_ is None:
            return piece
        total = sum_.plus(piece)
        self._give_back(piece.flat)
        return total

    def _fold(self, block: Block) -> None:
        start_s = time.perf_counter()
        parts = self._apart.pop(block, {})
        total: GradientPiece | None = None
        for k in sorted(parts):
            total = self._add(total, parts[k])
        if total is not None:
            self._whole[block] = total
            self._note(block, grad_norm=_norm(list(total.views().values())))
            self._record("reduce", block, total, start_s)

    def _check_finite(self, unit: Unit, block: Block, piece: GradientPiece) -> float:
        """The norm of a gradient, which may be infinite by overflow alone."""
        views = piece.views()
        norm = _norm(list(views.values()))
        if not math.isfinite(norm):
            names = [block.names[i] for i, view in views.items() if not torch.isfinite(view).all()]
            if not names:
                return norm
            raise NonFiniteError(
                f"the gradient of {unit.name} (layer {unit.key}) is not finite, the first in backward order; its weights were "
                f"not updated. Affected: {', '.join(names[:5])}. Lower the learning rate, clip with max_grad_norm and "
                "update='deferred', or look at this layer's inputs"
            )
        return norm

    def _note(self, block: Block, **stats: float) -> None:
        if block in self._owner:
            self._owner[block].stats.update(stats)

    def _update(self, block: Block) -> None:
        piece = self._whole.pop(block, None)
        if piece is None:
            return
        start_s = time.perf_counter()
        master = self._masters[block]
        if self._config.rollback or self._config.update == "deferred":
            self._undo.append(self._snapshot(block, piece))
        self._let_have(block, piece)
        before = _sample(block, piece.trained)
        self.before_write(block)
        try:
            self.updated.append(block)  # from here on the block may hold new weights
            merge(self._settings, update_part(master.part, self.optimizer, warmth_of(block)))
        finally:
            for param in master.params:
                param.grad = None
        size = float(torch.linalg.vector_norm(before))
        moved = float(torch.linalg.vector_norm(_sample(block, piece.trained) - before))
        self._note(block, update_ratio=moved / size if size else math.inf if moved else 0.0)
        block.version += 1
        self._give_back(piece.flat)
        self._record("update", block, piece, start_s)

    def _let_have(self, block: Block, piece: GradientPiece) -> None:
        """Give the optimizer's parameters of a block their gradients, and none to those that have none."""
        views = piece.views()
        for index, param in enumerate(self._masters[block].params):
            param.grad = views.get(index)

    def _all_masters(self) -> dict[Block, list[nn.Parameter]]:
        return {block: master.params for block, master in self._masters.items()}

    def _before_hook_writes(self, block: Block) -> None:
        """A step hook is about to change weights: branches and the way back need those that there are."""
        if self._config.rollback or self._config.update == "deferred":
            self._undo.append(self._snapshot(block))
        self.before_write(block)

    def _clip(self) -> None:
        start_s = time.perf_counter()
        for block, piece in self._whole.items():
            self._let_have(block, piece)
        assert self._config.max_grad_norm is not None
        self._order = self._order or {param: index for index, param in enumerate(self._in_order())}
        in_order = sorted(self._model_params, key=lambda master: self._order[self._model_params[master]])
        nn.utils.clip_grad_norm_(in_order, self._config.max_grad_norm)
        t0, nbytes = self._trace.began_s, sum(piece.flat.nbytes for piece in self._whole.values())
        self._trace.add(Event("eps", "clip", start_s - t0, time.perf_counter() - t0, nbytes=nbytes))

    def _give_back(self, grad: torch.Tensor) -> None:
        with self._room:
            self._under_way.discard(id(grad))
            self._pool.setdefault(grad.numel(), []).append(grad)
            self._room.notify_all()

    def _snapshot(self, block: Block, piece: GradientPiece | None = None) -> Callable[[], None]:
        """An undo for one block: of what an update with this gradient may change, 12 bytes per parameter with AdamW."""
        params, version = self._masters[block].params, block.version
        indices = list(piece.views()) if piece is not None and self._spares_others else range(len(params))
        values = {params[i]: block.views[i].clone() for i in indices}
        state = {p: clone_state(self.optimizer.state[p]) for p in values if p in self.optimizer.state}

        def undo() -> None:
            block.version = version
            with torch.no_grad():
                for param, value in values.items():
                    param.copy_(value)
                    self.optimizer.state.pop(param, None)
            self.optimizer.state.update(state)

        return undo

    def _record(self, kind: str, block: Block, piece: GradientPiece, start_s: float, k: int = -1) -> None:
        """Work on a gradient; its bytes are those of the weights that it is of."""
        t0 = self._trace.began_s
        key = block.key
        self._trace.add(Event("eps", kind, start_s - t0, time.perf_counter() - t0, key, k, piece.flat.nbytes))

    # -- between steps -------------------------------------------------------------------------------------------------

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state, as of the last step or edit."""
        return self._optimizer_bytes

    def masters_of(self, unit: Unit) -> dict[nn.Parameter, nn.Parameter]:
        """The optimizer's parameter for each of a unit's."""
        pairs = (zip(block.params, self._masters[block].params, strict=True) for block in unit.blocks)
        return {param: master for pair in pairs for param, master in pair}

    def masters_in(self, block: Block) -> list[nn.Parameter]:
        """The optimizer's parameters of a block that is here, in the order of its own."""
        return self._masters[block].params

    def side_of(self, block: Block) -> Side:
        """What the optimizer holds of a block that is here."""
        masters = self._masters[block].params
        group_of = {p: i for i, group in enumerate(self._masters[block].part.param_groups) for p in group["params"]}
        state = {p: self.optimizer.state[p] for p in masters if p in self.optimizer.state}
        return Side(masters, [group_of.get(p, -1) for p in masters], state)

    def admit(self, unit: Unit, sides: Mapping[Block, Side]) -> None:
        """Take a layer in, between two steps; `arrange` puts its parameters where they belong."""
        self.units.append(unit)
        self._order = {}
        for block, side in sides.items():
            self._blocks.append(block)
            self._owner[block] = unit
            self._model_params.update(zip(side.masters, block.params, strict=True))
            part = []
            for index, group in enumerate(self.optimizer.param_groups):
                own = [master for master, its in zip(side.masters, side.groups, strict=True) if its == index]
                group["params"].extend(own)
                part.append({**group, "params": own})
            self.optimizer.state.update(side.state)
            self._masters[block] = _Master(side.masters, over(self.optimizer, part, self.optimizer.state))
            self.host.book("weights", block.key, block.nbytes)
            self._book_state(side.nbytes)

    def dismiss(self, units: Collection[Unit]) -> dict[Unit, dict[Block, Side]]:
        """Let layers go, between two steps; the result is what `admit` needs to take them in again.

        Blocks that they share with others stay.
        """
        self._order = {}
        kept = {unit: {block: self.side_of(block) for block in unit.blocks if not block.shared} for unit in units}
        sides = {block: side for one in kept.values() for block, side in one.items()}
        masters = {master for side in sides.values() for master in side.masters}
        for group in self.optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param not in masters]
        for master in masters:
            del self._model_params[master]
            self.optimizer.state.pop(master, None)
        for block, side in sides.items():
            del self._masters[block], self._owner[block]
            self.host.release("weights", block.key, block.nbytes)
            self._book_state(-side.nbytes)
        self._blocks = [block for block in self._blocks if block not in sides]
        self.units = [unit for unit in self.units if unit not in kept]
        return kept

    def rename(self, block: Block, names: list[str]) -> None:
        """Say what a block's parameters are called now; the key of a shared one follows."""
        key = shared_key(names[0]) if block.shared else block.key
        self.host.release("weights", block.key, block.nbytes)
        self.host.book("weights", key, block.nbytes)
        block.key, block.names = key, names

    @property
    def groups(self) -> list[list[nn.Parameter]]:
        """The model's parameters in every group of the optimizer."""
        return [[self._model_params[master] for master in group["params"]] for group in self.optimizer.param_groups]

    def arrange(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Let the optimizer's groups hold what they hold in another order, which is given by the model's parameters."""
        masters = {param: master for master, param in self._model_params.items()}
        names: dict[nn.Parameter, str] = {}
        for group, params in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = [masters[param] for param in params]
            if "param_names" in group:
                names = names or self._names()
                group["param_names"] = [names[master] for master in group["params"]]
        self._order = {}

    def regroup(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Let the optimizer's groups hold other parameters, between two steps: one list of the model's for each."""
        self.arrange(groups)
        for master in self._masters.values():
            master.part = slice_of(self.optimizer, master.params)

    def _names(self) -> dict[nn.Parameter, str]:
        return {p: name for b in self._blocks for p, name in zip(self._masters[b].params, b.names, strict=True)}

    def snapshot(self) -> Callable[[], None]:
        """Copy all weights, versions and all that the optimizer keeps; the result puts them back bit by bit."""
        masters = [(block, block.master.clone(), block.version) for block in self._blocks]
        put_optimizer_back = keep(vars(self.optimizer))

        def undo() -> None:
            for block, master, version in masters:
                block.master.copy_(master)
                block.version = version
            put_optimizer_back()
            self.book_optimizer()

        return undo

    def plain_optimizer(self, twin: nn.Module, model: nn.Module) -> Optimizer:
        """A copy of the optimizer over the parameters of `twin`, a copy of `model`; the two optimizers share nothing."""
        counterpart = dict(zip(model.parameters(), twin.parameters(), strict=True))
        stands_for = {
            master: counterpart[param] for master, param in self._model_params.items() if param in counterpart
        }
        warmth = {p: warmth_of(block) for block in self._blocks if block.warmup for p in self._masters[block].params}
        groups = []
        for group in self.optimizer.param_groups:
            for factor in sorted({1.0, *(warmth.get(p, 1.0) for p in group["params"])}):
                alike = [stands_for[p] for p in group["params"] if warmth.get(p, 1.0) == factor]
                groups.append({**group, "params": alike, **({"lr": group["lr"] * factor} if factor != 1.0 else {})})
        state = {stands_for[p]: clone_state(known) for p, known in self.optimizer.state.items() if p in stands_for}
        return copy_over(self.optimizer, groups, defaultdict(dict, state), {**stands_for, **counterpart, model: twin})

    def states(self) -> dict[nn.Parameter, Mapping[str, Any]]:
        """What the optimizer knows of each of the model's parameters."""
        return {self._model_params[p]: known for p, known in self.optimizer.state.items() if p in self._model_params}

    def close(self) -> None:
        """Join the thread and give the optimizer the model's own parameters back."""
        self._thread.shutdown(wait=True)
        replace_params(self.optimizer, self._model_params)
        for block in self._blocks:
            self.host.release("weights", block.key, block.nbytes)

    def book_optimizer(self) -> None:
        """Count the bytes of the optimizer's state anew."""
        nbytes = sum(map(state_bytes, self.optimizer.state.values()))
        self._book_state(nbytes - self._optimizer_bytes)

    def _book_state(self, nbytes: int) -> None:
        """So many bytes of the optimizer's state more."""
        if nbytes > 0:
            self.host.book("optimizer", "state", nbytes)
        elif nbytes < 0:
            self.host.release("optimizer", "state", -nbytes)
        self._optimizer_bytes += nbytes


def warmth_of(block: Block) -> float:
    """By what the block's next update multiplies the learning rate: rises to 1 over its warm-up."""
    return min(1.0, (block.version + 1) / block.warmup) if block.warmup else 1.0


def _norm(views: list[torch.Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(views)))) if views else 0.0


def _sample(block: Block, trained: Trained) -> torch.Tensor:
    """A copy of evenly spaced weights of those that are trained: what the size of an update is told by, (samples,).

    About `_SAMPLED` of them, and at least one of every parameter.
    """
    if all(trained.flags):
        return block.master[:: -(-len(block.master) // _SAMPLED) or 1].clone()
    places = [(block.layout.pieces[i].offset, math.prod(block.layout.pieces[i].size)) for i in trained.indices]
    stride = -(-trained.layout.used // _SAMPLED) or 1
    return torch.cat([block.master[start : start + numel : stride] for start, numel in places])
