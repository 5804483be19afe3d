"""Fixture of a relay for a session, which checks that no thread is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from sessions import make_relay

from l2l_core import Relay


@pytest.fixture
def relay() -> Iterator[Relay]:
    before = set(threading.enumerate())
    with make_relay() as made:
        yield made
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]
    assert not left, f"threads that were not ended: {left}"
