"""Fine-tune a pretrained transformer one layer at a time; ten steps of pretraining stand in for a checkpoint of yours."""

import argparse
import html.entities
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from l2l_core import EmulatedDevice, Relay, RelayConfig

torch.manual_seed(0)
torch.set_num_threads(1)  # the model is small
texts = [torch.tensor(list(Path(module.__file__).read_bytes())) for module in (argparse, html.entities)]


def draw(held_out: bool, rows: int = 16, length: int = 32) -> dict[str, torch.Tensor]:
    """Draw windows of both texts, as bytes, with their labels. The last tenth of each text is held out."""
    parts = [text[len(text) * 9 // 10 :] if held_out else text[: len(text) * 9 // 10] for text in texts]
    labels = torch.arange(rows) % 2
    starts = [int(torch.randint(len(parts[label]) - length, ())) for label in labels]
    windows = [parts[label][start : start + length] for label, start in zip(labels, starts, strict=True)]
    return {"input_ids": torch.stack(windows), "labels": labels}


shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=256, pad_token_id=0, **shape)
options = {"device": EmulatedDevice(memory_bytes=5_000_000), "config": RelayConfig(micro_batches=2, stash="host")}
with tempfile.TemporaryDirectory() as folder, Relay(LlamaForCausalLM(config), **options) as relay:
    for tokens in (draw(held_out=False)["input_ids"] for _ in range(10)):
        relay.step({"input_ids": tokens, "labels": tokens})
    relay.model.save_pretrained(folder)
    model = LlamaForSequenceClassification.from_pretrained(folder)
with Relay(model, torch.optim.AdamW(model.parameters(), lr=1e-3), **options) as relay:
    before = relay.evaluate(draw(held_out=True))
    peak = max(relay.step(draw(held_out=False)).peak_device_bytes for _ in range(20))
    print(
        f"held-out loss {before:.3f} -> {relay.evaluate(draw(held_out=True)):.3f}, {peak / 1e6:.2f} MB of device memory"
    )
