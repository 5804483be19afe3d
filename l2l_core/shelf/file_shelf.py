"""User settings of a shelf, and checks of its folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from l2l_core.config import parse_bytes
from l2l_core.shelf.shelf_manifest import has_step

Initialiser = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class FileShelf:
    """Keep weights and optimizer state in files, for models that do not fit in memory: ``Relay(..., shelf=FileShelf(...))``.

    The disk holds two copies of every layer, so that a crash at any moment leaves the last whole step: 24 bytes per parameter
    with AdamW. See `docs/CAPACITY.md`.

    Args:
        folder: a separate folder on a local disk.
        memory_bytes: host memory for buffers of weights and state, as a number or as text: ``"2 GB"``.
        weights: for a model without weights (see `empty_weights`): a function that fills a parameter, given its name; a
            safetensors file; or a folder of such files, as written by ``save_pretrained``. None uses the weights of the model.
        resume: continue from the last whole step or edit in the folder, ignoring the weights of the model. The model must have
            the layers that the edits have left, in their order; keys and ``requires_grad`` are taken from the folder.

    Raises:
        ValueError: `memory_bytes` is not a positive number, or both `weights` and `resume` are given.
    """

    folder: str | Path
    memory_bytes: int | str
    weights: Initialiser | str | Path | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.memory_bytes, bool) or not isinstance(self.memory_bytes, int | str) or self.nbytes <= 0:
            raise ValueError(
                f'memory_bytes={self.memory_bytes!r}: must be a positive number of bytes, or text as "2 GB"'
            )
        if self.resume and self.weights is not None:
            raise ValueError(
                "resume=True continues with the weights in the folder, and weights= gives others: leave out one of them"
            )

    @property
    def nbytes(self) -> int:
        """`memory_bytes` as a number."""
        given = self.memory_bytes
        return parse_bytes(given, "memory_bytes") if isinstance(given, str) else given


def check_folder(folder: Path, resume: bool) -> None:
    """Check that a folder has a whole step if it is to be resumed, and none otherwise.

    Raises:
        ValueError: it does not.
    """
    if resume and not has_step(folder):
        raise ValueError(
            f"{folder} has no whole step to resume: no shelf was ever filled there. Give the folder of one, or leave "
            "out resume=True"
        )
    if not resume and has_step(folder):
        raise ValueError(
            f"{folder} is the shelf of a model already: resume it with FileShelf(..., resume=True), delete it, or give another "
            "folder. Nothing was changed"
        )


def lock_folder(folder: Path) -> int:
    """Lock a folder until the process ends or closes the descriptor that is returned.

    Raises:
        ValueError: another process, or another relay of this one, holds the lock.
    """
    import fcntl  # not at the top: absent on Windows

    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ValueError(f"{folder} is in use by another relay: close that one, or end its process") from None
    return descriptor
