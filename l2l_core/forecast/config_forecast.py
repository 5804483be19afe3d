"""A forecast of a model that was never built, from its configuration and a machine's figures; and advice where it does not fit.

It is not exact, since `configured_step.py` estimates what layers keep. Once a model is built, `Relay.forecast` is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from l2l_core.config import RelayConfig
from l2l_core.forecast.configured_step import ConfiguredStep, estimate_costs
from l2l_core.forecast.cost_forecast import forecast_costs
from l2l_core.forecast.forecast import Forecast
from l2l_core.forecast.model_shapes import Shape, read_model_shapes
from l2l_core.forecast.optimizer_state_size import OptimizerFactory, OptimizerStateSize, bytes_per_parameter
from l2l_core.forecast.shelf_costs import PlannedShelf
from l2l_core.schedule_rules import MAX_PENDING_GRADIENTS
from l2l_core.simulator import Machine
from l2l_core.trace import format_bytes

ADAMW_BYTES = 8  # bytes per parameter of its two moments in float32

Make = Callable[[ConfiguredStep], ConfiguredStep | None]  # gives None where the step is so already


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
    optimizer: OptimizerFactory | None = None,
    shelf: PlannedShelf | None = None,
) -> Forecast:
    """Forecast a step from a configuration of transformers and a machine's figures alone: bytes, seconds, and what binds.

    Args:
        config: of one of the families in `model_shapes.py`.
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
    model = read_model_shapes(config).with_adapters(adapters)
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
    if settings.stash == "disk" and model.shell_storages is None:
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
    kept = None if optimizer is None else OptimizerStateSize(optimizer)
    if kept is not None:
        optimizer_bytes = bytes_per_parameter(kept, [shape for shapes in model.trained for shape in shapes])
    rows = -(-batch // micro_batches)
    step = ConfiguredStep(model, machine, settings, rows, length, optimizer_bytes, emulated, kept, shelf)
    forecast = _forecast_configured(step, memory_bytes, host_bytes)
    if forecast.fits:
        return forecast
    if forecast.shelf is not None:
        return replace(forecast, advice=_shelf_advice(step, batch, forecast))
    return replace(forecast, advice=_advice(step, batch, {"device": memory_bytes, "host": host_bytes}))


def _forecast_configured(step: ConfiguredStep, memory_bytes: int | None, host_bytes: int | None) -> Forecast:
    machine = step.machine
    figures = {
        "memory_bytes": memory_bytes,
        "h2d_bytes_per_s": machine.h2d_bytes_per_s,
        "d2h_bytes_per_s": machine.d2h_bytes_per_s,
        "latency_s": machine.latency_s,
    }
    return forecast_costs(estimate_costs(step), step.config, figures, host_bytes)


def _advice(step: ConfiguredStep, batch: int, limits: Mapping[str, int | None]) -> str:
    """Write which settings together make the step fit, the cheapest first; one is taken only if its place still lacks room."""
    taken: dict[str, str] = {}  # words by kind
    lacking = []
    for place, limit in limits.items():
        for kind, words, make in _changes(place, batch):
            if limit is None or _need(step, place) <= limit:
                break
            other = make(step)
            if other is not None and _need(other, place) < _need(step, place):
                taken[kind], step = words, other
    for place, limit in limits.items():
        if limit is not None and (need := _need(step, place)) > limit:
            lacking.append(f"{format_bytes(need)} on the {place}")
    settings = ", ".join(taken.values())
    if lacking:
        return f"even with {settings or 'other settings'} it would need {' and '.join(lacking)}"
    return f"would fit with {settings}"


def _shelf_advice(step: ConfiguredStep, batch: int, forecast: Forecast) -> str:
    """Write what would make a step fit whose masters are on a shelf."""
    shelf, words = forecast.shelf, list[str]()
    assert shelf is not None
    if forecast.memory_bytes is not None and forecast.peak_device_bytes > forecast.memory_bytes:
        words.append(f"on the device it {_advice(step, batch, {'device': forecast.memory_bytes})}")
    if forecast.host_limit_bytes is not None and (over := forecast.needed_host_bytes - forecast.host_limit_bytes) > 0:
        room = shelf.memory_bytes - over
        words.append(
            f"on the host it would fit with memory_bytes={room:,} of the shelf"
            if room >= shelf.min_bytes
            else f"the smallest pool that works is {format_bytes(shelf.min_bytes)}, which is {shelf.min_bytes_reason}: load fewer layers "
            f"ahead, or free {format_bytes(over - (shelf.memory_bytes - shelf.min_bytes))} of the host"
        )
    if shelf.exceeds_disk:
        words.append(
            f"the disk must have {format_bytes(shelf.needed_bytes)} free, or the optimizer less state (in_bf16)"
        )
    return "; ".join(words)


def _need(step: ConfiguredStep, place: str) -> int:
    """Return the bytes at the peak; on the host, of gradients as many as there may be."""
    costs = estimate_costs(step)
    if place == "device":
        return costs.peak_bytes(place)
    layer, shell = step.gradient_bytes
    many = step.model.depth if step.config.update == "deferred" else min(MAX_PENDING_GRADIENTS, step.model.depth)
    apart = step.config.micro_batches + 1 if step.splits_shell_gradient else 1
    return costs.peak_bytes(place) + sum(costs.host_bytes.values()) + many * layer + apart * shell


def _changes(place: str, batch: int) -> list[tuple[str, str, Make]]:
    """List what makes a step smaller at a place, the cheapest first: kind, words, and the change.

    Of a kind the last change that was taken is named, since it holds those before it.
    """

    def config(**settings: Any) -> Make:
        return lambda step: replace(step, config=replace(step.config, **settings))

    def optimizer(nbytes: int) -> Make:
        return lambda step: (
            replace(step, state_bytes=nbytes, optimizer_state=None) if step.state_bytes > nbytes else None
        )

    def single(step: ConfiguredStep) -> ConfiguredStep | None:
        return replace(step, rows=1, config=replace(step.config, micro_batches=batch)) if step.rows > 1 else None

    if place == "device":
        return [
            ("stash", "stash='host'", config(stash="host")),
            ("rows", f"micro_batches={batch}", single),
            ("precision", "precision='bf16'", config(precision="bf16")),
            ("ahead", "ahead=0", config(ahead=0)),
        ]
    half = "4 bytes of optimizer state per parameter (one moment, or two in bfloat16: in_bf16)"
    return [
        ("update", "update='eager'", config(update="eager", max_grad_norm=None)),
        ("optimizer", half, optimizer(4)),
        ("optimizer", "2 bytes of optimizer state per parameter (bitsandbytes' 8-bit optimizers)", optimizer(2)),
        ("optimizer", "an optimizer without state (SGD)", optimizer(0)),
        ("precision", "precision='fp32'", config(precision="fp32")),
    ]
