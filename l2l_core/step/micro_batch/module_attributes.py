"""Plain attributes of modules, which micro-batches share while they take turns.

A model that notes something on itself (`self.rows = len(x)`) and reads it after a layer call would find what another
micro-batch has noted meanwhile. So what a micro-batch has set is set again before it goes on. What one leaves for the
next (a memory of the last forward) can only be had in the order of plain training; where turns change that order, it is
refused. So is a number that the shell sets on a layer anew for every micro-batch: the layer would run with another's.

Reads and writes are seen by spies on the classes of the model's own modules (`attribute_tracer.py`), for the length of a pass. What goes
past them (a hook's note on a module of torch's own, `object.__setattr__`, another submodule in a place) is found by a look at
what modules hold, before and after each turn: at all of them while metering, later where something was found, or has come.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn

from l2l_core.eps.blocks import Unit
from l2l_core.model import modules_of
from l2l_core.step.graph import TensorGuard
from l2l_core.step.micro_batch.attribute_tracer import AttributeTracer
from l2l_core.step.micro_batch.module_hooks import SideOutputs
from l2l_core.step.micro_batch.temporary_attribute import TemporaryAttribute

AttributeKey = tuple[nn.Module, str]

_MISSING = object()
_LAYER_ATTRIBUTES: weakref.WeakKeyDictionary[type, set[str]] = (
    weakref.WeakKeyDictionary()
)  # numbers that layers of a class set
_UNTRACED_WRITES: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that are written to past the spies
MODULE_INTERNALS = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}


class ModuleAttributes:
    """Sees which micro-batch reads and sets which attribute. Use as a context manager around a pass.

    Invariant: after the block every class is as it was before, also where passes in several threads overlap.

    Args:
        shell: modules of the shell; those of torch's own classes set nothing in their forward, so no spies stand there.
        layers: the layers.
        asides: told what a layer keeps on itself, and for which micro-batch it ran.
        sides: knows which layers keep what can be differentiated.
        metering: whether to find out which numbers layers keep; later passes see the same ones.
    """

    def __init__(
        self,
        shell: Iterable[nn.Module],
        layers: Sequence[Unit],
        guard: TensorGuard,
        side_outputs: SideOutputs,
        metering: bool,
    ) -> None:
        self._metering, self._side_outputs, self._guard = metering, side_outputs, guard
        self._checks_recompute = False
        self._unstable: set[AttributeKey] = set()  # numbers that a recompute would set to something else
        self._layer_values: dict[
            tuple[AttributeKey, int], Any
        ] = {}  # numbers that layers keep on themselves, by micro-batch
        self._kept_tensors: dict[AttributeKey, list[weakref.ref[torch.Tensor]]] = {}  # what layers keep on themselves
        self._shell = dict.fromkeys(shell)
        tops = [unit.module for unit in layers if _is_torch_class(unit.module)]
        self._dicts = [(m, held) for m in (*self._shell, *tops) for held in (vars(m), m._modules)]
        self._compared_dicts = [(m, held) for m, held in self._dicts if metering or m in _UNTRACED_WRITES]
        self._unit_of = {module: unit for unit in layers for module in modules_of(unit.module)}
        self._k = -1  # whose turn it is
        self._own_values: dict[AttributeKey, Any] = {}  # what that micro-batch has set so far
        self._in_layer = False
        self._last_reader: dict[AttributeKey, int] = {}  # the last micro-batch that has read what others left
        self._last_writer: dict[AttributeKey, int] = {}
        self._set_on_layers: dict[Unit, set[AttributeKey]] = {}  # what the shell has set there
        self._tracer = AttributeTracer(self)

    def __enter__(self) -> ModuleAttributes:
        with ExitStack() as undo:
            undo.callback(self._tracer.end)
            self._install()
            undo.pop_all()
        return self

    def _install(self) -> None:
        self._tracer.begin()
        own = [module for module in self._shell if not _is_torch_class(module)]
        names = {(type(m), name) for m in own for name in vars(m) if name not in MODULE_INTERNALS}
        names |= {(type(m), name) for m in self._unit_of for name in self._plain_names(m)}
        for cls, name in names:
            self._tracer.trace(cls, name)
        self._tracer.trace_all_sets({type(m) for m in (*own, *self._unit_of)})

    def __exit__(self, *exc: object) -> None:
        self._tracer.end()

    def owns(self, module: nn.Module) -> bool:
        """Whether a module is of this pass, and not of one in another thread."""
        return module in self._shell or module in self._unit_of

    def _plain_names(self, module: nn.Module) -> Iterable[str]:
        """List the names of what a layer's module may keep, which the shell may read before the layer has run."""
        if _is_torch_class(module):
            return ()
        if not self._metering:
            return _LAYER_ATTRIBUTES.get(type(module), ())
        return [name for name, value in vars(module).items() if name not in MODULE_INTERNALS and is_plain(value)]

    def turn(self, k: int, own_values: dict[AttributeKey, Any]) -> AbstractContextManager[None]:
        """Micro-batch `k` is at work in the block; `own` is what it has set so far, and gets what it sets."""
        return _AttributeTurn(self, k, own_values)

    def in_layer(self) -> AbstractContextManager[None]:
        """A layer is at work in the block: what it sets on itself is its own affair."""
        return TemporaryAttribute(self, "_in_layer", True)

    @contextmanager
    def record_compiled_region(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Compiled code of `modules` runs in the block, past the spies: it may read all, and what it has set shows afterwards."""
        before = {(m, name): value for m in modules for name, value in vars(m).items() if name not in MODULE_INTERNALS}
        for place in before:
            if place[0] in self._shell:
                self.on_read(*place)
        classes = {cls for kind in {type(module) for module in modules} for cls in kind.__mro__}
        with self._tracer.pause(classes):
            yield
        for place in [(m, n) for m in modules for n in vars(m) if n not in MODULE_INTERNALS]:
            if vars(place[0])[place[1]] is not before.get(place, _MISSING):
                self.on_set(*place)

    def on_read(self, module: nn.Module, name: str) -> Any:
        """Somebody reads an attribute that there is; returns its value for the micro-batch at work.

        Raises:
            RuntimeError: a later micro-batch has set it already.
        """
        place, value = (module, name), vars(module)[name]
        is_own = self._k < 0 or place in self._own_values or (self._in_layer and module in self._unit_of)
        if is_own or not (module in self._shell or module in self._unit_of):
            return value
        if place in self._unstable:
            raise RuntimeError(_unstable_message(*place))
        if (place, self._k) in self._layer_values:
            return self._layer_values[place, self._k]
        if self._last_writer.get(place, -1) > self._k:
            self._refuse(place)
        self._last_reader[place] = max(self._k, self._last_reader.get(place, -1))
        return value

    def on_set(self, module: nn.Module, name: str) -> None:
        """Somebody has set an attribute.

        Raises:
            RuntimeError: a later micro-batch has read the value before.
        """
        if self._k < 0:
            return
        if module in self._shell:
            self._record_set(module, name)
            if name in (held := attribute_dict(module, name)):
                self._own_values[module, name] = held[name]
        elif module in self._unit_of and self._in_layer:
            self._record_layer_set(module, name)
        elif module in self._unit_of:
            if is_plain(value := vars(module).get(name)):
                self._layer_values[(module, name), self._k] = self._own_values[module, name] = value
            self._set_on_layers.setdefault(self._unit_of[module], set()).add((module, name))

    def _record_set(self, module: nn.Module, name: str) -> None:
        place = module, name
        if self._last_reader.get(place, -1) > self._k:
            self._refuse(place)
        self._last_writer[place] = max(self._k, self._last_writer.get(place, -1))
        if name in vars(module):
            self._tracer.trace(type(module), name)

    def record_layer_change(self, key: AttributeKey) -> None:
        """A layer has changed what it keeps, for the micro-batch at work, in a way that need not show when it is set."""
        self._record_set(*key)

    @contextmanager
    def checking_recompute(self) -> Iterator[None]:
        """A layer runs once more in the block: numbers that it then counts on from its first run are unsteady."""
        self._checks_recompute = True
        try:
            yield
        finally:
            self._checks_recompute = False

    def _record_layer_set(self, module: nn.Module, name: str) -> None:
        place, value = (module, name), vars(module).get(name)
        self._side_outputs.check_attribute(self._unit_of[module], value)
        if is_plain(value):
            if self._checks_recompute:
                if self._layer_values.get((place, self._k), value) != value:
                    self._unstable.add(place)
                return
            _LAYER_ATTRIBUTES.setdefault(type(module), set()).add(name)
            self._record_set(module, name)
            self._layer_values[place, self._k] = value
            return
        before = [
            tensor for ref in self._kept_tensors.get(place, []) if (tensor := ref()) is not None and tensor is not value
        ]
        if any([self._guard.mark_replaced(tensor, self._k) for tensor in before]):
            self._refuse(place)
        self._kept_tensors[place] = [
            weakref.ref(tensor) for tensor in (*before, value) if isinstance(tensor, torch.Tensor)
        ]
        self._guard.register(value, self._k)

    def _refuse(self, key: AttributeKey) -> None:
        module, name = key
        raise RuntimeError(
            f"attribute {name!r} of {type(module).__name__} goes from one micro-batch's forward to the next one's, and "
            "micro-batches take turns at the layers: it would come too late or too early. Keep such a memory between steps, "
            "pass it in the batch, or use RelayConfig(micro_batches=1)"
        )

    def values_set_on(self, unit: Unit) -> dict[AttributeKey, Any]:
        """Return what the shell has set on a layer's modules in this pass, with the values as they stand."""
        return {(m, name): vars(m).get(name) for m, name in self._set_on_layers.get(unit, ())}


class _AttributeTurn(AbstractContextManager[None]):
    def __init__(self, attributes: ModuleAttributes, k: int, own_values: dict[AttributeKey, Any]) -> None:
        self._attributes, self._k, self._own_values = attributes, k, own_values

    def __enter__(self) -> None:
        for (module, name), value in self._own_values.items():
            attribute_dict(module, name)[name] = value  # another micro-batch has left its own there
        self._attributes._k, self._attributes._own_values = self._k, self._own_values
        self._sizes = [len(held) for _, held in self._attributes._dicts]
        self._before = [(module, held, dict(held)) for module, held in self._attributes._compared_dicts]

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None:
                for module, name in dict.fromkeys((*self._added(), *self._changed())):
                    _UNTRACED_WRITES.add(module)
                    self._attributes.on_set(module, name)
        finally:
            self._attributes._k, self._attributes._own_values = -1, {}

    def _added(self) -> Iterator[AttributeKey]:
        """List what there was not when the turn began, where their number tells."""
        for (module, held), size in zip(self._attributes._dicts, self._sizes, strict=True):
            if len(held) > size:
                yield from ((module, name) for name in [*held][size:] if name not in MODULE_INTERNALS)

    def _changed(self) -> Iterator[AttributeKey]:
        """List what is another object now than when the turn began, or new, on modules that are looked at."""
        for module, held, before in self._before:
            if len(before) != len(held) or not all(map(is_, before.values(), held.values())):
                names = [name for name, value in held.items() if before.get(name, _MISSING) is not value]
                yield from ((module, name) for name in names if name not in MODULE_INTERNALS)


def attribute_dict(module: nn.Module, name: str) -> dict[str, Any]:
    """Where a module holds an attribute of this name."""
    return module._modules if name in module._modules else vars(module)


def _is_torch_class(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _unstable_message(module: nn.Module, name: str) -> str:
    return (
        f"the model reads attribute {name!r} of {type(module).__name__}, which a layer counts on from what it found there: "
        "a layer runs a second time in backward, so it would count twice. Set it from the layer's arguments alone, or count "
        "in the model's own code"
    )


def is_plain(value: Any) -> bool:
    """Whether a value is numbers and words, or consists of them."""
    if isinstance(value, tuple | list):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
