"""Interface between a relay and its workers, for a single process and for several.

`DistributedBackend` supplies the weight source and the reducer of the EPS, numbers micro-batches across workers, and keeps all
workers on the same operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from l2l_core.batches import NoPeers as AloneWithBatches
from l2l_core.batches import Peers
from l2l_core.devices import Device, Ledger, StashStore
from l2l_core.eps import LayerStore, LocalReducer, MemoryWeightSource, OptimizerEntry, Reducer, WeightSource
from l2l_core.eps.blocks import Block, Layout, Unit, host_master_init
from l2l_core.trace import Trace
from l2l_core.workers.buffer_checks import BufferCheck, refuse_batch_norm
from l2l_core.workers.distributed_reducer import DistributedReducer
from l2l_core.workers.errors import WorkerError
from l2l_core.workers.rendezvous import init_process_group, launcher_rank
from l2l_core.workers.sharded_weight_source import ShardedWeightSource
from l2l_core.workers.sharding import Sharding
from l2l_core.workers.worker_group import WorkerGroup
from l2l_core.workers.worker_settings import Workers, resolve_workers

T = TypeVar("T")
FactsFn = Callable[[], Mapping[str, str]]


def numbered_keys(names: Sequence[str]) -> list[str]:
    """Return the keys "L000", "L001", ..."""
    return [f"L{i:03d}" for i in range(len(names))]


class WorkerBackend:
    """Interface between a relay and its workers; the defaults are those of a single process with weights in memory.

    Attributes:
        rank: rank of this worker.
        count: number of workers.
        batch_peers: exchange of the counts by which micro-batches are weighed.
        can_rehearse: whether one worker may run passes that the others do not run.
        settings: settings of the workers.
    """

    rank, count = 0, 1
    batch_peers: Peers = AloneWithBatches()
    can_rehearse = True
    settings = Workers()

    @property
    def lost(self) -> WorkerError | None:
        """The error of a lost worker, or None."""
        return None

    def master_init(self, empty: Callable[[int], torch.Tensor]) -> Callable[[Block], None]:
        """Return the function that places the weights of a new block; `empty` allocates host memory."""
        return host_master_init(empty)

    def make_weight_source(self, device: Device, host: Ledger) -> WeightSource:
        return MemoryWeightSource(device, host)

    def make_rehearsal_source(self, device: Device, host: Ledger) -> WeightSource:
        """Make the weight source of passes without updates, with another device and ledger; blocks are whole."""
        return MemoryWeightSource(device, host)

    def make_disk_stash(self, device: Device, host: Ledger) -> StashStore | None:
        """Make the store for a stash on disk, or return None if the backend has no disk."""
        return None

    def make_reducer(self) -> Reducer:
        return LocalReducer()

    def adopt_blocks(
        self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, facts: FactsFn
    ) -> int:
        """Take over the blocks of a new relay; return the number of steps that they have been trained for."""
        return 0

    def synchronized(self, what: str, facts: FactsFn) -> AbstractContextManager[None]:
        """Run a block of code on all workers; see `WorkerGroup.synchronized`."""
        return nullcontext()

    def unsharded(self) -> AbstractContextManager[None]:
        """Hold every block whole in a block of code that all workers run; reentrant."""
        return nullcontext()

    def storage_unsharded(self) -> AbstractContextManager[None]:
        """Make the block storage of the EPS give whole blocks in a block of code that all workers run."""
        return nullcontext()

    def editable(self) -> AbstractContextManager[None]:
        """Allow edits of layers in a block of code that all workers run."""
        return nullcontext()

    def layer_keys(self, names: Sequence[str]) -> list[str]:
        """Return permanent keys for layers with these names."""
        return numbered_keys(names)

    def shard_of(self, block: Block) -> tuple[Layout | None, int]:
        """Return the layout of this worker's shard of a block (None if whole) and its number of elements."""
        return None, block.layout.numel

    def reshard(self, detached: Mapping[Block, OptimizerEntry]) -> None:
        """After an edit, shard the blocks of stacks and make those of detached layers whole."""

    def broadcast_state(self, units: Sequence[Unit]) -> None:
        """Copy weights, and buffers that must be equal, from worker 0 to all; blocks are whole."""

    def make_buffer_check(self, units: Sequence[Unit]) -> Callable[[], None]:
        """Make the check that no forward changes a buffer."""
        return lambda: None

    def sign_trace(self, trace: Trace) -> Trace:
        """Add this worker to the trace of the present operation; return the trace."""
        return trace

    def announce_failure(self, error: BaseException) -> None:
        """Report a failure to the others in the background."""

    def agree_on_failure(self, error: BaseException, updated: Sequence[str]) -> list[str]:
        """Report a failure; return the keys of all layers that keep new weights on any worker."""
        return list(updated)

    def gather_items(self, items: Sequence[T], what: str = "gather losses") -> list[T]:
        """Concatenate the items of all workers, worker 0 first; `what` is the purpose, for messages."""
        return list(items)

    def first_micro_batch(self, count: int) -> int:
        """Return the index of this worker's first micro-batch in the whole batch."""
        return 0

    def refuse(self, what: str, why: str) -> None:
        """Raise if there are several workers, which cannot do this."""

    def leave(self) -> None:
        """Make the model whole again, if all workers take part."""

    def close(self) -> None:
        """Join threads and close connections."""


