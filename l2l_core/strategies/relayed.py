"""The relay as one way among others: the same model, batch, ledger and link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from l2l_core.batches import Batch
from l2l_core.config import RelayConfig
from l2l_core.devices import Device, EmulatedDevice
from l2l_core.relay import Relay
from l2l_core.schedule_rules import kept_layer_count
from l2l_core.simulator import Profile, simulate
from l2l_core.strategies.strategy_table import StrategyResult

_TIMED_STEPS = 3  # steps, of which one is hoped to be undisturbed: other ways take medians of their operations


def run_relay(
    name: str,
    model_and_optimizer: tuple[nn.Module, Optimizer],
    layers: Sequence[str],
    batch: Batch,
    config: RelayConfig,
    link: Device,
    options: Mapping[str, Any],
) -> StrategyResult:
    """Make steps by relay, without a budget, and say what the last one needed; the fastest of them is simulated.

    Args:
        name: of the row.
        twin: a model and its optimizer; they are trained.
        layers, options: as `Relay` takes them.
        link: the device whose link is simulated.
    """
    with Relay(
        model_and_optimizer[0], model_and_optimizer[1], EmulatedDevice(), layers=layers, config=config, **options
    ) as relay:
        relay.step(batch)  # metered; the optimizer's state comes into being
        results = [relay.step(batch) for _ in range(_TIMED_STEPS)]
        simulated = [simulate(Profile.of(each.trace), config, link) for each in results]
        result, host = results[-1], relay.host.peak
    trace = min(simulated, key=lambda each: each.span_s)
    forwards = 2 * len(layers) - kept_layer_count(result.trace.settings, len(layers))
    return StrategyResult(
        name, result.peak_device_bytes, host, forwards * config.micro_batches, trace.span_s, trace=trace
    )
