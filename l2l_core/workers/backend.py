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

from l2l_core._torch import NormBase
from l2l_core.batches import NoPeers as AloneWithBatches
from l2l_core.batches import Peers
from l2l_core.devices import Device, Ledger, StashStore
from l2l_core.eps import LayerStore, OptimizerEntry, Reducer, WeightSource
from l2l_core.eps.blocks import Block, Layout, Unit, host_master_init
from l2l_core.trace import Trace
from l2l_core.workers.distributed_reducer import DistributedReducer
from l2l_core.workers.health_monitor import WorkerError
from l2l_core.workers.rendezvous import find_launcher, init_process_group
from l2l_core.workers.sharded_weight_source import LeaseShard, ShardedWeightSource, lease_master
from l2l_core.workers.sharding import Sharding
from l2l_core.workers.worker_group import WorkerGroup
from l2l_core.workers.worker_settings import Workers

T = TypeVar("T")
FactsFn = Callable[[], Mapping[str, str]]


def numbered_keys(names: Sequence[str]) -> list[str]:
    """Return the keys "L000", "L001", ..."""
    return [f"L{i:03d}" for i in range(len(names))]


class WorkerBackend:
    """Interface between a relay and its workers; the defaults are those of a single process with weights in memory."""

    rank, count = 0, 1
    shares_params = True  # the optimizer may have the model's own parameters
    keeps_dtypes = True  # frozen parameters may have other dtypes than float32
    batch_peers: Peers = AloneWithBatches()  # exchange of the counts by which micro-batches are weighed
    settings = Workers()
    lost: WorkerError | None = None  # the error of a lost worker

    def master_init(self, empty: Callable[[int], torch.Tensor]) -> Callable[[Block], None]:
        """Return the function that places the weights of a new block; `empty` allocates host memory."""
        return host_master_init(empty)

    def make_weight_source(self, device: Device, host: Ledger) -> WeightSource:
        return WeightSource(device, host)

    def make_rehearsal_source(self, device: Device, host: Ledger) -> WeightSource:
        """Make the weight source of passes without updates, with another device and ledger; blocks are whole."""
        return WeightSource(device, host)

    def make_disk_stash(self, device: Device, host: Ledger) -> StashStore | None:
        """Make the store for a stash on disk, or return None if the backend has no disk."""
        return None

    def make_reducer(self, has_batch_loss: bool) -> Reducer:
        """Make the reducer of gradients; with `has_batch_loss`, a loss of the whole batch adds a part to them."""
        return Reducer()

    def initial_seed(self) -> int:
        """Return PyTorch's seed, of worker 0."""
        return torch.initial_seed()

    def adopt_blocks(
        self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, facts: FactsFn
    ) -> int:
        """Take over the blocks of a new relay; return the number of steps that they have been trained for."""
        return 0

    def synchronized(self, what: str, facts: FactsFn) -> AbstractContextManager[None]:
        """Run a block of code on all workers; see `WorkerGroup.synchronized`."""
        return nullcontext()

    def require(self, what: str) -> None:
        """Raise ValueError, with a remedy, if this backend cannot do the operation `what`."""

    def unsharded(self) -> AbstractContextManager[None]:
        """Hold every block whole in a block of code that all workers run; reentrant."""
        return nullcontext()

    def storage_unsharded(self) -> AbstractContextManager[None]:
        """Make the storages of the EPS give whole blocks in a block of code that all workers run."""
        return nullcontext()

    def layer_keys(self, names: Sequence[str]) -> list[str]:
        """Return permanent keys for layers with these names."""
        return numbered_keys(names)

    def shard_of(self, block: Block) -> Layout | None:
        """Return the layout of this worker's shard of a block; None if it holds the whole block."""
        return None

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
        """Return the index of this worker's first micro-batch in the whole batch, with `count` of them per worker."""
        return self.rank * count

    def refuse(self, what: str, why: str) -> None:
        """Raise if there are several workers, which cannot do this."""

    def leave(self) -> None:
        """Make the model whole again, if all workers take part."""

    def close(self) -> None:
        """Join threads and close connections."""


