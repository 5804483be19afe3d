"""Figures of a finished step beside its measurements: its operations, and the memory of in-core training.

Operations are matrix products, counted by PyTorch's `FlopCounterMode`. The model runs forward and backward once for every shape
of the batch, as a copy on fake tensors, which have shapes and take neither memory nor time on the device. Counted are the
products of the layers that ran, as plain training makes them. A relay also recomputes the forward of all layers but the kept
ones; that is left out, so that equal FLOP mean the same at every depth: it is a larger share of a deep model's step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from l2l_core import Relay, StepResult, Trace
from l2l_core._torch import FakeTensorMode
from l2l_core.batches import Batch, leaves_in, map_tensors
from l2l_core.eps.blocks import Unit
from l2l_core.model import deep_copy, find_stacks, preserve_random_state
from l2l_core.surgery import find_loop_numbers, set_numbers
from workbench.readings import batch_bytes, estimate_in_core_bytes
from workbench.session.snapshot_values import LayerFlop, LayerRow, StepFlop

_log = logging.getLogger(__name__)

FLOP_FORMULA = (
    "FLOP of plain training: the matrix products of forward and backward, attention's included, without the relay's "
    "recompute, counted by PyTorch's FlopCounterMode for each shape of the batch."
)
FLOP_ESTIMATE = (
    "FLOP of plain training, an estimate, as the operations of this model depend on values: per parameter and token 2 "
    "forward and 4 in backward, nothing for attention's own products nor for the relay's recompute."
)
FLOP_RULE = f"{FLOP_FORMULA} A model that needs values to run is estimated: 2 forward and 4 in backward per parameter and token."
Shape = Sequence[int]


@dataclass(frozen=True)
class Products:
    """Operations of one batch in the model's layers, in order, and outside of them.

    Attributes:
        forward, backward: of each layer.
        shell: forward and backward of everything outside of layers.
        shell_forward: forward alone.
        calls: number of calls of each layer.
        receive_gradient: whether backward computes a gradient of the input in every call of each layer.
    """

    forward: Sequence[int]
    backward: Sequence[int]
    shell: int
    shell_forward: int
    calls: Sequence[int]
    receive_gradient: Sequence[bool]


CountedShapes = dict[Hashable, Products | None]


class FlopCounter:
    """Counts the operations that plain training makes for a relay's steps, by `FLOP_FORMULA`.

    Args:
        relay: the relay that makes the steps.
        counted: counts of earlier relays over models that differ only in depth and values, which are used and extended.
    """

    def __init__(self, relay: Relay, counted: CountedShapes | None = None) -> None:
        self._relay, self._counted = relay, {} if counted is None else counted
        self._fixed: dict[Hashable, Mapping[str, tuple[bool, bool]]] = {}  # by the same cases

    def count(self, batch: Batch, trace: Trace, samples: int) -> int:
        """Return the operations of a finished step.

        Args:
            batch: batch of the step.
            trace: trace of the step; skipped layers do not count.
            samples: rows of the batch.
        """
        visits = _layers_that_ran(self._relay, trace)
        products = self._products_of(batch, visits)
        if products is None:
            return estimate_flop(self._relay, batch, trace, samples)
        of_layers = zip(self._relay.stack, products.forward, products.backward, strict=True)
        return products.shell + sum(forward + backward for layer, forward, backward in of_layers if layer in visits)

    def count_layers(self, batch: Batch, trace: Trace) -> StepFlop | None:
        """Count a step like the finished one, with all layers; None if the model cannot run without values."""
        case = self._case_of(batch, visits := _layers_that_ran(self._relay, trace))
        products = self._products_of(batch, visits)
        if products is None:
            return None
        if case not in self._fixed:
            self._fixed[case] = _find_fixed_shells(self._relay, batch, products)
        fixed = self._fixed[case]
        flop = [forward + backward for forward, backward in zip(products.forward, products.backward, strict=True)]
        of_layers = zip(self._relay.stack, flop, products.calls, products.receive_gradient, strict=True)
        layers = {
            unit.key: LayerFlop(own, calls, receives, *fixed.get(unit.key, (False, False)))
            for unit, own, calls, receives in of_layers
        }
        return StepFlop(products.shell + sum(flop), layers)

    @property
    def formula(self) -> str:
        """Statement of what the counts of this relay contain."""
        return FLOP_ESTIMATE if None in self._counted.values() else FLOP_FORMULA

    def _case_of(self, batch: Batch, visits: Mapping[Unit, int]) -> Hashable:
        """Return what determines the products of a batch."""
        units = (self._relay.shell, *self._relay.stack)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves_in(batch) if isinstance(leaf, torch.Tensor))
        loops = tuple(max([1, *(visits.get(unit, 0) for unit in layers)]) for layers in self._relay.stacks.values())
        return shapes, loops, tuple((type(u.module), tuple(p.shape for p in u.params), u.trained) for u in units)

    def _products_of(self, batch: Batch, visits: Mapping[Unit, int]) -> Products | None:
        """Return the products of a batch of this shape; None if the model cannot run without values."""
        case = self._case_of(batch, visits)
        if case not in self._counted:
            try:
                self._counted[case] = _count_products(self._relay, batch)
            except Exception as error:  # the step is done, so a count that fails must not stop the run
                _log.info("operations are estimated, since the model needs values: %s: %s", type(error).__name__, error)
                self._counted[case] = None
        return self._counted[case]


def count_tokens(batch: Batch, samples: int) -> int:
    """Return the number of elements of the first 2-D integer tensor, such as `input_ids`; `samples` if there is none."""
    for leaf in leaves_in(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and not leaf.is_floating_point() and len(leaf) == samples:
            return leaf.numel()
    return samples


# -- on fake tensors ---------------------------------------------------------------------------------------------------


class _ObjectiveCall(nn.Module):
    """Root of the counted modules, so that the names of layers do not depend on the objective."""

    def __init__(self, model: nn.Module, objective: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model, self._objective = model, objective

    def forward(self, batch: Any) -> torch.Tensor:
        return self._objective(self.model, batch)


@contextmanager
def _on_fakes(relay: Relay, batch: Batch) -> Iterator[tuple[_ObjectiveCall, Any]]:
    """Yield a call of a copy of the model on fake tensors, and the batch as such."""
    with _quiet(), preserve_random_state(), FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.enable_grad():
        yield _ObjectiveCall(_fake_copy(relay.model, fake), relay.objective), map_tensors(batch, fake.from_tensor)


def _count_products(relay: Relay, batch: Batch) -> Products:
    names = [f"{_ObjectiveCall.__name__}.model.{unit.name}" for unit in relay.stack]
    counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
    with _on_fakes(relay, batch) as (call, fakes):
        calls = [_record_calls(call.model.get_submodule(unit.name)) for unit in relay.stack]
        with counter:
            loss = call(fakes)
            forward, shell_forward = [_total(counter, name) for name in names], counter.get_total_flops()
            loss.backward()
    whole = [_total(counter, name) for name in names]
    backward = [after - before for after, before in zip(whole, forward, strict=True)]
    shell, shell_forward = counter.get_total_flops() - sum(whole), shell_forward - sum(forward)
    receive_gradient = [all(each) for each in calls]
    return Products(forward, backward, shell, shell_forward, [len(each) for each in calls], receive_gradient)


def _find_fixed_shells(relay: Relay, batch: Batch, products: Products) -> Mapping[str, tuple[bool, bool]]:
    """Return by layer whether the products outside of layers stay with another depth of its stack, and with more loops.

    Found by running the copy without the last layer of each stack (twice with it, if it is the only one), and with one loop more
    where layers run more than once. False if it fails then: the model's code may need something for every layer or loop.
    """
    count = dict(zip((unit.key for unit in relay.stack), products.calls, strict=True))
    found = {}
    for name, units in relay.stacks.items():
        changes: list[Callable[[_ObjectiveCall, Any], None]] = [partial(_change_depth, name, units)]
        if (loops := max(count[unit.key] for unit in units)) > 1:
            changes.append(partial(_set_loops, name, relay, loops + 1))
        same = [_shell_forward(relay, batch, change) == products.shell_forward for change in changes]
        found |= {unit.key: (same[0], same[-1] and len(same) > 1) for unit in units}
    return found


def _shell_forward(relay: Relay, batch: Batch, change: Callable[[_ObjectiveCall, Any], None]) -> int | None:
    """Return the products of a changed copy's forward outside of layers; None if it fails."""
    counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
    try:
        with _on_fakes(relay, batch) as (call, fakes):
            layers = {call.model.get_submodule(unit.name) for unit in relay.stack}
            change(call, fakes)
            names = [f"{_ObjectiveCall.__name__}.{name}" for name, module in call.named_modules() if module in layers]
            with counter:
                call(fakes)
    except Exception as error:  # any of the model's own
        _log.info("the copy with another depth, or with more loops, fails: %s: %s", type(error).__name__, error)
        return None
    return counter.get_total_flops() - sum(_total(counter, name) for name in names)


