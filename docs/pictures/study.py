"""The README's study: the demo's model, grown in two ways, beside all layers and few layers at the same compute.

    python -m workbench study docs/pictures/study.py -o docs/pictures/study.svg

It takes about ten minutes on two cores. An interrupted study continues with the same command.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from l2l_core import Depth, Relay, RelayConfig
from workbench import Study, Variant
from workbench.lessons.corpus import load_corpus
from workbench.lessons.demo import draw_batch, make_model, make_optimizer, make_schedule
from workbench.lessons.demo_values import FULL

STEPS = 120  # of growing models
ALL, FEW = 71, 269  # steps of 24 layers and of 6 with the same compute
OUT = Path(__file__).parents[2] / "out" / "study"
SETTINGS = FULL
CONFIG = RelayConfig(micro_batches=SETTINGS.micro_batches, ahead=0)
STAGES = {0: 6, 40: 12, 80: 24}  # layers from each step on
torch.set_num_threads(1)  # the model is small
corpus = load_corpus()


def make_relay(seed: int, layers: int, length: int = STEPS) -> tuple[Relay, Any]:
    settings = replace(SETTINGS, layers=layers, seed=seed, steps=length)  # the learning rate falls over `length` steps
    model = make_model(settings)
    relay = Relay(model, make_optimizer(model, settings), device="cpu", config=CONFIG)
    return relay, make_schedule(relay.optimizer, settings)


def batches(seed: int) -> Iterator[Any]:
    drawn = torch.Generator().manual_seed(seed)
    while True:
        yield draw_batch(corpus.train, SETTINGS, drawn)


judged = torch.Generator().manual_seed(1)
held_out = [draw_batch(corpus.held_out, SETTINGS, judged) for _ in range(8)]
few = {"layers": 6}
study = Study(
    make_relay,
    {
        "24 layers": Variant(None, {"layers": 24, "length": ALL}, steps=ALL),
        "stacked: 6, 12, 24": Variant(Depth(STAGES, grow="top"), few),
        "identity: 6, 12, 24": Variant(Depth(STAGES, grow="identity"), few),
        "6 layers": Variant(None, {**few, "length": FEW}, steps=FEW),
    },
    seeds=range(3),
    steps=STEPS,
    batches=batches,
    held_out=held_out,
    folder=OUT,
    workers="auto",
)
