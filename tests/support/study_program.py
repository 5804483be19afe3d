"""A small study for the command line and for tests: five variants, two seeds, six steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from l2l_core import Depth, EmulatedDevice, Freezing, Insert, LayerDrop, Relay, RelayConfig
from workbench import Study

Batch = dict[str, torch.Tensor]
ROWS = 4
torch.set_num_threads(1)  # the model is small

VARIANTS: dict[str, Any] = {
    "plain": None,
    "grown": Depth({0: 2, 3: 4}, grow="identity"),  # fresh layers
    "stacked": Depth({3: 4, 5: 3}, grow="top") + Freezing({4: 1}),
    "dropping": LayerDrop(lambda depth, step: 0.5 if step >= 4 else 0.0),
    "function": lambda relay, step: Insert(1, init="fresh") if step == 3 else None,
}
KILL_AT = int(os.environ.get("KILL_AT_BATCH", "0"))
drawn = 0


def make_relay(seed: int) -> tuple[Relay, Any]:
    shape = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))  # with dropout
    model.loss_type = "ForCausalLM"
    config = RelayConfig(micro_batches=2, verify="never")
    relay = Relay(
        model.train(), partial(torch.optim.AdamW, lr=1e-2), EmulatedDevice(), weight=lambda batch: ROWS, config=config
    )
    return relay, torch.optim.lr_scheduler.ExponentialLR(relay.optimizer, 0.9)


def batches(seed: int) -> Iterator[Batch]:
    """Random tokens; the generator is the global one, which a study seeds."""
    global drawn
    while True:
        drawn += 1
        if drawn == KILL_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        yield make_batch()


def make_batch() -> Batch:
    tokens = torch.randint(16, (ROWS, 8))
    return {"input_ids": tokens, "labels": tokens}


def make_study(folder: Any, names: list[str] | None = None, **options: Any) -> Study:
    torch.manual_seed(7)
    options = {
        "seeds": range(2),
        "steps": 6,
        "held_out": [make_batch()],
        "evaluate_every": 2,
        "autosave_s": 0.0,
        "make_relay": make_relay,
    } | options
    variants = {name: VARIANTS[name] for name in names or VARIANTS}
    return Study(variants=variants, batches=batches, folder=folder, **options)


if "STUDY_FOLDER" in os.environ:
    study = make_study(os.environ["STUDY_FOLDER"])
