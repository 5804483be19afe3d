"""No test leaves the thread of a session: those after it would wait for its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sessions import sessions_end


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    with sessions_end():
        yield
