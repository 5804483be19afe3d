"""Will it fit? The table of `workbench.Fit` against steps that run: bytes on the device, and seconds within the stated ±.

    python benchmarks/will_fit.py
    python benchmarks/will_fit.py --models gpt2 chain --width 64

Six models on an emulated device with a link of 2 GB/s each way, in float32: GPT-2, Llama, BERT, T5, ViT and a plain module. For
each the table is made first; then every way that can start here runs on its own copy. In core and recompute are timed as plain
training, with `torch.utils.checkpoint` around every layer for the latter, and their bytes are metered by the plans of
`l2l_core.strategies`; relays are timed and metered as they are. Bytes must be equal. Steps of a way and steps in core take turns,
so that drift of the machine meets both: `seconds, step` is the median of their ratios, times the table's seconds in core.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from functools import partial
from typing import Any

import torch
from _common import alternate, ratio, report, show
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, GPT2Config, LlamaConfig, T5Config, ViTConfig

from l2l_core import Disk, EmulatedDevice, FileShelf, Relay, RelayConfig, find_layers
from l2l_core.batches import ModelCall, rows_rule
from l2l_core.strategies import Full, Lab, Plain
from workbench.fit import FitRequest, FitWay, make_request

LINK = 2e9  # bytes per second
adamw = partial(torch.optim.AdamW, lr=1e-4)


class Chain(nn.Module):
    """A plain module: residual blocks."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, width), nn.Linear(width, 1)
        make = lambda: nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))  # noqa: E731
        self.layers = nn.ModuleList(make() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def make_models(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Arguments of `make_request` by name."""
    width, layers, length, heads = args.width, args.layers, args.length, max(1, args.width // 64)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"intermediate_size": 4 * width}
    text = {"vocab_size": 256, "max_position_embeddings": length}
    configs = {
        "gpt2": GPT2Config(
            vocab_size=256, n_embd=width, n_layer=layers, n_head=heads, n_positions=length, bos_token_id=0, eos_token_id=0
        ),
        "llama": LlamaConfig(**sizes, **text, bos_token_id=0, eos_token_id=0),
        "bert": BertConfig(**sizes, **text),
        "t5": T5Config(
            vocab_size=256, d_model=width, d_kv=64, d_ff=4 * width, num_heads=heads, num_layers=layers // 2,
            decoder_start_token_id=0,
        ),
        "vit": ViTConfig(**sizes, image_size=32, patch_size=4, num_labels=10),
    }  # fmt: skip
    requests = {name: {"model": config, "rows": args.rows, "length": length} for name, config in configs.items()}
    rows = args.rows * length
    batch = torch.randn(rows, 32), torch.randn(rows, 1)
    return {**requests, "chain": {"model": Chain(width, layers), "batch": batch, "loss": nn.MSELoss()}}


def run_way(way: FitWay, model: nn.Module, batch: Any, options: dict[str, Any], steps: int) -> tuple[int, float]:
    """Run a way on copies of the model; return its bytes on the device, and its seconds as a multiple of those in core."""
    device, K = EmulatedDevice(h2d_bytes_per_s=LINK, d2h_bytes_per_s=LINK), way.micro_batches
    plain = PlainSteps(model, batch, options, K, recomputes=False)
    if way.name.startswith("relay"):
        with tempfile.TemporaryDirectory() as folder:
            shelf = FileShelf(folder=folder, memory_bytes=way.pool_bytes) if way.pool_bytes else None
            config, copied = RelayConfig(micro_batches=K, stash="host"), copy.deepcopy(model)
            with Relay(copied, adamw, device, config=config, shelf=shelf, **options) as relay:
                relay.step(batch)  # metered
                seconds = alternate({"way": lambda: relay.step(batch), "in core": plain}, steps)
                return relay.step(batch).peak_device_bytes, ratio(seconds, "way", "in core")["median"]
    own = copy.deepcopy(model)
    lab = Lab(own, batch, adamw(own.parameters()), device, micro_batches=K, **options)
    plan = lab.plan(Plain() if way.name == "in core" else Full())
    peak = [lab.step(plan) for _ in range(2)][-1].peak_device_bytes
    other = PlainSteps(model, batch, options, K, recomputes=way.name == "recompute")
    return peak, ratio(alternate({"way": other, "in core": plain}, steps), "way", "in core")["median"]


class PlainSteps:
    """Plain training of a copy of a model; a call makes a step."""

    def __init__(self, model: nn.Module, batch: Any, options: dict[str, Any], count: int, recomputes: bool) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer, self.parts = adamw(self.model.parameters()), rows_rule(None)(batch).split(count)
        self.objective = ModelCall(self.model, **options).objective
        for layer in find_layers(self.model).values() if recomputes else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def __call__(self) -> None:
        """Train one step."""
        for part in self.parts:
            (self.objective(self.model, part) / len(self.parts)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def compare(name: str, request: FitRequest, options: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Rows of the comparison for one model."""
    table, model = request.table(), request.source.build()
    batch = (
        request.batch if request.source.module is not None else request.source.make_batch(request.rows, request.length)
    )
    rows = []
    for way in table.ways:
        if way.name in ("in core", "recompute", "relay", "relay on disk"):
            nbytes, multiple = run_way(way, model, batch, options, steps)
            seconds = multiple * table.ways[0].seconds.value
            row = {"model": name, "way": way.name, "device": way.device.value, "real_device": nbytes}
            row |= {"seconds": way.seconds.value, "margin": way.seconds.margin, "real_seconds": seconds}
            rows.append(row | {"within": abs(seconds - way.seconds.value) <= way.seconds.margin})
    return rows


def main() -> None:
    """Compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2", "llama", "bert", "t5", "vit", "chain"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=7, help="timed, of each way")
    parser.add_argument("--threads", type=int, default=max(1, torch.get_num_threads() - 1), help="of compute")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = EmulatedDevice(memory_bytes=10**10, h2d_bytes_per_s=LINK, d2h_bytes_per_s=LINK)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk.of(folder)
    for name, arguments in make_models(args).items():
        if name in args.models:
            options = {"loss": arguments["loss"]} if "loss" in arguments else {}
            request = make_request(**arguments, card=device, host="16 GB", disk=disk)
            rows += compare(name, request, options, args.steps)
            print(f"{name}: done", flush=True)
    report("will_fit", {"settings": vars(args), "rows": rows})
    show(
        ["model", "way", "device, table", "device, step", "seconds, table", "±", "seconds, step", "within ±"],
        [
            [row["model"], row["way"], f"{row['device']:,.0f}", f"{row['real_device']:,}"]
            + [row["seconds"], row["margin"], row["real_seconds"], "yes" if row["within"] else "no"]
            for row in rows
        ],
    )
    exact, within = sum(row["device"] == row["real_device"] for row in rows), sum(row["within"] for row in rows)
    print(f"device bytes equal: {exact} of {len(rows)}; seconds within ±: {within} of {len(rows)}")


if __name__ == "__main__":
    main()
