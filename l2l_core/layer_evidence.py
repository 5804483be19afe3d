"""Evidence from forwards on a few rows: how layers pass their hidden state on, and what depends on their position.

Steps without some layers and edits of a stack need it. It is from what the model does rather than from names: the relay runs the
rows without gradients, and restores all state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.edits import Editor, LayerReturn, Place, ReturnForm, UsedOutputs, tensor_arguments
from l2l_core.eps.blocks import Unit
from l2l_core.model import Stack, is_cache, version_of
from l2l_core.runner import Runner
from l2l_core.step import LayerCall, PassTask
from l2l_core.surgery import (
    CallSample,
    CodeBetweenLayers,
    DepthWatch,
    EqualOutputs,
    copy_outputs,
    describe_layer,
    ignored_hook_results,
    outputs_are_alike,
    results_are_close,
)
from l2l_core.surgery.identity import hidden_argument
from l2l_core.trial_forwards import TrialForwards

Share = Callable[[list[Any], str], list[Any]]  # gathers the items of all workers


@dataclass(frozen=True)
class _WatchedTask:
    """Task of a pass that watches the model's own code; equal tasks need equal device memory."""

    objective: Callable[[nn.Module, Any], torch.Tensor]
    watch: DepthWatch = field(compare=False)

    def __call__(self, model: nn.Module, micro_batch: Any) -> torch.Tensor:
        with self.watch.watching():
            result = self.objective(model, micro_batch)
        for flow in (self.watch.flow, self.watch.hidden_flow):
            flow.result = flow.layers_in(result)
        return result


@dataclass(frozen=True)
class _WithOtherRandom:
    """The same task with other random numbers."""

    objective: Callable[[nn.Module, Any], torch.Tensor]

    def __call__(self, model: nn.Module, micro_batch: Any) -> torch.Tensor:
        torch.manual_seed(1)  # on all devices; the runner restores their states
        return self.objective(model, micro_batch)


