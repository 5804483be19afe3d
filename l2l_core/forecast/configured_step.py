"""The costs of a step of a model that was never built: its shapes, a machine's figures, and settings in place of a trace.

Weights, gradients and optimizer state are counted; activations and stash are estimates of what the families' layers keep,
and compute is operations over achieved speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from l2l_core.config import RelayConfig
from l2l_core.forecast.families import ModelShapes, Shape, count, slot_numel
from l2l_core.forecast.from_costs import Costs
from l2l_core.forecast.kept_state import KeptState
from l2l_core.forecast.planned_moves import Image, with_moves
from l2l_core.forecast.planned_shelf import PlannedShelf, ShelfCosts
from l2l_core.forecast.stands import pattern
from l2l_core.rules import (
    CHUNK,
    GROUP,
    PACKING_BYTES,
    gradient_slots,
    packed_numel,
    spare_residuals,
    weight_itemsize,
    weight_slots,
)
from l2l_core.simulator import (
    SHELL,
    Job,
    Machine,
    Memory,
    Op,
    PartCost,
    Profile,
    Sized,
    Stay,
    TurnCost,
    cost_of_moving,
    costs_by_formula,
)

_KNOWN = 4  # micro-batches that are written out; more are as these
_LOGITS = 12  # bytes per output and token: logits, their float32 copy or log-softmax, and the gradient


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
    kept: KeptState | None = None  # what it keeps exactly, if there is an optimizer to ask
    shelf: PlannedShelf | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of a weight on the device."""
        return weight_itemsize(self.config.precision)

    @property
    def master_itemsize(self) -> int:
        """Bytes of a weight on the host: 2 where the optimizer rounds weights to bfloat16."""
        return 2 if self.kept is not None and self.kept.rounds_weights else 4

    @property
    def host_bytes(self) -> dict[str, int]:
        """Bytes of masters and of state in host memory, where there is no shelf on disk."""
        return {"weights": self._in_masters(self.model.depth, 1), "optimizer": self._in_state(self.model.depth, 1)}

    @property
    def layer_host_bytes(self) -> int:
        """What of that each layer adds."""
        return self._in_masters(1, 0) + self._in_state(1, 0)

    def _in_masters(self, layers: int, shells: int) -> int:
        cast = 0 if self.emulated or self.itemsize == self.master_itemsize else self.itemsize
        numel = layers * slot_numel(self.model.layer) + shells * slot_numel(self.model.shell)
        return (self.master_itemsize + cast) * numel

    def _in_state(self, layers: int, shells: int) -> int:
        layer, shell = self.model.trained
        if self.kept is None:
            return self.state_bytes * (layers * count(layer) + shells * count(shell))
        own = layers * self.kept.nbytes(layer) + shells * self.kept.nbytes(shell)
        return own + bool(shells) * self.kept.common((*layer, *shell))

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
        return slot_numel(trained) if wire is None else sum(packed_numel(wire.format, count((one,))) for one in trained)

    @property
    def wire_bytes(self) -> int:
        """Bytes on the device that compressed gradients need besides their slots: where they are packed, and residuals."""
        wire, (layer, shell) = self.config.wire, self.model.trained
        if wire is None:
            return 0
        largest = max((count((one,)) for one in (*layer, *shell)), default=0)
        packing = PACKING_BYTES * min(CHUNK, largest + GROUP)
        if not wire.feedback:
            return packing
        # of what goes whole: a shell that leaves micro-batch by micro-batch does not
        held = [4 * count(layer)] * self.model.depth + [0 if self.parts_shell else 4 * count(shell)]
        spares = spare_residuals(self.config.update, self.config.rollback)
        return packing + sum(held) + sum(sorted(held, reverse=True)[:spares])

    @property
    def image(self) -> Image:
        """What a micro-batch keeps, storage by storage."""
        beside = self.model.beside
        assert beside is not None, "refused where the stash is on the disk"
        sizes = [each.nbytes(self.rows, self.length, self.model.width, self.itemsize) for each in beside]
        return Image(beside, sizes, self.boundary_bytes)

    @property
    def parts_shell(self) -> bool:
        """Whether the shell's gradients leave micro-batch by micro-batch: the head is the embedding, and is trained."""
        return self.model.tied and bool(self.model.trained[1])


