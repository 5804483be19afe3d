"""Layers out of the stack: what holds their bytes, on the host or on disk, and when they are given back."""

from __future__ import annotations

import gc
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import rarely
from small import make_batch, make_gpt, make_relay, state_of
from torch import nn

from l2l_core import Drop, EmulatedDevice, Insert, Interpolate, Relay, Swap


def test_a_layer_dropped_for_good_gives_its_bytes_back_and_cannot_return(relay: Relay) -> None:
    before, layer = relay.host.by_category(), relay.stack[1]
    nbytes, num_params = layer.nbytes, layer.num_params
    relay.apply(Drop(1, park=None))
    after = relay.host.by_category()
    assert before["weights"] - after["weights"] == nbytes
    assert before["optimizer"] - after["optimizer"] >= 8 * num_params and "other" not in after
    assert layer.nbytes == 0 and all(param.numel() == 0 for param in layer.params), "whoever still knows the layer"
    with pytest.raises(ValueError, match="freed its weights"):
        relay.undo()
    relay.step(make_batch())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize(("park", "freed"), [rarely("memory", 0), ("disk", 2), rarely(None, 2)])
def test_bytes_of_dropped_layers_return_to_the_system(park: Any, freed: int) -> None:
    def resident_bytes() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    side = 3072  # 36 MiB a layer: more than malloc ever keeps for itself
    model = nn.Sequential(*(nn.Sequential(nn.Linear(side, side, bias=False)) for _ in range(3)))
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with Relay(model, optimizer, EmulatedDevice(), loss=lambda out, batch: out.mean()) as relay:
        relay.step((torch.ones(1, side),))
        before = resident_bytes()
        relay.apply(Drop(1, park=park))
        gone = before - resident_bytes()
        assert abs(gone - freed * 4 * side**2) < 2**20 * 8, f"{gone / 2**20:.0f} MiB"


def test_what_the_way_back_holds_is_booked(relay: Relay) -> None:
    before, layer = relay.host.by_category(), relay.stack[0]
    state = 8 * layer.num_params + 4 * len(layer.params)
    relay.apply(Interpolate(0, 1))
    assert relay.host.by_category() == {**before, "other": 4 * layer.num_params + state}
    relay.undo()
    assert relay.host.by_category() == {**before, "other": 4 * layer.num_params + state}, "for redo"
    relay.apply(Swap(0, 1))
    gc.collect()
    assert relay.host.by_category() == before


def test_state_that_an_edit_ends_is_not_booked_any_more(relay: Relay) -> None:
    relay.apply(Insert(at=2, init="copy", optimizer="fresh"))
    before = relay.host.by_category()["optimizer"]
    relay.apply(Interpolate(0, 2))
    layer = relay.stack[0]
    assert before - relay.host.by_category()["optimizer"] == 8 * layer.num_params + 4 * len(layer.params)


def test_a_layer_parked_on_disk_needs_no_memory_and_comes_back_to_the_bit(relay: Relay) -> None:
    before, held, layer = state_of(relay), relay.host.by_category(), relay.stack[1]
    nbytes = layer.nbytes
    relay.apply(Drop(1, park="disk"))
    after = relay.host.by_category()
    assert held["weights"] - after["weights"] == nbytes and "other" not in after
    assert layer.blocks[0].master.numel() == 0 and all(param.numel() == 0 for param in layer.params)
    assert held["optimizer"] - after["optimizer"] >= 8 * 4 * 100
    relay.step(make_batch(3))
    relay.undo()
    now = state_of(relay)
    own = [name for name in before if name.startswith("transformer.h.1.")]
    assert own and all(torch.equal(now[name], before[name]) for name in own)
    assert relay.verify(make_batch()).equal
    relay.redo()
    assert layer.blocks[0].master.numel() == 0
    relay.undo()
    assert relay.verify(make_batch()).equal


def test_a_closed_relay_leaves_nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with make_relay(make_gpt()) as relay:
        relay.apply(Drop(1, park="disk"))
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())
