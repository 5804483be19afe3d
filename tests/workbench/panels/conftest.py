"""Fixtures: a small relay, its session and header panel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from panel_reading import shown
from sessions import make_batches, make_relay

from l2l_core import Relay
from workbench.panels.header_panel import HeaderPanel
from workbench.session.session import Session


@pytest.fixture
def relay() -> Iterator[Relay]:
    with make_relay() as made:
        yield made


@pytest.fixture
def session(relay: Relay) -> Iterator[Session]:
    with Session(relay, make_batches()) as made:
        yield made


@pytest.fixture
def header(session: Session) -> HeaderPanel:
    panel = HeaderPanel(session)
    shown(panel)
    return panel
