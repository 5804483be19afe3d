"""What ranks do in tests of their processes."""

import os

import torch
import torch.distributed as dist


def sum_of_ones(rank: int, count: int, value: float = 1.0) -> float:
    """Add a number over all ranks."""
    numbers = torch.full((3,), value)
    dist.all_reduce(numbers)
    return float(numbers[0])


def fall_silent(rank: int, count: int, loser: int, signal_number: int) -> None:
    """One rank is killed or stopped while the others wait for it."""
    if rank == loser:
        os.kill(os.getpid(), signal_number)
    dist.all_reduce(torch.ones(3))
