"""A program that goes on after a worker was lost, started by torchrun: `docs/SCALE.md` shows its lines.

Run as `elastic_example.py FOLDER`. For the tests a worker kills itself once: FOLDER/kill says which, and at which step.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from l2l_core import Relay, RelayConfig, Workers

FOLDER, STEPS, MICRO_BATCHES, ROWS = Path(sys.argv[1]), 12, 4, 8  # micro-batches and rows of a whole batch

torch.set_num_threads(1)
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)]
model = nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 2))
rows = torch.randn(STEPS * ROWS, 8), torch.randn(STEPS * ROWS, 2)

rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # torchrun says them anew after each restart
options = {
    "layers": ["1", "2", "3", "4"],
    "loss": lambda y, batch: (y - batch[1]).square().mean(),
    "config": RelayConfig(seed=0, micro_batches=MICRO_BATCHES // count),
    "workers": Workers(reduce="ordered", timeout_s=60),
}
save = FOLDER / "save"
relay = Relay.load(save, model, **options) if (save / "latest.json").exists() else Relay(model, **options)


def maybe_die(step: int) -> None:
    """Kill this worker, or the agent that started it, where a test wants that; once."""
    order = FOLDER / "kill"
    if order.exists() and order.read_text().split()[1:] == [str(rank), str(step)]:
        whom = os.getppid() if order.read_text().startswith("agent") else os.getpid()
        order.unlink()
        os.kill(whom, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


with relay:
    for step in range(relay.steps, STEPS):
        maybe_die(step)
        mine = slice(step * ROWS + rank * ROWS // count, step * ROWS + (rank + 1) * ROWS // count)
        loss = relay.step(tuple(each[mine] for each in rows)).loss
        print(f"worker {rank} of {count}: step {step} {loss.hex()}", flush=True)
        if relay.steps % 3 == 0:
            relay.save(save)
total = float(sum(param.detach().double().sum() for param in model.parameters()))
print(f"worker {rank} of {count}: weights {total.hex()}", flush=True)
