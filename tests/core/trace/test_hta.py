"""Holistic Trace Analysis reads the Chrome trace and finds in it what the trace says; skipped where it is not installed."""

import warnings
from typing import Any

import pytest

from l2l_core import Event, Trace

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own affair
    analysis = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")


def six_layers() -> Trace:
    """Every load lies half under the compute of its layer, which begins early; times are exact in binary."""
    events = []
    for i in range(6):
        events.append(Event("h2d", "load", 1.0 * i, i + 0.5, f"L{i}", nbytes=4000, visit=i))
        events.append(Event("compute", "forward", i + 0.25, i + 1.0, f"L{i}", k=0, visit=i))
    return Trace.of(events, [], step=3, device="emulated")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("hta")
    six_layers().to_chrome(folder / "rank0.json")
    return analysis.TraceAnalysis(trace_files={0: str(folder / "rank0.json")}, trace_dir=str(folder))


def test_overlap_is_ours(found: Any) -> None:
    kinds, _ = found.get_gpu_kernel_breakdown(visualize=False)
    us = dict(zip(kinds["kernel_type"], kinds["sum"], strict=True))
    assert us == {"COMPUTATION": 3e6, "COMPUTATION overlapping MEMORY": 1.5e6, "MEMORY": 1.5e6}
    trace, hidden = six_layers(), us["COMPUTATION overlapping MEMORY"]
    assert hidden / (hidden + us["MEMORY"]) == trace.overlap()
    assert us["MEMORY"] == 1e6 * trace.exposed_s("h2d")


def test_seconds_of_compute_are_ours(found: Any) -> None:
    row = found.get_temporal_breakdown(visualize=False).iloc[0]
    assert row["compute_time(us)"] == 1e6 * six_layers().busy_s("compute")
    assert row["kernel_time(us)"] == 1e6 * six_layers().span_s


def test_bytes_per_second_are_ours(found: Any) -> None:
    rates = found.get_memory_bw_summary()["memory_bw_gbps"]
    assert rates["mean"].to_list() == [4000 / 0.5 / 1e9]
    assert rates.index.get_level_values("name").to_list() == ["Memcpy HtoD"]
