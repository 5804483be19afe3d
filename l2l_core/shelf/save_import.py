"""A shelf that gets the model of a save, block by block."""

from __future__ import annotations

from l2l_core.eps import Masters
from l2l_core.saves import SavedRelay
from l2l_core.shelf.disk_backend import DiskBackend
from l2l_core.shelf.initial_records import check_disk_space


class SaveImportBackend(DiskBackend):
    """Is the company of a relay that takes a save over: until it has, the folder has no step, and the model keeps what it has."""

    def _check_weights(self) -> None:
        if self._shelf.weights is not None or self._shelf.resume:
            raise ValueError(
                "Relay.load gives the shelf the weights of the save, and weights= or resume= of FileShelf would give it others: "
                "leave them out, or go on with the shelf as it is by Relay(..., shelf=FileShelf(..., resume=True))"
            )

    def _load_records(self, masters: Masters) -> None:
        check_disk_space(self.folder, masters.blocks, self.budget.state_sizes)


def refuse_edited_save(saved: SavedRelay) -> None:
    """Refuse a save with more than a present state.

    Raises:
        ValueError: it is of a model that was edited, or that has branches.
    """
    if saved.edited.is_edited or saved.manifest["past"].keys() - {"history"}:
        raise ValueError(
            f"{saved.path} is of a model that was edited, or that has branches, and what they need comes back in memory alone: "
            "load it without shelf=. For its present weights on a shelf, without the optimizer's state, write them there by "
            "model.save_pretrained and give FileShelf(weights=...). Nothing has been loaded"
        )