class DistributedBackend(WorkerBackend):
    """Backend of several workers with their shards in memory.

    Attributes:
        sharding: divides blocks between the workers; from `adopt_blocks` or `adopting` on.
    """

    shares_params = False
    sharding: Sharding

    def __init__(self, group: WorkerGroup, settings: Workers) -> None:
        self._group, self.settings = group, settings
        self.rank, self.count, self.batch_peers = group.rank, group.count, group
        self.synchronized, self.gather_items = group.synchronized, group.gather_items
        self.announce_failure, self.agree_on_failure = group.announce_failure, group.agree_on_failure
        self._is_unsharded = False

    @property
    def lost(self) -> WorkerError | None:
        return self._group.lost

    def make_weight_source(self, device: Device, host: Ledger, lease_shard: LeaseShard = lease_master) -> WeightSource:
        return ShardedWeightSource(device, host, self._group, lease_shard)

    def make_reducer(self, has_batch_loss: bool) -> Reducer:
        wire = {"fp32": torch.float32, "bf16": torch.bfloat16}[self.settings.wire]
        return DistributedReducer(self._group, self.settings.reduce == "ordered", wire, has_batch_loss)

    def initial_seed(self) -> int:
        return self._group.initial_seed

    def adopt_blocks(
        self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, facts: FactsFn
    ) -> int:
        with self.adopting(store, host, device, facts):
            self.sharding.broadcast_weights()
            self.sharding.broadcast_buffers(units)
        self.sharding.shard()
        return 0

    @contextmanager
    def adopting(self, store: LayerStore, host: Ledger, device: Device, facts: FactsFn) -> Iterator[None]:
        """Set `sharding`, and run a block of code in which all workers take over the blocks of a new relay."""
        self._group.elementwise = store.masters.findings.elementwise
        self.sharding = Sharding(self._group, store.masters, host, device.host_empty)
        modes = {name: getattr(self.settings, name) for name in ("reduce", "wire", "buffers")}
        with self.synchronized("make a relay", lambda: {**modes, **facts()}):
            yield

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        if self._is_unsharded:
            yield
            return
        self._is_unsharded = True
        try:
            self.sharding.unshard()
            yield
        finally:
            self._is_unsharded = False
            self.sharding.shard()  # the blocks that are whole by now

    storage_unsharded = unsharded

    def shard_of(self, block: Block) -> Layout | None:
        return None if block.in_bytes else self._group.shard_layout(block).shard(self.rank)

    def reshard(self, detached: Mapping[Block, OptimizerEntry]) -> None:
        self.sharding.shard()
        self.sharding.unshard_detached(detached)

    def broadcast_state(self, units: Sequence[Unit]) -> None:
        self.sharding.broadcast_weights()
        if self.settings.buffers == "same":
            self.sharding.broadcast_buffers(units)

    def make_buffer_check(self, units: Sequence[Unit]) -> Callable[[], None]:
        if self.settings.buffers == "own":
            return lambda: None
        values = [(unit, unit.buffers.copy()) for unit in units]

        def check() -> None:
            for unit, before in values:
                if not unit.buffers.equal(before):
                    raise ValueError(_buffer_message(unit.name))

        return check

    def sign_trace(self, trace: Trace) -> Trace:
        trace.settings |= {"workers": self.count, "reduce": self.settings.reduce, "wire": self.settings.wire}
        return self._group.sign_trace(trace)

    def refuse(self, what: str, why: str) -> None:
        raise ValueError(f"{what} is not possible with {self.count} workers: {why}. Nothing was done")

    def leave(self) -> None:
        self.leave_after(self.sharding.unshard)

    def leave_after(self, finish: Callable[[], None]) -> None:
        """Run `finish` together with all workers, unless one is lost or does not take part."""
        if self._group.lost is None:
            self._group.leave(finish)

    def close(self) -> None:
        self._group.close()


def _buffer_message(where: str) -> str:
    return (
        f"the forward of {where} changes a buffer in every micro-batch; with several workers its values would depend on the rows "
        "of each worker. Use layers without such state (GroupNorm or LayerNorm instead of BatchNorm), or put that part into "
        "evaluation mode before the relay is made and each time after model.train(). Or give each worker separate buffers: "
        'Workers(buffers="own")'
    )


def make_backend(workers: Workers | dist.ProcessGroup | str | WorkerBackend | None, model: nn.Module) -> WorkerBackend:
    """Make the backend for a relay of this model, or return `workers` if it is one.

    Raises:
        ValueError: the group cannot be made, or several workers cannot train the model.
        TypeError: `workers` has another type.
    """
    if workers is None:
        return WorkerBackend()
    if isinstance(workers, WorkerBackend):
        return workers
    if not isinstance(workers, Workers):
        if workers != "auto" and not isinstance(workers, dist.ProcessGroup):
            raise TypeError(
                f'workers={workers!r}: give "auto", a process group of torch.distributed, Workers(...), or None to train alone'
            )
        workers = Workers(group=workers)
    settings = workers
    if not dist.is_available():
        raise ValueError("workers: this PyTorch was built without torch.distributed")
    make_group = settings.group == "auto" and not dist.is_initialized()
    launcher, rank, count = find_launcher()
    if make_group and count == 1:
        return WorkerBackend()
    if settings.buffers == "same":
        for name, module in model.named_modules():
            if isinstance(module, NormBase) and module.track_running_stats and module.training:
                raise ValueError(_buffer_message(f"{name} ({type(module).__name__})"))
    if make_group:
        init_process_group(launcher, rank, count, settings.timeout_s)
    group = dist.group.WORLD if settings.group == "auto" else settings.group
    assert isinstance(group, dist.ProcessGroup)
    if dist.get_world_size(group) == 1:
        return WorkerBackend()
    return DistributedBackend(WorkerGroup(group, settings.timeout_s, make_group, settings.network), settings)
