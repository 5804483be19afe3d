"""A thread that runs queued commands in order, one at a time. Independent of relays and widgets.

commands ──► queue ──► thread: due work, or else the first command
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any


@dataclass(frozen=True, eq=False)
class Command:
    """Work for the thread.

    Attributes:
        what: short description, or a function that returns the current one.
        action: function to call; `future` gets its value.
        settings: settings that the command will make.
        is_atomic: the command takes effect as a whole, or raises ValueError or TypeError and changes nothing.
        is_query: the command changes nothing; its ValueError or TypeError is reported through the future alone.
        ticket: unique number for `CommandThread.cancel`.
    """

    what: str | Callable[[], str]
    action: Callable[[], Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_atomic: bool = False
    is_query: bool = False
    future: Future[Any] = field(default_factory=Future)
    ticket: int = field(default_factory=count().__next__)

    @property
    def label(self) -> str:
        """Current description of the command."""
        return self.what if isinstance(self.what, str) else self.what()


class CommandThread:
    """A command queue and the thread that runs it.

    Invariant: one command runs at a time. This state, and that of the owner's snapshots, is read and written under
    `changed`; `number` grows with every change. While `queue_paused` is set, queued commands wait. While `why_blocked` is
    not "", commands are refused for this reason. With `recheck_s`, due work is looked for as often while nothing changes.

    Args:
        next_due: returns work to do before the next command, or None; called under the lock.
        fail: receives a command and its error, before the command's future does; called under the lock.
    """

    def __init__(self, next_due: Callable[[], Command | None], fail: Callable[[Command, BaseException], None]) -> None:
        self.changed = threading.Condition()  # re-entrant
        self.queue: deque[Command] = deque()
        self.number = 0
        self.is_closing = self.queue_paused = False
        self.why_blocked = ""
        self.recheck_s: float | None = None
        self.current: Command | None = None  # the command that runs
        self._next_due, self._fail = next_due, fail
        self._thread: threading.Thread | None = None

    def start(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Start the thread, which calls `before` first and `after` last."""
        # In a list, from which it is popped: a thread keeps its arguments, and `before` may refer to another session.
        first = [before]
        self._thread = threading.Thread(target=self._run_loop, args=(first, after), name="session", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """True if a command runs or waits."""
        return self.current is not None or bool(self.queue)

    def submit(self, command: Command, always: bool = False) -> Future[Any]:
        """Append a command to the queue; `always`: a command that ends the reason why others are refused.

        Raises:
            RuntimeError: the session is closed.
            ValueError: commands are refused.
        """
        with self.changed:
            if self.is_closing:
                raise RuntimeError("this session is closed: make a new one on the relay")
            if self.why_blocked and not (command.is_query or always):
                raise ValueError(self.why_blocked)
            self.queue.append(command)
            self.notify_change()
        return command.future

    def cancel(self, ticket: int) -> bool:
        """Remove a command from the queue; return False if it is not in the queue any more."""
        with self.changed:
            command = next((command for command in self.queue if command.ticket == ticket), None)
            if command is None:
                return False
            self.queue.remove(command)
            self.notify_change()
        return command.future.cancel()

    def notify_change(self) -> None:
        """Count a change of state, and wake all threads that wait for one."""
        with self.changed:
            self.number += 1
            self.changed.notify_all()

    def close(self, wait: bool) -> None:
        """Cancel the queue, and end the thread after the command that runs."""
        with self.changed:
            self.is_closing = True
            dropped = list(self.queue)
            self.queue.clear()
            self.notify_change()
        for command in dropped:  # outside of the lock: this runs the futures' callbacks, which are foreign code
            command.future.cancel()
        if wait:
            self.join()

    def join(self) -> None:
        """Wait for the end of the thread, unless called on it."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def execute(self, command: Command) -> None:
        """Run a command now, on this thread, unless its future was cancelled."""
        if not command.future.set_running_or_notify_cancel():
            self._finish_current()
            return
        try:
            value = command.action()
        except BaseException as error:
            with self.changed:  # both at once: no snapshot may show an idle session between the end and the failure
                self._finish_current()
                self._fail(command, error)
            command.future.set_exception(error)  # afterwards, so that waiting code finds the failure in the snapshot
            del command  # the error refers to this frame
            return
        self._finish_current()
        command.future.set_result(value)

    def _finish_current(self) -> None:
        with self.changed:
            self.current = None
            self.notify_change()

    def _run_loop(self, first: list[Callable[[], None]], after: Callable[[], None]) -> None:
        first.pop()()
        while (command := self._next_command()) is not None:
            self.execute(command)
            del command  # its error refers to the frames of the step, and these to all tensors
        after()

    def _next_command(self) -> Command | None:
        """Wait for the next command; None when the thread is to end."""
        with self.changed:
            due: Command | None = None

            def is_ready() -> bool:
                nonlocal due
                due = None if self.is_closing else self._next_due()
                return self.is_closing or due is not None or bool(self.queue and not self.queue_paused)

            while not self.changed.wait_for(is_ready, self.recheck_s):
                pass
            if self.is_closing:
                return None
            self.current = due or self.queue.popleft()
            if due is None:
                self.notify_change()  # the queue has changed
            return self.current
