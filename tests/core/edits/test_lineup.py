"""Keys of layers: whoever gives them, none is given twice, and layers may come in any order."""

from __future__ import annotations

from typing import Any

import pytest
from small import keys, make_batch, make_gpt, make_relay

from l2l_core import Drop, Duplicate, Swap


def test_layers_may_have_keys_of_their_own() -> None:
    model = make_gpt(2)
    with make_relay(model, layers={"low": "transformer.h.0", "high": model.transformer.h[1]}) as relay:
        assert keys(relay) == ["low", "high"]
        relay.apply(Swap("low", "high"))
        assert keys(relay) == ["high", "low"] and relay.verify(make_batch()).equal


def test_no_key_is_given_out_twice() -> None:
    layers = {f"L{i:03d}": f"transformer.h.{i - 1}" for i in range(1, 5)}
    with make_relay(make_gpt(), layers=layers) as relay:
        relay.apply(Duplicate(0), Duplicate(0))
        assert sorted(keys(relay)) == ["L001", "L002", "L003", "L004", "L005", "L006"]


@pytest.mark.parametrize("key", ["shell", "relay", "history", "parked-L001", "a/b", "../a", "", 3])
def test_a_key_that_cannot_name_a_file_is_refused(key: Any) -> None:
    model = make_gpt(2)
    before = model.transformer.h[0].mlp.c_fc.weight.data_ptr()
    with pytest.raises(ValueError, match="layers has the key"):
        make_relay(model, layers={key: "transformer.h.0", "high": "transformer.h.1"})
    assert model.transformer.h[0].mlp.c_fc.weight.data_ptr() == before


def test_layers_may_be_given_in_any_order() -> None:
    names = [f"transformer.h.{i}" for i in (2, 0, 3, 1)]
    with make_relay(make_gpt(), layers=names) as relay:
        relay.step(make_batch())
        relay.apply(Drop(0))  # the stack's first, the relay's second
        assert sorted(keys(relay)) == ["L000", "L002", "L003"]
        relay.apply(Duplicate(0))
        assert sorted(keys(relay)) == ["L000", "L002", "L003", "L004"] and relay.verify(make_batch()).equal
