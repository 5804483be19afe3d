"""Relay on a GPU against in-core training with activation recompute: peak bytes, step time, what binds.

    python benchmarks/gpu.py                                   both models, meant for at most eight minutes
    python benchmarks/gpu.py --models decoder --rows 64 --micro-batches 16  a batch that hides the updates of the EPS
    python benchmarks/gpu.py --models decoder --layers 32 --width 4096 --relay-only     7 G parameters, 100 GB on the host
    python benchmarks/gpu.py --models bert --relay-only --forecast       what a forecast before any step says of it
    python benchmarks/gpu.py --layers 2 --width 64 --rows 4 --length 32 --vocabulary 128 --rounds 1      a smoke run

`gpu_day.py` runs these and more as a plan of 25 minutes.

bert: BERT-Large's shape (24 layers 1024 wide), 32 x 512 tokens, masked language modelling. decoder: Llama's shape (24
layers 2048 wide, 1.3 G parameters), 16 x 1024 tokens. Random weights, in large tensors a million numbers again and again;
AdamW, fused; bfloat16. The relay keeps float32
masters and the optimizer on the host; in core they are on the GPU, under autocast, with `gradient_checkpointing_enable`.
Sides run in turn in one process.

TFLOP/s by the 6 N formula: 6 x parameters x tokens / seconds, of parameters that are multiplied with (tables that are only
looked up do not count); the recompute, about a third more, is not counted on either side. Peak bytes are what PyTorch's
allocator had handed out, the other side's share taken off.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import alternate, hardware, medians, ratio, report
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from l2l_core import Device, Relay, RelayConfig, StepResult

SHAPES = {
    "bert": {"layers": 24, "width": 1024, "rows": 32, "length": 512, "vocabulary": 30522},
    "decoder": {"layers": 24, "width": 2048, "rows": 16, "length": 1024, "vocabulary": 32000},
}


class QuickDraw(TorchFunctionMode):
    """Fills large tensors with copies of 2**20 normal numbers of deviation 0.02.

    One core would take ten seconds for a billion.
    """

    draws = (torch.Tensor.normal_, torch.Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = args[0] if args else (kwargs or {}).get("tensor")
        if func not in self.draws or tensor.numel() <= (drawn := 2**20):
            return func(*args, **(kwargs or {}))
        flat = tensor.detach().view(-1)
        flat[:drawn].normal_(std=0.02)
        while drawn < len(flat):
            more = min(drawn, len(flat) - drawn)
            flat[drawn : drawn + more] = flat[:more]
            drawn += more
        return tensor


def device_of(name: str) -> str | Device:
    """The device by name; "double" is the tests' double of CUDA, on which copies come as late as they may."""
    if name != "double":
        return name
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from late_cuda import LateDevice

    return LateDevice()


def make_model(name: str, shape: dict[str, int]) -> nn.Module:
    """The model with random weights, in float32 on the CPU."""
    torch.manual_seed(0)
    with QuickDraw():
        return _make_model(name, shape)


