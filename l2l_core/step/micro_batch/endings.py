"""How a layer ends: its last product, which a recompute leaves out where backward reads nothing of what comes of it.

A block with its norms in front ends in a product of weights, dropout and a residual connection. Autograd saves what goes into
that product, and nothing that comes out: the recompute needs its node, not its value. In a transformer of that kind it is a
third of what a recompute multiplies.

A layer's value must not be wrong where somebody does read it, and a recompute that differs from the first run must be noticed:

- A dispatch mode sees every operation from the call of the module that makes the product until the layer is over. Sums,
  scalings and views may hand on what is missing; before anything else reads it, it is computed after all. So it is if it
  outlives the recompute: autograd has saved it, or somebody holds it.
- The outputs are a function of what goes into the product, and of what is added and multiplied afterwards. The sums of all
  that, in the first run and in the recompute, are compared instead of theirs.

What the metered step has found (`_Search`) only says where it is worth while, so nothing goes wrong if it is not true any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from l2l_core.eps.blocks import Unit
from l2l_core.model import modules_of, parts_of
from l2l_core.step.graph import written_by
from l2l_core.step.micro_batch.meanwhile import Meanwhile
from l2l_core.step.micro_batch.recomputes import Sum, sums_of
from l2l_core.step.traffic import LastProduct, Metered

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
        _aten.detach.default,
        _aten.empty_like.default,
        _aten.zeros_like.default,
        _aten.ones_like.default,
        _aten.rand_like.default,
        _aten.new_empty.default,
        _aten.new_zeros.default,
    )
)
# Multiplications from which on to leave a product out gains more than to watch the operations around it costs.
_WORTH_WHILE = {"cpu": 2**23, "cuda": 2**33}

Run = Callable[..., Any]


class Whole:
    """A run that computes all there is, and whose outputs are compared."""

    def around(self, real: Run) -> Run:
        """Wrap the layer's forward."""
        return real

    def sums(self, outputs: Sequence[torch.Tensor]) -> list[Sum]:
        """Return the sums that tell whether a recompute gave the same."""
        return sums_of(outputs)

    def close(self) -> None:
        """The run is over, and what it gave out is let go."""


WHOLE = Whole()


class Endings:
    """Knows how layers end, and gives each run what watches its end.

    Args:
        metered: what is known of passes of this kind, or gets to be known.
        learns: whether this is the metered pass.
        is_weight: whether a tensor lies in a weight, which a recompute finds as the first run did.

    Attributes:
        watching: the run that is watched now.
    """

    def __init__(self, metered: Metered, learns: bool, is_weight: Callable[[torch.Tensor], bool]) -> None:
        self._metered, self._learns, self.is_weight = metered, learns, is_weight
        self._searched: set[Unit] = set()
        self._owners: dict[Unit, nn.Module] = {}
        self.watching: _Watching | None = None

    @property
    def listens(self) -> bool:
        """Whether it has to hear of reads past the dispatcher (`read_past`)."""
        return torch.is_grad_enabled() and (self._learns or bool(self._metered.last_products))

    def read_past(self, tensor: torch.Tensor) -> None:
        """Somebody is about to read a tensor where no mode sees it."""
        if self.watching is not None:
            self.watching.read_past(tensor)

    def owner_of(self, unit: Unit, last: LastProduct) -> nn.Module:
        """Find the module that makes a layer's last product."""
        if unit not in self._owners:
            self._owners[unit] = unit.module.get_submodule(last.path)
        return self._owners[unit]

    def forget(self, unit: Unit) -> None:
        """Leave nothing out of this layer any more."""
        self._metered.last_products.pop(unit.key, None)

    def first(self, unit: Unit) -> Whole:
        """Give the first run of a layer that will be recomputed what it needs."""
        last = None if self._learns or not torch.is_grad_enabled() else self._metered.last_products.get(unit.key)
        return WHOLE if last is None else _Ending(self, unit, last)

    def again(self, unit: Unit, first: Whole) -> Whole:
        """Give the recompute what it needs."""
        if isinstance(first, _Ending) and first.is_whole:
            return _Recomputed(self, first)
        if self._learns and unit not in self._searched:
            self._searched.add(unit)
            if unit.key not in self._metered.gives_aside and not _is_closed(unit.module):
                return _Search(self, unit, self._metered)
        return WHOLE


