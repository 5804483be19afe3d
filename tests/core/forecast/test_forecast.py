"""Compare forecasts with the ledgers of real steps, and with stacks of exactly the largest depth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from deep_models import Chain, chain_batch, squared_error
from late_cuda import LateDevice
from oracle import adamw
from patience import rarely
from small import assert_same, make_batch, make_relay, whole
from small import make_gpt as make_small_gpt
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    ViTConfig,
    ViTForImageClassification,
)
from zoo import BY_NAME, Kind

from l2l_core import (
    Compress,
    DeviceOutOfMemory,
    Drop,
    EmulatedDevice,
    Machine,
    Profile,
    Relay,
    RelayConfig,
    Shapes,
    forecast_config,
    simulate,
)
from l2l_core.forecast import rehearsal
from l2l_core.forecast.memory_timeline import MemoryTimeline
from l2l_core.forecast.model_shapes import read_model_shapes
from l2l_core.forecast.profile_transforms import extrapolate_profile
from l2l_core.forecast.representatives import choose_representatives, repeat_middle
from l2l_core.forecast.step_limits import hiding_micro_batches
from l2l_core.schedule_rules import MAX_PENDING_GRADIENTS

MACHINE = Machine(flops_per_s=1e9, update_params_per_s=1e6, h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e6)


@pytest.fixture(autouse=True)
def one_timed_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time one pass only, since no test here needs seconds."""
    monkeypatch.setattr(rehearsal, "MAX_PASSES", 1)


@contextmanager
def relay_of(kind: Kind, config: RelayConfig) -> Iterator[Relay]:
    """Yield a relay for a model of the zoo on an emulated device behind a slow link."""
    model = kind.make_model()
    device = EmulatedDevice(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9)
    with Relay(
        model, adamw(model), device, layers=kind.layers, loss=kind.loss, loss_over=kind.loss_over, config=config
    ) as relay:
        yield relay


def chain(depth: int, config: RelayConfig, device: EmulatedDevice | None = None) -> Relay:
    optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    return Relay(Chain(depth), optimizer, device or EmulatedDevice(), loss=squared_error, config=config)


def assert_bytes(
    relay: Relay, batch: Any, config: RelayConfig | None = None, timed: frozenset[str] = frozenset({"gradients"})
) -> None:
    """Forecast, then make steps: device bytes agree to 2 %, and host bytes except those of the categories in `timed`.

    Metered steps (the first; the first two if the layer order was not predicted) book a little less than all later ones.
    """
    forecast = relay.forecast(batch, config)
    relay.config = config or relay.config
    for result in [relay.step(batch) for _ in range(4)][2:]:
        check = forecast.check(result)
        assert abs(check.peak_device.error) <= 0.02, str(check)
        for row in check.host:
            if row.name not in timed:
                assert abs(row.forecast - row.measured) <= 0.02 * check.peak_host.measured, str(check)
    if relay.config.ahead == 0 and "stash" not in timed:  # nothing depends on timing
        assert abs(check.peak_host.error) <= 0.02, str(check)
    whole_bytes = sum(block.nbytes for unit in [relay.shell, *relay.stack] for block in unit.blocks)
    assert forecast.host_bytes["gradients"] <= (relay.config.micro_batches + MAX_PENDING_GRADIENTS) * whole_bytes


# -- bytes, against the ledgers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "stash, ahead", [("device", 0), ("device", 1), rarely("device", 2), ("host", 0), ("host", 1), rarely("host", 2)]
)
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_bytes_before_any_step(name: str, stash: str, ahead: int, precision: str) -> None:
    config = RelayConfig(micro_batches=3, stash=stash, ahead=ahead, precision=precision)
    with relay_of(BY_NAME[name], config) as relay:
        assert_bytes(relay, BY_NAME[name].make_batch(6))


