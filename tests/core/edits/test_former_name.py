"""`trust=`, the former name of `force=`, still works and warns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from small import make_batch, make_gpt, make_relay

from l2l_core import Drop, Relay
from workbench import Session


@pytest.fixture
def relay() -> Iterator[Relay]:
    with make_relay(make_gpt(3)) as made:
        yield made


def call(relay: Relay, verb: str, **force: bool) -> Any:
    if verb == "step":
        return relay.step(make_batch(), skip=[1], **force)
    if verb == "probe":
        return relay.probe([make_batch()], Drop(1), **force)
    if verb == "apply":
        return relay.apply(Drop(1), **force)
    with Session(relay, [make_batch()]) as session:
        return session.edit(Drop(1), **force).result()


@pytest.mark.parametrize("verb", ["step", "probe", "apply", "edit"])
def test_trust_is_force_and_warns(relay: Relay, verb: str) -> None:
    with pytest.warns(DeprecationWarning, match="trust= was renamed: use force="):
        assert call(relay, verb, trust=True) is not None
    with pytest.raises(TypeError, match="force= and trust="):
        call(relay, verb, force=True, trust=True)
