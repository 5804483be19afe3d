"""A small residual network of nine unequal blocks, the model of lesson 7 on recompute.

The first block gets the largest images, so its record is the largest. On such a chain it matters *which* block runs twice.
"""

from __future__ import annotations

from functools import cache

import torch
from transformers import ResNetConfig, ResNetForImageClassification

from l2l_core import Device
from l2l_core.strategies import Lab

BLOCKS = tuple(f"resnet.encoder.stages.{i}.layers.{j}" for i in range(3) for j in range(3))


def make_lab(device: Device | None = None) -> Lab:
    """Make a lab with a batch of eight random images, 64 x 64; every block is a layer."""
    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64],
        depths=[3, 3, 3],
        layer_type="basic",
        downsample_in_first_stage=False,
    )
    config.num_labels = 10
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ResNetForImageClassification(config).train()
        batch = {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(10, (8,))}
    return Lab(model, batch, device=device, layers=BLOCKS)


@cache
def shared_lab() -> Lab:
    """Return a cached lab without a memory budget, for evaluating plans."""
    return make_lab()
