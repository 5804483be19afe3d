"""Folder with the saves of a session.

Each save is complete or absent at every moment, also if the process is killed::

folder/
  save-000012/             complete: the rename to this name was the last step of writing it
    save.json              summary: step, time, the probe's loss, shapes of the model
    session.json           everything else of the session but its relay; its tensors are in session.safetensors
    rows.jsonl             steps and changes, one a line
    relay/                 written by `Relay.save`
  unfinished/              being written or deleted, or left by a process that was killed
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from l2l_core.saves import sync, write_bytes

SCHEMA = 1


@dataclass(frozen=True)
class Autosave:
    """Where and how often a session is saved by itself.

    A session is also saved when it pauses, ends or is edited while it does not train, and when it is closed. A save takes
    place between two steps. Beside the last `keep` saves, the one with the lowest loss of the probe is kept, if ``probe=[...]``
    was given.

    Args:
        folder: created by the first save.
        steps: number of steps from one save to the next; None: by time alone.
        minutes: minutes from one save to the next; None: by steps alone.
        keep: number of saves that are kept.

    Raises:
        ValueError: a number is not positive, or neither `steps` nor `minutes` is given.

    Example:
        >>> from pathlib import Path
        >>> from workbench import Autosave, Session
        >>> with Session(relay, lambda: batch, autosave=Autosave("run", steps=2)) as session:
        ...     session.run(4)
        ...     state = session.wait()
        >>> Path("run").is_dir()  # the same program, run again after a crash, offers to resume
        True
    """

    folder: str | Path
    steps: int | None = None
    minutes: float | None = 5.0
    keep: int = 3

    def __post_init__(self) -> None:
        for name, kind in (("steps", int), ("minutes", (int, float)), ("keep", int)):
            value = getattr(self, name)
            if value is None and name != "keep":
                continue
            if not isinstance(value, kind) or isinstance(value, bool) or value <= 0:
                raise ValueError(
                    f"{name}={value!r}: must be a positive number, such as {name}={3 if name == 'keep' else 5}"
                )
        if self.steps is None and self.minutes is None:
            raise ValueError("steps=None and minutes=None: give one of them, such as minutes=5")


@dataclass(frozen=True)
class SavedSession:
    """A save of a session.

    Attributes:
        path: its folder.
        step: number of finished steps of its branch.
        branch: the active branch.
        saved: time of the save, as ISO 8601 with the time zone.
        loss: mean loss of the probe's held-out batches; None if it was not measured.
        lost: what the save lacks, in words; "" if it is complete.
        why_not: why the session cannot be resumed in this workbench, and the remedy; "" if it can.
        summary: content of `save.json`.
    """

    path: Path
    step: int
    branch: str
    saved: str
    loss: float | None = None
    lost: str = ""
    why_not: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def words(self) -> str:
        """The save in words, such as "a session of 500 steps was saved on 2026-11-26 at 14:02 in out/run"."""
        at, folder, here = datetime.fromisoformat(self.saved), self.path.parent, Path.cwd()
        shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
        return f"a session of {self.step} steps was saved on {at:%Y-%m-%d} at {at:%H:%M} in {shown}"


class SaveFolder:
    """The saves in a folder.

    Args:
        path: the folder, which may not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def saves(self) -> list[SavedSession]:
        """Return the complete saves, oldest first."""
        found = [self._read(path) for path in sorted(self.path.glob("save-*"))]
        return [save for save in found if save is not None]

    def best(self) -> SavedSession | None:
        """Return the save with the lowest loss of the probe; None if it was measured in none."""
        measured = [save for save in self.saves() if save.loss is not None and math.isfinite(save.loss)]
        return min(measured, key=lambda save: save.loss or 0.0, default=None)

    def write(self, fill: Callable[[Path], Mapping[str, Any]], keep: int) -> SavedSession:
        """Write a save, and delete the oldest ones; `fill` writes files into a folder and returns the summary.

        Raises:
            OSError: the disk is full, or permission is denied; the other saves are as they were.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._delete_unfinished()
        self._unfinished.mkdir()
        summary = {"schema": SCHEMA, **fill(self._unfinished)}
        write_bytes(self._unfinished / "save.json", json.dumps(summary, indent=1).encode())
        sync(self._unfinished)
        last = max((int(path.name.removeprefix("save-")) for path in self.path.glob("save-*")), default=0)
        path = self.path / f"save-{last + 1:06d}"
        self._unfinished.rename(path)
        sync(self.path)
        self._prune(keep)
        save = self._read(path)
        assert save is not None
        return save

    def set_aside(self) -> Path:
        """Rename the folder after the time of its last save, and return the new path."""
        saved = datetime.fromisoformat(self.saves()[-1].saved)
        name = f"{self.path.name}-{saved:%Y%m%d-%H%M%S}"
        paths = [self.path.with_name(name), *(self.path.with_name(f"{name}-{i}") for i in range(2, 1000))]
        path = next(path for path in paths if not path.exists())
        self.path.rename(path)
        return path

    @property
    def _unfinished(self) -> Path:
        return self.path / "unfinished"

    def _delete_unfinished(self) -> None:
        if self._unfinished.exists():
            shutil.rmtree(self._unfinished)

    def _prune(self, keep: int) -> None:
        saves, best = self.saves(), self.best()
        for save in saves[:-keep]:
            if best is None or save.path != best.path:
                save.path.rename(self._unfinished)  # first, so that no save is ever half deleted
                self._delete_unfinished()

    def _read(self, path: Path) -> SavedSession | None:
        try:
            summary = json.loads((path / "save.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        why_not = ""
        if summary["schema"] != SCHEMA:
            why_not = (
                f"{path} has schema {summary['schema']}, and this release reads schema {SCHEMA}: resume it with the release "
                "that wrote it, or start afresh"
            )
        names = ("step", "branch", "saved", "loss", "lost")
        return SavedSession(path, **{name: summary[name] for name in names}, why_not=why_not, summary=summary)
