"""Two processes train one model, each on its own rows and with half of the weights. torchrun starts them, or this script."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from l2l_core import Relay, RelayConfig, Workers

text = torch.tensor(list(Path(subprocess.__file__).read_bytes())).unfold(0, 32, 4)  # (windows, 32 bytes)


def train(rank: int, count: int, workers: Workers | None = None) -> list[float]:
    """Predict the last byte of windows, on this worker's share of every 256; return the losses of the 256."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(31 * 32, 128), *blocks, nn.Linear(128, 256))
    whole = 2 * sum(param.nbytes for param in model.parameters())  # AdamW keeps two numbers per weight
    settings = {"config": RelayConfig(micro_batches=4 // count), "layers": blocks, "workers": workers}
    with Relay(model, loss=lambda logits, batch: cross_entropy(logits, batch[1]), **settings) as relay:
        shares = [rows.chunk(count)[rank] for rows in text.split(256)[:40]]
        losses = [relay.step((rows[:, :31], rows[:, 31])).loss for rows in shares]
        held = relay.host.by_category()["optimizer"]
    line = f"worker {rank} of {count} holds {held / whole:.2f} of the optimizer state\n"
    print(line, end="", flush=True)  # in one write: the workers share a terminal
    return losses


if rank := os.environ.get("RANK"):
    losses = train(int(rank), 2, Workers(reduce="ordered"))
    if rank == "0":
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, equal to one worker: {train(0, 1) == losses}")
else:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    sys.exit(subprocess.call(torchrun))
