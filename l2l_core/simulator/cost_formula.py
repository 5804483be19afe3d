"""Costs by formula, from numbers of parameters and figures of a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from l2l_core.schedule_rules import gradient_slots, weight_itemsize, weight_slots
from l2l_core.simulator.step_costs import COPY_LANES, SHELL, ComputeOp, CopySpeed, LayerCost, StayCost, TurnCost


@dataclass(frozen=True)
class Machine:
    """Figures of a machine, for profiles without a recording.

    Attributes:
        flops_per_s: achieved in matrix products, in the precision in question.
        update_params_per_s: parameters that the optimizer updates on the host.
        h2d_bytes_per_s, d2h_bytes_per_s: of the link.
        name: for messages.
        latency_s: of a copy.
        overhead_s: of the host, before a layer runs a micro-batch.

    Example:
        >>> from l2l_core import Machine, Profile, Shapes, simulate
        >>> card = Machine(flops_per_s=50e12, update_params_per_s=1e9, h2d_bytes_per_s=20e9, d2h_bytes_per_s=20e9)
        >>> sizes = {"layer_params": [200_000_000] * 32, "shell_params": 0, "boundary_bytes": 2048 * 4096 * 4}
        >>> shapes = Shapes(**sizes, tokens=2048, micro_batches=8)
        >>> trace = simulate(Profile.of_shapes(shapes, card), RelayConfig(micro_batches=8), None)
        >>> round(trace.span_s)  # of a step of 6.4 billion parameters
        17
    """

    flops_per_s: float
    update_params_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    name: str = "a machine"
    latency_s: float = 0.0
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            if field in ("latency_s", "overhead_s"):
                if not value >= 0:
                    raise ValueError(f"{field}={value!r}: must be 0 or more seconds")
            elif field != "name" and not value > 0:
                raise ValueError(f"{field}={value!r}: must be positive")


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of a model and a step, for costs by formula.

    Attributes:
        layer_params: parameters of every layer.
        shell_params: of the rest of the model.
        tokens: per micro-batch.
        boundary_bytes: of a layer's output, per micro-batch.
        micro_batches: per step.
        activation_bytes: of one layer's graph for one micro-batch, if known.
        stash, precision: as in `RelayConfig`.
        layer_trained, shell_trained: number of these parameters that are trained; None for all.

    Raises:
        ValueError: no layers, a number that is not positive, or a number of trained parameters out of range or 0 in total.

    Example:
        >>> from l2l_core import EmulatedDevice, Machine, Profile, Shapes, simulate
        >>> shapes = Shapes(layer_params=[1_000_000] * 4, shell_params=10_000, tokens=512, boundary_bytes=512 * 256 * 4)
        >>> card = Machine(flops_per_s=1e12, update_params_per_s=1e9, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9)
        >>> link = EmulatedDevice(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9)
        >>> trace = simulate(Profile.of_shapes(shapes, card), RelayConfig(), link)
        >>> round(trace.span_s, 3)  # seconds of a step
        0.036
    """

    layer_params: Sequence[int]
    shell_params: int
    tokens: int
    boundary_bytes: int
    micro_batches: int = 1
    activation_bytes: int = 0
    stash: str = "device"
    precision: str = "fp32"
    layer_trained: Sequence[int] | None = None
    shell_trained: int | None = None

    @property
    def trained(self) -> tuple[Sequence[int], int]:
        """Trained parameters of every layer, and of the shell."""
        layers = self.layer_params if self.layer_trained is None else self.layer_trained
        return layers, self.shell_params if self.shell_trained is None else self.shell_trained

    def __post_init__(self) -> None:
        if not self.layer_params:
            raise ValueError("layer_params=[]: give the parameters of at least one layer")
        layers, shell = self.trained
        if len(layers) != len(self.layer_params):
            raise ValueError(
                f"layer_trained has {len(layers)} numbers for {len(self.layer_params)} layers: give one each"
            )
        pairs = [*zip(layers, self.layer_params, strict=True), (shell, self.shell_params)]
        if any(not 0 <= trained <= params for trained, params in pairs) or not any(trained for trained, _ in pairs):
            raise ValueError(
                f"layer_trained={self.layer_trained!r}, shell_trained={self.shell_trained!r}: give at most the number of "
                "parameters each, and more than 0 in total"
            )
        for field in ("tokens", "boundary_bytes", "micro_batches"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}={getattr(self, field)!r}: must be positive")


class FormulaLayer(NamedTuple):
    """A layer, or the shell, for the formula.

    Parameters that compute are counted apart from bytes that move: attention's products are not loaded, and slots are padded.
    """

    params: int  # each is 2 operations per token forward
    trained: int  # of these
    transfer: LayerCost

    @staticmethod
    def of(machine: Machine, precision: str, params: int, trained: int) -> FormulaLayer:
        """Make a layer whose parameters all compute and move, without padding."""
        return FormulaLayer(params, trained, transfer_cost(machine, precision, params, trained, trained))