@pytest.mark.parametrize("micro_batches, ahead", [(1, 1), (3, 1), rarely(3, 0), rarely(4, 2)])
@pytest.mark.parametrize(
    "name", ["gpt2", "albert", "tied_layers", rarely("t5"), rarely("resnet"), rarely("frozen_prefix")]
)
def test_bytes_depth_first(name: str, micro_batches: int, ahead: int) -> None:
    config = RelayConfig(micro_batches=micro_batches, ahead=ahead, schedule="depth_first", keep=12, resident=12)
    with relay_of(BY_NAME[name], config) as relay:
        assert_bytes(relay, BY_NAME[name].make_batch(2 * micro_batches))
        assert "measured" in relay.forecast(BY_NAME[name].make_batch(2 * micro_batches)).basis
        assert "rehearsal" in relay.forecast(BY_NAME[name].make_batch(6), replace(config, micro_batches=6)).basis


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("name", ["albert", "tied_layers"])
def test_layers_that_are_called_many_times(name: str, stash: str, micro_batches: int) -> None:
    """The first step agrees too, since the forecast has found the layer order."""
    config, batch = RelayConfig(micro_batches=micro_batches, stash=stash), BY_NAME[name].make_batch(2 * micro_batches)
    with relay_of(BY_NAME[name], config) as relay:
        forecast = relay.forecast(batch)
        for check in [forecast.check(relay.step(batch)) for _ in range(3)]:
            assert abs(check.peak_device.error) <= 0.02, str(check)
    with relay_of(BY_NAME[name], config) as relay:
        relay.step(batch)  # without a forecast the step finds the layer order
        assert_bytes(relay, batch, timed=frozenset({"gradients", "stash"}))


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_bytes_at_any_number_of_micro_batches(stash: str, micro_batches: int) -> None:
    config = RelayConfig(micro_batches=micro_batches, stash=stash)
    with relay_of(BY_NAME["gpt2"], config) as relay:
        assert_bytes(relay, BY_NAME["gpt2"].make_batch(2 * micro_batches))


@pytest.mark.parametrize("rows, micro_batches", [(7, 4), (13, 7), (9, 5), (5, 4), (10, 7)])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_bytes_with_an_uneven_last_micro_batch(stash: str, rows: int, micro_batches: int) -> None:
    config = RelayConfig(micro_batches=micro_batches, stash=stash)
    with relay_of(BY_NAME["chain"], config) as relay:
        assert_bytes(relay, BY_NAME["chain"].make_batch(rows))


@pytest.mark.parametrize("update", ["eager", "deferred"])
@pytest.mark.parametrize(
    "name",
    [
        *("frozen_layer", "frozen_prefix", "tied_layers", "t5", "unet", "mixture", "albert"),
        *("lora", "lora_tied", "lora_llama", "lora_albert"),
    ],
)
def test_bytes_of_unusual_models(name: str, update: str) -> None:
    """Without the ResNet of the zoo, whose measured peak varies by 4 % from step to step."""
    config = RelayConfig(micro_batches=5, stash="host", update=update)
    with relay_of(BY_NAME[name], config) as relay:
        assert_bytes(relay, BY_NAME[name].make_batch(5))


@pytest.mark.parametrize("name, precision", [("batch_norm", "fp32"), ("gpt2", "bf16")])
def test_bytes_on_a_device_with_separate_memory(name: str, precision: str) -> None:
    """On a fake GPU buffers move, and bfloat16 weights have a second copy on the host.

    The end of its copies depends on timing, and so do the bytes of the stash on the host.
    """
    config = RelayConfig(micro_batches=2, stash="host", ahead=0, precision=precision)
    kind = BY_NAME[name]
    model, device = kind.make_model(), LateDevice()
    with Relay(
        model, adamw(model), device, layers=kind.layers, loss=kind.loss, loss_over=kind.loss_over, config=config
    ) as relay:
        held = relay.host.by_category()
        relay.forecast(kind.make_batch(4))
        assert held == relay.host.by_category() and not device.ledger.by_category()
        assert_bytes(relay, kind.make_batch(4), timed=frozenset({"gradients", "stash"}))


def test_clipping_and_metering_in_every_step_can_be_forecast() -> None:
    config = RelayConfig(micro_batches=2, update="deferred", max_grad_norm=1.0, meter="always")
    with relay_of(BY_NAME["gpt2"], config) as relay:
        assert_bytes(relay, BY_NAME["gpt2"].make_batch(4))
        assert "measured" in relay.forecast(BY_NAME["gpt2"].make_batch(4)).basis


def test_another_config_than_the_relays_own() -> None:
    with relay_of(BY_NAME["gpt2"], RelayConfig(micro_batches=2)) as relay:
        relay.step(BY_NAME["gpt2"].make_batch(4))
        assert_bytes(relay, BY_NAME["gpt2"].make_batch(6), RelayConfig(micro_batches=6, stash="host", precision="bf16"))


# -- from the last step ------------------------------------------------------------------------------------------------


