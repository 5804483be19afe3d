"""Measurement of this machine's speed for forecasts: `python -m workbench calibrate`.

Measures in under half a minute the figures that `l2l_core.forecast_config` needs: matrix products, memory, the EPS's
optimizer, the link, and the overhead of a layer call. They are stored in the user's cache folder, one file per hardware,
torch version and number of threads. `Relay.forecast` measures the model itself and does not use them.
"""

import json
import os
import platform
import statistics
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs
import torch
from torch import nn

from l2l_core import Device, Machine, Profile, Relay, RelayConfig
from l2l_core.devices import resolve_device, serial_executor
from l2l_core.trace import format_bytes

SIZES = (256, 512, 1024, 2048)  # of square matrices
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPY_BYTES = 64 << 20
PARAMS = 4 << 20  # parameters that the optimizer updates
TIME_PER_FIGURE_S = 1.0  # duration of each measurement after the warm-up
MIN_REPEATS = 3
VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """Measured figures of a machine and device, as medians.

    Attributes:
        hardware: processor, device, torch version and threads, as text.
        flops_per_s: speed of matrix products, by precision and size.
        memory_bytes_per_s: bytes read and written by an elementwise operation.
        update_params_per_s: parameters reduced and updated by the EPS with fused AdamW.
        h2d_bytes_per_s, d2h_bytes_per_s: speed of a large copy.
        latency_s: duration of a copy of one number.
        overhead_s: overhead of a layer call.
        seconds: duration of the whole measurement.
    """

    hardware: str
    flops_per_s: dict[str, dict[str, float]]
    memory_bytes_per_s: float
    update_params_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    latency_s: float
    overhead_s: float
    seconds: float

    def machine(self, precision: str = "fp32") -> Machine:
        """Return the figures for a forecast, with the fastest size of the matrix products.

        Raises:
            ValueError: the precision was not measured.
        """
        if precision not in self.flops_per_s:
            raise ValueError(f"precision={precision!r}: choose one that was measured: {', '.join(self.flops_per_s)}")
        return Machine(
            flops_per_s=max(self.flops_per_s[precision].values()),
            update_params_per_s=self.update_params_per_s,
            h2d_bytes_per_s=self.h2d_bytes_per_s,
            d2h_bytes_per_s=self.d2h_bytes_per_s,
            name=self.hardware,
            latency_s=self.latency_s,
            overhead_s=self.overhead_s,
        )


# Measuring -----------------------------------------------------------------------------------------------------------


def measure(device: Device, share_s: float = TIME_PER_FIGURE_S) -> Calibration:
    """Measure this machine with `device`, for `share_s` seconds per figure."""
    began_s = time.perf_counter()
    with device.current():
        flops = {
            precision: {str(size): _flops_per_s(device, size, dtype, share_s / 2) for size in SIZES}
            for precision, dtype in DTYPES.items()
        }
        return Calibration(
            hardware=name_hardware(device),
            flops_per_s=flops,
            memory_bytes_per_s=_memory_bytes_per_s(device, share_s),
            update_params_per_s=_update_params_per_s(device, share_s),
            h2d_bytes_per_s=_link_bytes_per_s(device, "h2d", share_s),
            d2h_bytes_per_s=_link_bytes_per_s(device, "d2h", share_s),
            latency_s=_copy_s(device, "h2d", 1, share_s / 2),
            overhead_s=_overhead_s(device),
            seconds=time.perf_counter() - began_s,
        )


def median_seconds(action: Callable[[], object], share_s: float, wait: Callable[[], object] = lambda: None) -> float:
    """Return the median seconds of `action` over about `share_s` seconds; `wait` waits for the device."""
    action()  # a warm-up call that is not measured
    wait()
    seconds: list[float] = []
    while len(seconds) < MIN_REPEATS or sum(seconds) < share_s:
        began_s = time.perf_counter()
        action()
        wait()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def _wait_function(device: Device) -> Callable[[], object]:
    is_gpu = device.torch_device.type == "cuda"
    return partial(torch.cuda.synchronize, device.torch_device) if is_gpu else lambda: None


def _flops_per_s(device: Device, size: int, dtype: torch.dtype, share_s: float) -> float:
    a, b = (torch.full((size, size), 0.5, dtype=dtype, device=device.torch_device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=out), share_s / 2, _wait_function(device))


