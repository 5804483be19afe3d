"""How much memory a shelf needs at least, and what it does with more."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.eps import Masters
from l2l_core.eps.blocks import Block, Layout
from l2l_core.eps.optimizers import clone_shallow, step_part, without_step_hooks
from l2l_core.shelf.direct_io import PAGE, round_to_pages
from l2l_core.shelf.record_layout import RecordLayout
from l2l_core.trace import format_bytes

_TRIAL_NUMEL = 4096  # elements: state of smaller parameters may be of another kind
_ALIGNMENT_BYTES = 128  # bytes per tensor, for its alignment


class StateSizeTrial:
    """Tells what room to leave for an optimizer's state of parameters that it has not seen yet, by trying it on small ones.

    Args:
        optimizer: whose groups count; it does not hear of the trials.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tried: dict[tuple[int, tuple[int, ...]], float] = {}

    def __call__(self, shape: Sequence[int], index: int = 0) -> int:
        """Count the bytes for a parameter of a shape, in the group of an index."""
        numel, shape = math.prod(shape), tuple(shape)
        if numel > _TRIAL_NUMEL:
            side = math.ceil(_TRIAL_NUMEL ** (1 / len(shape)))
            shape = (side,) * len(shape)
        key = index, shape
        if key not in self._tried:
            self._tried[key] = self._try(*key)
        return math.ceil(self._tried[key] * max(1.0, numel / math.prod(shape)))

    def _try(self, index: int, shape: tuple[int, ...]) -> float:
        toy, optimizer = nn.Parameter(torch.ones(shape)), self._optimizer
        groups = [{**group, "params": [toy] if i == index else []} for i, group in enumerate(optimizer.param_groups)]
        twin = clone_shallow(optimizer, groups, defaultdict(dict))
        for name, value in vars(twin).items():
            if name not in ("param_groups", "state", "defaults") and isinstance(value, dict | list):
                setattr(twin, name, copy.copy(value))  # the optimizer's own must not hear of the toy
        toy.grad = torch.ones(shape)
        with without_step_hooks(optimizer):
            step_part(twin)
        form, tensors = RecordLayout.of(Layout.of([toy]), [twin.state.get(toy)])
        return sum(tensor.nbytes + _ALIGNMENT_BYTES for tensor in tensors.values())


class StateSizes:
    """Tells the same of whole blocks.

    Args:
        masters: the optimizer over them.
    """

    def __init__(self, masters: Masters) -> None:
        self._masters, self._trial = masters, StateSizeTrial(masters.optimizer)
        self._group_of = {p: i for i, group in enumerate(masters.optimizer.param_groups) for p in group["params"]}

    def __call__(self, block: Block, only_trained: bool = False) -> int:
        """Count the bytes for a block, as if all of its parameters were trained, or for those that are."""
        params = [p for p in self._masters.params_of(block) if p.requires_grad or not only_trained]
        return self.of_params(params, [self._group_of.get(p, -1) for p in params])

    def of_params(self, params: Sequence[nn.Parameter], groups: Sequence[int]) -> int:
        """Count the bytes for parameters, given the group of each, -1 for none."""
        return sum(self._trial(p.shape, index) for p, index in zip(params, groups, strict=True) if index >= 0)


def check_in_core_fits(masters: Masters, host_bytes: int) -> None:
    """See whether weights, gradients and state of training in core have room.

    Raises:
        ValueError: they have not.
    """
    room = StateSizes(masters)
    weights = sum(4 * block.layout.used for block in masters.blocks)
    gradients = sum(4 * block.trained.layout.used for block in masters.blocks)
    state = sum(room(block, only_trained=True) for block in masters.blocks)
    if (needed := weights + gradients + state) > host_bytes:
        raise ValueError(
            f"verify compares with training in core, which takes {needed:,} bytes of host memory ({weights:,} for weights, "
            f"{gradients:,} for gradients, {state:,} for the optimizer's state), and may take {host_bytes:,}: allow it more "
            "(host_bytes=), or verify a model with fewer of the same layers. Nothing was done"
        )


class BlockSize(NamedTuple):
    """Is a block in numbers.

    Attributes:
        key: of the block.
        numel: elements of its weights, padding included.
        state: bytes to leave room for, of the optimizer's state.
    """

    key: str
    numel: int
    state: int

    @staticmethod
    def of(block: Block, state: int) -> BlockSize:
        """Measure a block, for whose state so many bytes are left."""
        return BlockSize(block.key, block.layout.numel, state)

    @property
    def weights(self) -> int:
        """Bytes of a buffer for its weights: whole pages."""
        return round_to_pages(4 * self.numel)

    @property
    def record(self) -> int:
        """Bytes of a buffer for its record: whole pages."""
        return round_to_pages(self.weights + self.state)

    def load_bytes(self, casts: bool) -> int:
        """Count the bytes of a pool that its load needs."""
        return self.weights + PAGE + (round_to_pages(2 * self.numel) + PAGE if casts else 0)


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """Says what of memory goes where.

    Attributes:
        loads: bytes of buffers for the weights that are lent at a time.
        record: bytes of the buffer for the largest block's record.
        made: bytes of state that the optimizer makes in a block's first update, before it lies in a buffer.
        says: what needs them, for messages.
    """

    load_bytes: int
    record_bytes: int
    new_state_bytes: int
    description: str

    @staticmethod
    def of(units: Sequence[tuple[str, Sequence[BlockSize]]], ahead: int, casts: bool) -> MemorySizes:
        """Count them for a shell, which comes first, and its layers, each with its key and blocks."""
        shell, *layers = ((key, sum(block.load_bytes(casts) for block in blocks)) for key, blocks in units)
        widest = max(layers, key=lambda pair: pair[1])
        blocks = dict.fromkeys(block for _, blocks in units for block in blocks)
        largest = max(blocks, key=lambda block: block.record)
        loads = max(shell[1], (ahead + 1) * widest[1])
        record, made = largest.record + PAGE, max(block.state for block in blocks)
        what = "the shell" if loads == shell[1] else f"{ahead + 1} layers as {widest[0]} that load"
        says = (
            f"{format_bytes(loads)} for the weights of {what}, {format_bytes(record)} for weights and state of "
            f"{largest.key}, {format_bytes(made)} for state while the optimizer makes it"
        )
        return MemorySizes(loads, record, made, says)

    @property
    def min_bytes(self) -> int:
        """The smallest memory that works."""
        return self.load_bytes + self.record_bytes + self.new_state_bytes

    @property
    def max_useful_bytes(self) -> int:
        """Memory beyond which nothing gets faster: three records, and twice the weights that are lent at a time."""
        return self.min_bytes + 2 * self.record_bytes + self.load_bytes

    def split(self, memory_bytes: int) -> tuple[int, int]:
        """Give the pools of loads and of records their bytes.

        Further memory goes to two more records, so that one is read and one written while a third is updated; then to weights
        that are read ahead.

        Raises:
            ValueError: it does not suffice; names the smallest that does.
        """
        rest = memory_bytes - self.min_bytes
        if rest < 0:
            raise ValueError(
                f"memory_bytes={memory_bytes:,}: the smallest that works is {self.min_bytes:,}, which is {self.description}. Give the "
                "shelf as much, load fewer layers ahead (RelayConfig(ahead=...)), or cut the model into smaller layers "
                "(layers=...). Nothing was written"
            )
        records = self.record_bytes + min(rest, 2 * self.record_bytes)
        return memory_bytes - self.new_state_bytes - records, records
