"""How a layer ends: its last product, which a recompute leaves out where backward reads nothing of what comes of it.

A block with its norms in front ends in a product of weights, dropout and a residual connection. Autograd saves what goes into
that product, and nothing that comes out: the recompute needs its node, not its value. In a transformer of that kind it is a
third of what a recompute multiplies.

A value must not be wrong where somebody does read it, and a recompute that differs from the first run must be noticed:

- A dispatch mode sees every operation from the call of the module that makes the product until the layer is over. Sums and
  scalings may hand on what is missing, and views show it; before anything else reads it, it is computed after all. So it is if
  it outlives the recompute: autograd has saved it, or somebody holds it. Where code of other people's may read it that no mode
  sees (a function of its own in the graph, a tensor of another class, a mode around the step), nothing is left out.
- The outputs are a function of what goes into the product, and of what is added and multiplied afterwards. Marks of all that, in
  the first run and in the recompute, are compared instead of sums of the outputs. If the two do not end alike, everything is
  computed, and the outputs are compared as ever.

What the metered step has found (`last_product.py`) only says where it is worth while: every first run looks whether it still
is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as nn_module

from l2l_core._torch import (
    TorchDispatchMode,
    count_dispatch_modes,
    dispatch_modes,
    pop_dispatch_mode,
    push_dispatch_mode,
)
from l2l_core.eps.blocks import Unit
from l2l_core.model import key_of
from l2l_core.step.graph import is_entry, written_by
from l2l_core.step.micro_batch.last_product import search_in
from l2l_core.step.micro_batch.recomputes import WHOLE, Run, Sum, Whole, sums_of
from l2l_core.step.micro_batch.unread import (
    HAND_ON,
    PRODUCTS,
    READ_NOTHING,
    Form,
    Missing,
    Part,
    make_up,
    marks_of,
)
from l2l_core.step.traffic import LastProduct, Metered, Watch, tensors_in


class Endings:
    """Knows how layers end, and gives each run what watches its end.

    Args:
        metered: what is known of passes of this kind, or gets to be known.
        learns: whether this is the metered pass.
        is_weight: whether a tensor lies in a weight.

    Attributes:
        watching: the run that is watched now.
    """

    def __init__(self, metered: Metered, learns: bool, is_weight: Callable[[torch.Tensor], bool]) -> None:
        self._metered, self._learns, self.is_weight = metered, learns, is_weight
        self._searched: set[Unit] = set()
        self._owners: dict[Unit, nn.Module | None] = {}
        self.watching: _Ending | None = None

    @property
    def listens(self) -> bool:
        """Whether it has to hear of reads past the dispatcher (`read_past`)."""
        return torch.is_grad_enabled() and not self._learns and bool(self._metered.last_products)

    def read_past(self, tensor: torch.Tensor) -> None:
        """Somebody is about to read a tensor where no mode sees it."""
        if self.watching is not None:
            self.watching.read_past(tensor)

    def forget(self, unit: Unit) -> None:
        """Leave nothing out of this layer any more."""
        self._metered.last_products.pop(unit.key, None)

    def first(self, unit: Unit) -> Whole:
        """Give the first run of a layer that will be recomputed what it needs."""
        last = None if self._learns or not torch.is_grad_enabled() else self._metered.last_products.get(unit.key)
        if last is None or not all(isinstance(mode, Watch) for mode in dispatch_modes()):
            return WHOLE
        owner = self._owner_of(unit, last)
        return WHOLE if owner is None else _Ending(self, unit, owner, last.number)

    def again(self, unit: Unit, first: Whole, inputs: Sequence[torch.Tensor]) -> Whole:
        """Give the recompute what it needs; `inputs` are the layer's."""
        if isinstance(first, _Ending) and first.is_whole:
            return _Recomputed(first)
        if self._learns and unit not in self._searched:
            self._searched.add(unit)
            return search_in(unit, inputs, self._metered) or WHOLE
        return WHOLE

    def _owner_of(self, unit: Unit, last: LastProduct) -> nn.Module | None:
        if unit not in self._owners:
            self._owners[unit] = dict(unit.module.named_modules()).get(last.path)
        return self._owners[unit]


