"""What ranks do in tests of ways to train over ranks, and models for them."""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from l2l_core.parallel import ParallelTask, settled_tcp_bytes


def make_normed_stack() -> nn.Module:
    """Return layers and a head of other sizes; none has parts called `up` and `down`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layers = [nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*layers, nn.Linear(6, 3)).double()


def make_small_rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return tuple(torch.randn(4, width, generator=generator, dtype=torch.float64) for width in (6, 3))


def mean_square(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (outputs - batch[1]).square().mean()


def make_squares() -> nn.Module:
    """Return matrices of 256 elements: a block of int8 in whatever order DDP has them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh()) for _ in range(3))).double()


def make_square_rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    inputs, targets = torch.randn(2, 8, 16, generator=generator, dtype=torch.float64)
    return inputs, targets


class SlowOnOneRank(nn.Linear):
    """A layer whose forward takes 0.1 s longer on rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.1 if dist.get_rank() == 1 else 0.0)
        return super().forward(x)


def make_slow_stack() -> nn.Module:
    """Return two layers, the first slow on rank 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(SlowOnOneRank(16, 16), nn.Linear(16, 16)).double()


SLOW_TASK = ParallelTask(make_slow_stack, make_square_rows, layers=("0", "1"))
SMALL_TASK = ParallelTask(make_normed_stack, make_small_rows, steps=5, learning_rate=1e-2, layers=("0", "1", "2"))
SQUARE_TASK = ParallelTask(make_squares, make_square_rows, steps=6, learning_rate=1e-2)


def all_reduces_counted(rank: int, count: int, sizes: tuple[int, ...]) -> list[int]:
    """Add tensors of so many bytes over ranks; return the bytes that the kernel has counted for each."""
    counted = []
    for nbytes in sizes:
        before = settled_tcp_bytes(count)[0]
        dist.all_reduce(torch.zeros(nbytes // 4))
        counted.append(settled_tcp_bytes(count)[0] - before)
    return counted
