"""Compare the smallest budget with steps on devices of that size, and follow the advice of errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from deep_models import Block, Chain, Normed, chain_batch, gpt2, squared_error, unpadded_batch
from patience import rarely, sampled
from torch import nn

from l2l_core import DeviceOutOfMemory, EmulatedDevice, Relay, RelayConfig, TornStep
from l2l_core.forecast import Priced, Run, WhatFits, what_fits
from l2l_core.forecast.minimise import TIMED
from l2l_core.forecast.what_fits import counts_from, search_settings

LINK = {"h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 1e9}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "chain": (lambda: Chain(5), lambda: chain_batch(4, rows=2)),
    "gpt2": (lambda: gpt2(3), lambda: unpadded_batch()),
    "batch norm": (Normed, lambda: chain_batch(2)),
}


def relay_of(name: str, config: RelayConfig, budget: int | None = None) -> Relay:
    torch.manual_seed(0)
    options: dict[str, Any] = {} if name == "gpt2" else {"loss": squared_error}
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    return Relay(MODELS[name][0](), optimizer, EmulatedDevice(budget, **LINK), config=config, **options)


def error_of(name: str, config: RelayConfig, budget: int) -> DeviceOutOfMemory:
    """Return the error of steps that do not fit; the first ones are metered and may need less."""
    with relay_of(name, config, budget) as relay, pytest.raises((DeviceOutOfMemory, TornStep)) as caught:
        for _ in range(3):
            relay.step(MODELS[name][1]())
    error = caught.value if isinstance(caught.value, DeviceOutOfMemory) else caught.value.__cause__
    assert isinstance(error, DeviceOutOfMemory)
    return error


def least_of(name: str, config: RelayConfig) -> WhatFits:
    with relay_of(name, config) as relay:
        batch = MODELS[name][1]()
        return search_settings(relay._runner.rehearsal(batch), batch, config, relay.device.figures(), 1)


def runs(name: str, config: RelayConfig, budget: int) -> bool:
    """Return True if three steps fit; the first ones are metered and may need less."""
    with relay_of(name, config, budget) as relay:
        try:
            for _ in range(3):
                relay.step(MODELS[name][1]())
        except (DeviceOutOfMemory, TornStep):
            return False
    return True


# -- against steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [RelayConfig(micro_batches=2), RelayConfig(micro_batches=1, stash="host", ahead=2, update="deferred")]
)
@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_budget_fits_and_a_byte_less_does_not(name: str, config: RelayConfig) -> None:
    least = least_of(name, config).smallest
    assert least.config.ahead == 0 and least.config.update == config.update
    assert runs(name, least.config, least.budget_bytes)
    assert not runs(name, least.config, least.budget_bytes - 1)


@pytest.mark.parametrize("name", sampled(MODELS))
def test_no_settings_need_less_than_the_smallest_budget(name: str) -> None:
    least, rows = least_of(name, RelayConfig()).smallest, 8
    for micro_batches in (1, 2, 3, 4, 6, rows):
        for ahead, stash in ((0, "device"), (0, "host"), (1, "device"), (1, "host")):
            config = RelayConfig(micro_batches=micro_batches, ahead=ahead, stash=stash)
            if name == "batch norm" and micro_batches > rows // 2:
                continue  # batch norm fails with one row
            with relay_of(name, config) as relay:
                need = max(relay.step(MODELS[name][1]()).peak_device_bytes for _ in range(3))
            assert need >= least.budget_bytes, config


def test_a_model_that_does_not_run_with_one_row_gets_settings_with_which_it_does() -> None:
    assert least_of("batch norm", RelayConfig()).smallest.config.micro_batches == 4


@pytest.mark.parametrize("share", [rarely(0.0), 0.1, rarely(0.3), rarely(0.5), 0.8, rarely(0.99)])
@pytest.mark.parametrize("name", MODELS)
def test_the_advice_of_an_error_fits(name: str, share: float) -> None:
    """Budgets range from the smallest to a little less than the present settings need."""
    config = RelayConfig(micro_batches=1)
    least = least_of(name, config).smallest.budget_bytes
    with relay_of(name, config) as relay:
        need = max(relay.step(MODELS[name][1]()).peak_device_bytes for _ in range(3))
    budget = round(least + share * (need - least))
    error = error_of(name, config, budget)
    assert error.least_bytes == least and error.settings
    assert f"({least:,} bytes)" in str(error)
    shown = ", ".join(f"{name}={value!r}" for name, value in error.settings.items())
    assert f"Remedy: RelayConfig({shown}) needs " in str(error)
    assert runs(name, replace(config, **error.settings), budget)


@pytest.mark.parametrize("config", [RelayConfig(), RelayConfig(ahead=0), RelayConfig(micro_batches=8, stash="host")])
def test_no_advice_if_no_settings_help(config: RelayConfig) -> None:
    error = error_of("chain", config, 20_000)
    assert error.settings == {} and error.least_bytes is not None and error.least_bytes > 20_000
    remedy = str(error).splitlines()[-1]
    assert remedy.startswith("Remedy: No settings help. The smallest budget that fits this model and batch is ")
    assert "with micro_batches=8, ahead=0, stash='host'; the budget is 20 kB. Give the device that much" in remedy
    assert "RelayConfig(" not in remedy


def test_a_torn_step_has_advice_too() -> None:
    """The device shrinks in backward, after the update of the last layer."""

    class Shrinking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if relay._store.updated:
                relay.device.ledger.limit_bytes = 1
            return super().forward(x)

    model = Chain(5)
    model.layers[1] = Shrinking(32)
    device = EmulatedDevice()
    config = RelayConfig(micro_batches=1, ahead=0, verify="never")
    with Relay(model, device=device, loss=squared_error, config=config) as relay:
        with pytest.raises(
            TornStep, match=r"(?s)Remedy: No settings help.*smallest budget.*after the update of"
        ) as caught:
            relay.step(MODELS["chain"][1]())
    assert isinstance(caught.value.__cause__, DeviceOutOfMemory) and caught.value.__cause__.settings == {}


def test_a_search_leaves_the_relay_as_it_was() -> None:
    """After an error and its rehearsals, steps equal those of a relay without the error."""
    config = RelayConfig(micro_batches=2)
    batch = MODELS["chain"][1]()
    with relay_of("chain", config) as plain:
        expected = [plain.step(batch).loss for _ in range(3)]
    with relay_of("chain", config) as relay:
        losses = [relay.step(batch).loss]
        relay.device.ledger.limit_bytes = 60_000
        with pytest.raises(DeviceOutOfMemory):
            relay.step(batch)
        assert relay.steps == 1 and not relay.device.ledger.by_category()
        relay.device.ledger.limit_bytes = None
        losses += [relay.step(batch).loss for _ in range(2)]
    assert losses == expected


def test_a_failed_search_adds_a_note() -> None:
    """The model fails in rehearsals, so the error has only the figures of the ledger."""
    calls: list[int] = []

    def objective(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("the well is dry")
        return squared_error(model(batch[0]), batch)

    options: dict[str, Any] = {"objective": objective, "loss_over": "micro-batch"}  # calls: those of the step
    config = RelayConfig(micro_batches=2, verify="never")
    with Relay(Chain(3), device=EmulatedDevice(90_000), config=config, **options) as relay:
        with pytest.raises(DeviceOutOfMemory, match="Remedy: ") as caught:
            relay.step(chain_batch(2, rows=64))
    assert caught.value.settings == {} and caught.value.least_bytes is None
    (note,) = (note for note in caught.value.__notes__ if "search" in note)
    assert note.startswith("The search for settings that fit failed: ValueError: no step could run with ")


def test_inference_gets_no_advice_that_cannot_help() -> None:
    with relay_of("chain", RelayConfig(), 10_000) as relay, pytest.raises(DeviceOutOfMemory) as caught:
        relay.evaluate(MODELS["chain"][1]())
    assert "no settings help, since the shell, one layer and their gradients alone take 18.6 kB" in str(caught.value)


def test_a_forecast_that_does_not_fit_has_advice() -> None:
    config = RelayConfig(micro_batches=2)
    with relay_of("chain", config) as relay:
        batch = MODELS["chain"][1]()
        tight = relay.forecast(batch, device={"memory_bytes": 60_000})
        assert not tight.fits and "is the fastest of the settings that were found to fit" in tight.advice
        assert tight.advice in str(tight)
        assert relay.forecast(batch, device={"memory_bytes": 10_000}).advice.startswith("No settings help.")
        assert relay.forecast(batch, device={"memory_bytes": 10**6}).advice == ""


# -- the search alone --------------------------------------------------------------------------------------------------


def made_up(config: RelayConfig, priced: list[RelayConfig] | None = None) -> Priced:
    """Price a step of 64 rows: activations per row, slots for layers ahead, a stash or a ring."""
    if priced is not None:
        priced.append(config)
    rows = -(-64 // config.micro_batches)
    stash = 640 if config.stash == "device" else 30 * bool(config.ahead)
    seconds = 1 + 0.01 * config.micro_batches + 0.5 * (config.ahead == 0) + 0.2 * (config.stash == "host")
    return Priced(config, 100 + 50 * config.ahead + max(40, 10 * rows) + stash, lambda: Run(seconds, 0))


@pytest.mark.parametrize("budget", [139, 140, 150, 200, 230, 400, 700, 800, 900, 1500])
@pytest.mark.parametrize(
    "requested", [RelayConfig(), RelayConfig(micro_batches=4, ahead=3), RelayConfig(ahead=0, stash="host")]
)
def test_the_fastest_of_all_settings_that_fit_is_found(requested: RelayConfig, budget: int) -> None:
    found = what_fits(made_up, requested, counts_from(requested.micro_batches, 64), budget)
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count >= requested.micro_batches]
    every = [
        made_up(replace(requested, micro_batches=count, ahead=ahead, stash=stash))
        for count in counts
        for ahead in {requested.ahead, 1, 0}
        for stash in ("device", "host")
    ]
    assert found.smallest.device_bytes == min(step.device_bytes for step in every) == 140
    assert found.smallest.config.micro_batches == 16, "of equal ones the fewest micro-batches"
    fitting = [step for step in every if step.budget_bytes <= budget]
    assert (found.fastest is None) == (not fitting) == (budget < 140)
    if found.fastest is not None:
        assert found.fastest.seconds == min(step.seconds for step in fitting)
        assert replace(requested, **found.settings) == found.fastest.config


def test_steps_with_overlap_have_a_margin() -> None:
    step = made_up(RelayConfig(micro_batches=64, ahead=1))
    assert step.budget_bytes == pytest.approx((1 + TIMED) * step.device_bytes, abs=1)
    assert made_up(RelayConfig(ahead=0)).budget_bytes == made_up(RelayConfig(ahead=0)).device_bytes


def test_without_time_the_smallest_is_found() -> None:
    priced: list[RelayConfig] = []
    found = what_fits(lambda config: made_up(config, priced), RelayConfig(), counts_from(1, 64), 10_000, most_s=-1.0)
    assert found.fastest is found.smallest and {config.ahead for config in priced} <= {0, 1}
    assert len(priced) < len({*priced}) + 1 and not [c for c in priced if c.ahead and c.micro_batches < 64]


def test_settings_with_which_no_step_runs_are_skipped() -> None:
    """A model that needs two rows, and one that fails with all of these."""
    found = what_fits(lambda c: made_up(c) if c.micro_batches <= 32 else None, RelayConfig(), counts_from(1, 64), 139)
    assert found.smallest.config.micro_batches == 16 and found.fastest is None and found.settings == {}
    with pytest.raises(ValueError, match="no step could run with 4 settings"):
        what_fits(lambda config: None, RelayConfig(micro_batches=2), counts_from(2, 4), 100)
