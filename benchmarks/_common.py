"""What the benchmarks share: both sides in turn, medians and ratios, the hardware named, results as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


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


def alternate(sides: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each side, measured in turn so that drift of the machine meets all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(-warmup, rounds):
        for name, run in sides.items():
            began_s = time.perf_counter()
            run()
            if round_ >= 0:
                seconds[name].append(time.perf_counter() - began_s)
    return seconds


def ratio(seconds: Mapping[str, list[float]], side: str, over: str) -> dict[str, float]:
    """Pairwise ratio of two sides: median, smallest, largest."""
    pairs = [a / b for a, b in zip(seconds[side], seconds[over], strict=True)]
    return {"median": statistics.median(pairs), "min": min(pairs), "max": max(pairs)}


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Median seconds per side."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(name: str, results: Mapping[str, Any]) -> None:
    """Print results with the hardware, and keep them as JSON under out/benchmarks."""
    out = Path("out/benchmarks")
    out.mkdir(parents=True, exist_ok=True)
    record = {"benchmark": name, "hardware": hardware(), **results}
    (out / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
