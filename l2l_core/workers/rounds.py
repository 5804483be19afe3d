"""Workers that were started together find one another, whoever was there before them.

PyTorch connects workers by addresses that they leave in a store. torchrun's agent holds one and gives it to every round of
workers that it starts; so after a restart there are addresses of dead workers in it, and who reads before another has
written anew is refused the connection (seen with PyTorch 2.13; others: https://github.com/pytorch/pytorch/issues/167288).
Nothing that torchrun tells workers says which round they are of. So each leaves a token of its own, and all that see the
same tokens keep to a part of the store that is named by these.
"""

from __future__ import annotations

import hashlib
import secrets
import time

import torch.distributed as dist

from l2l_core.workers.errors import WorkerLostError

_LOOK_S = 0.05  # how often one who waits for the others looks


def init_round(timeout_s: float) -> None:
    """Make the default process group of the workers that a launcher has started together, on gloo.

    Raises:
        WorkerLostError: not all have come in so many seconds.
    """
    store, rank, count = next(iter(dist.rendezvous("env://")))
    dist.init_process_group("gloo", store=part_of_round(store, rank, count, timeout_s), rank=rank, world_size=count)


def part_of_round(store: dist.Store, rank: int, count: int, timeout_s: float) -> dist.Store:
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
        time.sleep(_LOOK_S)
    raise WorkerLostError(
        f"worker {rank} waited {timeout_s:g} s for the other {count - 1} that were to start with it: see what became of them. "
        "Workers(timeout_s=...) waits longer"
    )
