"""Five ways to train one model on one device, in numbers: what a step needs and takes, from a configuration alone.

    in core          everything on the device
    recompute        in core; of a layer only what enters it is kept, and backward runs it again (arXiv 1604.06174)
    ZeRO-Offload     weights on the device, optimizer on the host (arXiv 2101.06840, section 4)
    FSDP, offload    weights, gradients and optimizer on the host, layer by layer to the device, in every micro-batch anew
                     (`CPUOffloadPolicy`, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)
    relay            the same, but a layer runs all micro-batches while it is there (arXiv 2002.05645)

The relay's figures are the engine's own forecast. The others are arithmetic on the same numbers of parameters, the same
activations and the same machine. Every way overlaps copies with compute perfectly here, which none does; what else is left
out is said at each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from l2l_core import Machine, RelayConfig, forecast_config
from l2l_core.forecast import ModelShapes, read_model_shapes

MASTER_BYTES = 4  # bytes of a parameter in float32
ADAM_BYTES = 8  # of its two moments
LOSS_BYTES = 12  # per output and token: logits, their logarithmic softmax, and the gradient, in float32


@dataclass(frozen=True)
class StrategyCost:
    """Says what a step needs and takes, trained in one way.

    Attributes:
        name: of the way.
        micro_batches: into which the batch is cut.
        device_bytes: at the peak, by category.
        host_bytes: at the peak; 0 where nothing is kept there.
        seconds: of a step.
        link_bytes: that a step copies over the link, both directions together.
    """

    name: str
    micro_batches: int
    device_bytes: Mapping[str, int]
    host_bytes: int
    seconds: float
    link_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Bytes of the device at the peak, of all categories together."""
        return sum(self.device_bytes.values())

    def fits(self, memory_bytes: float, host_bytes: float = math.inf) -> bool:
        """Tell whether device and host have room for it."""
        return self.peak_bytes <= memory_bytes and self.host_bytes <= host_bytes