@dataclass
class _StackCalls:
    """The calls of the layers of one stack in one forward.

    Attributes:
        returns: by layer, the return of its first call.
        links: (layer, the argument of the next call that is its hidden output; None if there is none).
        last: the layer called last, its hidden output, and how often that was changed in place.
        samples: for each kind of layer, the arguments of one call.
        outputs: copies of the first outputs; None if those of other calls differ in structure, shapes or types.
        code_between: whether a call got something else than the last hidden output, unchanged, and what the first call got.
        carries: whether a call got more than the last outputs of the stack.
    """

    returns: dict[Unit, LayerReturn] = field(default_factory=dict)
    links: list[tuple[Unit, Place | None]] = field(default_factory=list)
    last: tuple[Unit, Any, int] | None = None
    samples: dict[int, tuple[Unit, CallSample]] = field(default_factory=dict)
    outputs: Any = None
    code_between: bool = False
    carries: bool = False
    first: list[tuple[Any, int]] = field(default_factory=list)  # what the first call got, with versions of tensors

    def begin(
        self, unit: Unit, args: tuple[Any, ...], kwargs: Mapping[str, Any], made_of: Collection[nn.Module]
    ) -> None:
        """Record a call of a layer with these arguments, made of the outputs of some layers of the stack."""
        self.carries |= not {*made_of} <= ({self.last[0].module} if self.last else set())
        leaves = [(leaf, _version_of(leaf)) for leaf in pytree.tree_leaves((args, kwargs), is_leaf=is_cache)]
        if self.last is None:
            self.first = leaves
        else:
            before, hidden, version = self.last
            others = [i for i, (leaf, _) in enumerate(leaves) if leaf is not hidden or leaf._version != version]
            same = len(leaves) == len(self.first) and all(_is_same(leaves[i], self.first[i]) for i in others)
            self.code_between |= not same or len(others) == len(leaves)
            arguments = tensor_arguments(args, kwargs)
            places = (place for place, tensor in arguments if tensor is hidden and tensor._version == version)
            self.links.append((before, next(places, None)))
        kind = id(describe_layer(unit.module).features)
        if kind not in self.samples:
            self.samples[kind] = unit, CallSample(args, {**kwargs}).clone()

    def end(self, unit: Unit, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Record what the layer returned."""
        if not self.returns:
            self.outputs = copy_outputs(outputs)
        elif self.outputs is not None and not outputs_are_alike(self.outputs, outputs):
            self.outputs = None
        found = LayerReturn.of(args, kwargs, outputs)
        self.returns.setdefault(unit, found)
        hidden = found.hidden_of(outputs)
        self.last = unit, hidden, 0 if hidden is None else hidden._version

    @property
    def hidden_at(self) -> Place | None:
        """The argument in which each layer gets what the one before has returned; None if the model's code changes it."""
        places = {place for _, place in self.links}
        return places.pop() if len(places) == 1 else None


def _layers_before_last(stack: Stack, used: Collection[nn.Module]) -> list[nn.Module]:
    """Return those of some layers that are in a stack before its last one, in order."""
    return [layer for layer in dict.fromkeys(stack.layers) if layer in used and layer is not stack.layers[-1]]


def _version_of(leaf: Any) -> int:
    return version_of(leaf) if isinstance(leaf, torch.Tensor) else 0


def _is_same(a: tuple[Any, int], b: tuple[Any, int]) -> bool:
    """Return whether two arguments, with versions, are one tensor or object, or equal plain values."""
    (ours, our_version), (theirs, their_version) = a, b
    if isinstance(ours, bool | int | float | str | None):
        return type(ours) is type(theirs) and ours == theirs
    if ours is theirs:
        return our_version == their_version
    # Others have no address: sparse and nested tensors
    if not all(type(each) is torch.Tensor and each.layout is torch.strided for each in (ours, theirs)):
        return False
    same_memory = ours.data_ptr() == theirs.data_ptr() and ours.stride() == theirs.stride()
    return same_memory and ours.shape == theirs.shape and ours.dtype == theirs.dtype and our_version == their_version


class LayerEvidence:
    """Evidence of one relay, collected when it is first needed.

    Args:
        runner: runs the passes.
        editor: has the stacks.
        share: gathers items of all workers, so that they decide alike.
    """

    def __init__(self, runner: Runner, editor: Editor, share: Share) -> None:
        self._runner, self._editor, self._share = runner, editor, share
        self._forwards = TrialForwards(runner)
        self._forms: dict[tuple[Unit, bool], ReturnForm | None] = {}  # by layer and the model's mode
        self._layers: dict[bool, list[Unit]] = {}  # those of the last evidence, by mode
        self._observed: set[tuple[str, int, bool]] = (
            set()
        )  # first names of stacks, with the number of layers and the mode
        # Rows, and the outputs that all layers of a stack return on them, by first name of the stack; by mode. Only of stacks
        # with code between layers.
        self._outputs: dict[bool, tuple[Any, dict[str, Any]]] = {}
        # The same of stacks of which several outputs are used behind the last layer, with the positions of these.
        self._used_behind: dict[bool, dict[str, tuple[Any, list[int]]]] = {}
        # Positions of layers whose outputs are used beyond their stack, by first name, where it is some of the layers; by mode.
        self._some_used: dict[bool, dict[str, list[int]]] = {}

    def forms(self, units: Iterable[Unit], rows: Any) -> dict[Unit, ReturnForm]:
        """Return the forms in which stand-ins of these layers return; of layers that can have one.

        Raises:
            Exception: errors of the model itself on the rows.
        """
        training, layers = self._editor.registry.model.training, self._editor.registry.layers
        if self._layers.get(training) != layers:  # an edit may change how a layer is called
            self._collect(rows)
        found = {unit: self._forms.get((unit, training)) for unit in units}
        return {unit: form for unit, form in found.items() if form is not None}

    def observe(self, rows: Any) -> None:
        """Record in the editor what depends on the positions of layers."""
        registry, training = self._editor.registry, self._editor.registry.model.training
        positions = self._editor.positions
        positions.code_between, positions.used_behind, positions.some_used = {}, {}, {}  # for rows that fail
        unseen = ((registry.first_name(stack), len(stack), training) not in self._observed for stack in registry.stacks)
        if training not in self._outputs or any(unseen):
            self._collect(rows)
        else:  # anew, since weights that were equal may have been trained
            self._compare_positions()

    @property
    def is_plain(self) -> bool:
        """Whether the model's own code, as last observed, only hands outputs on from one layer to the next."""
        positions, training = self._editor.positions, self._editor.registry.model.training
        return not (
            self._outputs[training][1]
            or self._used_behind[training]
            or positions.some_used
            or any(positions.reads.values())
        )

    def run(self, rows: Any, task: PassTask | None = None) -> tuple[Any, set[Unit]]:
        """Return the result of a task, by default the model's, on rows in evaluation mode, and the layers that ran."""
        ran = set[Unit]()

        def observe(call: LayerCall, forward: Callable[..., Any]) -> Callable[..., Any]:
            ran.add(call.unit)
            return forward

        return self._forwards.observe(rows, task or self._runner.objective, [observe], mode="evaluation"), ran

    def run_with_other_random(self, rows: Any) -> tuple[Any, set[Unit]]:
        """Return what `run` returns with other random numbers."""
        return self.run(rows, _WithOtherRandom(self._runner.objective))

    def used_layers(self, rows: Any) -> dict[str, list[nn.Module]]:
        """Return, by stack, the layers before the last whose outputs are used beyond it, in order."""
        registry, (_, _, used) = self._editor.registry, self._watch(rows)
        return {registry.first_name(stack): _layers_before_last(stack, used) for stack in registry.stacks}

    # -- passes --------------------------------------------------------------------------------------------------------

    def _watch(self, rows: Any) -> tuple[DepthWatch, dict[str, _StackCalls], set[nn.Module]]:
        """Run the model, and watch its own code.

        Returns:
            The watch, the calls by stack, and the layers whose outputs are used in the result or by layers of other stacks.
        """
        registry = self._editor.registry
        watch = DepthWatch(registry.model, [stack.layers for stack in registry.stacks])
        stack_of = {unit: stack for stack in registry.stacks for unit in registry.units_of(stack)}
        calls = {stack.name: _StackCalls() for stack in registry.stacks}
        used = set[nn.Module]()

        def observe(call: LayerCall, forward: Callable[..., Any]) -> Callable[..., Any]:
            def observed(*args: Any, **kwargs: Any) -> Any:
                stack = stack_of.get(call.unit)
                made_of = watch.flow.layers_in((args, kwargs))
                hidden_of = watch.hidden_flow.layers_in((args, kwargs))
                used.update(hidden_of.difference(stack.layers if stack else ()))
                with watch.clock.call(call.unit.module):
                    if stack is None:
                        outputs = forward(*args, **kwargs)
                    else:
                        calls[stack.name].begin(call.unit, args, kwargs, made_of.intersection(stack.layers))
                        outputs = forward(*args, **kwargs)
                        calls[stack.name].end(call.unit, args, kwargs, outputs)
                watch.flow.mark(outputs, call.unit.module)
                last = None if stack is None else calls[stack.name].last
                watch.hidden_flow.mark(outputs if last is None else last[1], call.unit.module)
                return outputs

            return observed

        self._forwards.observe(rows, _WatchedTask(self._runner.objective, watch), [observe])
        return watch, calls, used | watch.hidden_flow.result

    def _collect(self, rows: Any) -> None:
        registry, training = self._editor.registry, self._editor.registry.model.training
        watch, calls, used = self._watch(rows)
        outputs = {
            registry.first_name(stack): calls[stack.name].outputs
            for stack in registry.stacks
            if calls[stack.name].code_between
        }
        self._outputs[training] = rows, {name: each for name, each in outputs.items() if each is not None}
        self._used_behind[training] = {
            registry.first_name(stack): (calls[stack.name].outputs, at)
            for stack in registry.stacks
            if calls[stack.name].outputs is not None
            and not calls[stack.name].carries
            and len(at := [i for i, layer in enumerate(stack.layers[:-1]) if layer in watch.flow.result]) > 1
        }
        self._some_used[training] = {
            registry.first_name(stack): [stack.layers.index(layer) for layer in found]
            for stack in registry.stacks
            for ran in [[unit.module for unit in calls[stack.name].returns]]  # a model may draw those that run
            if ran and ran[-1] in used and 0 < len(found := _layers_before_last(stack, used)) < len(ran) - 1
        }
        self._compare_positions()
        for stack in registry.stacks:
            reads = watch.reads_by_depth(stack.layers)
            # Together with those in the other mode
            known = self._editor.positions.reads.setdefault(name := registry.first_name(stack), {})
            known |= {read.name: read for read in reads}
            self._observed.add((name, len(stack), training))
            forms = self._forms_of(stack, calls[stack.name])
            # Only what all workers have seen
            shared = self._share(
                [{unit.key for unit, form in forms.items() if form is not None}], "share forms of layers"
            )
            for unit, form in forms.items():
                self._forms[unit, training] = form if all(unit.key in keys for keys in shared) else None
        self._layers[training] = list(registry.layers)

    def _forms_of(self, stack: Stack, calls: _StackCalls) -> dict[Unit, ReturnForm | None]:
        units, hidden_at = dict.fromkeys(self._editor.registry.units_of(stack)), calls.hidden_at
        forms: dict[Unit, ReturnForm | None] = dict.fromkeys(units)
        for unit, returned in calls.returns.items():
            at = hidden_at if hidden_at is not None else self._residual_at(unit, returned, calls)
            forms[unit] = None if at is None else returned.form(at)
        return forms

    def _residual_at(self, unit: Unit, returned: LayerReturn, calls: _StackCalls) -> Place | None:
        """Return the argument that layers of this kind return with all weights at 0; None if there is none."""
        like, sample = calls.samples[id(describe_layer(unit.module).features)]
        with self._editor.load_layers([like]):
            return hidden_argument(like.module, sample, returned.alike)

    def _compare_positions(self) -> None:
        positions, training = self._editor.positions, self._editor.registry.model.training
        positions.code_between = self.code_between()
        positions.used_behind = {
            name: used
            for name, (outputs, used) in self._used_behind[training].items()
            if self._has_order(name, outputs, used)
        }
        positions.some_used = {
            name: UsedOutputs(
                {units[i].name: units[i].module for i in at},
                [unit.module for unit in units],
                in_order=name in positions.used_behind or name not in self._used_behind[training],
            )
            for name, at in self._some_used[training].items()
            for units in [self._editor.registry.units_of(self._editor.registry.find_stack(name))]
        }

    def _has_order(self, name: str, outputs: Any, used: Sequence[int]) -> bool:
        """Return whether the model's result depends on the order of the outputs at these positions of a stack."""
        count, rows = (
            len(self._editor.registry.find_stack(name)),
            self._outputs[self._editor.registry.model.training][0],
        )
        results = []
        for order in (used, used[::-1]):
            rolls = [order.index(i) + 1 if i in used else 0 for i in range(count)]
            results.append(self._run_with(rows, {name: EqualOutputs(outputs, rolls=rolls)}, self._runner.objective))
        return not results_are_close(*results)

    def _run_with(self, rows: Any, returned: Mapping[str, EqualOutputs], task: PassTask) -> Any:
        """Run the model with other outputs of the layers of some stacks; return its result."""
        registry = self._editor.registry
        stack_of = {u: registry.first_name(stack) for stack in registry.stacks for u in registry.units_of(stack)}

        def observe(call: LayerCall, forward: Callable[..., Any]) -> Callable[..., Any]:
            in_place = returned.get(stack_of.get(call.unit, ""))
            if in_place is None:
                return forward
            return lambda *args, **kwargs: in_place.call(call.unit.module, args, kwargs)

        with ignored_hook_results(unit.module for unit, name in stack_of.items() if name in returned):
            # In evaluation mode, where the code between drops nothing out
            return self._forwards.observe(rows, task, [observe], mode="evaluation")

    def code_between(self) -> dict[str, CodeBetweenLayers]:
        """Return the arguments of layers that return equal outputs, by the first name of their stack.

        Without stacks that have no code between layers, whose layers return unlike outputs, or are not called once each, in
        order. `observe` must have been called in this mode.
        """
        registry = self._editor.registry
        rows, outputs = self._outputs[registry.model.training]
        if not outputs:
            return {}

        def run(task: PassTask, factor: float = 1.0, factor_first: float | None = None) -> dict[str, EqualOutputs]:
            returned = {name: EqualOutputs(value, factor, factor_first) for name, value in outputs.items()}
            self._run_with(rows, returned, task)
            return returned

        objective = self._runner.objective
        one, doubled = run(objective), run(objective, factor=2.0)
        found = {
            name: CodeBetweenLayers.of(registry.find_stack(name).layers, one[name], doubled[name]) for name in outputs
        }
        between = {name: code for name, code in found.items() if code is not None}
        if any(code.odd_position is not None or not code.has_equal_arguments for code in between.values()):
            first = run(objective, factor_first=2.0)
            others = run(_WithOtherRandom(objective))
            between = {
                name: code.settled(one[name], doubled[name], first[name], others[name])
                for name, code in between.items()
            }
        return between
