"""Device memory: flat in depth and in micro-batches, exact where it is booked, and an error that helps when it is full."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from deep_models import ROWS, WIDTH, Chain, Recurring, chain_batch, gpt2, padded_batch, squared_error
from patience import rarely
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from l2l_core import DeviceOutOfMemory, EmulatedDevice, Relay, RelayConfig, TornStep
from l2l_core.devices.ledger import Ledger


def peaks(model: nn.Module, batch: Any, micro_batches: int, **options: Any) -> list[int]:
    """Peak device bytes of a metered step and of one that replays its profile."""
    config = RelayConfig(micro_batches=micro_batches, stash="host")
    with Relay(model, partial(torch.optim.SGD, lr=0.01), config=config, **options) as relay:
        return [relay.step(batch).peak_device_bytes for _ in range(2)]


def spread(values: list[int]) -> float:
    return max(values) / min(values) - 1


def test_a_chains_peak_is_flat_from_12_to_384_layers() -> None:
    metered, replayed = zip(*(peaks(Chain(n), chain_batch(2), 2, loss=squared_error) for n in (12, 384)), strict=True)
    assert spread(list(metered)) <= 0.01
    assert spread(list(replayed)) <= 0.01


@pytest.mark.parametrize("most", [96, rarely(384)])
def test_gpt2_with_padding_is_flat_from_12_layers_on(most: int) -> None:
    metered, replayed = zip(*(peaks(gpt2(n), padded_batch(2), 2) for n in (12, most)), strict=True)
    assert spread(list(metered)) <= 0.01
    assert spread(list(replayed)) <= 0.01


def test_peaks_are_flat_from_1_to_32_micro_batches() -> None:
    chain = [peaks(Chain(4), chain_batch(k), k, loss=squared_error) for k in (1, 2, 5, 32)]
    gpt = [peaks(gpt2(3), padded_batch(k), k) for k in (1, 2, 5, 32)]
    for values in (*zip(*chain, strict=True), *zip(*gpt, strict=True)):
        assert spread(list(values)) <= 0.01


class Early(Chain):
    """Rows decide how deep it is; the first micro-batch is the last one to finish."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = self.layers if x[0, 0] > 5 else self.layers[:2]
        x = self.stem(x)
        for layer in layers:
            x = x + layer(x)
        return self.head(x)


def test_peaks_are_flat_where_micro_batches_finish_early_or_layers_recur() -> None:
    def all_peaks(make_model: Any, micro_batches: int) -> list[int]:
        inputs, targets = chain_batch(micro_batches)
        inputs[0, 0] = 10.0
        config = RelayConfig(micro_batches=micro_batches, stash="host")
        # The first row decides for others of its micro-batch.
        with Relay(make_model(), loss=squared_error, loss_over="micro-batch", config=config) as relay:
            return [relay.step((inputs, targets)).peak_device_bytes for _ in range(3)]

    for make_model in (Recurring, lambda: Early(5)):
        for values in zip(*(all_peaks(make_model, k) for k in (2, 5, 32)), strict=True):
            assert spread(list(values)) <= 0.01, values


def test_the_stash_on_the_device_grows_with_depth() -> None:
    """The flatness above is not an artefact of counting nothing."""

    def peak(depth: int) -> int:
        with Relay(Chain(depth), loss=squared_error, config=RelayConfig(micro_batches=2)) as relay:
            return relay.step(chain_batch(2)).peak_device_bytes

    boundary = ROWS * WIDTH * 4
    assert peak(40) - peak(20) >= 20 * 2 * boundary


def test_384_layers_take_linear_work() -> None:
    """Events, not seconds: the graph is walked and run a number of times that does not depend on depth."""

    def backward_nodes(depth: int) -> int:
        counted = 0

        def count(*_: Any) -> None:
            nonlocal counted
            counted += 1

        model = Chain(depth)
        with Relay(model, loss=squared_error, config=RelayConfig(micro_batches=1, verify="never")) as relay:
            model.stem.weight.register_hook(count)
            result = relay.step(chain_batch(1))
        assert counted == 1, "the segment before the first layer ran backward more than once"
        return len(result.trace.events)

    assert backward_nodes(384) / backward_nodes(96) == pytest.approx(4, rel=0.05)