def test_after_steps_of_the_same_kind_nothing_runs_again() -> None:
    config = RelayConfig(micro_batches=4)
    calls: list[int] = []
    with chain(4, config) as relay:
        batch = chain_batch(4)
        relay.step(batch)
        assert "rehearsal" in relay.forecast(batch).basis, "the first step was metered, so it took longer"
        result = relay.step(batch)
        relay.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
        forecast = relay.forecast(batch)
        assert forecast.basis.startswith("step 2, measured") and not calls
        assert dict(forecast.device_bytes) == dict(result.trace.peak_sample("device").bytes_by_category)
        assert [e.label() for e in forecast.trace.lanes["compute"]] == [
            e.label() for e in result.trace.lanes["compute"]
        ]
        assert forecast.trace.busy_s("compute") == pytest.approx(result.trace.busy_s("compute"))


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("micro_batches, ahead", [(4, 2), (9, 1), (6, 3)])
def test_a_recorded_step_is_extrapolated_to_more_micro_batches_and_slots(
    stash: str, micro_batches: int, ahead: int
) -> None:
    with chain(5, RelayConfig(micro_batches=4, stash=stash)) as relay:
        for _ in range(2):
            relay.step(chain_batch(4))
        config = RelayConfig(micro_batches=micro_batches, ahead=ahead, stash=stash)
        assert "measured" in relay.forecast(chain_batch(micro_batches), config).basis
        assert_bytes(relay, chain_batch(micro_batches), config)


@pytest.mark.parametrize("change", ["edit", "rows", "stash", "freeze", "link"])
def test_a_step_of_another_kind_does_not_count(change: str) -> None:
    slow = EmulatedDevice(h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8)
    with chain(4, RelayConfig(micro_batches=4), slow) as relay:
        for _ in range(2):
            relay.step(chain_batch(4))
        batch, config, device = chain_batch(4), None, None
        if change == "edit":
            relay.apply(Drop(1))
        elif change == "rows":
            batch = chain_batch(4, rows=3)
        elif change == "stash":
            config = RelayConfig(micro_batches=4, stash="host")
        elif change == "freeze":
            relay.model.layers[1].requires_grad_(False)
        else:
            device = EmulatedDevice()
        assert "rehearsal" in relay.forecast(batch, config, device=device).basis


# -- nothing changes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"stash": "host"}, {"precision": "bf16"}, {"update": "deferred", "max_grad_norm": 0.1}]
)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_forecast_changes_nothing(steps: int, settings: dict[str, Any]) -> None:
    with make_relay(make_small_gpt()) as relay:
        hooked: list[int] = []
        for _ in range(steps):
            relay.step(make_batch())
        relay.optimizer.register_step_post_hook(lambda *_: hooked.append(1))
        relay.model.transformer.h[0].eval()
        before = whole(relay)
        others = relay.trace, relay.journal, relay.config, [dict(unit.stats) for unit in relay.stack]
        modes = [module.training for module in relay.model.modules()]
        held = relay.host.by_category(), relay.device.ledger.by_category()
        relay.forecast(make_batch(), RelayConfig(micro_batches=2, **settings))
        assert_same(before, whole(relay))
        assert others[0] is relay.trace and others[1:3] == (relay.journal, relay.config)
        assert others[3] == [dict(unit.stats) for unit in relay.stack]
        assert modes == [module.training for module in relay.model.modules()]
        assert held == (relay.host.by_category(), relay.device.ledger.by_category())
        assert not hooked and all(param.grad is None for param in relay.model.parameters())


def test_running_statistics_stay_as_they_are() -> None:
    with relay_of(BY_NAME["batch_norm"], RelayConfig(micro_batches=2)) as relay:
        before = {name: buffer.clone() for name, buffer in relay.model.named_buffers()}
        relay.forecast(BY_NAME["batch_norm"].make_batch(4))
        assert all(torch.equal(buffer, before[name]) for name, buffer in relay.model.named_buffers())


def test_steps_after_a_forecast_are_those_without_one() -> None:
    with make_relay(make_small_gpt()) as asked, make_relay(make_small_gpt()) as other:
        for seed in range(3):
            asked.forecast(make_batch(seed))
            assert asked.step(make_batch(seed)).loss == other.step(make_batch(seed)).loss
        assert_same(whole(asked), whole(other))


def test_a_failing_rehearsal_leaves_the_relay_as_it_was() -> None:
    with chain(3, RelayConfig()) as relay:
        with pytest.raises(RuntimeError, match="mat1 and mat2|shape"):
            relay.forecast((torch.zeros(2, 5), torch.zeros(2, 3)))
        assert relay.step(chain_batch(1)).loss > 0


