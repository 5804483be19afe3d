"""Saves a session in a folder by itself, and resumes it in a new process, to the bit."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from safetensors.torch import save as tensors_to_bytes
from torch import nn

from l2l_core import Relay
from l2l_core.model import Tensors
from l2l_core.saves import write_bytes
from workbench.session.batch_position import BatchPosition
from workbench.session.batches import Batches
from workbench.session.lr_scheduler import LRSchedulerAdapter
from workbench.session.plain_values import pack, unpack
from workbench.session.probe import NotMeasured, Probe
from workbench.session.random_states import RandomStates
from workbench.session.resume_check import ResumeCheck
from workbench.session.save_folder import Autosave, SavedSession, SaveFolder
from workbench.session.session_state import SessionState
from workbench.session.settings import (
    LINK_SETTINGS,
    apply_settings,
    plain_settings,
    read_plain_settings,
    read_settings,
)
from workbench.session.snapshot_values import Change, HeldOutRow, StepRow

_IDLE_SHARE = 10  # while nothing is trained, saves take at most this part of the time


class _RowLine(NamedTuple):
    """Line of a step, change or measurement, which it keeps alive, and its number in the file."""

    row: StepRow | Change | HeldOutRow
    text: str
    number: int = 0


class SessionSaver:
    """The saves of one session.

    Invariant: `save` and `resume` are called on the session's thread; all other state is read and written under its lock.

    Args:
        settings: where and how often.
        relay, batches, probe, scheduler, state: the session's.

    Attributes:
        offer: the last save of an earlier session, until the user has chosen to resume it or to start afresh.
        last: the last save of this session, or the one that it was resumed from.
        steps_since: steps since then.

    Raises:
        ValueError: the session cannot be saved.
    """

    def __init__(
        self,
        settings: Autosave,
        relay: Relay,
        batches: Batches,
        probe: Probe,
        scheduler: LRSchedulerAdapter,
        state: SessionState,
    ) -> None:
        if relay.shelf is not None or relay.workers > 1:
            raise ValueError(
                "autosave of a relay with a shelf or several workers: leave autosave out. The files of a shelf survive the end "
                "of the process by themselves, and relay.save(folder) on all workers saves their weights"
            )
        if why := scheduler.why_not_restorable:
            raise ValueError(f"autosave: {why}; add these methods, as in torch's schedulers, or leave autosave out")
        self._settings, self.folder = settings, SaveFolder(Path(settings.folder).expanduser().absolute())
        self._relay, self._batches, self._probe, self._scheduler = relay, batches, probe, scheduler
        self._state, self._check = state, ResumeCheck(relay, scheduler)
        self.offer: SavedSession | None = None
        self.last: SavedSession | None = None
        self.steps_since = 0
        self._ended_s, self._took_s = time.monotonic(), 0.0  # end and duration of the last attempt
        self._saved_key = self._key()
        self._newest: SavedSession | None = None  # the last save of the folder when this session wrote or read it
        self._lines: dict[int, _RowLine] = {}  # of the last save, by identity of the row

    # -- under the session's lock --------------------------------------------------------------------------------------

    def find_offer(self) -> SavedSession | None:
        """Find the last save of an earlier session, set `offer`, and return it."""
        saves = self.folder.saves()
        self.offer = self._check.checked(saves[-1]) if saves else None
        return self.offer

    def find(self, which: str) -> SavedSession:
        """Return the "last" or the "best" save of the earlier session.

        Raises:
            ValueError: another word, no such save, or the save cannot be resumed.
        """
        if self.offer is None:
            raise ValueError(f"{self.folder.path} has no session to resume")
        found = {"last": lambda: self.offer, "best": self.folder.best}
        if which not in found:
            raise ValueError(f'which={which!r}: must be "last" or "best"')
        if (save := found[which]()) is None:
            raise ValueError('which="best": no save has a loss of held-out batches; resume the last one')
        if (save := self._check.checked(save)).why_not:
            raise ValueError(save.why_not)
        return save

    def is_due(self, is_idle: bool) -> bool:
        """Return True if a save is due; `is_idle` is True while nothing is trained or queued."""
        if not self.has_changed:
            return False
        now_s = time.monotonic()
        if is_idle:
            return now_s - self._ended_s >= _IDLE_SHARE * self._took_s
        by_steps = self._settings.steps is not None and self.steps_since >= self._settings.steps
        return by_steps or (self._settings.minutes is not None and now_s - self._ended_s >= 60 * self._settings.minutes)

    @property
    def has_changed(self) -> bool:
        """True if the session can be saved and has changed since its last save."""
        return self.offer is None and self._batches.can_save and self._key() != self._saved_key

    def _key(self) -> object:
        """Return a value that changes with everything that a save is for."""
        view = self._state.relay_view
        settings = tuple(self._state.settings_plan.settings.items())
        history = view.histories.current
        rows = len(history.changes), len(history.held_out)
        return view.steps, view.branch, len(view.journal), view.branches, rows, settings

    # -- on the session's thread ---------------------------------------------------------------------------------------

    def save(self) -> SavedSession:
        """Save the session.

        Raises:
            ValueError: a value of the session cannot be saved; names it.
            OSError: the disk is full, or permission is denied.
        """
        self._state.activity = "save"
        self._check_owner()
        began_s = time.monotonic()
        try:
            saved = self.folder.write(self._fill, self._settings.keep)
        finally:
            with self._state.changed:  # after a failure too: the next attempt is made after as many steps
                self._ended_s, self.steps_since, self._saved_key = time.monotonic(), 0, self._key()
                self._took_s = self._ended_s - began_s
        with self._state.changed:
            self.last = self._newest = saved
        return saved

    def _check_owner(self) -> None:
        saves = self.folder.saves()
        if saves and saves[-1] != self._newest:
            raise ValueError(
                f"{saves[-1].path} was saved by another session after this one had begun: two sessions cannot save in one "
                "folder. Close the other one, or make this workbench with another folder"
            )

    def _fill(self, folder: Path) -> Mapping[str, Any]:
        """Write the session into a folder, and return the summary."""
        loss = self._held_out_loss()
        state, view = self._state, self._state.relay_view
        tensors: Tensors = {}
        lines, self._lines = self._lines, {}

        def number_of(row: StepRow | Change | HeldOutRow) -> int:
            """Return the number of a row, whose line is made once for all branches and saves."""
            if id(row) not in self._lines:
                known = lines.get(id(row)) or _RowLine(row, json.dumps(pack(row, f"row/{len(lines)}", tensors)) + "\n")
                self._lines[id(row)] = known._replace(number=len(self._lines))
            return self._lines[id(row)].number

        content = {
            "histories": view.histories.state_dict(number_of),
            "touched": sorted(view.touched),
            "figures": {name: v for name, v in self._relay.device.figures().items() if name in LINK_SETTINGS},
            "settings_at_start": plain_settings(state.settings_plan.start),
            "run": {"done": state.run.done, "remaining": state.run.remaining},
            "scheduler": self._scheduler.state_dict(),
            "batches": self._batches.position().to_plain(),
            "random": self._batches.random_states().to_plain(),
        }
        packed = pack(content, "session", tensors)
        packed_probe, lost = self._pack_probe(tensors)
        _write_json(folder / "session.json", {"session": packed, "probe": packed_probe})
        write_bytes(folder / "rows.jsonl", "".join(line.text for line in self._lines.values()).encode())
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        write_bytes(folder / "session.safetensors", tensors_to_bytes(copies))
        self._relay.save(folder / "relay")
        return {
            "step": view.steps,
            "branch": view.branch,
            "saved": datetime.now().astimezone().isoformat(timespec="seconds"),
            "loss": loss,
            "lost": lost,
            **self._check.summary(),
        }

    def _held_out_loss(self) -> float | None:
        """Return the loss that `evaluate` measured after this step, or else that of the probe."""
        view = self._state.relay_view
        if measured := view.histories.current.held_out:
            return measured[-1].values.get("loss") if measured[-1].step == view.steps else None
        if not (self._probe.row.is_on and self._probe.row.is_given):
            return None
        try:
            return self._probe.measure().mean
        except NotMeasured:
            return None

    def _pack_probe(self, tensors: Tensors) -> tuple[Any, str]:
        """Return the packed probe, and why its training batches are not in it."""
        try:
            return pack(self._probe.state_dict(), "probe", tensors), ""
        except ValueError as error:
            why = f"its training batches for the probe ({error}); the next ones take their place"
            return pack({**self._probe.state_dict(), "batches": (), "first_step": None}, "probe", tensors), why

    def resume(self, save: SavedSession, modules: Mapping[str, nn.Module]) -> SavedSession:
        """Continue from a save.

        Raises:
            ValueError: the save is damaged or of another model, or the batches cannot be continued.
        """
        self._state.activity = "resume"
        tensors = load_file(save.path / "session.safetensors")
        plain = json.loads((save.path / "session.json").read_text(encoding="utf-8"))
        content, probe = unpack(plain["session"], tensors), unpack(plain["probe"], tensors)
        with (save.path / "rows.jsonl").open(encoding="utf-8") as lines:
            rows = [unpack(json.loads(line), tensors) for line in lines]
        before = self._batches.random_states()
        try:
            self._batches.resume(BatchPosition.of_plain(content["batches"]))
            if not self._check.is_in_state_of(save):
                self._relay.restore(save.path / "relay", modules)
        except BaseException:
            self._batches.restore_random(before)
            raise
        self._scheduler.load_state_dict(content["scheduler"])
        apply_settings(self._relay, {**read_settings(self._relay), **content["figures"]})
        self._probe.load_state_dict(probe)
        self._restore_state(content, rows)
        self._batches.restore_random(RandomStates.of_plain(content["random"]))
        with self._state.changed:
            self._check.shapes = save.summary["shapes"]
            self.offer, self.last, self._newest = None, save, self.folder.saves()[-1]
            self.steps_since, self._ended_s, self._saved_key = 0, time.monotonic(), self._key()
        return save

    def _restore_state(self, content: Mapping[str, Any], rows: list[Any]) -> None:
        state = self._state
        with state.changed:
            state.relay_view.histories.load_state_dict(content["histories"], rows)
            state.refresh()
            state.relay_view.touched = frozenset(content["touched"])
            state.settings_plan.start = read_plain_settings(content["settings_at_start"], state.settings_plan.start)
            state.settings_plan.mark_used()
            state.run.restore(content["run"]["done"], content["run"]["remaining"])


def _write_json(path: Path, plain: Mapping[str, Any]) -> None:
    write_bytes(path, json.dumps(plain).encode())
