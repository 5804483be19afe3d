"""Ways to train in less memory beside the relay, on one model: metered bytes, layer forwards, simulated seconds.

    python benchmarks/strategies.py
    python benchmarks/strategies.py --models gpt2 resnet --links 1e8 1e9

GPT-2, BERT, a ResNet and a U-Net, small, in two micro-batches; AdamW. Bytes are metered in a step of each way on a copy,
with all that is on the device: weights, gradients, optimizer state, activations. Rotor, KARMA's greedy and all choices of
keeping, recompute and offload (up to eight layers) get a byte less than periodic recompute needs. Seconds are simulated from
measured operations of this machine and the stated speed of the link, one column per link; stages are measured anew for each.
Where a plan depends on the link, bytes and forwards are those for the last one.

Then, of each model: activations of few bits and randomized linear layers, in plain training, with the cosine between their
gradients and the exact ones. Of a ResNet of five blocks, and of random chains: what plans could gain that drop what they keep.
And what GPT-2 small saves for backward, by rows and length, on fake tensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _common import make_batch, make_gpt2, report, show
from _strategies_more import activations, approximate, gap
from torch import nn
from transformers import BertConfig, BertForMaskedLM, ResNetConfig, ResNetForImageClassification

from l2l_core import EmulatedDevice
from l2l_core.strategies import (
    Combined,
    Full,
    Karma,
    Lab,
    Offload,
    PartitionSwap,
    Periodic,
    Plain,
    RelayPolicy,
    Rotor,
    SelectiveCheckpoint,
)

ROWS, LENGTH, MICRO_BATCHES = 8, 64, 2


def gpt2() -> tuple[nn.Module, Any, dict[str, Any]]:
    """Eight blocks 128 wide, with dropout."""
    return make_gpt2(8, 128, LENGTH), make_batch(ROWS, LENGTH), {}


def bert() -> tuple[nn.Module, Any, dict[str, Any]]:
    """Six layers 128 wide."""
    config = BertConfig(
        vocab_size=256, hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512
    )
    return BertForMaskedLM(config).train(), make_batch(ROWS, LENGTH), {}


def resnet(depths: tuple[int, ...] = (3, 3, 3)) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Nine blocks, whose inputs shrink as they go down; each is a layer."""
    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64],
        depths=list(depths),
        layer_type="basic",
        downsample_in_first_stage=False,
        num_labels=10,
    )
    model = ResNetForImageClassification(config).train()
    layers = [f"resnet.encoder.stages.{i}.layers.{j}" for i in range(3) for j in range(depths[i])]
    batch = {"pixel_values": torch.randn(ROWS, 3, 64, 64), "labels": torch.randint(10, (ROWS,))}
    return model, batch, {"layers": layers}


class UNet(nn.Module):
    """Three levels down and up, with skips: tensors of the way down are read again on the way up."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(4)]
        pairs = list(zip(widths, widths[1:], strict=False))
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 1)
        self.down = nn.ModuleList(self._block(a, b, nn.MaxPool2d(2)) for a, b in pairs)
        self.up = nn.ModuleList(self._block(2 * b, a, nn.Upsample(scale_factor=2)) for a, b in reversed(pairs))

    @staticmethod
    def _block(a: int, b: int, resize: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU(), resize)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to images: (rows, 3, height, width)."""
        x, skips = self.enter(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.up:
            x = block(torch.cat([x, skips.pop()], 1))
        return self.leave(x)


def unet() -> tuple[nn.Module, Any, dict[str, Any]]:
    """Six blocks; learns to give its images back."""
    layers = [f"{way}.{i}" for way in ("down", "up") for i in range(3)]
    images = torch.randn(ROWS, 3, 64, 64)
    return UNet(), (images,), {"layers": layers, "loss": lambda out, batch: ((out - batch[0]) ** 2).mean()}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, dict[str, Any]]]] = {
    "gpt2": gpt2,
    "bert": bert,
    "resnet": resnet,
    "unet": unet,
}


def measure(name: str, links: list[float]) -> list[dict[str, Any]]:
    """Rows of one model; `seconds` by link."""
    torch.manual_seed(0)
    model, batch, options = MODELS[name]()
    rows: dict[str, dict[str, Any]] = {}
    for speed in links:
        device = EmulatedDevice(h2d_bytes_per_s=speed, d2h_bytes_per_s=speed)
        lab = Lab(model, batch, device=device, micro_batches=MICRO_BATCHES, **options)
        budget = lab.plan(Periodic()).peak_device_bytes - 1
        combined = {"combined, the same": Combined(budget)} if lab.cost_model.stages <= 9 else {}
        ways = {
            "plain": Plain(),
            "full": Full(),
            "periodic": Periodic(),
            "rotor, less than periodic": Rotor(budget),
            "karma, the same": Karma(budget),
            **combined,
            "partition and swap, the same": PartitionSwap(budget),
            "torch's selective checkpoint": SelectiveCheckpoint(),
            "offload": Offload(ahead=1),
            "offload, synchronous": Offload(ahead=0),
            "relay, stash on the host": RelayPolicy(),
            "relay, stash on the device": RelayPolicy(stash="device"),
            "relay, 4 graphs kept": RelayPolicy(keep=4, stash="device"),
        }
        for said, row in zip(ways, lab.compare(ways.values()).rows, strict=True):
            kept = rows.setdefault(said, {"way": said, "seconds": []})
            kept |= {
                "device_bytes": row.peak_device_bytes,
                "host_bytes": row.peak_host_bytes,
                "forwards": row.layer_forwards,
                "why": row.why,
            }
            kept["seconds"].append(row.seconds)
    return list(rows.values())


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--links", nargs="+", type=float, default=[3e7, 3e8, 3e9], help="bytes per second, each way")
    args = parser.parse_args()

    results, changed = {}, {}
    for name in args.models:
        results[name] = rows = measure(name, args.links)
        print(f"{name}: metered MB, layer forwards, simulated seconds by link")
        header = ("way", "device", "host", "forwards", *(f"{speed:.0e} B/s" for speed in args.links))
        show(
            header,
            [
                (r["way"], r["device_bytes"] / 1e6, r["host_bytes"] / 1e6, r["forwards"], *r["seconds"])
                if not r["why"]
                else (r["way"], r["why"], *[""] * (len(header) - 2))
                for r in rows
            ],
        )
        changed[name] = approximate(MODELS[name], MICRO_BATCHES)
        print(f"{name}, plain training: metered MB, MB of records of a micro-batch, cosine of the gradients")
        show(
            ("model", "device", "records", "cosine"),
            [
                (r["model"], r["device_bytes"] / 1e6, r["record_bytes"] / 1e6, r["cosine"])
                if "why" not in r
                else (r["model"], r["why"].partition(":")[0], "", "")
                for r in changed[name]
            ],
        )
    torch.manual_seed(0)
    model, batch, options = resnet((2, 2, 1))
    gains = gap(Lab(model, batch, micro_batches=MICRO_BATCHES, **options).cost_model.rotor_solution.chain)
    print(f"plans that drop what they keep: {gains}")
    results = {"ways": results, "changed": changed, "gap": gains, "activations": activations()}
    report("strategies", {"settings": vars(args), "results": results})


if __name__ == "__main__":
    main()