def costs_of(step: ConfiguredStep) -> Costs:
    """Say what a forecast of the step is made of."""
    model, machine, micro_batches = step.model, step.machine, step.config.micro_batches
    known = min(micro_batches, _KNOWN)
    profile = _profile_of(step, known)
    layers = [key for key in profile.layers if key != SHELL]
    shelf = None
    if step.shelf is not None:
        assert step.kept is not None, "a shelf is planned for the state of an optimizer"
        bf16 = step.config.precision == "bf16"
        shelf = ShelfCosts.of(step.shelf, model, step.kept, layers, step.config.ahead, not step.emulated, bf16)
    return Costs(
        profile=profile,
        stands=pattern(known, micro_batches),
        around_s=0.0,
        host={} if shelf is not None else step.host_bytes,
        pooled_bytes=0,
        layer_host_bytes=dict.fromkeys(layers, 0 if shelf is not None else step.layer_host_bytes),
        shelf=shelf,
        basis=f"formula: {model.num_params:,} parameters, {model.depth} layers of {model.layer_params:,}; {machine.name}: "
        f"{machine.flops_per_s / 1e12:.3g} TFLOP/s, {machine.update_params_per_s / 1e6:.3g} M parameters/s updated",
    )


def _profile_of(step: ConfiguredStep, micro_batches: int) -> Profile:
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
        cost_of_moving(
            machine, precision, slot_numel(held), slot_numel(trained), count(trained), step.pushed_numel(trained)
        )
        for held, trained in zip((model.layer, model.shell), model.trained, strict=True)
    )
    one = Sized(count(model.layer) + products, count(model.trained[0]) + products, layer)
    settings = {
        "micro_batches": micro_batches,
        "stash": step.config.stash,
        "precision": precision,
        "compress": step.config.compress,
    }
    costs = costs_by_formula(
        [one] * model.depth,
        Sized(head, head_trained, shell),
        machine,
        settings,
        step.tokens,
        step.boundary_bytes,
    )
    profile = Profile(**costs)
    layers = dict(profile.layers)
    if step.parts_shell:
        profile = _with_parts(profile, slot_numel(model.shell), model.head_params)
        layers[SHELL] = layers[SHELL]._replace(push_bytes=0)
    # updates that wait for all gradients
    late = list(layers) if step.config.update == "deferred" else [SHELL] if step.parts_shell else []
    updates = [Job("update", key, -1, layers[key].update_s, layers[key].block_bytes) for key in late]
    closing = tuple(job for job in updates if job.nbytes)
    if step.config.stash == "disk":
        profile = with_moves(profile, step.image, bool(model.trained[1]), step.config.ahead > 0)
    memory = _Memory(step)
    return profile.with_turns(lambda _, turns: map(memory.fill, turns), layers=layers, closing=closing, memory=())


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

    def __init__(self, step: ConfiguredStep) -> None:
        model, config = step.model, step.config
        layer, shell = slot_numel(model.layer), slot_numel(model.shell)
        self._slots = {
            "weights": step.itemsize * (shell + weight_slots(config.ahead, config.resident) * layer),
            "gradients": step.wire_bytes
            + step.gradient_bytes[1]
            + gradient_slots(config.ahead) * step.gradient_bytes[0],
        }
        self._stash, self._boundary = config.stash, step.boundary_bytes
        # the images that leave and arrive; in backward each is an input and a gradient
        self._ring = 4 * self._boundary if config.stash != "device" and config.ahead else 0
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
        high = self._sample(self._highest[op.kind])
        if op.kind in ("shell", "forward"):
            self._parked["stash"] += self._boundary
            self._parked["other"] += self._ids if op.kind == "shell" else 0
        elif op.kind == "backward":
            self._parked["stash"] -= self._boundary
        return op._replace(overhead_s=self._overhead_s, memory=(*high, *self._sample(0)))

    def _sample(self, activations: int) -> Memory:
        """What is there now, with so many bytes of activations."""
        parked = dict(self._parked)
        if self._stash == "device":
            return (("device", {**self._slots, **parked, "activations": activations}), ("host", {}))
        here = {"stash": self._ring + 2 * self._boundary, "other": self._ids}
        waiting = (
            {"stash": sum(parked.values())} if self._stash == "host" else {}
        )  # buffers on the way to a disk come apart
        return (("device", {**self._slots, **here, "activations": activations}), ("host", waiting))
