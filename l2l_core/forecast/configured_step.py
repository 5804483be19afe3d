"""The costs of a step of a model that was never built: its shapes, a machine's figures, and settings in place of a trace.

Weights, gradients and optimizer state are counted; activations and stash are estimates of what the families' layers keep,
and compute is operations over achieved speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from l2l_core.config import RelayConfig
from l2l_core.forecast.cost_forecast import ForecastCosts
from l2l_core.forecast.model_shapes import ModelShapes, Shape, count_elements, slot_numel
from l2l_core.forecast.optimizer_state_size import OptimizerStateSize
from l2l_core.forecast.representatives import repeat_middle
from l2l_core.forecast.shelf_costs import PlannedShelf, ShelfCosts
from l2l_core.forecast.stash_formula import LiveStorages, add_stash_moves
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
    Machine,
    MemorySamples,
    Profile,
    StayCost,
    TurnCost,
    profile_fields,
    transfer_cost,
)

_MAX_MICRO_BATCHES = 4  # micro-batches that are written out; more are as these
_LOGIT_BYTES = 12  # bytes per output and token: logits, their float32 copy or log-softmax, and the gradient


@dataclass(frozen=True, slots=True)
class ConfiguredStep:
    """A model, and a step of it."""

    model: ModelShapes
    machine: Machine
    config: RelayConfig
    rows: int  # of a micro-batch
    length: int
    state_bytes: int  # of the optimizer, per parameter
    emulated: bool
    optimizer_state: OptimizerStateSize | None = None  # what it keeps exactly, if there is an optimizer to ask
    shelf: PlannedShelf | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of a weight on the device."""
        return weight_itemsize(self.config.precision)

    @property
    def master_itemsize(self) -> int:
        """Bytes of a weight on the host: 2 where the optimizer rounds weights to bfloat16."""
        return 2 if self.optimizer_state is not None and self.optimizer_state.rounds_weights else 4

    @property
    def host_bytes(self) -> dict[str, int]:
        """Bytes of masters and of state in host memory, where there is no shelf on disk."""
        return {
            "weights": self._master_bytes(self.model.depth, 1),
            "optimizer": self._optimizer_bytes(self.model.depth, 1),
        }

    @property
    def layer_host_bytes(self) -> int:
        """What of that each layer adds."""
        return self._master_bytes(1, 0) + self._optimizer_bytes(1, 0)

    def _master_bytes(self, layers: int, shells: int) -> int:
        cast = 0 if self.emulated or self.itemsize == self.master_itemsize else self.itemsize
        numel = layers * slot_numel(self.model.layer) + shells * slot_numel(self.model.shell)
        return (self.master_itemsize + cast) * numel

    def _optimizer_bytes(self, layers: int, shells: int) -> int:
        layer, shell = self.model.trained
        if self.optimizer_state is None:
            return self.state_bytes * (layers * count_elements(layer) + shells * count_elements(shell))
        own = layers * self.optimizer_state.nbytes(layer) + shells * self.optimizer_state.nbytes(shell)
        return own + bool(shells) * self.optimizer_state.shared_bytes((*layer, *shell))

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.rows * self.length

    @property
    def boundary_bytes(self) -> int:
        """Bytes that one layer hands to the next, per micro-batch."""
        return self.tokens * self.model.width * self.itemsize

    @property
    def gradient_bytes(self) -> tuple[int, int]:
        """Bytes of the gradient of a layer, and of that of the shell."""
        layer, shell = (4 * slot_numel(shapes) for shapes in self.model.trained)
        return layer, shell

    def pushed_numel(self, trained: Sequence[Shape]) -> int:
        """Count what the gradient of such parameters takes on the wire, in float32."""
        wire = self.config.wire
        return (
            slot_numel(trained)
            if wire is None
            else sum(packed_numel(wire.format, count_elements((one,))) for one in trained)
        )

    @property
    def wire_bytes(self) -> int:
        """Bytes on the device that compressed gradients need besides their slots: where they are packed, and residuals."""
        wire, (layer, shell) = self.config.wire, self.model.trained
        if wire is None:
            return 0
        largest = max((count_elements((one,)) for one in (*layer, *shell)), default=0)
        packing = PACKING_BYTES * min(PACK_CHUNK, largest + SCALE_GROUP)
        if not wire.feedback:
            return packing
        # of what goes whole: a shell that leaves micro-batch by micro-batch does not
        held = [4 * count_elements(layer)] * self.model.depth + [
            0 if self.splits_shell_gradient else 4 * count_elements(shell)
        ]
        spares = residual_backups(self.config.update, self.config.rollback)
        return packing + sum(held) + sum(sorted(held, reverse=True)[:spares])

    @property
    def live_storages(self) -> LiveStorages:
        """What a micro-batch keeps, storage by storage."""
        beside = self.model.shell_storages
        assert beside is not None, "refused where the stash is on the disk"
        sizes = [each.nbytes(self.rows, self.length, self.model.width, self.itemsize) for each in beside]
        return LiveStorages(beside, sizes, self.boundary_bytes)

    @property
    def splits_shell_gradient(self) -> bool:
        """Whether the shell's gradients leave micro-batch by micro-batch: the head is the embedding, and is trained."""
        return self.model.tied and bool(self.model.trained[1])