class _Ending(Whole, TorchDispatchMode):
    """Watches the first run of a layer from the call of the module that makes its last product on, and notes what goes in.

    Attributes:
        steps: every operation on what comes of the product, with all that is no tensor, and the forms of those; and the outputs.
        marks: of every operand that does not come of the product, and of outputs that do not.
        product: what that is like; None until it is made.
    """

    def __init__(self, endings: Endings, unit: Unit, owner: nn.Module, number: int) -> None:
        super().__init__()
        self.endings, self.unit, self.owner, self.number = endings, unit, owner, number
        self.steps: list[Any] = []
        self.marks: list[Sum] = []
        self.product: Form | None = None
        self._products = 0
        # Storages with what comes of the product, and which step made it. A reference keeps others from taking its place.
        self._follows: dict[int, tuple[StorageWeakRef, int]] = {}
        self._goes_in: set[int] = set()  # storages of the operands
        self._has_begun = self._is_over = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @property
    def is_whole(self) -> bool:
        """Whether the product was made, and read by nothing but what may hand it on."""
        return self.product is not None and not self._is_over

    def around(self, real: Run) -> Run:
        def ran(*args: Any, **kwargs: Any) -> Any:
            depth = count_dispatch_modes()
            begin = partial(self._begin, depth, get_ident())
            # Not a hook of the module's own, which whoever copies the module would copy.
            handle = nn_module.register_module_forward_pre_hook(begin)
            try:
                if self.owner is self.unit.module:  # of which the forward alone is run
                    begin(self.owner)
                return real(*args, **kwargs)
            finally:
                handle.remove()
                self.endings.watching = None
                while count_dispatch_modes() > depth:  # an interrupt comes before or after it is noted
                    pop_dispatch_mode()

        return ran

    def _begin(self, depth: int, thread: int, module: nn.Module, *_: Any) -> None:
        """Watch from now on. Not under a mode that the layer has put on for a part of itself: that one goes before this.

        Nor in a thread of the layer's own, where the mode would stay.
        """
        is_here = thread == get_ident() and count_dispatch_modes() == depth
        if module is self.owner and not self._has_begun and is_here:
            self._has_begun = True
            self.endings.watching = self
            push_dispatch_mode(self)

    def made(self, nodes: Iterable[Any]) -> None:
        if any(_is_foreign(node) for node in nodes):
            self._give_up()

    def sums(self, outputs: Sequence[torch.Tensor]) -> list[Sum]:
        self._end(outputs)
        return sums_of(outputs)

    def _end(self, outputs: Sequence[torch.Tensor]) -> None:
        """Note what the layer gives out."""
        if not any(map(self._comes_of_it, outputs)):
            self._give_up()  # what came of it went where no mode sees it, as into an extension in C++
        for each in outputs if self.is_whole else ():
            self.steps.append(self._noted(each))
        self._follows.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_over or (func in READ_NOTHING and not types):
            return func(*args, **kwargs)
        if self.product is None:
            self._products += func in PRODUCTS
            if func not in PRODUCTS or self._products != self.number:
                return func(*args, **kwargs)
            make = partial(self._make, func)
        else:
            reads = bool(types) or any(map(self._comes_of_it, tensors_in(*args, kwargs)))
            if not reads or types or func not in HAND_ON:
                if reads or self._changes_what_goes_in(func, args):
                    self._give_up()
                return func(*args, **kwargs)
            make = func
        self.steps.append([func, kwargs, *map(self._noted, args)])
        out = make(*args, **kwargs)
        self._follow(out, func, args, kwargs)
        return out

    def _noted(self, arg: Any) -> Any:
        """Return what an argument must have in common with that of the other run, and mark its values."""
        if not isinstance(arg, torch.Tensor):
            return arg
        key = key_of(arg)
        if key in self._follows:
            return self._follows[key][1], Form.of(arg)
        self._goes_in.add(key)
        # Weights lie side by side, so that their offset tells which one it is.
        self.marks += sums_of([arg]) if self.endings.is_weight(arg) else marks_of(arg)
        return Form.of(arg)

    def _make(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = func(*args, **kwargs)
        self.product = Form.of(out)
        return out

    def _follow(self, out: torch.Tensor, func: Any, args: Any, kwargs: Any) -> None:
        """Note a new tensor that comes of the product."""
        self._follows[key_of(out)] = StorageWeakRef(out.untyped_storage()), len(self.steps)

    def _comes_of_it(self, tensor: torch.Tensor) -> bool:
        return key_of(tensor) in self._follows

    def _changes_what_goes_in(self, func: Any, args: Any) -> bool:
        return func._schema.is_mutable and not self._goes_in.isdisjoint(written_by(func, args))

    def read_past(self, tensor: torch.Tensor) -> None:
        """Hear that somebody is about to read a tensor where no mode sees it."""
        if self._comes_of_it(tensor):
            self._give_up()

    def _give_up(self) -> None:
        """What comes of the product may be read: the recompute is whole, and so are later ones."""
        self._is_over = True
        self._follows.clear()
        self.endings.forget(self.unit)


class _Recomputed(_Ending):
    """Watches a recompute, and leaves the product out of it."""

    def __init__(self, first: _Ending) -> None:
        super().__init__(first.endings, first.unit, first.owner, first.number)
        self._first = first
        self._missing: list[Missing] = []

    def compared(self, before: list[Sum], outputs: Sequence[torch.Tensor]) -> tuple[list[Sum], list[Sum]]:
        self._end(outputs)
        if self.is_whole and self.steps == self._first.steps:
            return self._first.marks, self.marks
        self._give_up()
        return super().compared(before, outputs)

    def close(self) -> None:
        if not all(each.ref.expired() for each in self._missing):
            self._give_up()
        self._missing.clear()

    def _make(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.product = self._first.product
        assert self.product is not None
        return self.product.empty() if self.steps == self._first.steps[:1] else func(*args, **kwargs)

    def _follow(self, out: torch.Tensor, func: Any, args: Any, kwargs: Any) -> None:
        args = [Part.of(arg) if isinstance(arg, torch.Tensor) and self._comes_of_it(arg) else arg for arg in args]
        super()._follow(out, func, args, kwargs)
        self._missing.append(Missing(self._follows[key_of(out)][0], Form.of(out), func, args, kwargs))

    def _give_up(self) -> None:
        super()._give_up()
        missing, self._missing = self._missing, []
        make_up(missing)


def _is_foreign(node: Any) -> bool:
    """Whether a node is a function of somebody's own, in Python or in C++: it may read what no mode sees."""
    return (isinstance(node, BackwardCFunction) and not is_entry(node)) or type(node).__name__ == "CppFunction"
