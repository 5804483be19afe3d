"""A session as a program: what was done with the relay, in order, as the lines of Python that do it again.

The program knows neither the model nor the batches, so it asks for them; `script_text.py` is its frame. What the session did
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
from workbench.session.layer_edits import code_of, literal
from workbench.session.race_values import Race, Racer
from workbench.session.script_text import Frame, frame
from workbench.session.settings import LINK, settings_of


@dataclass
class _Steps:
    """Steps one after another."""

    count: int
    loss: float  # of the last one


@dataclass
class _Settings:
    """Settings made between two steps; a later value stands for the ones before it."""

    config: dict[str, Any]
    link: dict[str, Any]


@dataclass(frozen=True)
class _Race:
    """A race, as far as it has come."""

    now: Callable[[], Race]


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
        self._scheduler = "" if scheduler is None else _turn_of(scheduler)
        self._has_schedule = type(schedule) is not Schedule
        self._done: list[str | _Steps | _Settings | _Race] = []
        self._names: set[str] = set()  # of the engine, beside those of every script
        self.begin()

    def begin(self) -> None:
        """Begin the script: it asks for a relay as this one is now."""
        relay = self._relay
        self._begun = relay.steps, relay.branch, [layer.key for layer in relay.stack], len(relay.journal)
        self._config = relay.config

    # -- what is done --------------------------------------------------------------------------------------------------

    def step(self, loss: float) -> None:
        """Note a step on the next batch."""
        with self._changed:
            if self._done and isinstance(last := self._done[-1], _Steps):
                last.count, last.loss = last.count + 1, loss
            else:
                self._done.append(_Steps(1, loss))

    def take(self) -> None:
        """Note that the next batch was taken and not trained on: random numbers that it draws were drawn here."""
        self._note("take()")

    def attempt(self) -> None:
        """Note that a step on the next batch has failed; edits that a schedule made before it stay."""
        self._note("attempt(take())" if self._has_schedule else "take()")

    def leave_out(self) -> None:
        """Note that the next batch is left out."""
        self._note("waiting.clear()  # the next batch is left out: a step had failed on it")

    def call(self, verb: str, *names: str) -> None:
        """Note a call of the relay that takes nothing but names."""
        self._note(f"relay.{verb}({', '.join(map(repr, names))})")

    def apply(self, edits: Sequence[Edit], trust: bool) -> None:
        """Note edits, as one group."""
        if (code := apply_code(edits, trust)) is None:
            self.by_hand(f"relay.apply({', '.join(map(repr, edits))})")
            return
        self._names |= {type(edit).__name__ for edit in edits}
        self._note(code)

    def set(self, settings: Mapping[str, Any]) -> None:
        """Note that the relay has these settings now."""
        with self._changed:
            if not self._done or not isinstance(last := self._done[-1], _Settings):
                self._done.append(last := _Settings({}, {}))
            last.config |= {name: value for name, value in settings.items() if name not in LINK}
            if not settings.keys().isdisjoint(LINK):
                # All figures of the link: `throttle` sets those that it is not given to no limit.
                last.link = {name: value for name, value in settings_of(self._relay).items() if name in LINK}

    def race(self, now: Callable[[], Race]) -> None:
        """Note that a race begins; `now` tells how far it has come."""
        self._note(_Race(now))  # asked when the script is read: in the middle of a race that is what was done by then

    def by_hand(self, what: str) -> None:
        """Note something that cannot be written as code."""
        self._note(f"by_hand({what!r}, relay)")

    def _note(self, done: str | _Race) -> None:
        with self._changed:
            self._done.append(done)

    # -- what it reads like --------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Write the program."""
        with self._changed:
            done = list(self._done)
            lines = [line for one in done for line in _lines(one)]
        return frame(
            Frame(
                lines=lines,
                names=sorted({"RelayConfig", *self._names}),
                config=code_of(self._config),
                begun=self._begun,
                kind=self._kind,
                turn=self._scheduler,
                has_schedule=self._has_schedule,
                has_race=any(isinstance(one, _Race) for one in done),
            )
        )


def apply_code(edits: Sequence[Edit], trust: bool = False) -> str | None:
    """Write the line that carries out edits as one group; None where one of them cannot be written, as one with a module."""
    if not all(_is_written(edit) for edit in edits):
        return None
    return f"relay.apply({', '.join([*map(code_of, edits), *(['trust=True'] if trust else [])])})"


def _lines(done: str | _Steps | _Settings | _Race) -> Sequence[str]:
    match done:
        case _Steps(count, loss):
            return [f"train({count}, loss={loss!r})" if math.isfinite(loss) else f"train({count})  # loss {loss}"]
        case _Settings(config, link):
            lines = [f"relay.config = replace(relay.config, {_keywords(config)})"] if config else []
            return [*lines, f"relay.device.throttle({_keywords(link)})"] if link else lines
        case _Race(now):
            return [_race_code(now().racers)]
        case _:
            return [done]


def _race_code(racers: Sequence[Racer]) -> str:
    steps = {racer.name: len(racer.steps) for racer in racers}
    last = {racer.name: racer.steps[-1].loss for racer in racers if racer.steps}
    losses = {name: loss for name, loss in last.items() if math.isfinite(loss)}
    tried = [racer.name for racer in racers if racer.tried]
    return f"race({steps}, {losses}{f', tried={tried}' if tried else ''})"


def _turn_of(scheduler: object) -> str:
    """How a scheduler of the learning rate is told of a step."""
    return "scheduler.step(losses[-1])" if isinstance(scheduler, ReduceLROnPlateau) else "scheduler.step()"


def _keywords(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={literal(value)}" for name, value in values.items())


def _is_written(edit: Edit) -> bool:
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
