"""Memory that a shelf needs, and its division between the buffer pools, for the present blocks and after edits."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.eps import Masters, OptimizerEntry
from l2l_core.eps.blocks import Block, Layout, Unit
from l2l_core.eps.optimizers import clone_shallow, step_part, with_members, without_step_hooks
from l2l_core.shelf.direct_io import PAGE, BufferPool, PoolBuffer, round_to_pages
from l2l_core.shelf.record_store import RecordLayout
from l2l_core.trace import format_bytes

_TRIAL_NUMEL = 4096  # elements: the state of smaller parameters may have another form
_ALIGNMENT_BYTES = 128  # bytes per tensor, for its alignment


class StateSizeTrial:
    """Size of an optimizer's state for new parameters, measured with steps on small ones."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tried: dict[tuple[int, tuple[int, ...]], float] = {}

    def __call__(self, shape: Sequence[int], index: int = 0) -> int:
        """Return the bytes of state for a parameter of `shape` in the parameter group `index`."""
        numel, shape = math.prod(shape), tuple(shape)
        if not numel:  # as large as one element's
            shape = (1,)
        if numel > _TRIAL_NUMEL:
            side = math.ceil(_TRIAL_NUMEL ** (1 / len(shape)))
            shape = (side,) * len(shape)
        key = index, shape
        if key not in self._tried:
            self._tried[key] = self._try(*key)
        return math.ceil(self._tried[key] * max(1.0, numel / math.prod(shape)))

    def _try(self, index: int, shape: tuple[int, ...]) -> float:
        param, optimizer = nn.Parameter(torch.ones(shape)), self._optimizer
        for known in optimizer.param_groups[index]["params"][:1]:
            vars(param).update(vars(known))  # attributes that the optimizer may read
        groups = [{**group, "params": [param] if i == index else []} for i, group in enumerate(optimizer.param_groups)]
        clone = clone_shallow(optimizer, groups, defaultdict(dict))
        for each in with_members(clone):
            for name, value in vars(each).items():
                if name not in ("param_groups", "state", "defaults") and isinstance(value, dict | list):
                    setattr(each, name, copy.copy(value))  # else the trial would change the optimizer's own
        param.grad = torch.ones(shape)
        with without_step_hooks(optimizer):
            step_part(clone)
        _, tensors = RecordLayout.of(Layout.of([param]), [clone.state.get(param)])
        return sum(tensor.nbytes + _ALIGNMENT_BYTES for tensor in tensors.values())


class StateSizes:
    """Sizes of the optimizer state of whole blocks."""

    def __init__(self, masters: Masters) -> None:
        self._masters, self._trial = masters, StateSizeTrial(masters.optimizer)
        self._group_of = {p: i for i, group in enumerate(masters.optimizer.param_groups) for p in group["params"]}

    def __call__(self, block: Block, only_trained: bool = False) -> int:
        """Return the bytes of state for all parameters of a block or shard, or only for the trained ones."""
        params = [p for p in self._masters.params_of(block) if p.requires_grad or not only_trained]
        return self.of_params(params, [self._group_of.get(p, -1) for p in params])

    def of_whole(self, block: Block) -> int:
        """Return the bytes of state for the trained parameters of a whole block."""
        groups = [self._group_of.get(p, -1) for p in self._masters.params_of(block)]
        trained = block.trained.indices
        return self.of_params([block.params[i] for i in trained], [groups[i] for i in trained])

    def of_params(self, params: Sequence[nn.Parameter], groups: Sequence[int]) -> int:
        """Return the bytes of state for parameters, given the index of each one's group, -1 for none."""
        return sum(self._trial(p.shape, index) for p, index in zip(params, groups, strict=True) if index >= 0)


def check_in_core_fits(masters: Masters, host_bytes: int) -> None:
    """Check that host memory suffices for training in core.

    Raises:
        ValueError: it does not.
    """
    state_sizes = StateSizes(masters)
    weights = sum(block.layout.nbytes if block.in_bytes else 4 * block.layout.used for block in masters.blocks)
    gradients = sum(4 * block.trained.layout.used for block in masters.blocks)
    state = sum(state_sizes.of_whole(block) for block in masters.blocks)
    if (needed := weights + gradients + state) > host_bytes:
        raise ValueError(
            f"verify compares with training in core, which takes {needed:,} bytes of host memory ({weights:,} for weights, "
            f"{gradients:,} for gradients, {state:,} for the optimizer's state) and is limited to {host_bytes:,}: raise "
            "host_bytes=, or verify a model with fewer of the same layers. Nothing was done"
        )


