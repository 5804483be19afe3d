"""A stash on the disk is forecast: its bytes, buffers and file are those of a step that was really made."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from on_shelf import relay_on, smallest, stack
from patience import rarely
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel
from zoo import BY_NAME, Kind

from l2l_core import (
    Disk,
    EmulatedDevice,
    FileShelf,
    Forecast,
    Machine,
    PlannedShelf,
    Profile,
    Relay,
    RelayConfig,
    Trace,
    fit_config,
    forecast_config,
)
from l2l_core.shelf.disk_stash import DiskStashStore

MACHINE = Machine(flops_per_s=1e10, update_params_per_s=1e9, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9)
DISK = Disk(read_bytes_per_s=1e9, write_bytes_per_s=5e8)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
LANES = ("disk read", "disk write")
LENGTH = 16


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How far into the scratch file each pass has come."""
    found: list[int] = []
    clear = DiskStashStore.clear
    monkeypatch.setattr(DiskStashStore, "clear", lambda self: (found.append(self._rotation.file_bytes), clear(self))[1])
    return found


def moved(trace: Trace) -> dict[str, list[tuple[str, int]]]:
    return {lane: sorted((event.kind, event.nbytes) for event in trace.lanes[lane]) for lane in LANES}


def on_host(trace: Trace) -> int:
    return max(s.bytes_by_category.get("stash", 0) for s in trace.memory if s.place == "host")


def assert_same(told: Forecast, trace: Trace, used_bytes: int) -> None:
    assert moved(told.trace) == moved(trace)
    assert told.shelf is not None and told.shelf.scratch_bytes == used_bytes
    assert told.shelf.read_bytes == sum(nbytes for _, nbytes in moved(trace)["disk read"])
    assert told.shelf.written_bytes == sum(nbytes for _, nbytes in moved(trace)["disk write"])
    assert told.host_bytes["stash"] == on_host(trace)


# -- of a configuration ------------------------------------------------------------------------------------------------


