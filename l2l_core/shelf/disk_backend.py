"""Backend of a relay whose weights and optimizer state are in files.

It supplies the EPS with a weight source and an updater (`disk_step.py`), and storage for blocks and edits (`disk_storage.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.config import RelayConfig
from l2l_core.devices import Device, Ledger, StashStore
from l2l_core.eps import LayerStore, Masters, Updater, WeightSource
from l2l_core.eps.blocks import Block, Unit
from l2l_core.shelf.direct_io import BufferPool, round_to_pages
from l2l_core.shelf.disk_stash import DiskStashStore
from l2l_core.shelf.disk_step import DiskUpdater, DiskWeightSource
from l2l_core.shelf.disk_storage import DiskBlockStorage, DiskEditStorage
from l2l_core.shelf.file_shelf import FileShelf, check_folder, lock_folder
from l2l_core.shelf.initial_weights import (
    InitialWeights,
    SafetensorsShards,
    check_buffers,
    check_disk_space,
    check_weights_source,
    refuse_placeholder_state,
    refuse_state,
    replace_meta_params,
    write_initial,
    write_shards,
)
from l2l_core.shelf.memory_sizes import MemoryBudget
from l2l_core.shelf.record_store import RecordStore, weights_in
from l2l_core.shelf.shelf_manifest import ShelfManifest, layer_keys_in
from l2l_core.surgery import ties_of
from l2l_core.trace import Trace
from l2l_core.workers import WorkerBackend, numbered_keys

_DEFAULT_REMEDY = "use masters in memory (no shelf=) where the model fits"
_SUPPORTED = (
    *("make a step", "run forward", "evaluate", "probe", "look inside", "put traces together"),
    *("edit", "undo", "redo", "try edits", "take edits back"),
    *("save", "take a save over", "verify", "forecast"),
)
_REMEDIES = {
    "fit": "it might choose to load more layers ahead than the pool has room for; forecast single settings with "
    "relay.forecast(batch, config), or use fit_config before the model is made",
    "schedule='depth_first'": "it keeps all layers on the device; leave schedule out of RelayConfig",
    "make a branch": "copy the folder between two steps, and resume each copy with resume=True",
}


class DiskBackend(WorkerBackend):
    """Backend with weights and optimizer state in files.

    Args:
        shelf: settings of the user.
        model: model whose parameters move to the files; those on ``meta`` are replaced by placeholders.
        ahead: number of layers that will be loaded ahead.
        from_save: a save will be loaded: until then the folder has no step, and the model keeps its weights.

    Attributes:
        folder: folder of the files.
        memory_bytes: memory for all buffers.
        budget: division of that memory.
    """

    shares_params = False
    budget: MemoryBudget

    def __init__(self, shelf: FileShelf, model: nn.Module, ahead: int, from_save: bool) -> None:
        self._shelf, self._model, self._ahead, self._from_save = shelf, model, ahead, from_save
        self.folder, self.memory_bytes = Path(shelf.folder), shelf.nbytes
        check_folder(self.folder, shelf.resume)
        check_weights_source(shelf, model, from_save)
        check_buffers(model)
        replace_meta_params(model.modules())
        self._initial_weights: InitialWeights = {}
        self._resources = ExitStack()

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
        return self.make_rehearsal_source(device, host)

    def make_rehearsal_source(self, device: Device, host: Ledger) -> WeightSource:
        # The same pool: only one pass runs at a time
        return DiskWeightSource(self._records, self._load_pool, casts=not device.in_host_memory)

    def make_disk_stash(self, device: Device, host: Ledger) -> StashStore | None:
        return DiskStashStore(self.folder / "stash.tmp", self._records, device.host_empty, host)

    def adopt_blocks(
        self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, facts: Callable[[], Any]
    ) -> int:
        masters, pools = store.masters, (self._load_pool, self._update_pool)
        self.budget = MemoryBudget(self.memory_bytes, self._ahead, not device.in_host_memory, masters, *pools)
        self.budget.plan_split(units)()
        self._manifest = ShelfManifest(self.folder, units, masters, self._records)
        self._load_records(masters)
        manifest, budget = self._manifest, self.budget
        store.updater = DiskUpdater(
            Updater(store.masters, can_undo=False), manifest, budget, host
        )  # the old copy serves for undo
        store.storage = DiskBlockStorage(manifest, budget, host, partial(self._weights_moved, masters.optimizer))
        store.edit_storage = DiskEditStorage(manifest, budget, device, host, self._guard_state_dict)
        return self._manifest.steps

    def record_bytes(self, block: Block) -> int:
        """Return the bytes of a block's committed record."""
        return self._records.committed[block].layout.nbytes

    def _load_records(self, masters: Masters) -> None:
        """Write the first records unless they come from a save, or load those in the folder."""
        if self._shelf.resume:
            self._manifest.load()()
        else:
            given, state_sizes = self._shelf.weights, self.budget.state_sizes
            fill = SafetensorsShards(Path(given), ties_of(self._model)) if isinstance(given, str | Path) else given
            check_disk_space(self.folder, masters.blocks, state_sizes)
            if self._from_save:
                return
            write_initial(masters, self._records, self._update_pool, state_sizes, self._initial_weights, fill)
            self._manifest.commit(0)
        self._weights_moved(masters.optimizer)

    def _weights_moved(self, optimizer: Optimizer) -> None:
        """Complete the move of weights and optimizer state to files."""
        self._initial_weights.clear()
        self._guard_state_dict(self._model)
        optimizer.register_state_dict_pre_hook(partial(refuse_state, self.folder))

    def _guard_state_dict(self, module: nn.Module) -> None:
        """Make modules refuse a state dict while their parameters have no values."""
        for part in module.modules():
            part.register_state_dict_pre_hook(partial(refuse_placeholder_state, self.folder))

    # -- interface of the relay ---------------------------------------------------------------------------------------------

    def sign_trace(self, trace: Trace) -> Trace:
        trace.settings |= {"shelf": "direct" if self._records.files.is_direct else "buffered"}
        return trace

    def synchronized(self, what: str, facts: Callable[[], Mapping[str, str]]) -> AbstractContextManager[None]:
        if what not in _SUPPORTED:
            self.refuse(what)
        return nullcontext()

    def layer_keys(self, names: Sequence[str]) -> list[str]:
        """Return the keys in the folder; if it has other layers, it is refused later."""
        return (layer_keys_in(self.folder, names) if self._shelf.resume else None) or numbered_keys(names)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        self.refuse("having all weights in memory at once, as branches and gathered() do,")
        yield

    def refuse(self, verb: str, instead: str = "") -> None:
        """Refuse an operation that a shelf cannot do.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{verb} is not possible for a relay with weights in files ({self.folder}): "
            f"{_REMEDIES.get(verb, _DEFAULT_REMEDY)}. Nothing was done"
        )

    def close(self) -> None:
        for block, values in self._initial_weights.items():  # set-up has failed: restore the model
            for param, value in zip(block.params, values, strict=True):
                param.data = value
        self._initial_weights.clear()
        self._resources.close()

    # -- interface of the user ----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of the last whole step in the folder."""
        return self._manifest.steps

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and values of each parameter, between two steps; a tensor is valid until the next iteration.

        Raises:
            RuntimeError: a step is running, or the relay is closed.
        """
        for tensors in self._read_blocks():
            yield from tensors.items()

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write weights and persistent buffers as safetensors shards, one per block, and the model's configuration.

        ``from_pretrained`` of transformers and ``FileShelf(weights=folder)`` read them.

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

        write_shards(Path(folder), parts(), len(self._manifest.blocks) + bool(buffers))
        if callable(save := getattr(getattr(self._model, "config", None), "save_pretrained", None)):
            save(folder)
        return Path(folder)

    def _read_blocks(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the parameters of each block by name."""
        self._records.trace = Trace()  # the last step, whose trace this was, is over
        for block in self._manifest.blocks:
            buffer = self._load_pool.acquire(round_to_pages(4 * block.layout.numel))
            if buffer is None:
                raise RuntimeError("the shelf has no free memory during a step: read its weights between two steps")
            try:
                self._records.read(block, buffer.flat).result()
                yield dict(zip(block.names, block.layout.views(weights_in(buffer.flat, block)), strict=True))
            finally:
                self._load_pool.release(buffer)


def make_disk_backend(
    shelf: FileShelf,
    workers: object,
    model: nn.Module,
    config: RelayConfig | Literal["auto"],
    from_save: bool = False,
) -> DiskBackend:
    """Make the backend of a relay with a shelf, which `Relay.load` fills if `from_save`.

    Raises:
        TypeError: `shelf` is not a `FileShelf`.
        ValueError: the folder cannot be used, the model has no weights, or there are several workers.
    """
    if not isinstance(shelf, FileShelf):
        raise TypeError(
            f"shelf={shelf!r}: give FileShelf(folder=..., memory_bytes=...), or leave it out for masters in memory"
        )
    if workers is not None:
        raise ValueError(
            "a shelf cannot be used with workers yet: train with one worker, or keep masters in memory (no shelf=), where each "
            "of several workers holds a shard"
        )
    if isinstance(config, str):
        raise ValueError(
            'config="auto" might choose to load more layers ahead than the pool of a shelf has room for: give a RelayConfig; '
            "relay.forecast(batch, config) returns the needs of one, and fit_config finds one before the model is made"
        )
    return DiskBackend(shelf, model, config.ahead, from_save)
