"""A training loop of your own: data loader, learning rate schedule, clipping, evaluation, and resuming to the bit."""

import tempfile
from pathlib import Path

import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from l2l_core import Relay, RelayConfig

text = torch.tensor(list(Path(tempfile.__file__).read_bytes())).unfold(0, 32, 32)  # (windows, bytes)
held_out = {"input_ids": text[:32], "labels": text[:32]}
batches = list(DataLoader([{"input_ids": row, "labels": row} for row in text[32:]], 32, shuffle=True))
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4)
settings = RelayConfig(micro_batches=2, update="deferred", max_grad_norm=1.0)
torch.set_num_threads(1)  # the model is small


def train(save: Path, steps: int) -> float:
    """Train until the given number of steps is made, from the save if it exists; save, and return the held-out loss."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = OneCycleLR(optimizer, max_lr=3e-3, total_steps=len(batches))  # before the relay is loaded
    with Relay.load(save, model, optimizer) if save.exists() else Relay(model, optimizer, config=settings) as relay:
        if relay.steps:
            scheduler.load_state_dict(torch.load(save / "scheduler.pt"))
        for batch in batches[relay.steps : steps]:
            relay.step(batch)
            scheduler.step()
        torch.save(scheduler.state_dict(), relay.save(save) / "scheduler.pt")
        return relay.evaluate(held_out)


with tempfile.TemporaryDirectory() as folder:
    losses = [train(Path(folder, "resumed"), steps) for steps in (0, len(batches) // 2, len(batches))]
    print("held-out loss at first, half-way, at the end:", *(f"{loss:.3f}" for loss in losses))
    print("equal to training without a pause:", losses[-1] == train(Path(folder, "whole"), len(batches)))
