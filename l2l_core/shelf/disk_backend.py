"""What a relay asks of a shelf on disk: it is the company of one worker whose weights and state are in files.

It stands at the seams of the EPS: a place that reads (`disk_weight_source.py`), an update that reads and writes (`disk_updater.py`), and what
edits have at hand (`disk_edit_storage.py`).
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
from l2l_core.eps import LayerStore, Masters, WeightSource
from l2l_core.eps.blocks import Block, Unit
from l2l_core.shelf.buffer_pool import BufferPool
from l2l_core.shelf.direct_io import round_to_pages
from l2l_core.shelf.disk_block_storage import DiskBlockStorage
from l2l_core.shelf.disk_edit_storage import DiskEditStorage
from l2l_core.shelf.disk_stash import DiskStashStore
from l2l_core.shelf.disk_updater import DiskUpdater
from l2l_core.shelf.disk_weight_source import DiskWeightSource
from l2l_core.shelf.empty_weights import check_buffers, refuse_placeholder_state, refuse_state, replace_meta_params
from l2l_core.shelf.file_shelf import FileShelf, Initialiser
from l2l_core.shelf.folder_lock import check_folder, lock_folder
from l2l_core.shelf.initial_records import InitialWeights, check_disk_space, refuse_without_weights, write_initial
from l2l_core.shelf.memory_budget import MemoryBudget
from l2l_core.shelf.record_store import RecordStore
from l2l_core.shelf.safetensors_shards import SafetensorsShards, write_shards
from l2l_core.shelf.shelf_manifest import ShelfManifest, layer_keys_in
from l2l_core.surgery import ties_of
from l2l_core.trace import Trace
from l2l_core.workers import LocalBackend, numbered_keys

_DEFAULT_REMEDY = "use masters in memory (no shelf=) where the model fits"
_SUPPORTED = (
    *("make a step", "run forward", "evaluate", "probe", "look inside", "put traces together"),
    *("edit", "undo", "redo", "try edits", "take edits back"),
    *("save", "take a save over", "verify", "forecast"),
)
_REMEDIES = {
    "fit": "it may choose to load more layers ahead than the pool has room for; ask for settings one by one by "
    "relay.forecast(batch, config), or before the model is made by fit_config",
    "schedule='depth_first'": "what is in files comes and goes; leave schedule out of RelayConfig",
    "make a branch": "copy the folder between two steps, and go on with each by resume=True",
}


class DiskBackend(LocalBackend):
    """Keeps a relay's weights and optimizer state in files.

    Args:
        shelf: what the user says.
        model: whose parameters move there; those on ``meta`` are exchanged for others that show NaN.
        ahead: how many layers will be loaded ahead.

    Attributes:
        folder: of the files.
        memory_bytes: of the pool.
        room: how it is shared out.
    """

    budget: MemoryBudget

    def __init__(self, shelf: FileShelf, model: nn.Module, ahead: int) -> None:
        self._shelf, self._model, self._ahead = shelf, model, ahead
        self.folder, self.memory_bytes = Path(shelf.folder), shelf.nbytes
        check_folder(self.folder, shelf.resume)
        self._check_weights()
        check_buffers(model)
        replace_meta_params(model.modules())
        self._initial_weights: InitialWeights = {}
        self._resources = ExitStack()

    def _check_weights(self) -> None:
        if self._shelf.weights is None and not self._shelf.resume:
            refuse_without_weights(self._model)

    # -- set up, in this order -----------------------------------------------------------------------------------------

    def master_init(self, empty: Callable[[int], torch.Tensor]) -> Callable[[Block], None]:
        def send_away(block: Block) -> None:
            if not self._initial_weights:
                self._open()  # what may fail comes before the model gives anything away, and after it was checked
            self._initial_weights[block] = [param.data for param in block.params]
            block.offload()

        return send_away

    def _open(self) -> None:
        (self.folder / "records").mkdir(parents=True, exist_ok=True)
        self._resources.callback(os.close, lock_folder(self.folder))
        self._records = RecordStore(self.folder / "records")
        self._resources.callback(self._records.close)

    def make_weight_source(self, device: Device, host: Ledger) -> WeightSource:
        self._load_pool, self._update_pool = (
            BufferPool(0, device.host_empty, host, kind) for kind in ("weights", "optimizer")
        )
        for pool in (self._load_pool, self._update_pool):
            self._resources.callback(pool.close)
        return DiskWeightSource(self._records, self._load_pool, casts=not device.in_host_memory)

    def make_rehearsal_source(self, device: Device, host: Ledger) -> WeightSource:
        return DiskWeightSource(
            self._records, self._load_pool, casts=not device.in_host_memory
        )  # one pool: a pass at a time

    def make_disk_stash(self, device: Device, host: Ledger) -> StashStore | None:
        return DiskStashStore(self.folder / "stash.tmp", self._records, device.host_empty, host)

    def adopt_blocks(
        self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, facts: Callable[[], Any]
    ) -> int:
        masters = store.masters
        self.budget = MemoryBudget(
            self.memory_bytes, self._ahead, not device.in_host_memory, masters, self._load_pool, self._update_pool
        )
        self.budget.plan_split(units)()
        self._manifest = ShelfManifest(self.folder, units, masters, self._records)
        self._load_records(masters)
        files = self._records, self._update_pool, self.budget.size_of, host, self._manifest
        store.updater = update = DiskUpdater(masters, store.updater, *files)
        store.storage = DiskBlockStorage(
            masters, *files, update, on_loaded=partial(self._weights_moved, masters.optimizer)
        )
        store.edit_storage = DiskEditStorage(
            masters, self._records, self._manifest, self.budget, device, host, self._guard_state_dict
        )
        return self._manifest.steps

    def record_bytes(self, block: Block) -> int:
        """Bytes of a block's record as it is: of weights and state."""
        return self._records.committed[block].layout.nbytes

    def _load_records(self, masters: Masters) -> None:
        """Have the first records, or those that there are."""
        if self._shelf.resume:
            self._manifest.load()()
        else:
            check_disk_space(self.folder, masters.blocks, self.budget.state_sizes)
            write_initial(
                masters,
                self._records,
                self._update_pool,
                self.budget.state_sizes,
                self._initial_weights,
                self._initialiser(),
            )
            self._records.commit(partial(self._manifest.write_next, 0), partial(self._manifest.activate, 0))
        self._weights_moved(masters.optimizer)

    def _weights_moved(self, optimizer: Optimizer) -> None:
        """From now on the model's weights and the optimizer's state are in files."""
        self._initial_weights.clear()
        self._guard_state_dict(self._model)
        optimizer.register_state_dict_pre_hook(partial(refuse_state, self.folder))

    def _guard_state_dict(self, module: nn.Module) -> None:
        """Let modules refuse to give out a state of parameters without values."""
        for part in module.modules():
            part.register_state_dict_pre_hook(partial(refuse_placeholder_state, self.folder))

    def _initialiser(self) -> Initialiser | None:
        given = self._shelf.weights
        return SafetensorsShards(Path(given), ties_of(self._model)) if isinstance(given, str | Path) else given

    # -- what a relay asks ---------------------------------------------------------------------------------------------

    def sign_trace(self, trace: Trace) -> Trace:
        trace.settings |= {"shelf": "direct" if self._records.files.is_direct else "buffered"}
        return trace

    def synchronized(self, what: str, facts: Callable[[], Mapping[str, str]]) -> AbstractContextManager[None]:
        if what not in _SUPPORTED:
            self.refuse(what)
        return nullcontext()

    def layer_keys(self, names: Sequence[str]) -> list[str]:
        """Give layers the keys that they have in the folder; one that has other layers is refused later."""
        return (layer_keys_in(self.folder, names) if self._shelf.resume else None) or numbered_keys(names)

    def editable(self) -> AbstractContextManager[None]:
        return nullcontext()  # what an edit needs is brought to memory when it needs it

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        self.refuse("having all weights in memory at once, as branches and gathered() do,")
        yield

    def refuse(self, verb: str, instead: str = "") -> None:
        """Refuse what a shelf on disk cannot do.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{verb} is not there for a relay whose weights are in files ({self.folder}): "
            f"{_REMEDIES.get(verb, _DEFAULT_REMEDY)}. Nothing was done"
        )

    def close(self) -> None:
        for block, values in self._initial_weights.items():  # it has never begun: the model gets back what it had
            for param, value in zip(block.params, values, strict=True):
                param.data = value
        self._initial_weights.clear()
        self._resources.close()

    # -- what a user asks ----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of the whole step that the folder has."""
        return self._manifest.steps

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Go through all parameters by name, between two steps; a tensor is valid until the next one is asked for.

        Raises:
            RuntimeError: in the middle of a step, or when the relay is closed.
        """
        for tensors in self._read_blocks():
            yield from tensors.items()

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write weights and persistent buffers as safetensors shards, one per block, with their index; and the configuration.

        ``from_pretrained`` of transformers reads them, and so does ``FileShelf(weights=folder)``.

        Raises:
            OSError: they cannot be written.
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

        write_shards(Path(folder), parts(), len(self._all_blocks) + bool(buffers))
        if callable(save := getattr(getattr(self._model, "config", None), "save_pretrained", None)):
            save(folder)
        return Path(folder)

    @property
    def _all_blocks(self) -> list[Block]:
        return self._manifest.blocks

    def _read_blocks(self) -> Iterator[dict[str, torch.Tensor]]:
        """Read block by block: its parameters by name."""
        self._records.trace = Trace()  # not that of the last step, which is over
        for block in self._all_blocks:
            buffer = self._load_pool.acquire(round_to_pages(4 * block.layout.numel))
            if buffer is None:
                raise RuntimeError(
                    "the shelf has no memory free in the middle of a step: go through its weights between two"
                )
            try:
                self._records.read(block, buffer.flat).result()
                flat = buffer.flat[: 4 * block.layout.numel].view(torch.float32)
                yield dict(zip(block.names, block.layout.views(flat), strict=True))
            finally:
                self._load_pool.release(buffer)


def make_disk_backend(
    shelf: FileShelf,
    workers: object,
    model: nn.Module,
    config: RelayConfig | Literal["auto"],
    kind: type[DiskBackend] = DiskBackend,
) -> DiskBackend:
    """Make the company of a relay with a shelf, of a kind that says what it begins with.

    Raises:
        ValueError, TypeError: no shelf, a folder that cannot be used, a model without weights, or several workers.
    """
    if not isinstance(shelf, FileShelf):
        raise TypeError(
            f"shelf={shelf!r}: give FileShelf(folder=..., memory_bytes=...), or leave it out for masters in memory"
        )
    if workers is not None:
        raise ValueError(
            "shelf does not go with workers yet: train with one worker, or keep masters in memory (no shelf=), of which each of "
            "several workers has a part"
        )
    if isinstance(config, str):
        raise ValueError(
            'config="auto" looks for settings, and may load more layers ahead than the pool of a shelf has room for: give a '
            "RelayConfig; relay.forecast(batch, config) says of each what it needs, and fit_config looks for one before the "
            "model is made"
        )
    return kind(shelf, model, config.ahead)