# -- figures and words -------------------------------------------------------------------------------------------------


def test_a_step_that_does_not_fit_can_be_forecast() -> None:
    config = RelayConfig(micro_batches=4)
    with chain(6, config) as roomy:
        need = roomy.forecast(chain_batch(4)).peak_device_bytes
    with chain(6, config, EmulatedDevice(memory_bytes=need - 1)) as tight:
        forecast = tight.forecast(chain_batch(4))
        assert forecast.peak_device_bytes == need and not forecast.fits and "does not fit the device" in str(forecast)
        with pytest.raises(DeviceOutOfMemory):
            tight.step(chain_batch(4))
    with chain(6, config, EmulatedDevice(memory_bytes=need)) as enough:
        assert enough.forecast(chain_batch(4)).fits
        enough.step(chain_batch(4))


@pytest.mark.parametrize("micro_batches", [1, rarely(2), 6])
@pytest.mark.parametrize("start_depth", [2, rarely(5), rarely(14)])
def test_the_largest_depth_fits_and_one_more_does_not(start_depth: int, micro_batches: int) -> None:
    check_largest_depth(start_depth, RelayConfig(micro_batches=micro_batches))


@pytest.mark.parametrize("start_depth, keep", [(5, 4), rarely(5, 3), rarely(12, 4), rarely(12, 9)])
def test_deeper_stacks_keep_no_more_graphs(start_depth: int, keep: int) -> None:
    check_largest_depth(start_depth, RelayConfig(micro_batches=2, resident=2, ahead=1, keep=keep))


@pytest.mark.all_cases
@pytest.mark.parametrize("ahead, resident", [(1, 20), rarely(1, 7), rarely(5, 0)])
@pytest.mark.parametrize("start_depth", [4, 12, rarely(2)])
def test_the_largest_depth_in_core(start_depth: int, ahead: int, resident: int) -> None:
    """Each layer takes a gradient and a graph, and a slot unless the slots for loads ahead are more than the layers."""
    config = RelayConfig(micro_batches=2, schedule="depth_first", keep=20, ahead=ahead, resident=resident)
    for depth in (3, 9):
        with chain(depth, config) as other:
            budget = other.forecast(chain_batch(2)).peak_device_bytes + 7
        with chain(start_depth, config) as relay:
            forecast = relay.forecast(chain_batch(2), device={"memory_bytes": budget})
        assert forecast.largest_depth == depth


def check_largest_depth(start_depth: int, config: RelayConfig) -> None:
    micro_batches = config.micro_batches
    with chain(9, config) as nine:
        budget = nine.forecast(chain_batch(micro_batches)).peak_device_bytes + 7
    with chain(start_depth, config) as relay:
        depth = relay.forecast(chain_batch(micro_batches), device={"memory_bytes": budget}).largest_depth
    assert depth == 9
    with chain(depth, config, EmulatedDevice(memory_bytes=budget)) as fits:
        for _ in range(2):
            fits.step(chain_batch(micro_batches))
    with chain(depth + 1, config, EmulatedDevice(memory_bytes=budget)) as full, pytest.raises(DeviceOutOfMemory):
        full.step(chain_batch(micro_batches))


@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_the_hosts_bytes_limit_the_depth(update: str) -> None:
    config = RelayConfig(micro_batches=3, stash="host", ahead=0, update=update)
    with chain(4, config) as relay:
        assert relay.forecast(chain_batch(3), device={"memory_bytes": 10**7}).largest_depth is None, (
            "independent of depth"
        )
        depth = relay.forecast(chain_batch(3), host_bytes=10**6).largest_depth
    assert depth is not None and depth > 4
    peaks = []
    for layers in (depth, depth + 1):
        with chain(layers, config) as relay:
            for _ in range(2):
                relay.step(chain_batch(3))
            peaks.append(relay.host.peak)
    assert peaks[0] <= 10**6 < peaks[1]


