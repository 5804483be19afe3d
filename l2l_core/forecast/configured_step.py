"""Costs of a step by formula, from a model's shapes, a machine's figures and the settings.

Weights, gradients and optimizer state are exact. Activations and stash are estimates for the layers of the families, and
compute is the number of operations over the achieved speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from l2l_core.config import RelayConfig
from l2l_core.forecast.cost_forecast import ForecastCosts
from l2l_core.forecast.model_shapes import ModelShapes, Shape, count_elements, slot_numel
from l2l_core.forecast.optimizer_state_size import OptimizerStateSize
from l2l_core.forecast.representatives import repeat_middle
from l2l_core.forecast.shelf_costs import PlannedShelf, ShelfCosts
from l2l_core.forecast.stash_moves import LiveStorages, add_stash_moves
from l2l_core.schedule_rules import (
    PACK_CHUNK,
    PACKING_BYTES,
    SCALE_GROUP,
    gradient_slots,
    packed_numel,
    residual_backups,
    weight_itemsize,
    weight_slots,
)
from l2l_core.simulator import (
    SHELL,
    ComputeOp,
    EPSJob,
    FormulaLayer,
    GradientPartCost,
    LayerCost,
    Machine,
    MemorySamples,
    Profile,
    TurnCost,
    profile_fields,
    transfer_cost,
)

_MAX_MICRO_BATCHES = 4  # of the profile; more are extrapolated
_LOGIT_BYTES = 12  # per output and token: logits, their float32 copy or log-softmax, and the gradient


@dataclass(frozen=True, slots=True)
class ConfiguredStep:
    """A step of a model that is not built."""

    model: ModelShapes
    machine: Machine
    config: RelayConfig
    rows: int  # of a micro-batch
    length: int  # tokens of a row
    state_bytes: int  # per parameter, unless `optimizer_state` has the exact size
    emulated: bool  # needs no bfloat16 copy of weights on the host
    optimizer_state: OptimizerStateSize | None = None
    shelf: PlannedShelf | None = None  # on disk, with masters and state

    @property
    def itemsize(self) -> int:
        """Bytes of a weight on the device."""
        return weight_itemsize(self.config.precision)

    def host_bytes(self, layers: int, shells: int) -> dict[str, int]:
        """Return the bytes of masters and state of this many layers and shells in host memory."""
        (layer, shell), state = self.model.trained, self.optimizer_state
        master = 2 if state is not None and state.rounds_weights else 4
        cast = 0 if self.emulated or self.itemsize == master else self.itemsize
        numel = layers * slot_numel(self.model.layer) + shells * slot_numel(self.model.shell)
        if state is None:
            optimizer = self.state_bytes * (layers * count_elements(layer) + shells * count_elements(shell))
        else:
            shared = bool(shells) * state.shared_bytes((*layer, *shell))
            optimizer = layers * state.nbytes(layer) + shells * state.nbytes(shell) + shared
        return {"weights": (master + cast) * numel + layers * self.model.quantised_bytes, "optimizer": optimizer}

    @property
    def layer_numel(self) -> int:
        """Elements of a layer in a slot."""
        return slot_numel(self.model.layer) + self.model.quantised_bytes // self.itemsize

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.rows * self.length

    @property
    def boundary_bytes(self) -> int:
        """Bytes of a layer's output, per micro-batch."""
        return self.tokens * self.model.width * self.itemsize

    @property
    def gradient_bytes(self) -> tuple[int, int]:
        """Bytes of the gradient of a layer, and of that of the shell."""
        layer, shell = (4 * slot_numel(shapes) for shapes in self.model.trained)
        return layer, shell

    def transfer_cost(self, held_numel: int, trained: Sequence[Shape]) -> LayerCost:
        """Return the costs of the copies and of the update of a layer or the shell."""
        numel, elements, wire = slot_numel(trained), count_elements(trained), self.config.wire
        pushed = numel
        if wire is not None:
            pushed = sum(packed_numel(wire.format, count_elements((one,))) for one in trained)
        return transfer_cost(self.machine, self.config.precision, held_numel, numel, elements, pushed)

    @property
    def wire_bytes(self) -> int:
        """Bytes on the device for compressed gradients besides their slots: packing buffer and residuals."""
        wire, (layer, shell) = self.config.wire, self.model.trained
        if wire is None:
            return 0
        largest = max((count_elements((one,)) for one in (*layer, *shell)), default=0)
        packing = PACKING_BYTES * min(PACK_CHUNK, largest + SCALE_GROUP)
        if not wire.feedback:
            return packing
        # Residuals exist for gradients that leave as a sum.
        held = [4 * count_elements(layer)] * self.model.depth
        held.append(0 if self.splits_shell_gradient else 4 * count_elements(shell))
        backups = residual_backups(self.config.update, self.config.rollback)
        return packing + sum(held) + sum(sorted(held, reverse=True)[:backups])

    @property
    def splits_shell_gradient(self) -> bool:
        """True if the shell's gradients leave per micro-batch: the head is the embedding, and is trained."""
        return self.model.tied and bool(self.model.trained[1])


