"""What a relay asks of a shelf on disk: it is the company of one worker whose weights and state are in files.

It stands at the seams of the EPS: a place that reads (`place.py`), an update that reads and writes (`updates.py`), and what
edits have at hand (`at_hand.py`).
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
from l2l_core.devices import Device, Ledger, WaitingRoom
from l2l_core.eps import LayerStore, Masters, Place
from l2l_core.eps.blocks import Block, Unit
from l2l_core.shelf.at_hand import OneEditAtATime
from l2l_core.shelf.custody import InRecords
from l2l_core.shelf.direct import pages
from l2l_core.shelf.empty import check_buffers, refuse_nan, refuse_state, stand_in
from l2l_core.shelf.first_records import Given, check_disk, refuse_without_weights, write_first
from l2l_core.shelf.folder import check_folder, lock
from l2l_core.shelf.manifest import Manifest, keys_of
from l2l_core.shelf.place import InFiles
from l2l_core.shelf.pool import Pool
from l2l_core.shelf.records import Records
from l2l_core.shelf.room import Room
from l2l_core.shelf.settings import FileShelf, Initialiser
from l2l_core.shelf.shards import Shards, write_shards
from l2l_core.shelf.stash import OnDisk
from l2l_core.shelf.updates import ThroughFiles
from l2l_core.surgery import ties_of
from l2l_core.trace import Trace
from l2l_core.workers import Solo, numbered

_IN_MEMORY = "use masters in memory (no shelf=) where the model fits"
_POSSIBLE = (
    *("make a step", "run forward", "evaluate", "probe", "look inside", "put traces together"),
    *("edit", "undo", "redo", "try edits", "take edits back"),
    *("save", "take a save over", "verify", "forecast"),
)
_INSTEAD = {
    "fit": "it may choose to load more layers ahead than the pool has room for; ask for settings one by one by "
    "relay.forecast(batch, config), or before the model is made by fit_config",
    "schedule='depth_first'": "what is in files comes and goes; leave schedule out of RelayConfig",
    "make a branch": "copy the folder between two steps, and go on with each by resume=True",
}


class OnFiles(Solo):
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

    room: Room

    def __init__(self, shelf: FileShelf, model: nn.Module, ahead: int) -> None:
        self._shelf, self._model, self._ahead = shelf, model, ahead
        self.folder, self.memory_bytes = Path(shelf.folder), shelf.nbytes
        check_folder(self.folder, shelf.resume)
        self._check_weights()
        check_buffers(model)
        stand_in(model.modules())
        self._given: Given = {}
        self._opened = ExitStack()

    def _check_weights(self) -> None:
        if self._shelf.weights is None and not self._shelf.resume:
            refuse_without_weights(self._model)

    # -- set up, in this order -----------------------------------------------------------------------------------------

    def keep_by(self, empty: Callable[[int], torch.Tensor]) -> Callable[[Block], None]:
        def send_away(block: Block) -> None:
            if not self._given:
                self._open()  # what may fail comes before the model gives anything away, and after it was checked
            self._given[block] = [param.data for param in block.params]
            block.send_away()

        return send_away

    def _open(self) -> None:
        (self.folder / "records").mkdir(parents=True, exist_ok=True)
        self._opened.callback(os.close, lock(self.folder))
        self._records = Records(self.folder / "records")
        self._opened.callback(self._records.close)

    def place(self, device: Device, host: Ledger) -> Place:
        self._loads, self._updates = (Pool(0, device.host_empty, host, kind) for kind in ("weights", "optimizer"))
        for pool in (self._loads, self._updates):
            self._opened.callback(pool.close)
        return InFiles(self._records, self._loads, casts=not device.in_host_memory)

    def place_apart(self, device: Device, host: Ledger) -> Place:
        return InFiles(self._records, self._loads, casts=not device.in_host_memory)  # one pool: a pass at a time

    def scratch(self, device: Device, host: Ledger) -> WaitingRoom | None:
        return OnDisk(self.folder / "stash.tmp", self._records, device.host_empty, host)

    def take_over(
        self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, facts: Callable[[], Any]
    ) -> int:
        masters = store.masters
        self.room = Room(self.memory_bytes, self._ahead, not device.in_host_memory, masters, self._loads, self._updates)
        self.room.shared_out(units)()
        self._manifest = Manifest(self.folder, units, masters, self._records)
        self._begin(masters)
        files = self._records, self._updates, self.room.size_of, host, self._manifest
        store.update = update = ThroughFiles(masters, store.update, *files)
        store.custody = InRecords(masters, *files, update, then=partial(self._begun, masters.optimizer))
        store.at_hand = OneEditAtATime(masters, self._records, self._manifest, self.room, device, host, self._guard)
        return self._manifest.steps

    def record_bytes(self, block: Block) -> int:
        """Bytes of a block's record as it is: of weights and state."""
        return self._records.current[block].form.nbytes

    def _begin(self, masters: Masters) -> None:
        """Have the first records, or those that there are."""
        if self._shelf.resume:
            self._manifest.read()()
        else:
            check_disk(self.folder, masters.blocks, self.room.state)
            write_first(masters, self._records, self._updates, self.room.state, self._given, self._initialiser())
            self._records.commit(partial(self._manifest.prepare, 0), partial(self._manifest.switch, 0))
        self._begun(masters.optimizer)

    def _begun(self, optimizer: Optimizer) -> None:
        """From now on the model's weights and the optimizer's state are in files."""
        self._given.clear()
        self._guard(self._model)
        optimizer.register_state_dict_pre_hook(partial(refuse_state, self.folder))

    def _guard(self, module: nn.Module) -> None:
        """Let modules refuse to give out a state of parameters without values."""
        for part in module.modules():
            part.register_state_dict_pre_hook(partial(refuse_nan, self.folder))

    def _initialiser(self) -> Initialiser | None:
        given = self._shelf.weights
        return Shards(Path(given), ties_of(self._model)) if isinstance(given, str | Path) else given

    # -- what a relay asks ---------------------------------------------------------------------------------------------

    def signed(self, trace: Trace) -> Trace:
        trace.settings |= {"shelf": "direct" if self._records.files.is_direct else "buffered"}
        return trace

    def together(self, what: str, facts: Callable[[], Mapping[str, str]]) -> AbstractContextManager[None]:
        if what not in _POSSIBLE:
            self.refuse(what)
        return nullcontext()

    def keys(self, names: Sequence[str]) -> list[str]:
        """Give layers the keys that they have in the folder; one that has other layers is refused later."""
        return (keys_of(self.folder, names) if self._shelf.resume else None) or numbered(names)

    def editing(self) -> AbstractContextManager[None]:
        return nullcontext()  # what an edit needs is brought to memory when it needs it

    @contextmanager
    def whole(self) -> Iterator[None]:
        self.refuse("having all weights in memory at once, as branches and gathered() do,")
        yield

    def refuse(self, verb: str, instead: str = "") -> None:
        """Refuse what a shelf on disk cannot do.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{verb} is not there for a relay whose weights are in files ({self.folder}): "
            f"{_INSTEAD.get(verb, _IN_MEMORY)}. Nothing was done"
        )

    def close(self) -> None:
        for block, values in self._given.items():  # it has never begun: the model gets back what it had
            for param, value in zip(block.params, values, strict=True):
                param.data = value
        self._given.clear()
        self._opened.close()

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
        for tensors in self._blocks():
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
            yield from self._blocks()
            if buffers:
                yield buffers

        write_shards(Path(folder), parts(), len(self._all_blocks) + bool(buffers))
        if callable(save := getattr(getattr(self._model, "config", None), "save_pretrained", None)):
            save(folder)
        return Path(folder)

    @property
    def _all_blocks(self) -> list[Block]:
        return self._manifest.blocks

    def _blocks(self) -> Iterator[dict[str, torch.Tensor]]:
        """Read block by block: its parameters by name."""
        self._records.trace = Trace()  # not that of the last step, which is over
        for block in self._all_blocks:
            buffer = self._loads.take(pages(4 * block.layout.numel))
            if buffer is None:
                raise RuntimeError(
                    "the shelf has no memory free in the middle of a step: go through its weights between two"
                )
            try:
                self._records.read(block, buffer.flat).result()
                flat = buffer.flat[: 4 * block.layout.numel].view(torch.float32)
                yield dict(zip(block.names, block.layout.views(flat), strict=True))
            finally:
                self._loads.give_back(buffer)


def on_files(
    shelf: FileShelf,
    workers: object,
    model: nn.Module,
    config: RelayConfig | Literal["auto"],
    kind: type[OnFiles] = OnFiles,
) -> OnFiles:
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
