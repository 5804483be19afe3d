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

from l2l_core.batches import Batch, BatchRows, LossNormaliser, ModelCall, Objective, Weight, shapes_of
from l2l_core.config import RelayConfig
from l2l_core.devices import Device, DeviceOutOfMemory, EmulatedDevice
from l2l_core.eps.blocks import refuse_checkpointing, refuse_scripted
from l2l_core.model import copy_tensors, resolve_layers
from l2l_core.schedule_rules import weight_slots
from l2l_core.step import record_failure
from l2l_core.strategies.allocation_meter import AllocationMeter
from l2l_core.strategies.measurement import Measurement, measure, measure_losses, measure_update, without_budget
from l2l_core.strategies.plan import Operation, Plan, check_operations
from l2l_core.strategies.plan_cost_model import PlanCostModel
from l2l_core.strategies.plan_runner import PlanInputs, PlanResult, PlanRunner, optimizer_bytes, total_storage_bytes
from l2l_core.strategies.plan_verification import PlanVerification, verify_plan
from l2l_core.strategies.policies import Policy
from l2l_core.strategies.relayed import run_relay
from l2l_core.strategies.selective_checkpoint import WrappedModel
from l2l_core.strategies.strategy_table import Strategy, StrategyResult, StrategyTable
from l2l_core.strategies.ways import default_strategies
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
        self.device = _check_device(device or EmulatedDevice())
        refuse_checkpointing(model)
        refuse_scripted(model)
        self.config = RelayConfig(micro_batches=micro_batches, seed=seed)
        self.steps = 0
        self.trace: Trace | None = None  # of the step under way, or of the last one
        self._layers = tuple(resolve_layers(model, layers))
        self._model_call = ModelCall(model, loss, objective)
        self._options = {"loss": loss, "objective": objective, "weight": weight}
        rows = BatchRows(batch)
        self._model_call.check(batch)
        self._micro_batches = [copy_tensors(each) for each in rows.split(micro_batches)]
        call = self._model_call
        self._normaliser = LossNormaliser(
            weight, lambda small, shaken: measure_losses(model, call.objective, small, shaken)
        )
        self._divisors = self._normaliser.divisors(rows, self._micro_batches)
        self._measurements: dict[Any, Measurement] = {}
        self._shared: frozenset[str] = frozenset()
        self._measure()

    # -- what is asked of it -------------------------------------------------------------------------------------------

    def on_device(self, device: Device) -> Lab:
        """Return a lab with the same measurements for another device: another budget, another link. The model is the same one."""
        other = copy.copy(self)
        other.device, other.cost_model = _check_device(device), replace(self.cost_model, figures=device.figures())
        return other

    def plan(self, policy: Policy | Sequence[Operation | tuple[str, int]], name: str = "by hand") -> Plan:
        """Make a plan by a policy, or check one that was written by hand.

        Raises:
            DeviceOutOfMemory: the policy has no plan for the device's budget; it states the smallest that would do.
            ValueError: the operations cannot be executed.
        """
        if isinstance(policy, Policy):
            operations, name = policy.operations(self.cost_model), policy.name
        else:
            operations = tuple(Operation(*each) for each in policy)
        check_operations(operations, self.cost_model.stages)
        prices = self.cost_model
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
        work = self._own_inputs if batch is None else self._inputs_of_batch(batch)
        settings = {"plan": plan.name, "micro_batches": self.config.micro_batches, **self.device.figures()}
        names = {name: name for name in self._layers}
        trace = self.trace = Trace(step=self.steps, device=self.device.name, names=names, settings=settings)
        course = self._make_runner(self.model, trace)
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
                error.least_bytes, error.remedy = plan.peak_device_bytes, _describe_need(plan)
            record_failure(trace, error)
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

    def verify(self, plan: Plan) -> PlanVerification:
        """Compare one step by the plan with plain training, on copies of the model; nothing of it stays."""
        ours, theirs = self._copy_model()[0], self._copy_model()[0]
        course = self._make_runner(ours)
        with without_budget(self.device), course.metered() as meter:
            ran = course.run(plan.operations, self._own_inputs, meter)
        return verify_plan(course, ran, theirs, self._own_inputs, self._model_call.objective)

    def compare(self, ways: Iterable[Strategy] | None = None) -> StrategyTable:
        """Make a step in each way on a copy of the model, without a budget, and put what they needed side by side.

        Args:
            ways: default one of each kind; `Combined` where it can try all choices.
        """
        ways = default_strategies(self.cost_model.stages - 1) if ways is None else ways
        return StrategyTable([way.measure(self) for way in ways], self.device.memory_bytes)

    def run_policy(self, policy: Policy) -> StrategyResult:
        """Make a step by the plan of a policy on a copy; a policy that has none for the device's budget says so in its row."""
        try:
            plan = self.plan(policy)
        except DeviceOutOfMemory as error:
            return StrategyResult(policy.name, why=str(error))
        model, optimizer = self._copy_model()
        course = self._make_runner(model)
        with without_budget(self.device):
            ran, peak = self._run(course, optimizer, plan, self._own_inputs)
        trace = self.cost_model.trace(plan.operations)
        return StrategyResult(
            policy.name, peak, course.host.peak, ran.layer_forwards, plan.seconds, trace=trace, plan=plan
        )

    def run_relay(self, name: str, keep: int, ahead: int, stash: str) -> StrategyResult:
        """Make a step by relay on a copy, with weights of as many layers on the device as graphs are kept of."""
        resident = max(0, keep - weight_slots(ahead))
        config = replace(self.config, keep=keep, ahead=ahead, stash=stash, resident=resident)
        return run_relay(name, self._copy_model(), self._layers, self.batch, config, self.device, self._options)

    def run_wrapped(self, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> StrategyResult:
        """Make a step by plain training on a copy, with every layer's forward in a wrap; its seconds are compute alone."""
        model, optimizer = self._copy_model()
        wrapped, work = WrappedModel(model, self._layers, wrap), self._own_inputs
        with without_budget(self.device):
            run = partial(wrapped.run, work, self._model_call.objective)
            seconds, peak = self._run_step(self._make_runner(model), optimizer, lambda _: run())
        return StrategyResult(name, peak, 0, wrapped.layer_forwards, seconds)

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _own_inputs(self) -> PlanInputs:
        return self._make_inputs(self._micro_batches, self._divisors)

    def _inputs_of_batch(self, batch: Batch) -> PlanInputs:
        self._model_call.check(batch)
        rows = BatchRows(batch)
        micro_batches = rows.split(self.config.micro_batches)
        ours, theirs = ([shapes_of(each) for each in those] for those in (self._micro_batches, micro_batches))
        if ours != theirs:
            raise ValueError(
                f"the micro-batches of this batch have shapes {theirs}, and plans are made for {ours}, whose bytes were "
                "measured: give batches of one shape (a DataLoader with drop_last=True), or make another Lab with this one"
            )
        return self._make_inputs(micro_batches, self._normaliser.divisors(rows, micro_batches))

    def _make_inputs(self, micro_batches: Sequence[Any], divisors: Sequence[float]) -> PlanInputs:
        seeds = [self.config.micro_batch_seed(self.steps, k) for k in range(len(micro_batches))]
        structures = [self._measurements[shapes_of(each)].structure for each in micro_batches]
        return PlanInputs(micro_batches, divisors, seeds, structures)

    def _run(self, runner: PlanRunner, optimizer: Optimizer, plan: Plan, inputs: PlanInputs) -> tuple[PlanResult, int]:
        return self._run_step(runner, optimizer, lambda meter: runner.run(plan.operations, inputs, meter))

    def _run_step(self, runner: PlanRunner, optimizer: Optimizer, run: Callable[[AllocationMeter], T]) -> tuple[T, int]:
        """Let `run` leave gradients, and update; returns what it gives, and the highest bytes on the device."""
        ledger = self.device.ledger
        with runner.metered(optimizer) as meter:
            more = self._optimizer_bytes - optimizer_bytes(optimizer)
            ledger.book("optimizer", "", more)  # room for what the first update makes
            try:
                ran = run(meter)
            finally:
                ledger.release("optimizer", "", more)
            runner.update(optimizer, meter, more + max(0, self.cost_model.update_bytes - meter.current_bytes))
        return ran, ledger.peak

    def _make_runner(self, model: nn.Module, trace: Trace | None = None) -> PlanRunner:
        layers = {model.get_submodule(name): name for name in self._layers}
        return PlanRunner(model, layers, self._model_call.objective, self.device, self._shared, trace)

    def _copy_model(self) -> tuple[nn.Module, Optimizer]:
        for param in self.model.parameters():
            param.grad = None
        held = [value for module in self.model.modules() for value in vars(module).values()]
        # A tensor with a graph, which a forward has left on a module, is copied without it: `deepcopy` refuses it.
        graphs = {id(t): t.detach().clone() for t in held if isinstance(t, torch.Tensor) and not t.is_leaf}
        return copy.deepcopy((self.model, self.optimizer), graphs)

    def _measure(self) -> None:
        """Learn structures and costs from every form of micro-batch, on copies without a budget."""
        twin, optimizer = self._copy_model()
        course = self._make_runner(twin)
        several = len(self._micro_batches) > 1
        with without_budget(self.device):
            for micro_batch, divisor in zip(self._micro_batches, self._divisors, strict=True):
                if shapes_of(micro_batch) not in self._measurements:
                    self._measurements[shapes_of(micro_batch)] = measure(course, micro_batch, divisor, several)
            update_bytes, self._optimizer_bytes = measure_update(course, optimizer)
        stages = {known.structure.stages for known in self._measurements.values()}
        if len(stages) > 1:
            raise ValueError(
                f"micro-batches of different shapes have {sorted(stages)} stages: use an even micro_batches"
            )
        self._shared = course.separate_shared_gradients()
        costs = [self._measurements[shapes_of(each)].costs[min(k, 1)] for k, each in enumerate(self._micro_batches)]
        fixed = total_storage_bytes([*twin.parameters(), *twin.buffers()]) + self._optimizer_bytes
        self.cost_model = PlanCostModel(costs, fixed, self._optimizer_bytes, update_bytes, self.device.figures())


def _check_device(device: Device) -> Device:
    if not device.in_host_memory:
        raise ValueError(f"device is {device.name}: plans are metered in host memory, use an EmulatedDevice")
    return device


def _describe_need(plan: Plan) -> str:
    nbytes = plan.peak_device_bytes
    return f"{plan.name} needs {format_bytes(nbytes)} ({nbytes} bytes), which is the smallest budget that would do."