def _change_depth(name: str, units: Sequence[Unit], call: _ObjectiveCall, _: Any) -> None:
    container: Any = call.model.get_submodule(name)
    at = int(units[-1].name.rpartition(".")[2])
    if len(units) > 1:
        del container[at]
    else:
        container.insert(at + 1, container[at])


def _set_loops(name: str, relay: Relay, count: int, call: _ObjectiveCall, fakes: Any) -> None:
    stacks = find_stacks(call.model, [call.model.get_submodule(unit.name) for unit in relay.stack])
    stack = next(each for each in stacks if each.name == name)
    _, numbers = find_loop_numbers(call.model, stack, partial(call, fakes), count)
    set_numbers(call.model, stack, dict.fromkeys(numbers, count))


def _record_calls(layer: nn.Module) -> list[bool]:
    """Return a list to which each call of a layer adds whether an argument requires a gradient."""
    calls = list[bool]()

    def record(_: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves_in((args, kwargs))))

    layer.register_forward_pre_hook(record, with_kwargs=True)
    return calls


def _fake_copy(model: nn.Module, fake: Any) -> nn.Module:
    """Copy a model; its tensors are fake, with the same shapes."""
    attributes = (value for module in model.modules() for value in vars(module).values())
    tensors = (*model.parameters(), *model.buffers(), *(each for each in attributes if isinstance(each, torch.Tensor)))
    return deep_copy(model, {id(tensor): fake.from_tensor(tensor) for tensor in tensors})


