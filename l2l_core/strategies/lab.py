"""Facade of the strategies: plan, run, verify and compare ways to train one model on one batch in less memory."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.batches import (
    Batch,
    Loss,
    LossNormaliser,
    LossOver,
    ModelCall,
    RowsOfBatch,
    Split,
    UserObjective,
    Weight,
    rows_rule,
    shapes_of,
)
from l2l_core.config import RelayConfig
from l2l_core.devices import Device, DeviceOutOfMemory, EmulatedDevice
from l2l_core.eps.blocks import refuse_checkpointing, refuse_scripted
from l2l_core.model import accumulate, copy_tensors, preserve_random_state, preserved_user_state, resolve_layers
from l2l_core.relay import Relay
from l2l_core.schedule_rules import kept_layer_count, weight_slots
from l2l_core.simulator import Profile, simulate
from l2l_core.step import record_failure
from l2l_core.strategies import policies
from l2l_core.strategies.allocation_meter import AllocationMeter
from l2l_core.strategies.measurement import measure, measure_losses, measure_update, without_budget
from l2l_core.strategies.plan import Operation, Plan, check_operations
from l2l_core.strategies.plan_cost_model import PlanCostModel
from l2l_core.strategies.plan_runner import (
    PlanInputs,
    PlanRunner,
    optimizer_bytes,
    restore_buffers,
    total_storage_bytes,
)
from l2l_core.strategies.plan_verification import PlanVerification, verify_plan
from l2l_core.strategies.policies import Policy
from l2l_core.strategies.selective_checkpoint import SelectiveCheckpoint, wrap_layers
from l2l_core.strategies.stage_costs import StageCosts
from l2l_core.strategies.strategy_table import Strategy, StrategyResult, StrategyTable
from l2l_core.trace import Trace, format_bytes

T = TypeVar("T")
_TIMED_STEPS = 3  # of a relay, whose fastest step counts, and of torch's checkpoint, whose median counts


@dataclass(frozen=True)
class LabResult:
    """Result of one step by a plan.

    Attributes:
        loss: mean over the batch.
        seconds: wall time of the metered step.
        trace: events and memory.
        peak_device_bytes, peak_host_bytes: metered.
        layer_forwards: number of forward runs of layers, in all micro-batches together.

    Example:
        See `Lab`.
    """

    loss: float
    seconds: float
    trace: Trace
    peak_device_bytes: int
    peak_host_bytes: int
    layer_forwards: int


class Lab:
    """Plans for any model that relays, on one batch.

    The constructor measures copies of the model in a few steps; only `step` changes the model itself.

    Args:
        model: any module with dense float32 parameters on the CPU.
        batch: divided into micro-batches as in a relay.
        optimizer: of the model's parameters; default AdamW with a learning rate of 1e-4.
        device: emulated; plans are made for its memory and its link.
        layers: as in `Relay`; default `find_layers(model)`.
        loss, objective, weight, split: as in `Relay`.
        loss_over: as in `Relay`, but no "batch": plans run one micro-batch after another.
        micro_batches: number of micro-batches, which follow the same plan one after another.
        seed: seed of the random streams, as in a relay.

    Attributes:
        layers: names of the layers at which stages end.
        rows_of: returns the rows of a batch.
        steps: number of steps done.
        trace: trace of the current or the last step.

    Raises:
        RuntimeError, TypeError, ValueError: reruns of the model would not give the same bits; nothing was trained.

    Example:
        >>> from l2l_core.strategies import Lab, Periodic
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model, batch, loss=nn.CrossEntropyLoss())
        >>> result = lab.step(lab.plan(Periodic(2)))
        >>> result.layer_forwards > 6  # layers that were run again
        True
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        optimizer: Optimizer | None = None,
        device: Device | None = None,
        layers: Iterable[nn.Module | str] | None = None,
        loss: Loss | None = None,
        objective: UserObjective | None = None,
        weight: Weight | None = None,
        loss_over: LossOver | None = None,
        micro_batches: int = 1,
        seed: int = 0,
        split: Split | None = None,
    ) -> None:
        self.model, self.batch = model, batch
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.device = _check_device(device or EmulatedDevice())
        refuse_checkpointing(model)
        refuse_scripted(model)
        self.config = RelayConfig(micro_batches=micro_batches, seed=seed)
        self.steps = 0
        self.trace: Trace | None = None
        self.layers = tuple(resolve_layers(model, layers))
        self._model_call = ModelCall(model, loss, objective)
        if loss_over == "batch":
            raise ValueError(
                'loss_over="batch": a lab runs one micro-batch after another, each with its own loss. Use a Relay, or leave it '
                "out"
            )
        self._options: dict[str, Any] = {
            "loss": loss, "objective": objective, "weight": weight, "loss_over": loss_over, "split": split
        }  # fmt: skip
        self._model_call.check(batch)
        self.rows_of = rows_rule(split)
        rows = self.rows_of(batch)
        self._micro_batches = [copy_tensors(each) for each in rows.split(micro_batches)]
        measure_few = partial(measure_losses, model, self._model_call.objective)
        self._normaliser = LossNormaliser(weight, measure_few, loss_over=loss_over)
        self._divisors = self._find_divisors(rows, self._micro_batches)
        self._costs: dict[Any, list[StageCosts]] = {}  # by form of micro-batch
        self._shared: frozenset[str] = frozenset()
        self._measure()

    def on_device(self, device: Device) -> Lab:
        """Return a lab of the same model and measurements for another device, with its budget and link."""
        other = copy.copy(self)
        other.device, other.cost_model = _check_device(device), replace(self.cost_model, figures=device.figures())
        return other

    def plan(self, policy: Policy | Sequence[Operation | tuple[str, int]], name: str = "by hand") -> Plan:
        """Make a plan by a policy, or check a plan that was written by hand.

        Raises:
            DeviceOutOfMemory: the policy has no plan for the device's budget; states the smallest that would do.
            ValueError: the operations cannot be executed.
        """
        costs = self.cost_model
        if isinstance(policy, Policy):
            operations, name = policy.operations(costs), policy.name
        else:
            operations = tuple(Operation(*each) for each in policy)
        check_operations(operations, costs.stages)
        return Plan(
            name,
            operations,
            costs.stages,
            costs.peak_device_bytes(operations),
            costs.peak_host_bytes(operations),
            costs.seconds(operations),
        )

    def step(self, plan: Plan, batch: Batch | None = None) -> LabResult:
        """Train the model by one step.

        Args:
            plan: from `plan`.
            batch: of the same shapes as the lab's own batch, which is the default.

        Raises:
            DeviceOutOfMemory: the device's budget does not suffice; `least_bytes` is the smallest that this step needs.
            RuntimeError: the model takes another path than the traced one.
            TornStep: the optimizer failed during its update. After any other error nothing is changed.
            ValueError: the batch has other shapes.
        """
        inputs = self._own_inputs if batch is None else self._inputs_of_batch(batch)
        limit, budget = self.device.ledger.limit_bytes, nullcontext()
        if self._varies and limit is not None:
            if (needed := self._peak_bytes(plan, inputs)) > limit:
                error = DeviceOutOfMemory(f"A budget of {limit} bytes is too small for the step", needed, limit, {})
                raise _name_budget(error, plan, needed)
            budget = without_budget(self.device)
        settings = {"plan": plan.name, "micro_batches": self.config.micro_batches, **self.device.figures()}
        names = {name: name for name in self.layers}
        trace = self.trace = Trace(step=self.steps, device=self.device.name, names=names, settings=settings)
        runner = self._make_runner(self.model, trace)
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        began_s = time.perf_counter()
        try:
            with budget:
                result, peak = self._run(runner, self.optimizer, partial(runner.run, plan.operations, inputs))
        except BaseException as error:
            self.optimizer.zero_grad(set_to_none=True)
            restore_buffers(buffers)
            if isinstance(error, DeviceOutOfMemory):
                _name_budget(error, plan, max(plan.peak_device_bytes, self._peak_bytes(plan, inputs)))
            record_failure(trace, error)
            raise
        self.steps += 1
        seconds, loss = time.perf_counter() - began_s, float(sum(result.losses))
        return LabResult(loss, seconds, trace, peak, runner.host.peak, result.layer_forwards)

    def verify(self, plan: Plan) -> PlanVerification:
        """Compare one step by the plan with plain training, on copies of the model."""
        model, reference = self._copy_model()[0], self._copy_model()[0]
        runner = self._make_runner(model)
        with without_budget(self.device), runner.metered() as meter:
            result = runner.run(plan.operations, self._own_inputs, meter)
        return verify_plan(model, result, reference, self._own_inputs, self._model_call.objective)

    def compare(self, ways: Iterable[Strategy] | None = None) -> StrategyTable:
        """Run a step by each strategy on a copy of the model, without a budget, and tabulate the results.

        Args:
            ways: strategies; default one of each kind, with `Combined` if the model has few enough layers.
        """
        ways = default_strategies(len(self.layers)) if ways is None else ways
        return StrategyTable([way.measure(self) for way in ways], self.cost_model.budget)

    # -- strategies on copies of the model -----------------------------------------------------------------------------

    def run_policy(self, policy: Policy) -> StrategyResult:
        """Run a step by the plan of a policy on a copy; without a plan, return the reason."""
        try:
            plan = self.plan(policy)
        except DeviceOutOfMemory as error:
            return StrategyResult(policy.name, why=str(error))
        model, optimizer = self._copy_model()
        runner = self._make_runner(model)
        with without_budget(self.device):
            result, peak = self._run(runner, optimizer, partial(runner.run, plan.operations, self._own_inputs))
        trace, forwards = self.cost_model.trace(plan.operations), result.layer_forwards
        return StrategyResult(policy.name, peak, runner.host.peak, forwards, plan.seconds, trace=trace, plan=plan)

    def run_relay(self, name: str, keep: int, ahead: int, stash: str) -> StrategyResult:
        """Run steps by relay on a copy, and simulate the fastest."""
        # The weights of layers with kept graphs stay on the device too.
        resident = max(0, keep - weight_slots(ahead))
        config = replace(self.config, keep=keep, ahead=ahead, stash=stash, resident=resident)
        model, optimizer = self._copy_model()
        with Relay(model, optimizer, EmulatedDevice(), layers=self.layers, config=config, **self._options) as relay:
            relay.step(self.batch)  # creates the optimizer's state
            results = [relay.step(self.batch) for _ in range(_TIMED_STEPS)]
            traces = [simulate(Profile.of(each.trace), config, self.device) for each in results]
            host_bytes = relay.host.peak
        trace, result = min(traces, key=lambda each: each.span_s), results[-1]
        layers = len(self.layers)
        forwards = config.micro_batches * (2 * layers - kept_layer_count(result.trace.settings, layers))
        return StrategyResult(name, result.peak_device_bytes, host_bytes, forwards, trace.span_s, trace=trace)

    def run_wrapped(self, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> StrategyResult:
        """Run plain training on a copy with every layer's forward in a wrapper; its seconds are compute alone."""
        model, optimizer = self._copy_model()
        forwards, inputs, seconds = wrap_layers(model, self.layers, wrap), self._own_inputs, []

        def run(_: AllocationMeter) -> None:
            for _step in range(_TIMED_STEPS):
                model.zero_grad(set_to_none=True)
                forwards.clear()
                began_s = time.perf_counter()
                accumulate(model, inputs.micro_batches, self._model_call.objective, inputs.divisors, inputs.seeds)
                seconds.append(time.perf_counter() - began_s)

        with without_budget(self.device):
            _, peak = self._run(self._make_runner(model), optimizer, run)
        return StrategyResult(name, peak, 0, len(forwards), median(seconds))

    # -- steps ---------------------------------------------------------------------------------------------------------

    @property
    def _own_inputs(self) -> PlanInputs:
        return self._make_inputs(self._micro_batches, self._divisors)

    def _inputs_of_batch(self, batch: Batch) -> PlanInputs:
        self._model_call.check(batch)
        rows = self.rows_of(batch)
        micro_batches = rows.split(self.config.micro_batches)
        given, measured = (list(map(shapes_of, each)) for each in (micro_batches, self._micro_batches))
        if given != measured:
            raise ValueError(
                f"the micro-batches of this batch have shapes {given}, and plans are made for {measured}, whose bytes were "
                "measured: give batches of one shape (a DataLoader with drop_last=True), or make another Lab with this one"
            )
        return self._make_inputs(micro_batches, self._find_divisors(rows, micro_batches))

    def _find_divisors(self, rows: RowsOfBatch, micro_batches: Sequence[Any]) -> list[float]:
        divisors = self._normaliser.divisors(rows, micro_batches)
        if math.inf in divisors:
            raise ValueError(
                f"micro-batch {divisors.index(math.inf)} has no target, so it has no loss that a plan could train: use fewer "
                "micro_batches, or leave such rows out"
            )
        return divisors

    def _make_inputs(self, micro_batches: Sequence[Any], divisors: Sequence[float]) -> PlanInputs:
        seeds = [self.config.micro_batch_seed(self.steps, k) for k in range(len(micro_batches))]
        structures = [self._costs[shapes_of(each)][0].structure for each in micro_batches]
        return PlanInputs(micro_batches, divisors, seeds, structures)

    def _run(self, runner: PlanRunner, optimizer: Optimizer, run: Callable[[AllocationMeter], T]) -> tuple[T, int]:
        """Accumulate gradients by `run`, and update; return its result and the peak bytes on the device."""
        ledger = self.device.ledger
        with runner.metered(optimizer) as meter:
            missing = max(0, self._optimizer_bytes - optimizer_bytes(optimizer))
            ledger.book("optimizer", "", missing)  # reserved for the state that the first update creates
            try:
                result = run(meter)
            finally:
                ledger.release("optimizer", "", missing)
            runner.update(optimizer, meter, missing + max(0, self.cost_model.update_bytes - meter.current_bytes))
        return result, ledger.peak

    def _peak_bytes(self, plan: Plan, inputs: PlanInputs) -> int:
        """Return the peak bytes of a step, made on copies without a budget."""
        lab = self.on_device(EmulatedDevice())
        model, optimizer = lab._copy_model()
        runner = lab._make_runner(model)
        with preserve_random_state(), preserved_user_state(*self._model_call.functions):
            return lab._run(runner, optimizer, partial(runner.run, plan.operations, inputs))[1]

    def _make_runner(self, model: nn.Module, trace: Trace | None = None) -> PlanRunner:
        layers = {model.get_submodule(name): name for name in self.layers}
        return PlanRunner(model, layers, self._model_call.objective, self.device, self._shared, trace)

    def _copy_model(self) -> tuple[nn.Module, Optimizer]:
        for param in self.model.parameters():
            param.grad = None
        held = [value for module in self.model.modules() for value in vars(module).values()]
        # `deepcopy` refuses a tensor with a graph, which a forward may have left on a module: copy it without the graph.
        graphs = {id(t): t.detach().clone() for t in held if isinstance(t, torch.Tensor) and not t.is_leaf}
        return copy.deepcopy((self.model, self.optimizer), graphs)

    def _measure(self) -> None:
        """Measure structures and costs for every form of micro-batch, on a copy without a budget."""
        twin, optimizer = self._copy_model()
        runner = self._make_runner(twin)
        forms, several = [shapes_of(each) for each in self._micro_batches], len(self._micro_batches) > 1
        with without_budget(self.device):
            for form, micro_batch, divisor in zip(forms, self._micro_batches, self._divisors, strict=True):
                if form not in self._costs:
                    self._costs[form] = measure(runner, micro_batch, divisor, several)
            # Another batch may reach parameters that this one does not, as experts do; their bytes are not in the plans.
            self._varies = any(param.requires_grad and param.grad is None for param in twin.parameters())
            update_bytes, self._optimizer_bytes = measure_update(runner, optimizer)
        stages = {each.structure.stages for costs in self._costs.values() for each in costs}
        if len(stages) > 1:
            raise ValueError(
                f"micro-batches of different shapes have {sorted(stages)} stages: use an even micro_batches"
            )
        self._shared = runner.separate_shared_gradients()
        costs = [self._costs[form][min(k, 1)] for k, form in enumerate(forms)]
        fixed = total_storage_bytes([*twin.parameters(), *twin.buffers()]) + self._optimizer_bytes
        self.cost_model = PlanCostModel(costs, fixed, self._optimizer_bytes, update_bytes, self.device.figures())


def _name_budget(error: DeviceOutOfMemory, plan: Plan, needed: int) -> DeviceOutOfMemory:
    """Add to an error the smallest budget with which the step runs."""
    error.least_bytes = needed
    error.remedy = (
        f"{plan.name} needs {format_bytes(needed)} ({needed} bytes), which is the smallest budget that would do."
    )
    if needed > plan.peak_device_bytes:
        error.remedy += (
            f" The plan states {plan.peak_device_bytes} bytes, those of the batch that was measured: this one needs other "
            "parts of the model, such as experts without a row there, and later ones may need more."
        )
    return error


def _check_device(device: Device) -> Device:
    if not device.in_host_memory:
        raise ValueError(f"device is {device.name}: plans are metered in host memory, use an EmulatedDevice")
    return device


def default_strategies(layers: int) -> list[Strategy]:
    """Return one strategy of each kind for a model of so many layers."""
    combined = [policies.Combined()] if layers <= policies.Combined().max_layers else []
    recompute = [policies.Plain(), policies.Full(), policies.Periodic(), policies.Rotor(), SelectiveCheckpoint()]
    return [*recompute, policies.Offload(), *combined, policies.Karma(), policies.RelayPolicy()]
