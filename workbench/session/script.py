"""A session as a program: what was done with the relay, in order, as the lines of Python that do it again.

The program knows neither the model nor the batches, so it asks for them; `script_template.py` is its frame. What the session did
by code that it cannot read (a function, a module) is a call of `by_hand` there, which raises until somebody has written it.
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
from workbench.session.batches import Batches
from workbench.session.layer_edits import edit_code, literal
from workbench.session.race_result import Race, Racer
from workbench.session.script_template import ScriptFrame, render_script
from workbench.session.settings import LINK_SETTINGS, read_settings


@dataclass
class _StepsRecord:
    """Steps one after another."""

    count: int
    loss: float  # of the last one


@dataclass
class _SettingsRecord:
    """Settings made between two steps; a later value stands for the ones before it."""

    config: dict[str, Any]
    link: dict[str, Any]


@dataclass(frozen=True)
class _RaceRecord:
    """A race, as far as it has come."""

    current: Callable[[], Race]


class Script:
    """What a session has done with its relay so far.

    Invariant: written on the session's thread, and read, under its lock; what was refused is not in it.

    Args:
        relay: of the session.
        batches: where its batches come from.
        scheduler, schedule, changed: of the session; the last is its lock.
    """

    def __init__(
        self, relay: Relay, batches: Batches, scheduler: object, schedule: Schedule, changed: Condition
    ) -> None:
        self._changed = changed
        self._relay, self._kind = relay, batches.kind
        self._scheduler = "" if scheduler is None else _scheduler_step_code(scheduler)
        self._has_schedule = type(schedule) is not Schedule
        self._records: list[str | _StepsRecord | _SettingsRecord | _RaceRecord] = []
        self._names: set[str] = set()  # of the engine, beside those of every script
        self.begin()

    def begin(self) -> None:
        """Begin the script: it asks for a relay as this one is now."""
        relay = self._relay
        self._start_state = relay.steps, relay.branch, [layer.key for layer in relay.stack], len(relay.journal)
        self._config = relay.config

    # -- what is done --------------------------------------------------------------------------------------------------

    def record_step(self, loss: float) -> None:
        """Note a step on the next batch."""
        with self._changed:
            if self._records and isinstance(last := self._records[-1], _StepsRecord):
                last.count, last.loss = last.count + 1, loss
            else:
                self._records.append(_StepsRecord(1, loss))

    def record_taken_batch(self) -> None:
        """Note that the next batch was taken and not trained on: random numbers that it draws were drawn here."""
        self._append("take()")

    def record_failed_step(self) -> None:
        """Note that a step on the next batch has failed; edits that a schedule made before it stay."""
        self._append("attempt(take())" if self._has_schedule else "take()")

    def record_skipped_batch(self) -> None:
        """Note that the next batch is left out."""
        self._append("waiting.clear()  # the next batch is left out: a step had failed on it")

    def record_call(self, method: str, *names: str) -> None:
        """Note a call of the relay that takes nothing but names."""
        self._append(f"relay.{method}({', '.join(map(repr, names))})")

    def record_edits(self, edits: Sequence[Edit], force: bool) -> None:
        """Note edits, as one group."""
        if (code := apply_code(edits, force)) is None:
            self.record_manual(f"relay.apply({', '.join(map(repr, edits))})")
            return
        self._names |= {type(edit).__name__ for edit in edits}
        self._append(code)

    def record_settings(self, settings: Mapping[str, Any]) -> None:
        """Note that the relay has these settings now."""
        with self._changed:
            if not self._records or not isinstance(last := self._records[-1], _SettingsRecord):
                self._records.append(last := _SettingsRecord({}, {}))
            last.config |= {name: value for name, value in settings.items() if name not in LINK_SETTINGS}
            if not settings.keys().isdisjoint(LINK_SETTINGS):
                # All figures of the link: `throttle` sets those that it is not given to no limit.
                last.link = {name: value for name, value in read_settings(self._relay).items() if name in LINK_SETTINGS}

    def record_race(self, current_race: Callable[[], Race]) -> None:
        """Note that a race begins; `now` tells how far it has come."""
        self._append(
            _RaceRecord(current_race)
        )  # asked when the script is read: in the middle of a race that is what was done by then

    def record_manual(self, what: str) -> None:
        """Note something that cannot be written as code."""
        self._append(f"by_hand({what!r}, relay)")

    def _append(self, done: str | _RaceRecord) -> None:
        with self._changed:
            self._records.append(done)

    # -- what it reads like --------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Write the program."""
        with self._changed:
            done = list(self._records)
            lines = [line for one in done for line in _record_lines(one)]
        return render_script(
            ScriptFrame(
                lines=lines,
                names=sorted({"RelayConfig", *self._names}),
                config=edit_code(self._config),
                start_state=self._start_state,
                kind=self._kind,
                scheduler_step=self._scheduler,
                has_schedule=self._has_schedule,
                has_race=any(isinstance(one, _RaceRecord) for one in done),
            )
        )


def apply_code(edits: Sequence[Edit], force: bool = False) -> str | None:
    """Write the line that carries out edits as one group; None where one of them cannot be written, as one with a module."""
    if not all(_has_code(edit) for edit in edits):
        return None
    return f"relay.apply({', '.join([*map(edit_code, edits), *(['force=True'] if force else [])])})"


def _record_lines(done: str | _StepsRecord | _SettingsRecord | _RaceRecord) -> Sequence[str]:
    match done:
        case _StepsRecord(count, loss):
            return [f"train({count}, loss={loss!r})" if math.isfinite(loss) else f"train({count})  # loss {loss}"]
        case _SettingsRecord(config, link):
            lines = [f"relay.config = replace(relay.config, {_keywords(config)})"] if config else []
            return [*lines, f"relay.device.throttle({_keywords(link)})"] if link else lines
        case _RaceRecord(now):
            return [_race_code(now().racers)]
        case _:
            return [done]


def _race_code(racers: Sequence[Racer]) -> str:
    steps = {racer.name: len(racer.steps) for racer in racers}
    last = {racer.name: racer.steps[-1].loss for racer in racers if racer.steps}
    losses = {name: loss for name, loss in last.items() if math.isfinite(loss)}
    tried = [racer.name for racer in racers if racer.tried]
    return f"race({steps}, {losses}{f', tried={tried}' if tried else ''})"


def _scheduler_step_code(scheduler: object) -> str:
    """How a scheduler of the learning rate is told of a step."""
    return "scheduler.step(losses[-1])" if isinstance(scheduler, ReduceLROnPlateau) else "scheduler.step()"


def _keywords(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={literal(value)}" for name, value in values.items())


def _has_code(edit: Edit) -> bool:
    """Whether Python's way to print an edit makes it again."""
    # By identity: a class of one's own may have a name that the engine has too.
    return getattr(l2l_core, type(edit).__name__, None) is type(edit) and all(map(_is_plain, vars(edit).values()))


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, slice):
        return all(map(_is_plain, (value.start, value.stop, value.step)))
    # The types themselves: a subclass may print itself in another way.
    return value is None or type(value) in (bool, int, float, str, range) or isinstance(value, numpy.generic)
