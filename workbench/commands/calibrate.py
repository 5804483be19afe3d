"""What this machine achieves: `python -m workbench calibrate`.

Measures in under half a minute what a forecast by formula needs (`l2l_core.forecast_config`): matrix products, memory, the
EPS's optimizer, the link, and what a layer's call costs beside its arithmetic. Kept in the user's cache folder, one file
per hardware, torch version and number of threads. `Relay.forecast` measures the model itself and needs none of it.
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
PARAMS = 4 << 20  # that the optimizer updates
TIME_PER_FIGURE_S = 1.0  # of each measurement, once it is warm
MIN_REPEATS = 3  # repetitions, however long they take
VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """Figures of one machine and device; medians.

    Attributes:
        hardware: processor and device, torch version and threads, in words.
        flops_per_s: achieved in matrix products, by precision and size of the matrices.
        memory_bytes_per_s: read and written by an elementwise operation.
        update_params_per_s: reduced and updated by the EPS, fused AdamW.
        h2d_bytes_per_s, d2h_bytes_per_s: of one large copy.
        latency_s: of a copy of one number.
        overhead_s: of a layer's call, whatever it computes.
        seconds: that this took.
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
        """Return the figures as a forecast takes them: of the matrix products, the size that ran fastest.

        Raises:
            ValueError: a precision that was not measured.
        """
        if precision not in self.flops_per_s:
            raise ValueError(f"precision={precision!r}: measured are {', '.join(self.flops_per_s)}")
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
    """Measure this machine with `device`; `share_s` seconds for each of about a dozen figures."""
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
    """Measure the median seconds of `work` in about `share_s` seconds; `wait` waits until the device has done it."""
    action()  # once unmeasured: what is made at the first call is there afterwards
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
    """On a thread like the EPS's own: the norm of a gradient, and fused AdamW."""
    # As many as `Relay` gives its EPS.
    cores = 1 if device.in_host_memory else max(1, torch.get_num_threads() * 3 // 4)
    param = nn.Parameter(torch.zeros(PARAMS))
    optimizer = torch.optim.AdamW([param], fused=True)
    param.grad = torch.full_like(param, 1e-3)

    def work() -> None:
        float(torch.linalg.vector_norm(param.grad))  # type: ignore[arg-type]
        optimizer.step()

    thread = serial_executor("calibrate", cores)
    try:
        return PARAMS / thread.submit(median_seconds, work, share_s).result()
    finally:
        thread.shutdown()


def _link_bytes_per_s(device: Device, lane: str, share_s: float) -> float:
    numel = COPY_BYTES // 4
    return COPY_BYTES / _copy_s(device, lane, numel, share_s)


def _copy_s(device: Device, lane: str, numel: int, share_s: float) -> float:
    """Median seconds of a copy, as the device's own lane does it."""
    here, there = device.host_empty(numel).zero_(), device.empty(numel)
    copy = (there, here) if lane == "h2d" else (here, there)
    return median_seconds(lambda: device.issue(lane, [copy], lambda start_s, stop_s: None).join(), share_s)


def _overhead_s(device: Device) -> float:
    """Median seconds of compute's turns in a relay that computes next to nothing."""
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
    """Name processor, device, torch version and threads in one line."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    beside = "" if device.in_host_memory else f", {device.name}"
    return f"{processor}, {os.cpu_count()} cores{beside}, torch {torch.__version__}, {torch.get_num_threads()} threads"


# Keeping -------------------------------------------------------------------------------------------------------------


def cache_path(device: Device) -> Path:
    """Return the file in which the figures of this machine and device are kept."""
    key = zlib.crc32(name_hardware(device).encode())
    return platformdirs.user_cache_path("l2l-workbench") / f"calibration-{key:08x}.json"


def load_calibration(device: str | Device = "auto") -> Calibration | None:
    """Read the figures of this machine, None if they were not measured; those of other hardware, torch or threads do not count.

    Raises:
        ValueError: the file is damaged; says how to measure anew.
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
    """Write the figures where `load_calibration` finds them; returns the path."""
    path = cache_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")  # put in place in one go: whoever reads meanwhile finds no half of it
    beside.write_text(json.dumps({"version": VERSION, **asdict(calibration)}, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)
    return path


# Printing ------------------------------------------------------------------------------------------------------------


def table_rows(calibration: Calibration) -> list[tuple[str, str]]:
    """Write the figures as rows of a name and a value."""
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
    """Write rows as two columns of plain text."""
    rows = list(rows)
    left, right = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{name.ljust(left)}  {value.rjust(right)}" for name, value in rows)


def main(device: str = "auto", force: bool = False) -> int:
    """Measure, or show what was measured before; returns the exit status."""
    try:
        with_device = resolve_device(device)
    except ValueError as error:
        print(error)
        return 1
    with closing(with_device):
        try:
            known = None if force else load_calibration(with_device)
        except ValueError as error:
            print(error)
            return 1
        calibration = known or measure(with_device)
        path = cache_path(with_device) if known else save_calibration(calibration, with_device)
    print(calibration.hardware)
    print(format_table(table_rows(calibration)))
    how = "measured before; --force measures anew" if known else f"measured in {calibration.seconds:.1f} s"
    print(f"{how}; {path}")
    return 0
