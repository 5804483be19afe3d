"""A forecast of a model that was never built: from its configuration and a machine's figures.

Weights, gradients and optimizer state are counted; activations and stash are estimates of what the families' layers keep,
and compute is operations over achieved speed. What it is not: exact. Once a model is built, `Relay.forecast` is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from l2l_core.config import RelayConfig
from l2l_core.forecast.costs import SHELL, Job, LayerCost, Memory, Op, PartCost, Stay, TurnCost
from l2l_core.forecast.families import ModelShapes, Shape, count, shapes_of_config, slot_numel
from l2l_core.forecast.forecast import Forecast
from l2l_core.forecast.formula import Machine, Shapes
from l2l_core.forecast.from_costs import Costs, forecast_costs
from l2l_core.forecast.memory_walk import MemoryWalk
from l2l_core.forecast.profile import Profile
from l2l_core.forecast.stands import pattern
from l2l_core.rules import MAX_UNDER_WAY, gradient_slots, weight_itemsize, weight_slots
from l2l_core.trace import format_bytes

ADAMW = 8  # bytes per parameter of its two moments in float32
_KNOWN = 4  # micro-batches that are written out; more are as these
_LOGITS = 12  # bytes per output and token: logits, their float32 copy or log-softmax, and the gradient


@dataclass(frozen=True, slots=True)
class _Step:
    """A model, and a step of it."""

    model: ModelShapes
    machine: Machine
    config: RelayConfig
    rows: int  # of a micro-batch
    length: int
    state_bytes: int  # of the optimizer, per parameter
    emulated: bool

    @property
    def itemsize(self) -> int:
        return weight_itemsize(self.config.precision)

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def boundary_bytes(self) -> int:
        """What one layer hands to the next."""
        return self.tokens * self.model.width * self.itemsize

    @property
    def gradient_bytes(self) -> tuple[int, int]:
        """Of a layer, and of the shell."""
        layer, shell = (4 * slot_numel(shapes) for shapes in self.model.trained)
        return layer, shell

    @property
    def parts_shell(self) -> bool:
        """Whether the shell's gradients leave micro-batch by micro-batch: the head is the embedding, and is trained."""
        return self.model.tied and bool(self.model.trained[1])


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
) -> Forecast:
    """What a step would need and take, from a configuration of transformers and a machine's figures alone.

    Args:
        config: of one of the families in `families.py`.
        machine: its figures; `flops_per_s` in the precision of `relay_config`.
        micro_batches: of a step.
        batch: rows of a step, a multiple of `micro_batches` or rounded up to one.
        sequence: tokens of a row; None where the configuration fixes it (images).
        relay_config: how the relay would run; its own number of micro-batches does not count.
        memory_bytes: of the device; None for no limit.
        host_bytes: of the host; None for no limit.
        optimizer_bytes: of the optimizer's state per parameter: 8 for AdamW, 0 for plain SGD.
        emulated: on an emulated device, bfloat16 weights need no second copy on the host.
        adapters: shapes of the parameters that adapters add to every layer (LoRA of rank 8 on two square matrices of width
            4096: `[(8, 4096), (4096, 8)] * 2`); then nothing else is trained. None of them: everything is. Activations are
            taken to be those without adapters.

    Returns:
        The forecast; where it does not fit, `Forecast.advice` says what would.

    Raises:
        ValueError: a family that is not known, or a number that is not positive.
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
    rows = -(-batch // micro_batches)
    step = _Step(model, machine, settings, rows, length, optimizer_bytes, emulated)
    forecast = _forecast(step, memory_bytes, host_bytes)
    return forecast if forecast.fits else replace(forecast, advice=_advise(step, batch, memory_bytes, host_bytes))


def _forecast(step: _Step, memory_bytes: int | None, host_bytes: int | None) -> Forecast:
    machine = step.machine
    figures = {
        "memory_bytes": memory_bytes,
        "h2d_bytes_per_s": machine.h2d_bytes_per_s,
        "d2h_bytes_per_s": machine.d2h_bytes_per_s,
        "latency_s": machine.latency_s,
    }
    return forecast_costs(_costs_of(step), step.config, figures, host_bytes)


def _costs_of(step: _Step) -> Costs:
    model, count_ = step.model, step.config.micro_batches
    known = min(count_, _KNOWN)
    profile = _profile_of(step, known)
    layer, shell = (4 * slot_numel(shapes) for shapes in (model.layer, model.shell))
    wire = 0.5 if step.config.precision == "bf16" and not step.emulated else 0.0
    weights = model.depth * layer + shell
    learning = [step.state_bytes * count(shapes) for shapes in model.trained]  # state of a layer's, and of the shell's
    machine = step.machine
    return Costs(
        profile=profile,
        stands=pattern(known, count_),
        around_s=0.0,
        host={"weights": round(weights * (1 + wire)), "optimizer": model.depth * learning[0] + learning[1]},
        pooled_bytes=0,
        layer_host_bytes={key: round(layer * (1 + wire)) + learning[0] for key in profile.layers if key != SHELL},
        basis=f"formula: {model.num_params:,} parameters, {model.depth} layers of {model.layer_params:,}; {machine.name}: "
        f"{machine.flops_per_s / 1e12:.3g} TFLOP/s, {machine.update_params_per_s / 1e6:.3g} M parameters/s updated",
    )


def _profile_of(step: _Step, micro_batches: int) -> Profile:
    """Costs by formula, with the memory of every turn.

    Attention's products count as `2 * length * width` more parameters: 4 operations per token, position and width.
    """
    model, machine = step.model, step.machine
    products = 2 * step.length * model.width
    head = model.head_params if not model.per_row else max(1, model.head_params // 3)
    shapes = Shapes(
        layer_params=[count(model.layer) + products] * model.depth,
        shell_params=head,
        layer_trained=[count(model.trained[0]) + products] * model.depth,
        shell_trained=head if model.trained[1] else 0,
        tokens=step.tokens,
        boundary_bytes=step.boundary_bytes,
        micro_batches=micro_batches,
        stash=step.config.stash,
        precision=step.config.precision,
    )
    profile = Profile.of_shapes(shapes, machine)
    sizes = {key: slot_numel(model.shell if key == SHELL else model.layer) for key in profile.layers}
    pushed = {key: step.gradient_bytes[key == SHELL] for key in profile.layers}
    trained = {key: count(model.trained[key == SHELL]) for key in profile.layers}
    layers = {
        key: LayerCost(step.itemsize * n, pushed[key], pushed[key], update_s=trained[key] / machine.update_params_per_s)
        for key, n in sizes.items()
    }
    if step.parts_shell:
        profile = _with_parts(profile, sizes[SHELL], model.head_params)
        layers[SHELL] = layers[SHELL]._replace(push_bytes=0)
    # updates that wait for all gradients
    late = list(layers) if step.config.update == "deferred" else [SHELL] if step.parts_shell else []
    jobs = tuple(Job("update", key, -1, layers[key].update_s, pushed[key]) for key in late if pushed[key])
    memory = _Memory(step, micro_batches)
    return profile.with_turns(lambda _, turns: map(memory.fill, turns), layers=layers, closing=jobs, memory=())


def _with_parts(profile: Profile, shell_numel: int, head_params: int) -> Profile:
    """The shell's gradients leave with every micro-batch: the head's after the loss, the embedding's with the first layer's."""

    def part(nbytes: int, visit: int) -> tuple[PartCost, ...]:
        return (PartCost(SHELL, nbytes, SHELL, 4 * shell_numel, 0.0, visit),)

    def parted(stay: Stay, is_last: bool) -> Stay:
        turns = []
        for turn in stay.turns:
            ops = [op._replace(parts=part(4 * head_params, stay.visit)) if op.kind == "loss" else op for op in turn.ops]
            if is_last:
                ops[-1] = ops[-1]._replace(parts=part(4 * shell_numel, stay.visit))
            turns.append(turn._replace(ops=tuple(ops)))
        return stay._replace(turns=tuple(turns))

    last = len(profile.stays) - 1
    return replace(profile, stays=tuple(parted(stay, index == last) for index, stay in enumerate(profile.stays)))


class _Memory:
    """Both memories, turn by turn, as the loop would book them."""

    def __init__(self, step: _Step, micro_batches: int) -> None:
        model, config = step.model, step.config
        layer, shell = slot_numel(model.layer), slot_numel(model.shell)
        self._slots = {
            "weights": step.itemsize * (shell + weight_slots(config.ahead) * layer),
            "gradients": step.gradient_bytes[1] + gradient_slots(config.ahead) * step.gradient_bytes[0],
        }
        self._on_host, self._boundary = config.stash == "host", step.boundary_bytes
        # the images that leave and arrive; in backward each is an input and a gradient
        self._ring = 4 * self._boundary if self._on_host and config.ahead else 0
        graph = model.graphs[config.precision].nbytes(model, step.rows, step.length)
        out = (step.rows if model.per_row else step.tokens) * model.outputs * _LOGITS
        # a fresh gradient of one parameter is beside the slot until it is added
        largest = [4 * max((count((shape,)) for shape in shapes), default=0) for shapes in model.trained]
        self._highest = {
            "shell": 2 * step.boundary_bytes,
            "forward": graph,
            "backward": graph + 2 * step.boundary_bytes + largest[0],
            "loss": graph + out + largest[1],
        }
        self._ids = 24 * step.tokens  # ids, labels and a mask, of 8 bytes
        self._parked: Counter[str] = Counter()
        self._overhead_s = step.machine.overhead_s

    def fill(self, turn: TurnCost) -> TurnCost:
        """The turn, with samples; the memories go on from there."""
        return turn._replace(ops=tuple(self._op(op) for op in turn.ops))

    def _op(self, op: Op) -> Op:
        last = op.kind == "backward"
        high = self._sample(self._highest[op.kind])
        if op.kind in ("shell", "forward"):
            self._parked["stash"] += self._boundary
            self._parked["other"] += self._ids if op.kind == "shell" else 0
        elif last:
            self._parked["stash"] -= self._boundary
        return op._replace(overhead_s=self._overhead_s, memory=(*high, *self._sample(0)))

    def _sample(self, activations: int) -> Memory:
        """What is there now, with so many bytes of activations."""
        parked = dict(self._parked)
        if not self._on_host:
            return (("device", {**self._slots, **parked, "activations": activations}), ("host", {}))
        here = {"stash": self._ring + 2 * self._boundary, "other": self._ids}
        waiting = {"stash": sum(parked.values())}
        return (("device", {**self._slots, **here, "activations": activations}), ("host", waiting))


# -- what would fit --------------------------------------------------------------------------------------------------


def _advise(step: _Step, batch: int, memory_bytes: int | None, host_bytes: int | None) -> str:
    """Settings that together make the step fit, in words; each is taken only if its place still lacks room."""
    taken: dict[str, str] = {}  # by what it replaces
    limits = {"device": memory_bytes, "host": host_bytes}
    for place, limit in limits.items():
        for kind, words, change in _changes(place, batch):
            if limit is None or _need(step, place) <= limit:
                break
            other = change(step)
            if other is not None and _need(other, place) < _need(step, place):
                taken[kind] = words
                step = other
    lacking = [
        f"{format_bytes(need)} on the {place}"
        for place, limit in limits.items()
        if limit is not None and (need := _need(step, place)) > limit
    ]
    settings = ", ".join(taken.values())
    if lacking:
        return f"even with {settings or 'other settings'} it would need {' and '.join(lacking)}"
    return f"would fit with {settings}"


def _need(step: _Step, place: str) -> int:
    """Bytes at the peak; of gradients in host memory as many as there may be."""
    costs = _costs_of(step)
    high = MemoryWalk(costs.profile).rise(place, costs.stands, {}).high
    if place == "device":
        return high
    layer, shell = step.gradient_bytes
    many = step.model.depth if step.config.update == "deferred" else min(MAX_UNDER_WAY, step.model.depth)
    apart = step.config.micro_batches + 1 if step.parts_shell else 1
    return high + sum(costs.host.values()) + many * layer + apart * shell


Change = Callable[[_Step], _Step | None]


def _changes(place: str, batch: int) -> list[tuple[str, str, Change]]:
    """What makes a step smaller at a place, the cheapest first: kind, words, and how; None where it is so already."""

    def config(**settings: Any) -> Change:
        return lambda step: replace(step, config=replace(step.config, **settings))

    def optimizer(nbytes: int) -> Change:
        return lambda step: replace(step, state_bytes=nbytes) if step.state_bytes > nbytes else None

    def single(step: _Step) -> _Step | None:
        return replace(step, rows=1, config=replace(step.config, micro_batches=batch)) if step.rows > 1 else None

    if place == "device":
        return [
            ("stash", "stash='host'", config(stash="host")),
            ("rows", f"micro_batches={batch}", single),
            ("precision", "precision='bf16'", config(precision="bf16")),
            ("ahead", "ahead=0", config(ahead=0)),
        ]
    return [
        ("update", "update='eager'", config(update="eager", max_grad_norm=None)),
        ("optimizer", "4 bytes of optimizer state per parameter (one moment, or two in bfloat16)", optimizer(4)),
        ("optimizer", "an optimizer without state (SGD)", optimizer(0)),
        ("precision", "precision='fp32'", config(precision="fp32")),
    ]
