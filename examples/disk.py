"""Train a model from files, with less host memory than its weights and optimizer state take; stop, and go on."""

import tempfile
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from l2l_core import FileShelf, Relay, RelayConfig, empty_weights

shape = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
config = LlamaConfig(num_hidden_layers=16, **shape)
torch.set_num_threads(1)  # the model is small
text = torch.tensor(list(Path(tempfile.__file__).read_bytes())).unfold(0, 32, 32)  # (windows, bytes)


def initialise(name: str, param: torch.Tensor) -> None:
    """Fill one parameter in place; a checkpoint would be `weights="folder/of/safetensors"`."""
    torch.nn.init.ones_(param) if param.dim() == 1 else torch.nn.init.normal_(param, std=0.05)


def train(shelf: FileShelf, steps: int) -> None:
    """Train up to the given number of steps; the files hold every step when it ends."""
    with empty_weights():  # the model is never whole in memory
        model = LlamaForCausalLM(config)
    optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    with Relay(model, optimizer, shelf=shelf, config=RelayConfig(micro_batches=2)) as relay:
        for step in range(relay.steps, steps):
            rows = text[16 * step : 16 * step + 16]
            result = relay.step({"input_ids": rows, "labels": rows})
            peak = result.trace.peak_bytes("host")
            print(f"step {step}: loss {result.loss:.3f}, {peak / 1e6:.1f} MB of host memory")


params = sum(param.numel() for param in LlamaForCausalLM(config).parameters())
print(f"weights and AdamW's state: {12 * params / 1e6:.1f} MB")
with tempfile.TemporaryDirectory() as folder:
    train(FileShelf(folder=folder, memory_bytes="12 MB", weights=initialise), steps=4)
    train(FileShelf(folder=folder, memory_bytes="12 MB", resume=True), steps=8)
