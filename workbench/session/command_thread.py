"""A thread that does commands one after another, in the order in which they were given. It knows neither relay nor widgets.

commands ──► queue ──► thread: what is due of itself, or else the first command, one at a time
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
    """Something to do on the thread.

    Attributes:
        what: in a few words; or a function that says them as things are then.
        action: does it; its value becomes that of `future`.
        settings: that it will make.
        is_whole: it does all of what it should, or nothing and says so by a ValueError or TypeError.
        is_question: it changes nothing, so that the same errors concern nobody but whoever asked, who gets them by the future.
        ticket: its number, by which it can be taken out of the queue.
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
        """What it does, as things are now."""
        return self.what if isinstance(self.what, str) else self.what()


class CommandThread:
    """The queue and the thread.

    Invariant: one thing is done at a time; what is in here, and what its owner shows of itself, is read and written under
    `changed`, and `number` has grown whenever it is different. While `is_held`, what is queued waits.

    Args:
        due: what to do before the next command, None if nothing; called under the lock.
        fail: gets a command and its error, before the command's future does; called under the lock.
    """

    def __init__(self, next_due: Callable[[], Command | None], fail: Callable[[Command, BaseException], None]) -> None:
        self.changed = threading.Condition()  # re-entrant: who holds it may call what takes it again
        self.queue: deque[Command] = deque()
        self.number = 0
        self.is_closing = self.queue_paused = False
        self.current: Command | None = None  # what is being done
        self._next_due, self._fail = next_due, fail
        self._thread: threading.Thread | None = None

    def start(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Begin; on the thread, `before` is called first and `after` last."""
        # in a list to take it from: a thread holds its arguments until it ends, and `before` may know another session
        first = [before]
        self._thread = threading.Thread(target=self._run_loop, args=(first, after), name="session", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether something is being done or waits."""
        return self.current is not None or bool(self.queue)

    def submit(self, command: Command) -> Future[Any]:
        """Put a command at the end of the queue.

        Raises:
            RuntimeError: it takes no more.
        """
        with self.changed:
            if self.is_closing:
                raise RuntimeError("this session is closed: make a new one on the relay")
            self.queue.append(command)
            self.notify_change()
        return command.future

    def cancel(self, ticket: int) -> bool:
        """Take a command out of the queue; False if its turn has come already."""
        with self.changed:
            command = next((command for command in self.queue if command.ticket == ticket), None)
            if command is None:
                return False
            self.queue.remove(command)
            self.notify_change()
        return command.future.cancel()

    def notify_change(self) -> None:
        """Say that something is different now: wakes all who wait for a change."""
        with self.changed:
            self.number += 1
            self.changed.notify_all()

    def close(self, wait: bool) -> None:
        """Let what is being done end, drop what is queued, end the thread."""
        with self.changed:
            self.is_closing = True
            dropped = list(self.queue)
            self.queue.clear()
            self.notify_change()
        for command in dropped:  # outside of the lock: this calls whatever somebody has hung on the futures
            command.future.cancel()
        if wait:
            self.join()

    def join(self) -> None:
        """Wait for the end of the thread, unless it is this one."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def execute(self, command: Command) -> None:
        """Carry a command out now, on this thread, unless its future was cancelled."""
        if not command.future.set_running_or_notify_cancel():
            self._finish_current()
            return
        try:
            value = command.action()
        except BaseException as error:
            with self.changed:  # at once: no snapshot shows a session at rest that has not failed yet
                self._finish_current()
                self._fail(command, error)
            command.future.set_exception(error)  # after that: who gets it finds the failure in the snapshot
            del command  # the error knows this frame
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
            del command  # its error knows the frames of the step, and these all tensors
        after()

    def _next_command(self) -> Command | None:
        """What to do next; None at the end."""
        with self.changed:
            due: Command | None = None

            def there_is() -> bool:
                nonlocal due
                due = None if self.is_closing else self._next_due()
                return self.is_closing or due is not None or bool(self.queue and not self.queue_paused)

            self.changed.wait_for(there_is)
            if self.is_closing:
                return None
            self.current = due or self.queue.popleft()
            if due is None:
                self.notify_change()  # the queue is another one
            return self.current
