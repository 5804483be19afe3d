"""Bytes and seconds of a step in five ways to train one model on one device, from a configuration alone.

    in core          everything on the device
    recompute        in core; only the inputs of layers are kept, and backward runs them again (arXiv 1604.06174)
    ZeRO-Offload     weights on the device, optimizer on the host (arXiv 2101.06840, section 4)
    FSDP, offload    weights, gradients and optimizer on the host, layer by layer to the device, again in every micro-batch
                     (`CPUOffloadPolicy`, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)
    relay            the same, but a layer runs all micro-batches while it is there (arXiv 2002.05645)

The relay's figures are the engine's own forecast. The others are arithmetic on the same numbers of parameters, the same
activations and the same machine. All are calculated with a perfect overlap of copies and compute, which none reaches; each
method lists its other simplifications.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from l2l_core import Machine, RelayConfig, forecast_config
from l2l_core.forecast import ModelShapes, read_model_shapes

MASTER_BYTES = 4  # of a parameter in float32
ADAM_BYTES = 8  # of the two moments of a parameter
LOSS_BYTES = (
    12  # per output and token, or row of a classifier: logits, their logarithmic softmax, and the gradient, in float32
)


@dataclass(frozen=True)
class StrategyCost:
    """Bytes and seconds of a step in one way.

    Attributes:
        name: name of the way.
        micro_batches: number of micro-batches.
        device_bytes: peak bytes on the device by category.
        host_bytes: peak bytes on the host.
        seconds: duration of a step.
        link_bytes: bytes that a step copies over the link in both directions.
    """

    name: str
    micro_batches: int
    device_bytes: Mapping[str, int]
    host_bytes: int
    seconds: float
    link_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Peak bytes on the device, summed over categories."""
        return sum(self.device_bytes.values())

    def fits(self, memory_bytes: float, host_bytes: float = math.inf) -> bool:
        """Return True if the step fits a device and a host of these sizes."""
        return self.peak_bytes <= memory_bytes and self.host_bytes <= host_bytes