def estimate_costs(step: ConfiguredStep) -> ForecastCosts:
    """Say what a forecast of the step is made of."""
    model, machine, micro_batches = step.model, step.machine, step.config.micro_batches
    known = min(micro_batches, _MAX_MICRO_BATCHES)
    profile = _make_profile(step, known)
    layers = [key for key in profile.layers if key != SHELL]
    shelf = None
    if step.shelf is not None:
        assert step.optimizer_state is not None, "a shelf is planned for the state of an optimizer"
        bf16 = step.config.precision == "bf16"
        shelf = ShelfCosts.of(
            step.shelf, model, step.optimizer_state, layers, step.config.ahead, not step.emulated, bf16
        )
    return ForecastCosts(
        profile=profile,
        representatives=repeat_middle(known, micro_batches),
        overhead_s=0.0,
        host_bytes={} if shelf is not None else step.host_bytes,
        pooled_bytes=0,
        layer_host_bytes=dict.fromkeys(layers, 0 if shelf is not None else step.layer_host_bytes),
        shelf=shelf,
        basis=f"formula: {model.num_params:,} parameters, {model.depth} layers of {model.layer_params:,}; {machine.name}: "
        f"{machine.flops_per_s / 1e12:.3g} TFLOP/s, {machine.update_params_per_s / 1e6:.3g} M parameters/s updated",
    )


def _make_profile(step: ConfiguredStep, micro_batches: int) -> Profile:
    """Costs by formula, with the memory of every turn.

    Attention's products count as `2 * length * width` more parameters: 4 operations per token, position and width.
    """
    model, machine, precision = step.model, step.machine, step.config.precision
    products = 2 * step.length * model.width
    head, head_trained = model.head_params, model.head_params if model.trained[1] else 0
    if model.per_row:
        # These are patch embeddings, and pixels need no gradient: per token and parameter 2 operations forward, and 2
        # backward if it is trained. The formula has 4 for a frozen parameter and 2 more for a trained one: half fits both.
        head //= 2
    layer, shell = (
        transfer_cost(
            machine,
            precision,
            slot_numel(held),
            slot_numel(trained),
            count_elements(trained),
            step.pushed_numel(trained),
        )
        for held, trained in zip((model.layer, model.shell), model.trained, strict=True)
    )
    one = FormulaLayer(count_elements(model.layer) + products, count_elements(model.trained[0]) + products, layer)
    settings = {
        "micro_batches": micro_batches,
        "stash": step.config.stash,
        "precision": precision,
        "compress": step.config.compress,
    }
    costs = profile_fields(
        [one] * model.depth,
        FormulaLayer(head, head_trained, shell),
        machine,
        settings,
        step.tokens,
        step.boundary_bytes,
    )
    profile = Profile(**costs)
    layers = dict(profile.layers)
    if step.splits_shell_gradient:
        profile = _split_shell_gradient(profile, slot_numel(model.shell), model.head_params)
        layers[SHELL] = layers[SHELL]._replace(push_bytes=0)
    # updates that wait for all gradients
    late = list(layers) if step.config.update == "deferred" else [SHELL] if step.splits_shell_gradient else []
    updates = [EPSJob("update", key, -1, layers[key].update_s, layers[key].block_bytes) for key in late]
    closing = tuple(job for job in updates if job.nbytes)
    if step.config.stash == "disk":
        profile = add_stash_moves(profile, step.live_storages, bool(model.trained[1]), step.config.ahead > 0)
    memory = _MemoryEstimate(step)
    return profile.map_turns(lambda _, turns: map(memory.add_samples, turns), layers=layers, closing=closing, memory=())


