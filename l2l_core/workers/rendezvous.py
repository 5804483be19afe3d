"""Workers that were started together find one another, whoever was there before them.

PyTorch connects workers by addresses that they leave in a store. torchrun's agent holds one and gives it to every round of
workers that it starts; so after a restart there are addresses of dead workers in it, and who reads before another has
written anew is refused the connection (seen with PyTorch 2.13; others: https://github.com/pytorch/pytorch/issues/167288).
Nothing that torchrun tells workers says which round they are of. So each leaves a token of its own, and all that see the
same tokens keep to a part of the store that is named by these.

Launchers of MPI programs say rank and count under names of their own, and nothing of where to meet. PyTorch does not read those
names, so that each process would take itself for the only one.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time

import torch.distributed as dist

from l2l_core.workers.errors import WorkerLostError

_POLL_S = 0.05  # how often one who waits for the others looks


_LAUNCHER_VARIABLES = {  # rank and count of a process, by who started it
    "torchrun, or a program that sets its names": ("RANK", "WORLD_SIZE"),
    "mpirun of Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec of Intel MPI or MPICH": ("PMI_RANK", "PMI_SIZE"),
    "mpirun of MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
}


def launcher_rank() -> tuple[int, int]:
    """Say which of how many processes this one is, by what its launcher has told it: rank and count, 0 of 1 without one."""
    said = next((names for names in _LAUNCHER_VARIABLES.values() if all(name in os.environ for name in names)), None)
    return (0, 1) if said is None else (int(os.environ[said[0]]), int(os.environ[said[1]]))


def init_process_group(rank: int, count: int, timeout_s: float) -> None:
    """Make the default process group of the workers that a launcher has started together, on gloo.

    Raises:
        ValueError: the launcher did not say where they meet.
        WorkerLostError: not all have come in so many seconds.
    """
    lacks = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if lacks:
        by = next(by for by, names in _LAUNCHER_VARIABLES.items() if all(name in os.environ for name in names))
        raise ValueError(
            f"{' and '.join(lacks)} not set: this is process {rank} of {count} started by {by}, which does not say where they "
            "are to meet. Set both for all of them, as in mpirun -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500, with the address "
            "of process 0 if there are several machines; or make the process group yourself; or train alone with workers=None"
        )
    store, rank, count = next(iter(dist.rendezvous("env://", rank=rank, world_size=count)))
    dist.init_process_group("gloo", store=round_store(store, rank, count, timeout_s), rank=rank, world_size=count)


def round_store(store: dist.Store, rank: int, count: int, timeout_s: float) -> dist.Store:
    """Give the part of a store that this worker and those that came with it have for themselves.

    A worker says that it is here under the name of a round only if its own token is in that name. So once all have said it,
    all have the same name, and none is of another round.

    Raises:
        WorkerLostError: not all have come in so many seconds.
    """
    token, keys = secrets.token_hex(8), [f"l2l/token/{other} of {count}" for other in range(count)]
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        store.set(keys[rank], token)  # again and again: a worker of a round before may not have ended yet
        if store.check(keys):
            tokens = b" ".join(store.get(key) for key in keys)
            name = f"l2l/round/{hashlib.sha256(tokens).hexdigest()}"
            if token.encode() in tokens:
                store.set(f"{name}/{rank}", "here")
            if store.check([f"{name}/{other}" for other in range(count)]):
                return dist.PrefixStore(name, store)
        time.sleep(_POLL_S)
    raise WorkerLostError(
        f"worker {rank} waited {timeout_s:g} s for the other {count - 1} that were to start with it: see what became of them. "
        "Workers(timeout_s=...) waits longer"
    )
