"""Forecast of a model from its configuration and a machine's figures, with advice if it does not fit.

The model need not be built; the forecast is an estimate (`configured_step.py`). `Relay.forecast` of a built model is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from l2l_core.config import RelayConfig
from l2l_core.forecast.configured_step import ConfiguredStep, estimate_costs
from l2l_core.forecast.cost_forecast import forecast_costs
from l2l_core.forecast.forecast import Forecast
from l2l_core.forecast.model_shapes import Shape, count_elements, read_model_shapes
from l2l_core.forecast.optimizer_state_size import OptimizerFactory, OptimizerStateSize
from l2l_core.forecast.shelf_costs import PlannedShelf
from l2l_core.schedule_rules import MAX_PENDING_GRADIENTS
from l2l_core.simulator import Machine
from l2l_core.trace import format_bytes

ADAMW_BYTES = 8  # per parameter: two moments in float32


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
    optimizer_bytes: int = ADAMW_BYTES,
    emulated: bool = False,
    adapters: Sequence[Shape] = (),
    base: Literal["nf4"] | None = None,
    optimizer: OptimizerFactory | None = None,
    shelf: PlannedShelf | None = None,
) -> Forecast:
    """Forecast bytes and seconds of a step from a transformers configuration and a machine's figures.

    Args:
        config: of one of the families in `model_shapes.py`.
        machine: its figures; `flops_per_s` in the precision of `relay_config`.
        micro_batches: of a step.
        batch: rows of a step, rounded up to a multiple of `micro_batches`.
        sequence: tokens of a row; ignored where the configuration fixes it (images).
        relay_config: other settings of the relay; its number of micro-batches is ignored.
        memory_bytes: of the device; None for no limit.
        host_bytes: of the host; None for no limit.
        optimizer_bytes: optimizer state per parameter: 8 for AdamW, 4 with `in_bf16`, 2 in 8 bits, 0 for plain SGD.
        emulated: on an emulated device, bfloat16 weights need no second copy on the host.
        adapters: shapes of parameters added to every layer (LoRA of rank 8 on two square matrices of width 4096:
            `[(8, 4096), (4096, 8)] * 2`), which are then the only trained ones. Activations are estimated without them.
        base: dtype of the matrices of layers beside `adapters`: "nf4" for bitsandbytes' 4 bits with nested statistics; None
            for that of masters. Seconds leave out the conversion of codes to weights.
        optimizer: makes the optimizer, as for `Relay`; its state is measured on small parameters, in place of
            `optimizer_bytes`. If it rounds weights to bfloat16, masters are bfloat16.
        shelf: on disk, with masters and state; needs `optimizer`. It allows ``stash="disk"`` for GPT-2.

    Returns:
        The forecast; if the step does not fit, `Forecast.advice` has settings that do.

    Raises:
        ValueError: a family without a formula, an invalid number, a shelf without optimizer or with too little memory, a
            base without adapters or on a shelf.

    Example:
        >>> from transformers import LlamaConfig
        >>> from l2l_core import Machine, RelayConfig, forecast_config
        >>> card = Machine(flops_per_s=50e12, update_params_per_s=1e9, h2d_bytes_per_s=20e9, d2h_bytes_per_s=20e9)
        >>> forecast = forecast_config(LlamaConfig(), card, micro_batches=8, batch=8, sequence=1024)  # 6.7 billion parameters
        >>> print(forecast)
        a step of 9.5 s; ...
        device peak 10.9 GB: stash 4.31 GB, weights 2.67 GB, gradients 2.67 GB, activations 1.25 GB, other 197 kB
        host peak 83.5 GB: optimizer 53.9 GB, weights 27 GB, gradients 2.67 GB
        ...
    """
    if base not in (None, "nf4"):
        raise ValueError(f"base={base!r}: give 'nf4', or leave it out for a base in float32")
    if base is not None and (not adapters or shelf is not None):
        raise ValueError(
            f"base={base!r} {'on a shelf has no formula' if adapters else 'is frozen, so nothing would be trained'}: "
            + (
                "build the model and call relay.forecast"
                if adapters
                else "give adapters=, the shapes added to every layer"
            )
        )
    model = read_model_shapes(config).with_adapters(adapters, quantised=base is not None)
    length = model.length or sequence
    for name, value in {"micro_batches": micro_batches, "batch": batch, "sequence": length}.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
    if batch < micro_batches:
        raise ValueError(f"batch={batch} rows in micro_batches={micro_batches}: every micro-batch needs a row")
    assert length is not None
    settings = replace(relay_config or RelayConfig(), micro_batches=micro_batches)
    if settings.keep or settings.schedule != "breadth_first":
        raise ValueError(
            f"relay_config has keep={settings.keep}, schedule={settings.schedule!r}: the bytes of kept graphs are measured, they "
            "have no formula. Leave these settings out, or build the model and call relay.forecast"
        )
    if settings.stash == "disk" and shelf is None:
        raise ValueError(
            "relay_config has stash='disk', which is a file in a shelf's folder: give shelf=PlannedShelf(disk=...), or "
            "RelayConfig(stash='host')"
        )
    if settings.stash == "disk" and model.shell_storages is None:
        raise ValueError(
            f"relay_config has stash='disk', but the storages that a model_type={config.model_type!r}"
            f"{' with adapters' * bool(adapters)} keeps have no formula; only those of gpt2 without adapters have. Build the "
            "model and call relay.forecast"
        )
    if shelf is not None and optimizer is None:
        raise ValueError(
            "shelf= needs optimizer=, since its files contain the optimizer's state. Give a function from parameters to an "
            "optimizer, such as partial(torch.optim.AdamW, lr=1e-4)"
        )
    if shelf is not None and settings.wire is not None:
        raise ValueError(
            f"relay_config has compress={settings.compress!r}: a relay on a shelf pushes float32. Leave it out"
        )
    state = None if optimizer is None else OptimizerStateSize(optimizer)
    if state is not None:
        shapes = [*model.trained[0], *model.trained[1]]
        optimizer_bytes = round(state.nbytes(shapes) / max(1, count_elements(shapes)))
    rows = -(-batch // micro_batches)
    step = ConfiguredStep(model, machine, settings, rows, length, optimizer_bytes, emulated, state, shelf)
    link = {name: getattr(machine, name) for name in ("h2d_bytes_per_s", "d2h_bytes_per_s", "latency_s")}
    forecast = forecast_costs(estimate_costs(step), settings, {"memory_bytes": memory_bytes, **link}, host_bytes)
    if forecast.fits:
        return forecast
    if forecast.shelf is not None:
        return replace(forecast, advice=_shelf_advice(step, batch, forecast))
    return replace(forecast, advice=_advice(step, batch, {"device": memory_bytes, "host": host_bytes}))


def _advice(step: ConfiguredStep, batch: int, limits: Mapping[str, int | None]) -> str:
    """Describe settings that together make the step fit, the cheapest first; each is taken only while its place lacks bytes."""
    taken: dict[str, str] = {}  # words by kind
    for place, limit in limits.items():
        for kind, words, settings, sizes in _changes(place, batch):
            if limit is None or _need(step, place) <= limit:
                break
            other = replace(step, config=replace(step.config, **settings), **sizes)
            if kind == "optimizer" and other.state_bytes >= step.state_bytes:
                continue
            if _need(other, place) < _need(step, place):
                taken[kind], step = words, other
    needs = {place: (limit, _need(step, place)) for place, limit in limits.items() if limit is not None}
    lacking = [f"{format_bytes(need)} on the {place}" for place, (limit, need) in needs.items() if need > limit]
    settings = ", ".join(taken.values())
    if lacking:
        return f"even with {settings or 'other settings'} it would need {' and '.join(lacking)}"
    return f"would fit with {settings}"


def _shelf_advice(step: ConfiguredStep, batch: int, forecast: Forecast) -> str:
    """Describe changes that make a step with a shelf fit."""
    shelf, words = forecast.shelf, list[str]()
    assert shelf is not None
    if forecast.memory_bytes is not None and forecast.peak_device_bytes > forecast.memory_bytes:
        words.append(f"on the device it {_advice(step, batch, {'device': forecast.memory_bytes})}")
    if forecast.host_limit_bytes is not None and (over := forecast.needed_host_bytes - forecast.host_limit_bytes) > 0:
        pool = shelf.memory_bytes - over
        if pool >= shelf.min_bytes:
            words.append(f"on the host it would fit with memory_bytes={pool:,} of the shelf")
        else:
            words.append(
                f"the smallest pool that works is {format_bytes(shelf.min_bytes)}, which is {shelf.min_bytes_reason}: load "
                f"fewer layers ahead, or free {format_bytes(shelf.min_bytes - pool)} of the host"
            )
    if shelf.exceeds_disk:
        words.append(f"the disk needs {format_bytes(shelf.needed_bytes)} free, or the optimizer less state (in_bf16)")
    return "; ".join(words)


def _need(step: ConfiguredStep, place: str) -> int:
    """Return the bytes at the peak; on the host, with the most gradients that may wait at once."""
    costs = estimate_costs(step)
    if place == "device":
        return costs.peak_bytes(place)
    layer, shell = step.gradient_bytes
    pending = step.model.depth if step.config.update != "eager" else min(MAX_PENDING_GRADIENTS, step.model.depth)
    shell_parts = step.config.micro_batches + 1 if step.splits_shell_gradient else 1
    return costs.peak_bytes(place) + sum(costs.host_bytes.values()) + pending * layer + shell_parts * shell


def _changes(place: str, batch: int) -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """List changes that make a step smaller in a place, the cheapest first: kind, words, settings, other fields.

    A later change of a kind includes the earlier ones.
    """
    if place == "device":
        return [
            ("stash", "stash='host'", {"stash": "host"}, {}),
            ("rows", f"micro_batches={batch}", {"micro_batches": batch}, {"rows": 1}),
            ("precision", "precision='bf16'", {"precision": "bf16"}, {}),
            ("ahead", "ahead=0", {"ahead": 0}, {}),
        ]
    states = {
        4: "4 bytes of optimizer state per parameter (one moment, or two in bfloat16: in_bf16)",
        2: "2 bytes of optimizer state per parameter (bitsandbytes' 8-bit optimizers)",
        0: "an optimizer without state (SGD)",
    }
    return [
        ("update", "update='eager'", {"update": "eager", "max_grad_norm": None}, {}),
        *(("optimizer", words, {}, {"state_bytes": n, "optimizer_state": None}) for n, words in states.items()),
        ("precision", "precision='fp32'", {"precision": "fp32"}, {}),
    ]
