"""The part of a session that saves it, and resumes an earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from torch import nn

from workbench.session.batches import Batches
from workbench.session.command_thread import Command
from workbench.session.queryable_session import QueryableSession
from workbench.session.save_folder import Autosave, SavedSession
from workbench.session.session_saver import SessionSaver

_RECHECK_S = 0.5


class ResumableSession(QueryableSession):
    """A session that is saved in a folder, if it has an `Autosave`.

    While an earlier session of the folder can be resumed, commands are refused and no batch is taken, so that nothing of it
    is overwritten before `resume` or `start_afresh` is called.
    """

    _batches: Batches
    _saver: SessionSaver | None = None

    def _begin_saving(self, settings: Autosave) -> None:
        relay, state, scheduler = self.relay, self._state, self._trainer.lr_scheduler
        saver = self._saver = SessionSaver(settings, relay, self._batches, self._probe, scheduler, state)
        state.saves = lambda: (saver.last, saver.offer)
        self._commands.recheck_s = _RECHECK_S
        self._find_offer()

    def _find_offer(self) -> None:
        """Block the session if an earlier one can be resumed, or else release it."""
        if self._saver is not None:
            with self._changed:
                offer = self._saver.find_offer()
                self._block(
                    "" if offer is None else f"{offer.words}: resume() continues it, start_afresh() puts it aside"
                )

    def _block(self, why: str) -> None:
        self._commands.why_blocked = self._batches.why_blocked = why
        self._commands.notify_change()

    def _saver_or_error(self) -> SessionSaver:
        if self._saver is None:
            raise ValueError('this session has no autosave: make it with autosave=Autosave("folder")')
        return self._saver

    def save(self) -> Future[SavedSession]:
        """Save the session after the current step, in the folder of its `Autosave`.

        Raises:
            ValueError: the session has no `Autosave`, or an earlier session waits to be resumed.
        """
        self._saver_or_error()
        return self._commands.submit(self._save_command())

    def resume(
        self, which: Literal["last", "best"] = "last", modules: Mapping[str, nn.Module] = MappingProxyType({})
    ) -> SavedSession:
        """Continue the session that an earlier process has saved in the folder of this session's `Autosave`, to the bit.

        Relay, batches, scheduler and loggers must be made as they were for that session, and not be used yet. Edits of the
        saved session are made again. Waits until it is resumed.

        Args:
            which: the last save, or the one with the lowest loss of the probe's held-out batches.
            modules: by key, layers that edits inserted and that resemble none of the model's, see `Relay.load`.

        Raises:
            ValueError: there is no such save, it is damaged or of another model, or the batches cannot be continued.
        """
        saver = self._saver_or_error()
        with self._changed:
            save = saver.find(which)

        def resume() -> SavedSession:
            resumed = saver.resume(save, modules)
            self._trainer.script.record_manual(
                f"resume the session saved in {save.path}: relay.restore and its batches"
            )
            self._block("")
            return resumed

        return self._commands.submit(Command("resume the session", resume, is_query=True), always=True).result()

    def start_afresh(self) -> Path:
        """Keep the session of an earlier process under another name, which is returned, and begin a new one.

        Raises:
            ValueError: no earlier session waits to be resumed.
        """
        saver = self._saver_or_error()
        with self._changed:
            if saver.offer is None:
                raise ValueError(f"{saver.folder.path} has no session that waits to be resumed")
            path, saver.offer = saver.folder.set_aside(), None
            self._block("")
        return path

    def _save_is_due(self) -> bool:
        is_idle = self._run.state != "running" and not self._commands.queue
        return self._saver is not None and self._saver.is_due(is_idle)

    def _save_last(self) -> None:
        """Save the session before it ends, if it has changed; an error is shown."""
        if self._saver is not None and self._saver.has_changed:
            self._commands.execute(self._save_command())

    def _save_command(self) -> Command:
        return Command("save the session", self._saver_or_error().save)

    def _count_for_save(self) -> None:
        if self._saver is not None:
            self._saver.steps_since += 1
