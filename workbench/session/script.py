"""Script of a session: a Python program that repeats what the session did with its relay.

The user adds the model and the batches to the program, whose frame is in `script_template.py`. Changes made by a function
or with a module have no code; they become calls of `by_hand`, which raises until the user has written it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Any

import numpy
from torch.optim.lr_scheduler import ReduceLROnPlateau

import l2l_core
from l2l_core import Edit, Relay, Schedule
from l2l_core.plan import schedule_name
from workbench.session.batches import Batches, SourceKind
from workbench.session.layer_edits import edit_code, literal
from workbench.session.notebook_source import find_notebook_source
from workbench.session.race_result import Race, Racer
from workbench.session.script_template import ScriptFrame, render_script
from workbench.session.settings import LINK_SETTINGS, read_settings


@dataclass
class _StepsRecord:
    """Consecutive steps."""

    count: int
    loss: float  # of the last step


@dataclass
class _SettingsRecord:
    """Settings made between two steps; a later value replaces an earlier one."""

    config: dict[str, Any]
    link: dict[str, Any]


_Record = str | _StepsRecord | _SettingsRecord | Callable[[], Race]  # a line; or a race, which may be in progress


class Script:
    """Record of what a session did with its relay.

    Invariant: written on the session's thread and read anywhere, under its lock. Refused commands are not recorded.

    Args:
        relay, batches, scheduler, schedule: the session's.
        changed: the session's lock.
    """

    def __init__(
        self, relay: Relay, batches: Batches, scheduler: object, schedule: Schedule, changed: Condition
    ) -> None:
        self._changed = changed
        self._relay = relay
        self._kind: SourceKind = batches.kind
        loss = "losses[-1]" if isinstance(scheduler, ReduceLROnPlateau) else ""
        self._scheduler_step = "" if scheduler is None else f"scheduler.step({loss})"
        self._has_schedule = type(schedule) is not Schedule
        self._records: list[_Record] = []
        # A relay that was trained before is made by more than its cell.
        self._notebook = None if relay.steps or relay.journal else find_notebook_source(relay)
        self._names: set[str] = set()  # imported from the engine, besides those of every script
        self.begin()

    def begin(self) -> None:
        """Begin the script: its relay must have the current state of the session's."""
        relay = self._relay
        self._start_state = relay.steps, relay.branch, [layer.key for layer in relay.stack], len(relay.journal)
        self._config = relay.config

    # -- recording -----------------------------------------------------------------------------------------------------

    def record_step(self, loss: float) -> None:
        """Record a step on the next batch."""
        with self._changed:
            if self._records and isinstance(last := self._records[-1], _StepsRecord):
                last.count, last.loss = last.count + 1, loss
            else:
                self._records.append(_StepsRecord(1, loss))

    def record_taken_batch(self) -> None:
        """Record that the next batch was taken and not trained on, since its source may draw random numbers."""
        self._append("take()")

    def record_failed_step(self) -> None:
        """Record that a step on the next batch failed; edits that a schedule made before it stay."""
        self._append("attempt(take())" if self._has_schedule else "take()")

    def record_skipped_batch(self) -> None:
        """Record that the next batch is skipped."""
        self._append("waiting.clear()  # skips the next batch, on which a step failed")

    def record_call(self, method: str, *names: str) -> None:
        """Record a call of a method of the relay that takes only names."""
        self._append(f"relay.{method}({', '.join(map(repr, names))})")

    def record_edits(self, edits: Sequence[Edit], force: bool) -> None:
        """Record edits, as one group."""
        if (code := apply_code(edits, force)) is None:
            self.record_manual(f"relay.apply({', '.join(map(repr, edits))})")
            return
        self._names |= {type(edit).__name__ for edit in edits}
        self._append(code)

    def record_settings(self, settings: Mapping[str, Any]) -> None:
        """Record new settings of the relay."""
        if callable(schedule := settings.get("schedule")):  # a function has no code here
            self.record_manual(f"relay.config = replace(relay.config, schedule={schedule_name(schedule)})")
            settings = {name: value for name, value in settings.items() if name != "schedule"}
        with self._changed:
            if not self._records or not isinstance(last := self._records[-1], _SettingsRecord):
                self._records.append(last := _SettingsRecord({}, {}))
            last.config |= {name: value for name, value in settings.items() if name not in LINK_SETTINGS}
            if not settings.keys().isdisjoint(LINK_SETTINGS):
                # All figures of the link, since `throttle` removes the limits that it is not given.
                last.link = {name: value for name, value in read_settings(self._relay).items() if name in LINK_SETTINGS}

    def record_race(self, current_race: Callable[[], Race]) -> None:
        """Record that a race begins; `current_race` is called when the script is written."""
        self._append(current_race)

    def record_manual(self, what: str) -> None:
        """Record a change that has no code."""
        self._append(f"by_hand({what!r}, relay)")

    def _append(self, record: str | Callable[[], Race]) -> None:
        with self._changed:
            self._records.append(record)

    # -- writing -------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Write the program."""
        with self._changed:
            records = list(self._records)
            lines = [line for record in records for line in _record_lines(record)]
        return render_script(
            ScriptFrame(
                lines=lines,
                names=sorted({"RelayConfig", *self._names}),
                config=edit_code(self._config),
                own_schedule=schedule_name(self._config.schedule) if callable(self._config.schedule) else "",
                start_state=self._start_state,
                kind=self._kind,
                scheduler_step=self._scheduler_step,
                has_schedule=self._has_schedule,
                has_race=any(map(callable, records)),
                notebook=self._notebook,
            )
        )


def apply_code(edits: Sequence[Edit], force: bool = False) -> str | None:
    """Return the line that applies edits as one group; None if one has no code (it has a module)."""
    if not all(_has_code(edit) for edit in edits):
        return None
    return f"relay.apply({', '.join([*map(edit_code, edits), *(['force=True'] if force else [])])})"


def _record_lines(record: _Record) -> Sequence[str]:
    match record:
        case _StepsRecord(count, loss):
            return [f"train({count}, loss={loss!r})" if math.isfinite(loss) else f"train({count})  # loss {loss}"]
        case _SettingsRecord(config, link):
            lines = [f"relay.config = replace(relay.config, {_keywords(config)})"] if config else []
            return [*lines, f"relay.device.throttle({_keywords(link)})"] if link else lines
        case str():
            return [record]
    return [_race_code(record().racers)]


def _race_code(racers: Sequence[Racer]) -> str:
    steps = {racer.name: len(racer.steps) for racer in racers}
    last = {racer.name: racer.steps[-1].loss for racer in racers if racer.steps}
    losses = {name: loss for name, loss in last.items() if math.isfinite(loss)}
    tried = [racer.name for racer in racers if racer.tried]
    return f"race({steps}, {losses}{f', tried={tried}' if tried else ''})"


def _keywords(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={literal(value)}" for name, value in values.items())


def _has_code(edit: Edit) -> bool:
    """Return True if the code of an edit makes an equal edit."""
    # By identity: a class of the user may have the same name as one of the engine.
    return getattr(l2l_core, type(edit).__name__, None) is type(edit) and all(map(_is_plain, vars(edit).values()))


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, slice):
        return all(map(_is_plain, (value.start, value.stop, value.step)))
    # Exact types: a subclass may have another `repr`.
    return value is None or type(value) in (bool, int, float, str, range) or isinstance(value, numpy.generic)