def test_not_even_one_layer_fits() -> None:
    with chain(4, RelayConfig()) as relay:
        assert relay.forecast(chain_batch(1), device={"memory_bytes": 1000}).largest_depth == 0


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("bytes_per_s", [2e5, 1e6, 4e6, 1e8])
def test_the_number_that_hides_the_link_is_the_smallest(bytes_per_s: float, stash: str) -> None:
    """Compare with profiles made for every number of micro-batches, without extrapolation."""
    sizes: dict[str, Any] = {"shell_params": 10, "tokens": 500, "boundary_bytes": 100, "stash": stash}
    link = {"h2d_bytes_per_s": bytes_per_s, "d2h_bytes_per_s": bytes_per_s}

    def profile(count: int) -> Profile:
        return Profile.of_shapes(Shapes(layer_params=[1000] * 12, micro_batches=count, **sizes), MACHINE)

    def binds(count: int) -> bool:
        trace = simulate(profile(count), RelayConfig(micro_batches=count, stash=stash), link)
        return any(b.phase in ("forward", "backward") and b.lane in ("h2d", "d2h") for b in trace.bound_by())

    found = hiding_micro_batches(profile(4), RelayConfig(micro_batches=4, stash=stash), link)
    if found is not None and found > 64:  # too many to try all
        assert binds(found - 1) and not binds(found)
    else:
        assert found == next((count for count in range(1, 65) if not binds(count)), None)


def hides(profile: Profile, count: int) -> bool:
    """Return True if `count` micro-batches like the profile's hide the link, by simulation."""
    config = RelayConfig(micro_batches=count, stash=profile.settings["stash"])
    trace = simulate(extrapolate_profile(profile, repeat_middle(profile.micro_batches, count)), config)
    return not any(b.phase in ("forward", "backward") and b.lane in ("h2d", "d2h") for b in trace.bound_by())


@pytest.mark.parametrize("bytes_per_s", [0.9e9, 1.4e9])
def test_a_number_beyond_the_powers_of_two_that_are_simulated(bytes_per_s: float) -> None:
    """For 60 layers up to 84 micro-batches are simulated."""
    machine = Machine(
        flops_per_s=1e12, update_params_per_s=1e9, h2d_bytes_per_s=bytes_per_s, d2h_bytes_per_s=bytes_per_s
    )
    sizes: dict[str, Any] = {"shell_params": 10, "tokens": 20, "boundary_bytes": 4000, "stash": "device"}
    profile = Profile.of_shapes(Shapes(layer_params=[1_000_000] * 60, micro_batches=4, **sizes), machine)
    found = hiding_micro_batches(profile, RelayConfig(micro_batches=4, stash="device"), {})
    assert found is not None and hides(profile, found)
    if found <= 84:
        assert found > 64 and not hides(profile, found - 1)
    else:  # the arithmetic hides all of the link, a bound ignores 5 %
        assert not hides(profile, int(0.9 * found))


def test_a_link_that_grows_as_fast_as_compute_is_never_hidden() -> None:
    sizes: dict[str, Any] = {"shell_params": 10, "tokens": 10, "boundary_bytes": 10**6, "stash": "host"}
    profile = Profile.of_shapes(Shapes(layer_params=[1000] * 12, micro_batches=4, **sizes), MACHINE)
    assert hiding_micro_batches(profile, RelayConfig(micro_batches=4, stash="host"), {"h2d_bytes_per_s": 1e6}) is None


def test_the_check_names_wrong_figures() -> None:
    with chain(3, RelayConfig(stash="host")) as relay:
        batch = chain_batch(1)
        forecast = relay.forecast(batch, RelayConfig(stash="host", ahead=0))
        check = forecast.check(relay.step(batch))
    slots = {row.name: row.error for row in check.device}
    assert slots["weights"] < 0 and slots["gradients"] < 0, "one slot of each fewer than with ahead=1"
    assert check.peak_device.error == pytest.approx(check.peak_device.forecast / check.peak_device.measured - 1)
    assert "device weights" in str(check) and "seconds" in str(check) and "%" in str(check)
    assert forecast.basis.split(":")[0] in str(forecast)


def test_bad_input_is_named() -> None:
    with chain(3, RelayConfig()) as relay:
        with pytest.raises(TypeError, match="config=4"):
            relay.forecast(chain_batch(1), 4)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="host_bytes=0"):
            relay.forecast(chain_batch(1), host_bytes=0)
        with pytest.raises(ValueError, match="figure 'bytes'.*h2d_bytes_per_s"):
            relay.forecast(chain_batch(1), device={"bytes": 1})
        with pytest.raises(ValueError, match="memory_bytes=-1"):
            relay.forecast(chain_batch(1), device={"memory_bytes": -1})
        with pytest.raises(TypeError, match="device=7"):
            relay.forecast(chain_batch(1), device=7)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="batch is a Tensor"):
            relay.forecast(torch.zeros(2, 8))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="closed"):
        relay.forecast(chain_batch(1))


