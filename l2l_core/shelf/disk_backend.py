"""Backend of a relay whose weights and optimizer state are in files.

It supplies the EPS with a weight source and an updater (`disk_step.py`), and storage between steps (`disk_storage.py`).

With several workers each has the records of its shards in a separate folder. The backend of the workers exchanges gradients as
in memory, and its weight source gathers layers from shards that are read from records.
"""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.config import RelayConfig
from l2l_core.devices import Device, Ledger, StashStore
from l2l_core.eps import LayerStore, Masters, Reducer, Updater, WeightSource
from l2l_core.eps.blocks import Block, Unit
from l2l_core.eps.optimizers import with_members
from l2l_core.shelf.direct_io import BufferPool, round_to_pages
from l2l_core.shelf.disk_stash import DiskStashStore
from l2l_core.shelf.disk_step import DiskUpdater, DiskWeightSource
from l2l_core.shelf.disk_storage import DiskStorage
from l2l_core.shelf.file_shelf import FileShelf, check_folder, lock_folder, worker_folder
from l2l_core.shelf.initial_weights import (
    InitialWeights,
    SafetensorsShards,
    check_buffers,
    check_disk_space,
    check_weights_source,
    fill_block,
    refuse_placeholder_state,
    replace_meta_params,
    write_initial,
    write_shards,
)
from l2l_core.shelf.memory_sizes import MemoryBudget
from l2l_core.shelf.record_store import RecordStore, weights_in
from l2l_core.shelf.shelf_manifest import ShelfManifest, complete_commit, has_step, layer_keys_in
from l2l_core.surgery import ties_of
from l2l_core.trace import Trace
from l2l_core.workers import DistributedBackend, FactsFn, WorkerBackend, WorkerError, numbered_keys

_DEFAULT_REMEDY = "use masters in memory (no shelf=) where the model fits"
_SUPPORTED = (
    *("make a step", "run forward", "evaluate", "probe", "look inside", "put traces together"),
    *("save", "take a save over", "verify", "gather weights"),
)
_EDITS = ("observe layers", "edit", "undo", "redo", "try edits", "take edits back")
_REMEDIES = {
    "fit": "it might choose to load more layers ahead than the pool has room for; forecast single settings with "
    "relay.forecast(batch, config), or use fit_config before the model is made",
    "schedule='depth_first'": "it keeps all layers on the device; leave schedule out of RelayConfig",
    "make a branch": "branches share weights in memory; copy the folder between two steps, and resume each copy with resume=True",
}
_SHARDED_EDIT = (
    "an edit needs whole layers, and each worker has only shards of them: save the relay, load the save onto another shelf in "
    "one process without workers, edit it there, and write its weights by relay.shelf.save_pretrained(folder) for "
    "FileShelf(weights=folder). The optimizer begins anew then"
)
_SHARDED_REHEARSAL = (
    "each worker rehearses alone, without the shards of the others: choose the settings of RelayConfig yourself, keep as a "
    "number of layers"
)
_SHARDED_REMEDIES: dict[str, str] = {
    **dict.fromkeys(_EDITS, _SHARDED_EDIT),
    **dict.fromkeys(("forecast", "fit"), _SHARDED_REHEARSAL),
}