def _split_shell_gradient(profile: Profile, shell_numel: int, head_params: int) -> Profile:
    """The shell's gradients leave with every micro-batch: the head's after the loss, the embedding's with the first layer's."""

    def part(nbytes: int, visit: int) -> tuple[GradientPartCost, ...]:
        return (GradientPartCost(SHELL, nbytes, SHELL, 4 * shell_numel, 0.0, visit),)

    def parted(stay: StayCost, is_last: bool) -> StayCost:
        turns = []
        for turn in stay.turns:
            ops = [
                op._replace(gradient_parts=part(4 * head_params, stay.visit)) if op.kind == "loss" else op
                for op in turn.ops
            ]
            if is_last:
                ops[-1] = ops[-1]._replace(gradient_parts=part(4 * shell_numel, stay.visit))
            turns.append(turn._replace(ops=tuple(ops)))
        return stay._replace(turns=tuple(turns))

    last = len(profile.stays) - 1
    return replace(profile, stays=tuple(parted(stay, index == last) for index, stay in enumerate(profile.stays)))


class _MemoryEstimate:
    """Both memories, turn by turn, as the loop would book them."""

    def __init__(self, step: ConfiguredStep) -> None:
        model, config = step.model, step.config
        layer, shell = slot_numel(model.layer), slot_numel(model.shell)
        self._slot_bytes = {
            "weights": step.itemsize * (shell + weight_slots(config.ahead, config.resident) * layer),
            "gradients": step.wire_bytes
            + step.gradient_bytes[1]
            + gradient_slots(config.ahead) * step.gradient_bytes[0],
        }
        self._stash, self._boundary_bytes = config.stash, step.boundary_bytes
        # the images that leave and arrive; in backward each is an input and a gradient
        self._ring_bytes = 4 * self._boundary_bytes if config.stash != "device" and config.ahead else 0
        graph = model.activation_sizes[config.precision].nbytes(model, step.rows, step.length)
        out = (step.rows if model.per_row else step.tokens) * model.outputs * _LOGIT_BYTES
        # a fresh gradient of one parameter is beside the slot until it is added
        largest = [4 * max((count_elements((shape,)) for shape in shapes), default=0) for shapes in model.trained]
        self._peak_by_kind = {
            "shell": 2 * step.boundary_bytes,
            "forward": graph,
            "backward": graph + 2 * step.boundary_bytes + largest[0],
            "loss": graph + out + largest[1],
        }
        self._id_bytes = 24 * step.tokens  # ids, labels and a mask, of 8 bytes
        self._stashed_bytes: Counter[str] = Counter()
        self._overhead_s = step.machine.overhead_s

    def add_samples(self, turn: TurnCost) -> TurnCost:
        """The turn, with samples; the memories go on from there."""
        return turn._replace(ops=tuple(self._add_op_samples(op) for op in turn.ops))

    def _add_op_samples(self, op: ComputeOp) -> ComputeOp:
        high = self._make_samples(self._peak_by_kind[op.kind])
        if op.kind in ("shell", "forward"):
            self._stashed_bytes["stash"] += self._boundary_bytes
            self._stashed_bytes["other"] += self._id_bytes if op.kind == "shell" else 0
        elif op.kind == "backward":
            self._stashed_bytes["stash"] -= self._boundary_bytes
        return op._replace(overhead_s=self._overhead_s, memory=(*high, *self._make_samples(0)))

    def _make_samples(self, activations: int) -> MemorySamples:
        """What is there now, with so many bytes of activations."""
        parked = dict(self._stashed_bytes)
        if self._stash == "device":
            return (("device", {**self._slot_bytes, **parked, "activations": activations}), ("host", {}))
        here = {"stash": self._ring_bytes + 2 * self._boundary_bytes, "other": self._id_bytes}
        waiting = (
            {"stash": sum(parked.values())} if self._stash == "host" else {}
        )  # buffers on the way to a disk come apart
        return (("device", {**self._slot_bytes, **here, "activations": activations}), ("host", waiting))
