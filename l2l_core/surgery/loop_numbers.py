"""Find the number that determines how often a model's forward runs a stack, and set it.

Names prove nothing. Numbers of the modules around the stack, and of their configurations, are changed one at a time, and the
layer calls of a forward are counted: the number of loops is the one that the layers follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from l2l_core.model import Stack, preserve_module_state, preserve_random_state, snapshot_attributes
from l2l_core.surgery import config_depth
from l2l_core.surgery.code_between_layers import Arguments, copy_arguments
from l2l_core.surgery.config_depth import DepthField
from l2l_core.surgery.config_update import config_assignments, copy_configs
from l2l_core.surgery.stack_context import StackContext, named_configs


class RecordedCalls(NamedTuple):
    """The layer calls of a stack in one forward, in order, and the forward's result."""

    layers: list[nn.Module]
    arguments: list[Arguments]
    output: Any

    def loops_over(self, stack: Stack) -> int | None:
        """Return how often all layers of a stack ran, one after another; None if they ran otherwise."""
        loops, rest = divmod(len(self.layers), len(stack))
        return loops if loops and not rest and self.layers == [*stack.layers] * loops else None


class _CallLimitError(BaseException):
    """Ends a forward; a BaseException, so that no model catches it by accident."""


def record_calls(
    model: nn.Module, call: Callable[[], Any], stack: Stack, most: int | None = None, seed: int = 0
) -> RecordedCalls:
    """Run `call()`, which calls `model`, in the model's present mode without gradients; all state is restored.

    Args:
        model: the model.
        call: runs it.
        stack: records calls of its layers.
        most: the number of calls after which the forward ends, without arguments; None: it runs to its end.
        seed: of the random numbers of the forward.
    """
    layers, arguments, output = list[nn.Module](), list[Arguments](), None
    modes = [(module, module.training) for module in model.modules()]

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layers.append(layer)
        if most is None:
            arguments.append(copy_arguments(args, kwargs))
        elif len(layers) > most:
            raise _CallLimitError

    with ExitStack() as restores:
        restores.callback(snapshot_attributes(model.modules()))
        for block in (preserve_module_state(model), torch.no_grad(), preserve_random_state()):
            restores.enter_context(block)
        for module, training in modes:  # the number may be read in training alone
            module.training = training
        torch.manual_seed(seed)
        for layer in dict.fromkeys(stack.layers):
            restores.callback(layer.register_forward_pre_hook(record, with_kwargs=True).remove)
        with suppress(_CallLimitError):
            output = call()
    return RecordedCalls(layers, arguments, output)


def numbers_around(model: nn.Module, stack: Stack) -> dict[str, int]:
    """Return the integers of the modules that contain a stack, and of their configurations, by dotted name."""
    return {name: fields[key] for name, (fields, key, _) in _places(StackContext.of(model, stack)).items()}


def depth_numbers(model: nn.Module, stack: Stack) -> set[str]:
    """Return the dotted names of those numbers that by their names may be the depth of the stack."""
    context = StackContext.of(model, stack)
    return {name for name, (_, key, _) in _places(context).items() if config_depth.is_depth_name(key, context.location)}


def _places(context: StackContext) -> dict[str, tuple[dict[str, Any], str, Any]]:
    """Map dotted names to (attributes of a module or fields of a config, name in it, the config or None)."""
    holders = [(path, vars(module), None) for path, module in context.chain]
    holders += [(path, config_depth.stored_fields(config), config) for path, config in named_configs(context.chain)]
    return {
        f"{path}.{key}".lstrip("."): (fields, key, config)
        for path, fields, config in holders
        for key, value in fields.items()
        if isinstance(key, str) and config_depth.is_int(value)
    }


def set_numbers(model: nn.Module, stack: Stack, values: Mapping[str, int]) -> Callable[[], None]:
    """Set numbers that `numbers_around` lists; return a function that restores the same objects.

    A configuration is copied, since other models may share it.

    Raises:
        ValueError: there is no number of a name.
    """
    with ExitStack() as restores:
        for name, value in values.items():
            context = StackContext.of(model, stack)  # anew, since a configuration may have been copied
            if name not in (places := _places(context)):
                raise ValueError(f"the model has no number {name!r} around {stack.title}; it has {_listed(places)}")
            fields, key, config = places[name]
            assignments = [(fields, key, value)]
            if config is not None:
                copies = copy_configs(context, [DepthField(config, key, name, None, frozenset())], [], [], value)
                assignments = list(config_assignments(context, stack.layers, copies))
            for target, attribute, new in assignments:
                restores.callback(target.__setitem__, attribute, target[attribute])
                target[attribute] = new
        return restores.pop_all().close