class DiskBackend(WorkerBackend):
    """Backend with weights and optimizer state in files.

    Args:
        shelf: settings of the user.
        model: model whose parameters move to the files; those on ``meta`` are replaced by placeholders.
        ahead: number of layers that will be loaded ahead.
        from_save: a save will be loaded: until then the folder has no step, and the model keeps its weights.
        own_loss: the loss or the objective is the user's, or was in the save.
        workers: backend of the workers that divide the files between them.

    Attributes:
        folder: folder of this worker's files.
        memory_bytes: memory for all buffers.
        budget: division of that memory.
    """

    shares_params = False
    budget: MemoryBudget

    def __init__(
        self, shelf: FileShelf, model: nn.Module, ahead: int, from_save: bool, own_loss: bool, workers: WorkerBackend
    ) -> None:
        self._shelf, self._model, self._ahead, self._from_save = shelf, model, ahead, from_save
        self._own_loss = own_loss
        self._workers, self._distributed = workers, workers if isinstance(workers, DistributedBackend) else None
        self.rank, self.count, self.settings = workers.rank, workers.count, workers.settings
        self.batch_peers = workers.batch_peers
        self.keeps_dtypes = workers.count == 1 and shelf.weights is None
        self.gather_items, self.shard_of = workers.gather_items, workers.shard_of
        self.announce_failure, self.agree_on_failure = workers.announce_failure, workers.agree_on_failure
        self.make_buffer_check, self.initial_seed = workers.make_buffer_check, workers.initial_seed
        self.folder, self.memory_bytes = worker_folder(Path(shelf.folder), self.rank, self.count), shelf.nbytes
        with workers.synchronized("open a shelf", dict):
            check_folder(Path(shelf.folder), shelf.resume, self.rank, self.count)
            check_weights_source(shelf, model, from_save)
            check_buffers(model)
        replace_meta_params(model.modules())
        self._initial_weights: InitialWeights = {}
        self._resources = ExitStack()
        self._is_gathered = self._is_closed = False

    # -- set-up, in the order of calls -----------------------------------------------------------------------------------------

    def master_init(self, empty: Callable[[int], torch.Tensor]) -> Callable[[Block], None]:
        def offload(block: Block) -> None:
            if not self._initial_weights:
                self._open()  # may fail: after the checks of the model, and before its first block is offloaded
            self._initial_weights[block] = [param.data for param in block.params]
            block.offload()

        return offload

    def _open(self) -> None:
        (self.folder / "records").mkdir(parents=True, exist_ok=True)
        self._resources.callback(os.close, lock_folder(self.folder))
        self._records = RecordStore(self.folder / "records")
        self._resources.callback(self._records.close)

    def make_weight_source(self, device: Device, host: Ledger) -> WeightSource:
        self._load_pool = BufferPool(0, device.host_empty, host, "weights")
        self._update_pool = BufferPool(0, device.host_empty, host, "optimizer")
        self._resources.callback(self._load_pool.close)
        self._resources.callback(self._update_pool.close)
        if self._distributed is not None:
            return self._distributed.make_weight_source(device, host, self._lease_shard)
        return self.make_rehearsal_source(device, host)

    @contextmanager
    def _lease_shard(self, block: Block, trace: Trace) -> Iterator[torch.Tensor]:
        """Read this worker's shard of a block into a buffer; gathers need one at a time."""
        self._records.trace = trace
        with self._load_pool.lease(round_to_pages(block.master_layout.nbytes)) as flat:
            self._records.read(block, flat).result()
            yield weights_in(flat, block)

    def make_rehearsal_source(self, device: Device, host: Ledger) -> WeightSource:
        if self.count > 1:
            self.refuse("a rehearsal (a forecast, keep in bytes)", _SHARDED_REHEARSAL)
        # The same pool: only one pass runs at a time
        return DiskWeightSource(self._records, self._load_pool, casts=not device.in_host_memory)

    def make_disk_stash(self, device: Device, host: Ledger) -> StashStore | None:
        return DiskStashStore(self.folder / "stash.tmp", self._records, device.host_empty, host)

    def make_reducer(self, has_batch_loss: bool) -> Reducer:
        return self._workers.make_reducer(has_batch_loss)

    def adopt_blocks(
        self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, facts: FactsFn
    ) -> int:
        if self._distributed is None:
            self._adopt(units, store, host, device, self._ahead, casts=not device.in_host_memory)
            return self._manifest.steps
        with self._distributed.adopting(store, host, device, facts):
            self._distributed.sharding.shard()
            self._distributed.sharding.broadcast_buffers(units)
            self._adopt(units, store, host, device, ahead=0, casts=False)  # one shard at a time is read for loads
        return self._manifest.steps

    def _adopt(
        self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, ahead: int, casts: bool
    ) -> None:
        masters, pools = store.masters, (self._load_pool, self._update_pool)
        self.budget = MemoryBudget(self.memory_bytes, ahead, casts, masters, *pools)
        self.budget.plan_split(units)()
        wait_for_all = partial(self.gather_items, list[None](), "commit")
        self._manifest = ShelfManifest(
            self.folder, units, masters, self._records, self.count, self._own_loss, wait_for_all
        )
        self._load_records(masters, host)
        manifest, budget = self._manifest, self.budget
        store.updater = DiskUpdater(
            Updater(store.masters, can_undo=False), manifest, budget, host
        )  # the old copy serves for undo
        self._storage = store.storage = DiskStorage(
            manifest, budget, device, host, partial(self._weights_moved, masters.optimizer), self._guard_state_dict
        )

    def record_bytes(self, block: Block) -> int:
        """Return the bytes of a block's committed record."""
        return self._records.committed[block].layout.nbytes

    def _load_records(self, masters: Masters, host: Ledger) -> None:
        """Write the first records unless they come from a save, or load those in the folder."""
        if self._shelf.resume:
            complete_commit(self.folder, self.gather_items)
            self._manifest.load()()
        else:
            self._manifest.run = self.gather_items([uuid.uuid4().hex], "begin a shelf")[0]
            check_disk_space(self.folder, masters.blocks, self.budget.state_sizes)
            if self._from_save:
                return
            fill = self._make_fill(host)
            write_initial(masters, self._records, self.budget, self._initial_weights, fill)
            self._manifest.commit(0)
        self._weights_moved(masters.optimizer)

    def _make_fill(self, host: Ledger) -> Callable[[Block, torch.Tensor], None]:
        """Return the function that writes the first weights of a block, or of this worker's shard, into its record."""
        if self.rank:
            given = None
        elif isinstance(given := self._shelf.weights, str | Path):
            given = SafetensorsShards(Path(given), ties_of(self._model))

        def fill_whole(block: Block, into: torch.Tensor) -> None:
            fill_block(into, block, self._initial_weights[block], given)

        def fill_shard(block: Block, into: torch.Tensor) -> None:
            assert self._distributed is not None
            whole = torch.zeros(block.layout.numel)
            host.book("weights", "whole", whole.nbytes)
            if self.rank == 0:
                fill_whole(block, whole)
            shard = self._distributed.sharding.broadcast_block(block, whole)
            into[: len(shard)].copy_(shard)
            host.release("weights", "whole", whole.nbytes)

        return fill_whole if self._distributed is None else fill_shard

    def _weights_moved(self, optimizer: Optimizer) -> None:
        """Complete the move of weights and optimizer state to files."""
        self._initial_weights.clear()
        self._guard_state_dict(self._model)
        for each in with_members(optimizer):
            each.register_state_dict_pre_hook(partial(refuse_placeholder_state, self.folder))

    def _guard_state_dict(self, module: nn.Module) -> None:
        """Make modules refuse a state dict while their parameters have no values."""
        for part in module.modules():
            part.register_state_dict_pre_hook(partial(refuse_placeholder_state, self.folder))

    # -- interface of the relay ---------------------------------------------------------------------------------------------

    def sign_trace(self, trace: Trace) -> Trace:
        trace.settings |= {"shelf": "direct" if self._records.files.is_direct else "buffered"}
        return self._workers.sign_trace(trace)

    @property
    def lost(self) -> WorkerError | None:
        return self._workers.lost

    def synchronized(self, what: str, facts: FactsFn) -> AbstractContextManager[None]:
        self.require(what)
        return self._workers.synchronized(what, facts)

    def require(self, what: str) -> None:
        if what not in (_SUPPORTED if self.count > 1 else (*_SUPPORTED, *_EDITS, "forecast")):
            self.refuse(what, _SHARDED_REMEDIES.get(what, ""))

    def layer_keys(self, names: Sequence[str]) -> list[str]:
        """Return the keys in the folder; if it has other layers, it is refused later."""
        found = layer_keys_in(self.folder, names) if self._shelf.resume and has_step(self.folder) else None
        return found or numbered_keys(names)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        whole_copies = self.count if self.count > 1 else 0
        with self.storage_unsharded(), self._storage.all_in_memory(1 + whole_copies):
            self._is_gathered = True
            try:
                yield
            finally:
                self._is_gathered = False

    @contextmanager
    def storage_unsharded(self) -> Iterator[None]:
        if self._distributed is not None:
            self._storage.unshard = self._distributed.sharding.unsharded
        try:
            yield
        finally:
            self._storage.unshard = nullcontext

    def refuse(self, verb: str, instead: str = "") -> None:
        """Refuse an operation that a shelf cannot do.

        Raises:
            ValueError: always.
        """
        remedy = instead if self.count > 1 and instead else _REMEDIES.get(verb, _DEFAULT_REMEDY)
        raise ValueError(
            f"{verb} is not possible for a relay with weights in files ({self._shelf.folder}): {remedy}. Nothing was done"
        )

    def leave(self) -> None:
        if self._is_gathered:
            raise RuntimeError(
                "close() inside of relay.gathered(), whose values are stored at its end: leave that block first. Nothing was done"
            )
        if self._distributed is not None:
            self._distributed.leave_after(lambda: None)

    def close(self) -> None:
        for block, values in self._initial_weights.items():  # set-up has failed: restore the model
            for param, value in zip(block.params, values, strict=True):
                param.data = value
        self._initial_weights.clear()
        self._is_closed = True
        self._resources.close()
        self._workers.close()

    # -- interface of the user ----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of the last whole step in the folder."""
        return self._manifest.steps

    @property
    def own_loss(self) -> bool:
        """True if the loss or the objective of this run, or of an earlier one, is the user's."""
        return self._manifest.own_loss

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and values of each parameter, between two steps; a tensor is valid until the next iteration.

        Several workers iterate together, to the end.

        Raises:
            RuntimeError: a step is running, or the relay is closed.
        """
        with self._workers.synchronized("read weights", dict):
            pass  # not longer: the caller may end the iteration
        for tensors in self._read_blocks():
            yield from tensors.items()

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write weights and persistent buffers as safetensors shards, one per block, and the model's configuration.

        ``from_pretrained`` of transformers and ``FileShelf(weights=folder)`` read them. Several workers call it together, and
        worker 0 writes.

        Raises:
            OSError: a file cannot be written.
        """
        buffers = {
            f"{prefix}.{name}" if prefix else name: buffer.detach().cpu().clone()
            for prefix, module in self._model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }

        def parts() -> Iterator[Mapping[str, torch.Tensor]]:
            yield from self._read_blocks()
            if buffers:
                yield buffers

        with self._workers.synchronized("write weights", dict):
            if self.rank:
                deque(parts(), maxlen=0)  # sends this worker's shards
            else:
                write_shards(Path(folder), parts(), len(self._manifest.blocks) + bool(buffers))
                if callable(save := getattr(getattr(self._model, "config", None), "save_pretrained", None)):
                    save(folder)
            self.gather_items([None], "finish writing")
        return Path(folder)

    def _read_blocks(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the parameters of each block by name."""
        if self._is_closed:
            raise RuntimeError(
                f"the relay of this shelf is closed: resume it with FileShelf(folder={str(self._shelf.folder)!r}, resume=True, "
                "...), and read its weights then"
            )
        self._records.trace = Trace()  # the last step, whose trace this was, is over
        for block in self._manifest.blocks:
            buffer = self._load_pool.acquire(round_to_pages(block.master_layout.nbytes))
            if buffer is None:
                raise RuntimeError("the shelf has no free memory during a step: read its weights between two steps")
            try:
                self._records.read(block, buffer.flat).result()
                values = weights_in(buffer.flat, block)
                if self._distributed is not None:
                    values = self._distributed.sharding.gather_block(block, values)
                yield dict(zip(block.names, block.layout.views(values), strict=True))
            finally:
                self._load_pool.release(buffer)


def make_disk_backend(
    shelf: FileShelf,
    workers: WorkerBackend,
    model: nn.Module,
    config: RelayConfig | Literal["auto"],
    own_loss: bool,
    from_save: bool = False,
) -> DiskBackend:
    """Make the backend of a relay with a shelf, which `Relay.load` fills if `from_save`.

    Raises:
        TypeError: `shelf` is not a `FileShelf`.
        ValueError: the folder cannot be used, or the model has no weights.
    """
    if not isinstance(shelf, FileShelf):
        raise TypeError(
            f"shelf={shelf!r}: give FileShelf(folder=..., memory_bytes=...), or leave it out for masters in memory"
        )
    if isinstance(config, str):
        raise ValueError(
            'config="auto" might choose to load more layers ahead than the pool of a shelf has room for: give a RelayConfig; '
            "relay.forecast(batch, config) returns the needs of one, and fit_config finds one before the model is made"
        )
    return DiskBackend(shelf, model, config.ahead, from_save, own_loss, workers)
