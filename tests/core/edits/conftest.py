"""A relay that has trained a little, to be edited."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from small import make_batch, make_gpt, make_relay

from l2l_core import Relay


@pytest.fixture
def relay() -> Iterator[Relay]:
    with make_relay(make_gpt()) as made:
        for seed in range(2):
            made.step(make_batch(seed))
        yield made
