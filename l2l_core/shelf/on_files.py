"""What a relay asks of a shelf on disk: it is the company of one worker whose weights and state are in files.

It stands at the seams of the EPS: a place that reads (`place.py`), an update that reads and writes (`updates.py`), and what
edits have at hand (`at_hand.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from l2l_core.config import RelayConfig
from l2l_core.devices import Device, Ledger
from l2l_core.eps import LayerStore, Place
from l2l_core.eps.blocks import Block, Unit, is_nowhere
from l2l_core.shelf.at_hand import OneEditAtATime
from l2l_core.shelf.direct import pages
from l2l_core.shelf.empty import check_buffers, stand_in
from l2l_core.shelf.first_records import Given, check_disk, refuse_without_weights, write_first
from l2l_core.shelf.folder import check_folder, lock
from l2l_core.shelf.manifest import Manifest, keys_of
from l2l_core.shelf.place import InFiles
from l2l_core.shelf.pool import Pool
from l2l_core.shelf.records import Records
from l2l_core.shelf.room import Room
from l2l_core.shelf.settings import FileShelf, Initialiser
from l2l_core.shelf.shards import Shards, write_shards
from l2l_core.shelf.updates import ThroughFiles
from l2l_core.surgery import ties_of
from l2l_core.trace import Trace
from l2l_core.workers import Solo, numbered

_IN_MEMORY = "use masters in memory (no shelf=) where the model fits"
_POSSIBLE = (
    *("make a step", "run forward", "evaluate", "probe", "look inside", "put traces together"),
    *("edit", "undo", "redo", "try edits", "take edits back"),
)
_INSTEAD = {
    "save": "the folder is a save already, with which FileShelf(..., resume=True) goes on, and so is a copy that was made of it "
    "between two steps; relay.shelf.save_pretrained(folder) writes the weights alone",
    "verify": "verify with masters in memory, on a model that fits",
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
    """

    can_rehearse = False

    def __init__(self, shelf: FileShelf, model: nn.Module, ahead: int) -> None:
        self._shelf, self._model, self._ahead = shelf, model, ahead
        self.folder = Path(shelf.folder)
        check_folder(self.folder, shelf.resume)
        if shelf.weights is None and not shelf.resume:
            refuse_without_weights(model)
        check_buffers(model)
        stand_in(model.modules())
        self._given: Given = {}

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
        self._lock = lock(self.folder)
        try:
            self._records = Records(self.folder / "records")
        except BaseException:
            os.close(self._lock)
            raise

    def place(self, device: Device, host: Ledger) -> Place:
        self._loads, self._updates = (Pool(0, device.host_empty, host, kind) for kind in ("weights", "optimizer"))
        return InFiles(self._records, self._loads, casts=not device.in_host_memory)

    def take_over(
        self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, facts: Callable[[], Any]
    ) -> int:
        masters = store.masters
        casts, pools = not device.in_host_memory, (self._loads, self._updates)
        room = Room(self._shelf.nbytes, self._ahead, casts, masters, *pools)
        room.shared_out(units)()
        self._manifest = Manifest(self.folder, units, masters, self._records)
        if self._shelf.resume:
            self._manifest.read()()
            self._given.clear()
        else:
            check_disk(self.folder, masters.blocks, room.state)
            write_first(masters, self._records, self._updates, room.state, self._given, self._initialiser())
            self._records.commit(partial(self._manifest.prepare, 0), partial(self._manifest.switch, 0))
        store.update = ThroughFiles(
            masters,
            store.update,
            self._records,
            self._updates,
            room.size_of,
            host,
            self._manifest,
        )
        store.at_hand = OneEditAtATime(masters, self._records, self._manifest, room, device, host, self._guard)
        self._guard(self._model)
        store.optimizer.register_state_dict_pre_hook(self._refuse_state)
        return self._manifest.steps

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
        self.refuse("having all weights in memory at once, as forecasts and gathered() do,")
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

    def _guard(self, model: nn.Module) -> None:
        """Let modules refuse to give out a state of parameters without values, also when the relay is closed."""

        def refuse_nan(
            module: nn.Module, *_: Any
        ) -> None:  # a function: copies of a layer share it, and no bound method
            if any(is_nowhere(param) for param in module.parameters()):
                self._refuse_state()

        for module in model.modules():
            module.register_state_dict_pre_hook(refuse_nan)

    def _refuse_state(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            f"the weights of this model and the optimizer's state are in {self.folder}, and in memory there is nothing but NaN: "
            "go through them by `for name, tensor in relay.shelf.weights()`, or write them by "
            "relay.shelf.save_pretrained(folder)"
        )

    def close(self) -> None:
        for block, values in self._given.items():  # it has never begun: the model gets back what it had
            for param, value in zip(block.params, values, strict=True):
                param.data = value
        self._records.close()
        self._loads.close()
        self._updates.close()
        os.close(self._lock)

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


def on_files(shelf: FileShelf, workers: object, model: nn.Module, config: RelayConfig | Literal["auto"]) -> OnFiles:
    """Make the company of a relay with a shelf.

    Raises:
        ValueError, TypeError: no shelf, a folder that cannot be used, a model without weights, or several workers.
    """
    if not isinstance(shelf, FileShelf):
        raise TypeError(
            f"shelf={shelf!r}: give FileShelf(folder=..., memory_bytes=...), or leave it out for masters in memory"
        )
    if workers is not None:
        raise ValueError(
            "shelf goes neither with workers nor with Relay.load yet: train with one worker, and go on by "
            "FileShelf(..., resume=True)"
        )
    if isinstance(config, str):
        raise ValueError(
            'config="auto" looks for settings by steps with all weights in memory, and a shelf has them in files: give a '
            "RelayConfig with the number of micro-batches with which a smaller model of these layers fits"
        )
    return OnFiles(shelf, model, config.ahead)
