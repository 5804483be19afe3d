"""What a relay asks of its workers, be it one or several: the value that makes the difference, so that nobody else has to.

A `Solo` does nothing and asks nobody. A `Team` puts its own place of weights and its own reducer at the seams of the EPS,
numbers micro-batches through all workers, and sees to it that all do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

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
    """Give keys by number."""
    return [f"L{i:03d}" for i in range(len(names))]


class WorkerBackend(Protocol):
    """Is whoever trains along: nobody, or other workers.

    Attributes:
        rank, count: of this worker, and how many there are.
        others: what the weighing of micro-batches asks.
        can_rehearse: whether one worker may run passes that the others do not run.
        settings: how they train together.
        lost: the error that tells of a lost worker, if there is one.
    """

    rank: int
    count: int
    batch_peers: Peers
    can_rehearse: bool
    settings: Workers

    @property
    def lost(self) -> WorkerError | None: ...

    def master_init(self, empty: Callable[[int], torch.Tensor]) -> Callable[[Block], None]:
        """Give what finds a place for the weights of a block of the model, once; `empty` makes host memory."""

    def make_weight_source(self, device: Device, host: Ledger) -> WeightSource:
        """Make what knows where weights are."""

    def make_rehearsal_source(self, device: Device, host: Ledger) -> WeightSource:
        """Make the same for passes that train nothing, on another device and with another ledger; blocks are seen whole."""

    def make_disk_stash(self, device: Device, host: Ledger) -> StashStore | None:
        """Say where a stash waits on the disk; None if it has no place there."""

    def make_reducer(self) -> Reducer:
        """Make what happens to gradients before updates."""

    def adopt_blocks(
        self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, facts: FactsFn
    ) -> int:
        """Take what this worker keeps of the blocks of a new relay; returns the number of steps that they have made already."""

    def synchronized(self, what: str, facts: FactsFn) -> AbstractContextManager[None]:
        """Do something with all workers; see `Crew.together`."""

    def unsharded(self) -> AbstractContextManager[None]:
        """Hold all of every block in a block of code that all workers run; inside of another one nothing happens."""

    def storage_unsharded(self) -> AbstractContextManager[None]:
        """Let the EPS's custody show all of every block, in a block of code that all workers run."""

    def editable(self) -> AbstractContextManager[None]:
        """Let layers be edited in a block of code that all workers run."""

    def layer_keys(self, names: Sequence[str]) -> list[str]:
        """Give permanent keys to layers of these names, whose user gave them none."""

    def shard_of(self, block: Block) -> tuple[Layout | None, int]:
        """Say what this worker holds of a block, None for all of it, and in how many elements."""

    def reshard(self, detached: Mapping[Block, OptimizerEntry]) -> None:
        """Hold parts of what is in stacks, and all of what waits beside them, after blocks have changed places."""

    def broadcast_state(self, units: Sequence[Unit]) -> None:
        """Let all workers have the weights that worker 0 has, and buffers that are to be the same; blocks are whole."""

    def make_buffer_check(self, units: Sequence[Unit]) -> Callable[[], None]:
        """Make the check that forwards leave alone what no worker could know of the others."""

    def sign_trace(self, trace: Trace) -> Trace:
        """Say in the trace of what begins now whose it is; returns it."""

    def announce_failure(self, error: BaseException) -> None: ...
    def agree_on_failure(self, error: BaseException, updated: Sequence[str]) -> list[str]: ...
    def gather_items(self, items: Sequence[T], what: str = "") -> list[T]: ...
    def first_micro_batch(self, count: int) -> int: ...

    def refuse(self, what: str, why: str) -> None:
        """Refuse what several workers cannot do."""

    def leave(self) -> None:
        """Make an ordinary model again of what workers hold, if all are there."""

    def close(self) -> None:
        """Join threads, and give up connections."""


