"""How much memory a shelf needs at least, and what it does with more."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from l2l_core.eps import Masters
from l2l_core.eps.blocks import Block, Layout, Unit
from l2l_core.eps.optimizers import over, silent, step_alone
from l2l_core.shelf.direct import PAGE, pages
from l2l_core.shelf.form import Form
from l2l_core.trace import format_bytes

_TOY = 4096  # elements: state of smaller parameters may be of another kind
_SLACK = 128  # bytes per tensor, for its alignment


class StateRoom:
    """Tells what an optimizer will keep of parameters that it has not seen yet, by trying it on small ones.

    Args:
        masters: the optimizer over them.
    """

    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        self._group_of = {p: i for i, group in enumerate(masters.optimizer.param_groups) for p in group["params"]}
        self._tried: dict[tuple[int, tuple[int, ...]], float] = {}

    def __call__(self, block: Block, only_trained: bool = False) -> int:
        """Count the bytes for a block, as if all of its parameters were trained, or for those that are."""
        params = [p for p in self._masters.params_of(block) if p in self._group_of]
        return sum(self._of(p) for p in params if p.requires_grad or not only_trained)

    def _of(self, param: nn.Parameter) -> int:
        shape = tuple(param.shape)
        if param.numel() > _TOY:
            side = math.ceil(_TOY ** (1 / len(shape)))
            shape = (side,) * len(shape)
        key = self._group_of[param], shape
        if key not in self._tried:
            self._tried[key] = self._try(*key)
        return math.ceil(self._tried[key] * max(1.0, param.numel() / math.prod(shape)))

    def _try(self, index: int, shape: tuple[int, ...]) -> float:
        toy, optimizer = nn.Parameter(torch.ones(shape)), self._masters.optimizer
        groups = [{**group, "params": [toy] if i == index else []} for i, group in enumerate(optimizer.param_groups)]
        twin = over(optimizer, groups, defaultdict(dict))
        for name, value in vars(twin).items():
            if name not in ("param_groups", "state", "defaults") and isinstance(value, dict | list):
                setattr(twin, name, copy.copy(value))  # the optimizer's own must not hear of the toy
        toy.grad = torch.ones(shape)
        with silent(optimizer):
            step_alone(twin)
        form, tensors = Form.of(Layout.of([toy]), [twin.state.get(toy)])
        return sum(tensor.nbytes + _SLACK for tensor in tensors.values())


@dataclass(frozen=True, slots=True)
class Sizes:
    """Says what of memory goes where.

    Attributes:
        loads: bytes of buffers for the weights that are lent at a time.
        record: bytes of the buffer for the largest block's record.
        made: bytes of state that the optimizer makes in a block's first update, before it lies in a buffer.
        says: what needs them, for messages.
    """

    loads: int
    record: int
    made: int
    says: str

    @staticmethod
    def of(units: Sequence[Unit], room: StateRoom, ahead: int, casts: bool) -> Sizes:
        """Count them for a shell, which comes first, and its layers."""
        shell, *layers = ((unit, sum(_to_lend(block, casts) for block in unit.blocks)) for unit in units)
        widest = max(layers, key=lambda pair: pair[1])
        blocks = dict.fromkeys(block for unit in units for block in unit.blocks)
        largest = max(blocks, key=lambda block: record_bytes(block, room))
        loads = max(shell[1], (ahead + 1) * widest[1])
        record, made = record_bytes(largest, room) + PAGE, max(map(room, blocks))
        what = "the shell" if loads == shell[1] else f"{ahead + 1} layers as {widest[0].key} that load"
        says = (
            f"{format_bytes(loads)} for the weights of {what}, {format_bytes(record)} for weights and state of "
            f"{largest.key}, {format_bytes(made)} for state while the optimizer makes it"
        )
        return Sizes(loads, record, made, says)

    @property
    def least(self) -> int:
        """The smallest memory that works."""
        return self.loads + self.record + self.made

    def shared_out(self, memory_bytes: int) -> tuple[int, int]:
        """Give the pools of loads and of records their bytes.

        Further memory goes to two more records, so that one is read and one written while a third is updated; then to weights
        that are read ahead.

        Raises:
            ValueError: it does not suffice; names the smallest that does.
        """
        rest = memory_bytes - self.least
        if rest < 0:
            raise ValueError(
                f"memory_bytes={memory_bytes:,}: the smallest that works is {self.least:,}, which is {self.says}. Give the "
                "shelf as much, load fewer layers ahead (RelayConfig(ahead=...)), or cut the model into smaller layers "
                "(layers=...). Nothing was written"
            )
        records = self.record + min(rest, 2 * self.record)
        return memory_bytes - self.made - records, records


def record_bytes(block: Block, room: StateRoom) -> int:
    """Count the bytes of a buffer for a block's record: whole pages."""
    return pages(pages(4 * block.layout.numel) + room(block))


def _to_lend(block: Block, casts: bool) -> int:
    numel = block.layout.numel
    return pages(4 * numel) + PAGE + (pages(2 * numel) + PAGE if casts else 0)