def transfer_cost(
    machine: Machine,
    precision: str,
    loaded_numel: int,
    gradient_numel: int,
    updated_numel: int,
    pushed_numel: int | None = None,
) -> LayerCost:
    """Return the cost of a layer, or of the shell, from numbers of elements; a compressed gradient has its `pushed_numel`."""
    pushed_bytes = 4 * (gradient_numel if pushed_numel is None else pushed_numel)
    return LayerCost(
        weight_itemsize(precision) * loaded_numel,
        pushed_bytes,
        4 * gradient_numel,
        update_s=updated_numel / machine.update_params_per_s,
    )


def profile_fields_of_shapes(shapes: Shapes, machine: Machine) -> dict[str, Any]:
    """Return the fields of a `Profile`, with peak memory for one layer ahead; see `profile_fields`."""
    layer_trained, shell_trained = shapes.trained
    layers = [
        FormulaLayer.of(machine, shapes.precision, params, trained)
        for params, trained in zip(shapes.layer_params, layer_trained, strict=True)
    ]
    shell = FormulaLayer.of(machine, shapes.precision, shapes.shell_params, shell_trained)
    slots = {
        "weights": shell.transfer.load_bytes + weight_slots(1) * max(layer.transfer.load_bytes for layer in layers),
        "gradients": shell.transfer.push_bytes + gradient_slots(1) * max(layer.transfer.push_bytes for layer in layers),
    }
    # With the stash on the host: one offloaded, one fetched, an input and its gradient.
    held = 4 if shapes.stash == "host" else len(layers) * shapes.micro_batches
    peak = {**slots, "stash": held * shapes.boundary_bytes, "activations": shapes.activation_bytes}
    settings = {name: getattr(shapes, name) for name in ("micro_batches", "stash", "precision")}
    costs = profile_fields(layers, shell, machine, settings, shapes.tokens, shapes.boundary_bytes)
    return {**costs, "memory": (("device", peak),)}


def profile_fields(
    layers: Sequence[FormulaLayer],
    shell: FormulaLayer,
    machine: Machine,
    settings: Mapping[str, Any],
    tokens: int,
    boundary_bytes: int,
) -> dict[str, Any]:
    """Return the fields of a `Profile` except its memory.

    A token costs 2 operations per parameter in forward, 6 in backward with recompute, 4 without (the last layer runs once).
    Source: Kaplan et al., https://arxiv.org/abs/2001.08361, section 2.1. Backward of a frozen parameter needs 2 fewer, and
    it has no gradient to push. Layers before the first trained one have no backward; a trained shell counts as before the
    first layer. Attention's own products count as parameters; `tokens` and `boundary_bytes` are those of a micro-batch.
    """
    moves = settings["stash"] != "device"
    keys = [f"L{index:03d}" for index in range(len(layers))]
    per_param_s = 2 * tokens / machine.flops_per_s

    def forward_s(layer: FormulaLayer) -> float:
        return layer.params * per_param_s

    def backward_s(layer: FormulaLayer) -> float:
        return (layer.params + layer.trained) * per_param_s

    def turns(ops: Sequence[ComputeOp], fetched: int, offloaded: int) -> tuple[TurnCost, ...]:
        moved = (0, fetched * boundary_bytes, offloaded * boundary_bytes) if moves else (0, 0, 0)
        return tuple(TurnCost(k, tuple(ops), *moved) for k in range(settings["micro_batches"]))

    last = len(layers) - 1
    forward = [
        StayCost(key, visit, turns([ComputeOp("forward", key, visit, forward_s(layer))], 1, 1))
        for visit, (key, layer) in enumerate(zip(keys[:last], layers[:last], strict=True))
    ]
    last_stay = [  # without recompute
        ComputeOp("forward", keys[last], last, forward_s(layers[last])),
        ComputeOp("loss", SHELL, -1, forward_s(shell) + backward_s(shell)),
        ComputeOp("backward", keys[last], last + 1, backward_s(layers[last])),
    ]
    first = 0 if shell.trained else next(i for i, layer in enumerate(layers) if layer.trained)
    # A turn of backward fetches the layer's input and the gradient of its output, and offloads the gradient of its input.
    backward = [
        StayCost(keys[i], visit, turns([ComputeOp("backward", keys[i], visit, seconds)], 2, 1))
        for i in range(last - 1, first - 1, -1)
        for visit, seconds in [(2 * last + 1 - i, forward_s(layers[i]) + backward_s(layers[i]))]
    ]
    return {
        "layers": {key: layer.transfer for key, layer in zip([*keys, SHELL], [*layers, shell], strict=True)},
        "start": turns([ComputeOp("shell", SHELL, -1, 0.0)], 0, 1),
        "stays": (*forward, StayCost(keys[last], last, turns(last_stay, 1, 1)), *backward),
        "closing": (),
        "copies": {lane: CopySpeed(0.0, getattr(machine, f"{lane}_bytes_per_s")) for lane in COPY_LANES},
        "handover_s": 0.0,
        "settings": dict(settings),
        "names": {key: key for key in (*keys, SHELL)},
    }
