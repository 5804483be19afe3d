"""Rendezvous of workers started together, also when the store still holds entries of earlier workers.

PyTorch connects workers by addresses in a store. torchrun's agent uses one store for every round of workers that it starts; after
a restart it holds addresses of dead workers, and a worker that reads them before they are overwritten is refused the
connection (seen with PyTorch 2.13; others: https://github.com/pytorch/pytorch/issues/167288). No variable of torchrun identifies
the round. Each worker therefore writes a random token, and workers that read the same tokens use a prefix derived from them.

Launchers of MPI programs set rank and count under other names, which PyTorch does not read, and no address.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import secrets
import time

import torch.distributed as dist

from l2l_core.workers.health_monitor import WorkerLostError

_POLL_S = 0.05  # interval at which the store is polled
_LAUNCHER_VARIABLES = {  # environment variables for rank and count, by launcher
    "torchrun, or a program that sets its names": ("RANK", "WORLD_SIZE"),
    "mpirun of Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec of Intel MPI or MPICH": ("PMI_RANK", "PMI_SIZE"),
    "mpirun of MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
}


def find_launcher() -> tuple[str, int, int]:
    """Return the launcher, the rank of this process and the number of processes; ("", 0, 1) without one."""
    for launcher, (rank, count) in _LAUNCHER_VARIABLES.items():
        if rank in os.environ and count in os.environ:
            return launcher, int(os.environ[rank]), int(os.environ[count])
    return "", 0, 1


def init_process_group(launcher: str, rank: int, count: int, timeout_s: float) -> None:
    """Initialise the default process group, on gloo, of the workers that a launcher has started together."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} not set: this is process {rank} of {count} started by {launcher}, which does not set "
            "the address of process 0. Set both for all processes, as in mpirun -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500, "
            "with the address of process 0 if there are several machines; or make the process group yourself; or train alone "
            "with workers=None"
        )
    # Default arguments in it are the default process group at the time of the import. Imported later (by torch._dynamo, say), it
    # would keep the group's threads running after `destroy_process_group`.
    importlib.import_module("torch.distributed.nn.functional")
    store, rank, count = next(iter(dist.rendezvous("env://", rank=rank, world_size=count)))
    dist.init_process_group("gloo", store=round_store(store, rank, count, timeout_s), rank=rank, world_size=count)


def round_store(store: dist.Store, rank: int, count: int, timeout_s: float) -> dist.Store:
    """Return a part of the store that only the workers of this round use.

    A worker registers under the name of a round only if that name was derived from its token. Once all have registered, all
    use the same name, and none belongs to another round. If they do not arrive in time, WorkerLostError is raised.
    """
    token, keys = secrets.token_hex(8), [f"l2l/token/{other} of {count}" for other in range(count)]
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        store.set(keys[rank], token)  # repeated: a worker of an earlier round may still be writing
        if store.check(keys):
            tokens = b" ".join(store.get(key) for key in keys)
            name = f"l2l/round/{hashlib.sha256(tokens).hexdigest()}"
            if token.encode() in tokens:
                store.set(f"{name}/{rank}", "here")
            if store.check([f"{name}/{other}" for other in range(count)]):
                return dist.PrefixStore(name, store)
        time.sleep(_POLL_S)
    raise WorkerLostError(
        f"worker {rank} waited {timeout_s:g} s for the other {count - 1} workers of the launch: check their logs. "
        "Workers(timeout_s=...) sets a longer limit"
    )
