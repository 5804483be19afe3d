"""Ways to train over several ranks by torch's own libraries, each run by one rank; bytes as the kernel counts them.

Every way trains the same small model for a few steps; bytes are the mean of the last steps, after all have begun to compress.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from l2l_core.workers import all_gather_traffic
from l2l_core.workers.network import FRAME_BYTES

WIDTH, HIDDEN, LAYERS, ROWS, STEPS = 64, 256, 4, 16, 4
START = 2  # step from which PowerSGD and local SGD begin


class Mlp(nn.Module):
    """Widen, narrow, add."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make_model() -> nn.Sequential:
    """Return the model, the same on every rank, in float64 so that differences are those of the ways."""
    torch.manual_seed(0)
    return nn.Sequential(*(Mlp() for _ in range(LAYERS))).double()


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def plain() -> list[torch.Tensor]:
    """Return the weights after plain training on all rows."""
    model, (x, y) = make_model(), make_rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def run_way(rank: int, count: int, way: str) -> dict[str, Any]:
    """Train by one way; return the largest difference of a weight, bytes sent in the last step, and bytes held."""
    warnings.simplefilter("ignore")
    model, optimizer, whole = WAYS[way](make_model(), count)
    x, y = make_rows()
    if way != "tensor parallel":
        x, y = x.chunk(count)[rank], y.chunk(count)[rank]
    sent = []
    for step in range(STEPS):
        optimizer.zero_grad()
        before = _settled(f"{way} {step}", count)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        sent.append(_settled(f"{way} {step} after", count) - before)
    params = [whole(param) for param in model.parameters()]
    error = max(float((mine - right).abs().max()) for mine, right in zip(params, plain(), strict=True))
    held = sum(_local(param).nbytes for param in model.parameters())
    inner = getattr(optimizer, "optim", optimizer)
    state = sum(_local(v).nbytes for s in inner.state.values() for v in s.values() if torch.is_tensor(v))
    return {"error": error, "sent": sum(sent[START:]) / (STEPS - START), "weights": held, "state": state}


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def _detached(param: torch.Tensor) -> torch.Tensor:
    return param.detach()


def _whole(param: Any) -> torch.Tensor:
    return param.full_tensor().detach()


Made = tuple[nn.Module, Any, Callable[[Any], torch.Tensor]]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def data_parallel(model: nn.Module, count: int) -> Made:
    """DDP: gradients are averaged over ranks, in one bucket."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1000)
    return wrapped, _adamw(wrapped), _detached


def zero_1(model: nn.Module, count: int) -> Made:
    """DDP with an optimizer that keeps a part of the state on each rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model, bucket_cap_mb=1000)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-3), _detached


def _sharded(model: nn.Module, count: int, **settings: Any) -> Made:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (count,))
    for layer in model.children():
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model, _adamw(model), _whole


def zero_2(model: nn.Module, count: int) -> Made:
    """FSDP2 that keeps gathered weights until backward."""
    return _sharded(model, count, reshard_after_forward=False)


def zero_3(model: nn.Module, count: int) -> Made:
    """FSDP2 that gathers weights for forward and again for backward."""
    return _sharded(model, count, reshard_after_forward=True)


def zero_3_offload(model: nn.Module, count: int) -> Made:
    """The same with weights, gradients and state on the host; on a CPU that is the same memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _sharded(model, count, reshard_after_forward=True, offload_policy=CPUOffloadPolicy(pin_memory=False))


def tensor_parallel(model: nn.Module, count: int) -> Made:
    """Megatron's MLP: the first matrix by columns, the second by rows; every rank has all rows of the batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (count,))
    for layer in model.children():
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, _adamw(model), _whole


def power_sgd(model: nn.Module, count: int) -> Made:
    """DDP with gradients of matrices as products of rank 1."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    wrapped = DistributedDataParallel(model, bucket_cap_mb=1000)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=START)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped, _adamw(wrapped), _detached


def fp16_gradients(model: nn.Module, count: int) -> Made:
    """DDP with gradients in float16 on the wire."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DistributedDataParallel(model, bucket_cap_mb=1000)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped, _adamw(wrapped), _detached


