"""Ways to train over several ranks by torch's own libraries, each with the bytes that it sends per step.

    data parallel           every rank has the model and a part of the rows; gradients are averaged           DDP
    ZeRO 1                  the same, and each rank keeps and updates a part of the optimizer state           arXiv 1910.02054
    ZeRO 2, ZeRO 3          each rank keeps a part of weights, gradients and state; weights are gathered      FSDP2
    tensor parallel         each matrix is split over ranks, and every rank has all rows                      arXiv 1909.08053
    PowerSGD, fp16          data parallel with gradients as products of rank 1, or in half precision          arXiv 1905.13727
    post-local SGD          ranks train alone for some steps between averages of weights                      arXiv 1808.07217
    int8, top-k             data parallel with gradients in a byte each, or the largest 1 % alone         `gradient_compression`
    3D                      a pipeline whose stages are split and sharded, on 8 ranks                     `parallel_grid`

A way prepares a rank (`prepare`), and states the bytes of a step (`traffic`), a mean over ranks. All update by AdamW.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from l2l_core.parallel.gradient_compression import CompressedGradients, Int8Gradients, LargestGradients
from l2l_core.parallel.parallel_grid import GRID_RANKS, grid_traffic, prepare_grid
from l2l_core.parallel.parallel_task import ParallelTask, ParallelWay, PreparedRank, bytes_of
from l2l_core.parallel.parallel_traffic import (
    WireBytes,
    all_gather_bytes,
    all_reduce_bytes,
    broadcast_bytes,
    reduce_scatter_bytes,
)
from l2l_core.parallel.tensor_split import split_matrices, split_traffic

Tensor = torch.Tensor
START = 2  # steps before gradients are compressed or ranks train alone; DDP orders its buckets in the first
PERIOD = 2  # steps between averages of weights


# -- data parallel -----------------------------------------------------------------------------------------------------


def _replicated(model: nn.Module) -> DistributedDataParallel:
    # One bucket, so that bytes on the wire have a formula.
    return DistributedDataParallel(model, bucket_cap_mb=1000)


def _prepared(task: ParallelTask, model: nn.Module, forward: nn.Module, optimizer: Any = None) -> PreparedRank:
    def backward(inputs: Tensor, targets: Tensor) -> None:
        task.loss(forward(inputs), targets).backward()

    return PreparedRank(dict(model.named_parameters()), optimizer or task.optimizer(model), backward)


def _optimizers_over_ranks() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.* is deprecated")  # this import calls script and interface
        from torch.distributed import optim
    return optim


def _data_parallel(task: ParallelTask, model: nn.Module, count: int) -> PreparedRank:
    return _prepared(task, model, _replicated(model))


def _data_parallel_traffic(task: ParallelTask, model: nn.Module, count: int, inputs: Tensor) -> WireBytes:
    return all_reduce_bytes(bytes_of(model), count)


def _zero_1(task: ParallelTask, model: nn.Module, count: int) -> PreparedRank:
    optimizer = _optimizers_over_ranks().ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=task.learning_rate
    )
    return _prepared(task, model, _replicated(model), optimizer)


def _zero_1_traffic(task: ParallelTask, model: nn.Module, count: int, inputs: Tensor) -> WireBytes:
    updated = (broadcast_bytes(param.nbytes, count) for param in model.parameters())
    return sum(updated, all_reduce_bytes(bytes_of(model), count))


def _power_sgd(task: ParallelTask, model: nn.Module, count: int) -> PreparedRank:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    forward = _replicated(model)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=START)
    forward.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return _prepared(task, model, forward)


def _power_sgd_traffic(task: ParallelTask, model: nn.Module, count: int, inputs: Tensor) -> WireBytes:
    whole, p_bytes, q_bytes = 0, 0, 0
    for param in model.parameters():
        rows = param.shape[0] if param.ndim else 1
        columns = param.numel() // rows
        if param.ndim > 1 and 2 * (rows + columns) < param.numel():  # others are sent as they are
            p_bytes, q_bytes = p_bytes + rows * param.itemsize, q_bytes + columns * param.itemsize
        else:
            whole += param.nbytes
    return sum((all_reduce_bytes(nbytes, count) for nbytes in (whole, p_bytes, q_bytes) if nbytes), WireBytes())


def _fp16_gradients(task: ParallelTask, model: nn.Module, count: int) -> PreparedRank:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    forward = _replicated(model)
    forward.register_comm_hook(None, fp16_compress_hook)
    return _prepared(task, model, forward)


def _fp16_gradients_traffic(task: ParallelTask, model: nn.Module, count: int, inputs: Tensor) -> WireBytes:
    return all_reduce_bytes(2 * sum(param.numel() for param in model.parameters()), count)


def _post_local_sgd(task: ParallelTask, model: nn.Module, count: int) -> PreparedRank:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    forward = _replicated(model)
    alone = dist.new_subgroups(1)[0]
    forward.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=START), post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=START)
    optimizer = _optimizers_over_ranks().PostLocalSGDOptimizer(task.optimizer(model), averager)
    return _prepared(task, model, forward, optimizer)


def _post_local_sgd_traffic(task: ParallelTask, model: nn.Module, count: int, inputs: Tensor) -> WireBytes:
    return all_reduce_bytes(bytes_of(model), count) * (1 / PERIOD)


def _compressed(kind: type[CompressedGradients], task: ParallelTask, model: nn.Module, count: int) -> PreparedRank:
    forward, state = _replicated(model), kind()
    forward.register_comm_hook(state, lambda state, bucket: state.average(bucket))
    return _prepared(task, model, forward)


def _compressed_traffic(
    kind: type[CompressedGradients], task: ParallelTask, model: nn.Module, count: int, inputs: Tensor
) -> WireBytes:
    elements, itemsize = sum(param.numel() for param in model.parameters()), next(model.parameters()).itemsize
    return all_gather_bytes(kind().message_bytes(elements, itemsize) * count, count)


# -- sharded -----------------------------------------------------------------------------------------------------------


def _sharded(task: ParallelTask, model: nn.Module, count: int, **settings: Any) -> PreparedRank:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (count,))
    for layer in task.layers_of(model):
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return _prepared(task, model, model)


def _zero_2(task: ParallelTask, model: nn.Module, count: int) -> PreparedRank:
    return _sharded(task, model, count, reshard_after_forward=False)


def _zero_3(task: ParallelTask, model: nn.Module, count: int) -> PreparedRank:
    return _sharded(task, model, count, reshard_after_forward=True)


def _zero_3_offload(task: ParallelTask, model: nn.Module, count: int) -> PreparedRank:
    from torch.distributed.fsdp import CPUOffloadPolicy  # on a CPU the host's memory is the device's

    return _sharded(task, model, count, reshard_after_forward=True, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _shard_groups(task: ParallelTask, model: nn.Module, count: int) -> list[int]:
    """Return the bytes that are gathered together: of each layer, and of the rest; first dimensions are padded."""

    def padded(param: nn.Parameter) -> int:
        rows = param.shape[0] if param.ndim else 1
        return -(-rows // count) * count * (param.nbytes // rows)

    layers = task.layers_of(model)
    inside = {id(param) for layer in layers for param in layer.parameters()}
    rest = sum(padded(param) for param in model.parameters() if id(param) not in inside)
    return [*(sum(map(padded, layer.parameters())) for layer in layers), *([rest] if rest else [])]


def _zero_2_traffic(task: ParallelTask, model: nn.Module, count: int, inputs: Tensor) -> WireBytes:
    groups = _shard_groups(task, model, count)
    return sum((all_gather_bytes(n, count) + reduce_scatter_bytes(n, count) for n in groups), WireBytes())


def _zero_3_traffic(task: ParallelTask, model: nn.Module, count: int, inputs: Tensor) -> WireBytes:
    again = (all_gather_bytes(nbytes, count) for nbytes in _shard_groups(task, model, count))
    return sum(again, _zero_2_traffic(task, model, count, inputs))


# -- tensor parallel ---------------------------------------------------------------------------------------------------


def _tensor_parallel(task: ParallelTask, model: nn.Module, count: int) -> PreparedRank:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (count,))
    for layer in task.layers_of(model):
        split_matrices(layer, mesh)
    prepared = _prepared(task, model, model)
    prepared.share = (0, 1)  # every rank has all rows
    return prepared


def _tensor_parallel_traffic(task: ParallelTask, model: nn.Module, count: int, inputs: Tensor) -> WireBytes:
    return split_traffic(task.layers_of(model), inputs.nbytes // inputs.shape[-1], count, True)


WAYS: dict[str, ParallelWay] = {
    "data parallel": ParallelWay(_data_parallel, _data_parallel_traffic, "DistributedDataParallel"),
    "ZeRO 1": ParallelWay(_zero_1, _zero_1_traffic, "ZeroRedundancyOptimizer"),
    "ZeRO 2": ParallelWay(_zero_2, _zero_2_traffic, "FSDP2 without resharding"),
    "ZeRO 3": ParallelWay(_zero_3, _zero_3_traffic, "FSDP2"),
    "ZeRO 3, CPU offload": ParallelWay(_zero_3_offload, _zero_3_traffic, "FSDP2 with CPUOffloadPolicy"),
    "tensor parallel": ParallelWay(_tensor_parallel, _tensor_parallel_traffic, "parallelize_module"),
    "PowerSGD, rank 1": ParallelWay(_power_sgd, _power_sgd_traffic, "powerSGD_hook"),
    "fp16 gradients": ParallelWay(_fp16_gradients, _fp16_gradients_traffic, "fp16_compress_hook"),
    "post-local SGD": ParallelWay(_post_local_sgd, _post_local_sgd_traffic, "PostLocalSGDOptimizer"),
    "int8 gradients": ParallelWay(
        partial(_compressed, Int8Gradients), partial(_compressed_traffic, Int8Gradients), "a hook of this package"
    ),
    "top-k gradients, 1 %": ParallelWay(
        partial(_compressed, LargestGradients), partial(_compressed_traffic, LargestGradients), "a hook of this package"
    ),
    "3D, 2 x 2 x 2": ParallelWay(
        prepare_grid, grid_traffic, "torch.distributed.pipelining, FSDP2, parallelize_module", GRID_RANKS
    ),
}
