"""What is asked of rehearsals is answered from files too: how many graphs fit, and what would fit where a step does not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from on_shelf import ROWS, assert_same, compared, relay_on, smallest, stack, state_of, train, weights_of
from oracle import adamw
from patience import rarely
from zoo import BY_NAME

from l2l_core import DeviceOutOfMemory, Disk, EmulatedDevice, Relay, RelayConfig


def kept_in_memory(config: RelayConfig) -> int:
    kind = stack(5)
    model = kind.make_model()
    with Relay(model, adamw(model), EmulatedDevice(), loss=kind.loss, loss_over=kind.loss_over, config=config) as relay:
        return int(relay.step(kind.make_batch(ROWS, 0)).trace.settings["keep"])


@pytest.mark.parametrize("keep", ["64 kB", "128 kB"])
def test_graphs_are_kept_by_bytes(keep: str, folder: Path) -> None:
    config = RelayConfig(micro_batches=3, keep=keep, resident=1)
    with compared(folder, stack(5), config=config) as (relay, plain):
        train(relay, plain, 2)
        assert relay.trace is not None and relay.trace.settings["keep"] == kept_in_memory(config) > 0


def test_graphs_are_kept_by_bytes_beside_a_stash_on_the_disk(folder: Path) -> None:
    config = RelayConfig(micro_batches=3, keep="128 kB", resident=1)
    with compared(folder, stack(5), config=replace(config, stash="disk")) as (relay, plain):
        train(relay, plain, 2)
        assert relay.trace is not None and relay.trace.settings["stash"] == "disk"
        assert relay.trace.settings["keep"] == kept_in_memory(replace(config, stash="host")) > 0


def test_the_smallest_pool_suffices_for_a_rehearsal(folder: Path) -> None:
    kind, config = stack(5), RelayConfig(micro_batches=3, keep="64 kB")
    nbytes = smallest(folder, kind, config=config)
    with compared(folder, kind, config=config, memory_bytes=nbytes) as (relay, plain):
        train(relay, plain, 2)
        held = relay.host.by_category()
        assert held["weights"] + held["optimizer"] <= nbytes


class Counted(torch.optim.AdamW):
    """Needs its state where its settings say that there is some."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert group.get("counted", 0) == 0 or all(p in self.state for p in group["params"] if p.grad is not None)
        result = super().step(closure)
        for group in self.param_groups:
            group["counted"] = 1
        return result


def test_a_rehearsal_begins_with_the_state_in_the_files(folder: Path) -> None:
    config = RelayConfig(micro_batches=3)
    with compared(folder, stack(3), lambda model: Counted(model.parameters(), lr=1e-3), config=config) as (
        relay,
        plain,
    ):
        train(relay, plain, 1)
        relay.config = RelayConfig(micro_batches=3, keep="64 kB")
        train(relay, plain, 1)


def test_a_step_that_does_not_fit_says_what_would(folder: Path) -> None:
    kind = stack(4)
    with relay_on(folder, kind, device=EmulatedDevice(memory_bytes=9_000)) as relay:
        before = weights_of(relay)
        with pytest.raises(DeviceOutOfMemory) as refused:
            relay.step(kind.make_batch(64, 0))
        assert refused.value.least_bytes is not None and "Remedy" in str(refused.value)
        assert_same(weights_of(relay), before)
        least = refused.value.least_bytes
    assert_same(before, state_of(kind.make_model()))
    assert least > 0


DISK = Disk(read_bytes_per_s=1e9, write_bytes_per_s=5e8)
LANES = ("disk read", "disk write")


@pytest.mark.parametrize(
    "settings",
    [{}, rarely({"ahead": 2}), rarely({"keep": 2, "resident": 1}), rarely({"update": "deferred", "stash": "host"})],
    ids=str,
)
def test_a_forecast_has_the_bytes_of_a_step(settings: dict[str, Any], folder: Path) -> None:
    """Of one that was rehearsed and of one that was measured: with the smallest pool all of them."""
    kind, config = BY_NAME["gpt2"], RelayConfig(micro_batches=2, **settings)
    nbytes = smallest(folder, kind, config=config)
    batches = [kind.make_batch(4, seed) for seed in range(5)]
    with relay_on(folder, kind, config=config, memory_bytes=nbytes) as relay:
        for batch in batches[:2]:
            relay.step(batch)
        before, drawn = weights_of(relay), torch.get_rng_state()
        last = relay.trace
        rehearsed = relay.forecast(batches[2], replace(config, rollback=True), disk=DISK)
        assert "rehearsal" in rehearsed.basis
        assert relay.trace is last and torch.equal(drawn, torch.get_rng_state())
        assert_same(weights_of(relay), before)
        relay.step(batches[2])
        measured = relay.forecast(batches[3], disk=DISK)
        result = relay.step(batches[3])
        trace = result.trace
        assert "measured" in measured.basis
        for found in (rehearsed, measured):
            for lane in LANES:
                sizes = [sorted(event.nbytes for event in each.lanes[lane]) for each in (found.trace, trace)]
                assert sizes[0] == sizes[1], lane
            shelf = found.shelf
            assert shelf is not None and shelf.memory_bytes == shelf.min_bytes == nbytes
            moved = [sum(event.nbytes for event in trace.lanes[lane]) for lane in LANES]
            assert [shelf.read_bytes, shelf.written_bytes] == moved
            assert shelf.disk_bytes == sum(path.stat().st_size for path in (folder / "records").iterdir())
            assert found.peak_device_bytes == result.peak_device_bytes
            for category in ("weights", "optimizer"):
                most = max(s.bytes_by_category.get(category, 0) for s in trace.memory if s.place == "host")
                if config.update == "eager":  # deferred ones come after the last sample
                    assert found.host_bytes[category] == most, category


@pytest.mark.slow
def test_a_slow_disk_binds_in_a_forecast(folder: Path) -> None:
    kind = stack(5)
    with relay_on(folder, kind) as relay:
        relay.step(kind.make_batch(ROWS, 0))
        slow, fast = (
            relay.forecast(kind.make_batch(ROWS, 1), disk=Disk(read_bytes_per_s=speed, write_bytes_per_s=speed))
            for speed in (1e5, 1e12)
        )
        assert slow.seconds > 2 * fast.seconds and "disk" in str(slow.bound)
        assert relay.forecast(kind.make_batch(ROWS, 1)).shelf is not None  # measured there
        with pytest.raises(ValueError, match="ahead=4 takes .* and the shelf has"):
            tight = RelayConfig(micro_batches=3, ahead=4)
            with relay_on(folder / "tight", kind, memory_bytes=smallest(folder / "tight", kind)) as other:
                other.forecast(kind.make_batch(ROWS, 1), tight, disk=DISK)
        with pytest.raises(ValueError, match="of several workers"):
            relay.forecast(kind.make_batch(ROWS, 1), workers=2, disk=DISK)


def test_forecasts_that_are_not_there(folder: Path) -> None:
    kind = BY_NAME["tied_layers"]
    with relay_on(folder, kind) as relay, pytest.raises(ValueError, match="is in several layers"):
        relay.forecast(kind.make_batch(ROWS, 0), disk=DISK)
    kind = stack(3)
    model = kind.make_model()
    with Relay(model, adamw(model), EmulatedDevice(), loss=kind.loss, loss_over=kind.loss_over) as relay:
        with pytest.raises(ValueError, match="Leave disk out"):
            relay.forecast(kind.make_batch(ROWS, 0), disk=DISK)