class LocalBackend:
    """Is the company of one worker, with its weights in memory."""

    rank, count = 0, 1
    batch_peers: Peers = AloneWithBatches()
    can_rehearse = True
    settings = Workers()
    lost = None

    def master_init(self, empty: Callable[[int], torch.Tensor]) -> Callable[[Block], None]:
        return host_master_init(empty)

    def make_weight_source(self, device: Device, host: Ledger) -> WeightSource:
        return MemoryWeightSource(device, host)

    def make_rehearsal_source(self, device: Device, host: Ledger) -> WeightSource:
        return MemoryWeightSource(device, host)

    def make_disk_stash(self, device: Device, host: Ledger) -> StashStore | None:
        return None

    def make_reducer(self) -> Reducer:
        return LocalReducer()

    def adopt_blocks(
        self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, facts: FactsFn
    ) -> int:
        return 0

    def synchronized(self, what: str, facts: FactsFn) -> AbstractContextManager[None]:
        return nullcontext()

    def unsharded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def storage_unsharded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def editable(self) -> AbstractContextManager[None]:
        return nullcontext()

    layer_keys = staticmethod(numbered_keys)

    def shard_of(self, block: Block) -> tuple[Layout | None, int]:
        return None, block.layout.numel

    def reshard(self, detached: Mapping[Block, OptimizerEntry]) -> None:
        pass

    def broadcast_state(self, units: Sequence[Unit]) -> None:
        pass

    def make_buffer_check(self, units: Sequence[Unit]) -> Callable[[], None]:
        return lambda: None

    def sign_trace(self, trace: Trace) -> Trace:
        return trace

    def announce_failure(self, error: BaseException) -> None:
        pass

    def agree_on_failure(self, error: BaseException, updated: Sequence[str]) -> list[str]:
        return list(updated)

    def gather_items(self, items: Sequence[T], what: str = "") -> list[T]:
        return list(items)

    def first_micro_batch(self, count: int) -> int:
        return 0

    def refuse(self, what: str, why: str) -> None:
        pass

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass


class DistributedBackend:
    """Is the company of several workers.

    Args:
        crew: the workers.
        settings: how they train together.
    """

    can_rehearse = False

    def __init__(self, group: WorkerGroup, settings: Workers) -> None:
        self._group, self.settings = group, settings
        self.rank, self.count, self.batch_peers = group.rank, group.count, group
        self.synchronized, self.announce_failure, self.agree_on_failure = (
            group.synchronized,
            group.announce_failure,
            group.agree_on_failure,
        )
        self.gather_items, self.first_micro_batch = group.gather_items, group.first_micro_batch
        self._sharding: Sharding | None = None
        self._is_unsharded = False

    @property
    def lost(self) -> WorkerError | None:
        return self._group.lost

    def master_init(self, empty: Callable[[int], torch.Tensor]) -> Callable[[Block], None]:
        return host_master_init(empty)

    def make_weight_source(self, device: Device, host: Ledger) -> WeightSource:
        return ShardedWeightSource(device, host, self._group)

    def make_rehearsal_source(self, device: Device, host: Ledger) -> WeightSource:
        return MemoryWeightSource(device, host)

    def make_disk_stash(self, device: Device, host: Ledger) -> StashStore | None:
        return None

    def make_reducer(self) -> Reducer:
        wire = {"fp32": torch.float32, "bf16": torch.bfloat16}[self.settings.wire]
        return DistributedReducer(self._group, per_micro_batch=self.settings.reduce == "ordered", wire=wire)

    def adopt_blocks(
        self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, facts: FactsFn
    ) -> int:
        self._group.elementwise = store.masters.findings.elementwise
        shares = Sharding(self._group, store.masters, host, device.host_empty)
        modes = {name: getattr(self.settings, name) for name in ("reduce", "wire", "buffers")}
        with self.synchronized("make a relay", lambda: {**modes, **facts()}):
            shares.broadcast_weights()
            shares.broadcast_buffers(units)
        shares.shard()
        self._sharding = shares
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
            self._sharding.shard()  # of whatever is whole by now

    def storage_unsharded(self) -> AbstractContextManager[None]:
        return self.unsharded()

    editable = unsharded
    layer_keys = staticmethod(numbered_keys)

    def shard_of(self, block: Block) -> tuple[Layout | None, int]:
        cut = self._group.shard_layout(block)
        return cut.shard(self.rank), cut.shard_numel(self.rank)

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
        """Refuse what several workers cannot do.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{what} is not there for a relay of {self.count} workers: {why}. Nothing was done")

    def leave(self) -> None:
        assert self._sharding is not None
        if self._group.lost is None:
            self._group.leave(self._sharding.unshard)

    def close(self) -> None:
        self._group.close()


def make_backend(
    workers: Workers | dist.ProcessGroup | str | LocalBackend | DistributedBackend | None, model: nn.Module
) -> WorkerBackend:
    """Make the company that a relay of this model is to have, or give the one that is there already.

    Raises:
        ValueError, TypeError: no such thing, or a model that several workers cannot train.
    """
    if workers is None:
        return LocalBackend()
    if isinstance(workers, LocalBackend | DistributedBackend):
        return workers
    settings = resolve_workers(workers)
    if not dist.is_available():
        raise ValueError("workers: this PyTorch was built without torch.distributed")
    made = settings.group == "auto" and not dist.is_initialized()
    rank, count = launcher_rank()
    if made and count == 1:
        return LocalBackend()
    if settings.buffers == "same":
        refuse_batch_norm(model)
    if made:
        init_process_group(rank, count, settings.timeout_s)
    group = dist.group.WORLD if settings.group == "auto" else settings.group
    if dist.get_world_size(group) == 1:
        return LocalBackend()
    return DistributedBackend(WorkerGroup(group, settings.timeout_s, made, settings.network), settings)
