"""Which product a recompute of a layer may leave out: the largest of which backward reads nothing. The metered step finds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as nn_module

from l2l_core._torch import TorchDispatchMode, count_dispatch_modes
from l2l_core.eps.blocks import Unit
from l2l_core.model import key_of, modules_of, parts_of
from l2l_core.step.micro_batch.recomputes import Run, Sum, Whole
from l2l_core.step.micro_batch.unread import HAND_ON, PRODUCTS, READ_NOTHING
from l2l_core.step.traffic import LastProduct, Metered, before_reads, tensors_in

# Multiplications from which on to leave a product out gains more than to watch what is around it costs (0.4 ms, against
# 1.5 ms of one core). Elsewhere than on the CPU nobody has measured it, and nothing is left out.
WORTH_WHILE: dict[str, float] = {"cpu": 2**26}
_NEVER = float("inf")


def search_in(unit: Unit, inputs: Sequence[torch.Tensor], metered: Metered) -> Whole | None:
    """Return a run of a layer that looks for its last product; None if none is worth it, or could not be seen."""
    least = _least(unit)
    if _most(unit, inputs) < least or unit.key in metered.gives_aside or _is_closed(unit.module):
        return None
    return _Search(unit, metered, least)


def _is_closed(layer: nn.Module) -> bool:
    """Whether code of it runs where nobody sees it: a compiled part, a script."""
    return bool(parts_of(layer)) or any(isinstance(module, torch.jit.ScriptModule) for module in modules_of(layer))


def _least(unit: Unit) -> float:
    """Return how many multiplications a product must have."""
    return max((WORTH_WHILE.get(param.device.type, _NEVER) for param in unit.params), default=_NEVER)


def _most(unit: Unit, inputs: Sequence[torch.Tensor]) -> int:
    """Return about how many multiplications its largest product with a weight can have: no small layer need be searched."""
    rows = max(
        (each.numel() // (each.shape[-1] or 1) if 0 < each.dim() < 4 else each.numel() for each in inputs), default=0
    )
    return rows * max((param.numel() for param in unit.params), default=0)


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


class _Search(Whole, TorchDispatchMode):
    """Watches a whole recompute, for the largest product of which backward reads nothing, nor anything that comes of it."""

    def __init__(self, unit: Unit, metered: Metered, least: float) -> None:
        super().__init__()
        self._unit, self._metered, self._least = unit, metered, least
        self._found: list[_Candidate] = []
        self._follows: dict[int, tuple[StorageWeakRef, set[_Candidate]]] = {}
        self._open: list[_Open] = []
        self._calls: Counter[nn.Module] = Counter()
        self._thread = get_ident()  # the layer may call modules in others

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def around(self, real: Run) -> Run:
        def ran(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                stack.enter_context(before_reads(self._read_past))
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
        inputs = tensors_in(*args, kwargs)
        read = [] if func in READ_NOTHING else inputs
        before = {each for tensor in read for each in self._followed(tensor) if not each.is_read}
        if before and func not in HAND_ON:
            self._are_read(before)
        elif before:
            self._follow(out, before)
        if func in PRODUCTS:
            self._made(out, func, inputs)
        return out

    def _made(self, out: torch.Tensor, func: Any, inputs: Sequence[torch.Tensor]) -> None:
        for each in self._open:
            each.products += 1
        here = self._open[-1]
        is_plain = all(map(_is_plain, inputs))
        if is_plain and here.depth == self._open[0].depth:
            candidate = _Candidate(here.module, here.products, _multiplications(func, out, inputs))
            if candidate.multiplications >= self._least:
                self._found.append(candidate)
                self._follow(out, {candidate})

    def _follow(self, out: torch.Tensor, candidates: set[_Candidate]) -> None:
        ref = StorageWeakRef(out.untyped_storage())
        self._follows.setdefault(ref.cdata, (ref, set()))[1].update(candidates)

    def _followed(self, tensor: torch.Tensor) -> Iterable[_Candidate]:
        return self._follows.get(key_of(tensor), (None, ()))[1]

    def _read_past(self, tensor: torch.Tensor) -> None:
        self._are_read(self._followed(tensor))

    def _are_read(self, candidates: Iterable[_Candidate]) -> None:
        for each in candidates:
            each.is_read = True

    def _called(self, module: nn.Module, *_: Any) -> None:
        self._calls[module] += 1
        if get_ident() == self._thread:
            self._open.append(_Open(module, count_dispatch_modes()))

    def _returned(self, module: nn.Module, *_: Any) -> None:
        while get_ident() == self._thread and len(self._open) > 1 and self._open.pop().module is not module:
            pass  # a call that ended in an exception


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested


def _multiplications(func: Any, out: torch.Tensor, inputs: Sequence[torch.Tensor]) -> int:
    aten = torch.ops.aten
    if func is aten.convolution.default:
        weight = inputs[1]
        return out.numel() * weight.numel() // max(1, weight.shape[0])
    factor = inputs[0] if func in (aten.mm.default, aten.bmm.default) else inputs[1]
    return out.numel() * factor.shape[-1]
