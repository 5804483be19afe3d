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

What the metered step has found (`_Search`) only says where it is worth while: every first run looks whether it is still so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from l2l_core.eps.blocks import Unit
from l2l_core.model import modules_of, parts_of
from l2l_core.step.graph import is_entry, written_by
from l2l_core.step.micro_batch.recomputes import Sum, sums_of
from l2l_core.step.traffic import LastProduct, Metered, Watch, before_reads, tensors_in

_aten = torch.ops.aten
_PRODUCTS = frozenset(
    (
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
    )
)
# What gives a new tensor element by element, and draws nothing: from the same operands always the same.
_HAND_ON = frozenset(
    (
        _aten.add.Tensor,
        _aten.sub.Tensor,
        _aten.mul.Tensor,
        _aten.div.Tensor,
        _aten._to_copy.default,
        _aten.clone.default,
    )
)
# What reads no values: views, and what looks at shapes alone.
_READ_NOTHING = frozenset(
    (
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.expand.default,
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.empty_like.default,
        _aten.zeros_like.default,
        _aten.ones_like.default,
        _aten.rand_like.default,
        _aten.new_empty.default,
        _aten.new_zeros.default,
    )
)
# Multiplications from which on to leave a product out gains more than to watch what is around it costs (0.4 ms, against
# 1.5 ms of one core). Elsewhere than on the CPU nobody has measured it, and nothing is left out.
_WORTH_WHILE: dict[str, float] = {"cpu": 2**26}
_NEVER = float("inf")

Run = Callable[..., Any]


class Whole:
    """A run that computes all there is, and whose outputs are compared."""

    def around(self, real: Run) -> Run:
        """Wrap the layer's forward."""
        return real

    def made(self, nodes: Iterable[Any]) -> None:
        """Hear of what graph the run has made."""

    def sums(self, outputs: Sequence[torch.Tensor]) -> list[Sum]:
        """Return the sums of what the first run gave out."""
        return sums_of(outputs)

    def compared(self, before: list[Sum], outputs: Sequence[torch.Tensor]) -> tuple[list[Sum], list[Sum]]:
        """Return what tells whether a recompute gave the same: of the first run, which had the sums `before`, and of this one."""
        return before, sums_of(outputs)

    def close(self) -> None:
        """The run is over, and what it gave out is let go."""


WHOLE = Whole()


class Endings:
    """Knows how layers end, and gives each run what watches its end.

    Args:
        metered: what is known of passes of this kind, or gets to be known.
        learns: whether this is the metered pass.
        is_weight: whether a tensor lies in a weight or buffer.

    Attributes:
        watching: the run that is watched now.
    """

    def __init__(self, metered: Metered, learns: bool, is_weight: Callable[[torch.Tensor], bool]) -> None:
        self._metered, self._learns, self.is_weight = metered, learns, is_weight
        self._searched: set[Unit] = set()
        self._owners: dict[Unit, nn.Module | None] = {}
        self.watching: _Watching | None = None

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
        if last is None or not all(isinstance(mode, Watch) for mode in _get_current_dispatch_mode_stack()):
            return WHOLE
        owner = self._owner_of(unit, last)
        return WHOLE if owner is None else _Ending(self, unit, owner, last.number)

    def again(self, unit: Unit, first: Whole, inputs: Sequence[torch.Tensor]) -> Whole:
        """Give the recompute what it needs; `inputs` are the layer's."""
        if isinstance(first, _Ending) and first.is_whole:
            return _Recomputed(first)
        if self._learns and unit not in self._searched:
            self._searched.add(unit)
            least = _least(unit)
            is_large = _most(unit, inputs) >= least
            if is_large and unit.key not in self._metered.gives_aside and not _is_closed(unit.module):
                return _Search(unit, self._metered, least)
        return WHOLE

    def _owner_of(self, unit: Unit, last: LastProduct) -> nn.Module | None:
        if unit not in self._owners:
            self._owners[unit] = dict(unit.module.named_modules()).get(last.path)
        return self._owners[unit]