def _total(counter: FlopCounterMode, name: str) -> int:
    return sum(counter.get_flop_counts().get(name, {}).values())


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep PyTorch from logging an operation that fake tensors do not have; it raises."""
    log = logging.getLogger(FakeTensorMode.__module__)
    log.disabled, before = True, log.disabled
    try:
        yield
    finally:
        log.disabled = before


# `FlopCounterMode` has no formula for the fused attention of CPUs. Without a fused kernel, its products are counted alone.
def _attention_flop(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    rows, heads, length, width = query
    return 2 * rows * heads * length * key[-2] * (width + value[-1])


def _attention_backward_flop(_: Shape, query: Shape, key: Shape, value: Shape, *__: Any, **___: Any) -> int:
    return 2 * _attention_flop(query, key, value)


_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flop,
}


# -- without it --------------------------------------------------------------------------------------------------------


def estimate_flop(relay: Relay, batch: Batch, trace: Trace, samples: int) -> int:
    """Estimate the operations of a finished step by `FLOP_ESTIMATE`, at no cost; arguments as in `FlopCounter.count`."""
    return _estimate(relay.shell, _layers_that_ran(relay, trace)) * count_tokens(batch, samples)


def _layers_that_ran(relay: Relay, trace: Trace) -> dict[Unit, int]:
    """Return the forward visits of each layer of a step."""
    visits = {(event.layer, event.visit) for event in trace.events_since(0)[0] if event.kind == "forward"}
    ran = Counter(key for key, _ in visits)
    return {layer: ran[layer.key] for layer in relay.stack if layer.key in ran}


def _estimate(shell: Unit, layers: Mapping[Unit, int]) -> int:
    """Return the operations of one token, by `FLOP_ESTIMATE`: 2 less per frozen parameter."""
    operations = 2 * shell.num_params + 2 * (shell.num_params + shell.num_trained)
    learns = shell.num_trained > 0  # whether anything at or before this layer is trained, so that backward reaches it
    for layer, visits in layers.items():
        learns = learns or layer.num_trained > 0
        operations += 2 * visits * layer.num_params
        if learns:
            operations += 2 * visits * (layer.num_params + layer.num_trained)
    return operations


# -- memory -------------------------------------------------------------------------------------------------------------


class InCoreEstimate:
    """Device bytes of in-core training of a relay's model, recomputed only when its inputs change.

    Args:
        relay: the relay that makes the steps.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._inputs: object = None  # inputs of the last estimate
        self._nbytes: int | None = None  # the last estimate

    def estimate(self, result: StepResult, layers: Sequence[LayerRow]) -> int | None:
        """Return the device bytes that in-core training would need for the same step; None if they cannot be estimated."""
        trained = self._relay.shell.num_trained, *((layer.key, layer.num_trained) for layer in layers)
        inputs = self._relay.config, result.samples, batch_bytes(result.trace), trained
        if inputs == self._inputs:
            return self._nbytes
        self._inputs, self._nbytes = inputs, None
        try:
            self._nbytes = estimate_in_core_bytes(self._relay, result.trace)
        except Exception:  # the step is done, so a failed estimate must not stop the run
            _log.exception("the memory of in-core training cannot be estimated")
        return self._nbytes