@dataclass(frozen=True)
class StepSpec:
    """A step of a model on a machine, and its cost in each way.

    Args:
        config: configuration of a transformer of a family that `l2l_core.forecast_config` supports.
        machine: figures of the machine, with `flops_per_s` in the given precision.
        rows: rows of the batch.
        length: tokens per row.
        micro_batches: number of equal micro-batches.
        precision: "fp32", or "bf16" with masters in float32.

    Raises:
        ValueError: an unsupported family, or rows that cannot be split into equal micro-batches.
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
        read_model_shapes(self.config)  # raises for an unsupported family

    @cached_property
    def model(self) -> ModelShapes:
        """Shapes of the model."""
        return read_model_shapes(self.config)

    def all_strategies(self) -> Sequence[StrategyCost]:
        """Return the costs of all five ways, the simplest first."""
        return (self.in_core(), self.recompute(), self.zero_offload(), self.fsdp_offload(), self.relay())

    # -- in core -------------------------------------------------------------------------------------------------------

    def in_core(self) -> StrategyCost:
        """Return the cost in core: 16 bytes per parameter, and all activations; the short update is left out."""
        kept = self.model.depth * self._graph_bytes + self._loss_bytes
        return StrategyCost(
            "in core", self.micro_batches, {**self._persistent_bytes, "activations": kept}, 0, 3 * self._forward_s, 0
        )

    def recompute(self) -> StrategyCost:
        """Return the cost in core with every layer recomputed once."""
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
        """Return the cost with weights on the device, and gradients, optimizer and update on the host.

        Gradients are copied to the host in backward, two layers at a time, in the precision of compute. The paper's delayed
        updates are left out, since they change the training.
        """
        N, one = self.model.num_params, self._itemsize * self.model.num_params
        pushed = one * self.micro_batches
        machine = self.machine
        backward_s = max(self._backward_s, pushed / machine.d2h_bytes_per_s)
        update_s = max(N / machine.update_params_per_s, one / machine.h2d_bytes_per_s)
        on_device = {"weights": one, "gradients": 2 * self._itemsize * self.model.layer_params, **self._recompute_bytes}
        return StrategyCost(
            "ZeRO-Offload",
            self.micro_batches,
            on_device,
            (MASTER_BYTES + ADAM_BYTES) * N + one,
            self._forward_s + backward_s + update_s,
            pushed + one,
        )

    def fsdp_offload(self) -> StrategyCost:
        """Return the cost with everything on the host in float32, where every micro-batch loads each layer twice.

        The device holds two layers and the shell. Copies for the cast, and gradients that wait on the host to be added up, are
        left out. The optimizer steps after backward.
        """
        N, k, machine = self.model.num_params, self.micro_batches, self.machine
        load_s, push_s = MASTER_BYTES * N * k / machine.h2d_bytes_per_s, MASTER_BYTES * N * k / machine.d2h_bytes_per_s
        loaded = 2 * self.model.layer_params + self._shell_params
        on_device = {"weights": self._itemsize * loaded, "gradients": MASTER_BYTES * loaded, **self._recompute_bytes}
        seconds = max(self._forward_s, load_s) + max(self._backward_s, load_s, push_s) + N / machine.update_params_per_s
        return StrategyCost(
            "FSDP, offload", k, on_device, (2 * MASTER_BYTES + ADAM_BYTES) * N, seconds, 3 * MASTER_BYTES * N * k
        )

    def relay(self) -> StrategyCost:
        """Return the engine's forecast, with the stash on the host."""
        settings = RelayConfig(precision=self.precision, stash="host")  # type: ignore[arg-type] - RelayConfig checks it
        forecast = forecast_config(
            self.config,
            self.machine,
            micro_batches=self.micro_batches,
            batch=self.rows,
            sequence=self.length,
            relay_config=settings,
        )
        moved = sum(event.nbytes for lane in ("h2d", "d2h") for event in forecast.trace.lanes[lane])
        return StrategyCost(
            "relay", self.micro_batches, forecast.device_bytes, forecast.peak_host_bytes, forecast.seconds, moved
        )

    # -- shared terms ------------------------------------------------------------------------------------------------

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
        """Bytes that autograd keeps for one layer and micro-batch."""
        return self.model.activation_sizes[self.precision].nbytes(
            self.model, self.rows // self.micro_batches, self.length
        )

    @property
    def _loss_bytes(self) -> int:
        rows = self.rows if self.model.per_row else self.tokens
        return LOSS_BYTES * self.model.outputs * rows // self.micro_batches

    @property
    def _recompute_bytes(self) -> Mapping[str, int]:
        """Bytes of the inputs of all layers, and of the graph of one layer or of the loss."""
        entering = self._itemsize * self.model.width * self.tokens // self.micro_batches
        return {"stash": self.model.depth * entering, "activations": max(self._graph_bytes, self._loss_bytes)}

    @property
    def _layers_s(self) -> float:
        """Seconds of one forward of all layers; attention's products count as 2 * length * width more parameters."""
        model = self.model
        one = model.layer_params + 2 * self.length * model.width
        return 2 * self.tokens * model.depth * one / self.machine.flops_per_s

    @property
    def _forward_s(self) -> float:
        return self._layers_s + 2 * self.tokens * self.model.head_params / self.machine.flops_per_s

    @property
    def _backward_s(self) -> float:
        """Seconds of backward, recompute included."""
        return 2 * self._forward_s + self._layers_s


def all_micro_batchings(step: StepSpec) -> Sequence[StrategyCost]:
    """Return the costs of all ways for every possible number of equal micro-batches."""
    counts = [count for count in range(1, step.rows + 1) if step.rows % count == 0]
    return [way for count in counts for way in replace(step, micro_batches=count).all_strategies()]


def best_strategies(
    costs: Iterable[StrategyCost], memory_bytes: float, host_bytes: float = math.inf
) -> Mapping[str, StrategyCost]:
    """Return for each way the fastest cost that fits; if none fits, the one with the least device memory."""

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