def _make_model(name: str, shape: dict[str, int]) -> nn.Module:
    width, length = shape["width"], shape["length"]
    sizes = {
        "vocab_size": shape["vocabulary"],
        "hidden_size": width,
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": max(1, width // (64 if name == "bert" else 128)),
        "max_position_embeddings": length,
        "use_cache": False,
    }
    if name == "bert":
        return BertForMaskedLM(BertConfig(**sizes, intermediate_size=4 * width)).train()
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=-(-8 * width // 3 // 64) * 64)).train()


def make_batch(name: str, shape: dict[str, int]) -> dict[str, torch.Tensor]:
    """Random tokens; all are predicted by the decoder, 15 % by BERT, the same number in every row."""
    ids = torch.randint(5, shape["vocabulary"], (shape["rows"], shape["length"]))
    labels = ids.clone()
    if name == "bert":
        labels[:, max(1, shape["length"] * 15 // 100) :] = -100
    return {"input_ids": ids, "labels": labels}


def multiplied_parameters(model: nn.Module) -> int:
    """Parameters of everything but lookup tables; a table that is also the head counts."""
    modules = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    return sum(p.numel() for p in {p for m in modules for p in m.parameters(recurse=False)})


class InCore:
    """Plain mixed-precision training: float32 weights and optimizer on the device, autocast, gradient accumulation."""

    def __init__(
        self, model: nn.Module, device: torch.device, batch: dict[str, torch.Tensor], micro_batches: int
    ) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        self.model, self.device = model.to(device), device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.batch, self.micro_batches = batch, micro_batches

    def step(self) -> float:
        """One step; the loss."""
        total = 0.0
        rows = len(self.batch["input_ids"]) // self.micro_batches
        for k in range(self.micro_batches):
            part = {name: t[k * rows : (k + 1) * rows].to(self.device) for name, t in self.batch.items()}
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.model(**part).loss / self.micro_batches
            loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class Peaks:
    """Wraps the step of a side: notes the loss and the peak bytes of the GPU."""

    def __init__(self, step: Callable[[], Any], owns: bool) -> None:
        self.step, self.owns, self.peak_bytes, self.last = step, owns, 0, None

    def __call__(self) -> None:
        gpu = torch.cuda.is_available()
        before = 0 if self.owns or not gpu else torch.cuda.memory_allocated()
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        self.last = self.step()
        if gpu:
            torch.cuda.synchronize()
            self.peak_bytes = torch.cuda.max_memory_allocated() - before


def describe(result: StepResult) -> dict[str, Any]:
    """Return the figures of the trace of a relay step."""
    trace = result.trace
    print(trace.summary())
    binds = [str(line) for line in trace.bound_by()] if hasattr(trace, "bound_by") else []
    for line in binds:
        print(" ", line)
    return {
        "overlap": trace.overlap(),
        "exposed_s": {lane: trace.exposed_s(lane) for lane in trace.lanes},
        "busy_s": {lane: trace.busy_s(lane) for lane in trace.lanes},
        "bound_by": binds,
        "bytes_loaded": result.bytes_loaded,
        "bytes_pushed": result.bytes_pushed,
        "ledger_peak_bytes": result.peak_device_bytes,
    }


def measure(name: str, shape: dict[str, int], args: argparse.Namespace) -> dict[str, Any]:
    """One model, all sides."""
    batch = make_batch(name, shape)
    config = RelayConfig(micro_batches=args.micro_batches, stash=args.stash, precision="bf16")
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    with Relay(model := make_model(name, shape), optimizer, device_of(args.device), config=config) as relay:
        parameters = sum(p.numel() for p in model.parameters())
        forecast = relay.forecast(batch) if args.forecast else None
        print(f"{name}: {parameters / 1e9:.3g} G parameters, {shape}, on {relay.device.name}", flush=True)
        steps = {"relay": Peaks(lambda: relay.step(batch), owns=False)}
        steps["relay"]()
        first_loss: dict[str, Any] = {"relay": getattr(steps["relay"].last, "loss", None)}
        if not args.relay_only:
            try:
                plain = InCore(make_model(name, shape), relay.device.torch_device, batch, args.micro_batches)
                steps["in core"] = Peaks(plain.step, owns=True)
                steps["in core"]()
                first_loss["in core"] = steps["in core"].last
            except torch.OutOfMemoryError:
                print("in core: does not fit")
                plain = None
                steps.pop("in core", None)
                gc.collect()
                torch.cuda.empty_cache()
        seconds = alternate(steps, args.rounds)  # after the first relay step, which counts activations, and one more
        result = steps["relay"].last
        assert isinstance(result, StepResult)
        trace = describe(result)
        if forecast is not None:
            trace["forecast"] = {
                "seconds over measured": forecast.seconds / result.seconds,
                "peak device bytes over measured": forecast.peak_device_bytes / result.peak_device_bytes,
            }
            print("forecast before any step:", trace["forecast"])
    flops = 6 * multiplied_parameters(model) * shape["rows"] * shape["length"]
    return {
        "shape": shape,
        "parameters": parameters,
        "median_s": medians(seconds),
        "ratio": ratio(seconds, "relay", "in core") if "in core" in seconds else "in core did not run",
        "tflop_per_s": {side: flops / s / 1e12 for side, s in medians(seconds).items()},
        "peak_bytes": {side: step.peak_bytes for side, step in steps.items()},
        "first_loss": first_loss,
        "last_loss": {side: getattr(step.last, "loss", step.last) for side, step in steps.items()},
        "relay": trace,
    }


def main() -> int:
    """Measure and report; 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    for size in ("layers", "width", "rows", "length", "vocabulary"):
        parser.add_argument(f"--{size}", type=int, help="in place of the model's own")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--stash", default="host", choices=["device", "host"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--relay-only", action="store_true", help="leave training in core out, where it cannot fit")
    parser.add_argument("--forecast", action="store_true", help="forecast the step before any step is made")
    parser.add_argument(
        "--device", default="cuda", help="'double' or 'cpu' tries the program out and measures nothing of a GPU"
    )
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"no CUDA device here ({hardware()}): nothing measured", file=sys.stderr)
        return 2
    results = {}
    for name in args.models:
        given = {size: getattr(args, size) for size in SHAPES[name] if getattr(args, size)}
        results[name] = measure(name, SHAPES[name] | given, args)
        gc.collect()
    report("gpu", {"settings": vars(args), **results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