def gpt2(depth: int = 5, **options: Any) -> GPT2Config:
    size = {"n_embd": 40, "n_head": 2, "vocab_size": 601, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2Config(n_layer=depth, **size, **options)


def told(config: RelayConfig, model: Any = None, disk: Disk = DISK, **options: Any) -> Forecast:
    count = config.micro_batches
    asked: dict[str, Any] = {"micro_batches": count, "batch": 2 * count, "sequence": LENGTH, "emulated": True}
    asked |= {"optimizer": ADAMW, "shelf": PlannedShelf(disk=disk), "relay_config": config}
    return forecast_config(gpt2() if model is None else model, MACHINE, **(asked | options))


@pytest.mark.parametrize(
    "depth, settings, model",
    [
        (5, {"micro_batches": 4}, {}),
        (3, {"micro_batches": 1}, {}),
        rarely(2, {"micro_batches": 2}, {}),
        rarely(6, {"micro_batches": 7, "update": "deferred"}, {}),
        rarely(4, {"micro_batches": 5, "ahead": 2, "resident": 1}, {}),
        rarely(4, {"micro_batches": 3, "ahead": 0}, {"embd_pdrop": 0.0}),
        rarely(3, {"micro_batches": 3, "precision": "bf16"}, {"tie_word_embeddings": False}),
        rarely(1, {"micro_batches": 3}, {}),
    ],
    ids=str,
)
def test_a_configuration(
    depth: int, settings: dict[str, Any], model: dict[str, Any], folder: Path, used: list[int]
) -> None:
    config, shape = RelayConfig(stash="disk", **settings), gpt2(depth, **model)
    forecast = told(config, shape)
    assert forecast.shelf is not None
    torch.manual_seed(0)
    ids = torch.arange(2 * config.micro_batches * LENGTH).view(-1, LENGTH) % shape.vocab_size
    shelf = FileShelf(folder=folder, memory_bytes=forecast.shelf.min_bytes)
    with Relay(GPT2LMHeadModel(shape), ADAMW, config=config, device=EmulatedDevice(), shelf=shelf) as relay:
        trace = [relay.step({"input_ids": ids, "labels": ids}).trace for _ in range(3)][-1]
    assert_same(forecast, trace, used[-1])
    copied = {lane: sum(e.nbytes for e in trace.lanes[lane] if e.kind in ("fetch", "stash")) for lane in ("h2d", "d2h")}
    for lane, nbytes in copied.items():
        assert nbytes == sum(e.nbytes for e in forecast.trace.lanes[lane] if e.kind in ("fetch", "stash"))


def test_a_slow_disk_takes_its_time_and_a_fast_one_none() -> None:
    config = RelayConfig(micro_batches=4, stash="disk")
    fast, host = (
        told(each, disk=Disk(read_bytes_per_s=1e18, write_bytes_per_s=1e18))
        for each in (config, replace(config, stash="host"))
    )
    slow = told(config, disk=Disk(read_bytes_per_s=1e7, write_bytes_per_s=1e7))
    assert fast.seconds == pytest.approx(host.seconds, rel=0.02)  # a few bytes more go over the link: ids, say
    assert slow.bound is not None and slow.bound.lane in LANES and slow.shelf is not None
    assert slow.seconds >= slow.shelf.read_bytes / 1e7
    reads = {(e.visit, e.k): e for e in slow.trace.lanes["disk read"] if e.kind == "fetch" and e.visit >= 0}
    computes = {(e.visit, e.k): e for e in slow.trace.lanes["compute"]}
    assert reads and all(read.stop_s <= computes[at].start_s for at, read in reads.items())


def test_host_memory_does_not_grow_and_the_disk_does() -> None:
    held = {(d, k): told(RelayConfig(micro_batches=k, stash="disk"), gpt2(d)) for d, k in ((4, 4), (8, 4), (4, 8))}
    assert len({forecast.host_bytes["stash"] for forecast in held.values()}) == 1
    few, *more = (forecast.shelf for forecast in held.values())
    assert few is not None and all(each is not None and each.scratch_bytes > few.scratch_bytes for each in more)
    full = told(RelayConfig(micro_batches=4, stash="disk"), gpt2(4), replace(DISK, free_bytes=few.needed_bytes - 1))
    assert not full.fits and full.largest_depth == 3
    assert told(RelayConfig(micro_batches=4, stash="disk"), gpt2(4), replace(DISK, free_bytes=few.needed_bytes)).fits


def test_a_fit_looks_at_disks_alone() -> None:
    asked: dict[str, Any] = {"micro_batches": 2, "batch": 4, "sequence": LENGTH, "emulated": True, "host_bytes": 10**9}
    fit = fit_config(
        gpt2(), MACHINE, optimizers={"adamw": ADAMW}, disk=DISK, relay_config=RelayConfig(stash="disk"), **asked
    )
    assert [way.name for way in fit.ways] == ["adamw on disk"] and fit.best is not None


def test_what_is_not_known_is_refused() -> None:
    config = RelayConfig(micro_batches=2, stash="disk")
    with pytest.raises(ValueError, match="give shelf=PlannedShelf"):
        told(config, shelf=None)
    bert = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    with pytest.raises(ValueError, match="model_type='bert' keeps have no formula"):
        told(config, bert)
    with pytest.raises(ValueError, match="with adapters keeps have no formula"):
        told(config, adapters=[(8, 40), (40, 8)])


def test_profiles_keep_storages(tmp_path: Path) -> None:
    from l2l_core.forecast.configured_step import ConfiguredStep, estimate_costs
    from l2l_core.forecast.model_shapes import read_model_shapes

    step = ConfiguredStep(read_model_shapes(gpt2(2)), MACHINE, RelayConfig(stash="disk"), 2, LENGTH, 8, True)
    profile = estimate_costs(step).profile
    assert Profile.load(profile.save(tmp_path / "profile.json")).turns == profile.turns


# -- of a relay --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, settings",
    [
        (stack(6), {"micro_batches": 7}),
        rarely(stack(4), {"micro_batches": 1}),
        rarely(stack(3), {"micro_batches": 2, "ahead": 0}),
        (BY_NAME["gpt2"], {"micro_batches": 3}),
        rarely(BY_NAME["gpt2"], {"micro_batches": 6, "ahead": 2, "keep": 2, "resident": 1}),
        rarely(BY_NAME["lora_llama"], {"micro_batches": 5, "update": "deferred"}),
    ],
    ids=str,
)
def test_a_relay(kind: Kind, settings: dict[str, Any], folder: Path, used: list[int]) -> None:
    """With more micro-batches than are rehearsed."""
    config = RelayConfig(stash="disk", **settings)
    nbytes = smallest(folder, kind, config=config)
    batches = [kind.make_batch(2 * config.micro_batches, seed) for seed in range(4)]
    with relay_on(folder, kind, config=config, memory_bytes=nbytes) as relay:
        for batch in batches[:3]:
            relay.step(batch)
        before = relay.host.by_category()
        forecast = relay.forecast(batches[3], disk=DISK)
        assert relay.host.by_category() == before
        trace = relay.step(batches[3]).trace
    assert_same(forecast, trace, used[-1])
    assert forecast.peak_device_bytes == trace.peak_bytes("device")