@dataclass(frozen=True)
class StepSpec:
    """Describes a step: a model, a machine, and a batch.

    Args:
        config: of a transformer; its family must be one that forecasts know, see `l2l_core.forecast_config`.
        machine: its figures; `flops_per_s` in the precision in question.
        rows: of the batch.
        length: tokens of a row.
        micro_batches: into which the batch is cut.
        precision: "fp32", or "bf16" with masters in float32.

    Raises:
        ValueError: a family that is not known, or rows that cannot be cut into so many equal micro-batches.
    """

    config: Any
    machine: Machine
    rows: int
    length: int
    micro_batches: int = 1
    precision: str = "bf16"

    def __post_init__(self) -> None:
        if self.micro_batches < 1 or self.rows % self.micro_batches or self.rows < 1:
            raise ValueError(
                f"rows={self.rows} in micro_batches={self.micro_batches}: give a positive number of micro-batches that "
                "divides the rows"
            )
        read_model_shapes(self.config)  # refuses here what no way could tell

    @cached_property
    def model(self) -> ModelShapes:
        """Shapes of the model."""
        return read_model_shapes(self.config)

    def all_strategies(self) -> Sequence[StrategyCost]:
        """Return all five, from the simplest on."""
        return (self.in_core(), self.recompute(), self.zero_offload(), self.fsdp_offload(), self.relay())

    # -- in core -------------------------------------------------------------------------------------------------------

    def in_core(self) -> StrategyCost:
        """Count 16 bytes per parameter, and the activations of all layers. The update itself is not timed: it is short there."""
        kept = self.model.depth * self._graph_bytes + self._loss_bytes
        return StrategyCost(
            "in core", self.micro_batches, {**self._persistent_bytes, "activations": kept}, 0, 3 * self._forward_s, 0
        )

    def recompute(self) -> StrategyCost:
        """Train as in core, with every layer run once more."""
        return StrategyCost(
            "recompute",
            self.micro_batches,
            {**self._persistent_bytes, **self._recompute_bytes},
            0,
            self._forward_s + self._backward_s,
            0,
        )

    @property
    def _persistent_bytes(self) -> Mapping[str, int]:
        N, masters = self.model.num_params, 0 if self.precision == "fp32" else MASTER_BYTES
        return {"weights": self._itemsize * N, "gradients": self._itemsize * N, "optimizer": (masters + ADAM_BYTES) * N}

    # -- the optimizer on the host -------------------------------------------------------------------------------------

    def zero_offload(self) -> StrategyCost:
        """Keep weights on the device; gradients leave in a micro-batch's backward; the host updates when all have come.

        On the device are gradients of two layers, on the host gradients in the precision of compute. Of the paper's variants
        it is the one without delayed updates, which would not be the same training.
        """
        N, one = self.model.num_params, self._itemsize * self.model.num_params
        away = one * self.micro_batches
        machine = self.machine
        backward_s = max(self._backward_s, away / machine.d2h_bytes_per_s)
        update_s = max(N / machine.update_params_per_s, one / machine.h2d_bytes_per_s)
        on_device = {"weights": one, "gradients": 2 * self._itemsize * self.model.layer_params, **self._recompute_bytes}
        return StrategyCost(
            "ZeRO-Offload",
            self.micro_batches,
            on_device,
            (MASTER_BYTES + ADAM_BYTES) * N + one,
            self._forward_s + backward_s + update_s,
            away + one,
        )

    def fsdp_offload(self) -> StrategyCost:
        """Keep everything on the host in float32; every micro-batch loads each layer twice, and its gradients leave.

        On the device are two layers and the shell. Copies for the cast, and gradients that are added up on the host while
        the next ones come, are left out. The optimizer's step comes after backward.
        """
        N, k, machine = self.model.num_params, self.micro_batches, self.machine
        load_s, push_s = MASTER_BYTES * N * k / machine.h2d_bytes_per_s, MASTER_BYTES * N * k / machine.d2h_bytes_per_s
        shown = 2 * self.model.layer_params + self._shell_params
        on_device = {"weights": self._itemsize * shown, "gradients": MASTER_BYTES * shown, **self._recompute_bytes}
        seconds = max(self._forward_s, load_s) + max(self._backward_s, load_s, push_s) + N / machine.update_params_per_s
        return StrategyCost(
            "FSDP, offload", k, on_device, (2 * MASTER_BYTES + ADAM_BYTES) * N, seconds, 3 * MASTER_BYTES * N * k
        )

    def relay(self) -> StrategyCost:
        """Return the engine's forecast, with the stash on the host."""
        settings = RelayConfig(precision=self.precision, stash="host")  # type: ignore[arg-type] - checked there
        told = forecast_config(
            self.config,
            self.machine,
            micro_batches=self.micro_batches,
            batch=self.rows,
            sequence=self.length,
            relay_config=settings,
        )
        moved = sum(event.nbytes for lane in ("h2d", "d2h") for event in told.trace.lanes[lane])
        return StrategyCost("relay", self.micro_batches, told.device_bytes, told.peak_host_bytes, told.seconds, moved)

    # -- what they share -----------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Number of tokens in the batch."""
        return self.rows * self.length

    @property
    def _itemsize(self) -> int:
        return 2 if self.precision == "bf16" else 4

    @property
    def _shell_params(self) -> int:
        return self.model.num_params - self.model.depth * self.model.layer_params

    @property
    def _graph_bytes(self) -> int:
        """What autograd keeps of one layer and micro-batch."""
        return self.model.activation_sizes[self.precision].nbytes(
            self.model, self.rows // self.micro_batches, self.length
        )

    @property
    def _loss_bytes(self) -> int:
        return LOSS_BYTES * self.model.outputs * self.tokens // self.micro_batches

    @property
    def _recompute_bytes(self) -> Mapping[str, int]:
        """What enters every layer, and the graph of one of them or the loss."""
        entering = self._itemsize * self.model.width * self.tokens // self.micro_batches
        return {"stash": self.model.depth * entering, "activations": max(self._graph_bytes, self._loss_bytes)}

    @property
    def _layers_s(self) -> float:
        """All layers forward, once; attention's products count as 2 * length * width more parameters."""
        model = self.model
        one = model.layer_params + 2 * self.length * model.width
        return 2 * self.tokens * model.depth * one / self.machine.flops_per_s

    @property
    def _forward_s(self) -> float:
        return self._layers_s + 2 * self.tokens * self.model.head_params / self.machine.flops_per_s

    @property
    def _backward_s(self) -> float:
        """With the layers run again."""
        return 2 * self._forward_s + self._layers_s


def all_micro_batchings(step: StepSpec) -> Sequence[StrategyCost]:
    """Return all ways, with the batch cut into every number of equal micro-batches that there is."""
    counts = [count for count in range(1, step.rows + 1) if step.rows % count == 0]
    return [way for count in counts for way in replace(step, micro_batches=count).all_strategies()]


def best_strategies(
    costs: Iterable[StrategyCost], memory_bytes: float, host_bytes: float = math.inf
) -> Mapping[str, StrategyCost]:
    """Return by name of the way the fastest one that fits; where none does, the one that needs the least of the device."""

    def rank(way: StrategyCost) -> tuple[bool, float]:
        return (False, way.seconds) if way.fits(memory_bytes, host_bytes) else (True, way.peak_bytes)

    best: dict[str, StrategyCost] = {}
    for way in costs:
        best[way.name] = min(best.get(way.name, way), way, key=rank)
    return best


def llama_config(size: str) -> Any:
    """Return the configuration of a published model: "1 B" (TinyLlama), "7 B" or "70 B" (Llama 2).

    Raises:
        ValueError: another size.
    """
    from transformers import LlamaConfig

    shapes = {
        "1 B": (2048, 5632, 22, 32, 4),
        "7 B": (4096, 11008, 32, 32, 32),
        "70 B": (8192, 28672, 80, 64, 8),
    }
    if size not in shapes:
        raise ValueError(f"size={size!r}: there are {', '.join(map(repr, shapes))}")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return LlamaConfig(vocab_size=32_000, **dict(zip(names, shapes[size], strict=True)))