def _memory_bytes_per_s(device: Device, share_s: float) -> float:
    values = torch.zeros(COPY_BYTES // 4, device=device.torch_device)
    return 2 * values.nbytes / median_seconds(lambda: values.add_(1.0), share_s, _wait_function(device))


def _update_params_per_s(device: Device, share_s: float) -> float:
    """Time the norm of a gradient and fused AdamW on a thread like that of the EPS."""
    # The number of cores that `Relay` gives its EPS.
    cores = 1 if device.in_host_memory else max(1, torch.get_num_threads() * 3 // 4)
    param = nn.Parameter(torch.zeros(PARAMS))
    optimizer = torch.optim.AdamW([param], fused=True)
    grad = param.grad = torch.full_like(param, 1e-3)

    def update() -> None:
        float(torch.linalg.vector_norm(grad))
        optimizer.step()

    thread = serial_executor("calibrate", cores)
    try:
        return PARAMS / thread.submit(median_seconds, update, share_s).result()
    finally:
        thread.shutdown()


def _link_bytes_per_s(device: Device, lane: str, share_s: float) -> float:
    return COPY_BYTES / _copy_s(device, lane, COPY_BYTES // 4, share_s)


def _copy_s(device: Device, lane: str, numel: int, share_s: float) -> float:
    """Return the median seconds of a copy on the device's lane."""
    on_host, on_device = device.host_empty(numel).zero_(), device.empty(numel)
    copy = (on_device, on_host) if lane == "h2d" else (on_host, on_device)
    return median_seconds(lambda: device.issue(lane, [copy], lambda start_s, stop_s: None).join(), share_s)


def _overhead_s(device: Device) -> float:
    """Return the median seconds of a turn in a relay of tiny layers."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    batch = (torch.zeros(8, 8), torch.zeros(8, 8))
    config = RelayConfig(micro_batches=4)
    with Relay(model, device=device, layers=list(model), loss=_loss, config=config) as relay:
        traces = [relay.step(batch).trace for _ in range(4)]
    stays = Profile.of(traces[-1]).stays
    return statistics.median(op.overhead_s + op.seconds for s in stays for turn in s.turns for op in turn.ops)


def _loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return (outputs - batch[-1]).square().mean()


def name_hardware(device: Device) -> str:
    """Return processor, device, torch version and threads as one line."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    beside = "" if device.in_host_memory else f", {device.name}"
    return f"{processor}, {os.cpu_count()} cores{beside}, torch {torch.__version__}, {torch.get_num_threads()} threads"


# Keeping -------------------------------------------------------------------------------------------------------------


def cache_path(device: Device) -> Path:
    """Return the path of the file with the figures of this machine and device."""
    key = zlib.crc32(name_hardware(device).encode())
    return platformdirs.user_cache_path("l2l-workbench") / f"calibration-{key:08x}.json"


def load_calibration(device: str | Device = "auto") -> Calibration | None:
    """Return the stored figures of this machine; None if there are none for this hardware, torch version and threads.

    Raises:
        ValueError: the file is damaged; the message has the command that measures anew.
    """
    device = resolve_device(device)
    path = cache_path(device)
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        if row.pop("version") != VERSION:
            return None
        found = Calibration(**row)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: damaged ({error}); measure anew: python -m workbench calibrate --force") from error
    return found if found.hardware == name_hardware(device) else None


def save_calibration(calibration: Calibration, device: Device) -> Path:
    """Store the figures for `load_calibration` and return the path."""
    path = cache_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")  # renamed when complete, so that no reader gets a part of it
    beside.write_text(json.dumps({"version": VERSION, **asdict(calibration)}, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)
    return path


# Printing ------------------------------------------------------------------------------------------------------------


def table_rows(calibration: Calibration) -> list[tuple[str, str]]:
    """Return the figures as rows of a name and a value."""
    c = calibration
    rows = [
        (f"matrix products, {precision}, {size} x {size}", f"{flops / 1e9:,.0f} GFLOP/s")
        for precision, by_size in c.flops_per_s.items()
        for size, flops in by_size.items()
    ]
    return [
        *rows,
        ("memory, elementwise", f"{format_bytes(c.memory_bytes_per_s)}/s"),
        ("optimizer of the EPS, fused AdamW", f"{c.update_params_per_s / 1e6:,.0f} M parameters/s"),
        ("link to the device", f"{format_bytes(c.h2d_bytes_per_s)}/s"),
        ("link from the device", f"{format_bytes(c.d2h_bytes_per_s)}/s"),
        ("latency of a copy", f"{c.latency_s * 1e6:,.0f} µs"),
        ("overhead of a layer's call", f"{c.overhead_s * 1e6:,.0f} µs"),
    ]


def format_table(rows: Iterable[tuple[str, str]]) -> str:
    """Format rows as two columns of plain text."""
    rows = list(rows)
    left, right = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{name.ljust(left)}  {value.rjust(right)}" for name, value in rows)


def main(device: str = "auto", force: bool = False) -> int:
    """Print the stored figures, or measure and store them; return the exit status."""
    try:
        with_device = resolve_device(device)
    except ValueError as error:
        print(error)
        return 1
    with closing(with_device):
        try:
            stored = None if force else load_calibration(with_device)
        except ValueError as error:
            print(error)
            return 1
        calibration = stored or measure(with_device)
        path = cache_path(with_device) if stored else save_calibration(calibration, with_device)
    print(calibration.hardware)
    print(format_table(table_rows(calibration)))
    origin = "measured before; --force measures anew" if stored else f"measured in {calibration.seconds:.1f} s"
    print(f"{origin}; {path}")
    return 0
