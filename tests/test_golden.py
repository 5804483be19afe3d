"""The hashes of `support/golden.py` notice a change of a loss, of a state, of the events and of the bytes."""

import json

import pytest
import torch
from golden import GOLDEN, HASHES, differences, recording, summary
from oracle import adamw
from zoo import BY_NAME, Kind

from l2l_core import Relay, RelayConfig


def hashes(kind: Kind, rows: int = 7, **settings: object) -> dict[str, object]:
    steps: list[dict[str, str]] = []
    torch.manual_seed(0)
    model = kind.make_model()
    config = RelayConfig(**({"micro_batches": 3} | settings))  # type: ignore[arg-type]
    with (
        recording(steps),
        Relay(
            model, adamw(model), layers=kind.layers, loss=kind.loss, loss_over=kind.loss_over, config=config
        ) as relay,
    ):
        relay.step(kind.make_batch(rows, 0))
    return summary("held", steps)


def test_two_runs_have_the_same_hashes() -> None:
    assert hashes(BY_NAME["chain"]) == hashes(BY_NAME["chain"])


@pytest.mark.parametrize(
    "settings, changed",
    [({"rows": 6}, {"loss", "state"}), ({"ahead": 0, "stash": "host"}, {"events"}), ({"resident": 1}, {"bytes"})],
    ids=["rows", "order of copies", "resident"],
)
def test_a_change_is_noticed(settings: dict[str, object], changed: set[str]) -> None:
    one, other = hashes(BY_NAME["chain"]), hashes(BY_NAME["chain"], **settings)  # type: ignore[arg-type]
    assert changed <= {name for name in HASHES if one[name] != other[name]}
    assert len(list(differences({"zoo": {"chain": one}}, {"zoo": {"chain": other}}))) == 1


def test_the_stored_hashes_are_of_every_group() -> None:
    stored = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert {name: len(stored[name]) for name in ("programs", "notebooks", "demo")} == {
        "programs": 300,
        "notebooks": 11,
        "demo": 1,
    }
    assert set(stored["zoo"]) == set(BY_NAME)
