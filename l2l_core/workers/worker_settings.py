"""User settings for training with several workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch.distributed as dist

from l2l_core.workers.network import Network

ReduceMode = Literal["sum", "ordered"]
WireType = Literal["fp32", "bf16"]
BufferMode = Literal["same", "own"]


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Process group of a relay, and the way in which its workers combine gradients.

    Args:
        group: a process group; or "auto", the default group of `torch.distributed`. If that does not exist and a launcher
            (torchrun, mpirun) has started several processes, it is made, and destroyed by `Relay.close`; otherwise the relay
            trains alone.
        reduce: "sum" adds up the gradients of each worker before sending the sum. "ordered" sends the gradient of every
            micro-batch, so that the sum equals that of one worker with all micro-batches to the bit; the bytes sent are
            multiplied by the number of micro-batches.
        wire: type in which gradients are sent. "bf16" halves the bytes; a worker's own gradient and the sums stay float32.
        buffers: "same" refuses models whose forward changes buffers (BatchNorm). "own" gives each worker separate buffers, as
            DDP does with ``broadcast_buffers=False``; a save contains those of worker 0.
        timeout_s: seconds after which a worker that does not respond counts as lost. It must exceed the longest visit of a
            layer, and the longest delay of a worker at a step or a save.
        network: emulated network, the same for all workers: no message arrives earlier than it would there. The default
            delays nothing.

    Raises:
        ValueError: a value out of range.

    Example:
        >>> from l2l_core import Workers
        >>> relay.close()  # a model belongs to one relay
        >>> with Relay(model, device="cpu", loss=nn.CrossEntropyLoss(), workers=Workers(reduce="ordered")) as relay:
        ...     relay.rank, relay.workers  # under torchrun, those of its processes
        (0, 1)
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
