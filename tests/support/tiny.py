"""Code for cells: a tiny relay whose layers take their time, so that a step is long enough to be watched."""

RELAY = '''
import os, threading, time
from functools import partial

import torch
from torch import nn

from l2l_core import EmulatedDevice, Relay, RelayConfig
from workbench import Workbench

torch.set_num_threads(1)


class Layer(nn.Module):
    """Can be told to take longer, or to fail."""

    def __init__(self):
        super().__init__()
        self.linear, self.seconds, self.broken = nn.Linear(8, 8), 0.03, False

    def forward(self, x):
        time.sleep(self.seconds)
        if self.broken:
            raise ValueError(f"this layer wants 7 features and got {x.shape[1]}")
        return x + torch.tanh(self.linear(x))


def make_relay():
    torch.manual_seed(0)
    layers = [Layer() for _ in range(4)]
    return Relay(
        nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 1)),
        partial(torch.optim.SGD, lr=0.01),
        EmulatedDevice(),
        layers,
        lambda outputs, batch: nn.functional.mse_loss(outputs, batch[1]),
        config=RelayConfig(micro_batches=2),
    )


batches = [(torch.randn(12, 4), torch.randn(12, 1))]
relay = make_relay()
'''

STACKED = (
    "view=['relay', 'time', 'memory', 'loss', 'figures', 'edits', 'layers', 'what if']"  # a whole workbench in sight
)
WORKBENCH = f"workbench = Workbench(relay, batches, {STACKED})\nworkbench"
THREADS = "print(sorted(t.name for t in threading.enumerate() if t.name in ('session', 'pump')))"
