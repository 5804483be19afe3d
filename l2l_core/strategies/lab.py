"""The facade: one model, one batch, and ways to train on it in less memory, planned, run, proved and compared."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.batches import Batch, Mean, ModelCall, Objective, RowsOf, Weight, form_of
from l2l_core.config import RelayConfig
from l2l_core.devices import Device, DeviceOutOfMemory, EmulatedDevice
from l2l_core.eps.blocks import refuse_checkpointing, refuse_scripted
from l2l_core.model import copy_tensors, resolve_layers
from l2l_core.rules import weight_slots
from l2l_core.step import note_failure
from l2l_core.strategies.course import Course, Ran, Work, nbytes_of, optimizer_bytes
from l2l_core.strategies.measure import Known, measure, small_losses, unlimited, update_costs
from l2l_core.strategies.meter import Meter
from l2l_core.strategies.plan import Operation, Plan, check_operations
from l2l_core.strategies.policies import Policy
from l2l_core.strategies.prices import Prices
from l2l_core.strategies.proof import Proof, prove
from l2l_core.strategies.relayed import relayed
from l2l_core.strategies.selective import Checkpointed
from l2l_core.strategies.table import Row, Table, Way
from l2l_core.strategies.ways import default_ways
from l2l_core.trace import Trace, format_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class LabResult:
    """What one step by a plan gave.

    Attributes:
        loss: mean over the batch.
        seconds: wall time, of a metered step.
        trace: events and memory.
        peak_device_bytes, peak_host_bytes: metered.
        layer_forwards: how often layers ran forward, all micro-batches together.
    """

    loss: float
    seconds: float
    trace: Trace
    peak_device_bytes: int
    peak_host_bytes: int
    layer_forwards: int


class Lab:
    """Plans over the stages of any module that relays, on one batch.

    Making it learns the model on a copy, by a few metered steps; the model itself changes in `step` alone.

    Args:
        model: any module with dense float32 parameters on the CPU.
        batch: cut into micro-batches as a relay cuts it.
        optimizer: over the model's parameters; default AdamW with a learning rate of 1e-4.
        device: emulated; its memory and its link are what plans are made for.
        layers: as `Relay` takes them; default `find_layers(model)`.
        loss, objective, weight: as `Relay` takes them.
        micro_batches: all follow the same plan, one after the other.
        seed: of the random streams, the same as a relay's.

    Raises:
        RuntimeError, TypeError, ValueError: a model that no plan can run again to the same bits; nothing was trained.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        optimizer: Optimizer | None = None,
        device: Device | None = None,
        layers: Iterable[nn.Module | str] | None = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        objective: Objective | None = None,
        weight: Weight | None = None,
        micro_batches: int = 1,
        seed: int = 0,
    ) -> None:
        self.model, self.batch = model, batch
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.device = _checked(device or EmulatedDevice())
        refuse_checkpointing(model)
        refuse_scripted(model)
        self.config = RelayConfig(micro_batches=micro_batches, seed=seed)
        self.steps = 0
        self.trace: Trace | None = None  # of the step under way, or of the last one
        self._layers = tuple(resolve_layers(model, layers))
        self._call = ModelCall(model, loss, objective)
        self._options = {"loss": loss, "objective": objective, "weight": weight}
        rows = RowsOf(batch)
        self._call.check(batch)
        self._micro_batches = [copy_tensors(each) for each in rows.split(micro_batches)]
        call = self._call
        self._mean = Mean(weight, lambda small, shaken: small_losses(model, call.objective, small, shaken))
        self._divisors = self._mean.divisors(rows, self._micro_batches)
        self._known: dict[Any, Known] = {}
        self._shared: frozenset[str] = frozenset()
        self._learn()

    # -- what is asked of it -------------------------------------------------------------------------------------------

    def on(self, device: Device) -> Lab:
        """Return a lab with the same measurements for another device: another budget, another link. The model is the same one."""
        other = copy.copy(self)
        other.device, other.prices = _checked(device), replace(self.prices, figures=device.figures())
        return other

    def plan(self, policy: Policy | Sequence[Operation | tuple[str, int]], name: str = "by hand") -> Plan:
        """Make a plan by a policy, or check one that was written by hand.

        Raises:
            DeviceOutOfMemory: the policy has no plan for the device's budget; it states the smallest that would do.
            ValueError: the operations cannot be executed.
        """
        if isinstance(policy, Policy):
            operations, name = policy.operations(self.prices), policy.name
        else:
            operations = tuple(Operation(*each) for each in policy)
        check_operations(operations, self.prices.stages)
        prices = self.prices
        return Plan(
            name=name,
            operations=operations,
            stages=prices.stages,
            peak_device_bytes=prices.peak_device_bytes(operations),
            peak_host_bytes=prices.peak_host_bytes(operations),
            seconds=prices.seconds(operations),
        )

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers at which stages end."""
        return self._layers

    def step(self, plan: Plan, batch: Batch | None = None) -> LabResult:
        """Train the model by one step.

        Args:
            plan: from `plan`.
            batch: of the same shapes as the lab's own, which is the default.

        Raises:
            DeviceOutOfMemory: the device's budget does not suffice; `least_bytes` is the smallest with which the plan fits.
            RuntimeError: the model takes another way than the one learned.
            TornStep: the optimizer failed in the middle of its update. In all other cases nothing was changed.
            ValueError: the batch has other shapes.
        """
        work = self._work if batch is None else self._work_on(batch)
        settings = {"plan": plan.name, "micro_batches": self.config.micro_batches, **self.device.figures()}
        names = {name: name for name in self._layers}
        trace = self.trace = Trace(step=self.steps, device=self.device.name, names=names, settings=settings)
        course = self._course(self.model, trace)
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        began_s = time.perf_counter()
        try:
            ran, peak = self._run(course, self.optimizer, plan, work)
        except BaseException as error:
            self.optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            if isinstance(error, DeviceOutOfMemory):
                error.least_bytes, error.remedy = plan.peak_device_bytes, _needs(plan)
            note_failure(trace, error)
            raise
        self.steps += 1
        return LabResult(
            loss=float(sum(ran.losses)),
            seconds=time.perf_counter() - began_s,
            trace=trace,
            peak_device_bytes=peak,
            peak_host_bytes=course.host.peak,
            layer_forwards=ran.layer_forwards,
        )

    def verify(self, plan: Plan) -> Proof:
        """Compare one step by the plan with plain training, on copies of the model; nothing of it stays."""
        ours, theirs = self._twins()[0], self._twins()[0]
        course = self._course(ours)
        with unlimited(self.device), course.metered() as meter:
            ran = course.run(plan.operations, self._work, meter)
        return prove(course, ran, theirs, self._work, self._call.objective)

    def compare(self, ways: Iterable[Way] | None = None) -> Table:
        """Make a step in each way on a copy of the model, without a budget, and put what they needed side by side.

        Args:
            ways: default one of each kind; `Combined` where it can try all choices.
        """
        ways = default_ways(self.prices.stages - 1) if ways is None else ways
        return Table([way.row(self) for way in ways], self.device.memory_bytes)

    def planned(self, policy: Policy) -> Row:
        """Make a step by the plan of a policy on a copy; a policy that has none for the device's budget says so in its row."""
        try:
            plan = self.plan(policy)
        except DeviceOutOfMemory as error:
            return Row(policy.name, why=str(error))
        model, optimizer = self._twins()
        course = self._course(model)
        with unlimited(self.device):
            ran, peak = self._run(course, optimizer, plan, self._work)
        trace = self.prices.trace(plan.operations)
        return Row(policy.name, peak, course.host.peak, ran.layer_forwards, plan.seconds, trace=trace, plan=plan)

    def relayed(self, name: str, keep: int, ahead: int, stash: str) -> Row:
        """Make a step by relay on a copy, with weights of as many layers on the device as graphs are kept of."""
        resident = max(0, keep - weight_slots(ahead))
        config = replace(self.config, keep=keep, ahead=ahead, stash=stash, resident=resident)
        return relayed(name, self._twins(), self._layers, self.batch, config, self.device, self._options)

    def checkpointed(self, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Row:
        """Make a step by plain training on a copy, with every layer's forward in a wrap; its seconds are compute alone."""
        model, optimizer = self._twins()
        wrapped, work = Checkpointed(model, self._layers, wrap), self._work
        with unlimited(self.device):
            run = partial(wrapped.run, work, self._call.objective)
            seconds, peak = self._stepped(self._course(model), optimizer, lambda _: run())
        return Row(name, peak, 0, wrapped.layer_forwards, seconds)

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _work(self) -> Work:
        return self._work_of(self._micro_batches, self._divisors)

    def _work_on(self, batch: Batch) -> Work:
        self._call.check(batch)
        rows = RowsOf(batch)
        micro_batches = rows.split(self.config.micro_batches)
        ours, theirs = ([form_of(each) for each in those] for those in (self._micro_batches, micro_batches))
        if ours != theirs:
            raise ValueError(
                f"the micro-batches of this batch have shapes {theirs}, and plans are made for {ours}, whose bytes were "
                "measured: give batches of one shape (a DataLoader with drop_last=True), or make another Lab with this one"
            )
        return self._work_of(micro_batches, self._mean.divisors(rows, micro_batches))

    def _work_of(self, micro_batches: Sequence[Any], divisors: Sequence[float]) -> Work:
        seeds = [self.config.micro_batch_seed(self.steps, k) for k in range(len(micro_batches))]
        structures = [self._known[form_of(each)].structure for each in micro_batches]
        return Work(micro_batches, divisors, seeds, structures)

    def _run(self, course: Course, optimizer: Optimizer, plan: Plan, work: Work) -> tuple[Ran, int]:
        return self._stepped(course, optimizer, lambda meter: course.run(plan.operations, work, meter))

    def _stepped(self, course: Course, optimizer: Optimizer, run: Callable[[Meter], T]) -> tuple[T, int]:
        """Let `run` leave gradients, and update; returns what it gives, and the highest bytes on the device."""
        ledger = self.device.ledger
        with course.metered(optimizer) as meter:
            more = self._optimizer_bytes - optimizer_bytes(optimizer)
            ledger.book("optimizer", "", more)  # room for what the first update makes
            try:
                ran = run(meter)
            finally:
                ledger.release("optimizer", "", more)
            course.update(optimizer, meter, more + max(0, self.prices.update_bytes - meter.now))
        return ran, ledger.peak

    def _course(self, model: nn.Module, trace: Trace | None = None) -> Course:
        layers = {model.get_submodule(name): name for name in self._layers}
        return Course(model, layers, self._call.objective, self.device, self._shared, trace)

    def _twins(self) -> tuple[nn.Module, Optimizer]:
        for param in self.model.parameters():
            param.grad = None
        held = [value for module in self.model.modules() for value in vars(module).values()]
        # A tensor with a graph, which a forward has left on a module, is copied without it: `deepcopy` refuses it.
        graphs = {id(t): t.detach().clone() for t in held if isinstance(t, torch.Tensor) and not t.is_leaf}
        return copy.deepcopy((self.model, self.optimizer), graphs)

    def _learn(self) -> None:
        """Learn structures and costs from every form of micro-batch, on copies without a budget."""
        twin, optimizer = self._twins()
        course = self._course(twin)
        several = len(self._micro_batches) > 1
        with unlimited(self.device):
            for micro_batch, divisor in zip(self._micro_batches, self._divisors, strict=True):
                if form_of(micro_batch) not in self._known:
                    self._known[form_of(micro_batch)] = measure(course, micro_batch, divisor, several)
            update_bytes, self._optimizer_bytes = update_costs(course, optimizer)
        stages = {known.structure.stages for known in self._known.values()}
        if len(stages) > 1:
            raise ValueError(
                f"micro-batches of different shapes have {sorted(stages)} stages: use an even micro_batches"
            )
        self._shared = course.keep_apart()
        costs = [self._known[form_of(each)].costs[min(k, 1)] for k, each in enumerate(self._micro_batches)]
        fixed = nbytes_of([*twin.parameters(), *twin.buffers()]) + self._optimizer_bytes
        self.prices = Prices(costs, fixed, self._optimizer_bytes, update_bytes, self.device.figures())


def _checked(device: Device) -> Device:
    if not device.in_host_memory:
        raise ValueError(f"device is {device.name}: plans are metered in host memory, use an EmulatedDevice")
    return device


def _needs(plan: Plan) -> str:
    nbytes = plan.peak_device_bytes
    return f"{plan.name} needs {format_bytes(nbytes)} ({nbytes} bytes), which is the smallest budget that would do."