class BlockSize(NamedTuple):
    """Size of a block.

    Attributes:
        key: key of the block.
        numel: elements of its weights in float32, padding included.
        state: bytes reserved for its optimizer state.
    """

    key: str
    numel: int
    state: int

    @staticmethod
    def of(block: Block, state: int) -> BlockSize:
        """Return the size of a block with `state` bytes of optimizer state."""
        return BlockSize(block.key, block.master_layout.nbytes // 4, state)

    @property
    def weights(self) -> int:
        """Bytes of a buffer for its weights, whole pages."""
        return round_to_pages(4 * self.numel)

    @property
    def record(self) -> int:
        """Bytes of a buffer for its record, whole pages."""
        return round_to_pages(self.weights + self.state)

    def load_bytes(self, casts: bool) -> int:
        """Return the bytes of the pool that one load of the block needs."""
        return self.weights + PAGE + (round_to_pages(2 * self.numel) + PAGE if casts else 0)


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """Memory that a shelf needs, by purpose.

    Attributes:
        load_bytes: buffers for the weights of concurrent loads, or between two steps for the record of a frozen block.
        record_bytes: buffer for the largest record that a step updates.
        new_state_bytes: state that the optimizer creates in the first update of a block, before it is copied to a buffer.
        description: the same in words, for messages.
    """

    load_bytes: int
    record_bytes: int
    new_state_bytes: int
    description: str

    @staticmethod
    def of(
        units: Sequence[tuple[str, Sequence[BlockSize]]], ahead: int, casts: bool, frozen: Collection[str]
    ) -> MemorySizes:
        """Return the memory for units, each with its key and blocks; the shell is the first.

        `casts`: loads cannot cast weights, so that a buffer in the device's type is needed too. `frozen`: keys of the blocks
        that no step updates.
        """
        shell, *layers = ((key, sum(block.load_bytes(casts) for block in blocks)) for key, blocks in units)
        widest = max(layers, key=lambda pair: pair[1])
        blocks = dict.fromkeys(block for _, blocks in units for block in blocks)
        updated = [block for block in blocks if block.key not in frozen] or [*blocks]
        largest = max(updated, key=lambda block: block.record)
        record, new_state = largest.record + PAGE, max(block.state for block in updated)
        kept = max(blocks, key=lambda block: block.record)
        kept_bytes = kept.record + PAGE if kept.record > largest.record else 0
        loads = max(shell[1], (ahead + 1) * widest[1], kept_bytes)
        loaded = f"the weights of {ahead + 1} layers of the size of {widest[0]}"
        if loads in (shell[1], kept_bytes):
            loaded = "the weights of the shell" if loads == shell[1] else f"the record of {kept.key}, which is frozen"
        description = (
            f"{format_bytes(loads)} for {loaded}, {format_bytes(record)} for weights and state of "
            f"{largest.key}, {format_bytes(new_state)} for state while the optimizer makes it"
        )
        return MemorySizes(loads, record, new_state, description)

    @property
    def min_bytes(self) -> int:
        """The smallest memory that works."""
        return self.load_bytes + self.record_bytes + self.new_state_bytes

    @property
    def max_useful_bytes(self) -> int:
        """Memory beyond which nothing gets faster: three records, and the weights of loads twice."""
        return self.min_bytes + 2 * self.record_bytes + self.load_bytes

    def split(self, memory_bytes: int) -> tuple[int, int]:
        """Return the bytes of the pools for weights and for records.

        Memory beyond the minimum is given to two more records, so that one can be read and one written while a third is
        updated, and then to weights that are read ahead.

        Raises:
            ValueError: memory does not suffice; names the smallest that does.
        """
        rest = memory_bytes - self.min_bytes
        if rest < 0:
            raise ValueError(
                f"memory_bytes={memory_bytes:,}: the smallest that works is {self.min_bytes:,}: {self.description}. Give "
                "the shelf as much, load fewer layers ahead (RelayConfig(ahead=...)), or divide the model into smaller layers "
                "(layers=...). Nothing was written"
            )
        records = self.record_bytes + min(rest, 2 * self.record_bytes)
        return memory_bytes - self.new_state_bytes - records, records


class MemoryBudget:
    """Sizes of all blocks, and the limits of the pools that follow from them.

    Attributes:
        state_sizes: bytes reserved for the optimizer state of a block.
    """

    def __init__(
        self, memory_bytes: int, ahead: int, casts: bool, masters: Masters, loads: BufferPool, updates: BufferPool
    ) -> None:
        self.memory_bytes, self.ahead, self.casts = memory_bytes, ahead, casts
        self.loads, self.updates = loads, updates
        self.state_sizes = StateSizes(masters)
        self._measured: dict[Block, BlockSize] = {}
        self._units: Sequence[Unit] = ()
        self._new_units: list[Unit] = []  # of the edit in progress

    @property
    def blocks(self) -> dict[Block, BlockSize]:
        """Sizes of the blocks of all units."""
        return {block: self._measured[block] for unit in self._units for block in unit.blocks}

    def size_of(self, block: Block) -> int:
        """Return the bytes of a buffer for a block's record."""
        return self._measured[block].record

    def acquire_record(self, block: Block) -> PoolBuffer | None:
        """Return a buffer for a block's record, or None if there is no room now."""
        return self.updates.acquire(self.size_of(block))

    def lease_record(self, block: Block, min_bytes: int = 0) -> AbstractContextManager[torch.Tensor]:
        """Lend such a buffer, of at least `min_bytes`, in a block of code between two steps."""
        nbytes = max(self.size_of(block), min_bytes)
        # A frozen block may have no room among those that a step updates; nothing is loaded between steps.
        return (self.updates if nbytes + PAGE <= self.updates.limit_bytes else self.loads).lease(nbytes)

    def sizes(self, ahead: int) -> MemorySizes:
        """Return the memory needed with `ahead` layers loaded ahead."""
        return self._sizes(self._units, ahead)

    def plan_split(self, units: Sequence[Unit]) -> Callable[[], None]:
        """Divide memory for these units, the shell first; the function returned applies the limits between two steps.

        Raises:
            ValueError: memory does not suffice; names the smallest that does.
        """
        for block in {block for unit in units for block in unit.blocks} - self._measured.keys():
            self._measured[block] = BlockSize.of(block, self.state_sizes(block))
        limits = self._sizes(units, self.ahead).split(self.memory_bytes)

        def apply() -> None:
            self._units = tuple(units)
            self.end_edit()
            self.loads.limit_bytes, self.updates.limit_bytes = limits

        return apply

    def check_fits(self, unit: Unit, entries: Mapping[Block, OptimizerEntry]) -> None:
        """Check that memory suffices with a new layer, and the earlier ones of this edit, added.

        Raises:
            ValueError: it does not; names the smallest that does.
        """
        for block, entry in entries.items():
            self._measured[block] = BlockSize.of(block, self.state_sizes.of_params(entry.masters, entry.groups))
        self._sizes([*self._units, *self._new_units, unit], self.ahead).split(self.memory_bytes)
        self._new_units.append(unit)

    def end_edit(self) -> None:
        """End an edit, after its commit or rollback."""
        self._new_units.clear()

    def forget_blocks(self, blocks: Iterable[Block]) -> None:
        """Remove deleted blocks."""
        for block in blocks:
            self._measured.pop(block, None)

    def clear_pools(self) -> None:
        """Free the buffers in the pools."""
        self.loads.close()
        self.updates.close()

    def _sizes(self, units: Sequence[Unit], ahead: int) -> MemorySizes:
        by_unit = [(unit.key, [self._measured[block] for block in unit.blocks]) for unit in units]
        frozen = {block.key for unit in units for block in unit.blocks if not any(block.trained.flags)}
        return MemorySizes.of(by_unit, ahead, self.casts, frozen)
