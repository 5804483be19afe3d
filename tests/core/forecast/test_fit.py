"""Compare prices with rehearsals, the search with all settings, and the chosen settings with real steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from deep_models import Chain, Normed, chain_batch, gpt2, squared_error, unpadded_batch
from oracle import InCore, adamw, assert_equal, both, differences
from patience import rarely, sampled
from small import assert_same, whole
from zoo import BY_NAME, KINDS, Kind

from l2l_core import DeviceOutOfMemory, EmulatedDevice, NothingFits, Relay, RelayConfig
from l2l_core.batches import split
from l2l_core.forecast import MemoryLimits, Priced, Run
from l2l_core.forecast.fit_result import TUNABLE_SETTINGS
from l2l_core.forecast.measured_costs import costs_of_rehearsal
from l2l_core.forecast.profile_transforms import interpolate_profiles
from l2l_core.forecast.relay_fit import FastestSearch, faster_than, finalists
from l2l_core.forecast.step_cost_model import StepCostModel
from l2l_core.schedule_rules import kept_layer_count, weight_slots

LINK = {"h2d_bytes_per_s": 2e7, "d2h_bytes_per_s": 2e7}


@contextmanager
def relay_of(
    kind: Kind,
    config: Any = RelayConfig(seed=0),  # noqa: B008
    budget: int | None = None,
    **link: float,
) -> Iterator[Relay]:
    model = kind.make_model()
    device = EmulatedDevice(budget, **link)
    with Relay(
        model, adamw(model), device, layers=kind.layers, loss=kind.loss, loss_over=kind.loss_over, config=config
    ) as relay:
        yield relay


# -- prices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead, stash", [(1, "device"), (2, "host"), rarely(0, "device"), rarely(0, "host")])
@pytest.mark.parametrize("kind", sampled(KINDS, 11), ids=str)
def test_prices_equal_rehearsals(kind: Kind, ahead: int, stash: Any) -> None:
    """Any number of kept graphs and weights is priced from two rehearsals.

    Equal to the byte, except for bytes that the first kept graph shares with the layer before it.
    """
    check_prices(kind, ahead, stash)


@pytest.mark.parametrize("name", ["batch_norm", "spectral_norm_old"])
def test_graphs_that_are_dropped_when_their_layer_leaves_are_priced(name: str) -> None:
    """Layers whose buffers change are recomputed, however many graphs are asked for."""
    check_prices(BY_NAME[name], 1, "device")


def check_prices(kind: Kind, ahead: int, stash: Any) -> None:
    batch = kind.make_batch(6, 0)
    with relay_of(kind) as relay, torch.enable_grad(), relay._kv_caches.disabled():
        prices = StepCostModel(relay._runner.rehearsal(batch), batch, relay.device.figures(), None)
        config = RelayConfig(seed=0, micro_batches=6, ahead=ahead, stash=stash)
        assert prices(config) is not None
        visits = prices.visits
        for keep in (visits, 0, *range(2, visits)):
            for resident in {max(0, keep - ahead - 1), visits}:
                asked = replace(config, keep=keep, resident=resident)
                priced = prices(asked)
                assert priced is not None, prices.errors
                exact = costs_of_rehearsal(relay._runner.rehearsal(batch), split(batch, 6), asked, 1)
                found, need = priced.device_bytes, exact.peak_bytes("device")
                assert found == need if keep in (0, visits) else 0.88 * need < found < 1.01 * need, asked


def test_a_model_that_begins_with_frozen_layers_keeps_graphs() -> None:
    """Backward ends at the first layer that is trained, and the graphs of those behind it can be kept."""
    kind = BY_NAME["frozen_prefix"]
    with relay_of(kind) as relay:
        found = relay.fit(kind.make_batch(6, 0), fixed=["micro_batches", "schedule"])
        assert found.config.keep >= 2 and found.layers == len(relay.stack)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_kind_of_step_is_metered_once_for_any_ahead(stash: Any) -> None:
    kind = BY_NAME["gpt2"]
    batch, kept = kind.make_batch(6, 0), {"keep": 2, "resident": 2}
    settings: list[Any] = [{"ahead": 0}, {"ahead": 1}, {"ahead": 0, **kept}, {"ahead": 1, **kept}]
    with relay_of(kind) as relay, torch.enable_grad(), relay._kv_caches.disabled():
        rehearsal = relay._runner.rehearsal(batch)
        for changes in settings:
            config = RelayConfig(seed=0, micro_batches=3, stash=stash, **changes)
            shared, alone = (
                costs_of_rehearsal(each, split(batch, 3), config, 1).peak_bytes("device")
                for each in (rehearsal, relay._runner.rehearsal(batch))
            )
            assert shared == alone
        assert len(rehearsal.metered_passes) == 2


def test_few_steps_are_rehearsed() -> None:
    kind = BY_NAME["gpt2"]
    with relay_of(kind) as relay, torch.enable_grad(), relay._kv_caches.disabled():
        batch = kind.make_batch(4, 0)
        prices = StepCostModel(relay._runner.rehearsal(batch), batch, relay.device.figures(), None)
        asked: list[RelayConfig] = []
        rehearse = prices.rehearse
        prices.rehearse = lambda config, passes: asked.append(config) or rehearse(config, passes)  # type: ignore[method-assign]
        depth = len(relay.stack)
        for keep in (depth, *range(depth)):
            for resident in reversed(range(depth - 1)):
                prices(RelayConfig(seed=0, micro_batches=2, keep=keep, resident=resident))
    assert [(config.keep, config.resident) for config in asked] == [(0, 0), (depth, depth - 2)], (
        "one keeps none, one keeps all"
    )


def test_a_rehearsal_keeps_no_more_than_there_is_memory_for() -> None:
    """Keeping many graphs takes as much memory as a step in core, which a relay avoids."""
    kind = BY_NAME["gpt2"]
    config, batch = RelayConfig(seed=0, micro_batches=2, keep=2), kind.make_batch(4, 0)
    with relay_of(kind) as relay, torch.enable_grad(), relay._kv_caches.disabled():
        free = StepCostModel(relay._runner.rehearsal(batch), batch, relay.device.figures(), None)
        bare, two, depth = free(replace(config, keep=0)), free(config), len(relay.stack)
        assert bare is not None and two is not None
        tight = StepCostModel(
            relay._runner.rehearsal(batch), batch, relay.device.figures(), round(1.2 * two.device_bytes)
        )
        assert tight(config) is not None
        assert tight(replace(config, keep=depth, resident=depth)) is None and not tight.errors
        none = StepCostModel(relay._runner.rehearsal(batch), batch, relay.device.figures(), bare.device_bytes)
        assert none(replace(config, keep=0)) is not None and none(config) is None


# -- the search alone --------------------------------------------------------------------------------------------------


class CachedPrices:
    """Prices of `made_up`, each computed once."""

    def __init__(self, link: float) -> None:
        self.link, self.known = link, dict[RelayConfig, Priced]()

    def __call__(self, config: RelayConfig) -> Priced:
        return self.known.setdefault(config, made_up(self.link, config))


def made_up(link: float, config: RelayConfig) -> Priced:
    """Price a step of 16 rows and 8 layers.

    Slots have 50 bytes, graphs 8 and the stash 2 bytes a row. `link` is the seconds of a load.
    """
    rows = -(-16 // config.micro_batches)
    host = 1000 + 500 * (config.update == "deferred")
    if config.schedule == "depth_first":
        nbytes = 50 * (config.ahead + 1 + config.resident) + 30 * 8 + 8 * 8 * rows
        return Priced(config, nbytes, lambda: Run(16 * (1 + 0.4 / rows) * 24 / 33 + 0.1 * link, host))
    kept = kept_layer_count(asdict(config), 8)
    slots = min(8, weight_slots(config.ahead, config.resident))
    nbytes = 50 * (config.ahead + 1 + config.resident) + 8 * rows + 8 * 16 * (kept - 1)
    nbytes += 2 * 16 * (9 - kept) if config.stash == "device" else 4 * rows
    compute = 16 * (1 + 0.4 / rows) * (3 * kept + 4 * (8 - kept)) / 32
    copies = link * (16 - slots + 0.5 * (8 - kept) * (config.stash == "host"))
    seconds = compute + copies if config.ahead == 0 else max(compute, copies) + 0.1 * (slots == 8)
    return Priced(config, nbytes, lambda: Run(seconds, host))


IN_CORE: dict[str, Any] = {"schedule": "depth_first", "keep": 8, "resident": 6}


def wanted(requested: RelayConfig, limits: MemoryLimits, free: Any = TUNABLE_SETTINGS) -> FastestSearch:
    """Search for steps of `made_up`."""
    return FastestSearch(requested=requested, free=free, rows=16, layers=8, limits=limits)


@pytest.mark.parametrize("budget", [200, 250, 300, 400, 500, 700, 900, 1200, 1500, 2000, 5000])
@pytest.mark.parametrize("link", [0.0, 0.7, 1.5, 4.0])
@pytest.mark.parametrize(
    "requested", [RelayConfig(seed=0), rarely(RelayConfig(seed=0, micro_batches=4, ahead=2, stash="host"))]
)
def test_the_choice_is_near_the_best_of_all_settings(requested: RelayConfig, link: float, budget: int) -> None:
    room, price = MemoryLimits(budget, None), CachedPrices(link)
    found = wanted(requested, room).fastest(price).steps
    every = [
        made_up(link, RelayConfig(seed=0, micro_batches=count, ahead=ahead, stash=stash, resident=resident, keep=keep))
        for count, ahead, stash, keep in product((1, 2, 4, 8, 16), (0, 1, 2), ("device", "host"), range(9))
        for resident in range(8)
    ]
    every += [made_up(link, RelayConfig(seed=0, micro_batches=count, **IN_CORE)) for count in (1, 2, 4, 8, 16)]
    fitting = [step for step in every if room.fits(step)]
    assert bool(found) == bool(fitting)
    assert len(price.known) < len(every) / 6
    if found:
        assert all(room.fits(step) for step in found)
        assert found[0].seconds <= 1.04 * min(step.seconds for step in fitting), "1.03 for the present micro-batches"
        better = faster_than(found[0], price.known.values(), room)
        assert better is None or (not room.fits(better[0]) and better[1] > 1)


def test_fixed_settings_stay() -> None:
    asked = RelayConfig(seed=0, micro_batches=3, ahead=2, stash="host", resident=1, keep=2, update="deferred")
    for name in TUNABLE_SETTINGS:
        free = [other for other in TUNABLE_SETTINGS if other != name]
        found = wanted(asked, MemoryLimits(900, None), free).fastest(CachedPrices(1.0)).steps
        assert found
        for step in found:
            assert getattr(step.config, name) == getattr(asked, name)


def test_settings_that_gain_nothing_leave_micro_batches_and_updates_alone() -> None:
    """Other micro-batches draw other random numbers, for which a gain of 1 % is too small."""

    def price(config: RelayConfig) -> Priced:
        return Priced(config, 100, lambda: Run(1.0 - 0.001 * config.micro_batches, 0))

    search = wanted(RelayConfig(seed=0, micro_batches=2), MemoryLimits(None, None))
    best = min(finalists(search, price, search.fastest(price).steps), key=search.cost)
    assert (best.config.micro_batches, best.config.update) == (2, "eager")


def test_without_time_the_present_number_of_micro_batches_is_tried() -> None:
    found = wanted(RelayConfig(seed=0, micro_batches=4), MemoryLimits(None, None)).fastest(
        CachedPrices(0.0), until_s=-1.0
    )
    assert {step.config.micro_batches for step in found.steps} == {4} and not found.all_tried


# -- a relay -----------------------------------------------------------------------------------------------------------


MODELS = {
    "chain": Kind("chain", lambda: Chain(5), lambda rows, seed: chain_batch(4, rows=2), squared_error),
    "gpt2": Kind("gpt2", lambda: gpt2(4), lambda rows, seed: unpadded_batch()),
    "batch norm": Kind("batch norm", Normed, lambda rows, seed: chain_batch(2), squared_error),
    "albert": BY_NAME["albert"],
    "t5": BY_NAME["t5"],
}


@cache
def budgets_of(name: str) -> tuple[int, int]:
    """Return the smallest budget, and that of a step without recompute."""
    kind = MODELS[name]
    batch = kind.make_batch(8, 0)
    with relay_of(kind) as relay:
        with pytest.raises(NothingFits) as caught:
            relay.fit(batch, device_bytes=1)
        assert caught.value.smallest is not None and relay.config == RelayConfig(seed=0)
        return caught.value.smallest.budget_bytes, relay.fit(batch, fixed=["micro_batches"]).chosen.budget_bytes


@pytest.mark.parametrize("share", [rarely(0.0), rarely(0.1), 0.4, rarely(0.6), rarely(0.9), rarely(1.1)])
@pytest.mark.parametrize("name", ["chain", "gpt2", "batch norm", rarely("albert"), rarely("t5")])
def test_steps_fit_the_budget(name: str, share: float) -> None:
    """Budgets range from the smallest to more than a step without recompute takes."""
    kind = MODELS[name]
    batch = kind.make_batch(8, 0)
    least, most = budgets_of(name)
    budget = round(least + share * (most - least))
    with relay_of(kind, budget=budget, **LINK) as relay:
        found = relay.fit(batch)
        assert relay.config == found.config and found.limits.device_bytes == budget
        peaks = [relay.step(batch).peak_device_bytes for _ in range(3)]
        assert max(peaks) <= found.chosen.budget_bytes <= budget
        assert found.forecast.peak_device_bytes == pytest.approx(peaks[-1], rel=0.02)


def test_without_limits_a_step_is_in_core() -> None:
    kind = BY_NAME["gpt2"]
    with relay_of(kind, RelayConfig(seed=0, micro_batches=2)) as relay:
        found = relay.fit(kind.make_batch(8, 0), fixed=["micro_batches"])
        depth = len(relay.stack)
        assert (found.config.keep, weight_slots(found.config.ahead, found.config.resident)) == (depth, depth)
        relay.step(kind.make_batch(8, 0))
        trace = relay.step(kind.make_batch(8, 0)).trace
        assert sum(e.kind == "load" and e.layer != "shell" for e in trace.events) == depth
        order = [e.k for e in trace.lanes["compute"] if e.kind in ("forward", "loss", "backward")]
        assert order == sorted(order) and {*order} == {0, 1}
    assert found.config.schedule == "depth_first" and "through all layers and back one after another" in str(found)
    assert found.faster is None and "Next better" not in str(found)


def test_a_layer_that_is_called_many_times_has_one_slot_depth_first() -> None:
    kind, fixed = BY_NAME["albert"], ["micro_batches", "schedule"]
    with relay_of(kind, RelayConfig(seed=0, micro_batches=2, schedule="depth_first")) as relay:
        batch = kind.make_batch(4)
        found = relay.fit(batch, fixed=fixed)
        assert found.config.schedule == "depth_first" and found.config.keep == len(relay.stack)
        assert found.forecast.peak_device_bytes == relay.step(batch).peak_device_bytes


def test_a_fixed_schedule_stays_and_everything_is_kept() -> None:
    kind = BY_NAME["gpt2"]
    with relay_of(kind, RelayConfig(seed=0, micro_batches=2)) as relay:
        found = relay.fit(kind.make_batch(8, 0), fixed=["micro_batches", "schedule"])
        depth = len(relay.stack)
        assert (found.config.keep, weight_slots(found.config.ahead, found.config.resident)) == (depth, depth)
        assert "All weights stay on the device during a step, and nothing is recomputed" in str(found)


def test_depth_first_relays_find_settings_for_a_smaller_budget() -> None:
    kind, batch = MODELS["chain"], MODELS["chain"].make_batch(8, 0)
    least, most = budgets_of("chain")
    with relay_of(kind, budget=2 * most) as relay:
        assert relay.fit(batch, fixed=["micro_batches"]).config.schedule == "depth_first"
        found = relay.fit(batch, device_bytes=(least + most) // 2, fixed=["micro_batches"])
        assert found.config.schedule == "breadth_first" and "schedule='breadth_first'" in str(found)
        assert relay.step(batch).peak_device_bytes <= (least + most) // 2
    with relay_of(kind, RelayConfig(seed=0, schedule="depth_first"), budget=(least + most) // 2) as relay:
        with pytest.raises(DeviceOutOfMemory, match=r"schedule='breadth_first'") as caught:
            relay.step(batch)
        relay.config = replace(relay.config, **caught.value.settings)
        assert relay.step(batch).peak_device_bytes <= (least + most) // 2


def test_a_fixed_schedule_that_does_not_fit_is_named() -> None:
    kind = MODELS["chain"]
    with relay_of(kind, RelayConfig(seed=0, schedule="depth_first")) as relay:
        batch = kind.make_batch(8, 0)
        budget = relay.forecast(batch).peak_device_bytes // 2
        with pytest.raises(NothingFits, match=r"schedule='breadth_first'\. Remedy: hold fewer settings fixed"):
            relay.fit(batch, device_bytes=budget, fixed=["schedule", "micro_batches"])


def test_the_description_has_reasons_and_the_needs_of_a_faster_step() -> None:
    kind = MODELS["gpt2"]
    batch = kind.make_batch(8, 0)
    least, _ = budgets_of("gpt2")
    with relay_of(kind, budget=least) as relay:
        # Only one row per micro-batch fits, which takes far longer than more rows on any machine, however busy.
        found = relay.fit(batch)
    text = str(found)
    assert found.faster is not None and found.limits.exceeded(found.faster[0]).keys() == {"device"}
    assert "Next better: " in text and " times as fast and needs " in text and f"of {found.limits}." in text
    assert f"RelayConfig(micro_batches={found.config.micro_batches}, ahead={found.config.ahead}, " in text


@pytest.mark.parametrize("name", ["gpt2", "batch_norm", "random_skip", "albert", rarely("llama"), rarely("mixture")])
def test_a_search_trains_nothing_and_training_goes_on_to_the_bit(name: str) -> None:
    kind = BY_NAME[name]
    with both(kind, RelayConfig(seed=0, micro_batches=2)) as pair:
        assert_equal([pair.step(kind.make_batch(7, seed)) for seed in range(2)])
        before = whole(pair.relay)
        pair.relay.fit(kind.make_batch(7, 2), fixed=["micro_batches"])
        assert_same(before, whole(pair.relay))
        assert_equal([pair.step(kind.make_batch(7, seed)) for seed in range(2, 5)])


def test_auto_searches_at_the_first_step() -> None:
    kind, batches = BY_NAME["gpt2"], [BY_NAME["gpt2"].make_batch(7, seed) for seed in range(3)]
    with relay_of(kind, "auto") as relay:
        assert relay.config == RelayConfig(seed=0)
        losses = [relay.step(batch).loss for batch in batches]
        assert relay.config.keep == len(relay.stack)
    twin = kind.make_model()
    in_core = InCore(kind, twin, adamw(twin), relay.config)
    assert losses == [in_core.step(batch) for batch in batches]
    assert not differences(relay.model, twin)


def test_settings_that_are_given_before_the_first_step_are_kept() -> None:
    kind = BY_NAME["chain"]
    with relay_of(kind, "auto") as relay:
        relay.config = RelayConfig(seed=0, micro_batches=3)
        relay.step(kind.make_batch(7, 0))
        assert relay.config == RelayConfig(seed=0, micro_batches=3)


@pytest.mark.parametrize("config", ["fast", None, {"micro_batches": 2}])
def test_other_settings_are_refused(config: Any) -> None:
    kind = BY_NAME["chain"]
    with pytest.raises(TypeError, match='give a RelayConfig, or "auto" for a new relay'), relay_of(kind, config):
        pass
    with relay_of(kind) as relay, pytest.raises(TypeError, match="give a RelayConfig"):
        relay.config = config
    with relay_of(kind, "auto") as relay:
        with pytest.raises(TypeError, match="give a RelayConfig"):
            relay.config = "auto"  # type: ignore[assignment]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"device_bytes": 0}, "device_bytes=0: must be positive"),
        ({"host_bytes": -1}, "host_bytes=-1: must be positive"),
        ({"device_bytes": 1 << 40}, "has a budget of 8,000,000 bytes"),
        ({"fixed": ["precision"]}, "fixed names 'precision': a search changes only micro_batches, ahead"),
        ({"fixed": "ahead"}, r"fixed='ahead' is text: give names, as \['ahead'\]"),
    ],
)
def test_bad_input_changes_nothing(options: dict[str, Any], message: str) -> None:
    kind = BY_NAME["chain"]
    with relay_of(kind, RelayConfig(seed=0, ahead=0), budget=8_000_000) as relay:
        with pytest.raises((ValueError, TypeError), match=message):
            relay.fit(kind.make_batch(7, 0), **options)
        assert relay.config == RelayConfig(seed=0, ahead=0)


def test_errors_of_the_model_are_raised() -> None:
    kind = BY_NAME["gpt2"]
    with relay_of(kind) as relay, pytest.raises(IndexError):
        relay.fit({"input_ids": torch.full((2, 4), 10_000), "labels": torch.zeros(2, 4, dtype=torch.long)})


def test_a_host_that_is_too_small_is_named() -> None:
    kind = BY_NAME["gpt2"]
    with relay_of(kind) as relay, pytest.raises(NothingFits, match="an optimizer with less state"):
        relay.fit(kind.make_batch(4, 0), host_bytes=1000)


def test_deferred_updates_become_eager_if_the_host_is_too_small() -> None:
    kind = BY_NAME["gpt2"]
    batch = kind.make_batch(4, 0)
    asked = RelayConfig(seed=0, update="deferred")
    with relay_of(kind, asked) as relay:
        held = relay.fit(batch, fixed=["update", "micro_batches"]).forecast.peak_host_bytes
    with relay_of(kind, asked) as relay:
        assert relay.fit(batch, host_bytes=held - 1000).config.update == "eager"
        relay.config = asked
        with pytest.raises(NothingFits):
            relay.fit(batch, host_bytes=held - 1000, fixed=["update"])
    with relay_of(kind, replace(asked, max_grad_norm=1.0)) as relay:
        assert relay.fit(batch).config.update == "deferred", "clipping needs it"


def test_step_pre_hooks_keep_deferred_updates() -> None:
    """A step with eager updates refuses such a hook, so a search must not choose them."""
    kind, seen = BY_NAME["gpt2"], []
    batch, asked = kind.make_batch(4, 0), RelayConfig(seed=0, update="deferred")
    with relay_of(kind, asked) as relay:

        def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            seen.append(float(torch.nn.utils.clip_grad_norm_(params, 1.0)))

        relay.optimizer.register_step_pre_hook(clip)
        held = relay.fit(batch).forecast.peak_host_bytes
        assert relay.config.update == "deferred" and not seen
        relay.step(batch)
        assert len(seen) == 1
        with pytest.raises(NothingFits):
            relay.fit(batch, host_bytes=held // 2)
        assert relay.config.update == "deferred"


def test_deferred_updates_stay_where_they_fit() -> None:
    """A step that fails is not torn then, which matters more than speed."""
    price = CachedPrices(0.0)
    for host_bytes, update in ((1500, "deferred"), (1400, "eager")):
        search = wanted(RelayConfig(seed=0, update="deferred"), MemoryLimits(900, host_bytes))
        found = finalists(search, price, search.fastest(price).steps)
        assert found and {step.config.update for step in found} == {update}


@pytest.mark.parametrize("count", [1, 3])
def test_an_interpolated_step_has_the_times_of_each_operation(count: int) -> None:
    """With kept graphs all but the recompute takes as long as without."""
    kind = BY_NAME["gpt2"]
    batch = kind.make_batch(6, 0)
    with relay_of(kind) as relay, torch.enable_grad(), relay._kv_caches.disabled():
        prices = StepCostModel(relay._runner.rehearsal(batch), batch, relay.device.figures(), None)
        config = RelayConfig(seed=0, micro_batches=count)
        none = prices.rehearse(config, 2)
        keeping = prices.rehearse(replace(config, keep=len(relay.stack), resident=len(relay.stack)), 2)
        assert none is not None and keeping is not None
        made = interpolate_profiles(none.profile, keeping.profile, len(relay.stack))
    for one, other in zip(made.turns, none.profile.turns, strict=True):
        others = list(other.ops)
        assert [op.kind for op in one.ops] == [op.kind for op in others]
        for op, known in zip(one.ops, others, strict=True):
            assert op.seconds <= known.seconds and op.overhead_s == known.overhead_s
            assert op.kind == "backward" or op.seconds == known.seconds


@pytest.mark.parametrize("held", ["keep", "resident"])
def test_settings_that_follow_from_the_schedule_may_be_fixed(held: str) -> None:
    """ALBERT's one layer is visited three times, so there are more graphs than layers."""
    with relay_of(BY_NAME["albert"], RelayConfig(seed=0, schedule="depth_first")) as relay:
        assert relay.fit(BY_NAME["albert"].make_batch(2), fixed=["schedule", held]).config.schedule == "depth_first"


def test_eager_updates_are_the_last_resort_depth_first_too() -> None:
    free = [name for name in TUNABLE_SETTINGS if name != "schedule"]
    for host_bytes, update in ((1500, "deferred"), (1400, "eager")):
        search = wanted(RelayConfig(seed=0, update="deferred", **IN_CORE), MemoryLimits(None, host_bytes), free)
        found = search.fastest(CachedPrices(0.0)).steps
        assert {(step.config.schedule, step.config.update) for step in found} == {("depth_first", update)}