class LocalBackend(WorkerBackend):
    """Backend of a single process."""


class DistributedBackend(WorkerBackend):
    """Backend of several workers with their shards in memory.

    Args:
        group: the workers.
        settings: settings of the workers.
    """

    can_rehearse = False

    def __init__(self, group: WorkerGroup, settings: Workers) -> None:
        self._group, self.settings = group, settings
        self.rank, self.count, self.batch_peers = group.rank, group.count, group
        self.synchronized, self.gather_items = group.synchronized, group.gather_items
        self.announce_failure, self.agree_on_failure = group.announce_failure, group.agree_on_failure
        self.first_micro_batch = group.first_micro_batch
        self._sharding: Sharding | None = None
        self._is_unsharded = False

    @property
    def lost(self) -> WorkerError | None:
        return self._group.lost

    def make_weight_source(self, device: Device, host: Ledger) -> WeightSource:
        return ShardedWeightSource(device, host, self._group)

    def make_reducer(self) -> Reducer:
        wire = {"fp32": torch.float32, "bf16": torch.bfloat16}[self.settings.wire]
        return DistributedReducer(self._group, per_micro_batch=self.settings.reduce == "ordered", wire=wire)

    def adopt_blocks(
        self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, facts: FactsFn
    ) -> int:
        self._group.elementwise = store.masters.findings.elementwise
        sharding = Sharding(self._group, store.masters, host, device.host_empty)
        modes = {name: getattr(self.settings, name) for name in ("reduce", "wire", "buffers")}
        with self.synchronized("make a relay", lambda: {**modes, **facts()}):
            sharding.broadcast_weights()
            sharding.broadcast_buffers(units)
        sharding.shard()
        self._sharding = sharding
        return 0

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        assert self._sharding is not None
        if self._is_unsharded:
            yield
            return
        self._is_unsharded = True
        try:
            self._sharding.unshard()
            yield
        finally:
            self._is_unsharded = False
            self._sharding.shard()  # the blocks that are whole by now

    def storage_unsharded(self) -> AbstractContextManager[None]:
        return self.unsharded()

    editable = unsharded

    def shard_of(self, block: Block) -> tuple[Layout | None, int]:
        layout = self._group.shard_layout(block)
        return layout.shard(self.rank), layout.shard_numel(self.rank)

    def reshard(self, detached: Mapping[Block, OptimizerEntry]) -> None:
        assert self._sharding is not None
        self._sharding.shard()
        self._sharding.unshard_detached(detached)

    def broadcast_state(self, units: Sequence[Unit]) -> None:
        assert self._sharding is not None
        self._sharding.broadcast_weights()
        if self.settings.buffers == "same":
            self._sharding.broadcast_buffers(units)

    def make_buffer_check(self, units: Sequence[Unit]) -> Callable[[], None]:
        return BufferCheck(units) if self.settings.buffers == "same" else lambda: None

    def sign_trace(self, trace: Trace) -> Trace:
        trace.settings |= {"workers": self.count, "reduce": self.settings.reduce, "wire": self.settings.wire}
        return self._group.sign_trace(trace)

    def refuse(self, what: str, why: str) -> None:
        """Refuse an operation that several workers cannot do.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{what} is not possible with {self.count} workers: {why}. Nothing was done")

    def leave(self) -> None:
        assert self._sharding is not None
        if self._group.lost is None:
            self._group.leave(self._sharding.unshard)

    def close(self) -> None:
        self._group.close()


def make_backend(workers: Workers | dist.ProcessGroup | str | WorkerBackend | None, model: nn.Module) -> WorkerBackend:
    """Make the backend for a relay of this model, or return `workers` if it is one.

    Raises:
        ValueError: the group cannot be made, or several workers cannot train the model.
        TypeError: `workers` has another type.
    """
    if workers is None:
        return LocalBackend()
    if isinstance(workers, WorkerBackend):
        return workers
    settings = resolve_workers(workers)
    if not dist.is_available():
        raise ValueError("workers: this PyTorch was built without torch.distributed")
    make_group = settings.group == "auto" and not dist.is_initialized()
    rank, count = launcher_rank()
    if make_group and count == 1:
        return LocalBackend()
    if settings.buffers == "same":
        refuse_batch_norm(model)
    if make_group:
        init_process_group(rank, count, settings.timeout_s)
    group = dist.group.WORLD if settings.group == "auto" else settings.group
    assert isinstance(group, dist.ProcessGroup)
    if dist.get_world_size(group) == 1:
        return LocalBackend()
    return DistributedBackend(WorkerGroup(group, settings.timeout_s, make_group, settings.network), settings)
