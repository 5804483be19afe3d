"""Two workers, of which the second stops between two steps but keeps its connections; the first closes its relay."""

import os
import signal
import time

import torch
from torch import nn

from l2l_core import Relay, WorkerLostError, Workers

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
batch = (torch.randn(2, 4), torch.randn(2, 4))
relay = Relay(model, layers=["1"], loss=lambda y, batch: (y - batch[1]).square().mean(), workers=Workers(timeout_s=3))
relay.step(batch)
if relay.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    relay.step(batch)
except WorkerLostError:
    began_s = time.monotonic()
    relay.close()
    print(f"closed after {time.monotonic() - began_s:.1f} s", flush=True)
    os._exit(0)  # PyTorch's threads would wait for the stopped worker