class Whole(nn.Module):
    """A model whose only layer is nearly everything."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Chain(2, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.parametrize(
    "make, layer, batch", [(Whole, "body", chain_batch(1, 256)), (lambda: gpt2(2), "transformer", padded_batch(1))]
)
def test_the_meter_agrees_with_memtracker(make: Any, layer: str, batch: Any) -> None:
    """Activations at the peak, counted by us and by PyTorch's own tracker, where a single layer is the whole model."""
    options = {} if isinstance(batch, dict) else {"loss": squared_error}
    with Relay(make(), partial(torch.optim.SGD, lr=0.01), layers=[layer], **options) as relay:
        peak = relay.step(batch).trace.peak_sample("device").bytes_by_category
    ours = peak["activations"] + peak["stash"]

    model, tracker = make(), MemTracker()
    tracker.track_external(model)
    with tracker:
        inputs = batch if isinstance(batch, dict) else {}
        loss = model(**inputs, use_cache=False).loss if inputs else squared_error(model(batch[0]), batch)
        loss.backward()
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    theirs = sum(n for kind, n in snapshot.items() if getattr(kind, "value", kind) in ("Activation", "Temp"))
    assert ours == pytest.approx(theirs, rel=0.02)


def test_metered_activations_are_those_of_a_layer_counted_by_hand() -> None:
    """A layer whose graph keeps exactly three tensors of known size."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(torch.sigmoid(x * self.scale))  # x is stash; product dies, sigmoid and tanh are saved

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Three() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    x = torch.randn(1000, 10)
    objective = lambda model, batch: model(batch[0]).sum()  # noqa: E731
    with Relay(Model(), objective=objective, config=RelayConfig(stash="host")) as relay:
        trace = relay.step((x,)).trace
    high = max(s.bytes_by_category.get("activations", 0) for s in trace.memory if s.place == "device")
    assert 2 * x.nbytes <= high <= 4.1 * x.nbytes


# -- the budget ------------------------------------------------------------------------------------------------------------


def test_a_step_that_fits_the_budget_exactly_runs_and_one_byte_less_does_not() -> None:
    batch = chain_batch(2)
    config = RelayConfig(micro_batches=2, stash="host", meter="always")
    with Relay(Chain(6), loss=squared_error, config=config) as relay:
        need = relay.step(batch).peak_device_bytes
    for budget, fits in ((need, True), (need - 1, False)):
        with Relay(Chain(6), device=EmulatedDevice(memory_bytes=budget), loss=squared_error, config=config) as relay:
            if fits:
                assert relay.step(batch).peak_device_bytes == need
            else:
                with pytest.raises((DeviceOutOfMemory, TornStep)):
                    relay.step(batch)


def test_the_budget_holds_in_steps_that_are_not_metered() -> None:
    batch = chain_batch(2)
    with Relay(Chain(6), loss=squared_error, config=RelayConfig(micro_batches=2, stash="host")) as relay:
        need = relay.step(batch).peak_device_bytes
        relay.device.ledger.limit_bytes = need // 2
        with pytest.raises((DeviceOutOfMemory, TornStep)):
            relay.step(batch)


def error_of(budget: int, model: nn.Module, batch: Any, **settings: Any) -> DeviceOutOfMemory:
    options = {} if isinstance(batch, dict) else {"loss": squared_error}
    with Relay(model, device=EmulatedDevice(memory_bytes=budget), config=RelayConfig(**settings), **options) as relay:
        with pytest.raises((DeviceOutOfMemory, TornStep)) as caught:
            relay.step(batch)
        error = caught.value.__cause__ if isinstance(caught.value, TornStep) else caught.value
        assert isinstance(error, DeviceOutOfMemory)
        return error


@pytest.mark.slow  # of 512 rows; test_what_fits.py takes the advice of errors on smaller batches
def test_the_error_says_what_fills_the_device_and_its_first_remedy_works() -> None:
    """Stash on the device does not fit; the message says so, and with the settings that it names the step runs."""
    batch, budget = chain_batch(8, rows=64), 700_000
    error = error_of(budget, Chain(12), batch, micro_batches=8)
    text = str(error)
    assert "emulated device of 700 kB is full" in text
    assert "stash" in text and "weights" in text and "in use" in text
    assert "Remedy: RelayConfig(" in text and "stash='host') needs" in text
    assert error.limit_bytes == budget
    assert error.requested_bytes + sum(error.bytes_by_category.values()) > budget
    fitting = replace(RelayConfig(micro_batches=8), **error.settings)
    with Relay(Chain(12), device=EmulatedDevice(memory_bytes=budget), loss=squared_error, config=fitting) as relay:
        assert relay.step(batch).peak_device_bytes <= budget


def test_the_remedy_ahead_0_works() -> None:
    batch = chain_batch(1, rows=1)  # no more micro-batches: which settings are faster is a matter of time
    with Relay(Chain(4, 128), loss=squared_error, config=RelayConfig(stash="host", ahead=0)) as relay:
        budget = relay.step(batch).peak_device_bytes
    error = error_of(budget + 1000, Chain(4, 128), batch, stash="host")
    assert "RelayConfig(ahead=0)" in str(error)
    device, fitting = EmulatedDevice(memory_bytes=budget + 1000), replace(RelayConfig(stash="host"), **error.settings)
    with Relay(Chain(4, 128), device=device, loss=squared_error, config=fitting) as relay:
        relay.step(batch)


def test_the_remedy_more_micro_batches_works() -> None:
    batch = chain_batch(8, rows=64)
    config = RelayConfig(micro_batches=4, stash="host", ahead=0)
    with Relay(Chain(4), loss=squared_error, config=config) as relay:
        budget = relay.step(batch).peak_device_bytes
    error = error_of(budget, Chain(4), batch, micro_batches=2, stash="host", ahead=0)
    assert error.settings and "Remedy: RelayConfig(micro_batches=" in str(error)
    fitting = replace(RelayConfig(micro_batches=2, stash="host", ahead=0), **error.settings)
    with Relay(Chain(4), device=EmulatedDevice(memory_bytes=budget), loss=squared_error, config=fitting) as relay:
        assert relay.step(batch).peak_device_bytes <= budget


def test_weights_that_are_too_large_are_called_so() -> None:
    error = error_of(10_000, Chain(4), chain_batch(1), ahead=0)
    assert "separate layers" in str(error)
    assert error.bytes_by_category.get("activations", 0) == 0


def test_device_memory_adds_up_and_is_empty_after_a_step() -> None:
    with Relay(Chain(4), loss=squared_error, config=RelayConfig(micro_batches=2)) as relay:
        result = relay.step(chain_batch(2))
        assert result.trace.peak_bytes("device") == result.peak_device_bytes
        assert relay.device.ledger.total == 0
        assert {"weights", "gradients", "stash", "activations"} <= set(
            result.trace.peak_sample("device").bytes_by_category
        )
        masters = sum(block.nbytes for unit in [relay.shell, *relay.stack] for block in unit.blocks)
        assert relay.host.by_category()["weights"] == masters


def test_host_bytes_per_parameter_stay_below_16_plus_fixed_buffers() -> None:
    model = Chain(32, 128)
    with Relay(model, partial(torch.optim.AdamW, lr=1e-3), loss=squared_error, config=RelayConfig()) as relay:
        relay.step(chain_batch(1))
        held = relay.host.by_category()
        largest = max(unit.nbytes for unit in [relay.shell, *relay.stack])
    params = sum(p.numel() for p in model.parameters())
    assert (held["weights"] + held["optimizer"]) / params <= 12.2
    assert held["gradients"] <= 5 * largest, "gradient buffers do not grow with depth"


# -- the ledger ------------------------------------------------------------------------------------------------------------


def test_a_ledger_keeps_the_categories_of_its_peak() -> None:
    ledger = Ledger("device", "A device", limit_bytes=100)
    ledger.book("weights", "slot", 60)
    ledger.book("stash", "", 30)
    ledger.release("weights", "slot", 60)
    ledger.book("other", "", 10)
    assert ledger.total == 40
    assert ledger.peak == 90
    assert ledger.take_high_water() == {"weights": 60, "stash": 30}
    assert ledger.take_high_water() == {"stash": 30, "other": 10}
    with pytest.raises(DeviceOutOfMemory):
        ledger.book("stash", "", 61)
    assert ledger.total == 40
    with pytest.raises(AssertionError, match="released twice"):
        ledger.release("other", "", 11)
