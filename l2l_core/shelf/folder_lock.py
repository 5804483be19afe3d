"""Whose a folder is: one process at a time may have a shelf there, and nobody begins a new one over another."""

from __future__ import annotations

import os
from pathlib import Path

from l2l_core.shelf.shelf_manifest import has_step


def check_folder(folder: Path, resume: bool) -> None:
    """Refuse to begin where there is something, and to go on where there is nothing.

    Raises:
        ValueError: one of them.
    """
    if resume and not has_step(folder):
        raise ValueError(
            f"{folder} has no whole step to resume: no shelf was ever filled there. Give the folder of one, or leave "
            "out resume=True"
        )
    if not resume and has_step(folder):
        raise ValueError(
            f"{folder} is the shelf of a model already: go on with it by FileShelf(..., resume=True), delete it, or give another "
            "folder. Nothing was changed"
        )


def lock_folder(folder: Path) -> int:
    """Hold a folder for this process until it ends or closes the descriptor that it gets.

    Raises:
        ValueError: another process, or another relay of this one, holds it.
    """
    import fcntl  # only here: Windows has none

    held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise ValueError(f"{folder} is in use by another relay: close that one, or end its process") from None
    return held
