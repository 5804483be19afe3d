"""One pass of a plan over all micro-batches of a batch, on a metered device: gradients in the parameters, a log, a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.batches import Objective, leaves_in
from l2l_core.devices import Device, Ledger
from l2l_core.eps import TornStep
from l2l_core.eps.optimizers import state_bytes
from l2l_core.model import Caches, RandomState, copy_tensors
from l2l_core.step.traffic import Clock
from l2l_core.strategies.execution import Done, Execution, OnMade
from l2l_core.strategies.forward import Tensor
from l2l_core.strategies.learning import Learning
from l2l_core.strategies.meter import Meter
from l2l_core.strategies.moves import Moves
from l2l_core.strategies.plan import COMPUTES
from l2l_core.strategies.recipes import Operations
from l2l_core.strategies.structure import Structure
from l2l_core.surgery import same_random_numbers
from l2l_core.trace import Trace


@dataclass(frozen=True)
class Work:
    """What all micro-batches of a step are made of.

    Attributes:
        micro_batches, divisors, seeds: one per micro-batch; a loss is divided by its own.
        structures: of the model, one per micro-batch.
    """

    micro_batches: Sequence[Any]
    divisors: Sequence[float]
    seeds: Sequence[int]
    structures: Sequence[Structure]


@dataclass
class Ran:
    """What a pass gave.

    Attributes:
        losses: scaled, one per micro-batch.
        logs, bases, constants: per micro-batch: operations; bytes before the first one; bytes of constants by stage.
        random: the state of the random stream at the end of the last micro-batch's pass.
    """

    losses: list[Tensor] = field(default_factory=list)
    logs: list[list[Done]] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    constants: list[dict[int, int]] = field(default_factory=list)
    layer_forwards: int = 0
    random: RandomState | None = None


class Course:
    """A model on a device, as plans see it.

    Invariant: between passes the device's ledger is as it was.

    Args:
        model: trained in place.
        layers: by module, their names.
        objective: the scalar loss of a micro-batch.
        device: computes in host memory.
        shared: names of parameters to whose gradients several stages add.
        trace: of what happens; default one that nobody reads.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[nn.Module, str],
        objective: Objective,
        device: Device,
        shared: frozenset[str] = frozenset(),
        trace: Trace | None = None,
    ) -> None:
        self.model, self._layers, self._objective, self._device = model, layers, objective, device
        self._shared = [param for name, param in model.named_parameters() if name in shared]
        self._caches = Caches(model)
        self.host = Ledger("host", "Host memory")
        self.trace = trace or Trace()
        self.stages_of: dict[str, set[int]] = {}  # which stages added to each parameter's gradient, in `measuring`
        self.on_made: OnMade | None = None  # is shown what stages make, first and again
        self._measures = False
        self._execution: Execution | None = None

    def learn(self, kind: Callable[..., Learning], micro_batch: Any, divisor: float, seed: int) -> Structure:
        """Learn the structure of the model from one micro-batch; leaves buffers and random state as they were."""
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        given = copy_tensors(micro_batch)
        with same_random_numbers(), self._caches.off():
            RandomState.seeded(seed).put()
            structure = kind(self.model, self._layers, self._task(given, divisor)).learn()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        return structure

    def _task(self, micro_batch: Any, divisor: float) -> Callable[[], Tensor]:
        return lambda: self._objective(self.model, micro_batch) / divisor

    def caches_off(self, model: nn.Module) -> AbstractContextManager[None]:
        """Let a copy of the model, too, do without key-value caches."""
        return Caches(model).off()

    @contextmanager
    def metered(self, optimizer: Optimizer | None = None) -> Iterator[Meter]:
        """Book weights and optimizer state, and count what else is made, in the block."""
        ledger, weights = self._device.ledger, [*self.model.parameters(), *self.model.buffers()]
        fixed = {"weights": nbytes_of(weights), "optimizer": optimizer_bytes(optimizer)}
        states = _state_tensors(optimizer) if optimizer else []
        ledger.reset_peak()
        booked: dict[str, int] = {}
        meter = Meter(ledger, [*weights, *states])
        try:
            for category, nbytes in fixed.items():
                ledger.book(category, "", nbytes)
                booked[category] = nbytes
            with self._caches.off(), same_random_numbers(), torch.enable_grad(), meter:
                yield meter
        finally:
            meter.close()
            for category, nbytes in booked.items():
                ledger.release(category, "", nbytes)

    @contextmanager
    def timed(self) -> Iterator[Meter]:
        """Count nothing in the block, since counting takes longer than small operations do; for plans that move nothing."""
        with self._caches.off(), same_random_numbers(), torch.enable_grad():
            yield Meter(self._device.ledger)

    def run(self, operations: Operations, work: Work, meter: Meter) -> Ran:
        """Execute a plan for every micro-batch; gradients add up in ascending k, as in plain training.

        Raises:
            DeviceOutOfMemory: the device's budget does not suffice.
            RuntimeError: the model takes another way than the one learned.
        """
        ran = Ran()
        for k, micro_batch in enumerate(work.micro_batches):
            with self._apart() if k else _as_they_are():
                self._micro_batch(k, micro_batch, operations, work, meter, ran)
        return ran

    def _micro_batch(self, k: int, given: Any, operations: Operations, work: Work, meter: Meter, ran: Ran) -> None:
        meter.spare(leaf for leaf in leaves_in(given) if isinstance(leaf, Tensor))  # it stays on the host
        micro_batch = copy_tensors(given)
        moves = Moves(self._device, self.host, meter, self.trace)
        clock = Clock(self._device, self.trace)
        execution = Execution(
            self.model,
            self._layers,
            self._task(micro_batch, work.divisors[k]),
            work.structures[k],
            meter,
            moves,
            partial(_timed, clock, k),
            k,
        )
        execution.measures, execution.on_made = self._measures, self.on_made
        execution.on_done = partial(self._sample, meter)
        self._execution = execution
        RandomState.seeded(work.seeds[k]).put()
        ran.bases.append(meter.now)
        self.trace.sample("device", self._device.ledger.by_category())
        try:
            execution.run(operations)
        except BaseException:
            moves.abandon()
            raise
        ran.random = RandomState.take()
        ran.constants.append(execution.constant_bytes())
        ran.logs.append(execution.log)
        ran.losses.append(execution.loss)
        ran.layer_forwards += execution.layer_forwards
        self._execution = None

    def _sample(self, meter: Meter, done: Done) -> None:
        if done.operation.kind in COMPUTES:
            self._note_high(meter, done.high)
        meter.call((p.grad for p in self.model.parameters() if p.grad is not None), "gradients")
        self.trace.sample("device", self._device.ledger.by_category())
        self.trace.sample("host", self.host.by_category())

    def _note_high(self, meter: Meter, high: int) -> None:
        """Note the most bytes within what has just run, ahead of what is left of it; readers know this order from a relay."""
        held = self._device.ledger.by_category()
        self.trace.sample("device", {**held, "activations": held.get("activations", 0) + high - meter.now})

    def update(self, optimizer: Optimizer, meter: Meter, room_bytes: int) -> None:
        """Update with the gradients that are there, and drop them.

        Args:
            room_bytes: that the update will need besides what is there now.

        Raises:
            DeviceOutOfMemory: there is no such room; nothing was updated.
            TornStep: the optimizer failed when some weights were new; it names their parameters.
        """
        ledger = self._device.ledger
        if ledger.limit_bytes is not None and ledger.total + room_bytes > ledger.limit_bytes:
            ledger.book("activations", "", room_bytes)  # refuses, before a part of the weights is new
        meter.take_high()
        clock = Clock(self._device, self.trace)
        clock.start("update", "", -1)
        versions = {name: param._version for name, param in self.model.named_parameters()}
        try:
            optimizer.step()
        except Exception as error:
            new = [name for name, param in self.model.named_parameters() if param._version != versions[name]]
            if not new:
                raise
            raise TornStep(f"the optimizer failed after it had updated {', '.join(new)}: {error!r}", new) from error
        clock.stop()
        self._note_high(meter, meter.take_high())
        meter.call(_state_tensors(optimizer), "optimizer")
        optimizer.zero_grad(set_to_none=True)
        self.trace.sample("device", ledger.by_category())

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Gather the gradients that a micro-batch has for parameters of several stages, and add them up at the end.

        Stage by stage they would be added in another order than in plain training: (a + b) + (c + d) is not ((a + b) + c) + d.
        """
        before = [param.grad for param in self._shared]
        for param in self._shared:
            param.grad = None
        yield
        for param, grad in zip(self._shared, before, strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else grad.add_(param.grad)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Note in the block what frames hold, and which stages add to each parameter's gradient."""
        self._measures = True
        handles = []
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                found = self.stages_of.setdefault(name, set())
                handles.append(param.register_post_accumulate_grad_hook(partial(self._note, found)))
        try:
            yield
        finally:
            self._measures = False
            for handle in handles:
                handle.remove()

    def keep_apart(self) -> frozenset[str]:
        """Keep gradients of each micro-batch apart where, as was noted, several stages add to them; returns the names."""
        shared = frozenset(name for name, found in self.stages_of.items() if len(found) > 1)
        self._shared = [param for name, param in self.model.named_parameters() if name in shared]
        return shared

    def _note(self, found: set[int], _: Tensor) -> None:
        found.add(self._execution.backs)  # type: ignore[union-attr]


def _timed(clock: Clock, k: int, kind: str, layer: str, visit: int) -> Callable[[], None]:
    clock.stay += 1  # every operation is a stay of its own: a stage may run several times
    clock.start(kind, layer, k, visit)
    return clock.stop


@contextmanager
def _as_they_are() -> Iterator[None]:
    yield


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def nbytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def optimizer_bytes(optimizer: Optimizer | None) -> int:
    """Return the bytes of an optimizer's state."""
    return sum(state_bytes(state) for state in optimizer.state.values()) if optimizer else 0
