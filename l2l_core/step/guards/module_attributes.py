"""Plain attributes of modules, kept separate for micro-batches that take turns.

A model that sets an attribute (`self.rows = len(x)`) and reads it after a layer call would find the value of another micro-batch.
So the values that a micro-batch has set are restored at its next turn. A value passed from one forward to the next (a memory of
the last forward) needs the order of plain training; where turns change that order, the step is refused. So is a number that the
shell sets on a layer for every micro-batch, as the layer would run with that of another one.

Descriptors on the classes of the model's own modules (`attribute_tracer.py`) report reads and writes during a pass. Other writes
(a hook's write to a module of torch's own, `object.__setattr__`, a replaced submodule) are found by comparing the modules' dicts
before and after each turn: of all modules in the metered pass, later of those where such a write was found or an entry was added.
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
from l2l_core.model import ModuleKey
from l2l_core.step.graph import TensorGuard
from l2l_core.step.guards.attribute_tracer import AttributeTracer
from l2l_core.step.guards.module_hooks import SideOutputs, temporarily

AttributeKey = ModuleKey

_MISSING = object()
# Plain attributes that layers of a class set on themselves.
_LAYER_ATTRIBUTES: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()
# Modules written to past the descriptors, by id: a module's own hash may read its attributes, and change with them.
_UNTRACED_WRITES: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
MODULE_INTERNALS = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}


class ModuleAttributes(AttributeTracer):
    """Records which micro-batch reads and sets which attribute. Use as a context manager around a pass.

    Invariant: after the block every class is as before, also if passes in several threads overlap.

    Args:
        shell: modules of the shell; those of torch's own classes set nothing in their forward, so they are not traced.
        metering: whether to find out which plain attributes layers set; later passes use the result.
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
        self._unstable: set[AttributeKey] = set()  # plain attributes that a recompute sets to another value
        self._layer_values: dict[tuple[AttributeKey, int], Any] = {}  # plain attributes of layers, by micro-batch
        self._kept_tensors: dict[AttributeKey, list[weakref.ref[torch.Tensor]]] = {}  # that layers keep on attributes
        self._shell = {id(module): module for module in shell}
        torch_layers = [unit.module for unit in layers if _is_torch_class(unit.module)]
        self._dicts = [
            (m, entries) for m in (*self._shell.values(), *torch_layers) for entries in (vars(m), m._modules)
        ]
        self._compared_dicts = [(m, entries) for m, entries in self._dicts if metering or id(m) in _UNTRACED_WRITES]
        self._layer_modules = {id(module): module for unit in layers for module in unit.module.modules()}
        self._unit_of = {id(module): unit for unit in layers for module in unit.module.modules()}
        self._k = -1  # micro-batch of the current turn
        self._own_values: dict[AttributeKey, Any] = {}  # set by it so far
        self._in_layer = False
        self._last_reader: dict[AttributeKey, int] = {}  # the last micro-batch that has read a value of another one
        self._last_writer: dict[AttributeKey, int] = {}
        self._kept_without_graph: dict[AttributeKey, torch.Tensor] = {}  # by layers, in this turn of an inference
        self._set_on_layers: dict[Unit, set[AttributeKey]] = {}  # by the shell

    def __enter__(self) -> ModuleAttributes:
        with ExitStack() as undo:
            undo.callback(self.end)
            self.begin()
            own = [module for module in self._shell.values() if not _is_torch_class(module)]
            names = {(type(m), name) for m, name in attributes_of(own)}
            names |= {(type(m), name) for m in self._layer_modules.values() for name in self._plain_names(m)}
            for cls, name in names:
                self.trace(cls, name)
            self.trace_all_sets({type(m) for m in (*own, *self._layer_modules.values())})
            undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def owns(self, module: nn.Module) -> bool:
        return id(module) in self._shell or id(module) in self._unit_of

    def _plain_names(self, module: nn.Module) -> Iterable[str]:
        """Return names of plain attributes of a layer's module, which the shell may read before the layer has run."""
        if _is_torch_class(module):
            return ()
        if not self._metering:
            return _LAYER_ATTRIBUTES.get(type(module), ())
        return [name for (_, name), value in attributes_of([module]).items() if is_plain(value)]

    @contextmanager
    def turn(self, k: int, own_values: dict[AttributeKey, Any]) -> Iterator[None]:
        """Run a turn of micro-batch `k` in the block; `own_values` are those it has set, and is updated."""
        for (module, name), value in own_values.items():
            attribute_dict(module, name)[name] = value  # in place of another micro-batch's value
        self._k, self._own_values = k, own_values
        sizes = [len(entries) for _, entries in self._dicts]
        before = [dict(entries) for _, entries in self._compared_dicts]
        try:
            yield
            for module, name in dict.fromkeys((*self._added(sizes), *self._changed(before))):
                _UNTRACED_WRITES[id(module)] = module
                self.on_set(module, name)
        finally:
            self._k, self._own_values = -1, {}

    def _added(self, sizes: Sequence[int]) -> Iterator[AttributeKey]:
        """Yield entries added in this turn, in dicts that have grown."""
        for (module, entries), size in zip(self._dicts, sizes, strict=True):
            if len(entries) > size:
                yield from (AttributeKey(module, name) for name in [*entries][size:] if name not in MODULE_INTERNALS)

    def _changed(self, dicts_before: Sequence[dict[str, Any]]) -> Iterator[AttributeKey]:
        """Yield entries that are new, or other objects than at the begin of the turn, in the compared dicts."""
        for (module, entries), before in zip(self._compared_dicts, dicts_before, strict=True):
            if len(before) != len(entries) or not all(map(is_, before.values(), entries.values())):
                names = [name for name, value in entries.items() if before.get(name, _MISSING) is not value]
                yield from (AttributeKey(module, name) for name in names if name not in MODULE_INTERNALS)

    def in_layer(self) -> AbstractContextManager[None]:
        """Run a layer in the block."""
        return temporarily(self, "_in_layer", True)

    @contextmanager
    def record_compiled_region(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Run compiled code of `modules` in the block, untraced: every attribute counts as read, and changed ones as set."""
        before = attributes_of(modules)
        for module, name in before:
            if id(module) in self._shell:
                self.on_read(module, name)
        with self.pause({cls for module in modules for cls in type(module).__mro__}):
            yield
        for key, value in attributes_of(modules).items():
            if value is not before.get(key, _MISSING):
                self.on_set(*key)

    def on_read(self, module: nn.Module, name: str) -> Any:
        """Return the attribute's value for the current micro-batch; refuse it if a later one has already set it."""
        value = vars(module)[name]
        if self._k < 0 or (self._in_layer and id(module) in self._unit_of):
            return value
        if (key := AttributeKey(module, name)) in self._own_values:
            return value
        if key in self._unstable:
            raise RuntimeError(
                f"the model reads attribute {name!r} of {type(module).__name__}, which a layer computes from its last value: a "
                "layer runs a second time in backward, so it would count twice. Set it from the layer's arguments alone, or "
                "count in the model's own code"
            )
        if (key, self._k) in self._layer_values:
            return self._layer_values[key, self._k]
        if self._last_writer.get(key, -1) > self._k:
            self._refuse(key)
        self._last_reader[key] = max(self._k, self._last_reader.get(key, -1))
        return value

    def on_set(self, module: nn.Module, name: str) -> None:
        """Record that an attribute was set; refuse it if a later micro-batch has already read the old value."""
        if self._k < 0:
            return
        key = AttributeKey(module, name)
        if id(module) in self._shell:
            self.record_change(key)
            if name in (entries := attribute_dict(module, name)):
                self._own_values[key] = entries[name]
        elif (unit := self._unit_of.get(id(module))) is not None and self._in_layer:
            self._record_layer_set(unit, key)
        elif unit is not None:
            # A submodule that is replaced is in another dict, and the same for all micro-batches.
            if name in vars(module) and is_plain(value := vars(module)[name]):
                self._layer_values[key, self._k] = self._own_values[key] = value
            self._set_on_layers.setdefault(unit, set()).add(key)

    def record_change(self, key: AttributeKey) -> None:
        """Record that the current micro-batch, or a layer for it, has set an attribute or changed it in place."""
        module, name = key
        if self._last_reader.get(key, -1) > self._k:
            self._refuse(key)
        self._last_writer[key] = max(self._k, self._last_writer.get(key, -1))
        if name in vars(module):
            self.trace(type(module), name)

    def checking_recompute(self) -> AbstractContextManager[None]:
        """Run a layer for the second time in the block, to find attributes that it then sets to other values."""
        return temporarily(self, "_checks_recompute", True)

    def _record_layer_set(self, unit: Unit, key: AttributeKey) -> None:
        module, name = key
        if name not in vars(module):
            return
        value = vars(module)[name]
        self._side_outputs.check_attribute(unit, value)
        if is_plain(value):
            if self._checks_recompute:
                if self._layer_values.get((key, self._k), value) != value:
                    self._unstable.add(key)
                return
            _LAYER_ATTRIBUTES.setdefault(type(module), set()).add(name)
            self.record_change(key)
            self._layer_values[key, self._k] = value
            return
        if isinstance(value, torch.Tensor) and not self._guard.is_active:
            self._kept_without_graph[key] = value
        refs = self._kept_tensors.get(key, [])
        before = [tensor for ref in refs if (tensor := ref()) is not None and tensor is not value]
        were_shared = [self._guard.mark_replaced(tensor, self._k) for tensor in before]
        if any(were_shared):
            self._refuse(key)
        self._kept_tensors[key] = [weakref.ref(t) for t in (*before, value) if isinstance(t, torch.Tensor)]
        self._guard.register(value, self._k)

    def take_kept_tensors(self) -> dict[AttributeKey, torch.Tensor]:
        """Return the tensors that layers have kept in this turn of an inference, which are the micro-batch's own.

        In training those with a graph are side outputs, and the others guarded.
        """
        kept, self._kept_without_graph = self._kept_without_graph, {}
        return kept

    def _refuse(self, key: AttributeKey) -> None:
        module, name = key
        raise RuntimeError(
            f"attribute {name!r} of {type(module).__name__} passes a value from one micro-batch's forward to the next, but "
            "micro-batches take turns at the layers, so it would arrive too late or too early. Keep such a memory between steps, "
            "pass it in the batch, or use RelayConfig(micro_batches=1)"
        )

    def values_set_on(self, unit: Unit) -> dict[AttributeKey, Any]:
        """Return the current values of attributes that the shell has set on a layer's modules in this pass."""
        return {key: vars(key.module).get(key.name) for key in self._set_on_layers.get(unit, ())}


def attributes_of(modules: Iterable[nn.Module]) -> dict[AttributeKey, Any]:
    """Return the attributes of modules, except those that every module has."""
    return {
        AttributeKey(m, name): value for m in modules for name, value in vars(m).items() if name not in MODULE_INTERNALS
    }


def attribute_dict(module: nn.Module, name: str) -> dict[str, Any]:
    """Return the dict of a module that holds an attribute of this name."""
    return module._modules if name in module._modules else vars(module)


def _is_torch_class(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def is_plain(value: Any) -> bool:
    """Whether a value is None, a number or a string, or a tuple or list of these."""
    if isinstance(value, tuple | list):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