def _is_closed(layer: nn.Module) -> bool:
    """Whether code of it runs where nobody sees it: a compiled part, a script."""
    return bool(parts_of(layer)) or any(isinstance(module, torch.jit.ScriptModule) for module in modules_of(layer))


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
        steps: every operation on what comes of the product, with all that is no tensor, and the forms of those.
        made: what the product is like.
    """

    def __init__(self, endings: Endings, unit: Unit, last: LastProduct) -> None:
        super().__init__()
        self._endings, self.unit, self.last = endings, unit, last
        self.steps: list[Any] = []
        self.made: _Made | None = None
        self._sums: list[Sum] = []
        self._products = 0
        # Storages with what comes of the product; a reference keeps others from taking its place.
        self._follows: dict[int, StorageWeakRef] = {}
        self._goes_in: set[int] = set()  # storages of the operands
        self._has_begun = self._is_over = False

    @property
    def is_whole(self) -> bool:
        """Whether the product was made, and read by nothing but what may hand it on."""
        return self.made is not None and not self._is_over

    def around(self, real: Run) -> Run:
        owner = self._endings.owner_of(self.unit, self.last)

        def ran(*args: Any, **kwargs: Any) -> Any:
            begin = partial(self._begin, torch._C._len_torch_dispatch_stack())
            if owner is self.unit.module:  # of which only the forward is run
                begin()
            # As `register_forward_pre_hook` does, without what it makes to be taken away by: this is done in every call.
            owner._forward_pre_hooks[id(self)] = begin
            try:
                return real(*args, **kwargs)
            finally:
                del owner._forward_pre_hooks[id(self)]
                if self._has_begun:
                    _pop_mode()
                    self._endings.watching = None

        return ran

    def _begin(self, depth: int, *_: Any) -> None:
        """Watch from now on. Not under a mode that the layer has put on for a part of itself: that one goes before this."""
        if not self._has_begun and torch._C._len_torch_dispatch_stack() == depth:
            self._has_begun = True
            self._endings.watching = self
            _push_mode(self)

    def sums(self, outputs: Sequence[torch.Tensor]) -> list[Sum]:
        others = [each for each in outputs if not self._comes_of_it(each)]
        self.steps += [_form(each) for each in outputs if self._comes_of_it(each)]
        if len(others) == len(outputs):
            self._is_over = True  # what came of it went where no mode sees it, as into an extension in C++
        self._follows.clear()
        return sums_of(outputs) if self._is_over else [*self._sums, *sums_of(others)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_over or func in _READ_NOTHING:
            return func(*args, **kwargs)
        if self.made is None:
            self._products += func in _PRODUCTS
            if func not in _PRODUCTS or self._products != self.last.number:
                return func(*args, **kwargs)
            self._note(func, args, kwargs)
            out = self._product(func, args, kwargs)
        else:
            reads = any(map(self._comes_of_it, _tensors((args, kwargs))))
            if not reads or func not in _HAND_ON:
                if reads or self._changes_what_goes_in(func, args):
                    self._read()
                return func(*args, **kwargs)
            self._note(func, args, kwargs)
            out = func(*args, **kwargs)
        self._follow(out, func, args, kwargs)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        step = [func, kwargs]
        for arg in args:
            if isinstance(arg, torch.Tensor):
                step += _form(arg)
                if not self._comes_of_it(arg) and not self._endings.is_weight(arg):
                    self._goes_in.add(arg.untyped_storage()._cdata)
                    self._sums += sums_of([arg])
            else:
                step.append(arg)
        self.steps.append(step)

    def _product(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        out = func(*args, **kwargs)
        self.made = _Made.of(out)
        return out

    def _follow(self, out: torch.Tensor, func: Any, args: Any, kwargs: Any) -> StorageWeakRef:
        """Note a new tensor that comes of the product."""
        storage = out.untyped_storage()
        self._follows[storage._cdata] = ref = StorageWeakRef(storage)
        return ref

    def _comes_of_it(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._follows

    def _changes_what_goes_in(self, func: Any, args: Any) -> bool:
        return func._schema.is_mutable and not self._goes_in.isdisjoint(written_by(func, args))

    def read_past(self, tensor: torch.Tensor) -> None:
        if self._comes_of_it(tensor):
            self._read()

    def _read(self) -> None:
        """Something else is about to read what comes of the product: outputs are compared as ever."""
        self._is_over = True
        self._follows.clear()


class _Recomputed(_Ending):
    """Watches a recompute, and leaves the product out of it."""

    def __init__(self, endings: Endings, first: _Ending) -> None:
        super().__init__(endings, first.unit, first.last)
        self._first = first
        self._missing: list[_Missing] = []

    def sums(self, outputs: Sequence[torch.Tensor]) -> list[Sum]:
        found = super().sums(outputs)
        return found if self.is_whole and self.steps == self._first.steps else []  # not even as many as there were

    def close(self) -> None:
        if not all(each.ref.expired() for each in self._missing):
            self._make_up()
        self._missing.clear()

    def _product(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        self.made = self._first.made
        assert self.made is not None
        return self.made.empty() if self.steps == self._first.steps[:1] else func(*args, **kwargs)

    def _follow(self, out: torch.Tensor, func: Any, args: Any, kwargs: Any) -> StorageWeakRef:
        args = [_Part.of(arg) if isinstance(arg, torch.Tensor) and self._comes_of_it(arg) else arg for arg in args]
        ref = super()._follow(out, func, args, kwargs)
        self._missing.append(_Missing(ref, _Made.of(out), func, args, kwargs))
        return ref

    def _read(self) -> None:
        super()._read()
        self._make_up()

    def _make_up(self) -> None:
        """Compute what was left out, for those who have it in their hands."""
        self._endings.forget(self.unit)
        values: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for each in self._missing:
                args = [values[arg.key].as_strided(*arg[1:]) if isinstance(arg, _Part) else arg for arg in each.args]
                values[each.ref.cdata] = value = each.func(*args, **each.kwargs)
                if not each.ref.expired():
                    storage = torch.UntypedStorage._new_with_weak_ptr(each.ref.cdata)
                    each.made.over(storage).copy_(value)
        self._missing.clear()


class _Made(NamedTuple):
    """What a tensor is like, but for its values."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> _Made:
        return _Made(tensor.size(), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor that lies there."""
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, 0, self.size, self.stride)  # type: ignore[call-overload]


class _Part(NamedTuple):
    """What an operation reads of what is missing, in numbers: who held the tensor would keep it."""

    key: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _Part:
        return _Part(tensor.untyped_storage()._cdata, tensor.size(), tensor.stride(), tensor.storage_offset())


class _Missing(NamedTuple):
    """A tensor whose values are missing, or follow from such, and how it is made."""

    ref: StorageWeakRef
    made: _Made
    func: Any
    args: list[Any]
    kwargs: dict[str, Any]


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

    def __init__(self, endings: Endings, unit: Unit, metered: Metered) -> None:
        super().__init__()
        self._endings, self._unit, self._metered = endings, unit, metered
        self._least = _least(unit)
        self._found: list[_Candidate] = []
        self._follows: dict[int, tuple[StorageWeakRef, set[_Candidate]]] = {}
        self._open: list[_Open] = []
        self._calls: Counter[nn.Module] = Counter()

    def around(self, real: Run) -> Run:
        def ran(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                stack.enter_context(Meanwhile(self._endings, "watching", self))
                stack.enter_context(self)
                stack.callback(nn_module.register_module_forward_pre_hook(self._called).remove)
                stack.callback(nn_module.register_module_forward_hook(self._returned).remove)
                self._called(self._unit.module)
                return real(*args, **kwargs)

        return ran

    def sums(self, outputs: Sequence[torch.Tensor]) -> list[Sum]:
        seen = {each for output in outputs for each in self._followed(output)}
        self._are_read(each for each in self._found if each not in seen)  # where no mode sees it
        return super().sums(outputs)

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
        inputs = list(_tensors((args, kwargs)))
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
        storage = out.untyped_storage()
        self._follows.setdefault(storage._cdata, (StorageWeakRef(storage), set()))[1].update(candidates)

    def _followed(self, tensor: torch.Tensor) -> Iterable[_Candidate]:
        return self._follows.get(tensor.untyped_storage()._cdata, (None, ()))[1]

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


def _least(unit: Unit) -> int:
    """Return how many multiplications a product must have."""
    devices = {param.device.type for param in unit.params}
    return max((_WORTH_WHILE.get(device, _WORTH_WHILE["cuda"]) for device in devices), default=0)


def _multiplications(func: Any, out: torch.Tensor, inputs: Sequence[torch.Tensor]) -> int:
    if func is _aten.convolution.default:
        weight = inputs[1]
        return out.numel() * weight.numel() // max(1, weight.shape[0])
    factor = inputs[0] if func in (_aten.mm.default, _aten.bmm.default) else inputs[1]
    return out.numel() * factor.shape[-1]


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
