"""Let an interrupt wait for the end of a step or an inference."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("l2l_core")


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Ctrl-C (or a kernel interrupt) in the block raises KeyboardInterrupt at its end; a second one raises at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only
        return
    before = signal.getsignal(signal.SIGINT)
    pressed = False

    def handler(signum: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        logger.warning("interrupt: what runs finishes first; interrupt again to stop at once")

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:  # not in `finally`: an error of the block itself is not hidden by it
        raise KeyboardInterrupt