def estimate_costs(step: ConfiguredStep) -> ForecastCosts:
    """Estimate the costs of a step."""
    model, machine, config = step.model, step.machine, step.config
    known = min(config.micro_batches, _MAX_MICRO_BATCHES)
    profile = _make_profile(step, known)
    layers = [key for key in profile.layers if key != SHELL]
    shelf, host_bytes, layer_host_bytes = None, step.host_bytes(model.depth, 1), sum(step.host_bytes(1, 0).values())
    if step.shelf is not None:
        state, bf16 = step.optimizer_state, config.precision == "bf16"
        assert state is not None, "forecast_config refuses a shelf without optimizer"
        shelf = ShelfCosts.of(step.shelf, model, state, layers, config.ahead, not step.emulated, bf16)
        host_bytes, layer_host_bytes = {}, 0
    return ForecastCosts(
        profile=profile,
        representatives=repeat_middle(known, config.micro_batches),
        overhead_s=0.0,
        host_bytes=host_bytes,
        pooled_bytes=0,
        layer_host_bytes=dict.fromkeys(layers, layer_host_bytes),
        shelf=shelf,
        basis=f"formula: {model.num_params:,} parameters, {model.depth} layers of {model.layer_params:,}; {machine.name}: "
        f"{machine.flops_per_s / 1e12:.3g} TFLOP/s, {machine.update_params_per_s / 1e6:.3g} M parameters/s updated",
    )


def _make_profile(step: ConfiguredStep, micro_batches: int) -> Profile:
    """Return costs by formula, with the memory of every turn.

    Attention's products count as `2 * length * width` more parameters: 4 operations per token, position and width.
    """
    model, config = step.model, step.config
    products = 2 * step.length * model.width
    head, head_trained = model.head_params, model.head_params if model.trained[1] else 0
    if model.per_row:
        # These are patch embeddings, and pixels need no gradient: per token and parameter 2 operations forward, and 2
        # backward if it is trained. The formula has 4 for a frozen parameter and 2 more for a trained one: half fits both.
        head //= 2
    held = step.layer_numel, slot_numel(model.shell)
    layer, shell = (step.transfer_cost(*pair) for pair in zip(held, model.trained, strict=True))
    one = FormulaLayer(model.layer_params + products, count_elements(model.trained[0]) + products, layer)
    settings = {"micro_batches": micro_batches, "compress": config.compress}
    settings |= {"stash": config.stash, "precision": config.precision}
    last, sizes = FormulaLayer(head, head_trained, shell), (step.tokens, step.boundary_bytes)
    profile = Profile(**profile_fields([one] * model.depth, last, step.machine, settings, *sizes))
    layers = dict(profile.layers)
    if step.splits_shell_gradient:
        profile = _split_shell_gradient(profile, slot_numel(model.shell), model.head_params)
        layers[SHELL] = layers[SHELL]._replace(push_bytes=0)
    # Updates that wait for all gradients
    late = list(layers) if config.update != "eager" else [SHELL] if step.splits_shell_gradient else []
    updates = [EPSJob("update", key, -1, layers[key].update_s, layers[key].block_bytes) for key in late]
    closing = tuple(job for job in updates if job.nbytes)
    if config.stash == "disk":
        assert model.shell_storages is not None, "forecast_config refuses a stash on the disk without them"
        nbytes = [each.nbytes(step.rows, step.length, model.width, step.itemsize) for each in model.shell_storages]
        storages = LiveStorages(model.shell_storages, nbytes, step.boundary_bytes)
        profile = add_stash_moves(profile, storages, bool(model.trained[1]), config.ahead > 0)
    memory = _MemoryEstimate(step)
    return profile.map_turns(lambda _, turns: map(memory.add_samples, turns), layers=layers, closing=closing, memory=())