def post_local_sgd(model: nn.Module, count: int) -> Made:
    """From step `START` on every rank trains alone, and weights are averaged every second step."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    wrapped = DistributedDataParallel(model, bucket_cap_mb=1000)
    alone = dist.new_subgroups(1)[0]
    wrapped.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=START), post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=START)
    return wrapped, PostLocalSGDOptimizer(_adamw(wrapped), averager), _detached


WAYS: dict[str, Callable[[nn.Module, int], Made]] = {
    "data parallel": data_parallel,
    "ZeRO 1": zero_1,
    "ZeRO 2": zero_2,
    "ZeRO 3": zero_3,
    "ZeRO 3, CPU offload": zero_3_offload,
    "tensor parallel": tensor_parallel,
    "PowerSGD, rank 1": power_sgd,
    "fp16 gradients": fp16_gradients,
    "post-local SGD": post_local_sgd,
}


def foreseen(way: str, count: int) -> tuple[float, float]:
    """Return the bytes that a rank sends in one step by the closed formulas, and by gloo's algorithms with its headers.

    p ranks, n bytes of weights: an all-reduce sends 2 (p-1)/p of its bytes, a gather or a reduce-scatter (p-1)/p. gloo's
    reduce-scatter is an all-reduce. Means over ranks.
    """
    model = make_model()
    n, share = sum(param.nbytes for param in model.parameters()), (count - 1) / count
    tensors = sum(1 for _ in model.parameters())
    matrices = [tuple(p.shape) for p in model.parameters() if p.ndim > 1]
    vectors = sum(p.nbytes for p in model.parameters() if p.ndim == 1)
    activations, reductions = ROWS * WIDTH * 8, 2 * LAYERS - 1
    compressed = 8 * sum(a + b for a, b in matrices) + vectors
    reduce_header = (
        FRAME_BYTES * 12 * (count - 1)
    )  # a ring in two phases and two halves; three headers for each message
    gather_header = all_gather_traffic(0, count).wire_sent
    sharded = share * n, LAYERS * (gather_header + reduce_header)
    return {
        "data parallel": (2 * share * n, 2 * share * n + reduce_header),
        "ZeRO 1": (3 * share * n, 3 * share * n + reduce_header + tensors * share * 3 * FRAME_BYTES),
        "ZeRO 2": (2 * sharded[0], 3 * sharded[0] + sharded[1]),
        "ZeRO 3": (3 * sharded[0], 4 * sharded[0] + sharded[1] + LAYERS * gather_header),
        "ZeRO 3, CPU offload": (3 * sharded[0], 4 * sharded[0] + sharded[1] + LAYERS * gather_header),
        "tensor parallel": (
            reductions * 2 * share * activations,
            reductions * (2 * share * activations + reduce_header),
        ),
        "PowerSGD, rank 1": (2 * share * compressed, 2 * share * compressed + 3 * reduce_header),
        "fp16 gradients": (2 * share * n / 4, 2 * share * n / 4 + reduce_header),
        "post-local SGD": (share * n, share * n + reduce_header / 2),
    }[way]


# -- bytes at the sockets ----------------------------------------------------------------------------------------------


def _settled(where: str, count: int) -> int:
    """Wait for all ranks, without a message between them, until no byte moves; return the bytes sent so far."""
    store = _store()
    store.add(where, 1)
    while store.add(where, 0) < count:
        time.sleep(0.002)
    before, still = _tcp_bytes_sent(store.port), 0
    while still < 4:
        time.sleep(0.01)
        now = _tcp_bytes_sent(store.port)
        before, still = now, still + 1 if now == before else 0
    store.add(f"{where} read", 1)
    while store.add(f"{where} read", 0) < count:
        time.sleep(0.002)
    return before


def _store() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    while not isinstance(store, dist.TCPStore):
        store = store.underlying_store
    return store


def _tcp_bytes_sent(store_port: int) -> int:
    sent = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as one:
                if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if store_port in (one.getpeername()[1], one.getsockname()[1]):
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # it listens, or was closed meanwhile
            continue
        sent += struct.unpack_from("Q", info, 120)[0]  # <linux/tcp.h>: tcpi_bytes_acked
    return sent
