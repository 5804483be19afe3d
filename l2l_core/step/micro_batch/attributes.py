"""Plain attributes of modules, which micro-batches share while they take turns.

A model that notes something on itself (`self.rows = len(x)`) and reads it after a layer call would find what another
micro-batch has noted meanwhile. So what a micro-batch has set is set again before it goes on. What one leaves for the
next (a memory of the last forward) can only be had in the order of plain training; where turns change that order, it is
refused. So is a number that the shell sets on a layer anew for every micro-batch: the layer would run with another's.

Reads and writes are seen by spies on the classes of the model's own modules (`spies.py`), for the length of a pass. What goes
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
from l2l_core.step.graph import Asides
from l2l_core.step.micro_batch.hooks import SideOutputs
from l2l_core.step.micro_batch.meanwhile import Meanwhile
from l2l_core.step.micro_batch.spies import Spies

Place = tuple[nn.Module, str]

_MISSING = object()
_KEPT_BY: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()  # numbers that layers of a class set
_WRITTEN_PAST: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that are written to past the spies
OF_MODULES = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}


class Attributes:
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
        asides: Asides,
        sides: SideOutputs,
        metering: bool,
    ) -> None:
        self._metering, self._sides, self._asides = metering, sides, asides
        self._proves = False
        self._unsteady: set[Place] = set()  # numbers that a recompute would set to something else
        self._plain: dict[tuple[Place, int], Any] = {}  # numbers that layers keep on themselves, by micro-batch
        self._left: dict[Place, list[weakref.ref[torch.Tensor]]] = {}  # what layers keep on themselves
        self._shell = dict.fromkeys(shell)
        tops = [unit.module for unit in layers if _is_torchs(unit.module)]
        self._held = [(m, held) for m in (*self._shell, *tops) for held in (vars(m), m._modules)]
        self._looked_at = [(m, held) for m, held in self._held if metering or m in _WRITTEN_PAST]
        self._unit_of = {module: unit for unit in layers for module in modules_of(unit.module)}
        self._k = -1  # whose turn it is
        self._own: dict[Place, Any] = {}  # what that micro-batch has set so far
        self._in_layer = False
        self._read: dict[Place, int] = {}  # the last micro-batch that has read what others left
        self._set: dict[Place, int] = {}
        self._on_layers: dict[Unit, set[Place]] = {}  # what the shell has set there
        self._spies = Spies(self)

    def __enter__(self) -> Attributes:
        with ExitStack() as undo:
            undo.callback(self._spies.end)
            self._begin()
            undo.pop_all()
        return self

    def _begin(self) -> None:
        self._spies.begin()
        own = [module for module in self._shell if not _is_torchs(module)]
        names = {(type(m), name) for m in own for name in vars(m) if name not in OF_MODULES}
        names |= {(type(m), name) for m in self._unit_of for name in self._numbers_of(m)}
        for cls, name in names:
            self._spies.see(cls, name)
        self._spies.see_all_sets({type(m) for m in (*own, *self._unit_of)})

    def __exit__(self, *exc: object) -> None:
        self._spies.end()

    def knows(self, module: nn.Module) -> bool:
        """Whether a module is of this pass, and not of one in another thread."""
        return module in self._shell or module in self._unit_of

    def _numbers_of(self, module: nn.Module) -> Iterable[str]:
        """List the names of what a layer's module may keep, which the shell may read before the layer has run."""
        if _is_torchs(module):
            return ()
        if not self._metering:
            return _KEPT_BY.get(type(module), ())
        return [name for name, value in vars(module).items() if name not in OF_MODULES and is_plain(value)]

    def turn(self, k: int, own: dict[Place, Any]) -> AbstractContextManager[None]:
        """Micro-batch `k` is at work in the block; `own` is what it has set so far, and gets what it sets."""
        return _Turn(self, k, own)

    def in_layer(self) -> AbstractContextManager[None]:
        """A layer is at work in the block: what it sets on itself is its own affair."""
        return Meanwhile(self, "_in_layer", True)

    @contextmanager
    def told_of_all(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Compiled code of `modules` runs in the block, past the spies: it may read all, and what it has set shows afterwards."""
        before = {(m, name): value for m in modules for name, value in vars(m).items() if name not in OF_MODULES}
        for place in before:
            if place[0] in self._shell:
                self.was_read(*place)
        classes = {cls for kind in {type(module) for module in modules} for cls in kind.__mro__}
        with self._spies.away_from(classes):
            yield
        for place in [(m, n) for m in modules for n in vars(m) if n not in OF_MODULES]:
            if vars(place[0])[place[1]] is not before.get(place, _MISSING):
                self.was_set(*place)

    def was_read(self, module: nn.Module, name: str) -> Any:
        """Somebody reads an attribute that there is; returns its value for the micro-batch at work.

        Raises:
            RuntimeError: a later micro-batch has set it already.
        """
        place, value = (module, name), vars(module)[name]
        is_own = self._k < 0 or place in self._own or (self._in_layer and module in self._unit_of)
        if is_own or not (module in self._shell or module in self._unit_of):
            return value
        if place in self._unsteady:
            raise RuntimeError(_unsteady(*place))
        if (place, self._k) in self._plain:
            return self._plain[place, self._k]
        if self._set.get(place, -1) > self._k:
            self._refuse(place)
        self._read[place] = max(self._k, self._read.get(place, -1))
        return value

    def was_set(self, module: nn.Module, name: str) -> None:
        """Somebody has set an attribute.

        Raises:
            RuntimeError: a later micro-batch has read the value before.
        """
        if self._k < 0:
            return
        if module in self._shell:
            self._note_set(module, name)
            if name in (held := holder_of(module, name)):
                self._own[module, name] = held[name]
        elif module in self._unit_of and self._in_layer:
            self._layer_keeps(module, name)
        elif module in self._unit_of:
            if is_plain(value := vars(module).get(name)):
                self._plain[(module, name), self._k] = self._own[module, name] = value
            self._on_layers.setdefault(self._unit_of[module], set()).add((module, name))

    def _note_set(self, module: nn.Module, name: str) -> None:
        place = module, name
        if self._read.get(place, -1) > self._k:
            self._refuse(place)
        self._set[place] = max(self._k, self._set.get(place, -1))
        if name in vars(module):
            self._spies.see(type(module), name)

    def layer_changed(self, place: Place) -> None:
        """A layer has changed what it keeps, for the micro-batch at work, in a way that need not show when it is set."""
        self._note_set(*place)

    @contextmanager
    def proving(self) -> Iterator[None]:
        """A layer runs once more in the block: numbers that it then counts on from its first run are unsteady."""
        self._proves = True
        try:
            yield
        finally:
            self._proves = False

    def _layer_keeps(self, module: nn.Module, name: str) -> None:
        place, value = (module, name), vars(module).get(name)
        self._sides.check_kept(self._unit_of[module], value)
        if is_plain(value):
            if self._proves:
                if self._plain.get((place, self._k), value) != value:
                    self._unsteady.add(place)
                return
            _KEPT_BY.setdefault(type(module), set()).add(name)
            self._note_set(module, name)
            self._plain[place, self._k] = value
            return
        before = [tensor for ref in self._left.get(place, []) if (tensor := ref()) is not None and tensor is not value]
        if any([self._asides.replaced(tensor, self._k) for tensor in before]):
            self._refuse(place)
        self._left[place] = [weakref.ref(tensor) for tensor in (*before, value) if isinstance(tensor, torch.Tensor)]
        self._asides.note(value, self._k)

    def _refuse(self, place: Place) -> None:
        module, name = place
        raise RuntimeError(
            f"attribute {name!r} of {type(module).__name__} goes from one micro-batch's forward to the next one's, and "
            "micro-batches take turns at the layers: it would come too late or too early. Keep such a memory between steps, "
            "pass it in the batch, or use RelayConfig(micro_batches=1)"
        )

    def set_on(self, unit: Unit) -> dict[Place, Any]:
        """Return what the shell has set on a layer's modules in this pass, with the values as they stand."""
        return {(m, name): vars(m).get(name) for m, name in self._on_layers.get(unit, ())}


class _Turn(AbstractContextManager[None]):
    def __init__(self, attributes: Attributes, k: int, own: dict[Place, Any]) -> None:
        self._attributes, self._k, self._own = attributes, k, own

    def __enter__(self) -> None:
        for (module, name), value in self._own.items():
            holder_of(module, name)[name] = value  # another micro-batch has left its own there
        self._attributes._k, self._attributes._own = self._k, self._own
        self._sizes = [len(held) for _, held in self._attributes._held]
        self._before = [(module, held, dict(held)) for module, held in self._attributes._looked_at]

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None:
                for module, name in dict.fromkeys((*self._come(), *self._changed())):
                    _WRITTEN_PAST.add(module)
                    self._attributes.was_set(module, name)
        finally:
            self._attributes._k, self._attributes._own = -1, {}

    def _come(self) -> Iterator[Place]:
        """List what there was not when the turn began, where their number tells."""
        for (module, held), size in zip(self._attributes._held, self._sizes, strict=True):
            if len(held) > size:
                yield from ((module, name) for name in [*held][size:] if name not in OF_MODULES)

    def _changed(self) -> Iterator[Place]:
        """List what is another object now than when the turn began, or new, on modules that are looked at."""
        for module, held, before in self._before:
            if len(before) != len(held) or not all(map(is_, before.values(), held.values())):
                names = [name for name, value in held.items() if before.get(name, _MISSING) is not value]
                yield from ((module, name) for name in names if name not in OF_MODULES)


def holder_of(module: nn.Module, name: str) -> dict[str, Any]:
    """Where a module holds an attribute of this name."""
    return module._modules if name in module._modules else vars(module)


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _unsteady(module: nn.Module, name: str) -> str:
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
