"""Progress of a search for settings that fit, which can be cancelled. It runs on the session's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from l2l_core import DeviceOutOfMemory, Relay, RelayConfig

FIT_S = 30.0  # limit of `Relay.fit`, once it has found settings
REMEDY_S = 10.0  # limit of the search after a step that did not fit, once it has found settings


class SearchCancelled(ValueError):
    """Raised in a search that was cancelled; nothing was changed."""


@dataclass(frozen=True, slots=True)
class SearchRow:
    """A search in progress.

    Attributes:
        tried: number of settings tried or being tried.
        elapsed_s: seconds since it began.
        limit_s: seconds after which it ends with the best settings found; without any, it continues.
        for_remedy: True after a step that did not fit.
    """

    tried: int
    elapsed_s: float
    limit_s: float
    for_remedy: bool


class SettingsSearch:
    """The search in progress, if there is one.

    Invariant: `row` is replaced on the session's thread; `cancel` may be called on any.

    Args:
        on_failure: called when a search for a remedy begins, with the error of the step.
        notify_change: called when `row` has changed.
    """

    def __init__(self, on_failure: Callable[[DeviceOutOfMemory], None], notify_change: Callable[[], None]) -> None:
        self._on_failure, self._notify_change = on_failure, notify_change
        self.row: SearchRow | None = None
        self._began_s = 0.0
        self._is_cancelled = False

    def cancel(self) -> None:
        """End the search in progress before the next settings that it would try."""
        self._is_cancelled = self.row is not None

    @contextmanager
    def watch(self, relay: Relay) -> Iterator[None]:
        """Show searches of the relay that run in this context."""
        relay.on_trial = self._on_trial
        try:
            yield
        finally:
            relay.on_trial, self.row, self._is_cancelled = None, None, False

    def _on_trial(self, error: DeviceOutOfMemory | None, config: RelayConfig) -> None:
        if self._is_cancelled:
            raise SearchCancelled("the search was cancelled")
        if self.row is None:
            self._began_s = time.monotonic()
            if error is not None:
                self._on_failure(error)
            self.row = SearchRow(0, 0.0, FIT_S if error is None else REMEDY_S, error is not None)
        self.row = replace(self.row, tried=self.row.tried + 1, elapsed_s=time.monotonic() - self._began_s)
        self._notify_change()