@pytest.mark.parametrize("keep", [0, "1 MB"])
def test_fewer_rows_than_micro_batches_are_forecast_as_they_run(keep: Any) -> None:
    """One row each, from a rehearsal and from a step."""
    config = RelayConfig(micro_batches=9, keep=keep)
    with chain(3, config) as relay, pytest.warns(UserWarning, match="8 row"):
        forecasts = [relay.forecast(chain_batch(2))]
        results = [relay.step(chain_batch(2)) for _ in range(2)]
        forecasts += [relay.forecast(chain_batch(2)), relay.forecast(chain_batch(2), replace(config, micro_batches=8))]
        assert {forecast.peak_device_bytes for forecast in forecasts} == {results[1].peak_device_bytes}
        for trace in (results[1].trace, *(forecast.trace for forecast in forecasts)):
            assert trace.settings["micro_batches"] == 8 and max(event.k for event in trace.events) == 7


# -- extrapolation -----------------------------------------------------------------------------------------------------


def test_representatives() -> None:
    assert choose_representatives("aaaaaaa") == ([0, 1, 2, 6], [0, 1, 2, 2, 2, 2, 3])
    assert choose_representatives("aaaaab") == ([0, 1, 2, 5], [0, 1, 2, 2, 2, 3])
    assert choose_representatives("aabbbbb") == ([0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4, 4, 5])
    assert choose_representatives("a") == ([0], [0])
    assert repeat_middle(4, 7) == [0, 1, 2, 2, 2, 2, 3] and repeat_middle(4, 4) == [0, 1, 2, 3]
    assert repeat_middle(4, 2) == [0, 3] and repeat_middle(4, 1) == [0] and repeat_middle(1, 3) == [0, 0, 0]


@pytest.mark.parametrize("stash", ["device", "host"])
def test_an_extrapolated_profile_is_that_of_the_longer_step(stash: str) -> None:
    """Moves, order and memory of nine micro-batches, from a step with four."""
    profiles = {}
    for count in (4, 9):
        with chain(4, RelayConfig(micro_batches=count, stash=stash)) as relay:
            profiles[count] = Profile.of([relay.step(chain_batch(count)) for _ in range(2)][-1].trace)
    longer_profile = extrapolate_profile(profiles[4], repeat_middle(4, 9))
    assert longer_profile.micro_batches == 9
    for ours, theirs in zip(longer_profile.stays, profiles[9].stays, strict=True):
        for a, b in zip(ours.turns, theirs.turns, strict=True):
            assert (a.k, a.fetch_bytes, a.stash_bytes) == (b.k, b.fetch_bytes, b.stash_bytes)
            assert [(op.kind, op.layer, op.visit) for op in a.ops] == [(op.kind, op.layer, op.visit) for op in b.ops]
    longer_peak = MemoryTimeline(profiles[9]).rise("device", range(9), {}).peak
    # A lane's thread frees bytes at any time: once 48 of 85,328 bytes were missing.
    assert MemoryTimeline(profiles[4]).rise("device", repeat_middle(4, 9), {}).peak == pytest.approx(
        longer_peak, rel=0.01
    )


# -- from a configuration alone ----------------------------------------------------------------------------------------

SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
LARGE_BERT = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
GROUPED = {**SMALL, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
FAMILIES = [
    (BertConfig, BertForMaskedLM, SMALL),
    (BertConfig, BertForMaskedLM, {**SMALL, "tie_word_embeddings": False}),
    (BertConfig, BertForMaskedLM, {"num_hidden_layers": 24, **LARGE_BERT}),
    (RobertaConfig, RobertaForMaskedLM, SMALL),
    (GPT2Config, GPT2LMHeadModel, {}),
    (GPT2Config, GPT2LMHeadModel, {"n_layer": 2, "n_inner": 100, "tie_word_embeddings": False}),
    (LlamaConfig, LlamaForCausalLM, GROUPED),
    (LlamaConfig, LlamaForCausalLM, {**GROUPED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    (MistralConfig, MistralForCausalLM, GROUPED),
    (Qwen2Config, Qwen2ForCausalLM, GROUPED),
    (Qwen3Config, Qwen3ForCausalLM, {**GROUPED, "head_dim": 32}),
    (ViTConfig, ViTForImageClassification, {"num_hidden_layers": 2}),
    (
        ViTConfig,
        ViTForImageClassification,
        {"qkv_bias": False, "image_size": (32, 64), "patch_size": 8, "num_labels": 7},
    ),
]
GPU = Machine(3e13, 1e9, 1.2e10, 1.2e10, name="a GPU", latency_s=1e-5, overhead_s=1e-4)
ON_16_GB: dict[str, Any] = {"micro_batches": 8, "sequence": 512, "memory_bytes": 16 * 10**9, "host_bytes": 512 * 10**9}


@pytest.mark.parametrize("config_class, model_class, settings", FAMILIES)
def test_parameters_are_those_of_the_real_model(config_class: Any, model_class: Any, settings: dict[str, Any]) -> None:
    config = config_class(**settings)
    with torch.device("meta"):
        model = model_class(config)
    assert read_model_shapes(config).num_params == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_slots_and_state_are_exact_and_the_rest_is_near(name: str, stash: str, precision: str) -> None:
    config = RelayConfig(micro_batches=2, stash=stash, precision=precision)
    with relay_of(BY_NAME[name], config) as relay:
        batch = BY_NAME[name].make_batch(4)
        real = relay.forecast(batch)
        length = batch["input_ids"].shape[1]  # type: ignore[index,call-overload]
        formula = forecast_config(
            relay.model.config, MACHINE, micro_batches=2, batch=4, sequence=length, relay_config=config, emulated=True
        )
    for category in ("weights", "gradients"):
        assert formula.device_bytes[category] == real.device_bytes[category]
    assert formula.host_bytes["weights"] == real.host_bytes["weights"]
    assert formula.host_bytes["optimizer"] == pytest.approx(real.host_bytes["optimizer"], rel=0.01)
    assert formula.peak_device_bytes == pytest.approx(real.peak_device_bytes, rel=0.25)
    fixed = [f.peak_host_bytes - f.host_bytes["gradients"] for f in (formula, real)]  # gradients depend on timing
    assert fixed[0] == pytest.approx(fixed[1], rel=0.05)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize(
    "config_class, model_class", [(GPT2Config, GPT2LMHeadModel), (ViTConfig, ViTForImageClassification)]
)
def test_operations_of_the_shell_are_those_that_torch_counts(
    config_class: Any, model_class: Any, is_frozen: bool
) -> None:
    """The inputs of a head need a gradient, the pixels under patch embeddings do not."""
    config = config_class(**SMALL, image_size=64, patch_size=8)
    model, length = model_class(config), 65
    layers, name = next((m, name) for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList))
    model.requires_grad_(not is_frozen)
    layers.requires_grad_(True)
    is_text = model_class is GPT2LMHeadModel
    inputs = torch.zeros(2, length, dtype=torch.long) if is_text else torch.zeros(2, 3, 64, 64)
    with FlopCounterMode(display=False) as counter:
        model(inputs).logits.sum().backward()
    counts = {at: sum(by_kind.values()) for at, by_kind in counter.get_flop_counts().items()}
    inside = sum(counts[f"{model_class.__name__}.{name}.{i}"] for i in range(len(layers)))
    # with any adapter, everything else is frozen
    step = forecast_config(
        config,
        replace(MACHINE, flops_per_s=1.0),
        micro_batches=1,
        batch=2,
        sequence=length,
        adapters=[(8, 64)] if is_frozen else (),
    )
    (loss,) = (event for event in step.trace.events if event.kind == "loss")
    assert loss.stop_s - loss.start_s == pytest.approx(counts["Global"] - inside, rel=0.03)


@pytest.mark.parametrize("update", ["eager", "deferred"])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_formula_with_adapters(stash: str, update: str) -> None:
    """With LoRA on q and v, slots, pushes and state are those of the adapters; without, everything is trained."""
    config, batch = RelayConfig(micro_batches=2, stash=stash, update=update), BY_NAME["lora_llama"].make_batch(4)
    length = batch["input_ids"].shape[1]  # type: ignore[index,call-overload]
    with relay_of(BY_NAME["lora_llama"], config) as relay:
        real, layer = relay.forecast(batch), relay.stack[0].module
        adapters = [tuple(param.shape) for param in layer.parameters() if param.requires_grad]
        formula_of = partial(forecast_config, relay.model.config, MACHINE, micro_batches=2, batch=4, sequence=length)
        formula = formula_of(relay_config=config, emulated=True, adapters=adapters)
        everything = formula_of(relay_config=config, emulated=True)
    for category in ("weights", "gradients"):
        assert formula.device_bytes[category] == real.device_bytes[category]
    assert formula.device_bytes["gradients"] < everything.device_bytes["gradients"] / 20
    assert formula.host_bytes["weights"] == real.host_bytes["weights"]
    assert formula.host_bytes["optimizer"] == pytest.approx(
        real.host_bytes["optimizer"], rel=0.1
    )  # it counts steps too
    pushes = [sum(e.nbytes for e in f.trace.lanes["d2h"] if e.kind == "push") for f in (formula, real)]
    assert pushes[0] == pushes[1]
    updates = [{e.layer: e.nbytes for e in f.trace.lanes["eps"] if e.kind == "update"} for f in (formula, real)]
    assert updates[0] == updates[1]
    assert formula.peak_device_bytes == pytest.approx(real.peak_device_bytes, rel=0.25)


def test_bert_large_fits_a_device_of_16_gb() -> None:
    config = RelayConfig(stash="host", precision="bf16")
    large = forecast_config(
        BertConfig(num_hidden_layers=24, **LARGE_BERT), GPU, batch=64, relay_config=config, **ON_16_GB
    )
    assert large.fits and not large.advice
    assert large.host_bytes["optimizer"] == 8 * 335_174_458
    deep = forecast_config(
        BertConfig(num_hidden_layers=384, **LARGE_BERT), GPU, batch=64, relay_config=config, **ON_16_GB
    )
    assert deep.fits and deep.peak_device_bytes == large.peak_device_bytes, "independent of depth"
    assert deep.seconds > 10 * large.seconds
    assert deep.largest_depth == pytest.approx(large.largest_depth, rel=0.01) and deep.largest_depth > 384


def test_50_billion_parameters_do_not_fit_and_the_advice_does() -> None:
    config = GPT2Config(n_embd=8192, n_layer=62, n_head=64)
    relay_config = RelayConfig(stash="host", precision="bf16", update="deferred")
    forecast = forecast_config(config, GPU, batch=64, relay_config=relay_config, **ON_16_GB)
    params = read_model_shapes(config).num_params
    assert 50e9 < params < 51e9
    assert forecast.peak_host_bytes > 18 * params, "masters, their bfloat16, two moments, gradients"
    assert not forecast.fits and "does not fit the host" in str(forecast) and "does not fit the device" in str(forecast)
    assert forecast.advice == "would fit with micro_batches=64, update='eager', an optimizer without state (SGD)"
    smaller = forecast_config(
        config,
        GPU,
        batch=64,
        relay_config=RelayConfig(stash="host", precision="bf16"),
        optimizer_bytes=0,
        **{**ON_16_GB, "micro_batches": 64},
    )
    assert smaller.fits, str(smaller)


def test_configurations_that_make_no_step_are_refused() -> None:
    config = BertConfig(**SMALL)
    with pytest.raises(ValueError, match="model_type='t5'.*rehearsing"):
        forecast_config(type("T5", (), {"model_type": "t5"})(), GPU, micro_batches=1, batch=1, sequence=1)
    with pytest.raises(ValueError, match="sequence=None"):
        forecast_config(config, GPU, micro_batches=1, batch=1)
    with pytest.raises(ValueError, match="micro_batches=4"):
        forecast_config(config, GPU, micro_batches=4, batch=2, sequence=8)
    with pytest.raises(ValueError, match="latency_s=-1"):
        Machine(1, 1, 1, 1, latency_s=-1)


@pytest.mark.parametrize("update", ["eager", "deferred"])
@pytest.mark.parametrize("compress", ["bf16", Compress("int8", feedback=False)])
def test_largest_depth_of_a_depth_first_step_that_compresses(compress: Any, update: str) -> None:
    """Gradients are whole on the device, and so are residuals, with every codec."""
    config, batch = (
        RelayConfig(schedule="depth_first", micro_batches=2, ahead=0, compress=compress, update=update),
        chain_batch(4),
    )

    def step_bytes(depth: int) -> int:
        with chain(depth, config) as relay:
            return [relay.step(batch).peak_device_bytes for _ in range(2)][-1]

    budget = 3 * step_bytes(4)
    with chain(4, config) as relay:
        for _ in range(2):
            relay.step(batch)
        depth = relay.forecast(batch, device={"memory_bytes": budget}).largest_depth
    assert depth is not None and step_bytes(depth) <= budget < step_bytes(depth + 2)
