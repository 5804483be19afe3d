"""Kept graphs given in bytes: as many as fit, found before the first step of a kind, with equal results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracle import adamw, assert_equal, both
from patience import rarely
from zoo import BY_NAME, Kind

from l2l_core import Drop, EmulatedDevice, Relay, RelayConfig
from l2l_core.trace import parse_bytes

KIND = BY_NAME["gpt2"]
DEPTH = len(KIND.make_model().transformer.h)
ALL = RelayConfig(micro_batches=2, resident=DEPTH, meter="always")  # every peak is measured


def peak_of(config: RelayConfig, kind: Kind = KIND) -> int:
    with both(kind, config) as pair:
        return pair.step(kind.make_batch(6, 0)).result.peak_device_bytes


def peaks(config: RelayConfig) -> list[int]:
    """Return the bytes of a step that keeps no graph (but the last, which is always kept), 2, 3, ..."""
    return [peak_of(replace(config, keep=keep)) for keep in (0, *range(2, DEPTH + 1))]


@pytest.mark.parametrize("stash", ["device", rarely("host")])
def test_as_many_graphs_are_kept_as_fit(stash: Any) -> None:
    config = replace(ALL, stash=stash)
    need = peaks(config)
    assert need == sorted({*need}), "each graph takes bytes"
    for more, kept in ((need[-1] - need[0], DEPTH), (need[2] - need[0], 3), (need[2] - need[0] - 1, 2), (0, 0)):
        with both(KIND, replace(config, keep=f"{more} B")) as pair:
            steps = [pair.step(KIND.make_batch(6, seed)) for seed in range(2)]
            assert_equal(steps)
            assert steps[0].result.trace.settings["keep"] == kept
            assert steps[0].result.peak_device_bytes - need[0] <= more
            assert pair.relay.config.keep == f"{more} B", "the requested setting stays"


def test_the_number_is_found_once_for_a_kind_and_again_after_an_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    from l2l_core import forecast as module

    before = module.layers_within
    monkeypatch.setattr(module, "layers_within", lambda *args: found.append(before(*args)) or found[-1])
    with both(KIND, replace(ALL, keep="1 GB")) as pair:
        relay = pair.relay
        for rows in (6, 6, 4, 6):
            relay.step(KIND.make_batch(rows, 0))
        assert found == [DEPTH, DEPTH], "for six rows and for four"
        relay.step(KIND.make_batch(6, 0), skip=[0])
        relay.apply(Drop(0))
        assert relay.step(KIND.make_batch(6, 0)).trace.settings["keep"] == DEPTH - 1
        assert found == [DEPTH, DEPTH, DEPTH - 1]


def test_forecast_fit_verify_evaluate_and_saves_accept_bytes(tmp_path: Path) -> None:
    batch = KIND.make_batch(6, 0)
    with both(KIND, replace(ALL, keep="1 GB")) as pair:
        relay = pair.relay
        forecast = relay.forecast(batch)
        assert forecast.config.keep == DEPTH
        assert relay.verify(batch).equal
        relay.evaluate(batch), relay.forward(batch)
        result = relay.step(batch)
        assert forecast.peak_device_bytes == result.peak_device_bytes
        relay.save(tmp_path / "save")
        model = KIND.make_model()
        with Relay.load(tmp_path / "save", model, adamw(model), device=EmulatedDevice(), layers=KIND.layers) as again:
            assert again.config.keep == "1 GB"
            assert again.step(batch).trace.settings["keep"] == DEPTH
        assert relay.fit(batch, fixed=["keep"]).config.keep == DEPTH


@pytest.mark.parametrize("text", ["", "7", "many", "-1 MB", "1 mb", "1e3 MB", "1 MB 2 MB"])
def test_text_that_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"keep=.*number of layers, as 4, or of bytes with a unit"):
        RelayConfig(keep=text)


def test_units() -> None:
    texts = ["0 B", "2 kB", "1.5MB", " 1 GB ", "1 KiB", "0.5 MiB"]
    assert [parse_bytes(each, "keep") for each in texts] == [0, 2000, 1_500_000, 10**9, 1024, 1 << 19]
