"""Shared code of the benchmarks: both sides in turn, medians and ratios, the model, the hardware named, a table and
JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 256


def make_gpt2(layers: int, width: int, length: int, dropout: float = 0.1, **settings: Any) -> GPT2LMHeadModel:
    """A GPT-2 with heads of 64 and a byte vocabulary, so that the blocks are what is measured; `settings` of its config."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=width,
        n_layer=layers,
        n_head=max(1, width // 64),
        n_positions=length,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        **settings,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what transformers falls back to anyway, with a warning
    return model.train()


def make_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Random bytes to predict: (rows, length)."""
    tokens = torch.randint(VOCABULARY, (rows, length))
    return {"input_ids": tokens, "labels": tokens}


def cut(batch: dict[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Cut a batch along its rows into so many micro-batches."""
    parts = [value.chunk(count) for value in batch.values()]
    return [dict(zip(batch, each, strict=True)) for each in zip(*parts, strict=True)]


def peak_resident_bytes() -> int:
    """Return the most bytes of this process that were in memory; `resource` would count those of the one that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on `count` cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def hardware() -> str:
    """Processor, cores, memory, GPU and torch version in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{model}, {os.cpu_count()} cores, {memory_gb:.0f} GB{gpu}, torch {torch.__version__}"


def load() -> float:
    """Processes that wanted to run in the last minute: what is much above our own threads is other people's work."""
    return os.getloadavg()[0]


def alternate(
    sides: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 1, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each side, measured in turn so that drift of the machine meets all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(-warmup, rounds):
        for name, run in sides.items():
            began_s = clock()
            run()
            if round_ >= 0:
                seconds[name].append(clock() - began_s)
    return seconds


def ratio(values: Mapping[str, list[float]], side: str, over: str) -> dict[str, float]:
    """Pairwise ratio of two sides: median, smallest, largest."""
    return spread(a / b for a, b in zip(values[side], values[over], strict=True))


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, smallest, largest."""
    kept = list(values)
    return {"median": statistics.median(kept), "min": min(kept), "max": max(kept)}


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Median seconds per side."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def show(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table in Markdown; floats with four digits."""
    cells = [list(header)] + [[f"{x:,.4g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    print("\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells), end="\n\n", flush=True)


def report(name: str, results: Mapping[str, Any]) -> None:
    """Keep results as JSON under out/benchmarks, with the hardware and the machine's load; print the path."""
    out = Path("out/benchmarks")
    out.mkdir(parents=True, exist_ok=True)
    record = {"benchmark": name, "hardware": hardware(), "load": load(), **results}
    path = out / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{record['hardware']}, load {record['load']:.1f}; {path}")