def find_loop_numbers(
    model: nn.Module, stack: Stack, call: Callable[[], Any], count: int, attribute: str | None = None
) -> tuple[int, list[str]]:
    """Return how often the forward runs a stack, and the dotted names of the numbers to set for another count.

    These are the number that the forward follows, and numbers of the same name and value, such as the one in the configuration
    from which it was copied.

    Args:
        model: the model, which `call` runs.
        stack: the stack.
        call: runs the model on a few rows.
        count: the number of loops that is wanted.
        attribute: dotted name of the number; None: it is searched for.

    Raises:
        ValueError: no number, or several of them, can be the number of loops; the message has a remedy.
    """
    now = record_calls(model, call, stack).loops_over(stack)
    if now is None or len({*stack.layers}) < len(stack):
        raise ValueError(
            f"the model's forward does not run the layers of {stack.title} one after another, all of them equally often, or "
            "holds one layer in several places, so there is no number of loops. Keep the layers of the loop, each once, in a "
            "separate ModuleList, and run it as a whole: for _ in range(self.n_loops): for layer in self.layers: ..."
        )
    numbers = numbers_around(model, stack)
    if attribute is not None and attribute not in numbers:
        raise ValueError(f"attribute={attribute!r}: the model has no such number; it has {_listed(numbers)}")
    tried = [name for name, value in numbers.items() if value == now] if attribute is None else [attribute]
    other = count if count != now else max(1, now - 1) if now > 1 else 2
    found, failures = list[str](), list[str]()
    for name in tried:
        try:
            if _loops_with(model, stack, call, {name: other}) == other:
                found.append(name)
        except Exception as error:  # a wrong number may break the model in any way
            failures.append(f"{name}={other} fails with {type(error).__name__}: {error}")
    failed = (
        f" {'; '.join(failures)}: if an entry for each loop is missing, make the model with more." if failures else ""
    )
    if not found:
        raise ValueError(
            f"the forward runs the layers of {stack.title} {now} time(s), and setting {_listed(tried)} to {other} does not make "
            f"that {other}.{failed} If another number does, name it: Loops({count}, attribute='...'), of "
            f"{_listed(numbers)}. Otherwise give the model one: self.n_loops = {now}, and for _ in range(self.n_loops) around "
            "the layers"
        )
    if len(found) > 1:
        choices = " or ".join(f"Loops({count}, attribute={name!r})" for name in found)
        raise ValueError(
            f"each of {_listed(found)} alone makes the forward run the layers of {stack.title} {other} times in place of {now}. "
            f"Name the one to set: {choices}"
        )
    names = _of_same_kind(numbers, found[0])
    if _loops_with(model, stack, call, dict.fromkeys(names, other), seed=1) != other:
        raise ValueError(
            f"with {_listed(names)} = {other} the forward runs the layers of {stack.title} {other} times, but not with other "
            "random numbers: their number is drawn at random, which no edit sets. Change what it is drawn from in your own code"
        )
    return now, names


def loop_numbers_among(model: nn.Module, stack: Stack, call: Callable[[], Any], names: Iterable[str]) -> set[str]:
    """Return those of some numbers that are numbers of loops: with one more, the forward runs all layers once more.

    Numbers of the same name and value, such as the one in the configuration from which it was copied, are returned with them.
    """
    numbers, found = numbers_around(model, stack), set[str]()
    for name in names:
        count = numbers[name] + 1
        with suppress(Exception):  # a model without a layer for a greater depth may fail in any way
            if _loops_with(model, stack, call, {name: count}) == count:
                found.update(_of_same_kind(numbers, name))
    return found


def _of_same_kind(numbers: Mapping[str, int], name: str) -> list[str]:
    """Return the numbers with the last part and the value of one of them."""
    kind = name.rpartition(".")[2], numbers[name]
    return [each for each, value in numbers.items() if (each.rpartition(".")[2], value) == kind]


def _loops_with(
    model: nn.Module, stack: Stack, call: Callable[[], Any], values: Mapping[str, int], seed: int = 0
) -> int | None:
    restore = set_numbers(model, stack, values)
    try:
        most = max(values.values()) * len(stack)
        return record_calls(model, call, stack, most, seed).loops_over(stack)
    finally:
        restore()


def _listed(names: Mapping[str, Any] | list[str]) -> str:
    return ", ".join(names) or "none"
