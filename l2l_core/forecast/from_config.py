"""A forecast of a model that was never built: from its configuration and a machine's figures.

What it is not: exact, since `configured_step.py` estimates what layers keep. Once a model is built, `Relay.forecast` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from l2l_core.config import RelayConfig
from l2l_core.forecast.configured_step import ConfiguredStep, costs_of
from l2l_core.forecast.families import Shape, shapes_of_config
from l2l_core.forecast.fitting import advise, advise_shelf
from l2l_core.forecast.forecast import Forecast
from l2l_core.forecast.from_costs import forecast_costs
from l2l_core.forecast.kept_state import KeptState, MakeOptimizer, bytes_per_parameter
from l2l_core.forecast.planned_shelf import PlannedShelf
from l2l_core.simulator import Machine

ADAMW = 8  # bytes per parameter of its two moments in float32


def forecast_config(
    config: Any,
    machine: Machine,
    *,
    micro_batches: int,
    batch: int,
    sequence: int | None = None,
    relay_config: RelayConfig | None = None,
    memory_bytes: int | None = None,
    host_bytes: int | None = None,
    optimizer_bytes: int = ADAMW,
    emulated: bool = False,
    adapters: Sequence[Shape] = (),
    optimizer: MakeOptimizer | None = None,
    shelf: PlannedShelf | None = None,
) -> Forecast:
    """Forecast a step from a configuration of transformers and a machine's figures alone: bytes, seconds, and what binds.

    Args:
        config: of one of the families in `families.py`.
        machine: its figures; `flops_per_s` in the precision of `relay_config`.
        micro_batches: of a step.
        batch: rows of a step, a multiple of `micro_batches` or rounded up to one.
        sequence: tokens of a row; None where the configuration fixes it (images).
        relay_config: how the relay would run; its own number of micro-batches does not count.
        memory_bytes: of the device; None for no limit.
        host_bytes: of the host; None for no limit.
        optimizer_bytes: of the optimizer's state per parameter: 8 for AdamW, 4 for `in_bf16` of it, 2 in 8 bits, 0 for plain SGD.
        optimizer: makes the optimizer, as `Relay` takes it: what it keeps is tried on small parameters, in place of
            `optimizer_bytes`. If it rounds weights to bfloat16, the model is taken to be in that.
        shelf: on disk, in whose files masters and state are; it needs `optimizer`. With it, ``stash="disk"`` is there for GPT-2.
        emulated: on an emulated device, bfloat16 weights need no second copy on the host.
        adapters: shapes of the parameters that adapters add to every layer (LoRA of rank 8 on two square matrices of width
            4096: `[(8, 4096), (4096, 8)] * 2`); then nothing else is trained. None of them: everything is. Activations are
            taken to be those without adapters.

    Returns:
        The forecast; where it does not fit, `Forecast.advice` says what would.

    Raises:
        ValueError: a family that is not known, a number that is not positive, a shelf without optimizer or with too little
            memory.
    """
    model = shapes_of_config(config).with_adapters(adapters)
    length = model.length or sequence
    figures = {"micro_batches": micro_batches, "batch": batch, "sequence": length}
    for name, value in figures.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
    if batch < micro_batches:
        raise ValueError(f"batch={batch} rows in micro_batches={micro_batches}: every micro-batch needs a row")
    assert length is not None
    settings = replace(relay_config or RelayConfig(), micro_batches=micro_batches)
    if settings.keep or settings.schedule != "breadth_first":
        raise ValueError(
            f"relay_config has keep={settings.keep}, schedule={settings.schedule!r}: what kept graphs hold is measured and "
            "has no formula. Leave that out, or build the model and ask relay.forecast"
        )
    if settings.stash == "disk" and shelf is None:
        raise ValueError(
            "relay_config has stash='disk', which lies in a scratch file of a shelf's folder: give shelf=PlannedShelf(disk=...), "
            "or RelayConfig(stash='host')"
        )
    if settings.stash == "disk" and model.beside is None:
        raise ValueError(
            f"relay_config has stash='disk', and what a model_type={config.model_type!r}{' with adapters' * bool(adapters)} "
            "keeps storage by storage has no formula, only what gpt2 without adapters keeps: build the model, and "
            "relay.forecast finds out by rehearsing"
        )
    if shelf is not None and optimizer is None:
        raise ValueError(
            "shelf= needs optimizer=: what lies in its files is what the optimizer really keeps. Give a function from parameters "
            "to an optimizer, such as partial(torch.optim.AdamW, lr=1e-4)"
        )
    if shelf is not None and settings.wire is not None:
        raise ValueError(
            f"relay_config has compress={settings.compress!r}: a relay on a shelf pushes float32. Leave it out"
        )
    kept = None if optimizer is None else KeptState(optimizer)
    if kept is not None:
        optimizer_bytes = bytes_per_parameter(kept, [shape for shapes in model.trained for shape in shapes])
    rows = -(-batch // micro_batches)
    step = ConfiguredStep(model, machine, settings, rows, length, optimizer_bytes, emulated, kept, shelf)
    forecast = _forecast(step, memory_bytes, host_bytes)
    if forecast.fits:
        return forecast
    if forecast.shelf is not None:
        return replace(forecast, advice=advise_shelf(step, batch, forecast))
    return replace(forecast, advice=advise(step, batch, memory_bytes, host_bytes))


def _forecast(step: ConfiguredStep, memory_bytes: int | None, host_bytes: int | None) -> Forecast:
    machine = step.machine
    figures = {
        "memory_bytes": memory_bytes,
        "h2d_bytes_per_s": machine.h2d_bytes_per_s,
        "d2h_bytes_per_s": machine.d2h_bytes_per_s,
        "latency_s": machine.latency_s,
    }
    return forecast_costs(costs_of(step), step.config, figures, host_bytes)
