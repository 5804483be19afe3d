"""A program as a user would write it, started by torchrun: `docs/SCALE.md` shows its lines."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from l2l_core import Relay, RelayConfig, Workers

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 16), *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)), nn.Linear(16, 2)
)
rows = TensorDataset(torch.randn(24, 8), torch.randn(24, 2))

config = RelayConfig(micro_batches=2)
layers = ["1", "2", "3", "4"]
with Relay(
    model, loss=lambda y, batch: (y - batch[1]).square().mean(), layers=layers, config=config, workers=Workers()
) as relay:
    sampler = DistributedSampler(rows, num_replicas=relay.workers, rank=relay.rank, shuffle=True, seed=0)
    loader = DataLoader(rows, batch_size=6, sampler=sampler)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        losses += [relay.step(batch).loss for batch in loader]
    rank, count = relay.rank, relay.workers
running = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
assert not [name for name in running if "gloo" in name], (
    running
)  # one that runs while the interpreter exits may abort it
total = float(sum(param.double().sum() for param in model.parameters()))  # closed, the model is whole on every worker
print(f"worker {rank} of {count}: losses {losses}, weights {total!r}", flush=True)
sys.exit(0)
