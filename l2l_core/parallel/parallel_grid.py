"""Pipeline, data and tensor parallelism at once, on a grid of 2 x 2 x 2 ranks (3D, arXiv 2104.04473).

Each of two stages has half of the layers. Four ranks share a stage: pairs split every matrix in two (`parallelize_module`), and
the two pairs have different rows and shard the halves between them (FSDP2, which gathers the weights once per step). torch's
`Schedule1F1B` runs two micro-batches. Rank = 4 x stage + 2 x part of the rows + half of the matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from l2l_core.model import resolve_layers
from l2l_core.parallel.parallel_task import ParallelTask, PreparedRank
from l2l_core.parallel.parallel_traffic import WireBytes, all_gather_bytes, reduce_scatter_bytes, send_bytes
from l2l_core.parallel.tensor_split import split_matrices, split_traffic, up_and_down

Tensor = torch.Tensor
SIDE = 2  # ranks along each dimension
GRID_RANKS = SIDE**3
MICRO_BATCHES = 2


def prepare_grid(task: ParallelTask, model: nn.Module, count: int) -> PreparedRank:
    """Prepare a rank of the grid."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (SIDE,) * 3, mesh_dim_names=("stage", "rows", "matrix"))
    index, part = mesh.get_local_rank("stage"), mesh.get_local_rank("rows")
    layers = _stages(task, model)[index]
    for layer in layers.values():
        split_matrices(layer, mesh["matrix"])
        fully_shard(layer, mesh=mesh["rows"], reshard_after_forward=False)
    module = nn.Sequential(*layers.values())
    fully_shard(module, mesh=mesh["rows"], reshard_after_forward=False)
    stage = PipelineStage(module, index, SIDE, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=task.loss)

    def backward(inputs: Tensor, targets: Tensor) -> None:
        named: dict[str, Any] = {"target": targets} if stage.is_last else {}
        schedule.step(*([inputs] if stage.is_first else []), **named)

    parameters = {f"{name}.{own}": param for name, layer in layers.items() for own, param in layer.named_parameters()}
    return PreparedRank(parameters, task.optimizer(module), backward, (part, SIDE))


def grid_traffic(task: ParallelTask, model: nn.Module, count: int, inputs: Tensor) -> WireBytes:
    """Return the bytes that a rank of the grid sends in a step, as a mean over ranks."""
    stages = [list(layers.values()) for layers in _stages(task, model)]
    value_bytes = inputs.nbytes // inputs.shape[-1] // SIDE // MICRO_BATCHES  # of one column of a micro-batch
    total = WireBytes()
    for index, layers in enumerate(stages):
        total += split_traffic(layers, value_bytes, SIDE, index == 0) * MICRO_BATCHES
        for layer in layers:
            up, down = up_and_down(layer)
            held = (up.weight.nbytes + up.bias.nbytes + down.weight.nbytes) // SIDE + down.bias.nbytes
            total += all_gather_bytes(held, SIDE) + reduce_scatter_bytes(held, SIDE)
    # A rank of the first stage sends activations, its partner in the second as many gradients.
    boundary = value_bytes * up_and_down(stages[0][-1])[1].out_features
    return total * (1 / SIDE) + send_bytes(boundary) * MICRO_BATCHES


def _stages(task: ParallelTask, model: nn.Module) -> list[dict[str, nn.Module]]:
    layers = resolve_layers(model, task.layers)
    if not isinstance(model, nn.Sequential) or list(layers.values()) != list(model) or len(layers) < SIDE:
        raise ValueError(
            f"3D cuts an nn.Sequential of {SIDE} or more layers and nothing else into stages; {type(model).__name__} is none. "
            "Pipelines alone cut any model that relays: run_pipeline(PipelineJob.of(model, ...), plan)"
        )
    for layer in layers.values():
        up_and_down(layer)
    middle = len(layers) // SIDE
    named = list(layers.items())
    return [dict(named[:middle]), dict(named[middle:])]
