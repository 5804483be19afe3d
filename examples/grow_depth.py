"""Train a model that grows from 2 to 8 layers. New layers start as the identity, so growing does not change the loss."""

import textwrap
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from l2l_core import Depth, Insert, LayerDrop, Relay, RelayConfig

torch.manual_seed(0)
torch.set_num_threads(1)  # the model is small
text = torch.tensor(list(Path(textwrap.__file__).read_bytes())).unfold(0, 32, 16)  # (windows, bytes)
held_out = {"input_ids": text[:32], "labels": text[:32]}
shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
schedule = Depth({0: 2, 10: 4, 20: 8}, grow="identity") + LayerDrop(0.1)  # depth from each step on

with Relay(model, optimizer, config=RelayConfig(micro_batches=2)) as relay:
    for step in range(30):
        tokens = text[torch.randint(34, len(text), (16,))]
        schedule.step(relay, {"input_ids": tokens, "labels": tokens})
        if step % 10 == 9:
            print(f"step {step + 1}: {len(relay.stack)} layers, held-out loss {relay.evaluate(held_out):.3f}")
    before = relay.evaluate(held_out)
    relay.apply(Insert(at=4, init="identity"))
    print(f"inserted a layer: {len(relay.stack)} layers, equal loss: {relay.evaluate(held_out) == before}")
    relay.undo()
    print(f"undone: {len(relay.stack)} layers, equal loss: {relay.evaluate(held_out) == before}")
print(f"a plain model of {model.config.num_hidden_layers} layers")