def _is_closed(layer: nn.Module) -> bool:
    """Whether code of it runs where nobody sees it: a compiled part, a script."""
    return bool(parts_of(layer)) or any(isinstance(module, torch.jit.ScriptModule) for module in modules_of(layer))


def _least(unit: Unit) -> float:
    """Return how many multiplications a product must have."""
    return max((_WORTH_WHILE.get(param.device.type, _NEVER) for param in unit.params), default=_NEVER)


def _most(unit: Unit, inputs: Sequence[torch.Tensor]) -> int:
    """Return about how many multiplications its largest product with a weight can have: no small layer need be searched."""
    rows = max(
        (each.numel() // (each.shape[-1] or 1) if 0 < each.dim() < 4 else each.numel() for each in inputs), default=0
    )
    return rows * max((param.numel() for param in unit.params), default=0)


# ---- runs ------------------------------------------------------------------------------------------------------------


class _Watching(Whole, TorchDispatchMode):
    """A run that is watched: by a mode that sees every operation, and by who hears of what no mode sees."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def read_past(self, tensor: torch.Tensor) -> None:
        """Hear that somebody is about to read a tensor where no mode sees it."""
        raise NotImplementedError


class _Ending(_Watching):
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
        self.product: _Form | None = None
        self._products = 0
        # Storages with what comes of the product, and which step made it. A reference keeps others from taking its place.
        self._follows: dict[int, tuple[StorageWeakRef, int]] = {}
        self._goes_in: set[int] = set()  # storages of the operands
        self._has_begun = self._is_over = False

    @property
    def is_whole(self) -> bool:
        """Whether the product was made, and read by nothing but what may hand it on."""
        return self.product is not None and not self._is_over

    def around(self, real: Run) -> Run:
        def ran(*args: Any, **kwargs: Any) -> Any:
            depth = torch._C._len_torch_dispatch_stack()
            begin = partial(self._begin, depth)
            if self.owner is self.unit.module:  # of which the forward alone is run
                begin(self.owner)
            # Not a hook of the module's own, which whoever copies the module would copy.
            handle = nn_module.register_module_forward_pre_hook(begin)
            try:
                return real(*args, **kwargs)
            finally:
                handle.remove()
                self.endings.watching = None
                while torch._C._len_torch_dispatch_stack() > depth:  # an interrupt comes before or after it is noted
                    _pop_mode()

        return ran

    def _begin(self, depth: int, module: nn.Module, *_: Any) -> None:
        """Watch from now on. Not under a mode that the layer has put on for a part of itself: that one goes before this."""
        if module is self.owner and not self._has_begun and torch._C._len_torch_dispatch_stack() == depth:
            self._has_begun = True
            self.endings.watching = self
            _push_mode(self)

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
        if self._is_over or (func in _READ_NOTHING and not types):
            return func(*args, **kwargs)
        if self.product is None:
            self._products += func in _PRODUCTS
            if func not in _PRODUCTS or self._products != self.number:
                return func(*args, **kwargs)
            make = self._make
        else:
            reads = bool(types) or any(map(self._comes_of_it, tensors_in((args, kwargs))))
            if not reads or types or func not in _HAND_ON:
                if reads or self._changes_what_goes_in(func, args):
                    self._give_up()
                return func(*args, **kwargs)
            make = _computed
        self.steps.append([func, kwargs, *map(self._noted, args)])
        out = make(func, args, kwargs)
        self._follow(out, func, args, kwargs)
        return out

    def _noted(self, arg: Any) -> Any:
        """Return what an argument must have in common with that of the other run, and mark its values."""
        if not isinstance(arg, torch.Tensor):
            return arg
        key = _key(arg)
        if key in self._follows:
            return self._follows[key][1], _Form.of(arg)
        self._goes_in.add(key)
        self.marks += sums_of([arg]) if self.endings.is_weight(arg) else _marks(arg)
        return _Form.of(arg)

    def _make(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        out = func(*args, **kwargs)
        self.product = _Form.of(out)
        return out

    def _follow(self, out: torch.Tensor, func: Any, args: Any, kwargs: Any) -> None:
        """Note a new tensor that comes of the product."""
        self._follows[_key(out)] = StorageWeakRef(out.untyped_storage()), len(self.steps)

    def _comes_of_it(self, tensor: torch.Tensor) -> bool:
        return _key(tensor) in self._follows

    def _changes_what_goes_in(self, func: Any, args: Any) -> bool:
        return func._schema.is_mutable and not self._goes_in.isdisjoint(written_by(func, args))

    def read_past(self, tensor: torch.Tensor) -> None:
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
        self._missing: list[_Missing] = []

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

    def _make(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        self.product = self._first.product
        assert self.product is not None
        return self.product.empty() if self.steps == self._first.steps[:1] else func(*args, **kwargs)

    def _follow(self, out: torch.Tensor, func: Any, args: Any, kwargs: Any) -> None:
        args = [_Part.of(arg) if isinstance(arg, torch.Tensor) and self._comes_of_it(arg) else arg for arg in args]
        super()._follow(out, func, args, kwargs)
        self._missing.append(_Missing(self._follows[_key(out)][0], _Form.of(out), func, args, kwargs))

    def _give_up(self) -> None:
        super()._give_up()
        missing, self._missing = self._missing, []
        values: dict[int, torch.Tensor] = {}
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # casts were made before
            for each in missing:
                args = [
                    values[arg.key].as_strided(*arg.form[:3]) if isinstance(arg, _Part) else arg for arg in each.args
                ]
                values[each.ref.cdata] = value = each.func(*args, **each.kwargs)
                if not each.ref.expired():
                    storage = torch.UntypedStorage._new_with_weak_ptr(each.ref.cdata)
                    each.form.over(storage).copy_(value)


class _Form(NamedTuple):
    """What a tensor is like, but for its values."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> _Form:
        return _Form(tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor that lies there."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload]


class _Part(NamedTuple):
    """What an operation reads of what is missing, in numbers: who held the tensor would keep it."""

    key: int
    form: _Form

    @staticmethod
    def of(tensor: torch.Tensor) -> _Part:
        return _Part(_key(tensor), _Form.of(tensor))


class _Missing(NamedTuple):
    """A tensor whose values are missing, or follow from such, and how it is made."""

    ref: StorageWeakRef
    form: _Form
    func: Any
    args: list[Any]
    kwargs: dict[str, Any]


def _is_foreign(node: Any) -> bool:
    """Whether a node is a function of somebody's own, in Python or in C++: it may read what no mode sees."""
    return (isinstance(node, BackwardCFunction) and not is_entry(node)) or type(node).__name__ == "CppFunction"


def _marks(tensor: torch.Tensor) -> list[Sum]:
    """Return numbers that tell a tensor from another one, also from one with the same values in another order."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
    values = values.reshape(-1, values.shape[-1] if values.dim() else 1)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    rows, columns = values.sum(1, dtype=dtype), values.sum(0, dtype=dtype)
    return [float((each * _weights(each.numel(), dtype)).sum()) for each in (rows, columns)]


@lru_cache(maxsize=64)
def _weights(count: int, dtype: torch.dtype) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():  # they stay, and belong to no micro-batch
        return torch.arange(1, count + 1, dtype=torch.float64).cos().to(dtype)


# ---- what the metered step looks for ---------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Candidate:
    """A product that might be left out."""

    owner: nn.Module
    number: int
    multiplications: int
    is_read: bool = False


@dataclass(slots=True)
class _Open:
    """A module whose forward runs."""

    module: nn.Module
    depth: int  # of dispatch modes when it was called
    products: int = 0


class _Search(_Watching):
    """Watches a whole recompute, for the largest product of which backward reads nothing, nor anything that comes of it."""

    def __init__(self, unit: Unit, metered: Metered, least: float) -> None:
        super().__init__()
        self._unit, self._metered, self._least = unit, metered, least
        self._found: list[_Candidate] = []
        self._follows: dict[int, tuple[StorageWeakRef, set[_Candidate]]] = {}
        self._open: list[_Open] = []
        self._calls: Counter[nn.Module] = Counter()

    def around(self, real: Run) -> Run:
        def ran(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                stack.enter_context(before_reads(self.read_past))
                stack.enter_context(self)
                stack.callback(nn_module.register_module_forward_pre_hook(self._called).remove)
                stack.callback(nn_module.register_module_forward_hook(self._returned).remove)
                self._called(self._unit.module)
                return real(*args, **kwargs)

        return ran

    def compared(self, before: list[Sum], outputs: Sequence[torch.Tensor]) -> tuple[list[Sum], list[Sum]]:
        seen = {each for output in outputs for each in self._followed(output)}
        self._are_read(each for each in self._found if each not in seen)  # where no mode sees it
        return super().compared(before, outputs)

    def close(self) -> None:
        for ref, candidates in self._follows.values():
            if not ref.expired():  # saved by autograd, or somebody has it
                self._are_read(candidates)
        paths = {module: path for path, module in self._unit.module.named_modules()}
        unread = [
            each for each in self._found if not each.is_read and self._calls[each.owner] == 1 and each.owner in paths
        ]
        if unread:
            best = max(unread, key=lambda each: each.multiplications)
            self._metered.last_products[self._unit.key] = LastProduct(paths[best.owner], best.number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = list(tensors_in((args, kwargs)))
        read = [] if func in _READ_NOTHING else inputs
        before = {each for tensor in read for each in self._followed(tensor) if not each.is_read}
        if before and func not in _HAND_ON:
            self._are_read(before)
        elif before:
            self._follow(out, before)
        if func in _PRODUCTS:
            self._made(out, func, inputs)
        return out

    def _made(self, out: torch.Tensor, func: Any, inputs: Sequence[torch.Tensor]) -> None:
        for each in self._open:
            each.products += 1
        here = self._open[-1]
        is_plain = all(type(t) in (torch.Tensor, nn.Parameter) and t.layout is torch.strided for t in inputs)
        if is_plain and here.depth == self._open[0].depth:
            candidate = _Candidate(here.module, here.products, _multiplications(func, out, inputs))
            if candidate.multiplications >= self._least:
                self._found.append(candidate)
                self._follow(out, {candidate})

    def _follow(self, out: torch.Tensor, candidates: set[_Candidate]) -> None:
        ref = StorageWeakRef(out.untyped_storage())
        self._follows.setdefault(ref.cdata, (ref, set()))[1].update(candidates)

    def _followed(self, tensor: torch.Tensor) -> Iterable[_Candidate]:
        return self._follows.get(_key(tensor), (None, ()))[1]

    def read_past(self, tensor: torch.Tensor) -> None:
        self._are_read(self._followed(tensor))

    def _are_read(self, candidates: Iterable[_Candidate]) -> None:
        for each in candidates:
            each.is_read = True

    def _called(self, module: nn.Module, *_: Any) -> None:
        self._calls[module] += 1
        self._open.append(_Open(module, torch._C._len_torch_dispatch_stack()))

    def _returned(self, module: nn.Module, *_: Any) -> None:
        while len(self._open) > 1 and self._open.pop().module is not module:
            pass  # a call that ended in an exception


def _multiplications(func: Any, out: torch.Tensor, inputs: Sequence[torch.Tensor]) -> int:
    if func is _aten.convolution.default:
        weight = inputs[1]
        return out.numel() * weight.numel() // max(1, weight.shape[0])
    factor = inputs[0] if func in (_aten.mm.default, _aten.bmm.default) else inputs[1]
    return out.numel() * factor.shape[-1]


def _computed(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    return func(*args, **kwargs)


def _key(tensor: torch.Tensor) -> int:
    """Return the storage of a tensor by number; sparse ones have none."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