def _split_shell_gradient(profile: Profile, shell_numel: int, head_params: int) -> Profile:
    """Push the shell's gradients per micro-batch: the head's after the loss, the embedding's with the first layer's."""

    def part(op: ComputeOp, nbytes: int, visit: int) -> ComputeOp:
        return op._replace(gradient_parts=(GradientPartCost(SHELL, nbytes, SHELL, 4 * shell_numel, 0.0, visit),))

    def split(index: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
        visit = profile.stays[index].visit
        for turn in turns:
            ops = [part(op, 4 * head_params, visit) if op.kind == "loss" else op for op in turn.ops]
            if index == len(profile.stays) - 1:
                ops[-1] = part(ops[-1], 4 * shell_numel, visit)
            yield turn._replace(ops=tuple(ops))

    return profile.map_turns(split)


class _MemoryEstimate:
    """Estimates both memories turn by turn, in the order of the loop."""

    def __init__(self, step: ConfiguredStep) -> None:
        model, config = step.model, step.config
        layer, shell = step.layer_numel, slot_numel(model.shell)
        layer_gradient, shell_gradient = step.gradient_bytes
        self._slot_bytes = {
            "weights": step.itemsize * (shell + weight_slots(config.ahead, config.resident) * layer),
            "gradients": step.wire_bytes + shell_gradient + gradient_slots(config.ahead) * layer_gradient,
        }
        self._stash, self._boundary_bytes = config.stash, step.boundary_bytes
        # Tensors that leave and arrive; in backward each is an input and a gradient.
        self._ring_bytes = 4 * self._boundary_bytes if config.stash != "device" and config.ahead else 0
        graph = model.activation_sizes[config.precision].nbytes(model, step.rows, step.length)
        logits = (step.rows if model.per_row else step.tokens) * model.outputs * _LOGIT_BYTES
        # A new gradient of one parameter exists besides the slot until it is added.
        largest = [4 * max((count_elements((shape,)) for shape in shapes), default=0) for shapes in model.trained]
        self._peak_by_kind = {
            "shell": 2 * step.boundary_bytes,
            "forward": graph,
            "backward": graph + 2 * step.boundary_bytes + largest[0],
            "loss": graph + logits + largest[1],
        }
        self._id_bytes = 24 * step.tokens  # ids, labels and a mask, of 8 bytes
        self._stashed_bytes: Counter[str] = Counter()
        self._overhead_s = step.machine.overhead_s

    def add_samples(self, turn: TurnCost) -> TurnCost:
        """Return the turn with memory samples; turns must be given in order."""
        ops = []
        for op in turn.ops:
            high = self._make_samples(self._peak_by_kind[op.kind])
            if op.kind in ("shell", "forward"):
                self._stashed_bytes["stash"] += self._boundary_bytes
                self._stashed_bytes["other"] += self._id_bytes if op.kind == "shell" else 0
            elif op.kind == "backward":
                self._stashed_bytes["stash"] -= self._boundary_bytes
            ops.append(op._replace(overhead_s=self._overhead_s, memory=(*high, *self._make_samples(0))))
        return turn._replace(ops=tuple(ops))

    def _make_samples(self, activations: int) -> MemorySamples:
        """Return the present state with this many bytes of activations."""
        device = {**self._slot_bytes, **self._stashed_bytes, "activations": activations}
        if self._stash == "device":
            return (("device", device), ("host", {}))
        device |= {"stash": self._ring_bytes + 2 * self._boundary_bytes, "other": self._id_bytes}
        # The buffers of a stash on the disk are counted separately.
        host = {"stash": self._stashed_bytes.total()} if self._stash == "host" else {}
        return (("device", device), ("host", host))
