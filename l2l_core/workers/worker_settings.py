"""What a user says of workers: with whom to train, what is sent, how long to wait."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch.distributed as dist

from l2l_core.workers.network import Network

ReduceMode = Literal["sum", "ordered"]
WireType = Literal["fp32", "bf16"]
BufferMode = Literal["same", "own"]


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Says with whom a relay trains, and how their gradients are added up.

    Args:
        group: a process group; or "auto": the default one of `torch.distributed`, which is made if there is none yet and a
            launcher (torchrun, mpirun) has started several processes, and ended by `Relay.close` in that case. Without either a
            relay is alone.
        reduce: "sum" adds up each worker's gradients first and sends the sum. "ordered" sends the gradient of every
            micro-batch, and adds in the order of one worker with all micro-batches: to the bit what that one would have, for as
            many times the bytes as there are micro-batches.
        wire: type in which gradients are sent. "bf16" halves the bytes; each worker's own, and the sums, stay float32.
        buffers: "same" refuses models whose forward changes buffers (BatchNorm). "own" lets each worker have its own of its own
            rows, as DDP does with ``broadcast_buffers=False``; a save has worker 0's.
        timeout_s: how long to wait for another worker before it counts as lost, in seconds. It must be longer than the longest
            visit of a layer, and than a worker may be late at a step or in writing its part of a save.
        network: an emulated one, the same for all: nothing that workers send comes sooner than it would there. Of one without
            figures there is nothing to see.

    Raises:
        ValueError: a value out of range.
    """

    group: dist.ProcessGroup | Literal["auto"] = "auto"
    reduce: ReduceMode = "sum"
    wire: WireType = "fp32"
    buffers: BufferMode = "same"
    timeout_s: float = 300.0
    network: Network = Network()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        for name, kind in {"reduce": ReduceMode, "wire": WireType, "buffers": BufferMode}.items():
            if (value := getattr(self, name)) not in get_args(kind):
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, get_args(kind)))}")
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise ValueError(f"timeout_s={self.timeout_s!r}: must be a positive number of seconds")
        if self.group != "auto" and not isinstance(self.group, dist.ProcessGroup):
            raise ValueError(
                f'group={self.group!r}: give a process group this process is a member of, or "auto" for the default one'
            )


def resolve_workers(workers: Any) -> Workers:
    """Return the settings that a process group, or "auto", stands for.

    Raises:
        TypeError: it is neither, nor settings.
    """
    if isinstance(workers, Workers):
        return workers
    if workers == "auto" or isinstance(workers, dist.ProcessGroup):
        return Workers(group=workers)
    raise TypeError(
        f'workers={workers!r}: give "auto", a process group of torch.distributed, Workers(...), or None to train alone'
    )
