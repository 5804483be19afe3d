"""Backend of a shelf that is filled from a save, block by block."""

from __future__ import annotations

from l2l_core.eps import Masters
from l2l_core.saves import SavedRelay
from l2l_core.shelf.disk_backend import DiskBackend
from l2l_core.shelf.initial_records import check_disk_space


class SaveImportBackend(DiskBackend):
    """Disk backend for `Relay.load`: until the save is loaded, the folder has no step and the model keeps its weights."""

    def _check_weights(self) -> None:
        if self._shelf.weights is not None or self._shelf.resume:
            raise ValueError(
                "Relay.load fills the shelf with the weights of the save, but weights= or resume= of FileShelf give it others: "
                "leave them out, or continue the existing shelf with Relay(..., shelf=FileShelf(..., resume=True))"
            )

    def _load_records(self, masters: Masters) -> None:
        check_disk_space(self.folder, masters.blocks, self.budget.state_sizes)


def refuse_edited_save(saved: SavedRelay) -> None:
    """Refuse a save with edits or branches.

    Raises:
        ValueError: the model was edited, or has branches.
    """
    if saved.edited.is_edited or saved.manifest["past"].keys() - {"history"}:
        raise ValueError(
            f"{saved.path} has edits or branches, which can only be loaded into memory: load it without shelf=. To put its "
            "present weights on a shelf, without the optimizer's state, write them with model.save_pretrained and give "
            "FileShelf(weights=...). Nothing has been loaded"
        )
