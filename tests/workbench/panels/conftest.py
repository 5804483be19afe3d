"""Fixtures: a small relay, its session and header panel; all threads end with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from panel_reading import shown
from sessions import make_batches, make_relay, threads_named, wait_until

from l2l_core import Relay
from workbench.panels.header_panel import HeaderPanel
from workbench.session.session import Session


@pytest.fixture
def relay() -> Iterator[Relay]:
    with make_relay() as made:
        yield made
    wait_until(lambda: not threads_named("session", "refresh loop"))


@pytest.fixture
def session(relay: Relay) -> Iterator[Session]:
    with Session(relay, make_batches()) as made:
        yield made


@pytest.fixture
def header(session: Session) -> HeaderPanel:
    panel = HeaderPanel(session)
    shown(panel)
    return panel


@pytest.fixture
def threads_end() -> Iterator[None]:
    """Wait for the threads of a session that the test creates itself."""
    yield
    wait_until(lambda: not threads_named("session", "refresh loop"))
